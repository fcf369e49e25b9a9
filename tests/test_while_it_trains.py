"""What a run says while it trains: held-out loss, traces, memory, trackers; and what an evaluation takes from a run."""

import json
import shutil
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from small_run import TINY, losses

import launch.evaluate
from ejdist.training import trackers
from ejdist.training.loop import train
from ejdist.training.metrics import MetricsWriter, read_evaluations, read_rows
from ejdist.training.profiling import GIB, StepProfiler, peak_memory
from ejdist.training.recorded import settings_at
from launch.errors import WRONG
from launch.evaluation_recipe import with_settings_of_run
from launch.train import main
from recipes.schema import compose

pytestmark = pytest.mark.usefixtures("one_program_for_equal_runs")


@pytest.fixture(scope="module")
def held(tmp_path_factory):
    folder = tmp_path_factory.mktemp("held")
    for i in range(6):
        (folder / f"{i}.txt").write_text(f"held out {i}: " + " ".join(str(j * i) for j in range(40)))
    return f"{folder}/*.txt"


def run(directory, corpus, *overrides):
    said = []
    outcome = train(compose([*TINY, *corpus, f"run.dir={directory}", *overrides]), log=said.append)
    return outcome, "\n".join(said)


@pytest.fixture(scope="module")
def evaluated(corpus, held, tmp_path_factory):
    """A run on two devices that evaluates at steps 0, 2, 4 and at its end, 5."""
    folder = tmp_path_factory.mktemp("evaluated") / "run"
    keys = ["run.steps=5", "evaluation.every=2", f"evaluation.data={held}", "evaluation.batches=2", "run.profile=[2,3]"]
    outcome, said = run(folder, corpus, *keys)
    return SimpleNamespace(folder=folder, outcome=outcome, said=said, keys=keys)


def test_held_out_data_is_evaluated_between_steps(evaluated, corpus, tmp_path):
    rows = read_evaluations(evaluated.folder)
    assert [row["step"] for row in rows] == [0, 2, 4, 5]
    assert rows[-1]["loss"] < rows[0]["loss"] and all(row["tokens"] == rows[0]["tokens"] > 100 for row in rows)
    assert sum(octave["tokens"] for octave in rows[0]["row"]) == rows[0]["tokens"]
    assert evaluated.outcome.summary["evaluation"] == {name: rows[-1][name] for name in ("step", "loss", "tokens")}
    assert evaluated.outcome.summary["goodput"]["evaluation"] > 0
    # The losses of the steps are the same bits as without.
    run(tmp_path / "without", corpus, "run.steps=5")
    assert losses(tmp_path / "without") == losses(evaluated.folder)


@pytest.mark.slow  # a run, and a command
def test_samples_are_what_the_checkpoint_generates(corpus, held, tmp_path, capfd):
    """Of each evaluated state, also on a mesh; they change no bit of the training, and the page about the run shows them."""
    from launch.generate import main
    from launch.report import main as report

    folder, steps = tmp_path / "run", ["run.steps=3", "evaluation.every=3", f"evaluation.data={held}"]
    run(folder, corpus, *steps, "evaluation.samples=['import ',x]", "evaluation.sample_tokens=5")
    rows = read_evaluations(folder)
    assert [row["step"] for row in rows] == [0, 3]
    assert all([one["prompt"] for one in row["samples"]] == ["import ", "x"] for row in rows)
    for one in rows[-1]["samples"]:
        assert f"  {one['prompt']!r} goes on with {one['text']!r}" in capfd.readouterr().out or one["prompt"] == "x"
        assert main([f"run.dir={folder}", f"prompt={one['prompt']}", "temperature=0", "max_tokens=5"]) == 0
        assert capfd.readouterr().out == one["text"] + "\n"
    run(tmp_path / "without", corpus, "run.steps=3")
    assert losses(tmp_path / "without") == losses(folder)
    assert report([f"run.dir={folder}"]) == 0
    assert "evaluation.samples at step 3" in (folder / "report.html").read_text()


