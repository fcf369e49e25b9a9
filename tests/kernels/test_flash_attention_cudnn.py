"""What cuDNN is told, and the out that it is handed in place of a delta. Its numbers are those of tests/gpu, on a device."""

import json
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo as library

from kernels import MaskInfo, Unsupported, flash_attention
from kernels.framework.interpret import interpret
from kernels.ops.flash_attention import cudnn_gpu, flash_attention_backward
from kernels.ops.flash_attention.contract import op

RNG = np.random.default_rng(0)
B, T, N, K, H = 2, 64, 4, 2, 32
QUERY, D_OUT = (jnp.asarray(RNG.standard_normal((B, T, N, H)), jnp.bfloat16) for _ in range(2))
KEY, VALUE = (jnp.asarray(RNG.standard_normal((B, T, K, H)), jnp.bfloat16) for _ in range(2))


def calls_of(module):
    """Returns {target: (configuration, types and layouts)} of the calls of cuDNN in a program's text."""
    found = {}
    for line in module.splitlines():
        if "__cudnn$" in line:
            target = line.split("@")[1].split("(")[0]
            config = line.split('backend_config = "')[1].split('", ')[0].replace("\\22", '"')
            found[target] = (
                json.loads(config)["cudnn_fmha_backend_config"],
                line.split("operand_layouts")[1].split(" loc(")[0],
            )
    return found


def exported(function, *arrays):
    checks = [jax.export.DisabledSafetyCheck.custom_call(f"__cudnn$fmhaSoftmax{s}") for s in ("", "Backward")]
    return calls_of(
        jax.export.export(jax.jit(function), platforms=["cuda"], disabled_checks=checks)(*arrays).mlir_module()
    )


def plain(value):
    """Returns a configuration without what is the default of its field, which may be left out."""
    if isinstance(value, dict):
        kept = {k: plain(v) for k, v in value.items()}
        return {k: v for k, v in kept.items() if v not in ([], {}, "0", "PRIMITIVE_TYPE_INVALID")}
    return value


@pytest.mark.parametrize(("causal", "window"), [(True, None), (True, 9), (False, None)])
def test_it_is_told_what_jax_tells_it(causal, window):
    """The calls of a program, forward and backward, against those of `jax.nn.dot_product_attention`."""
    mask = MaskInfo(causal=causal, window=(window - 1, 0) if window else None)

    def ours(q, k, v, d):
        (out, lse), pull = jax.vjp(lambda *x: op(*x, mask, platform="cudnn"), q, k, v)
        return out, pull((d, jnp.zeros_like(lse)))

    def theirs(q, k, v, d):
        kind = library.MaskType.CAUSAL if causal else library.MaskType.NO_MASK
        out, pull = jax.vjp(
            lambda *x: library.dot_product_attention(
                *x, scale=1 / np.sqrt(H), mask_type=kind, sliding_window_length=window, seed=0
            ),
            q, k, v,
        )  # fmt: skip
        return out, pull(d)

    got = exported(ours, QUERY, KEY, VALUE, D_OUT)
    with (
        mock.patch.object(library, "check_cudnn_version", lambda: 91500),
        mock.patch.object(library, "check_compute_capability", lambda capability: True),
        mock.patch.object(library, "is_cuda_compute_capability_equal", lambda capability: False),
        # Without what asks the devices how arrays are split.
        mock.patch.object(library, "_dot_product_attention_fwd_p_wrapper", library._dot_product_attention_fwd_p),
        mock.patch.object(library, "_dot_product_attention_bwd_p_wrapper", library._dot_product_attention_bwd_p),
    ):
        want = exported(theirs, QUERY, KEY, VALUE, D_OUT)
    assert set(got) == {"__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"} == set(want)
    for target in want:
        assert plain(got[target][0]) == plain(want[target][0]), target
        assert got[target][1] == want[target][1], target


def test_out_has_the_delta_that_is_asked_for():
    """Also where d_out is zero, or so small that its squares vanish, or large; to the rounding of bfloat16."""
    scales = jnp.asarray([0.0, 2.0**-80, 2.0**-40, 1.0, 2.0**40])[:, None, None, None]
    d_out = (D_OUT[:1] * scales).astype(jnp.bfloat16)
    delta = jnp.asarray(RNG.standard_normal(d_out.shape[:3]).astype(np.float32)).at[:, 3].set(0)
    d, out = cudnn_gpu._out_of(d_out, delta)
    got = jnp.sum(d.astype(jnp.float32) * out.astype(jnp.float32), -1)
    np.testing.assert_allclose(got, delta, rtol=2**-7)
    assert jnp.abs(d.astype(jnp.float32) - d_out.astype(jnp.float32)).max() <= 2.0**-59
    np.testing.assert_array_equal(d[2:], d_out[2:])


