"""What a run does when its folder, its disk or its cluster is not what it needs: it says so, and the next start mends it."""

import contextlib
import json
import pkgutil
import signal
import subprocess
import threading
import time
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
from small_run import PLAIN, TINY, losses

from ejdist.training import integrity, loop, run_lock
from ejdist.training.checkpoint import CheckpointError
from ejdist.training.metrics import read_rows, write_atomic
from ejdist.training.stop import Diverged, Stop, stop_on_signals
from ejdist.training.summary import summarise
from ejdist.weights.writer import save
from kernels import Unsupported
from launch import doctor, evaluate, export, plan, report
from launch.errors import BAD_CHECKPOINT, DIVERGED, DONE, PREEMPTED, WRONG
from launch.train import _virtual_cpus, main
from recipes import schema
from recipes.schema import compose

pytestmark = pytest.mark.usefixtures("one_program_for_equal_runs")


@pytest.mark.slow
def test_a_run_dir_that_cannot_be_is_named_before_anything_is_compiled(corpus, tmp_path, capsys, monkeypatch):
    (tmp_path / "file").write_text("mine")
    for directory in (tmp_path / "file", tmp_path / "file" / "run"):
        assert main([*PLAIN, *corpus, f"run.dir={directory}"]) == WRONG
        said = capsys.readouterr()
        assert "run.dir" in said.err and f"{tmp_path}/file is a file" in said.err and "parameters" not in said.out
    assert (tmp_path / "file").read_text() == "mine"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert main([*PLAIN, *corpus, 'run.dir="~/run"', "run.steps=1"]) == DONE
    assert (tmp_path / "run" / "summary.json").exists()


@pytest.mark.slow
def test_a_home_of_nobody_is_named(capsys):
    away = "~nobody_of_this_name/run"
    for words in (f'run.dir="{away}"', f'checkpoint.dir="{away}"', f'model.init_from="{away}"'):
        assert main([*TINY, words]) == WRONG
        assert f"{words.partition('=')[0]} = '{away}': there is no such user" in capsys.readouterr().err
    assert report.main([f"run.dir={away}"]) == export.main(["run.dir=a", f"to={away}"]) == WRONG
    said = capsys.readouterr().err
    assert f"run.dir = '{away}'" in said and f"to = '{away}'" in said
    tuned = ["devices=8", "device=h200", *TINY]
    for command, words, key in (
        (report, [f"run.dir=.,{away}"], "run.dir"),
        (evaluate, [f"model.init_from={away}"], "model.init_from"),
        (doctor, [*TINY, f"bandwidth={away}"], "bandwidth"),
        (plan, [*tuned, f"bandwidth={away}"], "bandwidth"),
    ):
        assert command.main(words) == WRONG
        assert f"error: {key} = '{away}': there is no such user" in capsys.readouterr().err
    assert main([*TINY, f"--config-dir={away}"]) == WRONG
    assert f"--config-dir {away}: there is no such user" in capsys.readouterr().err


def test_a_url_is_no_folder_of_that_name(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gs:" / "b").mkdir(parents=True)  # as whoever took one for a folder has left it
    (tmp_path / "gs:" / "metrics.jsonl").touch()
    away = "gs://b/x"
    for command, words, key in (
        (report, [f"run.dir={away}"], "run.dir"),
        (report, ["run.dir=gs:", f"to={away}"], "to"),
        (evaluate, ["run.dir=a", f"to={away}.json"], "to"),
        (doctor, [*TINY, f"bandwidth={away}"], "bandwidth"),
        (plan, ["devices=8", "device=h200", *TINY, f"bandwidth={away}"], "bandwidth"),
    ):
        assert command.main(words) == WRONG
        assert f"error: {key} = '{away}" in (said := capsys.readouterr().err) and "is a URL" in said
    for folder, words in ((away, "is a URL"), ("''", "run.dir is empty")):
        assert main(["-m", *TINY, "run.seed=1,2", f"run.dir={folder}"]) == WRONG
        assert "error: run run.seed=1: run.dir" in (said := capsys.readouterr().err) and words in said
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["b", "gs:", "metrics.jsonl"]


def test_more_virtual_devices_than_a_machine_has_room_for(capsys):
    recipe = compose([*TINY, "mesh.dp=1000000"])
    with pytest.raises(ValueError, match=r"mesh.dp=1000000 x mesh.sp=2 is 2,000,000 devices"):
        _virtual_cpus(recipe, only=True)
    assert _virtual_cpus(recipe, only=False) == 512, "not used alongside accelerators"
    assert _virtual_cpus(compose([*TINY, "mesh.fsdp=2"]), only=True) == 4


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (ValueError("run.steps is odd"), WRONG, "error: run.steps is odd\n"),
        (Unsupported("no such head_dim"), WRONG, "error: no such head_dim\n"),
        (OSError(28, "No space left", "/disk/file"), WRONG, "error: /disk/file: No space left\n"),
        (OSError("the cache is damaged"), WRONG, "error: the cache is damaged\n"),
        (CheckpointError("checkpoint 3 is damaged"), BAD_CHECKPOINT, "error: checkpoint 3 is damaged\n"),
        (Diverged("step 3 has loss nan"), DIVERGED, "error: step 3 has loss nan\n"),
    ],
)
def test_every_command_tells_of_an_error_alike(error, code, message, capsys, monkeypatch):
    def fails(*args):
        raise error

    monkeypatch.setattr(schema, "compose", fails)
    for command in (lambda: main([]), lambda: plan.main(["topology=v5p:2x2x1"])):
        assert command() == code
        assert capsys.readouterr().err == message


