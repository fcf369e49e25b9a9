"""Heads in groups over one axis of the sequence, another scheme over the axis before it: the numbers of one device."""

import functools
import itertools
import random
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Var, jaxprs_in_params

from ejdist import Order, make_mesh, ring_attention
from ejdist.sequence import AllGather, Ring, Ulysses
from ejdist.sequence.cost import AttentionShape
from ejdist.sequence.schemes import scheme_of
from kernels import MaskInfo, flash_attention

B, T, H = 2, 64, 8
IDS = np.sort(np.random.default_rng(1).integers(0, 5, (B, T)), axis=1)
IDS[:, T - 5 :] = -1
PACKED = {"q_segment_ids": IDS, "kv_segment_ids": IDS}
MASKS = {
    "causal": {"causal": True},
    "full": {},
    "two_sided_window": {"sliding_window": (6, 3)},
    "dropout": {"causal": True, "dropout_prob": 0.3, "dropout_seed": 7, **PACKED},
    "packed_chunk": {"causal": True, "chunk_size": 6, **PACKED},
    "packed_sink_window": {"causal": True, "sliding_window": 5, "sink_tokens": 2, **PACKED},
    "sinks_packed": {"causal": True, "softmax_aux": 2, **PACKED},
    "soft_cap": {"causal": True, "logits_soft_cap": 1.5, "softmax_scale": 0.9},
    "packed": {"causal": True, **PACKED},
    "alibi": {"causal": True, "alibi_slopes": 1, **PACKED},
    "prefix": {"causal": True, "sliding_window": (9, None), "prefix": [40, 3]},
    "all_of_a_head": {"causal": True, "softmax_aux": 1, "alibi_slopes": 1, "dropout_prob": 0.2, "dropout_seed": 3},
    "window": {"causal": True, "sliding_window": 9},
    "chunk": {"causal": True, "chunk_size": 12},
    "packed_full": PACKED,
    "packed_window": {"causal": True, "sliding_window": 5, **PACKED},
}
FIRST = 12  # rows: one for each of the masks from the first on
# Of which these are quick: with segments, sinks and seeds, and with all factors but one of their other values.
QUICK = ("packed_chunk", "sinks_packed")
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
        light = [row for row in some if turn or row["groups"] < 3 or row["mesh"] == MESHES[0]]
        rows.append(max(filter(legal, light), key=lambda row: len(pairs_of(row) - seen)))
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
        yield pytest.param(row, id=name_of(row), marks=() if i < FIRST and row["mask"] in QUICK else pytest.mark.slow)


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
        assert {row[factor] for row in rows[:FIRST]} == {*values[: FIRST if factor == "mask" else None]}, factor
    assert set().union(*map(pairs_of, rows)) == set().union(*map(pairs_of, whole()))


SHAPE = AttentionShape((("sp", 2),), 1, 800, 400, 400, 800, 16, 8, 4, 2)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: Ulysses("ring"), ["'outer'", "'ring'", "Ring()"]),
        (lambda: Ulysses(head_groups=0), ["sequence.head_groups = 0", "at least 1"]),
        (
            lambda: scheme_of("ring", head_groups=2),
            ["sequence.head_groups = 2", "'ring'", "sequence.scheme=all_gather or ulysses"],
        ),
        (lambda: scheme_of("all_gather", outer="ring"), ["sequence.outer = 'ring'", "'all_gather'"]),
        (
            lambda: call_of(Ulysses(head_groups=3), 8, sp=2),
            ["ring_attention: 8 heads over sp=2 are 4", "head_groups=2"],
        ),
        (lambda: call_of(Ulysses(), 12, sp=8), ["12 heads on a device", "sp=8", "mesh.sp=4 mesh.cp=2", "'ring'"]),
        (lambda: call_of(Ulysses(), 12, sp=4, cp=2), None),
        (lambda: call_of(Ulysses(), 6, sp=4, cp=2), ["6 heads on a device", "mesh.sp=2 mesh.cp=4"]),
        (lambda: call_of(Ulysses(), 3, sp=4, cp=2), ["3 heads", "a divisor of 3", "use scheme 'ring'"]),
    ],
)
def test_what_is_refused_names_the_nearest(call, words):
    """When it is traced, and by `rejects` before."""
    if words is None:
        assert call() is not None
        return
    with pytest.raises(ValueError) as error:
        call()
    assert all(word in str(error.value) for word in words), error.value


