"""The data pipeline: every token once, documents kept apart, and batches that depend on (seed, step) alone."""

import errno
import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ejdist.training.data import Data, DataSection, build
from ejdist.training.data.corpus import Corpus, build_corpus
from ejdist.training.data.packing import Packing
from ejdist.training.data.sources import files_of
from ejdist.training.data.tokenizer import ByteTokenizer, FileTokenizer

ROOT = Path(__file__).resolve().parent.parent


def corpus_of(lengths):
    """Returns a corpus whose tokens are all different, so that each can be traced."""
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return Corpus(np.arange(offsets[-1], dtype=np.uint32), offsets, "made", ByteTokenizer())


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(2, 33), st.integers(0, 3))
def test_an_epoch_has_every_token_once_and_every_transition_once(lengths, length, seed):
    corpus = corpus_of(lengths)
    packing = Packing(corpus, length, seed)
    document = np.repeat(np.arange(len(lengths)), lengths)
    seen, transitions = [], []
    for i in range(packing.rows_per_epoch):
        row = packing.row(i)
        real = row["segment_ids"] >= 0
        seen.extend(row["tokens"][real])
        assert (row["targets"][~real] == -1).all()
        assert (np.diff(row["segment_ids"][real]) >= 0).all()
        for segment in np.unique(row["segment_ids"][real]):
            at = row["segment_ids"] == segment
            tokens, targets = row["tokens"][at], row["targets"][at]
            assert len(set(document[tokens])) == 1, "a segment is of one document"
            assert (np.diff(tokens) == 1).all() and (row["positions"][at] == np.arange(at.sum())).all()
            for token, target in zip(tokens, targets, strict=True):
                last = token + 1 == len(document) or document[token + 1] != document[token]
                assert target == (-1 if last else token + 1)
                transitions += [] if last else [token]
    assert sorted(seen) == list(range(len(document)))
    assert len(transitions) == len(set(transitions)) == len(document) - len(lengths)


def data_of(batch=4, length=16, seed=3):
    rng = np.random.default_rng(0)
    return Data(corpus_of(rng.integers(1, 50, 40)), sequence_length=length, global_batch=batch, seed=seed)


def same(a, b):
    return a.keys() == b.keys() and all(np.array_equal(a[n], b[n]) for n in a)


def test_a_batch_is_a_pure_function_of_seed_and_step():
    first, second = data_of(), data_of()
    for step in (0, 5, 500, 1):  # in any order, over epochs
        assert same(first.batch(step), second.batch(step))
    assert not same(first.batch(0), first.batch(1))
    assert not same(first.batch(0), data_of(seed=4).batch(0))


def test_the_prefetching_iterator_gives_the_same_batches_from_any_step():
    data = data_of()
    got = list(data.iterator(5, 12, slice(1, 3)))
    assert len(got) == 7
    assert all(same(b, data.batch(5 + i, slice(1, 3))) for i, b in enumerate(got))


def test_a_changed_corpus_or_setting_is_noticed_on_resume():
    data = data_of()
    data.check_cursor(json.loads(json.dumps(data.cursor(9))))
    with pytest.raises(ValueError, match=r"data.sequence_length: was 16, is 32"):
        data_of(length=32).check_cursor(data.cursor(9))
    with pytest.raises(ValueError, match=r"run.seed: was 3, is 5"):
        data_of(seed=5).check_cursor(data.cursor(9))


TEXTS = ["one document", "zwei Dokumente, äöü", "third\nwith lines"]


def write_files(folder):
    rows = [json.dumps({"text": t, "id": i}) for i, t in enumerate(TEXTS)]
    (folder / "a.jsonl").write_text("\n".join(rows) + "\n\n")
    with gzip.open(folder / "b.jsonl.gz", "wt", encoding="utf-8") as f:
        f.write("\n".join(rows))
    pq.write_table(pa.table({"text": TEXTS, "id": [0, 1, 2]}), folder / "c.parquet")
    for i, t in enumerate(TEXTS):
        (folder / f"d{i}.txt").write_text(t)


