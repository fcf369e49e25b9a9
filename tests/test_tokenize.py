"""Datasets are made once: ranges that have every document once, and the same shards however they were made."""

import gzip
import hashlib
import io
import itertools
import json
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ejdist.training.data import DataSection, build, text_writing, units, workers
from ejdist.training.data.corpus import build_corpus
from ejdist.training.data.dataset import open_dataset
from ejdist.training.data.tokenizer import ByteTokenizer
from ejdist.training.data.tokenizing import make_dataset, make_plan, make_shard, missing, write_manifest
from ejdist.training.data.units import Span, cut_before, span_of, texts_of, units_of
from launch.tokenize import main

TEXT = st.text(st.sampled_from("ab \n\r\tä€😀"), max_size=60)


def jsonl(path, texts):
    path.write_text("".join(json.dumps({"text": t}, ensure_ascii=False) + "\n" for t in texts), encoding="utf-8")
    return path


def texts_of_units(file, shard_bytes):
    return [t for u in units_of([span_of(file)], shard_bytes) for s in u.spans for t in texts_of(s, "text")]


def bytes_of(folder):
    """Returns file -> its digest, of all shards and the manifest."""
    files = [*folder.glob("shard-*/*"), folder / "dataset.json"]
    return {p.relative_to(folder).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def decoded(folder):
    """Returns the documents of a dataset, in order."""
    dataset = open_dataset(folder, "dataset")
    found = []
    for shard in dataset.shards:
        ends = shard.offsets(0, shard.num_documents + 1)
        pieces = [shard.tokens(a, b) for a, b in itertools.pairwise(ends)]
        assert all(p[-1] == dataset.tokenizer.eos_id for p in pieces)
        found += [dataset.tokenizer.decode(p[:-1]) for p in pieces]
    return found


@settings(max_examples=40, deadline=None)
@given(st.lists(TEXT, min_size=1, max_size=8), st.integers(1, 70), st.booleans())
def test_ranges_of_jsonl_have_every_line_once_wherever_they_meet(tmp_path_factory, texts, shard_bytes, bom):
    file = jsonl(tmp_path_factory.mktemp("ranges") / "a.jsonl", texts)
    file.write_bytes(
        (b"\xef\xbb\xbf" if bom else b"") + file.read_bytes().removesuffix(b"\n" if len(texts) % 2 else b"")
    )
    assert texts_of_units(file, shard_bytes) == [t for t in texts if t.strip()]


@settings(max_examples=80, deadline=None)
@given(TEXT, st.integers(1, 40), st.integers(8, 32), st.booleans())
def test_parts_of_a_text_have_every_character_once(tmp_path_factory, text, shard_bytes, part, bom):
    file = tmp_path_factory.mktemp("parts") / "a.txt"
    file.write_bytes((b"\xef\xbb\xbf" if bom else b"") + text.encode())
    whole = text.replace("\r\n", "\n").replace("\r", "\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(units, "TEXT_PART", part)
        made = "".join(texts_of_units(file, shard_bytes))
    # A part of white space alone is left out, as a document of it is.
    assert "".join(made.split()) == "".join(whole.split())
    assert file.stat().st_size > part or made == (whole if whole.strip() else "")


@pytest.mark.parametrize(
    ("content", "place", "cut"),
    [
        (b"one\n\ntwo\nthree four", 12, 5),  # after a blank line
        (b"one\r\n\r\ntwo\nthree", 11, 7),
        (b"one two\nthree four", 14, 8),  # no blank line: after a line
        (b"one two three", 10, 8),  # no line: after a space
        (b"aaaaaaaaaa", 5, 5),
        ("aaää".encode(), 3, 2),  # not inside a character
        ("a€€".encode(), 6, 4),
        ("a€€".encode(), 5, 4),
        ("😀😀".encode(), 7, 4),
        (b"aaaa\r\nbb", 5, 4),  # nor between the two of an end of a line
    ],
)
def test_where_a_text_is_cut(content, place, cut):
    assert cut_before(io.BytesIO(content), place, len(content)) == cut
    assert cut_before(io.BytesIO(content), 0, len(content)) == 0
    assert cut_before(io.BytesIO(content), len(content), len(content)) == len(content)


def test_units_group_small_files_and_split_large_ones():
    files = [
        Span(f"/x/{n}", 0, s, s, 0)
        for n, s in [("a.txt", 4), ("b.txt", 4), ("c.txt", 4), ("d.jsonl", 25), ("e.gz", 99)]
    ]
    made = units_of(files, 10)
    assert [[s.place for s in u.spans] for u in made] == [
        [("/x/a.txt", 0, 4), ("/x/b.txt", 0, 4)],
        [("/x/c.txt", 0, 4)],
        [("/x/d.jsonl", 0, 10)],
        [("/x/d.jsonl", 10, 20)],
        [("/x/d.jsonl", 20, 25)],
        [("/x/e.gz", 0, 99)],
    ]
    # Whatever of them is made: the rest stays as it was, and files that are new make new units.
    for some in itertools.chain.from_iterable(itertools.combinations(made, n) for n in range(len(made) + 1)):
        assert units_of(files, 10, some) == made
    more = units_of([*files, Span("/x/f.txt", 0, 1, 1, 0)], 10, made)
    assert more[:-1] == made and len(more[-1].spans) == 1


def write_corpus(folder):
    texts = [f"document {i} äöü €\n" * (i % 7 + 1) for i in range(60)]
    folder.mkdir()
    jsonl(folder / "a.jsonl", texts[:30])
    (folder / "b.jsonl.gz").write_bytes(
        gzip.compress(b"".join(json.dumps({"text": t}).encode() + b"\n" for t in texts[30:40]))
    )
    pq.write_table(pa.table({"text": texts[40:50]}), folder / "c.parquet")
    for i, text in enumerate(texts[50:]):
        (folder / f"d{i}.txt").write_text(text)
    (folder / "e.txt").write_text("")  # files and lines of nothing have no document
    (folder / "f.txt").write_text(" \n")
    (folder / "g.jsonl").write_text('\n{"text": ""}\n{"text": " "}\n')
    return texts


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:300"])
def test_a_dataset_has_the_documents_and_tokens_of_a_corpus(tmp_path, tokenizer, monkeypatch):
    texts = write_corpus(tmp_path / "in")
    source = str(tmp_path / "in/*")
    made = make_dataset(tmp_path / "out", source, tokenizer=tokenizer, shard_bytes=500)
    assert decoded(tmp_path / "out") == texts and made["documents"] == len(texts) and len(made["shards"]) > 5
    name = "bytes" if tokenizer == "bytes" else str(tmp_path / "out/tokenizer.json")
    corpus = build_corpus(source, name, "text", tmp_path / "cache")
    dataset = open_dataset(tmp_path / "out", name)
    tokens = np.concatenate([s.tokens(0, s.num_tokens) for s in dataset.shards])
    assert np.array_equal(tokens, corpus.tokens) and tokens.dtype == corpus.tokens.dtype
    assert made["tokens"] == dataset.num_tokens == corpus.num_tokens
    # A long document goes to the tokenizer in parts, and is one document.
    monkeypatch.setattr(text_writing, "SEGMENT", 16)
    make_dataset(tmp_path / "segments", source, tokenizer=name, shard_bytes=500)
    assert decoded(tmp_path / "segments") == texts


def test_a_copy_is_the_same_corpus_and_files_that_are_added_make_new_shards(tmp_path):
    write_corpus(tmp_path / "in")
    first = make_dataset(tmp_path / "out", str(tmp_path / "in/*"), shard_bytes=500)
    shutil.copytree(tmp_path / "in", tmp_path / "else/where", copy_function=shutil.copyfile)  # other paths, other times
    assert (
        make_dataset(tmp_path / "copy", str(tmp_path / "else/where/*"), shard_bytes=500)["fingerprint"]
        == first["fingerprint"]
    )
    shutil.copytree(tmp_path / "out", tmp_path / "there")
    assert open_dataset(tmp_path / "there", "bytes").fingerprint == first["fingerprint"]

    before = {p: p.stat().st_mtime_ns for p in tmp_path.glob("out/shard-*/*")}
    for path in (tmp_path / "in").iterdir():
        os.utime(path, ns=(1, 1))  # a new time is no change
    jsonl(tmp_path / "in/a0.jsonl", ["new " * 200] * 3)
    (tmp_path / "in/z.txt").write_text("also new")
    more = make_dataset(tmp_path / "out", str(tmp_path / "in/*"), shard_bytes=500)
    assert all(p.stat().st_mtime_ns == t for p, t in before.items())
    assert more["documents"] == first["documents"] + 4 and more["fingerprint"] != first["fingerprint"]
    # Added alone, without the files of before: the same.
    again = make_dataset(
        tmp_path / "there", [str(tmp_path / "in/a0.jsonl"), str(tmp_path / "in/z.txt")], shard_bytes=500
    )
    assert again["fingerprint"] == more["fingerprint"]

    (tmp_path / "in/c.parquet").write_bytes((tmp_path / "in/c.parquet").read_bytes()[::-1])
    with pytest.raises(
        ValueError, match=r"c.parquet has changed since .*shard-.* was made from it; remove that folder"
    ):
        make_dataset(tmp_path / "out", str(tmp_path / "in/*"), shard_bytes=500)


def test_a_run_that_was_interrupted_goes_on_with_the_same_bytes(tmp_path, monkeypatch):
    write_corpus(tmp_path / "in")
    keys = {"tokenizer": "bytes", "text_key": "text", "shard_bytes": 300, "sample_bytes": 1}
    make_dataset(tmp_path / "whole", str(tmp_path / "in/*"), **keys)
    encode, calls = ByteTokenizer.encode_batch, []

    def failing(self, texts):
        calls.append(texts)
        if len(calls) % 3 == 0:
            raise OSError(28, "No space left on device")
        return encode(self, texts)

    monkeypatch.setattr(ByteTokenizer, "encode_batch", failing)
    failures = 0
    for _ in range(20):
        try:
            make_dataset(tmp_path / "out", str(tmp_path / "in/*"), **keys)
        except OSError as error:
            failures += 1
            assert "cannot write the shard" in str(error) and "nothing was left" in str(error)
            with pytest.raises(
                ValueError, match=r"out' is not finished; python -m launch.tokenize to=.*out with the same"
            ):
                open_dataset(tmp_path / "out", "bytes")
    assert failures > 2 and bytes_of(tmp_path / "out") == bytes_of(tmp_path / "whole")
    assert not list(tmp_path.glob("out/*.tmp"))


def test_parts_of_several_hosts_are_one_dataset(tmp_path, capsys):
    write_corpus(tmp_path / "in")
    source = str(tmp_path / "in/*")
    make_dataset(tmp_path / "whole", source, shard_bytes=300)
    plans = [
        make_plan(tmp_path / "out", source, tokenizer="bytes", text_key="text", shard_bytes=300, sample_bytes=1)
        for _ in range(3)
    ]
    for part, plan in enumerate(plans):
        assert missing(plan) > 0
        for unit in plan.units[part::3]:
            make_shard(plan.folder, unit, plan.settings, ByteTokenizer(), source, lambda n: None)
    assert missing(plans[0]) == 0
    write_manifest(plans[0])
    assert bytes_of(tmp_path / "out") == bytes_of(tmp_path / "whole")


@pytest.mark.slow
def test_parts_of_the_command(tmp_path, capsys):
    for name in "abc":
        jsonl(tmp_path / f"{name}.jsonl", [name * 700_000])
    arguments = [f"source={tmp_path}/*.jsonl", f"to={tmp_path}/out", "shard_mb=1", "processes=1"]
    assert main([*arguments, "part=1/2"]) == 0
    assert "1 shard from 1 MB (part 1 of 2)" in (said := capsys.readouterr().out), said
    assert (
        "part 1 of 2 is done; 2 shards of other parts are missing" in said
        and len(list(tmp_path.glob("out/shard-*"))) == 1
    )
    assert main([*arguments, "part=0/2"]) == 0
    assert "3 documents in 3 shards, tokenizer bytes" in (said := capsys.readouterr().out), said
    assert decoded(tmp_path / "out") == [name * 700_000 for name in "abc"]


def test_a_dataset_that_lost_a_part_or_has_one_twice_is_refused(tmp_path):
    jsonl(tmp_path / "a.jsonl", ["some text"] * 50)
    jsonl(tmp_path / "b.jsonl", ["other"])
    make_dataset(tmp_path / "out", str(tmp_path / "a.jsonl"), shard_bytes=300)
    shards = sorted((tmp_path / "out").glob("shard-*"))
    copy = tmp_path / "out" / f"shard-{'0' * 16}"
    shutil.copytree(shards[1], copy)
    with pytest.raises(ValueError, match=r"does not have every part of .*a.jsonl once"):
        make_dataset(tmp_path / "out", str(tmp_path / "b.jsonl"), shard_bytes=300)
    shutil.rmtree(copy)
    shutil.rmtree(shards[2])
    with pytest.raises(ValueError, match=r"does not have every part of .*a.jsonl once"):
        make_dataset(tmp_path / "out", str(tmp_path / "b.jsonl"), shard_bytes=300)
    made = make_dataset(tmp_path / "out", str(tmp_path / "?.jsonl"), shard_bytes=300)  # makes what is missing
    assert made["documents"] == 51


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tokenizer": "bpe:300"}, ["another tokenizer already"]),
        ({"tokenizer": "t.json"}, ["another tokenizer", "bytes-1", "tokenize into another folder"]),
        ({"text_key": "body"}, ["another text_key", "text_key text"]),
        ({"shard_bytes": 1 << 21}, ["another shard_mb", "shard_mb 1)"]),
    ],
)
def test_a_folder_has_one_tokenizer_and_one_way_of_splitting(tmp_path, monkeypatch, change, words):
    from test_data_files import save_tokenizer

    monkeypatch.chdir(tmp_path)
    jsonl(tmp_path / "a.jsonl", ["some text"])
    save_tokenizer(tmp_path / "t.json", {"a": 0, "</s>": 1})
    make_dataset(tmp_path / "out", "a.jsonl", shard_bytes=1 << 20)
    with pytest.raises(ValueError) as error:
        make_dataset(tmp_path / "out", "a.jsonl", **{"shard_bytes": 1 << 20, **change})
    assert all(w in str(error.value) for w in words), str(error.value)
    assert "no shard is made yet" not in str(error.value)
    for shard in (tmp_path / "out").glob("shard-*"):
        shutil.rmtree(shard)
    if change != {"tokenizer": "bpe:300"}:
        with pytest.raises(ValueError, match=r"remove settings.json and tokenizer.json there: no shard is made yet"):
            make_dataset(tmp_path / "out", "a.jsonl", **{"shard_bytes": 1 << 20, **change})


