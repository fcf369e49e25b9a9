"""Rows dealt to groups of devices and to microbatches: how even, that a step has the same rows, and where nothing is dealt."""

import itertools
import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_run import TINY, losses
from test_data import ROOT, corpus_of, same
from test_dataset import numbered, packed

from ejdist.documents import documents_of
from ejdist.models.model import Flops
from ejdist.training.data import Data, DataSection, shard_packing
from ejdist.training.data.mixture import MixedRows, counts_of
from ejdist.training.data.packing import Packing
from ejdist.training.dealing import dealer, dealt, described, least_waited_for, waited_for
from ejdist.training.loop import train
from ejdist.training.metrics import read_rows
from recipes.schema import compose


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 6), st.integers(1, 5), st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_each_row_has_a_place_and_no_deal_is_worse_than_what_was_drawn(groups, microbatches, each, seed):
    weights = np.random.default_rng(seed).lognormal(0, 1.5, groups * microbatches * each)
    place = dealt(weights, groups, microbatches)
    assert sorted(place) == list(range(len(weights)))
    assert waited_for(weights[place], groups, microbatches) <= waited_for(weights, groups, microbatches)
    assert (place == dealt(weights.copy(), groups, microbatches)).all()
    least, waited = (wait(weights[place], groups, microbatches) for wait in (least_waited_for, waited_for))
    assert least <= waited * (1 + 1e-9) and (each > 1 or waited < least * (1 + 1e-9) or groups == 1)


def test_the_heaviest_rows_share_a_microbatch_and_a_group_evens_out():
    """By hand: two groups of four rows, two microbatches. A group's rows 0 and 2 are of the first microbatch, 1 and 3 of the
    second."""
    weights = np.array([1.0, 9, 2, 8, 3, 7, 4, 6])
    first = [[9.0, 6.0], [8.0, 7.0]]  # the four heaviest: 9 + 6 and 8 + 7
    second = [[4.0, 1.0], [3.0, 2.0]]
    placed = weights[dealt(weights, 2, 2)].reshape(2, 2, 2)
    np.testing.assert_array_equal(placed[:, :, 0], first)
    np.testing.assert_array_equal(placed[:, :, 1], second)
    assert waited_for(weights, 2, 2) == (3 + 4) + (9 + 8) and waited_for(placed.reshape(-1), 2, 2) == 15 + 5


def test_the_heaviest_group_exchanges_a_row():
    """By hand: heaviest first the groups have 9 + 3 + 3 and 8 + 4 + 1; an exchange of 9 and 8 makes both 14."""
    weights = np.array([8.0, 1, 4, 3, 9, 3])
    assert waited_for(weights[dealt(weights, 2, 1)], 2, 1) == 14


def test_what_is_waited_for_at_least_is_no_more_than_the_best_deal():
    """Of all deals of six rows. One group has two of the three heaviest rows."""
    rng = np.random.default_rng(0)
    for sizes, _ in itertools.product([(2, 1), (3, 1), (2, 3), (3, 2)], range(10)):
        weights = rng.integers(1, 10, 6).astype(float)
        best = min(waited_for(weights[list(order)], *sizes) for order in itertools.permutations(range(6)))
        assert least_waited_for(weights, *sizes) <= best
    assert least_waited_for(np.array([9.0, 9, 9, 1]), 2, 1) == 18


def test_rows_of_one_weight_stay_as_drawn():
    np.testing.assert_array_equal(dealt(np.full(12, 5.0), 3, 2), np.arange(12))


