"""Kernels of the causal convolution on GPUs. A program walks over the tokens of some channels, a few rows loaded at a time, and
keeps the window in registers: each array is read or written once.

Rows are tokens, or with a table (`conv_rows.Rows`) what it lists.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _weights(weight_ptr, bias_ptr, cols, F: tl.constexpr, W: tl.constexpr, BLOCK_F: tl.constexpr):
    """Returns the taps of the channels, oldest first, and their bias, float32."""
    taps = ()
    for j in tl.static_range(W):
        taps = taps + (tl.load(weight_ptr + cols * W + j, mask=cols < F, other=0.0).to(tl.float32),)
    bias = tl.zeros([BLOCK_F], tl.float32)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + cols, mask=cols < F, other=0.0).to(tl.float32)
    return taps, bias


@triton.jit
def _place(r, source_ptr, seen_ptr, R: tl.constexpr):
    """Returns where row r is (source) and how many rows of its segment precede it (seen), or -1 if it counts for nothing."""
    source, seen = r, tl.where(r < R, r, -1)
    if source_ptr is not None:
        source = tl.load(source_ptr + r, mask=(r >= 0) & (r < R), other=0)
        seen = tl.load(seen_ptr + r, mask=(r >= 0) & (r < R), other=-1)
    return source, seen


@triton.jit
def _at(source, cols, F: tl.constexpr):
    """Returns where the channels of a row are, in 64 bits."""
    return source.to(tl.int64) * F + cols


@triton.jit
def _token(x_ptr, source, inside, cols, F: tl.constexpr):
    """Returns the channels of a token in their own dtype, 0 unless it is inside and no entry of a state."""
    return tl.load(x_ptr + _at(source, cols, F), mask=inside & (source >= 0) & (cols < F), other=0.0)


@triton.jit
def _input(x_ptr, state_ptr, source, inside, cols, F: tl.constexpr, MIXED: tl.constexpr):
    """Returns a row of the input: in the dtype of x, or float32 if it may be an entry of a state."""
    x = _token(x_ptr, source, inside, cols, F)
    if MIXED:
        there = inside & (source < 0) & (cols < F)
        entry = tl.load(state_ptr + _at(-1 - source, cols, F), mask=there, other=0.0)
        x = tl.where(source < 0, entry, x.to(tl.float32))
    return x


@triton.jit
def _window(x_ptr, state_ptr, source_ptr, seen_ptr, first, cols, F: tl.constexpr, R: tl.constexpr, W: tl.constexpr):
    """Returns the W - 1 rows before row `first`, oldest first, float32; those before the first row are the state."""
    window = ()
    for j in tl.static_range(W - 1):
        r = first - (W - 1) + j
        source, inside = r, r >= 0
        if source_ptr is not None:
            source, seen = _place(r, source_ptr, seen_ptr, R)
        x = _token(x_ptr, source, inside, cols, F).to(tl.float32)
        if state_ptr is not None:
            entry, there = -1 - source, inside & (source < 0)
            if source_ptr is None:
                entry, there = r + W - 1, r < 0
            x += tl.load(state_ptr + _at(entry, cols, F), mask=there & (cols < F), other=0.0)
        window = window + (x,)
    return window


@triton.jit
def _of_segment(window, seen, W: tl.constexpr, TABLE: tl.constexpr):
    """Returns the window before a row with zeros for other segments' rows."""
    kept = window
    if TABLE:
        kept = ()
        for j in tl.static_range(W - 1):
            kept = kept + (tl.where(seen >= W - 1 - j, window[j], 0.0),)
    return kept


@triton.jit
def _sum(window, x, taps, bias, W: tl.constexpr):
    """Returns the convolution at a row: bias plus the products of the taps with the window before it and the row."""
    z = bias
    for j in tl.static_range(W - 1):
        z += taps[j] * window[j]
    return z + taps[W - 1] * x


