"""Faults of compressed and overlapped collectives."""

from faults import Fault

FAULTS = (
    Fault(
        "a compressed block has the scale of another",
        "compress",
        "largest_magnitude($wide)",
        "jnp.max(jnp.abs($wide), axis=-2, keepdims=True).swapaxes(-1, -2)[..., :$wide.shape[-2], :]",
        "tests/test_compression.py -k error",
    ),
    Fault(
        "collective matmul: blocks are put where the rank before them belongs",
        "collective_matmul:_gathered",
        "$me - $by * $hop",
        "$me - $by * $hop - 1",
        "tests/test_collective_matmul.py -k numbers",
    ),
    Fault(
        "collective matmul: a sum comes home a rank late",
        "collective_matmul:_scattered",
        "$hop + 1",
        "$hop",
        "tests/test_collective_matmul.py -k numbers",
    ),
    Fault(
        "collective matmul: all rows are gathered first",
        "collective_matmul:_gathered",
        "$n, $me, $block = (lax.axis_size($axis), lax.axis_index($axis), $x.shape[-2])",
        "if True:\n    return use(lax.all_gather($x, $axis, axis=$x.ndim - 2, tiled=True), 0, carry)",
        "tests/test_collective_matmul.py -k travel",
    ),
)
