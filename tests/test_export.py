"""What `launch.export` writes: by layers, in bounded memory, checked against the checkpoint, and complete or not at all."""

import contextlib
import errno
import json
import shutil
import subprocess
import sys
from pathlib import Path

import export_memory
import isolation
import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts
from safetensors import safe_open
from safetensors.numpy import load_file

from ejdist.training import checkpoint, checkpoint_rows, integrity
from ejdist.training.checkpoint import CheckpointError, Checkpoints, CheckpointSection
from ejdist.training.checkpoint_rows import StoredArray, is_stack, layer_by_layer
from ejdist.training.runs import Run
from ejdist.weights import writer
from ejdist.weights.files import Files, WeightsError, read_header
from ejdist.weights.tensors import declared_leaves
from ejdist.weights.writer import save
from launch.errors import BAD_CHECKPOINT, DONE
from launch.export import main


def opened(folder):
    run = Run(folder)
    leaves = declared_leaves(run.model)
    return run, run.open({name: jax.ShapeDtypeStruct(p.shape, p.dtype) for name, p in leaves.items()})


def state_in(folder):
    return {k: v for file in sorted(folder.glob("*.safetensors")) for k, v in load_file(file).items()}


@pytest.fixture
def small(tmp_path):
    """A run of three layers whose matrices are stored by layers, and its parameters."""
    c = export_memory.model(3)
    return tmp_path / "run", export_memory.write(tmp_path / "run", c), c


@pytest.mark.slow  # exports of two sizes in processes of their own, 12 s
def test_the_memory_of_an_export_is_that_of_a_layer(tmp_path):
    """A stack is 100 MiB here, of 1 MiB a layer, and there are three of them."""
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("the peak of resident memory is read from Linux's /proc")
    environment = {"PATH": "/usr/bin:/bin"} | isolation.watched()
    # The run is written by a process of its own too: its arrays would stay with this one.
    command = [sys.executable, export_memory.__file__, str(tmp_path), "100"]
    row = json.loads(subprocess.check_output(command, env=environment, text=True).splitlines()[-1])
    assert row["largest_stack_MiB"] == 100 and row["beyond_MiB"] < 48, row
    numbers = np.random.default_rng(0).standard_normal(65_521, np.float32)  # repeated, as `write` has them
    with safe_open(tmp_path / "to" / "model.safetensors", "numpy") as file:
        for i in range(100):
            weight = file.get_tensor(f"model.layers.{i}.mlp.gate_proj.weight").T
            at = (np.arange(weight.size) + i * weight.size) % numbers.size
            assert np.array_equal(weight, numbers[at].reshape(weight.shape))
    shutil.rmtree(tmp_path)


# -- what a checkpoint has, and nothing else ------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(5,), (3, 2, 5)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64", "complex64"])
def test_the_digest_of_rows_is_that_of_the_array(shape, dtype):
    x = np.random.default_rng(0).standard_normal((2, *shape)) * 100
    x = (x[0] + 1j * x[1] if dtype == "complex64" else x[0]).astype(jax.numpy.dtype(dtype))
    x[-1].fill(1)
    array = StoredArray("x", ts.array(x), integrity.digests_of({"x": x})["x"], contextlib.nullcontext)
    assert array.rows == len(x)
    array.rows = 1
    for i in range(len(x)):
        np.testing.assert_array_equal(array[i], x[i])  # and the last raises no error
        if i < len(x) - 1:
            with pytest.raises(integrity.Changed, match="x is not what was saved"):
                array.check()
    array.check()


def stored(folder, name):
    """Returns an array of a checkpoint, to be written to."""
    base = {"driver": "file", "path": f"{folder}/checkpoints/1/state/"}
    kvstore = {"driver": "ocdbt", "base": base, "path": f"{name}/"}
    return ts.open({"driver": "zarr", "kvstore": kvstore}, open=True).result()


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("params.layers.gate", lambda x: x[::-1]),
        ("params.layers.attention_norm", lambda x: x[[0, 2, 1]]),
        ("params.layers.up", lambda x: np.concatenate([x[:-1], x[-1:] + 1])),
        ("params.embedding", lambda x: x * 2),
    ],
    ids=["layers swapped", "rows of a small stack", "the last layer", "no stack"],
)
def test_what_is_read_by_layers_is_checked(name, damage, small, tmp_path, capsys):
    run, leaves, _ = small
    store = stored(run, name)
    store.write(damage(leaves[name])).result()
    assert main([f"run.dir={run}", f"to={tmp_path}/to"]) == BAD_CHECKPOINT
    message = capsys.readouterr().err
    assert f"{name} is not what was saved" in message and message.count("\n") == 1, message
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


