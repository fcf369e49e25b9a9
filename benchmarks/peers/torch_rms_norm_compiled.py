"""torch.nn.functional.rms_norm under torch.compile."""

from __future__ import annotations

from typing import Any

from benchmarks.peers import needs_torch, torch_rms_norm

FRAMEWORK = "torch"
OPERATIONS = ("rms_norm",)


def available() -> str | None:
    return needs_torch(gpu=True)


def express(op_name: str, arguments: dict[str, Any]) -> Any:
    plain = torch_rms_norm.express(op_name, arguments)
    if isinstance(plain, str):
        return plain
    import torch

    # For exactly these shapes: with several cases in one process torch would generalise over them, and be slower.
    return torch.compile(plain, dynamic=False)
