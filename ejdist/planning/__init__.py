"""Plans: which mesh, remat, accumulation and batch a recipe is best trained with on some devices, before there are any."""