@pytest.mark.parametrize("words", ["4096", "long_tail.txt", "mixture.txt"])
def test_groups_are_even_for_documents_of_many_lengths(words):
    """8 groups and 4 microbatches with 4 rows of 32k tokens each: attention of the busiest over the mean, of 12 batches. As
    drawn it is 1.4 and more."""
    words = words if words.isdigit() else str(ROOT / "benchmarks" / "documents" / words)
    sizes, rng = np.asarray(documents_of(words).lengths), np.random.default_rng(1)
    rows = Packing(corpus_of(rng.choice(sizes, 2**25 // int(sizes.mean()))), 2**15, 0)
    batches = rows.squares(range(rows.rows_per_epoch // 128 * 128)).reshape(-1, 128)
    drawn, even = (
        sum(waited_for(w[deal(w)], 8, 4) for w in batches) / (batches.sum() / 8)
        for deal in (lambda w: np.arange(128), lambda w: dealt(w, 8, 4))
    )
    assert even < 1.03 and drawn > 1.4


# -- what rows say -----------------------------------------------------------------------------------------------------


@pytest.fixture
def small_windows(monkeypatch):
    monkeypatch.setattr(shard_packing, "_ROWS", 2)
    monkeypatch.setattr(shard_packing, "_DOCUMENTS", 5)


@pytest.mark.parametrize("how", ["packing", "cut", "even", "whole", "mixture"])
def test_squares_are_those_of_the_rows(how, tmp_path, small_windows):
    """Documents of many windows and some of many rows, in two epochs."""
    lengths = [[int(n) for n in np.random.default_rng(i).integers(1, 90, 40)] + [300] for i in range(3)]
    if how == "packing":
        rows = Packing(corpus_of(lengths[0]), 32, 3)
    elif how == "mixture":
        rows = MixedRows(
            [packed(numbered(lengths[:2]), 32, 3, k, tmp_path) for k in ("cut", "even")], counts_of([1, 2]), 3
        )
    else:
        rows = packed(numbered(lengths), 32, 3, how, tmp_path)
    numbers = [*range(rows.rows_per_epoch), 5 * rows.rows_per_epoch + 1, 7]
    for number, squares in zip(numbers, rows.squares(numbers), strict=True):
        ids = rows.row(number)["segment_ids"]
        assert squares == (np.bincount(ids[ids >= 0]) ** 2).sum(), number
    if how in ("even", "whole"):  # from the cache, too
        np.testing.assert_array_equal(
            packed(numbered(lengths), 32, 3, how, tmp_path).squares(numbers), rows.squares(numbers)
        )


def test_a_batch_is_that_of_the_step_in_another_order():
    """Read ahead, on two hosts, past skipped batches, and where a run began to read later."""
    from ejdist.training.data import Begin

    corpus = corpus_of(np.random.default_rng(0).integers(1, 40, 200))
    sizes = {"sequence_length": 32, "global_batch": 8, "seed": 0}

    def deal(number):
        return np.random.default_rng(number).permutation(8)

    for data in (Data(corpus, **sizes), Data(corpus, begin=Begin(2), **sizes)):
        hosts = [
            list(data.iterator(3, 6, rows, lambda step: 2 * step, deal=deal))
            for rows in (np.array([0, 1, 6]), slice(2, 6))
        ]
        for step, a, b in zip((6, 8, 10), *hosts, strict=True):
            whole = data.batch(step)
            assert same(a, {name: x[deal(step)[[0, 1, 6]]] for name, x in whole.items()})
            assert same(b, {name: x[deal(step)[2:6]] for name, x in whole.items()})
        assert (data.squares(4) == [(np.bincount(ids) ** 2).sum() for ids in data.batch(4)["segment_ids"]]).all()


# -- a run -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_trains_on_the_same_rows_more_evenly(tmp_path):
    """Two groups, two microbatches: the losses of rows as they are drawn, to rounding."""
    sizes = np.random.default_rng(0).lognormal(3, 1, 400).astype(int) + 1
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": "ab" * size}) + "\n" for size in sizes))
    keys = [
        *TINY,
        "mesh.sp=1",
        "model.num_layers=1",
        "mesh.fsdp=2",
        "data.global_batch=8",
        "accumulation=2",
        "run.steps=4",
        "data=files",
    ]
    keys += [f"data.source={tmp_path}/rows.jsonl", f"data.cache_dir={tmp_path}/cache", "data.sequence_length=128"]
    said = {name: [] for name in ("none", "auto")}
    for name, lines in said.items():
        train(compose([*keys, f"run.dir={tmp_path}/{name}", f"data.balance={name}"]), log=lines.append)
    np.testing.assert_allclose(losses(tmp_path / "auto"), losses(tmp_path / "none"), rtol=2e-6)
    uneven = {n: [row["imbalance_dp"] for row in read_rows(tmp_path / n / "metrics.jsonl")] for n in said}
    assert np.mean(uneven["auto"]) < np.mean(uneven["none"])
    told = [line for line in said["auto"] if line.startswith("data.balance")]
    numbers = re.findall(r"\d\.\d\d", told[0])
    assert len(told) == 1 and float(numbers[0]) < float(numbers[1]), told
    assert "8 rows of a step to 2 groups of devices and 2 microbatches" in told[0]
    assert not [line for line in said["none"] if line.startswith("data.balance")]
    recorded = json.loads((tmp_path / "auto" / "recipe.json").read_text())
    assert recorded["data.balance"] == "auto"


def test_where_nothing_is_dealt():
    corpus = corpus_of(np.random.default_rng(0).integers(1, 40, 200))
    data = Data(corpus, sequence_length=32, global_batch=4, seed=0)

    def of(groups, pair=1.0):
        return SimpleNamespace(groups=groups, model=SimpleNamespace(flops=[Flops(1, pair=pair)]))

    def recipe(balance):
        return SimpleNamespace(data=SimpleNamespace(balance=balance), accumulation=1)

    assert dealer(data, of(2), recipe("auto")) is not None and dealer(data, of(2), recipe("none")) is None
    for program, reason in (
        (of(1), "all devices work on every row"),
        (of(4), "each group of devices has one row"),
        (of(2, pair=0), "the model has no attention"),
    ):
        assert dealer(data, program, recipe("auto")) is None and described(data, program, recipe("auto")) is None
        assert described(data, program, recipe("rows")) == f"data.balance = rows deals no rows: {reason}"
    dataset = SimpleNamespace(
        has_squares=True, bytes_of_lengths=2**30, global_batch=4, squares=data.squares, begin=data.begin
    )
    assert dealer(dataset, of(2), recipe("auto")) is None and dealer(dataset, of(2), recipe("rows")) is not None
    assert "each host would read 1,024 MiB of lengths of documents" in described(dataset, of(2), recipe("auto"))


@pytest.mark.slow  # two more runs, 6 s
def test_what_cannot_be_dealt_is_refused_only_where_it_was_asked_for(tmp_path):
    batch = {name: np.zeros((2, 64), np.int32) for name in ("tokens", "targets")}
    keys = [*TINY, "mesh.sp=1", "run.steps=1"]
    refused, taken = (compose([*keys, f"run.dir={tmp_path}/{k}", f"data.balance={k}"]) for k in ("rows", "auto"))
    with pytest.raises(
        ValueError, match=r"data.balance = rows needs the lengths .*\(own batches\).*set data.balance=auto"
    ):
        train(refused, batches=lambda step: batch)
    train(taken, batches=lambda step: batch)
    with pytest.raises(ValueError, match=r"data.balance = 'even'"):
        DataSection(balance="even").validate()
