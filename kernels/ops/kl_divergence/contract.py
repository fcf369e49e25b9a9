"""Contracts of the fused projections and softmaxes that the KL divergence of two models is computed from."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kernels.engines.rows.vocabulary import VocabularyConfig
from kernels.framework.backend import Case
from kernels.framework.binding import Call
from kernels.framework.contract import Op
from kernels.framework.work import Work, nbytes


class KLDivergenceConfig(VocabularyConfig):
    """Tunables of the KL divergence; see `VocabularyConfig`."""


def kl_divergence(
    hidden: Float[Array, "*lead D"],
    lm_head: Float[Array, "D V"],
    teacher_hidden: Float[Array, "*lead Dt"],
    teacher_lm_head: Float[Array, "Dt V"],
    *,
    reverse: bool = False,
    temperature: float = 1.0,
    logits_soft_cap: float | None = None,
    teacher_logits_soft_cap: float | None = None,
) -> tuple[Float[Array, "*lead"], Float[Array, "*lead"], Float[Array, "*lead"]]:
    """Returns, in float32 per token: log-sum-exp of the student's logits, of the teacher's, and the gap.

    Logits are z = cap(hidden lm_head) / temperature of each model. The gap is the mean of z_p - z_q under p, with p the teacher
    and q the student, or with `reverse` p the student and q the teacher. KL(p || q) = gap - lse_p + lse_q. An entry with p = 0
    contributes nothing, as 0 log 0.

    A KL divergence is a plain function of the three. Over a vocabulary that is split over devices, log-sum-exps are
    combined, and gaps are averaged with each part's share of p as weight.
    """
    accumulate = jnp.promote_types(hidden.dtype, jnp.float32)
    return kl_divergence_of_logits(
        jnp.dot(hidden, lm_head, preferred_element_type=accumulate),
        jnp.dot(teacher_hidden, teacher_lm_head, preferred_element_type=accumulate),
        reverse=reverse,
        temperature=temperature,
        logits_soft_cap=logits_soft_cap,
        teacher_logits_soft_cap=teacher_logits_soft_cap,
    )


def kl_divergence_of_logits(
    logits: Float[Array, "*lead V"],
    teacher_logits: Float[Array, "*lead V"],
    *,
    reverse: bool = False,
    temperature: float = 1.0,
    logits_soft_cap: float | None = None,
    teacher_logits_soft_cap: float | None = None,
) -> tuple[Float[Array, "*lead"], Float[Array, "*lead"], Float[Array, "*lead"]]:
    """Returns the outputs of `kl_divergence`, from existing logits."""

    def bent(z: jax.Array, cap: float | None) -> jax.Array:
        z = z.astype(jnp.promote_types(z.dtype, jnp.float32))
        return (z if cap is None else cap * jnp.tanh(z / cap)) / temperature

    student, teacher = bent(logits, logits_soft_cap), bent(teacher_logits, teacher_logits_soft_cap)
    p, q = (student, teacher) if reverse else (teacher, student)
    # Entries that p masks out contribute nothing.
    allowed = p > -jnp.inf
    share = jnp.exp(jnp.where(allowed, p, -jnp.inf) - _finite(jax.nn.logsumexp(p, axis=-1, keepdims=True)))
    gap = jnp.sum(jnp.where(share > 0, share * (jnp.where(allowed, p, 0) - q), 0), axis=-1)
    return jax.nn.logsumexp(student, axis=-1), jax.nn.logsumexp(teacher, axis=-1), gap


def _finite(lse: jax.Array) -> jax.Array:
    return jnp.where(lse == -jnp.inf, 0, lse)


def work(call: Call) -> tuple[Work, Work]:
    """Returns the work of the matmuls: the logits of both models forward; both again and two gradients backward. The
    logits count no bytes, since they need not be materialised."""
    V = call.dims["V"]
    student_flops, teacher_flops = 2 * call.hidden.size * V, 2 * call.teacher_hidden.size * V
    student, teacher = nbytes(call.hidden, call.lm_head), nbytes(call.teacher_hidden, call.teacher_lm_head)
    rows = 4 * call.hidden.size // call.dims["D"]  # each output, and its cotangent, is float32
    forward = Work(student_flops + teacher_flops, student + teacher + 3 * rows)
    return forward, Work(3 * student_flops + teacher_flops, 2 * student + teacher + 6 * rows)


def work_of_logits(call: Call) -> tuple[Work, Work]:
    """Returns the work of passes over the logits: both read forward; both read and one gradient written backward."""
    size, rows = call.logits.size, 4 * call.logits.size // call.dims["V"]
    both = nbytes(call.logits, call.teacher_logits)
    return Work(8 * size, both + 3 * rows), Work(8 * size, both + nbytes(call.logits) + 6 * rows)


OUTPUTS = ("student_lse", "teacher_lse", "gap")
# If the vocabulary is split, each device has a partial sum over it; `ejdist` combines them.
ELSEWHERE = {"V": "fused_kl_divergence"}
_ALL = {"reverse": True, "temperature": 2.0, "logits_soft_cap": 3.0, "teacher_logits_soft_cap": 4.0}


def _case(name: str, *lead: int, options: dict | None = None, tags: tuple[str, ...] = (), **dims: int) -> Case:
    return Case(name, {"lead": lead, **dims}, options or {}, tags=frozenset(tags))


op = Op(
    kl_divergence,
    outputs=OUTPUTS,
    residuals=OUTPUTS,
    no_gradient=("teacher_hidden", "teacher_lm_head"),
    local_dims={"lead"},
    see_also=ELSEWHERE,
    weights=("lm_head", "teacher_lm_head"),
    same_dtype=("hidden", "lm_head"),
    config=KLDivergenceConfig,
    cases=(
        _case("small", 12, D=8, Dt=6, V=20, tags=("smoke",)),
        _case("all", 3, 7, D=8, Dt=8, V=37, options=_ALL),
        _case("reverse", 7, 43, D=16, Dt=24, V=37, options={"reverse": True}, tags=("slow",)),
        _case("llama_8b_of_70b", 8192, D=4096, Dt=8192, V=128256, tags=("bench", "code")),
    ),
    work=work,
)

logits_op = Op(
    kl_divergence_of_logits,
    outputs=OUTPUTS,
    residuals=OUTPUTS,
    no_gradient=("teacher_logits",),
    local_dims={"lead"},
    see_also=ELSEWHERE,
    config=KLDivergenceConfig,
    cases=(
        _case("small", 12, V=20, tags=("smoke",)),
        _case("all", 3, 5, V=50, options=_ALL, tags=("slow", "code")),
        _case("wide", 2, V=4101, options={"reverse": True}, tags=("code",)),
        _case("llama_8b", 2048, V=128256, tags=("bench", "code")),
    ),
    work=work_of_logits,
)
