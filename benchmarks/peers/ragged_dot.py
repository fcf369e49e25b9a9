"""jax.lax.ragged_dot: rows of a group times that group's matrix."""

from __future__ import annotations

from typing import Any

import jax

FRAMEWORK = "jax"
OPERATIONS = ("grouped_matmul",)


def available() -> str | None:
    return None


def express(op_name: str, arguments: dict[str, Any]) -> Any:
    if any(arguments[name] is not None for name in ("group_offset", "rhs_bias", "activation")):
        return "it has the plain product only"

    def grouped_matmul(lhs: Any, group_sizes: Any, rhs: Any = None, rhs_transposed: Any = None) -> Any:
        return jax.lax.ragged_dot(lhs, rhs_transposed.swapaxes(1, 2) if rhs is None else rhs, group_sizes)

    return grouped_matmul
