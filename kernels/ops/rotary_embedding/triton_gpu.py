"""Rotary embedding on GPUs: a program rotates heads of queries and keys of its tokens, each read once and written
once."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from kernels.ops.rotary_embedding.angles import turns
from kernels.ops.rotary_embedding.contract import RotaryConfig, frequencies, op, pair_op, rotated_width, work
from kernels.toolchains.triton import triton_launch

# Elements per program. Threads with the same pairs of different heads compute the same sines, so few warps with many
# heads each minimise that.
ELEMENTS, ELEMENTS_OF_A_WARP = 4096, 2048
# The widest head: one head of a token must fit in the registers of a program.
WIDEST = 8192


@triton.jit
def _cos_sin(angle):
    """Returns (cos, sin) of float32 angles of any size: reduces them by multiples of a quarter turn in float64, and
    evaluates the polynomials of Cephes. The hardware's sine is accurate only up to pi."""
    turns = tl.floor(angle * 0.6366197723675814 + 0.5)
    angle64, quarter = angle.to(tl.float64), turns.to(tl.float64)
    # pi / 2 as the sum of two numbers that are exact in float32.
    rest = (angle64 - quarter * 1.57079637050628662109375 + quarter * 4.371138828673793e-08).to(tl.float32)
    z = rest * rest
    sin = ((-1.9515295891e-4 * z + 8.3321608736e-3) * z - 1.6666654611e-1) * z * rest + rest
    cos = ((2.443315711809948e-5 * z - 1.388731625493765e-3) * z + 4.166664568298827e-2) * z * z - 0.5 * z + 1.0
    quadrant = turns.to(tl.int32) & 3
    swapped = (quadrant & 1) == 1
    c, s = tl.where(swapped, sin, cos), tl.where(swapped, cos, sin)
    c = tl.where((quadrant == 1) | (quadrant == 2), -c, c)
    return c, tl.where(quadrant >= 2, -s, s)


