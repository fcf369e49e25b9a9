"""`python -m launch.disturbed SPEC [KEY=VALUE ...]`: `launch.train` as one host that does something to itself, for a drill.

What it does is real: it kills itself with SIGKILL, poisons its parameters, takes the room for files away. Nothing in the
training code knows of it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any


def _disturb(spec: dict[str, Any]) -> None:
    """Wraps the step of the training loop with the fault that this host injects into itself."""
    from ejdist.training import steps
    from ejdist.training.checkpoint import Checkpoints
    from ejdist.training.local_tier import LocalCheckpoints

    make, save, place = steps.run_steps, Checkpoints.save, steps.place_batch

    def with_steps(run: Any, train_step: Any, state: Any, writer: Any, start: int, *rest: Any):
        steps_run = start

        def step(state: Any, batch: Any) -> Any:
            nonlocal steps_run
            steps_run += 1
            return train_step(_at_step(spec, steps_run, state), batch)

        return make(run, step, state, writer, start, *rest)

    def with_place(*arguments: Any) -> Any:
        time.sleep(spec.get("seconds", 0))
        return place(*arguments)

    def with_save(self: Any, step: int, *rest: Any) -> None:
        if spec["do"] == "no_room" and step >= spec["step"]:
            _take_room()
        save(self, step, *rest)
        if spec["do"] == "kill_in_save" and step == spec["step"]:
            os.kill(os.getpid(), signal.SIGKILL)

    begin, disk = LocalCheckpoints.__init__, spec.get("disk")

    def with_disk(self: Any, folder: Any, *rest: Any) -> None:
        begin(self, disk or folder, *rest)

    functions = (steps, "run_steps", with_steps), (steps, "place_batch", with_place), (Checkpoints, "save", with_save)
    functions = *functions, (LocalCheckpoints, "__init__", with_disk)
    for owner, name, function in functions:
        setattr(owner, name, function)


def _at_step(spec: dict[str, Any], step: int, state: Any) -> Any:
    if spec["do"] == "signal" and step == spec["step"]:
        os.kill(os.getpid(), spec["number"])
    elif spec["do"] == "bug" and step == spec["step"]:
        raise AssertionError(f"a bug of the drill at step {step}")
    elif spec["do"] == "device" and step == spec["step"]:
        from jax.errors import JaxRuntimeError

        raise JaxRuntimeError("INTERNAL: CUDA_ERROR_ECC_UNCORRECTABLE: uncorrectable ECC error encountered (a drill)")
    elif spec["do"] == "hang" and step == spec["step"]:
        while True:
            time.sleep(3600)
    elif spec["do"] in _FACTORS and step == spec["step"]:
        import jax

        factor = _FACTORS[spec.pop("do")]  # once: the step may be made again
        spec["do"] = "nothing more"
        scale = jax.jit(lambda tree: jax.tree.map(lambda x: x * factor, tree), donate_argnums=0)
        return state._replace(params=scale(state.params))
    elif spec["do"] == "flip_replica" and step == spec["step"]:
        return _with_another_bit(state)
    return state


_FACTORS = {"nan": float("nan"), "scale": 30.0}


def _with_another_bit(state: Any) -> Any:
    """Returns the state with another bit in one replica, on a device of this host: of the largest array that several devices
    hold, which is a parameter where the mesh replicates any."""
    import jax
    import numpy as np

    leaves, tree = jax.tree.flatten(state)

    def held_twice(x: Any) -> bool:
        return len({str(index) for index in x.sharding.devices_indices_map(x.shape).values()}) < len(
            x.sharding.device_set
        )

    n = max((i for i, x in enumerate(leaves) if held_twice(x)), key=lambda i: leaves[i].size)
    parts = [np.array(shard.data) for shard in leaves[n].addressable_shards]
    parts[0].reshape(-1).view(np.uint8)[0] ^= 1
    placed = [jax.device_put(x, s.device) for x, s in zip(parts, leaves[n].addressable_shards, strict=True)]
    leaves[n] = jax.make_array_from_single_device_arrays(leaves[n].shape, leaves[n].sharding, placed)
    return jax.tree.unflatten(tree, leaves)


def _take_room() -> None:
    """From here on no file of this process can grow past 16 KB: what a full disk does to a save, without filling one. What is
    logged has room."""
    import resource

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # the write fails, as on a full disk, instead of ending the process
    resource.setrlimit(resource.RLIMIT_FSIZE, (16 * 1024, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def main() -> None:
    """Runs `launch.train` as a host that does to itself what its first argument says."""
    from launch import train

    spec = json.loads(sys.argv.pop(1))
    if folder := spec.get("folder"):
        os.chdir(folder)
    train.command(lambda: _disturb(spec) if "do" in spec else None)


if __name__ == "__main__":
    main()
