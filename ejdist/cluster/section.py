"""The `cluster` section of a recipe: how the processes of a run find each other; `launch.cluster.join` uses it."""

from __future__ import annotations

from dataclasses import dataclass

from ejdist.cluster.hosts import MAX_SECONDS
from ejdist.cluster.tls import context
from ejdist.sections import operational

KINDS = ("local", "auto", "manual")


@dataclass
class ClusterSection:
    """How processes find each other. "local" is one process; "auto" lets JAX detect the values below that are not given from
    the cluster (Cloud TPU, Slurm, Kubernetes, Open MPI); "manual" uses only the given values."""

    # How the processes of a run find each other: local (one process), auto (the cluster says), manual (the keys below).
    kind: str = operational("local")
    coordinator: str | None = operational(None)  # HOST:PORT at which process 0 hears who the others are
    service_port: int | None = operational(
        None
    )  # where JAX's own coordinator listens on that machine; null: a free port
    num_processes: int | None = operational(None)  # processes of the run
    process_id: int | None = operational(None)  # which of them this is, from 0
    local_device_ids: list[int] | None = operational(None)  # the GPUs that a process uses; null: all
    # Folder with tls.crt, tls.key and ca.crt, the same on all hosts: only processes with such a certificate join the run.
    tls: str | None = operational(None)
    timeout: int = operational(300)  # seconds for all processes to connect
    heartbeat: int = operational(100)  # seconds of silence after which a process counts as lost and all exit

    def validate(self) -> None:
        """Raises ValueError naming the key and the remedy."""
        if not (0 < self.timeout <= MAX_SECONDS and 10 <= self.heartbeat <= MAX_SECONDS):
            raise ValueError(
                f"cluster.timeout = {self.timeout} must be positive, and cluster.heartbeat = {self.heartbeat} at least "
                f"10 s; both at most {MAX_SECONDS:,} s"
            )
        if self.coordinator is not None:
            check_address("cluster.coordinator", self.coordinator)
        if self.service_port is not None and not 0 < self.service_port < 2**16:
            raise ValueError(f"cluster.service_port = {self.service_port} must be from 1 to {2**16 - 1}, or null")
        if self.service_port is not None and (self.coordinator or "").rpartition(":")[2] == str(self.service_port):
            raise ValueError(
                f"cluster.service_port = {self.service_port} is the port of cluster.coordinator, where process 0 hears the "
                "others: give another one"
            )
        if self.kind not in KINDS:
            raise ValueError(f"cluster.kind = {self.kind!r} is unknown; use local, auto or manual")
        several = ("coordinator", "service_port", "num_processes", "process_id", "local_device_ids", "tls")
        multihost = [name for name in several if getattr(self, name) is not None]
        if self.kind == "local" and multihost:
            raise ValueError(
                f"cluster.{multihost[0]} = {getattr(self, multihost[0])!r} is for several processes: add "
                "cluster=manual, or leave it out"
            )
        if self.tls is not None:
            context(self.tls, server=True)
        if self.kind == "manual":
            if self.coordinator is None or self.num_processes is None or self.process_id is None:
                raise ValueError(
                    "cluster=manual needs cluster.coordinator, cluster.num_processes and cluster.process_id"
                )
            if not 0 <= self.process_id < self.num_processes:
                raise ValueError(
                    f"cluster.process_id = {self.process_id} must be from 0 to cluster.num_processes - 1, of "
                    f"cluster.num_processes = {self.num_processes}"
                )


def check_address(key: str, coordinator: str) -> None:
    """Raises ValueError, naming the key, unless the address of process 0 is HOST:PORT."""
    host, colon, port = coordinator.rpartition(":")
    if not (host and colon and port.isascii() and port.isdigit() and 0 < int(port) < 2**16):
        raise ValueError(f"{key} = {coordinator!r} must be HOST:PORT, the address of process 0")
