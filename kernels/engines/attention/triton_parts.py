"""Parts of the Triton kernels of flash attention: compile-time options, the logits of a pair of blocks, loads and
stores."""

# Triton's stubs declare tensors where its compiler accepts constants and integers too.
# pyrefly: ignore-errors[bad-argument-type, unbound-name, unsupported-operation, missing-attribute, bad-index]

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)

# How an end of the range of keys is represented.
POSITION, OFFSET, ROW = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@dataclass(frozen=True)
class Options:
    """Compile-time options of a kernel: sizes, strides in entries (0 if a dim is broadcast), and the options of the
    call.

    Names are those of the contract. `THRESHOLD` and `FACTOR` are for dropout: the limit of the random bits, and the
    scale of a weight that is not dropped. `EXACT` makes the Hopper kernels compute tanh to float32 rounding. The ends
    of a `KeyRange` are (POSITION, absolute position), (OFFSET, from the query's own position), (ROW, index into the
    array of ends), or None if unbounded. `LIST_BATCH` and `LIST_HEAD` are strides of the lists of tiles. `MERGE` is whether
    the Hopper forward finds attention over other keys in its outputs, and merges its own with that. `PAGE`, `PAGES` and
    `TABLE` are the slots of a page, the pages, and those of a row of the table, where keys are in pages.
    `SHARES` is how many of the K heads read the same keys, see `triton_shares.py`. `PART` is how many of the N query heads a
    Hopper kernel has, 0 for all; `JOINED` is whether it finds values beside keys, in the columns after theirs; `TILES_BATCH`
    is the stride of the places of blocks of keys; `RUNS` is whether positions ascend by one in each block of a Hopper kernel.
    """

    B: int
    T: int
    S: int
    N: int
    K: int
    H: int
    HV: int
    SCALE: float
    CAP: float | None
    EXACT: bool
    LOW: tuple[int, int] | None
    HIGH: tuple[int, int] | None
    GAP_LOW: tuple[int, int] | None
    GAP_HIGH: tuple[int, int] | None
    SEGMENTS: bool
    THRESHOLD: int
    FACTOR: float
    SPAN_BATCH: int
    Q_AT_BATCH: int
    K_AT_BATCH: int
    Q_SEGMENT_BATCH: int
    K_SEGMENT_BATCH: int
    ENDS_BATCH: int
    DENSE_BATCH: int
    DENSE_HEAD: int
    DENSE_ROW: int
    DENSE_COLUMN: int
    BIAS_BATCH: int
    BIAS_HEAD: int
    BIAS_ROW: int
    BIAS_COLUMN: int
    SLOPE_BATCH: int
    SEED_BATCH: int
    SEED_HEAD: int
    BLOCK_Q: int
    BLOCK_K: int
    BLOCK_H: int
    BLOCK_V: int
    LIST_BATCH: int = 0
    LIST_HEAD: int = 0
    MERGE: bool = False
    PAGE: int = 0
    PAGES: int = 0
    TABLE: int = 0
    SHARES: int = 1
    PART: int = 0
    JOINED: bool = False
    TILES_BATCH: int = 0
    RUNS: bool = False


@triton.jit
def _mix(x):
    x = (x ^ (x >> 16)) * tl.full([1], 0x85EBCA6B, tl.uint32)
    x = (x ^ (x >> 13)) * tl.full([1], 0xC2B2AE35, tl.uint32)
    return x ^ (x >> 16)


@triton.jit
def dropout_factor(seed, i, j, THRESHOLD: tl.constexpr, FACTOR: tl.constexpr):
    """Returns 0 or FACTOR for positions i and j, which broadcast: the same bits as `dropout.py`."""
    row = _mix(seed ^ _mix(i.to(tl.uint32) * tl.full([1], 0x9E3779B1, tl.uint32)))
    bits = _mix(row ^ (j.to(tl.uint32) * tl.full([1], 0x85EBCA77, tl.uint32)))
    return tl.where(bits >= tl.full([1], THRESHOLD, tl.uint32), FACTOR, 0.0)


@triton.jit
def tanh(x):
    # For large |x| the exponential is infinite or 0, so the result is 1 or -1.
    return 1.0 - 2.0 / (tl.exp2(x * (2 * LOG2E)) + 1.0)


