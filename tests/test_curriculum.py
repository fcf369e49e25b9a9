"""A length curriculum: stages of one run, each with a length, batch, mesh and positions of its own, stopped anywhere."""

import itertools
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from shared import once
from small_run import TINY, losses

from ejdist.cluster.hosts import Hosts
from ejdist.mesh import make_mesh
from ejdist.operations import bind_ops
from ejdist.training import steps
from ejdist.training.curriculum import history, stage_of, stages_of
from ejdist.training.data import build as build_data
from ejdist.training.guards import SkippedBatches
from ejdist.training.loop import train
from ejdist.training.metrics import read_rows
from ejdist.training.optimizer import make_schedule
from ejdist.training.program import make_program
from ejdist.training.resume import check_history, check_same_run, fingerprint
from ejdist.training.runs import Run
from ejdist.training.runs import nested as tree_of
from ejdist.training.setup import open_run
from ejdist.weights.tensors import declared_leaves
from launch import rehearse
from launch.errors import DONE
from launch.train import _virtual_cpus
from recipes.schema import compose

# The second stage has other rows, another mesh, and positions that turn much more slowly.
FIRST = "{until: 3, sequence_length: 32, global_batch: 4, mesh: {dp: 2}, rope_base: 100.0}"
SHORT = FIRST.replace("mesh: {dp: 2}, ", "")
PLAN = [*TINY, "run.steps=6", "optimizer.warmup_steps=1", f"curriculum=[{FIRST}, {{}}]", "optimizer.learning_rate=0.03"]


def run(directory, corpus, *overrides):
    said = []
    outcome = train(compose([*PLAN, *corpus, f"run.dir={directory}", *overrides]), log=said.append)
    return outcome, "\n".join(said)


def state_of(directory, step=None):
    """Returns (the run of a checkpoint, name -> array of its parameters); default: the last."""
    from_run = Run(directory, step)
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    leaves = {
        n: jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=here) for n, p in declared_leaves(from_run.model).items()
    }
    return from_run, from_run.load_and_close(leaves)


@pytest.fixture(scope="module")
def whole(corpus, tmp_path_factory):
    return once(tmp_path_factory, "curriculum", lambda folder: run(folder, corpus))


