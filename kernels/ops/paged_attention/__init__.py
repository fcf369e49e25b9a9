"""Paged attention: attention over keys and values stored in pages, for serving. Forward only."""

from kernels.ops.paged_attention.cache import written
from kernels.ops.paged_attention.contract import (
    PagedAttentionConfig,
    append_and_attend_op,
    append_op,
    decode_op,
    lse_op,
    op,
    page_op,
)
from kernels.ops.paged_attention.functions import (
    decode_attention,
    page_attention,
    prefill_page_attention,
    ragged_decode_attention,
)
from kernels.ops.paged_attention.ragged import (
    append_to_cache,
    chunked_prefill_paged_decode,
    ragged_page_attention_v2,
    ragged_page_attention_v3,
    unified_attention,
)

__all__ = [
    "PagedAttentionConfig",
    "append_and_attend_op",
    "append_op",
    "append_to_cache",
    "chunked_prefill_paged_decode",
    "decode_attention",
    "decode_op",
    "lse_op",
    "op",
    "page_attention",
    "page_op",
    "prefill_page_attention",
    "ragged_decode_attention",
    "ragged_page_attention_v2",
    "ragged_page_attention_v3",
    "unified_attention",
    "written",
]
