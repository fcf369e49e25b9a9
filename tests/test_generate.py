"""The generate command: its keys, prompts, the file of answers, and texts of a run and of a published folder."""

import io
import json
import os
import re
import sys

import pytest
from published_folder import write_folder
from small_run import PLAIN

from ejdist.training.chats.template import ChatTemplate
from ejdist.training.data.tokenizer import ByteTokenizer
from launch.answers import Answers, digest_of
from launch.errors import DONE, WRONG
from launch.generate import main, parse
from launch.loaded import check_cache
from launch.packed import check_adapters
from launch.prompts import Prompt, encoder, read_prompts
from recipes.schema import compose


def test_keys_are_read():
    args, where, words = parse(["run.dir=outputs/x", "prompt=a=b", "temperature=0", 'stop=["\\n", "Q:"]', "mesh.tp=2"])
    assert (where, words) == ("outputs/x", ["mesh=single", "mesh.tp=2", "curriculum=[]"])
    assert (args.prompt, args.stop, args.max_tokens, args.sampling["temperature"]) == ("a=b", ("\n", "Q:"), 256, 0.0)
    assert parse(["run.dir=x", 'stop=["[1"]'])[0].stop == ("[1",)
    words = parse(["from=models/m", "prompts=p.jsonl", "mesh=fsdp"])[2]
    assert words == ["model=hf", "model.init_from=models/m", "mesh=fsdp", "curriculum=[]"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["prompt=a"], r"give run\.dir=DIR, or from=HF_FOLDER"),
        (["run.dir=x", "from=y"], "one of the two"),
        (["run.dir=x", "prompt=a", "prompts=b"], "prompt=TEXT, or prompts=FILE"),
        (["run.dir=x", "prompt=a", "prompt=b"], "given twice"),
        (["run.dir=x", "max_tokens=0"], "max_tokens = '0' must be a whole number of at least 1"),
        (["run.dir=x", "max_tokens=1_6"], "max_tokens = '1_6' must be a whole number"),
        (["run.dir=x", "temperature=warm"], "temperature = 'warm' must be a number"),
        (["run.dir=x", "top_p=0"], r"top_p = 0\.0 must be above 0"),
        (["run.dir=x", 'stop=["a"'], "no JSON list .*: correct it, or if it is a text write a list of it"),
        (["run.dir=x", "stop=[/INST]"], r"""stop='\["\[/INST\]"\]'"""),
        (["run.dir=x", 'stop=[""]'], "must be a text, or a JSON list"),
        (["run.dir=x", "chat=maybe"], "must be auto, true or false"),
        (["run.dir=x", "cache=some"], "must be whole or spread"),
        (["run.dir=x", "model=nano"], "the model comes from the weights"),
        (["run.dir=x", "to=answers.txt"], r"must be a file \.jsonl"),
        (["run.dir=x", "temprature=0"], "did you mean"),
    ],
    ids=str,
)
def test_wrong_keys_are_one_sentence(words, message):
    with pytest.raises(ValueError, match=message):
        parse(words)


def test_the_folder_of_a_run_and_a_file_that_is_not_there_are_named(tmp_path):
    (tmp_path / "checkpoints/4").mkdir(parents=True)
    with pytest.raises(ValueError, match=f"^from = '{tmp_path}' is the folder of a run: give run.dir={tmp_path}$"):
        parse([f"from={tmp_path}"])
    with pytest.raises(ValueError, match=r"^prompts = '/nowhere.txt' cannot be read \(No such file or directory\)"):
        read_prompts(None, "/nowhere.txt")


def test_a_cache_that_nothing_splits_and_packed_adapters_are_refused_before_anything_is_loaded():
    check_cache(compose(["mesh.sp=2"]), "spread")
    check_adapters(compose(["mesh.sp=2"]), "int8")
    check_adapters(compose(["mesh=single", "lora.rank=4"]), None)
    with pytest.raises(
        ValueError, match=r"cache = spread needs several devices along mesh\.sp or mesh\.cp: give mesh\.sp=N"
    ):
        check_cache(compose(["mesh=single"]), "spread")
    with pytest.raises(
        ValueError, match=r"weights = int4 packs .*adapters: merge them first \(python -m launch\.export"
    ):
        check_adapters(compose(["lora.rank=4"]), "int4")


