"""Parts of the Triton kernels of recurrences: chunks of tokens, the decays between them, and sums over intervals.

A chunk is a run of tokens of one row. What a program needs to know about it does not depend on the operation: which
tokens it has, which of them a state reaches, and which pairs belong to one document (`layout.py` prepares the arrays).
Every exponent is a sum of log decays over an interval of tokens, summed by itself: none is a difference of two sums, and
nothing is divided by a decay.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def chunk_of(table_ptr, row, c, T: tl.constexpr, CHUNKS: tl.constexpr, BLOCK_C: tl.constexpr):
    """Returns (first token, tokens, state, whether a sequence begins here, whether it ends here) of chunk c of a row."""
    first = c * BLOCK_C
    count = tl.minimum(BLOCK_C, T - first)
    owner, begins, ends = 0, c == 0, c == CHUNKS - 1
    if table_ptr is not None:
        entry = table_ptr + (row.to(tl.int64) * CHUNKS + c) * 4
        first, count, owner = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
        begins, ends = tl.load(entry + 3) % 2 == 1, tl.load(entry + 3) >= 2
    return first, count, owner, begins, ends


@triton.jit
def _run(coded):
    return tl.where(coded < 0, -1 - coded, coded)


@triton.jit
def tokens_of(runs_ptr, table_ptr, row, first, count, T: tl.constexpr, BLOCK_C: tl.constexpr):
    """Returns (which tokens exist [C], which are valid)."""
    i = tl.arange(0, BLOCK_C)
    here = i < count
    if table_ptr is None and T % BLOCK_C == 0:
        here = tl.full([BLOCK_C], True, tl.int1)  # a constant, of which no mask is left
    valid = here
    if runs_ptr is not None:
        valid = valid & (tl.load(runs_ptr + row.to(tl.int64) * T + first + i, mask=here, other=-1) >= 0)
    return here, valid


@triton.jit
def runs_of(runs_ptr, table_ptr, row, first, count, T: tl.constexpr, BLOCK_C: tl.constexpr):
    """Returns (which tokens exist [C], which are valid, the document of each, that before the chunk, that at its end)."""
    i = tl.arange(0, BLOCK_C)
    here, valid = tokens_of(runs_ptr, table_ptr, row, first, count, T, BLOCK_C)
    run, before, last = tl.zeros([BLOCK_C], tl.int32), 0, 0
    if runs_ptr is not None:
        begin = runs_ptr + row.to(tl.int64) * T + first
        run = _run(tl.load(begin + i, mask=here, other=-1))
        before = _run(tl.load(begin - 1, mask=first > 0, other=0))
        last = _run(tl.load(begin + tl.maximum(count - 1, 0)))
    return here, valid, run, before, last


@triton.jit
def per_token(ptr, row, head, first, here, T: tl.constexpr, N: tl.constexpr, BLOCK_C: tl.constexpr):
    """Returns a chunk of one head of an array [B, N, T]; 0 past the chunk, and for None."""
    values = tl.zeros([BLOCK_C], tl.float32)
    if ptr is not None:
        begin = ptr + (row.to(tl.int64) * N + head) * T + first
        values = tl.load(begin + tl.arange(0, BLOCK_C), mask=here, other=0.0)
    return values


@triton.jit
def fades(
    a_ptr, row, head, first, count, here, run, before, last, T: tl.constexpr, N: tl.constexpr, BLOCK_C: tl.constexpr
):
    """Returns the decays of a state (until each token [C], from after each token to the end [C], over the chunk).

    They are 0 across the beginning of a document.
    """
    i = tl.arange(0, BLOCK_C)
    enters, leaves, whole = tl.full([BLOCK_C], 1.0, tl.float32), tl.full([BLOCK_C], 1.0, tl.float32), 1.0
    if a_ptr is not None:
        a = per_token(a_ptr, row, head, first, here, T, N, BLOCK_C)
        begin = a_ptr + (row.to(tl.int64) * N + head) * T + first
        later = tl.load(begin + i + 1, mask=i + 1 < count, other=0.0)
        enters, leaves = tl.exp(tl.cumsum(a, 0)), tl.exp(tl.cumsum(later, 0, reverse=True))
        whole = tl.exp(tl.sum(a, 0))
    enters, leaves = tl.where(run == before, enters, 0.0), tl.where(run == last, leaves, 0.0)
    return enters, leaves, tl.where(before == last, whole, 0.0)


@triton.jit
def store_fades(
    enters_ptr, leaves_ptr, whole_ptr, fades, row, head, c, first, here,
    T: tl.constexpr, N: tl.constexpr, CHUNKS: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Stores what `fades` returns, for kernels that walk over chunks: sums over tokens would delay each of their steps."""
    at = (row.to(tl.int64) * N + head) * T + first + tl.arange(0, BLOCK_C)
    tl.store(enters_ptr + at, fades[0], mask=here)
    tl.store(leaves_ptr + at, fades[1], mask=here)
    tl.store(whole_ptr + (row.to(tl.int64) * N + head) * CHUNKS + c, fades[2])


