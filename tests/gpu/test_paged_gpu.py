"""Attention over pages on a CUDA device, at the widths of models: numbers, and pages that are written where they are.

Run with the command in CONTRIBUTING.md. Small cases, every tuning candidate and the same bits twice are in
test_operations_gpu.py.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grid import FLOOR, error
from test_operations_gpu import has_cuda

import kernels
from kernels.ops.paged_attention import append_and_attend_op, append_op, lse_op, op, page_op

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not has_cuda(), reason="JAX sees no CUDA device here")]

N, K, H = 32, 8, 128
BF16 = FLOOR["bfloat16"]


def normal(seed, *shape, dtype=jnp.bfloat16):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def pages_of(lens, page, dtype=jnp.bfloat16, seed=0):
    """Returns caches with room for requests of these lengths, their tables, and scales of an 8-bit cache."""
    longest = -(-max(lens) // page)
    count = longest * len(lens) + 3
    tables = np.random.default_rng(seed).permutation(count)[: longest * len(lens)].reshape(len(lens), longest)
    shape, scales = (count, page, K, H), {}
    caches = {"key_cache": normal(seed, *shape), "value_cache": normal(seed + 1, *shape)}
    if jnp.dtype(dtype).itemsize == 1:
        top = 40.0 if dtype == jnp.int8 else 1.0
        caches = {n: (top * x).astype(dtype) for n, x in caches.items()}
        scales = {"k_scale": jnp.full((1, 1, K), 1 / top), "v_scale": jnp.full((count, page, K), 1 / top)}
    return caches | scales | {"block_tables": jnp.asarray(tables, jnp.int32), "kv_lens": jnp.asarray(lens, jnp.int32)}


def against_the_contract(which, arguments, **options):
    """Asserts that outputs are those of the contract in float32, to twice its own rounding."""
    floats = {n: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x for n, x in arguments.items()}
    with jax.default_matmul_precision("highest"):
        truth = jax.tree.leaves(which.reference(**floats, **options))
        rounded = jax.tree.leaves(which.reference(**arguments, **options))
    got = jax.tree.leaves(which(**arguments, **options, platform="triton"))
    for a, w, y in zip(got, truth, rounded, strict=True):
        assert error(a, w) <= 2 * error(y, w) + BF16


@pytest.mark.parametrize("page", [16, 64])
@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "float8_e4m3fn", "float8_e5m2"])
def test_decode(page, dtype):
    lens = [2000, 1, 0, 63, 64, 65, 517]
    a = pages_of(lens, page, jnp.dtype(dtype)) | {"query": normal(5, len(lens), 1, N, H)}
    against_the_contract(page_op, a)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize("lens", [[2000, 1, 63, 64, 65, 517], [40_000, 3]], ids=str)
def test_decode_with_its_log_sum_exp(lens, dtype):
    """Of one long request each multiprocessor has a part."""
    a = pages_of(lens, 16, jnp.dtype(dtype)) | {"query": normal(5, len(lens), 1, N, H)}
    against_the_contract(lse_op, a)


@pytest.mark.parametrize(
    "options", [{}, {"window": (100, None), "logits_soft_cap": 20.0}, {"causal": False, "window": (70, 30)}]
)
def test_a_mixed_batch(options):
    counts, lens = [300, 1, 37, 1, 128, 0], [300, 1500, 900, 3, 1400, 10]
    a = pages_of(lens, 16) | {"query": normal(6, sum(counts) + 9, N, H), "softmax_aux": normal(7, N, 1)}
    a |= {"alibi_slopes": jnp.linspace(0.0, 0.1, N, dtype=jnp.bfloat16)}
    a["query_start_loc"] = jnp.asarray(np.cumsum([5, *counts]), jnp.int32)
    against_the_contract(op, a, **options)
    run = jax.jit(functools.partial(op, platform="triton", **options))
    assert np.asarray(run(**a)).tobytes() == np.asarray(run(**a)).tobytes()


@pytest.mark.parametrize("page", [16, 64, 256])
@pytest.mark.parametrize("options", [{}, {"window": (300, None), "logits_soft_cap": 20.0}, {"causal": False}])
def test_a_mixed_batch_with_long_prompts(page, options):
    """Whose long requests take the kernel for Hopper; the same compiled step serves another batch, and gives the same bits."""
    run = jax.jit(functools.partial(op, platform="triton", **options))
    rows, most = 1700, 2000
    for counts, lens in (
        ([300, 1, 37, 1, 128, 0, 1100], [300, most, 900, 3, 1400, 10, 1900]),
        ([1, 1, 129, 4, 700, 1, 600], [1, 64, 129, 77, most, 1999, 700]),
        ([1, 1, 1, 1, 1, 1, 1], [5, 900, 16, 17, most, 1, 0]),
    ):
        a = pages_of(lens, page) | {"query": normal(6, rows, N, H), "softmax_aux": normal(7, N, 1)}
        a["query_start_loc"] = jnp.asarray(np.cumsum([5, *counts]), jnp.int32)
        got, wanted = run(**a), op(**a, **options, platform="xla")
        assert error(got, wanted) <= 2 * BF16
        assert np.asarray(got).tobytes() == np.asarray(run(**a)).tobytes()
    assert run._cache_size() == 1


@pytest.mark.parametrize("width", [64, 80, 256])
def test_widths_of_heads(width):
    pages = {n: normal(i, 70, 16, 4, width) for i, n in enumerate(("key_cache", "value_cache"))}
    tables = jnp.arange(70, dtype=jnp.int32).reshape(2, 35)
    for T in (1, 90, 200):
        a = pages | {"query": normal(3, 2, T, 12, width), "kv_lens": jnp.array([550, 201]), "block_tables": tables}
        against_the_contract(page_op, a)


@pytest.mark.parametrize("page", [8, 16, 64, 256])
@pytest.mark.parametrize("options", [{}, {"window": (300, None), "logits_soft_cap": 20.0}, {"causal": False}])
def test_prompts(page, options):
    """Of as many queries as flash attention's kernel takes; slots without a token hold NaN."""
    lens = [2000, 700, 1, 1024]
    a = pages_of(lens, page) | {"query": normal(6, len(lens), 700, N, H), "softmax_aux": normal(7, N, 1)}
    slots = np.arange(a["block_tables"].shape[1] * page)
    unused = np.ones(a["key_cache"].shape[:2], bool)
    for table, n in zip(np.asarray(a["block_tables"]), lens):
        unused[table[slots[:n] // page], slots[:n] % page] = False
    clean = {n: jnp.where(unused[..., None, None], 0, a[n]) for n in ("key_cache", "value_cache")}
    spoiled = {n: jnp.where(unused[..., None, None], jnp.nan, a[n]) for n in clean}
    wanted = page_op(**(a | clean), **options, platform="xla")
    got = page_op(**(a | spoiled), **options, platform="triton")
    assert error(got, wanted) <= 2 * BF16


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "float8_e4m3fn"])
def test_pages_are_written_where_they_are(dtype):
    """Also through the bits of 8-bit floats, of which XLA makes no other array."""
    lens, counts = [700, 40, 512], [9, 1, 3]
    a = pages_of(lens, 16, jnp.dtype(dtype)) | {"query": normal(8, 13, N, H), "key": normal(9, 13, K, H)}
    a |= {"value": normal(10, 13, K, H), "query_start_loc": jnp.asarray(np.cumsum([0, *counts]), jnp.int32)}
    wanted = append_and_attend_op.reference(**a)  # in float32, caches too
    kept = {n: np.asarray(a[n]).tobytes() for n in ("key_cache", "value_cache")}
    run = jax.jit(
        functools.partial(append_and_attend_op, platform="triton"), donate_argnames=("key_cache", "value_cache")
    )
    memory = run.lower(**a).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= a["key_cache"].nbytes + a["value_cache"].nbytes
    where = [a[n].unsafe_buffer_pointer() for n in ("key_cache", "value_cache")]
    out, *caches = run(**a)
    assert [x.unsafe_buffer_pointer() for x in caches] == where
    assert error(out, wanted[0]) <= 2 * BF16
    for name, x, w in zip(kept, caches, wanted[1:], strict=True):
        assert np.asarray(x).tobytes() == np.asarray(w.astype(x.dtype)).tobytes() != kept[name]


