"""torch.matmul with the weights that packed ones stand for, dequantised before: what not quantising costs."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from benchmarks.peers import Expression, needs_torch

FRAMEWORK = "torch"
OPERATIONS = ("quantized_matmul",)
COPIES = 2  # of the weights, which calls go round: one of 8192 x 8192 in bfloat16 is more than twice a cache


def available() -> str | None:
    return needs_torch()


def express(op_name: str, arguments: dict[str, Any]) -> Expression:
    return Expression(_product(arguments), backward=False)


def _product(arguments: dict[str, Any]) -> Callable:
    from benchmarks.torch_programs import to_torch
    from kernels import dequantize

    how = {name: arguments[name] for name in ("mode", "bits", "group_size")}
    weights = dequantize(arguments["w"], arguments["scales"], arguments["biases"], **how).astype(arguments["x"].dtype)
    turn = itertools.cycle([to_torch(weights) for _ in range(COPIES)])

    def product(x: Any, **_: Any) -> Any:
        return x @ next(turn)

    return product
