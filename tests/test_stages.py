"""Stages with data and learning rates of their own, changes on resume, and weights of a mixture by tokens."""

import json
import re
import shutil

import numpy as np
import pytest
from shared import once
from small_run import SMALL, losses, run
from test_chats_data import data_from

from ejdist.cluster.hosts import Hosts
from ejdist.training import steps
from ejdist.training.curriculum import stages_of
from ejdist.training.data import Data
from ejdist.training.data import build as build_data
from ejdist.training.data.corpus import Corpus
from ejdist.training.data.mixture import Mixture, counts_of
from ejdist.training.data.shuffle import Shuffle
from ejdist.training.data.tokenizer import ByteTokenizer
from ejdist.training.metrics import read_rows
from ejdist.training.optimizer import OptimizerSection, make_schedule
from ejdist.training.recorded import recorded, settings_at
from ejdist.training.resume import check_data
from ejdist.training.runs import Run
from ejdist.training.setup import open_run
from launch.evaluation_recipe import with_settings_of_run
from recipes.schema import compose


def corpus_of(lengths, first=0):
    """Returns a corpus whose tokens are first, first + 1, ...: each is known by its value."""
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    tokens = np.arange(first, first + offsets[-1], dtype=np.uint32)
    return Corpus(tokens, offsets, f"from {first}", ByteTokenizer())


def data(corpus, length=8, batch=2, seed=3, **how):
    return Data(corpus, sequence_length=length, global_batch=batch, seed=seed, **how)


def rows(data, numbers):
    return np.concatenate([data.batch(n)["tokens"] for n in numbers])


def mixture(weights, *parts, by="rows"):
    return Mixture(tuple(parts), counts_of(weights), tuple(weights) if by == "tokens" else None)


# -- weights by tokens --------------------------------------------------------------------------------------------------


def tokens_of(data, count):
    """Returns the tokens of each of two sources in the first rows, without padding."""
    sums = np.zeros(2)
    for i in range(count):
        row = data.packing.row(i)
        found = row["tokens"][row["segment_ids"] >= 0]
        sums[int(found[0] >= 10_000)] += len(found)
    return sums


def test_weights_by_tokens_are_shares_of_tokens(tmp_path):
    """Documents of 5 of 8 tokens leave room that no other fills; those of 8 fill their rows."""
    short, full = corpus_of([5] * 200), corpus_of([8] * 100, first=10_000)
    how = {"packing": "whole", "cache_dir": tmp_path}
    by_tokens = data(mixture([1, 1], short, full, by="tokens"), **how)
    by_rows = data(mixture([1, 1], short, full), **how)
    counts = by_tokens.packing.counts
    assert counts[0] * 5 == pytest.approx(
        counts[1] * 8, rel=1e-3
    ) and by_tokens.packing.tokens_per_row == pytest.approx(80 / 13, rel=1e-3)
    for found, share in ((by_tokens, 1 / 2), (by_rows, 5 / 13)):
        sums = tokens_of(found, 4000)
        assert sums[0] / sums.sum() == pytest.approx(share, abs=0.02), found.packing.counts
    assert by_tokens.corpus.fingerprint != by_rows.corpus.fingerprint
    # In full rows both are the same, and a length does not change what the data are.
    assert data(by_tokens.corpus).packing.counts == by_rows.packing.counts
    assert by_tokens.resized(16, 2).corpus.fingerprint == by_tokens.corpus.fingerprint
    with pytest.raises(ValueError, match=r"data.mixture\[0\].weight = 1e-05 is less than one row in 65,536"):
        data(mixture([2e-5, 1], full, short, by="tokens").__class__((full, short), (1, 2), (1e-5, 1)), **how)


def test_tokens_that_are_skipped_or_cut_off_do_not_count(tmp_path):
    """A conversation that is too long for a row."""
    words = " ".join(["word"] * 30)
    for name, texts in (("long", ["hi", words, words]), ("short", ["hi", "ho", "he"])):
        lines = [json.dumps({"prompt": "a", "completion": text}) for text in texts]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    made = {
        how: data_from(
            tmp_path,
            tmp_path / "long.jsonl",
            too_long=how,
            sequence_length=32,
            chat_template="chatml",
            format="completion",
        )
        for how in ("skip", "truncate")
    }
    for how, found in made.items():
        packing = found.packing
        packed = sum((packing.row(i)["segment_ids"] >= 0).sum() for i in range(packing.rows_per_epoch))
        assert packing.tokens_per_row * packing.rows_per_epoch == packed, how
    assert made["truncate"].packing.tokens_per_row > made["skip"].packing.tokens_per_row


