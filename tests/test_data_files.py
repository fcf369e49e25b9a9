"""Corpora from files: every format, tokenizers, what is damaged or missing, and the cache of tokens."""

import errno
import gzip
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ejdist.training.data import DataSection, build
from ejdist.training.data import corpus as corpus_module
from ejdist.training.data.corpus import build_corpus
from ejdist.training.data.sources import documents, files_of
from ejdist.training.data.tokenizer import FileTokenizer

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
    file = next((tmp_path / "cache").glob("tokenizer-*/tokenizer.json"))
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


# A file of one document or row that is wrong, and what its error says: of the file, the line, the argument and the remedy.
GZ = gzip.compress(b'{"text": "' + random.Random(0).randbytes(3000).hex().encode() + b'"}\n', mtime=0)
GOOD = b'{"text": "x"}\n'
BAD_FILES = [
    ("cut.jsonl.gz", GZ[:-900], ["after line 0", "damaged gzip", "leave it out"]),
    ("bits.jsonl.gz", GZ[:1500] + bytes([GZ[1500] ^ 255]) * 9 + GZ[1509:], ["damaged gzip", "leave it out"]),
    ("deflate.jsonl.gz", GZ[:10] + b"\xff" + GZ[11:], ["after line 0", "damaged gzip", "invalid block type"]),
    ("tail.jsonl.gz", GZ + b"tail", ["damaged gzip", "leave it out"]),
    ("plain.jsonl.gz", GOOD, ["damaged gzip", "leave it out"]),
    ("empty.jsonl.gz", b"", ["damaged gzip (it is empty)"]),
    ("half.jsonl", GOOD + b'\n{"text": "a\\ud800"}', ["line 3", "'text'", "\\ud800 at character 1", "fix"]),
    ("digits.jsonl", GOOD + b'{"text": "a", "n": ' + b"9" * 5000 + b"}", ["line 2", "4300 digits", "fix"]),
    ("deep.jsonl", GOOD + b"[" * 100_000, ["line 2", "recursion", "fix"]),
    ("list.jsonl", GOOD + b'["text"]', ["line 2", "list, not an object", "fix"]),
    ("null.jsonl", GOOD + b'{"text": null}', ["line 2", "'text' is NoneType", "data.text_key"]),
    ("latin.jsonl", GOOD * 3 + b'{"text": "\xe4"}', ["line 4", "not UTF-8", "byte 10 of the line"]),
    ("latin.txt", b"abc \xe4", ["not UTF-8", "byte 4", "convert", "leave it out"]),
    ("wide.txt", "text".encode("utf-16"), ["not UTF-8", "byte 0"]),
    ("cut.parquet", b"PAR1 and no more", ["not a readable parquet", "leave it out"]),
]


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:300"])
@pytest.mark.parametrize(("name", "content", "words"), BAD_FILES, ids=[name for name, _, _ in BAD_FILES])
def test_a_bad_file_is_named_with_its_line(tmp_path, name, content, words, tokenizer):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError) as error:
        build_corpus(str(tmp_path / "*.*"), tokenizer, "text", tmp_path / "cache")
    assert all(w in str(error.value) for w in ["data.source", str(tmp_path / name), *words]), str(error.value)
    assert not list(tmp_path.glob("cache/*"))


@pytest.mark.parametrize("kind", ["jsonl.gz", "parquet"])
def test_any_damage_gives_the_same_documents_or_names_the_file(tmp_path, kind):
    path, chance = tmp_path / f"rows.{kind}", random.Random(0)
    texts = [chance.randbytes(20).hex() * 3 for _ in range(300)]
    if kind == "parquet":
        pq.write_table(pa.table({"text": texts}), path, write_page_checksum=True)
    else:
        path.write_bytes(gzip.compress("\n".join(json.dumps({"text": t}) for t in texts).encode()))
    content, named = path.read_bytes(), 0
    for _ in range(150):
        damaged = bytearray(content)
        for _ in range(chance.randint(1, 3)):
            # A parquet file ends in its description, which has no checksum.
            damaged[chance.randrange(len(content) - (3000 if kind == "parquet" else 0))] ^= chance.randint(1, 255)
        path.write_bytes(damaged)
        try:
            assert list(documents(path)) == texts
        except ValueError as error:
            assert str(path) in str(error) and any(w in str(error) for w in ("leave it out", "fix"))
            named += 1
    assert named > 100


