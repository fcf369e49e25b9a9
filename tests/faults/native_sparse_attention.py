"""Faults of native_sparse_attention."""

from faults import Fault

SELECTED = "kernels/ops/native_sparse_attention/xla.py"
OF_SELECTED = "tests/kernels/test_native_sparse_attention.py"

FAULTS = (
    Fault(
        "the mean of a block before its end",
        SELECTED,
        "(keys.ends[:, None] <= at[:, None])",
        "(keys.ends[:, None] <= at[:, None] + 1)",
        OF_SELECTED + " -k against_a_loop",
    ),
    Fault(
        "the means of another document",
        SELECTED,
        "(keys.of_slot[:, None] == start[..., None])",
        "(keys.of_slot[:, None] >= 0)",
        OF_SELECTED + " -k packed",
    ),
    Fault(
        "the query's own block is not always selected",
        "kernels/ops/native_sparse_attention/contract.py",
        "jnp.where(block == own, 4.0,",
        "jnp.where(block == own + 1, 4.0,",
        OF_SELECTED + " -k against_a_loop",
    ),
    Fault(
        "a block that is named twice counts twice",
        SELECTED,
        "again = found[..., 1:] == found[..., :-1]",
        "again = found[..., 1:] < found[..., :-1]",
        OF_SELECTED + " -k documented",
    ),
    Fault(
        "the sliding branch sees a token more",
        SELECTED,
        "(j > at[:, None] - static.window)",
        "(j >= at[:, None] - static.window)",
        OF_SELECTED + " -k against_a_loop",
    ),
    Fault(
        "the gradient of a mean is not shared out",
        SELECTED,
        "_scattered(of_means, rows, keys.ends < S, S) / block_size",
        "_scattered(of_means, rows, keys.ends < S, S)",
        OF_SELECTED + " -k against_a_loop",
    ),
    Fault(
        "a rank's queries are the first's",
        "ejdist/sequence/native_sparse.py",
        "q_start = first + jax.lax.axis_index(ranks_of) * own",
        "q_start = first + jax.lax.axis_index(ranks_of) * 0",
        OF_SELECTED + " -k on_a_mesh",
    ),
)
