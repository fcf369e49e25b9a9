"""Tokens to experts over a mesh axis and back: numbers and gradients of a plain loop, whatever the router does."""

import functools

import experts_loop
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from expert_calls import (
    EP4,
    ONE,
    PLACES,
    TRAVELLING,
    Where,
    backward,
    check,
    check_routes,
    einsum_experts,
    grouped_experts,
    on_mesh,
    rows_only,
    shapes,
)
from experts_loop import Layer
from jax.sharding import PartitionSpec as P

from ejdist import make_mesh
from ejdist.experts.dispatch import exchange
from ejdist.experts.local import local
from ejdist.experts.own import Local
from ejdist.experts.rows import DispatchSpec
from ejdist.mapped import map_shards
from kernels import Unsupported


@pytest.mark.parametrize(
    ("place", "scheme", "options"),
    [
        pytest.param("ep", "all_to_all", {"chunks": 2}, marks=pytest.mark.slow),
        pytest.param("on sp", "ragged_all_to_all", {}, marks=pytest.mark.slow),
        pytest.param("on fsdp", "all_gather", {"chunks": 2, "buffer": 0.7}, marks=pytest.mark.slow),
        ("ep x tp", "all_to_all", {"buffer": 0.5, "late": True}),
        ("ep and sp", "two_level", {}),
    ],
)
def test_any_route_has_the_numbers_of_the_loop(place, scheme, options):
    check_routes(PLACES[place], scheme, **options)


def test_one_device_has_the_numbers_of_the_loop():
    check_routes(ONE, "auto", names={"random", "none"})


def test_places_of_a_chunk_past_the_last_pair_are_of_none():
    job = DispatchSpec(grouped_experts, (), Local(), num_experts=3, rooms=(3,), chunks=2)
    plan = job.scheme.plan(job, jnp.array([[1, 0], [0, 2]]), jnp.ones((2, 2)))
    first, second = (job.scheme.pairs(job, plan, jnp.int32(q)) for q in range(2))
    assert first.pair.tolist() == [1, 2, 0] and second.pair.tolist() == [3, -1, -1]
    assert first.slot.tolist() == [[2, 0], [1, -1]] and second.slot.tolist() == [[-1, -1], [-1, 0]]
    assert first.sizes.tolist() == [2, 1, 0] and second.sizes.tolist() == [0, 0, 1]


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "experts"), [("int8", 130), ("uint8", 256)])
def test_experts_of_a_dtype_that_has_no_number_for_none(dtype, experts):
    x, params, chosen = jnp.ones((2, 3)), jnp.arange(experts, dtype=jnp.float32), jnp.array([[1, 7], [100, -1]])

    def apply(params, rows, sizes):
        return rows * jnp.repeat(params, sizes, total_repeat_length=rows.shape[0])[:, None]

    chosen = chosen if dtype == "int8" else jnp.abs(chosen)
    out, stats = exchange(x, chosen.astype(dtype), jnp.ones((2, 2)), params, apply, axis=None, num_experts=experts)
    np.testing.assert_array_equal(out[:, 0], [8, 100 + (dtype == "uint8")])
    assert stats.counts.sum() == jnp.sum(chosen >= 0)


def grid():
    """Every number of ranks, alone, folded on an axis that also splits sequence or parameters, and with tp inside experts."""
    for n in (1, 2, 4, 8):
        beside = 8 // n  # all devices, and two tokens on each
        yield f"ep {n}", Where({"ep": n}, "ep", ("ep",)), TRAVELLING
        yield f"sp {n}", Where({"dp": beside, "sp": n}, "sp", ("dp", "sp")), TRAVELLING
        yield f"fsdp {n}", Where({"fsdp": n, "sp": beside}, "fsdp", ("fsdp", "sp")), TRAVELLING
        if n < 8:
            yield f"ep {n} x tp", Where({"ep": n, "tp": 2}, "ep", ("ep",)), TRAVELLING
    for outer in ("sp", "fsdp"):
        for i, j in ((2, 2), (2, 4), (4, 2)):
            where = Where({outer: i, "ep": j}, (outer, "ep"), (outer, "ep"))
            yield f"{outer} {i} and ep {j}", where, ("two_level", "all_to_all", "all_gather")


