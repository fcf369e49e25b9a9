"""RULER's tasks: prompts, scores, decoding by guesses, a model that reads them, and the same answers on every mesh."""

import dataclasses
import json
import re
import shlex
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import published_loop
import pytest
from known_model import model_of
from shared import once
from small_run import TINY

from ejdist.cluster.hosts import Hosts
from ejdist.evaluation import Evaluator
from ejdist.evaluation.decoding import WINDOW, decode
from ejdist.evaluation.ruler import (
    TASKS,
    Case,
    Essays,
    Generator,
    Questions,
    Sources,
    Task,
    check_names,
    chosen,
    measure,
    measure_ruler,
    string_match,
    summary,
)
from ejdist.mesh import make_mesh
from ejdist.training.chats.special_tokens import SpecialTokens, begun
from ejdist.training.data.tokenizer import ByteTokenizer, FileTokenizer, train_bpe
from ejdist.training.setup import open_run
from launch.errors import DONE, WRONG
from launch.evaluate import evaluate, main, parse
from launch.ruler import add_rows, check_context, place_of_rows, table
from recipes.schema import compose

BYTES = ByteTokenizer()
SQUAD = {
    "data": [
        {
            "paragraphs": [
                {
                    "context": f"In valley {a}{p} lives a bird named {a * 3}{p}.",
                    "qas": [
                        {
                            "question": f"Which bird of {a}{p}?",
                            "answers": [{"text": f"{a * 3}{p}"}, {"text": f"bird {a * 3}{p}"}],
                        },
                        {"question": "Which fish?", "answers": [], "is_impossible": True},
                    ],
                }
                for p in range(3)
            ]
        }
        for a in "abcdefgh"
    ]
}
HOTPOT = [
    {
        "question": f"Who {i}?",
        "answer": f"Mr {i}" if i != 1 else "Mr 1" * 20,
        "context": [[f"T{j}", [f"Fact {j}.", " More."]] for j in range(i, i + 4)],
    }
    for i in range(40)
]


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    folder = tmp_path_factory.mktemp("questions")
    for name, content in (("squad", SQUAD), ("hotpotqa", HOTPOT)):
        (folder / name).write_text(json.dumps(content))
    return Sources(Essays.generated(), *(Questions.read(name, str(folder / name)) for name in ("squad", "hotpotqa")))


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    """Bytes, and a BPE that begins every text with a token."""
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    path.write_text(train_bpe(iter([" ".join(Essays.generated().words[:3000])]), 400))
    bpe = FileTokenizer(path)
    bpe.bos_id = 399
    return {"bytes": BYTES, "bpe": bpe}


# -- prompts --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, "bytes") for name in TASKS),
        *(
            pytest.param(n, "bpe", marks=[] if n in ("niah_single_2", "vt", "qa_1") else pytest.mark.slow)
            for n in TASKS
        ),
    ],
)
def test_a_prompt_fills_its_length_with_room_for_the_answer(name, kind, sources, tokenizers):
    tokenizer, length = tokenizers[kind], 8192 if name != "qa_1" else 1024  # all of its 24 documents
    generator = Generator(TASKS[name], length, tokenizer, sources)
    samples = [generator.make(i) for i in range(3)]
    for sample in samples:
        used = len(sample.prompt) + sample.tokens
        assert used <= length and (used > 0.97 * length or name.startswith("qa")), (name, used)
        assert sample.tokens == max(TASKS[name].tokens, len(sample.answer))
        begin = [] if kind == "bytes" else [399]
        assert sample.prompt.tolist() == [*begin, *tokenizer.encode(sample.text).tolist()]
        answer = tokenizer.decode(sample.answer)
        assert string_match(answer, sample.references, TASKS[name].match) == 1 and sample.text[-1] != " " == answer[0]
        assert all(r in sample.text for r in sample.references) or TASKS[name].match == "part"
        assert string_match(sample.text, sample.references, TASKS[name].match) == 1 or name == "qa_2"
    again = Generator(TASKS[name], length, tokenizer, sources)
    assert again.make(2).text == samples[2].text, "a pure function, whatever was made before"
    assert len({s.text for s in samples}) == 3
    assert dataclasses.replace(generator, seed=1).make(0).text != samples[0].text