@pytest.mark.slow  # two runs, 8 s
def test_an_interrupted_run_evaluates_what_is_missing(evaluated, corpus, tmp_path):
    parts = tmp_path / "parts"
    run(parts, corpus, *evaluated.keys, "run.stop_after=4")
    first = read_evaluations(parts)
    assert [row["step"] for row in first] == [0, 2, 4]
    shutil.copytree(parts, tmp_path / "copy")
    run(tmp_path / "copy", corpus, *evaluated.keys)
    assert read_evaluations(tmp_path / "copy")[:-1] == first, "what is evaluated is not evaluated again"
    # As a kill between the checkpoint and the evaluation leaves it, and with a row of a step that is made again.
    lines = (parts / "evaluation.jsonl").read_text().splitlines()
    later = json.dumps(json.loads(lines[2]) | {"step": 5, "loss": 99.0})
    (parts / "evaluation.jsonl").write_text("\n".join([*lines[:2], later, '{"torn']))
    run(parts, corpus, *evaluated.keys)
    whole, again = read_evaluations(evaluated.folder), read_evaluations(parts)
    assert [(r["step"], r["loss"], r["row"]) for r in again] == [(r["step"], r["loss"], r["row"]) for r in whole]


@pytest.mark.slow
def test_an_evaluation_takes_the_data_and_the_mesh_of_its_run(evaluated, held, capsys):
    to = evaluated.folder.parent / "found.json"
    arguments = [f"run.dir={evaluated.folder}", "tasks=loss", "batches=2", f"to={to}"]
    assert launch.evaluate.main(arguments) == 0
    said = capsys.readouterr().out
    assert f"from the run: data.source={held}, mesh {{'sp': 2}}, data.tokenizer=bytes" in said
    found = json.loads(to.read_text())
    last = read_evaluations(evaluated.folder)[-1]
    assert found["mesh"]["sp"] == 2 and found["loss"]["64"]["row"] == last["row"], (
        "the numbers of the run's own evaluation"
    )


def test_what_is_named_replaces_what_the_run_had(evaluated):
    taken = []
    words = with_settings_of_run(
        str(evaluated.folder), None, ["mesh=single", "data.source=a.txt", "data.sequence_length=32"], taken.append
    )
    assert taken == ["from the run: data.tokenizer=bytes"]
    recipe = compose(words)
    assert (recipe.mesh.sp, recipe.data.source, recipe.data.sequence_length) == (1, "a.txt", 32)
    assert recipe.data.global_batch == 2 and recipe.sequence.order == "zigzag"
    named = ["recipe=short_context", "data.source=a.txt"]
    assert with_settings_of_run(str(evaluated.folder), None, named, taken.append) == named


def test_the_settings_of_a_run_are_those_of_the_stage_of_the_step():
    recipe = {"data.sequence_length": 64, "mesh.sp": 1, "mesh.dp": 2, "run.steps": 9}
    recipe |= {"curriculum[0].until": 4, "curriculum[0].sequence_length": 128}
    recipe |= {"curriculum[1].until": None, "curriculum[1].sequence_length": 256, "curriculum[1].mesh.sp": 4}
    assert settings_at(recipe, 4) == {"data.sequence_length": 128, "mesh.sp": 1, "mesh.dp": 2}
    for step in (5, 9, None):
        assert settings_at(recipe, step)["data.sequence_length"] == 256 and settings_at(recipe, step)["mesh.sp"] == 4


def test_a_trace_of_the_steps_asked_for(evaluated):
    traces = list((evaluated.folder / "profile").glob("plugins/profile/*/*"))
    assert {path.name for path in traces} >= {"perfetto_trace.json.gz"} and any(p.suffix == ".pb" for p in traces)
    assert "trace of steps 2 to 3" in evaluated.said


@pytest.mark.parametrize(
    ("start", "until", "words"),
    [
        (0, 5, ["trace of steps 2 to 4 in"]),
        (2, 5, ["trace of steps 3 to 4 in"]),  # a run that resumes
        (0, 3, ["trace of steps 2 to 3 in"]),  # a stage or a run that ends
        (4, 9, []),
    ],
)
def test_a_trace_is_of_the_steps_that_ran(start, until, words, monkeypatch, tmp_path):
    calls, said = [], []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda folder, **_: calls.append(("start", folder)))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: calls.append(("stop", None)))
    profiler = StepProfiler((2, 4), tmp_path, start, said.append)
    for step in range(start + 1, until + 1):
        with profiler.step(step):
            pass
        assert profiler.end_step(step, ()) == (step == 4 and start < 4)
    profiler.stop()
    assert len(said) == len(words) and all(word in line for word, line in zip(words, said, strict=True))
    assert [name for name, _ in calls] == ["start", "stop"] * len(words)