def test_a_fault_of_the_program_keeps_its_traceback(monkeypatch):
    def fails(*args):
        raise TypeError("a fault of ours")

    monkeypatch.setattr(schema, "compose", fails)
    for command in (lambda: main([]), lambda: plan.main(["topology=v5p:2x2x1"])):
        with pytest.raises(TypeError, match="a fault of ours"):
            command()


def test_ctrl_c_before_the_first_step_is_no_traceback(corpus, tmp_path, capsys, monkeypatch):
    from ejdist.training import setup

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(setup, "make_program", interrupted)
    assert main([*PLAIN, *corpus, f"run.dir={tmp_path}/run"]) == PREEMPTED
    assert "stopped at once by SIGINT" in capsys.readouterr().err and not (tmp_path / "run").exists()


def test_a_second_sigterm_does_not_cut_off_the_save():
    """A scheduler sends one more when time is up; a second Ctrl-C is of somebody who does not want to wait."""

    def ended(*args):
        raise AssertionError("the process is ended")

    before = signal.signal(signal.SIGTERM, ended)
    try:
        with stop_on_signals() as stop:
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)
            assert stop.after(1)
        assert signal.getsignal(signal.SIGTERM) is ended
    finally:
        signal.signal(signal.SIGTERM, before)
    with stop_on_signals() as stop:
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert stop.after(1)


