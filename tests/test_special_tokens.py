"""BOS and EOS: what the files of a tokenizer say, where they are written, and that no run and no dataset mixes two of them."""

import dataclasses
import json

import numpy as np
import pytest
from published_folder import FILES, write_folder
from small_run import PLAIN
from tokenizers import Tokenizer, models, pre_tokenizers

from ejdist.training.chats.encoding import Chats, Encoder, Skipped
from ejdist.training.chats.special_tokens import SpecialTokens, begun, ended, ends_of
from ejdist.training.data import DataSection, build, text_writing
from ejdist.training.data.cache import checksum_of
from ejdist.training.data.dataset import open_dataset
from ejdist.training.data.tokenizer import ByteTokenizer, FileTokenizer
from ejdist.training.data.tokenizing import make_dataset, make_plan, make_shard, write_manifest
from launch.errors import DONE, WRONG
from launch.tokenize import main as tokenize
from launch.train import main as train
from recipes.schema import compose

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path / "deepseek", "deepseek")


def change(path, **keys):
    path.write_text(json.dumps({k: v for k, v in (json.loads(path.read_text()) | keys).items() if v is not None}))


def texts(tmp_path, *given):
    path = tmp_path / "texts.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in given))
    return str(path)


def data_from(tmp_path, source, **keys):
    return build(
        DataSection(source=source, sequence_length=8, global_batch=1, cache_dir=str(tmp_path / "cache"), **keys), seed=0
    )


def documents(corpus):
    return [corpus.tokens[a:b].tolist() for a, b in zip(corpus.offsets[:-1], corpus.offsets[1:], strict=True)]


# -- what the files say ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FILES)
def test_the_tokens_of_a_published_folder(family, tmp_path):
    """Of a folder and of the file in it; and each family has what its own tokenizer_config.json has it write."""
    folder, of = write_folder(tmp_path / family, family), FILES[family]
    for path in (folder, folder / "tokenizer.json"):
        found = FileTokenizer(path)
        assert ends_of(found) == {"bos": of["bos"], "eos": of["eos"]}
        assert [found.token_of(i) for i in found.stop_ids] == of["stops"]


def test_which_file_names_a_token(folder):
    """The tokenizer's own files come first, then ids, of a list the first; then what any vocabulary calls an end."""
    config, generation, model = (
        folder / f"{name}.json" for name in ("tokenizer_config", "generation_config", "config")
    )
    eos = FileTokenizer(folder).eos_id
    change(config, eos_token=None)
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "b"}}))
    assert ends_of(FileTokenizer(folder))["eos"] == "b"
    (folder / "special_tokens_map.json").unlink()
    change(generation, eos_token_id=[3, eos])
    found = FileTokenizer(folder)
    assert (found.eos_id, found.stop_ids) == (3, (3, eos))
    generation.unlink()
    assert FileTokenizer(folder).eos_id == eos, "that of config.json"
    change(model, eos_token_id=None)
    with pytest.raises(
        ValueError, match=r"has none of .* to end a document, and no file beside it names another; give data.eos=T"
    ):
        FileTokenizer(folder)
    assert FileTokenizer(folder, SpecialTokens(eos="a")).eos_id == 0
    assert FileTokenizer(folder, SpecialTokens(eos=None)).eos_id is None
    change(config, eos_token="<|none|>")
    with pytest.raises(
        ValueError, match=r"the files beside it name eos_token = '<\|none\|>', which its vocabulary does not have"
    ):
        FileTokenizer(folder)


def test_whether_bos_is_written(tmp_path):
    """tokenizer_config.json decides where it says; else the post-processor, unless what it writes is an end."""
    deepseek, llama = (write_folder(tmp_path / name, name) for name in ("deepseek", "llama"))
    change(deepseek / "tokenizer_config.json", add_bos_token=False)
    assert FileTokenizer(deepseek).bos_id is None
    change(deepseek / "tokenizer_config.json", add_bos_token=True, bos_token=None)
    assert FileTokenizer(deepseek).bos_id is None, "there is none to write"
    change(deepseek / "config.json", bos_token_id=5)
    assert FileTokenizer(deepseek).bos_id == 5
    change(llama / "tokenizer_config.json", bos_token=None)
    assert ends_of(FileTokenizer(llama))["bos"] == "<|begin_of_text|>"
    change(llama / "tokenizer_config.json", eos_token="<|begin_of_text|>")
    assert FileTokenizer(llama).bos_id is None
    assert ends_of(FileTokenizer(llama, SpecialTokens("a", "b"))) == {"bos": "a", "eos": "b"}
    with pytest.raises(
        ValueError, match=r"data.bos = 'NOT_A_TOKEN' is no token of data.tokenizer = '.*llama'; give one, auto, or"
    ):
        FileTokenizer(llama, SpecialTokens(bos="NOT_A_TOKEN"))