BAD = [
    ("empty.jsonl.gz", b"", ["damaged gzip (it is empty)"]),
    ("one.jsonl", b'{"text": "' + b"x" * 4000 + b'"', ["line 1", "not JSON"]),
    ("late.jsonl", b'{"text": "x"}\n' * 100 + b"broken\n", ["not JSON", "of those that begin past byte"]),
    ("latin.txt", b"abc" * 500 + b"\xe4", ["not UTF-8", "byte 1500"]),
    ("none.txt", b" \n", ["hold no text"]),
]


@pytest.mark.parametrize(("name", "content", "words"), BAD, ids=[name for name, _, _ in BAD])
def test_a_bad_file_is_named_and_leaves_nothing_of_its_shard(tmp_path, monkeypatch, name, content, words):
    monkeypatch.setattr(units, "TEXT_PART", 700)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError) as error:
        make_dataset(tmp_path / "out", str(tmp_path / name), shard_bytes=700)
    assert all(w in str(error.value) for w in [name, *words]), str(error.value)
    assert not (tmp_path / "out/dataset.json").exists() and not list(tmp_path.glob("out/*.tmp"))


def test_a_line_longer_than_a_shard_is_one_document(tmp_path):
    jsonl(tmp_path / "a.jsonl", ["x" * 5000, "y"])
    made = make_dataset(tmp_path / "out", str(tmp_path / "a.jsonl"), shard_bytes=300)
    assert decoded(tmp_path / "out") == ["x" * 5000, "y"]
    assert (
        len(made["shards"]) == 2 and len(list(tmp_path.glob("out/shard-*"))) > 10
    )  # most have no line that begins there


