"""The decays of chunks, for walks that compute the weights of pairs themselves: sums of log decays are integers there, whose
differences lose nothing."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.engines.scan.triton_parts import chunk_of, fades, per_token, runs_of, store_fades


@triton.jit
def sums_of(a, run, before, BLOCK_C: tl.constexpr):
    """Returns the sums of log decays [C] from the start of a chunk, int32, in units of 2^-16: the difference of two is the sum
    of those between them, exact but for one rounding of each, however much has decayed before.

    A log decay counts as -120 at least, whose exponential is 0 in float32; so does the beginning of a document, on top of its
    own, so that no pair has a weight across it.

    Args:
      a: log decays, 0 for padding.
      run: the document of each token; before: that before the chunk.
    """
    a = tl.minimum(tl.maximum(a, -120.0), 120.0)
    # Multiples of 1/64, whose sums are exact, and a rest, whose sums stay small.
    coarse = tl.floor(a * 64.0 + 0.5)
    rest = tl.cumsum(a - coarse * 0.015625, 0)
    total = tl.cumsum(coarse.to(tl.int32), 0) - 7680 * (run - before)
    return total * 1024 + tl.floor(rest * 65536.0 + 0.5).to(tl.int32)


@triton.jit
def fades_kernel(
    a_ptr,  # [B, N, T] log decays, or None
    runs_ptr,
    sums_ptr,  # int32 [B, N, T]: what `sums_of` returns
    enters_ptr,  # [B, N, T] float32, as leaves: what `fades` returns
    leaves_ptr,
    whole_ptr,  # [B, N, CHUNKS] float32
    T: tl.constexpr,
    N: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """The decays of one chunk and head, for walks that compute pairs themselves."""
    c, head = tl.program_id(0) % CHUNKS, tl.program_id(0) // CHUNKS
    row, n = head // N, head % N
    first, count, owner, begins, ends = chunk_of(None, row, c, T, CHUNKS, BLOCK_C)
    here, valid, run, before, last = runs_of(runs_ptr, None, row, first, count, T, BLOCK_C)
    fading = fades(a_ptr, row, n, first, count, here, run, before, last, T, N, BLOCK_C)
    store_fades(enters_ptr, leaves_ptr, whole_ptr, fading, row, n, c, first, here, T, N, CHUNKS, BLOCK_C)
    a = per_token(a_ptr, row, n, first, here, T, N, BLOCK_C)
    at = (row.to(tl.int64) * N + n) * T + first + tl.arange(0, BLOCK_C)
    tl.store(sums_ptr + at, sums_of(a, run, before, BLOCK_C), mask=here)
