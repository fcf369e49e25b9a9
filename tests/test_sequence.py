"""Sequence parallelism gives the numbers of one device: every order, scheme and mask, in value and in every gradient."""

import functools
import re

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.interpreters import mlir
from jax._src.lib.mlir import ir
from jax.extend.core import jaxprs_in_params
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import kernels
from ejdist import Order, make_mesh, ring_attention
from ejdist.mapped import map_shards
from ejdist.sequence import SCHEMES, AllGather, Ring, Scheme, Ulysses, exchange, merge
from ejdist.sequence.reshard import Reshard
from ejdist.sequence.schedule import hops, needed
from kernels import MaskInfo, Unsupported, flash_attention
from kernels.framework.dispatch import vary_alike, varying_axes
from kernels.framework.interpret import interpret

B, T, N, K, H = 2, 64, 4, 2, 8
RNG = np.random.default_rng(0)


def normal(*shape):
    return jnp.asarray(RNG.standard_normal(shape).astype(np.float32))


QUERY, KEY, VALUE, D_OUT, D_LSE = (
    normal(B, T, N, H),
    normal(B, T, K, H),
    normal(B, T, K, H),
    normal(B, T, N, H),
    normal(B, T, N),
)
SINKS, SLOPES = normal(N), jnp.abs(normal(N)) / 10


def packed(padding):
    ids = np.sort(RNG.integers(0, 5, (B, T)), axis=1)
    ids[:, T - padding :] = -1
    return jnp.asarray(ids, jnp.int32)


SEGMENTS = packed(5)
PACKED = {"q_segment_ids": SEGMENTS, "kv_segment_ids": SEGMENTS}
MASKS = {
    "causal": {"causal": True},
    "full": {},
    "window": {"causal": True, "sliding_window": 9},
    "two_sided_window": {"sliding_window": (6, 3)},
    "chunk": {"causal": True, "chunk_size": 12},
    "packed": {"causal": True, **PACKED},
    "packed_full": PACKED,
    "packed_chunk": {"causal": True, "chunk_size": 6, **PACKED},
    "packed_window": {"causal": True, "sliding_window": 5, **PACKED},
    "sink_window": {"causal": True, "sliding_window": 9, "sink_tokens": 3},
    "packed_sink_window": {"causal": True, "sliding_window": 5, "sink_tokens": 2, **PACKED},
    "sinks": {"causal": True, "softmax_aux": SINKS},
    "sinks_packed_window": {
        "causal": True,
        "softmax_aux": jnp.stack([SINKS, -SINKS], 1),
        "sliding_window": 7,
        **PACKED,
    },
    "soft_cap": {"causal": True, "logits_soft_cap": 1.5, "softmax_scale": 0.9},
    "dropout": {"causal": True, "dropout_prob": 0.3, "dropout_seed": 7},
    "alibi": {"causal": True, "alibi_slopes": SLOPES},
    # Under the window alone two hops would do; the prefix lets the first rank see keys of the next ones.
    "prefix": {
        "causal": True,
        "sliding_window": (9, None),
        "mask_info": MaskInfo(prefix_lengths=jnp.asarray([40, 3], jnp.int32)),
    },
}


def outputs_and_gradients(function, order, options):
    """Returns out, lse and every gradient, in the original order of the sequence. NumPy permutes, and compiles nothing."""
    options = {n: order.permute(np.asarray(x)) if n.endswith("segment_ids") else x for n, x in options.items()}
    given = {n: options.pop(n) for n in ("softmax_aux", "alibi_slopes") if n in options}

    @jax.jit
    def run(q, k, v, d_out, d_lse, given):
        (out, lse), pull = jax.vjp(
            lambda q, k, v, g: function(q, k, v, **g, **options, return_lse=True), q, k, v, given
        )
        # A row with no key has lse -inf; its cotangent must not matter.
        return out, lse, *pull((d_out, jnp.where(jnp.isfinite(lse), d_lse, 0)))

    permuted = (order.permute(np.asarray(x)) for x in (QUERY, KEY, VALUE, D_OUT, D_LSE))
    *arrays, others = jax.device_get(run(*permuted, given))
    return [order.inverse(x) for x in arrays] + [others[n] for n in sorted(others)]


@functools.cache
def on_one_device(name):
    return outputs_and_gradients(flash_attention, Order("contiguous", 1), MASKS[name])


def assert_close(got, want, what):
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        g, w = np.asarray(g), np.asarray(w)
        assert np.array_equal(np.isfinite(g), np.isfinite(w)), (what, i)
        scale = max(1.0, float(np.abs(w[np.isfinite(w)]).max()))
        np.testing.assert_allclose(g, w, rtol=2e-5, atol=1e-5 * scale, err_msg=f"{what}, array {i}")


MESHES = {"sp4": {"sp": 4}, "sp2": {"sp": 2}, "sp2_tp2_fsdp2": {"sp": 2, "tp": 2, "fsdp": 2}, "sp8": {"sp": 8}}


# Those that are no ring where queries see all keys before them; tests/test_halo.py and test_group_cast.py have the others.
OF_ALL_KEYS = [name for name in SCHEMES if name not in ("halo", "group_cast")]
AND_GROUPS = [*OF_ALL_KEYS, "group_cast"]
AND_CHUNKS = [*OF_ALL_KEYS, pytest.param("group_cast", marks=pytest.mark.slow)]
# A mask that has it all in each scheme, order and kind of mesh, and rules that depend on where a key is in the text.
# Ulysses' are in test_ulysses.py.
QUICK = {
    ("sinks_packed_window", "sp4", "zigzag", "ring"),
    ("sinks_packed_window", "sp4", "zigzag", "all_gather"),
    ("packed_chunk", "sp4", "contiguous", "ring"),
}


