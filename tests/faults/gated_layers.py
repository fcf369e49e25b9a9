"""Faults of gated linear attention and RWKV-7 as layers."""

from faults import Fault

TESTS, COSTS = "tests/test_recurrent_layers.py", "tests/test_recurrent_costs.py"
NUMBERS, LEAKS = f"{TESTS} -k 'published and (gla or rwkv7)'", f"{TESTS} -k 'leaks and (gla or rwkv7)'"
REFUSED = f"{TESTS} -k refused"

FAULTS = (
    Fault(
        "the state of gated linear attention goes on over documents",
        "GatedLinear.mixed",
        "$ops.gla_attention($$args, segment_ids=$ctx.batch['segment_ids'])",
        "$ops.gla_attention($$args)",
        LEAKS,
    ),
    Fault(
        "the channels of a key of gated linear attention forget at the mean of their rates",
        "GatedLinear.mixed",
        "$ops.project($low, $$args).astype(jnp.float32)",
        "$ops.project($low, $$args).astype(jnp.float32).mean(-1, keepdims=True)",
        NUMBERS,
    ),
    Fault(
        "log decays of gated linear attention are not divided",
        "GatedLinear.mixed",
        "jax.nn.log_sigmoid($$f) / $m.normalizer",
        "jax.nn.log_sigmoid($$f)",
        NUMBERS,
    ),
    Fault(
        "decays of gated linear attention have no bias",
        "GatedLinear.mixed",
        "$f + $ops.gather($$bias)",
        "$f + 0 * $ops.gather($$bias)",
        NUMBERS,
    ),
    Fault(
        "the gate of gated linear attention comes before its norm",
        "GatedLinear.mixed",
        "$ops.rms_norm($out, $norms['gla_out_norm'], eps=$c.norm_eps) * jax.nn.silu($z)",
        "$ops.rms_norm($out * jax.nn.silu($z), $norms['gla_out_norm'], eps=$c.norm_eps)",
        NUMBERS,
    ),
    Fault(
        "a normaliser of 0 is taken",
        "GlaShape.validate",
        "0 < self.normalizer < math.inf",
        "0 <= self.normalizer < math.inf",
        REFUSED,
    ),
    Fault(
        "a token is mixed with the one before of another document",
        "_shifted",
        "$ctx.ops.causal_conv1d($$args, segment_ids=$ids)",
        "$ctx.ops.causal_conv1d($$args)",
        LEAKS,
    ),
    Fault(
        "a token is mixed with itself",
        "_shifted",
        "jnp.array([1.0, 0.0], $h.dtype)",
        "jnp.array([0.0, 1.0], $h.dtype)",
        NUMBERS,
    ),
    Fault(
        "RWKV-7's state goes on over documents",
        "Rwkv7.mixed",
        "$ops.rwkv7($$args, softmax_scale=1.0, segment_ids=$ids)",
        "$ops.rwkv7($$args, softmax_scale=1.0)",
        LEAKS,
    ),
    Fault(
        "RWKV-7's result is divided by the root of the width",
        "Rwkv7.mixed",
        "$ops.rwkv7($$args, softmax_scale=1.0, segment_ids=$ids)",
        "$ops.rwkv7($$args, segment_ids=$ids)",
        NUMBERS,
    ),
    Fault(
        "keys and values read each other's mixed tokens",
        "Rwkv7.mixed",
        "$r, $k, $v = (wide($x_r, 'receptance'), wide($x_k, 'key'), wide($x_v, 'value'))",
        "$r, $k, $v = (wide($x_r, 'receptance'), wide($x_v, 'key'), wide($x_k, 'value'))",
        NUMBERS,
    ),
    Fault(
        "RWKV-7 forgets without a bound",
        "recurrent_rwkv7:_written",
        "-LARGEST * jax.nn.sigmoid($w.astype(jnp.float32) + $bias)",
        "-jax.nn.sigmoid($w.astype(jnp.float32) + $bias)",
        NUMBERS,
    ),
    Fault(
        "what RWKV-7 removes is not of norm 1",
        "recurrent_rwkv7:_written",
        "$removed * jax.lax.rsqrt($$square)",
        "$removed",
        NUMBERS,
    ),
    Fault(
        "what is written with a key does not follow the rate of replacement",
        "recurrent_rwkv7:_written",
        "$exact * (1 + ($rate - 1) * $key_rate)",
        "$exact * (1 + 0 * ($rate - 1) * $key_rate)",
        NUMBERS,
    ),
    Fault(
        "a token of RWKV-7 has no bonus",
        "recurrent_rwkv7:_with_own",
        "$out + $own.astype($v.dtype) * $v",
        "$out + 0 * $own.astype($v.dtype) * $v",
        NUMBERS,
    ),
    Fault(
        "the norm of RWKV-7's heads keeps their mean",
        "recurrent_rwkv7:_normed",
        "$wide - jnp.mean($wide, axis=-1, keepdims=True)",
        "$wide",
        NUMBERS,
    ),
    Fault(
        "the norm of RWKV-7's heads is as sharp as the model's",
        "Rwkv7.mixed",
        "$c.rwkv7.head_dim * $c.norm_eps",
        "$c.norm_eps",
        NUMBERS,
    ),
    Fault(
        "padding gets the bias of a norm",
        "Rwkv7.mixed",
        "jnp.where($$there, $out, 0)",
        "$out",
        LEAKS,
    ),
    Fault(
        "channels all start to forget at one rate",
        "_ramp",
        "jnp.linspace(*$p.between, $p.shape[-1], dtype=$p.dtype)",
        "jnp.full($p.shape[-1], sum($p.between) / 2)",
        f"{TESTS} -k start_as",
    ),
    Fault(
        "values of the first layer are asked for and not mixed in",
        "Rwkv7Shape.validate",
        "_check($$args) and self.value_residual",
        "_check($$args) and False",
        REFUSED,
    ),
    Fault(
        "a plan does not count the tokens before over the devices of heads",
        "Rwkv7.traffic",
        "if $n > 1: $$body",
        "",
        f"{COSTS} -k compiled_layer",
    ),
)