def test_memory_of_devices_that_say():
    says = [SimpleNamespace(memory_stats=lambda peak=peak: {"peak_bytes_in_use": peak}) for peak in (3 * GIB, GIB // 2)]
    assert peak_memory(says) == [3.0, 0.5]
    assert peak_memory([*says, SimpleNamespace(memory_stats=lambda: None)]) == []


class Notes:
    """A tracker that keeps what it gets; it fails at `fails`."""

    def __init__(self, directory, recipe):
        self.directory, self.recipe, self.got, self.closed, self.fails = directory, recipe, [], False, None

    def add(self, step, values, tables=None):
        if step == self.fails:
            raise ConnectionError("the network is gone")
        self.got.append((step, dict(values), tables))

    def close(self):
        self.closed = True


def test_trackers_get_every_row_and_one_that_fails_stops_nothing(monkeypatch, tmp_path, capsys):
    opened = []
    for name in ("good", "bad"):
        monkeypatch.setitem(trackers.TRACKERS, name, lambda *a: opened.append(Notes(*a)) or opened[-1])
    writer = MetricsWriter(tmp_path, 0, 3, recipe={"run.steps": 3}, trackers=("good", "bad"))
    good, bad = opened
    bad.fails = 2
    octaves = [
        {"from": 1, "to": 1, "tokens": 0, "sum": 0.0, "loss": None},
        {"from": 2, "to": 3, "tokens": 4, "loss": 2.0},
    ]
    for step in (1, 2, 3):
        metrics = {"loss": np.float32(step), "tokens": np.int32(8), "load": np.ones((2, 3), np.float32)}
        writer.put(step, metrics, {"flops_full": 1.0})
    writer.put_evaluation(3, {"loss": 2.0, "tokens": 4, "seconds": 0.1, "document": octaves, "row": octaves})
    writer.close()
    assert [step for step, *_ in good.got] == [1, 2, 3, 3] and good.recipe == {"run.steps": 3} and good.closed
    assert good.got[0][2] == {"load": [[1.0] * 3] * 2}
    assert good.got[-1][1] == {
        "evaluation/loss": 2.0,
        "evaluation/seconds": 0.1,
        "evaluation/document/from_2": 2.0,
        "evaluation/row/from_2": 2.0,
    }
    assert [step for step, *_ in bad.got] == [1] and not bad.closed
    assert (
        "run.trackers: bad failed and gets no more rows from step 2 on (the network is gone)" in capsys.readouterr().out
    )
    assert len(read_rows(tmp_path / "metrics.jsonl")) == 3


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["evaluation.every=5"], "needs held-out data: give evaluation.data"),
        (["evaluation.samples=[a]"], "are written at evaluations: give evaluation.every"),
        (["evaluation.samples=['']"], "must be texts that are not empty"),
        (["evaluation.every=5", "evaluation.data=/nowhere/*.txt"], "evaluation.data: data.source = '/nowhere/*.txt'"),
        (["evaluation.every=5", "evaluation.data={train}"], "is a corpus that the run trains on"),
        (["run.trackers=[mlflow]"], "run.trackers: 'mlflow' is unknown; use wandb"),
        (["run.trackers=[tensorboard]"], "tensorboard is always written"),
        (["run.trackers=[wandb,wandb]"], "names one twice"),
        (["run.trackers=[wandb]"], "pip install 'ejdist[wandb]'"),
        (["run.profile=[5,50]"], "two steps from 1 to run.steps = 10"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_written(overrides, words, corpus, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: None)
    train_on = corpus[0].partition("=")[2]
    given = [text.replace("{train}", train_on) for text in overrides]
    assert main([*TINY, *corpus, f"run.dir={tmp_path}/run", *given]) == WRONG
    assert words in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.slow  # a run and a tokenizer, 6 s
def test_held_out_data_is_read_with_the_other_tokenizer_that_the_run_trained(corpus, held, tmp_path):
    """One that is trained on its data would be trained anew on what is held out."""
    shutil.copytree(corpus[0].partition("=")[2].rpartition("/")[0], tmp_path / "text", dirs_exist_ok=True)
    keys = [f"data.source={tmp_path}/text/rows.jsonl", corpus[1], "data.tokenizer=bpe:300", "model.vocab_size=300"]
    run(tmp_path / "run", keys, "run.steps=1", "evaluation.every=1", f"evaluation.data={held}", "mesh.sp=1")
    to = tmp_path / "found.json"
    assert launch.evaluate.main([f"run.dir={tmp_path}/run", "tasks=loss", "batches=8", f"to={to}"]) == 0
    assert json.loads(to.read_text())["loss"]["64"]["row"] == read_evaluations(tmp_path / "run")[-1]["row"]
