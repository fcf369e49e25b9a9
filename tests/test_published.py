"""A run from a published folder: model=hf, what of it a command line may change, and what a run keeps of it."""

import dataclasses
import json
import re
import shlex

import pytest
from omegaconf import OmegaConf
from published_folder import FILES, LETTERS, write_folder
from small_run import losses

import recipes
from ejdist.evaluation.weights import open_weights
from ejdist.models.decoder import DecoderConfig
from ejdist.sections import flat
from ejdist.training.curriculum import stages_of
from ejdist.training.kept import KEPT, keep, told_of_folder
from ejdist.training.loop import train
from ejdist.training.recorded import recorded
from ejdist.training.resume import check_same_run, fingerprint
from ejdist.training.stage_data import data_of
from ejdist.training.start import open_source
from ejdist.weights.families import read_config
from launch.errors import DONE, WRONG
from launch.evaluate import main as evaluate
from launch.export import main as export
from launch.options import check_run
from launch.plan import main as plan
from launch.plan import parse
from launch.train import main
from recipes.arguments import read
from recipes.published import fill, leaves
from recipes.schema import RecipeError, compose, text_of

SMALL = ["recipe=short_context", "data=files", "data.sequence_length=32", "data.global_batch=2", "run.steps=3",
         "optimizer.warmup_steps=1", "checkpoint.every=2"]  # fmt: skip


@pytest.fixture
def texts(tmp_path):
    """Keys for texts of the letters that a folder's tokenizer has."""
    texts = ["".join(LETTERS[(i * j * 7 + j) % 9] for j in range(5 + i % 30)) for i in range(60)]
    (tmp_path / "texts.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    return [*SMALL, f"data.source={tmp_path}/texts.jsonl", f"data.cache_dir={tmp_path}/cache"]


def ran(keys, *more):
    said = []
    train(compose([*keys, *more]), log=said.append)
    return said


def of(folder):
    return ["model=hf", f"model.init_from={folder}"]


def change(path, **keys):
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


# -- the model ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FILES)
def test_the_whole_section_is_that_of_the_folder(family, tmp_path):
    folder = write_folder(tmp_path / family, family)
    recipe = compose([f"model=hf:{folder}"])
    expected = flat(read_config(folder)[1]) | {"compute_dtype": "bfloat16", "init_from": str(folder)}
    assert flat(recipe.model) == expected and recipe.data.tokenizer == str(folder)


def test_a_folder_in_a_recipe_of_ones_own(tmp_path):
    folder = write_folder(tmp_path / "f", "gpt_oss")
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "printed.yaml").write_text(text_of(read(of(folder))))
    own = f"# @package _global_\ndefaults:\n  - override /model: hf\nmodel:\n  init_from: {folder}\n  rope_base: 7.0\n"
    (tmp_path / "recipe" / "mine.yaml").write_text(own)
    for name in ("printed", "mine"):
        recipe = compose([f"--config-dir={tmp_path}", f"recipe={name}", "model.rope_base=9"])
        assert recipe.model == compose([*of(folder), "model.rope_base=9"]).model
        assert recipe.data.tokenizer == str(folder)
    assert compose([*of(folder), "data=dataset"]).data.tokenizer == str(folder), "its shards are compared with that"
    assert compose(["data=dataset"]).data.tokenizer == "dataset"


@pytest.mark.parametrize("recipe", ["sft", "long_context_sft"])
def test_conversations_have_the_template_of_the_folder(recipe, tmp_path):
    """And not the one that is built in for those that are always there."""
    folder = of(write_folder(tmp_path / "f", "qwen3"))
    assert compose([f"recipe={recipe}"]).data.chat_template == "chatml"
    assert compose([f"recipe={recipe}", *folder]).data.chat_template is None
    assert compose([f"recipe={recipe}", *folder, "data.chat_template=chatml"]).data.chat_template == "chatml"


def test_every_key_of_the_section_follows_the_folder(tmp_path):
    open_keys = OmegaConf.to_container(OmegaConf.load(f"{recipes.__path__[0]}/model/hf.yaml"))
    named = dict(leaves(open_keys["model"]))
    assert named == {
        key: f"${{hf:{key}}}"
        for key in flat(DecoderConfig())
        if key not in ("init_std", "init_from", "remat", "scan_layers", "rope_exact_from")
        if not key.startswith("precision")
        if not key.startswith("mtp.")  # how a model is trained
    }
    values = {"data": {"tokenizer": "${hf:tokenizer,dataset}"}}
    assert fill(OmegaConf.create(values), values) is None