def grid():
    for name in MASKS:
        for mesh in MESHES:
            for order in ("contiguous", "zigzag", "striped"):
                for scheme in OF_ALL_KEYS:
                    sizes = MESHES[mesh]
                    if SCHEMES[scheme]().rejects(N // sizes.get("tp", 1), (("sp", sizes["sp"]),)):
                        continue  # eight ranks for four heads: refused, see below
                    marks = () if (name, mesh, order, scheme) in QUICK else pytest.mark.slow
                    yield pytest.param(name, mesh, order, scheme, marks=marks)


@pytest.mark.parametrize(("name", "mesh", "order", "scheme"), list(grid()))
def test_the_numbers_of_one_device(name, mesh, order, scheme):
    made = Order(order, MESHES[mesh]["sp"], 4 if order == "striped" else 1)
    ring = functools.partial(ring_attention, mesh=make_mesh(**MESHES[mesh]), order=made, scheme=scheme)
    assert_close(outputs_and_gradients(ring, made, MASKS[name]), on_one_device(name), f"{name} {mesh} {order} {scheme}")


def test_sp_of_one_is_the_plain_operation_in_any_order():
    order = Order("zigzag", 1)
    got = ring_attention(QUERY, KEY, VALUE, causal=True, order=order, mesh=make_mesh(tp=2))
    np.testing.assert_allclose(got, flash_attention(QUERY, KEY, VALUE, causal=True), atol=1e-6)


def test_a_string_order_on_a_mesh_whose_axis_has_one_device_is_the_plain_operation():
    for mesh in (make_mesh(), make_mesh(tp=2)):
        got = ring_attention(QUERY, KEY, VALUE, causal=True, order="zigzag", mesh=mesh)
        np.testing.assert_allclose(got, flash_attention(QUERY, KEY, VALUE, causal=True), atol=1e-6)


def test_a_batch_of_one_row_stays_whole():
    q, k, v = (x[:1] for x in (QUERY, KEY, VALUE))
    got = jax.jit(functools.partial(ring_attention, causal=True, mesh=make_mesh(dp=2, sp=2)))(q, k, v)
    np.testing.assert_allclose(got, WANTED(q, k, v), atol=1e-5)


@pytest.mark.parametrize(
    "rule",
    [pytest.param({"chunk_size": 6}, marks=pytest.mark.slow), {"sliding_window": 5, "sink_tokens": 2}],
    ids=str,
)
def test_inside_the_callers_own_shard_map(rule):
    """What is counted from the start of a segment is counted over all ranks."""
    mesh, spec, order = make_mesh(sp=4), P(None, "sp"), Order("zigzag", 4)
    options = {"causal": True, **rule}

    def local(q, k, v, ids):
        return ring_attention(q, k, v, axis_name="sp", order="zigzag", q_segment_ids=ids, kv_segment_ids=ids, **options)

    ring = jax.jit(map_shards(local, mesh, (spec,) * 4, spec))
    got = jax.device_get(ring(*(order.permute(np.asarray(x)) for x in (QUERY, KEY, VALUE, SEGMENTS))))
    want = jax.jit(functools.partial(flash_attention, **options, **PACKED))(QUERY, KEY, VALUE)
    np.testing.assert_allclose(order.inverse(got), want, atol=1e-5)


def test_axes_of_the_callers_own_names():
    mesh = Mesh(np.asarray(jax.devices()).reshape(2, 4), ("replica", "ring"))
    specs = (P("replica", "ring"),) * 3
    where = {"mesh": mesh, "in_specs": specs, "out_specs": specs[0]}
    got = jax.jit(functools.partial(ring_attention, axis_name="ring", causal=True, **where))(QUERY, KEY, VALUE)
    np.testing.assert_allclose(got, WANTED(QUERY, KEY, VALUE), atol=1e-5)
    assert got.sharding.spec == P("replica", "ring")


WANTED = jax.jit(functools.partial(flash_attention, causal=True))
TWO_AXES = Mesh(np.asarray(jax.devices()).reshape(2, 4), ("a", "b"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axis", "scheme"),
    [
        (("a", "b"), "ring"),
        (("a", "b"), "all_gather"),
        (("a", "b"), "ulysses"),
        (("b", "a"), "ring"),
    ],
)
def test_a_sequence_over_two_axes(axis, scheme):
    """The last tuple names the axes in another order than the mesh lists them."""
    order = Order("zigzag", 8)
    ring = functools.partial(ring_attention, mesh=TWO_AXES, axis_name=axis, order=order, scheme=scheme)
    got = outputs_and_gradients(ring, order, MASKS["sinks_packed_window"])
    assert_close(got, on_one_device("sinks_packed_window"), f"{axis} {scheme}")


def products():
    for order in ("contiguous", "zigzag", "striped"):
        for outer, axis in (
            (Ring(), ("a", "b")),
            (Ring(), ("b", "a")),
            (AllGather(), ("a", "b")),
            (AllGather(), ("b", "a")),
        ):
            for name in MASKS:
                # Quick is one of all: tests/test_ulysses.py has every mask and order.
                quick = (name, order, *axis) == ("packed_chunk", "striped", "b", "a") and outer == AllGather()
                yield pytest.param(name, order, outer, axis, marks=() if quick else (pytest.mark.slow,))


@pytest.mark.parametrize(("name", "order", "outer", "axis"), list(products()))
def test_heads_over_one_axis_and_keys_over_another(name, order, outer, axis):
    """Of four heads and two of keys, over the last axis of four or of two ranks, with another scheme over the first."""
    made = Order(order, 8)
    ring = functools.partial(ring_attention, mesh=TWO_AXES, axis_name=axis, order=made, scheme=Ulysses(outer))
    assert_close(outputs_and_gradients(ring, made, MASKS[name]), on_one_device(name), f"{name} {order} {outer} {axis}")


LEVELS = [
    ("sinks_packed_window", {"cp": 2, "sp": 2}, "zigzag"),
    ("causal", {"cp": 4, "sp": 2}, "contiguous"),
    ("packed", {"cp": 2, "sp": 4}, "striped"),
    ("dropout", {"cp": 4, "sp": 2}, "zigzag"),
    ("packed_chunk", {"cp": 2, "sp": 4}, "contiguous"),
    ("causal", {"cp": 2, "sp": 2, "tp": 2}, "zigzag"),
]


@pytest.mark.parametrize(
    ("name", "sizes", "order"),
    [pytest.param(*row, marks=() if i == 0 else pytest.mark.slow) for i, row in enumerate(LEVELS)],
)
def test_a_ring_of_two_levels(name, sizes, order):
    """Inside of the last axis, and between its groups; numbers of hops that differ, and other orders of the same keys."""
    ranks = sizes["cp"] * sizes["sp"]
    made = Order(order, ranks, 4 if order == "striped" else 1)
    mesh = make_mesh(**sizes, devices=jax.devices()[: ranks * sizes.get("tp", 1)])
    ring = functools.partial(ring_attention, mesh=mesh, order=made, scheme=Ring(levels=2))
    assert_close(outputs_and_gradients(ring, made, MASKS[name]), on_one_device(name), f"{name} {sizes} {order}")


def test_two_levels_need_two_axes():
    why = r"sequence.levels = 2 is for a sequence over two axes, mesh.cp and mesh.sp, and this one is over one: leave it out"
    with pytest.raises(ValueError, match=why):
        ring_attention(QUERY, KEY, VALUE, causal=True, mesh=make_mesh(sp=4), scheme=Ring(levels=2))
    assert re.search(why, Ring(levels=2).rejects(4, (("sp", 4),)))
    assert Ring(levels=2).rejects(4, (("cp", 2), ("sp", 4))) is None
    with pytest.raises(ValueError, match=r"sequence.levels = 3 is unknown; use 1, or 2"):
        Ring(levels=3)
    with pytest.raises(ValueError, match=r"sequence.levels = 2 makes all hops.*leave one of the two out"):
        Ring(levels=2, hops="batch")


@pytest.mark.parametrize(
    ("heads", "kv_heads", "sp"),
    [(12, 3, 2), *(pytest.param(*x, marks=pytest.mark.slow) for x in ((8, 2, 8), (4, 4, 4), (4, 1, 4), (12, 6, 4)))],
)
def test_heads_of_keys_are_repeated_where_they_do_not_divide(heads, kv_heads, sp):
    """Every rank has the heads that its queries read, once each where that is possible, and gradients are sums of all."""
    arrays = normal(B, T, heads, H), normal(B, T, kv_heads, H), normal(B, T, kv_heads, H)

    def gradients(function):
        return jax.jit(jax.grad(lambda *a: jnp.sum(jnp.sin(function(*a, causal=True))), (0, 1, 2)))(*arrays)

    ulysses = functools.partial(ring_attention, scheme="ulysses", mesh=make_mesh(sp=sp))
    assert_close(gradients(ulysses), gradients(flash_attention), f"{heads} {kv_heads} {sp}")


@pytest.mark.slow  # tests/test_ulysses.py has both axes
def test_a_sequence_over_both_axes_of_the_projects_own_mesh():
    """The layout has the sequence on cp and sp, with no axis named; the axis of the fewest devices is the inner one."""
    order = Order("zigzag", 8)
    ring = functools.partial(ring_attention, mesh=make_mesh(cp=4, sp=2), order=order, scheme="ulysses")
    assert_close(
        outputs_and_gradients(ring, order, MASKS["sinks_packed_window"]),
        on_one_device("sinks_packed_window"),
        "cp4 sp2",
    )


def test_what_a_contract_does_not_name_is_not_moved():
    from kernels.ops.blocksparse_attention import op

    way = Reshard(op, "sp", Order("contiguous", 2), ("N", "K"), ("T", "S"), {})
    with pytest.raises(Unsupported, match="'block_mask' of blocksparse_attention has the dims #B #N _ _"):
        way.there("block_mask", jnp.ones((1, 1, 2, 4), bool))


@pytest.mark.slow
@pytest.mark.parametrize("scheme", SCHEMES)
def test_over_two_axes_inside_the_callers_own_shard_map(scheme):
    axis, order, options = ("a", "b"), Order("zigzag", 8), {"causal": True, "chunk_size": 6}
    names = ("q_segment_ids", "kv_segment_ids")

    def local(q, k, v, ids):
        packed = dict.fromkeys(names, ids)
        return ring_attention(q, k, v, axis_name=axis, order="zigzag", scheme=scheme, **packed, **options)

    spec = P(None, axis)
    ring = map_shards(local, TWO_AXES, (spec,) * 4, spec)

    def gradients(function):
        return jax.jit(jax.grad(lambda *a: jnp.sum(jnp.sin(function(*a))), (0, 1, 2)))(QUERY, KEY, VALUE)

    got = gradients(lambda *a: order.inverse(ring(*(order.permute(x) for x in (*a, SEGMENTS)))))
    assert_close(got, gradients(functools.partial(flash_attention, **options, **PACKED)), scheme)


@pytest.mark.slow
def test_of_two_axes_one_may_have_one_device():
    mesh = Mesh(np.asarray(jax.devices()[:4]).reshape(1, 4), ("a", "b"))
    order = Order("zigzag", 4)
    ring = functools.partial(ring_attention, mesh=mesh, axis_name=("a", "b"), causal=True, order=order)
    got = jax.device_get(jax.jit(ring)(*(order.permute(np.asarray(x)) for x in (QUERY, KEY, VALUE))))
    np.testing.assert_allclose(order.inverse(got), WANTED(QUERY, KEY, VALUE), atol=1e-5)


def test_a_scheme_is_an_object():
    class Mine(Scheme):
        def forward(self, local):
            out, lse = Ring().forward(local)
            return 2 * jax.lax.optimization_barrier(out), lse  # the same bits, whatever it is fused with

    run = functools.partial(ring_attention, QUERY, KEY, VALUE, causal=True, mesh=make_mesh(sp=2))
    named = {name: run(scheme=name) for name in SCHEMES}
    for name, scheme in SCHEMES.items():
        assert np.array_equal(run(scheme=scheme()), named[name])
        assert scheme() == scheme() and hash(scheme()) == hash(scheme())
    assert np.array_equal(run(scheme=Mine()), 2 * named["ring"])


def test_a_padding_mask_is_segments():
    real = jnp.arange(T)[None] < jnp.asarray([[50], [64]])
    got = ring_attention(QUERY, KEY, VALUE, causal=True, attention_mask=real, mesh=make_mesh(sp=4))
    want = flash_attention(QUERY, KEY, VALUE, causal=True, attention_mask=real)
    np.testing.assert_allclose(got, want, atol=1e-5)


# -- where shard_map checks over which axes values vary ---------------------------------------------------------------


@pytest.mark.parametrize("checked", [True, False])
def test_a_constant_is_typed_like_the_arrays_that_it_meets(checked):
    seen = {}

    def local(x, whole):
        zeros, given = vary_alike((jnp.zeros(3), x), x, {"whole": whole})
        both = vary_alike(whole, x, exchange.rank("b"))
        seen["axes"] = [set(varying_axes(y)) for y in (zeros, given, whole, both)]
        total, _ = jax.lax.scan(lambda total, row: (total + row, None), jnp.sum(zeros) + jnp.zeros_like(x[0]), x)
        return jax.lax.psum(total * both[0], "b")

    mapped = jax.shard_map(local, mesh=TWO_AXES, in_specs=(P(None, "a"), P()), out_specs=P("a"), check_vma=checked)
    x, whole = jnp.arange(8.0).reshape(4, 2), jnp.ones(3)
    gradient = jax.grad(lambda w: jnp.sum(mapped(x, w)))(whole)
    assert seen["axes"] == ([{"a"}, {"a"}, set(), {"a", "b"}] if checked else [set()] * 4)
    # A replicated input's gradient is the sum over every rank that used it, once.
    np.testing.assert_array_equal(gradient, [4 * jnp.sum(x), 0, 0])


@pytest.mark.slow
@pytest.mark.parametrize("scheme", AND_GROUPS)
def test_inside_a_shard_map_that_checks_varying_axes(scheme):
    mesh, order, spec = make_mesh(sp=4), Order("zigzag", 4), P(None, "sp")

    def local(q, k, v, ids, sinks, slopes):
        options = {"softmax_aux": sinks, "alibi_slopes": slopes, "q_segment_ids": ids, "kv_segment_ids": ids}
        return ring_attention(q, k, v, causal=True, order="zigzag", scheme=scheme, **options)

    mapped = jax.shard_map(local, mesh=mesh, in_specs=(spec,) * 4 + (P(), P()), out_specs=spec, check_vma=True)

    def ring(q, k, v, sinks, slopes):
        return order.inverse(mapped(*(order.permute(x) for x in (q, k, v, SEGMENTS)), sinks, slopes))

    def plain(q, k, v, sinks, slopes):
        return flash_attention(q, k, v, causal=True, softmax_aux=sinks, alibi_slopes=slopes, **PACKED)

    def outputs(function):
        out, pull = jax.vjp(function, QUERY, KEY, VALUE, SINKS, SLOPES)
        return out, *pull(D_OUT)

    assert_close(jax.jit(lambda: outputs(ring))(), jax.jit(lambda: outputs(plain))(), scheme)


@pytest.mark.parametrize("scheme", AND_CHUNKS)
def test_a_second_derivative_is_refused_by_name(scheme):
    ring = functools.partial(ring_attention, causal=True, mesh=make_mesh(sp=2), scheme=scheme, softmax_aux=SINKS)

    def loss(q):
        return jnp.sum(jnp.sin(ring(q, KEY, VALUE)))

    def slope(q):
        return jnp.sum(jax.grad(loss)(q) ** 2)

    for second in (jax.grad(slope), jax.jit(jax.grad(slope)), lambda q: jax.jvp(jax.grad(loss), (q,), (q,))):
        with pytest.raises(Unsupported, match="ring_attention: second derivatives"):
            second(QUERY)
    # What does not go through the ring may be differentiated as often as one likes.
    twice = jax.grad(lambda a: jax.grad(lambda a: a**3 * loss(jax.lax.stop_gradient(QUERY)))(a))(2.0)
    np.testing.assert_allclose(twice, 12 * loss(QUERY), rtol=1e-5)


@pytest.mark.slow
def test_meshes_in_force_of_every_kind():
    def loss(q, k, v):
        return jnp.sum(jnp.sin(ring_attention(q, k, v, axis_name="sp", causal=True)))

    want = jax.jit(jax.grad(lambda q, k, v: jnp.sum(jnp.sin(flash_attention(q, k, v, causal=True)))))(QUERY, KEY, VALUE)
    auto = Mesh(np.asarray(jax.devices()[:4]), ("sp",))
    explicit = jax.make_mesh((4,), ("sp",), devices=jax.devices()[:4])
    for mesh in (auto, explicit):
        with jax.set_mesh(mesh):
            got = jax.jit(jax.grad(loss))(QUERY, KEY, VALUE)
        np.testing.assert_allclose(got, want, atol=1e-5)


def test_positions_of_the_callers_own():
    shuffled = np.random.default_rng(1).permutation(T)
    at = jnp.asarray(shuffled, jnp.int32)[None]
    q, k, v = (x[:, shuffled] for x in (QUERY, KEY, VALUE))
    got = ring_attention(q, k, v, causal=True, sliding_window=9, q_positions=at, kv_positions=at, mesh=make_mesh(sp=4))
    want = flash_attention(QUERY, KEY, VALUE, causal=True, sliding_window=9)
    np.testing.assert_allclose(got, want[:, shuffled], atol=1e-5)


@pytest.mark.slow  # three programs, 3 s
def test_bfloat16_is_as_near_to_float32_as_one_device():
    q, k, v = (x.astype(jnp.bfloat16) for x in (QUERY, KEY, VALUE))

    def gradients(function, *arrays):
        def loss(*a):
            return jnp.sum(function(*a, causal=True).astype(jnp.float32) * D_OUT)

        return jax.jit(jax.grad(loss, (0, 1, 2)))(*arrays)

    exact = gradients(flash_attention, *(x.astype(jnp.float32) for x in (q, k, v)))
    one = gradients(flash_attention, q, k, v)
    ring = gradients(functools.partial(ring_attention, mesh=make_mesh(sp=4)), q, k, v)
    half = gradients(functools.partial(ring_attention, mesh=make_mesh(sp=4), scheme=Ring("bfloat16")), q, k, v)
    with interpret():
        zigzag = functools.partial(ring_attention, mesh=make_mesh(sp=4), order="zigzag", platform="cudnn_gpu")
        order = Order("zigzag", 4)
        cudnn = gradients(lambda *a, **causal: order.inverse(zigzag(*map(order.permute, a), **causal)), q, k, v)
    for e, o, r, c, h in zip(exact, one, ring, cudnn, half, strict=True):
        assert r.dtype == c.dtype == h.dtype == jnp.bfloat16
        assert jnp.linalg.norm(h - e) < 2 * jnp.linalg.norm(o - e), "sums on their way are rounded at each hop"
        assert jnp.linalg.norm(r - e) < 1.5 * jnp.linalg.norm(o - e)
        assert jnp.linalg.norm(c - e) < 1.5 * jnp.linalg.norm(o - e)
    assert [bool(jnp.array_equal(r, h)) for r, h in zip(ring, half, strict=True)] == [True, False, False]


def test_a_row_that_sees_nothing_has_no_gradient_whatever_the_cotangent_of_its_lse():
    mask = MaskInfo.from_segments(SEGMENTS.at[:, 40:].set(-1))
    ring = functools.partial(ring_attention, mask_info=mask, mesh=make_mesh(sp=2), return_lse=True)

    @jax.jit
    def run(q, k, v, sinks):
        (out, lse), pull = jax.vjp(lambda *a: ring(*a[:3], softmax_aux=a[3]), q, k, v, sinks)
        return lse, pull((jnp.zeros_like(out), jnp.where(jnp.isfinite(lse), 0, jnp.nan)))

    lse, gradients = run(QUERY, KEY, VALUE, jnp.full(N, -jnp.inf))
    assert np.isneginf(lse[:, 40:]).all()
    assert all(np.array_equal(g, np.zeros(g.shape)) for g in gradients)


# -- order ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["contiguous", "zigzag", "striped"])
def test_the_axis_of_the_sequence_may_be_counted_from_the_last(name):
    order, x = Order(name, 2), np.arange(2 * 16 * 3).reshape(2, 16, 3)  # parts as long as there are parts
    np.testing.assert_array_equal(order.permute(x, axis=-2), order.permute(x, axis=1))
    np.testing.assert_array_equal(order.inverse(order.permute(x), axis=-2), x)


@pytest.mark.parametrize("name", [("contiguous",), ("zigzag",), ("striped",), ("striped", 4)])
@pytest.mark.parametrize("shards", [1, 2, 4])
def test_an_order_is_a_permutation_that_can_be_undone(name, shards):
    order = Order(name[0], shards, *name[1:])
    assert sorted(order.indices(32)) == list(range(32))
    x = np.arange(64).reshape(2, 32)
    assert np.array_equal(order.inverse(order.permute(x)), x)
    assert np.array_equal(order.permute(x)[0], order.indices(32))


@pytest.mark.parametrize("name", [("contiguous", 4), ("zigzag", 4), ("striped", 4), ("striped", 4, 2)])
def test_a_rank_finds_its_tokens_by_arithmetic(name):
    order = Order(*name)
    traced = jax.jit(lambda rank: order.positions(rank, 32))
    for rank in range(4):
        assert np.array_equal(traced(rank), order.indices(32)[8 * rank : 8 * rank + 8])


def test_zigzag_gives_each_rank_a_chunk_and_its_mirror():
    assert Order("zigzag", 2).indices(8).tolist() == [0, 1, 6, 7, 2, 3, 4, 5]


def test_stripes_go_around_the_ranks():
    assert Order("striped", 2, 2).indices(8).tolist() == [0, 1, 4, 5, 2, 3, 6, 7]
    assert Order("striped", 3, 2).positions(1, 18).tolist() == [2, 3, 8, 9, 14, 15]
    order, groups = Order("striped", 4, 2), Order("striped", 4, 2).of_groups(2)
    assert (groups, order.of_members(2)) == (Order("striped", 2, 4), Order("striped", 2, 2))
    of_group = np.arange(32)[groups.positions(1, 32)]  # the second group's tokens, and then its ranks'
    np.testing.assert_array_equal(
        order.of_members(2).permute(of_group, 0), order.positions(np.arange(2, 4), 32).ravel()
    )


ROW, CUTS = (QUERY[:1], KEY[:1], VALUE[:1]), jnp.asarray([0, 10, 33, T])


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: Order("zigzag", 4).indices(60), ["60", "multiple of 8", "64"]),
        (lambda: Order("spiral", 4), ["an order's 'name'", "spiral", "zigzag"]),
        (lambda: Order("zigzag", jnp.int32(4)), ["'shards'", "integer"]),
        (lambda: Order("striped", 4, 2.0), ["'stripe'", "integer"]),
        (lambda: Order("striped", 4, 0), ["'stripe'", "at least 1"]),
        (lambda: Order("zigzag", 4, 2), ["'stripe' = 2", "striped", "'zigzag' has no stripes"]),
        (lambda: Order("striped", 4, 12).indices(160), ["stripes of 12", "has 40", "use stripes of 10"]),
        (lambda: Order("striped", 4, 12).indices(162), ["multiple of 48", "144"]),
        (lambda: Order("zigzag", 4).permute([1, 2]), ["NumPy and JAX arrays", "list"]),
        (lambda: Order("zigzag", 4).permute(np.arange(8)), ["'axis' = 1", "(8,)"]),
        (lambda: ring_attention(QUERY, KEY, VALUE, scheme="tree"), ["'scheme'", "tree", "all_gather"]),
        (lambda: ring_attention(QUERY, KEY, VALUE, scheme=Ring), ["'scheme'", "Ring()"]),
        (
            lambda: ring_attention(QUERY, KEY, VALUE, scheme="ulysses", mesh=make_mesh(sp=8)),
            ["ring_attention: ", "4 heads", "sp=8", "divisor of 4", "mesh.sp=4 mesh.cp=2", "'ring'"],
        ),
        (
            lambda: ring_attention(
                QUERY, KEY, VALUE, causal=True, sliding_window=T, scheme="halo", mesh=make_mesh(sp=4)
            ),
            ["a halo", f"reaches {T - 1} tokens back in a sequence of {T}", "scheme 'ring'", f"at most {T - 1}"],
        ),
        (
            lambda: ring_attention(QUERY, KEY, VALUE, causal=True, order="balanced", mesh=make_mesh(sp=4)),
            ["'balanced' is another one for each row", "'q_positions'", "order='striped'"],
        ),
        (lambda: ring_attention(QUERY, KEY, VALUE, logits_soft_cap=0.0), ["ring_attention: ", "'logits_soft_cap'"]),
        (lambda: ring_attention(QUERY, KEY, VALUE, mask_info=MaskInfo(causal=1)), ["ring_attention: ", "'causal'"]),
        (lambda: ring_attention(QUERY, KEY, VALUE, order="spiral"), ["ring_attention", "'order'", "spiral", "zigzag"]),
        # Without a mesh there are no ranks: the tokens would be read as if they lay in their own order.
        (
            lambda: ring_attention(QUERY, KEY, VALUE, order="zigzag"),
            ["ring_attention", "'order'", "'zigzag'", "'mesh'"],
        ),
        (lambda: ring_attention(QUERY, KEY, VALUE, order="striped"), ["'order'", "'striped'", "no mesh"]),
        (lambda: ring_attention(QUERY, KEY, VALUE, order=Order("zigzag", 4)), ["'order'", "4 ranks", "no mesh"]),
        (lambda: ring_attention(QUERY, KEY, VALUE, axis_name="ring"), ["'axis_name'", "'ring'", "no mesh"]),
        (lambda: ring_attention(QUERY, KEY, VALUE, axis_name=("a", "b")), ["'axis_name'", "('a', 'b')", "no mesh"]),
        (lambda: ring_attention(QUERY, KEY, VALUE, axis_name=("sp", "sp")), ["'axis_name'", "different"]),
        (lambda: ring_attention(QUERY, KEY, VALUE, axis_name=["sp"]), ["'axis_name'", "tuple"]),
        (lambda: ring_attention(QUERY, KEY, VALUE, axis_name=(1,)), ["'axis_name' = (1,)", "name of a mesh axis"]),
        (
            lambda: ring_attention(QUERY, KEY, VALUE, axis_name=("a", "x"), mesh=TWO_AXES),
            ["'axis_name'", "'x'", "'a': 2"],
        ),
        (
            lambda: ring_attention(QUERY, KEY, VALUE, axis_name=("a", "b"), mesh=TWO_AXES, order=Order("zigzag", 4)),
            ["'order'", "4 ranks", "8", "('a', 'b')"],
        ),
        (
            lambda: ring_attention(
                QUERY, KEY, VALUE, axis_name=("a", "b"), mesh=TWO_AXES, in_specs=(P(None, "a"),) * 3
            ),
            ["in_specs", "('a',)", "axis_name = ('a', 'b')"],
        ),
        (lambda: ring_attention(QUERY, KEY, VALUE, axis_name="x", mesh=make_mesh(sp=4)), ["'axis_name'", "'x'"]),
        (lambda: ring_attention(QUERY, KEY[:, :32], VALUE[:, :32], mesh=make_mesh(sp=4)), ["'key'", "32", "64"]),
        (
            lambda: ring_attention(QUERY, KEY, VALUE, mesh=make_mesh(sp=2, tp=4)),
            ["ring_attention: ", "K = 2", "tp=4", "repeat"],
        ),
        (lambda: ring_attention(QUERY, KEY, VALUE, axis_name="x", mesh=make_mesh()), ["'axis_name'", "'x'"]),
        (lambda: ring_attention(QUERY, KEY, VALUE, in_specs=(P(None, "sp"),) * 3), ["'in_specs'", "'mesh'"]),
        (
            lambda: ring_attention(QUERY, KEY, VALUE, in_specs=(P("sp"),) * 3, mesh=make_mesh(sp=2)),
            ["in_specs", "axis_name", "'sp'"],
        ),
        (
            lambda: map_shards(ring_attention, Mesh(jax.devices()[:4], ("x",)), (P(None, "x"),) * 3, P(None, "x"))(
                QUERY, KEY, VALUE
            ),
            ["'axis_name'", "'sp'", "'x'", "mapped over"],
        ),
        (
            lambda: ring_attention(QUERY[:, :60], KEY[:, :60], VALUE[:, :60], mesh=make_mesh(sp=8)),
            ["60", "over 8 ranks", "multiple of 8"],
        ),
        # Cuts are of tokens in their own order: in another one, or on a rank, they would cut elsewhere.
        (
            lambda: ring_attention(*ROW, cum_seqlens_q=CUTS, order="zigzag", mesh=make_mesh(sp=4)),
            ["'cum_seqlens_q'", "'zigzag'", "'q_segment_ids'"],
        ),
        (
            lambda: map_shards(
                lambda *x: ring_attention(*x, cum_seqlens_q=CUTS), make_mesh(sp=4), (P(None, "sp"),) * 3, P(None, "sp")
            )(*ROW),
            ["'cum_seqlens_q'", "one rank", "'sp'", "'q_segment_ids'"],
        ),
        (lambda: ring_attention(QUERY, KEY.astype(jnp.bfloat16), VALUE, mesh=make_mesh(sp=4)), ["'key'", "bfloat16"]),
        (
            lambda: ring_attention(QUERY[:1], KEY[:1], VALUE[:1], mesh=make_mesh(sp=2), order=Order("zigzag", 4)),
            ["'order'"],
        ),
    ],
)
def test_a_wrong_call_names_the_argument(call, words):
    with pytest.raises(ValueError) as error:
        call()
    assert all(w in str(error.value) for w in words), str(error.value)


