"""How the processes of a run find each other: the `cluster` section of a recipe.

At the coordinator's address process 0 has a door (`ejdist.cluster.door`). The others say there who they are, and all join JAX's
own coordinator, at another port of that machine, once everybody has come.
"""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import time
from typing import Any, NamedTuple

# Seconds added to the user's timeout for JAX, so that our own message comes first.
_MARGIN = 60
_CLOSING = 2.0  # seconds that a port may stay taken after its door has closed
_BIND = "JAX_COORDINATOR_BIND_ADDRESS"


class _Place(NamedTuple):
    """The address of process 0, the number of processes, the number of this one, and its GPUs."""

    coordinator: str
    count: int
    index: int
    devices: list[int] | None


def join(cluster: Any, command: str = "launch.train", run: str = "") -> None:
    """Joins the cluster of a recipe; returns when all processes have connected.

    Args:
      command, run: what this process was started for, and its run.dir: the same in all processes of a start.

    Raises:
      ValueError: the section is incomplete, the environment describes no cluster, or this process is of another start than the
        one that has the address. HostLost: the others do not come within `cluster.timeout` seconds.
    """
    import jax

    from ejdist.cluster.ending import within
    from ejdist.cluster.line import TurnedAway
    from ejdist.cluster.presence import presence, whoami
    from ejdist.cluster.tls import context, of_jax
    from ejdist.cluster.verdict import FILE

    cluster.validate()
    if cluster.tls is not None:
        if cluster.kind == "local":
            raise ValueError(
                f"cluster.tls = {cluster.tls!r} is for several processes: add cluster=auto or manual, or leave it out"
            )
        context(cluster.tls, server=True)  # what is wrong with it is said before anybody is waited for
    if cluster.kind == "local":
        return
    with within(cluster.timeout, lambda: f"error: {_alone(cluster)}"):
        place = _place(cluster)
    me = presence().me = whoami(place.index, place.count, command, run)
    presence().tls = cluster.tls
    try:
        port = _open_door(cluster, place, me) if place.index == 0 else _knock(cluster, place, me)
    except TurnedAway:
        os.environ.pop(FILE, None)  # it may be that of the start which this process is not of
        raise
    host = place.coordinator.rpartition(":")[0]
    with within(cluster.timeout, lambda: f"error: {_alone(cluster)}"):
        jax.distributed.initialize(
            f"{host}:{port}",
            *place[1:],
            cluster_detection_method="deactivate",  # else JAX would take the choice of GPUs of a cluster around this process
            initialization_timeout=cluster.timeout + _MARGIN,
            heartbeat_timeout_seconds=cluster.heartbeat,
            coordinator_bind_address=f"[::]:{port}" if _BIND in os.environ else None,
            **of_jax(cluster.tls),
        )


def _place(cluster: Any) -> _Place:
    """Returns what the section says, with cluster=auto completed by what JAX detects. Raises ValueError."""
    arguments: Any = (cluster.coordinator, cluster.num_processes, cluster.process_id, cluster.local_device_ids)
    if cluster.kind == "manual":
        return _Place(*arguments)
    from jax._src.clusters import ClusterEnv

    address, count, index, devices = arguments
    address = address or os.environ.get("JAX_COORDINATOR_ADDRESS")
    if devices is None and (ids := os.environ.get("JAX_LOCAL_DEVICE_IDS")):
        devices = [int(i) for i in ids.split(",")]
    detected: Any = ClusterEnv.auto_detect_unset_distributed_params(
        address, count, index, devices, None, cluster.timeout
    )
    unknown = dict(zip(("coordinator_address", "num_processes", "process_id"), detected))
    if missing := [name for name, value in unknown.items() if value is None]:
        raise ValueError(
            f"cluster=auto finds no Cloud TPU, Slurm, Kubernetes or Open MPI around this process (no {missing[0]}); leave it "
            "out to train on this machine only, or use cluster=manual"
        )
    return _Place(*detected)


