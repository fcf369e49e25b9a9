"""The key range of a mask, and the tiles that follow from it, against the dense mask: for each rule by itself, and together."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejdist.order import Order
from ejdist.sequence.schedule import needed
from ejdist.training.flops import visible_pairs as pairs_of_documents
from kernels import MaskInfo
from kernels.engines.attention.masks import MASK_DIMS, MASK_FEATURES, key_range
from kernels.engines.attention.pairs import keys_of_causal, visible_pairs
from kernels.engines.attention.ranges import EXAMPLES, RULES, Edge, Interval, KeyRange, ends_at, interval_of, visible
from kernels.engines.attention.tiles import FIRST, FULL_FIRST, FULL_LAST, LAST, active_tiles, listed, meetings, spans

T, S = 40, 56
# What shows each rule: fields that are static, and arrays that it reads. A rule without an example here fails a test.
STATIC = EXAMPLES | {
    "causal": {"causal": True},
    "window alone": {"window": (9, 0)},
    "open window": {"window": (None, 3)},
    "two sides": {"window": (7, 12)},
    "chunk alone": {"chunk_size": 12},
    "chunk under a window": {"chunk_size": 24, "window": (9, 4)},
    "sinks in a chunk": {"chunk_size": 24, "window": (4, 2), "sink_tokens": 6},
    "more sinks than a window hides": {"causal": True, "window": (4, 0), "sink_tokens": 30},
    "causal chunk": {"causal": True, "chunk_size": 12},
}
DATA = {
    "prefix_lengths": {"causal": True, "prefix_lengths": jnp.asarray([0, 21])},
    "sink ends": {"window": (4, 0), "sink_tokens": 3, "q_sink_ends": jnp.arange(T)[None] // 8},
    "prefix in a window": {"causal": True, "window": (9, 5), "prefix_lengths": jnp.asarray([30, 21])},
}
MASKS = {name: MaskInfo(**fields) for name, fields in (STATIC | DATA).items()} | {"none": MaskInfo()}
RULES_AND_DATA = {name for rule in RULES for name in rule.fields}


def packed(mask):
    ids = np.repeat(np.arange(4), 14)[None] + np.zeros((2, 1), int)
    ids[1, 5:19], ids[0, -3:] = -1, -1
    return mask.combine(MaskInfo.from_segments(ids[:, -T:], ids))


def shuffled(mask):
    rng = np.random.default_rng(3)
    return mask.permute(rng.permutation(T), rng.permutation(S))


FORMS = {"in order": lambda mask: mask, "packed": packed, "shuffled": shuffled}


TILES = ((8, 8), (12, 8), (16, 64))
# One program for each kind of mask: op by op, every rule would be a hundred small ones.
_visible = jax.jit(lambda mask: mask.visible(T, S))


def _tiles(mask):
    """Returns what holds of each size of tiles: (tiles that are active, (visited, full), (spans by query, by key))."""
    keys = mask.key_range(T, S)
    return [(active_tiles(keys, *tile), meetings(keys, *tile), spans(mask, T, S, *tile)) for tile in TILES]


def dense(mask):
    return np.broadcast_to(np.asarray(_visible(mask)), (2, 1, T, S))[:, 0]


def tiled(seen, q_tile, kv_tile, fill):
    """Returns [B, query tiles, key tiles, q_tile * kv_tile] of [B, T, S]."""
    pad = [(0, -n % tile) for n, tile in zip(seen.shape[1:], (q_tile, kv_tile), strict=True)]
    seen = np.pad(seen, [(0, 0), *pad], constant_values=fill)
    rows, columns = seen.shape[1] // q_tile, seen.shape[2] // kv_tile
    seen = seen.reshape(-1, rows, q_tile, columns, kv_tile)
    return seen.transpose(0, 1, 3, 2, 4).reshape(-1, rows, columns, q_tile * kv_tile)


def test_every_rule_and_every_field_of_one_has_an_example():
    assert {name for mask in MASKS.values() for name in mask.used} == RULES_AND_DATA
    for rule in RULES:
        assert rule.fields[0] in MASK_FEATURES and rule.fields[0] not in MASK_DIMS, rule.fields


@pytest.mark.parametrize("name", MASKS)
def test_ends_never_decrease_and_are_static_where_the_rules_are(name):
    mask, at = MASKS[name], np.arange(-20, 60)[None]
    interval = interval_of(mask, at)
    for end in (interval.low, interval.high):
        if end is not None:
            found = np.asarray(
                np.broadcast_to(ends_at(end, at), np.broadcast_shapes(at.shape, np.shape(ends_at(end, at))))
            )
            assert (np.diff(found, axis=1) >= 0).all()
    keys = mask.key_range(T, S)
    for end in (getattr(keys, field) for field in Interval._fields):
        if name in STATIC:  # nothing to be read when the program runs
            assert end is None or isinstance(end, (Edge, np.ndarray))
        if "chunk" not in name and name not in DATA:  # and nothing to be stored in it
            assert end is None or isinstance(end, Edge)
    assert keys.is_open == (name == "none")


def test_causal_and_a_window_are_compiled_in():
    assert MaskInfo(causal=True, window=(9, 5)).key_range(T, S)[2:] == (Edge(-9), Edge(0), *(None,) * 5)
    assert MaskInfo(causal=True, chunk_size=8).key_range(T, T).high == Edge(0)  # what the chunk says of it is no news
    assert MaskInfo(chunk_size=64).key_range(T, T)[2:4] == (Edge(0, moves=False), Edge(63, moves=False))


@pytest.mark.parametrize(
    ("name", "form"),
    [
        # Each mask in order, and in one of the other forms.
        pytest.param(name, form, marks=() if i == 0 or (i + j) % 2 else pytest.mark.slow)
        for j, name in enumerate(MASKS)
        for i, form in enumerate(FORMS)
    ],
)
def test_tiles_and_pairs_are_those_of_the_dense_mask(name, form):
    """What is not visited nobody sees, what is full everybody does; in order, exactly those."""
    mask = FORMS[form](MASKS[name])
    seen = dense(mask)
    assert visible_pairs(mask, 2, 1, T, S) == seen.sum()
    found = jax.jit(_tiles)(mask) if mask.data_fields else _tiles(mask)
    for (q_tile, kv_tile), (active, met, spanned_both_ways) in zip(TILES, found, strict=True):
        some = tiled(seen, q_tile, kv_tile, False).any(-1)
        every = tiled(seen, q_tile, kv_tile, True).all(-1)
        assert (np.asarray(active) | ~some.any(0)).all()
        visited, full = (np.broadcast_to(x, some.shape) for x in met)
        assert (visited | ~some).all() and (every | ~full).all() and (visited | ~full).all()
        if form == "in order":  # but for a last tile of keys that is cut
            assert (visited == some).all() and (full == every)[..., : S // kv_tile].all()
        by_query, by_key = (np.broadcast_to(x, (2, *x.shape[1:])) for x in spanned_both_ways)
        for spanned, there, whole in (
            (by_query, visited, full),
            (by_key, visited.swapaxes(1, 2), full.swapaxes(1, 2)),
        ):
            for b, i in itertools.product(range(2), range(there.shape[1])):
                at, (first, full_first, full_last, last) = np.flatnonzero(there[b, i]), spanned[b, i]
                assert (first, last) == ((at[0], at[-1] + 1) if at.size else (first, first))
                assert whole[b, i, full_first:full_last].all() and (full_last > full_first) == whole[b, i].any()


def test_a_list_has_what_is_set_in_ascending_order():
    some = np.random.default_rng(0).random((2, 3, 8)) < 0.5
    some[0, 1] = False
    for there in (some, jnp.asarray(some)):
        index, count = listed(there)
        assert type(index) is type(count) is type(there) or isinstance(there, jax.Array)  # a constant stays one
        for at in np.ndindex(2, 3):
            np.testing.assert_array_equal(index[at][: count[at]], np.flatnonzero(some[at]))


def test_a_dense_mask_is_never_full():
    mask = MaskInfo(causal=True, attention_mask=jnp.ones((1, 1, T, S), bool))
    some, every = meetings(mask.key_range(T, S), 8, 8)
    assert not np.asarray(every).any() and np.asarray(some).any()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", MASKS)
def test_a_loosened_mask_hides_nothing_more(name, form):
    """Whatever the arrays hold that are not known, the rules that are left let through all that the mask does."""
    mask = FORMS[form](MASKS[name])
    for unknown in (mask.data_fields, mask.data_fields[:1], mask.data_fields[-1:]):
        loose = mask.loosened(unknown)
        assert not set(loose.used) & set(unknown)
        assert (dense(loose) | ~dense(mask)).all()
    assert MASKS["causal"].loosened(()) == MASKS["causal"]


@pytest.mark.parametrize(
    "order", [("contiguous", 4), ("zigzag", 4), ("striped", 4), ("striped", 4, 2), ("striped", 4, 8)]
)
@pytest.mark.parametrize("name", STATIC)
def test_the_ring_the_planner_and_flops_count_by_the_same_range(name, order):
    mask, order, length = MaskInfo(**STATIC[name]), Order(*order), 64
    at = order.indices(length)
    seen = np.asarray(mask.visible(length, length))[0, 0][at][:, at]
    joined = seen.reshape(4, 16, 4, 16).any((1, 3))
    asked = needed(order, length, mask)
    assert (asked | ~joined).all()
    assert (asked == joined).all()
    below = np.asarray(mask.combine(MaskInfo(causal=True)).visible(length, length))[0, 0]
    np.testing.assert_array_equal(keys_of_causal(mask, length), below.sum(1))
    assert (
        pairs_of_documents(np.repeat([[0, 1]], [20, 44], axis=1), mask) == below[:20, :20].sum() + below[:44, :44].sum()
    )


def test_a_range_is_made_without_a_square_of_memory():
    """Traced positions, segments and prefixes: O(S) arrays, and tiles of their bounds."""
    at = jax.ShapeDtypeStruct((1, 32768), jnp.int32)

    def maps(at, prefix):
        mask = MaskInfo(q_positions=at, kv_positions=at, causal=True, prefix_lengths=prefix, chunk_size=8192)
        return meetings(key_range(mask, 32768, 32768), 256, 256)

    used = jax.jit(maps).lower(at, jax.ShapeDtypeStruct((1,), jnp.int32)).compile().memory_analysis()
    assert used.temp_size_in_bytes < 32768 * 200


def test_a_gap_hides_the_keys_in_it():
    """Positions from gap_low to gap_high, of queries that move and of arrays, alike in a pair, a tile and the count."""
    at = np.arange(32, dtype=np.int32)[None]
    three, behind = np.full(32, 3), np.arange(32) - 6
    for low, high, a, b in (
        (Edge(3, moves=False), Edge(-6), three, behind),
        (three[None], behind[None], three, behind),
        (Edge(-9), Edge(-4), behind - 3, behind + 2),
    ):
        keys = KeyRange(at, at, high=Edge(0), gap_low=low, gap_high=high)
        seen = np.asarray(visible(keys))[0]
        j = np.arange(32)
        np.testing.assert_array_equal(seen, (j <= j[:, None]) & ((j < a[:, None]) | (j > b[:, None])))
        some, every = (x[0] for x in (tiled(seen[None], 4, 4, False).any(-1), tiled(seen[None], 4, 4, False).all(-1)))
        visited, full = (x[0] for x in meetings(keys, 4, 4))
        assert (visited | ~some).all() and (full == every).all()
        # No tile in the middle of the gap is visited.
        assert (visited.sum(1) <= some.sum(1) + 1).all()
    assert FIRST < FULL_FIRST < FULL_LAST < LAST
