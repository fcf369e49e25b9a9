"""Masks lie beside tokens in caches and shards, and through packing, mixtures and resumption nothing else is trained."""

import json
import shutil
from datetime import date

import decoder_loop
import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from chats import golden
from small_run import TINY, losses

from ejdist.models.parameters import initialise
from ejdist.sections import validate
from ejdist.training.data import DataSection, build, conversation_keys
from ejdist.training.data.conversation_keys import Asked
from ejdist.training.data.tokenizing import make_dataset
from ejdist.training.loop import train
from ejdist.training.metrics import read_rows
from ejdist.training.stage_data import data_of
from launch.errors import DONE, WRONG
from launch.tokenize import main as tokenize
from recipes.schema import compose

LONG = {"messages": golden.said("tell me", "word " * 14, "more", "and " * 9 + "so on")}
ROWS = [
    *({"messages": golden.said(f"question {i}", "answer " * (1 + i % 4), "again", str(i))} for i in range(24)),
    LONG,
    {"messages": golden.said("é€😀", "日本語")},
]


@pytest.fixture
def chats(tmp_path):
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def data_from(tmp_path, path, **more):
    section = {
        "format": "messages",
        "chat_template": "chatml",
        "packing": "whole",
        "sequence_length": 256,
        "global_batch": 2,
    }
    section |= {"source": None if path is None else str(path), "cache_dir": str(tmp_path / "cache")} | more
    made = DataSection(**section)
    made.validate()
    return build(made, seed=1)


def epoch(data):
    """Returns the conversations of an epoch, in the order of their tokens: (tokens, which of them are trained)."""
    found = []
    for i in range(data.packing.rows_per_epoch):
        row = data.packing.row(i)
        for segment in range(row["segment_ids"].max() + 1):
            at = row["segment_ids"] == segment
            tokens, targets = row["tokens"][at], row["targets"][at]
            assert (row["positions"][at] == np.arange(at.sum())).all()
            assert ((targets[:-1] == -1) | (targets[:-1] == tokens[1:])).all() and targets[-1] == -1
            found.append((bytes(tokens.tolist()).decode(), (targets[:-1] >= 0).tolist()))
        assert (row["targets"][row["segment_ids"] < 0] == -1).all()
    return sorted(found)


def wanted(rows=ROWS):
    """Returns the same by the rules of ChatML, written down once more."""
    found = []
    for row in rows:
        text, mask = "", []
        for message in row["messages"]:
            turns = [
                (f"<|im_start|>{message['role']}\n", False),
                (message["content"] + "<|im_end|>", True),
                ("\n", False),
            ]
            for part, said in turns:
                text += part
                mask += [said and message["role"] == "assistant"] * len(part.encode())
        found.append((text, mask[1:]))
    return sorted(found)


def test_every_conversation_is_whole_in_one_row_and_only_the_assistant_is_trained(tmp_path, chats):
    data = data_from(tmp_path, chats)
    assert epoch(data) == wanted()
    again = data_from(tmp_path, chats)
    for step in (0, 7, 3):
        for name, array in data.batch(step).items():
            assert (array == again.batch(step)[name]).all()
    assert sum(trained.count(True) for _, trained in wanted()) == data.corpus.facts["trained"]


