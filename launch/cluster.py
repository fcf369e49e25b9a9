"""How the processes of a run find each other: the `cluster` section of a recipe."""

from __future__ import annotations

import errno
import os
import socket
from typing import Any

# What JAX is given more than the user's limit: at the limit a message of ours ends the process, and JAX has none.
_MARGIN = 60


def join(cluster: Any) -> None:
    """Joins the cluster of a recipe; returns when all its processes have come.

    Raises:
      ValueError: the section is incomplete, or the environment describes no cluster. A command ends with a message, and the
        exit code of a lost host, where the others do not come within `cluster.timeout` seconds.
    """
    import jax

    from ejdist.cluster.ending import within

    cluster.validate()
    limits = {
        "initialization_timeout": cluster.timeout + _MARGIN,
        "heartbeat_timeout_seconds": cluster.heartbeat,
    }
    given = (cluster.coordinator, cluster.num_processes, cluster.process_id)
    facts = (*given, cluster.local_device_ids)
    if cluster.kind == "manual":
        if cluster.process_id == 0:
            _check_port(cluster.coordinator)
        with within(cluster.timeout, lambda: _why_alone(*given, cluster.timeout)):
            # Else JAX would ask a cluster around it which of the GPUs are this process's.
            jax.distributed.initialize(*facts, cluster_detection_method="deactivate", **limits)
    elif cluster.kind == "auto":
        try:
            with within(cluster.timeout, lambda: _why_alone(*given, cluster.timeout)):
                jax.distributed.initialize(*facts, **limits)
        except ValueError as error:  # JAX asks for what no environment gave it
            raise ValueError(
                f"cluster=auto finds no Cloud TPU, Slurm, Kubernetes or Open MPI around this process ({error}); leave it out "
                "to train on this machine alone, or use cluster=manual"
            ) from error


def _check_port(coordinator: str) -> None:
    """Raises ValueError where process 0 cannot listen for the others: JAX does not always live to say so. Two of its
    coordinators could both listen, and each would wait for its own share of the processes."""
    if "JAX_COORDINATOR_BIND_ADDRESS" in os.environ:  # another port, which leads to this one
        return
    port, both = int(coordinator.rpartition(":")[2]), socket.has_dualstack_ipv6()
    with socket.socket(socket.AF_INET6 if both else socket.AF_INET) as tried:
        # Connections of an earlier start that are not forgotten yet are no obstacle.
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if both:
            tried.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        try:
            tried.bind(("", port))
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                return  # of how this was tried; JAX has its own way
            raise ValueError(
                f"cluster.coordinator = {coordinator!r}: process 0 cannot listen on port {port} ({error.strerror}); end the "
                "process that has it, of an earlier start or with the same cluster.process_id, or give all of them another port"
            ) from error


def _why_alone(coordinator: str | None, count: int | None, index: int | None, seconds: float) -> str:
    """Returns why not all processes came together, as far as this one can find out."""
    from ejdist.cluster.health import why_unreachable

    end = f"within {seconds:g} s (cluster.timeout)"
    if coordinator is None or index is None:
        return f"error: not all processes that the cluster describes came together {end}; look at their logs"
    if index != 0 and (why := why_unreachable(coordinator, 0)):
        return f"error: the coordinator did not answer {end}: {why}"
    others = "the others" if count is None else "the other one" if count == 2 else f"the other {count - 1}"
    return (
        f"error: not all of the {count} processes (cluster.num_processes) came to {coordinator} {end}: this is process "
        f"{index}; look at the logs of {others}, and start all of them"
    )