@pytest.mark.parametrize("scheme", AND_CHUNKS)
def test_keys_of_other_ranks_do_not_hide_what_is_no_number(scheme):
    spoiled = KEY.at[0, 40].set(jnp.nan)
    where = {"mesh": make_mesh(sp=2), "scheme": scheme}
    _, lse = ring_attention(QUERY, spoiled, VALUE, causal=True, return_lse=True, **where)
    wanted = (np.arange(B) == 0)[:, None] & (np.arange(T) >= 40)
    np.testing.assert_array_equal(np.isnan(lse), np.broadcast_to(wanted[..., None], lse.shape))


@pytest.mark.parametrize(("name", "kind"), [("bias", float), ("attention_mask", bool)])
def test_what_is_not_split_is_refused_by_name(name, kind):
    with pytest.raises(Unsupported, match=name):
        ring_attention(QUERY, KEY, VALUE, mesh=make_mesh(sp=4), **{name: jnp.ones((B, 1, T, T), kind)})


# -- schedule and exchange ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [("contiguous", 4), ("zigzag", 4), ("striped", 4), ("striped", 4, 4)])
@pytest.mark.parametrize(
    "mask",
    [
        MaskInfo(causal=True),
        MaskInfo(),
        MaskInfo(causal=True, window=(9, 0)),
        MaskInfo(causal=True, window=(9, 0), sink_tokens=3),
        MaskInfo(
            causal=True, window=(1, 0), sink_tokens=6
        ),  # the first rank needs those of the second for nothing else
        MaskInfo(causal=True, chunk_size=16),
    ],
)
def test_no_pair_that_exists_is_left_out_of_the_schedule(order, mask):
    made = Order(*order)
    at = jnp.asarray(made.indices(T))[None]
    exists = (
        np.asarray(mask.replace(q_positions=at, kv_positions=at).visible(T, T))[0, 0].reshape(4, 16, 4, 16).any((1, 3))
    )
    assert np.array_equal(needed(made, T, mask), exists)


