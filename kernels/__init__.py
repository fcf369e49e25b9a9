"""Operations on local arrays, each on every backend that it has.

The rooms are imported here, and only their contracts: a backend's file, and the toolchain it needs, is loaded at the first
call that may use it.
"""

from __future__ import annotations

from typing import Any

from kernels import cross_entropy as _cross_entropy
from kernels import flash_attention as _flash_attention
from kernels import gated_mlp as _gated_mlp
from kernels import rms_norm as _rms_norm
from kernels import rotary_embedding as _rotary_embedding
from kernels._core.config import BwdParams, ConfigCache, ConfigSelectorChain, FwdParams, PersistentCache, config_overlay
from kernels._core.contract import Case, Op, Unsupported
from kernels._core.executor import Executor, create_default_executor
from kernels._core.masks import MaskInfo
from kernels._core.registry import Backend, KernelRegistry, Platform
from kernels.cross_entropy import fused_cross_entropy  # hidden x lm_head in chunks; the logits are never whole
from kernels.flash_attention import (
    attention,  # also returns the weights, dense by nature
    flash_attention,  # exact attention, O(S) memory in both directions
    scaled_dot_product_attention,  # the same, under the name and arguments of the field
)
from kernels.gated_mlp import gated_mlp  # activation(x gate) * (x up), then down: SwiGLU, GeGLU
from kernels.rms_norm import rms_norm  # x / rms(x) * weight
from kernels.rotary_embedding import rotary_embedding  # RoPE with linear, NTK, YaRN and Llama-3 scaling

_ROOMS = (_flash_attention, _rms_norm, _rotary_embedding, _gated_mlp, _cross_entropy)

# The functions of the registry, with the room that each belongs to.
_FACES = (
    (flash_attention, _flash_attention),
    (scaled_dot_product_attention, _flash_attention),
    (attention, _flash_attention),
    (rms_norm, _rms_norm),
    (rotary_embedding, _rotary_embedding),
    (gated_mlp, _gated_mlp),
    (fused_cross_entropy, _cross_entropy),
)


def operations() -> dict[str, Op]:
    """Returns every operation by name, one for each room."""
    return {room.op.name: room.op for room in _ROOMS}


def _faces() -> list[tuple[str, Any, Any]]:
    return [(face.__name__, room.op, face) for face, room in _FACES]


kernel_registry = KernelRegistry(_faces)

__all__ = [
    "Backend",
    "BwdParams",
    "Case",
    "ConfigCache",
    "ConfigSelectorChain",
    "Executor",
    "FwdParams",
    "MaskInfo",
    "Op",
    "PersistentCache",
    "Platform",
    "Unsupported",
    "attention",
    "config_overlay",
    "create_default_executor",
    "flash_attention",
    "fused_cross_entropy",
    "gated_mlp",
    "kernel_registry",
    "operations",
    "rms_norm",
    "rotary_embedding",
    "scaled_dot_product_attention",
]
