"""The data pipeline: every token once, documents kept apart, and batches that depend on (seed, step) alone."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ejdist.training.data import Data
from ejdist.training.data.corpus import Corpus
from ejdist.training.data.packing import Packing
from ejdist.training.data.tokenizer import ByteTokenizer

ROOT = Path(__file__).resolve().parent.parent


def corpus_of(lengths):
    """Returns a corpus whose tokens are all different, so that each can be traced."""
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return Corpus(np.arange(offsets[-1], dtype=np.uint32), offsets, "made", ByteTokenizer())


@settings(max_examples=60, deadline=None)
@example([1] * 7, 5, 0)  # documents of one token
@example([3, 900, 1, 500], 8, 1)  # documents of many rows
@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(2, 33), st.integers(0, 3))
def test_an_epoch_has_every_token_once_and_every_transition_once(lengths, length, seed):
    corpus = corpus_of(lengths)
    packing = Packing(corpus, length, seed)
    document = np.repeat(np.arange(len(lengths)), lengths)
    seen, transitions = [], []
    for i in range(packing.rows_per_epoch):
        row = packing.row(i)
        real = row["segment_ids"] >= 0
        seen.extend(row["tokens"][real])
        assert (row["targets"][~real] == -1).all()
        assert (np.diff(row["segment_ids"][real]) >= 0).all()
        for segment in np.unique(row["segment_ids"][real]):
            at = row["segment_ids"] == segment
            tokens, targets = row["tokens"][at], row["targets"][at]
            assert len(set(document[tokens])) == 1, "a segment is of one document"
            assert (np.diff(tokens) == 1).all() and (row["positions"][at] == np.arange(at.sum())).all()
            for token, target in zip(tokens, targets, strict=True):
                last = token + 1 == len(document) or document[token + 1] != document[token]
                assert target == (-1 if last else token + 1)
                transitions += [] if last else [token]
    assert sorted(seen) == list(range(len(document)))
    assert len(transitions) == len(set(transitions)) == len(document) - len(lengths)


def data_of(batch=4, length=16, seed=3):
    rng = np.random.default_rng(0)
    return Data(corpus_of(rng.integers(1, 50, 40)), sequence_length=length, global_batch=batch, seed=seed)


def same(a, b):
    return a.keys() == b.keys() and all(np.array_equal(a[n], b[n]) for n in a)


def test_a_batch_is_a_pure_function_of_seed_and_step():
    first, second = data_of(), data_of()
    for step in (0, 5, 500, 1):  # in any order, over epochs
        assert same(first.batch(step), second.batch(step))
    assert not same(first.batch(0), first.batch(1))
    assert not same(first.batch(0), data_of(seed=4).batch(0))


def test_no_seed_and_no_step_is_negative():
    with pytest.raises(ValueError, match=r"run.seed must be 0 or more, got -1"):
        data_of(seed=-1)
    with pytest.raises(ValueError, match=r"step must be 0 or more, got -2"):
        data_of().batch(-2)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=20), st.integers(2, 20), st.integers(0, 9), st.integers(0, 40))
def test_any_number_of_hosts_makes_the_same_batch_at_any_step(lengths, length, seed, step):
    def new():
        return Data(corpus_of(lengths), sequence_length=length, global_batch=4, seed=seed)

    whole = new().batch(step)  # of a run that starts here
    running = new()
    for earlier in range(step):
        running.batch(earlier)
    for hosts in (1, 2, 4):
        parts = [running.batch(step, slice(i * 4 // hosts, (i + 1) * 4 // hosts)) for i in range(hosts)]
        assert same({n: np.concatenate([p[n] for p in parts]) for n in parts[0]}, whole)


def test_the_prefetching_iterator_gives_the_same_batches_from_any_step():
    data = data_of(batch=40)  # some 1.7 steps to an epoch
    for start in range(9):
        got = list(data.iterator(start, 9, slice(1, 3)))
        assert len(got) == 9 - start
        assert all(same(b, data_of(batch=40).batch(start + i, slice(1, 3))) for i, b in enumerate(got))


def test_every_epoch_and_every_seed_has_the_same_tokens_in_another_order():
    orders = set()
    for seed, epoch in itertools.product(range(3), range(4)):
        packing = data_of(seed=seed).packing
        rows = [packing.row(epoch * packing.rows_per_epoch + i) for i in range(packing.rows_per_epoch)]
        tokens = np.concatenate([row["tokens"][row["segment_ids"] >= 0] for row in rows])
        assert (np.sort(tokens) == np.arange(len(tokens))).all() and len(tokens) == data_of().num_tokens
        orders.add(tokens.tobytes())
    assert len(orders) == 12


def test_a_changed_corpus_or_setting_is_noticed_on_resume():
    data = data_of()
    data.check_cursor(json.loads(json.dumps(data.cursor(9))))
    with pytest.raises(ValueError, match=r"data.sequence_length: was 16, is 32"):
        data_of(length=32).check_cursor(data.cursor(9))
    with pytest.raises(ValueError, match=r"run.seed: was 3, is 5"):
        data_of(seed=5).check_cursor(data.cursor(9))
