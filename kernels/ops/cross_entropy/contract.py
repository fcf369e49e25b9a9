"""Contracts of the fused projection and log-softmax that cross entropy is computed from."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels.engines.rows.losses import ALSO_IGNORED, check_cap, is_counted
from kernels.engines.rows.vocabulary import VocabularyConfig
from kernels.framework.backend import Case
from kernels.framework.binding import Call
from kernels.framework.contract import Op
from kernels.framework.work import Work, nbytes


class CrossEntropyConfig(VocabularyConfig):
    """Tunables of cross entropy; see `VocabularyConfig`."""


def cross_entropy(
    hidden: Float[Array, "*lead D"],
    lm_head: Float[Array, "D V"],
    targets: Int[Array, "*lead"],
    *,
    logits_soft_cap: float | None = None,
) -> tuple[Float[Array, "*lead"], Float[Array, "*lead"], Float[Array, "*lead"]]:
    """Returns, in float32 per token: log-sum-exp of the logits, the target's logit, and the mean of the logits.

    logits = cap(hidden lm_head). A target outside [0, V) has logit 0: it is padding, or a token of another vocabulary shard.
    Every loss is a plain function of these three. Over a vocabulary that is split over devices, log-sum-exps are
    combined, target logits summed and means averaged.
    """
    logits = jnp.dot(hidden, lm_head, preferred_element_type=jnp.promote_types(hidden.dtype, jnp.float32))
    return cross_entropy_of_logits(logits, targets, logits_soft_cap=logits_soft_cap)


def cross_entropy_of_logits(
    logits: Float[Array, "*lead V"],
    targets: Int[Array, "*lead"],
    *,
    logits_soft_cap: float | None = None,
) -> tuple[Float[Array, "*lead"], Float[Array, "*lead"], Float[Array, "*lead"]]:
    """Returns the outputs of `cross_entropy`, from existing logits."""
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    if logits_soft_cap is not None:
        logits = logits_soft_cap * jnp.tanh(logits / logits_soft_cap)
    V = logits.shape[-1]
    inside = (targets >= 0) & (targets < V)
    at_target = jnp.take_along_axis(logits, jnp.clip(targets, 0, V - 1)[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1), jnp.where(inside, at_target, 0), jnp.mean(logits, axis=-1)


class TokenLosses(NamedTuple):
    """Per-token terms, float32, zero where the target is ignored. Each is differentiable."""

    loss: jax.Array  # the summand of `fused_cross_entropy`: cross entropy plus z_loss
    z_loss: jax.Array  # the part of loss added by the argument z_loss; zero without it
    counted: jax.Array  # 1 where the token counts, 0 where it is ignored


class Terms(NamedTuple):
    """Per-token terms for the sums, kept separate."""

    cross_entropy: jax.Array
    z_loss: jax.Array
    counted: jax.Array


def terms_of_tokens(
    lse: jax.Array,
    target_logit: jax.Array,
    mean_logit: jax.Array,
    targets: jax.Array,
    *,
    vocabulary: int,
    ignore_index: int = -1,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Terms:
    """Returns the terms of cross entropy from the outputs of the operation, given the size of the vocabulary.

    cross_entropy = lse - (1 - s) target_logit - s mean_logit with smoothing s; z_loss = z lse^2. An ignored token is
    masked by selection, not multiplied by zero: otherwise an infinite lse of padding would make the loss or its gradient NaN.
    """
    counted = is_counted(targets, ignore_index)
    lse = jnp.where(counted, lse, 0.0)
    loss = lse - (1 - label_smoothing) * target_logit
    if label_smoothing:  # the mean is -inf where a token of the vocabulary is masked out
        loss = loss - label_smoothing * mean_logit
    # A target outside the vocabulary that is not ignored is the caller's mistake. Traced code cannot raise, so it becomes
    # NaN in the loss and the gradients.
    stray = counted & ((targets < 0) | (targets >= vocabulary))
    loss = loss * jnp.where(stray, jnp.nan, 1.0)
    return Terms(jnp.where(counted, loss, 0.0), z_loss * lse * lse, counted.astype(jnp.float32))


def token_losses(
    lse: jax.Array, target_logit: jax.Array, mean_logit: jax.Array, targets: jax.Array, **options: Any
) -> TokenLosses:
    """Returns the result of `fused_token_losses` from the outputs of the operation. Arguments as in `terms_of_tokens`."""
    terms = terms_of_tokens(lse, target_logit, mean_logit, targets, **options)
    return TokenLosses(terms.cross_entropy + terms.z_loss, terms.z_loss, terms.counted)


def summed(terms: Terms, weights: jax.Array | None) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the outputs of `cross_entropy_sums` from the terms of its tokens."""
    loss, z_loss = (jnp.sum(x if weights is None else x * weights) for x in (terms.cross_entropy, terms.z_loss))
    return loss + z_loss, loss, z_loss