def test_the_backward_of_a_part_of_the_keys():
    """Of the lse and delta of all keys, as a ring has them: the parts add up to the gradients of the whole."""
    arrays = [x.astype(jnp.float32) for x in (QUERY, KEY, VALUE, D_OUT)]
    out, lse = flash_attention(*arrays[:3], return_lse=True)
    want = flash_attention_backward(arrays[3], *arrays[:3], out=out, lse=lse)
    delta = jnp.sum(arrays[3] * out, -1)
    halves = [slice(0, T // 2), slice(T // 2, T)]
    with interpret():
        parts = [
            flash_attention_backward(D_OUT, QUERY, KEY[:, half], VALUE[:, half], lse=lse, delta=delta, platform="cudnn")
            for half in halves
        ]
    got = {n: jnp.concatenate([p[n] for p in parts], 1) for n in ("key", "value")}
    got["query"] = sum(p["query"].astype(jnp.float32) for p in parts)
    for name, d in got.items():
        assert jnp.linalg.norm(d.astype(jnp.float32) - want[name]) < 1e-2 * jnp.linalg.norm(want[name]), name


def loss(platform, window=None):
    """Returns a function of query, key and value whose gradient takes cotangents of both outputs."""

    def run(q, k, v):
        options = {"causal": True, "sliding_window": window, "return_lse": True, "platform": platform}
        out, lse = flash_attention(q, k, v, **options)
        return jnp.sum(jnp.sin(out.astype(jnp.float32))) + jnp.sum(jnp.cos(lse))

    return run


def near(got, want):
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        g, w = g.astype(jnp.float32), w.astype(jnp.float32)
        assert jnp.linalg.norm(g - w) < 2e-2 * jnp.linalg.norm(w)


@pytest.mark.slow  # of the operation they are quick on XLA
def test_vmap_scan_remat_shard_map_and_second_derivatives():
    """As XLA's backend has them, in bfloat16."""
    arrays, names = (QUERY, KEY, VALUE), (0, 1, 2)
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])

    def transformed(platform):
        f = loss(platform, window=17)
        gradient = jax.grad(f, names)
        stacked = [jnp.stack([x, -x]) for x in arrays]
        found = [jax.vmap(gradient)(*stacked), jax.grad(jax.checkpoint(f), names)(*arrays)]
        found.append(jax.lax.scan(lambda c, x: (c + f(*x), gradient(*x)), jnp.float32(0), tuple(stacked)))
        split = jax.shard_map(gradient, mesh=mesh, in_specs=jax.P("x"), out_specs=jax.P("x"))
        found.append(split(*arrays))
        return found, jax.grad(lambda q: jnp.sum(jnp.square(gradient(q, KEY, VALUE)[0].astype(jnp.float32))))(QUERY)

    with interpret():
        got = jax.jit(lambda: transformed("cudnn"))()
    near(got, jax.jit(lambda: transformed("xla"))())


def test_what_it_cannot_do_is_refused_by_name():
    x, other = jnp.zeros((1, 16, 2, 24), jnp.bfloat16), jnp.zeros((1, 8, 2, 24), jnp.bfloat16)
    for words, arrays, options in (
        ("float32", (x.astype(jnp.float32),) * 3, {}),
        ("multiple of 8", (x[..., :12],) * 3, {}),
        ("T = 8 is not S = 16", (other, x, x), {"causal": True}),
        ("windows only backward", (x, x, x), {"causal": True, "sliding_window": (None, 3)}),
        ("windows only backward", (x, x, x), {"sliding_window": 4}),
        ("segments", (x, x, x), {"q_segment_ids": jnp.zeros((1, 16), jnp.int32)}),
        ("logits_soft_cap", (x, x, x), {"logits_soft_cap": 30.0}),
    ):
        with pytest.raises(Unsupported, match=words):
            flash_attention(*arrays, **options, platform="cudnn")
    with mock.patch.object(jax, "__version__", "0.12.1"), pytest.raises(Unsupported, match=r"this is 0\.12\.1"):
        flash_attention(x, x, x, platform="cudnn")
