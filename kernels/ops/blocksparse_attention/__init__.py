"""Block-sparse attention: attention over the pairs of blocks that a mask sets. The cost is that of the set pairs."""

from kernels.ops.blocksparse_attention.contract import BlockSparseConfig, op
from kernels.ops.blocksparse_attention.functions import blocksparse_attention
from kernels.ops.blocksparse_attention.patterns import (
    bigbird_blocks,
    blocks_of_mask,
    global_blocks,
    local_blocks,
    random_blocks,
    strided_blocks,
)

__all__ = [
    "BlockSparseConfig",
    "bigbird_blocks",
    "blocks_of_mask",
    "blocksparse_attention",
    "global_blocks",
    "local_blocks",
    "op",
    "random_blocks",
    "strided_blocks",
]
