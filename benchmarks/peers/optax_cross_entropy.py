"""optax's cross entropy on logits that exist as a whole: what a fused one is compared with."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from benchmarks.peers import Expression, missing

FRAMEWORK = "jax"
OPERATIONS = ("cross_entropy",)
MOST_LOGITS = 16 * 2**30  # bytes in float32, of which the gradient needs several times as many


def available() -> str | None:
    return missing("optax")


def express(op_name: str, arguments: dict[str, Any]) -> Any:
    if arguments.get("logits_soft_cap") is not None:
        return "it cannot say logits_soft_cap"
    vocabulary = arguments["lm_head"].shape[1]
    logits = 4 * arguments["hidden"].shape[0] * vocabulary
    if logits > MOST_LOGITS:
        return f"its logits alone would take {logits / 2**30:.0f} GiB"

    def inside(targets: Any) -> Any:
        return (targets >= 0) & (targets < vocabulary)

    def loss(hidden: Any, lm_head: Any, targets: Any) -> Any:
        import optax

        logits = jnp.dot(hidden, lm_head, preferred_element_type=jnp.float32)
        labels = jnp.clip(targets, 0, vocabulary - 1)
        each = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return jnp.where(inside(targets), each, 0)

    def of(lse: Any, target_logit: Any, mean_logit: Any) -> Any:
        return jnp.where(inside(arguments["targets"]), lse - target_logit, 0)

    return Expression(loss, of)
