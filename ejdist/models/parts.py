"""The parts of a decoder's layer, by name. Each declares its parameters, applies itself, counts its FLOPs and says what remat
keeps.

A new mixer or feed-forward is a `Part` and its line in `PARTS`: a pattern may then join it with any of the other role.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from ejdist.models.attention import Attention, LatentAttention
from ejdist.models.attention_sparse import SparseAttention
from ejdist.models.feedforward import MLP, Experts, UngatedMLP
from ejdist.models.part import LayerContext, Part
from ejdist.models.recurrent import GatedDelta, KimiDelta, Lightning, Mamba2
from ejdist.models.recurrent_gla import GatedLinear
from ejdist.models.recurrent_rwkv7 import Rwkv7

__all__ = ["PARTS", "LayerContext", "Part", "nearest_kind"]

PARTS: dict[str, Part] = {
    "attention": Attention(),
    "window_attention": Attention(windowed=True),
    "latent_attention": LatentAttention(),
    "sparse_attention": SparseAttention(),
    "gated_delta": GatedDelta(),
    "kda": KimiDelta(),
    "mamba2": Mamba2(),
    "lightning": Lightning(),
    "gla": GatedLinear(),
    "rwkv7": Rwkv7(),
    "mlp": MLP(),
    "ungated_mlp": UngatedMLP(),
    "experts": Experts(),
}


def nearest_kind(kind: str, mixers: Sequence[str], feed_forwards: Sequence[str]) -> str:
    """Returns the kind of layer that one which does not exist was meant to be, empty where none is near."""
    mixer, _, feed_forward = kind.partition("+")
    near = [
        difflib.get_close_matches(name, known, n=1, cutoff=0.8)
        for name, known in ((mixer, mixers), (feed_forward or feed_forwards[0], feed_forwards))
    ]
    meant = "+".join(found for (found,) in near) if all(near) else ""
    if mixer in feed_forwards and feed_forward in mixers:
        meant = f"{feed_forward}+{mixer}"
    return "" if meant == kind else meant
