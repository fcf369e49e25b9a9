"""What users of other trainers type, and what `--help KEY` says: one table, and the comments on the fields."""

import dataclasses
import importlib
import re
import shlex

import pytest

from ejdist.dtypes import SPELLINGS, dtype_name
from ejdist.sections import flat
from launch import evaluate, export, plan, rehearse, tokenize, train
from recipes.descriptions import describe, head_of, option, sentence_of
from recipes.schema import GROUPS, Recipe, RecipeError, compose, keys_of, variants_of
from recipes.variant_words import _ELSE, _VARIANTS
from recipes.words import _MEANT, _TOLD, MEANT, NOTES, last_part, meaning

COMMANDS = ("train", "plan", "evaluate", "export", "tokenize", "doctor", "slurm", "gke", "tpu_vm", "local", "rehearse")
COMMANDS += ("report",)


def own_options():
    """Returns the options of every command that is not a launcher, and of the launchers."""
    found = {*plan.OWN, *evaluate._DEFAULTS, *tokenize._DEFAULTS, *export._EXPORT}
    for name in ("doctor", "slurm", "gke", "tpu_vm", "local"):
        found |= {f.name for f in dataclasses.fields(importlib.import_module(f"launch.{name}").Options)}
    return found


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("lr=3e-4", "did you mean 'optimizer.learning_rate'?"),
        ("cp=8", "did you mean 'mesh.sp'?"),
        ("tp=8", "did you mean 'mesh.tp'?"),
        ("pp=4", "there are no pipelines"),
        ("ep=8", "did you mean 'mesh.ep'?"),
        ("dp=8", "did you mean 'mesh.dp'?"),
        ("training.seq_len=8192", "did you mean 'data.sequence_length'?"),
        ("per_device_train_batch_size=4", "did you mean 'data.global_batch'? It counts the rows of a step"),
        ("max_steps=10", "did you mean 'run.steps'?"),
        ("output_dir=x", "did you mean 'run.dir'?"),
        ("wandb=true", "did you mean 'run.trackers'? run.trackers=[wandb] sends the metrics there"),
        ("resume=true", "the same command resumes"),
        ("num_train_epochs=3", "a run ends at run.steps"),
        ("gradient_checkpointing=true", "did you mean 'model.remat'?"),
        ("--lr 3e-4", "keys are written KEY=VALUE: optimizer.learning_rate=3e-4"),
        ("--tensor-model-parallel-size=8", "keys are written KEY=VALUE: mesh.tp=8"),
        ("--run.steps 10", "keys are written KEY=VALUE: run.steps=10"),
        ("--bf16", "keys are written KEY=VALUE: model.compute_dtype=bfloat16"),
        ("--zzz", "unknown flag '--zzz'"),
        ("zzz=1", "unknown key 'zzz'; --help lists the keys"),
        ("base.yml", "a recipe of your own is --config-dir DIR recipe=NAME"),
        ("model=llama3_8b", "did you mean model=8b?"),
        ("model=meta-llama/Llama-3.1-70B-Instruct", "did you mean model=70b?"),
        ("model=Qwen/Qwen3-8B", "did you mean model=qwen3_8b?"),
        ("model=gpt2", "a downloaded model is model=hf model.init_from=FOLDER"),
        ("model=huggingface", "did you mean model=hf?"),
        ("model.init_from_folder=x", "did you mean 'model.init_from'?"),
        ("model.gated_delta.heads=4", "did you mean 'model.gated_delta.num_key_heads'?"),
        ("add_bos_token=true", "did you mean 'data.bos'? auto follows the tokenizer's folder"),
        ("data=c4", "data.source=hf:NAME"),
        ("cluster=slurm", "did you mean cluster=auto?"),
        ("optimizer=adam", "did you mean optimizer=adamw?"),
    ],
)
def test_a_foreign_word_leads_to_ours(typed, said):
    with pytest.raises(RecipeError) as refused:
        compose(shlex.split(typed))
    assert said in str(refused.value), refused.value


def test_every_word_leads_to_something_that_is_there():
    keys, options = {*keys_of(), *GROUPS}, own_options()
    assert set(_MEANT) <= keys | options, set(_MEANT) - keys - options
    assert set(NOTES) <= set(_MEANT)
    for group, names in _VARIANTS.items():
        assert set(names) <= set(variants_of(group))
    # Keys and commands that the sentences name.
    for sentence in [*(what for what, _ in _TOLD), *_ELSE.values(), *NOTES.values()]:
        for name in re.findall(r"\b((?:run|model|mesh|data|optimizer|checkpoint|guards)\.\w+)\b", sentence):
            assert name in keys or name == "data.source", (name, sentence)
        for command in re.findall(r"launch\.(\w+)", sentence):
            importlib.import_module(f"launch.{command}")


