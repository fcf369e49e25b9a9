"""How a command ends: its exit codes, and which error becomes which."""

from __future__ import annotations

import sys

# Finished or told to stop (0), the compiler refuses (1), the user's recipe or files (2), a checkpoint (3), a loss that is no
# number (4), a device with other bits than its replicas (6), a host that is gone (69: start all again), a signal (75: try
# again). FAILED_DRILL is of a rehearsal.
DONE, NOT_COMPILED, WRONG, BAD_CHECKPOINT, DIVERGED, HOST_LOST, PREEMPTED = 0, 1, 2, 3, 4, 69, 75
FAILED_DRILL, REPLICAS = 5, 6
# Of a process that JAX has ended by SIGABRT, as a shell shows it: the coordinator is gone.
ABORTED = 134


def exit_code_of(error: Exception) -> int | None:
    """Returns the exit code for an error that a user can mend, None for any other: that one is a fault of the program."""
    # Imported when something went wrong: a command sets up its environment before JAX is imported.
    from ejdist.cluster.hosts import HostLost
    from ejdist.training.checkpoint import CheckpointError
    from ejdist.training.replicas import ReplicasDiffer
    from ejdist.training.stop import Diverged
    from kernels import Unsupported

    codes = {
        CheckpointError: BAD_CHECKPOINT,
        Diverged: DIVERGED,
        ReplicasDiffer: REPLICAS,
        HostLost: HOST_LOST,
        ValueError: WRONG,
        Unsupported: WRONG,
        OSError: WRONG,
    }
    return next((code for kind, code in codes.items() if isinstance(error, kind)), None)


def tell(error: Exception) -> int:
    """Returns the exit code for an error, after one line about it to stderr. Raises what no user can mend."""
    from ejdist.cluster.hosts import lost

    error = lost(error) or error
    code = exit_code_of(error)
    if code is None:
        raise error
    if isinstance(error, OSError):
        where = f" {error.filename}:" if error.filename else ""
        print(f"error:{where} {error.strerror or error}", file=sys.stderr)
    else:
        print(f"error: {error}", file=sys.stderr)
    return code
