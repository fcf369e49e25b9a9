"""A run goes on past its end where that is the run that it would have been, and elsewhere when told to."""

import shutil

import numpy as np
import pytest
from small_run import TINY, losses

from ejdist.training.loop import train
from ejdist.training.metrics import read_rows
from ejdist.training.optimizer import OptimizerSection, make_schedule
from ejdist.training.resume import changed_rate, check_same_run, fingerprint, how_to_continue
from launch.errors import DONE, WRONG
from launch.train import main
from recipes.schema import compose

pytestmark = pytest.mark.usefixtures("one_program_for_equal_runs")

ONE = [*TINY, "mesh.sp=1", "model.num_layers=1"]


def run(directory, corpus, *overrides):
    said = []
    outcome = train(compose([*ONE, *corpus, f"run.dir={directory}", *overrides]), log=said.append)
    return outcome, "\n".join(said)


@pytest.mark.slow  # two runs; tests/test_train.py has one that goes on, the rows below the decision
def test_a_constant_rate_goes_on_bit_for_bit_past_its_end(corpus, tmp_path):
    constant = "optimizer.schedule=constant"
    run(tmp_path / "whole", corpus, constant, "run.steps=5")
    run(tmp_path / "parts", corpus, constant, "run.steps=3")
    _, said = run(tmp_path / "parts", corpus, constant, "run.steps=3")
    assert "nothing to do" in said and "raise run.steps, or choose" in said
    outcome, said = run(tmp_path / "parts", corpus, constant, "run.steps=5")
    assert outcome.finished and outcome.summary["steps"] == 5
    assert "resuming from step 3" in said and "run.steps changed from 3 to 5" in said and "run.steps is" not in said
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole"), "every loss must be the same number"
    _, said = run(tmp_path / "parts", corpus, constant, "run.steps=5")
    assert "has 5 of 5 steps" in said and "was 3" not in said, "what is stored is the new total"


@pytest.mark.slow  # two runs; a constant rate goes the same way
def test_wsd_goes_on_bit_for_bit_before_its_decay(corpus, tmp_path):
    run(tmp_path / "whole", corpus, "optimizer=wsd", "run.steps=6")
    run(tmp_path / "parts", corpus, "optimizer=wsd", "run.steps=5", "run.stop_after=3")
    outcome, _ = run(tmp_path / "parts", corpus, "optimizer=wsd", "run.steps=6")
    assert outcome.finished and losses(tmp_path / "parts") == losses(tmp_path / "whole")


@pytest.mark.slow  # four starts of a run; the rows below have the decision
def test_a_cosine_goes_on_past_its_end_only_when_told_to(corpus, tmp_path, capsys):
    parts = tmp_path / "parts"
    run(parts, corpus, "run.steps=4")
    _, said = run(parts, corpus, "run.steps=4")
    assert "raise run.steps with run.extend=true, or choose" in said
    before = (parts / "metrics.jsonl").read_text()
    arguments = [*ONE, *corpus, f"run.dir={parts}", "run.steps=6"]
    assert main(arguments) == WRONG
    message = capsys.readouterr().err
    words = [
        "run.steps: was 4, is 6",
        "their learning rates would differ",
        "warmup_cosine",
        "step 4 had",
        "run.extend=true",
    ]
    assert all(w in message for w in words), message
    assert (parts / "metrics.jsonl").read_text() == before
    shutil.copytree(parts, tmp_path / "at_once")
    run(tmp_path / "at_once", corpus, "run.steps=6", "run.extend=true")
    assert main([*arguments, "run.extend=true", "run.stop_after=5"]) == DONE
    assert main(arguments) == DONE, "once it has gone on, it is an ordinary run of the new total"
    rows = read_rows(parts / "metrics.jsonl")
    assert losses(parts) == losses(tmp_path / "at_once") and len(rows) == 6
    assert (parts / "metrics.jsonl").read_text().startswith(before)
    schedule = make_schedule(compose(arguments).optimizer, 6)
    # To a rounding: the step computes it among other things, and here it is computed alone.
    assert [row["learning_rate"] for row in rows[4:]] == pytest.approx([float(schedule(i)) for i in (4, 5)], rel=1e-6)


@pytest.mark.parametrize(
    ("section", "old", "new", "made", "first"),
    [
        ({"schedule": "constant"}, 10, 20, 10, None),
        ({"schedule": "constant"}, 10, 5, 4, None),
        ({"schedule": "constant", "warmup_steps": 0}, 10, 20, 10, None),
        # A warmup that the old total cut short.
        ({"schedule": "constant", "warmup_steps": 8}, 4, 20, 4, 1),
        ({"schedule": "wsd", "decay_fraction": 0.3}, 10, 20, 6, None),
        # Step 7 is the start of the fall: the peak, but for the last bit.
        ({"schedule": "wsd", "decay_fraction": 0.3}, 10, 20, 10, 7),
        ({"schedule": "wsd", "decay_fraction": 0.3}, 20, 10, 8, 7),
        ({"schedule": "wsd", "decay_fraction": 0.3, "warmup_steps": 0}, 10, 20, 10, 7),
        ({"schedule": "wsd", "decay_fraction": 0}, 10, 20, 10, None),
        ({"schedule": "warmup_cosine"}, 10, 20, 2, None),
        ({"schedule": "warmup_cosine"}, 10, 20, 4, 4),
    ],
)
def test_the_rates_of_the_steps_made_decide(section, old, new, made, first):
    section = OptimizerSection(**{"warmup_steps": 2} | section)
    found = changed_rate(section, old, new, made)
    rates = np.array([[float(make_schedule(section, steps)(i)) for i in range(made)] for steps in (old, new)])
    assert (found is None) == (first is None) == bool((rates[0] == rates[1]).all())
    if found is not None:
        assert found == (first, rates[0][first - 1], rates[1][first - 1])


@pytest.mark.parametrize(
    ("overrides", "made", "words"),
    [
        (["run.steps=8"], 9, ["another recipe", "run.steps: was 10, is 8"]),
        (["run.steps=8", "run.extend=true"], 5, ["was 10, is 8", "restore run.steps"]),
        (
            ["run.steps=8", "optimizer.schedule=constant"],
            5,
            ["another recipe", "optimizer.schedule: was warmup_cosine"],
        ),
        (
            ["run.steps=20", "run.extend=true", "z_loss=0"],
            10,
            ["z_loss: was 0.0001, is 0.0", "run.steps: was 10, is 20"],
        ),
    ],
)
def test_what_the_key_does_not_allow(overrides, made, words, tmp_path):
    stored = fingerprint(compose(TINY))
    with pytest.raises(ValueError) as caught:
        check_same_run(stored, compose([*TINY, *overrides]), made, tmp_path)
    message = str(caught.value)
    assert all(w in message for w in [str(tmp_path), *words]) and "run.extend=true" not in message, message


@pytest.mark.parametrize(
    ("overrides", "made", "words"),
    [
        ([], 10, "raise run.steps with run.extend=true"),
        (["optimizer.schedule=constant"], 10, "raise run.steps"),
        (["run.stop_after=4"], 4, "raise run.stop_after"),
        (["run.stop_after=10"], 10, "raise run.steps with run.extend=true and run.stop_after"),
    ],
)
def test_what_is_said_of_a_run_with_nothing_to_do(overrides, made, words):
    recipe = compose([*TINY, *overrides])
    assert how_to_continue(recipe.run, recipe.optimizer, made) == words