@pytest.mark.parametrize(("values", "words"), [(["x", None], ["row 1", "NoneType"]), ([b"x"], ["row 0", "bytes"])])
def test_a_parquet_row_that_is_no_text_is_named(tmp_path, values, words):
    pq.write_table(pa.table({"text": values}), tmp_path / "x.parquet")
    with pytest.raises(ValueError) as error:
        build_corpus(str(tmp_path / "x.parquet"), "bytes", "text", tmp_path / "cache")
    assert all(w in str(error.value) for w in ["x.parquet", "data.text_key", *words]), str(error.value)


@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO])
@pytest.mark.parametrize("name", ["a.jsonl", "b.jsonl.gz", "d1.txt"])
def test_a_file_that_cannot_be_read_is_named_and_not_the_cache(tmp_path, monkeypatch, name, code):
    write_files(tmp_path)
    whole = Path.open

    def refusing(path, *args, **kwargs):
        if path.name == name:
            raise OSError(code, os.strerror(code), str(path))
        return whole(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", refusing)
    with pytest.raises(ValueError) as error:
        build_corpus(str(tmp_path / "*.*"), "bytes", "text", tmp_path / "cache")
    words = ["data.source", f"cannot read {tmp_path / name}", os.strerror(code), "leave it out"]
    assert all(w in str(error.value) for w in words) and "cache" not in str(error.value), str(error.value)


@pytest.mark.parametrize("name", ["b.jsonl.gz", "c.parquet", "d1.txt"])
def test_a_file_that_vanishes_or_changes_while_others_are_read_is_named(tmp_path, monkeypatch, name):
    for change, words in ((os.remove, ["cannot read", "listed"]), (lambda p: os.utime(p, (1, 1)), ["changed"])):
        write_files(tmp_path)

        def changing(path, text_key, change=change):
            if path.name == "a.jsonl":
                change(tmp_path / name)
            return documents(path, text_key)

        monkeypatch.setattr(corpus_module, "documents", changing)
        with pytest.raises(ValueError) as error:
            build_corpus(str(tmp_path / "*.*"), "bytes", "text", tmp_path / "cache")
        assert all(w in str(error.value) for w in [str(tmp_path / name), *words]), str(error.value)
        assert not list(tmp_path.glob("cache/*"))
    monkeypatch.setattr(corpus_module, "files_of", lambda source: [tmp_path / "gone.txt"])
    with pytest.raises(ValueError, match=r"cannot read .*gone.txt: No such file"):
        build_corpus("*", "bytes", "text", tmp_path / "cache")


def test_what_is_no_text_is_left_out_and_how_it_was_written_does_not_matter(tmp_path):
    files = {
        "a.txt": "\ufeffone\r\ntwo\rthree\n".encode(),
        "b.txt": b"",
        "c.txt": b" \r\n\t\n",
        "d.jsonl": b'\xef\xbb\xbf{"text": "x\\r\\n"}\r\n\r\n  \n{"text": ""}\n{"text": " \\n"}\r\n{"text": "y"}',
        "e.JSONL.GZ": gzip.compress(b'\xef\xbb\xbf{"text": "z\xe2\x80\xa8"}\r\n'),
        "f.jsonl": b"\n\n",
        "g[1].txt": b"brackets",
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    corpus = build_corpus([str(tmp_path / "[a-f].*"), str(tmp_path / "g[1].txt")], "bytes", "text", tmp_path / "cache")
    made = [corpus.tokens[a:b] for a, b in itertools.pairwise(corpus.offsets)]
    expected = ["one\ntwo\nthree\n", "x\r\n", "y", "z\u2028", "brackets"]
    assert [corpus.tokenizer.decode(d) for d in made] == expected
    with pytest.raises(ValueError, match=r"data.source.*hold no text"):
        build_corpus(str(tmp_path / "[bcf].*"), "bytes", "text", tmp_path / "cache")


def test_files_are_in_one_order_and_taken_once(tmp_path, monkeypatch):
    folders = [tmp_path / f"part{i}" for i in range(3)]
    for folder, i in itertools.product(folders, range(400)):
        folder.mkdir(exist_ok=True)
        (folder / f"{i}.txt").write_text(f"{folder.name} {i}")
    (tmp_path / "latest").symlink_to(folders[2])
    patterns = [str(tmp_path / "**/*.txt"), str(tmp_path / "part1/../part1/*.txt"), str(tmp_path / "part0/7.txt")]
    first = files_of(patterns)
    assert len(first) == len({p.resolve() for p in first}) == 1200 and first == sorted(first)
    listed = os.scandir

    class Shuffled(list):
        def __init__(self, path):
            super().__init__(listed(path))
            random.shuffle(self)

        __enter__, __exit__, close = (lambda self: self), (lambda *_: None), (lambda self: None)

    monkeypatch.setattr(os, "scandir", Shuffled)
    assert files_of(patterns) == files_of(patterns[::-1]) == first


def test_files_that_would_be_missing_are_named(tmp_path, monkeypatch):
    (tmp_path / "locked/deep").mkdir(parents=True)
    (tmp_path / "locked/deep/a.txt").write_text("x")
    (tmp_path / "b.txt").write_text("x")
    listed = os.scandir

    def refusing(path):
        if "locked" in str(path):
            raise OSError(errno.EACCES, os.strerror(errno.EACCES), path)
        return listed(path)

    monkeypatch.setattr(os, "scandir", refusing)
    for pattern in ("**/*.txt", "**/b.txt", "locked/*/a.txt", "locked/deep/*.txt"):
        with pytest.raises(
            ValueError, match=r"data.source = .*cannot list .*locked.*Permission denied; make it readable"
        ):
            files_of([str(tmp_path / "b.txt"), str(tmp_path / pattern)])
    monkeypatch.undo()
    (tmp_path / "c.txt").symlink_to(tmp_path / "gone.txt")
    with pytest.raises(ValueError, match=r"c.txt is a broken link; fix"):
        files_of(str(tmp_path / "*.txt"))
    with pytest.raises(ValueError, match=r"data.source is not set: .* for example data.source='corpus"):
        files_of(None)
    for nothing in ([], 5, ["a", 5]):
        with pytest.raises(ValueError, match=r"data.source = .*give 'stdlib', a glob"):
            files_of(nothing)


def test_a_changed_file_is_not_served_from_the_cache(tmp_path):
    path = tmp_path / "a.txt"
    for text in ("first", "other"):  # the same size and, as a copying tool leaves it, the same time
        path.write_text(text)
        os.utime(path, ns=(1, 1))
        corpus = build_corpus(str(path), "bytes", "text", tmp_path / "cache")
        assert corpus.tokenizer.decode(corpus.tokens) == text


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
    with pytest.raises(ValueError, match=r"data.tokenizer = .* is a folder without tokenizer.json; give one that has"):
        FileTokenizer(tmp_path)


def test_a_full_disk_leaves_nothing_behind(tmp_path, monkeypatch):
    from ejdist.training.data.cache import NewFile

    write_files(tmp_path)
    (tmp_path / "file").write_text("")

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(NewFile, "write", full)
    for tokenizer in ("bytes", "bpe:300"):
        with pytest.raises(OSError, match=r"No space left on device; nothing was left behind; set data.cache_dir"):
            build_corpus(str(tmp_path / "a.jsonl"), tokenizer, "text", tmp_path / "cache")
        assert not list((tmp_path / "cache").iterdir())
        with pytest.raises(OSError, match=r"the corpus cache .*file/.*data.cache_dir"):
            build_corpus(str(tmp_path / "a.jsonl"), tokenizer, "text", tmp_path / "file")


@pytest.mark.slow  # and by many at once in the quick tests, below
def test_a_damaged_cache_is_made_again(tmp_path, monkeypatch):
    monkeypatch.setattr("ejdist.training.data.cache._BLOCK", 16)  # so that there are several
    write_files(tmp_path)

    def made():
        corpus = build_corpus(str(tmp_path / "a.jsonl"), "bpe:300", "text", tmp_path / "cache")
        return corpus.fingerprint, corpus.tokens.tolist(), corpus.offsets.tolist(), corpus.tokenizer.fingerprint

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first = made()
        assert made() == first
    for path in [p for p in (tmp_path / "cache").glob("*/*") if p.is_file()]:
        content = path.read_bytes()
        places = range(0, len(content), 7 if len(content) < 500 else len(content) // 20)
        for damaged in [b"", content[:-1], content + b"x", b"damaged", *(_flip(content, i) for i in places)]:
            path.write_bytes(damaged)
            with pytest.warns(UserWarning, match=rf"corpus cache .* is damaged \({path.name} .*to be rebuilt"):
                assert made() == first
            assert path.read_bytes() == content
        path.unlink()
        with pytest.warns(UserWarning, match=rf"damaged \({path.name} is missing"):
            assert made() == first
    assert len(list((tmp_path / "cache").iterdir())) == 2


def _flip(content, i):
    return content[:i] + bytes([content[i] ^ 1]) + content[i + 1 :]


@pytest.mark.filterwarnings("ignore:the corpus cache")
def test_a_cache_that_cannot_be_kept_or_read_is_an_error(tmp_path, monkeypatch):
    write_files(tmp_path)
    build_corpus(str(tmp_path / "a.jsonl"), "bytes", "text", tmp_path / "cache")
    monkeypatch.setattr("ejdist.training.data.cache.zlib.crc32", lambda *args: random.random())
    with pytest.raises(OSError, match=r"damaged whenever it is written"):
        build_corpus(str(tmp_path / "a.jsonl"), "bytes", "text", tmp_path / "cache")

    def failing(*args):
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.undo()
    build_corpus(str(tmp_path / "a.jsonl"), "bytes", "text", tmp_path / "cache")
    monkeypatch.setattr("ejdist.training.data.cache.os.pread", failing)
    with pytest.raises(OSError, match=r"cannot read the corpus cache .*Permission denied; make it readable"):
        build_corpus(str(tmp_path / "a.jsonl"), "bytes", "text", tmp_path / "cache")


def test_a_killed_build_leaves_nothing_that_is_served(tmp_path):
    write_files(tmp_path)
    code = (
        "import os, sys; from ejdist.training.data import corpus;"
        "real = corpus.documents; dying = lambda p, k: os.kill(os.getpid(), 9) if p.name == 'd2.txt' else real(p, k);"
        "corpus.documents = dying; corpus.build_corpus(sys.argv[1], 'bytes', 'text', sys.argv[2])"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "d*.txt"), str(tmp_path / "cache")]
    killed = subprocess.run(command, check=False)
    assert killed.returncode == -signal.SIGKILL
    (left,) = (tmp_path / "cache").iterdir()
    corpus = build_corpus(str(tmp_path / "d*.txt"), "bytes", "text", tmp_path / "cache")
    assert corpus.num_documents == 3 and left.exists()  # for all that is known here, it may still be written
    for path in (*left.iterdir(), left):
        os.utime(path, (1, 1))
    build_corpus(str(tmp_path / "a.jsonl"), "bytes", "text", tmp_path / "cache")
    assert not left.exists() and len(list((tmp_path / "cache").iterdir())) == 2


@pytest.mark.filterwarnings("ignore:the corpus cache")
def test_many_builders_of_a_damaged_cache_at_once(tmp_path):
    write_files(tmp_path)
    start = threading.Barrier(4)

    def made(_):
        start.wait()
        return build_corpus(str(tmp_path / "a.jsonl"), "bpe:300", "text", tmp_path / "cache").tokens.tolist()

    for _ in range(15):
        with ThreadPoolExecutor(4) as threads:
            results = list(threads.map(made, range(4)))
        assert all(r == results[0] for r in results)
        folders = list((tmp_path / "cache").iterdir())
        assert len(folders) == 2
        for folder in folders:
            file = folder / ("tokens.bin" if "corpus" in folder.name else "tokenizer.json")
            file.write_bytes(_flip(file.read_bytes(), 5))


@pytest.mark.filterwarnings("ignore:the corpus cache")
def test_what_another_process_has_made_again_is_kept(tmp_path, monkeypatch):
    from ejdist.training.data import cache

    write_files(tmp_path)

    def made():
        return build_corpus(str(tmp_path / "a.jsonl"), "bytes", "text", tmp_path / "cache").fingerprint

    first, discard, other = made(), cache._discard, []
    (folder,) = (tmp_path / "cache").iterdir()

    def slow(*args):
        monkeypatch.setattr(cache, "_discard", discard)
        assert made() == first  # by the other process, before this one comes to it
        other.append(folder.stat().st_mtime_ns)
        discard(*args)

    (folder / "tokens.bin").write_bytes(b"")
    monkeypatch.setattr(cache, "_discard", slow)
    assert made() == first and other == [folder.stat().st_mtime_ns]


def test_a_cache_that_another_process_removes_is_made_again(tmp_path, monkeypatch):
    write_files(tmp_path)
    whole, calls = corpus_module.open_folder, []

    def removed(folder):
        calls.append(folder)
        if len(calls) == 2:
            os.rename(folder, tmp_path / "removed")
        return whole(folder)

    monkeypatch.setattr(corpus_module, "open_folder", removed)
    assert build_corpus(str(tmp_path / "a.jsonl"), "bytes", "text", tmp_path / "cache").num_documents == 3


@pytest.mark.slow
def test_two_builders_at_once(tmp_path):
    write_files(tmp_path)
    code = (
        "import sys; from ejdist.training.data.corpus import build_corpus;"
        "print(build_corpus(sys.argv[1], 'bytes', 'text', sys.argv[2]).fingerprint)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "d*.txt"), str(tmp_path / "cache")]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    prints = [p.communicate()[0] for p in started]
    assert all(p.returncode == 0 for p in started) and len(set(prints)) == 1
    assert len(list((tmp_path / "cache").iterdir())) == 1
