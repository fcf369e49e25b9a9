"""layer_norm on every toolchain: adapts the engine's norm of rows to the parameters of the contracts."""

from __future__ import annotations

from typing import Any

from kernels.ops.layer_norm.contract import add_op, norm_of, op


def register(name: str, engine: Any) -> None:
    """Registers a backend of the norm, alone and with the residual, from the engine's file for its toolchain."""

    def forward(x, weight, bias, eps, cfg):
        return engine.forward(x, None, weight, bias, norm_of(eps), cfg)

    def backward(saved, x, weight, bias, eps, cfg):
        return engine.backward(saved, x, None, weight, bias, norm_of(eps), cfg)

    def forward_add(x, residual, weight, bias, eps, cfg):
        return engine.forward(x, residual, weight, bias, norm_of(eps), cfg)

    def backward_add(saved, x, residual, weight, bias, eps, cfg):
        return engine.backward(saved, x, residual, weight, bias, norm_of(eps), cfg)

    op.register(forward, backward, name=name, **engine.FACTS)
    add_op.register(forward_add, backward_add, name=name, **engine.FACTS)