@pytest.mark.parametrize(
    ("window", "expected"), [(0, (0,)), (1, (0, 1)), (16, (0, 1)), (17, (0, 1, 2)), (None, (0, 1, 2, 3))]
)
def test_a_window_talks_to_as_many_neighbours_as_it_reaches(window, expected):
    mask = MaskInfo(causal=True, window=None if window is None else (window, 0))
    assert hops(Order("contiguous", 4), T, mask) == expected


def transfers(jaxpr):
    """Returns how many times a program runs ppermute, all_gather or all_to_all."""
    count = 0
    for equation in jaxpr.eqns:
        times = equation.params["length"] if equation.primitive.name == "scan" else 1
        count += equation.primitive.name in ("ppermute", "all_gather", "all_to_all")
        count += times * sum(transfers(j) for j in jaxprs_in_params(equation.params))
    return count


def sends(options, order="contiguous", scheme="ring", gradient=False, sp=4):
    ring = functools.partial(ring_attention, mesh=make_mesh(sp=sp), order=order, scheme=scheme, **options)
    function = jax.grad(lambda *a: jnp.sum(ring(*a)), (0, 1, 2)) if gradient else ring
    count = transfers(jax.make_jaxpr(function)(QUERY, KEY, VALUE).jaxpr)
    if not gradient and count <= 2:  # written out: the compiled program has what was asked for
        text = jax.jit(function).lower(QUERY, KEY, VALUE).compile().as_text()
        assert text.count("collective-permute(") + text.count("all-gather(") == count
    return count


