"""Conversations become the tokens and masks that transformers gives, token by token, with and without marks in the template."""

import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from chats import golden
from hypothesis import given, settings
from hypothesis import strategies as st

from ejdist.training.chats.encoding import Chats, Encoder, Skipped, mask_of
from ejdist.training.chats.folder import templates_of, tokens_of
from ejdist.training.chats.special_tokens import SpecialTokens
from ejdist.training.data.tokenizer import ByteTokenizer, FileTokenizer

HERE = Path(golden.__file__).parent
# Without BOS, which the template alone writes in what transformers makes of a conversation.
TOKENIZER = FileTokenizer(HERE / "tokenizer.json", SpecialTokens(bos=None))
WANTED = json.loads((HERE / "golden.json").read_text("utf-8"))
EVERY = [(template, name) for template, of in WANTED.items() for name in of]
SPECIAL = {"bos_token": "<|begin_of_text|>", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}


def source_of(template, marks=True):
    """Returns a template, or what is left of it without marks: the same text, and space around the marks as it was."""
    source = (HERE / f"{template}.jinja").read_text("utf-8")
    if marks:
        return source
    source = re.sub(r"(\{%-? )generation( -?%\})", r"\1if true\2", source)
    return re.sub(r"(\{%-? )endgeneration( -?%\})", r"\1endif\2", source)


def chats_of(source, loss_on="assistant", kind="messages", on_error="stop", **more):
    templates = {} if source is None else {"default": source}
    return Chats(kind, "messages", loss_on, on_error, templates, SPECIAL, today=golden.DATE, **more)


def encoded(chats, rows, tokenizer=TOKENIZER, skipped=None):
    found = ((f"row {i}", (0, i), row) for i, row in enumerate(rows))
    return list(Encoder(chats, tokenizer).encode_all(found, skipped or Skipped(), lambda n: None))


def one(chats, row, tokenizer=TOKENIZER):
    ((ids, mask, _),) = encoded(chats, [row], tokenizer)
    return ids.tolist(), "".join(map(str, mask.astype(int)))


def trained(chats, row, tokenizer=TOKENIZER):
    """Returns the text of the tokens that are trained."""
    ((ids, mask, _),) = encoded(chats, [row], tokenizer)
    if isinstance(tokenizer, ByteTokenizer):
        return tokenizer.decode(ids[mask])
    return tokenizer._tokenizer.decode(ids[mask].tolist(), skip_special_tokens=False)


@pytest.mark.parametrize("marks", [True, False], ids=["marks", "prefixes"])
@pytest.mark.parametrize(("template", "name"), EVERY, ids=lambda x: x.replace(" ", "_"))
def test_tokens_and_masks_are_those_of_transformers(template, name, marks):
    ids, mask = one(chats_of(source_of(template, marks)), golden.CONVERSATIONS[name])
    assert [ids, mask] == WANTED[template][name]
    assert "1" in mask and "0" in mask


def test_the_golden_file_has_every_conversation():
    wanted = {(t, n) for t in golden.TEMPLATES for n in golden.CONVERSATIONS} - golden.REFUSED
    assert set(EVERY) == wanted


@pytest.mark.parametrize("marks", [True, False], ids=["marks", "prefixes"])
def test_what_is_trained_can_be_chosen(marks):
    row = {"messages": golden.said("a", "one", "b", "two", "c", "three", "d")}
    plain = source_of("plain", marks)
    assert trained(chats_of(plain), row) == "one<|im_end|>\ntwo<|im_end|>\nthree<|im_end|>\n"
    assert trained(chats_of(plain, "last"), row) == "three<|im_end|>\n"
    ids, mask = one(chats_of(plain, "all"), row)
    assert mask == "1" * len(ids)
    row["messages"][1]["weight"], row["messages"][3]["train"] = 0, False
    assert trained(chats_of(plain), row) == "three<|im_end|>\n", "a turn that says that it is not trained is not"
    row["messages"][5]["train"] = [[0, 1], [3, 5]]
    assert trained(chats_of(plain, "spans"), row, ByteTokenizer()) == "tee"
    row["messages"][1]["weight"] = 1
    assert trained(chats_of(plain, "spans"), row, ByteTokenizer()) == "one<|im_end|>\ntee"


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(st.sampled_from("ab \né한👩‍🚀"), min_size=1, max_size=6), min_size=1, max_size=6), st.data())
def test_a_token_is_trained_if_a_character_of_it_is(parts, data):
    text = "".join(parts)
    ends = np.cumsum([len(part) for part in parts]).tolist()
    spans = [(end - len(part), end) for part, end in zip(parts, ends, strict=True) if data.draw(st.booleans())]
    inside = {place for begin, end in spans for place in range(begin, end)}
    for tokenizer in (TOKENIZER, ByteTokenizer()):
        ((ids, places),) = tokenizer.encode_places([text])
        assert (ids == tokenizer.encode(text)).all()
        wanted = [any(begin <= place < end for place in inside) for begin, end in places.tolist()]
        assert mask_of(places, spans).tolist() == wanted
        assert {p for begin, end in places.tolist() for p in range(begin, end)} == set(range(len(text)))


