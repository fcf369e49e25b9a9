"""Datasets are read where a row needs it: every token once, batches that depend on (seed, step) alone, damage found by its
first reader, mixtures whose shares are exact."""

import hashlib
import itertools
import json
import os
import shutil
import threading
import tracemalloc
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec
from test_data import corpus_of, data_of, same

from ejdist.mesh import make_mesh
from ejdist.order import Order
from ejdist.training.data import Data, DataSection, blocks, build, dataset, shard_packing
from ejdist.training.data.dataset import open_dataset
from ejdist.training.data.even_packing import Even
from ejdist.training.data.mixture import BLOCK, MixedRows, Mixture, counts_of
from ejdist.training.data.packing import Packing
from ejdist.training.data.shard_packing import CorpusShard, Cut
from ejdist.training.data.shuffle import Shuffle
from ejdist.training.data.tokenizing import make_dataset
from ejdist.training.data.whole_packing import Whole, best_fit
from ejdist.training.placing import local_rows, permuted, place_batch
from recipes.schema import compose


@pytest.fixture
def small_windows(monkeypatch):
    monkeypatch.setattr(shard_packing, "_ROWS", 2)
    monkeypatch.setattr(shard_packing, "_DOCUMENTS", 5)


class Numbered(CorpusShard):
    """A shard whose tokens are numbered from `first`, so that those of several shards can be told apart."""

    def __init__(self, lengths, first):
        super().__init__(corpus_of(lengths))
        self._first = first

    def tokens(self, begin, end):
        return super().tokens(begin, end) + np.uint32(self._first)


def numbered(shards):
    firsts = np.cumsum([0, *(sum(lengths) for lengths in shards)])
    return [Numbered(lengths, first) for lengths, first in zip(shards, firsts[:-1], strict=True)]


def packed(shards, length, seed, how, folder):
    if how == "cut":
        return Cut(shards, length, seed)
    return {"even": Even, "whole": Whole}[how](shards, length, seed, "made", folder)


SHARDS = st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=30), min_size=1, max_size=4)


