"""Checkpoints of any state: what is saved comes back bit for bit and as what it was, and what cannot be saved is named."""

import shutil

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from ejdist.cluster.hosts import HostLost
from ejdist.training import checkpoint
from ejdist.training.checkpoint import CheckpointError, Checkpoints, CheckpointSection, DamagedCheckpoint
from ejdist.training.integrity import digest

BESIDE = {"recipe": {"run.steps": 3}}


def described(leaf):
    is_array = isinstance(leaf, jax.Array)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding) if is_array else leaf


def restored(directory, state, like=None):
    checkpoints = Checkpoints(directory, CheckpointSection())
    checkpoints.save(1, state, BESIDE)
    checkpoints.wait()
    checkpoints.close()
    checkpoints = Checkpoints(directory, CheckpointSection())
    found, beside = checkpoints.restore(1, jax.tree.map(described, state) if like is None else like)
    checkpoints.close()
    assert beside == BESIDE, "metadata of the checkpoint itself must not be returned"
    return found


def test_a_checkpoint_that_a_run_removes_while_it_is_read_is_not_damaged_storage(tmp_path):
    checkpoints = Checkpoints(tmp_path, CheckpointSection())
    checkpoints.save(1, {"a": jnp.ones(3)}, BESIDE)
    checkpoints.wait()
    assert checkpoints.latest() == 1
    shutil.rmtree(checkpoints.directory / "1")
    with pytest.raises(DamagedCheckpoint, match=r"1 cannot be read \(it no longer exists: .* checkpoint.keep\)"):
        checkpoints.run_of(1)
    checkpoints.close()


def test_no_file_of_each_process_is_written_or_read_again(tmp_path):
    """Every process would read those of all processes. A checkpoint from before has them, and they are not looked at."""
    state = {"layers": {"w": jnp.arange(1 << 10, dtype=jnp.float32).reshape(2, -1)}, "key": jax.random.key(3), "n": 4}
    found = restored(tmp_path, state)
    assert (found["layers"]["w"] == state["layers"]["w"]).all() and found["n"] == 4 and found["key"] == state["key"]
    folder = tmp_path / "checkpoints" / "1" / "state"
    assert (folder / "_METADATA").is_file() and not (folder / "array_metadatas").exists()
    (folder / "array_metadatas").mkdir()
    (folder / "array_metadatas" / "process_0").write_text("not JSON")
    checkpoints = Checkpoints(tmp_path, CheckpointSection())
    found, _ = checkpoints.restore(1, jax.tree.map(described, state))
    assert int(found["layers"]["w"].sum()) == int(state["layers"]["w"].sum())
    checkpoints.close()


def test_a_host_whose_part_of_a_save_has_failed_does_not_wait_for_the_others(tmp_path, monkeypatch):
    """They wait for that part, at another barrier: its failure was heard of when the time of the save was over."""
    import orbax.checkpoint as ocp

    waits = []

    def barrier(*, key, timeout_ms):
        waits.append(key)
        if failed:
            raise TimeoutError(f"{key} timed out: the others never came")

    failed = []

    def full(self):
        failed.append(True)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ocp.multihost, "get_barrier_sync_fn", lambda **_: barrier)
    monkeypatch.setattr(ocp.CheckpointManager, "_wait_for_checkpointers", full)
    checkpoints = Checkpoints(tmp_path, CheckpointSection())
    checkpoints.save(1, {"a": jnp.ones(3)}, BESIDE)
    with pytest.raises(
        CheckpointError, match=r"could not be written .*No space left on device\); free space on that disk"
    ):
        checkpoints.wait()
    assert waits, "Orbax asks for none: the test shows nothing"


