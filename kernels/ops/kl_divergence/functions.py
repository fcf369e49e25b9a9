"""Public function: the KL divergence of teacher and student, per token or reduced."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from kernels.engines.rows.losses import check_cap, check_reduction, is_counted, reduced
from kernels.engines.rows.vocabulary import no_features
from kernels.framework.binding import is_array
from kernels.framework.dims import leading
from kernels.framework.public import Prepared, public
from kernels.framework.segments import indices
from kernels.ops.kl_divergence.contract import logits_op, op

NAME = "fused_kl_divergence"


@public(op, logits_op, module="FusedKLDivergence")
def fused_kl_divergence(
    hidden: jax.Array | None = None,
    lm_head: jax.Array | None = None,
    teacher_hidden: jax.Array | None = None,
    teacher_lm_head: jax.Array | None = None,
    *,
    logits: jax.Array | None = None,
    teacher_logits: jax.Array | None = None,
    direction: str = "forward",
    temperature: float = 1.0,
    targets: jax.Array | None = None,
    ignore_index: int = -1,
    weights: jax.Array | None = None,
    logits_soft_cap: float | None = None,
    teacher_logits_soft_cap: float | None = None,
    reduction: str = "mean",
) -> Prepared:
    """Returns the KL divergence of teacher and student, each softmax(cap(hidden lm_head) / temperature), in float32.

    The student's arrays have gradients; the teacher's are data, as under `stop_gradient`.

    Args:
      hidden: [*lead, D]; lm_head: [D, V], of the student.
      teacher_hidden: [*lead, Dt]; teacher_lm_head: [Dt, V], of a teacher of any width and dtype. Logits are
        never materialised, only one block of tokens at a time.
      logits, teacher_logits: [*lead, V], both, instead of hidden states and heads.
      direction: "forward", KL(teacher || student), which is mode-covering; or "reverse", KL(student || teacher), which is
        mode-seeking.
      temperature: divides the logits of both. Gradients scale with 1 / temperature²; multiply by temperature² to
        undo that (Hinton).
      targets: int [*lead], used only to select tokens: those with `ignore_index` or -100 do not count.
      weights: float [*lead], one per token; the mean divides by their sum.
      logits_soft_cap, teacher_logits_soft_cap: cap tanh(logits / cap) for each model; None for no cap.
      reduction: "mean" over counted tokens (0 if there are none), "sum", or "none" for [*lead].
      cfg: `KLDivergenceConfig(block_rows=...)`, the number of tokens whose logits exist at once.

    Raises:
      ValueError: naming the argument.

    Source: Hinton, Vinyals and Dean 2015, arXiv:1503.02531; reverse: Gu et al., MiniLLM, 2023, arXiv:2306.08543.

    >>> import jax.numpy as jnp
    >>> student, teacher = jnp.log(jnp.array([[0.5, 0.5]])), jnp.log(jnp.array([[0.25, 0.75]]))
    >>> forward = fused_kl_divergence(logits=student, teacher_logits=teacher)
    >>> reverse = fused_kl_divergence(logits=student, teacher_logits=teacher, direction="reverse")
    >>> print(forward.round(4), reverse.round(4))
    0.1308 0.1438
    """
    if direction not in ("forward", "reverse"):
        raise ValueError(
            f"{NAME}: argument 'direction' = {direction!r}: use forward, KL(teacher || student), or reverse"
        )
    check_reduction(NAME, reduction)
    if not 0 < temperature < float("inf"):
        raise ValueError(
            f"{NAME}: argument 'temperature' must be positive and finite, got {temperature}; use 1 for none"
        )
    check_cap(NAME, "logits_soft_cap", logits_soft_cap)
    check_cap(NAME, "teacher_logits_soft_cap", teacher_logits_soft_cap)
    call, operation = _bound(
        {"hidden": hidden, "lm_head": lm_head, "teacher_hidden": teacher_hidden, "teacher_lm_head": teacher_lm_head},
        {"logits": logits, "teacher_logits": teacher_logits},
        reverse=direction == "reverse",
        temperature=float(temperature),
        **{} if logits_soft_cap is None else {"logits_soft_cap": float(logits_soft_cap)},
        **{} if teacher_logits_soft_cap is None else {"teacher_logits_soft_cap": float(teacher_logits_soft_cap)},
    )
    lead = call.arguments["hidden" if operation is op else "logits"].shape[:-1]
    per_token = {"targets": targets, "weights": weights}
    # Converted to int32: in 8 or 16 bits an ignored index could wrap to a token.
    per_token = {
        n: None if x is None else indices(x) if n == "targets" else jnp.asarray(x) for n, x in per_token.items()
    }
    for name, x in per_token.items():
        if x is not None and x.shape != lead:
            raise ValueError(f"{NAME}: argument {name!r} must have shape {lead}, got {x.shape}")
    marks, counts = per_token["targets"], jnp.ones(lead, jnp.float32)
    if marks is not None:
        if not jnp.issubdtype(marks.dtype, jnp.integer):
            raise ValueError(
                f"{NAME}: argument 'targets' must be integers, got {marks.dtype}; it selects the tokens that count"
            )
        counts = is_counted(marks, ignore_index).astype(jnp.float32)

    def finish(student_lse: jax.Array, teacher_lse: jax.Array, gap: jax.Array) -> jax.Array:
        lse_p, lse_q = (student_lse, teacher_lse) if direction == "reverse" else (teacher_lse, student_lse)
        # Masked by selection, not multiplied by zero: the divergence of an ignored token may be infinite.
        losses = jnp.where(counts > 0, gap - lse_p + lse_q, 0.0)
        return reduced(losses, counts, per_token["weights"], reduction)

    return Prepared(call, finish=finish, dims=leading(len(lead)) if reduction == "none" else (), op=operation)


def _bound(fused: dict[str, Any], plain: dict[str, Any], **options: Any) -> tuple[Any, Any]:
    """Returns (the bound call, its operation) for the arrays that were passed."""
    whole = [all(x is not None for x in arrays.values()) for arrays in (fused, plain)]
    some = [any(x is not None for x in arrays.values()) for arrays in (fused, plain)]
    if whole != some or sum(whole) != 1:
        raise ValueError(
            f"{NAME}: pass either 'hidden', 'lm_head', 'teacher_hidden' and 'teacher_lm_head', or 'logits' and "
            "'teacher_logits'; logits of one model are its hidden @ lm_head"
        )
    arrays, operation = (fused, op) if whole[0] else (plain, logits_op)
    for name, x in arrays.items():
        if not is_array(x):
            raise ValueError(f"{NAME}: argument {name!r} must be an array, got {type(x).__name__}")
        if no_features(x):
            raise ValueError(f"{NAME}: argument {name!r} of shape {x.shape} has no features, or no vocabulary")
    return operation.bind(**arrays, **options), operation
