"""How tiles reach the Hopper forward: rings of stages in shared memory, and what its producer warp loads into them from one
array or from pages."""

# Triton's stubs declare tensors where its compiler accepts constants and integers too.
# pyrefly: ignore-errors[bad-argument-type, bad-assignment, unbound-name, unsupported-operation, missing-attribute, bad-index]

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from kernels.engines.attention.gluon_parts import BLOCK, nth
from kernels.toolchains.gluon import SWIZZLED, after


@gluon.jit
def ring_of(STAGES: gl.constexpr, TILES: gl.constexpr, dtype: gl.constexpr, ROWS: gl.constexpr, WIDTH: gl.constexpr,
               READERS: gl.constexpr):  # fmt: skip
    """Allocates a ring: (TILES tiles per stage, a "full" barrier per stage, a "free" barrier that all readers signal)."""
    tiles = gl.allocate_shared_memory(dtype, [STAGES * TILES, ROWS, WIDTH], SWIZZLED)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(free.index(i), count=READERS)
    return tiles, full, free


@gluon.jit
def load_tile(desc, rope_desc, batch, row, head, ring, stage, phase, HEAD_TILES: gl.constexpr, FIRST: gl.constexpr):
    """Loads the rows of a head from `row` on into a stage, once it is free; rows out of bounds are zeros. The last tile
    of columns comes from `rope_desc`, which all heads share, if there is one. FIRST: the first column."""
    tiles, full, free = ring
    ROWS: gl.constexpr = desc.block_type.shape[1]
    WIDTH: gl.constexpr = desc.block_type.shape[3]
    mbarrier.wait(free.index(stage), phase ^ 1)
    mbarrier.expect(full.index(stage), HEAD_TILES * desc.nbytes_per_cta)
    for i in gl.static_range(HEAD_TILES):
        block = tiles.index(HEAD_TILES * stage + i).reinterpret(shape=[1, ROWS, 1, WIDTH], layout=BLOCK)
        if rope_desc is not None and i == HEAD_TILES - 1:
            tma.async_load(rope_desc, [batch, row, 0, 0], full.index(stage), block)
        else:
            tma.async_load(desc, [batch, row, head, FIRST + i * WIDTH], full.index(stage), block)


@gluon.jit
def copy_pages(desc, pages, slot, head, tile, first, arrived):
    """Starts copying a block from its pages into a tile, from column `first` on: a part of the block is a page, or the block a
    part of a page that begins at `slot`. Each copy is one panel of 64 columns, as tiles are stored in shared memory."""
    PART: gl.constexpr = desc.block_type.shape[1]
    PANEL: gl.constexpr = desc.block_type.shape[3]
    PARTS: gl.constexpr = tile.shape[0] // PART
    PANELS: gl.constexpr = tile.shape[1] // PANEL
    parts = tile.reinterpret(shape=[PANELS * PARTS, 1, PART, 1, PANEL], layout=BLOCK)
    for j in gl.static_range(PARTS):
        for k in gl.static_range(PANELS):
            tma.async_load(desc, [pages[j], slot, head, first + k * PANEL], arrived, parts.index(k * PARTS + j))


@gluon.jit
def load_pages(desc, pages, row, head, ring, stage, phase, HEAD_TILES: gl.constexpr, O: gl.constexpr):
    """Loads a block of keys or values from its pages into a stage, once it is free: see `copy_pages`."""
    tiles, full, free = ring
    COPIES: gl.constexpr = tiles.shape[1] // desc.block_type.shape[1] * (tiles.shape[2] // desc.block_type.shape[3])
    mbarrier.wait(free.index(stage), phase ^ 1)
    mbarrier.expect(full.index(stage), HEAD_TILES * COPIES * desc.nbytes_per_cta)
    for i in gl.static_range(HEAD_TILES):
        tile = tiles.index(HEAD_TILES * stage + i)
        copy_pages(desc, pages, row % O.PAGE, head, tile, i * tiles.shape[2], full.index(stage))


@gluon.jit
def load_keys(k_desc, k_rope_desc, v_desc, list_ptr, table_ptr, batch, head, end, begin, keys, values, stage, phase,
              HEAD_TILES: gl.constexpr, VALUE_TILES: gl.constexpr, O: gl.constexpr):  # fmt: skip
    """Loads the blocks of keys and values from `end` - 1 down to `begin`, or those entries of a list; returns the next
    stage and its phase."""
    PART: gl.constexpr = k_desc.block_type.shape[1]
    STAGES: gl.constexpr = values[0].shape[0] // VALUE_TILES
    for i in range(end - begin):
        row = nth(list_ptr, end - 1 - i) * O.BLOCK_K
        if table_ptr is None:
            load_tile(k_desc, k_rope_desc, batch, row, head, keys, stage, phase, HEAD_TILES, 0)
            load_tile(v_desc, None, batch, row, head, values, stage, phase, VALUE_TILES, O.H if O.JOINED else 0)
        else:
            pages = ()
            for j in gl.static_range(O.BLOCK_K // PART):
                entry = gl.minimum((row + j * PART) // O.PAGE, O.TABLE - 1)
                page = gl.load(table_ptr + batch * O.TABLE + entry)
                pages = pages + (gl.minimum(gl.maximum(page, 0), O.PAGES - 1),)
            load_pages(k_desc, pages, row, head, keys, stage, phase, HEAD_TILES, O)
            load_pages(v_desc, pages, row, head, values, stage, phase, VALUE_TILES, O)
        stage, phase = after(stage, phase, STAGES)
    return stage, phase


@gluon.jit
def clear(values, stage, phase, until, TILES: gl.constexpr):
    """Sets the rows of a block of values from `until` on to zero: slots without a token may hold anything, even NaN. Each
    warpgroup does it for itself: what the others write is the same."""
    tiles, full, _ = values
    ROWS_AT_ONCE: gl.constexpr = 16
    # Few columns at once of tiles so wide that what they are multiplied with fills the registers.
    WIDTH: gl.constexpr = tiles.shape[2] if tiles.shape[2] <= 256 else 128
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    if until < tiles.shape[1]:
        mbarrier.wait(full.index(stage), phase)
        for tile in gl.static_range(TILES):
            for i in gl.static_range(tiles.shape[1] // ROWS_AT_ONCE):
                for j in gl.static_range(tiles.shape[2] // WIDTH):
                    part = tiles.index(TILES * stage + tile).slice(i * ROWS_AT_ONCE, ROWS_AT_ONCE, 0)
                    part = part.slice(j * WIDTH, WIDTH, 1)
                    rows = i * ROWS_AT_ONCE + gl.arange(0, ROWS_AT_ONCE, gl.SliceLayout(1, WIDE))
                    x = part.load(WIDE)
                    part.store(gl.where((rows < until)[:, None], x, gl.zeros_like(x)))
        fence_async_shared()