@pytest.mark.slow  # hops that no batch needs are quick in test_trips.py
def test_a_hop_nobody_needs_is_not_sent():
    assert sends({"causal": True}) == 2 * 3, "keys and values, three ring steps"
    assert sends({"causal": True}, sp=8) == 2 * 7
    # Forward, then keys and values again, and their gradients by others from the first of these on, and home.
    assert sends({"causal": True}, gradient=True) == 2 * 3 + 2 * 3 + 2 * 3
    assert sends({"causal": True, "sliding_window": 9}) == 2 * 1, (
        "a window of 9 over shards of 16 reaches one neighbour"
    )
    assert sends({"causal": True, "sliding_window": 18}) == 2 * 2
    assert sends({"causal": True, "sliding_window": 18}, gradient=True) == 2 * 2 + 2 * 2 + 2 * 2
    assert sends({"causal": True, "sliding_window": 9}, order="zigzag") == 2 * 2, "one neighbour on either side"
    by_mask = {"scheme": Ring(hops="mask")}  # else by the documents, see tests/test_trips.py
    assert sends({"causal": True, **PACKED}, **by_mask) == 2 * 3 + 1, "segments are gathered once"
    assert sends({"causal": True, **PACKED}, gradient=True, **by_mask) == sends({"causal": True}, gradient=True) + 1, (
        "for both ways"
    )
    for scheme in ("ring", "all_gather"):
        assert sends({"causal": True, "chunk_size": 16}, scheme=scheme) == 0, "each chunk is one rank's shard"
    assert sends({"causal": True}, scheme="all_gather") == 2
    # Each array and lse there or back, whatever is seen; then those again, what the gradient is made of, and gradients.
    assert sends({"causal": True, "sliding_window": 9}, order="zigzag", scheme="ulysses") == 5
    assert sends({"causal": True}, scheme="ulysses", gradient=True) == 5 + 3 + 3 + 3