def test_a_dataset_and_a_table_have_the_same_conversations(tmp_path, chats):
    pq.write_table(pa.Table.from_pylist([{**row, "tools": None} for row in ROWS]), tmp_path / "chats.parquet")
    assert epoch(data_from(tmp_path, tmp_path / "chats.parquet")) == wanted()
    # A table has tool_calls in every message, without a value in most; this template asks whether they are there.
    some = [golden.CONVERSATIONS["tools"], golden.CONVERSATIONS["one turn"]]
    pq.write_table(pa.Table.from_pylist(some), tmp_path / "tools.parquet")
    (tmp_path / "tools.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
    keys = {"chat_template": str(golden.HERE / "channels.jinja"), "sequence_length": 1024}
    table, lines = (epoch(data_from(tmp_path, tmp_path / f"tools.{kind}", **keys)) for kind in ("parquet", "jsonl"))
    assert table == lines
    asked = Asked(format="messages", chat_template="chatml")
    for name, shard_bytes in (("one", 1 << 28), ("many", 700)):  # a line is of the shard that has its first byte
        make_dataset(tmp_path / name, str(chats), tokenizer="bytes", asked=asked, shard_bytes=shard_bytes)
        made = data_from(tmp_path, tmp_path / name, tokenizer="dataset", format="text", chat_template=None)
        assert epoch(made) == wanted()
        assert (len(made.corpus.shards) > 1) == (name == "many")
    assert "26 conversations (key 'messages')" in made.notes()[0] and "loss on assistant" in made.notes()[0]
    long = wanted([LONG])[0]
    with pytest.raises(
        ValueError, match=r"chats.jsonl, line \d+ of those that begin past byte \d+: the conversation has"
    ):
        data_from(tmp_path, tmp_path / "many", tokenizer="dataset", chat_template=None, sequence_length=len(long[1]))
    for keys, told in (
        ({"loss_on": "last"}, "data.loss_on = 'last', and .* was made with 'assistant'"),
        ({"format": "ids"}, "data.format = 'ids', and .* was made with 'messages'"),
        ({"chat_template": str(golden.HERE / "plain.jinja")}, "is not what .* was made with"),
    ):
        with pytest.raises(ValueError, match=told):
            data_from(tmp_path, tmp_path / "one", **{"tokenizer": "dataset", "chat_template": None, **keys})
    for shard in (tmp_path / "one").glob("shard-*"):
        content = bytearray((shard / "mask.bin").read_bytes())
        content[len(content) // 2] ^= 1
        (shard / "mask.bin").write_bytes(content)
    damaged = data_from(tmp_path, tmp_path / "one", tokenizer="dataset", chat_template=None)
    with pytest.raises(OSError, match=r"is damaged: mask.bin does not hold the bytes that were written"):
        epoch(damaged)


def test_what_a_mask_depends_on_is_compared_on_resume(tmp_path, chats):
    data = data_from(tmp_path, chats)
    cursor = json.loads(json.dumps(data.cursor(3)))
    data_from(tmp_path, chats, on_error="skip").check_cursor(cursor)  # the same conversations are taken
    (tmp_path / "same.jinja").write_text("{# the same text #}" + data.corpus.chats.templates["default"])
    for keys in ({"loss_on": "last"}, {"loss_on": "all"}, {"chat_template": str(tmp_path / "same.jinja")}):
        other = data_from(tmp_path, chats, **keys)
        assert other.corpus.fingerprint != data.corpus.fingerprint
        with pytest.raises(ValueError, match=r"data.format, data.loss_on, data.chat_template or data.chat_date: was"):
            other.check_cursor(cursor)


def test_text_is_tokenized_and_resumed_as_before_there_were_conversations(tmp_path):
    """The fingerprints of a text, as they were; of others the cursors of runs that go on would not be those."""
    path = tmp_path / "text.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("one", "two é", "three")))
    data = data_from(tmp_path, path, format="text", chat_template=None)
    assert data.corpus.fingerprint == "f3ad385140629acd454526a7"
    cursor = data.cursor(0)
    cursor = {name: value for name, value in cursor.items() if name not in ("begin", "used")}
    keys = ["step", "seed", "corpus", "tokenizer", "bos", "eos", "sequence_length", "global_batch", "order"]
    assert list(cursor) == keys
    data.check_cursor(
        {key: value for key, value in cursor.items() if key not in ("bos", "eos")}
    )  # of a run before them
    assert cursor["order"] == "whole" and data.notes() == []
    made = make_dataset(tmp_path / "made", str(path), tokenizer="bytes")
    assert made["fingerprint"] == "351cacca8c270d8174b8b36a" and made["format"] == 1
    assert sorted(p.name for p in next((tmp_path / "made").glob("shard-*")).iterdir()) == [
        "meta.json",
        "offsets.bin",
        "tokens.bin",
    ]
    assert "chats" not in (tmp_path / "made" / "settings.json").read_text()


def test_a_mixture_may_have_text_and_conversations(tmp_path, chats):
    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"text": "plain text " * 9}) + "\n" for _ in range(9)))
    mixture = [{"source": str(chats), "weight": 3}, {"source": str(text), "weight": 1, "format": "text"}]
    data = data_from(tmp_path, None, mixture=mixture, loss_on="assistant")
    places = [data.packing.place(i) for i in range(40)]
    assert {part for part, _ in places} == {0, 1}
    for i, (part, number) in enumerate(places):
        row, own = data.packing.row(i), data.packing.parts[part].row(number)
        assert all((row[name] == own[name]).all() for name in row)
        inside = row["segment_ids"] >= 0
        last = np.append(np.diff(row["segment_ids"]) != 0, True)
        assert (part == 0) == bool((row["targets"][inside & ~last] == -1).any()), "of text every token is trained"
    assert [line[:16] for line in data.notes()] == ["data.mixture[0]:"]
    data.check_cursor(json.loads(json.dumps(data.cursor(1))))
    mixture[0]["loss_on"] = "last"
    with pytest.raises(ValueError, match=r"data.loss_on"):
        data_from(tmp_path, None, mixture=mixture).check_cursor(data.cursor(1))