def test_a_layer_that_is_gone_is_not_zeros(small, tmp_path, capsys):
    run, _, _ = small
    base = {"driver": "file", "path": f"{run}/checkpoints/1/state/"}
    store = ts.KvStore.open({"driver": "ocdbt", "base": base}).result()
    (key,) = [k for k in store.list().result() if k.startswith(b"params.layers.gate/2.")]
    store.delete_range(ts.KvStore.KeyRange(key, key + b"\0")).result()
    assert main([f"run.dir={run}", f"to={tmp_path}/to"]) == BAD_CHECKPOINT
    message = capsys.readouterr().err
    assert "cannot be read" in message and "params.layers.gate" in message and message.count("\n") == 1, message
    assert "is not what was saved" not in message, "it was read"
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("dims", [(None, "data"), (None, None, "data"), ()], ids=["rows", "columns", "replicated"])
def test_a_stack_is_stored_by_layers_on_every_mesh(dims, tmp_path):
    mesh = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4])
    x = np.resize(np.random.default_rng(0).standard_normal(65_521, np.float32), (3, 1024, 2048))
    sharded = jax.device_put(x, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*dims)))
    saves = Checkpoints(tmp_path / "run", CheckpointSection())
    saves.save(1, {"params": {"layers": {"x": sharded}}}, {})
    saves.wait()
    array = saves.open_part(1, {"params.layers.x": jax.ShapeDtypeStruct(x.shape, x.dtype)})["params.layers.x"]
    assert array.rows == 1 and all(np.array_equal(array[i], x[i]) for i in (2, 0, 1))
    array.check()
    with pytest.raises(
        CheckpointError, match=r"params\.layers\.x is float32\[3, 1024, 2048\] there and float32\[3, 1024\] here"
    ):
        saves.open_part(1, {"params.layers.x": jax.ShapeDtypeStruct((3, 1024), x.dtype)})
    saves.close()


def test_a_checkpoint_with_all_layers_in_a_chunk_is_written_parameter_by_parameter(tmp_path, monkeypatch, capsys):
    """So that one stack is in memory at a time, where earlier versions wrote it."""
    c = export_memory.model(3)
    export_memory.write(tmp_path / "rows", c)
    monkeypatch.setattr(checkpoint, "save_args", lambda arrays: jax.tree.map(lambda x: ocp.SaveArgs(), arrays))
    export_memory.write(tmp_path / "whole", c)
    read = []
    add = StoredArray._add
    monkeypatch.setattr(
        StoredArray, "_add", lambda self, *block: (read.append((self.name, block[0])), add(self, *block))
    )
    for name in ("rows", "whole"):
        run, arrays = opened(tmp_path / name)
        rows = {array.rows for array in arrays.values() if is_stack(array.name) and array.nbytes >= 3 << 20}
        assert rows == {1 if name == "rows" else 3} and layer_by_layer(arrays)  # they are small
        run.close()
        monkeypatch.setattr(checkpoint_rows, "_MOST", 0)
        assert layer_by_layer(arrays) == (name == "rows")
        read.clear()
        assert main([f"run.dir={tmp_path / name}", f"to={tmp_path / name}_to"]) == DONE
        assert len(set(read)) == len(read), "a chunk is decoded once"
        monkeypatch.undo()
        monkeypatch.setattr(
            StoredArray, "_add", lambda self, *block: (read.append((self.name, block[0])), add(self, *block))
        )
    names = [list(read_header(tmp_path / f"{n}_to" / "model.safetensors")) for n in ("rows", "whole")]
    assert set(names[0]) == set(names[1]) and names[0] != names[1]
    gates = [i for i, n in enumerate(names[1]) if "gate_proj" in n]
    assert gates == list(range(gates[0], gates[0] + 3)), "all layers of a parameter follow each other"
    one, other = state_in(tmp_path / "rows_to"), state_in(tmp_path / "whole_to")
    assert all(np.array_equal(one[k], other[k]) for k in one)


# -- complete, or not there -----------------------------------------------------------------------------------------------


def test_files_are_appended_to_so_that_one_that_was_interrupted_is_short(tmp_path):
    kinds = {n: (np.dtype(np.float32), (4, 2)) for n in ("a", "b", "c")}
    files = Files(tmp_path, kinds, 64)
    with pytest.raises(ValueError, match="tensor b is not the next to write, a"):
        files.write("b", np.ones((4, 2), np.float32))
    files.write("a", np.ones((4, 2), np.float32))
    files.close()
    assert [p.name for p in tmp_path.iterdir()] == ["model-00001-of-00002.safetensors"]
    with pytest.raises(WeightsError, match="is truncated: tensor b"):
        read_header(tmp_path / "model-00001-of-00002.safetensors")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.EDQUOT, "Disk quota exceeded"), MemoryError()])
def test_an_export_that_fails_half_way_leaves_nothing(error, tmp_path):
    c = export_memory.model(2)
    leaves = {n: np.zeros(p.shape, np.float32) for n, p in declared_leaves(c).items()}

    class Fails:
        def __getitem__(self, row):
            assert list((tmp_path / "to.partial").iterdir()) == [tmp_path / "to.partial" / "model.safetensors"]
            raise error

    with pytest.raises(WeightsError if isinstance(error, OSError) else type(error)):
        save(tmp_path / "to", c, lambda name: Fails() if name.endswith("down") else leaves[name])
    assert not list(tmp_path.iterdir())


def test_a_disk_without_room_is_refused_before_anything_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(writer.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(2000, 1000, 1000))
    with pytest.raises(WeightsError) as caught:
        save(tmp_path / "to", export_memory.model(2), lambda name: pytest.fail("read"))
    assert "takes 7,345,152 bytes" in str(caught.value) and "its disk has 1,000 left: free some" in str(caught.value)
    assert not list(tmp_path.iterdir())
