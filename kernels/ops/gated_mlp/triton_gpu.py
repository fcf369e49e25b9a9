"""A gated MLP on GPUs: the product of activation and gate in one pass per direction, between XLA's matmuls (cuBLAS)."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import jax
import triton
import triton.language as tl

from kernels.engines.matmul.triton_activations import activation
from kernels.ops.gated_mlp.contract import GatedMLPConfig, activation_of, activation_op, op, work_of_activation
from kernels.ops.gated_mlp.matmuls import block_tokens, by_block, gradients_through, hidden, output
from kernels.toolchains.triton import triton_launch


@triton.jit
def gated_activation_fwd_kernel(gate_ptr, up_ptr, out_ptr, SIZE: tl.constexpr, NAME: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < SIZE
    gate = tl.load(gate_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    act, _ = activation(gate, NAME)
    tl.store(out_ptr + offsets, (act * up).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def gated_activation_bwd_kernel(
    gate_ptr,
    up_ptr,
    d_ptr,
    d_gate_ptr,
    d_up_ptr,
    out_ptr,  # the recomputed product, for the gradient of the following matmul; or None
    SIZE: tl.constexpr,
    NAME: tl.constexpr,
    BLOCK: tl.constexpr,
):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < SIZE
    gate = tl.load(gate_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    d = tl.load(d_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    act, slope = activation(gate, NAME)
    tl.store(d_gate_ptr + offsets, (d * up * slope).to(d_gate_ptr.dtype.element_ty), mask=mask)
    tl.store(d_up_ptr + offsets, (d * act).to(d_up_ptr.dtype.element_ty), mask=mask)
    if out_ptr is not None:
        tl.store(out_ptr + offsets, (act * up).to(out_ptr.dtype.element_ty), mask=mask)


def _product(gate, up, activation, cfg):
    (out,) = triton_launch(
        gated_activation_fwd_kernel,
        gate,
        up,
        out_shape=(jax.ShapeDtypeStruct(gate.shape, gate.dtype),),
        grid=(triton.cdiv(gate.size, cfg.block_size),),
        num_warps=cfg.num_warps,
        work=work_of_activation(activation_op.bind(gate, up))[0],
        SIZE=gate.size,
        NAME=activation,
        BLOCK=cfg.block_size,
    )
    return out


def _pull(gate, up, d, activation, cfg, with_product):
    """Returns (gradient of gate, gradient of up), followed by the product if requested."""
    shape = jax.ShapeDtypeStruct(gate.shape, gate.dtype)
    unused: dict[str, Any] = {} if with_product else {"out_ptr": None}
    return triton_launch(
        gated_activation_bwd_kernel,
        gate,
        up,
        d,
        out_shape=(shape,) * (3 if with_product else 2),
        grid=(triton.cdiv(gate.size, cfg.backward_block_size),),
        num_warps=cfg.backward_num_warps,
        work=work_of_activation(activation_op.bind(gate, up))[1],
        SIZE=gate.size,
        NAME=activation,
        BLOCK=cfg.backward_block_size,
        **unused,
    )


def forward_activation(gate, up, activation, cfg):
    activation_of(activation)
    return _product(gate, up, activation, cfg)


def backward_activation(saved, gate, up, activation, cfg):
    d_gate, d_up = _pull(gate, up, saved.d_out, activation, cfg, False)
    return {"gate": d_gate, "up": d_up}


def forward(x, gate, up, down, activation, cfg):
    activation_of(activation)
    return by_block(lambda x: output(_product(*hidden(x, gate, up), activation, cfg), down), x, cfg.block_tokens)


def backward(saved, x, gate, up, down, activation, cfg):
    def pull(g, u, dh):
        dg, du, h = _pull(g, u, dh, activation, cfg, True)
        return h, dg, du

    return gradients_through(pull, saved.d_out, x, gate, up, down, cfg.block_tokens)


def heuristic(call, platform):
    # 16 elements of each array per thread: two loads of 16 bytes for a 16-bit type.
    return GatedMLPConfig(block_size=2048, num_warps=4, backward_block_size=2048, backward_num_warps=4)


def candidates(call):
    configs = [heuristic(call, "cuda")]
    configs += [GatedMLPConfig(32 * w * each, w, 32 * w * each, w) for w in (4, 8) for each in (8, 16, 32)]
    return list(dict.fromkeys(configs))


def of_mlp(call, cfg):
    """Returns the configuration of the activation as one of the gated MLP."""
    return replace(cfg, block_tokens=block_tokens(math.prod(call.dims["lead"]), call.dims["F"]))


def mlp_heuristic(call, platform):
    return of_mlp(call, heuristic(call, platform))


def mlp_candidates(call):
    return [of_mlp(call, cfg) for cfg in candidates(call)]


def rejects(call):
    if any(x.size == 0 for x in (call.arguments.get(n) for n in ("x", "gate")) if x is not None):
        return "an array has no elements"
    return None


FACTS: Any = {
    "platforms": {"cuda"},
    "dtypes": {"float32", "bfloat16", "float16"},
    "rejects": rejects,
}
op.register(forward, backward, heuristic=mlp_heuristic, candidates=mlp_candidates, **FACTS)
activation_op.register(forward_activation, backward_activation, heuristic=heuristic, candidates=candidates, **FACTS)
