"""Runs that start from weights: of another run, of files, on a mesh; and the command that writes a run's parameters."""

import json
import shlex

import jax
import numpy as np
import published_loop as published
import pytest
from safetensors.numpy import load_file
from shared import once
from small_run import TINY, losses
from test_weights import loaded, made, state_in

from ejdist.mesh import make_mesh
from ejdist.training import integrity
from ejdist.training.checkpoint import CheckpointError
from ejdist.training.data.tokenizer import ByteTokenizer, FileTokenizer, fingerprint_of, train_bpe
from ejdist.training.loop import train
from ejdist.training.program import make_program
from ejdist.training.restore import start_from
from ejdist.training.resume import check_same_run, fingerprint
from ejdist.training.runs import Run
from ejdist.training.start import open_source
from ejdist.weights.families import read_config
from ejdist.weights.files import WeightsError
from ejdist.weights.tensors import declared_leaves
from launch.errors import BAD_CHECKPOINT, DONE, WRONG
from launch.export import main
from recipes.schema import compose

MODEL = ["model.vocab_size=320", "mesh.sp=1", "sequence.order=contiguous"]


def run(directory, corpus, *overrides):
    said = []
    outcome = train(compose([*TINY, *corpus, *MODEL, f"run.dir={directory}", *overrides]), log=said.append)
    return outcome, "\n".join(said)


@pytest.fixture(scope="session")
def trained(corpus, tmp_path_factory):
    """A folder with a tokenizer and a run of three steps, with checkpoints of the second and the third."""

    def make(folder):
        (folder / "tokenizer.json").write_text(train_bpe(iter(["a few words", "and a few more"]), 300))
        (folder / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
        keys = [f"data.tokenizer={folder}/tokenizer.json", "run.steps=3", "checkpoint.every=2"]
        run(folder / "run", corpus, *keys)

    return once(tmp_path_factory, "trained", make)


@pytest.mark.slow
def test_a_run_starts_from_another_and_from_its_files_alike(trained, corpus, tmp_path, capsys):
    """The same bits, a new optimizer and schedule; and once it has a checkpoint of its own it goes on from that."""
    tokenizer = f"data.tokenizer={trained}/tokenizer.json"
    assert main([f"run.dir={trained}/run", f"to={tmp_path}/files", tokenizer]) == DONE
    assert f"Qwen3ForCausalLM, step 3: 25,792 parameters as float32 in {tmp_path}/files" in capsys.readouterr().out
    _, found = loaded(tmp_path / "files")
    there = Run(trained / "run")
    c, leaves = there.model, declared_leaves(there.model)
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    own = there.load({n: jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=here) for n, p in leaves.items()})
    assert set(own) == set(found) and all(np.array_equal(own[n], found[n]) for n in own)
    assert read_config(tmp_path / "files")[1].head_dim == c.head_dim == 8

    keys = [tokenizer, "run.steps=2", "optimizer.warmup_steps=1", "optimizer.learning_rate=1e-3"]
    _, said = run(tmp_path / "one", corpus, *keys, f"model.init_from={trained}/run")
    assert f"parameters read from step 3 of the run in {trained}/run" in said
    _, said = run(tmp_path / "other", corpus, *keys, f"model.init_from={tmp_path}/files")
    assert f"parameters read from {tmp_path}/files" in said
    assert losses(tmp_path / "one") == losses(tmp_path / "other"), "equal parameters must give equal losses"
    assert losses(tmp_path / "one")[0] < losses(trained / "run")[0] - 0.1, "it does not start anew"
    rows = [json.loads(line) for line in (tmp_path / "one" / "metrics.jsonl").read_text().splitlines()]
    assert rows[0]["step"] == 1 and rows[0]["learning_rate"] == pytest.approx(1e-3), "the schedule is its own"

    before = losses(tmp_path / "one")
    constant = [tokenizer, "run.steps=3", "run.extend=true", *keys[2:]]
    _, said = run(tmp_path / "one", corpus, *constant, "model.init_from=moved/since")
    assert "model.init_from = 'moved/since' is not read: the run resumes from its own checkpoint" in said
    assert "resuming from step 2" in said and losses(tmp_path / "one")[:2] == before


def test_where_parameters_came_from_does_not_stop_a_run(tmp_path):
    stored = fingerprint(compose([*TINY, "model.init_from=a"]))
    assert stored["model.init_from"] == "a"
    for given in ("model.init_from=b", "model.init_from=null"):
        check_same_run(stored, compose([*TINY, given]), 3, tmp_path)
    check_same_run({k: v for k, v in stored.items() if k != "model.init_from"}, compose(TINY), 3, tmp_path)
    with pytest.raises(ValueError, match=r"model\.num_layers"):
        check_same_run(stored, compose([*TINY, "model.num_layers=3"]), 3, tmp_path)


