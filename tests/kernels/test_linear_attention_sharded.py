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
    return jnp.asarray(RNG.standard_normal(shape).astype(np.float32))


QKV = {"query": normal(B, T, N, H), "key": normal(B, T, K, H), "value": normal(B, T, K, HV)}
RKV = dict(zip("rkv", QKV.values(), strict=True))
GK, GV, G = (-jnp.exp(normal(B, T, N, *w)) for w in ((H,), (HV,), ()))
GAMMA = -jnp.abs(normal(N))
TOKENS = {*QKV, *RKV, "g", "gk", "gv", "w"}

# name -> (function, arrays that are differentiated)
CALLS = {
    "gla_of_heads": ("gla_attention", {**QKV, "g": G, "g_gamma": GAMMA}),
    "gla_of_channels": ("gla_attention", {**QKV, "g": GK}),
    "recurrent": ("recurrent_attention", {**QKV, "g": G, "gk": GK, "gv": GV}),
    "lightning": ("lightning_attention", {**QKV, "decay": -GAMMA}),
    "retention": ("retention", QKV),
    "rwkv6": ("rwkv6", {**RKV, "w": GK, "u": normal(N, H)}),
}
# Rows of documents; or one of packed sequences. Each with the states before them.
KINDS = {
    "documents": ({"segment_ids": IDS}, normal(B, N, H, HV)),
    "packed": ({"cu_seqlens": [0, 3, 3, 11, 14]}, normal(4, N, H, HV)),
}
MESHES = {f"sp{n}": {"sp": n} for n in (1, 2, 4, 8)} | {
    "sp4_tp2": {"sp": 4, "tp": 2},
    "dp2_sp2_tp2": {"dp": 2, "sp": 2, "tp": 2},
}
QUICK: set[tuple[str, str, str]] = set()  # recurrences over ranks are quick in test_runs.py


def call_of(name, kind):
    """Returns (function, arrays with the states, options)."""
    function, arrays = CALLS[name]
    options, states = KINDS[kind]
    arrays = {n: x[:1] if kind == "packed" and n in TOKENS else x for n, x in arrays.items()}
    return function, {**arrays, "initial_state": states}, {**options, "return_state": True}


def value_and_gradients(function, arrays, options):
    @jax.jit
    def run(arrays):
        out, pull = jax.vjp(lambda a: function(**a, **options), arrays)
        d = jax.tree.map(lambda y: jnp.cos(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape), out)
        return out, pull(d)[0]

    return run(arrays)


@functools.cache
def plain(name, kind):
    function, arrays, options = call_of(name, kind)
    return value_and_gradients(getattr(kernels, function), arrays, options)


@pytest.mark.parametrize(
    ("name", "kind", "mesh"),
    [pytest.param(n, k, m, marks=() if (m, n, k) in QUICK else pytest.mark.slow)
     for n in CALLS for k in KINDS for m in MESHES if k != "packed" or "dp" not in MESHES[m]],
)  # fmt: skip
def test_the_numbers_and_gradients_of_one_device(mesh, name, kind):
    function, arrays, options = call_of(name, kind)
    sizes = MESHES[mesh]
    mesh = make_mesh(**sizes, devices=jax.devices()[: int(np.prod(list(sizes.values())))])
    got = value_and_gradients(functools.partial(getattr(ejdist, function), mesh=mesh), arrays, options)
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=2e-4, atol=2e-5), got, plain(name, kind))


def collective_bytes(T):
    """Returns (bytes that collectives of a forward and backward over 8 ranks write, how many of them there are)."""
    x = jax.ShapeDtypeStruct((1, T, 2, 8), jnp.float32)
    run = functools.partial(ejdist.gla_attention, mesh=make_mesh(sp=8))
    program = jax.jit(jax.grad(lambda *a: jnp.sum(run(*a)), (0, 1, 2, 3))).lower(x, x, x, x).compile().as_text()
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