@pytest.mark.parametrize(
    ("written", "computed"),
    [
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "torch.float32", "dtype": None}, "float32"),
        ({"dtype": None}, "float32"),
    ],
)
def test_the_dtype_is_that_of_the_file(written, computed, tmp_path):
    folder = write_folder(tmp_path / "f", "qwen3", **written)
    assert compose(of(folder)).model.compute_dtype == computed
    assert compose([*of(folder), "model.compute_dtype=fp32"]).model.compute_dtype == "float32"


def test_a_dtype_that_nothing_here_computes_in_is_named(tmp_path):
    folder = write_folder(tmp_path / "f", "qwen3", dtype="float16")
    with pytest.raises(
        ValueError, match=r"config.json has dtype = float16, .*: give model.compute_dtype=bfloat16, or float32"
    ):
        compose(of(folder))
    assert compose([*of(folder), "model.compute_dtype=bf16"]).model.compute_dtype == "bfloat16"


def test_another_scaling_leaves_the_parameters_of_the_folders_out(tmp_path):
    llama = write_folder(tmp_path / "llama", "llama")
    plain = compose([*of(llama), "model.rope_scaling=null"]).model
    assert (plain.rope_scaling, plain.rope_factor, plain.rope_original_length) == (None, 1.0, 8192)
    same = compose([*of(llama), "model.rope_factor=16"]).model
    assert (same.rope_scaling, same.rope_factor, same.rope_original_length) == ("llama3", 16, 8)
    assert compose([*of(llama), "model.rope_scaling=yarn", "model.rope_factor=2"]).model.rope_original_length == 8
    qwen = write_folder(tmp_path / "qwen3", "qwen3")
    # Nothing is scaled there: its context is what yarn starts from, as transformers has it, and linear has no place for one.
    assert compose([*of(qwen), "model.rope_scaling=yarn", "model.rope_factor=2"]).model.rope_original_length == 64
    assert compose([*of(qwen), "model.rope_scaling=linear", "model.rope_factor=2"]).model.rope_original_length == 8192


WRONG_CALLS = [
    (["model=hf"], "model=hf takes the model from a folder: give model.init_from=DIR, or model=hf:DIR"),
    (["model=hf:"], "model=hf: names no folder"),
    (["model=hf:{f}", "model.init_from=x"], "both name the weights; give one of them"),
    (["model=hf:{tmp}/none"], "is no folder: model=hf takes the model from the config.json"),
    (["model=hf:{tmp}/empty"], "has no config.json: model=hf takes the model"),
    (["model=hf:s3://bucket/model"], "is a URL, and this key takes a path of this machine, or gs://BUCKET/NAME"),
    (["model=hf:{tmp}/other"], "is of GemmaForCausalLM, which is not supported; supported are LlamaForCausalLM"),
    (["model=hf:{f}", "model.num_layers=5"], "model.num_layers = 5 in this recipe, and {f}/config.json has 3"),
    (["model=hf:{f}", "model.qk_norm=false"], "model.qk_norm = false in this recipe, and {f}/config.json has true"),
    (["model=hf:{f}", "model.vocab_size=64", "model.head_dim=8"], "(2 more keys differ), or leave it out"),
    (["model=hf:{f}", "model.norm_eps=1e-3"], "model.norm_eps = 0.001 in this recipe"),
    (["model=hf:{f}", "model.num_heads=0"], "model.num_heads must be positive"),
    (["model=hf:{f}", "model.rope_factor=4.0"], "model.rope_factor belongs to model.rope_scaling, which is null"),
]  # fmt: skip


def test_a_launcher_needs_the_folder_without_its_weights(tmp_path):
    folder = write_folder(tmp_path / "qwen3", "qwen3")
    (folder / "model.safetensors").unlink()
    keys = ["recipe=sft", *of(folder), "mesh=single"]
    assert check_run(keys, "", devices=1).data.chat_template is None
    folder.rename(tmp_path / "away")
    with pytest.raises(
        ValueError, match=r"qwen3' is not on this machine, .*copy what the folder has beside its weights"
    ):
        check_run(keys, "", devices=1)


