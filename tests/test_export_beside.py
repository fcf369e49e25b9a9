"""What an export has beside its tensors: as in the folder that the run's weights came from, checked against the run, and what
cannot be written is named."""

import json
import shutil

import export_memory
import published_loop as published
import pytest

from ejdist.training.chats.encoding import Chats
from ejdist.training.chats.folder import templates_of, tokens_of
from ejdist.training.data.tokenizer import FileTokenizer, train_bpe
from ejdist.training.kept import KEPT, keep
from ejdist.weights.beside import context_of, ids_of_tokenizer
from ejdist.weights.families import read_config
from launch.errors import DONE, WRONG
from launch.export import main

IDS = {"bos_token_id": 1, "eos_token_id": 7, "pad_token_id": 3}
GENERATION = {"bos_token_id": 1, "eos_token_id": [7, 0], "temperature": 0.6, "do_sample": True}
END = 0  # of <|endoftext|> in the tokenizer here


@pytest.fixture(scope="module")
def tokenizer():
    return train_bpe(iter(["a few words"]), 300)


def source_in(folder, tokenizer, name="qwen3", **keys):
    """A published folder without its tensors: nothing of them is read again."""
    folder.mkdir()
    content = {
        "config.json": published.MODELS[name] | IDS | {"vocab_size": 320, "max_position_embeddings": 128} | keys,
        "generation_config.json": GENERATION,
        "tokenizer_config.json": {
            "eos_token": "<|im_end|>",
            "model_max_length": 1000,
            "chat_template": "{{ messages }}",
        },
        "special_tokens_map.json": {"eos_token": "<|im_end|>"},
    }
    for file, value in content.items():
        (folder / file).write_text(json.dumps(value))
    (folder / "tokenizer.json").write_text(tokenizer)
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    return folder


def run_from(folder, source, tokenizer=None, data=None, **more):
    """A run that started from a folder and was trained with its tokenizer, before BOS and EOS were recorded unless `data` has
    them."""
    tokenizer = source / "tokenizer.json" if tokenizer is None else tokenizer
    fingerprint = FileTokenizer.of(tokenizer.read_bytes(), "the run's").fingerprint
    kept = {"step": 1, "tokenizer": fingerprint, "sequence_length": 64} | (data or {})
    recipe = {"model.init_from": str(source), "data.tokenizer": str(tokenizer)} | more.pop("recipe", {})
    c = more.pop("model", None) or read_config(source)[1]
    section = {"model.init_from": str(source)} | recipe
    c.init_from = section["model.init_from"]
    export_memory.write(folder, c, recipe, data=kept, **more)
    return folder


def exported(run, to, capsys, *keys):
    assert main([f"run.dir={run}", f"to={to}", *keys]) == DONE
    lines = capsys.readouterr().out.splitlines()
    return json.loads((to / "config.json").read_text()), lines[1:]


BESIDE = {"generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
          "chat_template.jinja"}  # fmt: skip


def test_what_the_source_had_is_written_and_nothing_said(tokenizer, tmp_path, capsys):
    source = source_in(tmp_path / "source", tokenizer, "mistral", sliding_window=None)
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    config, lines = exported(run_from(tmp_path / "run", source), tmp_path / "to", capsys)
    assert not lines, lines
    assert {name: config[name] for name in IDS} == IDS and config["max_position_embeddings"] == 128
    assert config["dtype"] == config["torch_dtype"] == "float32"
    assert config["architectures"] == ["MistralForCausalLM"] and config["model_type"] == "mistral", (
        "not the first that fits"
    )
    names = {str(p.relative_to(tmp_path / "to")) for p in (tmp_path / "to").rglob("*") if p.is_file()}
    copied = BESIDE | {"additional_chat_templates/tool_use.jinja"}
    assert names == copied | {"config.json", "model.safetensors"}
    assert all((tmp_path / "to" / name).read_bytes() == (source / name).read_bytes() for name in copied)


def test_a_run_that_started_from_a_run_has_its_source(tokenizer, tmp_path, capsys):
    source = source_in(tmp_path / "source", tokenizer)
    first = run_from(tmp_path / "first", source)
    second = run_from(tmp_path / "second", source, recipe={"model.init_from": str(first)})
    config, lines = exported(second, tmp_path / "to", capsys)
    assert not lines and config["eos_token_id"] == 7 and config["max_position_embeddings"] == 128
    circle = run_from(tmp_path / "circle", source, recipe={"model.init_from": str(tmp_path / "circle")})
    config, lines = exported(circle, tmp_path / "of_circle", capsys)
    assert config["eos_token_id"] == END and not lines


