"""Flash attention by cuDNN, for what it supports: all keys, causal, or a causal window, in bfloat16.

XLA calls cuDNN's fused attention for custom calls with certain names. The names, and the text that describes the call,
are XLA internals, not a stable interface. They are used only here.

cuDNN's backward takes out, and computes delta = rowsum(d_out * out) from it. Ours is given delta, which may cover more
keys and includes the cotangent of lse. So it passes another out: the multiple of d_out whose product with d_out is
delta. If delta belongs to this call's own out, it passes that.
"""

from __future__ import annotations

import json
import math
from typing import Any

import jax
import jax.numpy as jnp

from kernels.engines.attention.masks import MaskInfo
from kernels.framework.execute import Saved
from kernels.framework.interpret import interpreting
from kernels.ops.flash_attention.contract import flash_attention, op
from kernels.toolchains.simulate.compile_for import CUDNN

# JAX releases whose XLA is known to accept these calls.
KNOWN = ((0, 11), (0, 12))
WIDEST = 256
FORWARD, BACKWARD = CUDNN
_ROWS_FIRST = (0, 2, 1, 3)  # an array [B, N, T, H] stored as [B, T, N, H]
_PLAIN = {3: (0, 1, 2), 4: (0, 1, 2, 3), 1: (0,)}


def _backend_config(query, value, mask: MaskInfo, scale: float, backward: bool) -> str:
    """Returns XLA's `GpuBackendConfig` of the call, as JSON. Dimension numbers are those of the products over [B, T, N,
    H]."""
    (B, T, N, _), S = query.shape, value.shape[1]
    left = None if mask.window is None else mask.window[0]
    forward_products = {"bmm1": (3, 3, (0, 2), (0, 2)), "bmm2": (3, 1, (0, 1), (0, 2))}
    backward_products = {
        "bmm1_grad_gemm1": (2, 1, (0, 1), (0, 2)),
        "bmm1_grad_gemm2": (3, 1, (0, 1), (0, 2)),
        "bmm2_grad_gemm1": (2, 1, (0, 1), (0, 2)),
        "bmm2_grad_gemm2": (3, 3, (0, 2), (0, 2)),
    }
    products = {
        f"{name}_dot_dimension_numbers": {
            "lhs_contracting_dimensions": [str(left)],
            "rhs_contracting_dimensions": [str(right)],
            "lhs_batch_dimensions": [*map(str, left_batch)],
            "rhs_batch_dimensions": [*map(str, right_batch)],
        }
        for name, (left, right, left_batch, right_batch) in (
            backward_products if backward else forward_products
        ).items()
    }
    logits = {
        "element_type": "BF16",
        "dimensions": [str(n) for n in (B, N, T, S)],
        "layout": {"minor_to_major": ["3", "2", "1", "0"]},
        "is_dynamic_dimension": [False] * 4,
    }
    config = {
        "algorithm": {
            "algo_id": "0",
            "math_type": "TENSOR_OP_MATH",
            "tuning_knobs": {"17": "1", "24": "0"},
            "is_cudnn_frontend": True,
            "workspace_size": "0",
        },
        "fmha_scale": scale,
        "intermediate_tensor_shape": logits,
        "is_flash_attention": True,
        "mask_type": "CAUSAL" if mask.causal else "NO_MASK",
        "dropout_rate": 0.0,
        "seed": 0,
        "sliding_window_length": 0 if left is None else left + 1,
        "max_seg_per_batch": 1,
        "is_paged_attention": False,
    }
    return json.dumps({"operation_queue_id": "0", "cudnn_fmha_backend_config": config | products})


def _call(target: str, config: str, results: list[tuple], *arrays: jax.Array) -> list[jax.Array]:
    """Returns the results of a custom call, given as (shape, dtype, layout), without the workspace, which comes
    last."""
    if interpreting():
        return _interpreted(json.loads(config)["cudnn_fmha_backend_config"], *arrays)
    results = [*results, ((0,), jnp.uint8, (0,))]
    outputs = jax.ffi.ffi_call(
        target,
        [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype, _ in results],
        input_layouts=[_PLAIN[x.ndim] for x in arrays],
        output_layouts=[layout for _, _, layout in results],
        custom_call_api_version=2,
        legacy_backend_config=config,
    )(*arrays)
    return list(outputs[:-1])