def test_a_second_checkpoint_of_a_step_that_is_damaged_is_set_aside_too(tmp_path):
    """A run went on before it, made the step again, and the disk damaged it again. Each is kept, and none is a checkpoint."""
    checkpoints = Checkpoints(tmp_path, CheckpointSection())
    for n in range(3):
        (checkpoints.directory / "8").mkdir(parents=True)
        (checkpoints.directory / "8" / "what").write_text(str(n))
        checkpoints.set_aside(8)
    kept = {p.name: (p / "what").read_text() for p in checkpoints.directory.iterdir()}
    assert kept == {"8.damaged": "0", "8.damaged-2": "1", "8.damaged-3": "2"} and not checkpoints.steps()
    checkpoints.close()


NUMBERS = {
    "int": 2**40 + 1,
    "negative_int": -7,
    "float": 0.1,
    "nan": float("nan"),
    "bool": True,
    "complex": 0.1 + 2j,
    "numpy_float32": np.float32(0.1),
    "numpy_float64": np.float64(0.1),
    "numpy_int64": np.int64(2**40 + 1),
    "numpy_uint64": np.uint64(2**63),
    "numpy_bool": np.bool_(True),
    "bfloat16": ml_dtypes.bfloat16(0.1),
}


def test_numbers_come_back_as_what_they_were(tmp_path):
    found = restored(tmp_path, {"array": jnp.arange(3.0), "numbers": NUMBERS})
    for name, number in NUMBERS.items():
        got = found["numbers"][name]
        assert type(got) is type(number), name
        assert np.asarray(got).tobytes() == np.asarray(number).tobytes(), name


def test_arrays_come_back_bit_for_bit(tmp_path):
    state = {
        "complex64": jnp.array([1 + 2j, -3j], jnp.complex64),
        "numpy_complex64": np.array([1 + 2j, -3j], np.complex64),
        "numpy_float64": np.array([[0.1, 0.2, 0.3]]),
        "numpy_int64": np.array([2**40, -1]),
        "float8": jnp.array([0.5, 3.0], jnp.float8_e4m3fn),
        "bool": jnp.array([True, False]),
        "no_dims": jnp.int32(3),
        "nothing": None,
    }
    found = restored(tmp_path, state)
    for name, leaf in state.items():
        assert type(found[name]) is type(leaf) and np.asarray(found[name]).tobytes() == np.asarray(leaf).tobytes(), name


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_typed_keys_come_back_where_they_lay(impl, tmp_path):
    mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spread = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d"))
    key = jax.random.key(3, impl=impl)
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    state = {"one": jax.device_put(key, whole), "many": jax.device_put(jax.random.split(key, 8), spread)}
    found = restored(tmp_path, state)
    for name, leaf in state.items():
        assert found[name].dtype == leaf.dtype and found[name].shape == leaf.shape
        np.testing.assert_array_equal(jax.random.key_data(found[name]), jax.random.key_data(leaf))
    assert found["many"].sharding.is_equivalent_to(spread, 1)
    np.testing.assert_array_equal(jax.random.normal(found["one"], 5), jax.random.normal(key, 5))


@pytest.mark.parametrize(
    ("saved", "wanted", "words"),
    [
        (jax.random.key, lambda seed: jax.random.key(seed, impl="rbg"), ["key<fry>", "key<rbg>"]),
        # Their data have the same dtype and shape.
        (
            lambda seed: jax.random.key(seed, impl="rbg"),
            lambda seed: jax.random.key(seed, impl="unsafe_rbg"),
            ["key<rbg>", "key<urbg>"],
        ),
        (jax.random.key, jax.random.PRNGKey, ["key<fry>[]", "uint32[2]"]),
        (jax.random.PRNGKey, jax.random.key, ["uint32[2]", "key<fry>[]"]),
        (float, int, ["float64[]", "int64[]"]),
        (np.float32, float, ["float32[]", "float64[]"]),
    ],
)
def test_another_kind_of_key_or_number_is_named(saved, wanted, words, tmp_path):
    with pytest.raises(CheckpointError) as caught:
        restored(tmp_path, {"model": {"x": saved(0)}}, {"model": {"x": described(wanted(0))}})
    assert all(w in str(caught.value) for w in ["model.x", *words]), caught.value
    assert "cannot be read" not in str(caught.value)