def changed_model(source):
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.1}))


def changed_tokenizer(source):
    (source / "tokenizer.json").write_text(train_bpe(iter(["other words"]), 301))


GONE = {
    "gone": (
        shutil.rmtree,
        ["source, which the run started from, is gone", "generation_config.json", "is not written"],
    ),
    "empty": (
        lambda d: [p.unlink() for p in d.iterdir()],
        ["source, which the run started from, is no model any more"],
    ),
    "config": (
        changed_model,
        ["has changed since the run started from it: its model has norm_eps = 0.1", "not written"],
    ),
    "broken": (lambda d: (d / "config.json").write_text("{"), ["config.json is not JSON", "is not written"]),
}


@pytest.mark.parametrize("name", GONE)
def test_a_source_that_is_gone_or_has_changed_is_named(name, tokenizer, tmp_path, capsys):
    source = source_in(tmp_path / "source", tokenizer)
    (tmp_path / "own.json").write_text(tokenizer)
    run = run_from(tmp_path / "run", source, tmp_path / "own.json")
    spoil, words = GONE[name]
    spoil(source)
    config, lines = exported(run, tmp_path / "to", capsys)
    assert len(lines) == 1 and all(w in lines[0] for w in [str(source), *words]), lines
    # The ids are those of the tokenizer, and the context that of the run.
    assert config["eos_token_id"] == END and "pad_token_id" not in config and config["max_position_embeddings"] == 64
    assert json.loads((tmp_path / "to" / "generation_config.json").read_text()) == {"eos_token_id": END}


def test_a_tokenizer_that_has_changed_is_not_written_nor_its_ids(tokenizer, tmp_path, capsys):
    source = source_in(tmp_path / "source", tokenizer)
    run = run_from(tmp_path / "run", source)
    changed_tokenizer(source)
    config, lines = exported(run, tmp_path / "to", capsys)
    assert "eos_token_id" not in config and config["max_position_embeddings"] == 128
    assert {p.name for p in (tmp_path / "to").iterdir()} == {"config.json", "model.safetensors"}
    for words in (
        f"no tokenizer is written: {source}/tokenizer.json has changed since the run; give data.tokenizer=FILE",
        f"generation_config.json of {source} are not written: the run was trained with another tokenizer",
        "neither eos_token_id nor generation_config.json is written",
    ):
        assert any(words in line for line in lines), lines
    assert len(lines) == 3
    (tmp_path / "kept.json").write_text(tokenizer)
    config, _ = exported(run, tmp_path / "kept", capsys, f"data.tokenizer={tmp_path}/kept.json")
    assert config["eos_token_id"] == END, "of the tokenizer, and not of the source's"
    assert main([f"run.dir={run}", f"to={tmp_path}/no", f"data.tokenizer={source}"]) == WRONG
    assert "is not the file that the run was trained with" in capsys.readouterr().err


def test_a_run_with_a_tokenizer_of_its_own_has_its_ids(tokenizer, tmp_path, capsys):
    source = source_in(tmp_path / "source", tokenizer)
    own = tmp_path / "own"
    own.mkdir()
    (own / "tokenizer.json").write_text(train_bpe(iter(["other words"]), 301))
    added = json.loads((own / "tokenizer.json").read_text())
    added["added_tokens"].append(added["added_tokens"][0] | {"id": 301, "content": "<|im_end|>"})
    (own / "tokenizer.json").write_text(json.dumps(added))
    (own / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": {"content": "<|im_end|>"}, "pad_token": "<|endoftext|>"})
    )
    config, lines = exported(run_from(tmp_path / "run", source, own / "tokenizer.json"), tmp_path / "to", capsys)
    assert config["eos_token_id"] == [END, 301] and config["pad_token_id"] == END and "bos_token_id" not in config
    generation = json.loads((tmp_path / "to" / "generation_config.json").read_text())
    assert generation == {"eos_token_id": [END, 301], "pad_token_id": END}
    assert len(lines) == 1 and "trained with another tokenizer than is there" in lines[0]
    assert (tmp_path / "to" / "tokenizer.json").read_bytes() == (own / "tokenizer.json").read_bytes()
    assert not (tmp_path / "to" / "chat_template.jinja").exists(), "the source's template is of other tokens"
    bytes_ = run_from(tmp_path / "bytes", source, data={"tokenizer": "bytes-1"}, recipe={"data.tokenizer": "bytes"})
    config, lines = exported(bytes_, tmp_path / "of_bytes", capsys)
    assert config["eos_token_id"] == 256 and any("data.tokenizer=bytes" in line for line in lines)


