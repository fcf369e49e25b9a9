"""Checkpoints in a bucket: TensorStore's own driver, gcsfs and google-cloud-storage, against a server that plays the store."""

import json
import shutil
import sys

import jax
import numpy as np
import pytest
from damaged_checkpoints import BESIDE, described, small_state
from etils import epath
from published_folder import LETTERS, write_folder
from small_run import TINY, losses

from ejdist.paths import check_folder, place
from ejdist.training.checkpoint import CheckpointError, Checkpoints, CheckpointSection
from ejdist.training.runs import Run
from ejdist.weights.files import WeightsError
from launch.errors import BAD_CHECKPOINT, DONE, WRONG
from launch.export import main as export
from launch.processes import Job
from launch.train import main

URL = "gs://a-bucket/runs/one"


@pytest.fixture
def bucket(server):
    server.bucket.objects.clear()
    server.forbidden = ()
    return server.bucket


def opened(**section):
    return Checkpoints("nowhere", CheckpointSection(dir=URL, **section))


def test_checkpoints_in_a_bucket(bucket):
    """Saved, found, restored bit for bit; old ones go; one is set aside; one that was cut off is none, and is removed."""
    state = small_state()
    checkpoints = opened(keep=2)
    assert checkpoints.latest() is None and checkpoints.steps() == []
    for step in (7, 8, 9):
        checkpoints.save(step, state, BESIDE)
    checkpoints.wait()
    assert checkpoints.steps() == [9, 8]
    checkpoints.close()
    assert {name.split("/")[2] for name in bucket.objects} == {"8", "9"}, "what is not kept is gone"
    del bucket.objects["runs/one/9/commit_success.txt"]
    checkpoints = opened(keep=2)
    assert checkpoints.latest() == 8 and checkpoints.interrupted() == ["9"]
    checkpoints.remove_interrupted()
    found, beside = checkpoints.restore(8, described(state))
    assert beside == BESIDE
    assert jax.tree.all(jax.tree.map(lambda a, b: np.array_equal(a, b), tuple(found), tuple(state)))
    assert str(checkpoints.set_aside(8)) == f"{URL}/8.damaged"
    checkpoints.reload()
    assert checkpoints.latest() is None
    assert {name.split("/")[2] for name in bucket.objects} == {"8.damaged"}
    checkpoints.close()


def test_damage_in_a_bucket_is_named(bucket):
    state = small_state()
    checkpoints = opened()
    checkpoints.save(7, state, BESIDE)
    checkpoints.wait()
    checkpoints.close()
    name = max((n for n in bucket.objects if "/d/" in n), key=lambda n: len(bucket.objects[n][0]))
    data, generation = bucket.objects[name]
    bucket.objects[name] = (data[: len(data) // 2], generation)
    checkpoints = opened()
    with pytest.raises(CheckpointError, match=rf"checkpoint {URL}/7 cannot be read .*(params|opt_state)\."):
        checkpoints.restore(7, described(state))
    checkpoints.close()


@pytest.mark.slow
def test_a_run_in_a_bucket_goes_on_is_exported_and_started_from(bucket, corpus, tmp_path, capsys):
    run = [*TINY, *corpus, f"run.dir={tmp_path / 'run'}", f"checkpoint.dir={URL}"]
    assert main([*run, "run.stop_after=6", "checkpoint.every=3"]) == DONE
    assert main([*TINY, *corpus, f"run.dir={tmp_path / 'calm'}"]) == DONE
    assert main(run) == DONE
    assert "resuming from step 6" in capsys.readouterr().out
    assert losses(tmp_path / "run") == losses(tmp_path / "calm")
    assert not (tmp_path / "run" / "checkpoints").exists()
    there, here = Run(URL), Run(tmp_path / "calm" / "checkpoints")
    assert there.step == here.step == 10 and there.model == here.model and there.digest() == here.digest()
    there.close()
    here.close()
    assert export([f"run.dir={URL}", f"to={tmp_path / 'files'}"]) == DONE
    assert (tmp_path / "files" / "config.json").exists()
    begun = [*TINY, *corpus, "run.stop_after=1", f"run.dir={tmp_path / 'begun'}"]
    assert main([*begun, f"model.init_from={URL}"]) == DONE
    assert f"parameters read from step 10 of the run in {URL}" in capsys.readouterr().out


def test_a_bucket_that_is_not_there_is_told(server, corpus, tmp_path, capsys):
    run = [*TINY, *corpus, f"run.dir={tmp_path / 'run'}", "checkpoint.dir=gs://another-bucket/run"]
    assert main(run) in (BAD_CHECKPOINT, WRONG)
    message = capsys.readouterr().err
    assert message.startswith("error: ") and "another-bucket" in message and message.count("\n") == 1


def test_a_bucket_that_may_not_be_written_is_refused_before_anything_is_compiled(
    bucket, server, corpus, tmp_path, capsys
):
    server.forbidden = ("POST",)
    assert main([*TINY, *corpus, f"run.dir={tmp_path / 'run'}", f"checkpoint.dir={URL}"]) == WRONG
    said = capsys.readouterr()
    assert "cannot write to checkpoint.dir = gs://a-bucket/runs/one: an-account does not have access" in said.err
    assert "compiling" not in said.out and said.err.count("\n") == 1 and not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("s3://bucket/run", "Orbax writes checkpoints to folders and to gs://BUCKET/FOLDER, and not to s3://"),
        ("S3://bucket/run", "TensorStore has a driver for S3, which Orbax never opens: it takes the URL for a folder"),
        ("http://host/run", "and not to http://"),
        ("gs://bucket", "names no folder of a bucket: write gs://BUCKET/FOLDER"),
        ("gs://", "names no folder of a bucket"),
    ],
)
def test_urls_that_no_checkpoint_can_be_written_to(value, words):
    with pytest.raises(ValueError, match=r"checkpoint\.dir") as caught:
        place("checkpoint.dir", value)
    assert words in str(caught.value)