def test_prompts_of_a_file(tmp_path, monkeypatch):
    (tmp_path / "p.txt").write_text("one\r\n\n  two\n")
    assert read_prompts(None, str(tmp_path / "p.txt")) == [Prompt("one"), Prompt("  two")]
    turn = {"role": "user", "content": "hi"}
    (tmp_path / "p.jsonl").write_text(
        '{"prompt": "one\\ntwo"}\n' + json.dumps({"messages": [turn], "answer": ["Paris", "Rome"]}) + '\n"three"\n'
    )
    expected = [Prompt("one\ntwo"), Prompt(messages=(turn,), answers=("Paris", "Rome")), Prompt("three")]
    assert read_prompts(None, str(tmp_path / "p.jsonl")) == expected
    assert expected[1].is_right("It is ROME.") and not expected[1].is_right("Pari s") and not expected[0].is_right("")
    assert expected[1].is_exact(" rome\n") and not expected[1].is_exact("It is Rome") and not expected[0].is_exact("")
    assert [one.shown for one in expected] == ["one\ntwo", [turn], "three"]
    (tmp_path / "p.jsonl").write_text("\n\n")
    with pytest.raises(ValueError, match=r"p\.jsonl has no prompts"):
        read_prompts(None, str(tmp_path / "p.jsonl"))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("é\n".encode())))
    assert read_prompts(None, None) == [Prompt("é")]


def test_prompts_beside_a_wrong_one_go_on(tmp_path):
    """Each wrong line is told where it is encoded, with its number, and the others keep theirs."""
    wrong = {
        b'{"prompt": 3}': "has no prompt; write",
        b"3": "has no prompt; write",
        b'{"prompt": "a", "answer": 3}': ": 'answer' must be a text",
        b"{": "is not JSON",
        b'"\xc3"': r"is not UTF-8 \(byte 1\)",
        b'{"prompt": "\\ud83d"}': "has half of a character",
        b"[" * 100_000: "is nested too deeply",
    }
    (tmp_path / "p.jsonl").write_bytes(b"\n".join([b'"first"', *wrong, b'"last"']))
    prompts, encode = read_prompts(None, str(tmp_path / "p.jsonl")), encoder(ByteTokenizer(), None)
    assert len(prompts) == 2 + len(wrong) and bytes(encode(prompts[-1])) == bytes(encode(Prompt("last")))
    for i, message in enumerate(wrong.values(), 2):
        with pytest.raises(ValueError, match=rf"p\.jsonl, line {i}:? ?{message}"):
            encode(prompts[i - 1])


def test_prompts_go_through_the_chat_template():
    template = ChatTemplate(
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}",
        {},
        None,
    )
    tokenizer = ByteTokenizer()
    encode = encoder(tokenizer, template)
    assert tokenizer.decode(encode(Prompt("hi"))) == "<user>hi<a>"
    turns = ({"role": "system", "content": "s"}, {"role": "user", "content": "q"})
    assert tokenizer.decode(encode(Prompt(messages=turns))) == "<system>s<user>q<a>"
    plain = encoder(tokenizer, None)
    assert tokenizer.decode(plain(Prompt("hi"))) == "hi" and not len(plain(Prompt(""))) and not len(encode(Prompt("")))
    with pytest.raises(ValueError, match="messages need a chat template"):
        plain(Prompt(messages=turns))


def test_a_stopped_file_goes_on_and_another_is_refused(tmp_path):
    path, prompts, settings = tmp_path / "a.jsonl", ["one", "two"], digest_of({"seed": 0})
    file = Answers(path, settings, prompts)
    file.add(1, "two", {"text": "é\n"})
    row = path.read_bytes()
    assert json.loads(row) == {"index": 1, "prompt": "two", "text": "é\n", "settings": settings}
    path.write_bytes(row + row[:-9])  # killed while it wrote
    again = Answers(path, settings, prompts)
    assert again.finished == {1: "é\n"}
    again.add(0, "one", {"text": ""})
    assert [json.loads(line)["index"] for line in path.read_text().splitlines()] == [1, 0]
    for other in ((digest_of({"seed": 1}), prompts), (settings, ["one", "three"]), (settings, ["one"])):
        with pytest.raises(ValueError, match=r"answers to other prompts, or of other weights or settings \(line 1\)"):
            Answers(path, *other)
    path.write_text("not JSON\n")
    with pytest.raises(ValueError, match="name another file"):
        Answers(path, settings, prompts)
    assert path.read_text() == "not JSON\n"