def test_the_date_of_a_template_is_that_of_the_first_start(tmp_path, chats, monkeypatch):
    template = str(golden.HERE / "headers.jinja")

    def start(day):
        monkeypatch.setattr(
            conversation_keys, "date", type("Day", (date,), {"today": staticmethod(lambda: date.fromisoformat(day))})
        )
        return data_from(tmp_path, chats, chat_template=template, sequence_length=512)

    first, second = start("2026-01-31"), start("2026-02-01")
    assert "dated 2026-01-31 (data.chat_date)" in second.notes()[0]
    second.check_cursor(first.cursor(1))
    assert "31 Jan 2026" in bytes(first.batch(0)["tokens"][0].tolist()).decode(errors="replace")
    shutil.rmtree(tmp_path / "cache")
    with pytest.raises(ValueError, match=r"'date': '2026-01-31'.*'date': '2026-02-01'"):
        start("2026-02-01").check_cursor(first.cursor(1))
    given = data_from(tmp_path, chats, chat_template=template, sequence_length=512, chat_date="2026-01-31")
    given.check_cursor(first.cursor(1))


def test_the_command_makes_shards_of_conversations(tmp_path, chats, capfd):
    words = [f"source={chats}", f"to={tmp_path / 'made'}", "processes=1", "chat_template=chatml", "format=auto"]
    assert tokenize([*words, "loss_on=last"]) == DONE
    said = capfd.readouterr().out
    assert "26 conversations (key 'messages'), chat template" in said and "loss on last" in said
    last = [(text, [i >= text.rindex("assistant\n") + 9 and m for i, m in enumerate(mask)]) for text, mask in wanted()]
    made = epoch(data_from(tmp_path, tmp_path / "made", tokenizer="dataset", chat_template=None))
    assert [(t, m) for t, m in made if t.isascii()] == [(t, m) for t, m in last if t.isascii()]
    assert tokenize([*words, "loss_on=all"]) == WRONG
    assert "was started with another loss_on" in capfd.readouterr().err
    assert tokenize([*words, "loss_on=last", "chat_template_kwargs={a}"]) == WRONG
    assert "chat_template_kwargs = '{a}' is not JSON" in capfd.readouterr().err


