"""linear_attention with the sequence, batch and heads split: the numbers and gradients of one device, in traffic that does not
depend on the length."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import ejdist
import kernels
from ejdist import make_mesh

RNG = np.random.default_rng(0)
B, T, N, K, H, HV = 2, 16, 4, 2, 4, 3
IDS = [[3] * 5 + [-1] + [1] * 6 + [1] + [7] * 3, [-1] * 4 + [0] * 12]


def normal(*shape):
    return jnp.asarray(RNG.standard_normal(shape), jnp.float32)


QKV = {"query": normal(B, T, N, H), "key": normal(B, T, K, H), "value": normal(B, T, K, HV)}
GK, GV, G = (-jnp.exp(normal(B, T, N, *w)) for w in ((H,), (HV,), ()))
STATE, U = normal(B, N, H, HV), normal(N, H)
ONE_ROW = {n: x[:1] for n, x in QKV.items()}

# name -> (function, arrays that are differentiated, options)
CALLS = {
    "gla": ("gla_attention", {**QKV, "g": GK, "initial_state": STATE}, {"segment_ids": IDS, "return_state": True}),
    "packed": (
        "gla_attention",
        {**ONE_ROW, "g": GK[:1], "initial_state": normal(4, N, H, HV)},
        {"cu_seqlens": [0, 3, 3, 11, 14], "return_state": True},
    ),
    "rwkv6": (
        "rwkv6",
        {"r": QKV["query"], "k": QKV["key"], "v": QKV["value"], "w": GK, "u": U, "initial_state": STATE},
        {"segment_ids": IDS},
    ),
    "recurrent": ("recurrent_attention", {**QKV, "g": G, "gk": GK, "gv": GV, "state": STATE}, {}),
    "lightning": ("lightning_attention", {**QKV, "decay": jnp.abs(normal(N))}, {"segment_ids": IDS}),
    "retention": ("retention", QKV, {"return_state": True}),
}
MESHES = {
    "sp8": {"sp": 8},
    "dp2_sp2_tp2": {"dp": 2, "sp": 2, "tp": 2},
    "sp4_tp2": {"sp": 4, "tp": 2},
    "sp2": {"sp": 2},
}
QUICK = {("sp8", "packed"), ("dp2_sp2_tp2", "rwkv6")}


def value_and_gradients(function, arrays, options):
    @jax.jit
    def run(arrays):
        out, pull = jax.vjp(lambda a: function(**a, **options), arrays)
        d = jax.tree.map(lambda y: jnp.cos(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape), out)
        return out, pull(d)[0]

    return run(arrays)


@functools.cache
def plain(name):
    function, arrays, options = CALLS[name]
    return value_and_gradients(getattr(kernels, function), arrays, options)


@pytest.mark.parametrize(
    ("mesh", "name"),
    [(m, n) if (m, n) in QUICK else pytest.param(m, n, marks=pytest.mark.slow)
     for m in MESHES for n in CALLS if n != "packed" or "dp" not in MESHES[m]],
)  # fmt: skip
def test_the_numbers_and_gradients_of_one_device(mesh, name):
    function, arrays, options = CALLS[name]
    sizes = MESHES[mesh]
    mesh = make_mesh(**sizes, devices=jax.devices()[: int(np.prod(list(sizes.values())))])
    got = value_and_gradients(functools.partial(getattr(ejdist, function), mesh=mesh), arrays, options)
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=2e-4, atol=2e-5), got, plain(name))


def collective_bytes(T):
    """Returns (bytes that collectives of a forward and backward over 8 ranks write, how many of them there are)."""
    x = jax.ShapeDtypeStruct((1, T, 2, 8), jnp.float32)
    run = functools.partial(ejdist.gla_attention, mesh=make_mesh(sp=8))
    loss = lambda q, k, v, g: jnp.sum(run(q, k, v, g))  # noqa: E731
    program = jax.jit(jax.grad(loss, (0, 1, 2, 3))).lower(x, x, x, x).compile().as_text()
    kinds = r"= (.*?) (?:collective-permute|all-gather|all-reduce|reduce-scatter|all-to-all)(?:-start)?\("
    found = re.findall(kinds, program)
    sizes = [
        int(np.prod([int(n) for n in dims.split(",") if n]))
        for f in found
        for dims in re.findall(r"\w+\[([\d,]*)\]", f)
    ]
    return 4 * sum(sizes), len(found)


@pytest.mark.slow
def test_traffic_does_not_depend_on_the_length():
    short, long = collective_bytes(128), collective_bytes(1024)
    assert short == long
    state = 4 * 2 * 8 * 8
    assert 0 < short[0] < 40 * state


def test_results_lie_where_they_follow():
    mesh = make_mesh(dp=2, sp=2, tp=2)
    lies = (P("dp", "sp", "tp"), P("dp", "tp"))
    out, state = ejdist.retention(**QKV, return_state=True, mesh=mesh, out_specs=lies)
    assert out.sharding.spec[:3] == ("dp", "sp", "tp") and state.sharding.spec[:2] == ("dp", "tp")
    with pytest.raises(ValueError, match="'out_specs' says"):
        ejdist.retention(**QKV, return_state=True, mesh=mesh, out_specs=(P(), P()))