@pytest.mark.slow
def test_texts_of_a_run(tmp_path, capfd, monkeypatch):
    """The first is that of greedy decoding without a cache; a file goes on; each wrong prompt is one sentence."""
    from ejdist.training.loop import train
    from recipes.schema import compose

    monkeypatch.chdir(tmp_path)
    wide = ["model.model_dim=128", "model.head_dim=32", "model.ffn_dim=128"]
    train(compose([*PLAIN, *wide, "run.dir=run", "run.steps=2"]), log=lambda line: None)
    how = ["run.dir=run", "max_tokens=6", "temperature=0"]
    capfd.readouterr()
    assert main([*how, "prompt=def "]) == DONE
    text, told = capfd.readouterr()
    assert text.endswith("\n") and "1 prompt" in told and "tokens: the first after" in told and "warning" not in told
    assert main([*how, "prompt=def ", "mesh.sp=2", "cache=spread"]) == DONE
    spread, told = capfd.readouterr()
    assert spread == text and re.search(r"the cache \(cache=spread\) takes \d+\.\d MiB on each device", told)
    assert main([*how, "prompt=def ", "length=4000"]) == DONE
    told = capfd.readouterr().err
    assert "warning: up to 4,000 tokens" in told and "are more than the model's context of" in told
    os.makedirs("out")
    rows = [{"prompt": "def ", "answer": text[:-1] or "?"}, 5, {"prompt": "import sys", "answer": ["never \u1234"]}, ""]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert main([*how, "prompts=p.jsonl", "to=out/a.jsonl"]) == WRONG  # one is no prompt, and one is empty
    told = capfd.readouterr().err
    assert "error: prompt 1: p.jsonl, line 2 has no prompt" in told
    assert "error: prompt 3: the prompt is empty" in told and "1 of 2 answers have a right one in them (50.0%)" in told
    rows = [json.loads(line) for line in (tmp_path / "out/a.jsonl").read_text().splitlines()]
    assert {row["index"]: row["text"] for row in rows}[0] == text[:-1] and len(rows) == 2
    for other in ("seed=1", "weights=int8"):
        assert main([*how, "prompts=p.jsonl", "to=out/a.jsonl", other]) == WRONG
        assert "name another file" in capfd.readouterr().err
    assert main([*how, "prompt=def ", "weights=int8"]) == DONE
    packed, told = capfd.readouterr()
    assert (
        re.search(r"^weights=int8: [\d.]+ MB of weights, as they are stored, become [\d.]+ MB$", told, re.MULTILINE)
        and packed
    )
    assert "  not packed: key, value, " in told and "outside of the layers" in told and "tokens/s" in told
    for words, message in (
        (["prompt="], "the prompt is empty"),
        (["prompt=abcdef", "length=8"], "exceed the 8 tokens of a request"),
        (["prompt=a", "data.tokenizer=bpe:300"], "not the tokenizer that the run was trained with"),
        (["prompt=a", "chat=true"], "need a chat template"),
    ):
        assert main([*how, *words]) == WRONG
        assert message in capfd.readouterr().err


@pytest.mark.slow
def test_texts_of_a_published_folder(tmp_path, capfd, monkeypatch):
    """With its tokenizer, chat template and ends; in bfloat16, as the folder says."""
    monkeypatch.chdir(tmp_path)
    folder = write_folder(tmp_path / "m", "qwen3")
    assert main(["from=m", "prompt=abc", "max_tokens=4", "temperature=0"]) == DONE
    text, told = capfd.readouterr()
    assert "through the chat template" not in told and len(text) <= 5
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    assert main(["from=m", "prompt=abc", "max_tokens=4", "temperature=0"]) == DONE
    again, told = capfd.readouterr()
    assert "through the chat template" in told and again == text
    assert main(["from=m", "prompt=abc", "data.tokenizer=bytes"]) == WRONG
    assert "257 tokens" in capfd.readouterr().err
