"""What is read from a bucket, through gcsfs and from a server that plays the store: it is what the same files on a disk are."""

import gzip
import json
import shutil
import sys
from types import SimpleNamespace

import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from etils import epath
from gcsfs.retry import HttpError
from published_folder import write_folder

from ejdist.buckets import BucketPath, at_once, source_path
from ejdist.cluster import Hosts, HostsDiffer, agreement
from ejdist.evaluation.weights import open_weights
from ejdist.paths import place
from ejdist.training.chats.folder import templates_of
from ejdist.training.data import DataSection, build, dataset, sources
from ejdist.training.data.corpus import build_corpus
from ejdist.training.data.tokenizer import FileTokenizer
from ejdist.training.data.tokenizing import make_dataset
from ejdist.training.kept import keep, told_of_folder
from ejdist.training.start import open_source
from ejdist.weights import remote
from ejdist.weights.files import WeightsError, read_folder, read_header
from launch.errors import DONE, HOST_LOST, WRONG, exit_code_of
from launch.tokenize import main as tokenize
from launch.train import main as train
from recipes.schema import RecipeError, compose

TEXTS = [f"{n} bottles\nof beer on the wall" for n in range(40)]


@pytest.fixture
def bucket(server):
    server.bucket.objects.clear()
    server.requests.clear()
    server.forbidden = ()
    return server.bucket


def upload(bucket, folder, name):
    """Copies the files of a folder into the bucket, and returns their URL."""
    for path in folder.rglob("*"):
        if path.is_file():
            bucket.put(f"{name}/{path.relative_to(folder)}", path.read_bytes(), None)
    return f"gs://a-bucket/{name}"


def rows(texts):
    return "\n".join(json.dumps({"text": text}) for text in texts).encode()


@pytest.fixture
def texts(tmp_path):
    """A folder with a file of every format, a hidden one and one of another kind."""
    folder = tmp_path / "texts"
    (folder / "more").mkdir(parents=True)
    (folder / "a.jsonl").write_bytes(rows(TEXTS[:10]))
    (folder / "more" / "b.jsonl.gz").write_bytes(gzip.compress(rows(TEXTS[10:20])))
    pq.write_table(pa.table({"text": TEXTS[20:30]}), folder / "more" / "c.parquet")
    (folder / "more" / "d.txt").write_text(TEXTS[30])
    (folder / ".hidden.jsonl").write_bytes(rows(["hidden"]))
    return folder


# -- data -----------------------------------------------------------------------------------------------------------------


def test_files_of_every_format_are_what_they_are_on_a_disk(bucket, texts, tmp_path):
    url = upload(bucket, texts, "corpus")
    bucket.put("corpus-of-another/e.jsonl", rows(["another"]), None)
    local = build_corpus(f"{texts}/**/*", "bytes", "text", tmp_path / "cache")
    found = build_corpus(f"{url}/**/*", "bytes", "text", tmp_path / "cache")
    assert found.num_documents == 31 and found.fingerprint == local.fingerprint
    listed = [str(path) for path in sources.files_of([f"{url}/*.jsonl", f"{url}/more/*", str(texts / "a.jsonl")])]
    names = ["a.jsonl", "more/b.jsonl.gz", "more/c.parquet", "more/d.txt"]
    assert listed == [str(texts / "a.jsonl"), *(f"{url}/{name}" for name in names)]


def test_another_object_under_the_name_is_another_corpus(bucket, tmp_path, monkeypatch):
    bucket.put("a.jsonl", rows(TEXTS), None)
    built = lambda: build_corpus("gs://a-bucket/a.jsonl", "bytes", "text", tmp_path / "cache")  # noqa: E731
    first = built()
    monkeypatch.setattr(sources, "_lines", lambda *_, **__: pytest.fail("the cache has it"))
    assert built().fingerprint == first.fingerprint
    monkeypatch.undo()
    bucket.put("a.jsonl", rows(TEXTS[::-1]), None)
    assert built().fingerprint != first.fingerprint
    lines = sources._lines

    def changing(path, **how):
        for number, line in lines(path, **how):
            if number == 3:
                bucket.put("a.jsonl", rows(TEXTS[5:]), None)
            yield number, line

    monkeypatch.setattr(sources, "_lines", changing)
    bucket.put("a.jsonl", rows(TEXTS[3:]), None)
    with pytest.raises(ValueError, match=r"gs://a-bucket/a\.jsonl changed while it was read"):
        built()


