"""Products of quantized_matmul's kernel for Hopper, and how their numbers are held: on a GPU, and interpreted on a CPU."""

import jax
import jax.numpy as jnp
import numpy as np
from hopper import spoil_memory

from kernels import dequantize, quantize
from kernels.ops.quantized_matmul import op
from kernels.ops.quantized_matmul.contract import QuantizedMatmulConfig

# (mode, bits, entries of a group, dtype, M, D, F, block_m, block_f, block_d, warps, splits, stages, and teams if there are
# two): rows, columns and steps that end within a tile, parts of D of other lengths and one without steps, one of more steps
# than stages, groups longer and shorter than a step, each kind of codes.
CALLS = [
    ("affine", 4, 32, "bfloat16", 9, 608, 136, 16, 128, 64, 4, 1, 3),
    ("affine", 4, 64, "bfloat16", 20, 320, 200, 32, 128, 128, 4, 2, 2),
    ("affine", 4, 32, "float16", 5, 160, 264, 8, 256, 64, 4, 3, 3),
    ("affine", 4, 256, "bfloat16", 70, 256, 264, 64, 256, 128, 8, 1, 2),
    ("affine", 8, 64, "bfloat16", 17, 192, 136, 16, 128, 64, 4, 4, 4),
    ("affine", 8, 64, "bfloat16", 130, 128, 136, 128, 128, 64, 4, 2, 2),
    ("affine", 8, 16, "float16", 8, 128, 136, 8, 128, 64, 4, 1, 2),
    ("nf4", 4, 64, "bfloat16", 3, 256, 136, 8, 128, 128, 4, 1, 2),
    ("nf4", 4, 64, "float16", 3, 128, 136, 8, 128, 64, 4, 2, 2),
    ("mxfp4", 4, 32, "bfloat16", 16, 320, 144, 16, 128, 128, 4, 2, 2),
    ("mxfp8", 8, 32, "bfloat16", 16, 192, 144, 16, 128, 64, 4, 2, 2),
    ("affine", 4, 64, "bfloat16", 20, 1088, 520, 32, 256, 128, 8, 3, 3),
    ("mxfp4", 4, 32, "bfloat16", 70, 320, 272, 64, 256, 64, 8, 1, 2),
    ("affine", 4, 64, "bfloat16", 20, 1088, 520, 32, 256, 128, 8, 3, 3, 2),
    ("mxfp4", 4, 32, "bfloat16", 70, 320, 272, 64, 256, 64, 8, 1, 2, 2),
    ("affine", 4, 64, "float16", 40, 448, 264, 64, 256, 64, 8, 2, 2, 2),
]


def arrays_of(mode, bits, group_size, dtype, M, D, F):
    """Returns x and weights whose groups differ by orders of magnitude, so that a scale that is not their own shows."""
    rng = np.random.default_rng(M + D + F)
    spread = np.exp2(rng.integers(-4, 4, (D // group_size, F))).repeat(group_size, 0)
    w = jnp.asarray(rng.standard_normal((D, F)) * spread + (mode == "affine") * spread, dtype)
    return (jnp.asarray(rng.standard_normal((M, D)), dtype), *quantize(w, mode, bits=bits, group_size=group_size))


def check(
    mode, bits, group_size, dtype, M, D, F, block_m, block_f, block_d, warps, splits, stages, teams=1, *, again=0
):
    """Holds every entry of a result to rounding of its weights and of itself, beside the size of the products that it sums."""
    x, *packed = arrays_of(mode, bits, group_size, dtype, M, D, F)
    how = {"mode": mode, "bits": bits, "group_size": group_size}
    weights = np.asarray(dequantize(*packed, **how), np.float64)
    want = np.asarray(x, np.float64) @ weights
    size = np.abs(np.asarray(x, np.float64)) @ np.abs(weights)
    cfg = QuantizedMatmulConfig(
        block_m, block_f, block_d, splits, num_warps=warps, num_stages=stages, turned=True, teams=teams, dense=False
    )
    ours = jax.jit(lambda x, *packed: op(x, *packed, **how, platform="triton", cfg=cfg))
    for time in range(1 + again):
        spoil_memory([jnp.zeros((M, F), dtype)])
        got = np.asarray(ours(x, *packed), np.float64)
        unit = 2.0 ** -(8 if dtype == "bfloat16" else 11)
        # Numbers of nf4 are rounded before they are scaled, too.
        bound = unit * np.abs(want) + (2.01 if mode == "nf4" else 1.01) * unit * size
        assert (np.abs(got - want) <= bound).all(), (time, np.argwhere(~(np.abs(got - want) <= bound))[:5])