def test_bytes_have_an_end_or_none():
    assert (ByteTokenizer().bos_id, ByteTokenizer().eos_id) == (None, 256)
    assert (ByteTokenizer(SpecialTokens(eos=None)).eos_id, ByteTokenizer().eos_id) == (None, 256)
    for key in ("bos", "eos"):
        with pytest.raises(
            ValueError, match=rf"data.{key} = 'a': data.tokenizer = 'bytes' has no token of a name; give auto, or"
        ):
            ByteTokenizer(SpecialTokens(**{key: "a"}))


# -- where they are written -----------------------------------------------------------------------------------------------


def test_a_document_has_each_once_and_shards_have_what_a_corpus_has(folder, tmp_path, monkeypatch):
    source = texts(tmp_path, "ab", f"{BOS}ab", "a" * 100 + " b", "   c")
    made = FileTokenizer(folder)
    bos, eos = made.bos_id, made.eos_id
    assert begun(made, np.array([], np.int32)).tolist() == [bos] and ended(made, np.array([3])).tolist() == [3, eos]
    data = data_from(tmp_path, source, tokenizer=str(folder))
    found = documents(data.corpus)
    assert found[0] == found[1] == [bos, 0, 1, eos] and all((d.count(bos), d.count(eos)) == (1, 1) for d in found)
    monkeypatch.setattr(text_writing, "SEGMENT", 64)  # so that documents are tokenized in parts
    make_dataset(tmp_path / "made", source, tokenizer=str(folder))
    shard = open_dataset(tmp_path / "made", "dataset").shards[0]
    assert shard.tokens(0, shard.num_tokens).tolist() == [i for document in found for i in document]
    facts = json.loads(next((tmp_path / "made").glob("shard-*/meta.json")).read_text())["content"]["facts"]
    assert (facts["bos"], facts["eos"]) == (bos, eos)
    for bos, eos, expected in (("c", None, [2, 0, 1]), (None, "d", [0, 1, 3]), (None, None, [0, 1])):
        data = data_from(tmp_path, source, tokenizer=str(folder), bos=bos, eos=eos)
        assert documents(data.corpus)[0] == expected


def test_a_text_without_tokens_is_no_document_where_nothing_begins_and_ends_it(tmp_path):
    made = Tokenizer(models.BPE(vocab={"a": 0, "</s>": 1}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "t.json"))
    source, keys = texts(tmp_path, "aaa", "zz", "aa"), {"tokenizer": str(tmp_path / "t.json"), "eos": None}
    assert documents(data_from(tmp_path, source, **keys).corpus) == [[0, 0, 0], [0, 0]]
    made = make_dataset(tmp_path / "made", source, tokenizer=keys["tokenizer"], special_tokens=SpecialTokens(eos=None))
    assert (made["documents"], made["tokens"]) == (2, 5)
    (tmp_path / "texts.jsonl").write_text('{"text": "zz"}')
    for tokens in (SpecialTokens(eos=None), SpecialTokens()):
        with pytest.raises(ValueError, match="has no tokens for any of its text"):
            data_from(tmp_path, source, tokenizer=keys["tokenizer"], eos=tokens.eos)


def test_a_conversation_and_a_prompt_begin_once(folder):
    """Whether the template or the prompt writes it; what is trained stays where it was."""
    template = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    tokenizer = FileTokenizer(folder)
    bos, eos = tokenizer.bos_id, tokenizer.eos_id
    said = {"messages": [{"role": "assistant", "content": "ab"}]}
    asked = [{"prompt": f"{start}ab", "completion": "c"} for start in ("", BOS)]
    for kind, source, rows, expected in (
        ("messages", template, [said], ([bos, 0, 1], "011")),
        ("messages", "{{ bos_token }}" + template, [said], ([bos, 0, 1], "011")),
        ("completion", None, asked, ([bos, 0, 1, 2, eos], "00011")),
    ):
        templates = {} if source is None else {"default": source}
        chats = Chats(kind, "messages", "assistant", "stop", templates, {"bos_token": BOS})
        found = [(f"row {i}", (0, i), row) for i, row in enumerate(rows)]
        for ids, mask, _ in Encoder(chats, tokenizer).encode_all(found, Skipped(), lambda n: None):
            assert (ids.tolist(), "".join(map(str, mask.astype(int)))) == expected
    chats = Chats("ids", "messages", "all", "stop")
    ((ids, _, _),) = Encoder(chats, tokenizer).encode_all(
        [("", (0, 0), {"input_ids": [0, 1]})], Skipped(), lambda n: None
    )
    assert ids.tolist() == [0, 1], "ids are what the row says"


# -- others are refused ---------------------------------------------------------------------------------------------------


def test_a_run_resumes_with_the_same_or_not_at_all(folder, tmp_path):
    source = texts(tmp_path, "ab" * 20)
    keys = {"source": source, "tokenizer": str(folder)}
    cursor = json.loads(json.dumps(data_from(tmp_path, **keys).cursor(2)))
    assert (cursor["bos"], cursor["eos"]) == (BOS, EOS)
    data_from(tmp_path, **keys, bos=BOS, eos=EOS).check_cursor(cursor)
    for changed, told in (
        ({"bos": None}, f"with other data: data.bos: was {BOS}, is None; restore it"),
        ({"eos": "a"}, f"with other data: data.eos: was {EOS}, is a; restore it"),
    ):
        with pytest.raises(ValueError, match=told):
            data_from(tmp_path, **keys, **changed).check_cursor(cursor)
    before = {
        key: value
        for key, value in data_from(tmp_path, **keys, bos=None).cursor(2).items()
        if key not in ("bos", "eos")
    }
    data_from(tmp_path, **keys, bos=None).check_cursor(before)
    with pytest.raises(ValueError, match=f"data.bos: was None, is {BOS}"):
        data_from(tmp_path, **keys).check_cursor(before)