def test_a_wrong_word_for_weights():
    with pytest.raises(ValueError, match=r"data.weights_by = 'bytes' is unknown; use rows or tokens"):
        compose(["recipe=long_context", "data.weights_by=bytes"]).data.validate()


def test_the_first_places_of_a_shuffle_are_those_of_its_rule():
    for n in (1, 2, 7, 1000, 65536):
        shuffle = Shuffle(n, 5, "a", n)
        assert shuffle.first(min(n, 300)).tolist() == [shuffle[i] for i in range(min(n, 300))]


def test_a_mixture_from_before_its_sources_had_their_rows_in_turn_is_named():
    mixed = data(mixture([1, 1], corpus_of([8] * 5), corpus_of([8] * 5, first=99)))
    kept = {"data": mixed.cursor(3) | {"order": mixed.packing.order.replace(" in turn", "")}, "recipe": {}}
    with pytest.raises(ValueError) as refused:
        check_data(kept, mixed, compose([]), 3, [])
    assert str(refused.value) == (
        "this run cannot resume with other data: data.mixture: the run began before version 0.2.0, in which a source of a "
        "mixture had its rows in another order; finish the run with the version that it began with, set "
        "run.allow_change=[data.packing] to resume with what it is now from step 4 on, or start in another run.dir"
    )
    assert set(check_data(kept, mixed, compose([]), 3, ["data.packing"])) == {"data.packing"}
    kept["data"]["seed"] = 5
    with pytest.raises(ValueError, match=r"run.seed: was 5, is 3; data.mixture: .*; restore it, finish the run with"):
        check_data(kept, mixed, compose([]), 3, [])


# -- where data goes on -------------------------------------------------------------------------------------------------


def test_a_source_goes_on_where_an_earlier_stage_has_left_it():
    """Alone, then in a mixture, then in other sizes: no row comes twice, and each stage begins with its own rows."""
    web, code = corpus_of([8] * 50), corpus_of([8] * 50, first=10_000)
    first = data(web)
    again = data(mixture([1, 1], web, code)).after(json.loads(json.dumps(first.cursor(5, 5))), 5)
    seen, later = rows(first, range(5)), rows(again, range(5, 15))
    from_web = later[later[:, 0] < 10_000]
    assert len(from_web) and not set(from_web[:, 0]) & set(seen[:, 0]), "a row of the first stage comes again"
    assert from_web.tolist() == rows(first, range(5, 15))[: len(from_web)].tolist(), "in the order that it has alone"
    from_code = later[later[:, 0] >= 10_000]
    assert from_code.tolist() == rows(data(code), range(10))[: len(from_code)].tolist(), "from its own beginning"
    # The third stage has the second source alone, in batches of another size.
    third = data(code, batch=3).after(json.loads(json.dumps(again.cursor(15, 15))), 15)
    assert rows(third, [15]).tolist() == rows(data(code), range(20))[len(from_code) :][:3].tolist()
    assert third.used(16) == {"from 0": 8 * (10 + len(from_web)), "from 10000": 8 * (len(from_code) + 3)}


def test_a_stage_resumes_at_any_of_its_batches():
    web, code = corpus_of([8] * 50), corpus_of([8] * 50, first=10_000)
    of_stage = data(mixture([2, 1], code, web), batch=4).after(data(web).cursor(5, 5), 5)
    for number in range(5, 9):
        kept = json.loads(json.dumps(of_stage.cursor(number, number)))
        resumed = data(mixture([2, 1], code, web), batch=4).after(kept, number)
        assert rows(resumed, range(number, 12)).tolist() == rows(of_stage, range(number, 12)).tolist()
    hosts = [of_stage.batch(9, slice(i, i + 2))["tokens"] for i in (0, 2)]
    assert np.concatenate(hosts).tolist() == of_stage.batch(9)["tokens"].tolist()


def test_other_rows_of_one_source_go_on_by_tokens():
    """As a longer sequence does, and a larger batch."""
    web = corpus_of([8] * 50)
    before = data(web, batch=3)
    assert data(web, batch=2).after(before.cursor(5, 5), 5).batch(5)["tokens"].tolist() == (
        rows(before, range(5, 7))[:2].tolist()
    )
    longer = data(web, length=16, batch=1).after(before.cursor(5, 5), 5)
    assert longer.batch(5)["tokens"].tolist() == rows(data(web, length=16, batch=1), [8]).tolist(), "120 tokens are 7.5"
    # A checkpoint from before sources were counted says how many batches there were.
    old = {name: value for name, value in before.cursor(5).items() if name not in ("begin", "used")}
    assert data(web, batch=2).after(old, 5).batch(5)["tokens"].tolist() == rows(before, range(5, 7))[:2].tolist()
    assert rows(data(web, batch=3).after(old, 5), [7]).tolist() == rows(before, [7]).tolist()
    with pytest.raises(ValueError, match="step must be 5 or more, got 4"):
        longer.batch(4)