@triton.jit
def conv_fwd_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    state_ptr,  # [B, ENTRIES, F] float32, or None
    source_ptr,  # [B, R], or None: rows are tokens
    seen_ptr,
    out_ptr,
    T: tl.constexpr,
    F: tl.constexpr,
    W: tl.constexpr,
    R: tl.constexpr,
    ENTRIES: tl.constexpr,
    SPAN: tl.constexpr,  # rows of a program
    SILU: tl.constexpr,
    TABLE: tl.constexpr,  # whether rows are not simply tokens
    MIXED: tl.constexpr,  # and may be entries of a state
    TOKENS: tl.constexpr,  # rows that are loaded at once
    BLOCK_F: tl.constexpr,
):
    COLUMNS: tl.constexpr = (F + BLOCK_F - 1) // BLOCK_F
    SPANS: tl.constexpr = (R + SPAN - 1) // SPAN
    part = tl.program_id(0) // COLUMNS
    cols = tl.program_id(0) % COLUMNS * BLOCK_F + tl.arange(0, BLOCK_F)
    row, first = (part // SPANS).to(tl.int64), part % SPANS * SPAN
    x_ptr += row * T * F
    out_ptr += row * T * F
    if state_ptr is not None:
        state_ptr += row * ENTRIES * F
    if source_ptr is not None:
        source_ptr += row * R
        seen_ptr += row * R
    taps, bias = _weights(weight_ptr, bias_ptr, cols, F, W, BLOCK_F)
    window = _window(x_ptr, state_ptr, source_ptr, seen_ptr, first, cols, F, R, W)
    for start in range(0, tl.minimum(SPAN, R - first), TOKENS):
        xs, sources, counts = (), (), ()
        for i in tl.static_range(TOKENS):
            source, seen = _place(first + start + i, source_ptr, seen_ptr, R)
            xs = xs + (_input(x_ptr, state_ptr, source, seen >= 0, cols, F, MIXED),)
            sources, counts = sources + (source,), counts + (seen,)
        for i in tl.static_range(TOKENS):
            x, seen = xs[i].to(tl.float32), counts[i]
            window = _of_segment(window, seen, W, TABLE)
            out = _sum(window, x, taps, bias, W)
            if SILU:
                out = out / (1.0 + tl.exp(-out))
            if TABLE:
                out = tl.where(seen >= 0, out, 0.0)
            there = (first + start + i < R) & (sources[i] >= 0) & (cols < F)
            tl.store(out_ptr + _at(sources[i], cols, F), out.to(out_ptr.dtype.element_ty), mask=there)
            window = window[1:] + (x,)


@triton.jit
def _through(g, window, x, taps, bias, W: tl.constexpr, SILU: tl.constexpr):
    """Returns the gradient of a row's sum, given that of its output."""
    if SILU:
        z = _sum(window, x, taps, bias, W)
        s = 1.0 / (1.0 + tl.exp(-z))
        g = g * (s * (1.0 + z * (1.0 - s)))
    return g


@triton.jit
def _owed(pending, g, seen, taps, W: tl.constexpr, TABLE: tl.constexpr):
    """Returns the gradients of W rows, the oldest first, with what the row that is the last of them adds."""
    owed = ()
    for j in tl.static_range(W - 1):
        more = taps[j] * g
        if TABLE:
            more = tl.where(seen >= W - 1 - j, more, 0.0)
        owed = owed + (pending[j] + more,)
    return owed + (taps[W - 1] * g,)


@triton.jit
def _store_gradient(
    dx_ptr,
    d_state_ptr,
    d_final_ptr,
    source_ptr,
    seen_ptr,
    leaves_ptr,
    r,
    first,
    dx,
    cols,
    F: tl.constexpr,
    R: tl.constexpr,
    W: tl.constexpr,
):
    """Stores the gradient of row r, of a token or of an entry of the initial state, if it is one of the program's."""
    mine = (r >= first) & (r < R)
    entry, leaves = r + W - 1, r - (R - (W - 1))
    at, is_entry = r, (r < 0) & (first == 0)
    if source_ptr is not None:
        at, seen = _place(r, source_ptr, seen_ptr, R)
        leaves = tl.load(leaves_ptr + r, mask=mine, other=-1)
        entry, is_entry = -1 - at, mine & (at < 0)
    left = (leaves >= 0) & (mine | is_entry)
    dx += tl.load(d_final_ptr + _at(leaves, cols, F), mask=left & (cols < F), other=0.0)
    is_token = mine & (at >= 0)
    tl.store(dx_ptr + _at(at, cols, F), dx.to(dx_ptr.dtype.element_ty), mask=is_token & (cols < F))
    if d_state_ptr is not None:
        if is_entry:
            tl.store(d_state_ptr + _at(entry, cols, F), dx, mask=cols < F)


@triton.jit
def conv_bwd_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    state_ptr,
    source_ptr,
    seen_ptr,
    leaves_ptr,
    d_out_ptr,
    d_final_ptr,  # [B, ENTRIES, F] float32
    dx_ptr,
    d_weight_ptr,  # [B * SPANS, W, F] float32: a partial sum for each program
    d_bias_ptr,  # [B * SPANS, F] float32, or None
    d_state_ptr,  # [B, ENTRIES, F] float32, or None
    T: tl.constexpr,
    F: tl.constexpr,
    W: tl.constexpr,
    R: tl.constexpr,
    ENTRIES: tl.constexpr,
    SPAN: tl.constexpr,
    SILU: tl.constexpr,
    TABLE: tl.constexpr,
    MIXED: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    """A row's gradient is complete, and stored, W - 1 rows later; those of the program's last rows need rows after them."""
    COLUMNS: tl.constexpr = (F + BLOCK_F - 1) // BLOCK_F
    SPANS: tl.constexpr = (R + SPAN - 1) // SPAN
    part = tl.program_id(0) // COLUMNS
    cols = tl.program_id(0) % COLUMNS * BLOCK_F + tl.arange(0, BLOCK_F)
    row, first = (part // SPANS).to(tl.int64), part % SPANS * SPAN
    rows = tl.minimum(SPAN, R - first)
    x_ptr += row * T * F
    d_out_ptr += row * T * F
    dx_ptr += row * T * F
    d_final_ptr += row * ENTRIES * F
    if state_ptr is not None:
        state_ptr += row * ENTRIES * F
        d_state_ptr += row * ENTRIES * F
    if source_ptr is not None:
        source_ptr += row * R
        seen_ptr += row * R
        leaves_ptr += row * R
    taps, bias = _weights(weight_ptr, bias_ptr, cols, F, W, BLOCK_F)
    window = _window(x_ptr, state_ptr, source_ptr, seen_ptr, first, cols, F, R, W)
    pending, d_taps, d_bias = (), (), tl.zeros([BLOCK_F], tl.float32)
    for _ in tl.static_range(W - 1):
        pending = pending + (tl.zeros([BLOCK_F], tl.float32),)
    for _ in tl.static_range(W):
        d_taps = d_taps + (tl.zeros([BLOCK_F], tl.float32),)
    for start in range(0, rows, TOKENS):
        xs, gs, counts = (), (), ()
        for i in tl.static_range(TOKENS):
            source, seen = _place(first + start + i, source_ptr, seen_ptr, R)
            xs = xs + (_input(x_ptr, state_ptr, source, seen >= 0, cols, F, MIXED),)
            gs = gs + (_token(d_out_ptr, source, seen >= 0, cols, F),)
            counts = counts + (seen,)
        for i in tl.static_range(TOKENS):
            x, seen = xs[i].to(tl.float32), counts[i]
            window = _of_segment(window, seen, W, TABLE)
            g = _through(gs[i].to(tl.float32), window, x, taps, bias, W, SILU)
            sums = ()
            for j in tl.static_range(W - 1):
                sums = sums + (d_taps[j] + g * window[j],)
            d_taps = sums + (d_taps[W - 1] + g * x,)
            d_bias += g
            owed = _owed(pending, g, seen, taps, W, TABLE)
            _store_gradient(
                dx_ptr,
                d_state_ptr,
                d_final_ptr,
                source_ptr,
                seen_ptr,
                leaves_ptr,
                first + start + i - (W - 1),
                first,
                owed[0],
                cols,
                F,
                R,
                W,
            )
            window, pending = window[1:] + (x,), owed[1:]
    end = first + (rows + TOKENS - 1) // TOKENS * TOKENS
    xs, gs, counts = (), (), ()
    for i in tl.static_range(W - 1):
        source, seen = _place(end + i, source_ptr, seen_ptr, R)
        xs = xs + (_input(x_ptr, state_ptr, source, seen >= 0, cols, F, MIXED),)
        gs = gs + (_token(d_out_ptr, source, seen >= 0, cols, F),)
        counts = counts + (seen,)
    for i in tl.static_range(W - 1):
        x, seen = xs[i].to(tl.float32), counts[i]
        window = _of_segment(window, seen, W, TABLE)
        g = _through(gs[i].to(tl.float32), window, x, taps, bias, W, SILU)
        owed = _owed(pending, g, seen, taps, W, TABLE)
        _store_gradient(
            dx_ptr,
            d_state_ptr,
            d_final_ptr,
            source_ptr,
            seen_ptr,
            leaves_ptr,
            end + i - (W - 1),
            first,
            owed[0],
            cols,
            F,
            R,
            W,
        )
        window, pending = window[1:] + (x,), owed[1:]
    for j in tl.static_range(W):
        tl.store(d_weight_ptr + _at(part * W + j, cols, F), d_taps[j], mask=cols < F)
    if d_bias_ptr is not None:
        tl.store(d_bias_ptr + _at(part, cols, F), d_bias, mask=cols < F)
