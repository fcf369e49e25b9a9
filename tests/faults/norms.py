"""Faults of layer_norm and rms_norm."""

from faults import Fault

FAULTS = (
    Fault(
        "no cotangent of rstd",
        "norm_bwd_kernel",
        "tl.sum($products, axis=1) + $d_rstd",
        "tl.sum($products, axis=1)",
        "tests/kernels/test_rms_norm.py",
    ),
    Fault(
        "layer_norm: the mean has no gradient",
        "layer_norm/xla:_pull",
        "$g * $rstd - $through_mean",
        "$g * $rstd",
        "tests/test_ops.py -k layer_norm-small-float32",
    ),
    Fault(
        "layer_norm: no cotangent of mean",
        "layer_norm/xla:_pull",
        "jnp.sum($g, axis=-1, keepdims=True) * $rstd - $d_mean[..., None]",
        "jnp.sum($g, axis=-1, keepdims=True) * $rstd",
        "tests/test_ops.py -k layer_norm-small-float32",
    ),
    Fault(
        "layer_norm: the variance cancels",
        "layer_norm/xla:forward",
        "$apart = $wide - $mean[..., None]\n$rstd = jax.lax.rsqrt(jnp.mean(jnp.square($apart), axis=-1) + $eps)",
        "$apart = $wide - $mean[..., None]\n"
        "$rstd = jax.lax.rsqrt(jnp.mean(jnp.square($wide), axis=-1) - jnp.square($mean) + $eps)",
        "tests/kernels/test_layer_norm.py -k cancel",
    ),
    Fault(
        "layer_norm: the gradient of the stream is dropped",
        "layer_norm/xla:backward_add",
        "$dx + $saved.d_stream.astype(jnp.float32)",
        "$dx",
        "tests/test_ops.py -k fused_add_layer_norm",
    ),
    Fault(
        "rms_norm: what is normalised is not the stream that goes on",
        "rms_norm/xla:forward_add",
        "$stream = ($x.astype(jnp.float32) + $residual.astype(jnp.float32)).astype($$args)\n"
        "$out, $rstd = forward($stream.astype(jnp.float32), $$after)",
        "$stream = ($x.astype(jnp.float32) + $residual.astype(jnp.float32)).astype($$args)\n"
        "$out, $rstd = forward($x.astype(jnp.float32) + $residual.astype(jnp.float32), $$after)",
        "tests/kernels/test_rms_norm_fused.py -k rounded",
    ),
    Fault(
        "norms in Triton: the gradient of the stream is dropped",
        "norm_bwd_kernel",
        "$dx += $d_stream[$i].to($$args)",
        "$dx -= $d_stream[$i].to($$args)",
        "tests/test_ops.py -k fused_add_rms_norm-small-float32-triton_gpu",
    ),
    Fault(
        "rms_norm in pallas_tpu: the gradient of the stream is dropped",
        "rms_norm_bwd_kernel",
        "$dx + $refs['d_stream'][...].astype(jnp.float32)",
        "$dx - $refs['d_stream'][...].astype(jnp.float32)",
        "tests/test_ops.py -k fused_add_rms_norm-small-float32-pallas_tpu",
    ),
    Fault(
        "norms in Triton: what is normalised is not the stream that goes on",
        "norm_fwd_kernel",
        "$x = $stream",
        "$x = $x",
        "tests/test_ops.py -k fused_add_rms_norm-small-float32-triton",
    ),
    Fault(
        "rms_norm in Pallas: rows past the end are summed",
        "rms_norm_bwd_kernel",
        "jnp.where($row < $num_rows, $$after)",
        "jnp.where($row >= 0, $$after)",
        "tests/kernels/test_rms_norm.py -k candidates",
    ),
    Fault(
        "layer_norm in pallas_tpu: the gradient of the stream is dropped",
        "layer_norm_bwd_kernel",
        "$dx + $refs['d_stream'][...].astype(jnp.float32)",
        "$dx - $refs['d_stream'][...].astype(jnp.float32)",
        "tests/test_ops.py -k fused_add_layer_norm-small-float32-pallas_tpu",
    ),
    Fault(
        "layer_norm in Pallas: rows past the end are summed",
        "layer_norm_bwd_kernel",
        "jnp.where($row < $num_rows, $$after)",
        "jnp.where($row >= 0, $$after)",
        "tests/kernels/test_layer_norm.py -k candidates",
    ),
    Fault(
        "layer_norm in Triton: masked columns are apart from the mean",
        "norm_fwd_kernel",
        "tl.where($mask, $apart - $mean[:, None], 0.0)",
        "$apart - $mean[:, None]",
        "tests/kernels/test_layer_norm.py -k cancel_in_a_kernel",
    ),
    Fault(
        "layer_norm in Triton: no cotangent of mean",
        "norm_bwd_kernel",
        "tl.sum($total, axis=1) * $rstd - $d_mean",
        "tl.sum($total, axis=1) * $rstd",
        "tests/test_ops.py -k layer_norm-small-float32-triton",
    ),
    Fault(
        "layer_norm in Pallas: the bias learns what the weight does",
        "layer_norm_bwd_kernel",
        "(('weight', $g * $normal), ('bias', $g))",
        "(('weight', $g * $normal), ('bias', $g * $normal))",
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
        "norm_bwd_kernel",
        "tl.range($$args, num_stages=$STAGES)",
        "tl.range($$args, num_stages=1)",
        "tests/kernels/test_rms_norm.py -k read_ahead",
    ),
)
