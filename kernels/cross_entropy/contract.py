"""The meaning of the fused projection and log-softmax that cross entropy is made of."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels._core.contract import Call, Case, Op
from kernels._core.work import Work, nbytes


@dataclass(frozen=True)
class CrossEntropyConfig:
    """Tunables: rows (tokens) whose logits exist at one time. None: chosen."""

    block_rows: int | None = None


def cross_entropy(
    hidden: Float[Array, "T D"],
    lm_head: Float[Array, "D V"],
    targets: Int[Array, " T"],
    *,
    logits_soft_cap: float | None = None,
) -> tuple[Float[Array, " T"], Float[Array, " T"], Float[Array, " T"]]:
    """Returns, in float32 per token: log-sum-exp of the logits, the target's logit, and the mean of the logits.

    logits = cap(hidden lm_head). A target outside [0, V) has logit 0: padding, or a token of another vocabulary shard.
    Everything that a loss needs is a plain function of the three, and so is the same thing over a vocabulary that is
    split over devices (`join_vocabulary_shards`).
    """
    accumulate = jnp.promote_types(hidden.dtype, jnp.float32)
    logits = jnp.dot(hidden, lm_head, preferred_element_type=accumulate)
    if logits_soft_cap is not None:
        logits = logits_soft_cap * jnp.tanh(logits / logits_soft_cap)
    V = lm_head.shape[1]
    inside = (targets >= 0) & (targets < V)
    at_target = jnp.take_along_axis(logits, jnp.clip(targets, 0, V - 1)[:, None], axis=1)[:, 0]
    return jax.nn.logsumexp(logits, axis=-1), jnp.where(inside, at_target, 0), jnp.mean(logits, axis=-1)


def _targets(rng, dims):
    targets = rng.integers(0, dims["V"], dims["T"])
    targets[::5] = -1
    return jnp.asarray(targets, jnp.int32)


def work(call: Call) -> tuple[Work, Work]:
    """Returns the work of the matmuls: the logits forward; the logits again and two gradients backward. No bytes of the
    logits, which need not be whole anywhere."""
    matmul = 2 * call.hidden.size * call.dims["V"]
    inputs, rows = nbytes(call.hidden, call.lm_head), 4 * call.dims["T"]  # each output, and its cotangent, is float32
    targets = nbytes(call.targets)
    return Work(matmul, inputs + targets + 3 * rows), Work(3 * matmul, 2 * inputs + targets + 4 * rows)


op = Op(
    cross_entropy,
    work=work,
    outputs=("lse", "target_logit", "mean_logit"),
    residuals=("lse",),
    local_dims={"T"},
    same_dtype=("hidden", "lm_head"),
    order=("triton_gpu", "pallas_tpu", "xla"),
    config=CrossEntropyConfig,
    cases=(
        Case("small", {"T": 12, "D": 8, "V": 20}, make={"targets": _targets}, tags=frozenset({"smoke"})),
        Case("odd", {"T": 301, "D": 16, "V": 37}, make={"targets": _targets}),
        Case("soft_cap", {"T": 23, "D": 8, "V": 50}, {"logits_soft_cap": 2.0}, make={"targets": _targets}),
        Case("llama_8b", {"T": 16384, "D": 4096, "V": 128256}, make={"targets": _targets}, tags=frozenset({"bench"})),
    ),
)