# -- stages -------------------------------------------------------------------------------------------------------------


def plan(other):
    rate = "learning_rate: 0.02, schedule: wsd, warmup_steps: 1, decay_fraction: 0.5"
    return f"curriculum=[{{until: 2}}, {{until: 5, source: '{other}', {rate}}}, {{}}]"


@pytest.fixture(scope="module")
def whole(corpus, other, tmp_path_factory):
    made = lambda folder: run(folder, *corpus, plan(other), "checkpoint.every=1")  # noqa: E731
    return once(tmp_path_factory, "stages", made)


@pytest.mark.slow  # a run of stages is quick in test_curriculum.py
def test_a_stage_has_its_data_and_its_rate(corpus, other, whole):
    recipe = compose([*SMALL, *corpus, plan(other)])
    schedule = make_schedule(recipe.optimizer, 6)
    own = OptimizerSection(learning_rate=0.02, schedule="wsd", warmup_steps=1, decay_fraction=0.5)
    rates = [*(float(schedule(i)) for i in (0, 1)), *(float(make_schedule(own, 3)(i)) for i in range(3))]
    rows = read_rows(whole / "metrics.jsonl")
    assert [row["learning_rate"] for row in rows] == pytest.approx([*rates, float(schedule(5))], rel=1e-6)
    there = [Run(whole, step) for step in (2, 4, 6)]
    assert [r.recipe["data.source"] for r in there] == [recipe.data.source, other, recipe.data.source]
    first, second = there[0].data["corpus"], there[1].data["corpus"]
    assert first != second == stages_data(recipe)[1].corpus.fingerprint
    assert there[1].data["begin"] == [2, {first: 2 * 2 * 32}] and there[1].data["used"][second] == 2 * 2 * 32
    assert there[2].data["begin"] == [5, {first: 128, second: 192}], "the first source goes on where it was"
    for r in there:
        r.close()


def stages_data(recipe):
    return [build_data(stage.sections.data, seed=recipe.run.seed) for stage in stages_of(recipe)]


@pytest.mark.slow  # with the runs of the tests above
def test_the_losses_of_a_stage_are_those_of_its_rows(corpus, other, whole, monkeypatch, tmp_path):
    """A run that resumes in each stage sees the rows that the stage has, and its losses are the same bits."""
    recipe = compose([*SMALL, *corpus, plan(other)])
    base = stages_data(recipe)
    expected = [base[0].batch(0), base[0].batch(1), *(base[1].batch(i) for i in range(3)), base[0].batch(2)]
    seen, place = {}, steps.place_batch

    def looked(batch, *rest):
        seen[len(seen)] = batch["tokens"]
        return place(batch, *rest)

    monkeypatch.setattr(steps, "place_batch", looked)
    parts = shutil.copytree(whole, tmp_path / "parts")
    for step in (4, 5, 6):
        shutil.rmtree(parts / "checkpoints" / str(step))
    outcome, said = run(parts, *corpus, plan(other))
    assert outcome.finished and "resuming from step 3" in said and f"of {other}" in said
    assert "wsd up to a rate of 0.02" in said
    assert [seen[i].tolist() for i in range(3)] == [batch["tokens"].tolist() for batch in expected[3:]]
    assert losses(parts) == losses(whole), "every loss must be the same number"


@pytest.mark.slow
def test_stages_stop_after_any_step_and_go_on_bit_for_bit(corpus, other, whole, tmp_path):
    for stop in (1, 2, 3, 4, 5):
        outcome, _ = run(tmp_path, *corpus, plan(other), f"run.stop_after={stop}")
        assert outcome.step == stop
    assert run(tmp_path, *corpus, plan(other))[0].finished and losses(tmp_path) == losses(whole)