def cotangents_of_sums(residuals: dict, cotangents: dict) -> dict:
    """Returns the inputs of the backward of `cross_entropy_sums`. Absent cotangents stay absent: the gradients of the total
    suffice unless `loss` or `z_loss` has its own cotangent."""
    return residuals | cotangents


def check_options(owner: str, label_smoothing: float, z_loss: float, logits_soft_cap: float | None) -> None:
    """Raises ValueError for options that define no loss, naming the argument."""
    if not 0 <= label_smoothing < 1:
        raise ValueError(f"{owner}: argument 'label_smoothing' must be in [0, 1), got {label_smoothing}")
    if not (z_loss >= 0 and math.isfinite(z_loss)):
        raise ValueError(f"{owner}: argument 'z_loss' must not be negative, got {z_loss}; use 0 for none")
    check_cap(owner, "logits_soft_cap", logits_soft_cap)


def cross_entropy_sums(
    hidden: Float[Array, "*lead D"],
    lm_head: Float[Array, "D V"],
    targets: Int[Array, "*lead"],
    weights: Float[Array, "*lead"] | None = None,
    *,
    ignore_index: int = -1,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    logits_soft_cap: float | None = None,
) -> tuple[Float[Array, ""], Float[Array, ""], Float[Array, ""]]:
    """Returns weighted sums over the counted tokens in float32: cross entropy plus z-loss, and each alone.

    All three are differentiable. The tokens of the total share one cotangent, so a differentiated forward computes the
    gradients while it has the logits, and no logits are computed twice. Gradients of one part alone recompute them.
    """
    check_options("cross_entropy_sums", label_smoothing, z_loss, logits_soft_cap)
    outputs = cross_entropy(hidden, lm_head, targets, logits_soft_cap=logits_soft_cap)
    how: Any = {"ignore_index": ignore_index, "label_smoothing": label_smoothing, "z_loss": z_loss}
    return summed(terms_of_tokens(*outputs, targets=targets, vocabulary=lm_head.shape[1], **how), weights)


def residuals_of_sums(
    hidden: jax.Array,
    lm_head: jax.Array,
    targets: jax.Array,
    weights: jax.Array | None = None,
    *,
    ignore_index: int = -1,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    logits_soft_cap: float | None = None,
) -> dict[str, jax.Array]:
    """Returns the gradients of the sum for a cotangent of one: of hidden in its dtype, of lm_head in float32, in which it is
    accumulated, and of weights, which is the loss of each token."""
    ones = jnp.ones(targets.shape, jnp.float32) if weights is None else weights.astype(jnp.float32)

    def total(hidden: jax.Array, lm_head: jax.Array, weights: jax.Array) -> jax.Array:
        how: Any = {"ignore_index": ignore_index, "label_smoothing": label_smoothing, "z_loss": z_loss}
        return cross_entropy_sums(hidden, lm_head, targets, weights, logits_soft_cap=logits_soft_cap, **how)[0]

    wide = hidden.astype(jnp.float32), lm_head.astype(jnp.float32)
    d_hidden, d_lm_head, losses = jax.grad(total, (0, 1, 2))(*wide, ones)
    return {"hidden_gradient": d_hidden.astype(hidden.dtype), "lm_head_gradient": d_lm_head, "losses": losses}


def _targets(rng, dims, ignored=-1):
    targets = rng.integers(0, dims["V"], dims["lead"])
    targets.reshape(-1)[::5] = ignored
    return jnp.asarray(targets, jnp.int32)


