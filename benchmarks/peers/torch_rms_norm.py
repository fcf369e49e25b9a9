"""torch.nn.functional.rms_norm."""

from __future__ import annotations

from typing import Any

from benchmarks.peers import needs_torch

FRAMEWORK = "torch"
OPERATIONS = ("rms_norm",)


def available() -> str | None:
    return needs_torch()


def express(op_name: str, arguments: dict[str, Any]) -> Any:
    if arguments["zero_centered"]:
        return "its weight is not zero-centred"
    eps = arguments["eps"]

    def rms_norm(x: Any, weight: Any = None) -> Any:
        import torch.nn.functional as F

        return F.rms_norm(x, x.shape[-1:], weight, eps)

    return rms_norm