def test_ranks_communicate_in_no_branch():
    """Ranks choose different ones at a hop, and would wait for each other."""

    def branches(jaxpr):
        for equation in jaxpr.eqns:
            inside = list(jaxprs_in_params(equation.params))
            if equation.primitive.name == "cond":
                yield from inside
            for j in inside:
                yield from branches(j)

    ring = functools.partial(ring_attention, mesh=make_mesh(sp=4), order="zigzag", causal=True, **PACKED)
    program = jax.make_jaxpr(jax.grad(lambda *a: jnp.sum(ring(*a)), (0, 1, 2)))(QUERY, KEY, VALUE)
    found = [*branches(program.jaxpr)]
    assert len(found) >= 3 * (2 + 2 * 2), "of two hops forward, and twice as many backward"
    assert not any(map(transfers, found))


KERNELS = re.compile(r"fmhaSoftmax(Backward)?\b|triton_kernel_call")


def kernels_of_hops(order, platform, gradient, **options):
    """Returns, of each hop in the program of a rank on a GPU, the numbers of kernel calls that ranks choose between. Hops
    between the first and the last are one loop."""
    ring = functools.partial(
        ring_attention, mesh=make_mesh(sp=4), order=order, causal=True, platform=platform, **options
    )

    def run(q, k, v):
        out, pull = jax.vjp(ring, q, k, v)
        return pull(out) if gradient else out

    arrays = [jax.ShapeDtypeStruct((1, 1024, n, 64), jnp.bfloat16) for n in (4, 2, 2)]
    with kernels.compile_for(90) as checks:
        module = jax.export.export(jax.jit(run), platforms=["cuda"], disabled_checks=checks)(*arrays).mlir_module()
    return hops_in(module)