def test_the_end_of_the_runs_documents_ends_what_is_generated(tokenizer, tmp_path, capsys):
    source = source_in(tmp_path / "source", tokenizer)
    (source / "generation_config.json").write_text(json.dumps(GENERATION | {"eos_token_id": 7}))
    _, lines = exported(run_from(tmp_path / "run", source), tmp_path / "to", capsys)
    assert len(lines) == 1 and f"is 7 of {source}, and {END}, which ends the run's documents" in lines[0], lines
    written = json.loads((tmp_path / "to" / "generation_config.json").read_text())
    assert written == GENERATION | {"eos_token_id": [7, END]}


def test_without_a_generation_config_the_ids_make_one(tokenizer, tmp_path, capsys):
    source = source_in(tmp_path / "source", tokenizer, eos_token_id=[7, 0], bos_token_id=None)
    (source / "generation_config.json").unlink()
    _, lines = exported(run_from(tmp_path / "run", source), tmp_path / "to", capsys)
    assert not lines
    assert json.loads((tmp_path / "to" / "generation_config.json").read_text()) == {
        "eos_token_id": [7, 0],
        "pad_token_id": 3,
    }


def test_ids_that_a_tokenizer_names():
    vocabulary = {"<s>": 5, "</s>": 6}
    assert ids_of_tokenizer(vocabulary, {"bos_token": "<s>", "eos_token": "</s>"}, [6]) == {
        "bos_token_id": 5,
        "eos_token_id": 6,
    }
    assert ids_of_tokenizer(vocabulary, {"eos_token": "<not there>"}, [2]) == {"eos_token_id": 2}
    assert ids_of_tokenizer(vocabulary, {"eos_token": "</s>"}, []) == {"eos_token_id": 6}
    assert ids_of_tokenizer(vocabulary, {}, []) == {}


# -- the tokens that the run's documents begin and end with --------------------------------------------------------------


def token(tokenizer, i):
    return FileTokenizer.of(tokenizer.encode(), "the run's").token_of(i)


def test_the_end_that_a_run_asked_for_is_the_one_it_recorded(tokenizer, tmp_path, capsys):
    """data.eos, which no file names, ends what is generated too."""
    source = source_in(tmp_path / "source", tokenizer)
    run = run_from(tmp_path / "run", source, data={"bos": None, "eos": token(tokenizer, 5)})
    config, lines = exported(run, tmp_path / "to", capsys)
    assert len(lines) == 1 and f"is 7, 0 of {source}, and 5, which ends the run's documents" in lines[0], lines
    assert json.loads((tmp_path / "to" / "generation_config.json").read_text())["eos_token_id"] == [7, 0, 5]
    assert config["eos_token_id"] == 7
    alone = tmp_path / "alone.json"
    alone.write_text(tokenizer)
    run = run_from(tmp_path / "own", source, alone, data={"bos": None, "eos": token(tokenizer, 5)})
    shutil.rmtree(source)
    config, _ = exported(run, tmp_path / "of_own", capsys)
    assert config["eos_token_id"] == 5
    said = json.loads((tmp_path / "of_own" / "tokenizer_config.json").read_text())
    assert said["eos_token"] == token(tokenizer, 5)


