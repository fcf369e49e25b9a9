"""torch.nn.functional.scaled_dot_product_attention, with the kernel that it chooses."""

from __future__ import annotations

from typing import Any

from benchmarks.peers import needs_torch, plain_attention

FRAMEWORK = "torch"
OPERATIONS = ("flash_attention",)


def available() -> str | None:
    return needs_torch()


def express(op_name: str, arguments: dict[str, Any]) -> Any:
    plain = plain_attention(arguments)
    if isinstance(plain, str):
        return plain
    if plain.window is not None:
        return "a window would need a dense mask"
    grouped = arguments["query"].shape[2] != arguments["key"].shape[2]

    def attention(query: Any, key: Any, value: Any) -> Any:
        import torch.nn.functional as F

        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=plain.causal, scale=plain.scale, enable_gqa=grouped)
        return out.transpose(1, 2)

    return attention
