"""Files and reports that somebody else has made: each wrong one is a sentence, and nothing is read that should not be."""

import json
import os
import signal

import pytest

from ejdist.cluster import HostLost
from ejdist.cluster.verdict import Verdict, of_start
from ejdist.weights.files import INDEX, SINGLE, WeightsError, read_folder, read_json
from launch.errors import DONE, HOST_LOST, WRONG, exit_code_of, run_command
from recipes.hostile import is_secret, too_many_values
from recipes.schema import RecipeError, compose


@pytest.fixture(autouse=True)
def in_time():
    """Whoever waits for a pipe would wait for ever."""
    before = signal.signal(signal.SIGALRM, lambda *_: pytest.fail("it waits"))
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/passwd", "a/../../x", "~/x"])
def test_a_weight_map_stays_in_its_folder(tmp_path, name):
    (tmp_path / "a").mkdir()
    (tmp_path / "x.safetensors").write_text("{}")
    (tmp_path / "a" / INDEX).write_text(json.dumps({"weight_map": {"w": name}}))
    with pytest.raises(WeightsError, match="which is not in its folder; copy it again"):
        read_folder(tmp_path / "a")


@pytest.mark.parametrize("name", [INDEX, SINGLE])
def test_a_pipe_is_no_file(tmp_path, name):
    os.mkfifo(tmp_path / name)
    with pytest.raises(WeightsError, match="is not a file: copy the folder again"):
        read_folder(tmp_path)


def header(text):
    return len(text).to_bytes(8, "little") + text + bytes(64)


@pytest.mark.parametrize(
    "text",
    [
        b"[" * 50_000,
        b'{"w": {"dtype": "F32", "shape": [-1, -4], "data_offsets": [0, 16]}}',
        b'{"w": {"dtype": "F32", "shape": [4], "data_offsets": [0.0, 16.0]}}',
        b'{"w": {"dtype": "F32", "shape": [true, 4], "data_offsets": [0, 16]}}',
    ],
    ids=["deep", "negative", "float", "bool"],
)
def test_a_header_that_is_none(tmp_path, text):
    (tmp_path / SINGLE).write_bytes(header(text))
    with pytest.raises(WeightsError, match="has an unreadable header"):
        read_folder(tmp_path)


def test_deep_json_is_a_sentence(tmp_path):
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(WeightsError, match=r"config\.json is not JSON"):
        read_json(tmp_path / "config.json")


def test_a_bomb_of_aliases_is_refused_before_it_is_composed(tmp_path):
    lines = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 9)]
    (tmp_path / "recipe").mkdir()
    bomb = tmp_path / "recipe" / "mine.yaml"
    bomb.write_text("# @package _global_\n" + "\n".join(lines) + "\n")
    with pytest.raises(RecipeError, match=r"aliases \(\*NAME\) make 4\d\d,\d\d\d,\d\d\d values of recipe/mine.yaml"):
        compose(["--config-dir", str(tmp_path), "recipe=mine"])
    bomb.write_text("# @package _global_\nmodel: &m {d_model: 64}\nx: *m\n")
    assert too_many_values(bomb) == 0


@pytest.mark.parametrize(
    ("word", "key"),
    [
        ("run.dir=${oc.env:HF_TOKEN}", "run.dir"),
        ("data.source='${oc.env:AWS_SECRET_ACCESS_KEY,x}/a'", "data.source"),
        ("data.source=['a','b-${oc.env:WANDB_API_KEY}']", r"data.source\[1\]"),
    ],
)
def test_a_recipe_takes_no_secret(monkeypatch, word, key):
    monkeypatch.setenv("HF_TOKEN", "hf_value")
    with pytest.raises(
        RecipeError, match=f"{key} takes .* from the environment, which is named as secrets are"
    ) as said:
        compose(["recipe=long_context", word])
    assert "hf_value" not in str(said.value)


def test_other_variables_are_taken(monkeypatch):
    monkeypatch.setenv("SCRATCH", "/scratch/me")
    assert compose(["recipe=long_context", "run.dir=${oc.env:SCRATCH}/a"]).run.dir == "/scratch/me/a"
    assert not any(map(is_secret, ["TOKENIZERS_PARALLELISM", "GOOGLE_APPLICATION_CREDENTIALS", "KEYBOARD"]))


class PanicException(BaseException):
    """As a library in Rust raises it."""


def test_a_panic_of_a_tokenizer_is_a_sentence(capsys, monkeypatch):
    """And states the end, by which the other hosts are told."""
    stated = []
    monkeypatch.setattr("ejdist.cluster.verdict.give", lambda code, reason: stated.append((code, reason)))

    def body(arguments):
        raise PanicException("called `Option::unwrap()` on a `None` value")

    assert run_command(["x"], body, str) == WRONG
    said = capsys.readouterr().err
    assert (
        said.startswith("error: a library cannot use a file") and "Option::unwrap()" in said and "Traceback" not in said
    )
    assert [code for code, _ in stated] == [WRONG]
    with pytest.raises(SystemExit):
        run_command(["x"], lambda _: (_ for _ in ()).throw(SystemExit(3)), str)


def test_a_failure_is_not_code_0():
    """What another host has reported, or left in the launcher's file."""
    assert exit_code_of(HostLost("host 1 failed", 0)) == HOST_LOST
    assert of_start([134, 69], Verdict(0, "nothing")) == 134 != DONE
