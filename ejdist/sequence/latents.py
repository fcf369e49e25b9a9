"""Whether latents travel: what ranks send of latent attention, the latents or the keys and values that are made of them.

A token of DeepSeek-V3 has 128 heads of 192 and 128 numbers, all made of the 576 of its latent and its rotary key. Where latents
travel, every rank makes the keys and values of its own heads again for the tokens that arrive: 2 R K (H + Hv) FLOPs a token and
hop, three times that in the backward, against N (T / n) (H + Hr + Hv) of causal attention to the token.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from ejdist.layout import current_layout
from ejdist.order import AUTO
from ejdist.placement import mesh_of
from ejdist.sequence.cost import ALWAYS, AttentionShape, attention_shape
from ejdist.tokens import axes_of_layout

# FLOPs of products that a device does at least while it sends a byte to a neighbour. Of data sheets: an H200 800e12 FLOP/s and
# 450e9 bytes/s, a v5p 459e12 and 90e9 along an axis. Half of what is sent is assumed to hide under attention, as in plans.
FLOPS_A_BYTE = 900


def sends_latents(scheme: Any, shape: AttentionShape) -> bool:
    """Returns whether latents travel in a layer: as `Scheme.latents` says, and by `AUTO` where the bytes that are not sent take
    longer than what is computed again.

    Args:
      shape: of latent attention, whose latents travel.
    """
    if shape.ranks == 1 or scheme.latents != AUTO:
        return shape.ranks > 1 and scheme.latents == ALWAYS
    heads = replace(shape, latents=0, expansion=0)
    saved = sum(scheme.cost(heads).bytes.values()) - sum(scheme.cost(shape).bytes.values())
    # In the forward, in the backward, and two products for the gradients of the latents and of the matrices.
    again = 4 * (scheme.expansions(shape) - 1) * shape.expansion
    return saved > 0 and again <= FLOPS_A_BYTE * saved


def travels(mesh: Any, scheme: Any, platform: str | None, itemsize: int, adapted: bool, **dims: int) -> bool:
    """Returns whether latents travel in a model's layer, by the layout in force.

    Args:
      mesh: None for the one in force. scheme: a `Scheme`.
      platform: the backend that the model asks for; by `AUTO` latents travel only under XLA's, or the fastest.
      adapted: whether a matrix that keys or values are made with has an adapter, which attention does not add.
      dims: N, K, H, Hr, Hv and R of the whole layer.

    Raises:
      ValueError: latents always travel, and a matrix is `adapted`.
    """
    mesh = mesh_of(mesh, None, None)
    if adapted and scheme.latents == ALWAYS:
        raise ValueError(
            "sequence.latents = 'always': a matrix that makes keys or values of latents has an adapter, and attention adds "
            "none; use sequence.latents=auto, or leave it out of lora.targets"
        )
    if mesh is None or adapted or (scheme.latents == AUTO and platform not in (None, "xla")):
        return False
    features = math.prod(mesh.shape.get(a, 1) for a in current_layout().activations.get("N", ()))
    sizes = dims | {n: max(1, dims[n] // features) for n in ("N", "K")}
    over = tuple((a, mesh.shape.get(a, 1)) for a in axes_of_layout(mesh))
    ranks = math.prod(n for _, n in over)
    return sends_latents(scheme, attention_shape(over, {"B": 1, "T": 1, **sizes}, itemsize, ranks - 1))
