"""jax.nn.dot_product_attention as plain XLA: all logits at once."""

from __future__ import annotations

from typing import Any, Literal

import jax

from benchmarks.peers import plain_attention

FRAMEWORK = "jax"
OPERATIONS = ("flash_attention",)
MOST_LOGITS = 16 * 2**30  # bytes in float32, of which the gradient needs several times as many


def available() -> str | None:
    return None


def express(op_name: str, arguments: dict[str, Any], implementation: Literal["xla", "cudnn"] = "xla") -> Any:
    plain = plain_attention(arguments)
    if isinstance(plain, str):
        return plain
    (B, T, N, H), (S, Hv) = arguments["query"].shape, arguments["value"].shape[1::2]
    if H != Hv:
        return "it needs values as wide as queries"
    logits = 4 * B * N * T * S
    if implementation == "xla" and logits > MOST_LOGITS:
        return f"its logits alone would take {logits / 2**30:.0f} GiB"

    def attention(query: Any, key: Any, value: Any) -> Any:
        return jax.nn.dot_product_attention(
            query,
            key,
            value,
            scale=plain.scale,
            is_causal=plain.causal,
            local_window_size=plain.sides(max(T, S)),
            implementation=implementation,
        )

    return attention
