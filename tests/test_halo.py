"""The halo of windows and chunks: the numbers of one device, whatever the width, order and documents, and what is sent."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from test_sequence import KEY, PACKED, QUERY, SINKS, TWO_AXES, VALUE, T, assert_close, outputs_and_gradients

from ejdist import Order, make_mesh, ring_attention
from ejdist.sequence import Halo, Ulysses
from ejdist.sequence.halo import has_runs, pieces, reach_of
from ejdist.sequence.windows import ByWindow, by_window
from kernels import MaskInfo, flash_attention

ORDERS = ("contiguous", "zigzag", "striped")
STRIPE = 4
FAR = {"causal": True, "softmax_aux": SINKS}


def made_of(order, ranks, stripe=STRIPE):
    return Order(order, ranks, stripe if order == "striped" else 1)


def run_of(order, ranks):
    return STRIPE if order == "striped" else T // Order(order, ranks).multiple


def masks(run):
    """Returns the masks by name, of windows that reach over a part of a run, all of it, one token or two runs more."""
    windows = {"two": 2, "run": run, "more": run + 1, "three": min(3 * run, T - 1)}
    found = {name: FAR | {"sliding_window": w} for name, w in windows.items()}
    found |= {f"packed_{name}": found[name] | PACKED for name in windows}
    found["chunk"] = {"causal": True, "chunk_size": 12}
    found["packed_chunk"] = found["chunk"] | PACKED
    return found | {
        "one": {"causal": True, "sliding_window": 1},
        "dropout": found["more"] | {"dropout_prob": 0.3, "dropout_seed": 7},
    }


def rows():
    quick = {
        (4, "zigzag"): ("packed_chunk",),
        (4, "striped"): ("dropout",),
    }
    for ranks, order in itertools.product((2, 3, 4, 8), ORDERS):
        if T % made_of(order, ranks).multiple:
            continue
        for name in masks(run_of(order, ranks)):
            yield pytest.param(
                ranks, order, name, marks=() if name in quick.get((ranks, order), ()) else pytest.mark.slow
            )


@functools.cache
def on_one_device(run, name):
    return outputs_and_gradients(flash_attention, Order("contiguous", 1), masks(run)[name])


@pytest.mark.parametrize(("ranks", "order", "name"), list(rows()))
def test_the_numbers_of_one_device(ranks, order, name):
    made, run = made_of(order, ranks), run_of(order, ranks)
    halo = functools.partial(ring_attention, mesh=make_mesh(sp=ranks), order=made, scheme="halo")
    got = outputs_and_gradients(halo, made, masks(run)[name])
    assert_close(got, on_one_device(run, name), f"{ranks} {order} {name}")


@pytest.mark.parametrize("order", ["striped", pytest.param("zigzag", marks=pytest.mark.slow)])
def test_between_groups_of_ranks_that_exchange_heads(order):
    """Groups of ranks have runs, in a zigzag and in stripes, and a halo between them."""
    made, mask = made_of(order, 8), masks(8)["packed_more"]
    halo = functools.partial(ring_attention, mesh=TWO_AXES, axis_name=("a", "b"), order=made, scheme=Ulysses(Halo()))
    assert_close(outputs_and_gradients(halo, made, mask), on_one_device(8, "packed_more"), order)


def sent(order, ranks, options, scheme="halo"):
    """Returns the tokens of each array that the program of a rank sends, forward."""

    def inside(jaxpr):
        for e in jaxpr.eqns:
            if e.primitive.name == "ppermute":
                yield e.invars[0].aval.shape[1]
            for j in jax.extend.core.jaxprs_in_params(e.params):
                yield from inside(j)

    ring = functools.partial(ring_attention, mesh=make_mesh(sp=ranks), order=order, scheme=scheme, **options)
    return sorted(inside(jax.make_jaxpr(ring)(QUERY, KEY, VALUE).jaxpr))


def test_what_is_sent_is_no_more_than_the_window():
    assert sent("contiguous", 4, {"causal": True, "sliding_window": 9}) == [8, 8], "keys and values, once"
    assert sent("zigzag", 4, {"causal": True, "sliding_window": 9}) == [8] * 4, (
        "up with the first parts, down with the second"
    )
    assert sent("contiguous", 4, {"causal": True, "sliding_window": 18}) == [1, 1, 16, 16], (
        "all of one rank, one of the next"
    )
    assert sent("contiguous", 4, {"causal": True, "chunk_size": 16}) == [], "each chunk is one rank's"
    stripes = made_of("striped", 4)
    # Of 4 stripes of a rank, to the next one, around.
    assert sent(stripes, 4, {"causal": True, "sliding_window": 5}) == [16, 16]
    assert sent(stripes, 4, {"causal": True, "sliding_window": 3}) == [8, 8], "two tokens of each"
    # What is no halo is a ring: without a limit, a window back to a rank's own stripe, tokens dealt out one by one, later keys.
    assert sent(stripes, 4, {"causal": True, "sliding_window": 14})[0] == 16
    assert sent("zigzag", 4, {"causal": True}) == [16] * 4
    assert sent("striped", 4, {"causal": True, "sliding_window": 9})[0] == 16
    assert sent("contiguous", 4, {"sliding_window": (6, 3)})[0] == 16


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8])
def test_every_token_before_a_run_comes_once_unless_the_rank_has_it(order, ranks):
    run = 6
    made = made_of(order, ranks, run)
    length = (3 if order == "striped" else run) * made.multiple
    runs = made.indices(length).reshape(ranks, -1, run)
    for reach in (x for x in (1, run - 1, run, run + 3, 3 * run, length) if has_runs(made, length, x)):
        arrived = {(rank, at): [] for rank in range(ranks) for at in range(runs.shape[1])}
        for piece in pieces(made, length, reach):
            assert 0 < piece.tokens <= min(run, reach)
            for side in zip(*piece.pairs, strict=True):
                assert len(set(side)) == len(side), "a permutation"
            for sender, rank in piece.pairs:
                assert sender != rank
                later = int(rank < piece.around)
                for k in range(piece.count - later):
                    arrived[rank, piece.run + k + later] += [*runs[sender, piece.source + k, run - piece.tokens :]]
        for (rank, at), tokens in arrived.items():
            first = int(runs[rank, at, 0])
            held = {t for before in runs[rank, :at] for t in before}
            least = max([0, first - reach, *(int(before[-1]) + 1 for before in runs[rank, :at])])
            assert sorted(tokens) == [*range(least, first)] and not held & set(tokens), (reach, rank, at)


@pytest.mark.parametrize(
    ("mask", "reach"),
    [
        (MaskInfo(causal=True, window=(8, 0)), 8),
        (MaskInfo(causal=True, window=(8, None)), 8),
        (MaskInfo(causal=True, chunk_size=6), 5),
        (MaskInfo(causal=True, window=(3, 0), chunk_size=6), 3),
        (MaskInfo(causal=True, window=(None, 2)), None),
        (MaskInfo(causal=True, window=(8, 0), sink_tokens=2), None),
        (MaskInfo(causal=True, window=(8, 0), prefix_lengths=np.asarray([3])), None),
        (MaskInfo(window=(8, 3)), None),
        (MaskInfo(causal=True), None),
        (None, None),
    ],
)
def test_how_far_a_query_sees(mask, reach):
    assert reach_of(mask, 40) == reach


def test_kinds_of_layers_have_a_scheme_each():
    """Those with a window have a halo where that sends less, or the scheme that was asked for."""
    window, every = {"causal": True, "sliding_window": 9}, {"causal": True}
    assert sent("zigzag", 4, window, ByWindow()) == [8] * 4
    assert sent("zigzag", 4, every, ByWindow()) == sent("zigzag", 4, every, "ring")
    assert sent("zigzag", 4, {"causal": True, "sliding_window": T - 1}, ByWindow()) == sent("zigzag", 4, every, "ring")
    assert sent("contiguous", 4, window, by_window("ring", "ring")) == [16, 16]
    assert sent("contiguous", 4, window, by_window("all_gather", None)) == [8, 8]
    assert sent("contiguous", 4, every, by_window("all_gather", "halo")) == []
    assert by_window("all_gather", None).hides is False and by_window("ring", "all_gather").hides


def test_a_run_of_whole_tiles_begins_with_one():
    """Before it is padding up to a whole tile, which nobody sees."""
    rng, options = np.random.default_rng(1), {"causal": True, "sliding_window": 100}
    arrays = [rng.standard_normal((1, 512, 1, 4)).astype(np.float32) for _ in range(4)]

    def both(function):
        out, pull = jax.vjp(lambda *a: function(*a, **options), *arrays[:3])
        return out, *pull(arrays[3])

    halo = functools.partial(ring_attention, mesh=make_mesh(sp=2), scheme="halo")
    got, want = jax.jit(lambda: (both(halo), both(flash_attention)))()
    assert_close(got, want, "tiles")


@pytest.mark.slow
def test_inside_a_shard_map_that_checks_varying_axes():
    mesh, spec = make_mesh(sp=4), P(None, "sp")
    options = {"causal": True, "sliding_window": 20}

    def local(q, k, v, ids):
        packed = {"q_segment_ids": ids, "kv_segment_ids": ids}
        return ring_attention(q, k, v, axis_name="sp", scheme="halo", **packed, **options)

    mapped = jax.shard_map(local, mesh=mesh, in_specs=(spec,) * 4, out_specs=spec, check_vma=True)
    ids = PACKED["q_segment_ids"]

    def gradients(function):
        return jax.grad(lambda *a: jnp.sum(jnp.sin(function(*a))), (0, 1, 2))(QUERY, KEY, VALUE)

    halo = functools.partial(lambda *a: mapped(*a, ids))
    got, want = jax.jit(lambda: (gradients(halo), gradients(functools.partial(flash_attention, **options, **PACKED))))()
    assert_close(got, want, "checked")
