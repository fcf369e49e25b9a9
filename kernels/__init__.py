"""Operations on local arrays, each on every backend that it has: one line an operation.

A name is imported at its first use, so that importing this package loads no toolchain and no room that is not needed.
"""

from __future__ import annotations

import importlib
from typing import Any

# operation -> the room that has it. The room's `__init__.py` holds the functions, its contract.py what they mean.
OPERATIONS = {
    "flash_attention": "flash_attention",  # exact attention, O(S) memory in both directions
    "scaled_dot_product_attention": "flash_attention",  # the same under the name and arguments of the field
    "attention": "flash_attention",  # also returns the weights, dense by nature
    "rms_norm": "rms_norm",  # x / rms(x) * weight
    "rotary_embedding": "rotary_embedding",  # RoPE with linear, NTK, YaRN and Llama-3 scaling
    "gated_mlp": "gated_mlp",  # activation(x gate) * (x up), then down: SwiGLU, GeGLU
    "fused_cross_entropy": "cross_entropy",  # hidden x lm_head in chunks; the logits are never whole
}

_CORE = {
    "Case": "contract",
    "Op": "contract",
    "Unsupported": "dispatch",
    "MaskInfo": "masks",
    "ConfigCache": "config",
    "ConfigSelectorChain": "config",
    "PersistentCache": "config",
    "FwdParams": "config",
    "BwdParams": "config",
    "config_overlay": "config",
    "Executor": "executor",
    "create_default_executor": "executor",
    "Platform": "registry",
    "Backend": "registry",
}

__all__ = [*OPERATIONS, *_CORE, "kernel_registry", "operations"]


def operations() -> dict[str, Any]:
    """Returns every `Op` of the project by name, one for each room."""
    rooms = dict.fromkeys(OPERATIONS.values())
    ops = [importlib.import_module(f"kernels.{room}").op for room in rooms]
    return {op.name: op for op in ops}


def _faces() -> list[tuple[str, Any, Any]]:
    rooms = {name: importlib.import_module(f"kernels.{room}") for name, room in OPERATIONS.items()}
    return [(name, room.op, getattr(room, name)) for name, room in rooms.items()]


def __getattr__(name: str) -> Any:
    if name in OPERATIONS:
        room = importlib.import_module(f"kernels.{OPERATIONS[name]}")
        value = getattr(room, name)
    elif name in _CORE:
        value = getattr(importlib.import_module(f"kernels._core.{_CORE[name]}"), name)
    elif name == "kernel_registry":
        from kernels._core.registry import KernelRegistry

        value = KernelRegistry(_faces)
    else:
        raise AttributeError(f"module 'kernels' has no attribute {name!r}; it has {', '.join(__all__)}")
    globals()[name] = value  # a room's folder may share its operation's name; the operation is what users mean
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
