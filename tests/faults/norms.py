"""Faults of layer_norm and rms_norm."""

from faults import Fault

FAULTS = (
    Fault(
        "no cotangent of rstd",
        "kernels/ops/rms_norm/triton_gpu.py",
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
)