def test_what_local_keeps_is_a_ranks_own():
    """On ranks of other tokens, with the backward as a program of its own."""
    rng, d_out = np.random.default_rng(10), np.ones((16, 6), np.float32)
    layer = Layer.random(rng, 16, 3, 8, experts=rng.integers(0, 8, (16, 3)))
    params = {n: getattr(layer, n) for n in ("gate", "up", "down")}

    def body(x, experts, weights, params):
        return local(x, experts, weights, params, einsum_experts, num_experts=8)[0]

    function = map_shards(body, make_mesh(dp=4), (*(P("dp"),) * 3, P()), P("dp"))
    pull = jax.jit(
        lambda x, params: jax.vjp(lambda *a: function(a[0], layer.experts, layer.weights, a[1]), x, params)[1]
    )
    d_x, d_params = backward(pull(layer.x, params), d_out)
    true = experts_loop.run(layer, d_out)[1]
    for name, got in {"x": d_x, **d_params}.items():
        np.testing.assert_allclose(got, true[name], atol=1e-5 * np.abs(true[name]).max(), rtol=0, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "scheme"), [(name, s) for name, _, schemes in grid() for s in schemes])
def test_every_place_and_scheme(name, scheme):
    check_routes(next(where for n, where, _ in grid() if n == name), scheme)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", [*TRAVELLING, "two_level"])
def test_more_chunks_than_one_in_any_scheme(scheme):
    place = PLACES["ep and sp" if scheme == "two_level" else "ep"]
    for chunks in (2, 5):
        check_routes(place, scheme, chunks=chunks, buffer=0.9)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", TRAVELLING)
