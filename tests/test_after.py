"""What a run that has ended says may come next: each command is run as it is printed."""

import importlib
import shlex

import pytest
from small_run import TINY

from launch.after import next_commands
from launch.errors import DONE
from launch.train import main
from recipes.arguments import assigned, in_shell
from recipes.schema import compose


def commands(lines):
    """Returns (command, its arguments) of each line of commands."""
    assert lines[0] == "next:"
    words = [shlex.split(line, comments=True) for line in lines[1:]]
    assert all(w[:2] == ["python", "-m"] for w in words)
    return [(w[2].removeprefix("launch."), w[3:]) for w in words]


@pytest.mark.slow  # an evaluation of every task is half a minute
def test_what_a_run_prints_at_its_end_can_be_run(corpus, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    given = [*TINY, *corpus, "run.dir=outputs/a run", "run.steps=2", "data.sequence_length=128"]
    assert main([*given, "run.stop_after=1"]) == DONE
    lines = capsys.readouterr().out.splitlines()
    (name, rest), report = commands(lines[lines.index("next:") :])
    assert (name, report[0]) == ("train", "report")
    assert main(rest) == DONE
    lines = capsys.readouterr().out.splitlines()
    found = commands(lines[lines.index("next:") :])
    assert [name for name, _ in found] == ["evaluate", "generate", "export", "report", "train"]
    for name, rest in found:
        assert importlib.import_module(f"launch.{name}").main(rest) == DONE, (name, rest, capsys.readouterr())
    assert (tmp_path / "outputs" / "a run_hf" / "config.json").exists()
    assert "resuming from step 2" in capsys.readouterr().out


def test_an_export_that_would_be_refused_does_not_come_next():
    given = ["recipe=moe", "run.steps=7", "model.logits_soft_cap=30"]
    assert [name for name, _ in commands(next_commands(given, compose(given), 7))] == [
        "evaluate",
        "generate",
        "report",
        "train",
    ]


def test_a_command_of_a_sweep_is_printed_in_two_kinds_of_quotes():
    given = ["recipe=long_context", "run.steps=7", assigned("run.dir", "o/run.seed=1,run.steps=7"), "run.trackers=[]"]
    *_, longer = next_commands(given, compose(given), 7)
    assert """ "run.dir='o/run.seed=1,run.steps=7'" """ in longer and """'"'""" not in longer
    for hard in ("a'b", "a'b$c", "a'b`c", "a'b!c", "a'b\\c", "a'b\"c", "a'b\nc", "a b", ""):
        assert shlex.split(in_shell(["x", hard])) == ["x", hard]


def test_what_comes_next_keeps_what_the_run_was_given():
    given = [
        "recipe=long_context",
        "model=8b",
        "data=files",
        "data.source=[a b.txt,c.txt]",
        "data.tokenizer=t.json",
        "run.steps=7",
    ]
    given += ["run.dir=o", "optimizer.learning_rate=1e-4", "mesh.sp=2"]
    lines = next_commands(given, compose(given), 7)
    evaluate, generate, export, report, longer = commands(lines)
    assert evaluate == ("evaluate", ["run.dir=o"]), "it has data and mesh from the run's folder"
    assert generate == ("generate", ["run.dir=o", "prompt=TEXT"])
    assert export == ("export", ["run.dir=o", "to=o_hf"]) and report == ("report", ["run.dir=o"])
    assert compose(longer[1]).run.steps == 14 and compose(longer[1]).model == compose(given).model
    stopped = [*given, "run.stop_after=3"]
    (_, more), _ = commands(next_commands(stopped, compose(stopped), 3))
    assert more == given
