"""layer_norm as plain XLA, alone, with the residual, and with the projection."""

from __future__ import annotations

from kernels.engines.rows import norms_xla
from kernels.ops.layer_norm.adapters import register
from kernels.ops.layer_norm.contract import linear_op, norm_of


def forward_linear(x, weight, bias, projection, eps):
    return norms_xla.forward_linear(x, weight, bias, projection, norm_of(eps))


def backward_linear(saved, x, weight, bias, projection, eps):
    return norms_xla.backward_linear(saved, x, weight, bias, projection, norm_of(eps))


register("xla", norms_xla)
linear_op.register(forward_linear, backward_linear, **norms_xla.FACTS)
