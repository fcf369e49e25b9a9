"""Faults of grouped_matmul."""

from faults import Fault

GROUPED = "tests/kernels/test_grouped_matmul.py"

FAULTS = (
    Fault(
        "grouped matmul: rows of the next group in the gradient of a matrix",
        "kernels/ops/grouped_matmul/xla.py",
        "x, d = _rows(padded, first, size, end), _rows(d_padded, first, size, end)",
        "x, d = _rows(padded, first, size), _rows(d_padded, first, size)",
        GROUPED,
    ),
    Fault(
        "grouped matmul: rows past the last group are not zero",
        "kernels/ops/grouped_matmul/xla.py",
        "return _inside(groups, out, rows)",
        "return out[:rows]",
        GROUPED,
    ),
    Fault(
        "grouped matmul: the last rows of a group left out",
        "kernels/ops/grouped_matmul/xla.py",
        "(size - 1 if size == TILES[-1] else 0)",
        "0",
        GROUPED,
    ),
    Fault(
        "grouped matmul: rows of a device take the sizes of all",
        "ejdist/grouped_matmul.py",
        "jnp.pad(jnp.cumsum(group_sizes), (1, 0)) - first",
        "jnp.pad(jnp.cumsum(group_sizes), (1, 0)) - 0 * first",
        f"{GROUPED} -k mesh",
    ),
    Fault(
        "grouped matmul: every device adds the bias",
        "ejdist/grouped_matmul.py",
        "jnp.where(jax.lax.axis_index(features) == 0, bias, 0)",
        "bias",
        f"{GROUPED} -k mesh",
    ),
)
