"""torch's flex_attention, compiled, with block masks for causal masks and windows."""

from __future__ import annotations

from typing import Any

from benchmarks.peers import needs_torch, plain_attention

FRAMEWORK = "torch"
OPERATIONS = ("flash_attention",)


def available() -> str | None:
    return needs_torch(gpu=True)


def express(op_name: str, arguments: dict[str, Any]) -> Any:
    plain = plain_attention(arguments, causal_cross=True)
    if isinstance(plain, str):
        return plain
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    T, N = arguments["query"].shape[1:3]
    S, K = arguments["key"].shape[1:3]
    left, right = plain.sides(max(T, S)) or (None, None)

    def visible(batch: Any, head: Any, i: Any, j: Any) -> Any:
        at = i + (S - T)
        seen = j >= 0
        if plain.causal:
            seen = seen & (j <= at)
        if left is not None:
            seen = seen & (j >= at - left) & (j <= at + right)
        return seen

    masked = plain.causal or left is not None
    block_mask = create_block_mask(visible, None, None, T, S, device="cuda") if masked else None
    compiled = torch.compile(flex_attention, dynamic=False)

    def attention(query: Any, key: Any, value: Any) -> Any:
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        out = compiled(q, k, v, block_mask=block_mask, scale=plain.scale, enable_gqa=N != K)
        return out.transpose(1, 2)

    return attention