@pytest.mark.parametrize(("words", "told"), WRONG_CALLS, ids=lambda x: " ".join(x) if isinstance(x, list) else "")
def test_a_folder_named_wrongly(words, told, tmp_path):
    folder = write_folder(tmp_path / "f", "qwen3")
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text('{"architectures": ["GemmaForCausalLM"]}')
    with pytest.raises(ValueError, match=re.escape(told.format(f=folder, tmp=tmp_path))) as caught:
        compose([word.format(f=folder, tmp=tmp_path) for word in words])
    assert "\n" not in str(caught.value)


def test_a_folder_without_a_tokenizer_is_named_when_text_is_asked_for(texts, tmp_path, capsys):
    folder = write_folder(tmp_path / "f", "qwen3")
    (folder / "tokenizer.json").rename(folder / "tokenizer.model")
    keys = [*texts, *of(folder), f"run.dir={tmp_path}/run"]
    assert main(keys) == WRONG
    message = capsys.readouterr().err
    assert (
        "is a folder without tokenizer.json; tokenizer.model there is of another format: save the tokenizer again"
        in message
    )
    assert message.count("\n") == 1


def test_the_command_of_a_folder_is_taken_by_a_shell_and_by_a_plan(tmp_path, capsys):
    folder = write_folder(tmp_path / "gpt_oss", "gpt_oss")
    assert export([f"from={folder}"]) == DONE
    words = capsys.readouterr().out.split()  # as $(...) does, which removes no quotes
    assert compose(words).model == compose(of(folder)).model and compose(words).data.tokenizer == str(folder)
    spaced = write_folder(tmp_path / "their models, 2", "llama")
    args = parse(["device=h200", "devices=8", f"model=hf:{spaced}", "model.rope_base=1e6"])
    assert args.recipe[0] == "model=hf" and compose(args.recipe).model.init_from == str(spaced)


def test_a_plan_of_a_folder_ends_in_a_line_that_trains(tmp_path, capsys):
    folder = write_folder(tmp_path / "qwen3", "qwen3")
    for more in (
        [],
        ["model.rope_base=5e6", "mesh.fsdp=2"],
        ["mesh.fsdp=2", "curriculum=[{until: 9},{rope_base: 5e6}]"],
    ):
        assert (
            plan(["device=h200", "devices=2", "finalists=0", "recipe=short_context", f"model=hf:{folder}", *more])
            == DONE
        )
        last = capsys.readouterr().out.splitlines()[-1].strip()
        assert last.startswith(f"python -m launch.train recipe=short_context model=hf model.init_from={folder}")
        recipe = compose(shlex.split(last)[3:])
        assert (
            recipe.model.vocab_size == 24 and len(recipe.curriculum) == sum("curriculum" in word for word in more) * 2
        )


# -- what is not as in the folder -----------------------------------------------------------------------------------------


def notes_of(words, folder):
    recipe = compose([*of(folder), *words])
    return open_source(str(folder), recipe.model, [stage.sections.model for stage in stages_of(recipe)]).notes


def test_positions_may_be_others_than_the_folders_and_are_told(tmp_path):
    folder = write_folder(tmp_path / "f", "qwen3")
    assert notes_of([], folder) == []
    assert notes_of(["model.rope_base=500000"], folder) == ["rope_base 500000 (the folder says 1000000)"]
    assert notes_of(["model.rope_base=5e5", "model.compute_dtype=float32"], folder) == [
        "rope_base 500000 (the folder says 1000000), compute_dtype float32 (the folder says bfloat16)"
    ]
    yarn = ["model.rope_scaling=yarn", "model.rope_factor=4"]
    (line,) = notes_of(yarn, folder)
    assert line == "rope_scaling yarn (the folder says null), rope_factor 4, rope_original_length 64"
    (line,) = notes_of(
        ["curriculum=[{until: 9},{until: 50,rope_base: 5e5},{rope_scaling: ntk,rope_factor: 2.0}]"], folder
    )
    assert line == (
        "stage 2: rope_base 500000 (the folder says 1000000); stage 3: rope_scaling ntk (the folder says null), "
        "rope_factor 2"
    )


