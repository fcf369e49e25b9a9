"""Tokens to experts over a mesh axis and back: numbers and gradients of a plain loop, whatever the router does."""

import functools
from typing import NamedTuple

import expert_loop
import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from expert_loop import Layer
from jax.sharding import PartitionSpec as P

import kernels
from ejdist import make_mesh
from ejdist.experts.choice import LINKS, choose
from ejdist.experts.dispatch import Stats, exchange
from ejdist.experts.schemes import SCHEMES
from ejdist.sharded import map_shards
from kernels import Unsupported
from kernels._core.ahead_of_time import compile_tpu, tpu_topology

TRAVELLING = tuple(n for n in SCHEMES if n not in ("local", "two_level"))


class Where(NamedTuple):
    """A mesh, the axis of the experts, and the axes that split the tokens; experts' features are split over tp."""

    sizes: dict[str, int]
    axis: object
    tokens: tuple[str, ...]

    @property
    def mesh(self):
        return make_mesh(**self.sizes)

    @property
    def specs(self):
        """Specs of x, experts, weights and params."""
        tp = "tp" if "tp" in self.sizes else None
        wide = P(self.axis, None, tp)
        return *(P(self.tokens),) * 3, {"gate": wide, "up": wide, "down": P(self.axis, tp)}


EP4 = Where({"ep": 4}, "ep", ("ep",))
ONE = Where({"dp": 1}, None, ())


def einsum_experts(params, rows, sizes, reduced=()):
    """A gated MLP for each group by dense products: little to compile. What is past the last group becomes NaN, and all does if
    such a row is not zero, as `exchange` promises."""
    group = jnp.searchsorted(jnp.cumsum(sizes), jnp.arange(len(rows)), side="right")
    own = (group[:, None] == jnp.arange(len(sizes))).astype(rows.dtype)
    by = functools.partial(jnp.einsum, precision="highest")
    a, b = (by("re,rd,edf->rf", own, rows, params[n]) for n in ("gate", "up"))
    y = by("re,rf,efd->rd", own, jax.nn.silu(a) * b, params["down"])
    y = jax.lax.psum(y, reduced) if reduced else y
    past = (group == len(sizes))[:, None]
    return jnp.where(past | jnp.any(past & (rows != 0)), jnp.nan, y)


def grouped_experts(params, rows, sizes):
    h = jax.nn.silu(kernels.grouped_matmul(rows, params["gate"], sizes))
    return kernels.grouped_matmul(h * kernels.grouped_matmul(rows, params["up"], sizes), params["down"], sizes)


def on_mesh(where, num_experts, apply=None, late=False, **options):
    """Returns (x, experts, weights, params) -> (out, stats), of global arrays; sums of stats are over all tokens.

    Where tp splits the features of experts, their parts are added up by themselves or, `late`, after they have come home.
    """
    reduced = ("tp",) if "tp" in where.sizes else ()
    apply = apply or functools.partial(einsum_experts, reduced=() if late else reduced)

    def body(x, experts, weights, params):
        out, stats = exchange(x, experts, weights, params, apply, axis=where.axis, num_experts=num_experts, **options)
        out = jax.lax.psum(out, reduced) if late else out
        if where.tokens:
            stats = stats._replace(**{n: jax.lax.psum(getattr(stats, n), where.tokens) for n in ("dropped", "counts")})
        return out, stats

    return map_shards(body, where.mesh, where.specs, (P(where.tokens), Stats(P(), P(), P(), P())))


@functools.lru_cache(maxsize=64)
def compiled(where, num_experts, options):
    function = on_mesh(where, num_experts, **dict(options))

    @jax.jit
    def run(x, experts, weights, params, d_out):
        out, pull, stats = jax.vjp(
            lambda *floats: function(floats[0], experts, *floats[1:]), x, weights, params, has_aux=True
        )
        d_x, d_weights, d_params = pull(d_out.astype(out.dtype))
        return out, {"x": d_x, "weights": d_weights, **d_params}, stats

    return run


