"""The layer of experts over a mesh: the loop of one device in NumPy, in result, statistics and every gradient."""

import functools
import math

import experts_loop as loop
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import ejdist
import kernels
from ejdist import moe
from ejdist.experts.placed import _compiled, expert_sharding
from kernels.framework.interpret import interpret

B, T, D, E, F, K = 8, 8, 8, 8, 8, 3
WEIGHTS = ("gate", "up", "down", "gate_bias", "up_bias", "down_bias")
OPTIONS = {"top_k": K, "score": "sigmoid", "balance": "sequence"}


@functools.cache
def inputs():
    rng = np.random.default_rng(0)
    shapes = {
        "x": (B, T, D), "router": (D, E), "gate": (E, D, F), "up": (E, D, F), "down": (E, F, D), "router_bias": (E,),
        "gate_bias": (E, F), "up_bias": (E, F), "down_bias": (E, D), "shared_gate": (D, F), "shared_up": (D, F),
        "shared_down": (F, D), "shared_expert_gate": (D, 1),
    }  # fmt: skip
    return {name: (0.5 * rng.standard_normal(shape)).astype(np.float32) for name, shape in shapes.items()}


@functools.cache
def ids():
    """Returns documents that go over the ends of shards, and padding, of which some shards have nothing else."""
    rows = np.tile(np.arange(T) // 3, (B, 1))
    rows[1, 2:], rows[5] = -1, -1
    return rows


def slanted(arrays, towards):
    """Returns the arrays with a router that sends every token to the first `towards` experts."""
    return {**arrays, "router_bias": arrays["router_bias"] + 50 * (np.arange(E) < towards)}


def both(arrays, **how):
    """Returns (result, statistics, gradients of something that depends on all of them)."""

    def total(arrays):
        out, stats = moe(**arrays, **OPTIONS, segment_ids=jnp.asarray(ids()), **how)
        return jnp.sin(out).sum() + 0.3 * stats.balance_loss + 0.2 * stats.z_loss, (out, stats)

    (_, (out, stats)), gradients = jax.jit(jax.value_and_grad(total, has_aux=True))(arrays)
    return out, stats, gradients


@functools.cache
def of_one_device(towards):
    arrays = inputs() if towards is None else slanted(inputs(), towards)
    out, stats = loop.moe(**{n: a.astype(np.float64) for n, a in arrays.items()}, **OPTIONS, segment_ids=ids())
    # `test_experts` holds these gradients to finite differences of the loop.
    return out, stats, both(arrays)[2]


def check(sizes, towards=None, **how):
    mesh = ejdist.make_mesh(**sizes, devices=jax.devices()[: math.prod(sizes.values())])
    out, stats, gradients = of_one_device(towards)
    got, got_stats, got_gradients = both(inputs() if towards is None else slanted(inputs(), towards), mesh=mesh, **how)
    np.testing.assert_allclose(got, out, rtol=1e-5, atol=1e-5)
    for name in (
        "tokens",
        "counts",
        "probabilities",
        "balance_loss",
        "z_loss",
        "entropy",
        "max_violation",
        "dead_experts",
    ):
        np.testing.assert_allclose(getattr(got_stats, name), getattr(stats, name), rtol=1e-5, atol=1e-5, err_msg=name)
    for name, wanted in gradients.items():
        scale = max(1.0, float(jnp.abs(wanted).max()))
        np.testing.assert_allclose(got_gradients[name] / scale, wanted / scale, atol=1e-5, err_msg=name)
    return got_stats


# name -> (mesh, axis)
PLACES = {
    "ep 2": ({"ep": 2}, None),
    "ep 4": ({"ep": 4}, None),
    "ep 8": ({"ep": 8}, None),
    "ep 1, tp 2": ({"tp": 2}, None),
    "ep 2 beside sp 2": ({"ep": 2, "sp": 2}, None),
    "ep 2 beside fsdp 2": ({"ep": 2, "fsdp": 2}, None),
    "on sp 2": ({"sp": 2}, "sp"),
    "on sp 4": ({"sp": 4}, "sp"),
    "on sp 8": ({"sp": 8}, "sp"),
    "ep 2 on sp 2": ({"ep": 2, "sp": 2}, ("ep", "sp")),
    "ep 2 on sp 4": ({"ep": 2, "sp": 4}, ("ep", "sp")),
    "on fsdp 2": ({"fsdp": 2}, "fsdp"),
    "on fsdp 4": ({"fsdp": 4}, "fsdp"),
    "on fsdp 8": ({"fsdp": 8}, "fsdp"),
    "ep 2 on fsdp 2, sp 2": ({"fsdp": 2, "ep": 2, "sp": 2}, ("fsdp", "ep")),
    "ep 2, tp 2": ({"ep": 2, "tp": 2}, None),
    "ep 4, tp 2": ({"ep": 4, "tp": 2}, None),
    "on sp 2, tp 2": ({"sp": 2, "tp": 2}, "sp"),
    "on fsdp 2, tp 2": ({"fsdp": 2, "tp": 2}, "fsdp"),
    "all axes": ({"fsdp": 2, "ep": 2, "tp": 2}, None),
}
SCHEMES = ("all_gather", "all_to_all", "ragged_all_to_all")
QUICK = [("ep 2 on sp 2", "two_level", 1)]


def grid():
    for place, (_, axis) in PLACES.items():
        for scheme in (*SCHEMES, "two_level") if isinstance(axis, tuple) else SCHEMES:
            for towards in (None, K):  # as it comes; all tokens to as many experts as a token has
                yield place, scheme, towards


@pytest.mark.slow
@pytest.mark.parametrize(("place", "scheme", "towards"), QUICK)
def test_places(place, scheme, towards):
    sizes, axis = PLACES[place]
    check(sizes, towards, axis=axis, dispatch=scheme, stored_weights=True)


@pytest.mark.slow
@pytest.mark.parametrize(("place", "scheme", "towards"), list(grid()))
def test_every_place_and_dispatch(place, scheme, towards):
    sizes, axis = PLACES[place]
    stats = check(sizes, towards, axis=axis, dispatch=scheme, stored_weights=towards is None)
    ranks = math.prod(sizes[a] for a in (axis if isinstance(axis, tuple) else (axis or "ep",)) if a in sizes)
    assert stats.rank_counts.shape == (ranks,)
    if towards and ranks >= 4 and scheme != "all_gather":
        assert stats.extra_passes > 0 and stats.high_water > 1


@pytest.mark.slow
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("chunks", [2, 3])
def test_chunks(scheme, chunks):
    check({"ep": 4}, K, dispatch=scheme, chunks=chunks, buffer=0.6)


@pytest.mark.slow
def test_what_has_no_room_is_counted():
    """Of tokens that all want the same experts, the first of them have room; on one device as on a mesh."""
    arrays = slanted(inputs(), K)
    wide = {n: a.astype(np.float64) for n, a in arrays.items()}
    wanted, wanted_stats = loop.moe(**wide, **OPTIONS, segment_ids=ids(), capacity=1.1)
    tokens = int((ids() >= 0).sum())
    assert wanted_stats.dropped == K * tokens - K * math.ceil(1.1 * K * B * T / E)
    for where in ({}, {"mesh": ejdist.make_mesh(ep=2, devices=jax.devices()[:2])}):
        call = functools.partial(moe, **OPTIONS, segment_ids=jnp.asarray(ids()), capacity=1.1, **where)
        out, stats = jax.jit(lambda arrays, call=call: call(**arrays))(arrays)
        assert stats.dropped == wanted_stats.dropped and stats.counts.sum() == K * tokens
        share = ejdist.experts.summary(stats)["dropped_fraction"]
        np.testing.assert_allclose(share, wanted_stats.dropped / (K * tokens), rtol=1e-6)
        np.testing.assert_allclose(out, wanted, atol=1e-5)


@pytest.mark.slow
def test_a_batch_of_one_counts_once_what_has_no_room():
    """It is whole on the axes of the batch, so those are no more tokens."""
    arrays = {n: a[:1] if n == "x" else a for n, a in slanted(inputs(), K).items()}
    mesh = ejdist.make_mesh(dp=2, sp=2, devices=jax.devices()[:4])
    for where in ({}, {"mesh": mesh, "axis": "sp", "dispatch": "all_to_all"}):
        out, stats = jax.jit(lambda arrays, where=where: moe(**arrays, top_k=K, capacity=1.0, **where))(arrays)
        if not where:
            found = out, stats.dropped
        np.testing.assert_allclose(out, found[0], atol=1e-5)
        assert stats.dropped == found[1] > 0


@pytest.mark.slow
def test_tokens_that_all_ranks_have():
    """As the specs of a call say."""
    stats = check({"ep": 4, "tp": 2}, K, in_specs=(P(), P("ep", None, "tp")))
    assert stats.extra_passes == stats.dropped == 0 and stats.rank_counts.shape == (4,)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "rows", "how"),
    [
        ({"ep": 4, "tp": 2}, 1, {}),
        ({"ep": 8}, 1, {}),
        ({"ep": 2, "sp": 2}, 1, {}),
        ({"dp": 2, "ep": 2}, 3, {"in_specs": (P(),), "axis": "ep"}),
        ({"fsdp": 2, "ep": 2}, 1, {"stored_weights": True, "axis": ("fsdp", "ep")}),
        ({"fsdp": 2, "ep": 2, "tp": 2}, 1, {"stored_weights": True}),
    ],
)
def test_a_batch_that_does_not_split_over_the_ranks_of_the_experts(sizes, rows, how):
    """A batch of one in decoding: each rank adds what its experts make, and nothing else is sent."""
    arrays = {**inputs(), "x": inputs()["x"][:rows]}
    options = {**OPTIONS, "segment_ids": jnp.asarray(ids()[:rows])}

    def call(arrays, **where):
        def total(arrays):
            out, stats = moe(**arrays, **options, **where)
            return jnp.sin(out).sum() + 0.3 * stats.balance_loss + 0.2 * stats.z_loss, (out, stats)

        return jax.value_and_grad(total, has_aux=True)(arrays)

    wide = {n: a.astype(np.float64) for n, a in arrays.items()}
    wanted, wanted_stats = loop.moe(**wide, **{**options, "segment_ids": ids()[:rows]})
    program = jax.jit(functools.partial(call, mesh=on(**sizes), **how)).lower(arrays).compile()
    (_, (out, stats)), gradients = program(arrays)
    np.testing.assert_allclose(out, wanted, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(stats.counts, wanted_stats.counts)
    assert stats.extra_passes == stats.dropped == 0 and stats.rank_counts.sum() == stats.counts.sum()
    # `test_experts` holds the gradients of one device to finite differences of the loop.
    for name, d in jax.jit(call)(arrays)[1].items():
        np.testing.assert_allclose(gradients[name], d, atol=2e-5 * max(1.0, float(jnp.abs(d).max())), err_msg=name)
    assert " all-to-all(" not in program.as_text()


@pytest.mark.slow
def test_inside_a_shard_map_of_the_caller():
    """The arrays are a rank's own, and the axis is named."""
    mesh = ejdist.make_mesh(ep=2, devices=jax.devices()[:2])
    arrays = inputs()
    specs = {n: P("ep") if n in ("x", *WEIGHTS) else P() for n in arrays}

    def of_rank(arrays, ids):
        out, stats = moe(**arrays, **OPTIONS, segment_ids=ids, axis="ep")
        return jax.lax.psum(jnp.sin(out).sum() + 0.3 * stats.balance_loss + 0.2 * stats.z_loss, "ep")

    total = jax.shard_map(of_rank, mesh=mesh, in_specs=(specs, P("ep")), out_specs=P())
    gradients = jax.jit(jax.grad(total))(arrays, jnp.asarray(ids()))
    for name, wanted in of_one_device(None)[2].items():
        np.testing.assert_allclose(gradients[name], wanted, atol=3e-5, rtol=1e-4, err_msg=name)


@pytest.mark.slow
def test_axes_of_the_callers_own():
    """A mesh with other names, said by `set_layout` and by specs."""
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    out = of_one_device(None)[0]
    call = functools.partial(moe, **OPTIONS, segment_ids=jnp.asarray(ids()), mesh=mesh)
    with ejdist.set_layout(B="data", E="data", F="model"):
        got, stats = jax.jit(lambda a: call(**a))(inputs())
    np.testing.assert_allclose(got, out, atol=1e-5)
    assert stats.rank_counts.shape == (2,)
    specs = P("data"), P("data", None, "model")
    got, stats = jax.jit(lambda a: call(**a, in_specs=specs))(inputs())
    np.testing.assert_allclose(got, out, atol=1e-5)
    assert stats.rank_counts.shape == (2,)


@pytest.mark.slow
def test_a_mesh_of_explicit_axes():
    mesh = jax.make_mesh((2, 2), ("ep", "tp"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    lies = {n: P("ep", None, "tp") if n in ("gate", "up") else P() for n in inputs()} | {
        "x": P("ep"),
        "down": P("ep", "tp"),
    }
    with jax.set_mesh(mesh):
        arrays = {n: jax.device_put(a, jax.sharding.NamedSharding(mesh, lies[n])) for n, a in inputs().items()}
        segments = jax.device_put(ids(), jax.sharding.NamedSharding(mesh, P("ep")))
        out, stats = jax.jit(lambda a, s: moe(**a, **OPTIONS, segment_ids=s))(arrays, segments)
    np.testing.assert_allclose(out, of_one_device(None)[0], atol=1e-5)
    assert stats.rank_counts.shape == (2,)


@pytest.mark.slow
def test_the_result_has_the_type_of_explicit_tokens_with_an_axis_of_one_device_too():
    """Else `x + moe(x)`, which every other operation allows, is refused by JAX."""
    mesh = jax.make_mesh(
        (1, 2), ("dp", "ep"), axis_types=(jax.sharding.AxisType.Explicit,) * 2, devices=jax.devices()[:2]
    )
    lies = {n: P("ep") if n in ("gate", "up", "down") else P() for n in inputs()} | {"x": P(("dp", "ep"))}
    with jax.set_mesh(mesh):
        given = {n: jax.device_put(a, jax.sharding.NamedSharding(mesh, lies[n])) for n, a in inputs().items()}
        out, stats = jax.jit(lambda a: (lambda out, stats: (a["x"] + out, stats))(*moe(**a, **OPTIONS)))(given)
        assert jax.typeof(out) == jax.typeof(given["x"])
    wanted = moe(**inputs(), **OPTIONS)[0]
    np.testing.assert_allclose(out - given["x"], wanted, atol=1e-5)
    assert stats.rank_counts.shape == (2,)


def test_the_gradients_of_arrays_that_lay_on_no_mesh_are_of_explicit_axes():
    """Without `jit` the router's were of automatic axes, and no other operation of the mesh took them."""
    mesh = jax.make_mesh((2,), ("ep",), axis_types=(jax.sharding.AxisType.Explicit,), devices=jax.devices()[:2])
    given = inputs()
    with jax.set_mesh(mesh):
        place = expert_sharding(given["x"], given["gate"], E, axis=None, mesh=None, in_specs=None, stored=None)
        routed = place.automatic(jax.jit(ejdist.experts.route, static_argnames="top_k"))
        gradient = jax.grad(lambda router: routed(given["x"], router, top_k=1).stats.z_loss)(given["router"])
        assert (given["router"] - gradient).shape == gradient.shape


def on(**sizes):
    return ejdist.make_mesh(**sizes, devices=jax.devices()[: math.prod(sizes.values())])


# name -> (what else is given, argument that the error names)
ILLEGAL = {
    "experts that do not divide": (lambda: {"mesh": on(ep=4), "experts": 6}, "router"),
    "an axis that the mesh lacks": (lambda: {"mesh": on(ep=2), "axis": "expert"}, "axis"),
    "an axis of features": (lambda: {"mesh": on(tp=2), "axis": "tp"}, "mesh"),
    "an axis that splits tokens and one that does not": (
        lambda: {"mesh": on(ep=2, sp=2), "axis": ("ep", "sp"), "rows": 1},
        "axis",
    ),
    "a way to other ranks, which have the same tokens": (
        lambda: {"mesh": on(ep=2), "rows": 1, "dispatch": "all_to_all"},
        "dispatch",
    ),
    "room, where all ranks have the same tokens": (lambda: {"mesh": on(ep=2), "rows": 1, "capacity": 1.0}, "capacity"),
    "rows that do not divide": (lambda: {"mesh": on(ep=4), "rows": 6}, "x"),
    "features that do not divide": (lambda: {"mesh": on(ep=2, tp=3)}, "F"),
    "two levels of one axis": (lambda: {"mesh": on(ep=2), "dispatch": "two_level"}, "'dispatch' of"),
    "no travel over ranks": (lambda: {"mesh": on(ep=2), "dispatch": "local"}, "'dispatch' of"),
    "sums in 8 bits that nothing sends": (
        lambda: {"mesh": on(ep=2), "dispatch": "all_gather", "exchange": "fp8"},
        "'exchange' of `moe`",
    ),
    "the ranks of a mesh": (
        lambda: {"mesh": on(ep=2), "ranks": 2},
        "'ranks' is that of the experts' mesh axes, here 2",
    ),
    "no tokens": (lambda: {"mesh": on(ep=2), "rows": 0}, "'x' of shape"),
    "specs of another mesh": (lambda: {"mesh": on(ep=2), "in_specs": (P("data"),)}, "data"),
    "specs that split D": (lambda: {"mesh": on(ep=2), "in_specs": (P(None, None, "ep"),)}, "D"),
    "specs and another axis": (
        lambda: {"mesh": on(ep=2, sp=2), "in_specs": (P("ep", "sp"), P("ep")), "axis": "sp"},
        "axis",
    ),
    "too many specs": (lambda: {"mesh": on(ep=2), "in_specs": (P(), P(), P())}, "in_specs"),
}


@pytest.mark.parametrize("what", ILLEGAL)
def test_illegal_calls_are_refused_by_name(what):
    change, argument = ILLEGAL[what]
    given = change()
    experts, rows = given.pop("experts", E), given.pop("rows", B)
    arrays = {n: inputs()[n] for n in ("x", "router", "gate", "up", "down")}
    arrays = {n: a[:, :experts] if n == "router" else a[:rows] if n == "x" else a[:experts] for n, a in arrays.items()}
    with pytest.raises(ValueError, match=rf"moe: .*{argument}"):
        jax.eval_shape(lambda: moe(**arrays, top_k=2, **given))


@pytest.mark.slow
@pytest.mark.parametrize("scheme", SCHEMES)
def test_an_export_for_each_platform(scheme):
    """Of the gradient of the layer over a mesh, on a machine without a GPU; that for the CPU gives the numbers here."""
    mesh = ejdist.make_mesh(ep=2, devices=jax.devices()[:2])
    whole = ejdist.layout.sharding(mesh, (), ejdist.layout.ACTIVATIONS)
    arrays = jax.device_put(inputs(), whole)
    arrays["x"] = jax.device_put(inputs()["x"], ejdist.layout.sharding(mesh, ("B", "T"), ejdist.layout.ACTIVATIONS))
    run = jax.jit(functools.partial(both, mesh=mesh, dispatch=scheme))
    ragged = jax.export.DisabledSafetyCheck.custom_call("ragged_all_to_all")
    exported = {}
    for platform, target in {"cpu": None, "cuda": "triton_kernel_call", "tpu": "tpu_custom_call"}.items():
        with kernels.compile_for(90) as checks:
            exported[platform] = jax.export.export(run, platforms=[platform], disabled_checks=[*checks, ragged])(arrays)
        program = exported[platform].mlir_module()
        assert target is None or target in program
        assert ("@ragged_all_to_all" in program) == (scheme == "ragged_all_to_all" and platform != "cpu")
    got = jax.jit(jax.export.deserialize(exported["cpu"].serialize()).call)(arrays)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), got, run(arrays))


def test_a_program_is_of_the_choices_in_force():
    """What was compiled under another configuration, for another device, or with kernels interpreted is not used again."""
    x, router, gate, down = (jnp.ones(s) for s in ((2, 2, 4), (4, 2), (2, 4, 3), (2, 3, 4)))

    def programs():
        jax.eval_shape(lambda: moe(x, router, gate, gate, down, top_k=1, mesh=ejdist.make_mesh(ep=2)))
        return _compiled.cache_info().misses

    before = programs()  # programs so far, this one among them
    assert programs() == before
    with interpret():
        assert programs() == before + 1
    with kernels.compile_for(90):
        assert programs() == before + 2
    assert programs() == before + 2
