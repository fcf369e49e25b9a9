"""QK-clip: after a step, queries and keys of heads whose logits grew past a limit become smaller.

Kimi Team, "Kimi K2: Open Agentic Intelligence", 2025 (arXiv:2507.20534), section 2.1. A head whose largest logit of a step is
S > tau has its logits multiplied by tau / S: both projections by the root of it; with latents, what is of one head's own, so
its part of queries with positions by all of it, because the key of that part is one for all heads. Where query heads share a
key head, S is the largest of theirs, and all of them become smaller with it.

S is not the largest logit but the largest log-sum-exp of logits, which every backend returns: at most log(keys) more, and
little more where one logit is large. So no logit of the step stays past tau, and a head may be scaled whose largest is less
than log(keys) below it: tau is at least twice that. The largest itself would take a maximum in every kernel, and on every
rank of a sequence.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ejdist.models.config import DecoderShape
from ejdist.models.part import LARGEST_LOGITS
from ejdist.models.stack import parts_of


def check_clip(tau: float, c: Any, keys: int) -> None:
    """Raises ValueError for a model whose logits `optimizer.qk_clip` cannot bound; names the key and the remedy.

    Args:
      keys: the most that a query sees.
    """
    start, parts = f"optimizer.qk_clip = {tau}", parts_of(c) if isinstance(c, DecoderShape) else {}
    if not any(part.logit_scales(c) for part in parts.values()):
        raise ValueError(f"{start}: no layer of model.layer_pattern has logits that it could bound; give null")
    bounded = {
        "qk_norm": "queries and keys are normalised after their projections",
        "attention_soft_cap": "logits are bounded",
        "attention_sinks": "a head's log-sum-exp, which bounds its logits, has its sink in it",
    }
    for key, why in bounded.items():
        if getattr(c, key):
            raise ValueError(f"{start} and model.{key} = {getattr(c, key)}: {why}; leave one of them out")
    if 0 < tau < (least := 2 * math.log(keys)):  # its section refuses 0 and less
        raise ValueError(
            f"{start}: the log-sum-exp that bounds a head's logits is {math.log(keys):.1f} where {keys} keys have logits of 0; "
            f"give at least twice that, {math.ceil(10 * least) / 10}, or small heads would vanish"
        )
    if silent := [name for name, part in parts.items() if part.logit_scales(c) is None]:
        raise ValueError(f"{start}: layers with {silent[0]} do not report their logits; give null")
    if c.mtp.modules:
        raise ValueError(
            f"{start} and model.mtp.modules = {c.mtp.modules}: the layer of multi-token prediction is not clipped; leave one "
            "of them out"
        )


def clipped(c: DecoderShape, tau: float, params: Any, largest: Mapping[str, jax.Array]) -> Any:
    """Returns the parameters with the heads scaled whose logits were past `tau`.

    Args:
      largest: name of a metric -> float32 [layers that have the part, heads], as `Part` reports them.

    Raises:
      ValueError: a part's logits are not among them.
    """
    layers = dict(params["layers"])
    for name, part in parts_of(c).items():
        if not (scales := part.logit_scales(c)):
            continue
        key = f"{name}/{LARGEST_LOGITS}"
        if key not in largest:
            raise ValueError(
                f"optimizer.qk_clip: the loss returns no metric {key!r}; it must return what layers report (LossTerms.layers)"
            )
        declared = part.declare(c)
        fewest = min(p.shape[_of_heads(p)] for p in (declared[n] for n in scales))
        told = largest[key]
        of_groups = jnp.max(told.reshape(told.shape[0], fewest, -1), -1)
        # What is not finite is for the guards to find.
        factor = jnp.where(jnp.isfinite(of_groups) & (of_groups > tau), tau / of_groups, 1.0)
        for matrix, power in scales.items():
            at = _of_heads(declared[matrix])
            heads = jnp.repeat(factor, declared[matrix].shape[at] // fewest, axis=1)
            shape = [1] * (layers[matrix].ndim - 1)
            shape[at] = heads.shape[1]
            layers[matrix] = layers[matrix] * heads.reshape(-1, *shape) ** jnp.asarray(power, jnp.float32)
    return {**params, "layers": layers}


def _of_heads(p: Any) -> int:
    """Returns which dim of a layer's parameter is its heads."""
    return next(i for i, d in enumerate(p.dims.split()) if d in "NK")
