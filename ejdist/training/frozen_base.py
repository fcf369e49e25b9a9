"""The frozen parameters of a run with adapters (`ejdist.models.lora`): where they come from."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax

from ejdist.models.lora import BASE, LoRASection
from ejdist.models.parameters import Param
from ejdist.training.program import Program


def check_base(section: LoRASection, init_from: str | None) -> None:
    """Raises ValueError for adapters on a base that nothing has trained."""
    if section.rank and init_from is None:
        raise ValueError(
            f"lora.rank = {section.rank} trains adapters of a model that is there: give model.init_from=DIR, the folder of a "
            "model or of a run, or lora.rank=0 to train all parameters from the start"
        )


def load_base(program: Program, source: Any) -> dict[str, Any]:
    """Returns the frozen parameters of a source (`ejdist.training.start.Source`) as the program stores them. They are read one
    by one, so that only one of those stored in int8 is held in float32 at a time."""
    base, places = program.model.base, program.state.buffers[BASE]
    params: dict[str, Any] = {}
    for path, p in jax.tree_util.tree_leaves_with_path(base.declared, is_leaf=lambda x: isinstance(x, Param)):
        *groups, last = keys = [key.key for key in path]
        place, here, name = places, params, ".".join(keys)
        for key in keys:
            place = place[key]
        for key in groups:
            here = here.setdefault(key, {})
        values = place["values"] if isinstance(place, dict) else place
        dtype = p.dtype if isinstance(place, dict) else values.dtype
        leaf = f"params.{name}"
        read = source.load({leaf: jax.ShapeDtypeStruct(p.shape, dtype, sharding=values.sharding)})[leaf]
        if isinstance(place, dict):
            shardings = jax.tree.map(lambda like: like.sharding, place)
            read = jax.jit(partial(base.frozen, name), out_shardings=shardings, donate_argnums=0)(read)
        here[last] = read
    return params
