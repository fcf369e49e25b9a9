"""Faults of compressed and overlapped collectives."""

from faults import Fault

COLLECTIVE = "ejdist/collective_matmul.py"

FAULTS = (
    Fault(
        "a compressed block has the scale of another",
        "ejdist/compression.py",
        "largest_magnitude(wide)",
        "jnp.max(jnp.abs(wide), axis=-2, keepdims=True).swapaxes(-1, -2)[..., : wide.shape[-2], :]",
        "tests/test_compression.py -k error",
    ),
    Fault(
        "collective matmul: blocks are put where the rank before them belongs",
        COLLECTIVE,
        "(me - by * hop) % n * block",
        "(me - by * hop - 1) % n * block",
        "tests/test_collective_matmul.py -k numbers",
    ),
    Fault(
        "collective matmul: a sum comes home a rank late",
        COLLECTIVE,
        "(me - by * (hop + 1)) % n * block",
        "(me - by * hop) % n * block",
        "tests/test_collective_matmul.py -k numbers",
    ),
    Fault(
        "collective matmul: all rows are gathered first",
        COLLECTIVE,
        "    n, me, block = lax.axis_size(axis), lax.axis_index(axis), x.shape[-2]\n",
        "    if True:\n        return use(lax.all_gather(x, axis, axis=x.ndim - 2, tiled=True), 0, carry)\n",
        "tests/test_collective_matmul.py -k travel",
    ),
)