def test_ranges_of_a_large_object_are_shards_and_a_dataset_is_read_from_a_bucket(bucket, server, tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").write_bytes(rows([f"{text} {n}" * 40 for n, text in enumerate(TEXTS)]))
    bucket.put("raw/a.jsonl", (tmp_path / "a.jsonl").read_bytes(), None)
    common = {"tokenizer": "bytes", "shard_bytes": 1 << 13}
    make_dataset(tmp_path / "local", f"{tmp_path}/a.jsonl", **common)
    make_dataset(tmp_path / "made", "gs://a-bucket/raw/*.jsonl", **common)
    local = dataset.open_dataset(tmp_path / "local", "bytes")
    assert len(local.shards) > 3 and dataset.open_dataset(tmp_path / "made", "bytes").fingerprint == local.fingerprint
    url = upload(bucket, tmp_path / "made", "tokens")
    section = {"sequence_length": 128, "global_batch": 4, "cache_dir": str(tmp_path / "cache")}
    here = build(DataSection(source=str(tmp_path / "local"), **section), seed=1)
    server.requests.clear()
    there = build(DataSection(source=url, **section), seed=1)
    opened = len(server.requests)
    assert opened < 20, "its shards are listed, and none is asked for"
    for step in range(3):
        batch, expected = there.batch(step), here.batch(step)
        assert all(np.array_equal(batch[name], expected[name]) for name in expected)
    assert there.corpus.fingerprint == here.corpus.fingerprint
    media = [r for r in server.requests[opened:] if "alt=media" in r or "/download/" in r]
    assert len(media) < 60, "blocks of a read travel together"
    name = next(n for n in bucket.objects if n.endswith("tokens.bin"))
    data, generation = bucket.objects[name]
    bucket.objects[name] = (bytes(len(data)), generation)
    with pytest.raises(
        OSError, match=r"the shard gs://a-bucket/tokens/shard-\w+ is damaged: tokens\.bin does not hold"
    ):
        for shard in dataset.open_dataset(BucketPath(url), "bytes").shards:
            shard.tokens(0, 100)
    for one in [n for n in bucket.objects if n.startswith(name.rpartition("/")[0])]:
        del bucket.objects[one]
    with pytest.raises(ValueError, match=r"is damaged: it is missing"):
        dataset.open_dataset(BucketPath(url), "bytes")


# -- tokenizer and weights ------------------------------------------------------------------------------------------------


# The first has tensors of several parts beside those of the second.
@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_next", "llama"])
def test_a_published_folder_is_what_it_is_on_a_disk(family, bucket, tmp_path, monkeypatch):
    monkeypatch.setattr(remote, "_CHUNK", 64)
    monkeypatch.setattr(remote, "_RUN", 100)
    folder = write_folder(tmp_path / "folder", family)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    url = upload(bucket, folder, "models/one")
    here, there = FileTokenizer(folder), FileTokenizer(url)
    assert (there.bos_id, there.eos_id, there.stop_ids) == (here.bos_id, here.eos_id, here.stop_ids)
    assert there.fingerprint == here.fingerprint == FileTokenizer(f"{url}/tokenizer.json").fingerprint
    assert templates_of(None, url) == templates_of(None, str(folder))
    recipe = compose([f"model=hf:{url}"])
    assert recipe.data.tokenizer == url and recipe.model.init_from == url
    assert vars(compose([f"model=hf:{folder}"]).model) | {"init_from": url} == vars(recipe.model)
    local, source = open_source(str(folder), recipe.model), open_source(url, recipe.model)
    assert source.digest() == local.digest() and source.what == url
    devices = np.array(jax.devices()[:2])
    split = jax.sharding.NamedSharding(jax.sharding.Mesh(devices, "x"), jax.sharding.PartitionSpec())
    like = {
        name: jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=split) for name, p in remote_leaves(recipe.model).items()
    }
    read, expected = source.load(like), local.load(like)
    assert all(np.array_equal(read[name], expected[name]) for name in like)
    assert open_weights(url).tokenizer == url
    keep(BucketPath(url), tmp_path / "run")
    assert told_of_folder(url, tmp_path / "run") == []
    kept = {str(p.relative_to(tmp_path / "run" / "published")) for p in (tmp_path / "run").rglob("*") if p.is_file()}
    assert {"config.json", "tokenizer.json", "additional_chat_templates/tool_use.jinja"} <= kept
    bucket.put("models/one/config.json", (folder / "config.json").read_bytes() + b" ", None)
    assert "config.json in gs://a-bucket/models/one changed since" in told_of_folder(url, tmp_path / "run")[0]