def test_stages_are_one_run_with_one_schedule(corpus, whole):
    rows = read_rows(whole / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [(row["stage"], row["sequence_length"]) for row in rows] == [(1, 32)] * 3 + [(2, 64)] * 3
    assert all(120 <= row["tokens"] <= 128 for row in rows), (
        "32 x 4 and 64 x 2, less what ends a document in its last row"
    )
    recipe = compose(PLAN)
    schedule = make_schedule(recipe.optimizer, recipe.run.steps)
    # To a rounding: the step computes it among other things, and here it is computed alone.
    assert [row["learning_rate"] for row in rows] == pytest.approx([float(schedule(i)) for i in range(6)], rel=1e-6)
    there, _ = state_of(whole)
    assert there.step == 6 and there.model.rope_base == recipe.model.rope_base == 10000.0
    assert there.data["sequence_length"] == 64 and there.data["step"] == 6


@pytest.mark.slow
def test_a_run_whose_first_stage_has_just_ended_goes_on_bit_for_bit_in_the_second(corpus, whole, tmp_path):
    """As after a kill between two stages: their common checkpoint is there, and nothing of the second."""
    parts = shutil.copytree(whole, tmp_path / "parts")
    shutil.rmtree(parts / "checkpoints" / "6")
    outcome, said = run(parts, corpus)
    assert outcome.finished and "resuming from step 3" in said and "stage 2 of 2" in said and "stage 1 of 2" not in said
    assert losses(parts) == losses(whole), "every loss must be the same number"
    (_, one), (_, other) = state_of(parts), state_of(whole)
    assert all(np.array_equal(one[name], other[name]) for name in one)


@pytest.mark.slow
def test_a_stop_after_any_step_goes_on_bit_for_bit(corpus, whole, tmp_path):
    for stop in (1, 2, 3, 4, 5):
        outcome, said = run(tmp_path, corpus, f"run.stop_after={stop}")
        assert outcome.step == stop and not outcome.finished
        assert f"stage {1 if stop <= 3 else 2} of 2" in said, said
    outcome, said = run(tmp_path, corpus)
    assert outcome.finished and losses(tmp_path) == losses(whole)


def test_the_first_step_of_a_stage_has_its_positions_and_its_rows(corpus, whole):
    """Against the loss by hand: what the stage before has saved, in the model and on the rows of the next, on one device."""
    before, params = state_of(whole, 3)
    assert before.model.rope_base == 100.0 and before.data["sequence_length"] == 32 and before.data["step"] == 3
    recipe = compose([*PLAN, *corpus])
    batch = build_data(recipe.data, seed=recipe.run.seed).batch(3)
    tree = tree_of(params)["params"]
    found = recipe.model.build().loss(tree, batch, ops=bind_ops(None))[1]
    assert losses(whole)[3] == pytest.approx(float(found["loss"].value / found["tokens"].value), rel=1e-5)


def test_the_plan_ahead_may_change_and_what_was_made_may_not(tmp_path):
    """A run may be given stages that begin where it is: its steps are those of the new plan."""
    stages = stages_of(compose(PLAN))
    kept = {"recipe": fingerprint(stages[1].sections), "data": {"sequence_length": 64, "global_batch": 2}}
    kept["stages"] = [list(part) for part in history(stages, 5)]
    assert [until for until, _ in history(stages, 5)] == [3, 5] and [u for u, _ in history(stages, 3)] == [3]
    ahead = f"curriculum=[{FIRST}, {{until: 5}}, {{sequence_length: 128}}]"
    check_history(kept, stages_of(compose([*PLAN, ahead])), 5, tmp_path)
    for changed, words in (
        (
            FIRST.replace("until: 3", "until: 4"),
            ["step 4 with data.sequence_length = 64", "this curriculum has 32", "after 5"],
        ),
        (FIRST.replace("100.0", "101.0"), ["step 3 with model.rope_base = 100.0", "this curriculum has 101.0"]),
        (FIRST.replace("global_batch: 4", "global_batch: 8"), ["data.global_batch = 4"]),
    ):
        with pytest.raises(ValueError) as caught:
            check_history(kept, stages_of(compose([*PLAN, f"curriculum=[{changed}, {{}}]"])), 5, tmp_path)
        assert all(w in str(caught.value) for w in words), caught.value
    plain = compose([*TINY, "run.steps=6"])
    single = {"recipe": fingerprint(plain), "data": {"sequence_length": 64, "global_batch": 2}}
    later = compose([*TINY, "run.steps=6", "curriculum=[{until: 4}, {sequence_length: 128, rope_base: 5e5}]"])
    check_history(single, stages_of(later), 4, tmp_path)
    check_same_run(single["recipe"], stage_of(stages_of(later), 4).sections, 4, tmp_path)
    with pytest.raises(ValueError, match=r"step 5 with data.sequence_length = 64, but this curriculum has 128"):
        check_history(single, stages_of(later), 5, tmp_path)


def test_a_checkpoint_of_other_positions_than_the_stage_has_is_refused(corpus, whole):
    """At the end of a stage what is stored is of the stage that ends, and not of the one that goes on."""
    stages = stages_of(compose(PLAN))
    check_same_run(fingerprint(stages[0].sections), stage_of(stages, 3).sections, 3, whole)
    with pytest.raises(ValueError, match=r"model.rope_base: was 100.0, is 10000.0"):
        check_same_run(fingerprint(stages[0].sections), stage_of(stages, 4).sections, 4, whole)
    hosts = Hosts(60)
    for keys, words in (
        (
            ["model.rope_base=20000.0"],
            "step 6 with model.rope_base = 10000.0, but this curriculum has 20000.0",
        ),
        (["curriculum=[]"], "step 3 with data.sequence_length = 32, but this recipe has 64"),
        (["optimizer.b1=0.5"], "optimizer.b1: was 0.9, is 0.5"),
        (["run.seed=1"], "run.seed: was 0, is 1"),
    ):
        # Before anything is compiled.
        with pytest.raises(ValueError, match=re.escape(words)):
            open_run(compose([*PLAN, *corpus, f"run.dir={whole}", *keys]), hosts)


@pytest.mark.parametrize(
    ("stages", "words"),
    [
        ("[{}, {}]", r"curriculum\[0\].until is missing"),
        ("[{until: 2}, {until: 6}]", r"curriculum\[1\].until = 6: the last stage ends with the run"),
        ("[{until: 6}, {}]", r"curriculum\[0\] ends at step 6; that must be at least 1 and before run.steps = 6"),
        ("[{until: 3}, {until: 3}, {}]", r"curriculum\[1\] ends at step 3; that must be past step 3"),
        ("[{until: 0}, {}]", "at least 1"),
        ("[{until: 3, sequence_length: 1}, {}]", r"curriculum\[0\].sequence_length = 1 is too small"),
        ("[{until: 3, global_batch: 0}, {}]", r"curriculum\[0\].global_batch = 0"),
        ("[{until: 3, sequence_lenght: 8}, {}]", "sequence_lenght"),
        ("[{until: 3, mesh: {so: 2}}, {}]", "so"),
        ("[{until: soon}, {}]", "until"),
    ],
)
def test_a_wrong_plan_names_the_stage_and_the_key(stages, words):
    with pytest.raises(ValueError, match=words):
        stages_of(compose([*PLAN, f"curriculum={stages}"]))


@pytest.mark.parametrize(
    ("first", "last", "override", "own"),
    [
        ("mesh: {sp: 2}", "mesh: {sp: 4}", "mesh.sp=8", "mesh"),
        ("mesh: {sp: 2}", "mesh: {sp: 4}", "mesh=sequence", "mesh"),
        ("sequence_length: 32", "sequence_length: 64", "data.sequence_length=128", "sequence_length"),
        ("rope_base: 5.0", "rope_base: 6.0", "model.rope_base=7.0", "rope_base"),
        ("accumulation: 2", "accumulation: 1", "accumulation=2", "accumulation"),
    ],
)
def test_what_every_stage_has_of_its_own_is_not_taken_beside_them(first, last, override, own):
    words = ["recipe=long_context", override]
    with pytest.raises(ValueError, match=f"{override} is not used: every stage of the curriculum has its own {own};"):
        compose([*words, f"curriculum=[{{until: 2, {first}}}, {{{last}}}]"])
    for one_has_none in (f"[{{until: 2, {first}}}, {{}}]", f"[{{until: 2}}, {{{last}}}]", "[]"):
        compose([*words, f"curriculum={one_has_none}"])


def test_null_in_a_stage_of_the_command_line_is_refused():
    """It would train on with the recipe's scaling; of a printed recipe it means what the stage leaves out."""
    words = ["recipe=length_curriculum", "model.rope_scaling=ntk", "model.rope_factor=2.0"]
    with pytest.raises(ValueError, match=r"curriculum\[1\].rope_scaling = null: .* leave it out"):
        compose([*words, "curriculum=[{until: 9, rope_base: 5.0}, {rope_scaling: null}]"])


def test_what_is_wrong_with_a_later_stage_is_said_at_the_start(corpus, tmp_path):
    for stage, words in (
        ("{mesh: {sp: 3}}", r"curriculum\[1\]: .*sequence length 64"),
        ("{rope_scaling: nkt}", r"curriculum\[1\]: .*'nkt' is unknown"),
        ("{accumulation: 3}", r"curriculum\[1\]: data.global_batch = 2 must be a multiple of accumulation = 3"),
    ):
        with pytest.raises(ValueError, match=words):
            run(tmp_path / "none", corpus, f"curriculum=[{SHORT}, {stage}]")
    assert not (tmp_path / "none").exists()


def test_the_recipe_is_a_plan_and_one_program_says_that_it_is_none_of_its_stages():
    recipe = compose(["recipe=length_curriculum"])
    stages = stages_of(recipe)
    lengths = [stage.sections.data.sequence_length for stage in stages]
    assert lengths == sorted(lengths) and len(set(lengths)) == 3
    assert len({s.sections.data.sequence_length * s.sections.data.global_batch for s in stages}) == 1
    assert [s.sections.model.rope_factor for s in stages] == [1.0, 2.0, 4.0] and stages[-1].until == recipe.run.steps
    assert _virtual_cpus(recipe, only=True) == 4
    assert _virtual_cpus(compose([*PLAN, f"curriculum=[{SHORT}, {{mesh: {{sp: 6}}}}]"]), only=True) == 6
    sections = compose([*PLAN, "mesh.sp=1"])
    mesh = make_mesh(devices=jax.devices()[:1])
    assert any("not one of the curriculum's" in note for note in make_program(sections, mesh).notes)
    assert not any("stages" in note for note in make_program(stages_of(sections)[1].sections, mesh).notes)


@pytest.mark.slow
@pytest.mark.parametrize("damaged", [None, "3"])
def test_a_rewind_goes_back_to_the_stage_before(corpus, tmp_path, monkeypatch, damaged):
    """The first step of the second stage is bad; and the checkpoint between them damaged by then."""
    rewinds = ["guards.nonfinite=rewind", "checkpoint.every=2", "checkpoint.keep=5"]
    calm, there = tmp_path / "calm", tmp_path / "rewound"
    calm.mkdir()
    SkippedBatches([[4, 1]]).write(calm)
    run(calm, corpus, *rewinds)
    make, bad = steps.run_steps, [4]

    def with_a_bad_step(run, train_step, state, writer, start, *rest):
        made = itertools.count(start + 1)

        def step(state, batch):
            if next(made) in bad:
                bad.clear()
                state = state._replace(params=jax.tree.map(lambda x: x * math.nan, state.params))
                for file in (there / "checkpoints" / damaged).rglob("d/*") if damaged else ():
                    file.write_bytes(file.read_bytes()[:-7])
            return train_step(state, batch)

        return make(run, step, state, writer, start, *rest)

    monkeypatch.setattr(steps, "run_steps", with_a_bad_step)
    outcome, said = run(there, corpus, *rewinds)
    assert outcome.finished and "rewinding to step 3 and skipping batches 3 to 3" in said, said
    assert ("resuming from step 2" in said) == bool(damaged) and said.count("stage 1 of 2") == 1 + bool(damaged), said
    assert losses(there) == losses(calm)


@pytest.mark.slow
def test_kills_anywhere_go_on_bit_for_bit(corpus, tmp_path):
    """kill -9 of a real process in each stage, and wherever it is a moment after a stage's last step."""
    own = [word for word in TINY if not word.startswith("mesh.")]
    plan = [*own, *corpus, "optimizer.learning_rate=0.03", "run.steps=24", "checkpoint.every=3", "checkpoint.keep=9"]
    third = "{until: 16, sequence_length: 64, global_batch: 2, mesh: {sp: 2}, rope_base: 1000.0}"
    plan += [f"curriculum=[{FIRST.replace('until: 3', 'until: 8')}, {third}, {{mesh: {{sp: 4}}, rope_base: 5000.0}}]"]
    command = [sys.executable, "-m", "launch.train", *plan]
    calm = subprocess.run([*command, f"run.dir={tmp_path / 'calm'}"], capture_output=True, text=True)
    assert calm.returncode == DONE, calm.stderr
    kills = 0
    for at in (2, 8, 8, 11, 16, 20):
        process = subprocess.Popen([*command, f"run.dir={tmp_path / 'killed'}"], stdout=subprocess.DEVNULL)
        while process.poll() is None:
            rows = read_rows(tmp_path / "killed" / "metrics.jsonl")
            if rows and rows[-1]["step"] >= at:
                os.kill(process.pid, signal.SIGKILL)
            time.sleep(0.01)
        kills += process.returncode == -signal.SIGKILL
    assert kills >= 4
    end = subprocess.run([*command, f"run.dir={tmp_path / 'killed'}"], capture_output=True, text=True)
    assert end.returncode == DONE, end.stderr
    assert losses(tmp_path / "killed") == losses(tmp_path / "calm") and len(losses(tmp_path / "calm")) == 24
    (_, one), (_, other) = state_of(tmp_path / "killed"), state_of(tmp_path / "calm")
    assert all(np.array_equal(one[name], other[name]) for name in one)


@pytest.mark.slow
def test_hosts_go_through_the_stages_together(corpus, tmp_path):
    """Two processes with two devices each: every stage is of all four, and a killed one loses nothing."""
    lines = []
    plan = f"curriculum=[{FIRST.replace('{dp: 2}', '{dp: 4}').replace('until: 3', 'until: 7')}, {{}}]"
    length = ["run.steps=14", "checkpoint.every=4", "run.host_timeout=120"]
    small = [a for a in TINY if not a.startswith(("run.", "checkpoint.", "mesh."))]
    arguments = [*small, *corpus, *length, plan, "mesh.dp=2", "mesh.sp=2", "fault=kill,sigterm", f"run.dir={tmp_path}"]
    assert rehearse.main(arguments, log=lines.append) == DONE, "\n".join(lines)
    assert [row["stage"] for row in read_rows(tmp_path / "calm" / "run" / "metrics.jsonl")] == [1] * 7 + [2] * 7