def test_the_end_of_a_turn_that_several_tokens_make_is_trained_whole():
    template = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}|{% endfor %}"
    row = {"messages": [{"role": "assistant", "content": "👋🏽"}]}
    _, mask = one(chats_of(template), row, ByteTokenizer())
    assert mask == "1" * 8 + "0"


@pytest.mark.parametrize("template", ["headers", "plain", None])
def test_bos_is_at_the_start_of_a_conversation_once(template):
    """Whether the template writes it, as `headers` does, or not; and before a prompt, which may have it too."""
    bos = FileTokenizer(HERE / "tokenizer.json")
    assert bos.token_of(bos.bos_id) == "<|begin_of_text|>"
    chats = chats_of(None if template is None else source_of(template), kind="messages" if template else "completion")
    rows = [golden.CONVERSATIONS["one turn"]] if template else [
        {"prompt": f"{start}a b", "completion": " c"} for start in ("", "<|begin_of_text|>")
    ]  # fmt: skip
    for row in rows:
        (ids, mask), (without, unmarked) = one(chats, row, bos), one(chats, row)
        assert ids[0] == bos.bos_id and ids.count(bos.bos_id) == 1
        assert (
            ids[1:] == [i for i in without if i != bos.bos_id]
            and mask.endswith(unmarked.lstrip("0"))
            and mask[0] == "0"
        )


def test_a_prompt_and_a_completion_are_texts_or_messages():
    end = TOKENIZER.eos_id
    ids, mask = one(chats_of(None, kind="completion"), {"prompt": "Two and two are", "completion": " four"})
    assert ids == [*TOKENIZER.encode("Two and two are four"), end] and mask.rstrip("1").count("1") == 0
    assert TOKENIZER._tokenizer.decode(ids[mask.index("1") : -1]) == " four", "and the end is trained"
    ids, mask = one(chats_of(None, kind="completion"), {"prompt": "a", "completion": "b<|endoftext|>"})
    assert ids.count(end) == 1, "an end that is there is not added"
    row = {"prompt": golden.said("a", "not this", "b"), "completion": golden.said("x", "this")[1:]}
    assert trained(chats_of(source_of("plain"), kind="completion"), row) == "this<|im_end|>\n"
    row = {"prompt": "abc", "completion": "defg", "spans": [[1, 3]]}
    assert trained(chats_of(None, "spans", kind="completion"), row, ByteTokenizer()) == "ef"


def test_ids_have_labels_or_a_mask():
    ids = [5, 6, 7, 8]
    for said in ({"labels": [-100, -100, 7, 8]}, {"loss_mask": [0, 0, 1, 1]}, {"assistant_masks": [0, 0, True, 1]}):
        assert one(chats_of(None, "spans", kind="ids"), {"input_ids": ids, **said}) == (ids, "0011")
    assert one(chats_of(None, "all", kind="ids"), {"input_ids": ids}) == (ids, "1111")


def test_content_may_be_parts_of_text():
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    rows = [{"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": parts}]}]
    rows += [{"messages": golden.said("one two", "one two")}]
    first, second = encoded(chats_of(source_of("plain")), rows)
    assert first.ids.tolist() == second.ids.tolist() and (first.mask == second.mask).all()


def test_variables_of_a_template_come_from_the_recipe_and_from_the_row():
    template = "{% for m in messages %}{{ mood }}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    row = {"messages": [{"role": "assistant", "content": "."}]}
    chats = chats_of(template, arguments={"mood": "calm"})
    assert one(chats, row)[0] == TOKENIZER.encode("calm.").tolist()
    assert one(chats, row | {"chat_template_kwargs": {"mood": "loud"}})[0] == TOKENIZER.encode("loud.").tolist()