def _interpreted(config: dict[str, Any], query, key, value, *rest) -> list[jax.Array]:
    """Computes what cuDNN computes for the call that `config` describes, in plain JAX: attention, or with lse, d_out
    and out as the remaining arguments its gradients."""
    causal, window = config["mask_type"] == "CAUSAL", config["sliding_window_length"]
    mask, scale = MaskInfo(causal=causal, window=(window - 1, 0) if window else None), config["fmha_scale"]
    if not rest:
        out, lse = flash_attention(query, key, value, mask, softmax_scale=scale)
        return [out.swapaxes(1, 2), lse.swapaxes(1, 2)]
    lse, d_out, out = rest
    group = query.shape[2] // key.shape[2]
    q, k, v, d = (x.astype(jnp.float32) for x in (query, key.repeat(group, 2), value.repeat(group, 2), d_out))
    logits = jnp.where(mask.visible(q.shape[1], k.shape[1]), jnp.einsum("btnh,bsnh->bnts", q, k) * scale, -jnp.inf)
    weights = jnp.exp(logits - lse[..., None])
    delta = jnp.einsum("btnh,btnh->bnt", d, out.astype(jnp.float32))
    d_logits = weights * (jnp.einsum("btnh,bsnh->bnts", d, v) - delta[..., None]) * scale
    pairs = (("bnts,bsnh->bnth", d_logits, k), ("bnts,btnh->bnsh", d_logits, q), ("bnts,btnh->bnsh", weights, d))
    d_query, *rest = (jnp.einsum(*pair) for pair in pairs)
    summed = (x.reshape(x.shape[0], -1, group, *x.shape[2:]).sum(2) for x in rest)
    return [x.astype(query.dtype) for x in (d_query, *summed)]


def _config_of(query, value, mask, softmax_scale, backward: bool) -> str:
    scale = 1 / math.sqrt(query.shape[-1]) if softmax_scale is None else float(softmax_scale)
    return _backend_config(query, value, MaskInfo() if mask is None else mask, scale, backward)


def _turned(shape: tuple[int, ...]) -> tuple[int, ...]:
    return shape[0], shape[2], shape[1], shape[3]


def forward(query, key, value, mask, softmax_scale):
    (B, T, N, _), Hv = query.shape, value.shape[-1]
    results = [((B, N, T, Hv), query.dtype, _ROWS_FIRST), ((B, N, T), jnp.float32, _PLAIN[3])]
    config = _config_of(query, value, mask, softmax_scale, False)
    out, lse = _call(FORWARD, config, results, query, key, value)
    return out.swapaxes(1, 2), lse.swapaxes(1, 2)


# Below this, d_out counts as zero: its squares would underflow in float32.
SMALLEST = 2.0**-60


def _out_of(d_out: jax.Array, delta: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns (d_out, out) such that rowsum(d_out * out) = delta. If a row of d_out is zero but its delta is not, one
    entry of d_out becomes a number too small to affect anything else."""
    first = (jnp.arange(d_out.shape[-1]) == 0).astype(jnp.float32)
    upcast = d_out.astype(jnp.float32)
    largest = jnp.max(jnp.abs(upcast), axis=-1, keepdims=True)
    upcast = jnp.where((largest < SMALLEST) & (delta[..., None] != 0), SMALLEST * first, upcast)
    largest = jnp.maximum(largest, SMALLEST)
    unit = upcast / largest
    squares = jnp.sum(unit * unit, axis=-1, keepdims=True)
    out = unit * (delta[..., None] / jnp.where(squares > 0, largest * squares, 1))
    return upcast.astype(d_out.dtype), out.astype(d_out.dtype)


def backward(saved: Saved, query, key, value, mask, softmax_scale):
    d_out, out = saved.d_out.astype(query.dtype), saved.get("out")
    if out is None:
        d_out, out = _out_of(d_out, saved.delta)
    results = [(_turned(x.shape), x.dtype, _ROWS_FIRST) for x in (query, key, value)]
    config = _config_of(query, value, mask, softmax_scale, True)
    lse = saved.lse.swapaxes(1, 2)
    gradients = _call(BACKWARD, config, results, query, key, value, lse, d_out, out)
    return {name: d.swapaxes(1, 2) for name, d in zip(("query", "key", "value"), gradients, strict=True)}


def _rejects(call: Any) -> str | None:
    release = tuple(int(n) for n in jax.__version__.split(".")[:2])
    if not KNOWN[0] <= release < KNOWN[1]:
        return f"its calls to cuDNN are known for jax 0.11 only, and this is {jax.__version__}"
    dims, mask = call.dims, call.mask
    if dims["H"] % 8 or dims["H"] > WIDEST:
        return f"H = {dims['H']} must be a multiple of 8, and at most {WIDEST}"
    if mask is None:
        return None
    if mask.causal and dims["T"] != dims["S"]:
        return f"its causal mask is top-left aligned, but T = {dims['T']} is not S = {dims['S']}"
    if mask.window is not None and not (mask.causal and mask.window[0] is not None):
        return "it supports windows only backward, with a causal mask"
    return None


op.register(
    forward,
    backward,
    platforms={"cuda"},
    dtypes={"bfloat16"},
    features={"causal", "window", "gqa", "cross_attention"},
    rejects=_rejects,
)