@pytest.mark.parametrize("how", ["scan", "checkpoint", "vmap", "axes of the compiler beside", "nothing tracked"])
def test_inside_of_other_transformations(how, scheme):
    """Two batches, of which the second goes to one expert; a loop of one is inside a loop, a map or both of the others."""
    batches = [
        Layer.random(np.random.default_rng(3), 16, 3, 8, experts=e) for e in (None, np.full((16, 3), 5, np.int32))
    ]
    x, experts, weights = (np.stack([getattr(b, n) for b in batches]) for n in ("x", "experts", "weights"))
    params = {n: getattr(batches[1], n) for n in ("gate", "up", "down")}
    batches[0] = batches[0]._replace(**params)
    d_out = np.cos(np.arange(x.size)).reshape(x.shape).astype(np.float32)

    def one(x, experts, weights, params):
        return exchange(x, experts, weights, params, einsum_experts, axis="ep", num_experts=8, scheme=scheme)[0]

    one = jax.checkpoint(one) if how == "checkpoint" else one

    def both(*batches, params):
        if how == "vmap":
            return jax.vmap(functools.partial(one, params=params))(*batches)
        return jax.lax.map(lambda batch: one(*batch, params), batches)

    function = jax.shard_map(
        lambda x, experts, weights, params: both(x, experts, weights, params=params),
        mesh=make_mesh(dp=2, ep=4),
        in_specs=(*(P(None, "ep"),) * 3, P("ep")),
        out_specs=P(None, "ep"),
        check_vma=how != "nothing tracked",
        **({"axis_names": {"ep"}} if how == "axes of the compiler beside" else {}),
    )
    out, pull = jax.jit(lambda x, w, p: jax.vjp(lambda x, w, p: function(x, experts, w, p), x, w, p))(
        x, weights, params
    )
    d_x, d_weights, d_params = jax.jit(pull)(d_out)
    want = [experts_loop.run(b, d)[:2] for b, d in zip(batches, d_out, strict=True)]
    true = {n: np.stack([d[n] for _, d in want]) for n in ("x", "weights")}
    true |= {"out": np.stack([o for o, _ in want])} | {n: want[0][1][n] + want[1][1][n] for n in params}
    for name, got in {"out": out, "x": d_x, "weights": d_weights, **d_params}.items():
        np.testing.assert_allclose(got, true[name], atol=1e-5 * np.abs(true[name]).max(), rtol=0, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", TRAVELLING)
@pytest.mark.parametrize("place", ["ep", "ep x tp"])
def test_tokens_and_weights_of_bfloat16(place, scheme):
    rng = np.random.default_rng(4)
    check(PLACES[place], Layer.random(rng, 16, 3, 8), scheme=scheme, dtype="bfloat16", tolerance=3e-2)


@pytest.mark.slow
def test_grouped_matmul_as_the_experts():
    for where, scheme in ((EP4, "all_to_all"), (ONE, "local")):
        check(where, Layer.random(np.random.default_rng(5), 16, 3, 8), scheme=scheme, apply=grouped_experts)


@pytest.mark.parametrize("scheme", ["all_to_all", pytest.param("all_gather", marks=pytest.mark.slow)])
def test_fewer_tokens_than_ranks_have_experts(scheme):
    check(EP4, Layer.random(np.random.default_rng(6), 4, 1, 16), scheme=scheme)


@pytest.mark.parametrize("scheme", ["all_to_all", *(pytest.param(s, marks=pytest.mark.slow) for s in TRAVELLING[::2])])
def test_what_has_no_room_is_dropped_and_counted(scheme):
    rng, where = np.random.default_rng(7), PLACES["on sp"]._replace(sizes={"sp": 4}, tokens=("sp",))
    for experts in (None, np.full((16, 3), 5)):  # 3.3 tokens an expert are 4
        stats = check(where, Layer.random(rng, 16, 3, 8, experts=experts), scheme=scheme, capacity=0.55)
        assert stats.dropped > 0


@pytest.mark.parametrize(
    "scheme", [pytest.param("all_to_all", marks=pytest.mark.slow), "ragged_all_to_all", "all_gather"]
)
def test_balanced_tokens_need_one_pass_of_a_buffer_without_slack(scheme):
    E, M, k = 8, 32, 2
    experts = (np.arange(M * k).reshape(M, k) % E).astype(np.int32)
    layer = Layer.random(np.random.default_rng(8), M, k, E, experts=experts)
    params = {n: getattr(layer, n) for n in ("gate", "up", "down")}
    stats = jax.jit(on_mesh(EP4, E, scheme=scheme, buffer=1.0))(layer.x, experts, layer.weights, params)[1]
    assert stats.extra_passes == 0 and stats.high_water == 1


@pytest.mark.slow
def test_ranks_of_other_tokens_make_as_many_passes():
    """Experts that communicate over another axis would wait for ever, were the passes not agreed on over the whole mesh."""
    where = PLACES["on sp"]
    experts = np.tile(np.arange(8), 6).reshape(16, 3)
    experts[:8] = [4, 5, 4]  # the first replica's

    def apply(params, rows, sizes):
        y = einsum_experts(params, rows, sizes)
        return jnp.where(jax.lax.psum(1.0 + 0 * jnp.sum(sizes), "dp") > 0, y, 0)

    stats = check(
        where, Layer.random(np.random.default_rng(9), 16, 3, 8, experts=experts), scheme="all_to_all", apply=apply
    )
    assert stats.extra_passes > 0


# -- what is refused ---------------------------------------------------------------------------------------------------------


def test_second_derivatives_are_refused():
    layer = shapes(16, 2, 8, 4, 4)
    function = on_mesh(EP4, 8, scheme="all_to_all")

    def loss(x, *rest):
        return jnp.sum(function(x, *rest)[0] ** 2)

    with pytest.raises(Unsupported, match="exchange: second derivatives"):
        jax.eval_shape(jax.grad(lambda *a: jnp.sum(jax.grad(loss)(*a))), *layer)


ILLEGAL = {
    "num_experts": [{"num_experts": 6}, {"num_experts": 0}, {"num_experts": True}, {"num_experts": 4.0}],
    "capacity": [{"capacity": 0.49}, {"capacity": float("nan")}, {"capacity": "1"}, {"capacity": True}],
    "buffer": [{"buffer": 0}, {"buffer": -1.0}, {"buffer": float("inf")}, {"buffer": None}],
    "chunks": [{"chunks": 0}, {"chunks": 1.5}, {"chunks": True}],
    "scheme": [{"scheme": "ring"}, {"scheme": None}, {"scheme": "local"}, {"scheme": "two_level"}],
    "axis": [{"axis": "nowhere"}, {"axis": ("ep", "ep")}, {"axis": 3}, {"axis": "dp2"}],
    "x": [{"x": np.zeros((4, 2), np.int32)}, {"x": np.zeros((4,), np.float32)}, {"x": 3.0}],
    "experts": [{"experts": np.zeros((4, 2), np.float32)}, {"experts": np.zeros((5, 2), np.int32)}, {"experts": [[1]]}],
    "weights": [{"weights": np.zeros((4, 3), np.float32)}, {"weights": np.zeros((4, 2), np.int32)}],
    "params['gate']": [{"params": {"gate": np.zeros((8, 4, 4), np.float32)}}, {"params": {"gate": 1.0}}],
    "apply": [{"apply": lambda params, rows, sizes: rows[:1]}],
}


@pytest.mark.parametrize("name", ILLEGAL)
def test_illegal_calls_name_the_argument(name):
    for wrong in ILLEGAL[name]:
        call = {"apply": rows_only, "axis": "ep", "num_experts": 8, "scheme": "all_to_all"} | wrong

        def body(x, experts, weights, params, call=call):
            given = {"x": x, "experts": experts, "weights": weights, "params": params} | call
            return exchange(**given)[0]

        function = map_shards(body, EP4.mesh, (P("ep"),) * 4, P("ep"))
        with pytest.raises(ValueError) as error:
            jax.eval_shape(function, *shapes(16, 2, 8, 4, 4))
        assert f"exchange: argument {name!r}" in str(error.value) or f'exchange: argument "{name}"' in str(error.value)
