"""flash-linear-attention: gated linear attention, delta rules, RWKV-4 and 7, native sparse attention, and Mamba-2, which is
linear attention there."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from benchmarks.peers import Expression, every, missing, needs_torch
from benchmarks.tuners import compile_side_by_side

FRAMEWORK = "torch"
OPERATIONS = ("linear_attention", "delta_rule", "rwkv7", "state_space_v2", "rwkv4", "native_sparse_attention")
# The array of tokens whose dtype counts.
_TOKENS = {"state_space_v2": "x", "rwkv4": "k", "rwkv7": "r"}
LEAST_SAFE = -5.0  # log decays that `safe_gate` promises are no smaller


def available() -> str | None:
    return missing("fla") or needs_torch(gpu=True)


def express(op_name: str, arguments: dict[str, Any], expressed: Callable | None = None) -> Any:
    """One token is `fused_recurrent`, its form for decoding, with states.

    Args:
      expressed: what expresses calls of many tokens; None: that of the operation.
    """
    used = {name for name, value in arguments.items() if value is not None}
    values = arguments[_TOKENS.get(op_name, "query")]
    one = values.shape[1] == 1 and op_name in _ONE_TOKEN
    if {"segment_ids", *(() if one else ("initial_state",))} & used:
        return "documents and states are compared without"
    if str(values.dtype) == "float32":
        return "it has 16-bit floats only"
    compile_side_by_side()
    return (_ONE_TOKEN[op_name] if one else expressed or _EXPRESSED[op_name])(arguments, used)


def _with_states(function: Callable) -> Expression:
    """Returns the expression of a function of arrays and a state [B, N, H, Hv] to both outputs. Its backward, where there is
    one, goes over all states in memory, and is for no one."""

    def one_token(initial_state: Any = None, **arrays: Any) -> Any:
        state = None if initial_state is None else initial_state[:, 0]
        out, final = function(initial_state=state, output_final_state=True, **arrays)
        return out, final[:, None]

    return Expression(one_token, every, backward=False)


def _linear_attention_token(arguments: dict[str, Any], used: set[str]) -> Expression | str:
    said = _linear_attention(arguments, used)
    if isinstance(said, str):
        return said
    scale = arguments.get("softmax_scale")

    def linear_attention(query: Any, key: Any, value: Any, gk: Any = None, bonus: Any = None, **more: Any) -> Any:
        from fla.ops.gla import fused_recurrent_gla
        from fla.ops.rwkv6 import fused_recurrent_rwkv6
        from fla.ops.simple_gla import fused_recurrent_simple_gla

        if bonus is not None:
            return fused_recurrent_rwkv6(query, key, value, gk, bonus, scale=scale, **more)
        if gk is not None:
            return fused_recurrent_gla(query, key, value, gk=gk, scale=scale, **more)
        return fused_recurrent_simple_gla(query, key, value, scale=scale, **more)

    return _with_states(linear_attention)


def _delta_rule_token(arguments: dict[str, Any], used: set[str]) -> Expression | str:
    said = delta_rule(arguments, used)
    if isinstance(said, str):
        return said
    how = {"scale": arguments.get("softmax_scale"), "use_qk_l2norm_in_kernel": bool(arguments.get("use_qk_l2norm"))}

    def one(query: Any, key: Any, value: Any, beta: Any, g: Any = None, **more: Any) -> Any:
        from fla.ops.delta_rule import fused_recurrent_delta_rule
        from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule
        from fla.ops.kda import fused_recurrent_kda

        if g is None:
            return fused_recurrent_delta_rule(query, key, value, beta=beta, **how, **more)
        if g.shape[-1] > 1:
            return fused_recurrent_kda(query, key, value, g=g, beta=beta, **how, **more)
        return fused_recurrent_gated_delta_rule(query, key, value, g=g[..., 0], beta=beta, **how, **more)

    return _with_states(one)


def _linear_attention(arguments: dict[str, Any], used: set[str]) -> Callable | str:
    query, key, scale = arguments["query"], arguments["key"], arguments.get("softmax_scale")
    decays = sorted({"g", "gk", "gv", "g_gamma", "bonus"} & used)
    if query.shape[2] != key.shape[2]:
        return "it has as many heads of keys as of queries"
    if decays not in ([], ["g"], ["gk"], ["g_gamma"], ["bonus", "gk"]):
        return f"it cannot say {', '.join(decays)}"

    def linear_attention(query: Any, key: Any, value: Any, gk: Any = None, bonus: Any = None, **decay: Any) -> Any:
        from fla.ops.gla import chunk_gla
        from fla.ops.rwkv6 import chunk_rwkv6
        from fla.ops.simple_gla import chunk_simple_gla

        if bonus is not None:
            return chunk_rwkv6(query, key, value, gk, bonus, scale=scale)[0]
        if gk is not None:
            return chunk_gla(query, key, value, gk, scale=scale)[0]
        return chunk_simple_gla(query, key, value, scale=scale, **decay)[0]

    return linear_attention


def delta_rule(arguments: dict[str, Any], used: set[str], keeps: bool = False) -> Callable | str:
    """With decays of channels: with the promise that they are mild where they are, which lets it take matrix products.

    Args:
      keeps: whether its forward keeps for its backward what that would compute again, where it has both.
    """
    key, value, g = arguments["key"], arguments["value"], arguments.get("g")
    how = {"scale": arguments.get("softmax_scale"), "use_qk_l2norm_in_kernel": bool(arguments.get("use_qk_l2norm"))}
    channels = g is not None and g.shape[-1] > 1
    mild = channels and bool((g >= LEAST_SAFE).all())
    if key.shape[2] != value.shape[2] and g is None:
        return "it has as many heads of keys as of values"

    def chunked(query: Any, key: Any, value: Any, beta: Any, g: Any = None) -> Any:
        from fla.ops.delta_rule import chunk_delta_rule
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
        from fla.ops.kda import chunk_kda

        if g is None:
            return chunk_delta_rule(query, key, value, beta, **how)[0]
        if channels:
            modes = {"safe_gate": mild, "disable_recompute": keeps}
            known = inspect.signature(inspect.unwrap(chunk_kda)).parameters
            return chunk_kda(query, key, value, g, beta, **how, **{n: x for n, x in modes.items() if n in known})[0]
        return chunk_gated_delta_rule(query, key, value, g[..., 0], beta, **how)[0]

    return chunked


def _rwkv7(arguments: dict[str, Any], used: set[str]) -> Callable:
    """With the promise that decays are mild where they are: its chunks are then longer."""
    scale = arguments["r"].shape[-1] ** -0.5 if arguments.get("softmax_scale") is None else arguments["softmax_scale"]
    mild = bool((arguments["w"] >= LEAST_SAFE).all())

    def rwkv7(r: Any, w: Any, k: Any, v: Any, a: Any, b: Any) -> Any:
        from fla.ops.rwkv7 import chunk_rwkv7

        promises = {"safe_gate": mild} if "safe_gate" in inspect.signature(chunk_rwkv7).parameters else {}
        return chunk_rwkv7(r=r, w=w, k=k, v=v, a=a, b=b, scale=scale, **promises)[0]

    return rwkv7


def _state_space_v2(arguments: dict[str, Any], used: set[str]) -> Callable | str:
    heads = arguments["x"].shape[2] // arguments["B"].shape[2]

    def state_space_v2(x: Any, dt: Any, A: Any, B: Any, C: Any, D: Any = None) -> Any:
        from fla.ops.simple_gla import chunk_simple_gla

        query, key = (a.repeat_interleave(heads, dim=2) for a in (C, B))
        out = chunk_simple_gla(query, key, x * dt[..., None].to(x.dtype), g=dt.float() * A.float(), scale=1.0)[0]
        return out if D is None else out + x * D[:, None].to(x.dtype)

    return state_space_v2


def _rwkv4(arguments: dict[str, Any], used: set[str]) -> Callable | str:
    """Its kernels store the state after each token for the backward, in the dtype of k."""

    def rwkv4(w: Any, u: Any, k: Any, v: Any) -> Any:
        from fla.ops.rwkv4 import fused_recurrent_rwkv4

        state = k.new_zeros(k.shape[0], 3, 1, k.shape[2]).float()
        state[:, 2] = -1e38
        return fused_recurrent_rwkv4(w, u, k, v, state)[0]

    return rwkv4


def _native_sparse_attention(arguments: dict[str, Any], used: set[str]) -> Callable | str:
    """A block that is named twice counts twice there: the cases name each once."""
    group = arguments["query"].shape[2] // arguments["key"].shape[2]
    if group < 16 or group & (group - 1):
        return "it takes 16, 32, 64, ... query heads of each key head"
    if arguments["window"]:
        return "its window is that of flash-attn, which is compared as attention"
    if {"starts", "q_start"} & used:
        return "documents and parts of the queries are compared without"
    if arguments["g_cmp"] is None and arguments["block_indices"] is None:
        return "it chooses blocks with the gate of the compressed branch alone"
    from benchmarks.torch_programs import to_torch

    indices, counts = arguments["block_indices"], arguments["block_counts"]
    how: dict[str, Any] = {"block_size": arguments["block_size"], "scale": arguments["softmax_scale"]}
    if indices is not None:
        how["block_indices"] = to_torch(indices).long()
    most = arguments["num_blocks"] if indices is None else indices.shape[-1]
    how["block_counts"] = most if counts is None else to_torch(counts).long()

    def native_sparse_attention(
        query: Any, key: Any, value: Any, g_cmp: Any = None, g_slc: Any = None, **_: Any
    ) -> Any:
        from fla.ops.nsa import parallel_nsa

        return parallel_nsa(query, key, value, g_cmp=g_cmp, g_slc=g_slc, **how)

    return native_sparse_attention


_EXPRESSED = {
    "linear_attention": _linear_attention,
    "delta_rule": delta_rule,
    "rwkv7": _rwkv7,
    "state_space_v2": _state_space_v2,
    "rwkv4": _rwkv4,
    "native_sparse_attention": _native_sparse_attention,
}
_ONE_TOKEN = {"linear_attention": _linear_attention_token, "delta_rule": _delta_rule_token}
