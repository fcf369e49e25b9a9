"""Whether an error means that another host is gone, or that a device of this one has failed."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

import jax

from ejdist.cluster.ending import has_stepped
from ejdist.cluster.hosts import HostLost, Hosts
from ejdist.cluster.presence import presence

# Words in the errors of Gloo, NCCL and JAX's coordinator when the peer has exited.
_OF_ANOTHER = ("gloo", "nccl", "connection", "peer", "socket", "coordination service", "barrier")
_STATUS = re.compile(r"(UNKNOWN|UNAVAILABLE|INTERNAL|ABORTED|CANCELLED|DEADLINE_EXCEEDED): ")
# Of the runtime, when a program that has run before does not any more. Not RESOURCE_EXHAUSTED, which it would be again.
_OF_DEVICE = re.compile(r"(UNKNOWN|UNAVAILABLE|INTERNAL|ABORTED|DATA_LOSS): ")
_OF_PYTHON = re.compile(r"callback|Traceback|jaxlib\.mlir", re.IGNORECASE)
_LAST = 5.0  # seconds for a save that the other hosts may have finished their part of
_KNOWN = 3.0  # seconds after a failed collective in which the host that is gone is known


def lost(error: BaseException) -> HostLost | None:
    """Returns the HostLost that an error amounts to, None if it has another cause.

    Args:
      error: raised by JAX, or by a library as a consequence; a HostLost is returned as it is.
    """
    if isinstance(error, HostLost):
        return error
    text = next((str(e) for e in _causes(error) if _of_runtime(e)), None)
    # Only now `jax.process_count()`, which may initialise the devices.
    if text is None or jax.process_count() == 1:
        return None
    if not any(word in text.lower() for word in _OF_ANOTHER):
        return None
    presence().gone(_KNOWN)  # its connection ends with it, but is read by another thread
    with contextlib.suppress(Exception):  # the coordinator may be what is gone
        if failure := Hosts(1.0).failed():
            return HostLost(failure.text, failure.code)
    return HostLost(
        f"another host is gone, or its network is down ({(text.splitlines() or [''])[0][:300]}); check its log. The same "
        "command, started on all hosts, resumes from the last checkpoint",
        known=False,
    )


def failed_device(error: BaseException) -> HostLost | None:
    """Returns the HostLost that an error of the runtime in a step amounts to: this host's devices, or its driver, have failed.

    None before the first step, where the compiler raises such errors too, and for what a Python callback raised.
    """
    if not has_stepped():
        return None
    text = next((str(e) for e in _causes(error) if isinstance(e, jax.errors.JaxRuntimeError)), "")
    if not _OF_DEVICE.match(text) or _OF_PYTHON.search(text):
        return None
    return HostLost(
        f"a device of this host has failed, or its driver ({text.splitlines()[0][:300]}); the same command resumes from the "
        "last checkpoint. If the same host fails again, take it out of service"
    )


def patience(error: BaseException, hosts: Hosts) -> float:
    """Returns the seconds that an unfinished save may take once an error has ended the run: a save waits for every host."""
    if lost(error) is not None:
        return 0.0
    # The others have heard of an error that only this host has, and end.
    return hosts.limit if hosts.count == 1 or getattr(error, "on_all_hosts", False) else _LAST


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _of_runtime(error: BaseException) -> bool:
    # Reading an array whose computation failed raises a ValueError with the runtime's message.
    return isinstance(error, jax.errors.JaxRuntimeError) or (
        isinstance(error, ValueError) and _STATUS.match(str(error)) is not None
    )
