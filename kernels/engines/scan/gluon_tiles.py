"""Parts of the Gluon kernels of gradients of delta rules: tiles of 64 by 64, how they arrive, and what needs values alone."""

# Gluon's stubs declare tensors where its compiler accepts constants and integers too.
# pyrefly: ignore-errors[bad-argument-type, bad-assignment, unbound-name, unsupported-operation, missing-attribute, bad-index]

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma

C = gl.constexpr(64)  # tokens of a chunk, and rows and columns of a tile
WIDTH = gl.constexpr(128)  # channels of keys and of values
HALVES = gl.constexpr(2)
TILES = gl.constexpr(8)  # of a stage: see `load_half`
SQUARE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
WIDE = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))  # 16 contiguous bytes a thread


@gluon.jit
def place_of(table_ptr, chunk, T: gl.constexpr, CHUNKS: gl.constexpr, RAGGED: gl.constexpr):
    """Returns (the first token, how many there are) of a chunk of all rows; RAGGED: some have fewer than 64."""
    if not RAGGED:
        return chunk * C, C
    elif table_ptr is None:
        first = chunk % CHUNKS * C
        return chunk // CHUNKS * T + first, gl.minimum(C, T - first)
    else:
        return chunk // CHUNKS * T + gl.load(table_ptr + 4 * chunk), gl.load(table_ptr + 4 * chunk + 1)


@gluon.jit
def load_tokens(ptr, i, count, other, RAGGED: gl.constexpr):
    """Returns what tokens i of a chunk have."""
    if RAGGED:
        return gl.load(ptr + i, mask=i < count, other=other)
    else:
        return gl.load(ptr + i)


@gluon.jit
def store_tokens(ptr, i, x, count, RAGGED: gl.constexpr):
    if RAGGED:
        gl.store(ptr + i, x, mask=i < count)
    else:
        gl.store(ptr + i, x)


@gluon.jit
def _store_rows(ptr, rows, token, columns, x, count, STRIDE: gl.constexpr, RAGGED: gl.constexpr):
    where = (token + rows).to(gl.int64)[:, None] * STRIDE + columns[None, :]
    if RAGGED:
        gl.store(ptr + where, x, mask=(rows < count)[:, None] & (columns >= 0)[None, :])
    else:
        gl.store(ptr + where, x)


@gluon.jit
def load_half(descs, tiles, slot, full, token, n, state, half):
    """Loads half of the columns of a head into the tiles of a slot: cotangents of outputs, what is written, its gradients,
    values, and two tiles each of the state before the chunk and of the gradients of that after it."""
    d_out_desc, written_desc, du_desc, v_desc, states_desc, d_states_desc = descs
    mbarrier.expect(full, TILES * v_desc.nbytes_per_cta)
    at, first = n * WIDTH + half * C, slot * TILES
    tma.async_load(d_out_desc, [token, at], full, tiles.index(first))
    tma.async_load(written_desc, [token, at], full, tiles.index(first + 1))
    tma.async_load(du_desc, [token, at], full, tiles.index(first + 2))
    for side in gl.static_range(2):
        row = state + side * C
        tma.async_load(states_desc, [row, half * C], full, tiles.index(first + 4 + side))
        tma.async_load(d_states_desc, [row, half * C], full, tiles.index(first + 6 + side))
    tma.async_load(v_desc, [token, at], full, tiles.index(first + 3))


@gluon.jit
def product_of(a, b, sums, use):
    return warpgroup_mma(a, b, sums, use_acc=use, is_async=True)


@gluon.jit
def again(x):
    """Returns an integer as it is. What follows from it is computed after, where the compiler would do so before a loop, and
    have no registers to keep it."""
    same: gl.constexpr = "mov.b32 $0, $1;"
    return gl.inline_asm_elementwise(same, "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def clear(tiles, index, runs_ptr, count, TILES_HERE: gl.constexpr, RAGGED: gl.constexpr):
    """Sets tokens of padding, and those past the chunk, to zero in tiles of one: they may hold anything, even NaN. Each
    warpgroup does it for itself: what the other writes is the same."""
    for tile in gl.static_range(TILES_HERE):
        for i in gl.static_range(4):
            rows = 16 * i + gl.arange(0, 16, gl.SliceLayout(1, WIDE))
            part = tiles.index(index + tile).slice(16 * i, 16, 0)
            x = part.load(WIDE)
            if runs_ptr is None:
                there = rows < count
            else:
                there = load_tokens(runs_ptr, rows, count, -1, RAGGED) >= 0
            part.store(gl.where(there[:, None], x, gl.zeros_like(x)))


@gluon.jit
def of_values(du, v, beta_ptr, dv_ptr, token, column, sums, count, ROW: gl.constexpr, STRIDE: gl.constexpr,
              RAGGED: gl.constexpr):  # fmt: skip
    """Stores gradients of 16 rows of values, and returns sums of their products with du."""
    du, v = du.slice(ROW, 16, 0).load(WIDE), v.slice(ROW, 16, 0).load(WIDE)
    rows = ROW + again(gl.arange(0, 16, gl.SliceLayout(1, WIDE)))
    columns = gl.arange(0, C, gl.SliceLayout(0, WIDE))
    d = du.to(gl.float32)
    beta = load_tokens(beta_ptr, rows, count, 0.0, RAGGED)
    d_v = (d * beta[:, None]).to(dv_ptr.dtype.element_ty)
    _store_rows(dv_ptr, rows, token, column + columns, d_v, count, STRIDE, RAGGED)
    return sums + gl.sum(d * v.to(gl.float32), axis=1)


@gluon.jit
def store_half(ptr, x, tile, token, column, count, STRIDE: gl.constexpr, RAGGED: gl.constexpr):
    """Stores half of the channels of a chunk through a tile, so that each thread writes 16 contiguous bytes."""
    tile.store(x.to(tile.dtype))
    rows, columns = gl.arange(0, C, gl.SliceLayout(1, WIDE)), gl.arange(0, C, gl.SliceLayout(0, WIDE))
    _store_rows(ptr, rows, token, column + columns, tile.load(WIDE), count, STRIDE, RAGGED)