def test_layers_write_into_one_array_of_pages():
    """A scan over layers that carries the pages of all, as generation does: nothing of their size is made."""
    layers, count = 8, 512
    caches = [normal(i, layers * count, 16, K, H) for i in range(2)]
    rows, queries = normal(2, layers, 2, 4, K, H), normal(3, layers, 4, 1, N, H)
    tables, lens = jnp.arange(400).reshape(4, 100), jnp.array([1600, 17, 300, 1])

    def step(platform):
        def layer(carry, x):
            at, new, query = x
            place = tables + at * count
            slots = jnp.take_along_axis(place, ((lens - 1) // 16)[:, None], 1)[:, 0] * 16 + (lens - 1) % 16
            keys, values = kernels.append_to_cache(*new, *carry, slots, platform=platform)
            return (keys, values), kernels.page_attention(query, keys, values, lens, place, platform=platform)

        return jax.jit(lambda *c: jax.lax.scan(layer, c, (jnp.arange(layers), rows, queries)), donate_argnums=(0, 1))

    wanted, wanted_out = step("xla")(*(jnp.array(x, copy=True) for x in caches))
    run = step("triton")
    memory = run.lower(*caches).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= 2 * caches[0].nbytes
    assert memory.temp_size_in_bytes < caches[0].nbytes // layers
    where = [x.unsafe_buffer_pointer() for x in caches]
    got, out = run(*caches)
    assert [x.unsafe_buffer_pointer() for x in got] == where
    assert error(out, wanted_out) <= 2 * BF16
    for a, b in zip(got, wanted, strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_rows_alone_need_no_memory():
    caches = [normal(i, 4096, 16, K, H) for i in range(2)]
    new, slots = normal(2, 2048, K, H), jax.random.permutation(jax.random.key(3), 65536)[:2048].astype(jnp.int32)
    run = jax.jit(functools.partial(append_op, platform="triton"), donate_argnums=(3, 4))
    assert run.lower(new, new, slots, *caches).compile().memory_analysis().temp_size_in_bytes == 0


def test_more_than_two_to_the_31_numbers():
    count = 2**31 // (16 * K * H) + 70
    keys, values = (jnp.zeros((count, 16, K, H), jnp.bfloat16) for _ in range(2))
    assert keys.size > 2**31
    small = [normal(i, 64, 16, K, H) for i in range(2)]
    keys, values = (x.at[count - 64 :].set(y) for x, y in zip((keys, values), small, strict=True))
    query, lens = normal(4, 2, 1, N, H), jnp.array([500, 512])
    tables = jnp.arange(64, dtype=jnp.int32).reshape(2, 32)
    wanted = kernels.page_attention(query, *small, lens, tables, platform="xla")
    new, slots = normal(5, 2, K, H), jnp.array([(count - 1) * 16 + 15, (count - 1) * 16 + 14], jnp.int32)
    got = kernels.page_attention(query, keys, values, lens, tables + count - 64, platform="triton")
    assert error(got, wanted) <= BF16
    run = jax.jit(functools.partial(kernels.append_to_cache, platform="triton"), donate_argnums=(2, 3))
    keys, values = run(new, new, keys, values, slots)
    for x in (keys, values):
        assert np.asarray(x[count - 1, 14:]).tobytes() == np.asarray(new[::-1]).tobytes()
