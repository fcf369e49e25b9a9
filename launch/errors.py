"""How a command starts and ends: --help, Ctrl-C, exit codes, and the exit code of each error."""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import itertools
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import NoReturn

# Finished or told to stop (0), the compiler fails (1), the user's recipe or files (2), a checkpoint (3), a diverged loss (4), a
# device whose bits differ from its replicas' (6), a lost host or a bucket that does not answer (69: start all again), a signal
# (75: try again). A rehearsal returns FAILED_DRILL.
DONE, NOT_COMPILED, WRONG, BAD_CHECKPOINT, DIVERGED, HOST_LOST, PREEMPTED = 0, 1, 2, 3, 4, 69, 75
FAILED_DRILL, REPLICAS = 5, 6
# For Ctrl-C, where the same command does not resume.
INTERRUPTED = 130
# When the reader of the output is gone: the code that a shell gives SIGPIPE.
PIPE_CLOSED = 141
# When JAX aborts because the coordinator is gone: the code that a shell gives SIGABRT.
ABORTED = 134
# A bug: the code that Python itself ends with after a traceback.
BUG = 1


class AtOnce(int):
    """An exit code of a process that must exit without waiting for anything, such as an interrupted save."""


class NotCompiled(RuntimeError):
    """The compiler failed; the message is its own."""


def exit_code_of(error: Exception) -> int | None:
    """Returns the exit code for an error that a user can fix, None for a bug."""
    # Imported late: a command sets up its environment before JAX is imported.
    from ejdist.buckets import is_unreachable
    from ejdist.cluster.hosts import HostLost
    from ejdist.training.checkpoint_format import CheckpointError
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
    if isinstance(error, HostLost) and error.code:  # 0 would be no failure
        return error.code
    if is_unreachable(error):
        return HOST_LOST
    return next((code for kind, code in codes.items() if isinstance(error, kind)), None)


def _not_installed(error: Exception) -> str | None:
    """Returns what to install if the error is a missing third-party package, else None."""
    name = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if not name or name in ("kernels", "ejdist", "recipes", "launch") or importlib.util.find_spec(name) is not None:
        return None
    return f"the package {name} is not installed; the commands need pip install 'ejdist[train]'"


def _read(error: Exception) -> tuple[int | None, str]:
    """Returns the exit code of an error, and the sentence about it; (None, "") for a bug."""
    if (missing := _not_installed(error)) is not None:
        return WRONG, missing
    if (
        isinstance(error, ImportError) and error.name == "kernels"
    ):  # not ours, without which the rest cannot be imported
        return WRONG, str(error)
    from ejdist.cluster.lost import failed_device, lost

    error = lost(error) or failed_device(error) or error
    code = exit_code_of(error)
    if code is None:
        return None, ""
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        return code, f"{where}{error.strerror or error}"
    if isinstance(error, MemoryError):
        what = f" ({error})" if str(error) else ""
        return code, f"this host is out of memory{what}: use a smaller batch, or shorter rows"
    return code, str(error)


def panicked(error: BaseException) -> bool:
    """Returns whether a library in Rust, such as that of tokenizers, has panicked: no Exception, which others would tell."""
    return type(error).__name__ == "PanicException"


def panic(error: BaseException) -> Exception:
    """Returns what a panic amounts to: a wrong file, which a new start would read again."""
    return ValueError(
        f"a library cannot use a file that it was given, most likely the tokenizer.json (data.tokenizer): {error}"
    )


_told: tuple[Exception, int] | None = None  # the error that `state` has printed, and its exit code


def state(error: Exception) -> int:
    """Prints an error, with its traceback if it is a bug, and states it as the reason of this process' end. Returns the exit
    code."""
    global _told
    if _told is None or _told[0] is not error:
        code, text = _read(error)
        if code is None:
            traceback.print_exception(error)
            code, text = BUG, f"a bug, whose traceback is in the log: {traceback.format_exception_only(error)[-1]}"
        else:
            print(f"error: {text}", file=sys.stderr)
        _told = error, code
        _give(code, text)
    return _told[1]


def tell(error: Exception) -> int:
    """Prints one line about an error to stderr, unless `state` has, and returns its exit code. Raises the error if it is a
    bug."""
    stated = _told is not None and _told[0] is error
    code, text = (_told[1], "") if stated and _told is not None else _read(error)
    if code is None or (stated and code == BUG):
        raise error
    if not stated:
        print(f"error: {text}", file=sys.stderr)
        _give(code, text)
    return code


def _give(code: int, text: str) -> None:
    with contextlib.suppress(ImportError):  # what the commands need is not installed, which is the error to report
        from ejdist.cluster.verdict import give

        give(code, text)


def leaver() -> Callable[[int], NoReturn]:
    """Returns a function that exits this process with a code. Call it first: what is registered for the exit later still runs.

    If Triton's compiler was used, the process ends before the interpreter is taken apart: the bindings of triton 3.9 lose
    references to parts of a Gluon kernel, and nanobind would print dozens of lines about them, which no option turns off.
    """
    codes: list[int] = []

    def last() -> None:
        if codes and "triton._C.libtriton" in sys.modules:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError, ValueError):  # closed, or nobody reads it
                    stream.flush()
            os._exit(codes[0])

    atexit.register(last)  # functions run in the reverse order

    def leave(code: int) -> NoReturn:
        codes.append(code)
        sys.exit(code)

    return leave


def _help(arguments: list[str], usage: str, recipe: bool) -> str:
    """Returns the text of --help, or, where keys follow it, what these mean."""
    position = next((i for i, word in enumerate(arguments) if word in ("-h", "--help")), len(arguments))
    words = list(itertools.takewhile(lambda word: not word.startswith("-"), arguments[position + 1 :]))
    if not words:
        return usage
    from recipes.arguments import read
    from recipes.descriptions import text

    rest = arguments[:position] + arguments[position + 1 + len(words) :]
    return text(usage, words, read(rest, every=True).words() if recipe else [], recipe=recipe)


def run_command(
    argv: Sequence[str] | None,
    body: Callable[[list[str]], int],
    usage: Callable[[list[str]], str],
    *,
    needs_arguments: bool = True,
    recipe: bool = True,
    stopped: tuple[str, int] = ("stopped by SIGINT", INTERRUPTED),
) -> int:
    """Runs a command and returns its exit code: the frame of every `main`.

    Args:
      argv: the arguments after the command's name; None for those of this process.
      body: takes the arguments and returns the exit code. Its errors are printed in one line if a user can fix them.
      usage: returns the text of --help, given the arguments.
      needs_arguments: without arguments, print the usage and return WRONG.
      recipe: the command takes keys of a recipe, about which `--help KEY` tells too.
      stopped: the message and exit code after Ctrl-C.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the parent process
            setattr(sys, name, open(os.devnull, "w"))
    asked = any(a in ("-h", "--help") for a in arguments)
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # blocked until here
        if asked or (needs_arguments and not arguments):
            print(_help(arguments, usage(arguments), recipe), flush=True)
            return DONE if asked else WRONG
        code = body(arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader, such as `head`, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # discard the rest
        return PIPE_CLOSED
    except Exception as error:
        return tell(error)
    except KeyboardInterrupt:
        print(stopped[0], file=sys.stderr)
        return AtOnce(stopped[1])
    except BaseException as error:
        if not panicked(error):
            raise
        return tell(panic(error))
