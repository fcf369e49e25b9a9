"""What `python -m launch.generate` loads: the recipe that weights generate under, their tokenizer and parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from launch.evaluation_recipe import recipe_of, trained_tokenizer, with_settings_of_run
from recipes.arguments import key_of


def recipe_for(where: str, step: int | None, words: Sequence[str], weights: Any) -> Any:
    """Returns the recipe under which weights generate: on one device, unless words say otherwise."""
    sections = ("mesh", "sequence", "experts")  # how the run was split over devices
    inherited = with_settings_of_run(where, step, words, lambda line: None)
    own = {*words}
    kept = [w for w in inherited if w in own or key_of(w).partition(".")[0] not in sections]
    return recipe_of(weights, kept)


def check_cache(recipe: Any, cache: str) -> None:
    """Raises ValueError, before anything is loaded, for a cache that nothing splits."""
    from ejdist.mesh import SEQUENCE_AXES

    if cache == "spread" and all(recipe.mesh.sizes[axis] == 1 for axis in SEQUENCE_AXES):
        raise ValueError(
            "cache = spread needs several devices along mesh.sp or mesh.cp: give mesh.sp=N, or leave cache out"
        )


def tokenizer_of(where: str, recipe: Any, weights: Any) -> Any:
    """Returns the tokenizer of the weights.

    Raises:
      ValueError: it is not the one that the run was trained with, or has more tokens than the model.
    """
    from ejdist.training.data.tokenizer import ByteTokenizer, FileTokenizer
    from ejdist.training.recorded import is_made
    from ejdist.training.stage_data import data_of

    name, special = recipe.data.tokenizer, recipe.data.special_tokens()
    if name == "bytes":
        tokenizer = ByteTokenizer(special)
    elif is_made(name):
        tokenizer = data_of(recipe, trained_tokenizer(where, recipe)).corpus.tokenizer
    else:
        tokenizer = FileTokenizer(name, special)
    trained = weights.data.get("tokenizer")
    if trained not in (None, tokenizer.fingerprint):
        raise ValueError(
            f"data.tokenizer = {name!r} is not the tokenizer that the run was trained with: leave it out, or give that file"
        )
    if tokenizer.vocab_size > recipe.model.vocab_size:
        raise ValueError(
            f"data.tokenizer = {name!r} has {tokenizer.vocab_size} tokens, and {weights.what} {recipe.model.vocab_size}: it is "
            "of another model; give that of these weights"
        )
    return tokenizer


def load(recipe: Any, weights: Any) -> tuple[Any, Any, Any, Any]:
    """Returns (model, mesh, params, buffers), matrices in the dtype that the model computes in."""
    import jax

    from ejdist.mesh import make_mesh
    from ejdist.models.parameters import map_declared
    from ejdist.training.program import make_program

    mesh = make_mesh(**vars(recipe.mesh))
    size = 128 * mesh.size  # of the program, of which the shapes and shardings of parameters are read
    data = dataclasses.replace(recipe.data, sequence_length=size, global_batch=size)
    program = make_program(dataclasses.replace(recipe, data=data), mesh)
    params, buffers = weights.load(program)
    dtype = recipe.model.compute_dtype
    casts = map_declared(lambda _, p: p.cast and program.model.base is None, program.model.declared)

    def cast(params: Any) -> Any:
        return jax.tree.map(lambda x, narrow: x.astype(dtype) if narrow else x, params, casts)

    places = jax.tree.map(lambda x: x.sharding, params)
    params = jax.jit(cast, donate_argnums=0, out_shardings=places)(params) if dtype != "float32" else params
    return program.model, mesh, params, buffers
