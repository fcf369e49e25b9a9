"""Spans of blocks against the dense mask: nothing that attends is left out, nothing masked is taken as full."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels import MaskInfo
from kernels.engines.attention.tiles import FIRST, FULL_FIRST, FULL_LAST, LAST, spans

T, S = 40, 56
RNG = np.random.default_rng(0)


def packed(lengths, total, batch=2):
    ids = np.full((batch, total), -1)
    for row in range(batch):
        at = 0
        for i, n in enumerate(np.roll(lengths, row)):
            ids[row, at : at + n] = i
            at += n
    return jnp.asarray(ids, jnp.int32)


ORDER = jnp.asarray(np.concatenate([np.arange(10, 30), np.arange(36, 56)]), jnp.int32)[None]
MASKS = {
    "none": MaskInfo(),
    "causal": MaskInfo(causal=True),
    "window": MaskInfo(causal=True, window=(9, 0)),
    "both sides": MaskInfo(window=(7, 12)),
    "chunks": MaskInfo(causal=True, chunk_size=12),
    "prefix": MaskInfo(causal=True, prefix_lengths=jnp.asarray([0, 21])),
    "segments": MaskInfo.from_segments(packed([9, 14, 10], T), packed([20, 4, 25], S), causal=True),
    "padded keys": MaskInfo.from_segments(packed([9, 14, 17], T), packed([20, 4, 25], S)),
    "zigzag": MaskInfo(causal=True, q_positions=ORDER, kv_positions=jnp.arange(S)[None]),
    "any order": MaskInfo(
        causal=True,
        window=(20, None),
        q_positions=jnp.asarray(RNG.permutation(T))[None],
        kv_positions=jnp.asarray([RNG.permutation(S) for _ in range(2)]),
    ),
    "dense": MaskInfo(causal=True, attention_mask=jnp.asarray(RNG.random((2, 1, T, S)) < 0.5)),
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("blocks", [(8, 8), (16, 8), (12, 8), (8, 32), (64, 64)])
def test_spans_hold_all_that_attends_and_no_masked_pair_is_full(name, blocks):
    mask, (bq, bk) = MASKS[name], blocks
    seen = np.asarray(mask.visible(T, S)).any(1)
    by_query, by_key = jax.jit(lambda m: spans(m, T, S, bq, bk))(mask)
    rows = max(seen.shape[0], by_query.shape[0])
    seen, by_query, by_key = (np.broadcast_to(x, (rows, *x.shape[1:])) for x in (seen, by_query, by_key))
    for b in range(rows):
        for i, j in itertools.product(range(-(-T // bq)), range(-(-S // bk))):
            block = seen[b, i * bq : (i + 1) * bq, j * bk : (j + 1) * bk]
            for span, at in ((by_query[b, i], j), (by_key[b, j], i)):
                assert 0 <= span[FIRST] <= span[FULL_FIRST] <= span[FULL_LAST] <= span[LAST]
                if block.any():
                    assert span[FIRST] <= at < span[LAST], (b, i, j)
                if span[FULL_FIRST] <= at < span[FULL_LAST]:
                    assert block.all() and (j + 1) * bk <= S, (b, i, j)


def test_work_is_that_of_the_blocks_that_attend():
    """Of a causal square the lower half, of a window its band, of packed rows each row's own documents; mostly full."""
    by_query, _ = spans(MaskInfo(causal=True), 1024, 1024, 64, 64)
    assert isinstance(by_query, np.ndarray)  # a constant of the program
    np.testing.assert_array_equal(by_query[0], [[0, 0, i, i + 1] for i in range(16)])
    window, by_key = spans(MaskInfo(causal=True, window=(255, 0)), 1024, 1024, 64, 64)
    np.testing.assert_array_equal(window[0, 8], [4, 5, 8, 9])
    np.testing.assert_array_equal(by_key[0, 4], [4, 5, 8, 9])
    ids = np.repeat([[0, 1], [0, 0]], 512, axis=1)
    rows, _ = spans(MaskInfo.from_segments(ids, causal=True), 1024, 1024, 64, 64)
    np.testing.assert_array_equal(rows[:, 10], [[8, 8, 10, 11], [0, 0, 10, 11]])
    # The second half of a zigzag rank sees all of the first, and no key is looked at twice.
    order = np.concatenate([np.arange(512), np.arange(3584, 4096)])[None]
    zigzag, _ = spans(MaskInfo(causal=True, q_positions=order, kv_positions=order), 1024, 1024, 64, 64)
    np.testing.assert_array_equal(zigzag[0, [3, 12]], [[0, 0, 3, 4], [0, 0, 12, 13]])
