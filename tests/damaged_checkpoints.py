"""Checkpoints of a small training state, with a file of them damaged at random: what a restore then makes of it."""

from __future__ import annotations

import os
import random
import shutil
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
import optax

from ejdist.training.checkpoint import Checkpoints, CheckpointSection, DamagedCheckpoint
from ejdist.training.pytree_io import name_of
from ejdist.training.step import TrainState

BESIDE = {"recipe": {"run.steps": 20, "model.num_layers": 2}, "data": {"step": 7, "corpus": "5c0ffee5", "seed": 0}}
RIGHT, REFUSED, NAMELESS, WRONG, RAISED = "restored right", "refused by name", "refused without", "OTHER BITS", "RAISED"


def small_state() -> TrainState:
    """Returns a training state with Adam's moments: sharded, replicated and scalar leaves, of about 60 KB."""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    split, whole = (jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes)) for axes in (("x",), ()))
    draw = np.random.default_rng(0)
    params = {
        "embedding": jax.device_put(draw.standard_normal((64, 32), np.float32), split),
        "layers": {"up": jax.device_put(draw.standard_normal((2, 32, 32), np.float32), split)},
        "norm": jax.device_put(draw.standard_normal(32, np.float32), whole),
    }
    moments = jax.tree.map(lambda x: x if x.ndim else jax.device_put(x, whole), optax.adam(1e-3).init(params))
    return TrainState(jax.device_put(np.int32(7), whole), params, moments, {})


def described(state):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


def save(folder: Path, state) -> None:
    """Writes the state as checkpoint 7 of the run in a folder."""
    checkpoints = Checkpoints(folder, CheckpointSection())
    checkpoints.save(7, state, BESIDE)
    checkpoints.wait()
    checkpoints.close()


@dataclass(frozen=True)
class Damage:
    """One thing done to one file of a checkpoint, and what a restore made of it."""

    file: str
    told: str
    outcome: str
    message: str


def damage(path: Path, chance: random.Random) -> str:
    """Truncates a file or flips one of its bits, and returns what was done in words."""
    size = path.stat().st_size
    at = chance.randrange(size)
    if chance.random() < 0.5:
        os.truncate(path, at)
        return f"cut to {at} of {size} bytes"
    data, bit = bytearray(path.read_bytes()), chance.randrange(8)
    data[at] ^= 1 << bit
    path.write_bytes(data)
    return f"bit {bit} of byte {at} of {size} flipped"


def tried(whole: Path, scratch: Path, state, chance: random.Random) -> Damage:
    """Returns what became of a copy of a run whose checkpoint was damaged in one random file."""
    shutil.rmtree(scratch, ignore_errors=True)
    shutil.copytree(whole, scratch)
    root = scratch / "checkpoints" / "7"
    # A file as often as any other, however small: most of the bytes are of one.
    path = chance.choice(sorted(p for p in root.rglob("*") if p.is_file() and p.stat().st_size))
    told, file = damage(path, chance), str(path.relative_to(root))
    checkpoints = Checkpoints(scratch, CheckpointSection())
    try:
        found, beside = checkpoints.restore(7, described(state))
    except DamagedCheckpoint as error:
        message = str(error)
        items = [name_of(p) for p, _ in jax.tree_util.tree_leaves_with_path(state)]
        named = file in message or any(item in message for item in items)
        return Damage(file, told, REFUSED if named else NAMELESS, message)
    except Exception as error:
        return Damage(file, told, RAISED, repr(error))
    finally:
        checkpoints.close()
    same = jax.tree.all(
        jax.tree.map(lambda a, b: np.asarray(a).tobytes() == np.asarray(b).tobytes(), tuple(found), tuple(state))
    )
    return Damage(file, told, RIGHT if same and beside == BESIDE else WRONG, "")
