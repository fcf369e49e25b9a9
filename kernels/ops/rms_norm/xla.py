"""rms_norm as plain XLA, alone, with the residual, and with the projection."""

from __future__ import annotations

from kernels.engines.rows import norms_xla
from kernels.ops.rms_norm.adapters import register
from kernels.ops.rms_norm.contract import linear_op, norm_of


def forward_linear(x, weight, projection, eps, zero_centered):
    return norms_xla.forward_linear(x, weight, None, projection, norm_of(eps, zero_centered))


def backward_linear(saved, x, weight, projection, eps, zero_centered):
    return norms_xla.backward_linear(saved, x, weight, None, projection, norm_of(eps, zero_centered))


register("xla", norms_xla)
linear_op.register(forward_linear, backward_linear, **norms_xla.FACTS)
