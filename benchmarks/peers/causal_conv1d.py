"""causal_conv1d: the convolution of Mamba, in CUDA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.peers import missing, needs_torch

FRAMEWORK = "torch"
OPERATIONS = ("causal_conv1d",)


def available() -> str | None:
    return missing("causal_conv1d") or needs_torch(gpu=True)


def express(op_name: str, arguments: dict[str, Any]) -> Callable | str:
    if any(arguments.get(name) is not None for name in ("segment_ids", "initial_state")):
        return "documents and states are compared without"
    if arguments["weight"].shape[1] not in (2, 3, 4):
        return "it has 2 to 4 taps"
    activation = arguments.get("activation")

    def convolved(x: Any, weight: Any, bias: Any = None) -> Any:
        from causal_conv1d import causal_conv1d_fn

        # Channels before tokens, of which it takes a view: channels last is the faster of its two kernels.
        return causal_conv1d_fn(x.transpose(1, 2), weight, bias, activation=activation).transpose(1, 2)

    return convolved
