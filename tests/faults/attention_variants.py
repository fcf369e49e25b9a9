"""Faults of attention_variants."""

from faults import Fault

FAULTS = (
    Fault(
        "differential attention adds",
        "differential.forward",
        "$first.astype(jnp.float32) - $lambda_.astype(jnp.float32)[:, None] * $second.astype(jnp.float32)",
        "$first.astype(jnp.float32) + $lambda_.astype(jnp.float32)[:, None] * $second.astype(jnp.float32)",
        "tests/test_ops.py -k differential_attention-small-float32",
    ),
    Fault(
        "the second attention has the first one's cotangent",
        "differential.backward",
        "$saved.d_out_2.astype(jnp.float32) - $weight * $d",
        "$saved.d_out_2.astype(jnp.float32) + $d",
        "tests/test_ops.py -k differential_attention-small-float32",
    ),
    Fault(
        "a performer forgets to rescale its state",
        "_with_keys",
        "$old[..., None] * $sums",
        "$sums",
        "tests/test_ops.py -k performer_attention-several_chunks-float32",
    ),
    Fault(
        "a performer joins halves as if they were divided by the same key",
        "attention_variants/xla:_joined",
        "$share[..., None] * $sums",
        "$sums",
        "tests/test_ops.py -k performer_attention-several_chunks-float32",
    ),
    Fault(
        "slots are not put back",
        "mixture.forward.projected",
        "permuted(grouped_matmul($$args, platform=$p), $back, $order)",
        "grouped_matmul($$args, platform=$p)",
        "tests/test_ops.py -k mixture_of_attention_heads-small-float32",
    ),
    Fault(
        "the mean of the keys stays",
        "centred",
        "$wide - jnp.mean($wide, axis=1, keepdims=True)",
        "$wide",
        "tests/kernels/test_attention_variants.py -k test_quantized_attention",
    ),
    Fault(
        "the attentions of differential attention are left on XLA",
        "flash_of.flash",
        "{'mask_info': $mask, 'softmax_scale': $softmax_scale, 'platform': $platform}",
        "{'mask_info': $mask, 'softmax_scale': $softmax_scale, 'platform': 'xla'}",
        "tests/kernels/test_composed_attention.py -k holds_the_kernels_of_attention_both_ways",
    ),
    Fault(
        "XLA asked for by name lets dispatch choose",
        "attention_variants/xla:",
        "differential('xla')",
        "differential(None)",
        "tests/kernels/test_composed_attention.py -k asked_by_name",
    ),
)
