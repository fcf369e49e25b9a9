"""Heads in groups over one axis of the sequence, another scheme over the axis before it: the numbers of one device."""

import functools
import itertools
import random
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejdist import Order, make_mesh, ring_attention
from ejdist.sequence import AllGather, Ring, Ulysses
from kernels import MaskInfo, flash_attention

B, T, H = 2, 64, 8
IDS = np.sort(np.random.default_rng(1).integers(0, 5, (B, T)), axis=1)
IDS[:, T - 5 :] = -1
PACKED = {"q_segment_ids": IDS, "kv_segment_ids": IDS}
MASKS = {
    "causal": {"causal": True},
    "full": {},
    "two_sided_window": {"sliding_window": (6, 3)},
    "packed": {"causal": True, **PACKED},
    "packed_chunk": {"causal": True, "chunk_size": 6, **PACKED},
    "packed_sink_window": {"causal": True, "sliding_window": 5, "sink_tokens": 2, **PACKED},
    "sinks_packed": {"causal": True, "softmax_aux": 2, **PACKED},
    "soft_cap": {"causal": True, "logits_soft_cap": 1.5, "softmax_scale": 0.9},
    "dropout": {"causal": True, "dropout_prob": 0.3, "dropout_seed": 7, **PACKED},
    "alibi": {"causal": True, "alibi_slopes": 1, **PACKED},
    "prefix": {"causal": True, "sliding_window": (9, None), "prefix": [40, 3]},
    "all_of_a_head": {"causal": True, "softmax_aux": 1, "alibi_slopes": 1, "dropout_prob": 0.2, "dropout_seed": 3},
    "window": {"causal": True, "sliding_window": 9},
    "chunk": {"causal": True, "chunk_size": 12},
    "packed_full": PACKED,
    "packed_window": {"causal": True, "sliding_window": 5, **PACKED},
}
QUICK = 12  # rows: one for each of the masks from the first on
# (cp, sp, tp), heads of queries and of keys, groups of heads.
MESHES = ((1, 2, 1), (1, 4, 1), (1, 8, 1), (1, 2, 2), (1, 4, 2), (2, 4, 1), (4, 2, 1), (2, 2, 2), (8, 1, 1))
HEADS = ((8, 8), (16, 4), (16, 2), (8, 1), (12, 6))
FACTORS = {
    "mask": tuple(MASKS),
    "mesh": MESHES,
    "heads": HEADS,
    "groups": (1, 2, 3, 4),
    "order": ("contiguous", "zigzag", "striped"),
    "outer": (Ring(), AllGather()),
}