@pytest.mark.parametrize("pattern", ["a.jsonl", "b.jsonl.gz", "c.parquet", "d*.txt"])
@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:300"])
def test_every_format_gives_the_same_documents(tmp_path, pattern, tokenizer):
    write_files(tmp_path)
    corpus = build_corpus(str(tmp_path / pattern), tokenizer, "text", tmp_path / "cache")
    made = [corpus.tokens[a:b] for a, b in zip(corpus.offsets[:-1], corpus.offsets[1:], strict=True)]
    assert [corpus.tokenizer.decode(d[:-1]) for d in made] == TEXTS
    assert all(d[-1] == corpus.tokenizer.eos_id for d in made)
    again = build_corpus(str(tmp_path / pattern), tokenizer, "text", tmp_path / "cache")
    assert again.fingerprint == corpus.fingerprint and isinstance(again.tokens, np.memmap)


def test_a_tokenizer_file_and_several_globs(tmp_path):
    write_files(tmp_path)
    build_corpus(str(tmp_path / "d*.txt"), "bpe:320", "text", tmp_path / "cache")
    file = next((tmp_path / "cache").glob("tokenizer-*.json"))
    both = build_corpus([str(tmp_path / "d*.txt"), str(tmp_path / "a.jsonl")], str(file), "text", tmp_path / "cache")
    # So little text has fewer pairs to join than the vocabulary has room for.
    assert both.num_documents == 6 and 257 <= both.tokenizer.vocab_size <= 320


def test_the_standard_library_is_there_and_real(tmp_path):
    section = DataSection(cache_dir=str(tmp_path), sequence_length=512, global_batch=2)
    data = build(section, seed=0)
    assert data.num_tokens > 5_000_000 and data.corpus.num_documents > 300
    text = data.corpus.tokenizer.decode(data.batch(0)["tokens"][0])
    assert "\n" in text and all(p.suffix == ".py" for p in files_of("stdlib"))


@pytest.mark.parametrize(
    ("make", "section", "words"),
    [
        (None, {"source": "{}/none/*.txt"}, ["data.source", "matches no file"]),
        ("{broken\n", {"source": "{}/bad.jsonl"}, ["bad.jsonl", "line 1", "not JSON"]),
        ('{"body": "x"}\n', {"source": "{}/bad.jsonl"}, ["line 1", "'text'", "body", "data.text_key"]),
        ('{"text": 5}\n', {"source": "{}/bad.jsonl"}, ["'text'", "int"]),
        ("", {"source": "{}/bad.jsonl"}, ["hold no text"]),
        ("x", {"source": "{}/bad.jsonl", "tokenizer": "{}/no.json"}, ["data.tokenizer", "no such file"]),
        ("x", {"source": "{}/bad.jsonl", "tokenizer": "{}/bad.jsonl"}, ["data.tokenizer", "not a tokenizer.json"]),
        ("x", {"source": "{}/bad.jsonl", "tokenizer": "bpe:many"}, ["data.tokenizer", "bpe:SIZE"]),
        ('{"text": "x"}', {"source": "{}/bad.jsonl", "sequence_length": 1}, ["data.sequence_length"]),
        ('{"text": "x"}', {"source": "{}/bad.jsonl", "global_batch": 0}, ["data.global_batch"]),
    ],
)
def test_bad_input_is_named(tmp_path, make, section, words):
    if make is not None:
        (tmp_path / "bad.jsonl").write_text(make)
    section = {k: v.format(tmp_path) if isinstance(v, str) else v for k, v in section.items()}
    with pytest.raises(ValueError) as error:
        build(DataSection(cache_dir=str(tmp_path / "cache"), **section), seed=0)
    assert all(w in str(error.value) for w in words), str(error.value)
    assert not list(tmp_path.glob("cache/*.tmp"))


