"""How a command begins and ends: what it does with --help and with Ctrl-C, its exit codes, and which error becomes which."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence

# Finished or told to stop (0), the compiler refuses (1), the user's recipe or files (2), a checkpoint (3), a loss that is no
# number (4), a device with other bits than its replicas (6), a host that is gone (69: start all again), a signal (75: try
# again). FAILED_DRILL is of a rehearsal.
DONE, NOT_COMPILED, WRONG, BAD_CHECKPOINT, DIVERGED, HOST_LOST, PREEMPTED = 0, 1, 2, 3, 4, 69, 75
FAILED_DRILL, REPLICAS = 5, 6
# Of Ctrl-C, as of any program, where the same command does not go on from where it was.
INTERRUPTED = 130
# Of a process whose output nobody reads any more, as a shell shows SIGPIPE.
PIPE_CLOSED = 141
# Of a process that JAX has ended by SIGABRT, as a shell shows it: the coordinator is gone.
ABORTED = 134
# After these the same command goes on, so a cluster starts it again.
AGAIN = (PREEMPTED, HOST_LOST, ABORTED)


class AtOnce(int):
    """An exit code of a process that is to wait for nothing that it has begun: a save may have been cut off."""


class NotCompiled(RuntimeError):
    """The compiler refuses a program; the message is its own."""


def exit_code_of(error: Exception) -> int | None:
    """Returns the exit code for an error that a user can mend, None for any other: that one is a fault of the program."""
    # Imported when something went wrong: a command sets up its environment before JAX is imported.
    from ejdist.cluster.hosts import HostLost
    from ejdist.training.checkpoint import CheckpointError
    from ejdist.training.replicas import ReplicasDiffer
    from ejdist.training.stop import Diverged
    from kernels import Unsupported

    codes = {
        NotCompiled: NOT_COMPILED,
        CheckpointError: BAD_CHECKPOINT,
        Diverged: DIVERGED,
        ReplicasDiffer: REPLICAS,
        HostLost: HOST_LOST,
        ValueError: WRONG,
        Unsupported: WRONG,
        OSError: WRONG,
        MemoryError: WRONG,
    }
    if isinstance(error, HostLost) and error.code is not None:
        return error.code
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
    elif isinstance(error, MemoryError):
        what = f" ({error})" if str(error) else ""
        print(f"error: this host has not the memory{what}: use a smaller batch, or shorter rows", file=sys.stderr)
    else:
        print(f"error: {error}", file=sys.stderr)
    return code


def run_command(
    argv: Sequence[str] | None,
    body: Callable[[list[str]], int],
    usage: Callable[[list[str]], str],
    *,
    needs_arguments: bool = True,
    stopped: tuple[str, int] = ("stopped by SIGINT", INTERRUPTED),
) -> int:
    """Returns the exit code of a command, after what it has to say: the frame of every `main`.

    Args:
      argv: what stands after the command's name; None for that of this process.
      body: takes it and returns the exit code. What it raises is told in one line, as far as a user can mend it.
      usage: returns the text of --help, given the arguments.
      needs_arguments: with none, the command says how it is used and ends with WRONG.
      stopped: what is said after Ctrl-C, and the exit code then.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by whoever started this: nobody is to read it
            setattr(sys, name, open(os.devnull, "w"))
    asked = any(a in ("-h", "--help") for a in arguments)
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # which has waited for this
        if asked or (needs_arguments and not arguments):
            print(usage(arguments), flush=True)
            return DONE if asked else WRONG
        code = body(arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # whoever read what is said, as `head`, has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left to say goes nowhere
        return PIPE_CLOSED
    except Exception as error:
        return tell(error)
    except KeyboardInterrupt:
        print(stopped[0], file=sys.stderr)
        return AtOnce(stopped[1])
