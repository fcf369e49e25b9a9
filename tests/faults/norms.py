"""Faults of layer_norm and rms_norm."""

from faults import Fault

FAULTS = (
    Fault(
        "no cotangent of rstd",
        "norms_triton:norm_bwd_kernel",
        "tl.sum($products, axis=1) + $d_rstd",
        "tl.sum($products, axis=1)",
        "tests/kernels/test_rms_norm.py",
    ),
    Fault(
        "layer_norm: the mean has no gradient",
        "norms:pull",
        "$g * $rstd - $through_mean",
        "$g * $rstd",
        "tests/test_ops.py -k layer_norm-small-float32",
    ),
    Fault(
        "layer_norm: no cotangent of mean",
        "norms:pull",
        "jnp.sum($g, axis=-1, keepdims=True) * $rstd - $statistics['d_mean']",
        "jnp.sum($g, axis=-1, keepdims=True) * $rstd",
        "tests/test_ops.py -k layer_norm-small-float32",
    ),
    Fault(
        "layer_norm: the variance cancels",
        "norms:normalise",
        "if $norm.centered:\n    $means = [$$mean]\n    $x = $x - $means[0]\n"
        "$rstd = jax.lax.rsqrt(jnp.mean($x * $x, axis=-1, keepdims=True) + $norm.eps)",
        "$rstd = jax.lax.rsqrt(jnp.mean($x * $x, axis=-1, keepdims=True) + $norm.eps)\n"
        "if $norm.centered:\n    $means = [$$mean]\n"
        "    $rstd = jax.lax.rsqrt(1 / ($rstd * $rstd) - $means[0] * $means[0])\n    $x = $x - $means[0]",
        "tests/kernels/test_layer_norm.py -k cancel",
    ),
    Fault(
        "norms: the gradient of the stream is dropped",
        "norms_xla:backward",
        "$gradients['x'] + $saved.d_stream.astype(jnp.float32)",
        "$gradients['x']",
        "tests/test_ops.py -k fused_add_layer_norm",
    ),
    Fault(
        "norms: what is normalised is not the stream that goes on",
        "norms:outputs",
        "$stream = (($wide + $residual.astype($compute)).astype($residual.dtype),)\n$wide = $stream[0].astype($compute)",
        "$stream = (($wide + $residual.astype($compute)).astype($residual.dtype),)\n"
        "$wide = $wide + $residual.astype($compute)",
        "tests/kernels/test_rms_norm_fused.py -k rounded",
    ),
    Fault(
        "norms in Triton: the gradient of the stream is dropped",
        "norms_triton:norm_bwd_kernel",
        "$dx += $d_stream[$i].to($$args)",
        "$dx -= $d_stream[$i].to($$args)",
        "tests/test_ops.py -k fused_add_rms_norm-small-float32-triton_gpu",
    ),
    Fault(
        "norms in Pallas: the gradient of the stream is dropped",
        "norms_pallas:norm_bwd_kernel",
        "$dx + $refs['d_stream'][...].astype(jnp.float32)",
        "$dx - $refs['d_stream'][...].astype(jnp.float32)",
        "tests/test_ops.py -k fused_add_rms_norm-small-float32-pallas_tpu",
    ),
    Fault(
        "norms in Triton: what is normalised is not the stream that goes on",
        "norms_triton:norm_fwd_kernel",
        "$x = $stream",
        "$x = $x",
        "tests/test_ops.py -k fused_add_rms_norm-small-float32-triton",
    ),
    Fault(
        "norms in Pallas: rows past the end are summed",
        "norms_pallas:norm_bwd_kernel",
        "jnp.where($row < $num_rows, $$after)",
        "jnp.where($row >= 0, $$after)",
        "tests/kernels/test_rms_norm.py -k candidates",
    ),
    Fault(
        "rms_norm: a weight that is centered at zero is taken as it is",
        "norms:_factor",
        "$weight + 1.0 if $norm.zero_centered else $weight",
        "$weight",
        "tests/kernels/test_rms_norm.py -k against_numpy",
    ),
    Fault(
        "rms_norm: its cotangents have one of an rstd that nothing reads",
        "rms_norm/adapters:register",
        "jnp.zeros_like($rstd)",
        "jnp.ones_like($rstd)",
        "tests/kernels/test_rms_norm.py -k kept",
    ),
    Fault(
        "rms_norm: no cotangent of rstd",
        "norms:pull",
        "jnp.sum($g * $x, axis=-1, keepdims=True) + $statistics['d_rstd']",
        "jnp.sum($g * $x, axis=-1, keepdims=True)",
        "tests/test_ops.py -k rms_norm-small-float32-xla",
    ),
    Fault(
        "layer_norm: no cotangent of rstd",
        "norms:pull",
        "jnp.sum($g * $normalised, axis=-1, keepdims=True) + $statistics['d_rstd'] * $rstd",
        "jnp.sum($g * $normalised, axis=-1, keepdims=True)",
        "tests/test_ops.py -k layer_norm-small-float32-xla",
    ),
    Fault(
        "norms: the work of a mean is not counted",
        "norms:cost",
        "3 * $centered + ($residual is not None)",
        "int($residual is not None)",
        "tests/test_work.py -k by_hand",
    ),
    Fault(
        "layer_norm in Triton: masked columns are apart from the mean",
        "norms_triton:norm_fwd_kernel",
        "tl.where(_inside($$mask), $apart - $mean[:, None], 0.0)",
        "$apart - $mean[:, None]",
        "tests/kernels/test_layer_norm.py -k cancel_in_a_kernel",
    ),
    Fault(
        "layer_norm in Triton: no cotangent of mean",
        "norms_triton:norm_bwd_kernel",
        "tl.sum($total, axis=1) * $rstd - $d_mean",
        "tl.sum($total, axis=1) * $rstd",
        "tests/test_ops.py -k layer_norm-small-float32-triton",
    ),
    Fault(
        "layer_norm in Pallas: the bias learns what the weight does",
        "norms_pallas:norm_bwd_kernel",
        "(('weight', $d_out * $normalised), ('bias', $d_out))",
        "(('weight', $d_out * $normalised), ('bias', $d_out * $normalised))",
        "tests/test_ops.py -k layer_norm-small-float32-pallas",
    ),
    Fault(
        "norms in Triton: rows of a tile are not added up",
        "_summand",
        "tl.sum",
        "tl.max",
        "tests/kernels/test_rms_norm.py -k sums_over",
    ),
    Fault(
        "norms in Triton: rows are not read ahead",
        "norms_triton:norm_bwd_kernel",
        "tl.range($$args, num_stages=$STAGES)",
        "tl.range($$args, num_stages=1)",
        "tests/kernels/test_rms_norm.py -k read_ahead",
    ),
    Fault(
        "norms in Triton: the last chunk of a row goes on into the next row",
        "norms_triton:_inside",
        "($i * BLOCK_D + $cols < D)[None, :]",
        "($cols < D)[None, :]",
        "tests/kernels/test_rms_norm.py -k wide",
    ),
    Fault(
        "norms in Triton: rows in chunks lack the last",
        "rows:forward_tiles",
        "-(-$D // $chunk)",
        "$D // $chunk",
        "tests/test_ops.py -k rms_norm-narrow_chunks-float32-triton",
    ),
)