@triton.jit
def load_fades(
    enters_ptr, leaves_ptr, whole_ptr, row, head, c, first, here,
    T: tl.constexpr, N: tl.constexpr, CHUNKS: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Returns what `store_fades` has stored."""
    enters = per_token(enters_ptr, row, head, first, here, T, N, BLOCK_C)
    leaves = per_token(leaves_ptr, row, head, first, here, T, N, BLOCK_C)
    return enters, leaves, tl.load(whole_ptr + (row.to(tl.int64) * N + head) * CHUNKS + c)


@triton.jit
def channels_whole(whole_ptr, row, head, c, h, N: tl.constexpr, H: tl.constexpr, CHUNKS: tl.constexpr):
    """Returns the decay of each channel over a chunk [H, 1], of an array [B, N, CHUNKS, H]."""
    at = whole_ptr + ((row.to(tl.int64) * N + head) * CHUNKS + c) * H
    return tl.load(at + h, mask=h < H, other=0.0)[:, None]


@triton.jit
def load_walk_fades(
    enters_ptr, leaves_ptr, whole_ptr, row, head, c, first, here, h,
    T: tl.constexpr, N: tl.constexpr, H: tl.constexpr, CHUNKS: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Returns `load_fades`; without enters_ptr 1, 1 and the decay of each channel over the chunk [H, 1]."""
    if enters_ptr is not None:
        fading = load_fades(enters_ptr, leaves_ptr, whole_ptr, row, head, c, first, here, T, N, CHUNKS, BLOCK_C)
    else:
        ones = tl.full([BLOCK_C], 1.0, tl.float32)
        fading = (ones, ones, channels_whole(whole_ptr, row, head, c, h, N, H, CHUNKS))
    return fading


@triton.jit
def pairs(a_ptr, a, run, BLOCK_C: tl.constexpr):
    """Returns the decay from each token s to each t >= s, [t, s]; 0 for other pairs, and across documents.

    Args:
      a: the log decays [C] of a chunk, loaded early; not read if a_ptr is None.
    """
    t, s = tl.arange(0, BLOCK_C)[:, None], tl.arange(0, BLOCK_C)[None, :]
    decay = tl.full([BLOCK_C, BLOCK_C], 1.0, tl.float32)
    if a_ptr is not None:
        decay = tl.exp(tl.cumsum(tl.where(t > s, a[:, None], 0.0), 0))
    return tl.where((t >= s) & (run[:, None] == run[None, :]), decay, 0.0)


@triton.jit
def pairs_from(a_ptr, a, run, BLOCK_C: tl.constexpr):
    """Returns the transpose of `pairs`, [s, t]."""
    s, t = tl.arange(0, BLOCK_C)[:, None], tl.arange(0, BLOCK_C)[None, :]
    decay = tl.full([BLOCK_C, BLOCK_C], 1.0, tl.float32)
    if a_ptr is not None:
        decay = tl.exp(tl.cumsum(tl.where(t > s, a[None, :], 0.0), 1))
    return tl.where((t >= s) & (run[:, None] == run[None, :]), decay, 0.0)


@triton.jit
def interval_gradient(between, reading, BLOCK_C: tl.constexpr):
    """Returns the gradient of the log decay of each token u [C], of what passes it to the outputs of the chunk.

    Args:
      between: [t, s], what a decay from s to t is multiplied with; of it pairs s < u <= t pass u.
      reading: [t], the same for the decay until t: t >= u.
    """
    t, s = tl.arange(0, BLOCK_C)[:, None], tl.arange(0, BLOCK_C)[None, :]
    after = tl.cumsum(tl.where(t > s, between, 0.0), 0, reverse=True)
    passing = tl.sum(tl.where(t > s, after, 0.0), 1)
    return passing + tl.cumsum(reading, 0, reverse=True)


@triton.jit
def tokens_by_channels(ptr, row, first, head, T: tl.constexpr, K: tl.constexpr, D: tl.constexpr):
    """Returns a pointer to the first channel of a head of a chunk's first token, of an array [B, T, K, D]."""
    return ptr + (row.to(tl.int64) * T + first) * (K * D) + head * D


@triton.jit
def load_rows(begin, valid, d, K: tl.constexpr, D: tl.constexpr, BLOCK_C: tl.constexpr):
    """Returns channels d of the tokens of a chunk, [C, d]; 0 where a token is not valid."""
    i = tl.arange(0, BLOCK_C)
    mask = valid[:, None]
    if (d.shape[0] - 1) & D:
        mask = mask & (d < D)[None, :]
    return tl.load(begin + i[:, None] * (K * D) + d[None, :], mask=mask, other=0.0)


@triton.jit
def load_columns(begin, valid, d, K: tl.constexpr, D: tl.constexpr, BLOCK_C: tl.constexpr):
    """Returns the transpose of `load_rows`, [d, C]."""
    i = tl.arange(0, BLOCK_C)
    mask = valid[None, :]
    if (d.shape[0] - 1) & D:
        mask = mask & (d < D)[:, None]
    return tl.load(begin + i[None, :] * (K * D) + d[:, None], mask=mask, other=0.0)


@triton.jit
def store_rows(begin, tile, here, d, K: tl.constexpr, D: tl.constexpr, BLOCK_C: tl.constexpr):
    """Stores a tile [C, d], rounded to the array's dtype."""
    i = tl.arange(0, BLOCK_C)
    mask = here[:, None]
    if (d.shape[0] - 1) & D:
        mask = mask & (d < D)[None, :]
    tl.store(begin + i[:, None] * (K * D) + d[None, :], tile.to(begin.dtype.element_ty), mask=mask)


@triton.jit
def _state_at(ptr, index, h, v, H: tl.constexpr, Hv: tl.constexpr):
    """Returns pointers to a tile [h, v] of a state, of an array [..., H, Hv] whose leading dims are one index."""
    return ptr + index.to(tl.int64) * (H * Hv) + h[:, None] * Hv + v[None, :]


@triton.jit
def load_state(ptr, index, h, v, there, H: tl.constexpr, Hv: tl.constexpr):
    """Returns a tile [h, v] of a state of an array [..., H, Hv]; 0, without a read, if it is not `there`."""
    mask = (h < tl.where(there, H, 0))[:, None]
    if (v.shape[0] - 1) & Hv:
        mask = mask & (v < Hv)[None, :]
    return tl.load(_state_at(ptr, index, h, v, H, Hv), mask=mask, other=0.0)


@triton.jit
def store_state(ptr, index, h, v, state, wanted, H: tl.constexpr, Hv: tl.constexpr):
    """Stores a tile [h, v] of a state, rounded to the array's dtype; not if it is not `wanted`."""
    mask = (h < tl.where(wanted, H, 0))[:, None]
    if (v.shape[0] - 1) & Hv:
        mask = mask & (v < Hv)[None, :]
    tl.store(_state_at(ptr, index, h, v, H, Hv), state.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def square_at(ptr, index, BLOCK_C: tl.constexpr):
    """Returns pointers to a matrix of an array [..., C, C] whose leading dims are one index."""
    i = tl.arange(0, BLOCK_C)
    return ptr + index.to(tl.int64) * (BLOCK_C * BLOCK_C) + i[:, None] * BLOCK_C + i[None, :]
