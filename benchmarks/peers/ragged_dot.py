"""jax.lax.ragged_dot: rows of a group times that group's matrix."""

from __future__ import annotations

from typing import Any

import jax

FRAMEWORK = "jax"
OPERATIONS = ("grouped_matmul",)


def available() -> str | None:
    return None


def express(op_name: str, arguments: dict[str, Any]) -> Any:
    transposed = bool(arguments.get("transpose_rhs", False))

    def grouped_matmul(lhs: Any, rhs: Any, group_sizes: Any) -> Any:
        return jax.lax.ragged_dot(lhs, rhs.swapaxes(1, 2) if transposed else rhs, group_sizes)

    return grouped_matmul
