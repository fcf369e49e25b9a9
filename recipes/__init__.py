"""Recipes: typed sections and their variants, composed by Hydra."""