def _open_door(cluster: Any, place: _Place, me: Any) -> int:
    """Opens the door of process 0, waits for the others, and returns the port at which all may join JAX."""
    from ejdist.cluster.door import Door
    from ejdist.cluster.hosts import HostLost
    from ejdist.cluster.line import tell
    from ejdist.cluster.presence import presence
    from ejdist.cluster.tls import context

    behind = os.environ.get(_BIND)
    if behind and cluster.service_port is None:
        raise ValueError(
            f"{_BIND} = {behind}: a proxy forwards the port of cluster.coordinator, and must forward that of JAX's service "
            "too; give cluster.service_port=PORT, the same on both sides"
        )
    _allow_files(2 * place.count + 256)
    server = _server(place.coordinator, behind, me, cluster.timeout, cluster.tls)
    door = Door(me, server, presence(), tell, context(cluster.tls, server=True) if cluster.tls else None)
    try:
        hosts = door.wait(cluster.timeout)
    except TimeoutError as error:
        time.sleep(1.0)  # the others read it before the door closes
        raise HostLost(f"{error}: look at their logs, and start all processes again", known=False) from None
    port = _service_port(cluster.service_port)
    presence().hosts, presence().side = hosts, door
    door.admit(port)
    return port


def _server(coordinator: str, behind: str | None, me: Any, seconds: float, tls: str | None = None) -> socket.socket:
    """Returns the socket of the door. One start waits for another that is ending; raises ValueError if the port stays taken."""
    from ejdist.cluster.door import listening
    from ejdist.cluster.line import TurnedAway, occupant

    name, _, port = (behind or coordinator).rpartition(":")
    interface = name.strip("[]") if behind and name.strip("[]") not in ("::", "0.0.0.0") else ""
    began = time.monotonic()
    while True:
        try:
            return listening(interface, int(port))
        except OSError as error:
            why, ending = occupant(int(port), me, tls)
            # Where nobody answers, a door may just have closed.
            if time.monotonic() - began < (seconds if ending else 0 if why else _CLOSING):
                time.sleep(0.5)
                continue
            remedy = (
                "stop the process that uses it, from an earlier start or with the same cluster.process_id, or give all another "
                "port"
            )
            reason = os.strerror(error.errno) if error.errno else str(error)
            raise (TurnedAway if why else ValueError)(
                f"cluster.coordinator = {coordinator!r}: process 0 cannot listen on port {port} ({reason}); {why or remedy}"
            ) from error


def _service_port(port: int | None) -> int:
    """Returns a port for JAX's service. Raises ValueError if the one that was given is taken."""
    from ejdist.cluster.door import listening

    try:
        with listening("", port or 0) as tried:
            return tried.getsockname()[1]
    except OSError as error:
        raise ValueError(
            f"cluster.service_port = {port}: process 0 cannot listen on it ({error.strerror}); give another, or leave it out"
        ) from error


def _allow_files(count: int) -> None:
    """A connection to each process, here and in JAX's service, is an open file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < count:
        wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))


def _knock(cluster: Any, place: _Place, me: Any) -> int:
    """Says who this process is, waits to be let in, and returns the port at which it may join JAX."""
    from ejdist.cluster.ending import leave
    from ejdist.cluster.health import why_unreachable
    from ejdist.cluster.hosts import HostLost
    from ejdist.cluster.line import NobodyCame, knock, tell
    from ejdist.cluster.presence import Gone, presence
    from ejdist.cluster.verdict import NO_USE
    from launch.errors import HOST_LOST

    def end(gone: Gone) -> None:
        code = gone.code if gone.code in NO_USE else None
        more = "" if code else "; the same command, started on all hosts, resumes from the last checkpoint"
        leave(f"error: {gone.text}{more}", code or HOST_LOST)

    name = place.coordinator.rpartition(":")[0]
    try:
        line = knock(place.coordinator, me, cluster.timeout, f"host 0 ({name})", cluster.tls)
    except NobodyCame as error:
        within = f"within {cluster.timeout:g} s (cluster.timeout)"
        if why := str(error):
            raise HostLost(f"{why}: this is {me}; start all processes again", known=False) from None
        unreachable = (
            why_unreachable(place.coordinator, 0) or f"what listens at {place.coordinator} closes the connection"
        )
        raise HostLost(f"the coordinator did not answer {within}: {unreachable}", known=False) from None
    presence().side = line
    line.keep(presence(), tell, end)
    return line.port


def _alone(cluster: Any) -> str:
    """Returns the message for when JAX has not connected all processes, though all have come or the cluster knows them."""
    return (
        f"JAX did not connect the processes of the cluster within {cluster.timeout:g} s (cluster.timeout): process 0 must be "
        "reachable by the others at every port, or at cluster.service_port; check the logs"
    )
