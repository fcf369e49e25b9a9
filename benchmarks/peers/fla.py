"""flash-linear-attention: gated linear attention, delta rules, and Mamba-2 as linear attention with a decay a head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.peers import missing, needs_torch

FRAMEWORK = "torch"
OPERATIONS = ("linear_attention", "delta_rule", "state_space_v2")


def available() -> str | None:
    return missing("fla") or needs_torch(gpu=True)


def express(op_name: str, arguments: dict[str, Any]) -> Any:
    used = {name for name, value in arguments.items() if value is not None}
    if {"segment_ids", "initial_state"} & used:
        return "documents and states are compared without"
    values = arguments["x" if op_name == "state_space_v2" else "query"]
    if str(values.dtype) == "float32":
        return "it has 16-bit floats only"
    return _EXPRESSED[op_name](arguments, used)


def _linear_attention(arguments: dict[str, Any], used: set[str]) -> Callable | str:
    query, key, scale = arguments["query"], arguments["key"], arguments.get("softmax_scale")
    decays = sorted({"g", "gk", "gv", "g_gamma", "bonus"} & used)
    if query.shape[2] != key.shape[2]:
        return "it has as many heads of keys as of queries"
    if decays not in ([], ["g"], ["gk"], ["g_gamma"]):
        return f"it cannot say {', '.join(decays)}"

    def linear_attention(query: Any, key: Any, value: Any, gk: Any = None, **decay: Any) -> Any:
        from fla.ops.gla import chunk_gla
        from fla.ops.simple_gla import chunk_simple_gla

        if gk is not None:
            return chunk_gla(query, key, value, gk, scale=scale)[0]
        return chunk_simple_gla(query, key, value, scale=scale, **decay)[0]

    return linear_attention


def _delta_rule(arguments: dict[str, Any], used: set[str]) -> Callable | str:
    key, value, g = arguments["key"], arguments["value"], arguments.get("g")
    how = {"scale": arguments.get("softmax_scale"), "use_qk_l2norm_in_kernel": bool(arguments.get("use_qk_l2norm"))}
    channels = g is not None and g.shape[-1] > 1
    if key.shape[2] != value.shape[2] and g is None:
        return "it has as many heads of keys as of values"

    def delta_rule(query: Any, key: Any, value: Any, beta: Any, g: Any = None) -> Any:
        from fla.ops.delta_rule import chunk_delta_rule
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
        from fla.ops.kda import chunk_kda

        if g is None:
            return chunk_delta_rule(query, key, value, beta, **how)[0]
        if channels:
            return chunk_kda(query, key, value, g, beta, **how)[0]
        return chunk_gated_delta_rule(query, key, value, g[..., 0], beta, **how)[0]

    return delta_rule


def _state_space_v2(arguments: dict[str, Any], used: set[str]) -> Callable | str:
    heads = arguments["x"].shape[2] // arguments["B"].shape[2]

    def state_space_v2(x: Any, dt: Any, A: Any, B: Any, C: Any, D: Any = None) -> Any:
        from fla.ops.simple_gla import chunk_simple_gla

        query, key = (a.repeat_interleave(heads, dim=2) for a in (C, B))
        out = chunk_simple_gla(query, key, x * dt[..., None].to(x.dtype), g=dt.float() * A.float(), scale=1.0)[0]
        return out if D is None else out + x * D[:, None].to(x.dtype)

    return state_space_v2


_EXPRESSED = {"linear_attention": _linear_attention, "delta_rule": _delta_rule, "state_space_v2": _state_space_v2}