def legal(row):
    (cp, sp, tp), (heads, kv_heads) = row["mesh"], row["heads"]
    over = (("cp", cp),) * (cp > 1) + (("sp", sp),) * (sp > 1)
    alone = row["outer"] == Ring() or min(cp, sp) > 1  # with one axis nothing is outside
    made = Ulysses(row["outer"], row["groups"])
    return alone and (kv_heads == 1 or kv_heads % tp == 0) and made.rejects(heads // tp, over) is None


def pairs_of(row):
    return {frozenset(two) for two in itertools.combinations(row.items(), 2)}


def whole():
    """Yields every legal row."""
    rows = (dict(zip(FACTORS, values, strict=True)) for values in itertools.product(*FACTORS.values()))
    return (row for row in rows if legal(row))


@functools.cache
def covering():
    """Returns rows that have every legal pair of two factors' values; the first ones have each mask."""
    rng, seen, rows = random.Random(0), set(), []
    others = [*itertools.product(*(FACTORS[n] for n in FACTORS if n not in ("mask", "mesh")))]
    for turn, (i, mask) in itertools.product(range(len(MESHES)), enumerate(MASKS)):
        some = [
            dict(zip(FACTORS, (mask, MESHES[(i + turn) % len(MESHES)], *o), strict=True))
            for o in rng.sample(others, 30)
        ]
        rows.append(max(filter(legal, some), key=lambda row: len(pairs_of(row) - seen)))
        seen |= pairs_of(rows[-1])
    return rows


def name_of(row):
    cp, sp, tp = row["mesh"]
    outer = type(row["outer"]).__name__
    return (
        f"{row['mask']}-cp{cp}_sp{sp}_tp{tp}-{row['heads'][0]}_{row['heads'][1]}-{row['groups']}-{row['order']}-{outer}"
    )


def rows():
    for i, row in enumerate(covering()):
        yield pytest.param(row, id=name_of(row), marks=() if i < QUICK else (pytest.mark.slow,))


@functools.cache
def drawn(heads, kv_heads):
    """Returns query, key, value, the cotangents of out and lse, sinks and slopes."""
    rng = np.random.default_rng(heads + kv_heads)
    shapes = [(B, T, heads, H), (B, T, kv_heads, H), (B, T, kv_heads, H), (B, T, heads, H), (B, T, heads), (heads, 2)]
    return [rng.standard_normal(s, np.float32) for s in shapes] + [rng.random(heads, np.float32) / 10]


def outputs_and_gradients(function, order, mask, heads):
    """Returns out, lse and every gradient, in the original order of the sequence."""
    *arrays, sinks, slopes = drawn(*heads)
    options = {n: order.permute(x) if n.endswith("segment_ids") else x for n, x in MASKS[mask].items()}
    floats = {}
    if "softmax_aux" in options:
        floats["softmax_aux"] = sinks[:, 0] if options.pop("softmax_aux") == 1 else sinks
    if options.pop("alibi_slopes", 0):
        floats["alibi_slopes"] = slopes
    if "prefix" in options:
        options["mask_info"] = MaskInfo(prefix_lengths=jnp.asarray(options.pop("prefix"), jnp.int32))

    @jax.jit
    def run(q, k, v, d_out, d_lse, floats):
        (out, lse), pull = jax.vjp(
            lambda q, k, v, f: function(q, k, v, **f, **options, return_lse=True), q, k, v, floats
        )
        # A row with no key has lse -inf; its cotangent must not matter.
        return out, lse, *pull((d_out, jnp.where(jnp.isfinite(lse), d_lse, 0)))

    *results, others = run(*(order.permute(x) for x in arrays), floats)
    return [order.inverse(np.asarray(x)) for x in results] + [np.asarray(others[n]) for n in sorted(others)]


@functools.cache
def on_one_device(mask, heads):
    return outputs_and_gradients(flash_attention, Order("contiguous", 1), mask, heads)


def assert_close(got, want, what):
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        assert np.array_equal(np.isfinite(g), np.isfinite(w)), (what, i)
        scale = max(1.0, float(np.abs(w[np.isfinite(w)]).max()))
        np.testing.assert_allclose(g, w, rtol=2e-5, atol=1e-5 * scale, err_msg=f"{what}, array {i}")


def check(row):
    cp, sp, tp = row["mesh"]
    order = Order(row["order"], cp * sp)
    scheme = Ulysses(row["outer"], row["groups"])
    split = functools.partial(ring_attention, mesh=make_mesh(cp=cp, sp=sp, tp=tp), order=order, scheme=scheme)
    got = outputs_and_gradients(split, order, row["mask"], row["heads"])
    assert_close(got, on_one_device(row["mask"], row["heads"]), name_of(row))


@pytest.mark.parametrize("row", list(rows()))
def test_the_numbers_of_one_device(row):
    """Of every pair of factors; the whole product is `python tests/test_ulysses.py [PART/PARTS]`."""
    check(row)


def test_the_rows_have_every_pair():
    rows = covering()
    for factor, values in FACTORS.items():
        assert {row[factor] for row in rows[:QUICK]} == {*values[: QUICK if factor == "mask" else None]}, factor
    assert set().union(*map(pairs_of, rows)) == set().union(*map(pairs_of, whole()))


if __name__ == "__main__":
    number, parts = map(int, (sys.argv[1:] or ["1/1"])[0].split("/"))
    for i, one in enumerate(whole()):
        if i % parts == number - 1:
            check(one)
            jax.clear_caches()
            print(name_of(one), flush=True)