def test_a_file_that_changes_while_it_is_read_is_named(tmp_path):
    file = jsonl(tmp_path / "a.jsonl", ["text"])
    keys = {"tokenizer": "bytes", "text_key": "text", "shard_bytes": 300, "sample_bytes": 1}
    plan = make_plan(tmp_path / "out", str(file), **keys)
    jsonl(file, ["text", "more"])
    with pytest.raises(ValueError, match=r"a.jsonl changed while it was read"):
        make_shard(plan.folder, plan.todo[0], plan.settings, ByteTokenizer(), str(file), lambda n: None)


def command(source, to, *more):
    return [sys.executable, "-m", "launch.tokenize", f"source={source}", f"to={to}", "shard_mb=1", *more]


def started(*arguments):
    return subprocess.Popen(command(*arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def shards_there(folder, number):
    while len(list(folder.glob("shard-????????????????"))) < number:
        time.sleep(0.005)


def children(pid):
    return [int(n) for n in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.slow  # a dozen processes, 11 s
def test_processes_killed_and_at_once_make_the_same_bytes(tmp_path):
    chance = random.Random(0)
    for name in "ab":
        jsonl(tmp_path / f"{name}.jsonl", [chance.randbytes(chance.randint(1, 400)).hex() for _ in range(15_000)])
    source = tmp_path / "*.jsonl"
    make_dataset(tmp_path / "whole", str(source), shard_bytes=1 << 20)
    wanted = bytes_of(tmp_path / "whole")
    assert len(wanted) > 30

    out = tmp_path / "out"
    run = started(source, out, "processes=2")  # killed: its processes end by themselves
    shards_there(out, 2)
    mine = children(run.pid)
    run.kill()
    run.communicate()
    assert run.returncode == -signal.SIGKILL and not (out / "dataset.json").exists()
    for leftover in out.glob("*.tmp"):
        assert leftover.is_dir()
    until = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in mine) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(Path(f"/proc/{pid}").exists() for pid in mine), "processes outlive the one that started them"
    for leftover in out.glob("*.tmp"):
        shutil.rmtree(leftover)

    runs = [started(source, out, f"processes={n}") for n in (1, 2)]  # two commands at once
    told = [r.communicate() for r in runs]
    assert [r.returncode for r in runs] == [0, 0], told
    assert "of them done already" in told[0][0] and "fingerprint" in told[1][0]
    assert bytes_of(out) == wanted and not list(out.glob("*.tmp"))


@pytest.mark.slow
def test_a_run_that_is_told_to_stop_leaves_nothing_half_done(tmp_path):
    line = json.dumps({"text": "some words of text " * 50}).encode() + b"\n"
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(line * 100_000, compresslevel=1))  # one unit of many seconds
    run = started(tmp_path / "a.jsonl.gz", tmp_path / "out", "processes=1")
    while not any(p.stat().st_size for p in tmp_path.glob("out/shard-*.tmp/tokens.bin")):
        time.sleep(0.005)
    run.send_signal(signal.SIGTERM)
    _, said = run.communicate()
    assert run.returncode == 75 and said == "stopped by a signal; the same command resumes with what is missing\n"
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["settings.json"]


@pytest.mark.slow
def test_a_process_that_is_killed_is_named(tmp_path):
    jsonl(tmp_path / "a.jsonl", ["x" * 1000] * 40_000)
    run = started(tmp_path / "a.jsonl", tmp_path / "out", "processes=1")
    shards_there(tmp_path / "out", 1)
    for pid in children(run.pid):
        if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes():
            os.kill(pid, signal.SIGKILL)
    _, said = run.communicate()
    assert run.returncode == 2 and "was killed by SIGKILL" in said and "a.jsonl" in said, said


def test_a_package_that_is_not_installed_is_named_by_the_command(monkeypatch):
    """By its name, as the process that needed it says it."""
    asked, answers = ["unit"], []

    def receive():
        if not asked:
            raise EOFError
        return asked.pop()

    def fail(*_):
        raise ModuleNotFoundError("No module named 'nowhere'", name="nowhere.parquet")

    monkeypatch.setattr(workers, "make_shard", fail)
    monkeypatch.setattr(workers.signal, "signal", lambda *_: None)
    monkeypatch.setattr(workers.gc, "callbacks", [])
    settings = SimpleNamespace(own={"name": "bytes", "fingerprint": "bytes-1"})
    workers._work(Path(), settings, None, SimpleNamespace(recv=receive, send_bytes=answers.append), ())
    ((kind, error),) = map(pickle.loads, answers)
    assert kind == "failed" and type(error) is ModuleNotFoundError and error.name == "nowhere.parquet"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["source=a.txt"], ["to is missing", "to=corpus.tokens"]),
        (["to=out"], ["source is missing"]),
        (["source=a.txt", "to=out", "tokeniser=bytes"], ["unknown key 'tokeniser'", "did you mean 'tokenizer'"]),
        (["source=a.txt", "to=out", "zzz=1"], ["unknown key 'zzz'", "processes"]),
        (["source=a.txt", "to"], ["cannot read 'to'", "KEY=VALUE"]),
        (["source=a.txt", "to="], ["cannot read 'to='"]),
        (["source=a.txt", "to=out", "to=other"], ["to is given twice"]),
        (["source=a.txt", "source=stdlib", "to=out"], ["a folder of their own", "data.mixture"]),
        (["source=a.txt", "to=a.txt"], ["to = 'a.txt': a.txt is a file; name a folder"]),
        (["source=none/*.txt", "to=out"], ["error: source = 'none/*.txt' matches no file"]),
        (["source=a.txt", "to=out", "processes=0"], ["processes must be a whole number of at least 1, got 0"]),
        (["source=a.txt", "to=out", "threads=x"], ["threads must be", "got x"]),
        (["source=a.txt", "to=out", "shard_mb=0.5"], ["shard_mb must be"]),
        (["source=a.txt", "to=out", "sample_mb=-1"], ["sample_mb must be"]),
        (["source=a.txt", "to=out", "part=2/2"], ["part = '2/2'", "0 to N-1"]),
        (["source=a.txt", "to=out", "part=auto"], ["part=auto finds none of SLURM_PROCID"]),
        (["source=a.txt", "to=out", "tokenizer=bpe:x"], ["bpe:SIZE"]),
        (["source=a.txt", "to=out", "tokenizer=none.json"], ["error: tokenizer = 'none.json': no such file"]),
        (["source=hf:", "to=out"], ["hf:NAME"]),
        (
            ["source=a.txt", "to=/proc/out"],
            ["cannot write /proc/out: No such file", "name a writable folder with enough space in to="],
        ),
        (["source=a.txt", "to=a.txt/out"], ["a.txt is a file; name a folder"]),
    ],
)
def test_every_key_that_is_wrong_is_named(tmp_path, monkeypatch, capsys, arguments, words):
    monkeypatch.chdir(tmp_path)
    for name in ("SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "JOB_COMPLETION_INDEX"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "a.txt").write_text("text")
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1 and all(w in said for w in words), said
    assert not (tmp_path / "out").exists()


def test_a_cluster_says_which_part_it_is(monkeypatch):
    from launch.tokenize import _part

    monkeypatch.setenv("SLURM_PROCID", "3")
    monkeypatch.setenv("SLURM_NTASKS", "8")
    assert _part("auto") == (3, 8) and _part("1/2") == (1, 2)


class Stream:
    """What the library `datasets` returns, of rows that can be divided."""

    num_shards = 3

    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return iter(self.rows)

    def shard(self, num_shards, index):
        return Stream(self.rows[index::num_shards])


def test_a_set_of_a_hub_is_streamed_into_a_dataset(tmp_path, monkeypatch):
    asked = []

    def load_dataset(name, split, streaming):
        asked.append((name, split, streaming))
        if name == "none/such":
            raise FileNotFoundError("Dataset 'none/such' does not exist\non the Hub")
        return Stream([{"text": f"row {i}"} for i in range(10)])

    section = DataSection(source="hf:some/set:test", cache_dir=str(tmp_path), sequence_length=8, global_batch=1)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"'hf:some/set:test' needs the library datasets: pip install datasets"):
        build(section, seed=0)
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    data = build(section, seed=0)
    (folder,) = tmp_path.glob("hub-*")
    assert decoded(folder) == [f"row {i}" for part in range(3) for i in range(part, 10, 3)]
    assert set(asked) == {("some/set", "test", True)}
    asked.clear()
    assert build(section, seed=0).corpus.fingerprint == data.corpus.fingerprint and not asked
    with pytest.raises(
        ValueError, match=r"'hf:none/such' cannot be opened \(FileNotFoundError: Dataset .* exist\); check"
    ):
        make_dataset(tmp_path / "out", "hf:none/such")
    with pytest.raises(ValueError, match=r"part 0, row 0 \(from 0\): no key 'body' \(there is text\)"):
        make_dataset(tmp_path / "out", "hf:some/set", text_key="body")