def hops_in(module):
    with mlir.make_ir_context():
        parsed = ir.Module.parse(module)
        functions = {str(f.name).strip('"'): f for f in parsed.body.operations}

        def calls(operation):
            """Returns (calls of kernels in an operation, those of each branch of each case in it)."""
            name, attributes = operation.operation.name, operation.operation.attributes
            if name == "func.call":
                return calls(functions[str(attributes["callee"]).strip('@"')])
            inside = [[calls(o) for block in region for o in block] for region in operation.operation.regions]
            if name == "stablehlo.case":
                return 0, [[sum(n for n, _ in branch) for branch in inside]]
            inside = [found for region in inside for found in region]
            own = name == "stablehlo.custom_call" and bool(KERNELS.search(str(attributes["call_target_name"])))
            return own + sum(n for n, _ in inside), [case for _, cases in inside for case in cases]

        own, cases = calls(functions["main"])
        return [[own], *map(sorted, cases)]


# (order, whether differentiated, scheme) -> kernels of a rank's own keys, then at each hop those of the earlier and the later
# ranks: without positions cuDNN has every one.
OF_HOPS = {
    ("zigzag", False, "ring"): [[1], [1, 1], [1, 1]],
    ("contiguous", False, "ring"): [[1], [0, 1], [0, 1]],
    ("zigzag", False, "all_gather"): [[1], [1, 1]],  # the others' are one loop
    # From the third hop on there is a second conditional: it adds to the gradients of the keys, which arrive meanwhile.
    ("zigzag", True, "ring"): [[2], [1, 1], [1, 1], [1, 1], *([1, 1], [0, 0]) * 2],
    ("contiguous", True, "ring"): [[2], [0, 1], [0, 1], [0, 1], *([0, 1], [0, 0]) * 2],
}