@pytest.mark.slow
def test_the_command_shows_what_is_trained(tmp_path, capfd):
    chats, words = tmp_path / "few.jsonl", ["format=auto", "chat_template=chatml"]
    turns = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "é two"}] * 2
    rows = [{"messages": turns}, {"messages": turns[:1]}, {"messages": [turns[0], turns[1] | {"train": [[2, 4]]}]}]
    chats.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    first = "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n"
    whole = f"few.jsonl, line 1: 32 of 140 tokens are trained\n{2 * f'{first}[[é two<|im_end|>]]\n'}\n"
    assert tokenize([f"source={chats}", "show=2", *words]) == WRONG, "it ends at the row that is wrong"
    out, err = capfd.readouterr()
    assert out == f"{tmp_path}/{whole}" and "few.jsonl, line 2: no message is the assistant's" in err
    assert tokenize([f"source={chats}", "show=9", "on_error=skip", "loss_on=spans", *words]) == DONE
    out = capfd.readouterr().out
    assert out.startswith(f"{chats}, line 3: 2 of 70 tokens are trained\n{first}é [[tw]]o<|im_end|>\n")
    assert "wrong, and skipped: 2 of these 3 rows, the first: " in out and list(tmp_path.iterdir()) == [chats]
    made = tmp_path / "made"
    assert tokenize([f"source={chats}", f"to={made}", "processes=1", "on_error=skip", *words]) == DONE
    capfd.readouterr()
    assert tokenize([f"source={made}", "show=1"]) == DONE
    assert capfd.readouterr().out == f"{tmp_path}/{whole}", "a dataset has the same"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["show=1", "to=x"], "show=N prints conversations and writes nothing: leave to out, or show"),
        (["show=1"], "show = 1 is of conversations, and rows of text are trained whole; set format=auto"),
        (["show=0", "format=auto"], "show must be a whole number of at least 1, got 0"),
    ],
)
def test_what_cannot_be_shown(words, told, chats, capfd):
    assert tokenize([f"source={chats}", *words]) == WRONG
    assert told in capfd.readouterr().err


def recipe(directory, tmp_path, chats, *overrides):
    words = [
        "recipe=long_context_sft",
        *TINY[1:],
        "data=files",
        "data.chat_template=chatml",
        "data.sequence_length=256",
    ]
    words += [
        f"data.source={chats}",
        f"data.cache_dir={tmp_path / 'cache'}",
        "run.steps=4",
        f"run.dir={tmp_path / directory}",
    ]
    return compose([*words, *overrides])


def run(directory, tmp_path, chats, *overrides):
    said = []
    train(recipe(directory, tmp_path, chats, *overrides), log=said.append)
    return losses(tmp_path / directory), said


@pytest.mark.slow  # three starts of a run, 8 s
def test_a_run_trains_the_mean_of_what_is_trained_and_resumes_bit_for_bit(tmp_path, chats):
    """Over two devices; the mean is that of a loop in NumPy over the tokens that are trained."""
    whole, said = run("whole", tmp_path, chats)
    assert any("data.source: 26 conversations (key 'messages')" in line for line in said)
    run("parts", tmp_path, chats, "run.stop_after=2")
    resumed, said = run("parts", tmp_path, chats)
    assert any("resuming from step 2" in line for line in said) and resumed == whole
    with pytest.raises(ValueError, match=r"cannot resume with other data: data.format, data.loss_on"):
        run("parts", tmp_path, chats, "data.loss_on=last", "run.steps=5", "run.extend=true")
    r = recipe("whole", tmp_path, chats)
    batch = data_of(r).batch(0)
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), initialise(r.model.build().declared, jax.random.key(0)))
    total, _ = decoder_loop.forward(params, {}, batch, r.model)
    counted = (batch["targets"] >= 0).sum()
    np.testing.assert_allclose(whole[0], total / counted, rtol=2e-5)
    row = read_rows(tmp_path / "whole" / "metrics.jsonl")[0]
    assert row["tokens"] == counted and 2 * counted < (batch["segment_ids"] >= 0).sum()


@pytest.mark.parametrize("name", ["sft", "long_context_sft"])
def test_the_recipes_have_conversations_of_their_own(name, tmp_path):
    r = compose([f"recipe={name}", f"data.cache_dir={tmp_path}"])
    validate(r)
    data = data_of(r)
    (said,) = data.notes()
    assert said.startswith("data.source: 30 conversations (key 'messages')") and "turns by {% generation %}" in said
    assert (data.batch(0)["targets"] >= 0).any()