def test_a_run_whose_documents_have_no_end(tokenizer, tmp_path, capsys):
    """data.eos=null: what ends a text is what the source says, or nothing."""
    source, null = source_in(tmp_path / "source", tokenizer), {"bos": None, "eos": None}
    config, lines = exported(run_from(tmp_path / "run", source, data=null), tmp_path / "to", capsys)
    assert not lines and config["eos_token_id"] == 7
    assert json.loads((tmp_path / "to" / "generation_config.json").read_text()) == GENERATION
    alone = tmp_path / "alone.json"
    alone.write_text(tokenizer)
    (source / "tokenizer.json").unlink()  # so nothing says of which tokenizer its ids are
    _, lines = exported(run_from(tmp_path / "other", source, alone, data=null), tmp_path / "of_other", capsys)
    assert "are not written: it has no tokenizer, and the end of the run's documents is not among" in lines[0], lines
    assert "neither eos_token_id nor generation_config.json is written" in lines[1]
    assert "eos_token" not in json.loads((tmp_path / "of_other" / "tokenizer_config.json").read_text())
    bytes_ = {"tokenizer": "bytes-1", "bos": None, "eos": None}
    run = run_from(tmp_path / "bytes", source, alone, data=bytes_, recipe={"data.tokenizer": "bytes"})
    config, _ = exported(run, tmp_path / "of_bytes", capsys)
    assert "eos_token_id" not in config and not (tmp_path / "of_bytes" / "generation_config.json").exists()


def test_all_that_end_a_text_are_written_where_no_generation_config_says(tokenizer, tmp_path, capsys):
    source = source_in(tmp_path / "source", tokenizer, eos_token_id=[7, 0], bos_token_id=None)
    (source / "generation_config.json").write_text(json.dumps({"temperature": 0.6}))
    run = run_from(tmp_path / "run", source, data={"bos": None, "eos": token(tokenizer, 0)})
    (source / "tokenizer_config.json").write_text(json.dumps({"eos_token": token(tokenizer, 0)}))
    _, lines = exported(run, tmp_path / "to", capsys)
    written = json.loads((tmp_path / "to" / "generation_config.json").read_text())
    assert not lines and written == {"temperature": 0.6, "eos_token_id": [7, 0], "pad_token_id": 3}
    own = tmp_path / "folder"  # of the tokenizer, which says more than that of the weights
    own.mkdir()
    (own / "tokenizer.json").write_text(tokenizer)
    (own / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 9]}))
    run = run_from(tmp_path / "more", source, own / "tokenizer.json", data={"bos": None, "eos": None})
    exported(run, tmp_path / "of_more", capsys)
    assert json.loads((tmp_path / "of_more" / "generation_config.json").read_text())["eos_token_id"] == [7, 0, 9]
    # Of a tokenizer's folder, to which the weights' says nothing.
    other = source_in(tmp_path / "other", train_bpe(iter(["other words"]), 301))
    run = run_from(tmp_path / "two", other, source / "tokenizer.json", data={"bos": None, "eos": token(tokenizer, 5)})
    config, _ = exported(run, tmp_path / "of_two", capsys)
    assert config["eos_token_id"] == [5, 7, 0]


def test_another_beginning_than_by_the_tokenizers_files_is_told(tokenizer, tmp_path, capsys):
    source = source_in(tmp_path / "source", tokenizer)
    own = {"add_bos_token": True, "bos_token": token(tokenizer, 5), "eos_token": token(tokenizer, 0)}
    (source / "tokenizer_config.json").write_text(json.dumps(own))
    none = f"begins with {own['bos_token']} by the tokenizer's files, and the run's documents with no token (data.bos)"
    for bos, told in ((5, None), (None, none), (6, f"with {token(tokenizer, 6)} (data.bos)")):
        ends = {"bos": None if bos is None else token(tokenizer, bos), "eos": own["eos_token"]}
        _, lines = exported(run_from(tmp_path / f"{bos}", source, data=ends), tmp_path / f"to_{bos}", capsys)
        assert len(lines) == (told is not None) and (told is None or told in lines[0]), lines
    # A dataset has no files beside its tokenizer, and those of the source are written.
    (tmp_path / "dataset").mkdir()
    (tmp_path / "dataset" / "tokenizer.json").write_text(tokenizer)
    recipe = {"data.tokenizer": "dataset", "data.source": str(tmp_path / "dataset")}
    run = run_from(tmp_path / "of_dataset", source, data=ends | {"bos": own["bos_token"]}, recipe=recipe)
    assert not exported(run, tmp_path / "to_of_dataset", capsys)[1]
    (source / "tokenizer_config.json").write_text(json.dumps(own | {"bos_token": "<nowhere>"}))
    _, lines = exported(run_from(tmp_path / "no", source, data=ends), tmp_path / "to_no", capsys)
    assert "a text begins with a token that it does not have by the tokenizer's files" in lines[0]


