"""flash_mla's forward on Hopper, interpreted: the parts of a head from arrays of their own. tests/gpu runs its cases."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grid import FLOOR, error
from hopper import interpreted
from kernel_names import without_code

from kernels import MaskInfo, Unsupported
from kernels.engines.attention import triton_calls
from kernels.ops.multi_latent_attention import op
from kernels.toolchains.simulate.ahead_of_time import export_cuda

RNG = np.random.default_rng(0)


def arrays(B=2, T=200, N=2, K=2, H=128, Hr=64, Hv=128, R=16, dtype="bfloat16"):
    shapes = {
        "query": (B, T, N, H),
        "key_value": (B, T, R),
        "w_kc": (R, K, H),
        "w_vc": (R, K, Hv),
        "query_rope": (B, T, N, Hr),
        "key_rope": (B, T, Hr),
    }
    return {
        name: jnp.asarray((RNG.standard_normal(shape) / R ** (name[0] == "w")).astype(dtype))
        for name, shape in shapes.items()
    }


def packed(T, **rest):
    ids = jnp.asarray(np.repeat([0, 1, -1], [T // 3, T // 2, T - T // 3 - T // 2])[None], jnp.int32)
    return MaskInfo(q_segment_ids=ids, kv_segment_ids=ids, **rest)


SINKS = jnp.asarray(RNG.standard_normal((2, 1)).astype(np.float32))


@pytest.mark.parametrize(
    ("sizes", "mask", "options"),
    [
        pytest.param({}, MaskInfo(causal=True), {}, marks=pytest.mark.slow),
        ({"K": 1, "Hr": 24, "Hv": 64}, packed(200, causal=True), {"softmax_aux": SINKS}),
        (
            {"T": 300, "B": 1, "Hr": 8},
            MaskInfo(causal=True, window=(70, 0)),
            {"logits_soft_cap": 2.0, "softmax_scale": 0.3},
        ),
    ],
    ids=["causal", "packed", "window"],
)
def test_numbers(monkeypatch, sizes, mask, options):
    a = arrays(**sizes)

    def run(platform, arrays):
        return op(**arrays, mask=mask, platform=platform, **options)

    exact = jax.jit(lambda a: op.function(**a, mask=mask, **options))({n: x.astype("float32") for n, x in a.items()})
    near = jax.jit(lambda a: run("xla", a))(a)
    with interpreted(monkeypatch, op, triton_calls):
        ours = jax.jit(lambda a: run("triton", a))(a)
    for got, want, other in zip(ours, exact, near, strict=True):
        assert error(got, want) <= 2 * error(other, want) + FLOOR["bfloat16"]


def exported(capability):
    """Returns (the names of the kernels of a call, whether its program joins arrays, its first kernel)."""
    run = functools.partial(op, mask=MaskInfo(causal=True), platform="triton")
    report = export_cuda(lambda a: run(**a), arrays(), compute_capability=capability)
    joins = "stablehlo.concatenate" in report.exported.mlir_module()
    return [kernel.name for kernel in report.kernels], joins, report.kernels[0]


@pytest.mark.slow  # two compilations, 7 s
def test_hopper_joins_nothing():
    names, joins, kernel = exported(90)
    assert names == ["warp_specialized_fwd_kernel"] and not joins
    # The same registers as with joined heads (test_flash_attention_hopper.py).
    assert kernel.resources["serialized"] == 0 and kernel.resources["spill_stores"] <= 44
    assert kernel.shared_memory_bytes <= 227 * 1024


def test_other_gpus_join_the_parts():
    with without_code():
        assert exported(80)[:2] == (["forward_kernel"], True)


def test_dispatch_takes_it_on_gpus():
    choices = op.plan(op.bind(**arrays()), None, None, differentiated=False).choices
    assert [choice.backend.name for choice in choices if choice.platform == "cuda"] == ["triton_gpu"]


@pytest.mark.parametrize(
    ("sizes", "options", "message"),
    [
        ({"H": 64}, {}, "H = 64, Hr = 64"),
        ({"Hr": 0}, {}, "Hr = 0"),
        ({"Hr": 72}, {}, "Hr = 72"),
        ({"Hr": 4}, {}, "Hr = 4"),
        ({"Hv": 136}, {}, "Hv = 136"),
        ({"Hv": 36}, {}, "Hv = 36"),
        ({}, {"softmax_scale": -1.0}, "positive scale"),
        ({}, {"mask": MaskInfo(attention_mask=jnp.ones((1, 1, 200, 200), bool))}, "dense mask"),
        ({"dtype": "float32"}, {}, "float32"),
    ],
    ids=str,
)
def test_refused_by_name_and_composed_otherwise(sizes, options, message):
    a = {name: x for name, x in arrays(**sizes).items() if x.size}
    with pytest.raises(Unsupported, match=message):
        op(**a, **options, platform="triton")
    choices = op.plan(op.bind(**a, **options), None, None, differentiated=False).choices
    assert [choice.backend.name for choice in choices if choice.platform == "cuda"] == ["composed"]
