"""The exchange of tokens on a mesh beside the loop that is its oracle: what the tests of experts share."""

import functools
from typing import NamedTuple

import experts_loop
import jax
import jax.numpy as jnp
import numpy as np
from experts_loop import Layer
from jax.sharding import PartitionSpec as P

import kernels
from ejdist import make_mesh
from ejdist.experts.dispatch import Stats, exchange
from ejdist.experts.schemes import SCHEMES
from ejdist.mapped import map_shards

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
    group = jnp.sum(jnp.cumsum(sizes) <= jnp.arange(len(rows))[:, None], axis=1)
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

    def run(x, experts, weights, params):
        return jax.vjp(lambda *floats: function(floats[0], experts, *floats[1:]), x, weights, params, has_aux=True)

    return jax.jit(run)


@jax.jit
def _pulled(pull, d_out):
    return pull(d_out)


def backward(pull, d_out):
    """Returns the gradients, by a program of its own: what was kept is what its type says, and not what each device has."""
    return _pulled(jax.tree.map(np.asarray, pull), d_out)


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
    out, pull, stats = run(floats[0], layer.experts, layer.weights, params)
    d_x, d_weights, d_params = backward(pull, d_out.astype(dtype))
    grads = {"x": d_x, "weights": d_weights, **d_params}
    limit = None if capacity is None else int(np.ceil(capacity * layer.experts.shape[1] * M / E))
    want, d_want, dropped = experts_loop.run(layer, d_out, limit)
    for name, got, true in [("out", out, want), *((n, grads[n], d) for n, d in d_want.items())]:
        assert got.dtype == ("float32" if name == "weights" else dtype)
        error = np.abs(np.asarray(got, np.float64) - true).max()
        assert error <= tolerance * np.abs(true).max() + 1e-30, (name, error, np.abs(true).max())
    assert stats.dropped == dropped
    own = layer.experts[(layer.experts >= 0) & (layer.experts < E)]
    np.testing.assert_array_equal(stats.counts, np.bincount(own, minlength=E))
    return stats


def shapes(M, k, E, D, F):
    f = jnp.float32
    params = {n: jax.ShapeDtypeStruct((E, *s), f) for n, s in (("gate", (D, F)), ("up", (D, F)), ("down", (F, D)))}
    return (
        jax.ShapeDtypeStruct((M, D), f), jax.ShapeDtypeStruct((M, k), jnp.int32), jax.ShapeDtypeStruct((M, k), f), params
    )  # fmt: skip


def rows_only(params, rows, sizes):
    """Experts that need no memory: what is measured is the exchange."""
    return rows * params["gate"][0, 0, 0]


def routes(tokens, top_k, E):
    """What a router may do: anything, all to two experts, one of them twice, to the last ones, nothing at all, or on the first
    ranks."""
    rng = np.random.default_rng(1)
    some = np.where(np.arange(tokens)[:, None] < tokens // 2, -1, rng.integers(-2, E + 1, (tokens, top_k)))
    ends = rng.integers(E - E // 4, E, (tokens, top_k))
    return {
        "random": None,
        "two experts": np.tile(E // 2 + np.arange(top_k) % 2, (tokens, 1)),
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
            # A token travels once to a rank: two ranks have room for all.
            if name == "two experts" and ranks > (2 if scheme in ("all_to_all", "ragged_all_to_all") else 1):
                assert stats.extra_passes > 0 and stats.high_water > 1