def test_every_stage_may_have_positions_of_its_own(tmp_path):
    """Where all of them do, the recipe's own are those of no step, and cannot be given."""
    folder = write_folder(tmp_path / "f", "qwen3")
    stages = "curriculum=[{until: 9,rope_base: 3e6},{rope_base: 5e6}]"
    assert len(notes_of([stages], folder)) == 1
    with pytest.raises(
        RecipeError, match=r"model.rope_base=7 is not used: every stage of the curriculum has its own rope_base"
    ):
        compose([*of(folder), stages, "model.rope_base=7"])


# -- evaluations ----------------------------------------------------------------------------------------------------------


def evaluated(capsys, *words):
    """Returns (exit code, what was printed, or the error)."""
    code = evaluate(["tasks=loss", "lengths=32", "batches=2", "mesh=single", *words])
    told = capsys.readouterr()
    return code, told.out if code == DONE else told.err


@pytest.mark.slow
def test_an_evaluation_of_a_folder_takes_what_training_does(texts, tmp_path, capsys):
    folder = write_folder(tmp_path / "f", "llama")
    keys = [key for key in texts if key.startswith("data")]
    code, told = evaluated(capsys, f"model=hf:{folder}", *keys, f"to={tmp_path}/a.json")
    assert code == DONE and "compute_dtype" not in told, told
    assert "documents begin with <|begin_of_text|> (data.bos), and texts end with <|end_of_text|> (data.eos)" in told
    long = [f"model.init_from={folder}", f"data.tokenizer={folder}", "model.compute_dtype=bfloat16"]
    assert evaluated(capsys, *long, *keys, f"to={tmp_path}/b.json")[0] == DONE
    first, second = (json.loads((tmp_path / f"{name}.json").read_text()) for name in "ab")
    assert first["loss"] == second["loss"] and first["loss"]["32"]["tokens"] > 100
    weights = open_weights(str(folder))
    assert weights.notes(DecoderConfig()) == ["compute_dtype float32 (the folder says bfloat16)"]


@pytest.mark.slow
def test_an_evaluation_of_a_folder_without_its_tokenizer_says_what_to_write(texts, tmp_path, capsys):
    folder = write_folder(tmp_path / "f", "llama")
    for words in ([], ["data=files", "data.source=none.txt"], ["recipe=sft"]):
        code, told = evaluated(capsys, f"model.init_from={folder}", *words)
        assert code == WRONG and told == (
            f"error: data.tokenizer = 'bytes' is not the tokenizer of {folder}: give model=hf, which takes dtype, tokenizer, "
            f"BOS and EOS from there, or data.tokenizer={folder}\n"
        )
    for words, told in (
        (["model=hf", "run.dir=a"], "model=hf: the model and the tokenizer come from the run; leave it out"),
        (["model=hf"], "give run.dir=DIR, or model.init_from=DIR"),
        (["model=hf:"], "names no folder"),
        (["model=8b", f"model.init_from={folder}"], "model=8b: the model comes from the weights"),
        (["model=hf", f"model.init_from={tmp_path}/no"], "is no folder"),
        ([*of(folder), "model.num_layers=1"], "model.num_layers = 1 in this recipe"),
    ):
        code, error = evaluated(capsys, *words)
        assert code == WRONG and told in error, error


# -- runs -----------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_from_a_folder_that_goes(texts, tmp_path):
    folder, kept = write_folder(tmp_path / "f", "qwen3"), tmp_path / "run" / KEPT
    said = ran(texts, "run.steps=2", *of(folder), f"run.dir={tmp_path}/run")
    assert said[0] == "compute in bfloat16, parameters in float32"
    assert "documents begin with no token (data.bos), and texts end with <|im_end|> (data.eos)" in said
    assert {path.name for path in kept.iterdir()} == {path.name for path in folder.iterdir()} - {"model.safetensors"}
    began = compose([*texts, *of(folder)])
    folder.rename(tmp_path / "moved")
    again = compose([*texts, *of(folder), f"run.dir={tmp_path}/run"])
    assert (
        again.model == began.model and again.data.tokenizer == str(kept) == recorded(tmp_path / "run")["data.tokenizer"]
    )
    assert told_of_folder(str(folder), tmp_path / "run") == [
        f"model.init_from = '{folder}' has gone: its config.json and tokenizer are those in {kept}"
    ]


