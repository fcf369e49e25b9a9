"""Faults of native sparse attention over ranks by its blocks, and of the two parts of the operation that it calls."""

from faults import Fault

TESTS = "tests/test_sparse_blocks.py"
NUMBERS, ORDERS, SENT = f"{TESTS} -k one_device", f"{TESTS} -k another_order", f"{TESTS} -k is_declared"
PARTS = "tests/kernels/test_native_sparse_attention_parts.py"
LAYERS = "tests/test_sparse_layers.py -k is_declared"

FAULTS = (
    Fault(
        "selected blocks are all expected in the first pass",
        "selected:plan_of",
        "jnp.where($received, $listed // $room, -1)",
        "jnp.where($received, 0, -1)",
        NUMBERS,
    ),
    Fault(
        "blocks of further passes are dropped",
        "_Call.over_passes",
        "self.plan.passes - 1",
        "0 * self.plan.passes",
        NUMBERS,
    ),
    Fault(
        "a document that goes on has its blocks counted from the rank's first token",
        "selected:plan_of",
        "$size - ($first - $start) % $size",
        "$size",
        NUMBERS,
    ),
    Fault(
        "a document that goes on has a block less before the rank's tokens",
        "selected:plan_of",
        "jnp.where($goes_on, ($first - $start) // $size, 0)",
        "jnp.where($goes_on, ($first - $start) // $size - 1, 0)",
        NUMBERS,
    ),
    Fault(
        "gradients of blocks that others received do not come home",
        "_Call.added",
        "$sums.at[$row, $head, $one[0]].add($one[1].astype($sums.dtype), mode='drop')",
        "$sums",
        NUMBERS,
    ),
    Fault(
        "gradients of a pass are added where those of the next belong",
        "selected:_backward",
        "$call.added($state[1], $d, $turn)",
        "$call.added($state[1], $d, $turn + 1)",
        NUMBERS,
    ),
    Fault(
        "the mean of a block over two ranks is of other tokens",
        "sparse_blocks:attended",
        "jax.lax.dynamic_slice_in_dim($rows, $$part) - ($first - $block_size)",
        "jax.lax.dynamic_slice_in_dim($rows, $$part) - $first",
        NUMBERS,
    ),
    Fault(
        "a rank's window is one token short before its own",
        "sparse_blocks:attended",
        "min($window - 1, $front)",
        "min($window - 2, $front)",
        NUMBERS,
    ),
    Fault(
        "the window of the first rank goes on at the end of the text",
        "sparse_blocks:attended",
        "jnp.where($places >= 0, $$rest)",
        "jnp.where($places < 2**30, $$rest)",
        NUMBERS,
    ),
    Fault(
        "blocks are chosen for the first rank's queries",
        "sparse_blocks:attended",
        "choice_op(*$arrays, $starts, $first, **$$rest)",
        "choice_op(*$arrays, $starts, 0 * $first, **$$rest)",
        NUMBERS,
    ),
    Fault(
        "all blocks that are named count",
        "sparse_blocks:attended",
        "jnp.where($within, $indices, -1)",
        "$indices",
        ORDERS,
    ),
    Fault(
        "padding is multiplied",
        "sparse_blocks:attended",
        "(zeroed($x, $start) for $x in ($query, $key, $value))",
        "($query, $key, $value)",
        f"{TESTS} -k padding",
    ),
    Fault(
        "gradients of blocks cost nothing",
        "sparse_blocks:cost",
        "($times + 1) * $passes",
        "$times * $passes",
        SENT,
    ),
    Fault("a group-cast gathers all keys of sparse layers", "GroupCast.blocks", "self.buffer", "None", LAYERS),
    Fault(
        "a refusal names an operation that users do not know",
        "Op.__init__",
        "$title or self.name",
        "self.name",
        f"{TESTS} -k refused",
    ),
    Fault(
        "the selected branch takes the sum of gradients over its own keys",
        "native_sparse_attention/xla:selected_backward",
        "_dot($$args) - $delta",
        "_dot($$args)",
        PARTS,
    ),
    Fault(
        "lists of keys take blocks of documents for aligned ones",
        "native_sparse_attention/triton_gpu:selected_backward",
        "$starts is None",
        "True",
        PARTS,
    ),
)
