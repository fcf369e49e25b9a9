"""Faults of mixtures of experts and latent attention in the decoder, and of what a step does with them."""

from faults import Fault

EXPERTS, ATTENTION, STACK = (f"ejdist/models/{name}.py" for name in ("feedforward", "attention", "stack"))


def step(cases: str) -> str:
    """Returns the tests of steps of these cases."""
    return f"tests/test_moe_model.py -k 'numpy and ({cases})'"


FAULTS = (
    Fault(
        "a projection leaves its bias out",
        "project_all",
        "$product if $bias is None else $product + _of_bias($bias, $weight, $dims_weight, $dims_out, $mesh)",
        "$product",
        "tests/test_projection.py -k mesh",
    ),
    Fault(
        "a projection's weight is not gathered, so its gradient is not scattered",
        "projection:_product",
        "_einsum($$args, gather($values, $dims_weight, $mesh))",
        "_einsum($$args, $values)",
        "tests/test_projection.py -k mesh",
    ),
    Fault(
        "a projection lies where the compiler likes",
        "project_all",
        "constrain($product, ' '.join($dims_out), $mesh)",
        "$product",
        "tests/test_projection.py -k mesh",
    ),
    Fault(
        "a projection by a weight of another size",
        "projection:_check",
        "$sizes.setdefault($dim, $size) != $size",
        "False",
        "tests/test_projection.py -k refused",
    ),
    Fault(
        "the losses of experts counted again where a layer is computed again",
        "Experts._metrics",
        "Metric($loss * $share, $$after)",
        "Metric($loss * $share * (1 + (c.remat == 'full')), $$after)",
        step("full"),
    ),
    Fault(
        "the bias of a router moves to the experts that have most",
        "Experts.update",
        "update_bias($$before, $seen['counts'], $$after)",
        "update_bias($$before, -$seen['counts'], $$after)",
        step("deepseek or mixed"),
    ),
    Fault(
        "the mean that the bias of a router moves to is rounded",
        "update_bias",
        "jnp.divmod(jnp.sum($counts), $bias.size)",
        "(jnp.mean($counts.astype(jnp.float32)), 0)",
        "tests/test_experts.py -k bias_brings",
    ),
    Fault(
        "the bias of a router moves by the last microbatch",
        "make_train_step.train_step.add",
        "$m.plus($more[$name])",
        "$more[$name] if $name == 'experts.counts' else $m.plus($more[$name])",
        step("mixed"),
    ),
    Fault(
        "each microbatch adds its whole balance loss",
        "Experts._metrics",
        "$tokens / jnp.maximum($stats.tokens, 1)",
        "1.0",
        step("mixtral"),
    ),
    Fault(
        "the losses of experts are sums over padding too",
        "Experts._metrics",
        "$tokens / jnp.maximum($stats.tokens, 1)",
        "$tokens / ctxs[0].batch['tokens'].size",
        step("mixtral"),
    ),
    Fault(
        "sinks that nothing reads",
        "Attention.attended",
        "$ops.gather($params['sinks'], 'N _')",
        "$ops.gather($params['sinks'], 'N _') - 1000000000.0",
        step("gpt_oss"),
    ),
    Fault(
        "the bias of the output projection left out",
        "Attention.apply",
        "$ops.project($$args, bias=$params.get('output_bias'))",
        "$ops.project($$args)",
        step("gpt_oss"),
    ),
    Fault("the windows of experts' layers see all", "Attention.attended", "self.window($c)", "None", step("gpt_oss")),
    Fault(
        "the shared expert left out",
        "Experts._mixed",
        "{$n: $params.get($n) for $n in _SHARED}",
        "{$n: 0 * $params[$n] if $n == 'shared_down' and $n in $params else $params.get($n) for $n in _SHARED}",
        step("deepseek"),
    ),
    Fault(
        "the scaling factor of the weights left out",
        "Experts._mixed",
        "$ops.moe($$args, **$$before, routed_scaling_factor=$m.scaling_factor, **$$after)",
        "$ops.moe($$args, **$$before, routed_scaling_factor=1.0, **$$after)",
        step("deepseek"),
    ),
    Fault(
        "the pattern starts with the rows of the first layers",
        "run_layers.every_round",
        "($each[$name], $first[$name])",
        "($each[$name], 0)",
        step("mixed"),
    ),
    Fault(
        "the shared key of latent attention is not turned",
        "LatentAttention.apply",
        "turned($shared[:, :, None])",
        "$shared[:, :, None]",
        step("deepseek"),
    ),
    Fault(
        "latent attention turns halves and not neighbours",
        "LatentAttention.apply",
        "_turning($ctx, interleaved=True)",
        "_turning($ctx, interleaved=False)",
        step("deepseek"),
    ),
    Fault(
        "YaRN between whole pairs where it is not asked for",
        "frequencies",
        "$scaling.truncate",
        "True",
        "tests/kernels/test_rotary_embedding.py -k frequencies",
    ),
    Fault(
        "the balance of the global batch without its counts",
        "Experts._mixed",
        "$at.buffers.get('load')",
        "None if 'load' not in $at.buffers else jnp.ones_like($at.buffers['load'])",
        step("mixed"),
    ),
    Fault(
        "noise that is the same in every layer",
        "Experts._mixed",
        "$at.layer",
        "0",
        "tests/test_moe_model.py -k noise_differs",
    ),
    Fault(
        "noise that is the same in every microbatch",
        "Experts._mixed",
        "($at.step, $at.microbatch, $at.layer, $$rest)",
        "($at.step, $at.layer, $$rest)",
        "tests/test_moe_model.py -k noise_differs",
    ),
    Fault(
        "FLOPs of all experts instead of the chosen",
        "Experts.flops",
        "$m.top_k",
        "$m.num",
        "tests/test_moe_model.py -k flops_of",
    ),
    Fault(
        "the matrices of latents whole on every device",
        "PARAMETERS",
        "{'D': (FSDP, *SEQUENCE_AXES), 'R': (FSDP, *SEQUENCE_AXES), 'N': (TP,), 'K': (TP,), 'F': (TP,), 'V': (TP,), "
        "'E': (EP,)}",
        "{'D': (FSDP, *SEQUENCE_AXES), 'N': (TP,), 'K': (TP,), 'F': (TP,), 'V': (TP,), 'E': (EP,)}",
        "tests/test_moe_model.py -k split_by_fsdp",
    ),
    Fault(
        "how groups are scored does not reach the router",
        "Experts._mixed",
        "$ops.moe($$args, **$$before, group_top=$m.group_top, **$$after)",
        "$ops.moe($$args, **$$before, group_top=2, **$$after)",
        "tests/test_moe_model.py -k every_option_of_the_router",
    ),
)