def test_shards_of_other_tokens_are_refused(folder, tmp_path):
    source, made = texts(tmp_path, "ab" * 20), tmp_path / "made"
    make_dataset(made, source, tokenizer=str(folder), special_tokens=SpecialTokens(bos=None))
    with pytest.raises(
        ValueError, match=rf"data.bos: .*made was made with none, and {BOS} is that of data.tokenizer = .*bos=null"
    ):
        data_from(tmp_path, str(made), tokenizer=str(folder))
    with pytest.raises(
        ValueError, match=rf"data.eos: .*made was made with {EOS}, and data.eos = a; give data.eos={EOS}, or"
    ):
        data_from(tmp_path, str(made), tokenizer="dataset", eos="a")
    for keys in (
        {"tokenizer": str(folder), "bos": None},
        {"tokenizer": "dataset"},
        {"tokenizer": "dataset", "bos": None},
    ):
        assert data_from(tmp_path, str(made), **keys).ends() == (
            f"documents begin with no token (data.bos), and texts end with {EOS} (data.eos)"
        )
    with pytest.raises(ValueError, match=rf"was started with another bos \(.*, bos null, eos {EOS}, text_key text"):
        make_dataset(made, source, tokenizer=str(folder))
    make_dataset(tmp_path / "other", source, tokenizer=str(folder))
    mixture = [{"source": str(tmp_path / name), "weight": 1} for name in ("made", "other")]
    with pytest.raises(
        ValueError, match=r"data.mixture: '.*other' was made with another bos than '.*made'; tokenize all"
    ):
        data_from(tmp_path, None, tokenizer="dataset", mixture=mixture)


def test_a_dataset_from_before_they_were_recorded_is_read_as_it_was_made(tmp_path):
    """Its documents have no BOS, and the end that a vocabulary alone says."""
    folder = write_folder(tmp_path / "llama", "llama")
    source, made = texts(tmp_path, "ab" * 20), tmp_path / "made"
    plan = make_plan(made, source, tokenizer=str(folder), text_key="text", shard_bytes=1 << 20, sample_bytes=1,
                     special_tokens=SpecialTokens(None, "<|end_of_text|>"))  # fmt: skip
    old = {
        k: v for k, v in json.loads((made / "settings.json").read_text())["content"].items() if k != "special_tokens"
    }
    (made / "settings.json").write_text(json.dumps({"content": old, "checksum": checksum_of(old)}))
    settings = dataclasses.replace(plan.settings, special_tokens=None)
    own = FileTokenizer(folder, SpecialTokens(None, "<|end_of_text|>"))
    for unit in plan.todo:
        make_shard(made, unit, settings, own, source, lambda n: None)
    content = write_manifest(dataclasses.replace(plan, settings=settings))
    assert set(content["tokenizer"]) == {"name", "fingerprint", "vocab_size"}
    assert ends_of(open_dataset(made, "dataset").tokenizer) == {"bos": None, "eos": "<|end_of_text|>"}
    with pytest.raises(
        ValueError, match=r"data.bos: .* was made with none, and <\|begin_of_text\|> is that of data.tokenizer"
    ):
        open_dataset(made, str(folder))


# -- on the command line --------------------------------------------------------------------------------------------------


@pytest.mark.slow  # two commands
def test_they_are_written_as_they_are(folder, tmp_path, capsys):
    section = compose([f"data.bos={BOS}", "data.eos=<|im_end|>"]).data
    assert (section.bos, section.eos) == (BOS, "<|im_end|>") and compose(["data.bos=null"]).data.bos is None
    assert (compose([]).data.bos, compose([]).data.eos) == ("auto", "auto")
    source = texts(tmp_path, "ab" * 20)
    given = [f"source={source}", f"tokenizer={folder}", "processes=1"]
    assert tokenize([*given, f"to={tmp_path}/made", "bos=null", f"eos={EOS}"]) == DONE
    assert ends_of(open_dataset(tmp_path / "made", "dataset").tokenizer) == {"bos": None, "eos": EOS}
    capsys.readouterr()
    assert tokenize([*given, f"to={tmp_path}/other", "bos=NOT_A_TOKEN"]) == WRONG
    keys = [*PLAIN, "data=files", f"data.source={source}", f"data.tokenizer={folder}", f"run.dir={tmp_path}/run"]
    assert train([*keys, "data.bos=NOT_A_TOKEN"]) == WRONG
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and lines[0].startswith("error: bos = 'NOT_A_TOKEN' is no token of tokenizer =")
    assert lines[1].startswith("error: data.bos = 'NOT_A_TOKEN' is no token of data.tokenizer =")