def _some_at_minus_one_hundred(rng, dims):
    return _targets(rng, dims, ALSO_IGNORED)


def _case(name: str, *lead: int, options: dict | None = None, tags: tuple[str, ...] = (), **dims: int) -> Case:
    return Case(name, {"lead": lead, **dims}, options or {}, make={"targets": _targets}, tags=frozenset(tags))


def work(call: Call) -> tuple[Work, Work]:
    """Returns the work of the matmuls: the logits forward; the logits again and two gradients backward. The
    logits count no bytes, since they need not be materialised."""
    matmul = 2 * call.hidden.size * call.dims["V"]
    inputs, rows = (
        nbytes(call.hidden, call.lm_head),
        4 * call.targets.size,
    )  # each output, and its cotangent, is float32
    targets = nbytes(call.targets)
    return Work(matmul, inputs + targets + 3 * rows), Work(3 * matmul, 2 * inputs + targets + 4 * rows)


def work_of_logits(call: Call) -> tuple[Work, Work]:
    """Returns the work of passes over the logits: one that reads them forward; one that reads and one that writes backward."""
    size, rows = call.logits.size, 4 * call.targets.size
    logits, targets = nbytes(call.logits), nbytes(call.targets)
    return Work(4 * size, logits + targets + 3 * rows), Work(4 * size, 2 * logits + targets + 4 * rows)


def work_of_sums(call: Call) -> tuple[Work, Work]:
    """Returns the work of the matmuls: the logits forward, two gradients backward, wherever they are computed."""
    forward, backward = work(call)
    return forward, Work(backward.flops - forward.flops, backward.bytes)


OUTPUTS = ("lse", "target_logit", "mean_logit")
# If the vocabulary is split, each device has a partial sum over it; `ejdist` combines them.
ELSEWHERE = {"V": "fused_cross_entropy"}

op = Op(
    cross_entropy,
    outputs=OUTPUTS,
    residuals=("lse",),
    local_dims={"lead"},
    see_also=ELSEWHERE,
    weights=("lm_head",),
    same_dtype=("hidden", "lm_head"),
    config=CrossEntropyConfig,
    cases=(
        _case("small", 12, D=8, V=20, tags=("smoke",)),
        _case("odd", 7, 43, D=16, V=37),
        _case("soft_cap", 23, D=8, V=50, options={"logits_soft_cap": 2.0}),
        _case("llama_8b", 16384, D=4096, V=128256, tags=("bench", "code")),
    ),
    work=work,
)

logits_op = Op(
    cross_entropy_of_logits,
    outputs=OUTPUTS,
    residuals=("lse",),
    local_dims={"lead"},
    see_also=ELSEWHERE,
    config=CrossEntropyConfig,
    cases=(
        _case("small", 12, V=20, tags=("smoke",)),
        _case("soft_cap", 3, 5, V=50, options={"logits_soft_cap": 2.0}, tags=("code",)),
        _case("wide", 3, V=9001, tags=("code",)),
        _case("llama_8b", 4096, V=128256, tags=("bench", "code")),
    ),
    work=work_of_logits,
)

EVERY_OPTION = {"ignore_index": 7, "label_smoothing": 0.1, "z_loss": 1e-2, "logits_soft_cap": 3.0}
sums_op = Op(
    cross_entropy_sums,
    outputs=("total", "loss", "z_loss"),
    extra_residuals=residuals_of_sums,
    backward_inputs=cotangents_of_sums,
    sum_dims={"lead"},
    see_also=ELSEWHERE,
    weights=("lm_head",),
    same_dtype=("hidden", "lm_head"),
    config=CrossEntropyConfig,
    cases=(
        _case("small", 12, D=8, V=20, tags=("smoke",)),
        Case(
            "odd",
            {"lead": (7, 43), "D": 16, "V": 37},
            EVERY_OPTION,
            arrays=("weights",),
            make={"targets": _some_at_minus_one_hundred},
        ),
        _case("llama_8b", 16384, D=4096, V=128256, tags=("bench", "code")),
        _case("llama_8b_32k", 32768, D=4096, V=128256, tags=("bench",)),
    ),
    work=work_of_sums,
)