class Key(Where):
    """A place that can be a key of a cache."""

    def __hash__(self):
        return hash((tuple(self.sizes.items()), self.axis, self.tokens))


def check(where, layer, *, tolerance=1e-5, dtype="float32", capacity=None, **options):
    """Compares value and all gradients with the loop, and returns the stats."""
    E, M = len(layer.gate), len(layer.x)
    if capacity is not None:
        options["capacity"] = capacity
    floats = [jnp.asarray(a, dtype) for a in (layer.x, layer.gate, layer.up, layer.down)]
    layer = layer._replace(
        **dict(zip(("x", "gate", "up", "down"), (np.asarray(f, np.float32) for f in floats), strict=True))
    )
    d_out = np.cos(np.arange(layer.x.size)).reshape(layer.x.shape).astype(np.float32)
    params = dict(zip(("gate", "up", "down"), floats[1:], strict=True))
    run = compiled(Key(*where), E, tuple(sorted(options.items())))
    out, grads, stats = run(floats[0], layer.experts, layer.weights, params, d_out)
    limit = None if capacity is None else int(np.ceil(capacity * layer.experts.shape[1] * M / E))
    want, d_want, dropped = expert_loop.run(layer, d_out, limit)
    for name, got, true in [("out", out, want), *((n, grads[n], d) for n, d in d_want.items())]:
        assert got.dtype == ("float32" if name == "weights" else dtype)
        error = np.abs(np.asarray(got, np.float64) - true).max()
        assert error <= tolerance * np.abs(true).max() + 1e-30, (name, error, np.abs(true).max())
    assert stats.dropped == dropped
    own = layer.experts[(layer.experts >= 0) & (layer.experts < E)]
    np.testing.assert_array_equal(stats.counts, np.bincount(own, minlength=E))
    return stats


