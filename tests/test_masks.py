"""MaskInfo against pair-by-pair loops: what is visible, what is joined, which blocks may be skipped."""

import functools

import attention_loop as loop
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejdist
import kernels
from kernels.engines.attention.masks import MaskInfo, map_data, window_of
from kernels.engines.attention.pairs import visible_pairs
from kernels.engines.attention.tiles import active_tiles
from kernels.framework import segments
from kernels.ops.flash_attention import flash_attention

T, S = 19, 26


def some_mask(seed, positions=True):
    """Returns a mask with each field there or not, by the seed; and the query and key lengths."""
    rng = np.random.default_rng(seed)
    t, s = (T, S) if rng.random() < 0.5 else (S, S)
    fields = {"causal": bool(rng.random() < 0.6)}
    if rng.random() < 0.5:
        fields["window"] = tuple(None if rng.random() < 0.3 else int(rng.integers(0, 9)) for _ in range(2))
    if rng.random() < 0.5:
        fields["chunk_size"] = int(rng.integers(2, 8))
    if rng.random() < 0.6:
        k = np.sort(rng.integers(0, 4, (2, s)), axis=1)
        k[rng.random((2, s)) < 0.1] = -1
        fields["kv_segment_ids"] = jnp.asarray(k)
        fields["q_segment_ids"] = jnp.asarray(k if t == s else np.sort(rng.integers(-1, 4, (2, t)), axis=1))
    if positions and rng.random() < 0.4:
        at = rng.permutation(s)[None].astype(np.int32)
        fields["q_positions"], fields["kv_positions"] = jnp.asarray(at[:, :t]), jnp.asarray(at)
    if rng.random() < 0.3:
        fields["prefix_lengths"] = jnp.asarray(rng.integers(0, s, 2))
    if rng.random() < 0.3:
        fields["attention_mask"] = jnp.asarray(rng.random((2, 3, 1, s)) < 0.7)
    if rng.random() < 0.5:
        fields["sink_tokens"] = int(rng.integers(1, 4))
    return MaskInfo(**fields), t, s


# One program for each kind of mask: op by op, every rule would be a hundred small ones.
_visible = jax.jit(MaskInfo.visible, static_argnums=(1, 2))


def dense(mask, t, s):
    return np.broadcast_to(np.asarray(_visible(mask, t, s)), (2, 3, t, s))


BLOCKS = ((4, 4), (8, 3), (1, 1), (64, 64))
SEEDS = pytest.mark.parametrize("seed", [*range(12), *(pytest.param(i, marks=pytest.mark.slow) for i in range(12, 24))])


def _active(mask, t, s):
    keys = mask.key_range(t, s)
    return [active_tiles(keys, *block) for block in BLOCKS]


@SEEDS
def test_visible_is_what_the_fields_say(seed):
    mask, t, s = some_mask(seed)
    mask.check(2, t, s, 3)
    np.testing.assert_array_equal(dense(mask, t, s), loop.visible(mask, 2, 3, t, s))


@SEEDS
def test_an_inactive_block_hides_every_pair(seed):
    """Never a block skipped that has a visible pair; with tokens in their order, never one kept that has none."""
    mask, t, s = some_mask(seed)
    seen = dense(mask, t, s).any((0, 1))
    found = jax.jit(_active, static_argnums=(1, 2))(mask, t, s) if mask.data_fields else _active(mask, t, s)
    for (q_block, kv_block), active in zip(BLOCKS, map(np.asarray, found), strict=True):
        for a in range(active.shape[0]):
            for b in range(active.shape[1]):
                pairs = seen[a * q_block : (a + 1) * q_block, b * kv_block : (b + 1) * kv_block]
                assert active[a, b] or not pairs.any(), (q_block, kv_block, a, b)


