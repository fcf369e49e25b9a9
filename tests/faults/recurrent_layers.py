"""Faults of the layers that are recurrences, and of the attention that stands beside them."""

from faults import Fault

TESTS = "tests/test_recurrent_layers.py -m 'not slow'"
NUMBERS, LEAKS = f"{TESTS} -k published", f"{TESTS} -k leaks"
STYLES = "tests/test_moe_model.py -m 'not slow' -k mixed"

FAULTS = (
    Fault(
        "the convolution of a layer goes on over documents",
        "_convolved",
        "$ctx.ops.causal_conv1d($$args, activation='silu', segment_ids=$ids)",
        "$ctx.ops.causal_conv1d($$args, activation='silu')",
        LEAKS,
    ),
    Fault(
        "a delta rule's state goes on over documents",
        "GatedDelta.mixed",
        "$ops.gated_delta_rule($$args, segment_ids=$ids, use_qk_l2norm=True)",
        "$ops.gated_delta_rule($$args, use_qk_l2norm=True)",
        LEAKS,
    ),
    Fault(
        "the gate of Gated DeltaNet comes before its norm",
        "GatedDelta.mixed",
        "$ops.rms_norm($out, $norms['gated_delta_out_norm'], eps=$c.norm_eps) * jax.nn.silu($z)",
        "$ops.rms_norm($out * jax.nn.silu($z), $norms['gated_delta_out_norm'], eps=$c.norm_eps)",
        NUMBERS,
    ),
    Fault(
        "step sizes have no bias",
        "recurrent:_rates",
        "-jnp.exp($log), $bias",
        "-jnp.exp($log), 0 * $bias",
        NUMBERS,
    ),
    Fault(
        "queries and keys of Gated DeltaNet keep their norms",
        "GatedDelta.mixed",
        "$ops.gated_delta_rule($$args, segment_ids=$ids, use_qk_l2norm=True)",
        "$ops.gated_delta_rule($$args, segment_ids=$ids)",
        NUMBERS,
    ),
    Fault(
        "Mamba-2's norm is over all heads",
        "Mamba2.mixed",
        "_normed($out, $norms['mamba2_out_norm'], $m.num_groups, $c.norm_eps)",
        "_normed($out, $norms['mamba2_out_norm'], 1, $c.norm_eps)",
        NUMBERS,
    ),
    Fault(
        "Mamba-2's gate comes after its norm",
        "Mamba2.mixed",
        "$out = $out * jax.nn.silu($ops.project($$gate))\n$out = _normed($$args)",
        "$out = _normed($$args) * jax.nn.silu($ops.project($$gate))",
        NUMBERS,
    ),
    Fault(
        "every layer of lightning attention forgets as the first",
        "Lightning.mixed",
        "1 - $ctx.layer / ($c.num_layers - 1 + 1e-05) + 1e-05",
        "1.0",
        NUMBERS,
    ),
    Fault(
        "rates of decay have weight decay",
        "recurrent:_decaying",
        "{'decay': False, 'cast': False}",
        "{'cast': False}",
        f"{TESTS} -k weight_decay",
    ),
    Fault(
        "step sizes start at the smallest",
        "_inverse_softplus",
        "jnp.exp(jax.random.uniform($key, $p.shape, $p.dtype, $low, $high))",
        "jnp.exp($low)",
        f"{TESTS} -k start_as",
    ),
    Fault(
        "a plan does not count what convolutions send",
        "_Size.traffic",
        "if self.convolved: $$body",
        "",
        f"{TESTS} -k sends",
    ),
    Fault(
        "attention with a gate has none",
        "Attention.apply",
        "if $c.attention_gate: $$body",
        "",
        STYLES,
    ),
    Fault(
        "RoPE turns whole heads",
        "Attention.apply",
        "_turning($ctx, rotary_dim=$c.rotary_dim)",
        "_turning($ctx)",
        STYLES,
    ),
)