def test_no_word_hides_a_key_of_ours_or_is_in_two_sentences():
    told = [word for _, words in _TOLD for word in words.split()]
    assert len(told) == len(set(told)) and not set(told) & set(MEANT)
    # A key that is written without its section is found by its name, not by what others call so.
    last = {key.rpartition(".")[2] for key in keys_of()}
    for word in set(MEANT) & last:
        assert any(
            ours.rpartition(".")[2] == word or ours in own_options() or word in ("cp",) for ours in MEANT[word]
        ), word
    assert last_part("--per-device-train-batch-size=4") == "per_device_train_batch_size"


def test_an_option_of_the_command_comes_before_a_key_of_its_run():
    assert meaning("gpus", ["devices", *keys_of()]) == "did you mean 'devices'?"
    assert meaning("output_dir", ["to"]) == "did you mean 'to'?"


@pytest.mark.parametrize("key", keys_of())
def test_every_key_has_a_sentence(key):
    section = Recipe()
    *inside, name = key.split(".")
    for part in inside:
        section = getattr(section, part)
    said = sentence_of(type(section), name)
    assert len(said.split()) >= 3 and not said[0].islower() and said[-1] in ".?!" and "`" not in said, said


def test_every_variant_has_a_sentence():
    assert all(len(head_of(group, name).split()) >= 2 for group in GROUPS for name in variants_of(group))


def test_help_about_keys_groups_and_options(capsys):
    assert describe("data.global_batch", ["recipe=moe"]) == (
        "data.global_batch=a whole number\n  Rows of a step, over all devices.\n  default: 4; of this command line: 8"
    )
    assert describe("model.init_from", ["recipe=moe"]).splitlines()[0] == "model.init_from=a text or null"
    assert describe("lr").startswith("lr: optimizer.learning_rate here\n\noptimizer.learning_rate=a number\n")
    assert "optimizer=wsd" in describe("optimizer") and "optimizer.b1" in describe("optimizer")
    assert "run.steps" in describe("run")
    assert train.main(["recipe=moe", "--help", "data.global_batch", "run.seed"]) == 0
    said = capsys.readouterr().out
    assert "of this command line: 8" in said and "run.seed=a whole number" in said
    assert plan.main(["--help", "gpus"]) == 0 and "gpus: devices here\n\ndevices=N" in capsys.readouterr().out
    assert train.main(["--help", "pp"]) == 2 and "no pipelines" in capsys.readouterr().err
    assert tokenize.main(["--help", "run.steps"]) == 2 and "unknown key 'run.steps'" in capsys.readouterr().err


def test_every_option_of_a_command_has_help(capsys):
    for name in COMMANDS:
        module = importlib.import_module(f"launch.{name}")
        assert module.main(["--help"]) == 0
        usage = capsys.readouterr().out
        given = {
            "plan": plan.OWN, "evaluate": [*evaluate._DEFAULTS], "tokenize": [*tokenize._DEFAULTS], "export": export._EXPORT,
            "report": ("run.dir", "to"), "rehearse": [*rehearse._OWN],
        }.get(name, [f.name for f in dataclasses.fields(module.Options)] if hasattr(module, "Options") else [])  # fmt: skip
        assert [one for one in given if option(usage, one) is None] == [], name


def test_dtypes_are_stored_by_one_name():
    for name, others in SPELLINGS.items():
        assert all(dtype_name(other.upper()) == name for other in (name, *others.split()))
    assert dtype_name("jnp.bfloat16") == "bfloat16" and dtype_name("int8") == "int8"
    written = [flat(compose([f"model.compute_dtype={one}"])) for one in ("bf16", "bfloat16")]
    assert written[0] == written[1] and written[0]["model.compute_dtype"] == "bfloat16"
    with pytest.raises(ValueError, match="use bfloat16 or float32; float16 needs loss scaling, which is not supported"):
        compose(["model.compute_dtype=fp16"]).model.validate()
    assert export._keys(["run.dir=a", "to=b", "dtype=bf16"])["dtype"] == "bfloat16"
