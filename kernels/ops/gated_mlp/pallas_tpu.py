"""The product of activation and gate on TPUs, in blocks: each array is read once and written once.

The gated MLP itself is not here: XLA's compiler for TPUs fuses the product into the adjacent matmuls, so it needs no
pass over memory; as a separate kernel it would.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from kernels.engines.matmul.pallas_activations import activation_in_vmem
from kernels.ops.gated_mlp.contract import GatedMLPConfig, activation_op, work_of_activation
from kernels.toolchains.pallas import pallas_launch

# Memory for a kernel's blocks and temporaries, and elements of a block. The smallest default limit of a chip is 16 MiB.
MOST_COLS, ELEMENTS = 2048, 128 * 1024


def gated_activation_fwd_kernel(gate_ref, up_ref, out_ref, *, activation):
    act = activation_in_vmem(activation)(gate_ref[...].astype(jnp.float32))
    out_ref[...] = (act * up_ref[...].astype(jnp.float32)).astype(out_ref.dtype)


def gated_activation_bwd_kernel(gate_ref, up_ref, d_ref, d_gate_ref, d_up_ref, *, activation):
    act, pull = jax.vjp(activation_in_vmem(activation), gate_ref[...].astype(jnp.float32))
    d = d_ref[...].astype(jnp.float32)
    d_gate_ref[...] = pull(d * up_ref[...].astype(jnp.float32))[0].astype(d_gate_ref.dtype)
    d_up_ref[...] = (d * act).astype(d_up_ref.dtype)


def _run(kernel, arrays, num_outputs, activation, cfg, cost):
    shape, F = arrays[0].shape, arrays[0].shape[-1]
    M = arrays[0].size // F
    rows, cols = min(M, cfg.block_rows), min(F, cfg.block_cols)
    block = pl.BlockSpec((rows, cols), lambda i, j: (i, j))
    out = pallas_launch(
        functools.partial(kernel, activation=activation),
        *(x.reshape(M, F) for x in arrays),
        out_shape=(jax.ShapeDtypeStruct((M, F), arrays[0].dtype),) * num_outputs,
        grid=(pl.cdiv(M, rows), pl.cdiv(F, cols)),
        in_specs=[block] * len(arrays),
        out_specs=(block,) * num_outputs,
        dimension_semantics=("parallel", "parallel"),
        work=cost,
        name=kernel.__name__,
    )
    return [x.reshape(shape) for x in out]


def forward(gate, up, activation, cfg):
    cost = work_of_activation(activation_op.bind(gate, up))[0]
    return _run(gated_activation_fwd_kernel, (gate, up), 1, activation, cfg, cost)[0]


def backward(saved, gate, up, activation, cfg):
    cost = work_of_activation(activation_op.bind(gate, up))[1]
    d_gate, d_up = _run(gated_activation_bwd_kernel, (gate, up, saved.d_out), 2, activation, cfg, cost)
    return {"gate": d_gate, "up": d_up}


def _config(call, elements):
    cols = min(MOST_COLS, -(-call.dims["F"] // 128) * 128)
    return GatedMLPConfig(block_rows=max(16, elements // cols // 16 * 16), block_cols=cols)


def heuristic(call, platform):
    return _config(call, ELEMENTS)


def candidates(call):
    return list(dict.fromkeys(_config(call, ELEMENTS // n) for n in (1, 2, 4)))


def rejects(call):
    return "an array has no elements" if call.gate.size == 0 else None


activation_op.register(
    forward,
    backward,
    platforms={"tpu"},
    dtypes={"float32", "bfloat16"},
    rejects=rejects,
    heuristic=heuristic,
    candidates=candidates,
)