@pytest.mark.parametrize("count", [1, 2, 5, 16, 40])
def test_depths_are_spread_evenly_however_many_there_are(count, sources):
    for seed in range(4):
        generator = Generator(TASKS["niah_single_1"], 2048, BYTES, sources, seed)
        depths = np.sort([generator.depth(i) for i in range(count)])
        around = np.append(depths, depths[0] + 1)
        assert np.diff(around).max() < 2 / count + 1e-9 and 0 <= depths[0] and depths[-1] < 1


@pytest.mark.parametrize("name", [name for name in TASKS if name.startswith("niah")])
def test_the_needle_stands_at_its_depth_before_the_question(name, sources):
    generator = Generator(TASKS[name], 8192, BYTES, sources)
    for i in range(6):
        sample = generator.make(i)
        head, *lines, question = sample.text.split("\n")
        body = "\n".join(lines)
        places = [body.index(r) / len(body) for r in sample.references]
        assert min(abs(p - sample.depth) for p in places) < 0.02, (name, i)
        assert all(sample.text.count(r) == 1 and r not in head + question for r in sample.references)


def needles_of(text):
    return re.findall(r"Remember that a special magic (\w+) for (\S+) is (\S+)\.(?=\s)", text)


@pytest.mark.parametrize(
    ("name", "needles", "keys", "asked"),
    [
        ("niah_single_1", 1, 1, 1), ("niah_single_2", 1, 1, 1), ("niah_single_3", 1, 1, 1), ("niah_multikey_1", 4, 4, 1),
        ("niah_multivalue", 4, 1, 1), ("niah_multiquery", 4, 4, 4), ("niah_multikey_2", None, None, 1),
        ("niah_multikey_3", None, None, 1),
    ],
)  # fmt: skip
def test_needles_have_different_keys_and_values_and_the_question_asks_for_them(name, needles, keys, asked, sources):
    """Of many prompts, since a draw that repeats is rare: with keys and values from few, it is not."""
    for i in range(5):
        sample = Generator(TASKS[name], 8192, BYTES, sources).make(i)
        standing = needles_of(sample.text)
        values = {value: key for _, key, value in standing}
        assert needles is None or len(values) == len(standing) == needles
        assert keys is None or len({key for _, key, _ in standing}) == keys
        assert needles is not None or len(standing) == len({key for _, key, _ in standing}) > 40
        question = sample.text.rpartition("\n")[2]
        wanted = re.search(r"for (.*) in this text\?", question)[1].replace(", and ", ", ").split(", ")
        assert len(wanted) == asked and [values[r] for r in sample.references] == [
            key for key in wanted for _ in range(len(sample.references) // asked)
        ]
        assert {kind for kind, _, _ in standing} == {"uuid" if "_3" in name else "number"}


def test_keys_that_are_drawn_from_few_never_repeat(monkeypatch, sources):
    """A distractor with the key, or the value, of the needle would be a second right answer."""
    from ejdist.evaluation.ruler import needles, words

    few = {"words": lambda rng: f"k{rng.integers(60)}", "numbers": lambda rng: str(1000 + rng.integers(60))}
    monkeypatch.setattr(needles, "KINDS", words.KINDS | few)
    for i in range(4):
        sample = Generator(TASKS["niah_multikey_2"], 2400, BYTES, sources).make(i)
        standing = needles_of(sample.text)
        assert len(standing) > 25
        assert len({key for _, key, _ in standing}) == len(standing)
        assert [value for _, _, value in standing].count(*sample.references) == 1


def test_variables_get_the_value_from_each_other_in_order(sources):
    for i in range(5):
        sample = Generator(TASKS["vt"], 4096, BYTES, sources).make(i)
        shown, asked = sample.text.split("\n\nSomewhere")
        value = re.search(r"have the value (\d+) in", asked)[1]
        assert value not in shown
        holds = {}
        for name, source in re.findall(r"^VAR (\w+) = (?:VAR )?(\w+)$", asked, re.M):
            holds[name] = holds.get(source, source)  # what is not assigned yet is no value
        assert [n for n, v in holds.items() if v == value] == list(sample.references) and len(holds) == 5
        assert not any(r in shown for r in sample.references), "the example has other variables"


@pytest.mark.parametrize(("length", "often", "seldom"), [(8192, 30, 3), (4000, 6, 1)])
def test_common_words_are_the_most_common_ones(length, often, seldom, sources):
    sample = Generator(TASKS["cwe"], length, BYTES, sources).make(0)
    shown, listed = (part.split("\n")[1] for part in sample.text.split("The numbered list")[1:])
    counts = Counter(re.findall(r"\d+\. (\w+)", listed))
    assert {w for w, n in counts.items() if n == often} == set(sample.references) and len(sample.references) == 10
    assert set(counts.values()) == {often, seldom} and {len(w) for w in counts} == {6}
    assert not set(counts) & set(re.findall(r"\d+\. (\w+)", shown)), "the example has other words"


@pytest.mark.parametrize("length", [1100, 8192])
def test_the_three_most_frequent_coded_words_are_asked_for(length, sources):
    for i in range(4):
        sample = Generator(TASKS["fwe"], length, BYTES, sources).make(i)
        listed = sample.text.partition("most frequent ones. ")[2].partition("\nQuestion")[0].split()
        counts = Counter(listed).most_common()
        assert counts[0][0] == "..." and {w for w, _ in counts[1:4]} == set(sample.references)
        assert counts[3][1] > counts[4][1], "the third is not as frequent as the fourth"


def test_a_question_stands_below_its_documents_and_others(sources):
    starts = []
    for i in range(12):
        sample = Generator(TASKS["qa_1"], 900, BYTES, sources).make(i)
        documents = re.findall(r"Document \d+:\n(.*)\n", sample.text)
        bird = re.search(r"Which bird of (\w\d)", sample.text)[1]
        article = [d for d in documents if f"valley {bird[0]}" in d]
        assert len(documents) == len(set(documents)) > 4 and len(article) == 3, "those of its article come first"
        at = [bird in d for d in documents].index(True)
        assert abs(at - sample.depth * (len(documents) - 1)) <= 0.5
        assert sample.references == (f"{bird[0] * 3}{bird[1]}", f"bird {bird[0] * 3}{bird[1]}")
        starts.append(bird)
    assert starts == [f"{a}{p}" for a in "abcd" for p in range(3)], (
        "in the order of the file, without those of no answer"
    )
    sample = Generator(TASKS["qa_2"], 1100, BYTES, sources).make(3)
    documents = re.findall(r"Document \d+:\n(T\d+)\nFact", sample.text)
    assert {"T3", "T4", "T5", "T6"} < set(documents) and len(documents) == len(set(documents))
    assert sample.references == ("Mr 3",) and sample.depth is None
    every = Generator(TASKS["qa_1"], 8192, BYTES, sources).make(0)
    assert every.text.count("Document ") == 24, "there are no more"


@pytest.mark.parametrize("name", TASKS)
def test_a_length_without_room_is_refused_in_a_sentence_that_names_one_with(name, sources):
    with pytest.raises(
        ValueError, match=rf"^lengths: 300 tokens are too few for {name}, which needs \d+ for"
    ) as refused:
        Generator(TASKS[name], 300, BYTES, sources).make(0)
    needs = int(re.search(r"needs (\d+)", str(refused.value))[1])
    assert "\n" not in str(refused.value) and needs > 300
    if name == "qa_1":  # whatever the length draws, this has as many tokens
        Generator(TASKS[name], needs, BYTES, sources).make(0)
        with pytest.raises(ValueError, match="too few"):
            Generator(TASKS[name], needs - 1, BYTES, sources).make(0)


def test_a_haystack_is_what_the_user_names(tmp_path, sources):
    text = "First things come first. " + "word " * 95 + 'He printed "stop!" And again?'
    (tmp_path / "essay.txt").write_text(text)
    essays = Essays.read(str(tmp_path / "essay.txt"))
    assert essays.ends.tolist() == [4, 44, 84, 102, 104] and essays.name.endswith("essay.txt")
    hidden = essays.hide([(0.0, "A."), (1.0, "Z."), (0.5, "M.")], 200, 0)
    words = hidden.split()
    assert words[0] == "A." and words[-1] == "Z." and len(words) == 203
    # The first sentence ended before; after the last one comes the first.
    assert [w for w in words if w not in ("A.", "M.", "Z.")] == (text.split() * 3)[4:204]
    assert (
        words[words.index("M.") - 1] in ("first.", 'again?"', "And", "again?", '"stop!"') or words.index("M.") == 84 - 4
    )
    sample = Generator(TASKS["niah_single_2"], 4096, BYTES, dataclasses.replace(sources, essays=essays)).make(0)
    assert "First things come first." in sample.text
    assert dataclasses.replace(sources, essays=essays).digest() != sources.digest()


def test_an_answer_that_the_haystack_has_is_drawn_again_and_at_last_refused(sources):
    def draw(rng, depth, number, length, sources):
        value = str(rng.integers(4))
        return Case((value,), f" {value}", lambda size: f"is {value} " + "0 1 2 " * size, "words", once=(value,))

    sample = Generator(Task("own", 4, draw), 64, BYTES, sources).make(0)
    assert sample.references == ("3",)

    def never(rng, depth, number, length, sources):
        return Case(("1",), " 1", lambda size: "1 1 " * size, "words", once=("1",))

    with pytest.raises(ValueError, match="has the answers of own in it"):
        Generator(Task("own", 4, never), 64, BYTES, sources).make(0)


@pytest.mark.parametrize(
    ("key", "content", "words"),
    [
        ("squad", None, "cannot be read: No such file"),
        ("squad", "{", "is not JSON; name dev-v2.0.json"),
        ("squad", json.dumps(HOTPOT), "has another format"),
        ("hotpotqa", json.dumps(SQUAD), "has another format; name hotpot_dev_distractor_v1.json"),
        ("squad", '{"data": []}', "has no question with an answer"),
        ("essays", " \n", "has no words"),
        ("essays", b"\xff\xfe\xff", "it is not UTF-8"),
    ],
)
def test_a_file_that_is_not_what_its_key_says(key, content, words, tmp_path):
    path = tmp_path / "file"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=rf"^{key} = '{path}'.*{words}"):
        Essays.read(str(path)) if key == "essays" else Questions.read(key, str(path))


