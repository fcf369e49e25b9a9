"""tokamax.dot_product_attention, with the implementation that it chooses."""

from __future__ import annotations

from typing import Any

from benchmarks.peers import missing, plain_attention

FRAMEWORK = "jax"
OPERATIONS = ("flash_attention",)


def available() -> str | None:
    return missing("tokamax")


def express(op_name: str, arguments: dict[str, Any]) -> Any:
    plain = plain_attention(arguments)
    if isinstance(plain, str):
        return plain
    length = max(arguments["query"].shape[1], arguments["key"].shape[1])

    def attention(query: Any, key: Any, value: Any) -> Any:
        import tokamax

        return tokamax.dot_product_attention(
            query,
            key,
            value,
            scale=plain.scale,
            is_causal=plain.causal,
            local_window_size=plain.sides(length),
        )

    return attention
