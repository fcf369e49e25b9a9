"""The interpreter of Gluon kernels: right kernels have right numbers, and each of the mistakes that Hopper does not forgive
shows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels.framework.interpret import interpret, interpreting
from kernels.toolchains.simulate.simulated_hopper import Shared
from kernels.toolchains.triton import tensor_descriptor, triton_launch

SIZE = 64
TILE = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
SUMS = gl.constexpr(gl.NVMMASharedLayout(128, 32, 2))


@gluon.constexpr_function
def halved(size):
    return size // 2


@gluon.jit
def _load(x_desc, tiles, full, free, BLOCKS: gl.constexpr, WRONG: gl.constexpr):
    for i in range(BLOCKS):
        if WRONG != "free":
            mbarrier.wait(free.index(i % 2), (i // 2 & 1) ^ 1)
        mbarrier.expect(full.index(i % 2), x_desc.nbytes_per_cta * (2 if WRONG == "bytes" else 1))
        tile = tiles.index(i % 2)
        if WRONG == "shape":
            tile = tile.slice(0, 32, 0)
        tma.async_load(x_desc, [i * tile.shape[0] + (1 if WRONG == "outside" else 0), 4 if WRONG == "aligned" else 0],
                       full.index(i % 2), tile)  # fmt: skip


@gluon.jit
def _multiply(sum_desc, o_ptr, tiles, full, free, sums, BLOCKS: gl.constexpr, WRONG: gl.constexpr):
    SIZE: gl.constexpr = tiles.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SIZE, 16])
    acc = gl.zeros([SIZE, SIZE], gl.float32, layout)
    for i in range(BLOCKS):
        if WRONG != "full":
            mbarrier.wait(full.index(i % 2), i // 2 & 1)
        tile = tiles.index(i % 2)
        if WRONG == "written":
            tile.store((tile.load(layout).to(gl.float32) * 1.0).to(tile.dtype))
        acc = warpgroup_mma(tile.permute((1, 0)), tile, acc, is_async=True)
        if WRONG == "early":
            mbarrier.arrive(free.index(i % 2))
        if WRONG != "product" or i < BLOCKS - 1:
            acc = warpgroup_mma_wait(0, (acc,))
        if WRONG != "early":
            mbarrier.arrive(free.index(i % 2), count=2 if WRONG == "arrivals" else 1)
    if WRONG == "product":
        left = acc + 0.0
        acc = warpgroup_mma_wait(0, (acc,))
    else:
        left = acc
    sums.store(left)
    if WRONG != "fence":
        fence_async_shared()
    tma.async_atomic_add(sum_desc, [0, 0], sums)
    if WRONG == "overwritten":
        sums.store(gl.zeros([SIZE, SIZE], gl.float32, layout))
        fence_async_shared()
    if WRONG != "sums":
        tma.store_wait(0)
    rows = gl.arange(0, SIZE, gl.SliceLayout(1, layout)) + (1 if WRONG == "past" else 0)
    cols = gl.arange(0, SIZE, gl.SliceLayout(0, layout))
    gl.store(o_ptr + rows[:, None] * SIZE + cols[None, :], left)
    if WRONG == "word":
        gl.histogram(cols, 4)


@gluon.jit
def squares_kernel(x_desc, sum_desc, o_ptr, BLOCKS: gl.constexpr, WRONG: gl.constexpr):
    """x^T x of rows that are loaded SIZE at a time: added to one array, and stored to another."""
    SIZE: gl.constexpr = x_desc.block_type.shape[1]
    tiles = gl.allocate_shared_memory(x_desc.dtype, [2, 2 * halved(SIZE), SIZE], TILE)
    sums = gl.allocate_shared_memory(gl.float32, [SIZE, SIZE], SUMS)
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(full.index(i), count=1)
        if WRONG != "init":
            mbarrier.init(free.index(i), count=1)
    gl.warp_specialize(
        [
            (_multiply, (sum_desc, o_ptr, tiles, full, free, sums, BLOCKS, WRONG)),
            (_load, (x_desc, tiles, full, free, BLOCKS, WRONG)),
        ],
        [1],
        [24],
    )


BLOCKS = 40  # so many that copies are late in some of them
X = jnp.asarray(np.random.default_rng(0).standard_normal((BLOCKS * SIZE, SIZE)), "bfloat16")


def squares(x, wrong=None):
    sums = jax.ShapeDtypeStruct((SIZE, SIZE), "float32")
    desc = tensor_descriptor(x, x.shape, (SIZE, SIZE), TILE.value)
    sum_desc = tensor_descriptor(jnp.ones(sums.shape), sums.shape, (SIZE, SIZE), SUMS.value)
    how = {"grid": (1,), "input_output_aliases": {1: 1}, "BLOCKS": BLOCKS, "WRONG": wrong}
    return triton_launch(squares_kernel, desc, sum_desc, out_shape=(sums, sums), **how)


def test_a_right_kernel_has_the_right_numbers():
    with interpret(90):
        stored, added = jax.jit(squares)(X)
        mapped, _ = jax.vmap(squares)(jnp.stack([X, 2 * X]))
    wide = np.asarray(X, np.float32)
    np.testing.assert_allclose(stored, wide.T @ wide, rtol=1e-5, atol=1e-4)
    np.testing.assert_array_equal(added, np.asarray(stored) + 1)
    np.testing.assert_array_equal(mapped[1], 4 * np.asarray(stored))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("init", "wait on a barrier that was never initialised"),
        ("free", "1 too many arrivals at a barrier of 1"),
        ("full", r"a tile bfloat16\[64, 64\] changed while the matrix units are reading it"),
        ("early", r"a tile bfloat16\[64, 64\] changed while the matrix units are reading it"),
        ("overwritten", r"a tile float32\[64, 64\] changed while TMA is reading it"),
        ("arrivals", "2 too many arrivals at a barrier of 1"),
        (
            "bytes",
            r"program 0 deadlocks: _multiply \(partition 0\) at _multiply, line \d+ of test_gluon_.*; _load",
        ),
        ("shape", r"TMA copies blocks bfloat16\[64, 64\], but the tile is bfloat16\[32, 64\]"),
        ("aligned", "aligned to 16 bytes, not entry 4 of a row"),
        ("written", r"the matrix units are to read a tile before fence_async_shared\(\) after it was written"),
        ("fence", r"TMA is to read a tile before fence_async_shared\(\) after it was written"),
        ("sums", r"_multiply \(partition 0\) ended before waiting for its products or TMA adds"),
        ("past", "o_ptr: entry 4096 is out of bounds, size 4096"),
        ("word", "Gluon's histogram is not implemented; add it to"),
    ],
)
def test_what_is_not_forgiven_is_told(wrong, message):
    with interpret(90), pytest.raises(Exception, match=message):
        jax.block_until_ready(squares(X, wrong))


def test_a_product_is_nan_until_it_is_waited_for():
    with interpret(90):
        assert np.isnan(squares(X, "product")[0]).all()


def test_what_lies_past_the_end_of_an_array_is_zeros():
    with interpret(90):
        stored, _ = squares(X, "outside")
    wide = np.asarray(X, np.float32)[1:]
    np.testing.assert_allclose(stored, wide.T @ wide, rtol=1e-5, atol=1e-4)


def test_a_tile_of_wider_entries_has_the_same_bytes_and_flags():
    """In the second of two tiles of 64 by 128, which lies as panels of 64 columns: words of two of its columns."""
    memory, unfenced = np.arange(2 * 64 * 128).astype(np.uint16), np.zeros(2 * 64 * 128, bool)
    tiles = Shared(memory, unfenced, Shared.allocate(np.uint16, [2, 64, 128], TILE.value)._entries)
    words = tiles.reinterpret(np.int32, [2, 64, 64], SUMS.value)
    low, high = (np.asarray(tiles.index(1).load())[:, i::2].astype(np.int64) for i in (0, 1))
    np.testing.assert_array_equal(np.asarray(words.index(1).load()), low + (high << 16))
    words._unfenced[words.index(1)._entries] = True
    assert unfenced[tiles.index(1)._entries].all() and not unfenced[tiles.index(0)._entries].any()


def test_kernels_for_hopper_are_not_interpreted_for_another_gpu():
    with interpret(), pytest.raises(ValueError, match=r"squares_kernel is for Hopper: .* interpret\(90\)"):
        squares(X)


@pytest.mark.parametrize("asked", [70, 100, True, "90"])
def test_another_gpu_is_refused(asked):
    with pytest.raises(ValueError, match=f"'compute_capability' = {asked!r} must be 80 .* 90"), interpret(asked):
        pass
    assert interpreting() is None