def test_tasks_by_name_and_what_does_not_run(sources):
    bare = Sources(sources.essays)
    run, left_out = chosen(["ruler"], bare)
    assert [t.name for t in run] == [n for n in TASKS if not n.startswith("qa")] and len(TASKS) == 13
    assert left_out == {"qa_1": "qa_1 needs squad=FILE.json", "qa_2": "qa_2 needs hotpotqa=FILE.json"}
    assert len(chosen(["ruler"], sources)[0]) == 13 and chosen(["vt"], bare) == ([TASKS["vt"]], {})
    for names, words in (
        (["qa_1"], "qa_1 needs squad=FILE.json; give that, or leave qa_1 out"),
        (["niah_single1"], "'niah_single1' is unknown; did you mean 'niah_single_1'?"),
        (["hay"], "'hay' is unknown; use some of ruler, niah_single_1, "),
        (["vt", "vt"], "has vt twice"),
        (["ruler", "vt"], "has vt twice; name it once, or ruler for all"),
    ):
        with pytest.raises(ValueError, match=re.escape(words)):
            chosen(names, bare)
    check_names(["loss", "vt"], ["loss"])


# -- scores ---------------------------------------------------------------------------------------------------------------


def test_a_string_matches_in_any_case_in_part_or_in_one_of_many():
    assert string_match("they are ABC, def\x07", ["abc", "DEF", "ghi", "jkl"], "all") == 0.5
    assert string_match("so: abc.", ["abc"], "all") == 1 and string_match("", ["abc"], "all") == 0
    assert string_match("The Bird", ["fish", "bird"], "part") == 1
    assert string_match("The Bird", ["fish", "birds"], "part") == 0
    assert string_match("12\x00345", ["12345"], "all") == 0, "a character that is not shown parts what it stands in"


