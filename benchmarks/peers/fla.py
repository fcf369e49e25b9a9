"""flash-linear-attention: the delta rule in chunks."""

from __future__ import annotations

from typing import Any

from benchmarks.peers import missing, needs_torch

FRAMEWORK = "torch"
OPERATIONS = ("delta_rule",)


def available() -> str | None:
    return missing("fla") or needs_torch(gpu=True)


def express(op_name: str, arguments: dict[str, Any]) -> Any:
    unknown = set(arguments) - {"query", "key", "value", "beta", "state"}
    used = sorted(name for name in unknown if arguments[name] is not None)
    if used:
        return f"it cannot say {', '.join(used)}"
    if str(arguments["query"].dtype) == "float32":
        return "it has 16-bit floats only"

    def delta_rule(query: Any, key: Any, value: Any, beta: Any, state: Any = None) -> Any:
        from fla.ops.delta_rule import chunk_delta_rule

        return chunk_delta_rule(query, key, value, beta, scale=1.0, initial_state=state)[0]

    return delta_rule