def call_of(scheme, heads, **sizes):
    over = tuple((axis, sizes[axis]) for axis in ("cp", "sp") if axis in sizes)
    q = jax.ShapeDtypeStruct((1, 32, heads, 8), jnp.float32)
    split = functools.partial(ring_attention, mesh=make_mesh(**sizes), scheme=scheme)
    assert (scheme.rejects(heads, over) is None) == (
        heads % sizes["sp"] == 0 and heads // sizes["sp"] % scheme.head_groups == 0
    )
    return jax.eval_shape(split, q, q, q)


def test_no_more_than_two_groups_are_held():
    one, two, four = (Ulysses(head_groups=n).memory(SHAPE).work for n in (1, 2, 4))
    assert one == 800 + 2 * 400 + 800 + 2 * 16
    # Two heads of keys on a rank: four groups of queries have one of them in turn.
    assert two == one and four == 2 * (200 + 2 * 200 + 200 + 2 * 4)


def has(jaxpr, name):
    return any(
        eqn.primitive.name == name or any(has(inner, name) for inner in jaxprs_in_params(eqn.params))
        for eqn in jaxpr.eqns
    )


def waiting(jaxpr):
    """Returns of every all-to-all in turn the numbers of the attentions that it waits for, by the data that it needs."""
    inside = [inner for eqn in jaxpr.eqns for inner in jaxprs_in_params(eqn.params) if has(inner, "all_to_all")]
    if inside:
        return [n for inner in inside for n in waiting(inner)]
    behind, found, attentions = {}, [], itertools.count()
    for eqn in jaxpr.eqns:
        needed = set().union(*(behind.get(v, set()) for v in eqn.invars if isinstance(v, Var)))
        if eqn.primitive.name == "jit" and "hop" in str(eqn.source_info.name_stack):
            needed = needed | {next(attentions)}
        if eqn.primitive.name == "all_to_all":
            found.append({*needed})
        behind |= dict.fromkeys(eqn.outvars, needed)
    return found


def test_a_group_is_exchanged_beside_the_attention_of_the_one_before():
    """And waits for the one before that. Two groups of queries have the same heads of keys."""
    how = {"scheme": Ulysses(head_groups=4), "mesh": make_mesh(sp=4), "order": "zigzag"}
    shapes = [jax.ShapeDtypeStruct((1, 64, heads, 8), jnp.bfloat16) for heads in (16, 8, 8)]
    program = jax.make_jaxpr(functools.partial(ring_attention, causal=True, **how))(*shapes)
    # Query, key and value; query; and the same of the other heads of keys; then what comes back.
    assert waiting(program.jaxpr)[:8] == [set()] * 4 + [{0}] * 3 + [{1}]


if __name__ == "__main__":
    number, parts = map(int, (sys.argv[1:] or ["1/1"])[0].split("/"))
    for i, one in enumerate(whole()):
        if i % parts == number - 1:
            check(one)
            jax.clear_caches()
            print(name_of(one), flush=True)


def test_nothing_comes_of_what_lies_in_padding():
    """It is zero before heads are exchanged: no kernel zeroes it again, in another copy of all tokens."""
    order, rng = Order("zigzag", 4), np.random.default_rng(0)
    arrays = [rng.standard_normal((B, T, heads, H)).astype(np.float32) for heads in (4, 4, 4, 4)]
    ids = order.permute(IDS)
    attend = functools.partial(ring_attention, mesh=make_mesh(sp=4), order=order, scheme="ulysses", causal=True)

    @jax.jit
    def run(q, k, v, d_out):
        out, pull = jax.vjp(lambda *a: attend(*a, q_segment_ids=ids, kv_segment_ids=ids), q, k, v)
        return out, *pull(d_out)

    made = [
        run(*(np.where((ids < 0)[..., None, None], fill, order.permute(x)) for x in arrays)) for fill in (0.0, np.nan)
    ]
    for zeros, lost in zip(*made, strict=True):
        np.testing.assert_array_equal(zeros[ids >= 0], lost[ids >= 0])
        assert np.isfinite(zeros[ids >= 0]).all()