# -- what the run keeps of a folder --------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [True, False], ids=["gone", "changed"])
def test_a_folder_that_is_gone_or_has_changed_is_what_the_run_kept_of_it(after, tokenizer, tmp_path, capsys):
    source = source_in(tmp_path / "source", tokenizer)
    before = {name: (source / name).read_bytes() for name in BESIDE}
    run = run_from(tmp_path / "run", source, data={"bos": None, "eos": token(tokenizer, 0)})
    keep(source, run)
    if after:
        shutil.rmtree(source)
        told = f"{source}, which the run started from, is gone: what was there is taken from {run / KEPT}"
    else:
        for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
            (source / name).write_text("{}")
        told = (
            f"config.json, generation_config.json, tokenizer_config.json in {source} changed since the run began: what was "
            f"there is taken from {run / KEPT}"
        )
    for i, named in enumerate((run, run / "checkpoints")):
        config, lines = exported(named, tmp_path / f"to{i}", capsys)
        assert lines == [told]
        assert {name: config[name] for name in IDS} == IDS and config["max_position_embeddings"] == 128
        assert {name: (tmp_path / f"to{i}" / name).read_bytes() for name in BESIDE} == before
    second = run_from(tmp_path / "second", run / KEPT, data={"bos": None, "eos": token(tokenizer, 0)},
                      recipe={"model.init_from": str(run)})  # fmt: skip
    config, lines = exported(second, tmp_path / "of_second", capsys)
    assert lines == [told] and config["eos_token_id"] == 7, "through another run"


def test_a_tokenizer_that_only_the_run_has_is_written(tokenizer, tmp_path, capsys):
    """Where the folder's model is another now, which says nothing more."""
    source = source_in(tmp_path / "source", tokenizer)
    run = run_from(tmp_path / "run", source)
    keep(source, run)
    changed_model(run / KEPT)
    shutil.rmtree(source)
    config, lines = exported(run, tmp_path / "to", capsys)
    assert any("norm_eps = 0.1" in line for line in lines) and config["eos_token_id"] == END
    assert (tmp_path / "to" / "tokenizer.json").read_text() == tokenizer


# -- the context ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "trained", "scaled", "source", "context", "words"),
    [
        (None, 64, 0, 128, 128, None),
        (None, 128, 0, 128, 128, None),
        (None, 256, 0, 128, 256, "raised from the 128 of there to 256: the run trained rows of 256"),
        (None, 64, 512, 128, 512, "raised from the 128 of there to 512: model.rope_scaling reaches 512"),
        (None, 64, 0, None, 64, None),
        (100, 64, 0, 128, 100, "is 100, as asked: shorter than the 128 of there"),
        (100, 128, 0, None, 100, "is 100, as asked, and the run trained rows of 128"),
        (256, 64, 0, 128, 256, "raised from the 128 of there to 256: as asked"),
        (256, 64, 0, None, 256, None),
    ],
)  # fmt: skip
def test_the_context_is_never_shortened_in_silence(asked, trained, scaled, source, context, words):
    result, line = context_of(asked, trained, scaled, source, "there")
    assert result == context and (line is None if words is None else words in line), line


def test_a_longer_context_of_an_earlier_stage_counts(tokenizer, tmp_path, capsys):
    source = source_in(tmp_path / "source", tokenizer)
    (source / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 128, "padding_side": "left"}))
    stages = [(1, {"data.sequence_length": 256}), (2, {"data.sequence_length": 32})]
    run = run_from(tmp_path / "run", source, data={"sequence_length": 32}, stages=stages)
    config, lines = exported(run, tmp_path / "to", capsys)
    assert config["max_position_embeddings"] == 256
    assert f"max_position_embeddings is raised from the 128 of {source} to 256: the run trained rows of 256" in lines[0]
    written = json.loads((tmp_path / "to" / "tokenizer_config.json").read_text())
    assert written == {"model_max_length": 256, "padding_side": "left"} and "raised from 128 to 256" in lines[1]


