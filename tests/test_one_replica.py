"""One replica of the mesh reads, and the others get the same bits from its devices."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ejdist.mesh import make_mesh
from ejdist.training import one_replica as module
from ejdist.training.checkpoint import Checkpoints, CheckpointSection
from ejdist.training.one_replica import one_replica, read_once


def agree(read):
    return read()


def described(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


@pytest.fixture
def of_two(monkeypatch):
    """A mesh of two replicas, whose first is taken for that of another host."""
    mesh = make_mesh(dp=2, fsdp=2, sp=2)
    monkeypatch.setattr(module, "one_replica", lambda mesh: Mesh(mesh.devices[:1], mesh.axis_names))
    return mesh


def state_on(mesh):
    rng = np.random.default_rng(0)
    odd = np.array([-0.0, 0.0, np.nan, -np.nan, np.inf, 1e-45, 1.5, -2.5], np.float32)
    arrays = {
        "floats": (odd.reshape(4, 2), ("fsdp", "sp")),
        "payload": (rng.integers(0, 2**32, (8, 4), np.uint32).view(np.float32), (("fsdp", "sp"), None)),
        "bfloat16": (odd.astype(ml_dtypes.bfloat16), ("sp",)),
        "float8": (odd.astype(ml_dtypes.float8_e4m3fn), ()),
        "count": (np.int32(-7), ()),
        "bytes": (rng.integers(0, 256, 6, np.uint8), ("fsdp",)),
        "flags": (np.array([True, False]), ("sp",)),
    }
    put = {name: (x, NamedSharding(mesh, PartitionSpec(*axes))) for name, (x, axes) in arrays.items()}
    return {name: jax.device_put(jnp.asarray(x), placement) for name, (x, placement) in put.items()}


def test_a_checkpoint_is_read_by_one_replica_and_all_have_its_bits(of_two, tmp_path, monkeypatch):
    state, read = state_on(of_two), []
    checkpoints = Checkpoints(tmp_path, CheckpointSection())
    checkpoints.save(1, state, {})
    checkpoints.wait()
    arrays = checkpoints._read_arrays
    monkeypatch.setattr(checkpoints, "_read_arrays", lambda step, like: (read.append(like), arrays(step, like))[1])
    found, _ = checkpoints.restore(1, described(state))
    checkpoints.close()
    assert {x.sharding.num_devices for x in jax.tree.leaves(read)} == {4}, "the devices of one replica"
    for name, x in state.items():
        assert found[name].sharding == x.sharding and found[name].dtype == x.dtype, name
        for a, b in zip(found[name].addressable_shards, x.addressable_shards, strict=True):
            assert a.device == b.device and np.asarray(a.data).tobytes() == np.asarray(b.data).tobytes(), name


def test_only_whole_hosts_read_for_the_others():
    def mesh(owners, shape, names):
        devices = np.array([SimpleNamespace(process_index=i) for i in owners], object).reshape(shape)
        return SimpleNamespace(devices=devices, axis_names=names, shape=dict(zip(names, shape, strict=True)))

    made = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "Mesh", lambda devices, names: made.append(devices) or "a replica")
        assert one_replica(mesh([0, 0, 1, 1, 2, 2, 3, 3], (2, 4), ("dp", "fsdp"))) == "a replica"
        assert [d.process_index for d in made[0].flat] == [0, 0, 1, 1]
        assert one_replica(mesh([0, 0, 0, 0], (2, 2), ("dp", "fsdp"))) is None, "one host has both"
        assert one_replica(mesh([0, 0, 0, 1, 1, 1], (2, 3), ("dp", "fsdp"))) == "a replica"
        assert one_replica(mesh([0, 0, 1, 1], (1, 4), ("dp", "fsdp"))) is None
        assert one_replica(mesh([0, 0, 1, 0, 1, 1], (2, 3), ("dp", "fsdp"))) is None


@pytest.mark.parametrize("odd", ["a number", "over dp", "complex"])
def test_what_cannot_be_sent_is_read_by_all(of_two, odd):
    whole = NamedSharding(of_two, PartitionSpec())
    like = {"w": jax.ShapeDtypeStruct((4,), np.float32, sharding=whole)}
    like["odd"] = {
        "a number": np.zeros((), np.int64),
        "over dp": jax.ShapeDtypeStruct((4,), np.float32, sharding=NamedSharding(of_two, PartitionSpec("dp"))),
        "complex": jax.ShapeDtypeStruct((4,), np.complex64, sharding=whole),
    }[odd]
    assert read_once(like, lambda asked: asked, agree) is like


def test_a_host_that_cannot_read_ends_all_before_they_wait_for_its_devices(of_two, monkeypatch):
    monkeypatch.setattr(module, "spread", None)

    def fails(read):
        raise ValueError("host 3 cannot read it")

    with pytest.raises(ValueError, match="host 3"):
        read_once(described(state_on(of_two)), lambda like: like, fails)
