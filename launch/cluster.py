"""How the processes of a run find each other: the `cluster` section of a recipe."""

from __future__ import annotations

import errno
import os
import socket
from typing import Any

# Seconds added to the user's timeout for JAX, so that our own message comes first.
_MARGIN = 60


def join(cluster: Any) -> None:
    """Joins the cluster of a recipe; returns when all processes have connected.

    Raises:
      ValueError: the section is incomplete, or the environment describes no cluster. A command exits with a message and the
        code of a lost host if the others do not connect within `cluster.timeout` seconds.
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
            # Otherwise JAX would detect a surrounding cluster and take its choice of GPUs.
            jax.distributed.initialize(*facts, cluster_detection_method="deactivate", **limits)
    elif cluster.kind == "auto":
        try:
            with within(cluster.timeout, lambda: _why_alone(*given, cluster.timeout)):
                jax.distributed.initialize(*facts, **limits)
        except ValueError as error:  # JAX asks for values that no environment provided
            raise ValueError(
                f"cluster=auto finds no Cloud TPU, Slurm, Kubernetes or Open MPI around this process ({error}); leave it out "
                "to train on this machine only, or use cluster=manual"
            ) from error


def _check_port(coordinator: str) -> None:
    """Raises ValueError if process 0 cannot listen on the port, which JAX does not always report. Two coordinators could
    otherwise both listen, and each wait for its share of the processes."""
    if "JAX_COORDINATOR_BIND_ADDRESS" in os.environ:  # a proxy forwards this port to another one
        return
    port, both = int(coordinator.rpartition(":")[2]), socket.has_dualstack_ipv6()
    with socket.socket(socket.AF_INET6 if both else socket.AF_INET) as tried:
        # Ignore lingering connections of an earlier start.
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if both:
            tried.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        try:
            tried.bind(("", port))
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                return  # specific to this probe; JAX may still succeed
            raise ValueError(
                f"cluster.coordinator = {coordinator!r}: process 0 cannot listen on port {port} ({error.strerror}); stop the "
                "process that uses it, from an earlier start or with the same cluster.process_id, or give all another port"
            ) from error


def _why_alone(coordinator: str | None, count: int | None, index: int | None, seconds: float) -> str:
    """Returns a message about why not all processes connected, as far as this one can tell."""
    from ejdist.cluster.health import why_unreachable

    end = f"within {seconds:g} s (cluster.timeout)"
    if coordinator is None or index is None:
        return f"error: not all processes of the cluster connected {end}; check their logs"
    if index != 0 and (why := why_unreachable(coordinator, 0)):
        return f"error: the coordinator did not answer {end}: {why}"
    others = "the others" if count is None else "the other one" if count == 2 else f"the other {count - 1}"
    return (
        f"error: not all of the {count} processes (cluster.num_processes) connected to {coordinator} {end}: this is process "
        f"{index}; check the logs of {others}, and start all of them"
    )