def test_the_scaling_of_rope_is_that_of_the_run(tokenizer, tmp_path, capsys):
    """Which a curriculum may have changed since the source."""
    source = source_in(tmp_path / "source", tokenizer)
    c = read_config(source)[1]
    c.rope_scaling, c.rope_factor, c.rope_original_length = "yarn", 4.0, 128
    config, lines = exported(run_from(tmp_path / "run", source, model=c), tmp_path / "to", capsys)
    assert config["max_position_embeddings"] == 512 and "model.rope_scaling reaches 512" in lines[0] and len(lines) == 1
    assert config["rope_scaling"]["factor"] == 4.0
    assert config["rope_scaling"]["original_max_position_embeddings"] == 128


# -- the tokenizer --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["folder", "dataset", "mixture", "stage", "bpe", "recipe.json"])
def test_the_tokenizer_is_where_the_run_had_it(place, tokenizer, tmp_path, capsys):
    there = tmp_path / ("cache/tokenizer-0" if place == "bpe" else "there")
    there.mkdir(parents=True)
    (there / "tokenizer.json").write_text(tokenizer)
    recipe = {
        "folder": {"data.tokenizer": str(there)},
        "dataset": {"data.tokenizer": "dataset"},
        "stage": {"data.tokenizer": "dataset"},
        "mixture": {"data.tokenizer": "dataset", "data.mixture": [{"source": str(there), "weight": 1.0}]},
        "bpe": {"data.tokenizer": "bpe:300"},
        "recipe.json": {},
    }[place]
    c = export_memory.model(1)
    data = {"step": 1, "sequence_length": 64, "tokenizer": FileTokenizer(there / "tokenizer.json").fingerprint}
    export_memory.write(tmp_path / "run", c, recipe, data=data)
    latest = {"data.cache_dir": str(tmp_path / "cache"), "data.source": str(there), "data.tokenizer": str(there)}
    latest |= {"data.source": None} if place in ("mixture", "stage") else {}
    if place == "stage":
        parts = [{"source": str(tmp_path / "no"), "weight": 1.0}, {"source": str(there), "weight": 2.0}]
        latest |= {"curriculum[0].until": 1, "curriculum[0].source": "a.txt"}
        latest |= {"data.tokenizer": "dataset", "curriculum[1].until": None, "curriculum[1].mixture": parts}
    (tmp_path / "run" / "recipe.json").write_text(json.dumps(latest))
    config, lines = exported(tmp_path / "run", tmp_path / "to", capsys)
    assert not lines and config["eos_token_id"] == END
    assert (tmp_path / "to" / "tokenizer.json").read_text() == tokenizer
    # transformers would take it for one of the family otherwise.
    assert json.loads((tmp_path / "to" / "tokenizer_config.json").read_text()) == {
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>", "model_max_length": 64,
    }  # fmt: skip


# -- the template of conversations ----------------------------------------------------------------------------------------


def trained_with(asked, source):
    """What a checkpoint keeps of conversations."""
    tokenizer = str(source / "tokenizer.json")
    chats = Chats("messages", "", "", "", templates=templates_of(asked, tokenizer), tokens=tokens_of(tokenizer))
    return {"conversations": [None, chats.description]}


@pytest.mark.parametrize("asked", ["chatml", "file", None])
def test_the_template_that_a_run_was_trained_with_is_written(asked, tokenizer, tmp_path, capsys):
    source = source_in(tmp_path / "source", tokenizer)
    (tmp_path / "own.jinja").write_text("{{ messages[0].content }}!")
    asked = f"{tmp_path}/own.jinja" if asked == "file" else asked
    data, recipe = trained_with(asked, source), {"data.chat_template": asked}
    run = run_from(tmp_path / "run", source, data=data, recipe=recipe)
    _, lines = exported(run, tmp_path / "to", capsys)
    wanted = templates_of(asked, str(source / "tokenizer.json"))["default"]
    assert (tmp_path / "to" / "chat_template.jinja").read_text() == wanted
    assert lines == (
        [] if asked is None else [f"chat_template.jinja is the one that the run was trained with, {asked}"]
    )
    if asked == "chatml":
        return
    ((source / "chat_template.jinja") if asked is None else (tmp_path / "own.jinja")).write_text("other")
    _, lines = exported(run, tmp_path / "changed", capsys)
    assert (
        len(lines) == 1 and "the chat template that the run was trained with is not written: it has changed" in lines[0]
    )