@pytest.mark.slow
def test_what_ran_must_match_and_what_comes_may_change(corpus, other, whole, tmp_path):
    hosts, keys = Hosts(60), [*SMALL, *corpus, f"run.dir={whole}"]
    ends = plan(other).replace("until: 5", "until: 4")
    data_of_first = plan(other).replace("{until: 2}", f"{{until: 2, source: '{other}'}}")
    for changed, words in (
        (ends, "ran step 5 with optimizer.learning_rate = 0.02, but this curriculum has 0.003"),
        (
            plan(other).replace(other, f"{corpus[0].partition('=')[2]}"),
            "ran step 5 with data.source, data.mixture or data.weights_by",
        ),
        (plan(other).replace("0.02", "0.01"), "ran step 5 with optimizer.learning_rate = 0.02, but this curriculum"),
        (data_of_first, "ran step 2 with data.source, data.mixture"),
    ):
        with pytest.raises(ValueError, match=re.escape(words)):
            open_run(compose([*keys, changed]), hosts)
    ahead = shutil.copytree(whole, tmp_path / "ahead")
    for step in (3, 4, 5, 6):
        shutil.rmtree(ahead / "checkpoints" / str(step))
    open_run(compose([*SMALL, *corpus, f"run.dir={ahead}", ends]), hosts)


@pytest.mark.slow
def test_a_stage_that_ends_elsewhere_has_another_rate(corpus, other, whole, tmp_path):
    parts = shutil.copytree(whole, tmp_path / "parts")
    shutil.rmtree(parts / "checkpoints" / "6")
    longer = plan(other).replace("until: 5", "until: 7")
    keys = [*SMALL, *corpus, f"run.dir={parts}", "run.steps=9"]
    with pytest.raises(ValueError, match=r"ran step 5 with a learning rate of .*its stage ends elsewhere"):
        open_run(compose([*keys, longer]), Hosts(60))
    with pytest.raises(ValueError, match=r"ran step 5 with a learning rate of .*restore until or run.steps"):
        open_run(compose([*keys, plan(other).replace("{until: 5, ", "{").replace(", {}]", "]")]), Hosts(60))
    opened = open_run(
        compose([*keys, plan(other).replace("{until: 5, ", "{").replace(", {}]", "]"), "run.extend=true"]), Hosts(60)
    )
    assert opened.stages[-1].until == 9


@pytest.mark.parametrize(
    ("stage", "words"),
    [
        ("{source: /none/*.txt}", r"curriculum\[1\]: .*/none/\*\.txt.* matches no file"),
        (
            "{source: SHORT}",
            r"curriculum\[1\]: data.source has 6 tokens, fewer than a row of data.sequence_length = 32",
        ),
        ("{mixture: [{source: OTHER, weight: 1}, {source: SHORT, weight: 1}]}", r"curriculum\[1\]: .* has 6 tokens"),
        ("{source: OTHER, mixture: [{source: OTHER, weight: 1}]}", r"curriculum\[1\] has both source and mixture"),
        ("{mixture: [{source: OTHER}]}", r"curriculum\[1\]: data.mixture\[0\] has no weight"),
        ("{weights_by: bytes}", r"curriculum\[1\]: data.weights_by = 'bytes'"),
        ("{learning_rate: -1.0}", r"curriculum\[1\]: optimizer.learning_rate must be positive"),
        ("{schedule: cosine}", r"curriculum\[1\]: optimizer.schedule = 'cosine' is unknown"),
        ("{packing: whole, sequence_length: 1}", r"curriculum\[1\].sequence_length = 1 is too small"),
    ],
)
def test_wrong_data_of_a_stage_names_the_stage(corpus, other, tmp_path, stage, words):
    (tmp_path / "short.txt").write_text("hello")
    stage = stage.replace("OTHER", f"'{other}'").replace("SHORT", f"'{tmp_path / 'short.txt'}'")
    with pytest.raises(ValueError, match=words):
        open_run(
            compose([*SMALL, *corpus, f"run.dir={tmp_path / 'run'}", f"curriculum=[{{until: 2}}, {stage}]"]), Hosts(60)
        )
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_an_evaluation_takes_the_data_of_the_stage(corpus, other, whole):
    recipe = recorded(whole)
    assert settings_at(recipe, 4)["data.source"] == other
    assert settings_at(recipe, 2)["data.source"] == settings_at(recipe, 6)["data.source"] != other
    recipe["curriculum[1].mixture"], recipe["curriculum[1].source"] = [{"source": "a", "weight": 1}], None
    assert settings_at(recipe, 4)["data.source"] is None and settings_at(recipe, 4)["data.mixture"]
    said = []
    words = with_settings_of_run(str(whole), 4, [], said.append)
    assert f"data.source='{other}'" in words and any(other in line for line in said)