@pytest.mark.slow
def test_a_digest_tells_weights_from_those_of_another_step_and_copies_from_none(trained, tmp_path):
    for name in ("one", "same", "other"):
        step = ["step=2"] if name == "other" else []
        assert main([f"run.dir={trained}/run", f"to={tmp_path}/{name}", *step]) == DONE
    c = Run(trained / "run").model
    one, same, other = (open_source(str(tmp_path / name), c).digest() for name in ("one", "same", "other"))
    assert one == same != other
    (first, again), earlier = (Run(trained / "run").digest() for _ in range(2)), Run(trained / "run", 2).digest()
    assert first == again != earlier == Run(trained / "run", 2).digest()


@pytest.mark.slow  # a run from another is in the test above
def test_the_first_state_has_the_weights_and_nothing_else_of_another_run(tmp_path):
    made(tmp_path, "deepseek")
    c, leaves = loaded(tmp_path)
    sections = compose(["recipe=short_context", "mesh.ep=2", "mesh.fsdp=2", "data.sequence_length=32"])
    sections.model = c
    program = make_program(sections, make_mesh(**vars(sections.mesh), devices=jax.devices()[:4]))
    said = []
    state = start_from(program, open_source(str(tmp_path), c), said.append)
    assert f"{sum(x.size for x in leaves.values()):,} parameters read from {tmp_path}" in said[-1]
    assert int(state.step) == 0 and not any(np.any(x) for x in jax.tree.leaves(state.opt_state))
    for name, x in state.params["layers"].items():
        np.testing.assert_array_equal(x, leaves[f"params.layers.{name}"], err_msg=name)
    np.testing.assert_array_equal(state.buffers["experts"]["bias"], leaves["buffers.experts.bias"])
    for got, like in zip(jax.tree.leaves(state), jax.tree.leaves(program.state), strict=True):
        assert got.sharding.is_equivalent_to(like.sharding, got.ndim) and got.dtype == like.dtype
    # Counts of the step before are of a run, and start as they do in any.
    sections.model.experts.balance = "global"
    program = make_program(sections, make_mesh(**vars(sections.mesh), devices=jax.devices()[:4]))
    state = start_from(program, open_source(str(tmp_path), sections.model), said.append)
    assert np.all(np.asarray(state.buffers["experts"]["load"]) == 1) and np.any(
        np.asarray(state.buffers["experts"]["bias"])
    )


def test_a_tokenizer_that_is_not_that_of_the_weights_is_told(trained, tmp_path):
    there = Run(trained / "run")
    source = open_source(f"{trained}/run", there.model)
    own = fingerprint_of(trained / "tokenizer.json")
    assert source.tokenizer == own == FileTokenizer(trained / "tokenizer.json").fingerprint
    assert not source.told_of_tokenizer(own) and fingerprint_of(tmp_path / "none") is None
    (line,) = source.told_of_tokenizer(ByteTokenizer.fingerprint)
    assert line.startswith(f"data.tokenizer is not that of step 3 of the run in {trained}/run: a token whose id")
    there.close()


def test_weights_of_another_model_are_named_before_anything_is_written(trained, corpus, tmp_path):
    for given, words in (
        (["model.num_layers=3"], ["model.num_layers = 3", f"run in {trained}/run has 2", "give model.num_layers=2"]),
        (["model.qk_norm=false"], ["give model.qk_norm=true"]),
    ):
        with pytest.raises(WeightsError) as caught:
            run(tmp_path / "new", corpus, f"model.init_from={trained}/run", *given)
        assert all(w in str(caught.value) for w in words), caught.value
    for empty, words in (("none", "is no folder"), ("", "has neither")):
        with pytest.raises(WeightsError, match=words):
            run(tmp_path / "new", corpus, f"model.init_from='{tmp_path}/{empty}'")
    assert not (tmp_path / "new").exists()


def test_parameters_of_a_checkpoint_that_changed_are_not_taken(trained, monkeypatch):
    there = Run(trained / "run", 2)
    assert there.step == 2
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    with pytest.raises(CheckpointError, match=r"params\.nothing is missing there and float32\[3\] here"):
        there.load({"params.nothing": jax.ShapeDtypeStruct((3,), np.float32, sharding=here)})
    norm = jax.ShapeDtypeStruct((32,), np.float32, sharding=here)
    assert there.load({"params.final_norm": norm})["params.final_norm"].shape == (32,)
    monkeypatch.setattr(integrity, "digest", lambda tree: jax.tree.map(lambda x: np.uint32(0), tree))
    with pytest.raises(CheckpointError, match=r"params\.final_norm is not what was saved"):
        there.load({"params.final_norm": norm})


