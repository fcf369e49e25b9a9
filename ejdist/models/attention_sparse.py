"""Native sparse attention, the mixer of a layer that attends to a part of what is before a token."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from ejdist.costs import ALL_GATHER, ALL_TO_ALL, REDUCE_SCATTER, Traffic
from ejdist.models.attention import Attention, scaled
from ejdist.models.config import DecoderShape
from ejdist.models.kept import Kept
from ejdist.models.model import CAUSAL, Flops, Metrics
from ejdist.models.parameters import Param
from ejdist.models.part import LayerContext
from ejdist.models.remat import PartBytes
from ejdist.models.share import Share
from ejdist.order import Order
from ejdist.sequence import sparse_blocks
from ejdist.sequence.cost import chunks_of_documents
from kernels.engines.attention.masks import MaskInfo, window_of

BRANCHES = 3  # each with a gate: compressed, selected, sliding
TABLE_ROWS = 8  # of the kernels on TPUs, beside a row for each block
# Arrays of the size of a buffer of blocks at the height of a backward: what is sent and came, of two passes, and gradients.
RECEIVED = 8


@dataclass(frozen=True)
class SparseAttention(Attention):
    """Native sparse attention of queries, keys and values as plain attention has them,

        out = g_c compressed + g_s selected + g_w sliding, g = sigmoid(h W_g), a number of each branch and head

    with h the layer's input after its norm. Compressed: over the means of blocks; selected: over the tokens of the blocks that
    have the most weight there; sliding: over the last tokens; see the operation. A block's key is the mean of its keys after
    RoPE, and the three branches have the same keys and values; the paper compresses by an MLP, and has keys and values of each
    branch. Yuan et al., Native Sparse Attention, 2025, arXiv:2502.11089.
    """

    name = "sparse_attention"
    operation = "native_sparse_attention"
    prefix = "sparse_"
    reads_norm = True
    saves = ()
    offloads = ("sparse_attention.out",)
    selects = True
    fixed_order = True

    def check(self, c: DecoderShape) -> None:
        for name in ("attention_sinks", "attention_soft_cap"):
            if getattr(c, name) != getattr(DecoderShape, name):
                raise ValueError(
                    f"model.{name} = {getattr(c, name)} is not supported by layers with sparse attention: "
                    "leave it out, or take these layers out of model.layer_pattern"
                )

    def declare(self, c: DecoderShape) -> dict[str, Param]:
        gates = Param((c.model_dim, c.num_heads, BRANCHES), "D N H", std=c.init_std, inputs="D", adapts=True)
        return super().declare(c) | {f"{self.prefix}gates": gates}

    def attended(
        self, h: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, p: dict[str, jax.Array], ctx: LayerContext
    ) -> tuple[jax.Array, Metrics]:
        m, ops = ctx.config.sparse, ctx.ops
        gates = jax.nn.sigmoid(ops.project(h, p["gates"], "btd,dnh->btnh"))
        out = ops.native_sparse_attention(
            q,
            k,
            v,
            *(gates[..., i] for i in range(BRANCHES)),
            block_size=m.block_size,
            block_counts=m.num_blocks,
            sliding_window=m.window,
            segment_ids=ctx.batch["segment_ids"],
            **scaled(ctx.config),
        )
        return checkpoint_name(out, "sparse_attention.out"), {}

    def logit_scales(self, c: DecoderShape) -> dict[str, Any] | None:
        return None

    def keeps(self, c: DecoderShape) -> dict[str, Kept]:
        return {name: replace(kept, block=c.sparse.block_size) for name, kept in super().keeps(c).items()}

    def flops(self, c: DecoderShape) -> Flops:
        """Returns the FLOPs of the keys that are read: of the selected blocks, of one mean for each block before the query, and
        of the window."""
        m, dense = c.sparse, super().flops(c)
        selected, sliding = (
            MaskInfo(causal=True, window=window_of(n)) for n in (m.num_blocks * m.block_size, m.window)
        )
        gates = 2 * c.model_dim * c.num_heads * BRANCHES
        beside = (dense.pair / m.block_size, CAUSAL), (dense.pair, sliding)
        return replace(dense, token=dense.token + gates, mask=selected, beside=beside, of_text=True)

    def memory(self, c: DecoderShape, share: Share) -> PartBytes:
        """Returns the bytes: keys and values of all ranks, which are padded, and their gradients in float32; or those of a rank
        and before it, and a buffer of blocks. Of kernels what they keep, which is the result and the lse of each branch and the
        chosen blocks. On GPUs also gradients of queries in float32, of both branches that flash attention computes and their
        sum, and a branch's cotangent and gradient. On TPUs cotangents of branches take the place of their results, and there
        are one more gradient of queries, their sum in float32, and tables of what each row reads (`kernels`' README)."""
        m, shape = c.sparse, self._shape(c, share)
        alone = super().memory(c, replace(share, order=replace(share.order, shards=1, stripe=1), outer=1))
        gates = share.tokens * c.num_heads // share.features * BRANCHES * share.itemsize
        whole = share.sequence * (shape.key + shape.value)
        sums = 0
        if share.sequence > 1 and share.scheme.blocks is not None:
            whole = int((2 + RECEIVED * share.scheme.blocks) * (shape.key + shape.value))
            sums = 2 * (4 * shape.query // share.itemsize)  # of the passes and of one of them
        kept = (
            BRANCHES * (shape.out + 4 * share.tokens * shape.heads) + 4 * share.tokens * shape.kv_heads * m.num_blocks
        )
        of_gpus = 3 * (4 * shape.query // share.itemsize) + shape.out + shape.query
        tables = 4 * share.tokens * shape.heads * (-(-m.num_blocks // 8) * 8 + TABLE_ROWS)
        return replace(
            alone,
            saved=0,
            products=alone.products + gates,
            rest=alone.rest + gates + (whole if share.sequence > 1 else 0),
            work=alone.work + 2 * gates + whole + 4 * whole // share.itemsize + sums,
            tpu_rest=alone.tpu_rest + kept,
            tpu_work=alone.tpu_work + shape.query + 4 * shape.query // share.itemsize + tables,
            gpu_rest=alone.gpu_rest + kept,
            gpu_work=alone.gpu_work + kept + of_gpus,
        )

    def traffic(self, c: DecoderShape, share: Share) -> Traffic:
        """Returns the sums over heads, as attention has them; the gather of keys and values, again for the backward unless they
        are kept, and the sum of their gradients, or what blocks cost (`sparse_blocks.cost`); and tokens that change places for
        another order."""
        sent, shape, others = (
            share.sums_over_features(c.model_dim, 3 - share.remat.products),
            self._shape(c, share),
            share.sequence - 1,
        )
        own, buffer = share.length // share.sequence, share.scheme.blocks
        if share.order.carried or not others or (buffer is not None and own % c.sparse.block_size):
            return sent  # with such an order, or blocks over the ends of ranks, the layer is refused when it runs
        forwards, keys = 2 - share.remat.rest, shape.key + shape.value
        if buffer is None:
            sent.add(shape.axis, ALL_GATHER, forwards * keys * others, forwards * 2)
            sent.add(shape.axis, REDUCE_SCATTER, keys * others, 2)
        else:
            order = Order("contiguous", share.sequence)
            most, every = chunks_of_documents(order, share.length, CAUSAL, share.documents)
            shape = replace(shape, forwards=forwards)
            sizes = own, c.sparse.block_size, c.sparse.window
            sent.add_all(sparse_blocks.cost(shape, *sizes, buffer, most / every))
        if not share.order.few_hops:
            gates = share.tokens * shape.heads * BRANCHES * share.itemsize
            moved = (forwards + 1) * (shape.query + keys + gates) + 2 * shape.out
            sent.add(shape.axis, ALL_TO_ALL, moved * others // share.sequence, (forwards + 1) * (BRANCHES + 4))
        return sent