def remote_leaves(model):
    from ejdist.weights.tensors import declared_leaves

    return declared_leaves(model)


def test_of_a_tensor_only_what_is_taken_is_read(bucket, server, tmp_path, monkeypatch):
    monkeypatch.setattr(remote, "_CHUNK", 64)
    folder = write_folder(tmp_path / "folder", "llama")
    url = upload(bucket, folder, "model")
    name, stored = max(read_folder(BucketPath(url)).items(), key=lambda one: np.prod(one[1].shape))
    local = read_folder(folder)[name].open()
    ranges = []
    read = BucketPath.read_ranges
    monkeypatch.setattr(BucketPath, "read_ranges", lambda self, spans: ranges.extend(spans) or read(self, spans))
    tensor = stored.open()
    part = tensor.reshape(local.shape)[2:4]
    assert ranges == [] and part.shape == local[2:4].shape and len(part) == 2
    assert np.array_equal(np.ascontiguousarray(part.transpose((1, 0))), local[2:4].T)
    assert sum(end - begin for begin, end in ranges) <= local[2:4].nbytes + 2 * 64 < local.nbytes / 2
    before = len(ranges)
    assert np.array_equal(part, local[2:4]) and len(ranges) == before, "what has been read is not read again"
    assert np.array_equal(tensor, local)
    assert sum(end - begin for begin, end in ranges) == local.nbytes


def test_weights_that_are_replaced_or_cut_off_are_named(bucket, tmp_path):
    folder = write_folder(tmp_path / "folder", "llama")
    upload(bucket, folder, "model")
    path = BucketPath("gs://a-bucket/model/model.safetensors")
    tensors = read_header(path)
    stored = next(iter(tensors.values()))
    bucket.put("model/model.safetensors", (folder / "model.safetensors").read_bytes(), None)
    with pytest.raises(OSError) as caught:
        np.asarray(stored.open())
    assert caught.value.filename == str(path)
    bucket.put("model/model.safetensors", (folder / "model.safetensors").read_bytes()[:-8], None)
    with pytest.raises(WeightsError, match=r"gs://a-bucket/model/model\.safetensors is truncated"):
        read_header(path)


# -- what is refused ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["data.source=gs://a-bucket/none/*.jsonl"], "matches no object: check the name"),
        (
            ["data.source=gs://a-bucket/corpus"],
            "matches no object: give a pattern such as gs://BUCKET/corpus/**/*.jsonl",
        ),
        (["data.source=gs://no-bucket/a.jsonl"], "'gs://no-bucket/a.jsonl'"),
        (["data.source=gs://a-bucket"], "names nothing in a bucket: write gs://BUCKET/NAME"),
        (["data.tokenizer=gs://a-bucket/none.json"], "no such file; give 'bytes', 'bpe:4096' or a path"),
        (["model.init_from=gs://a-bucket/corpus/a.jsonl"], "gs://a-bucket/corpus/a.jsonl"),
        (["model=hf:gs://a-bucket/none"], "model.init_from = 'gs://a-bucket/none' is no folder"),
    ],
)
def test_what_is_not_in_the_bucket_is_named_before_anything_is_written(
    given, words, bucket, texts, monkeypatch, capsys
):
    upload(bucket, texts, "corpus")
    monkeypatch.chdir(texts.parent)
    shutil.rmtree(texts)
    assert train(["recipe=long_context", "run.dir=run", "data.source=gs://a-bucket/corpus/a.jsonl", *given]) != DONE
    message = capsys.readouterr().err
    assert words in message and message.startswith("error: ") and message.count("\n") == 1
    assert not [path for path in texts.parent.iterdir() if path.name == "run"]