def test_what_the_command_writes(trained, tmp_path, capsys, monkeypatch):
    source, tokenizer = f"run.dir={trained}/run", f"data.tokenizer={trained}/tokenizer.json"
    assert main([source, f"to={tmp_path}/a", tokenizer, "step=2", "dtype=bfloat16"]) == DONE
    out = capsys.readouterr().out
    assert "step 2" in out and "as bfloat16" in out and "no tokenizer" not in out
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    eos = FileTokenizer(trained / "tokenizer.json").eos_id
    assert config["eos_token_id"] == eos and config["max_position_embeddings"] == 64
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "a" / name).read_bytes() == (trained / name).read_bytes()
    assert {str(v.dtype) for v in load_file(tmp_path / "a" / "model.safetensors").values()} == {"bfloat16"}
    assert main([source, f"to={tmp_path}/b", "max_position_embeddings=4096"]) == DONE
    assert len(capsys.readouterr().out.splitlines()) == 1, "the run's tokenizer is where the run says"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "b" / name).read_bytes() == (trained / name).read_bytes()
    assert json.loads((tmp_path / "b" / "config.json").read_text())["max_position_embeddings"] == 4096
    two, three = state_in(tmp_path / "a"), state_in(tmp_path / "b")
    name = "model.layers.1.mlp.up_proj.weight"
    assert np.abs(two[name].astype(np.float32) - three[name]).max() > 1e-4, "must be the requested step"
    monkeypatch.setattr(ByteTokenizer, "fingerprint", FileTokenizer(trained / "tokenizer.json").fingerprint)
    assert main([source, f"to={tmp_path}/c"]) == DONE
    assert "data.tokenizer=bytes" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("scaling", "context"),
    [
        *(pytest.param(scaling, 64, marks=pytest.mark.slow) for scaling in ("ntk", "linear")),
        pytest.param("yarn", 384, marks=pytest.mark.slow),
        pytest.param("llama3", 384, marks=pytest.mark.slow),
    ],
)
def test_the_context_that_is_written_is_one_that_the_run_names(scaling, context, corpus, tmp_path):
    """Linear and ntk read no model.rope_original_length, so that its default says nothing of theirs."""
    keys = [f"model.rope_scaling={scaling}", "model.rope_factor=4.0", "run.steps=1"]
    keys += ["model.rope_original_length=96"] * (context > 64)
    run(tmp_path / "run", corpus, *keys)
    assert main([f"run.dir={tmp_path}/run", f"to={tmp_path}/to"]) == DONE
    assert json.loads((tmp_path / "to" / "config.json").read_text())["max_position_embeddings"] == context


def test_the_model_of_a_folder_as_overrides(trained, tmp_path, capsys):
    made(tmp_path / "their models, 2", "deepseek")
    assert main([f"from={tmp_path}/their models, 2"]) == DONE
    said = capsys.readouterr()
    assert said.err.startswith("# deepseek_v3")
    recipe = compose(shlex.split(said.out))  # as a shell gives them
    assert recipe.model.init_from == f"{tmp_path}/their models, 2"
    assert open_source(recipe.model.init_from, recipe.model).notes == []


WRONG_CALLS = [
    ([], ["run.dir=DIR and to=DIR"]),
    (["to={tmp}/to"], ["run.dir=DIR and to=DIR"]),
    (["run.dir={run}", "to={tmp}/to", "run.steps=3"], ["'run.steps=3'", "one of run.dir, to"]),
    (["run.dir={run}", "to="], ["cannot read 'to='"]),
    (["run.dir={run}", "to={tmp}/to", "to={tmp}/other"], ["to is given twice"]),
    (["from={run}", "to={tmp}/to"], ["takes no other key"]),
    (["from={run}"], ["config.json cannot be read"]),
    (["run.dir={tmp}/none", "to={tmp}/to"], ["holds no checkpoint"]),
    (["run.dir={run}", "to={tmp}/to", "step=7"], ["no checkpoint of step 7", "2, 3"]),
    (["run.dir={run}", "to={tmp}/to", "step=x"], ["step = 'x' must be a positive number"]),
    (["run.dir={run}", "to={tmp}/to", "max_position_embeddings=0"], ["max_position_embeddings = '0'"]),
    (["run.dir={run}", "to={tmp}/to", "dtype=int8"], ["dtype = 'int8'", "bfloat16"]),
    (["run.dir={run}", "to={run}"], ["already exists"]),
    (["run.dir={run}", "to={run}/checkpoints/hf"], ["checkpoints and nothing else", "next to it"]),
    (["run.dir={run}", "to={tmp}/to", "data.tokenizer={tmp}/no.json"], ["no such file"]),
    (["run.dir={run}", "to={tmp}/to", "data.tokenizer={tmp}/other.json"], ["not the file that the run was trained with"]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "words"), WRONG_CALLS, ids=lambda x: "" if isinstance(x, str) else x[-1] if x else "none"
)
def test_the_command_called_wrongly(arguments, words, trained, tmp_path, capsys):
    (tmp_path / "other.json").write_text(train_bpe(iter(["other words"]), 301))
    given = [a.format(run=f"{trained}/run", tmp=tmp_path) for a in arguments]
    assert main(given) == WRONG
    message = capsys.readouterr().err
    assert message.startswith("error: ") and message.count("\n") == 1 and all(w in message for w in words), message
    assert [p.name for p in tmp_path.iterdir()] == ["other.json"]


def test_a_damaged_checkpoint_has_its_own_exit_code(trained, tmp_path, capsys):
    (tmp_path / "run" / "checkpoints" / "3").mkdir(parents=True)
    assert main([f"run.dir={tmp_path}/run", f"to={tmp_path}/to"]) in (BAD_CHECKPOINT, WRONG)
    assert str(tmp_path / "run") in capsys.readouterr().err
    assert main(["--help"]) == DONE and "python -m launch.export from=" in capsys.readouterr().out
    assert published.V < 257
