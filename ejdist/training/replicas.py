"""Compares replicas: the copies of parameters, moments and other state that several devices hold.

Replicas have the same bits after every step, except on a device that computes wrong or loses bits of its memory. Each device
hashes its arrays, in one program without collectives; the hosts compare the hashes through the store of JAX's coordinator.
Nothing waits: a host publishes its hashes a few steps later, when they have arrived, host 0 compares them a few steps after
that, and all hosts read the result at the same step.
"""

from __future__ import annotations

import collections
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejdist.cluster.hosts import Hosts, Round
from ejdist.layout import spec
from ejdist.mapped import map_shards
from ejdist.training.guards import LAG
from ejdist.training.integrity import digest
from ejdist.training.pytree_io import name_of


class ReplicasDiffer(RuntimeError):
    """A device's bits differ from its replicas'; the message names the array, the device and its host."""

    on_all_hosts = True  # all raise it, at the same step


@dataclass
class _Check:
    """A comparison in progress."""

    step: int
    hashes: jax.Array  # uint32[devices, arrays]
    age: int = 0  # calls of `look` since; step numbers repeat after a rewind
    round: Round | None = None
    compared: bool = False


class Replicas:
    """The comparisons of a run.

    Args:
      like: the state, as `jax.ShapeDtypeStruct` with shardings.
      every: steps between comparisons; 0: never.
    """

    def __init__(self, hosts: Hosts, like: Any, every: int) -> None:
        self.groups: dict[str, list[list[int]]] = {}
        self.every, self._hosts, self._agreed = 0, hosts, 0
        self._checks: collections.deque[_Check] = collections.deque()
        if not every:  # where each array is takes seconds of thousands of devices
            return
        leaves = [(name_of(path), x) for path, x in jax.tree_util.tree_leaves_with_path(like)]
        self.groups = {name: held for name, x in leaves if (held := _replicated(x))}
        self.every = every if self.groups else 0
        if self.every:
            mesh = leaves[0][1].sharding.mesh
            held = {name: x for name, x in leaves if name in self.groups}
            # Compile now, not at the first comparison.
            self._hash = _hasher(mesh, {name: x.sharding.spec for name, x in held.items()}).lower(held).compile()

    def look(self, step: int, state: Any, *, saves: bool) -> None:
        """Call it after every step, on all hosts, with its state. Before a save it waits for all comparisons in progress.

        Raises:
          ReplicasDiffer: on all hosts at the same step. HostLost: a host does not publish its hashes.
        """
        if not self.every:
            return
        if saves or step % self.every == 0:
            named = {name_of(path): x for path, x in jax.tree_util.tree_leaves_with_path(state)}
            hashes = self._hash({name: named[name] for name in self.groups})
            for shard in hashes.addressable_shards:
                shard.data.copy_to_host_async()
            self._checks.append(_Check(step, hashes))
        for check in list(self._checks):
            age = 3 * LAG if saves else check.age
            check.age += 1
            if age >= LAG and check.round is None:
                name = f"the comparison of replicas after step {check.step}"
                check.round = self._hosts.begin_round(name, _hashes_of(check))
            if age >= 2 * LAG and check.round is not None and not check.compared:
                check.round.reduce(self._comparison(check.step))
                check.round.delete_values()
                check.compared = True
            if age >= 3 * LAG and check.round is not None:
                self._checks.popleft()
                if text := check.round.result():
                    raise ReplicasDiffer(text)
                self._agreed = check.step

    def _comparison(self, step: int) -> Any:
        agreed = f"after step {self._agreed}" if self._agreed else "at the start"
        return lambda hashes: different(hashes, self.groups, step, agreed)


def different(reports: dict[int, Any], groups: dict[str, list[list[int]]], step: int, agreed: str) -> str | None:
    """Returns a message about replicas that differ, None if all agree.

    Args:
      reports: host -> [its name, device -> the hashes of all arrays, eight hexadecimal digits each].
      groups: array -> the groups of devices that hold the same shard of it.
      agreed: when they last agreed, for the message.
    """
    owner = {int(device): (host, name) for host, (name, held) in reports.items() for device in held}
    hashes = {int(device): text for _, held in reports.values() for device, text in held.items()}
    odd: dict[str, list[str]] = {}
    for n, (name, held) in enumerate(groups.items()):
        for group in held:
            sides = collections.defaultdict(list)
            for device in group:
                sides[hashes[device][8 * n : 8 * n + 8]].append(device)
            if len(sides) > 1:
                most = max(sides.values(), key=len)
                fewer = [side for side in sides.values() if side is not most]
                alone = len(most) > max(map(len, fewer))
                one = ", ".join(_named(device, owner) for side in fewer for device in side)
                other = ", ".join(_named(device, owner) for device in most[:4])
                unsure = f"not the same bits on {other} and on {one}, of which either may be wrong"
                odd.setdefault(f"other bits on {one} than on {other}" if alone else unsure, []).append(name)
    if not odd:
        return None
    sides, names = next(iter(odd.items()))
    more = "" if len(names) == 1 else f" and {len(names) - 1} more arrays"
    others = "" if len(odd) == 1 else f"; {len(odd) - 1} more sets of devices differ too"
    return (
        f"after step {step} {names[0]}{more} has {sides}{others}. They agreed {agreed}, and nothing was saved "
        "since: such a device computes wrong or loses bits. Take its host out of service, and start again: "
        "the run resumes from the last checkpoint"
    )


def _named(device: int, owner: dict[int, tuple[int, str]]) -> str:
    host, name = owner[device]
    return f"device {device} of host {host} ({name})"


def _hashes_of(check: _Check) -> dict[str, str]:
    """Returns device -> its hashes as text, for the devices of this host."""
    shards = check.hashes.addressable_shards
    return {str(s.device.id): "".join(f"{int(x):08x}" for x in np.asarray(s.data).ravel()) for s in shards}


def _replicated(x: Any) -> list[list[int]]:
    """Returns the groups of two or more devices that hold the same shard of an array."""
    groups = collections.defaultdict(list)
    for device, index in x.sharding.devices_indices_map(x.shape).items():
        groups[tuple(span.indices(size)[:2] for span, size in zip(index, x.shape, strict=True))].append(device.id)
    return [sorted(group) for group in groups.values() if len(group) > 1]


def _hasher(mesh: Any, specs: dict[str, Any]) -> Any:
    """Returns the jitted function: name -> array to uint32[devices, arrays], each device's own hashes."""

    def body(arrays: dict[str, jax.Array]) -> jax.Array:
        hashes = digest(arrays)
        return jnp.stack([hashes[name] for name in specs])[None]

    return jax.jit(map_shards(body, mesh, (specs,), spec(("B", "_"), {"B": tuple(mesh.axis_names)})))
