"""The meaning of the fused projection and log-softmax that cross entropy is made of."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels._core.backend import Case
from kernels._core.binding import Call
from kernels._core.contract import Op
from kernels._core.work import Work, nbytes


@dataclass(frozen=True)
class CrossEntropyConfig:
    """Tunables; None leaves the choice to the configuration chain.

    Attributes:
      block_rows: rows (tokens) whose logits exist at one time.
      block_vocab, num_warps: entries of the vocabulary that a program handles at once, and its warps (Triton).
    """

    block_rows: int | None = None
    block_vocab: int | None = None
    num_warps: int | None = None


def cross_entropy(
    hidden: Float[Array, "*lead D"],
    lm_head: Float[Array, "D V"],
    targets: Int[Array, "*lead"],
    *,
    logits_soft_cap: float | None = None,
) -> tuple[Float[Array, "*lead"], Float[Array, "*lead"], Float[Array, "*lead"]]:
    """Returns, in float32 per token: log-sum-exp of the logits, the target's logit, and the mean of the logits.

    logits = cap(hidden lm_head). A target outside [0, V) has logit 0: padding, or a token of another vocabulary shard.
    Everything that a loss needs is a plain function of the three, and so is the same thing over a vocabulary that is
    split over devices: log-sum-exps are joined, target logits summed, means averaged.
    """
    logits = jnp.dot(hidden, lm_head, preferred_element_type=jnp.promote_types(hidden.dtype, jnp.float32))
    return cross_entropy_of_logits(logits, targets, logits_soft_cap=logits_soft_cap)


def cross_entropy_of_logits(
    logits: Float[Array, "*lead V"],
    targets: Int[Array, "*lead"],
    *,
    logits_soft_cap: float | None = None,
) -> tuple[Float[Array, "*lead"], Float[Array, "*lead"], Float[Array, "*lead"]]:
    """Returns what `cross_entropy` does, from logits that exist already."""
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    if logits_soft_cap is not None:
        logits = logits_soft_cap * jnp.tanh(logits / logits_soft_cap)
    V = logits.shape[-1]
    inside = (targets >= 0) & (targets < V)
    at_target = jnp.take_along_axis(logits, jnp.clip(targets, 0, V - 1)[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1), jnp.where(inside, at_target, 0), jnp.mean(logits, axis=-1)


def _targets(rng, dims):
    targets = rng.integers(0, dims["V"], dims["lead"])
    targets.reshape(-1)[::5] = -1
    return jnp.asarray(targets, jnp.int32)


def _case(name: str, *lead: int, options: dict | None = None, tags: tuple[str, ...] = (), **dims: int) -> Case:
    return Case(name, {"lead": lead, **dims}, options or {}, make={"targets": _targets}, tags=frozenset(tags))


def work(call: Call) -> tuple[Work, Work]:
    """Returns the work of the matmuls: the logits forward; the logits again and two gradients backward. No bytes of the
    logits, which need not be whole anywhere."""
    matmul = 2 * call.hidden.size * call.dims["V"]
    inputs, rows = (
        nbytes(call.hidden, call.lm_head),
        4 * call.targets.size,
    )  # each output, and its cotangent, is float32
    targets = nbytes(call.targets)
    return Work(matmul, inputs + targets + 3 * rows), Work(3 * matmul, 2 * inputs + targets + 4 * rows)


def work_of_logits(call: Call) -> tuple[Work, Work]:
    """Returns the work of passes over the logits: one forward, a reading and a writing one backward."""
    size, rows = call.logits.size, 4 * call.targets.size
    logits, targets = nbytes(call.logits), nbytes(call.targets)
    return Work(4 * size, logits + targets + 3 * rows), Work(4 * size, 2 * logits + targets + 4 * rows)


OUTPUTS = ("lse", "target_logit", "mean_logit")
# With the vocabulary split, a device has a part of each sum over it: `ejdist` joins them.
ELSEWHERE = {"V": "fused_cross_entropy"}

op = Op(
    cross_entropy,
    outputs=OUTPUTS,
    residuals=("lse",),
    local_dims={"lead"},
    elsewhere=ELSEWHERE,
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
    elsewhere=ELSEWHERE,
    config=CrossEntropyConfig,
    cases=(
        _case("small", 12, V=20, tags=("smoke",)),
        _case("soft_cap", 3, 5, V=50, options={"logits_soft_cap": 2.0}, tags=("code",)),
        _case("wide", 3, V=9001, tags=("code",)),
        _case("llama_8b", 4096, V=128256, tags=("bench", "code")),
    ),
    work=work_of_logits,
)
