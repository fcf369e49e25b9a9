"""The walk over blocks of tokens: the matmuls, which are XLA's on every device, around what a backend does with the logits.

A backend brings two functions of the raw logits of a block, [rows, V] in float32; `how` is (reverse, temperature, soft
cap, soft cap of the teacher):
  outputs: (student, teacher, how, cfg) -> (student_lse, teacher_lse, gap), [rows] each.
  pull: (student, teacher, {residual or cotangent: [rows]}, dtype, how, cfg) -> the gradient of the student's, in that dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from kernels.engines.matmul.dot import dot
from kernels.engines.rows.vocabulary import in_blocks, out_of_blocks
from kernels.ops.kl_divergence.contract import op

# Logits of one block of each model: 2^25 float32 are 128 MiB.
BLOCK_ELEMENTS, MOST_ROWS = 2**25, 4096
PER_ROW = ("student_lse", "teacher_lse", "gap", "d_student_lse", "d_gap")


def register(name: str, outputs_of: Callable, pull: Callable, **facts: Any) -> None:
    """Registers a backend of the operation on hidden states."""

    def forward(
        hidden,
        lm_head,
        teacher_hidden,
        teacher_lm_head,
        reverse,
        temperature,
        logits_soft_cap,
        teacher_logits_soft_cap,
        cfg,
    ):
        how = reverse, temperature, logits_soft_cap, teacher_logits_soft_cap
        lead, rows = hidden.shape[:-1], cfg.block_rows
        flat = [x.reshape(-1, x.shape[-1]) for x in (hidden, teacher_hidden)]

        def block(_: None, x: Any) -> Any:
            student, teacher = dot("td,dv->tv", x[0], lm_head), dot("td,dv->tv", x[1], teacher_lm_head)
            return None, outputs_of(student, teacher, how, cfg)

        _, outputs = jax.lax.scan(block, None, tuple(in_blocks(x, rows) for x in flat))
        return tuple(out_of_blocks(x, flat[0].shape[0]).reshape(lead) for x in outputs)

    def backward(
        saved,
        hidden,
        lm_head,
        teacher_hidden,
        teacher_lm_head,
        reverse,
        temperature,
        logits_soft_cap,
        teacher_logits_soft_cap,
        cfg,
    ):
        how = reverse, temperature, logits_soft_cap, teacher_logits_soft_cap
        shape, rows = hidden.shape, cfg.block_rows
        flat = [x.reshape(-1, x.shape[-1]) for x in (hidden, teacher_hidden)]

        def block(d_head: jax.Array, x: Any) -> Any:
            h, t, row = x
            student, teacher = dot("td,dv->tv", h, lm_head), dot("td,dv->tv", t, teacher_lm_head)
            d = pull(student, teacher, row, h.dtype, how, cfg)
            return d_head + dot("td,tv->dv", h, d), dot("tv,dv->td", d, lm_head).astype(h.dtype)

        # A padded row has cotangents of zero, and residuals of zero keep its exponentials finite.
        row = {name: in_blocks(saved[name].reshape(-1), rows) for name in PER_ROW}
        xs = (*(in_blocks(x, rows) for x in flat), row)
        d_head, d_hidden = jax.lax.scan(block, jnp.zeros(lm_head.shape, jnp.float32), xs)
        return {"hidden": out_of_blocks(d_hidden, flat[0].shape[0]).reshape(shape), "lm_head": d_head}

    op.register(forward, backward, name=name, **facts)
