"""The router: which experts a token goes to, and how much each of them weighs in its result."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.export
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.scipy.special import xlogy

from ejdist.experts.losses import balance_loss, sequence_balance_loss, z_loss
from ejdist.experts.metrics import Stats, dead_experts, expert_counts, max_violation, rank_tokens
from ejdist.tokens import bound_axes, mapped_axes
from kernels.framework.binding import is_array, is_float_array
from kernels.framework.options import checked
from kernels.framework.public import module_class


def _sqrt_softplus(x: jax.Array) -> jax.Array:
    # softplus is exp(x) to the last bit of float32 there; below, it would be 0, where the root has no slope.
    small = x < -20
    return jnp.where(small, jnp.exp(jnp.minimum(x, -20) / 2), jnp.sqrt(jax.nn.softplus(jnp.maximum(x, -20))))


_SCORES = {"softmax": jax.nn.softmax, "sigmoid": jax.nn.sigmoid, "sqrtsoftplus": _sqrt_softplus}
SCORES = tuple(_SCORES)
BALANCE = ("batch", "sequence", "global")


class Routing(NamedTuple):
    """What a router decides.

    Attributes:
      experts: int32 [B, T, k], best first, each token's all different; -1 of a token that is padding.
      weights: float32 [B, T, k]; 0 of a token that is padding.
      stats: see `Stats`.
    """

    experts: jax.Array
    weights: jax.Array
    stats: Stats


def _refuse(argument: str, what: str) -> ValueError:
    return ValueError(f"route: argument {argument!r} {what}")


def _shape(x: Any) -> str:
    return f"{x.dtype} of shape {x.shape}" if is_array(x) else type(x).__name__


def _check_arrays(x: Any, router: Any, segment_ids: Any, vectors: dict[str, Any]) -> None:
    if not is_float_array(x) or x.ndim != 3:
        raise _refuse("x", f"must be a float array [B, T, D], got {_shape(x)}")
    if not is_float_array(router) or router.ndim != 2 or router.shape[0] != x.shape[2]:
        raise _refuse("router", f"must be a float array [D, E] with D = {x.shape[2]} of 'x', got {_shape(router)}")
    if not router.shape[1]:
        raise _refuse("router", "has E = 0 experts")
    for name, vector in vectors.items():
        kind = "numbers" if name == "load" else "a float array"
        fits = is_float_array(vector) or (name == "load" and is_array(vector) and vector.dtype != bool)
        if vector is not None and (not fits or vector.shape != router.shape[1:]):
            raise _refuse(name, f"must be {kind} [E] with E = {router.shape[1]} of 'router', got {_shape(vector)}")
    if segment_ids is None:
        return
    integers = is_array(segment_ids) and jnp.issubdtype(segment_ids.dtype, jnp.integer)
    if not integers or segment_ids.shape != x.shape[:2]:
        raise _refuse("segment_ids", f"must be integers [B, T] = {x.shape[:2]}, got {_shape(segment_ids)}")


def _check_groups(experts: int, top_k: int, num_groups: int, topk_groups: int | None, group_top: int) -> None:
    if not 1 <= top_k <= experts:
        raise _refuse("top_k", f"= {top_k} must be at least 1 and at most E = {experts}, the experts of 'router'")
    if num_groups < 1 or experts % num_groups:
        raise _refuse("num_groups", f"= {num_groups} must divide E = {experts}, the experts of 'router'")
    if num_groups == 1:
        for name, value, default in (("topk_groups", topk_groups, None), ("group_top", group_top, 2)):
            if value not in (default, 1):
                raise _refuse(name, f"= {value} is for groups, and there are none; give 'num_groups'")
        return
    if topk_groups is None or not 1 <= topk_groups <= num_groups:
        raise _refuse(
            "topk_groups", f"= {topk_groups} must be at least 1 and at most 'num_groups' = {num_groups}; give it"
        )
    size = experts // num_groups
    if top_k > topk_groups * size:
        raise _refuse(
            "top_k", f"= {top_k} is more than the {topk_groups * size} experts of 'topk_groups' = {topk_groups} groups"
        )
    if not 1 <= group_top <= size:
        raise _refuse("group_top", f"= {group_top} must be at least 1 and at most {size}, the experts of a group")


def _check_ranks(
    experts: int, top_k: int, num_groups: int, topk_groups: int | None, ranks: int, max_ranks: int | None
) -> None:
    if max_ranks is None:
        return
    if ranks < 1 or experts % ranks:
        raise _refuse("ranks", f"= {ranks} must divide E = {experts}, the experts of 'router'")
    if not 1 <= max_ranks <= ranks:
        raise _refuse("max_ranks", f"= {max_ranks} must be at least 1 and at most 'ranks' = {ranks}")
    left = max_ranks * (experts // ranks)
    if num_groups > 1 and topk_groups is not None:
        if num_groups % ranks and ranks % num_groups:
            raise _refuse(
                "max_ranks",
                f"needs 'num_groups' = {num_groups} that divides 'ranks' = {ranks} or is divided by it; use other groups, or "
                "leave out one of the two",
            )
        left = min(left, min(max_ranks, topk_groups) * (experts // num_groups)) if num_groups >= ranks else left
        left = min(left, topk_groups * (experts // num_groups))
    if top_k > left:
        raise _refuse("max_ranks", f"= {max_ranks} leaves a token {left} experts of {experts}, and 'top_k' is {top_k}")


def _check_options(score: str, balance: str, load: Any, jitter: float, key: Any, factor: float) -> None:
    if score not in SCORES:
        raise _refuse("score", f"= {score!r} is unknown; use one of {', '.join(SCORES)}")
    if balance not in BALANCE:
        raise _refuse("balance", f"= {balance!r} is unknown; use one of {', '.join(BALANCE)}")
    if (balance == "global") != (load is not None):
        why = "is needed for" if load is None else "is for"
        raise _refuse("load", f"{why} balance='global' alone: how often each expert was chosen in the global batch")
    if not 0 <= jitter < 1:
        raise _refuse("jitter", f"must be in [0, 1), got {jitter!r}")
    if (jitter > 0) != (key is not None):
        why = f"is needed for 'jitter' = {jitter}" if key is None else "is for 'jitter', which is 0"
        raise _refuse("key", f"{why}; give both or none")
    if key is not None and not _is_key(key):
        raise _refuse("key", f"must be one key of `jax.random.key`, got {_shape(key)}")
    if not 0 < factor < float("inf"):
        raise _refuse("routed_scaling_factor", f"must be positive and finite, got {factor!r}")


def _sequence_axes(balance: str, axis_name: Any, length: int) -> tuple[str, ...]:
    """Returns the axes of a `shard_map` around this that the sequences of a loss are split over."""
    if axis_name is not None:
        if balance != "sequence":
            raise _refuse("axis_name", f"is of balance='sequence', and it is {balance!r}; leave it out")
        return mapped_axes("route", axis_name)
    bound = bound_axes(("T",)) if balance == "sequence" and length != 1 else ()
    if bound:
        raise _refuse(
            "balance",
            f"= 'sequence' counts over whole sequences, and the layout has dim T on {', '.join(map(repr, bound))}, over which "
            f"this call is mapped: give axis_name={bound[0] if len(bound) == 1 else bound!r}, or () where each "
            "rank has whole sequences",
        )
    return ()


def _is_key(key: Any) -> bool:
    if not is_array(key):
        return False
    typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    return key.shape == () if typed else key.ndim == 1 and key.dtype == jnp.uint32


def _best(values: jax.Array, count: int) -> jax.Array:
    """Returns the indices [..., count] of the largest of values [..., E], the largest first, and of equal ones the first.

    As `jax.lax.top_k`, which on a mesh gathers the tokens of all devices; here each token is by itself.
    """
    values = jnp.maximum(values, jnp.finfo(values.dtype).min)  # so that only those already chosen are -inf
    indices = []
    for _ in range(count):
        indices.append(jax.lax.argmax(values, values.ndim - 1, jnp.int32))
        values = jnp.where(jnp.arange(values.shape[-1]) == indices[-1][..., None], -jnp.inf, values)
    return jnp.stack(indices, axis=-1)


def _at(values: jax.Array, indices: jax.Array) -> jax.Array:
    """Returns values [..., E] at indices [..., k]; unlike with a gather, nothing is scattered in a gradient."""
    here = indices[..., None] == jnp.arange(values.shape[-1])
    return jnp.sum(jnp.where(here, values[..., None, :], 0), axis=-1)


def _allowed(choice: jax.Array, num_groups: int, topk_groups: int, group_top: int) -> jax.Array:
    """Returns choice [B, T, E] with -inf for the experts of groups that are not among a token's best.

    A group of which others have left something has `group_top` experts or more, see `_check_ranks`; one of nothing is last.
    """
    groups = choice.reshape(*choice.shape[:-1], num_groups, choice.shape[-1] // num_groups)
    worth = _at(groups, _best(groups, group_top)).sum(-1)
    chosen = jnp.any(_best(worth, topk_groups)[..., None] == jnp.arange(num_groups), axis=-2)
    return jnp.where(chosen[..., None], groups, -jnp.inf).reshape(choice.shape)


def _round_robin(counted: jax.Array, padded: bool, top_k: int, experts: int) -> jax.Array:
    """Returns experts [B, T, k] in turn over the tokens that count."""
    if padded:
        before = jnp.cumsum(counted.reshape(counted.size).astype(jnp.int32)).reshape(counted.shape) - 1
    else:
        before = jnp.arange(counted.size, dtype=jnp.int32).reshape(counted.shape)
    # Before it is multiplied: tokens times top_k may pass an int32.
    return (before[..., None] % experts * top_k + jnp.arange(top_k, dtype=jnp.int32)) % experts


@checked
def route(
    x: jax.Array,
    router: jax.Array,
    *,
    top_k: int,
    score: str = "softmax",
    normalize: bool = True,
    bias: Any = None,
    router_bias: Any = None,
    num_groups: int = 1,
    topk_groups: int | None = None,
    group_top: int = 2,
    routed_scaling_factor: float = 1.0,
    segment_ids: Any = None,
    balance: str = "batch",
    load: Any = None,
    jitter: float = 0.0,
    key: Any = None,
    forced_balance: bool = False,
    axis_name: str | tuple[str, ...] | None = None,
    ranks: int = 1,
    max_ranks: int | None = None,
) -> Routing:
    """Returns (experts [B, T, k], weights [B, T, k], stats): the top_k experts of each token, computed in float32.

    The logits are x router + router_bias, the scores a function of them. A token goes to the experts with the best
    score + bias, and each weighs its score, divided by the sum of the chosen ones' if `normalize`, times
    `routed_scaling_factor`. Mixtral and Qwen3-MoE are the defaults, DeepSeek-V3 is score="sigmoid" with `bias`, groups and a
    factor, GPT-OSS has a `router_bias`, and Qwen2-MoE and Switch have normalize=False.

    Args:
      x: [B, T, D]. router: [D, E].
      top_k: experts of a token.
      score: "softmax" over all experts, "sigmoid" or "sqrtsoftplus", which is sqrt(log(1 + exp(logit))).
      normalize: weights sum to 1 before the factor. Of a softmax, that is the softmax of the chosen logits: top-k before
        normalisation; False is top-k after it. With top_k = 1 normalised weights are 1, and the router learns nothing by them.
      bias: float [E], added to the scores that choose and to nothing else, so it has no gradient; see `update_bias`.
      router_bias: float [E], a parameter, added to the logits.
      num_groups, topk_groups, group_top: experts are chosen among those of the `topk_groups` best of `num_groups` groups, which
        are equal parts of E, one after the other. A group is as good as the sum of its best `group_top` scores: 2 in
        DeepSeek-V3, 1 in DeepSeek-V2.
      ranks, max_ranks: experts are chosen among those of the `max_ranks` best of `ranks` devices, which have equal parts of E,
        one after the other; `moe` knows how many these are. A rank is as good as the sum of its best ceil(top_k / max_ranks)
        scores among the experts that groups leave, as a node in DeepSeek-V3.
      routed_scaling_factor: of the weights.
      segment_ids: int [B, T]; a token with id < 0 is padding: it has experts -1 and weights 0, and is in no loss or statistic.
      balance: what the balance loss is of: "batch", all tokens of this call; "sequence", each sequence, which are the rows, or
        with `segment_ids` what has one id in a row; "global", the global batch, whose counts are `load`.
      load: [E], how often each expert was chosen in the global batch.
      jitter: x is multiplied by random numbers in [1 - jitter, 1 + jitter] before the router sees it; in training alone.
      key: of `jax.random`, needed by `jitter`: a different one for each layer and step.
      forced_balance: experts in turn instead of the best, with the weights of their scores: for benchmarks alone. It takes the
        place of the choice, so `bias` and groups, which may be given, have no part in it.
      axis_name: of balance="sequence" inside a `shard_map` of your own: the mesh axis that sequences are split over, or a tuple
        of them; `()` where they are whole. Their experts are then counted over all ranks.

    x, router and router_bias have gradients, of the weights and of the losses in `stats`. Under `jit` arrays are
    global, and sums are over all devices, however rows and sequence are split; inside a `shard_map` they are of the device's
    own tokens.

    Raises:
      ValueError: naming the argument.

    Sources: Shazeer et al., Outrageously Large Neural Networks, 2017; Fedus et al., Switch Transformers, 2021 (jitter);
    DeepSeek-V2 and V3, 2024 (groups, sigmoid); Wang et al., Auxiliary-Loss-Free Load Balancing, 2024 (bias).

    >>> import jax.numpy as jnp
    >>> x, router = jnp.array([[[1.0, 0.0], [0.0, 2.0]]]), jnp.array([[3.0, 1.0, 3.0], [1.0, 0.0, 2.0]])
    >>> experts, weights, stats = route(x, router, top_k=2)
    >>> print(experts[0].tolist(), weights[0, 0].tolist(), stats.counts.tolist())
    [[0, 2], [2, 0]] [0.5, 0.5] [2, 0, 2]
    """
    _check_arrays(x, router, segment_ids, {"bias": bias, "router_bias": router_bias, "load": load})
    experts_in_all = router.shape[1]
    _check_groups(experts_in_all, top_k, num_groups, topk_groups, group_top)
    _check_ranks(experts_in_all, top_k, num_groups, topk_groups, ranks, max_ranks)
    _check_options(score, balance, load, jitter, key, routed_scaling_factor)
    over = _sequence_axes(balance, axis_name, x.shape[1])
    wide = jnp.promote_types(jnp.promote_types(x.dtype, router.dtype), jnp.float32)
    counted = jnp.ones(x.shape[:2], bool) if segment_ids is None else segment_ids >= 0
    # Before anything else sees it: values in padding, NaN included, contribute to no sum and no gradient.
    x = jnp.where(counted[..., None], x, 0).astype(wide)
    if jitter:
        x = x * jax.random.uniform(key, x.shape, wide, 1 - jitter, 1 + jitter)
    logits = jnp.einsum("btd,de->bte", x, router.astype(wide), precision=jax.lax.Precision.HIGHEST)
    if router_bias is not None:
        logits = logits + router_bias.astype(wide)
    scores = _SCORES[score](logits)
    if forced_balance:
        experts = _round_robin(counted, segment_ids is not None, top_k, experts_in_all)
    else:
        groups = [] if num_groups == 1 else [(num_groups, topk_groups, group_top)]
        groups += (
            [] if max_ranks is None else [(ranks, max_ranks, min(-(-top_k // max_ranks), experts_in_all // ranks))]
        )
        experts = _chosen(logits, scores, bias, top_k, groups)
    # By this name a policy can keep them: where they are computed again, what is close may be decided otherwise.
    experts = checkpoint_name(experts, "route.experts")
    if score == "softmax" and normalize:
        weights = jax.nn.softmax(_at(logits, experts))
    else:
        weights = _at(scores, experts)
        if normalize:  # the scores of all chosen may be too small for float32
            weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
    weights = jnp.where(counted[..., None], weights * routed_scaling_factor, 0)
    experts = jnp.where(counted[..., None], experts, -1)
    probabilities = scores if score == "softmax" else scores / (scores.sum(-1, keepdims=True) + 1e-20)
    probabilities = jnp.where(counted[..., None], probabilities, 0)
    return Routing(experts, weights, _stats(logits, probabilities, experts, counted, segment_ids, balance, load, over))


def _chosen(
    logits: jax.Array,
    scores: jax.Array,
    bias: Any,
    top_k: int,
    groups: list[tuple[int, Any, int]],
) -> jax.Array:
    """Returns the experts of each token [B, T, k]; `groups` are (groups, how many are kept, scores that they are judged by)."""
    # The logits are in the order of their scores, and do not saturate where scores do.
    choice = logits if bias is None and not groups else scores
    choice = jax.lax.stop_gradient(choice if bias is None else choice + bias.astype(choice.dtype))
    for group in groups:
        choice = _allowed(choice, *group)
    return _best(choice, top_k)


def _stats(
    logits: jax.Array,
    probabilities: jax.Array,
    experts: jax.Array,
    counted: jax.Array,
    segment_ids: Any,
    balance: str,
    load: Any,
    over: tuple[str, ...],
) -> Stats:
    size = logits.shape[-1]
    counts = expert_counts(experts, size)
    sums = probabilities.sum((0, 1))
    if balance == "sequence":
        loss = sequence_balance_loss(experts, probabilities, segment_ids, over)
    else:
        loss = balance_loss(counts if load is None else load, sums)
    p = jax.lax.stop_gradient(probabilities)
    return Stats(
        tokens=counted.sum(dtype=jnp.int32),
        counts=counts,
        probabilities=sums,
        balance_loss=loss,
        z_loss=z_loss(logits, counted),
        entropy=-xlogy(p, p).sum(),
        max_violation=max_violation(counts),
        dead_experts=dead_experts(counts),
        rank_counts=counts.sum(keepdims=True),
        host_counts=counts.sum(keepdims=True),
        rank_tokens=rank_tokens(experts, 1, size),
    )


Route = module_class("Route", route)
jax.export.register_namedtuple_serialization(Routing, serialized_name="ejdist.experts.Routing")