@triton.jit
def masks_of(masks, b, O: tl.constexpr):
    """Returns the arrays that a mask reads (positions and segments of queries and of keys, ends), from batch row b on. Those
    that a call does not have stay None."""
    q_at_ptr, k_at_ptr, q_segment_ptr, k_segment_ptr, ends_ptr = masks
    if q_at_ptr is not None:
        q_at_ptr += b * O.Q_AT_BATCH
        k_at_ptr += b * O.K_AT_BATCH
    if q_segment_ptr is not None:
        q_segment_ptr += b * O.Q_SEGMENT_BATCH
        k_segment_ptr += b * O.K_SEGMENT_BATCH
    if ends_ptr is not None:
        ends_ptr += b * O.ENDS_BATCH
    return q_at_ptr, k_at_ptr, q_segment_ptr, k_segment_ptr, ends_ptr


@triton.jit
def positions_of(ptr, tokens, SHIFT: tl.constexpr, LENGTH: tl.constexpr):
    """Returns the positions of tokens: from the array, or counted if there is none."""
    if ptr is None:
        positions = tokens + SHIFT
    else:
        positions = tl.load(ptr + tokens, mask=tokens < LENGTH, other=0)
    return positions


@triton.jit
def positions_in(ptr, tokens, first, SHIFT: tl.constexpr, LENGTH: tl.constexpr, O: tl.constexpr):
    """Returns the positions of the tokens of a block, whose first one is given: with O.RUNS one is loaded for all, so that they
    take no registers."""
    if ptr is None:
        positions = tokens + SHIFT
    elif O.RUNS:
        positions = tl.load(ptr + first) - first + tokens
    else:
        positions = tl.load(ptr + tokens, mask=tokens < LENGTH, other=0)
    return positions


@triton.jit
def segments_of(ptr, tokens, LENGTH: tl.constexpr):
    if ptr is None:
        segments = tokens
    else:
        segments = tl.load(ptr + tokens, mask=tokens < LENGTH, other=-1)
    return segments


@triton.jit
def tile_of(order_ptr, b, n, rank, TILES: tl.constexpr, GROUP: tl.constexpr, O: tl.constexpr):
    """Returns the tile of this rank; tiles with the longest lists rank first. Key tiles are ranked once for a group of
    query heads, query tiles for each head."""
    row = b * O.LIST_BATCH + n * (GROUP * O.LIST_HEAD)
    if O.LIST_HEAD != 0:
        row = row // GROUP
    return tl.load(order_ptr + row * TILES + rank)


@triton.jit
def list_of(index_ptr, b, n, tile, TILES: tl.constexpr, OTHERS: tl.constexpr, O: tl.constexpr):
    """Returns a pointer to the list of a tile, one of TILES per head; None if there are no lists."""
    if index_ptr is None:
        begin = index_ptr
    else:
        begin = index_ptr + ((b * O.LIST_BATCH + n * O.LIST_HEAD) * TILES + tile).to(tl.int64) * OTHERS
    return begin


@triton.jit
def limits_of(spans_ptr, index_ptr, b, n, tile, TILES: tl.constexpr, O: tl.constexpr):
    """Returns (first, first full, end of full, end): of the range of tiles paired with a tile or, with lists, of the
    entries of its list, which starts with the full tiles."""
    if index_ptr is None:
        span = spans_ptr + b * O.SPAN_BATCH + tile * 4
        first, full, full_end, last = tl.load(span), tl.load(span + 1), tl.load(span + 2), tl.load(span + 3)
    else:
        ends = spans_ptr + ((b * O.LIST_BATCH + n * O.LIST_HEAD) * TILES + tile) * 2
        first, full, full_end, last = 0, 0, tl.load(ends), tl.load(ends + 1)
    return first, full, full_end, last


@triton.jit
def nth(list_ptr, i):
    """Returns entry i of a list of tiles, or i itself if there is no list."""
    if list_ptr is None:
        tile = i
    else:
        tile = tl.load(list_ptr + i)
    return tile


@triton.jit
def _pair(ptr, qi, kj, ROW: tl.constexpr, COLUMN: tl.constexpr, T: tl.constexpr, S: tl.constexpr, other: tl.constexpr):
    """Returns the entries of a dense array for queries qi and keys kj, which broadcast."""
    return tl.load(ptr + qi.to(tl.int64) * ROW + kj * COLUMN, mask=(qi < T) & (kj < S), other=other)


@triton.jit
def ends_of(ptr, qi, O: tl.constexpr):
    """Returns pointers to the first end of queries qi in a batch row [ends, T]; clamped to the last query."""
    if ptr is None:
        ends = None
    else:
        ends = ptr + tl.minimum(qi, O.T - 1)
    return ends


