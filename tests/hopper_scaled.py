"""Products of scaled_matmul's kernel for Hopper, and how their numbers are held: on a GPU, and interpreted on a CPU."""

import jax
import jax.numpy as jnp
import numpy as np
from hopper import spoil_memory

from kernels import quantize_scaled
from kernels.ops.scaled_matmul import ScaledMatmulConfig, grouped_op, op

ROWS, BLOCKS, BOTH = ((1, None), (1, None)), ((1, 128), (128, 128)), ((1, 128), (1, 128))
# (rows and entries that share a scale of a and of b, M, D, F, block_m, block_n, dtype of b, of the result, whether sums stay in
# the tensor cores): rows, columns and steps that end within a tile, tiles of several programs, each size of a tile, both
# kinds of 8 bits.
CALLS = [
    (ROWS, 300, 256, 200, 128, 256, "float8_e4m3fn", "bfloat16", True),
    (ROWS, 300, 144, 200, 256, 128, "float8_e5m2", "float16", True),
    (((None, None), (1, None)), 70, 272, 456, 128, 128, "float8_e4m3fn", "bfloat16", True),
    (((1, None), (None, None)), 257, 128, 136, 128, 128, "float8_e4m3fn", "bfloat16"),
    (ROWS, 300, 272, 200, 256, 128, "float8_e4m3fn", "float16"),
    (BLOCKS, 300, 384, 256, 256, 128, "float8_e4m3fn", "bfloat16"),
    (BLOCKS, 260, 640, 384, 128, 128, "float8_e5m2", "float16"),
    (BOTH, 300, 384, 200, 128, 128, "float8_e4m3fn", "bfloat16"),
    (ROWS, 261, 144, 200, 128, 64, "float8_e4m3fn", "bfloat16", True),
    (ROWS, 261, 272, 200, 128, 64, "float8_e4m3fn", "float16"),
    (BLOCKS, 300, 384, 256, 128, 64, "float8_e4m3fn", "bfloat16"),
]


def operands(blocks, M, D, F, dtype):
    """Returns operands whose scales differ by orders of magnitude, so that one that is not its own shows."""
    rng = np.random.default_rng(M + D + F)
    spread = [np.exp2(rng.integers(-6, 6, (n, -(-D // 128)))).repeat(128, 1)[:, :D] for n in (M, F)]
    x, w = (rng.standard_normal(s.shape) * s for s in spread)
    a, a_scale = quantize_scaled(x.astype(np.float32), blocks[0])
    b, b_scale = quantize_scaled(w.astype(np.float32), blocks[1], dtype=dtype)
    return a, b, a_scale, b_scale


def check(blocks, M, D, F, block_m, block_n, b_dtype, dtype, fast=False, *, again=0):
    """Holds every entry of a result to rounding of its dtype, beside the size of the products that it sums."""
    arrays = operands(blocks, M, D, F, b_dtype)
    want = np.asarray(op.function(*arrays, dtype="float32"))
    size = np.asarray(op.function(*(jnp.abs(x.astype(jnp.float32)) for x in arrays), dtype="float32"))
    cfg = ScaledMatmulConfig(block_m=block_m, block_n=block_n, num_stages=3, num_buffers=1 + M % 2, band=2)
    ours = jax.jit(lambda *a: op(*a, dtype=dtype, fast_accumulation=fast, platform="triton", cfg=cfg))
    for time in range(1 + again):
        spoil_memory([jnp.zeros((M, F), dtype)])
        got = np.asarray(ours(*arrays), np.float32)
        # The tensor cores align 32 products to the largest of them and their sum, and cut off what is below 14 bits: in steps
        # of 128, or in all of them.
        added = (-(-D // 32) if fast else 4) * 2.0**-14 * size
        bound = 2.0 ** -(8 if dtype == "bfloat16" else 11) * np.abs(want) + added
        assert (np.abs(got - want) <= bound).all(), (time, np.argwhere(~(np.abs(got - want) <= bound))[:5])


# (whether scales are of blocks, rows of the groups, M, D, F, block_m): groups that end within a tile, or have no rows, rows
# past the last one, and a group of several tiles.
GROUPED = [
    (True, (130, 0, 70, 300, 1), 560, 384, 256, 256),
    (True, (40, 129, 3), 172, 256, 384, 128),
    (False, (0, 260, 57), 320, 256, 128, 256),
]


def check_grouped(blocks, sizes, M, D, F, block_m, *, again=0):
    """Holds every entry of a grouped product, as `check` does."""
    a, _, a_scale, _ = operands(BLOCKS if blocks else ROWS, M, D, 128, "float8_e4m3fn")
    made = [operands(BLOCKS if blocks else ROWS, 128 + i, D, F, "float8_e4m3fn") for i in range(len(sizes))]
    b, b_scale = (jnp.stack([x[i] for x in made]) for i in (1, 3))
    counts = jnp.asarray(sizes, jnp.int32)
    arrays = a, b, a_scale, b_scale, counts
    want = np.asarray(grouped_op.function(*arrays, dtype="float32"))
    magnitudes = (jnp.abs(x.astype(jnp.float32)) for x in (a, b))
    size = np.asarray(grouped_op.function(*magnitudes, a_scale, b_scale, counts, dtype="float32"))
    cfg = ScaledMatmulConfig(block_m=block_m, block_n=128, num_stages=3, num_buffers=1, band=2)
    ours = jax.jit(lambda *a: grouped_op(*a, platform="triton", cfg=cfg))
    for time in range(1 + again):
        spoil_memory([jnp.zeros((M, F), jnp.bfloat16)])
        got = np.asarray(ours(*arrays), np.float32)
        off = np.abs(got - want) > 2.0**-8 * np.abs(want) + 4 * 2.0**-14 * size
        assert not off.any(), (time, np.argwhere(off)[:5])