@triton.jit
def _load(
    x_ptr,
    offsets,
    mask,
    H: tl.constexpr,
    WIDTH: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Returns the two entries of each pair, [tokens, heads, BLOCK_W], and the entries that are not rotated. `offsets` are
    those of the heads, [tokens, heads, 1]."""
    pair = tl.arange(0, BLOCK_W)[None, None, :]
    if INTERLEAVED:
        entry = tl.arange(0, 2 * BLOCK_W)[None, None, :]
        x = tl.load(x_ptr + offsets + entry, mask=mask & (entry < WIDTH), other=0.0)
        a, b = tl.split(tl.reshape(x, (x.shape[0], x.shape[1], BLOCK_W, 2)))
    else:
        inside = mask & (pair < WIDTH // 2)
        a = tl.load(x_ptr + offsets + pair, mask=inside, other=0.0)
        b = tl.load(x_ptr + offsets + WIDTH // 2 + pair, mask=inside, other=0.0)
    rest = a  # unused if all entries are rotated
    if WIDTH < H:
        entry = WIDTH + tl.arange(0, BLOCK_R)[None, None, :]
        rest = tl.load(x_ptr + offsets + entry, mask=mask & (entry < H), other=0.0)
    return a, b, rest


@triton.jit
def _store(
    out_ptr,
    offsets,
    mask,
    x,
    cos,
    sin,
    H: tl.constexpr,
    WIDTH: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    a, b = x[0].to(tl.float32), x[1].to(tl.float32)
    dtype = out_ptr.dtype.element_ty
    one, two = (a * cos - b * sin).to(dtype), (b * cos + a * sin).to(dtype)
    if INTERLEAVED:
        entry = tl.arange(0, 2 * BLOCK_W)[None, None, :]
        both = tl.reshape(tl.join(one, two), (one.shape[0], one.shape[1], 2 * BLOCK_W))
        tl.store(out_ptr + offsets + entry, both, mask=mask & (entry < WIDTH))
    else:
        pair = tl.arange(0, BLOCK_W)[None, None, :]
        inside = mask & (pair < WIDTH // 2)
        tl.store(out_ptr + offsets + pair, one, mask=inside)
        tl.store(out_ptr + offsets + WIDTH // 2 + pair, two, mask=inside)
    if WIDTH < H:
        entry = WIDTH + tl.arange(0, BLOCK_R)[None, None, :]
        tl.store(out_ptr + offsets + entry, x[2], mask=mask & (entry < H))


@triton.jit
def rotary_embedding_kernel(
    query_ptr,
    key_ptr,  # None for a single array
    positions_ptr,
    frequencies_ptr,  # [WIDTH / 2]
    fixed_ptr,  # [WIDTH / 2], frequencies in units of 2^-32 turns; None if no angle is exact
    rest_ptr,  # [WIDTH / 2], what these leave, in turns
    exponents_ptr,  # [WIDTH / 2], of XPos; None without
    query_out_ptr,
    key_out_ptr,
    M: tl.constexpr,  # tokens
    T: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    WIDTH: tl.constexpr,
    SHARED: tl.constexpr,  # one row of positions for the batch
    INTERLEAVED: tl.constexpr,
    FACTOR: tl.constexpr,
    CENTER: tl.constexpr,
    EXACT_FROM: tl.constexpr,
    BACK: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    tokens = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    inside = (tokens < M)[:, None, None]
    first = tokens.to(tl.int64)[:, None, None] * H
    # All loads are issued before any store.
    heads = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :, None]
    query_at, query_mask = first * N + heads * H, inside & (heads < N)
    query = _load(query_ptr, query_at, query_mask, H, WIDTH, INTERLEAVED, BLOCK_W, BLOCK_R)
    key, key_at, key_mask = query, query_at, query_mask
    if key_ptr is not None:
        key_heads = (tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K))[None, :, None]
        key_at, key_mask = first * K + key_heads * H, inside & (key_heads < K)
        key = _load(key_ptr, key_at, key_mask, H, WIDTH, INTERLEAVED, BLOCK_W, BLOCK_R)
    pair = tl.arange(0, BLOCK_W)
    row = tokens
    if SHARED:
        row = tokens % T
    index = tl.load(positions_ptr + row, mask=tokens < M, other=0)
    position = index.to(tl.float32)
    frequency = tl.load(frequencies_ptr + pair, mask=pair < WIDTH // 2, other=0.0)
    angle = position[:, None] * frequency[None, :]
    if fixed_ptr is not None:  # see angles.py
        fixed = tl.load(fixed_ptr + pair, mask=pair < WIDTH // 2, other=0)
        rest = tl.load(rest_ptr + pair, mask=pair < WIDTH // 2, other=0.0)
        index = index.to(tl.int32)
        part = (index[:, None] * fixed[None, :]).to(tl.float32) * 2.3283064365386963e-10  # 2^-32
        exact = (part + position[:, None] * rest[None, :]) * 6.283185307179586
        angle = tl.where(((index >= EXACT_FROM) | (index <= -EXACT_FROM))[:, None], exact, angle)
    cos, sin = _cos_sin(angle)
    cos, sin = (cos * FACTOR)[:, None, :], (sin * FACTOR)[:, None, :]
    if BACK:
        sin = -sin
    if exponents_ptr is not None:
        exponent = tl.load(exponents_ptr + pair, mask=pair < WIDTH // 2, other=0.0)
        power = ((position - CENTER)[:, None] * exponent[None, :])[:, None, :]
        scale = tl.exp(power)
        _store(
            query_out_ptr,
            query_at,
            query_mask,
            query,
            cos * scale,
            sin * scale,
            H,
            WIDTH,
            INTERLEAVED,
            BLOCK_W,
            BLOCK_R,
        )
        if key_ptr is not None:
            scale = tl.exp(-power)
            _store(
                key_out_ptr, key_at, key_mask, key, cos * scale, sin * scale, H, WIDTH, INTERLEAVED, BLOCK_W, BLOCK_R
            )
    else:
        _store(query_out_ptr, query_at, query_mask, query, cos, sin, H, WIDTH, INTERLEAVED, BLOCK_W, BLOCK_R)
        if key_ptr is not None:
            _store(key_out_ptr, key_at, key_mask, key, cos, sin, H, WIDTH, INTERLEAVED, BLOCK_W, BLOCK_R)


def _turned(query, key, positions, options, back, cfg, cost):
    """Returns (query rotated, key rotated or None)."""
    base, scaling, interleaved, rotary_dim, xpos, exact_from = options
    B, T, N, H = query.shape
    width = rotated_width(H, rotary_dim)
    angles, factor = frequencies(width, base, scaling)
    K = 1 if key is None else key.shape[2]
    chunks = triton.cdiv(N, cfg.block_heads)
    fixed, rest = (None, None) if exact_from is None else (jnp.asarray(x) for x in turns(angles))
    arrays = [query] if key is None else [query, key]
    unused: dict[str, Any] = {"key_out_ptr": None} if key is None else {}
    out = triton_launch(
        rotary_embedding_kernel,
        query,
        key,
        positions,
        jnp.asarray(angles, jnp.float32),
        fixed,
        rest,
        None if xpos is None else jnp.asarray(xpos.exponent(width), jnp.float32),
        out_shape=tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays),
        grid=(triton.cdiv(B * T, cfg.block_tokens), chunks),
        num_warps=cfg.num_warps,
        work=cost,
        M=B * T,
        T=T,
        N=N,
        K=K,
        H=H,
        WIDTH=width,
        SHARED=positions.shape[0] < B,
        INTERLEAVED=interleaved,
        FACTOR=factor,
        CENTER=0.0 if xpos is None else float(xpos.center),
        EXACT_FROM=exact_from or 0,
        BACK=back,
        BLOCK_T=cfg.block_tokens,
        BLOCK_N=cfg.block_heads,
        BLOCK_K=triton.next_power_of_2(triton.cdiv(K, chunks)),
        BLOCK_W=triton.next_power_of_2(width // 2),
        BLOCK_R=triton.next_power_of_2(max(1, H - width)),
        **unused,
    )
    return out[0], None if key is None else out[1]


def _block_heads(N: int, H: int) -> int:
    """Returns the largest power of two of heads that divides N and is at most a tile; else one that covers N."""
    most = max(1, ELEMENTS // triton.next_power_of_2(H))
    whole = min(most, N & -N)
    return whole if N // whole <= 8 else min(most, triton.next_power_of_2(N))


def _shape(call):
    return call.dims["N"], call.dims.get("K", 0), call.dims["H"]


def _config(call, heads: int, elements: int, more: int = 1) -> RotaryConfig:
    N, K, H = _shape(call)
    chunks = triton.cdiv(N, heads)
    of_a_token = (heads + triton.next_power_of_2(triton.cdiv(K, chunks)) * (K > 0)) * triton.next_power_of_2(H)
    tokens = min(max(1, elements // of_a_token), triton.next_power_of_2(call.dims["B"] * call.dims["T"]))
    tokens = 1 << (tokens.bit_length() - 1)
    warps = max(1, min(16, triton.next_power_of_2(tokens * heads * H) // ELEMENTS_OF_A_WARP))
    return RotaryConfig(tokens, heads, more * warps)


def heuristic(call, platform):
    N, _, H = _shape(call)
    return _config(call, _block_heads(N, H), ELEMENTS)


def candidates(call):
    N, _, H = _shape(call)
    best = _block_heads(N, H)
    configs = [heuristic(call, "cuda")]
    for heads in dict.fromkeys((best, max(1, best // 2), max(1, best // 4))):
        for elements in (ELEMENTS // 2, ELEMENTS, 2 * ELEMENTS):
            configs += [_config(call, heads, elements, more) for more in (1, 2)]
    return list(dict.fromkeys(configs))


def rejects(call):
    _, _, H = _shape(call)
    if call.x.size == 0 or (call.arguments.get("key") is not None and call.key.size == 0):
        return "an array has no elements"
    if H > WIDEST:
        return f"H = {H} is more than {WIDEST}: a head must fit in the registers of a program"
    return None


def forward(x, positions, base, scaling, interleaved, rotary_dim, xpos, exact_from, cfg):
    options = base, scaling, interleaved, rotary_dim, xpos, exact_from
    return _turned(x, None, positions, options, False, cfg, work(op.bind(x, positions, rotary_dim=rotary_dim))[0])[0]


def backward(saved, x, positions, base, scaling, interleaved, rotary_dim, xpos, exact_from, cfg):
    options = base, scaling, interleaved, rotary_dim, xpos, exact_from
    cost = work(op.bind(x, positions, rotary_dim=rotary_dim))[1]
    return {"x": _turned(saved.d_out, None, positions, options, True, cfg, cost)[0]}


def forward_pair(x, key, positions, base, scaling, interleaved, rotary_dim, xpos, exact_from, cfg):
    options = base, scaling, interleaved, rotary_dim, xpos, exact_from
    cost = work(pair_op.bind(x, key, positions, rotary_dim=rotary_dim))[0]
    return _turned(x, key, positions, options, False, cfg, cost)


def backward_pair(saved, x, key, positions, base, scaling, interleaved, rotary_dim, xpos, exact_from, cfg):
    options = base, scaling, interleaved, rotary_dim, xpos, exact_from
    cost = work(pair_op.bind(x, key, positions, rotary_dim=rotary_dim))[1]
    d_query, d_key = _turned(saved.d_query, saved.d_key, positions, options, True, cfg, cost)
    return {"x": d_query, "key": d_key}


FACTS: Any = {
    "platforms": {"cuda"},
    "dtypes": {"float32", "bfloat16", "float16"},
    "rejects": rejects,
    "heuristic": heuristic,
    "candidates": candidates,
}
op.register(forward, backward, **FACTS)
pair_op.register(forward_pair, backward_pair, **FACTS)
