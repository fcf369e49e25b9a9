"""Triton kernel of both walks of a delta rule's backward in one launch: neither reads what the other writes, and a walk waits
for memory more than it computes, so each fills the time of the other."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.engines.scan.triton_delta import delta_reverse_kernel, delta_walk_kernel


@triton.jit
def delta_both_kernel(
    q_ptr,  # arguments as in the two kernels
    k_ptr,
    k_writes_ptr,
    v_ptr,
    pairs_ptr,
    solve_ptr,
    beta_ptr,
    enters_ptr,
    leaves_ptr,
    whole_ptr,
    runs_ptr,
    table_ptr,
    entries_ptr,
    d_out_ptr,
    d_exits_ptr,
    written_ptr,
    states_ptr,
    du_ptr,
    d_states_ptr,
    d_entries_ptr,
    T: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    Hv: tl.constexpr,
    G: tl.constexpr,
    CHUNKS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Rows are one part each. The third dim of the grid is the direction, so that a multiprocessor gets one program of each."""
    SPLITS: tl.constexpr = tl.constexpr(1)
    if tl.program_id(2) == 0:
        delta_reverse_kernel(
            q_ptr, k_ptr, k_writes_ptr, pairs_ptr, solve_ptr, beta_ptr, enters_ptr, leaves_ptr, whole_ptr, runs_ptr, table_ptr,
            d_out_ptr, d_exits_ptr, None, du_ptr, d_states_ptr, d_entries_ptr, None,
            T, N, K, H, Hv, G, CHUNKS, SPLITS, SCALE, PRECISION, BLOCK_C, BLOCK_H, BLOCK_V,
        )  # fmt: skip
    else:
        delta_walk_kernel(
            None, k_ptr, k_writes_ptr, v_ptr, None, solve_ptr, beta_ptr, enters_ptr, leaves_ptr, whole_ptr, runs_ptr, table_ptr,
            entries_ptr, None, None, written_ptr, states_ptr, None, None,
            T, N, K, H, Hv, G, CHUNKS, SPLITS, COLUMNS, SCALE, PRECISION, BLOCK_C, BLOCK_H, BLOCK_V,
        )  # fmt: skip
