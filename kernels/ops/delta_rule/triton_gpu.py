"""The delta rules for NVIDIA GPUs in Triton: an adapter of `kernels/engines/scan`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from kernels.engines.scan import gluon_delta_calls as gluon
from kernels.engines.scan import gluon_walk_parts as hopper_walks
from kernels.engines.scan import triton_channel_calls as channels
from kernels.engines.scan import triton_decode as decode
from kernels.engines.scan import triton_delta_calls as delta
from kernels.engines.scan import triton_delta_kept as kept_by
from kernels.engines.scan import triton_delta_tiles as delta_tiles
from kernels.engines.scan import triton_dplr_calls as dplr
from kernels.engines.scan.chunks import ChunkConfig
from kernels.engines.scan.delta_tokens import DplrTokens
from kernels.engines.scan.triton_calls import LEAST, LONGEST, sizes_refused
from kernels.framework.execute import Saved
from kernels.framework.target import MULTIPROCESSORS
from kernels.ops.delta_rule.contract import (
    NORM_EPS,
    check_states,
    normalized,
    op,
    rwkv7_op,
    rwkv7_work,
    scale_of,
    work,
)
from kernels.ops.delta_rule.pool import pool_op, pool_work, used_slots


def _launches(query, key, value, beta, g, segment_ids, initial_state, softmax_scale, num_states, cfg, cost):
    """Returns the launches of a call: those of decays of channels where g has more than one."""
    check_states("delta_rule", initial_state, segment_ids, num_states)
    per_channel = g is not None and g.shape[-1] != 1
    a = None if g is None else g if per_channel else g[..., 0].astype(jnp.float32)
    entries = None if initial_state is None else initial_state.astype(jnp.float32)
    x = delta.Tokens(query, key, value, beta.astype(jnp.float32), a, segment_ids, entries)
    scale = scale_of(softmax_scale, query.shape[-1])
    return (channels.DeltaLaunches if per_channel else delta.Launches)(x, num_states, scale, cfg, cost)


def _unit(x: jax.Array) -> jax.Array:
    return normalized(x.astype(jnp.float32)).astype(x.dtype)


def _token(query, key, value, beta, g, use_qk_l2norm) -> decode.Token:
    a = g[..., 0] if g is not None and g.shape[-1] == 1 else g
    return decode.Token(query, key, value, a, beta, delta=True, norm_eps=NORM_EPS if use_qk_l2norm else 0.0)


def rejects(call):
    return sizes_refused(call.dims, call.query, call.key, call.value)


def _per_channel(call):
    return call.g is not None and call.g.shape[-1] > 1


def keeps(call, cfg):
    one = decode.one_token(call.dims["T"], call.num_states)
    if one or not (cfg and cfg.keeps) or not (cfg.chunk is None or LEAST <= cfg.chunk <= LONGEST):
        return {}  # chunks of another length are another backend's, or refused where they are launched
    names = channels.KEPT if _per_channel(call) else kept_by.KEPT
    return kept_by.kept_of(call.dims, call.num_states, call.key.dtype, cfg, names)


def forward(
    query, key, value, beta, g, segment_ids, initial_state, softmax_scale, use_qk_l2norm, num_states, cfg
):  # fmt: skip
    cost = work(op.bind(query, key, value, beta, g, num_states=num_states))[0]
    if decode.one_token(query.shape[1], num_states):
        check_states("delta_rule", initial_state, segment_ids, num_states)
        token, scale = _token(query, key, value, beta, g, use_qk_l2norm), scale_of(softmax_scale, query.shape[-1])
        return decode.decode(token, value.shape[2], segment_ids, initial_state, scale, cfg, cost)
    if use_qk_l2norm:
        query, key = _unit(query), _unit(key)
    options = (segment_ids, initial_state, softmax_scale, num_states, cfg, cost)
    return delta.forward(_launches(query, key, value, beta, g, *options))


def forward_with_residuals(
    query, key, value, beta, g, segment_ids, initial_state, softmax_scale, use_qk_l2norm, num_states, cfg
):  # fmt: skip
    cost = work(op.bind(query, key, value, beta, g, num_states=num_states))[0]
    if use_qk_l2norm:
        query, key = _unit(query), _unit(key)
    options = (segment_ids, initial_state, softmax_scale, num_states, cfg, cost)
    return delta.keeping(_launches(query, key, value, beta, g, *options))


def backward(
    saved, query, key, value, beta, g, segment_ids, initial_state, softmax_scale, use_qk_l2norm, num_states, cfg
):  # fmt: skip
    if decode.one_token(query.shape[1], num_states):
        arrays = {"query": query, "key": key, "value": value, "beta": beta, "g": g}
        arrays |= {"segment_ids": segment_ids, "initial_state": initial_state}
        return decode.gradients(op, saved, arrays, softmax_scale=softmax_scale, use_qk_l2norm=use_qk_l2norm)
    cost = work(op.bind(query, key, value, beta, g, num_states=num_states))[1]
    pull = None
    if use_qk_l2norm:
        (query, key), pull = jax.vjp(lambda q, k: (_unit(q), _unit(k)), query, key)
    options = (segment_ids, initial_state, softmax_scale, num_states, cfg, cost)
    kept = saved if kept_by.KEPT[0] in saved else None
    d = delta.backward(_launches(query, key, value, beta, g, *options), saved.d_out, saved.d_final_state, kept)
    dq, dk = (d[name].astype(query.dtype) for name in ("q", "k"))
    dq, dk = (dq, dk) if pull is None else pull((dq, dk))
    gradients = {"query": dq, "key": dk, "value": d["v"].astype(value.dtype), "beta": d["beta"]}
    gradients |= {} if g is None else {"g": d["a"].reshape(g.shape)}
    return gradients | ({} if initial_state is None else {"initial_state": d["entries"]})


def pool_forward(
    query, key, value, beta, state_pool, state_indices, g, has_initial_state, softmax_scale, use_qk_l2norm, cfg
):  # fmt: skip
    cost = pool_work(pool_op.bind(query, key, value, beta, state_pool, state_indices, g))[0]
    token, scale = _token(query, key, value, beta, g, use_qk_l2norm), scale_of(softmax_scale, query.shape[-1])
    return decode.ragged_decode(token, state_pool, state_indices, has_initial_state, scale, cfg, cost)


def pool_backward(
    saved, query, key, value, beta, state_pool, state_indices, g, has_initial_state, softmax_scale, use_qk_l2norm, cfg
):  # fmt: skip
    """That of a batch in chunks, of copies of the states: the gradient of a pool is as large as the pool anyway."""
    used, slots = used_slots(state_indices, state_pool.shape[0])
    begun = used if has_initial_state is None else used & has_initial_state
    entries = jnp.where(begun[:, None, None, None], state_pool.at[slots].get(mode="clip"), 0)
    arrays = {"query": query, "key": key, "value": value, "beta": beta} | ({} if g is None else {"g": g})
    batch: dict[str, Any] = {n: x[:, None] for n, x in arrays.items()}
    batch |= {"segment_ids": jnp.where(used, 0, -1)[:, None], "initial_state": entries[:, None]}
    d_pool = saved.d_new_pool.astype(jnp.float32)
    d_exits = jnp.where(used[:, None, None, None], d_pool.at[slots].get(mode="clip"), 0)
    of_batch = Saved({"d_out": saved.d_out[:, None], "d_final_state": d_exits[:, None]})
    options = {"softmax_scale": softmax_scale, "use_qk_l2norm": use_qk_l2norm, "num_states": 1, "cfg": cfg}
    d = backward(of_batch, **{"g": None} | batch | options)
    d_entries = jnp.where(begun[:, None, None, None], d["initial_state"][:, 0], 0)
    return {n: d[n][:, 0] for n in arrays} | {"state_pool": d_pool.at[slots].set(d_entries, mode="drop")}


def _rwkv7_launches(r, w, k, v, a, b, segment_ids, initial_state, softmax_scale, num_states, cfg, cost, d_out):
    check_states("rwkv7", initial_state, segment_ids, num_states)
    entries = None if initial_state is None else initial_state.astype(jnp.float32)
    x = DplrTokens(r, w, k, v, a, b, segment_ids, entries)
    return dplr.Launches(x, num_states, scale_of(softmax_scale, r.shape[-1]), cfg, cost, d_out)


def rwkv7_rejects(call):
    return sizes_refused(call.dims, call.r, call.k, call.v)


def rwkv7_forward(r, w, k, v, a, b, segment_ids, initial_state, softmax_scale, num_states, cfg):
    cost = rwkv7_work(rwkv7_op.bind(r, w, k, v, a, b, num_states=num_states))[0]
    if decode.one_token(r.shape[1], num_states):
        check_states("rwkv7", initial_state, segment_ids, num_states)
        token, scale = decode.Token(r, k, v, w, read=a, back=b), scale_of(softmax_scale, r.shape[-1])
        return decode.decode(token, v.shape[2], segment_ids, initial_state, scale, cfg, cost)
    options = (segment_ids, initial_state, softmax_scale, num_states, cfg, cost)
    return delta.forward(_rwkv7_launches(r, w, k, v, a, b, *options, None))


def rwkv7_backward(saved, r, w, k, v, a, b, segment_ids, initial_state, softmax_scale, num_states, cfg):
    if decode.one_token(r.shape[1], num_states):
        arrays = {"r": r, "w": w, "k": k, "v": v, "a": a, "b": b}
        arrays |= {"segment_ids": segment_ids, "initial_state": initial_state}
        return decode.gradients(rwkv7_op, saved, arrays, softmax_scale=softmax_scale)
    cost = rwkv7_work(rwkv7_op.bind(r, w, k, v, a, b, num_states=num_states))[1]
    options = (segment_ids, initial_state, softmax_scale, num_states, cfg, cost)
    run = _rwkv7_launches(r, w, k, v, a, b, *options, saved.d_out)
    d = delta.backward(run, saved.d_out, saved.d_final_state)
    gradients = {"r": d["q"]} | {name: d[name] for name in "wkvab"}
    return gradients | ({} if initial_state is None else {"initial_state": d["entries"]})


def _tiles(call, cfg):
    """Returns tiles with what is worth while in a backward: what the forward keeps; both walks at once where that was timed, of
    decays of heads whose programs leave half of each multiprocessor empty; Hopper's own kernels where it has them, its walks
    of whole rows where their programs are at most half as many as multiprocessors, and of parts of rows where they are not
    more, with decays of heads: those of channels were not timed."""
    d, whole = call.dims, call.num_states == 1 and cfg.chunk == gluon.CHUNK and call.dims["T"] % gluon.CHUNK == 0
    in_one = whole and d["H"] == d["Hv"] == gluon.WIDTH and call.dtype != "float32"
    programs, most = hopper_walks.COLUMNS.value * d["B"] * d["N"] * (cfg.splits or 1), MULTIPROCESSORS
    most = most // 2 if cfg.splits == 1 else 0 if _per_channel(call) else most
    cfg = replace(cfg, keeps=True, in_one=in_one, hopper_walks=in_one and programs <= most)
    if _per_channel(call):
        return cfg
    # Of wide programs too: of twice as many narrow ones, both were timed where they leave room.
    programs = d["B"] * d["N"] * -(-d["Hv"] // min(delta_tiles.NARROW, cfg.block_v or 1))
    few = cfg.splits == 1 and programs <= MULTIPROCESSORS and call.dtype != "float32"
    return replace(cfg, at_once=few)


def of_chunks(call, platform):
    return _tiles(call, delta_tiles.heuristic(call, platform))


def others(call):
    tiles = [_tiles(call, cfg) for cfg in delta_tiles.candidates(call)]
    first = tiles[0]
    return [
        *tiles,
        *([replace(first, in_one=False)] if first.in_one else []),
        *([replace(first, hopper_walks=not first.hopper_walks)] if first.in_one else []),
    ]


rwkv7_heuristic = decode.heuristic(dplr.heuristic, lambda call: decode.OF_CHANNELS)
heuristic = decode.heuristic(of_chunks, lambda call: decode.OF_CHANNELS if _per_channel(call) else decode.COLUMNS)
op.register(
    forward,
    backward,
    forward_with_residuals=forward_with_residuals,
    keeps=keeps,
    platforms={"cuda"},
    dtypes={"float32", "bfloat16", "float16"},
    rejects=rejects,
    heuristic=heuristic,
    candidates=decode.candidates(others, heuristic),
)
rwkv7_op.register(
    rwkv7_forward,
    rwkv7_backward,
    platforms={"cuda"},
    dtypes={"float32", "bfloat16", "float16"},
    rejects=rwkv7_rejects,
    heuristic=rwkv7_heuristic,
    candidates=decode.candidates(dplr.candidates, rwkv7_heuristic),
)
pool_op.register(
    pool_forward,
    pool_backward,
    platforms={"cuda"},
    dtypes={"float32", "bfloat16", "float16"},
    rejects=rejects,
    heuristic=lambda call, platform: decode.tiles(ChunkConfig(chunk=LEAST, num_stages=1)),
    candidates=lambda call: decode.others(decode.tiles(ChunkConfig(chunk=LEAST, num_stages=1))),
)
