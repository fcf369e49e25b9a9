"""The halo of windows and chunks: the numbers of one device, whatever the width, order and documents, and what is sent."""

import functools
import itertools

import jax
import numpy as np
import pytest
from test_sequence import KEY, PACKED, QUERY, SINKS, VALUE, T, assert_close, outputs_and_gradients

from ejdist import Order, make_mesh, ring_attention
from ejdist.sequence.halo import pieces, reach_of
from kernels import MaskInfo, flash_attention

ORDERS = ("contiguous", "zigzag")
FAR = {"causal": True, "softmax_aux": SINKS}


def run_of(order, ranks):
    return T // Order(order, ranks).multiple


def masks(run):
    """Returns the masks by name, of windows that reach over a part of a run, all of it, one token or two runs more."""
    windows = {"two": 2, "run": run, "more": run + 1, "three": 3 * run}
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
        (4, "zigzag"): ("packed_more", "three", "packed_chunk", "dropout"),
        (4, "contiguous"): ("packed_three",),
        (2, "zigzag"): ("packed_more",),
        (8, "zigzag"): ("packed_three",),
    }
    for ranks, order in itertools.product((2, 3, 4, 8), ORDERS):
        if T % Order(order, ranks).multiple:
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
    made, run = Order(order, ranks), run_of(order, ranks)
    halo = functools.partial(ring_attention, mesh=make_mesh(sp=ranks), order=made, scheme="halo")
    got = outputs_and_gradients(halo, made, masks(run)[name])
    assert_close(got, on_one_device(run, name), f"{ranks} {order} {name}")


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
    # What is no halo is a ring: without a limit, tokens dealt out one by one, later keys.
    assert sent("zigzag", 4, {"causal": True}) == [16] * 4
    assert sent("striped", 4, {"causal": True, "sliding_window": 9})[0] == 16
    assert sent("contiguous", 4, {"sliding_window": (6, 3)})[0] == 16


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_every_token_before_a_run_comes_once_unless_the_rank_has_it(order, ranks):
    made = Order(order, ranks)
    run = run_of(order, ranks)
    runs = made.indices(T).reshape(ranks, -1, run)
    for reach in (1, run - 1, run, run + 3, 3 * run, T):
        arrived = {(rank, at): [] for rank in range(ranks) for at in range(runs.shape[1])}
        for piece in pieces(made, T, reach):
            assert 0 < piece.tokens <= min(run, reach)
            for side in zip(*piece.pairs, strict=True):
                assert len(set(side)) == len(side), "a permutation"
            for sender, rank in piece.pairs:
                assert sender != rank
                arrived[rank, piece.run] += [*runs[sender, piece.source, run - piece.tokens :]]
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
    assert reach_of(mask) == reach