def test_the_template_of_a_folder(tmp_path):
    config, tokenizer = tmp_path / "tokenizer_config.json", str(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer.json").write_bytes((HERE / "tokenizer.json").read_bytes())
    with pytest.raises(
        ValueError, match=r"neither chat_template.jinja nor one in tokenizer_config.json: give data.chat_t"
    ):
        templates_of(None, tokenizer)
    config.write_text(json.dumps({"chat_template": "one", "bos_token": {"content": "<s>"}, "eos_token": "</s>"}))
    assert templates_of(None, tokenizer) == {"default": "one"}
    assert tokens_of(tokenizer) == {"bos_token": "<s>", "eos_token": "</s>"}
    listed = [
        {"name": "default", "template": "one"},
        {"name": "tool_use", "template": "two"},
        {"name": "rag", "template": "3"},
    ]
    config.write_text(json.dumps({"chat_template": listed}))
    assert templates_of(None, tokenizer) == {"default": "one", "tool_use": "two"}
    assert templates_of("rag", tokenizer) == {"default": "3"}
    (tmp_path / "chat_template.jinja").write_text("four")
    assert templates_of(None, str(tmp_path)) == {"default": "four", "tool_use": "two"}
    config.write_text(json.dumps({"chat_template": listed[1:]}))
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match=r"rag, tool_use, and none is the default: name one in data.chat_template"):
        templates_of(None, tokenizer)
    with pytest.raises(
        ValueError, match=r"data.chat_template = 'nowhere.jinja': no such file; give a Jinja template, chatml"
    ):
        templates_of("nowhere.jinja", tokenizer)
    with pytest.raises(ValueError, match=r"data.tokenizer = 'bytes' has none: give data.chat_template=FILE, or chatml"):
        templates_of(None, "bytes")


def test_a_conversation_with_tools_has_the_template_for_them():
    text = "{{% for m in messages %}}{{% generation %}}{}{{% endgeneration %}}{{% endfor %}}".format
    chats = Chats("messages", "messages", "assistant", "stop", {"default": text("plain"), "tool_use": text("tools")})
    row = {"messages": [{"role": "assistant", "content": "."}]}
    assert trained(chats, row) == "plain" and trained(chats, row | {"tools": golden.TOOLS}) == "tools"
    assert trained(chats, row | {"tools": json.dumps(golden.TOOLS)}) == "tools", "tables have them as JSON"


def test_a_template_cannot_reach_what_it_should_not():
    row = {"messages": [{"role": "assistant", "content": "."}]}
    for attack in ("messages.append(1)", "''.__class__.__mro__", "cycler.__init__.__globals__.os.system('true')"):
        with pytest.raises(ValueError, match="row 0: the chat template fails: "):
            one(chats_of("{{ " + attack + " }}"), row)


@pytest.mark.slow
def test_random_conversations_are_those_of_transformers():
    """Of 100 to 60,000 tokens, with the interpreter of TRANSFORMERS_PYTHON where this one does not have the library."""
    python = os.environ.get("TRANSFORMERS_PYTHON", sys.executable)
    if subprocess.run([python, "-c", "import transformers"], capture_output=True).returncode:
        pytest.skip("transformers is not installed; TRANSFORMERS_PYTHON may name an interpreter that has it")
    rng = random.Random(0)
    letters = "aeiou bcdst \n\n.,éü日한👩‍🚀<|im_end|>"
    cases = []
    for size in (100, 300, 1000, 3000, 10_000, 30_000, 60_000):
        for template in golden.TEMPLATES:
            turns, left = [], size
            while left > 0 or len(turns) % 2:
                count = min(rng.choice([1, 5, 20, 200, 2000]), max(left, 1))
                turns.append("x" + "".join(rng.choice(letters) for _ in range(count)))
                left -= count
            cases.append((template, {"messages": golden.said(*turns, system=rng.choice([None, "Be kind."]))}))
    run = subprocess.run(
        [python, golden.__file__, "-"], input=json.dumps(cases), capture_output=True, text=True, check=True
    )
    for (template, conversation), (ids, mask) in zip(cases, json.loads(run.stdout), strict=True):
        for marks in (True, False):
            assert one(chats_of(source_of(template, marks)), conversation) == (ids, "".join(map(str, mask)))
