"""Triton kernels of one token of an LSTM, all rows at once: a product with `weight_hh`, and the cell in its registers.

A program has the four gates of BLOCK_F hidden units of BLOCK_B rows. A launch is one token, as a token reads all units of the
one before; the weights, 8 MB for 1,024 units, stay in the L2 cache from launch to launch. The number of the token is in memory,
where the launch before wrote it, so that one kernel is all of a loop.
"""

from __future__ import annotations

import triton
import triton.language as tl

GOES_ON, BEGINS, PADDING = tl.constexpr(0), tl.constexpr(1), tl.constexpr(-1)  # codes of tokens


@triton.jit
def _tanh(x):
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit
def lstm_fwd_kernel(
    step_ptr,  # int32 [1]: the token
    of_inputs_ptr,  # [T, B, 4 F] float32: the gates of the inputs, with all biases
    weight_ptr,  # [4 F, F]
    codes_ptr,  # int32 [T, B], or None: all go on
    hidden_ptr,  # [T + 1, B, F]: the hidden state before each token and after the last, read and written
    cells_ptr,  # [T + 1, B, F] float32, likewise
    last_ptr,  # [B, F] float32: the hidden state after the token, as it is not rounded
    next_ptr,  # int32 [1]: the token after it
    T: tl.constexpr,
    B: tl.constexpr,
    F: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    t = tl.load(step_ptr).to(tl.int64)
    b, f = tl.program_id(1) * BLOCK_B + tl.arange(0, BLOCK_B), tl.program_id(0) * BLOCK_F + tl.arange(0, BLOCK_F)
    row, here = t * B + b, (b < B)[:, None] & (f < F)[None, :]
    goes_on, code = b < B, tl.full([BLOCK_B], GOES_ON, tl.int32)
    if codes_ptr is not None:
        code = tl.load(codes_ptr + row, mask=b < B, other=PADDING)
        goes_on &= code != BEGINS
    i, j = tl.zeros([BLOCK_B, BLOCK_F], tl.float32), tl.zeros([BLOCK_B, BLOCK_F], tl.float32)
    g, o = tl.zeros([BLOCK_B, BLOCK_F], tl.float32), tl.zeros([BLOCK_B, BLOCK_F], tl.float32)
    for start in range(0, F, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        h = tl.load(hidden_ptr + row[:, None] * F + k[None, :], mask=goes_on[:, None] & (k < F)[None, :], other=0.0)
        at, inside = weight_ptr + f[None, :] * F + k[:, None], (f < F)[None, :] & (k < F)[:, None]
        i = tl.dot(h, tl.load(at, mask=inside, other=0.0), i)
        j = tl.dot(h, tl.load(at + F * F, mask=inside, other=0.0), j)
        g = tl.dot(h, tl.load(at + 2 * F * F, mask=inside, other=0.0), g)
        o = tl.dot(h, tl.load(at + 3 * F * F, mask=inside, other=0.0), o)
    x = of_inputs_ptr + row[:, None] * (4 * F) + f[None, :]
    i = tl.sigmoid(i + tl.load(x, mask=here, other=0.0))
    j = tl.sigmoid(j + tl.load(x + F, mask=here, other=0.0))
    g = _tanh(g + tl.load(x + 2 * F, mask=here, other=0.0))
    o = tl.sigmoid(o + tl.load(x + 3 * F, mask=here, other=0.0))
    at, own = row[:, None] * F + f[None, :], b[:, None] * F + f[None, :]
    old = tl.load(cells_ptr + at, mask=here, other=0.0)
    c = j * tl.where(goes_on[:, None], old, 0.0) + i * g
    h = o * _tanh(c)
    if codes_ptr is not None:  # padding leaves the state as it is
        counts = (code != PADDING)[:, None]
        c, h = tl.where(counts, c, old), tl.where(counts, h, tl.load(last_ptr + own, mask=here, other=0.0))
    tl.store(cells_ptr + at + B * F, c, mask=here)
    tl.store(hidden_ptr + at + B * F, h.to(hidden_ptr.dtype.element_ty), mask=here)
    tl.store(last_ptr + own, h, mask=here)
    if tl.program_id(0) + tl.program_id(1) == 0:
        tl.store(next_ptr, (t + 1).to(tl.int32))


@triton.jit
def lstm_bwd_kernel(
    step_ptr,  # int32 [1]: the token
    gates_ptr,  # [T, B, 4 F] float32: the gates, before they are activated
    weight_ptr,  # [F, 4 F]: `weight_hh` transposed
    cells_ptr,  # [T + 1, B, F] float32, as the forward wrote them
    codes_ptr,
    d_out_ptr,  # [T, B, F]
    d_gates_ptr,  # [T + 1, B, 4 F]: gradients of the gates; the token after the last has zeros. Read and written
    d_hidden_ptr,  # [B, F] float32: gradients of the hidden state after the token by what is no product. Read and written
    d_cell_ptr,  # [B, F] float32: of the cell state. Read and written
    next_ptr,  # int32 [1]: the token before it
    T: tl.constexpr,
    B: tl.constexpr,
    F: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    t = tl.load(step_ptr).to(tl.int64)
    b, f = tl.program_id(1) * BLOCK_B + tl.arange(0, BLOCK_B), tl.program_id(0) * BLOCK_F + tl.arange(0, BLOCK_F)
    row, here = t * B + b, (b < B)[:, None] & (f < F)[None, :]
    d_gates = d_gates_ptr + row[:, None] * (4 * F)
    followed, code = b < B, tl.full([BLOCK_B], GOES_ON, tl.int32)
    if codes_ptr is not None:  # a token that begins a document has no gradient for the state before it
        code = tl.load(codes_ptr + row, mask=b < B, other=PADDING)
        followed &= tl.load(codes_ptr + row + B, mask=(b < B) & (t + 1 < T), other=GOES_ON) != BEGINS
    d_h = tl.zeros([BLOCK_B, BLOCK_F], tl.float32)
    for start in range(0, 4 * F, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        d = tl.load(d_gates + B * 4 * F + k[None, :], mask=followed[:, None] & (k < 4 * F)[None, :], other=0.0)
        weight = tl.load(
            weight_ptr + f[None, :] * (4 * F) + k[:, None], mask=(f < F)[None, :] & (k < 4 * F)[:, None], other=0.0
        )
        d_h = tl.dot(d, weight, d_h)
    at, own = row[:, None] * F + f[None, :], b[:, None] * F + f[None, :]
    d_h += tl.load(d_hidden_ptr + own, mask=here, other=0.0)
    d_c = tl.load(d_cell_ptr + own, mask=here, other=0.0)
    x = gates_ptr + row[:, None] * (4 * F) + f[None, :]
    i, j = tl.sigmoid(tl.load(x, mask=here, other=0.0)), tl.sigmoid(tl.load(x + F, mask=here, other=0.0))
    g, o = _tanh(tl.load(x + 2 * F, mask=here, other=0.0)), tl.sigmoid(tl.load(x + 3 * F, mask=here, other=0.0))
    old, c = tl.load(cells_ptr + at, mask=here, other=0.0), _tanh(tl.load(cells_ptr + at + B * F, mask=here, other=0.0))
    if codes_ptr is not None:
        old = tl.where((code == BEGINS)[:, None], 0.0, old)
    d_out = d_h + tl.load(d_out_ptr + at, mask=here, other=0.0).to(tl.float32)
    d_o = d_out * c * o * (1.0 - o)
    d_cell = d_c + d_out * o * (1.0 - c * c)
    d_i, d_j, d_g = d_cell * g * i * (1.0 - i), d_cell * old * j * (1.0 - j), d_cell * i * (1.0 - g * g)
    d_before, passes = d_cell * j, tl.zeros([BLOCK_B, BLOCK_F], tl.float32)
    if codes_ptr is not None:
        counts = (code != PADDING)[:, None]
        d_i, d_j = tl.where(counts, d_i, 0.0), tl.where(counts, d_j, 0.0)
        d_g, d_o = tl.where(counts, d_g, 0.0), tl.where(counts, d_o, 0.0)
        d_before = tl.where(counts, tl.where((code == BEGINS)[:, None], 0.0, d_before), d_c)
        passes = tl.where(counts, 0.0, d_h)
    d_gates += f[None, :]
    dtype = d_gates_ptr.dtype.element_ty
    tl.store(d_gates, d_i.to(dtype), mask=here)
    tl.store(d_gates + F, d_j.to(dtype), mask=here)
    tl.store(d_gates + 2 * F, d_g.to(dtype), mask=here)
    tl.store(d_gates + 3 * F, d_o.to(dtype), mask=here)
    tl.store(d_hidden_ptr + own, passes, mask=here)
    tl.store(d_cell_ptr + own, d_before, mask=here)
    if tl.program_id(0) + tl.program_id(1) == 0:
        tl.store(next_ptr, (t - 1).to(tl.int32))
