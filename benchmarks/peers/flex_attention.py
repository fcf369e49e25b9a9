"""torch's flex_attention, compiled: block masks for causal masks, windows and documents, a soft cap as its change of logits,
and sinks by a factor of its outputs. Of block-sparse attention, the lists of its block mask."""

from __future__ import annotations

from typing import Any

from benchmarks.peers import needs_torch, plain_attention

FRAMEWORK = "torch"
OPERATIONS = ("flash_attention", "blocksparse_attention")
BESIDES = ("logits_soft_cap", "softmax_aux", "q_segment_ids", "kv_segment_ids")
MOST_PAIRS = 2**31  # of which a block mask is made all at once; of more, by a compiled function


def available() -> str | None:
    return needs_torch(gpu=True)


def _express_blocks(arguments: dict[str, Any]) -> Any:
    plain, sides = plain_attention(arguments), arguments["block_size"]
    if isinstance(plain, str):
        return plain
    if plain.causal or plain.window is not None:
        return "its only mask here is that of the blocks"
    if any(size % 128 for size in sides):
        return f"its kernels take blocks whose sides are multiples of 128, not {sides}"
    import torch
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    from benchmarks.torch_programs import to_torch

    lengths = arguments["query"].shape[1], arguments["key"].shape[1]
    blocks = to_torch(arguments["block_mask"]).to(torch.bool)
    rows, heads = blocks.shape[:2]

    def visible(batch: Any, head: Any, i: Any, j: Any) -> Any:
        return blocks[batch if rows > 1 else 0, head if heads > 1 else 0, i // sides[0], j // sides[1]]

    order = torch.argsort(blocks.to(torch.int8), dim=-1, descending=True, stable=True).to(torch.int32)
    count = blocks.sum(-1).to(torch.int32)
    # All blocks are full: no pair of one is looked at.
    made = BlockMask.from_kv_blocks(
        torch.zeros_like(count),
        torch.zeros_like(order),
        count,
        order,
        BLOCK_SIZE=sides,
        mask_mod=visible,
        seq_lengths=lengths,
    )
    compiled = torch.compile(flex_attention, dynamic=False)
    gqa = arguments["query"].shape[2] != arguments["key"].shape[2]

    def attention(query: Any, key: Any, value: Any, **rest: Any) -> Any:
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        return compiled(q, k, v, block_mask=made, scale=plain.scale, enable_gqa=gqa).transpose(1, 2)

    return attention


def express(op_name: str, arguments: dict[str, Any]) -> Any:
    if op_name == "blocksparse_attention":
        return _express_blocks(arguments)
    plain = plain_attention(arguments, causal_cross=True, besides=BESIDES)
    if isinstance(plain, str):
        return plain
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    from benchmarks.torch_programs import device, to_torch

    (B, T, N), cap = arguments["query"].shape[:3], arguments.get("logits_soft_cap")
    S, K = arguments["key"].shape[1:3]
    left, right = plain.sides(max(T, S)) or (None, None)
    mask = arguments.get("mask")
    ids = None if mask is None else mask.q_segment_ids
    q_ids, k_ids = (None, None) if ids is None else (to_torch(ids), to_torch(mask.kv_segment_ids))

    def visible(batch: Any, head: Any, i: Any, j: Any) -> Any:
        at = i + (S - T)
        seen = j >= 0
        if plain.causal:
            seen = seen & (j <= at)
        if left is not None:
            seen = seen & (j >= at - left) & (j <= at + right)
        if q_ids is not None and k_ids is not None:
            row, column = (batch if x.shape[0] > 1 else 0 for x in (q_ids, k_ids))
            seen = seen & (q_ids[row, i] == k_ids[column, j]) & (q_ids[row, i] >= 0)
        return seen

    def capped(logit: Any, batch: Any, head: Any, i: Any, j: Any) -> Any:
        return cap * torch.tanh(logit / cap)

    made = None
    if plain.causal or left is not None or q_ids is not None:
        rows = B if q_ids is not None and k_ids is not None and max(q_ids.shape[0], k_ids.shape[0]) > 1 else None
        made = create_block_mask(visible, rows, None, T, S, device=device(), _compile=T * S >= MOST_PAIRS)
    compiled = torch.compile(flex_attention, dynamic=False)
    options: dict[str, Any] = {"block_mask": made, "scale": plain.scale, "enable_gqa": N != K}
    if cap is not None:
        options["score_mod"] = capped

    def attention(query: Any, key: Any, value: Any, softmax_aux: Any = None) -> Any:
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        if softmax_aux is None:
            return compiled(q, k, v, **options).transpose(1, 2)
        out, lse = compiled(q, k, v, return_lse=True, **options)
        share = torch.sigmoid(lse - torch.logsumexp(softmax_aux.float(), -1)[None, :, None])
        return (out * share[..., None].to(out.dtype)).transpose(1, 2)

    return attention
