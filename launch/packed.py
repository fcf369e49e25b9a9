"""The key `weights=FORMAT` of commands that run a model: its matrices are packed once they are loaded, and told of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

USAGE = """\
  weights=null         int8, int4, nf4, mxfp4 or mxfp8: pack the layers' matrices in this format after loading (the log
                       names those that are not packed); null: keep the dtype that the model computes in
"""
DEFAULTS = {"weights": "null"}


def format_of(values: Mapping[str, Any]) -> str | None:
    """Returns the format that a command's keys name, None for none. Raises ValueError: there is no such format."""
    from ejdist.packed import check_format

    form = None if values["weights"] == "null" else values["weights"]
    check_format("weights", form)
    return form


def check_adapters(recipe: Any, form: str | None) -> None:
    """Raises ValueError, before anything is loaded, for adapters that cannot be packed."""
    if form is not None and recipe.lora.rank:
        raise ValueError(
            f"weights = {form} packs matrices as they are stored, and those of this run have adapters: merge them first "
            "(python -m launch.export, for families of checkpoints that it writes), or leave weights out"
        )


def pack(
    model: Any, params: Any, buffers: Any, form: str | None, log: Callable[[str], Any]
) -> tuple[Any, list[str] | None]:
    """Returns (the parameters with the layers' matrices packed, the names of parameters that stay as they are), and logs the
    bytes before and after. The stacks that are packed are freed. With no format it returns (the parameters, None).

    Raises:
      ValueError: no matrix of the model can be packed so.
    """
    import jax

    if form is None:
        return params, None
    if model.cached is None:
        raise ValueError(
            f"weights = {form!r} packs the matrices of decoders of ejdist.models, and this is another model: leave weights out"
        )
    packing = model.cached.packing(params, buffers, form)
    params = model.cached.packed(params, packing, donate=True)
    for line in packing.lines(sum(x.nbytes for x in jax.tree.leaves(params))):
        log(line)
    return params, [name for names in packing.stays.values() for name in names]
