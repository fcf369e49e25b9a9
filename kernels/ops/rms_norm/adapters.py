"""rms_norm on every toolchain: adapts the engine's norm of rows to the parameters of the contracts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax.numpy as jnp

from kernels.engines.rows.norms import NormConfig
from kernels.framework.contract import Saved
from kernels.ops.rms_norm.contract import add_op, cotangents_op, norm_of, op


def _of_backward(facts: dict[str, Any]) -> dict[str, Any]:
    """Returns the facts of a backward that is an operation of its own: its configurations have no tunables of a forward."""

    def backward(cfg: NormConfig) -> NormConfig:
        return replace(cfg, block_rows=None, num_warps=None)

    if "heuristic" not in facts:
        return facts
    return facts | {
        "heuristic": lambda call, platform: backward(facts["heuristic"](call, platform)),
        "candidates": lambda call: list(dict.fromkeys(map(backward, facts["candidates"](call)))),
    }


def register(name: str, engine: Any) -> None:
    """Registers a backend of the norm, alone and with the residual, from the engine's file for its toolchain."""

    def forward(x, weight, eps, zero_centered, cfg):
        return engine.forward(x, None, weight, None, norm_of(eps, zero_centered), cfg)

    def backward(saved, x, weight, eps, zero_centered, cfg):
        return engine.backward(saved, x, None, weight, None, norm_of(eps, zero_centered), cfg)

    def forward_add(x, residual, weight, eps, zero_centered, cfg):
        return engine.forward(x, residual, weight, None, norm_of(eps, zero_centered), cfg)

    def backward_add(saved, x, residual, weight, eps, zero_centered, cfg):
        return engine.backward(saved, x, residual, weight, None, norm_of(eps, zero_centered), cfg)

    def cotangents(x, weight, rstd, d, cfg):
        saved = Saved(rstd=rstd, d_rstd=jnp.zeros_like(rstd), d_out=d)
        made = engine.backward(saved, x, None, weight, None, norm_of(0.0, False), cfg)  # eps is in rstd
        return made["x"].astype(x.dtype), made["weight"].astype(weight.dtype)

    op.register(forward, backward, name=name, **engine.FACTS)
    cotangents_op.register(cotangents, name=name, **_of_backward(engine.FACTS))
    add_op.register(forward_add, backward_add, name=name, **engine.FACTS)