@triton.jit
def _end(END: tl.constexpr, q_at, ends, O: tl.constexpr):
    if END[0] == ROW:
        end = tl.load(ends + END[1] * O.T)
    elif END[0] == POSITION:
        end = END[1]
    elif END[1] == 0:
        end = q_at
    else:
        end = q_at + END[1]
    return end


@triton.jit
def visible(kj, q_at, k_at, q_segment, k_segment, ends, O: tl.constexpr):
    """Returns which pairs attend, for keys kj and for positions, segments and ends that broadcast; ignores a dense
    mask."""
    seen = in_range(kj, q_at, k_at, ends, O)
    if O.SEGMENTS:
        seen = seen & in_one_segment(q_segment, k_segment)
    return seen


@triton.jit
def in_range(kj, q_at, k_at, ends, O: tl.constexpr):
    """Returns which pairs attend if segments do not count."""
    seen = kj < O.S
    if O.HIGH is not None:
        seen = seen & (k_at <= _end(O.HIGH, q_at, ends, O))
    if O.LOW is not None:
        seen = seen & (k_at >= _end(O.LOW, q_at, ends, O))
    if O.GAP_LOW is not None:
        seen = seen & ((k_at < _end(O.GAP_LOW, q_at, ends, O)) | (k_at > _end(O.GAP_HIGH, q_at, ends, O)))
    return seen


@triton.jit
def in_one_segment(q_segment, k_segment):
    return (q_segment == k_segment) & (q_segment >= 0)


@triton.jit
def scores(qk, qi, kj, q_at, k_at, q_segment, k_segment, ends, dense_ptr, bias_ptr, slope, O: tl.constexpr,
            MASKED: tl.constexpr):  # fmt: skip
    """Returns the logits for the products qk, in units of log 2 and -inf where masked; and the derivative of the soft
    cap, or 1.

    Rows and columns follow from how qi, q_at, kj and k_at broadcast, so qk may be transposed.
    """
    softcap_grad = 1.0
    if O.CAP is None:
        x = qk * (O.SCALE * LOG2E)
    else:
        capped = tanh(qk * (O.SCALE / O.CAP))
        x = capped * (O.CAP * LOG2E)
        softcap_grad = 1.0 - capped * capped
    if bias_ptr is not None:
        x += _pair(bias_ptr, qi, kj, O.BIAS_ROW, O.BIAS_COLUMN, O.T, O.S, 0.0).to(tl.float32) * LOG2E
    if slope is not None:
        x -= (slope * LOG2E) * tl.abs(q_at - k_at).to(tl.float32)
    if MASKED:
        seen = visible(kj, q_at, k_at, q_segment, k_segment, ends, O)
        if dense_ptr is not None:
            seen = seen & (_pair(dense_ptr, qi, kj, O.DENSE_ROW, O.DENSE_COLUMN, O.T, O.S, 0) != 0)
        x = tl.where(seen, x, float("-inf"))
    return x, softcap_grad


@triton.jit
def rows_of(ptr, tokens, heads, head, WIDTH: tl.constexpr, LENGTH: tl.constexpr, BLOCK: tl.constexpr):
    """Loads [tokens, BLOCK] from a batch row [LENGTH, heads, WIDTH], for some tokens of a head; zeros out of bounds."""
    cols = tl.arange(0, BLOCK)
    where = ptr + (tokens.to(tl.int64) * heads + head)[:, None] * WIDTH + cols[None, :]
    mask = (tokens < LENGTH)[:, None]
    if BLOCK != WIDTH:
        mask = mask & (cols < WIDTH)[None, :]
    return tl.load(where, mask=mask, other=0.0)


@triton.jit
def store_rows(ptr, x, tokens, heads, head, WIDTH: tl.constexpr, LENGTH: tl.constexpr, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    where = ptr + (tokens.to(tl.int64) * heads + head)[:, None] * WIDTH + cols[None, :]
    mask = (tokens < LENGTH)[:, None] & (cols < WIDTH)[None, :]
    tl.store(where, x.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def statistics(lse_ptr, delta_ptr, qi, n, O: tl.constexpr):
    """Returns (lse in units of log 2, delta) of queries qi. For queries without keys, and past the last one, the values make
    all weights zero, whatever the cotangents are."""
    lse = tl.load(lse_ptr + qi * O.N + n, mask=qi < O.T, other=float("-inf"))
    delta = tl.load(delta_ptr + qi * O.N + n, mask=qi < O.T, other=0.0)
    nonempty = lse > float("-inf")
    return tl.where(nonempty, lse * LOG2E, float("inf")), tl.where(nonempty, delta, 0.0)
