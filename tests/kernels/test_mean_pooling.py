"""mean_pooling: against NumPy, alone and on meshes; every backend's own behaviour, and the code for every target."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grid import error, on_this_machine, value_and_gradients
from jax.sharding import PartitionSpec as P

import ejdist
import kernels
from ejdist import make_mesh
from kernels import Unsupported
from kernels.framework.interpret import interpret
from kernels.ops.mean_pooling import MeanPoolingConfig, mean_pooling, op
from kernels.toolchains.simulate import ahead_of_time as checks

CASES = {case.name: case for case in op.cases}
SMALL = [case for case in op.cases if "bench" not in case.tags]
BACKENDS = ("triton_gpu", "pallas_tpu", "xla")
RNG = np.random.default_rng(0)
X = RNG.standard_normal((4, 16, 24)).astype(np.float32)
MASK = RNG.random((4, 16)) < 0.6
MASK[1], MASK[2] = True, False
CUTS = np.array([0, 3, 3, 11, 14])


def numpy_means(x, attention_mask=None, cum_seqlens=None):
    """Returns (means, dx of their sum times cos(0, 1, 2, ...)), float64, a token at a time."""
    B, T, D = x.shape
    sequences = [(b, 0, T) for b in range(B)] if cum_seqlens is None else []
    if cum_seqlens is not None:
        sequences = [(0, begin, end) for begin, end in itertools.pairwise(cum_seqlens)]
    means, dx = np.zeros((len(sequences), D)), np.zeros((B, T, D))
    d = np.cos(np.arange(means.size)).reshape(means.shape)
    for mean, d_mean, (b, begin, end) in zip(means, d, sequences, strict=True):
        tokens = [t for t in range(begin, end) if attention_mask is None or attention_mask[b, t]]
        for t in tokens:
            mean += x[b, t].astype(np.float64) / len(tokens)
            dx[b, t] = d_mean / len(tokens)
    return means, dx


def value_and_gradient(function, x, *args, **kwargs):
    """Returns what `numpy_means` does."""

    def loss(x, *args):
        out = function(x, *args, **kwargs)
        return jnp.sum(out * jnp.cos(jnp.arange(out.size)).reshape(out.shape)), out

    (_, out), dx = jax.jit(jax.value_and_grad(loss, has_aux=True))(x, *args)
    return out, dx


def close(got, want):
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-6)


CALLS = {
    "all valid": (X, {}),
    "mask": (X, {"attention_mask": MASK}),
    "packed": (X[:1], {"cum_seqlens": CUTS}),
    "packed and mask": (X[:1], {"cum_seqlens": CUTS, "attention_mask": MASK[:1]}),
    "packed, and a sequence has no valid token": (
        X[:1],
        {"cum_seqlens": CUTS, "attention_mask": np.arange(16)[None] > 4},
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_means_against_numpy(name):
    x, options = CALLS[name]
    want = numpy_means(x, **options)
    close(value_and_gradient(mean_pooling, x, **options), want)
    if "attention_mask" in options:
        integers = options["attention_mask"].astype(np.uint8)
        close([mean_pooling(x, **{**options, "attention_mask": integers})], want[:1])


@pytest.mark.parametrize("case", SMALL, ids=lambda c: c.name)
def test_contract_against_numpy(case):
    a = op.case_inputs(case)
    x, ids = np.asarray(a["x"], np.float64), np.asarray(a["segment_ids"])
    want = np.zeros((x.shape[0], a.get("num_segments", 1), x.shape[2]))
    for b, t in np.ndindex(ids.shape):
        if 0 <= ids[b, t] < want.shape[1]:
            want[b, ids[b, t]] += x[b, t]
    assert error(op.reference(**a), want) < 3e-6


def test_cuts_and_masks_may_be_traced():
    x, options = CALLS["packed and mask"]
    run = jax.jit(lambda cuts, mask: mean_pooling(x, mask, cum_seqlens=cuts))
    close([run(CUTS, MASK[:1])], numpy_means(x, **options)[:1])
    # These start late and end past the end: a mean is over the tokens that there are.
    others = np.array([2, 9, 12, 14, 40])
    close([run(others, MASK[:1])], numpy_means(x, MASK[:1], np.minimum(others, 16))[:1])
    close([mean_pooling(x, cum_seqlens=others)], numpy_means(x, None, np.minimum(others, 16))[:1])
    mapped = jax.vmap(lambda x, mask: mean_pooling(x[None], mask[None])[0])(X, MASK)
    close([mapped], numpy_means(X, MASK)[:1])


def test_cuts_of_a_narrow_dtype():
    x, cuts = jnp.arange(200.0).reshape(1, 200, 1), np.array([0, 50, 120])
    for dtype in (np.int8, np.uint8):
        np.testing.assert_allclose(mean_pooling(x, cum_seqlens=cuts.astype(dtype))[:, 0], [24.5, 84.5])


def test_many_tokens_of_a_narrow_dtype_are_summed_in_float32():
    out = mean_pooling(jnp.ones((1, 4096, 8), "bfloat16"))
    assert out.dtype == jnp.bfloat16 and (out == 1).all()  # in bfloat16, 256 + 1 is 256


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("packed", [pytest.param(False, marks=pytest.mark.slow), True])
def test_nothing_of_a_token_that_is_not_valid_is_in_a_mean(name, packed):
    x = jnp.where(MASK[:1, :, None], X[:1], jnp.nan)
    cuts = {"cum_seqlens": CUTS} if packed else {}
    with on_this_machine(op.backends[name]):
        got = value_and_gradient(functools.partial(mean_pooling, platform=name), x, MASK[:1], **cuts)
    close(got, numpy_means(X[:1], MASK[:1], **cuts))


@pytest.mark.parametrize("name", ["triton_gpu", "xla"])
def test_sequences_do_not_know_each_other(name):
    x = jnp.asarray(X[:1]).at[0, 5, 0].set(jnp.nan)
    with on_this_machine(op.backends[name]):
        out = mean_pooling(x, cum_seqlens=CUTS, platform=name)
    assert np.isnan(out[2, 0]) and np.isnan(out).sum() == 1


# -- on a mesh ---------------------------------------------------------------------------------------------------------

MESHES = {"dp2": {"dp": 2}, "dp2_sp2_tp2": {"dp": 2, "sp": 2, "tp": 2}, "sp8": {"sp": 8}}


@pytest.mark.parametrize("mesh", [pytest.param("dp2", marks=pytest.mark.slow), "dp2_sp2_tp2", "sp8"])
@pytest.mark.parametrize("name", ["mask", "packed and mask"])
def test_on_a_mesh(name, mesh):
    x, options = CALLS[name]
    got = value_and_gradient(functools.partial(ejdist.mean_pooling, mesh=make_mesh(**MESHES[mesh])), x, **options)
    close(got, numpy_means(x, **options))


@pytest.mark.parametrize("name", [pytest.param("all valid", marks=pytest.mark.slow), "packed"])
def test_features_may_be_split(name):
    x, options = CALLS[name]
    mesh = make_mesh(dp=1, sp=2, tp=4)
    lies = P(None, "tp")
    run = functools.partial(ejdist.mean_pooling, mesh=mesh, in_specs=(P(None, "sp", "tp"),), out_specs=lies)
    got = value_and_gradient(run, x, **options)
    close(got, numpy_means(x, **options))
    out = run(x, **options)
    assert {s.data.shape for s in out.addressable_shards} == {(out.shape[0], 6)}


def test_on_a_mesh_of_explicit_axes():
    mesh = jax.make_mesh(
        (2, 2), ("dp", "sp"), axis_types=(jax.sharding.AxisType.Explicit,) * 2, devices=jax.devices()[:4]
    )
    with jax.set_mesh(mesh):
        x, mask = jax.device_put(X, P("dp", "sp")), jax.device_put(MASK, P("dp", "sp"))
        out = ejdist.mean_pooling(x, mask)
    assert out.sharding.spec[0] == "dp"
    close([out], numpy_means(X, MASK)[:1])


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "args", "options"),
    [
        (r"'x' must be a float array \[B, T, D\].*one sequence is x\[None\]", (X[0],), {}),
        (r"'x' must be a float array .* got int32", (X.astype(np.int32),), {}),
        (r"'x' must be a float array .* got list", ([[[1.0]]],), {}),
        (r"'x' of shape \(4, 0, 24\) has no elements; give it", (X[:, :0],), {}),
        (
            r"'attention_mask' must be boolean .* got float32; write attention_mask > 0",
            (X, MASK.astype(np.float32)),
            {},
        ),
        (r"'attention_mask' must have the shape \[B, T\] = \(4, 16\) .* got \(4, 15\)", (X, MASK[:, 1:]), {}),
        (r"'cum_seqlens' splits one packed row, but x has B = 4; reshape", (X,), {"cum_seqlens": CUTS}),
        (r"'cum_seqlens' must be integers .* got float32", (X[:1],), {"cum_seqlens": CUTS.astype(np.float32)}),
        (r"'cum_seqlens' must be integers .* shape \(1,\)", (X[:1],), {"cum_seqlens": [0]}),
        (r"'cum_seqlens' must be nondecreasing, .*not the lengths", (X[:1],), {"cum_seqlens": [9, 7]}),
        (r"'cum_seqlens' must be nondecreasing", (X[:1],), {"cu_seqlens": jnp.asarray([0, 5, 3], jnp.uint8)}),
    ],
)
def test_a_wrong_call_is_a_value_error(said, args, options):
    for function in (mean_pooling, ejdist.mean_pooling):
        with pytest.raises(ValueError, match=f"mean_pooling: argument {said}"):
            function(*args, **options)


def test_a_backend_refuses_by_name():
    with pytest.raises(ValueError, match="'num_segments' must be at least 1, got 0"):
        op(X, np.zeros((4, 16), np.int32), num_segments=0)
    with interpret(), pytest.raises(Unsupported, match=r"num_segments = 9000 is too large: .* the 10 MiB of VMEM"):
        op(X, np.zeros((4, 16), np.int32), num_segments=9000, platform="pallas")
    with interpret(), pytest.raises(Unsupported, match="dtype float16 is not among bfloat16, float32"):
        mean_pooling(X.astype(np.float16), platform="pallas")


# -- the backends ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("forward", "backward"), [("xla", "triton_gpu"), ("triton_gpu", "pallas_tpu"), ("pallas_tpu", "xla")]
)
def test_any_backward_follows_any_forward(forward, backward):
    a = op.case_inputs(CASES["odd"])
    (total,), wanted, (d_total,) = value_and_gradients(op.function, a)
    with interpret():
        assert error(op(**a, platform=forward), total) < 2e-6
        got = op.backward({"d_total": d_total}, **a, platform=backward)
    assert error(got["x"], wanted["x"]) < 1e-7


OWN = {"triton_gpu": MeanPoolingConfig(64, 256, splits=7, backward_block_t=512, backward_block_d=256)}
OWN["pallas_tpu"] = MeanPoolingConfig(384, 256, backward_block_t=384, backward_block_d=128)


@pytest.mark.parametrize("backend", OWN)
@pytest.mark.slow
@pytest.mark.parametrize("name", ["long_row", "scattered"])
def test_numbers_of_the_tuning_candidates(backend, name):
    a, backend = op.case_inputs(CASES[name]), op.backends[backend]
    candidates = backend.candidates(op.bind(**a))
    assert len(candidates) == len(set(candidates)) > 1
    # Several blocks of tokens and of features, and a partial sum that is of no token.
    configs = [OWN[backend.name]] if name == "long_row" else [candidates[-1]]
    truth, true_gradients, d = value_and_gradients(op.function, a)
    for cfg in configs:
        with interpret():
            got, gradients, _ = value_and_gradients(lambda **a: op(**a, platform=backend.name, cfg=cfg), a, d)  # noqa: B023
        assert error(got[0], truth[0]) < 3e-6, cfg
        assert error(gradients["x"], true_gradients["x"]) < 1e-7, cfg


def test_the_size_of_the_batch_may_be_a_symbol_for_several_segments_too():
    (b,) = jax.export.symbolic_shape("b")
    a = op.case_inputs(CASES["odd"])
    shapes = [jax.ShapeDtypeStruct((b, *a[n].shape[1:]), a[n].dtype) for n in ("x", "segment_ids")]
    run = jax.jit(lambda x, ids: op(x, ids, num_segments=a["num_segments"]))
    close(*([f(a["x"], a["segment_ids"])] for f in (jax.export.export(run)(*shapes).call, run)))


@pytest.mark.slow
@pytest.mark.parametrize("segments", [1, 64, 1500])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_tpu_candidate_fits_vmem(segments, dtype):
    a = {"x": jax.ShapeDtypeStruct((1, 4096, 4096), dtype), "segment_ids": jax.ShapeDtypeStruct((1, 4096), "int32")}
    call = op.bind(**a, num_segments=segments)
    for cfg in op.backends["pallas_tpu"].candidates(call):

        def run(a, cfg=cfg):
            out, pull = jax.vjp(lambda x: op(x, a["segment_ids"], num_segments=segments, cfg=cfg), a["x"])
            return out, pull(out)

        assert checks.mosaic_calls(checks.compile_tpu(run, a)) == 2, cfg


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pool_8k", "packed_128k"])
def test_no_cuda_candidate_spills(name):
    candidates = op.backends["triton_gpu"].candidates(
        op.bind(**checks.call_of(op, CASES[name])[1], **CASES[name].options)
    )
    for cfg in candidates:
        for kernel in checks.export_cuda(*checks.call_of(op, CASES[name], cfg=cfg)).kernels:
            assert kernel.resources["spill_stores"] == 0, (cfg, kernel.name, kernel.resources)


def test_the_public_function():
    assert kernels.mean_pooling is mean_pooling and kernels.operations()["mean_pooling"] is op
    np.testing.assert_array_equal(ejdist.MeanPooling()(X, MASK), mean_pooling(X, MASK))
