"""Operations on a mesh give the numbers and gradients of the plain operations, or say which one to use instead."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import ejdist
import kernels
from ejdist import make_mesh
from ejdist.mapped import map_shards
from ejdist.sharded import sharded
from kernels.framework.dims import named

RNG = np.random.default_rng(0)
B, T, N, K, H, D, F, V = 4, 16, 4, 2, 8, 16, 24, 32


def normal(*shape):
    return jnp.asarray(RNG.standard_normal(shape).astype(np.float32))


QUERY, KEY, VALUE = normal(B, T, N, H), normal(B, T, K, H), normal(B, T, K, H)
X, WEIGHT = normal(B, T, D), normal(D)
SEGMENTS = jnp.asarray(np.sort(RNG.integers(-1, 3, (B, T)), axis=1), jnp.int32)
POSITIONS = jnp.asarray(RNG.integers(0, 100, (B, T)), jnp.int32)
TARGETS = jnp.asarray(RNG.integers(-1, V, (B, T)), jnp.int32)
MASK = jnp.asarray(RNG.random((B, 1, T, T)) < 0.7)

# name -> (function, arrays that are differentiated, options)
CALLS = {
    "rms_norm": ("rms_norm", {"x": X, "weight": WEIGHT}, {}),
    "rms_norm of heads": ("rms_norm", {"x": QUERY, "weight": normal(H)}, {}),
    "rms_norm of one token": ("rms_norm", {"x": X[:, :1], "weight": WEIGHT}, {}),
    "rotary_embedding": ("rotary_embedding", {"x": QUERY}, {"positions": POSITIONS}),
    "gated_mlp": ("gated_mlp", {"x": X, "gate": normal(D, F), "up": normal(D, F), "down": normal(F, D)}, {}),
    "fused_cross_entropy": (
        "fused_cross_entropy",
        {"hidden": X, "lm_head": normal(D, V)},
        {"targets": TARGETS, "z_loss": 1e-2, "label_smoothing": 0.1},
    ),
    "flash_attention": (
        "flash_attention",
        {"query": QUERY, "key": KEY, "value": VALUE, "softmax_aux": normal(N), "alibi_slopes": normal(N)},
        {"causal": True, "q_segment_ids": SEGMENTS, "kv_segment_ids": SEGMENTS},
    ),
    "flash_attention of one key head": (
        "flash_attention",
        {"query": QUERY, "key": KEY[:, :, :1], "value": VALUE[:, :, :1]},
        {"sliding_window": 5},
    ),
    "flash_attention with bias, mask and dropout": (
        "flash_attention",
        {"query": QUERY, "key": KEY, "value": VALUE, "bias": normal(1, N, T, T)},
        {"attention_mask": MASK, "dropout_prob": 0.3, "dropout_seed": jnp.uint32(5)},
    ),
    "flash_attention of one row": ("flash_attention", {"query": QUERY[:1], "key": KEY[:1], "value": VALUE[:1]}, {}),
    "scaled_dot_product_attention": (
        "scaled_dot_product_attention",
        {"query": QUERY, "key": KEY, "value": VALUE},
        {"causal": True},
    ),
}
MESHES = {"dp2_tp2": {"dp": 2, "tp": 2}, "fsdp2_ep2_tp2": {"fsdp": 2, "ep": 2, "tp": 2}}
BOTH = ("rms_norm", "gated_mlp", "rotary_embedding", "fused_cross_entropy", "flash_attention")
SPLITS_SEQUENCE = ("rms_norm", "rotary_embedding", "fused_cross_entropy", "gated_mlp")


def value_and_gradients(function, arrays, options):
    """Returns the output and every gradient under a cotangent that differs from element to element."""

    @jax.jit
    def run(arrays):
        out, pull = jax.vjp(lambda a: function(**a, **options), arrays)
        return out, pull(jnp.sin(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape))[0]

    return run(arrays)


@functools.cache
def plain(name):
    function, arrays, options = CALLS[name]
    return value_and_gradients(getattr(kernels, function), arrays, options)


def grid():
    for name, (function, _, _) in CALLS.items():
        for mesh, sizes in MESHES.items():
            if mesh == "fsdp2_ep2_tp2" and name not in BOTH:
                continue
            marks = pytest.mark.slow if mesh == "fsdp2_ep2_tp2" and function == "flash_attention" else ()
            yield pytest.param(name, sizes, id=f"{name}-{mesh}", marks=marks)
        if function in SPLITS_SEQUENCE:
            yield pytest.param(name, {"dp": 2, "sp": 2, "tp": 2}, id=f"{name}-dp2_sp2_tp2")


@pytest.mark.parametrize(("name", "sizes"), list(grid()))
def test_values_and_gradients_are_those_of_the_plain_operation(name, sizes):
    """Among them the gradients of what is whole on every device, which are sums over the devices."""
    function, arrays, options = CALLS[name]
    on_mesh = functools.partial(getattr(ejdist, function), mesh=make_mesh(**sizes))
    got, want = value_and_gradients(on_mesh, arrays, options), plain(name)

    def close(g, w):
        np.testing.assert_allclose(g, w, rtol=2e-5, atol=2e-6 * max(10.0, float(np.abs(w).max())))

    jax.tree.map(close, got, want)


def test_attention_with_weights():
    arrays = {"query": QUERY, "key": KEY, "value": VALUE}
    got = ejdist.attention(**arrays, causal=True, mesh=make_mesh(dp=2, tp=2))
    want = kernels.attention(**arrays, causal=True)
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g, w, atol=1e-5)


def test_lse_comes_with_its_own_spec():
    specs = (P("dp", None, "tp"),) * 3
    mesh = make_mesh(dp=2, tp=2)
    where = {"mesh": mesh, "in_specs": specs, "out_specs": specs[0]}
    out, lse = ejdist.flash_attention(QUERY, KEY, VALUE, return_lse=True, **where)
    want = kernels.flash_attention(QUERY, KEY, VALUE, return_lse=True)
    np.testing.assert_allclose(out, want[0], atol=1e-5)
    np.testing.assert_allclose(lse, want[1], atol=1e-5)
    assert {s.data.shape for s in lse.addressable_shards} == {(B // 2, T, N // 2)}


@pytest.mark.parametrize("name", list(CALLS))
def test_without_a_mesh_it_is_the_plain_operation(name):
    function, arrays, options = CALLS[name]
    got = getattr(ejdist, function)(**arrays, **options)
    np.testing.assert_array_equal(got, getattr(kernels, function)(**arrays, **options))


def test_a_sharded_function_has_the_signature_of_the_plain_operation_and_where_arrays_lie():
    for function in {c[0] for c in CALLS.values()}:
        ours = list(inspect.signature(getattr(ejdist, function)).parameters)
        theirs = list(inspect.signature(getattr(kernels, function)).parameters)
        assert [p for p in ours if p in theirs] == theirs
        sequence = {"axis_name"} if "attention" in function else set()  # what depends on a whole one
        assert set(ours) - set(theirs) == {"mesh", "in_specs", "out_specs"} | sequence


# -- sharded(function) -------------------------------------------------------------------------------------------------------


def test_any_operation_can_be_put_on_a_mesh_by_its_contract():
    op, on_mesh = kernels.operations()["rms_norm"], sharded(kernels.rms_norm)
    for lead in ((8,), (4, 6), (4, 6, 2), (4, 6, 2, 3)):
        x = normal(*lead, D)
        assert named(op.output_dims[0], x.ndim) == (*("B", "T", "N", "_")[: len(lead)], "D")
        got = on_mesh(x, WEIGHT, eps=1e-3, mesh=make_mesh(dp=2, sp=2, tp=2))
        np.testing.assert_allclose(got, kernels.rms_norm(x, WEIGHT, eps=1e-3), atol=1e-6)


def test_axes_of_the_callers_own_names():
    mesh = Mesh(np.asarray(jax.devices()).reshape(4, 2), ("data", "model"))
    specs = (P("data", None, "model"),) * 3
    out = sharded(kernels.flash_attention)(QUERY, KEY, VALUE, mesh=mesh, in_specs=specs, out_specs=specs[0])
    assert out.sharding.spec == P("data", None, "model")
    np.testing.assert_allclose(out, kernels.flash_attention(QUERY, KEY, VALUE), atol=1e-5)


def test_an_optional_array_may_have_a_spec_or_follow():
    mesh, bias = make_mesh(dp=2, tp=2), normal(1, N, T, T)
    specs = (P("dp", None, "tp"),) * 3
    want = kernels.flash_attention(QUERY, KEY, VALUE, bias=bias)
    for in_specs in (specs, (*specs, P(None, "tp"))):
        got = ejdist.flash_attention(QUERY, KEY, VALUE, bias=bias, mesh=mesh, in_specs=in_specs)
        np.testing.assert_allclose(got, want, atol=1e-5)


# -- wrong calls -------------------------------------------------------------------------------------------------------


def flash(*specs, mesh=None, arrays=(QUERY, KEY, VALUE)):
    return lambda: ejdist.flash_attention(*arrays, mesh=mesh or make_mesh(dp=2, sp=2, tp=2), in_specs=specs or None)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (flash(*(P("dp", "sp", "tp"),) * 3), ["'query'", "dim T", "sp", "ring_attention"]),
        (flash(P("dp"), P("dp", "sp"), P("dp", "sp")), ["'key'", "dim S", "sp", "ring_attention"]),
        (flash(*(P("dp", None, None, "tp"),) * 3), ["'query'", "dim H", "tp", "gather"]),
        (flash(P("dp", None, "tp"), P("dp"), P("dp")), ["N = 4", "K = 2", "alike"]),
        (flash(P("dp"), P("sp"), P("dp")), ["dim B", "'dp'", "'sp'"]),
        (flash(*(P("rows"),) * 3), ["rows", "does not have"]),
        (flash(*(P("dp"),) * 4), ["4 in_specs", "3 array arguments"]),
        (flash(P("dp", None, "tp", None, None)), ["5 entries"]),
        (flash(), ["dim T", "sp", "ring_attention"]),
        (flash(arrays=(QUERY[:3], KEY[:3], VALUE[:3])), ["dim T"]),
        (
            lambda: ejdist.flash_attention(QUERY[:3], KEY[:3], VALUE[:3], mesh=make_mesh(dp=2)),
            ["'query'", "dim B = 3", "dp=2", "multiple of 2"],
        ),
        (lambda: ejdist.flash_attention(QUERY, KEY, VALUE, mesh=make_mesh(tp=4)), ["'key'", "K = 2", "tp=4", "2 times"]),
        (lambda: ejdist.rms_norm(X, WEIGHT, in_specs=(P("dp"),)), ["'in_specs'", "'mesh'"]),
        (lambda: ejdist.rms_norm(X, WEIGHT, mesh=make_mesh(tp=2), in_specs=P(None, None, "tp")), ["'x'", "dim D", "tp"]),
        (lambda: ejdist.rms_norm(X[:, :6], WEIGHT, mesh=make_mesh(sp=4)), ["'x'", "dim T = 6", "sp=4", "multiple of 4"]),
        (
            lambda: ejdist.gated_mlp(
                X, normal(D, F), normal(D, F), normal(F, D), mesh=make_mesh(tp=2), in_specs=P(None, None, "tp")
            ),
            ["'x'", "dim D", "tp"],
        ),
        (
            lambda: ejdist.fused_cross_entropy(
                X, normal(D, V), TARGETS, mesh=make_mesh(tp=2), in_specs=(P(None, None, "tp"), P("tp"))
            ),
            ["cross_entropy", "dim D", "tp"],
        ),
        (
            lambda: sharded(kernels.fused_cross_entropy)(X, normal(D, V), TARGETS, mesh=make_mesh(tp=2)),
            ["'lm_head'", "dim V", "tp", "ejdist.fused_cross_entropy"],
        ),
    ],
)  # fmt: skip
def test_a_wrong_call_names_what_to_change(call, words):
    with pytest.raises(ValueError) as error:
        call()
    assert all(w in str(error.value) for w in words), str(error.value)


def test_every_operation_named_as_a_remedy_exists():
    for op in kernels.operations().values():
        for dim, name in op.see_also.items():
            assert dim not in op.local_dims | op.sum_dims and callable(getattr(ejdist, name)), (op, dim)


def test_the_gradient_of_what_every_device_has_whole_is_summed():
    mesh = make_mesh(dp=4, tp=2)
    double = map_shards(lambda x, w: x * w, mesh, (P("dp"), P()), P("dp"))
    x, w = jnp.arange(8.0), jnp.float32(3)
    assert jax.grad(lambda w: jnp.sum(double(x, w)))(w) == jnp.sum(x)


def test_placement_on_explicit_axes_is_made():
    mesh = jax.make_mesh((2, 4), ("dp", "tp"))
    arrays = (QUERY, normal(B, T, 4, H), normal(B, T, 4, H))
    with jax.set_mesh(mesh):
        got = jax.jit(functools.partial(ejdist.flash_attention, causal=True))(*arrays)
    np.testing.assert_allclose(got, kernels.flash_attention(*arrays, causal=True), atol=1e-5)