def test_without_gcsfs_nothing_is_read_and_the_extra_is_named(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    find = __import__("importlib.util").util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "gcsfs" else find(name))
    with pytest.raises(
        ValueError, match=r"data\.source = .* needs gcsfs, which is not installed: pip install 'ejdist\[gcs\]'"
    ):
        source_path("data.source", "gs://a-bucket/a.jsonl")
    assert tokenize(["source=gs://a-bucket/a.txt", f"to={tmp_path / 'x'}"]) == WRONG
    assert "pip install 'ejdist[gcs]'" in capsys.readouterr().err
    assert str(source_path("data.source", "a.jsonl")) == "a.jsonl"


def test_a_bucket_that_may_not_be_written_is_named_in_a_sentence(bucket, server):
    """Its account may list and read it."""
    folder = place("checkpoint.dir", "gs://a-bucket/runs/one")
    agreement.check_shared(Hosts(5), folder, "checkpoint.dir", alone=True)
    assert bucket.objects == {}, "nothing stays there"
    server.forbidden = ("POST", "PUT")
    with pytest.raises(HostsDiffer) as caught:
        agreement.check_shared(Hosts(5), folder, "checkpoint.dir", alone=True)
    assert "cannot write to checkpoint.dir = gs://a-bucket/runs/one: an-account does not have access" in str(
        caught.value
    )
    assert "let its account create, read and delete objects there" in str(caught.value)
    assert "\n" not in str(caught.value)
    with pytest.raises(HostsDiffer, match=r"cannot write to checkpoint\.dir = gs://no-bucket/runs"):
        agreement.check_shared(Hosts(5), epath.Path("gs://no-bucket/runs"), "checkpoint.dir", alone=True)


def test_a_bucket_that_may_not_be_read_is_named_where_a_recipe_is_composed(bucket, server):
    server.forbidden = ("GET",)
    with pytest.raises(RecipeError) as caught:
        compose(["model=hf:gs://a-bucket/model"])
    assert str(caught.value) == (
        "model.init_from = 'gs://a-bucket/model' cannot be read: an-account does not have access to GET"
    )


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (HttpError({"code": 503, "message": "try again"}), True),
        (HttpError({"code": 400, "message": "no such thing"}), False),
        (ConnectionResetError("reset"), True),
        (OSError("Forbidden: https://a\nan-account may not"), False),
    ],
)
def test_a_store_that_does_not_answer_may_do_so_at_the_next_start(error, passes, bucket, monkeypatch):
    def fails(*_, **__):
        raise error

    monkeypatch.setattr("ejdist.buckets._files", lambda: SimpleNamespace(info=fails))
    for read in (lambda: read_folder(BucketPath("gs://a-bucket/model")), lambda: sources.files_of("gs://a-bucket/*")):
        with pytest.raises((OSError, ValueError)) as caught:
            read()
        assert exit_code_of(caught.value) == (HOST_LOST if passes else WRONG)


def test_paths_of_a_bucket():
    path = BucketPath("gs://a-bucket/x/y.tar.gz")
    assert (path.name, path.stem, str(path.parent), str(path / "z")) == (
        "y.tar.gz", "y.tar", "gs://a-bucket/x", "gs://a-bucket/x/y.tar.gz/z",
    )  # fmt: skip
    assert path == BucketPath("gs://a-bucket/x/y.tar.gz/") and path != path.at(3)
    assert sorted([BucketPath("gs://b/a-b"), BucketPath("gs://b/a/c")])[0] == BucketPath("gs://b/a/c"), (
        "as paths of a disk"
    )
    assert at_once(lambda one, two: two, [path, path], [1, 2]) == [1, 2]