# -- decoding -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Asked:
    prompt: np.ndarray
    answer: np.ndarray
    tokens: int


class Hashing:
    """Stands for an `Evaluator`: the token after a prefix follows from its last ids; 7 and 8 end a text. It sees only what the
    batch has, and counts the passes."""

    rows, length = 3, 96

    def __init__(self, last=4, ids=9):
        self.last, self.ids, self.passes = last, ids, 0

    def after(self, ids):
        return int(sum((i + 3) * int(x) * int(x) for i, x in enumerate(ids[-self.last :])) // 5 % self.ids)

    def answers(self, batch, marks, given):
        self.passes += 1
        best = np.full((self.rows, WINDOW), -5)
        for row, ids, segments, positions in zip(
            range(3), batch["tokens"], batch["segment_ids"], batch["positions"], strict=True
        ):
            for i in np.flatnonzero(marks[row] >= 0):
                assert segments[i] == 0 and positions[i] == i
                best[row, marks[row, i]] = self.after(ids[: i + 1].tolist())
        assert given.shape == best.shape
        return best, np.where(best == given, -0.5, -2.0)


def greedy(model, asked, enough=lambda ids: False):
    ids = []
    while len(ids) < asked.tokens:
        following = model.after([*asked.prompt.tolist(), *ids])
        if following in (7, 8):
            break
        ids.append(following)
        if enough(ids):
            break
    return tuple(ids)


@pytest.mark.parametrize("last", [1, 4])
def test_what_is_decoded_by_guesses_is_what_is_decoded_by_tokens(last):
    """Answers that are right, right at first, or wrong; one longer than a window; more prompts than rows."""
    rng, model = np.random.default_rng(0), Hashing(last)
    asked = []
    for i in range(20):
        prompt = rng.integers(0, 9, int(rng.integers(2, 40))).astype(np.int32)
        tokens = int(rng.integers(1, 50))
        right = [*greedy(model, Asked(prompt, prompt, tokens)), 1][:tokens]
        answer = right if i % 3 == 0 else [*right[: len(right) // 2], 2] if i % 3 == 1 else rng.integers(0, 9, tokens)
        asked.append(Asked(prompt, np.asarray(answer[:tokens], np.int32), tokens))

    def enough(one, ids):
        return sum(ids) > 60

    for stop in (None, enough):
        decoded = {id(one): answer for one, answer in decode(model, asked, (7, 8), stop)}
        assert len(decoded) == 20
        for one in asked:
            answer = decoded[id(one)]
            assert answer.ids == greedy(model, one, lambda ids, s=stop, o=one: s is not None and s(o, ids))
            forced = [model.after([*one.prompt.tolist(), *one.answer[:i].tolist()]) for i in range(len(one.answer))]
            hits = np.asarray(forced) == one.answer
            assert answer.right == hits.sum()
            assert answer.log_probability == pytest.approx(-0.5 * hits.sum() - 2 * (~hits).sum())
            assert answer.passes <= len(answer.ids) + 1 + -(-len(one.answer) // WINDOW)
    scored = list(decode(model, asked, (7, 8), generate=False))
    assert all(a.ids == () and a.right == decoded[id(o)].right for o, a in scored)


def test_a_right_answer_and_a_text_that_repeats_take_few_passes():
    model = Hashing()
    model.after = lambda ids: (ids[-1] + 1) % 7
    prompt = np.arange(3, dtype=np.int32)
    ((_, right),) = decode(model, [Asked(prompt, np.asarray([3, 4, 5]), 60)], (7, 8), lambda one, ids: len(ids) == 3)
    assert right.ids == (3, 4, 5) and right.passes == model.passes == 1
    ((_, wrong),) = decode(model, [Asked(prompt, np.asarray([0]), 60)], (7, 8))
    assert wrong.ids == tuple((3 + i) % 7 for i in range(60)) and wrong.passes < 13 and wrong.right == 0


def test_a_text_ends_where_the_tokenizer_says(sources, tokenizers, monkeypatch):
    """At each of its stop_ids; where it has none, as of data.eos=null, nowhere."""
    asked = []
    monkeypatch.setattr(measure, "decode", lambda evaluator, prompts, ends, *_: asked.append(ends) or ())
    for tokenizer in (BYTES, tokenizers["bpe"].with_ids(None, 3), ByteTokenizer(SpecialTokens(eos=None))):
        generator = Generator(TASKS["vt"], 1024, tokenizer, sources)
        list(measure_ruler(SimpleNamespace(length=1024), [generator], 1))
    assert asked == [(256,), (3, *tokenizers["bpe"].stop_ids), ()]


def test_a_prompt_begins_with_bos_as_a_document_does(sources, tokenizers):
    """Once, also where the text has it already."""
    generator = Generator(TASKS["vt"], 1024, tokenizers["bpe"], sources)
    for text in ("a", tokenizers["bpe"].token_of(399) + "a"):
        ids = generator._ids(text)
        assert ids.dtype == np.int32 and ids.tolist().count(399) == 1 == (ids[0] == 399)
        assert (ids == begun(tokenizers["bpe"], tokenizers["bpe"].encode(text))).all()


def test_what_does_not_fit_is_refused():
    for one in (Asked(np.zeros(90, int), np.zeros(3, int), 7), Asked(np.zeros(9, int), np.zeros(3, int), 2)):
        with pytest.raises(ValueError, match="does not fit into 96"):
            list(decode(Hashing(), [one], (7, 8)))


# -- a model that is known ------------------------------------------------------------------------------------------------

ASKED = np.frombuffer(b" in this text is", np.uint8).astype(np.int32)


@dataclass
class Reader:
    """A model of bytes that writes what stands after the key that the question names, if that is less than `window` back."""

    vocab_size: int = 257
    window: int = 10**6

    def build(self):
        return model_of(self.at)

    def at(self, params, batch, marks, ops, *, count, context):
        length, key = batch["tokens"].shape[1], 9

        def one(tokens, positions, segments, marks):
            text = jnp.full(length, -1).at[jnp.where(segments >= 0, positions, length)].set(tokens, mode="drop")
            places = jnp.arange(length)
            here = jnp.stack([jnp.roll(text, len(ASKED) - 1 - j) for j in range(len(ASKED))])
            end = jnp.max(jnp.where((here == ASKED[:, None]).all(0), places, 0))
            wanted = jax.lax.dynamic_slice(text, (end - len(ASKED) - key + 1,), (key,))
            same = (jnp.stack([jnp.roll(text, key - 1 - j) for j in range(key)]) == wanted[:, None]).all(0)
            first = jnp.argmax(same)  # the last character of the key in its needle

            def answer(i):
                at = jnp.max(jnp.where(marks == i, positions, 0))
                copied = text[first + 4 + at - end]
                return 8.0 * jax.nn.one_hot(jnp.where(at - first < self.window, copied, 0), self.vocab_size)

            return jax.vmap(answer)(jnp.arange(count))

        return jax.vmap(one)(*(batch[name] for name in ("tokens", "positions", "segment_ids")), marks)


def test_a_model_that_reads_gets_all_and_one_that_sees_less_what_it_sees(sources):
    """In zigzag order over four devices, with prompts of two tasks in the same batches."""
    recipe = compose([*TINY, "data.sequence_length=1024", "data.global_batch=4", "mesh.sp=4", "sequence.order=zigzag"])
    mesh = make_mesh(sp=4, devices=jax.devices()[:4])
    names = ("niah_single_1", "niah_multikey_1")
    generators = [Generator(TASKS[name], 1024, BYTES, sources) for name in names]
    for window in (10**6, 400):
        evaluator = Evaluator(dataclasses.replace(recipe, model=Reader(window=window)), mesh, {}, {})
        cells = {answers[0].sample.task: answers for answers in measure_ruler(evaluator, generators, 5)}
        assert set(cells) == set(names)
        for name in names:
            answers = cells[name]
            row = summary(answers, 1024)
            assert [a.sample.number for a in answers] == list(range(5))
            if window > 1024:
                assert row["score"] == 100 == 100 * row["teacher_forced"]["accuracy"] and row["passes"] == 5
                assert row["teacher_forced"]["tokens_correct"] == 1
            else:
                seen = [a.score for a in answers]
                near = [
                    a.sample.text.rindex(" is") - a.sample.text.index(a.sample.references[0]) < 380 for a in answers
                ]
                assert seen == [float(x) for x in near] and 0 < row["score"] < 100 and row["score"] == 20 * sum(near)
    with pytest.raises(ValueError, match="count = 0 must be at least 1"):
        list(measure_ruler(evaluator, generators, 0))


# -- a run ----------------------------------------------------------------------------------------------------------------

KEYS = ["tasks=niah_single_1", "lengths=640", "examples=2", "data.global_batch=2", "sequence.order=zigzag"]


@pytest.fixture(scope="module")
def trained(corpus, tmp_path_factory):
    """The run.dir of a run with a checkpoint, and beside it its answers on four devices."""

    def make(folder):
        keys = [
            *TINY,
            *corpus,
            "model.init_std=0.2",
            "model.num_layers=1",
            "data.sequence_length=640",
            f"run.dir={folder}",
        ]
        run = open_run(compose(keys), Hosts(60))
        run.checkpoints.save(2, run.program.init(), run.checkpoint_metadata(2))
        run.checkpoints.close()
        decoded = evaluate(*parse([f"run.dir={folder}", *corpus, *KEYS, "mesh.sp=4"]), lambda line: None)
        (folder / "four.json").write_text(json.dumps(decoded))

    return once(tmp_path_factory, "ruler", make)


@pytest.mark.slow  # two more programs of an evaluation
def test_four_devices_answer_what_one_does(trained, corpus, tmp_path, capsys):
    to = tmp_path / "one.json"
    assert main([f"run.dir={trained}", *corpus, *KEYS, "mesh=single", f"to={to}"]) == DONE
    four, one = (json.loads(path.read_text()) for path in (trained / "four.json", to))
    assert four["mesh"]["sp"] == 4 and one["mesh"]["sp"] == 1
    assert [(r["task"], r["length"]) for r in one["ruler"]["rows"]] == [("niah_single_1", 640)]
    for a, b in zip(four["ruler"]["answers"], one["ruler"]["answers"], strict=True):
        assert a == b and len(a["answer"]) > 10
    for a, b in zip(four["ruler"]["rows"], one["ruler"]["rows"], strict=True):
        forced = [row.pop("teacher_forced") for row in (a, b)]
        assert a == b and forced[0]["tokens_correct"] == forced[1]["tokens_correct"]
        assert forced[0]["log_probability"] == pytest.approx(forced[1]["log_probability"], rel=1e-5)
    rows = [json.loads(line) for line in (trained / "ruler.jsonl").read_text().splitlines()]
    assert (
        len(rows) == 1 and rows[0] | {"step": 2, "seed": 0, "essays": "generated sentences", "length": 640} == rows[0]
    )
    add_rows(trained / "ruler.jsonl", four, 3)
    steps = [json.loads(line)["step"] for line in (trained / "ruler.jsonl").read_text().splitlines()]
    assert steps == [2, 3], "rows are added"
    printed = capsys.readouterr().out
    assert all(
        words in printed
        for words in ("niah_single_1 at 640 tokens: ", "mean of 1", "essays: generated sentences", "added to ")
    )
    assert to.with_suffix(".png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.slow
def test_what_cannot_be_run_is_refused_before_anything_is_compiled(trained, corpus, capsys):
    for words, refusal in (
        (["tasks=vt", "lengths=4096"], "4096 tokens are more than the context of 640 tokens of step 2"),
        (["tasks=ruler", "lengths=640", "squad=no.json"], "squad = 'no.json' cannot be read"),
        (["tasks=qa_2", "lengths=640"], "qa_2 needs hotpotqa=FILE.json"),
        (["tasks=vt", "lengths=640"], "640 tokens are too few for vt"),
    ):
        assert main([f"run.dir={trained}", *corpus, *words]) == WRONG
        assert refusal in (printed := capsys.readouterr().err) and printed.count("\n") == 1, printed


def test_the_documented_commands_are_read(tmp_path, monkeypatch):
    (tmp_path / "outputs" / "long_context").mkdir(parents=True)
    (tmp_path / "weights" / "llama").mkdir(parents=True)
    (tmp_path / "weights" / "llama" / "config.json").write_text(json.dumps(published_loop.MODELS["llama"]))
    monkeypatch.chdir(tmp_path)
    text = (Path(measure_ruler.__code__.co_filename).parent / "README.md").read_text()
    block = re.search(r"```bash\n(.*?)```", text, re.DOTALL)[1].replace("\\\n", " ")
    commands = [parse(shlex.split(line)) for line in block.split("python -m launch.evaluate")[1:]]
    assert [args.ruler.generate for args, _, _ in commands] == [True, False] and len(commands[1][0].ruler.tasks) == 3
    assert all(compose(keys).data.sequence_length for _, _, keys in commands)
    assert all(f"`{name}`" in text for name in TASKS)


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        (["tasks=niah_singel_1"], "tasks: 'niah_singel_1' is unknown; did you mean 'niah_single_1'?"),
        (["tasks=ruller"], "did you mean 'ruler'?"),
        (["tasks=loss", "essays=a.txt"], "essays is for RULER's tasks; add tasks=ruler"),
        (["tasks=ruler", "generate=no"], "generate must be true or false"),
        (["tasks=ruler", "essays=gs://a/b"], "essays = 'gs://a/b' is a URL"),
        (["tasks=ruler", "examples=0"], "examples = '0' must be a positive number"),
    ],
)
def test_a_wrong_key_is_named(words, refusal):
    with pytest.raises(ValueError, match=re.escape(refusal)):
        parse(["run.dir=a", *words])


def test_the_context_is_that_of_the_run_of_config_json_or_of_the_scaled_positions(tmp_path):
    @dataclass
    class Known:
        data: dict
        what: str = "these"

    model = compose([]).model
    scaled = dataclasses.replace(model, rope_scaling="yarn", rope_factor=4.0, rope_original_length=1000)
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 512}')
    of_run, of_folder = Known({"sequence_length": 64}), Known({})
    for weights, of, most in ((of_run, model, 64), (of_folder, model, 512), (of_folder, scaled, 4000)):
        check_context([8, most], weights, str(tmp_path), of, [])
        with pytest.raises(ValueError, match=f"{most + 1} tokens are more than the context of {most} tokens of these"):
            check_context([8, most + 1], weights, str(tmp_path), of, ["data.source=a"])
        check_context([10**6], weights, str(tmp_path), of, ["model.rope_base=10000"])


def test_the_table_and_where_its_rows_are_kept(tmp_path):
    forced = {"tokens_correct": 0.5}
    rows = [
        {"task": task, "length": n, "score": score, "teacher_forced": forced}
        for n, scores in ((4096, (100.0, 50.0)), (131072, (80.0, 0.0)))
        for task, score in zip(("vt", "cwe"), scores, strict=True)
    ]
    results = {"rows": rows, "generate": True, "essays": "a.txt", "not_run": {"qa_1": "qa_1 needs squad=FILE.json"}}
    assert table(results).splitlines() == [
        "RULER        4,096  131,072",
        "vt           100.0     80.0",
        "cwe           50.0      0.0",
        "mean of 2     75.0     40.0",
        "string match, 0 to 100; essays: a.txt",
        "not run: qa_1 needs squad=FILE.json",
    ]
    assert "50.0" in table(results | {"generate": False}).splitlines()[1]
    printed = []
    assert place_of_rows(str(tmp_path), printed.append) == tmp_path / "ruler.jsonl" and not printed
    (tmp_path / "config.json").touch()
    assert place_of_rows(str(tmp_path), printed.append) is None and not printed
    assert place_of_rows("gs://a/b", printed.append) is None and "no ruler.jsonl in it" in printed[0]
