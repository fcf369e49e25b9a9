"""Faults of native_sparse_attention."""

from faults import Fault

OF_SELECTED = "tests/kernels/test_native_sparse_attention.py"

FAULTS = (
    Fault(
        "the mean of a block before its end",
        "native_sparse_attention/xla:_read",
        "$keys.ends[:, None] <= $at[:, None]",
        "$keys.ends[:, None] <= $at[:, None] + 1",
        OF_SELECTED + " -k against_a_loop",
    ),
    Fault(
        "the means of another document",
        "native_sparse_attention/xla:_read",
        "$keys.of_slot[:, None] == $start[..., None]",
        "$keys.of_slot[:, None] >= 0",
        OF_SELECTED + " -k packed",
    ),
    Fault(
        "the query's own block is not always selected",
        "contract:ranked",
        "jnp.where($block == $own, $$after)",
        "jnp.where($block == $own + 1, $$after)",
        OF_SELECTED + " -k against_a_loop",
    ),
    Fault(
        "a block that is named twice counts twice",
        "_blocks_of",
        "$found[..., 1:] == $found[..., :-1]",
        "$found[..., 1:] < $found[..., :-1]",
        OF_SELECTED + " -k documented",
    ),
    Fault(
        "the sliding branch sees a token more",
        "native_sparse_attention/xla:_read",
        "$j > $at[:, None] - $static.window",
        "$j >= $at[:, None] - $static.window",
        OF_SELECTED + " -k against_a_loop",
    ),
    Fault(
        "the gradient of a mean is not shared out",
        "native_sparse_attention/xla:backward",
        "_scattered($of_means, $rows, $keys.ends < $S, $S) / $block_size",
        "_scattered($of_means, $rows, $keys.ends < $S, $S)",
        OF_SELECTED + " -k against_a_loop",
    ),
    Fault(
        "a rank's queries are the first's",
        "native_sparse:_gathered",
        "jax.lax.axis_index($ranks_of) * $own",
        "jax.lax.axis_index($ranks_of) * 0",
        OF_SELECTED + " -k on_a_mesh",
    ),
)
