"""Triton kernels that compose the maps of the parts of a row, which were walked at once, to the state before each part."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.engines.scan.triton_parts import load_state, store_state


@triton.jit
def scan_join_kernel(
    added_ptr,  # [B * N, SPLITS, SIZE]
    fade_ptr,  # [B * N, SPLITS, ROWS]
    starts_ptr,  # [B * N, SPLITS, SIZE]
    SPLITS: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,  # rows of a state that decay by themselves: 1 or H
    REVERSE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Composes the maps of the parts of a row to the state before each; from the last part on if REVERSE."""
    head = tl.program_id(0).to(tl.int64) * SPLITS
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    state = tl.zeros([BLOCK], tl.float32)
    for step in range(SPLITS):
        part = SPLITS - 1 - step if REVERSE else step
        tl.store(starts_ptr + (head + part) * SIZE + i, state, mask=i < SIZE)
        added = tl.load(added_ptr + (head + part) * SIZE + i, mask=i < SIZE, other=0.0)
        fade = tl.load(fade_ptr + (head + part) * ROWS + i // (SIZE // ROWS), mask=i < SIZE, other=0.0)
        state = fade * state + added


@triton.jit
def delta_join_kernel(
    maps_ptr,  # [B, N, SPLITS, H, WIDTH + H]
    added_ptr,  # [B, N, SPLITS, H, Hv] if REVERSE; None: the first columns of maps
    starts_ptr,  # [B, N, SPLITS, H, Hv]
    H: tl.constexpr,
    Hv: tl.constexpr,
    WIDTH: tl.constexpr,
    SPLITS: tl.constexpr,
    REVERSE: tl.constexpr,  # from the last part, by the transposes: the gradient of a state passes a part by them
    PRECISION: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Composes the maps S -> M S + added of the parts of a row to the state before each."""
    head = tl.program_id(0).to(tl.int64) * SPLITS
    h, v = tl.arange(0, BLOCK_H), tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    state = tl.zeros([BLOCK_H, BLOCK_V], tl.float32)
    for step in range(SPLITS):
        part = SPLITS - 1 - step if REVERSE else step
        store_state(starts_ptr, head + part, h, v, state, True, H, Hv)
        tl.debug_barrier()  # what other threads have stored is read below
        if added_ptr is None:
            state = load_state(maps_ptr, head + part, h, v, True, H, WIDTH + H)
        else:
            state = load_state(added_ptr, head + part, h, v, True, H, Hv)
        for start in range(0, H, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            at = maps_ptr + (head + part) * (H * (WIDTH + H)) + WIDTH
            at += k[None, :] * (WIDTH + H) + h[:, None] if REVERSE else h[:, None] * (WIDTH + H) + k[None, :]
            M = tl.load(at, mask=(h < H)[:, None] & (k < H)[None, :], other=0.0)
            old = load_state(starts_ptr, head + part, k, v, True, H, Hv)
            state = tl.dot(M, old, state, input_precision=PRECISION)