def test_a_parquet_without_the_column_names_the_columns(tmp_path):
    pq.write_table(pa.table({"body": ["x"]}), tmp_path / "x.parquet")
    with pytest.raises(ValueError, match=r"no column 'text'; set data.text_key to one of body"):
        build_corpus(str(tmp_path / "x.parquet"), "bytes", "text", tmp_path / "cache")
    (tmp_path / "y.parquet").write_text("no parquet")
    with pytest.raises(ValueError, match="not a readable parquet"):
        build_corpus(str(tmp_path / "y.parquet"), "bytes", "text", tmp_path / "cache")


def save_tokenizer(path, vocab, **changes):
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], **changes))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=8, pad_id=0, pad_token="a")
    tokenizer.save(str(path))


def test_a_tokenizer_file_neither_cuts_nor_pads(tmp_path):
    save_tokenizer(tmp_path / "t.json", {"a": 0, "b": 1, "</s>": 2})
    (tmp_path / "a.txt").write_text("a b " * 50)
    (tmp_path / "b.txt").write_text("b")
    corpus = build_corpus(str(tmp_path / "*.txt"), str(tmp_path / "t.json"), "text", tmp_path / "cache")
    assert corpus.tokens.tolist() == [0, 1] * 50 + [2] + [1, 2]


def test_a_tokenizer_file_is_checked(tmp_path):
    path = tmp_path / "t.json"
    save_tokenizer(path, {"a": 0, "b": 70_000, "</s>": 2})
    (tmp_path / "a.txt").write_text("ab")
    corpus = build_corpus(str(tmp_path / "a.txt"), str(path), "text", tmp_path / "cache")
    assert corpus.tokenizer.vocab_size == 70_001 and corpus.tokens.tolist() == [0, 70_000, 2]
    (tmp_path / "a.txt").write_text("none of it")
    with pytest.raises(ValueError, match=r"data.tokenizer has no tokens"):
        build_corpus(str(tmp_path / "a.txt"), str(path), "text", tmp_path / "cache")
    save_tokenizer(path, {"a": 0, "</s>": 2}, dropout=0.5)
    with pytest.raises(ValueError, match=r"data.tokenizer = .*t.json.*dropout = 0.5.*null"):
        FileTokenizer(path)
    with pytest.raises(ValueError, match=r"data.tokenizer = .*cannot be read: Is a directory"):
        FileTokenizer(tmp_path)


def test_a_full_disk_leaves_nothing_behind(tmp_path, monkeypatch):
    write_files(tmp_path)

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(np, "save", full)
    with pytest.raises(OSError, match="No space left on device; nothing was left"):
        build_corpus(str(tmp_path / "a.jsonl"), "bytes", "text", tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())


def test_a_damaged_cache_is_made_again(tmp_path):
    write_files(tmp_path)
    first = build_corpus(str(tmp_path / "a.jsonl"), "bytes", "text", tmp_path / "cache")
    folder = next((tmp_path / "cache").glob("corpus-*"))
    for name in ("tokens.npy", "meta.json", "offsets.npy"):
        (folder / name).write_bytes(b"damaged")
        again = build_corpus(str(tmp_path / "a.jsonl"), "bytes", "text", tmp_path / "cache")
        assert again.fingerprint == first.fingerprint


def test_two_builders_at_once(tmp_path):
    write_files(tmp_path)
    code = (
        "import sys; from ejdist.training.data.corpus import build_corpus;"
        "print(build_corpus(sys.argv[1], 'bytes', 'text', sys.argv[2]).fingerprint)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "d*.txt"), str(tmp_path / "cache")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) for _ in range(2)]
    prints = [p.communicate()[0] for p in started]
    assert all(p.returncode == 0 for p in started) and len(set(prints)) == 1
    assert len(list((tmp_path / "cache").iterdir())) == 1


@pytest.mark.parametrize("hosts", [1, 2, 4])
def test_hosts_together_make_the_same_batch(hosts):
    data = data_of()
    parts = [data.batch(7, slice(i * 4 // hosts, (i + 1) * 4 // hosts)) for i in range(hosts)]
    joined = {n: np.concatenate([p[n] for p in parts]) for n in parts[0]}
    assert same(joined, data.batch(7))
