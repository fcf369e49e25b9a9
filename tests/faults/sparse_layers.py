"""Faults of layers with native sparse attention, and of the operation over a sequence in any order."""

from faults import Fault

TESTS = "tests/test_sparse_layers.py"
NUMBERS, TEXTS, FLOPS = f"{TESTS} -k 'published and options'", f"{TESTS} -k texts", f"{TESTS} -k flops"
SENT, REFUSED = f"{TESTS} -k declared", f"{TESTS} -k refused"
EXCHANGED = "tests/kernels/test_native_sparse_attention.py -k exchanged"

FAULTS = (
    Fault(
        "gates of branches are not bounded",
        "SparseAttention.attended",
        "jax.nn.sigmoid($ops.project($$args))",
        "$ops.project($$args)",
        NUMBERS,
    ),
    Fault(
        "branches have each other's gates",
        "SparseAttention.attended",
        "$gates[..., $i]",
        "$gates[..., 2 - $i]",
        NUMBERS,
    ),
    Fault(
        "layers with sparse attention have the default scale",
        "SparseAttention.attended",
        "scaled($ctx.config)",
        "{}",
        NUMBERS,
    ),
    Fault(
        "a layer selects over documents",
        "SparseAttention.attended",
        "$ctx.batch['segment_ids']",
        "0 * $ctx.batch['segment_ids']",
        f"{TESTS} -k packed",
    ),
    Fault(
        "the window of sparse attention is not counted",
        "SparseAttention.flops",
        "(($dense.pair / $m.block_size, CAUSAL), ($dense.pair, $sliding))",
        "(($dense.pair / $m.block_size, CAUSAL),)",
        FLOPS,
    ),
    Fault(
        "means of blocks cost as much as tokens",
        "SparseAttention.flops",
        "$dense.pair / $m.block_size",
        "$dense.pair",
        FLOPS,
    ),
    Fault(
        "the gather of the backward is not counted",
        "SparseAttention.traffic",
        "2 - $share.remat.rest",
        "1",
        SENT,
    ),
    Fault(
        "sinks are left out of sparse attention in silence",
        "SparseAttention.check",
        "('attention_sinks', 'attention_soft_cap')",
        "('attention_soft_cap',)",
        REFUSED,
    ),
    Fault(
        "two blocks are taken where three are always selected",
        "SparseShape.validate",
        "self.num_blocks < ALWAYS",
        "self.num_blocks < 1",
        REFUSED,
    ),
    Fault(
        "tokens of sparse attention are not exchanged",
        "native_sparse:_attended",
        "$query = $runs.exchanged($query)",
        "$query = $query",
        EXCHANGED,
    ),
    Fault(
        "the result of sparse attention stays in the order of the text",
        "native_sparse:_attended",
        "$runs.home($out)",
        "$out",
        EXCHANGED,
    ),
    Fault(
        "documents are those of the tokens as they lie",
        "native_sparse:_of_text",
        "$order.inverse($ids)",
        "$ids",
        EXCHANGED,
    ),
    Fault(
        "a text reads what is before its first token",
        "served:_sparse_attention",
        "jnp.where($place >= 0, 0, -1)",
        "jnp.where($place >= -1, 0, -1)",
        TEXTS,
    ),
    Fault(
        "a text reads the pages of the first layer",
        "served:_sparse_attention",
        "_of_layer($rows.tables, $row, *$sizes)",
        "_of_layer($rows.tables, 0 * $row, *$sizes)",
        TEXTS,
    ),
    Fault(
        "beside the blocks that it always sees a query chooses none",
        "SparseAttention.attended",
        "$m, $ops = $ctx.config.sparse, $ctx.ops",
        "$m, $ops = replace($ctx.config.sparse, num_blocks=3), $ctx.ops",
        NUMBERS,
    ),
    Fault(
        "each device chooses by its own heads of a key head",
        "_check_tied",
        "$a and $op.together",
        "False",
        f"{TESTS} -k one_key_head",
    ),
    Fault(
        "ranks that attend for runs of the text are as even as the order",
        "Attended.evenness",
        "$program.order.permute(self.seen - self.in_runs, index=self.index) + self.in_runs",
        "$program.order.permute(self.seen, index=self.index)",
        f"{TESTS} -k how_even",
    ),
    Fault(
        "what attends for a run of the text asks for an order",
        "orders:choose",
        "[$part for $part in $parts if not $part.of_text]",
        "$parts",
        "tests/test_orders.py -k run_of_the_text",
    ),
    Fault(
        "plans forget what kernels of sparse layers keep on TPUs",
        "attention_sparse:SparseAttention.memory",
        "$alone.tpu_rest + $kept",
        "$alone.tpu_rest",
        "tests/test_sparse_layers.py -k plans_count",
    ),
    Fault(
        "plans of sparse layers on TPUs hold as many gradients as on GPUs",
        "attention_sparse:SparseAttention.memory",
        "$alone.tpu_work + $shape.query + 4 * $shape.query // $share.itemsize + $tables",
        "$alone.tpu_work + 8 * $shape.query + $tables",
        "tests/test_sparse_layers.py -k plans_count",
    ),
)
