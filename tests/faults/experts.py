"""Faults of the router and of the layer of experts."""

from faults import Fault

ROUTER, LOSSES, METRICS = "ejdist/experts/router.py", "ejdist/experts/losses.py", "ejdist/experts/metrics.py"
LAYER = "ejdist/experts/layer.py"
TESTS = "tests/test_experts.py"

FAULTS = (
    Fault(
        "experts: a weight of another choice of the token",
        LAYER,
        "weights[..., None] * rows.astype",
        "weights[..., ::-1, None] * rows.astype",
        f"{TESTS} -k mixtral",
    ),
    Fault(
        "experts: rows come back by the order that they went in",
        LAYER,
        "apply(params, rows, counts), jnp.argsort(order))",
        "apply(params, rows, counts), order)",
        f"{TESTS} -k mixtral",
    ),
    Fault(
        "experts: padding is counted with the last expert",
        ROUTER,
        "chosen = jnp.where(experts < 0, size, experts)",
        "chosen = jnp.where(experts < 0, size - 1, experts)",
        f"{TESTS} -k random_routes",
    ),
    Fault(
        "experts: padding is in the z-loss",
        ROUTER,
        "z_loss=z_loss(logits, counted)",
        "z_loss=z_loss(logits)",
        f"{TESTS} -k random_routes",
    ),
    Fault(
        "experts: the shared expert sees what lies in padding",
        LAYER,
        "x = x if segment_ids is None else jnp.where((segment_ids >= 0)[..., None], x, 0)",
        "",
        f"{TESTS} -k packed",
    ),
    Fault(
        "experts: the bias leads to the busy ones",
        LOSSES,
        "jnp.sign(counts.mean() - counts)",
        "jnp.sign(counts - counts.mean())",
        f"{TESTS} -k brings_balance",
    ),
    Fault(
        "experts: the bias weighs",
        ROUTER,
        "weights = jnp.take_along_axis(scores, experts, axis=-1)",
        "weights = jnp.take_along_axis(scores if bias is None else scores + bias, experts, axis=-1)",
        f"{TESTS} -k random_routes",
    ),
    Fault(
        "experts: a softmax over the chosen where it is over all",
        ROUTER,
        'if score == "softmax" and normalize:',
        'if score == "softmax":',
        f"{TESTS} -k random_routes",
    ),
    Fault(
        "experts: no limit of groups",
        ROUTER,
        "choice = _allowed(choice, num_groups, topk_groups, group_top)",
        "pass",
        f"{TESTS} -k random_routes",
    ),
    Fault(
        "experts: a group is as good as its best expert",
        ROUTER,
        "jax.lax.top_k(groups, group_top)[0].sum(-1)",
        "jax.lax.top_k(groups, group_top)[0][..., 0]",
        f"{TESTS} -k random_routes",
    ),
    Fault(
        "experts: the factor is left out",
        ROUTER,
        "weights * routed_scaling_factor",
        "weights",
        f"{TESTS} -k deepseek",
    ),
    Fault(
        "experts: documents of a row are one sequence",
        LOSSES,
        "ids[:, 1:] != ids[:, :-1]",
        "ids[:, 1:] != ids[:, 1:]",
        f"{TESTS} -k packed",
    ),
    Fault(
        "experts: a microbatch balances by its own counts where the global batch's are given",
        ROUTER,
        "balance_loss(counts if load is None else load, sums)",
        "balance_loss(counts, sums)",
        f"{TESTS} -k microbatches",
    ),
    Fault(
        "experts: maxima are added up",
        METRICS,
        '"max_violation": "max"',
        '"max_violation": "sum"',
        f"{TESTS} -k microbatches",
    ),
    Fault(
        "experts: the root has no slope where its score is 0",
        ROUTER,
        "small = x < -20",
        "small = x < -200",
        f"{TESTS} -k far_logits",
    ),
)
