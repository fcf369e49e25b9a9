"""Why a process ends, stated once: to the other hosts, and to the launcher, which decides by it whether to start the run again.

The launcher names a file in EJDIST_VERDICT, the same for all processes where they share a folder. One line is left in it: the
exit code, and the reason with its host. Exit codes alone do not tell: srun returns the highest one of all processes, and those
that lose a host end with higher ones than the one that had a reason.
"""

from __future__ import annotations

import contextlib
import os
import socket
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ejdist.cluster.presence import presence

FILE = "EJDIST_VERDICT"
# After these a new start would end as this one did, until somebody has mended what the message names: a bug (1, Python's own),
# the user's recipe, files or disk (2), a checkpoint (3), a diverged loss (4), a device with wrong bits (6), Ctrl-C (130), and a
# shell's for a program that is missing or not executable (126, 127).
NO_USE = frozenset({1, 2, 3, 4, 6, 126, 127, 130})
_LONGEST = 2000  # characters of a reason


class Verdict(NamedTuple):
    """What one process left: its exit code, and the reason with its host."""

    code: int
    reason: str


def again(code: int) -> bool:
    """Returns whether a launcher should start the run again after this exit code: any code that is neither 0 nor in `NO_USE`
    counts as a lost host."""
    return code != 0 and code not in NO_USE


def of_start(codes: Sequence[int | None], left: Verdict | None = None) -> int:
    """Returns the exit code of a start: the verdict, the first code of no use, or the first that is not 0.

    Args:
      codes: of its processes, in the order in which they ended, if known; a signal as -N; None: killed by the launcher.
      left: what they left in the launcher's file.
    """
    exit_codes = [137 if c is None else 128 - c if c < 0 else c for c in codes]
    failed = [c for c in exit_codes if c]
    if failed and left is not None and left.code:
        return left.code
    return next((c for c in failed if c in NO_USE), next(iter(failed), 0))


_given: Verdict | None = None


def given() -> Verdict | None:
    """Returns what this process has stated about its end; None before."""
    return _given


def give(code: int, reason: str) -> Verdict:
    """States that this process is about to end. Only the first call counts; returns what that one stated.

    Args:
      reason: one sentence; empty for an end that is no failure.
    """
    global _given
    if _given is not None:
        return _given
    reason = " ".join(reason.removeprefix("error: ").split())[:_LONGEST]
    _given = Verdict(code, reason)
    if code and (file := os.environ.get(FILE)):
        with contextlib.suppress(OSError):
            write(Path(file), Verdict(code, f"{_name()}: {reason or f'exit code {code}'}"))
    with contextlib.suppress(Exception):  # whoever ends has a reason of its own, which must not be lost over this
        if (side := presence().side) is not None:
            side.bye(code, reason)  # last, as it waits for the others
    return _given


def _name() -> str:
    me = presence().me
    return socket.gethostname() if me is None else str(me)


def write(file: Path, verdict: Verdict) -> None:
    """Writes a verdict. One in `NO_USE` is never replaced, and replaces one after which the run would be started again;
    otherwise the first one stays.

    Raises:
      OSError: it cannot be written.
    """
    text = f"{verdict.code} {verdict.reason}\n"
    before = read(file)
    if before is not None and (before.code in NO_USE or verdict.code not in NO_USE):
        return
    if (file.exists() and not file.is_file()) or str(file).startswith("/dev/"):
        file.write_text(text)  # as Kubernetes has it: a file that it reads, and that cannot be replaced
        return
    temporary = file.with_name(f"{file.name}.{uuid.uuid4().hex}")
    temporary.write_text(text)
    try:
        if before is None:
            with contextlib.suppress(FileExistsError):
                return os.link(temporary, file)
            return write(file, verdict)  # another one came first
        os.replace(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)


def read(file: Path) -> Verdict | None:
    """Returns the verdict in a file; None if the file is missing, or holds something else."""
    with contextlib.suppress(OSError, ValueError):
        code, _, reason = file.read_text().strip().partition(" ")
        return Verdict(int(code), reason)
    return None
