"""Full rows whose attention is even: by hand, of drawn lengths, and what a run says of them. What all packings have in common
(every token once, pure functions of seed and number, hosts, resumption, squares) is in test_dataset and test_dealing."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_data import corpus_of
from test_dataset import numbered, packed

from ejdist.training.data import Data, shard_packing
from ejdist.training.data.even_packing import Even, even_rows
from ejdist.training.data.packing import squares_of
from ejdist.training.data.shard_packing import CorpusShard
from ejdist.training.dealing import waited_for


def placed(lengths, length, seed=None):
    """Returns the rows, as lists of (document, begin, tokens)."""
    lengths = np.asarray(lengths)
    order = np.arange(len(lengths)) if seed is None else np.random.default_rng(seed).permutation(len(lengths))
    return even_rows(lengths, order, length, -(-int(lengths.sum()) // length))


def squares(rows):
    return np.array([sum(count**2 for _, _, count in row) for row in rows], float)


def cut_squares(lengths, length):
    """Of the rows of the same documents one after another."""
    starts = np.concatenate([[0], np.cumsum(lengths)])
    return np.array([squares_of(starts, a, min(a + length, starts[-1])) for a in range(0, starts[-1], length)])


def test_each_document_goes_where_squares_are_least_and_has_room():
    """By hand, rows of 10: 12 fills a row, and its rest of 2 the last one, which has room for no more. 7 and 6 begin the two
    others; 4 has room beside 6 alone, and 3 beside 7."""
    assert placed([4, 12, 3, 6, 7], 10) == [
        [(1, 0, 10)],
        [(2, 0, 3), (4, 0, 7)],
        [(0, 0, 4), (3, 0, 6)],
        [(1, 10, 2)],
    ]
    # 5 has room beside 5; 2 has room nowhere and is cut.
    assert placed([9, 9, 5, 5, 2], 10) == [[(0, 0, 9), (4, 0, 1)], [(1, 0, 9), (4, 1, 1)], [(2, 0, 5), (3, 0, 5)]]
    # Both of 2 go beside 3 and 3, where squares are least (18 and 22), and not beside 5 (25), where there is more room.
    assert squares(placed([5, 3, 3, 2, 2, *[1] * 9], 12)).tolist() == [25 + 7, 9 + 9 + 4 + 4 + 2]


@settings(max_examples=80, deadline=None)
@example([300, 1, 8, 16], 8, 0)
@example([8] * 4, 8, 0)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=60).filter(any), st.integers(2, 33), st.integers(0, 9))
def test_rows_are_full_and_hold_every_token_once(lengths, length, seed):
    rows = placed(lengths, length, seed)
    filled = [sum(count for *_, count in row) for row in rows]
    assert filled == [length] * (len(rows) - 1) + [sum(lengths) - length * (len(rows) - 1)]
    held = sorted((d, t) for row in rows for d, begin, count in row for t in range(begin, begin + count))
    assert held == [(d, t) for d, n in enumerate(lengths) for t in range(n)]
    rank = {d: i for i, d in enumerate(np.random.default_rng(seed).permutation(len(lengths)).tolist())}
    for row in rows:
        ranks = [rank[d] for d, *_ in row]
        assert ranks == sorted(set(ranks)), "once in a row, in the order of the epoch"
    assert (squares(rows) == squares(placed(lengths, length))).all(), (
        "of the lengths alone, so they are the same each epoch"
    )


@pytest.mark.parametrize("longest", [2**14, 2**20], ids=["an eighth of a row", "many rows"])
@pytest.mark.parametrize("tail", ["lognormal", "pareto"])
def test_rows_are_more_even_than_one_after_another_and_few_documents_are_cut(tail, longest):
    """Eight windows of 64 rows of 131,072 tokens, of documents of a mean of about 2,000. The rows of a window are even where no
    document has more squares than the mean row. Else its row remains the heaviest, and steps of 8 groups, 4 microbatches and a
    row each are more even."""
    rng, length, count = np.random.default_rng(0), 2**17, 64
    sums, divided = [], 0
    for _ in range(8):
        drawn = rng.lognormal(7.1, 1, 8192) if tail == "lognormal" else 1000 * (1 + rng.pareto(2.5, 8192))
        lengths = drawn.astype(int).clip(1, longest)
        lengths = lengths[: np.searchsorted(np.cumsum(lengths), count * length)]
        rows = placed(lengths, length, 0)
        divided += (np.bincount([d for row in rows for d, *_ in row]) > 1).sum()
        sums.append([of[:-1] for of in (squares(rows), cut_squares(lengths, length))])  # the last one is not full
    of_windows = np.array(sums)
    even, cut = (of_windows.std(-1) / of_windows.mean(-1)).mean(0)
    steps = of_windows.swapaxes(0, 1).reshape(2, -1)[:, rng.permutation(504)[:480]].reshape(2, -1, 32)
    step, step_cut = (sum(waited_for(of, 8, 4) for of in one) / (one.sum() / 8) for one in steps)
    assert step < step_cut and even < (cut / 3 if longest < length else cut)
    assert divided < 0.6 * 8 * count, "cut one after another, nearly as many are as there are rows"


def test_a_window_is_a_range_of_rows(monkeypatch, tmp_path):
    """Of 7 rows of 10 tokens two have a window each, or three. A row has documents of its window alone, and a document that
    goes on in the next window has a target there."""
    monkeypatch.setattr(shard_packing, "_ROWS", 2)
    shard = [3, 30, 7, 9, 1, 1, 14]
    rows = packed(numbered([shard]), 10, 5, "even", tmp_path)
    assert rows.windows == [3] and rows.rows_per_epoch == 7 and rows.tokens_per_row == 65 / 7
    parts = [range(20), range(20, 40), range(40, 65)]
    seen = [[] for _ in parts]
    for i in range(7):
        row = rows.row(i)
        tokens = row["tokens"][row["segment_ids"] >= 0]
        (where,) = [w for w, part in enumerate(parts) if set(tokens.tolist()) <= set(part)]
        seen[where] += tokens.tolist()
        for token, target in zip(row["tokens"], row["targets"], strict=True):
            assert token != 19 or target == 20
    assert [sorted(tokens) for tokens in seen] == [list(part) for part in parts]


def test_squares_are_kept(monkeypatch, tmp_path):
    """A second start reads no lengths: neither those of a run that goes on, nor of another seed, whose rows have the same."""
    lengths = np.random.default_rng(0).integers(1, 40, 300)
    first = Even([CorpusShard(corpus_of(lengths))], 32, 0, "made", tmp_path)
    monkeypatch.setattr(CorpusShard, "offsets", None)
    for seed in (0, 1):
        again = Even([CorpusShard(corpus_of(lengths))], 32, seed, "made", tmp_path)
        assert again.describe() == first.describe()
        assert sorted(again.squares(range(again.rows_per_epoch))) == sorted(first.squares(range(first.rows_per_epoch)))


def test_the_run_says_how_even_rows_are(tmp_path):
    """Of rows of 10 tokens, as in the example by hand."""
    data = Data(
        corpus_of([4, 12, 3, 6, 7]), sequence_length=10, global_batch=1, seed=0, packing="even", cache_dir=tmp_path
    )
    sums = np.array([100.0, 9 + 49, 16 + 36, 4])
    (line,) = data.notes()
    assert line == (
        "data.source: documents lie in rows so that these have even attention (data.packing=even): the sum of the squares of "
        f"their lengths has a standard deviation of {sums.std() / sums.mean():.2f} of the mean, and 1 of 5 documents are cut, "
        "1 of them longer than a row"
    )