@pytest.mark.parametrize(
    ("leaf", "words"),
    [
        ("text", ["str"]),
        (object(), ["object"]),
        (len, ["builtin_function"]),
        (jax.ShapeDtypeStruct((2,), jnp.float32), ["ShapeDtypeStruct"]),
        (jax.eval_shape(lambda: jax.random.key(0)), ["ShapeDtypeStruct"]),
        (np.array(["a"], object), ["dtype object"]),
        (np.str_("a"), ["dtype <U1"]),
        (np.datetime64("2026-01-01"), ["datetime64"]),
        (np.ones(2, ">f4"), ["dtype >f4"]),
        (jnp.ones(3, jnp.int4), ["dtype int4"]),
        (jnp.zeros((0, 3)), ["no elements", "(0, 3)"]),
        (2**70, ["64 bits"]),
    ],
    ids=lambda x: type(x).__name__ if not isinstance(x, list) else "",
)
def test_what_cannot_be_saved_is_named_and_nothing_is_written(leaf, words, tmp_path):
    checkpoints = Checkpoints(tmp_path, CheckpointSection())
    with pytest.raises(ValueError, match=r"model\.x") as caught:
        checkpoints.save(1, {"model": {"x": leaf, "w": jnp.ones(2)}}, BESIDE)
    message = str(caught.value)
    assert all(w in message for w in words) and "out of the state" in message + "out of the state" * (
        "64 bits" in message
    )
    assert not list(tmp_path.iterdir())


def test_every_bit_of_a_64_bit_number_is_in_the_digest(tmp_path, monkeypatch):
    """JAX would round them to 32 bits."""
    read = Checkpoints._read

    def changed(self, *args):
        found = read(self, *args)
        return {"x": np.nextafter(found["x"], 1)} if found.keys() == {"x"} else found

    monkeypatch.setattr(Checkpoints, "_read", changed)
    with pytest.raises(CheckpointError, match="x is not what was saved"):
        restored(tmp_path, {"x": 0.1})


def test_a_read_waits_for_no_other_process(tmp_path, monkeypatch):
    """One that can read its part of what is damaged would wait for one that cannot, and has gone to say so."""
    from orbax.checkpoint._src.multihost import multihost

    saves = Checkpoints(tmp_path, CheckpointSection())
    saves.save(1, {"w": jnp.ones(3)}, {"kept": 1})
    saves.wait()
    monkeypatch.setattr(multihost, "sync_global_processes", lambda *args, **options: pytest.fail("it waits"))
    like = {"w": jax.ShapeDtypeStruct((3,), jnp.float32, sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0]))}
    found, beside = saves.restore(1, like)
    assert beside == {"kept": 1} == saves.run_of(1) and len(saves.digests_of(1)) == 1
    np.testing.assert_array_equal(found["w"], saves.restore_part(1, like)["w"])


def test_what_one_host_cannot_describe_none_restores(tmp_path, monkeypatch):
    saves = Checkpoints(tmp_path, CheckpointSection())
    saves.save(1, {"w": jnp.ones(3)}, {})
    saves.wait()
    said = []
    monkeypatch.setattr(saves, "_kinds", lambda step: {}[step])
    with pytest.raises(DamagedCheckpoint, match=r"cannot be read .*another host's reason"):
        saves.restore(1, {}, lambda moment, word: said.append((moment, word)) or "another host's reason")
    assert said == [("the reading of checkpoint 1", "state/_METADATA: KeyError: 1")]


def test_a_digest_is_what_checkpoints_on_disk_have():
    """Another hash would make every checkpoint that was ever written unreadable."""
    assert int(digest(jnp.arange(6.0).reshape(2, 3))) == 2967665986


