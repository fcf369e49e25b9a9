"""Faults of the router and of the layer of experts."""

from faults import Fault

TESTS, CALLS = "tests/test_experts.py", "tests/test_experts_calls.py"

FAULTS = (
    Fault(
        "experts: a weight of another choice of the token",
        "local:local",
        "$weights[..., None]",
        "$weights[..., ::-1, None]",
        f"{TESTS} -k mixtral",
    ),
    Fault(
        "experts: rows come back by the order that they went in",
        "local:local",
        "_permuted($$args, $inverse, $order)",
        "_permuted($$args, $order, $inverse)",
        f"{TESTS} -k mixtral",
    ),
    Fault(
        "experts: padding is counted with the last expert",
        "expert_counts",
        "$experts[..., None] == jnp.arange($num_experts)",
        "$experts[..., None] % $num_experts == jnp.arange($num_experts)",
        f"{TESTS} -k random_routes",
    ),
    Fault(
        "experts: padding is in the z-loss",
        "_stats",
        "z_loss($$args, $counted)",
        "z_loss($$args)",
        f"{TESTS} -k random_routes",
    ),
    Fault(
        "experts: the shared expert sees what lies in padding",
        "moe",
        "$x = $x if $segment_ids is None else jnp.where(($segment_ids >= 0)[..., None], $x, 0)",
        "",
        f"{TESTS} -k packed",
    ),
    Fault(
        "experts: the bias leads to the busy ones",
        "update_bias",
        "($whole > $counts).astype(jnp.int32) - ($whole < $counts)",
        "($whole < $counts).astype(jnp.int32) - ($whole > $counts)",
        f"{TESTS} -k brings_balance",
    ),
    Fault(
        "experts: the bias weighs",
        "route",
        "$weights = _at($scores, $$after)",
        "$weights = _at($scores if bias is None else $scores + bias, $$after)",
        f"{TESTS} -k random_routes",
    ),
    Fault(
        "experts: a softmax over the chosen where it is over all",
        "route",
        "$score == 'softmax' and $normalize",
        "$score == 'softmax'",
        f"{TESTS} -k random_routes",
    ),
    Fault(
        "experts: no limit of groups",
        "router:_chosen",
        "$choice = _allowed($choice, $num_groups, $topk_groups, $group_top)",
        "pass",
        f"{TESTS} -k random_routes",
    ),
    Fault(
        "experts: a group is as good as its best expert",
        "_allowed",
        "_at($groups, _best($groups, $group_top)).sum",
        "$groups.max",
        f"{TESTS} -k deepseek",
    ),
    Fault(
        "experts: the factor is left out",
        "route",
        "jnp.where($$before, $weights * $routed_scaling_factor, $$after)",
        "jnp.where($$before, $weights, $$after)",
        f"{TESTS} -k deepseek",
    ),
    Fault(
        "experts: documents of a row are one sequence",
        "losses:_documents",
        "$ids[:, :-1]",
        "$ids[:, 1:]",
        f"{TESTS} -k packed",
    ),
    Fault(
        "experts: a microbatch balances by its own counts where the global batch's are given",
        "_stats",
        "$counts if $load is None else $load",
        "$counts",
        f"{TESTS} -k microbatches",
    ),
    Fault(
        "experts: maxima are added up",
        "metrics:REDUCTIONS",
        "{'tokens': 'sum', 'counts': 'sum', 'probabilities': 'sum', 'balance_loss': 'sum', 'z_loss': 'sum', "
        "'entropy': 'sum', 'max_violation': 'max', 'dead_experts': 'max', 'rank_counts': 'sum', "
        "'extra_passes': 'max', 'high_water': 'max', 'dropped': 'sum'}",
        "{'tokens': 'sum', 'counts': 'sum', 'probabilities': 'sum', 'balance_loss': 'sum', 'z_loss': 'sum', "
        "'entropy': 'sum', 'max_violation': 'sum', 'dead_experts': 'max', 'rank_counts': 'sum', "
        "'extra_passes': 'max', 'high_water': 'max', 'dropped': 'sum'}",
        f"{TESTS} -k microbatches",
    ),
    Fault(
        "experts: the root has no slope where its score is 0",
        "_sqrt_softplus",
        "jnp.maximum($x, -20)",
        "$x",
        f"{TESTS} -k far_logits",
    ),
    Fault(
        "experts: the gradient of rows goes where they went",
        "experts/local:",
        "(_permuted(d, *reversed(kept)), $$after)",
        "(_permuted(d, *kept), $$after)",
        f"{TESTS} -k mixtral",
    ),
    Fault(
        "experts: what a dispatch drops is not told",
        "placed:_flat",
        "Traffic($$args, $s.dropped)",
        "Traffic($$args)",
        "tests/test_experts_mesh.py -k room",
    ),
    Fault(
        "experts: what was dropped is a part of the tokens",
        "metrics:summary",
        "jnp.maximum($stats.counts.sum(), 1)",
        "tokens",
        "tests/test_experts_mesh.py -k room",
    ),
    Fault(
        "experts: padding has a turn",
        "_round_robin",
        "$counted.reshape($counted.size)",
        "jnp.ones($counted.size)",
        f"{TESTS} -k jitter",
    ),
    Fault("experts: jitter makes tokens larger alone", "route", "1 - $jitter", "1.0", f"{TESTS} -k jitter"),
    Fault(
        "experts: up has no limit below",
        "_expert.clamped",
        "jnp.clip($u, -$limit, $limit)",
        "jnp.minimum($u, $limit)",
        f"{TESTS} -k gpt_oss",
    ),
    Fault(
        "experts: what is kept by name is chosen again",
        "route",
        "checkpoint_name($experts, 'route.experts')",
        "$experts",
        f"{TESTS} -k keeps",
    ),
    Fault(
        "experts: any part of the experts is a rank's",
        "_check_experts",
        "$ranks * $E != $router.shape[1]",
        "$E > $router.shape[1]",
        "tests/test_experts_calls.py -k refused",
    ),
    Fault(
        "experts: the tokens of all devices are gathered to be chosen for",
        "router:_chosen",
        "_best($choice, $top_k)",
        "jax.lax.top_k($choice, $top_k)[1]",
        f"{CALLS} -k gathers_no_token",
    ),
    Fault(
        "experts: of equal experts the last",
        "_best",
        "jax.lax.argmax($values, $values.ndim - 1, jnp.int32)",
        "$values.shape[-1] - 1 - jax.lax.argmax($values[..., ::-1], $values.ndim - 1, jnp.int32)",
        f"{TESTS} -k every_expert_is_chosen",
    ),
    Fault(
        "an expert counts once for each document",
        "_shares.of_row",
        "$counts.at[$documents[:, None], $chosen].add",
        "$counts.at[$documents[:, None], $chosen].set",
        "tests/test_experts_calls.py -k counts_every_choice",
    ),
)
