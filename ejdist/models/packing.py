"""Which matrices of a decoder a generation packs (`ejdist.packed`), and why the others stay as they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax

from ejdist.frozen import Frozen
from ejdist.models.config import DecoderShape
from ejdist.models.stack import parts_of
from ejdist.packed import FORMATS, obstacle


@dataclass(frozen=True)
class Packing:
    """A choice of matrices.

    form: a name of `FORMATS`. packed: the names of those that are packed, in bytes before. stays: why others are not -> their
    names, in bytes. before: bytes of all parameters.
    """

    form: str
    packed: Mapping[str, int]
    stays: Mapping[str, Mapping[str, int]]
    before: int

    def lines(self, after: int) -> list[str]:
        """Returns the lines to log. after: bytes of all parameters once these are packed."""
        told = [f"weights={self.form}: {_size(self.before)} of weights, as they are stored, become {_size(after)}"]
        for why, names in self.stays.items():
            share = sum(names.values()) / self.before
            told.append(f"  not packed: {', '.join(names)}, {share:.1%} of the {_size(self.before)}: {why}")
        return told


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e9:,.2f} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:,.2f} MB"


def packing_of(params: Mapping[str, Any], c: DecoderShape, form: str) -> Packing:
    """Returns which matrices of the layers are packed, by how they lie.

    Raises:
      ValueError: none can be, or the model has adapters.
    """
    layers, packed, stays = params["layers"], {}, {}
    if any(isinstance(x, Frozen) for x in layers.values()):
        raise ValueError(
            f"weights = {form!r} packs matrices as they are stored, and those of this model have adapters or are frozen in "
            "another dtype: merge them first (python -m launch.export, for families of checkpoints that it writes), or leave "
            "weights out"
        )
    for part in parts_of(c).values():
        may = part.packs(c)
        for name, p in part.declare(c).items():
            if not p.inputs:
                continue
            why = "multiplied as a batch of matrices, which has no packed form"
            if name in may:
                why = obstacle(layers[name], p.dims.split(), p.inputs.split(), form)
            (packed if why is None else stays.setdefault(why, {}))[name] = layers[name].nbytes
    if not packed:
        raise ValueError(
            f"weights = {form!r} can pack no matrix of this model, in groups of {FORMATS[form]['group_size']} inputs: "
            + "; ".join(f"{', '.join(names)}: {why}" for why, names in stays.items())
            + ". Leave weights out"
        )
    outside = {name: _nbytes(x) for name, x in params.items() if name != "layers"}
    return Packing(form, packed, {**stays, "outside of the layers": outside}, _nbytes(params))


def _nbytes(tree: Any) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(tree))
