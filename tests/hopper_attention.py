"""Calls of flash_attention's kernels for Hopper, and how their numbers are held: on a GPU, and interpreted on a CPU.

Every mask and option that they take, beside the contract in float32. What lies past the ends of a row of the batch is another
row: a kernel that reads a token too many shows it.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from grid import FLOOR, error
from hopper import spoil_memory

from ejdist.order import Order
from kernels import MaskInfo
from kernels.framework.config import BwdParams, FwdParams, KernelConfig
from kernels.framework.padding import zeroed
from kernels.ops.flash_attention import hops_of
from kernels.ops.flash_attention.contract import op
from kernels.ops.flash_attention.triton_gpu import THREE_WARPGROUPS, WARP_SPECIALIZED

THREE = KernelConfig(FwdParams(THREE_WARPGROUPS, 128, WARP_SPECIALIZED, 2), BwdParams(64, 128, WARP_SPECIALIZED, 2))


def at(positions, **rest):
    positions = jnp.asarray(positions, jnp.int32)
    return MaskInfo(q_positions=positions, kv_positions=positions, **rest)


def calls(batch, length, heads):
    """Returns name -> (mask, options) of rows of so many tokens."""
    rng = np.random.default_rng(0)
    documents = np.sort(rng.integers(0, 6, (batch, length)), axis=1)
    padded = np.where(np.arange(length) < length * 3 // 4, documents, -1)
    shuffled = np.stack([rng.permutation(length) for _ in range(batch)])
    zigzag = np.concatenate([np.arange(length // 2), 3 * length + np.arange(length - length // 2)])[None]
    sinks = {"softmax_aux": rng.standard_normal((heads, 2))}

    def segments(ids, **rest):
        ids = jnp.asarray(ids, jnp.int32)
        return MaskInfo(q_segment_ids=ids, kv_segment_ids=ids, **rest)

    prefix = jnp.asarray([length // 6, length // 2])
    return {
        "full": (MaskInfo(), {}),
        "causal": (MaskInfo(causal=True), {}),
        "window": (MaskInfo(causal=True, window=(200, 0)), {}),
        "both_sides": (MaskInfo(window=(70, 90)), {}),
        "sink_window": (MaskInfo(causal=True, window=(40, 0), sink_tokens=5), {}),
        "packed_sink_window": (segments(padded, causal=True, window=(20, 0), sink_tokens=5), {}),
        "chunks": (MaskInfo(causal=True, chunk_size=150), {}),
        "prefix": (MaskInfo(causal=True, prefix_lengths=prefix), {}),
        "packed": (segments(documents, causal=True), {}),
        "padded": (segments(padded, causal=True), {}),
        "shuffled": (at(shuffled, causal=True), {}),
        "zigzag": (at(zigzag, causal=True), {}),
        "soft_cap": (MaskInfo(causal=True), {"logits_soft_cap": 3.0}),
        "sinks": (MaskInfo(causal=True), sinks),
        "scale": (MaskInfo(causal=True), {"softmax_scale": 0.3}),
        "together": (segments(padded, causal=True, window=(100, 0)), {"logits_soft_cap": 3.0, **sinks}),
    }


def arrays(batch, lengths, heads, widths, dtype, seed=0):
    """Returns query, key and value of (tokens of the query, of the keys), (query heads, key heads) and (width, of values)."""
    rng, (t, s), (n, k), (h, hv) = np.random.default_rng(seed), lengths, heads, widths
    shapes = {"query": (batch, t, n, h), "key": (batch, s, k, h), "value": (batch, s, k, hv)}
    return {name: jnp.asarray(rng.standard_normal(shape).astype(dtype)) for name, shape in shapes.items()}


def outcome(function, floats, d_out, d_lse):
    """Returns outputs and gradients by name, for cotangents of both outputs."""
    (out, lse), pull = jax.vjp(lambda x: function(**x), floats)
    found = pull((d_out.astype(out.dtype), jnp.where(jnp.isfinite(lse), d_lse, 0)))[0]
    return {"out": out, "lse": lse, **found}


def contract(mask, options, **x):
    return op.function(**x, mask=mask, **options)


def ours(mask, options, cfg=None, **x):
    return op(**x, mask=mask, platform="triton", cfg=cfg, **options)


def by_hops(float_of_first, mask, options, cfg=None, **x):
    """As `ours`, of the keys of two ranks one after the other, in place. Of the first, whose queries these are, places tell
    causal order, and of the second whole tiles."""
    half = x["key"].shape[1] // 2
    hops = hops_of(op.bind(**{n: v if n == "query" else v[:, :half] for n, v in x.items()}, **options), "triton", cfg)
    keys = [slice(0, half), slice(half, None)]
    of_tiles = [mask.replace(**{n: getattr(mask, n)[:, s] for n in ("kv_positions", "kv_segment_ids")}) for s in keys]
    bare = [m.replace(q_positions=None, kv_positions=None) for m in of_tiles]
    masks = [(bare[0], bare[0]), (bare[1].replace(causal=False), of_tiles[1])]

    def parts(x):
        return [(x["query"], x["key"][:, s], x["value"][:, s], *m) for s, m in zip(keys, masks, strict=True)]

    def forward(x):
        first, last = parts(x)
        sofar = hops.attend(*first, None, float_of_first)
        return hops.attend(*last, sofar, x["query"].dtype)

    def backward(residuals, cotangents):
        x, out, lse = residuals
        saved = op.backward_inputs({"out": out, "lse": lse}, dict(zip(("d_out", "d_lse"), cotangents, strict=True)))
        sums, made = jnp.zeros(x["query"].shape, jnp.float32), []
        for part in parts(x):
            sums, *grads = hops.pull(saved, *part, sums)
            made.append(grads)
        joined = (jnp.concatenate(grads, axis=1) for grads in zip(*made, strict=True))
        return ({"query": hops.of_query(sums).astype(x["query"].dtype), **dict(zip(("key", "value"), joined))},)

    function = jax.custom_vjp(forward)
    function.defvjp(lambda x: (found := forward(x), (x, *found)), backward)
    return function(x)


def hold_hops(length, heads, widths, dtype, options, *, rank=0, again=0):
    """Holds the kernels that add in place, of a rank of two in a zigzag with documents and padding."""
    order = Order("zigzag", 2)
    ids = np.where(np.arange(2 * length) < 2 * length - 50, np.arange(2 * length) * 5 // (2 * length), -1)
    ids, places = (order.permute(x[None]) for x in (ids, np.arange(2 * length)))
    mine = slice(rank * length, (rank + 1) * length)
    floats = arrays(1, (length, 2 * length), heads, widths, dtype)
    own_first = [*range(rank * length, (rank + 1) * length), *range((1 - rank) * length, (2 - rank) * length)]
    names = ("q_segment_ids", "kv_segment_ids", "q_positions", "kv_positions")
    at_of = (ids[:, mine], ids[:, own_first], places[:, mine], places[:, own_first])
    mask = MaskInfo(causal=True, **{n: jnp.asarray(x, jnp.int32) for n, x in zip(names, at_of, strict=True)})
    floats |= {n: zeroed(floats[n], mask.kv_segment_ids) for n in ("key", "value")}
    floats["query"] = zeroed(floats["query"], mask.q_segment_ids)
    for float_of_first in (jnp.float32, dtype):
        hold(floats, mask, options, mine=functools.partial(by_hops, float_of_first), again=again)


def hold(floats, mask, options, *, cfg=None, peer=contract, mine=ours, again=0):
    """Holds a call of kernels for Hopper against the contract in float32: it may be twice as far from it as `peer`, called
    likewise, is in the type of the arrays; each of `again` and one more times, over memory that is full of NaN."""
    rng, options, dtype = np.random.default_rng(1), dict(options), str(floats["query"].dtype)
    if "softmax_aux" in options:
        floats = {**floats, "softmax_aux": jnp.asarray(options.pop("softmax_aux"), jnp.float32)}
    found = cfg or op.backends["triton_gpu"].heuristic(op.bind(**floats, mask=mask, **options), "cuda")
    assert {found.fwd_params.num_warps, found.bwd_params.num_warps} == {WARP_SPECIALIZED}
    shape = (*floats["query"].shape[:3], floats["value"].shape[3])
    d_out = jnp.asarray(rng.standard_normal(shape).astype(dtype))
    d_lse = jnp.asarray(rng.standard_normal(shape[:3]).astype(np.float32))

    @jax.jit
    def wanted(floats):
        wide = {name: x.astype(jnp.float32) for name, x in floats.items()}
        exact = outcome(functools.partial(contract, mask, options), wide, d_out.astype(jnp.float32), d_lse)
        return exact, outcome(functools.partial(peer, mask, options), floats, d_out, d_lse)

    exact, near = wanted(floats)
    made = jax.jit(lambda x: outcome(functools.partial(mine, mask, options, cfg), x, d_out, d_lse))
    for _ in range(1 + again):
        spoil_memory(exact.values())
        got = made(floats)
        for name, want in exact.items():
            assert error(got[name], want) <= 2 * error(near[name], want) + FLOOR[dtype], name