def hop_rows():
    for platform in ("cudnn", "triton"):
        for call in OF_HOPS:
            slow = platform == "triton"  # cuDNN shows it, and compiles no kernel; the next test has Hopper's in a ring
            yield pytest.param(platform, *call, marks=pytest.mark.slow if slow else ())


@pytest.mark.parametrize(("platform", "order", "gradient", "scheme"), list(hop_rows()))
def test_a_hop_is_one_kernel_and_a_hop_that_a_rank_does_not_need_none(platform, order, gradient, scheme):
    """Hopper's kernels add in place: there are no branches, and without work a launch is empty. Of gathered keys there are
    those of the rank, and two groups of heads of all others'."""
    wanted = [[7 if gradient else 3]] if platform == "triton" else OF_HOPS[order, gradient, scheme]
    assert kernels_of_hops(order, platform, gradient, scheme=scheme) == wanted


@pytest.mark.slow
@pytest.mark.parametrize(
    ("order", "options", "wanted"),
    [
        ("striped", {}, [[3]]),  # of which every rank sees some at every hop
        ("zigzag", {"sliding_window": 300}, [[1], [1, 1], [1, 1]]),
        ("contiguous", {"sliding_window": 300}, [[1], [0, 1], [0, 1]]),
        ("zigzag", {"sliding_window": 300, "scheme": "all_gather"}, [[1]]),  # all keys at once
        ("zigzag", {"logits_soft_cap": 5.0}, [[3]]),  # which is no mask
    ],
    ids=str,
)
def test_where_positions_are_compared_a_hop_is_one_kernel_too(order, options, wanted):
    """Of the half that sees anything, or none; the kernel skips the blocks that nobody sees."""
    assert kernels_of_hops(order, None, False, **options) == wanted


@pytest.mark.parametrize(("scheme", "transfer"), [("ring", "collective-permute"), ("all_gather", "all-gather")])
def test_a_profile_names_hops_and_exchanges(scheme, transfer):
    ring = functools.partial(ring_attention, causal=True, mesh=make_mesh(sp=2), scheme=scheme)
    text = jax.jit(jax.grad(lambda q: jnp.sum(ring(q, KEY, VALUE)))).lower(QUERY).compile().as_text()
    sent = [line for line in text.splitlines() if f" {transfer}(" in line]
    assert sent and all("/exchange/" in line for line in sent)
    products = [line for line in text.splitlines() if " dot(" in line]
    assert products and all("/hop/" in line for line in products)


def test_a_profile_names_what_is_exchanged_for_heads():
    """The compiler merges products of this size, and names none of them."""
    ring = functools.partial(ring_attention, causal=True, mesh=make_mesh(sp=2), scheme="ulysses")
    text = jax.jit(jax.grad(lambda q: jnp.sum(ring(q, KEY, VALUE)))).lower(QUERY).compile().as_text()
    sent = [line for line in text.splitlines() if " all-to-all(" in line]
    assert sent and all("/exchange/" in line for line in sent)


@pytest.mark.slow  # two programs of the size of models
def test_memory_of_a_device_halves_when_sp_doubles():
    length = 65536

    def bytes_per_device(sp):
        mesh = make_mesh(sp=sp)
        ring = functools.partial(ring_attention, causal=True, mesh=mesh, order=Order("zigzag", sp))
        step = jax.jit(jax.grad(lambda q, k, v: jnp.sum(ring(q, k, v)), (0, 1, 2)))
        at = NamedSharding(mesh, P(None, "sp"))
        arguments = (jax.ShapeDtypeStruct((1, length, 2, 32), jnp.float32, sharding=at),) * 3
        memory = step.lower(*arguments).compile().memory_analysis()
        return memory.temp_size_in_bytes + memory.argument_size_in_bytes

    two, four, eight = (bytes_per_device(sp) for sp in (2, 4, 8))
    assert 0.45 < eight / four < 0.55, (four, eight)
    # Two hops are written out and share buffers better than the loop of more; from there on it halves.
    assert four / two < 0.8, (two, four)


def test_merge_joins_disjoint_sets_of_keys():
    whole, whole_lse = flash_attention(QUERY, KEY, VALUE, return_lse=True)
    parts = [flash_attention(QUERY, KEY[:, s], VALUE[:, s], return_lse=True) for s in (slice(0, 20), slice(20, T))]
    out, lse = merge(parts[0][0].astype(jnp.float32), parts[0][1], *parts[1])
    np.testing.assert_allclose(out, whole, atol=1e-5)
    np.testing.assert_allclose(lse, whole_lse, atol=1e-5)
    empty = jnp.full((B, T, N), -jnp.inf)
    out, lse = merge(jnp.zeros_like(whole), empty, jnp.zeros_like(whole), empty)
    assert not np.isnan(out).any() and np.isneginf(lse).all()


def test_remat_keeps_attention_instead_of_running_it_again():
    mesh = make_mesh(sp=4)
    policy = jax.checkpoint_policies.save_only_these_names("flash_attention.out", "flash_attention.lse")

    def loss(q, k, v):
        return jnp.sum(jnp.sin(ring_attention(jnp.sin(q), k, v, causal=True, mesh=mesh)))

    def count(function):
        return str(jax.make_jaxpr(jax.grad(function, (0, 1, 2)))(QUERY, KEY, VALUE)).count("ppermute")

    plain, kept, again = (count(f) for f in (loss, jax.checkpoint(loss, policy=policy), jax.checkpoint(loss)))
    assert kept == plain < again
