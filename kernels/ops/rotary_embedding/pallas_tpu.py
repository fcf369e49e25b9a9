"""Rotary embedding on TPUs: blocks of tokens with all their heads in VMEM, each array read once and written once."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from kernels.ops.rotary_embedding.angles import exact_angle, is_far, turns
from kernels.ops.rotary_embedding.contract import RotaryConfig, frequencies, op, pair_op, rotated_width, work
from kernels.toolchains.pallas import pallas_launch

# Memory for a kernel's blocks and temporaries. The smallest default limit of a chip is 16 MiB.
VMEM_BUDGET = 10 * 2**20
MOST_TOKENS = 256


def rotary_embedding_kernel(positions_ref, columns_ref, fixed_ref, swap_ref, *refs, center, has_xpos, exact_from, back):
    index = positions_ref[0]  # [tokens, 1]
    position = index.astype(jnp.float32)
    angle = position * columns_ref[0:1, :]
    if exact_from is not None:
        exact = exact_angle(index, fixed_ref[...], columns_ref[4:5, :])
        angle = jnp.where(is_far(index.astype(jnp.int32), exact_from), exact, angle)
    cos_factor, sign = columns_ref[1:2, :], columns_ref[2:3, :]
    cos, sin = jnp.cos(angle) * cos_factor, jnp.sin(angle) * (-sign if back else sign)
    power = (position - center) * columns_ref[3:4, :] if has_xpos else None
    half = len(refs) // 2
    for i, (x_ref, out_ref) in enumerate(zip(refs[:half], refs[half:], strict=True)):
        c, s = cos, sin
        if power is not None:
            scale = jnp.exp(power if i == 0 else -power)
            c, s = c * scale, s * scale
        for n in range(x_ref.shape[1]):
            x = x_ref[0, n]
            # Swaps the entries of each pair by a product with a permutation: exact, for any width and layout.
            highest = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
            other = jnp.dot(x, swap_ref[...], precision=highest, preferred_element_type=jnp.float32)
            out_ref[0, n] = (x.astype(jnp.float32) * c + other * s).astype(out_ref.dtype)


def _columns(H, width, base, scaling, interleaved, xpos):
    """Returns, for each entry of a head, [5, H] float32: the frequency, the factor of cos, that of sin with its sign,
    the exponent of XPos, and what the fixed-point frequency leaves; that frequency, int32 [1, H]; and the permutation
    that swaps the entries of each pair, [H, H]."""
    angles, factor = frequencies(width, base, scaling)
    pair, entry = np.arange(width // 2), np.arange(H)
    one, two = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + width // 2)
    columns, fixed, other = np.zeros((5, H)), np.zeros((1, H), np.int32), entry.copy()
    other[one], other[two] = two, one
    columns[1] = np.where(entry < width, factor, 1.0)
    columns[2, one], columns[2, two] = -factor, factor
    for entries in (one, two):
        columns[0, entries] = angles
        columns[3, entries] = 0.0 if xpos is None else xpos.exponent(width)
        fixed[0, entries], columns[4, entries] = turns(angles)
    return columns.astype(np.float32), fixed, np.eye(H)[:, other]


def _turned(arrays, positions, options, back, cfg, cost):
    """Returns the arrays [B, T, heads, H], rotated."""
    base, scaling, interleaved, rotary_dim, xpos, exact_from = options
    B, T, _, H = arrays[0].shape
    columns, fixed, swap = _columns(H, rotated_width(H, rotary_dim), base, scaling, interleaved, xpos)
    tokens = min(T, cfg.block_tokens)
    # [heads, tokens], as in attention: a block of one head is whole tiles of tokens and entries.
    moved = [x.swapaxes(1, 2) for x in arrays]
    specs = [pl.BlockSpec((1, x.shape[1], tokens, H), lambda b, t: (b, 0, t, 0)) for x in moved]
    shared = positions.shape[0] < B
    row = pl.BlockSpec((1, tokens, 1), (lambda b, t: (0, t, 0)) if shared else (lambda b, t: (b, t, 0)))

    def whole(x):
        return pl.BlockSpec(x.shape, lambda b, t: (0, 0))

    out = pallas_launch(
        functools.partial(
            rotary_embedding_kernel,
            center=0.0 if xpos is None else float(xpos.center),
            has_xpos=xpos is not None,
            exact_from=exact_from,
            back=back,
        ),
        positions[..., None],
        jnp.asarray(columns),
        jnp.asarray(fixed),
        jnp.asarray(swap, arrays[0].dtype),
        *moved,
        out_shape=tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in moved),
        grid=(B, pl.cdiv(T, tokens)),
        in_specs=[row, whole(columns), whole(fixed), whole(swap), *specs],
        out_specs=tuple(specs),
        dimension_semantics=("parallel", "parallel"),
        work=cost,
        name="rotary_embedding_kernel",
    )
    return [x.swapaxes(1, 2) for x in out]


def _heads(call):
    return call.dims["N"] + call.dims.get("K", 0)


def _tokens(call) -> int:
    lanes = -(-call.dims["H"] // 128) * 128
    itemsize = jnp.dtype(call.dtype).itemsize
    # Each array in and out, double-buffered; float32 tables of one head.
    of_a_token = lanes * (4 * itemsize * _heads(call) + 4 * 8) + 2 * 4 * 128
    return min(MOST_TOKENS, (VMEM_BUDGET - 3 * lanes * lanes * itemsize) // of_a_token // 16 * 16)


def heuristic(call, platform):
    return RotaryConfig(block_tokens=_tokens(call))


def candidates(call):
    best = _tokens(call)
    return list(dict.fromkeys(RotaryConfig(block_tokens=max(16, best // n // 16 * 16)) for n in (1, 2, 4)))


def rejects(call):
    if any(x.size == 0 for x in (call.arguments.get(n) for n in ("x", "key")) if x is not None):
        return "an array has no elements"
    if _tokens(call) < 16:
        heads = f"{_heads(call)} heads of H = {call.dims['H']}"
        return f"16 tokens of {heads} do not fit in the {VMEM_BUDGET >> 20} MiB of VMEM of a block"
    return None


def forward(x, positions, base, scaling, interleaved, rotary_dim, xpos, exact_from, cfg):
    options = base, scaling, interleaved, rotary_dim, xpos, exact_from
    return _turned([x], positions, options, False, cfg, work(op.bind(x, positions, rotary_dim=rotary_dim))[0])[0]


def backward(saved, x, positions, base, scaling, interleaved, rotary_dim, xpos, exact_from, cfg):
    options = base, scaling, interleaved, rotary_dim, xpos, exact_from
    cost = work(op.bind(x, positions, rotary_dim=rotary_dim))[1]
    return {"x": _turned([saved.d_out], positions, options, True, cfg, cost)[0]}


def forward_pair(x, key, positions, base, scaling, interleaved, rotary_dim, xpos, exact_from, cfg):
    options = base, scaling, interleaved, rotary_dim, xpos, exact_from
    cost = work(pair_op.bind(x, key, positions, rotary_dim=rotary_dim))[0]
    return tuple(_turned([x, key], positions, options, False, cfg, cost))


def backward_pair(saved, x, key, positions, base, scaling, interleaved, rotary_dim, xpos, exact_from, cfg):
    options = base, scaling, interleaved, rotary_dim, xpos, exact_from
    cost = work(pair_op.bind(x, key, positions, rotary_dim=rotary_dim))[1]
    d_query, d_key = _turned([saved.d_query, saved.d_key], positions, options, True, cfg, cost)
    return {"x": d_query, "key": d_key}


FACTS: Any = {
    "platforms": {"tpu"},
    "dtypes": {"float32", "bfloat16"},
    "rejects": rejects,
    "heuristic": heuristic,
    "candidates": candidates,
}
op.register(forward, backward, **FACTS)
pair_op.register(forward_pair, backward_pair, **FACTS)
