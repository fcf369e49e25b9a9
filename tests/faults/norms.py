"""Faults of layer_norm and rms_norm."""

from faults import Fault

TRITON = "kernels/engines/rows/norms_triton.py"

FAULTS = (
    Fault(
        "no cotangent of rstd",
        TRITON,
        "(tl.sum(products, axis=1) + d_rstd)",
        "tl.sum(products, axis=1)",
        "tests/kernels/test_rms_norm.py",
    ),
    Fault(
        "layer_norm: the mean has no gradient",
        "kernels/ops/layer_norm/xla.py",
        "return g * rstd - through_mean - normal * through_rstd, features",
        "return g * rstd - normal * through_rstd, features",
        "tests/test_ops.py -k layer_norm-small-float32",
    ),
    Fault(
        "layer_norm: no cotangent of mean",
        "kernels/ops/layer_norm/xla.py",
        "* rstd - d_mean[..., None]) / D",
        "* rstd) / D",
        "tests/test_ops.py -k layer_norm-small-float32",
    ),
    Fault(
        "layer_norm: the variance cancels",
        "kernels/ops/layer_norm/xla.py",
        "jnp.mean(jnp.square(apart), axis=-1)",
        "jnp.mean(jnp.square(wide), axis=-1) - jnp.square(mean)",
        "tests/kernels/test_layer_norm.py -k cancel",
    ),
    Fault(
        "layer_norm: the gradient of the stream is dropped",
        "kernels/ops/layer_norm/xla.py",
        "d = dx + saved.d_stream.astype(jnp.float32)",
        "d = dx",
        "tests/test_ops.py -k fused_add_layer_norm",
    ),
    Fault(
        "rms_norm: what is normalised is not the stream that goes on",
        "kernels/ops/rms_norm/xla.py",
        "out, rstd = forward(stream.astype(jnp.float32), weight",
        "out, rstd = forward(x.astype(jnp.float32) + residual.astype(jnp.float32), weight",
        "tests/kernels/test_rms_norm_fused.py -k rounded",
    ),
    Fault(
        "norms in Triton: the gradient of the stream is dropped",
        TRITON,
        "                dx += d_stream[i].to(tl.float32)",
        "                dx -= d_stream[i].to(tl.float32)",
        "tests/test_ops.py -k fused_add_rms_norm-small-float32-triton_gpu",
    ),
    Fault(
        "rms_norm in pallas_tpu: the gradient of the stream is dropped",
        "kernels/ops/rms_norm/pallas_tpu.py",
        'dx = dx + refs["d_stream"][...].astype(jnp.float32)',
        'dx = dx - refs["d_stream"][...].astype(jnp.float32)',
        "tests/test_ops.py -k fused_add_rms_norm-small-float32-pallas_tpu",
    ),
    Fault(
        "norms in Triton: what is normalised is not the stream that goes on",
        TRITON,
        "        x = stream\n",
        "        x = x\n",
        "tests/test_ops.py -k fused_add_rms_norm-small-float32-triton",
    ),
    Fault(
        "rms_norm in Pallas: rows past the end are summed",
        "kernels/ops/rms_norm/pallas_tpu.py",
        "row < num_rows",
        "row >= 0",
        "tests/kernels/test_rms_norm.py -k candidates",
    ),
    Fault(
        "layer_norm in pallas_tpu: the gradient of the stream is dropped",
        "kernels/ops/layer_norm/pallas_tpu.py",
        'dx = dx + refs["d_stream"][...].astype(jnp.float32)',
        'dx = dx - refs["d_stream"][...].astype(jnp.float32)',
        "tests/test_ops.py -k fused_add_layer_norm-small-float32-pallas_tpu",
    ),
    Fault(
        "layer_norm in Pallas: rows past the end are summed",
        "kernels/ops/layer_norm/pallas_tpu.py",
        "row < num_rows",
        "row >= 0",
        "tests/kernels/test_layer_norm.py -k candidates",
    ),
    Fault(
        "layer_norm in Triton: masked columns are apart from the mean",
        TRITON,
        "apart = tl.where(mask, apart - mean[:, None], 0.0)",
        "apart = apart - mean[:, None]",
        "tests/kernels/test_layer_norm.py -k cancel_in_a_kernel",
    ),
    Fault(
        "layer_norm in Triton: no cotangent of mean",
        TRITON,
        "(tl.sum(total, axis=1) * rstd - d_mean) / D",
        "(tl.sum(total, axis=1) * rstd) / D",
        "tests/test_ops.py -k layer_norm-small-float32-triton",
    ),
    Fault(
        "layer_norm in Pallas: the bias learns what the weight does",
        "kernels/ops/layer_norm/pallas_tpu.py",
        '("bias", g)',
        '("bias", g * normal)',
        "tests/test_ops.py -k layer_norm-small-float32-pallas",
    ),
    Fault(
        "norms in Triton: rows of a tile are not added up",
        TRITON,
        "part = tl.sum(x, axis=0, keep_dims=True)",
        "part = tl.max(x, axis=0, keep_dims=True)",
        "tests/kernels/test_rms_norm.py -k sums_over",
    ),
    Fault(
        "norms in Triton: rows are not read ahead",
        TRITON,
        "tl.range(program * BLOCK_M, M, PROGRAMS * BLOCK_M, num_stages=STAGES)",
        "tl.range(program * BLOCK_M, M, PROGRAMS * BLOCK_M, num_stages=1)",
        "tests/kernels/test_rms_norm.py -k read_ahead",
    ),
)
