"""rms_norm on GPUs, alone and with the residual: the kernels of norms, without the mean."""

from __future__ import annotations

from kernels.engines.rows import norms_triton as norms
from kernels.ops.rms_norm.contract import add_op, op, work, work_of_add


def forward(x, weight, eps, zero_centered, cfg):
    how = {"eps": eps, "centered": False, "zero_centered": zero_centered}
    return norms.normalised(x, None, weight, None, cfg, work(op.bind(x, weight))[0], **how)


def backward(saved, x, weight, eps, zero_centered, cfg):
    cost = work(op.bind(x, weight))[1]
    return norms.pulled(saved, x, x, weight, None, cfg, cost, zero_centered=zero_centered)[1]


def forward_add(x, residual, weight, eps, zero_centered, cfg):
    how = {"eps": eps, "centered": False, "zero_centered": zero_centered}
    return norms.normalised(x, residual, weight, None, cfg, work_of_add(add_op.bind(x, residual, weight))[0], **how)


def backward_add(saved, x, residual, weight, eps, zero_centered, cfg):
    cost = work_of_add(add_op.bind(x, residual, weight))[1]
    d, gradients = norms.pulled(saved, saved.stream, x, weight, None, cfg, cost, zero_centered=zero_centered)
    return {**gradients, "residual": d}


def heuristic(call, platform):
    return norms.shapes(call, crowded="residual" in call.arguments)


op.register(forward, backward, heuristic=heuristic, **norms.FACTS)
add_op.register(forward_add, backward_add, heuristic=heuristic, **norms.FACTS)