def test_the_benchmark_reports_nothing_where_bytes_differ(tmp_path, monkeypatch):
    from benchmarks import tokenize as benchmark
    from benchmarks.options import read

    def run(source, to, tokenizer, processes, threads=1):
        (to / "shard-0").mkdir(parents=True)
        (to / "shard-0/tokens.bin").write_bytes(b"same" if same else str(processes).encode())
        return {
            "processes": processes,
            "threads": threads,
            "seconds": 4 / processes,
            "cpu_seconds": 4.0,
            "peak_mb": 100.0,
        }

    monkeypatch.setattr(benchmark, "run", run)
    asked = read(benchmark.OPTIONS, ["mb=1", "do=scale,threads", "rounds=2"])
    for same, folder in ((True, tmp_path / "same"), (False, tmp_path / "other")):
        folder.mkdir()
        if same:
            found = benchmark.measured(asked, folder)
            assert found["ratio"] == 2 and [(r["processes"], r["threads"]) for r in found["runs"]] == [
                (1, 1),
                (2, 1),
                (1, 2),
            ]
            assert "| 1 process of 2 threads |" in benchmark.table(
                found
            ) and "2.00 (of CPU seconds in a process 2.00)" in benchmark.table(found)
        else:
            with pytest.raises(SystemExit, match="changes the bytes"):
                benchmark.measured(asked, folder)