IN_ORDER = {
    "causal": MaskInfo(causal=True),
    "window": MaskInfo(causal=True, window=(9, 0)),
    "two sides": MaskInfo(window=(3, 5)),
    "chunk": MaskInfo(causal=True, chunk_size=6),
    "packed": MaskInfo.from_segments([[0] * 7 + [1] * 11 + [2] * 6 + [-1] * 8], causal=True),
    "dense": MaskInfo(attention_mask=(jnp.arange(32)[:, None] // 5 == jnp.arange(32)[None] // 7)[None, None]),
}


@pytest.mark.parametrize("name", IN_ORDER)
def test_with_tokens_in_order_exactly_the_hidden_blocks_are_skipped(name):
    mask = IN_ORDER[name]
    seen = np.asarray(mask.visible(32, 32))[0, 0]
    for block in (4, 8):
        wanted = seen.reshape(32 // block, block, 32 // block, block).any((1, 3))
        np.testing.assert_array_equal(np.asarray(active_tiles(mask.key_range(32, 32), block, block)), wanted)
        assert not wanted.all()


def test_the_pattern_of_a_static_mask_is_a_constant():
    assert isinstance(
        active_tiles(MaskInfo(causal=True, window=(5, 0), chunk_size=4).key_range(64, 64), 8, 8), np.ndarray
    )
    # The number of blocks grows with the length, not with its square.
    counts = [
        active_tiles(MaskInfo(causal=True, window=(1023, 0)).key_range(n, n), 256, 256).sum() for n in (4096, 8192)
    ]
    assert counts[1] - 2 * counts[0] == 10 and counts[0] == 16 * 5 - 10


def test_block_bounds_of_traced_masks_take_no_square_of_memory():
    ids = jax.ShapeDtypeStruct((1, 65536), jnp.int32)

    def blocks(ids):
        mask = MaskInfo(q_segment_ids=ids, kv_segment_ids=ids, causal=True, window=(99, 0), chunk_size=512)
        return active_tiles(mask.key_range(65536, 65536), 256, 256)

    used = jax.jit(blocks).lower(ids).compile().memory_analysis()
    assert used.temp_size_in_bytes < 65536 * 200  # a dense mask would be 65536 bytes a token


@pytest.mark.parametrize("seed", range(12))
def test_combined_masks_are_the_conjunction(seed):
    a, t, s = some_mask(seed, positions=False)
    b, *lengths = some_mask(100 + seed, positions=False)
    if lengths != [t, s]:
        b = MaskInfo(causal=b.causal, window=b.window)
    # A prefix softens the causality of the whole, sink tokens its window, and chunks restart in the segments of the whole:
    # tested on their own.
    packed = a.q_segment_ids is not None or b.q_segment_ids is not None
    a = a.replace(prefix_lengths=None, sink_tokens=None, chunk_size=None if packed else a.chunk_size)
    b = b.replace(
        prefix_lengths=None, sink_tokens=None, chunk_size=None if packed or a.chunk_size is None else 2 * a.chunk_size
    )
    for one, other in ((a, b), (b, a)):
        wanted = dense(a, t, s) & dense(b, t, s)
        np.testing.assert_array_equal(dense(one.combine(other), t, s), wanted)


def test_combining_prefixes_chunks_and_positions():
    causal, prefix = MaskInfo(causal=True), MaskInfo(prefix_lengths=jnp.asarray([5]))
    np.testing.assert_array_equal(
        causal.combine(prefix).visible(8, 8)[0, 0], np.tril(np.ones((8, 8))) + (np.arange(8) < 5) > 0
    )
    packed = MaskInfo.from_segments([[0, 0, 0, 1, 1, 1]]).combine(MaskInfo(chunk_size=2))
    wanted = [[1, 1, 0], [1, 1, 0], [0, 0, 1]]
    np.testing.assert_array_equal(packed.visible(6, 6)[0, 0], np.kron(np.eye(2), wanted))
    assert MaskInfo(chunk_size=8).combine(MaskInfo(chunk_size=4)).chunk_size == 4
    assert MaskInfo(window=(5, None)).combine(MaskInfo(window=(9, 2))).window == (5, 2)
    at = MaskInfo(q_positions=jnp.arange(4)[None], kv_positions=jnp.arange(4)[None])
    with pytest.raises(ValueError, match="'q_positions' was given twice"):
        at.combine(MaskInfo(q_positions=jnp.arange(4)[None], kv_positions=jnp.arange(4)[None]))
    with pytest.raises(ValueError, match="'chunk_size' was given twice"):
        MaskInfo(chunk_size=8).combine(MaskInfo(chunk_size=6))
    with pytest.raises(ValueError, match="'kv_segment_ids' must be given together"):
        MaskInfo(q_segment_ids=jnp.zeros((1, 4), int)).combine(MaskInfo(causal=True))


def test_large_segment_ids_do_not_collide_when_joined():
    big = jnp.asarray([[2**31 - 1, 2**31 - 2, 2**30, 2**31 - 1]])
    mask = MaskInfo.from_segments(big).combine(MaskInfo.from_segments(big[:, ::-1]))
    np.testing.assert_array_equal(mask.visible(4, 4)[0, 0], [[1, 0, 0, 1], [0, 1, 0, 0], [0, 0, 1, 0], [1, 0, 0, 1]])


@pytest.mark.parametrize("seed", range(8))
def test_permuted_tokens_see_what_they_saw(seed):
    mask, t, s = some_mask(seed)
    rng = np.random.default_rng(seed)
    q, k = rng.permutation(t), rng.permutation(s)
    np.testing.assert_array_equal(dense(mask.permute(q, k), t, s), dense(mask, t, s)[:, :, q][..., k])


def test_resolved_in_a_permuted_order():
    ids = jnp.asarray([[0] * 9 + [1] * 12 + [2] * 5])
    mask = MaskInfo.from_segments(ids, causal=True, chunk_size=4)
    order = np.random.default_rng(0).permutation(26)
    at = jnp.asarray(order)[None]
    shuffled = MaskInfo.from_segments(ids[:, order], causal=True, chunk_size=4).resolved(order)
    shuffled = shuffled.replace(q_positions=at, kv_positions=at)
    np.testing.assert_array_equal(shuffled.visible(26, 26)[0, 0], mask.visible(26, 26)[0, 0][order][:, order])


def test_windows():
    assert window_of(None) is None
    assert window_of(4) == (3, 0) and window_of(np.int64(1)) == (0, 0)
    assert window_of((4, None)) == (4, None) and window_of([0, 2]) == (0, 2)
    for wrong in (0, -1, True, 2.0, (1,), (1, 2, 3), (-1, 0), "4"):
        with pytest.raises(ValueError, match="sliding_window"):
            window_of(wrong)
    # W keys, itself among them: neither W - 1 nor W + 1.
    seen = MaskInfo(causal=True, window=window_of(5)).visible(20, 20)[0, 0]
    np.testing.assert_array_equal(seen.sum(-1), np.minimum(np.arange(20) + 1, 5))


def test_the_first_tokens_stay_visible_beside_a_window():
    i, j = np.arange(12)[:, None], np.arange(12)[None]
    wanted = (j <= i) & ((i - j < 4) | (j < 2))
    sinks = MaskInfo(sink_tokens=2)
    np.testing.assert_array_equal(MaskInfo(causal=True, window=(3, 0), sink_tokens=2).visible(12, 12)[0, 0], wanted)
    np.testing.assert_array_equal(sinks.combine(MaskInfo(causal=True, window=(3, 0))).visible(12, 12)[0, 0], wanted)
    np.testing.assert_array_equal(MaskInfo(causal=True, window=(3, 0)).combine(sinks).visible(12, 12)[0, 0], wanted)
    assert sinks.combine(MaskInfo(sink_tokens=5)).sink_tokens == 2
    # Of packed sequences those of each, wherever it lies; where positions are given, those at positions below 2.
    ids = jnp.asarray([[0] * 2 + [1] * 10])
    packed = MaskInfo.from_segments(ids, causal=True, window=(3, 0), sink_tokens=2)
    alone = [np.asarray(MaskInfo(causal=True, window=(3, 0), sink_tokens=2).visible(n, n))[0, 0] for n in (2, 10)]
    wanted = np.zeros((12, 12), bool)
    wanted[:2, :2], wanted[2:, 2:] = alone
    np.testing.assert_array_equal(packed.visible(12, 12)[0, 0], wanted)
    at = jnp.asarray([[0, 1, *range(10)]])
    np.testing.assert_array_equal(packed.replace(q_positions=at, kv_positions=at).visible(12, 12)[0, 0], wanted)
    assert packed.resolved().resolved().q_sink_ends.tolist() == [[2**30] * 2 + [4] * 10]
    x = jnp.ones((1, 12, 1, 8))
    with pytest.raises(ValueError, match="'sink_tokens' = 2 keeps tokens visible in addition to a window"):
        kernels.flash_attention(x, x, x, causal=True, sink_tokens=2)


def test_causal_is_bottom_right_aligned_unless_positions_say_otherwise():
    more_keys = np.asarray(MaskInfo(causal=True).visible(3, 5)[0, 0])
    np.testing.assert_array_equal(more_keys, np.tril(np.ones((3, 5)), 2))
    fewer_keys = np.asarray(MaskInfo(causal=True).visible(5, 3)[0, 0])
    assert not fewer_keys[:2].any() and fewer_keys[4].all()
    at = MaskInfo(causal=True, q_positions=jnp.arange(3)[None], kv_positions=jnp.arange(5)[None])
    np.testing.assert_array_equal(at.visible(3, 5)[0, 0], np.tril(np.ones((3, 5))))


def test_from_attention_mask():
    real = np.array([[1, 1, 1, 0], [1, 0, 0, 0]])
    seen = np.asarray(MaskInfo.from_attention_mask(real).visible(4, 4))[:, 0]
    np.testing.assert_array_equal(seen, real[:, :, None] & real[:, None] > 0)
    pairs = np.random.default_rng(0).random((2, 4, 5)) < 0.5
    np.testing.assert_array_equal(MaskInfo.from_attention_mask(pairs).visible(4, 5)[:, 0], pairs)
    np.testing.assert_array_equal(MaskInfo.from_attention_mask(pairs[:, None]).visible(4, 5)[:, 0], pairs)
    for wrong, words in ((np.ones((2, 4)), "boolean"), (np.ones(4, bool), r"\[B, S\]")):
        with pytest.raises(ValueError, match=f"'attention_mask' must be .*{words}"):
            MaskInfo.from_attention_mask(wrong)


def test_from_cu_seqlens():
    cut = functools.partial(MaskInfo.from_cu_seqlens, jnp.asarray([0, 3, 3, 7]), 9)
    np.testing.assert_array_equal(cut().q_segment_ids, [[0, 0, 0, 2, 2, 2, 2, -1, -1]])
    cross = cut(jnp.asarray([0, 1, 5, 10]), 11, causal=True)
    seen = np.asarray(cross.visible(9, 11))[0, 0]
    wanted = np.zeros((9, 11), bool)
    wanted[2, 0] = True  # three queries, one key: only the last sees it
    wanted[3:7, 5:10] = np.tril(np.ones((4, 5)), 1)
    np.testing.assert_array_equal(seen, wanted)
    for wrong in (jnp.asarray([4]), jnp.ones((2, 2), int), jnp.asarray([0.0, 4.0])):
        with pytest.raises(ValueError, match="cum_seqlens_q"):
            MaskInfo.from_cu_seqlens(wrong, 9)
    with pytest.raises(ValueError, match="'cum_seqlens_k'"):
        cut(jnp.asarray([0, 9]), 9)


def test_chunks_of_cut_sequences_are_counted_inside_each_whoever_asks_for_them():
    cuts, C = ([0, 3, 5, 9], [0, 4, 9, 10]), 3
    wanted = np.zeros((10, 11), bool)
    for q, q_end, k, k_end in zip(cuts[0], cuts[0][1:], cuts[1], cuts[1][1:]):
        for i, j in np.ndindex(q_end - q, k_end - k):
            at = i + (k_end - k) - (q_end - q)  # the last query is at the last key
            wanted[q + i, k + j] = j <= at and at // C == j // C
    cut, rule = functools.partial(MaskInfo.from_cu_seqlens, cuts[0], 10, cuts[1], 11), MaskInfo(chunk_size=C)
    causal = cut(causal=True)
    ways = {
        "given there": cut(causal=True, chunk_size=C),
        "combined": causal.combine(rule),
        "combined with": rule.combine(causal),
        "in two steps": causal.combine(MaskInfo(window=(99, 99))).combine(rule),
        "as an argument": flash_attention.prepare(
            *[jnp.ones((1, n, 1, 8)) for n in (10, 11, 11)], mask_info=causal, chunk_size=C
        ).call.mask,
    }
    for how, mask in ways.items():
        np.testing.assert_array_equal(_visible(mask, 10, 11)[0, 0], wanted, err_msg=how)
        assert visible_pairs(mask, 1, 1, 10, 11) == wanted.sum(), how
    own = MaskInfo(q_positions=jnp.arange(4)[None] + 1, kv_positions=jnp.arange(4)[None] + 1)
    own = own.combine(MaskInfo.from_segments([[0, 1, 1, 1]])).combine(MaskInfo(chunk_size=2))  # a caller's own decide
    np.testing.assert_array_equal(own.visible(4, 4)[0, 0], [[1, 0, 0, 0], [0, 1, 1, 0], [0, 1, 1, 0], [0, 0, 0, 1]])


def test_a_mask_is_a_pytree_whose_rules_are_static():
    mask = MaskInfo.from_segments(jnp.zeros((2, 6), int), causal=True, window=(3, 0))
    assert len(jax.tree.leaves(mask)) == 2
    traces = []

    @jax.jit
    def see(mask):
        traces.append(mask)
        return mask.visible(6, 6)

    ids = jnp.asarray([[0, 0, 1, 1, -1, -1]] * 2)
    np.testing.assert_array_equal(see(mask), mask.visible(6, 6))
    other = mask.replace(q_segment_ids=ids, kv_segment_ids=ids)
    np.testing.assert_array_equal(see(other), other.visible(6, 6))
    assert len(traces) == 1
    see(mask.replace(causal=False))
    assert len(traces) == 2
    doubled = map_data(mask, lambda name, x: x + (name == "q_segment_ids"))
    assert (doubled.q_segment_ids == 1).all() and (doubled.kv_segment_ids == 0).all() and doubled.window == (3, 0)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"q_segment_ids": jnp.zeros((3, 4), int)}, "'q_segment_ids' must be .2 or 1, 4."),
        ({"kv_positions": jnp.zeros((2, 4), int)}, "'kv_positions' must be .2 or 1, 6."),
        ({"q_positions": jnp.zeros((1, 4), int)}, "'q_positions' and 'kv_positions' must be given together"),
        ({"attention_mask": jnp.zeros((2, 2, 4, 6), bool)}, "'attention_mask' must broadcast"),
        ({"prefix_lengths": jnp.zeros((3,), int)}, "'prefix_lengths'"),
        ({"chunk_size": 0}, "'chunk_size'"),
        ({"chunk_size": 2.0}, "'chunk_size'"),
        ({"sink_tokens": 0}, "'sink_tokens' must be a positive integer"),
        ({"q_sink_ends": jnp.zeros((2, 6), int)}, "'q_sink_ends' must be .2 or 1, 4."),
        ({"window": (-1, 0)}, "'window' must be"),
        ({"window": (1.5, 0)}, "'window' must be"),
        ({"causal": "yes"}, "'causal' must be True or False"),
        # Bits of integers would be taken for truth, and of 2 there is none.
        ({"attention_mask": jnp.full((1, 1, 4, 6), 2)}, "'attention_mask' must be an array of bools, got int32"),
        ({"q_segment_ids": jnp.zeros((2, 4)), "kv_segment_ids": jnp.zeros((2, 6))}, "'q_segment_ids'.*got float32"),
        ({"prefix_lengths": [3, 4]}, "'prefix_lengths' must be an array of integers, got list"),
    ],
)
def test_a_field_that_does_not_fit_is_named(fields, words):
    with pytest.raises(ValueError, match=words):
        MaskInfo(**fields).check(2, 4, 6, 3)


