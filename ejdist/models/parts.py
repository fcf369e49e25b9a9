"""The parts of a decoder's layer, by name. Each declares its parameters, applies itself, counts its FLOPs and says what remat
keeps.

A new kind of layer is a `Part`, its line in `PARTS`, and a line in `KINDS` of ejdist/models/config.py.
"""

from __future__ import annotations

from ejdist.models.attention import Attention, LatentAttention
from ejdist.models.feedforward import MLP, Experts
from ejdist.models.part import LayerContext, Part

__all__ = ["PARTS", "LayerContext", "Part"]

PARTS: dict[str, Part] = {
    "attention": Attention(),
    "window_attention": Attention(windowed=True),
    "latent_attention": LatentAttention(),
    "mlp": MLP(),
    "experts": Experts(),
}