def test_the_reason_against_s3_still_holds():
    """Once Orbax opens TensorStore's driver for S3, checkpoints may go there."""
    import tensorstore
    from orbax.checkpoint._src.path.atomicity_defaults import get_default_temporary_path_class
    from orbax.checkpoint._src.serialization.tensorstore_utils import build_kvstore_tspec

    assert tensorstore.KvStore.Spec({"driver": "s3", "bucket": "a-bucket"}).to_json()["driver"] == "s3"
    assert build_kvstore_tspec(URL, "params", use_ocdbt=True)["base"]["driver"] == "gcs"
    with pytest.raises(ValueError, match=r"should be absolute\. Got s3:/a-bucket"):
        build_kvstore_tspec("s3://a-bucket/run", "params", use_ocdbt=True)
    assert build_kvstore_tspec("s3://a-bucket/run", "params", use_ocdbt=False)["driver"] == "file"
    assert "Rename" in get_default_temporary_path_class(epath.Path("s3://a-bucket/run")).__name__


def test_without_its_library_a_bucket_is_refused_with_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    find = __import__("importlib.util").util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "gcsfs" else find(name))
    with pytest.raises(ValueError, match=r"needs gcsfs, which is not installed: pip install 'ejdist\[gcs\]'"):
        place("checkpoint.dir", URL)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["run.dir=gs://a-bucket/run"], "run.dir = 'gs://a-bucket/run' is a URL, and this key takes a path"),
        (["data.source=s3://a-bucket/*.jsonl"], "data.source = 's3://a-bucket/*.jsonl' is a URL"),
        (["data.source=[a.jsonl,s3://a-bucket/b.jsonl]"], "data.source = 's3://a-bucket/b.jsonl' is a URL"),
        (
            ["data.tokenizer=s3://a-bucket/tokenizer.json"],
            "path of this machine, or gs://BUCKET/NAME: mount the bucket",
        ),
        (["data.cache_dir=gs://a-bucket/cache"], "data.cache_dir = 'gs://a-bucket/cache' is a URL"),
        (["checkpoint.dir=s3://a-bucket/run"], "checkpoint.dir = 's3://a-bucket/run'"),
        (["model.init_from=s3://a-bucket/run"], "model.init_from = 's3://a-bucket/run'"),
    ],
)
def test_a_key_of_a_run_that_takes_no_url_says_so(given, words, corpus, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main([*TINY, *corpus, "run.dir=run", *given]) == WRONG
    assert words in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_a_key_of_a_command_that_takes_no_url_says_so(tmp_path, capsys):
    from launch.tokenize import main as tokenize

    for command, arguments, words in (
        (export, ["run.dir=run", "to=gs://a-bucket/files"], "to = 'gs://a-bucket/files' is a URL"),
        (export, ["from=gs://a-bucket/files"], "from = 'gs://a-bucket/files' is a URL"),
        (export, ["run.dir=s3://a-bucket/run", "to=files"], "run.dir = 's3://a-bucket/run'"),
        (tokenize, ["source=s3://a-bucket/a.txt", "to=x"], "source = 's3://a-bucket/a.txt' is a URL"),
        (tokenize, ["source=a.txt", "to=gs://a-bucket/x"], "to = 'gs://a-bucket/x' is a URL"),
    ):
        assert command(arguments) == WRONG
        assert words in capsys.readouterr().err


def test_a_path_is_no_url():
    for path in ("a:b", "C:/x", "/a//b", "hf:name", "outputs/run"):
        check_folder("run.dir", path)
    check_folder("data.cache_dir", None)


def test_a_folder_without_checkpoints_is_no_run(tmp_path):
    with pytest.raises(WeightsError, match=r"holds no checkpoint; give the run\.dir of a run that has one"):
        Run(tmp_path)


def hosts_with_folders_of_their_own(tmp_path, name, arguments):
    """Returns (exit codes, logs) of two hosts; `~` is another folder on each, as on machines that share nothing."""
    homes = {i: tmp_path / f"host-{i}" for i in range(2)}
    environment = {i: {"HOME": str(home), "EJDIST_CACHE_DIR": str(home / "cache")} for i, home in homes.items()}
    for home in homes.values():
        home.mkdir(exist_ok=True)
    job = Job(2, tmp_path / name, 2).start([*arguments, 'run.dir="~/run"'], environment=environment)
    codes = job.wait(400, after_first=60)
    return codes, "\n".join(job.log(i).read_text() for i in range(2))


@pytest.mark.slow
def test_hosts_that_share_a_bucket_and_nothing_else(bucket, server, corpus, tmp_path):
    """Data, tokenizer, weights and checkpoints come from the bucket, and only host 0 writes to its run.dir. After host 0 has
    got another disk the run goes on, with the losses of one that was never stopped."""
    for path in write_folder(tmp_path / "model", "llama").iterdir():
        bucket.put(f"model/{path.name}", path.read_bytes(), None)
    texts = ["".join(LETTERS[(i * j * 7 + j) % 9] for j in range(5 + i % 30)) for i in range(60)]
    bucket.put("texts/a.jsonl", "\n".join(json.dumps({"text": text}) for text in texts).encode(), None)
    run = [
        *(
            "recipe=short_context",
            "model=hf:gs://a-bucket/model",
            "data=files",
            "data.source=gs://a-bucket/texts/*.jsonl",
        ),
        *(
            "data.sequence_length=32",
            "data.global_batch=4",
            "run.steps=6",
            "checkpoint.every=2",
            "mesh.dp=2",
            "mesh.fsdp=2",
        ),
        *("optimizer.warmup_steps=1", "optimizer.schedule=constant"),
    ]
    calm = [f"run.dir={tmp_path}/calm", f"checkpoint.dir={tmp_path}/kept", f"data.cache_dir={tmp_path}/cache"]
    assert main([*run, *calm]) == DONE
    assert export([f"run.dir={tmp_path}/kept", f"to={tmp_path}/files"]) == DONE
    assert (tmp_path / "files" / "tokenizer_config.json").read_bytes() == bucket.objects["model/tokenizer_config.json"][
        0
    ]
    shared = [*run, f"checkpoint.dir={URL}"]
    codes, said = hosts_with_folders_of_their_own(tmp_path, "first", [*shared, "run.stop_after=4"])
    assert codes == [DONE, DONE], said
    assert "parameters read from gs://a-bucket/model" in said
    assert {"metrics.jsonl", "hosts.json", "published"} <= {p.name for p in (tmp_path / "host-0" / "run").iterdir()}
    assert not (tmp_path / "host-1" / "run").exists()
    first = losses(tmp_path / "host-0" / "run")
    shutil.rmtree(tmp_path / "host-0")
    left = tmp_path / "host-1" / "run" / "recipe.json"  # of a run before, whose host 0 this machine was
    left.parent.mkdir()
    left.write_text('{"plugins": ["of.a.run.before"]}')
    codes, said = hosts_with_folders_of_their_own(tmp_path, "second", shared)
    assert codes == [DONE, DONE] and "resuming from step 4" in said, said
    np.testing.assert_allclose([*first, *losses(tmp_path / "host-0" / "run")], losses(tmp_path / "calm"), rtol=1e-4)
    # Without a place that both share, and with one that may not be written, before anything is compiled.
    codes, said = hosts_with_folders_of_their_own(tmp_path, "third", run)
    assert codes == [WRONG, WRONG] and "host 1 (" in said and "give checkpoint.dir a folder or bucket" in said, said
    assert "compiling the step" not in said
    server.forbidden = ("POST",)
    codes, said = hosts_with_folders_of_their_own(tmp_path, "fourth", [*run, "checkpoint.dir=gs://a-bucket/runs/two"])
    server.forbidden = ()
    assert codes == [WRONG, WRONG] and "cannot write to checkpoint.dir = gs://a-bucket/runs/two" in said, said
    assert "compiling the step" not in said
