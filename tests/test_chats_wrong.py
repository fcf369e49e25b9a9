"""A row of conversations that is wrong is named by file and line, in one sentence, and one policy says what becomes of it."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from chats import golden

from ejdist.training.data import DataSection, build
from ejdist.training.data.conversation_keys import Asked
from ejdist.training.data.tokenizing import make_dataset

GOOD = {"messages": golden.said("question", "answer")}
RAISES = "{{ raise_exception('only questions') }}"
NEVER_PREFIX = (
    "{% for m in messages %}[{{ m.role }}: {{ m.content }}]{% endfor %}{% if add_generation_prompt %}<reply>{% endif %}"
)


def message(role="assistant", **more):
    return {"messages": [{"role": "user", "content": "q"}, {"role": role, "content": "a"} | more]}


def without(name):
    row = message()
    del row["messages"][1][name]
    return row


# (the row, data.format, more keys, what is said of it)
WRONG = [
    ({"messages": golden.said("only a question")}, {}, "no message is the assistant's, so nothing is trained"),
    (GOOD, {"chat_template": RAISES}, "the chat template fails: only questions"),
    (
        GOOD,
        {"chat_template": "{{ messages[7].content + 'x' }}"},
        "the chat template fails: list object has no element 7",
    ),
    (
        GOOD,
        {"chat_template": NEVER_PREFIX},
        "message 1: the conversation up to it, with the prompt of its turn, is not how",
    ),
    (
        GOOD,
        {"chat_template": "{% if false %}{% generation %}{% endgeneration %}{% endif %}{{ messages }}"},
        "the chat template marks no text as the assistant's; give data.chat_template=FILE, a template that marks",
    ),
    (
        message("critic"),
        {},
        "messages[1] has the unknown role 'critic'; roles are system, developer, user, assistant, tool",
    ),
    (without("role"), {}, "messages[1] has no 'role'"),
    (without("content"), {}, "messages[1] has no 'content' and no 'tool_calls'"),
    (
        {"messages": [{"from": "human", "value": "q"}]},
        {},
        "has no 'role'; it has 'from' and 'value': rename these to role",
    ),
    ({"messages": []}, {}, "'messages' is an empty list, not a list of messages"),
    ({"messages": "hello"}, {}, "'messages' is str, not a list of messages"),
    ({"text": "hello"}, {}, "no key 'messages' (there is text); set data.text_key to the key of the messages"),
    ([1, 2], {}, "list, not an object"),
    ("{", {}, "not JSON (Expecting property name enclosed in double quotes)"),
    (message(content=3), {}, "messages[1].content is int, neither a text nor a list of parts with text"),
    (
        message(content=[{"type": "image"}]),
        {},
        "messages[1].content[0] is of type 'image'; only parts of text can be trained",
    ),
    (message(content="\ud800"), {}, "messages[1].content has half of a surrogate pair at character 0"),
    (message(tool_calls="f()"), {}, "messages[1].tool_calls is str, not a list of objects"),
    (GOOD | {"tools": "f()"}, {}, "'tools' is a text, but not JSON"),
    (GOOD | {"chat_template_kwargs": 1}, {}, "'chat_template_kwargs' is int, not an object"),
    (message(weight=2), {}, "message 1: 'weight' is 2; it is true or false, or 1 or 0"),
    (message("user", train=True), {}, "'train' is True for role 'user'; only turns of the assistant are trained"),
    (message(train=[[0, 9]]), {"loss_on": "spans"}, "must be [begin, end] pairs, in order, within the 1 characters"),
    (
        GOOD,
        {"loss_on": "spans"},
        "nothing of it is trained: no message of the assistant says so by 'train' or 'weight'",
    ),
    ({"prompt": "a", "completion": ""}, {"format": "completion"}, "'completion' is empty, so nothing is trained"),
    ({"prompt": "a", "completion": [GOOD]}, {"format": "completion"}, "must both be texts, or both lists of messages"),
    (
        {"prompt": golden.said("a", "b"), "completion": golden.said("c")},
        {"format": "completion"},
        "'completion' has no message of the assistant, so nothing is trained",
    ),
    (
        {"input_ids": [1, 2], "labels": [1, 2, 3]},
        {"format": "ids"},
        "'labels' has 3 numbers, longer than the 2 of 'input_ids'",
    ),
    (
        {"input_ids": [1, 2], "labels": [2, -100]},
        {"format": "ids"},
        "labels[0] = 2 is neither -100 nor input_ids[0] = 1",
    ),
    (
        {"input_ids": [1, 257], "labels": [1, 257]},
        {"format": "ids"},
        "'input_ids' has 257, and the tokenizer has the ids 0 to",
    ),
    ({"input_ids": [1, 2]}, {"format": "ids"}, "neither 'labels' nor a mask (loss_mask,"),
    ({"input_ids": [1, 2], "mask": [0, 5]}, {"format": "ids"}, "'mask' has 5; a mask has 0 and 1 only"),
    (
        {"input_ids": [1, 2], "labels": [-100, -100]},
        {"format": "ids"},
        "nothing of it is trained: none of its 2 tokens",
    ),
    ({"input_ids": [1, "2"]}, {"format": "ids"}, "'input_ids' is not a list of whole numbers"),
    ({"input_ids": [1], "labels": [1], "mask": [1]}, {"format": "ids"}, "'labels' and 'mask' both say what is trained"),
]


def written(path, *rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def data_of(tmp_path, source, **more):
    section = {"format": "messages", "chat_template": "chatml", "packing": "whole", "sequence_length": 256} | more
    if section["chat_template"] not in ("chatml", None):
        (tmp_path / "own.jinja").write_text(section["chat_template"])
        section["chat_template"] = str(tmp_path / "own.jinja")
    section |= {"source": str(source), "cache_dir": str(tmp_path / "cache")}
    made = DataSection(**section)
    made.validate()
    return build(made, seed=0)


GOODS = {
    "messages": GOOD,
    "completion": {"prompt": "a", "completion": "b"},
    "ids": {"input_ids": [1, 2], "labels": [-100, 2]},
}


@pytest.mark.parametrize(("row", "more", "told"), WRONG, ids=[told[:40] for *_, told in WRONG])
def test_a_wrong_row_is_named_by_file_and_line(row, more, told, tmp_path):
    spans = more.get("loss_on") == "spans"
    good = message(train=True) if spans else GOODS[more.get("format", "messages")]
    file = written(tmp_path / "chats.jsonl", good, good, row)
    if "chat_template" in more:  # which no row can be good for
        file = written(tmp_path / "chats.jsonl", "", "", row)
    with pytest.raises(ValueError) as caught:
        data_of(tmp_path, file, **more)
    said = str(caught.value)
    assert f"{file}, line 3: " in said and told in said and said.count("\n") == 0
    assert said.endswith("; fix or remove it, or pass over such rows with data.on_error=skip")
    assert not list((tmp_path / "cache").glob("corpus-*")), "nothing is kept of it"
    if "chat_template" in more:
        with pytest.raises(ValueError, match="all 1 rows are wrong; the first: "):
            data_of(tmp_path, file, on_error="skip", **more)
    else:
        data = data_of(tmp_path, file, on_error="skip", **more)
        assert data.corpus.num_documents == 2
        (line,) = [line for line in data.notes() if "skipped" in line]
        assert "1 of 3 rows are wrong and skipped (data.on_error=skip); the first: " in line and told in line


def test_rows_of_a_table_and_of_a_dataset_are_named_too(tmp_path):
    rows = [GOOD, {"messages": golden.said("only a question")}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "chats.parquet")
    with pytest.raises(ValueError, match=r"chats.parquet, row 1 \(from 0\): no message is the assistant's"):
        data_of(tmp_path, tmp_path / "chats.parquet")
    file = written(tmp_path / "chats.jsonl", *rows)
    chosen = {"tokenizer": "bytes", "asked": Asked(format="messages", chat_template="chatml")}
    with pytest.raises(ValueError, match=r"chats.jsonl, line 2: no message is the assistant's"):
        make_dataset(tmp_path / "made", str(file), **chosen)
    chosen["asked"] = Asked(format="messages", chat_template="chatml", on_error="skip")
    made = make_dataset(tmp_path / "skipped", str(file), **chosen)
    assert made["conversations"]["skipped"]["count"] == 1 and made["documents"] == 1


def test_a_conversation_that_is_too_long_stops_the_run_or_is_skipped_or_truncated(tmp_path):
    long = {"messages": golden.said("q", "a" * 300)}
    late = {"messages": golden.said("q" * 300, "a")}
    file = written(tmp_path / "chats.jsonl", GOOD, long, late)
    with pytest.raises(ValueError, match=r"line 2: the conversation has 3\d\d tokens, more than data.sequence_length"):
        data_of(tmp_path, file)
    skipped = data_of(tmp_path, file, too_long="skip")
    assert "longer than data.sequence_length = 256: 2, the longest of 3" in skipped.notes()[-1]
    assert skipped.packing.rows_per_epoch == 1
    truncated = data_of(tmp_path, file, too_long="truncate")
    assert "are truncated, and 1 of them, where nothing trained is left, skipped" in truncated.notes()[-1]
    rows = [truncated.packing.row(i) for i in range(truncated.packing.rows_per_epoch)]
    (full,) = [row for row in rows if (row["segment_ids"] == 0).all()]
    assert full["targets"][-1] == -1 and full["targets"][-2] == ord("a"), "nothing past the end of the row is trained"
    with pytest.raises(ValueError, match=r"all conversations are longer than data.sequence_length = 16"):
        data_of(tmp_path, file, too_long="skip", sequence_length=16)
    with pytest.raises(ValueError, match=r"cannot resume with other data: data.packing or data.too_long"):
        skipped.check_cursor(truncated.cursor(1))


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"format": "chat"}, r"data.format = 'chat' is unknown; use text, auto, messages, completion or ids"),
        ({"loss_on": "user"}, r"data.loss_on = 'user' is unknown; use assistant, last, all or spans"),
        ({"on_error": "warn"}, r"data.on_error = 'warn' is unknown; use stop or skip"),
        ({"too_long": "cut"}, r"data.too_long = 'cut' is unknown; use stop, skip or truncate"),
        ({"chat_date": "tomorrow"}, r"data.chat_date = 'tomorrow': write it as 2026-01-31"),
        ({"chat_template_kwargs": "fast"}, r"data.chat_template_kwargs = 'fast': write {name: value}"),
        ({"packing": "cut"}, r"data.packing = cut would divide conversations between rows; set data.packing=whole"),
        ({"packing": "even"}, r"data.packing = even would divide conversations between rows; set data.packing=whole"),
        ({"tokenizer": "bpe:300"}, r"data.tokenizer = 'bpe:300' is trained on text, and conversations are written"),
        (
            {"chat_template": "{% if %}"},
            r"data.chat_template \(default\) is not a Jinja template: line 1: Expected an expr",
        ),
        (
            {"chat_template": None},
            r"conversations need a chat template, but data.tokenizer = 'bytes' has none: give data.ch",
        ),
        (
            {"format": "ids", "loss_on": "last"},
            r"data.loss_on = last: rows of token ids say themselves what is trained",
        ),
    ],
    ids=lambda x: str(x)[:30],
)
def test_a_wrong_key_is_named(keys, told, tmp_path):
    with pytest.raises(ValueError, match=told):
        data_of(tmp_path, written(tmp_path / "chats.jsonl", GOOD | {"id": "a text"}), **keys)


def test_what_rows_are_is_said_and_never_guessed_of_several(tmp_path):
    file = written(tmp_path / "chats.jsonl", "{", GOOD)
    auto = {"format": "auto", "on_error": "skip"}
    assert "1 conversations (key 'messages')" in data_of(tmp_path, file, **auto).notes()[0]
    for kind, phrase in (
        ("completion", "1 prompts and completions"),
        ("ids", "1 token ids with what of them is trained"),
    ):
        file = written(tmp_path / f"{kind}.jsonl", GOODS[kind])
        assert phrase in data_of(tmp_path, file, **auto).notes()[0]
    file = written(tmp_path / "own.jsonl", {"talk": GOOD["messages"]})
    assert "conversations (key 'talk')" in data_of(tmp_path, file, text_key="talk", **auto).notes()[0]
    text = written(tmp_path / "text.jsonl", {"text": "[ ] a list"})
    assert data_of(tmp_path, text, chat_template=None, **auto).notes() == [
        "data.source: text, all of which is trained (data.format=auto)"
    ]
    both = written(tmp_path / "both.jsonl", GOOD | GOODS["ids"])
    with pytest.raises(ValueError, match=r"line 1 has what messages and ids need; say which with data.format=messages"):
        data_of(tmp_path, both, **auto)
    with pytest.raises(ValueError, match=r"line 1 has nope: neither 'messages', nor 'prompt' and 'completion', nor"):
        data_of(tmp_path, written(tmp_path / "none.jsonl", {"nope": 1}), **auto)
    with pytest.raises(ValueError, match=r"has no row to tell data.format by: .*line 1: not JSON"):
        data_of(tmp_path, written(tmp_path / "broken.jsonl", "{"), **auto)
    with pytest.raises(ValueError, match=r"no key 'text' .*; recipe=sft, or data.format=auto, reads conversations"):
        data_of(tmp_path, written(tmp_path / "chats.jsonl", GOOD), format="text")
    with pytest.raises(ValueError, match=r"plain.txt has no rows: conversations are read from .jsonl"):
        data_of(tmp_path, written(tmp_path / "plain.txt", "text"))