@pytest.mark.parametrize("dtype", ["uint8", "int8", "uint32"])
@pytest.mark.parametrize("array", [np.asarray, jnp.asarray])
def test_positions_of_any_integer_reach_back_below_zero(dtype, array):
    """Less a window, and less one another, those of an unsigned dtype would turn around."""
    at, prefix = np.random.default_rng(0).permutation(120)[None], np.asarray([7])
    rules = {"causal": True, "window": (9, 0), "chunk_size": 300}
    mask = MaskInfo(
        q_positions=array(at, dtype), kv_positions=array(at, dtype), prefix_lengths=array(prefix, dtype), **rules
    )
    want = MaskInfo(q_positions=at, kv_positions=at, prefix_lengths=prefix, **rules)
    np.testing.assert_array_equal(mask.visible(120, 120), want.visible(120, 120))
    distance = [np.abs(q[:, :, None] - k[:, None]) for q, k in (m.positions(120, 120) for m in (mask, want))]
    np.testing.assert_array_equal(*distance)
    assert mask.data_fields == want.data_fields and mask.q_positions.dtype == np.int32
    again = jax.jit(lambda mask: mask.visible(120, 120))(mask)
    np.testing.assert_array_equal(again, want.visible(120, 120))


@pytest.mark.parametrize("dtype", ["int64", "uint32", "uint64"])
def test_segments_past_an_int32_are_no_padding(dtype):
    """As hashes of documents are: cast to an int32 half of them would be negative, and their tokens see nothing."""
    ids = np.repeat(np.asarray([[2**31 + 5, 2**31 + 6]], dtype), 3, axis=1)
    for make in (MaskInfo.from_segments, lambda ids: MaskInfo(q_segment_ids=ids, kv_segment_ids=ids)):
        with pytest.raises(
            ValueError, match="'q_segment_ids' must be at most 2147483647, got 2147483654; renumber them"
        ):
            make(ids)
        with jax.enable_x64(True):
            mask = jax.jit(make)(jnp.asarray(ids))
        assert mask.q_segment_ids.dtype == jnp.int32
        np.testing.assert_array_equal(mask.visible(6, 6)[0, 0], np.kron(np.eye(2), np.ones((3, 3))))
    with jax.enable_x64(True):  # what is negative stays padding, however far below
        ids = jnp.asarray([[-(2**40), -1, 3]])
        assert (MaskInfo.from_segments(ids).q_segment_ids < 0).tolist() == [[True, True, False]]


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_search_finds_what_that_of_numpy_does(side):
    rng, search = np.random.default_rng(0), jax.jit(segments.searchsorted, static_argnames="side")
    for size in (1, 2, 7, 8, 33):
        for _ in range(4):
            ordered, values = np.sort(rng.integers(0, size, size)), rng.integers(-1, size + 2, 40)
            np.testing.assert_array_equal(search(ordered, values, side=side), np.searchsorted(ordered, values, side))


