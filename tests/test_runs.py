"""What depends on the order of tokens, in orders in which a rank has several runs of them: maps of runs, and the exchange."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grid import error
from jax.sharding import PartitionSpec as P

import ejdist
import kernels
from ejdist import Order, make_mesh, set_layout
from ejdist.costs import ALL_REDUCE, ALL_TO_ALL, PERMUTE
from ejdist.mapped import map_shards
from ejdist.sequence.cost import states_sent
from ejdist.sequence.runs import Runs
from ejdist.sharded import sharded

RANKS, T = 4, 64
ORDERS = {"zigzag": Order("zigzag", 4), "stripes": Order("striped", 4, 2), "long": Order("striped", 4, 8)}
RNG = np.random.default_rng(0)


def normal(*shape):
    return jnp.asarray(RNG.standard_normal(shape).astype(np.float32))


@functools.cache
def mesh():
    return make_mesh(sp=RANKS, devices=jax.devices()[:RANKS])


@pytest.mark.parametrize(
    "order", [*ORDERS.values(), Order("contiguous", 4), Order("zigzag", 1), Order("striped", 1, 4)]
)
def test_runs_are_the_tokens_of_a_rank(order):
    own = T // order.shards
    parts = order.runs(own)
    run = own // parts.shape[1]
    np.testing.assert_array_equal((parts[..., None] * run + np.arange(run)).ravel(), order.indices(T))


@pytest.mark.parametrize(
    "order",
    [
        *(pytest.param(o, id=n, marks=[pytest.mark.slow] * (n == "long")) for n, o in ORDERS.items()),
        pytest.param(Order("zigzag", 2), id="zigzag2"),
    ],
)
def test_tokens_are_exchanged_to_contiguous_order_and_home(order):
    """A rank has two short stripes for every rank, and fewer long ones than there are ranks."""
    tokens = np.arange(2 * T, dtype=np.int32).reshape(2, T)

    def there_and_home(x):
        runs = Runs(order, T // order.shards, ("sp",))
        there = runs.exchanged(x)
        return there, runs.home(there)

    ranks = make_mesh(sp=order.shards, devices=jax.devices()[: order.shards])
    exchange = jax.jit(map_shards(there_and_home, ranks, (P(None, "sp"),), (P(None, "sp"),) * 2))
    there, home = exchange(order.permute(tokens))
    np.testing.assert_array_equal(there, tokens)
    np.testing.assert_array_equal(order.inverse(np.asarray(home)), tokens)


IDS = np.array([[0] * 9 + [-1] * 8 + [1] * 30 + [2] * 16 + [-1], [-1] * 3 + [5] * 61])
HEADS = {n: normal(2, T, 2, 4) for n in ("query", "key", "value")}
DECAYS = -jnp.exp(normal(2, T, 2))
CALLS = {
    "gated_delta_rule": ({**HEADS, "beta": jax.nn.sigmoid(DECAYS), "g": DECAYS}, {"use_qk_l2norm": True}),
    "gla_attention": ({**HEADS, "gk": -jnp.exp(normal(2, T, 2, 4))}, {}),
    "rwkv4": ({"w": normal(6), "u": normal(6), "k": normal(2, T, 6), "v": normal(2, T, 6)}, {}),
    "causal_conv1d": ({"x": normal(2, T, 6), "weight": normal(6, 3)}, {}),
    "state_space_v1": (
        {"x": normal(2, T, 6), "dt": jnp.exp(normal(2, T, 6)), "A": -jnp.exp(normal(6, 3)), "B": normal(2, T, 3)}
        | {"C": normal(2, T, 3)}, {},
    ),
}  # fmt: skip
QUICK = {("gated_delta_rule", "zigzag", False)}


@pytest.mark.parametrize(
    ("name", "order", "exchanged"),
    [pytest.param(n, o, e, marks=() if (n, o, e) in QUICK else pytest.mark.slow)
     for n in CALLS for o in ORDERS for e in ((None,) if n == "causal_conv1d" else (False, True))],
)  # fmt: skip
def test_recurrences_in_other_orders(name, order, exchanged):
    """Numbers and gradients of one device, of documents on any ranks, either way."""
    order, (arrays, options) = ORDERS[order], CALLS[name]
    function = getattr(ejdist, name)
    if exchanged is not None:
        local = dataclasses.replace(function.local, exchanged=exchanged)
        function = sharded(function.function, local=local, handles=function.handles, follows=function.follows)

    def both(call, ids, way):
        @jax.jit
        def run(arrays):
            (out, state), pull = jax.vjp(lambda a: call(**a, **options, segment_ids=ids, return_state=True), arrays)
            d = way(jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape))
            return out, state, pull((d, jnp.ones_like(state)))[0]

        return run

    want = both(getattr(kernels, name), IDS, lambda x: x)(arrays)
    ids = order.permute(np.asarray(IDS))
    moved = {n: order.permute(np.asarray(x)) if x.shape[:2] == (2, T) else x for n, x in arrays.items()}
    with set_layout(order=order):
        run = both(functools.partial(function, mesh=mesh()), ids, order.permute)
        out, state, gradients = jax.device_get(run(moved))
    got = order.inverse(out), state, {n: order.inverse(x) if x.shape[:2] == (2, T) else x for n, x in gradients.items()}
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert error(g, w) < 5e-6, error(g, w)


def test_a_delta_rule_makes_one_pass_over_its_tokens():
    arrays, options = CALLS["gated_delta_rule"]
    program = jax.make_jaxpr(lambda a: ejdist.gated_delta_rule(**a, **options, mesh=mesh()))(arrays)
    assert str(program).count("ejdist_call[") == 1


def test_what_sends_less_is_chosen():
    """A zigzag of many tokens passes on states, and stripes with fewer tokens than a state has are exchanged."""
    zigzag, stripes = Order("zigzag", 8), Order("striped", 8, 16)
    head, token = 2 * 4 * 128 * 128, 4 * 2 * 128
    for order, own, exchanged in ((zigzag, 131072, False), (stripes, 8192, True), (zigzag, 64, True)):
        ways = [states_sent(order, own, head, own * token, exchanged=e) for e in (False, True)]
        less = states_sent(order, own, head, own * token)
        assert less.bytes == ways[exchanged].bytes != ways[not exchanged].bytes
        assert sum(less.bytes.values()) < sum(ways[not exchanged].bytes.values())
    assert states_sent(Order("contiguous", 8), 64, head, 1).bytes == {("sp", PERMUTE): 4 * head}
    assert states_sent(zigzag, 64, head, 1, exchanged=False).bytes == {
        ("sp", PERMUTE): 8 * head, ("sp", ALL_REDUCE): 1.75 * head,
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("exchanged", [False, True])
def test_the_program_sends_what_is_declared(exchanged):
    order, (arrays, options) = ORDERS["stripes"], CALLS["gated_delta_rule"]
    local = dataclasses.replace(ejdist.gated_delta_rule.local, exchanged=exchanged)
    function = sharded(kernels.gated_delta_rule, local=local, handles=("T",), follows="fixed")
    with set_layout(order=order):
        program = jax.jit(lambda a: function(**a, **options, mesh=mesh())).lower(arrays).compile().as_text()

    def bytes_of(collective):
        shapes = re.findall(rf"= \(?((?:f32\[[\d,]*\]\S*,? ?)+)\)? {collective}\(", program)
        sizes = [dims for shape in shapes for dims in re.findall(r"f32\[([\d,]*)\]", shape)]
        return sum(4 * int(np.prod([int(n) for n in dims.split(",") if n])) for dims in sizes)

    state = 2 * 4 * 2 * 2 * 4 * 4
    tokens = sum(x.size for x in arrays.values()) * 4 // RANKS + 2 * T * 2 * 4 * 4 // RANKS
    sent = states_sent(order, T // RANKS, state, tokens, exchanged=exchanged).bytes
    assert bytes_of("collective-permute") == sent["sp", PERMUTE]
    if exchanged:
        assert bytes_of("all-to-all") * (RANKS - 1) / RANKS == sent["sp", ALL_TO_ALL]
    else:
        assert bytes_of("all-reduce") >= sent["sp", ALL_REDUCE] / (2 * (RANKS - 1) / RANKS)