@pytest.mark.slow  # three programs each
@pytest.mark.parametrize("family", FILES)
def test_a_run_has_the_losses_of_the_section_written_out_and_resumes_to_the_bit(family, texts, tmp_path):
    folder, (bos, eos) = write_folder(tmp_path / family, family), (FILES[family][key] for key in ("bos", "eos"))
    first = ran(texts, *of(folder), f"run.dir={tmp_path}/run", "run.stop_after=2")
    assert f"documents begin with {bos or 'no token'} (data.bos), and texts end with {eos} (data.eos)" in first
    folder.rename(tmp_path / "moved")
    assert any("has gone" in line for line in ran(texts, *of(folder), f"run.dir={tmp_path}/run"))
    (tmp_path / "moved").rename(folder)
    recipe = compose([*texts, f"run.dir={tmp_path}/written", f"data.tokenizer={folder}/tokenizer.json"])
    recipe.model = dataclasses.replace(read_config(folder)[1], compute_dtype="bfloat16", init_from=str(folder))
    recipe.data.bos, recipe.data.eos = bos, eos
    train(recipe, log=lambda line: None)
    assert len(losses(tmp_path / "run")) == 3 and losses(tmp_path / "run") == losses(tmp_path / "written")


CHANGES = [
    ("config.json", {"rms_norm_eps": 1e-4}, "model.norm_eps: was 1e-05, is 0.0001"),
    ("config.json", {"dtype": "float32"}, "model.compute_dtype: was bfloat16, is float32"),
    ("tokenizer_config.json", {"eos_token": "<|endoftext|>"}, "data.eos: was <|im_end|>, is <|endoftext|>"),
    ("tokenizer_config.json", {"add_bos_token": True, "bos_token": "<|im_end|>"}, "data.bos: was None, is <|im_end|>"),
    ("generation_config.json", {"temperature": 0.6}, None),
]


def test_a_folder_that_changed_is_named_when_its_run_resumes(texts, tmp_path):
    folder, run_dir = write_folder(tmp_path / "f", "qwen3"), tmp_path / "run"
    began = compose([*texts, *of(folder)])
    cursor, stored = data_of(began).cursor(0), fingerprint(began)
    assert told_of_folder(str(folder), run_dir) == []
    run_dir.mkdir()
    keep(folder, run_dir)
    for file, changes, told in CHANGES:
        before = (folder / file).read_text()
        change(folder / file, **changes)
        (line,) = told_of_folder(str(folder), run_dir)
        assert line.startswith(f"{file} in {folder} changed since the run in {run_dir} began; what it began with is in")
        changed = compose([*texts, *of(folder)])

        def resumed(changed=changed):
            check_same_run(stored, changed, 0, run_dir)
            data_of(changed).check_cursor(cursor)

        if told is None:
            resumed()
        else:
            with pytest.raises(ValueError, match=re.escape(told)):
                resumed()
        (folder / file).write_text(before)
    assert compose([*texts, *of(run_dir / KEPT)]).model == dataclasses.replace(
        began.model, init_from=f"{run_dir / KEPT}"
    )
    keep(None, run_dir)  # started again, from no folder
    assert told_of_folder(str(tmp_path / "run"), run_dir) == [] and not (run_dir / KEPT).exists()


@pytest.mark.slow
def test_a_run_of_a_folder_that_changed_is_refused(texts, tmp_path, capsys):
    folder = write_folder(tmp_path / "f", "qwen3")
    keys = [*texts, "run.steps=1", *of(folder), f"run.dir={tmp_path}/run"]
    ran(keys)
    change(folder / "config.json", rms_norm_eps=1e-4)
    assert main(keys) == WRONG
    said = capsys.readouterr()
    assert f"config.json in {folder} changed" in said.out and "model.norm_eps: was 1e-05, is 0.0001" in said.err
    assert main([*keys[:-2], f"model.init_from={tmp_path}/run/{KEPT}", f"run.dir={tmp_path}/run"]) == DONE
