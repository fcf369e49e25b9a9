"""Faults of one token of a recurrence, in rows and in a pool."""

from faults import Fault

DECODE, TOOLCHAINS = "tests/kernels/test_decode_triton.py", "tests/test_toolchains.py"

FAULTS = (
    Fault(
        "decode: padding writes to the pool",
        "decode_kernel",
        "store_state($states, $slot * $N + $n, $h, $v, $after, $counts, $H, $Hv)",
        "store_state($states, $slot * $N + $n, $h, $v, $after, True, $H, $Hv)",
        f"{DECODE} -k pool_against_xla",
    ),
    Fault(
        "decode: a slot past the pool is one of it",
        "decode_kernel",
        "($slot >= 0) & ($slot < $SLOTS)",
        "$slot >= 0",
        f"{DECODE} -k pool_against_xla",
    ),
    Fault(
        "decode: a token that begins continues what is in its slot",
        "decode_kernel",
        "$begun if $slots is None else $begun & $counts",
        "$begun if $slots is None else $counts",
        f"{DECODE} -k pool_against_xla",
    ),
    Fault(
        "decode: padding of a row loses the state",
        "decode_kernel",
        "tl.where($counts, $after, $state)",
        "$after",
        f"{DECODE} -k padding_may_hold",
    ),
    Fault(
        "decode: padding has an output",
        "decode_kernel",
        "tl.where($counts, $out, 0.0)",
        "$out",
        f"{DECODE} -k padding_may_hold",
    ),
    Fault(
        "decode: the query does not see its own token",
        "decode_kernel",
        "tl.sum($q[:, None] * $faded, 0) + tl.sum($q * $k) * $u",
        "tl.sum($q[:, None] * $faded, 0)",
        f"{DECODE} -k first_token",
    ),
    Fault(
        "decode: a delta rule adds what it should replace",
        "decode_kernel",
        "$u -= tl.sum($k[:, None] * $faded, 0)",
        "",
        f"{DECODE} -k 'after_a_state and delta_rule'",
    ),
    Fault(
        "decode: a bonus has no weight",
        "decode_kernel",
        "tl.sum($q[:, None] * $state, 0) + $own * $u",
        "tl.sum($q[:, None] * $state, 0) + $u",
        f"{DECODE} -k 'after_a_state and bonus'",
    ),
    Fault(
        "decode: writes are not weighed",
        "decode_kernel",
        "$u *= tl.load($w + $m * $N + $n).to(tl.float32)",
        "",
        f"{DECODE} -k 'first_token and state_space'",
    ),
    Fault(
        "decode: keys keep their norm",
        "decode_kernel",
        "($q * tl.rsqrt(tl.sum($q * $q) + $NORM_EPS), $k * tl.rsqrt(tl.sum($k * $k) + $NORM_EPS))",
        "($q * tl.rsqrt(tl.sum($q * $q) + $NORM_EPS), $k)",
        f"{DECODE} -k 'first_token and channels'",
    ),
    Fault(
        "decode: one token is computed as a chunk",
        "triton_decode:one_token",
        "$T == 1 and $num_states == 1",
        "False",
        f"{DECODE} -k one_kernel",
    ),
    Fault(
        "decode: one token of several states is computed as of one",
        "triton_decode:one_token",
        "$T == 1 and $num_states == 1",
        "$T == 1",
        f"{DECODE} -k several_states",
    ),
    Fault(
        "decode: the pool is an output of its own",
        "triton_decode:ragged_decode",
        "{$last: 1}",
        "{}",
        f"{DECODE} -k requests_of_one_token",
    ),
    Fault(
        "decode: what a token that begins found has a gradient",
        "pool_backward",
        "jnp.where($begun[:, None, None, None], $d['initial_state'][:, 0], 0)",
        "$d['initial_state'][:, 0]",
        f"{DECODE} -k gradients_of_a_pool",
    ),
    Fault(
        "decode: a request without tokens takes that of the next",
        "ragged_gated_delta_rule",
        "jnp.where($used & (jnp.diff($cuts) > 0), $cuts[:-1], $M)",
        "jnp.where($used, $cuts[:-1], $M)",
        f"{DECODE} -k requests_of_one_token",
    ),
    Fault(
        "a launch takes an alias before an output without one",
        "toolchains/triton:_check_buffers",
        "if $late is not None: $$body",
        "",
        f"{TOOLCHAINS} -k would_take_each_others",
    ),
    Fault(
        "a launch takes an array after an output",
        "toolchains/triton:_check_buffers",
        "if hasattr($bound.get($name), 'shape'): $$body",
        "pass",
        f"{TOOLCHAINS} -k would_take_each_others",
    ),
    Fault(
        "decode: products of the gradient of a token are of fewer bits",
        "triton_decode:gradients",
        'jax.default_matmul_precision("highest")',
        'jax.default_matmul_precision("bfloat16")',
        f"{DECODE} -k float32_throughout",
    ),
)