@pytest.mark.parametrize("how", [pytest.param("cut", marks=pytest.mark.slow), "even", "whole"])
@settings(max_examples=40, deadline=None)
@example([[1] * 9, [1]], 5, 0)
@example([[3, 300, 1, 200], [2]], 8, 1)  # documents of many rows and windows
@given(SHARDS, st.integers(2, 33), st.integers(0, 3))
def test_an_epoch_has_every_token_and_every_transition_once(how, tmp_path_factory, lengths, length, seed):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard_packing, "_ROWS", 2)
        patch.setattr(shard_packing, "_DOCUMENTS", 5)
        rows = packed(numbered(lengths), length, seed, how, tmp_path_factory.mktemp("rows"))
    flat = [n for shard in lengths for n in shard]
    document = np.repeat(np.arange(len(flat)), flat)
    ends = np.cumsum(flat)
    for epoch in (0, 3):
        seen, transitions, pieces = [], [], Counter()
        for i in range(rows.rows_per_epoch):
            row = rows.row(epoch * rows.rows_per_epoch + i)
            real = row["segment_ids"] >= 0
            assert real.any() and (np.diff(real.astype(int)) <= 0).all(), "padding is at the end"
            assert (row["targets"][~real] == -1).all() and (np.diff(row["segment_ids"][real]) >= 0).all()
            seen.extend(row["tokens"][real])
            for segment in np.unique(row["segment_ids"][real]):
                at = row["segment_ids"] == segment
                tokens, targets = row["tokens"][at], row["targets"][at]
                (d,) = set(document[tokens])
                pieces[d] += 1
                assert (np.diff(tokens) == 1).all() and (row["positions"][at] == np.arange(at.sum())).all()
                assert (targets == np.where(tokens + 1 == ends[d], -1, tokens + 1)).all()
                transitions.extend(tokens[targets >= 0])
        assert sorted(seen) == list(range(len(document)))
        assert len(transitions) == len(set(transitions)) == len(document) - len(flat)
        if how != "whole":
            assert rows.rows_per_epoch == sum(-(-sum(shard) // length) for shard in lengths), (
                "only last rows have padding"
            )
        else:
            assert all(pieces[d] == -(-n // length) for d, n in enumerate(flat)), (
                "only what is longer than a row is cut"
            )


@pytest.mark.parametrize("how", ["cut", "even", "whole"])
def test_a_row_is_a_pure_function_of_seed_and_number(how, tmp_path, small_windows):
    lengths = [[int(n) for n in np.random.default_rng(i).integers(1, 60, 40)] for i in range(3)]
    first, second, other = (packed(numbered(lengths), 32, seed, how, tmp_path) for seed in (3, 3, 4))
    numbers = [500, 0, 7, first.rows_per_epoch, first.rows_per_epoch - 1, 2]
    assert all(same(first.row(i), second.row(i)) for i in numbers)
    assert all(same(first.row(i), second.row(i)) for i in reversed(numbers))
    orders = set()
    for rows, epoch in itertools.product((first, other), range(3)):
        made = [rows.row(epoch * rows.rows_per_epoch + i)["tokens"].tobytes() for i in range(rows.rows_per_epoch)]
        orders.add(b"".join(made))
    assert len(orders) == 6
    # Of one document only rows can move, and they do.
    alone = packed(numbered([[2000]]), 32, 3, how, tmp_path / "alone")
    made = [[alone.row(e * 63 + i)["tokens"].tobytes() for i in range(63)] for e in range(2)]
    assert alone.rows_per_epoch == 63 and sorted(made[0]) == sorted(made[1]) and made[0] != made[1]
    # Not only rows move: documents have other neighbours.
    assert {first.row(i)["tokens"].tobytes() for i in range(first.rows_per_epoch)} != {
        first.row(i)["tokens"].tobytes() for i in range(first.rows_per_epoch, 2 * first.rows_per_epoch)
    }


def test_best_fit_wastes_little_and_depends_on_lengths_alone():
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 900, 4000)
    counts = {len(best_fit(lengths, rng.permutation(len(lengths)), 1000)) for _ in range(3)}
    assert len(counts) == 1 and lengths.sum() / (counts.pop() * 1000) > 0.97
    rows = best_fit(np.array([6, 5, 4, 3, 2]), np.arange(5), 10)
    assert sorted(sorted(p.document for p in row) for row in rows) == [[0, 2], [1, 3, 4]]


class Endless:
    """A shard that nobody could hold: documents of 1000 tokens, each token the number of its place; it counts what is read."""

    num_documents, num_tokens, chats = 10**9, 10**12, None

    def __init__(self):
        self.read = 0

    def tokens(self, begin, end):
        self.read += end - begin
        return np.arange(begin, end) % 2**31

    def tokens_of(self, spans):
        return [self.tokens(*span) for span in spans]

    def offsets(self, begin, end):
        self.read += end - begin
        return np.arange(begin, end) * 1000

    def first_from(self, token):
        return min(-(-token // 1000), self.num_documents)


def test_no_index_of_documents_is_made():
    tracemalloc.start()
    shards = [Endless() for _ in range(50)]
    rows = Cut(shards, 2048, 0)
    made = [rows.row(i * 10**6) for i in range(200)]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert rows.rows_per_epoch == 50 * -(-(10**12) // 2048)
    assert all((row["targets"][:-1] - row["tokens"][:-1])[row["targets"][:-1] > 0].max() == 1 for row in made)
    assert sum(s.read for s in shards) / len(made) < 2 * 64 * 2048 and peak < 50e6


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 700), st.integers(0, 5))
def test_a_shuffle_has_every_number_once(n, seed):
    made = [Shuffle(n, seed, 1)[i] for i in range(n)]
    assert sorted(made) == list(range(n))
    assert n < 30 or made != [Shuffle(n, seed, 2)[i] for i in range(n)]


def test_a_shuffle_is_even():
    counts = np.zeros((10, 10))
    for key in range(4000):
        shuffle = Shuffle(10, key)
        for i in range(10):
            counts[i, shuffle[i]] += 1
    assert abs(counts / 400 - 1).max() < 0.25  # five standard deviations
    far = [Shuffle(10**12, 0)[i] for i in range(2000)]
    assert abs(np.mean(far) / 10**12 - 0.5) < 0.04 and abs(np.corrcoef(far[:-1], far[1:])[0, 1]) < 0.12
    with pytest.raises(IndexError):
        Shuffle(5, 0)[5]


def made_dataset(folder, *, documents=200, seed=0, name="made", shard_bytes=3000):
    rng = np.random.default_rng(seed)
    rows = [{"text": rng.bytes(int(rng.integers(1, 60))).hex()} for _ in range(documents)]
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    make_dataset(folder / name, str(folder / f"{name}.jsonl"), shard_bytes=shard_bytes)
    return folder / name


def section_of(folder, **keys):
    return DataSection(source=str(folder), tokenizer="dataset", sequence_length=32, global_batch=4, **keys)


@pytest.mark.parametrize("packing", ["cut", "even", "whole"])
def test_batches_of_a_dataset_whatever_the_hosts_and_the_step_it_starts_at(tmp_path, packing, small_windows):
    keys = {"packing": packing, "cache_dir": str(tmp_path / "cache")}
    source = made_dataset(tmp_path)
    data = build(section_of(source, **keys), seed=1)
    assert data.num_tokens == open_dataset(source, "bytes").num_tokens and data.vocab_size == 257
    whole = [data.batch(step) for step in range(12)]
    shutil.copytree(source, tmp_path / "copy")  # another host
    other = build(section_of(tmp_path / "copy", **keys), seed=1)
    for step in (7, 0, 11):
        parts = [other.batch(step, slice(i, i + 2)) for i in (0, 2)]
        assert same({n: np.concatenate([p[n] for p in parts]) for n in parts[0]}, whole[step])
    resumed = build(section_of(source, **keys), seed=1)
    resumed.check_cursor(json.loads(json.dumps(other.cursor(5))))
    assert all(same(a, b) for a, b in zip(resumed.iterator(5, 12), whole[5:], strict=True))


class Addressable:
    """A sharding as one host of two sees it: every second part of the rows is on its devices."""

    def __init__(self, sharding):
        self.sharding = sharding

    def addressable_devices_indices_map(self, shape):
        indices = self.sharding.devices_indices_map(shape)
        return {device: (b, t) for device, (b, t) in indices.items() if b.indices(8)[0] // 2 % 2}


def test_a_host_has_the_rows_of_its_devices_and_no_others(monkeypatch):
    """Its devices' rows do not follow each other, as on a TPU mesh; the sequence is split, and in another order."""
    placement = NamedSharding(make_mesh(fsdp=4, sp=2), PartitionSpec("fsdp", "sp"))
    like = SimpleNamespace(shape=(8, 16), sharding=Addressable(placement))
    program: Any = SimpleNamespace(batch={"tokens": like}, order=Order("zigzag", 2))
    rows = local_rows(program)
    mine = like.sharding.addressable_devices_indices_map(like.shape)
    assert rows.tolist() == [2, 3, 6, 7] and len(mine) == 4
    whole = np.arange(8 * 16, dtype=np.int32).reshape(8, 16)
    monkeypatch.setattr(jax, "make_array_from_callback", lambda shape, sharding, piece: piece)
    piece = place_batch(permuted({"tokens": whole[rows]}, program), program, rows)["tokens"]
    expected = program.order.permute(whole, axis=1)
    assert all(np.array_equal(piece(index), expected[index]) for index in mine.values())


def test_rows_read_together_or_alone_are_the_same(tmp_path, small_windows):
    one, two = made_dataset(tmp_path), made_dataset(tmp_path, seed=1, name="other")
    parts = [{"source": str(one), "weight": 3}, {"source": str(two), "weight": 1}]
    section = DataSection(source=None, mixture=parts, tokenizer="dataset", sequence_length=32, global_batch=16)
    data = build(section, seed=1)
    rows = np.array([0, 3, 4, 9, 15])
    whole, some = data.batch(3), data.batch(3, rows)
    assert same(some, {name: x[rows] for name, x in whole.items()})
    alone = [data.packing.row(3 * 16 + int(i)) for i in rows]
    assert same(some, {name: np.stack([row[name] for row in alone]) for name in some})
    (got,) = data.iterator(3, 4, rows, then=lambda batch: {name: -x for name, x in batch.items()})
    assert same(got, {name: -x for name, x in some.items()})


@pytest.fixture
def reads(monkeypatch):
    """The sizes of all reads, made since it was last cleared."""
    sizes, pread = [], os.pread

    def counting(number, size, at):
        sizes.append(len(content := pread(number, size, at)))
        return content

    monkeypatch.setattr(os, "pread", counting)
    return sizes


def test_a_step_has_few_reads_and_no_bytes_that_it_does_not_need(tmp_path, monkeypatch, reads):
    source = made_dataset(tmp_path, documents=3000, shard_bytes=1 << 20)
    size = open_dataset(source, "bytes").num_tokens * 2
    data = build(section_of(source), seed=0)
    made = [data.batch(step) for step in range(50)]
    files = sum(p.stat().st_size for p in source.glob("shard-*/*.bin"))
    assert len(reads) < 200 and size < sum(reads) <= files, "a block once, many in a read"
    reads.clear()
    assert all(same(data.batch(step), batch) for step, batch in enumerate(made)) and not reads, "in memory"
    monkeypatch.setattr(dataset, "_KEPT_TOKENS", 0)
    monkeypatch.setattr(blocks.OpenFile, "gap", 16)
    data = build(section_of(source), seed=0)
    for step in range(50):
        data.batch(step)
    reads.clear()
    assert all(same(data.batch(step), batch) for step, batch in enumerate(made))
    documents = sum((batch["segment_ids"].max(axis=1) + 1).sum() for batch in made)
    needed = sum((batch["segment_ids"] >= 0).sum() for batch in made) * 2
    assert len(reads) <= documents and needed <= sum(reads) < 1.1 * needed + 2 * documents


def test_only_so_many_blocks_stay_in_memory():
    kept = blocks.Kept(100)
    for number in range(10):
        kept.put(number, bytes(40))
        kept.get(0)
    assert kept.size == 80 and kept.get(0) is not None and kept.get(9) is not None and kept.get(8) is None
    kept.put(0, bytes(60))
    assert kept.size == 100


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from([1, 2, 900]), min_size=1, max_size=300), st.integers(1, 5))
def test_the_first_document_from_a_token_on_is_found_in_few_blocks(lengths, per_block):
    """However uneven the lengths are."""
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    read: list[int] = []

    def of_shard(begin, end):
        read.append(begin // per_block)
        assert (end - 1) // per_block == begin // per_block, "one block at a time"
        return offsets[begin:end]

    shard = object.__new__(dataset.Shard)
    shard.num_documents, shard.num_tokens = len(lengths), int(offsets[-1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "BLOCK", 8 * per_block)
        patch.setattr(dataset.Shard, "offsets", lambda self, begin, end: of_shard(begin, end))
        for token in {
            0,
            1,
            int(offsets[-1]),
            int(offsets[-1]) - 1,
            *offsets[::7].tolist(),
            *(offsets[::11] + 1).tolist(),
        }:
            read.clear()
            assert shard.first_from(token) == np.searchsorted(offsets[:-1], token)
            assert len(read) <= 2 * (len(lengths) // per_block + 2).bit_length() + 2


def test_one_shard_is_packed_as_many_are_and_few_files_are_open(tmp_path, monkeypatch, small_windows):
    monkeypatch.setattr(dataset, "_OPEN_FILES", 3)
    data = build(section_of(made_dataset(tmp_path)), seed=1)
    assert len(data.corpus.shards) > 5

    def opened():
        return sum(
            str(tmp_path) in os.readlink(f"/proc/self/fd/{n}")
            for n in os.listdir("/proc/self/fd")
            if os.path.exists(f"/proc/self/fd/{n}")
        )

    wanted = [data.batch(step) for step in range(40)]
    assert opened() <= 3
    start = threading.Barrier(4)

    def read(_):
        start.wait()
        return [data.batch(step) for step in range(40)]

    with ThreadPoolExecutor(4) as threads:
        for made in threads.map(read, range(4)):
            assert all(same(a, b) for a, b in zip(made, wanted, strict=True))
    assert opened() <= 3


def test_only_what_is_read_is_verified_and_damage_names_shard_and_remedy(tmp_path, monkeypatch):
    monkeypatch.setattr("ejdist.training.data.tokenizing.BLOCK", 64)
    monkeypatch.setattr(blocks, "BLOCK", 64)
    source = made_dataset(tmp_path)
    shard = open_dataset(source, "bytes").shards[2]
    good = shard.tokens(0, shard.num_tokens)
    file = shard.folder / "tokens.bin"
    content = file.read_bytes()
    file.write_bytes(content[:700] + bytes([content[700] ^ 1]) + content[701:])

    def again():
        return open_dataset(source, "bytes").shards[2]

    damaged = again()
    assert np.array_equal(damaged.tokens(0, 300), good[:300])  # bytes 0 to 600
    with pytest.raises(OSError) as error:
        damaged.tokens(310, 360)  # begins in the block before
    words = [str(shard.folder), "tokens.bin does not hold the bytes that were written, from 640 to 704",
             "python -m launch.tokenize", "made.jsonl", "copy it again"]  # fmt: skip
    assert all(w in str(error.value) for w in words) and "\n" not in str(error.value), str(error.value)
    data = build(section_of(source), seed=0)
    with pytest.raises(OSError, match=r"tokens.bin does not hold the bytes"):
        list(data.iterator(0, 60))  # a thread reads it, and the run hears of it
    for content_now, words in (
        (content[:-1], f"has {len(content) - 1} bytes, not {len(content)}"),
        (b"", "has 0 bytes"),
    ):
        file.write_bytes(content_now)
        with pytest.raises(OSError, match=words):
            again().tokens(0, 1)
    file.unlink()
    with pytest.raises(OSError, match=r"tokens.bin is missing"):
        again().tokens(0, 1)
    file.write_bytes(content)
    opened = again()
    assert np.array_equal(opened.tokens(0, 5), good[:5])
    os.truncate(file, 100)
    with pytest.raises(OSError, match=r"tokens.bin (does not hold the bytes|is shorter)"):
        opened.tokens(100, 110)
    file.write_bytes(content)
    meta = shard.folder / "meta.json"
    for change in (lambda c: c[:-20], lambda c: c.replace(b'"documents": ', b'"documents": 1')):
        kept = meta.read_bytes()
        meta.write_bytes(change(kept))
        with pytest.raises(OSError, match=r"meta.json"):
            again().tokens(0, 1)
        meta.write_bytes(kept)
    offsets = shard.folder / "offsets.bin"
    offsets.write_bytes(offsets.read_bytes()[::-1])
    with pytest.raises(OSError, match=r"offsets.bin does not hold the bytes"):
        again().first_from(5)


def test_a_shard_of_another_dataset_is_noticed(tmp_path):
    one, two = made_dataset(tmp_path), made_dataset(tmp_path, seed=1, name="other")
    names = [sorted(p.name for p in folder.glob("shard-*")) for folder in (one, two)]
    for file in (two / names[1][0]).iterdir():
        shutil.copy(file, one / names[0][0])
    shard = next(s for s in open_dataset(one, "bytes").shards if s.folder.name == names[0][0])
    with pytest.raises(OSError, match=r"meta.json is of another shard than dataset.json says"):
        shard.tokens(0, 1)


def test_what_is_wrong_with_a_dataset_is_told_at_the_start(tmp_path):
    from test_data_files import save_tokenizer

    source = made_dataset(tmp_path)
    save_tokenizer(tmp_path / "t.json", {"a": 0, "</s>": 1})
    cases = [
        (
            source,
            str(tmp_path / "t.json"),
            "text",
            ["data.tokenizer", "bytes, fingerprint bytes-1", "data.tokenizer=dataset"],
        ),
        (source, "bpe:300", "text", ["data.tokenizer = 'bpe:300'", "data.tokenizer=dataset"]),
        (source, str(tmp_path / "none.json"), "text", ["no such file"]),
        (source, "bytes", "body", ["data.text_key = 'body'", "'text'"]),
    ]
    for folder, tokenizer, text_key, words in cases:
        with pytest.raises(ValueError) as error:
            build(DataSection(source=str(folder), tokenizer=tokenizer, text_key=text_key), seed=0)
        assert all(w in str(error.value) for w in words), str(error.value)
    with pytest.raises(ValueError, match=r"'dataset' is the tokenizer of a dataset, but .*jsonl' is not a dataset"):
        build(section_of(f"{tmp_path}/made.jsonl"), seed=0)
    with pytest.raises(
        ValueError, match=r"'dataset' is the tokenizer of a dataset, but data\.source is not set: make one"
    ):
        build(DataSection(source=None, tokenizer="dataset"), seed=0)
    with pytest.raises(
        ValueError, match=r"data.source lists '.*made', which is a dataset; join datasets with data.mixture"
    ):
        build(DataSection(source=[str(source)]), seed=0)
    with pytest.raises(ValueError, match=r"data.packing = 'best' is unknown; use cut, even or whole"):
        build(section_of(source, packing="best"), seed=0)
    shard = next(source.glob("shard-*"))
    shard.rename(tmp_path / "aside")
    with pytest.raises(ValueError, match=rf"the shard .*{shard.name} is damaged: it is missing; copy it again"):
        build(section_of(source), seed=0)
    (tmp_path / "aside").rename(shard)
    manifest = source / "dataset.json"
    content = manifest.read_bytes()
    manifest.write_bytes(content.replace(b'"tokens": ', b'"tokens": 1', 1))
    with pytest.raises(ValueError, match=r"is damaged: dataset.json does not hold the bytes .*launch.tokenize"):
        build(section_of(source), seed=0)
    manifest.unlink()
    with pytest.raises(ValueError, match=r"is not finished; python -m launch.tokenize to="):
        build(section_of(source), seed=0)
    manifest.write_bytes(content)
    build(section_of(source), seed=0)


def test_another_order_of_rows_is_noticed_on_resume(tmp_path):
    old = data_of().cursor(9)
    del old["order"]  # of a run before there were others
    data_of().check_cursor(old)
    corpus = corpus_of([5, 6, 7] * 9)
    cut, even, whole = (
        Data(corpus, sequence_length=8, global_batch=1, seed=0, packing=how, cache_dir=tmp_path)
        for how in ("cut", "even", "whole")
    )
    with pytest.raises(ValueError, match=r"data.too_long \(how rows follow from the documents\): was cut, is even"):
        even.check_cursor(cut.cursor(1))
    with pytest.raises(ValueError, match=r"data.too_long \(how rows follow from the documents\): was cut, is whole"):
        whole.check_cursor(cut.cursor(1))


def test_a_mixture_has_its_shares_and_every_row_of_a_source_in_turn():
    class Source:
        rows_per_epoch, length, order = 10, 4, "cut"

        def __init__(self, name):
            self.name = name

        def row(self, i):
            return self.name, i

    counts = counts_of([0.7, 0.2, 0.1])
    assert sum(counts) == BLOCK and abs(counts[0] / BLOCK - 0.7) < 1 / BLOCK
    rows = MixedRows([Source(n) for n in "abc"], counts, 5)
    made = [rows.row(i) for i in range(BLOCK)]
    for name, count in zip("abc", counts, strict=True):
        assert sorted(i for n, i in made if n == name) == list(range(count)), "must be exact at the end of a block"
    assert Counter(n for n, _ in made[:2000])["a"] == pytest.approx(1400, abs=100)
    after = [rows.place(BLOCK + i) for i in range(BLOCK)]
    assert sorted(i for part, i in after if part == 1) == list(range(counts[1], 2 * counts[1]))
    assert [p for p, _ in after[:100]] != ["abc".index(n) for n, _ in made[:100]]
    assert [MixedRows(rows.parts, counts, 6).place(i) for i in range(50)] != [rows.place(i) for i in range(50)]


def test_a_mixture_is_a_recipe_s_and_resumes(tmp_path):
    one, two = made_dataset(tmp_path), made_dataset(tmp_path, seed=1, name="two")
    text = f"data.mixture=[{{source:{one},weight:3}},{{source:{two},weight:1}}]"
    keys = ["data.sequence_length=32", "data.global_batch=4"]
    section = compose(["data=dataset", text, *keys]).data
    data = build(section, seed=2)
    assert isinstance(data.corpus, Mixture) and data.corpus.counts == (BLOCK * 3 // 4, BLOCK // 4)
    alone = [build(section_of(folder), seed=2) for folder in (one, two)]
    for i in range(40):
        part, number = data.packing.place(i)
        assert same(data.packing.row(i), alone[part].packing.row(number))
    build(section, seed=2).check_cursor(json.loads(json.dumps(data.cursor(3))))
    for changed in (text.replace("weight:3", "weight:2"), text.replace(str(two), str(one))):
        other = build(compose(["data=dataset", changed, *keys]).data, seed=2)
        with pytest.raises(ValueError, match=r"data.source, data.mixture or data.weights_by"):
            other.check_cursor(data.cursor(3))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"source": "stdlib", "mixture": []}, ["data.mixture and data.source = 'stdlib' are both set", "data=files"]),
        ({"mixture": []}, ["data.mixture = []", "for example data.mixture="]),
        ({"mixture": "a"}, ["data.mixture = 'a'", "a list"]),
        ({"mixture": [{"source": "x"}]}, ["data.mixture[0] has no weight"]),
        ({"mixture": [{"weight": 1}]}, ["data.mixture[0] has no source"]),
        ({"mixture": [{"source": "x", "weight": 1, "wieght": 2}]}, ["data.mixture[0] has an unknown key 'wieght'"]),
        ({"mixture": [{"source": "x", "weight": 0}]}, ["data.mixture[0].weight", "above 0", "leave a source out"]),
        ({"mixture": [{"source": "x", "weight": "1"}]}, ["data.mixture[0].weight", "got '1'"]),
        ({"mixture": [{"source": "x", "weight": True}]}, ["data.mixture[0].weight"]),
        ({"mixture": [{"source": "x", "weight": float("nan")}]}, ["data.mixture[0].weight", "nan"]),
        ({"mixture": [{"source": "x", "weight": 1e308}] * 2}, ["data.mixture[0].weight", "below 1e+300", "1e+308"]),
        (
            {"mixture": [{"source": "x", "weight": 1}, {"source": "y", "weight": 1e-6}]},
            ["data.mixture[1].weight = 1e-06 is less than one row in 65,536"],
        ),
        ({"mixture": [{"source": "none/*.txt", "weight": 1}]}, ["none/*.txt", "matches no file"]),
    ],
)
def test_a_mixture_that_is_wrong_is_named(tmp_path, given, words):
    with pytest.raises(ValueError) as error:
        build(DataSection(**{"source": None, "cache_dir": str(tmp_path), **given}), seed=0)
    assert all(w in str(error.value) for w in words), str(error.value)


def test_sources_of_a_mixture_have_one_tokenizer(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(f"text of {name} " * 40)
    parts = [{"source": str(tmp_path / f"{name}.txt"), "weight": 1} for name in "ab"]
    section = DataSection(source=None, mixture=parts, tokenizer="bpe:300", cache_dir=str(tmp_path / "cache"))
    with pytest.raises(
        ValueError, match=r"data.mixture: .*b.txt' has another tokenizer than .*a.txt'; tokenize all sources"
    ):
        build(section, seed=0)
    section.tokenizer = "bytes"
    assert build(section, seed=0).num_tokens == 2 * (len("text of a " * 40) + 1)


@pytest.mark.parametrize(
    ("how", "pinned"),
    [
        ("packing", "54956e6b6c09301a"),
        ("cut", "a2e4680d7ffc6913"),
        ("even", "948d76290680e710"),
        ("whole", "02e568a09fa047c6"),
        ("mixture", "fb727c61836f903c"),
    ],
)
def test_rows_are_those_that_runs_so_far_have_seen(tmp_path, how, pinned):
    """A run goes on with the rows that it would have had; whoever changes them gives `order` another name, to refuse it."""
    lengths = [[int(n) for n in np.random.default_rng(i).integers(1, 300, 900)] for i in range(2)]
    if how == "packing":
        rows = Packing(corpus_of(lengths[0]), 64, 7)
    elif how == "mixture":
        rows = MixedRows([Cut(numbered([part]), 64, 7) for part in lengths], counts_of([1, 2]), 7)
    else:
        rows = packed(numbered(lengths), 64, 7, how, tmp_path)
    digest = hashlib.sha256()
    for i in range(0, 3 * rows.rows_per_epoch, 11):
        row = rows.row(i)
        for name in sorted(row):
            digest.update(row[name].tobytes())
    assert digest.hexdigest()[:16] == pinned