def test_what_jax_is_asked_about_grows_though_steps_go_back(monkeypatch):
    """As after a rewind: JAX would agree on a step that has been made, and the run would not stop there."""
    from ejdist.training import stop

    asked = []
    monkeypatch.setattr(stop.jax, "process_count", lambda: 2)
    monkeypatch.setattr(
        stop.multihost_utils, "reached_preemption_sync_point", lambda n: asked.append(n) or len(asked) == 5
    )
    told = stop.Stop()
    assert [told.after(step) for step in (7, 8, 9, 7, 8)] == [False] * 4 + [True]
    assert asked == sorted(set(asked))


def test_no_save_tells_jax_where_the_run_is(tmp_path, monkeypatch):
    """JAX stops all hosts after the last step that any of them asked about; Orbax would ask about one that was long ago."""
    from jax.experimental import multihost_utils

    asked = []
    monkeypatch.setattr(multihost_utils, "reached_preemption_sync_point", lambda step: asked.append(step) or False)
    checkpoints = Checkpoints(tmp_path, CheckpointSection())
    for step in (1, 2, 3):
        checkpoints.save(step, {"x": jnp.ones(3)}, BESIDE)
    checkpoints.wait()
    checkpoints.close()
    assert checkpoints.steps() == [3, 2, 1] and asked == []


GLOO = "UNKNOWN: Gloo all-reduce failed: [pair.cc:538] Read error [127.0.0.1]:33690: Connection reset by peer"


def timed_out():
    """As Orbax raises it where a host does not come to the end of a save."""
    error = TimeoutError("Timed out while waiting for async_write_complete barrier.")
    error.__cause__ = jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: Barrier timed out. Id: async_write_complete")
    return error


LOST = [jax.errors.JaxRuntimeError(GLOO), ValueError(GLOO), timed_out()]
NOT_LOST = [ValueError("the other side of the connection is 3"), OSError("UNKNOWN: Gloo"), timed_out().__cause__]


def fails(monkeypatch, where, name, error, hosts=2):
    """Lets a function raise, in a run of several hosts: which this one becomes then, as its libraries ask for the others."""

    def failing(*args, **options):
        monkeypatch.setattr(jax, "process_count", lambda: hosts)
        raise error

    monkeypatch.setattr(where, name, failing)


@pytest.mark.parametrize("error", LOST, ids=lambda e: type(e).__name__)
def test_a_host_that_is_lost_while_arrays_are_saved_is_not_the_disk(error, tmp_path, monkeypatch):
    saves = Checkpoints(tmp_path, CheckpointSection())
    fails(monkeypatch, type(saves._manager()), "save", error)
    with pytest.raises(HostLost, match="another host is gone") as found:
        saves.save(1, {"w": jnp.ones(3)}, {})
    assert not found.value.known


@pytest.mark.parametrize("error", LOST, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("at", ["_read", "check_digests"])
def test_a_host_that_is_lost_while_arrays_are_read_has_damaged_nothing(at, error, tmp_path, monkeypatch):
    saves = Checkpoints(tmp_path, CheckpointSection())
    saves.save(1, {"w": jnp.ones(3)}, {})
    saves.wait()
    fails(monkeypatch, Checkpoints if at == "_read" else checkpoint, at, error)
    with pytest.raises(HostLost, match="another host is gone"):
        saves.restore(1, {"w": jax.ShapeDtypeStruct((3,), jnp.float32)})


@pytest.mark.parametrize(("error", "hosts"), [(e, 2) for e in NOT_LOST[:2]] + [(NOT_LOST[2], 1)], ids=str)
def test_what_is_the_disk_is_no_lost_host(error, hosts, tmp_path, monkeypatch):
    saves = Checkpoints(tmp_path, CheckpointSection())
    fails(monkeypatch, type(saves._manager()), "save", error, hosts)
    with pytest.raises(CheckpointError, match="check that the disk is mounted"):
        saves.save(1, {"w": jnp.ones(3)}, {})
