"""A small operation made for the tests of the core, and the configurations that it ran with."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels.framework.backend import Case
from kernels.framework.config import BwdParams, FwdParams, KernelConfig
from kernels.framework.contract import Op

SEEN: list = []  # configurations that the toy backend ran with


def make_op(**options):
    """A weighted power: y = w * x**2, with an optional traced shift; its backward is written by hand."""

    def toy(
        x: Float[Array, "*lead D"],
        weight: Float[Array, " D"] | None = None,
        shift: Int[Array, "#D"] | None = None,
        *,
        power: float = 2.0,
        flip: bool = False,
    ) -> tuple[Float[Array, "*lead D"], Float[Array, "*lead"]]:
        square = x.astype(jnp.float32) ** power
        out = square if weight is None else square * weight
        out = out if shift is None else out + shift
        return (-out if flip else out).astype(x.dtype), jnp.sum(square, -1)

    op = Op(
        toy,
        outputs=("out", "total"),
        residuals=("total",),
        local_dims={"lead"},
        same_dtype=("x", "weight"),
        priority=("triton_gpu", "xla"),
        config=KernelConfig,
        cases=(Case("odd", dims={"lead": (2, 3), "D": 5}, arrays=("weight",)),),
        **options,
    )

    def backward(saved, x, weight, shift, power):
        d = saved.d_out
        dx = d * power * x ** (power - 1) * (1 if weight is None else weight) + saved.d_total[
            ..., None
        ] * power * x ** (power - 1)
        grads = {"x": dx}
        if weight is not None:
            grads["weight"] = jnp.sum(d * x**power, axis=tuple(range(x.ndim - 1)))
        return grads

    def forward(x, weight, shift, power, cfg):  # no flip
        SEEN.append(cfg)
        if cfg.fwd_params.q_blocksize == 32:  # a miscompiled candidate
            return x * 0 + 7, jnp.sum(x, -1)
        return op.function(x, weight, shift, power=power)

    def triton_forward(x, weight):
        return jnp.sin(x), jnp.sum(x, -1)  # told apart from the other by its sine

    op.register(
        forward,
        backward,
        name="xla",
        platforms={"cpu", "cuda", "tpu"},
        dtypes={"float32", "bfloat16"},
        rejects=lambda c: "D must not be 13" if c.dims["D"] == 13 else None,
        heuristic=lambda c, platform: KernelConfig(FwdParams(q_blocksize=8, kv_blocksize=4), BwdParams(q_blocksize=2)),
        candidates=lambda c: [KernelConfig(FwdParams(q_blocksize=n)) for n in (16, 32)],
    )
    op.register(triton_forward, name="triton_gpu", platforms={"cuda"}, dtypes={"float32"})
    return op
