"""Latent attention over pages on a CUDA device, at the widths of DeepSeek's models: numbers of each kernel, and the same bits.

Run with the command in CONTRIBUTING.md. Few heads take a kernel of their own on Hopper, many heads another one.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grid import FLOOR, error
from test_operations_gpu import has_cuda

from kernels.ops.multi_latent_attention import paged_op

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not has_cuda(), reason="JAX sees no CUDA device here")]

R, HR, SCALE = 512, 64, 192**-0.5


def batch_of(heads, lens, counts, page, dtype, seed=0):
    """Returns arguments of requests with these lengths and new tokens; slots and pages that none of them has hold NaN."""
    rng = np.random.default_rng(seed)
    longest = -(-max(lens) // page)
    tables = rng.permutation(longest * len(lens) + 3)[: longest * len(lens)].reshape(len(lens), longest)
    cache = np.full((tables.size + 3, page, R + HR), np.nan, np.float32)
    slots = np.arange(longest * page)
    for table, n in zip(tables, lens, strict=True):
        cache[table[slots[:n] // page], slots[:n] % page] = rng.standard_normal((n, R + HR))
    rows = sum(counts)
    arrays = {"query": rng.standard_normal((rows, heads, R)), "query_rope": rng.standard_normal((rows, heads, HR))}
    arrays = {n: jnp.asarray(x, dtype) for n, x in (arrays | {"kv_cache": cache}).items()}
    integers = {"kv_lens": lens, "block_tables": tables, "query_start_loc": np.cumsum([0, *counts])}
    return arrays | {n: jnp.asarray(x, jnp.int32) for n, x in integers.items()}


RAGGED = [2000, 1, 63, 64, 65, 517, 128]
ONE_EACH = [1] * len(RAGGED)


@pytest.mark.parametrize(
    ("lens", "counts"),
    [(RAGGED, ONE_EACH), ([40_000], [1]), ([9000, 3, 700], [4, 1, 2]), ([700, 90], [130, 60]), ([333] * 70, [1] * 70)],
    ids=["ragged", "long", "several", "prompts", "many"],
)
@pytest.mark.parametrize("options", [{}, {"logits_soft_cap": 20.0}], ids=["plain", "capped"])
@pytest.mark.parametrize("page", [16, 64])
@pytest.mark.parametrize("heads", [8, 12, 16, 32, 64, 128])
def test_numbers(heads, page, options, lens, counts):
    """Of six calls each, which must give the same bits: kernels that race are seldom wrong and often different."""
    a = batch_of(heads, lens, counts, page, jnp.bfloat16)
    clean = a | {"kv_cache": jnp.nan_to_num(a["kv_cache"])}
    options = options | {"softmax_scale": SCALE}
    with jax.default_matmul_precision("highest"):
        floats = {n: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x for n, x in clean.items()}
        truth = jax.tree.leaves(paged_op(**floats, **options, platform="xla"))
    rounded = jax.tree.leaves(paged_op(**clean, **options, platform="xla"))
    run = jax.jit(functools.partial(paged_op, platform="triton", **options))
    first, *others = (jax.tree.leaves(run(**a)) for _ in range(5))
    for got, w, y in zip(first, truth, rounded, strict=True):
        assert error(got, w) <= 2 * error(y, w) + FLOOR["bfloat16"]
    for other in others:
        assert [np.asarray(x).tobytes() for x in other] == [np.asarray(x).tobytes() for x in first]


@pytest.mark.parametrize("heads", [8, 16, 128])
def test_float16(heads):
    a = batch_of(heads, RAGGED, ONE_EACH, 64, jnp.float16)
    clean = a | {"kv_cache": jnp.nan_to_num(a["kv_cache"])}
    wanted = jax.tree.leaves(paged_op(**clean, softmax_scale=SCALE, platform="xla"))
    got = jax.tree.leaves(paged_op(**a, softmax_scale=SCALE, platform="triton"))
    for x, w in zip(got, wanted, strict=True):
        assert error(x, w) <= 2 * FLOOR["float16"]