@pytest.mark.parametrize(
    ("more", "code"),
    [
        pytest.param([], PREEMPTED, marks=pytest.mark.slow),
        (["run.stop_after=4"], PREEMPTED),
        pytest.param(["run.stop_after=2"], DONE, marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_a_signal_before_the_step_to_stop_after_is_no_end(more, code, corpus, tmp_path, monkeypatch, capsys):
    """Whoever starts the run again where it was preempted asks the exit code alone."""

    def told(self, step):
        self.signals += [signal.SIGTERM] * (step == 2)
        return bool(self.signals)

    monkeypatch.setattr(Stop, "after", told)
    assert main([*PLAIN, *corpus, f"run.dir={tmp_path}", *more]) == code
    assert ("stopped by SIGTERM after step 2" in capsys.readouterr().out) == (code == PREEMPTED)


def test_a_cluster_that_is_not_there_is_named(corpus, tmp_path, capsys):
    assert main([*PLAIN, *corpus, f"run.dir={tmp_path}/run", "cluster=auto"]) == WRONG
    message = capsys.readouterr().err
    assert "cluster=auto finds no" in message and "cluster=manual" in message


@pytest.mark.slow
@pytest.mark.parametrize(
    "full", [pytest.param("tensorboardX.record_writer.RecordWriter.write", marks=pytest.mark.slow), "json.dumps"]
)
def test_metrics_that_cannot_be_written_end_the_run_and_do_not_block_it(full, corpus, tmp_path, capsys, monkeypatch):
    """Many more steps than any queue holds: a writer that dies in silence would leave the loop waiting for ever."""
    seen, real = [], pkgutil.resolve_name(full)

    def fails(*args, **kwargs):
        seen.append(1)
        if len(seen) > 20 and threading.current_thread().name == "metrics":
            raise OSError(28, "No space left on device")
        return real(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(full, fails)
        assert main([*PLAIN, *corpus, f"run.dir={tmp_path}", "run.steps=60"]) == WRONG
    message = capsys.readouterr().err
    assert f"run.dir = '{tmp_path}' cannot be written: No space left" in message and "free space" in message
    assert main([*PLAIN, *corpus, f"run.dir={tmp_path}", "run.steps=60"]) == DONE
    assert len(losses(tmp_path)) == 60


@pytest.mark.parametrize("name", [pytest.param("summary.json", marks=pytest.mark.slow), "loss.png"])
@pytest.mark.slow
def test_a_summary_that_could_not_be_written_is_made_by_the_next_start(name, corpus, tmp_path, capsys):
    (tmp_path / name).mkdir()
    assert main([*PLAIN, *corpus, f"run.dir={tmp_path}", "run.steps=3"]) == WRONG
    assert "run.dir" in capsys.readouterr().err and not list(tmp_path.glob("*tmp*")), "nothing half-written"
    (tmp_path / name).rmdir()
    assert main([*PLAIN, *corpus, f"run.dir={tmp_path}", "run.steps=3"]) == DONE
    assert (tmp_path / name).is_file() and json.loads((tmp_path / "summary.json").read_text())["steps"] == 3
    before = (tmp_path / "summary.json").stat().st_mtime_ns
    assert main([*PLAIN, *corpus, f"run.dir={tmp_path}", "run.steps=3"]) == DONE
    assert (tmp_path / "summary.json").stat().st_mtime_ns == before, "made once"


@pytest.mark.slow
def test_a_run_without_a_loss_has_a_summary_that_says_so(corpus, tmp_path, capsys):
    """All updates may be left out; NaN is no JSON, and what cannot be written as a number was a traceback."""
    wrong = ["model.init_std=1e3", "model.attention_scale=8e37", "guards.nonfinite=skip", "run.steps=3"]
    assert main([*PLAIN, *corpus, f"run.dir={tmp_path}", *wrong]) == DONE
    assert "loss none -> none in 3 steps" in capsys.readouterr().out

    def refused(word):
        raise AssertionError(f"{word} is no JSON")

    summary = json.loads((tmp_path / "summary.json").read_text(), parse_constant=refused)
    assert summary["loss_first"] is None and summary["loss_last"] is None and summary["steps"] == 3


@pytest.mark.slow  # two runs
def test_the_loss_of_a_later_step_is_not_that_of_the_first(corpus, tmp_path):
    given = [*PLAIN, *corpus, f"run.dir={tmp_path}", "run.steps=3"]
    assert main([*given, "run.stop_after=2"]) == DONE
    (tmp_path / "metrics.jsonl").unlink()
    assert main(given) == DONE
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["loss_first"] is None and summary["loss_last"] == losses(tmp_path)[-1]


def test_speeds_are_of_the_steps_on_the_devices_of_the_summary():
    """A run may go on with another mesh: steps on one device over the peak of four would be a quarter of what they were."""
    row = {"loss": 1.0, "tokens": 8.0, "flops_causal": 4.0, "flops_full": 8.0}
    made = [row | {"step": n, "step_time": 2.0, "devices": 1} for n in range(1, 21)]
    made += [row | {"step": n, "step_time": 0.5, "devices": 4} for n in range(21, 26)]
    found = summarise(made, devices=4, peak=4.0)
    assert found["step_time"] == 0.5 and found["mfu_causal"] == 4.0 / 0.5 / 4 / 4.0 and found["tokens_per_second"] == 16
    old = [{name: value for name, value in one.items() if name != "devices"} for one in made]
    assert summarise(old, devices=4, peak=4.0)["step_time"] == 2.0, "rows from before it was recorded"
    other = [one | {"devices": 4, "mesh": "sp=4" if one["devices"] == 1 else "fsdp=4"} for one in made]
    assert summarise(other, devices=4, peak=4.0)["step_time"] == 0.5, "the same number of devices, in another mesh"


def test_rows_that_are_no_metrics_are_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1, "loss": 2.0}\n{"a": 1}\n{"step": 3, "loss": 1.0}\n')
    assert [row["step"] for row in read_rows(path)] == [1, 3], "rows after a damaged line must be kept"
    odd = ["[" * 100000, "1" * 5000, "null", "[1]", '{"step": "2"}', '{"step": true}', '{"step": 2, "step_time": "fast"}',
           '{"step": 2, "step_time": 0.0}', '{"step": 2, "loss": [1]}', '{"step": 2, "tokens": NaN}']  # fmt: skip
    path.write_text("\n".join(['{"step": 1, "loss": null}', *odd, '{"step": 3, "loss": 1.0}']))
    assert [row["step"] for row in read_rows(path)] == [1, 3]
    large = {"step": 2, "loss": 1.0, "flops_causal": 7.1e18, "flops_full": 1.4e19}
    path.write_text(json.dumps(large) + "\n")
    assert read_rows(path) == [large], "a step of 8B parameters and 8 rows of 2^20 tokens"
    path.write_bytes(b"\xdb\xff\x00")
    assert read_rows(path) == []


def test_the_cause_of_a_failed_write_is_not_cut_off():
    reason = integrity.reason_of(ValueError("RESOURCE_EXHAUSTED: " + "x" * 900 + ": No space left on device\nmore"))
    assert reason.startswith("ValueError: RESOURCE_EXHAUSTED") and reason.endswith("No space left on device")
    assert len(reason) < 350
    assert (
        integrity.reason_of(ValueError("bad chunk. See full TensorStore details: <bound method>"))
        == "ValueError: bad chunk"
    )


def test_a_full_disk_is_told_with_the_file_that_was_written(tmp_path, monkeypatch):
    """The error of a write names none: reports, evaluations and exports ended in "No space left on device" alone."""

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_text", full)
    with pytest.raises(OSError, match=f"No space left.*{tmp_path}/page.html"):
        write_atomic(tmp_path / "page.html", "")
    with pytest.raises(ValueError, match=f"to = '{tmp_path}/out' takes .* its disk is full: free some"):
        save(tmp_path / "out", compose([]).model, full)
    assert not list(tmp_path.iterdir())


def test_checkpoints_that_are_a_file(corpus, tmp_path, capsys):
    (tmp_path / "checkpoints").write_text("mine")
    assert main([*PLAIN, *corpus, f"run.dir={tmp_path}"]) == BAD_CHECKPOINT
    assert "is not a folder" in capsys.readouterr().err and (tmp_path / "checkpoints").read_text() == "mine"


@contextlib.contextmanager
def taken(folder):
    """While another process has it."""
    with subprocess.Popen(["sleep", "600"]) as other:
        owner = replace(run_lock._me(), id="other", pid=other.pid, born=run_lock._born(other.pid))
        (folder / ".owner").write_text(json.dumps(asdict(owner)))
        try:
            yield
        finally:
            other.kill()


@pytest.mark.slow  # runs; the lock itself is in test_run_lock.py
def test_a_folder_in_which_another_process_trains_is_left_alone(corpus, tmp_path, monkeypatch, capsys):
    given = [*PLAIN, *corpus, f"run.dir={tmp_path}", "checkpoint.every=1"]
    assert main([*given, "run.stop_after=2"]) == DONE
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")}
    assert not (tmp_path / ".owner").exists(), "a run that has ended holds no lock"
    monkeypatch.setattr(run_lock, "_PATIENCE", 0.1)
    with taken(tmp_path):
        assert main([*given, "run.stop_after=3"]) == WRONG
        assert "another process trains in it (pid " in capsys.readouterr().err
        (tmp_path / ".owner").rename(tmp_path.parent / "owner")
        assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")} == before
        (tmp_path.parent / "owner").rename(tmp_path / ".owner")
    assert main([*given, "run.stop_after=3"]) == DONE, "that process is gone"
    assert "belonged to pid" in capsys.readouterr().out and not (tmp_path / ".owner").exists()


@pytest.mark.slow
def test_a_run_whose_folder_is_taken_over_before_a_save_saves_nothing(corpus, tmp_path, monkeypatch, capsys):
    """As when its machine was cut off for minutes, and another one goes on with the run."""
    taken_over = contextlib.ExitStack()
    after = Stop.after

    def other_takes_it(self, step):
        if step == 2:
            (tmp_path / ".owner").unlink()
            taken_over.enter_context(taken(tmp_path))
        return after(self, step)

    monkeypatch.setattr(Stop, "after", other_takes_it)
    with taken_over:
        assert main([*PLAIN, *corpus, f"run.dir={tmp_path}", "checkpoint.every=2", "run.steps=3"]) == WRONG
    assert "belongs to this run no more: pid" in capsys.readouterr().err
    assert not (tmp_path / "checkpoints").exists() and (tmp_path / ".owner").exists()


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.slow
def test_two_runs_do_not_share_a_folder_of_checkpoints(there, corpus, tmp_path, monkeypatch, capsys):
    where, first = tmp_path / "checkpoints", tmp_path / "first"
    given = [*PLAIN, *corpus, f"checkpoint.dir={where}", "checkpoint.every=1", "run.steps=1"]
    if there:
        assert main([*given, f"run.dir={first}"]) == DONE
    else:
        where.mkdir()
    monkeypatch.setattr(run_lock, "_PATIENCE", 0.1)
    with taken(where):
        assert main([*given, f"run.dir={tmp_path / 'second'}"]) == WRONG
        assert f"checkpoint.dir = '{where}': another process trains in it" in capsys.readouterr().err
    assert not (tmp_path / "second").exists()


@pytest.mark.slow
def test_the_own_checkpoints_of_a_run_that_goes_on_are_no_other_runs(corpus, tmp_path, monkeypatch, capsys):
    first, given = tmp_path / "first", [*PLAIN, *corpus, "checkpoint.every=1", "run.steps=1"]
    assert main([*given, f"run.dir={first}"]) == DONE
    monkeypatch.setattr(run_lock, "_PATIENCE", 0.1)
    other = [*given, f"run.dir={tmp_path / 'second'}", f"checkpoint.dir={first}/checkpoints"]
    with taken(first):
        assert main(other) == WRONG
        assert f"checkpoint.dir = '{first}': another process trains in it" in capsys.readouterr().err
    assert main(other) == DONE, "the first one has ended"


def test_a_run_does_not_begin_anew_where_its_checkpoints_are_elsewhere(corpus, tmp_path, capsys):
    run, last = tmp_path / "run", tmp_path / "run" / "checkpoints" / "2"
    last.mkdir(parents=True)
    write_atomic(run / "recipe.json", '{"checkpoint.dir": null}')
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": 5.0}\n{"step": 2, "loss": 4.0}\n')
    given = [*PLAIN, *corpus, f"run.dir={run}", f"checkpoint.dir={tmp_path / 'other'}", "run.stop_after=1"]
    assert main(given) == WRONG
    said = capsys.readouterr().err
    assert f"has one of step 2 in {last.parent}, where checkpoint.dir was None: restore checkpoint.dir" in said
    assert losses(run) == [5.0, 4.0] and not (tmp_path / "other").exists()
    last.rmdir()
    assert main(given) == DONE and len(losses(run)) == 1
    assert "starting at step 1 and discarding the 2 rows of metrics.jsonl" in capsys.readouterr().out


def test_a_folder_of_checkpoints_is_no_run_dir(corpus, tmp_path, capsys):
    assert main([*PLAIN, *corpus, f"run.dir={tmp_path}", f"checkpoint.dir={tmp_path}/."]) == WRONG
    assert "is run.dir, but a checkpoint folder must hold nothing else" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_folder_of_checkpoints_that_two_processes_make_is_of_the_first(corpus, tmp_path, monkeypatch, capsys):
    where = tmp_path / "checkpoints"

    def other_trains(*args, **options):
        (where / "1").mkdir(parents=True)
        return compile_stage(*args, **options)

    compile_stage = loop.compile_stage
    monkeypatch.setattr(loop, "compile_stage", other_trains)
    assert main([*PLAIN, *corpus, f"run.dir={tmp_path / 'run'}", f"checkpoint.dir={where}", "run.steps=1"]) == WRONG
    assert f"checkpoint.dir = '{where}': another process has trained in it since" in capsys.readouterr().err


@pytest.mark.slow
def test_what_a_process_saves_while_another_waits_for_it_is_gone_on_from(corpus, tmp_path, monkeypatch, capsys):
    given = [*PLAIN, *corpus, f"run.dir={tmp_path / 'run'}", "checkpoint.every=1"]
    assert main([*given, "run.stop_after=2"]) == DONE
    last = tmp_path / "run" / "checkpoints" / "2"
    last.rename(tmp_path / "2")  # is not written yet
    other = contextlib.ExitStack()
    other.enter_context(taken(tmp_path / "run"))

    def ends(seconds):
        (tmp_path / "2").rename(last)
        other.close()

    monkeypatch.setattr(run_lock, "time", SimpleNamespace(monotonic=time.monotonic, sleep=ends))
    capsys.readouterr()
    assert main([*given, "run.stop_after=3"]) == DONE
    said = capsys.readouterr().out
    assert "waiting for another process that trains in" in said
    assert "resuming from step 2" in said and "removing" not in said and len(losses(tmp_path / "run")) == 3


@pytest.mark.slow
def test_a_folder_that_two_processes_make_is_of_the_first(corpus, tmp_path, monkeypatch, capsys):
    folder, given = tmp_path / "run", [*PLAIN, *corpus, f"run.dir={tmp_path / 'run'}"]

    def other_trains(*args, **options):
        folder.mkdir()
        (folder / "metrics.jsonl").write_text("")
        return compile_stage(*args, **options)

    compile_stage = loop.compile_stage
    monkeypatch.setattr(loop, "compile_stage", other_trains)
    assert main([*given, "run.steps=1"]) == WRONG
    assert "another process has trained in it since" in capsys.readouterr().err
    assert [p.name for p in folder.iterdir()] == ["metrics.jsonl"]