def routes(tokens, top_k, E):
    """What a router may do: anything, all to one expert, to the last ones, nothing at all, nothing on the first ranks."""
    rng = np.random.default_rng(1)
    some = np.where(np.arange(tokens)[:, None] < tokens // 2, -1, rng.integers(-2, E + 1, (tokens, top_k)))
    ends = rng.integers(E - E // 4, E, (tokens, top_k))
    return {
        "random": None,
        "one expert": np.full((tokens, top_k), E // 2),
        "the last experts": ends,
        "none": np.full((tokens, top_k), -1),
        "no tokens on the first ranks": some,
    }


PLACES = {
    "ep": EP4,
    "on sp": Where({"dp": 2, "sp": 2}, "sp", ("dp", "sp")),
    "on fsdp": Where({"fsdp": 2, "sp": 2}, "fsdp", ("fsdp", "sp")),
    "ep x tp": Where({"ep": 2, "tp": 2}, "ep", ("ep",)),
    "ep and sp": Where({"ep": 2, "sp": 2}, ("sp", "ep"), ("ep", "sp")),
}


def check_routes(where, scheme, tokens=16, top_k=3, E=8, names=None, **options):
    rng = np.random.default_rng(2)
    ranks = 1 if where.axis is None else int(np.prod([where.mesh.shape[a] for a in np.atleast_1d(where.axis)]))
    for name, experts in routes(tokens, top_k, E).items():
        if names is None or name in names:
            stats = check(where, Layer.random(rng, tokens, top_k, E, experts=experts), scheme=scheme, **options)
            if name == "none":
                assert stats.extra_passes == 0 and stats.high_water == 0
            if name == "one expert" and ranks > 1:
                assert stats.extra_passes > 0 and stats.high_water > 1


@pytest.mark.parametrize(
    ("place", "scheme", "options"),
    [
        ("ep", "all_to_all", {"chunks": 2}),
        ("on sp", "ragged_all_to_all", {}),
        ("on fsdp", "all_gather", {"chunks": 2, "buffer": 0.7}),
        ("ep x tp", "all_to_all", {"buffer": 0.5, "late": True}),
        ("ep and sp", "two_level", {}),
    ],
)
def test_any_route_has_the_numbers_of_the_loop(place, scheme, options):
    check_routes(PLACES[place], scheme, **options)


def test_one_device_has_the_numbers_of_the_loop():
    check_routes(ONE, "auto", names={"random", "none"})


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
    for experts in (None, np.full((16, 3), 5)):
        stats = check(where, Layer.random(rng, 16, 3, 8, experts=experts), scheme=scheme, capacity=0.5)
        assert stats.dropped > 0


@pytest.mark.parametrize("scheme", ["all_to_all", "ragged_all_to_all", "all_gather"])
def test_balanced_tokens_need_one_pass_of_a_buffer_without_slack(scheme):
    E, M, k = 8, 32, 2
    experts = (np.arange(M * k).reshape(M, k) % E).astype(np.int32)
    layer = Layer.random(np.random.default_rng(8), M, k, E, experts=experts)
    params = {n: getattr(layer, n) for n in ("gate", "up", "down")}
    stats = jax.jit(on_mesh(EP4, E, scheme=scheme, buffer=1.0))(layer.x, experts, layer.weights, params)[1]
    assert stats.extra_passes == 0 and stats.high_water == 1


def test_ranks_of_other_tokens_make_as_many_passes():
    """Experts that communicate over another axis would wait for ever, were the passes not agreed on over the whole mesh."""
    where = PLACES["on sp"]
    experts = np.tile(np.arange(8), 6).reshape(16, 3)
    experts[:8] = 5  # the first replica's

    def apply(params, rows, sizes):
        y = einsum_experts(params, rows, sizes)
        return jnp.where(jax.lax.psum(1.0 + 0 * jnp.sum(sizes), "dp") > 0, y, 0)

    stats = check(
        where, Layer.random(np.random.default_rng(9), 16, 3, 8, experts=experts), scheme="all_to_all", apply=apply
    )
    assert stats.extra_passes > 0


# -- what it costs -----------------------------------------------------------------------------------------------------------


def shapes(M, k, E, D, F):
    f = jnp.float32
    params = {n: jax.ShapeDtypeStruct((E, *s), f) for n, s in (("gate", (D, F)), ("up", (D, F)), ("down", (F, D)))}
    return (
        jax.ShapeDtypeStruct((M, D), f), jax.ShapeDtypeStruct((M, k), jnp.int32), jax.ShapeDtypeStruct((M, k), f), params
    )  # fmt: skip


def rows_only(params, rows, sizes):
    """Experts that need no memory: what is measured is the exchange."""
    return rows * params["gate"][0, 0, 0]


@pytest.mark.parametrize("scheme", ["all_to_all", pytest.param("ragged_all_to_all", marks=pytest.mark.slow)])
def test_memory_is_that_of_the_buffer(scheme):
    """Sizes do not depend on the router, so a program's memory is that of the worst imbalance: then a rank has all rows."""
    M, k, D, n = 256, 4, 128, 8
    where = Where({"ep": n}, "ep", ("ep",))

    def used(buffer):
        run = compiled(Key(*where), n, (("apply", rows_only), ("buffer", buffer), ("scheme", scheme)))
        args = shapes(M * n, k, n, D, 1)
        analysis = run.lower(*args, jax.ShapeDtypeStruct((M * n, D), jnp.float32)).compile().memory_analysis()
        return analysis.temp_size_in_bytes

    # Forward and backward, beside a buffer that takes the worst imbalance in one pass: a rank then has all rows of all ranks.
    assert used(1.25) < used(n) / 4 or scheme != "all_to_all"
    assert used(0.25) < used(1.25) / 2 or scheme != "all_to_all"


def inside(jaxpr, name):
    """Returns the jaxpr, of those in this one, that has an equation of that name itself."""
    if any(e.primitive.name == name for e in jaxpr.eqns):
        return jaxpr
    subs = (s for e in jaxpr.eqns for s in jax.extend.core.jaxprs_in_params(e.params))
    return next((found for s in subs if (found := inside(getattr(s, "jaxpr", s), name)) is not None), None)


def test_a_chunk_waits_for_no_products_of_another():
    """In a pass of three chunks rows go out before any product, and come back after those of their own chunk alone."""
    layer = shapes(16, 2, 8, 4, 4)
    function = on_mesh(EP4, 8, scheme="all_to_all", chunks=3)
    jaxpr = inside(jax.make_jaxpr(function)(*layer).jaxpr, "all_to_all")
    needs, found, products = {}, [], 0
    for i, e in enumerate(jaxpr.eqns):
        before = frozenset().union(*(needs.get(id(v), frozenset()) for v in e.invars))
        if e.primitive.name == "all_to_all":
            found.append(len(before))
        own = {i} if "dot_general" in str(e) and e.primitive.name != "while" else set()
        products += len(own)
        needs |= {id(v): before | own for v in e.outvars}
    assert sorted(found) == [0, 0, 0, *[products // 3] * 3] and products >= 9


def test_second_derivatives_are_refused():
    layer = shapes(16, 2, 8, 4, 4)
    function = on_mesh(EP4, 8, scheme="all_to_all")

    def loss(x, *rest):
        return jnp.sum(function(x, *rest)[0] ** 2)

    with pytest.raises(Unsupported, match="exchange: second derivatives"):
        jax.eval_shape(jax.grad(lambda *a: jnp.sum(jax.grad(loss)(*a))), *layer)


@pytest.mark.parametrize("scheme", ["ragged_all_to_all"])
def test_it_compiles_for_a_tpu(scheme):
    mesh = jax.sharding.Mesh(np.asarray(tpu_topology("v5e:2x4").devices), ("ep",))
    lies = jax.sharding.NamedSharding(mesh, P("ep"))
    layer = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=lies), shapes(1024, 2, 8, 128, 128))

    def body(x, experts, weights, params):
        def loss(x, weights, params):
            out, _ = exchange(x, experts, weights, params, einsum_experts, axis="ep", num_experts=8, scheme=scheme)
            return jnp.sum(out**2)

        return jax.grad(loss, (0, 1, 2))(x, weights, params)

    function = map_shards(body, mesh, (P("ep"),) * 4, (P("ep"),) * 3)
    text = compile_tpu(function, *layer, topology="v5e:2x4").as_text()
    assert scheme.replace("_", "-") in text


# -- what is refused ---------------------------------------------------------------------------------------------------------

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


# -- auto --------------------------------------------------------------------------------------------------------------------

CALL = {"tokens": 8192, "top_k": 8, "width": 2048, "itemsize": 2}


@pytest.mark.parametrize(
    ("sizes", "kind", "options", "scheme"),
    [
        ((1,), "NVIDIA H200", {}, "local"),
        ((4,), "NVIDIA H200", {}, "all_gather"),
        ((64,), "NVIDIA H200", {"hosts": 1}, "all_to_all"),
        ((8, 8), "NVIDIA H200", {"hosts": 8, "tokens": 64}, "two_level"),
        ((16,), "TPU v5 lite", {"top_k": 1}, "ragged_all_to_all"),
        ((64,), "TPU v5p", {}, "ragged_all_to_all"),
        ((16,), "something else", {}, "all_to_all"),
    ],
)
def test_auto_takes_the_least_time(sizes, kind, options, scheme):
    choice = choose(axis_sizes=sizes, device_kind=kind, **CALL | options)
    assert choice.scheme == scheme == min(choice.seconds, key=choice.seconds.get), choice
    assert choice.reason.startswith(scheme) and "\n" not in choice.reason


def test_auto_can_be_pinned():
    choice = choose(axis_sizes=(4,), device_kind="NVIDIA H200", pinned="ragged_all_to_all", **CALL)
    assert choice.scheme == "ragged_all_to_all" and "pinned" in choice.reason and "all_gather" in choice.reason
    with pytest.raises(ValueError, match="pinned"):
        choose(axis_sizes=(4,), device_kind="NVIDIA H200", pinned="two_level", **CALL)
    assert all(links.source for links in LINKS.values())