@pytest.mark.parametrize("dtype", ["int8", "uint16", "int32", "uint32", "int64", "uint64"])
@pytest.mark.parametrize("traced", [False, True], ids=["numpy", "traced"])
def test_indices_that_are_no_int32_are_none(dtype, traced):
    info = np.iinfo(dtype)
    at = [x for x in (3, -1, -100, 2**31 - 1, 2**31 + 5, 2**32 - 1, 2**32 + 5, -(2**32)) if info.min <= x <= info.max]
    with jax.enable_x64(traced):  # else JAX has no wide integers
        got = jax.jit(segments.indices)(np.array(at, dtype)) if traced else segments.indices(np.array(at, dtype), -7)
    outside = 2**31 - 1 if traced else -7
    assert got.dtype == jnp.int32
    np.testing.assert_array_equal(got, [x if abs(x) < 2**31 else outside for x in at])


def test_rows_of_tokens_that_are_no_int32():
    hidden, table, far = np.ones((2, 3), np.float32), np.eye(3, dtype=np.float32), np.array([1, 2**32 + 1])
    losses = kernels.fused_cross_entropy(hidden, table, far, reduction="none")
    np.testing.assert_array_equal(np.isnan(losses), [False, True])
    np.testing.assert_array_equal(
        kernels.grouped_matmul(hidden, np.ones((2, 3, 1), np.float32), group_ids=far)[:, 0], [3, 0]
    )
    np.testing.assert_array_equal(np.isnan(ejdist.embedding.embedding(table, far[None]))[0, :, 0], [False, True])
