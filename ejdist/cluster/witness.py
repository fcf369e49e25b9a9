"""A process beside process 0 that outlives it: it says which hosts had ended when process 0 ends without a word.

A library may abort process 0 the moment another host is gone, before a thread of it can say which: Gloo calls std::terminate
when the collectives of the hosts that are left no longer match. JAX then ends the others, as its coordinator was in process 0,
so that nobody is left who knows. The witness shares process 0's connections to the others, reads none of them, and has the
kernel tell it which of them end, and when.

Run as a script, with nothing but the standard library, so that it is there at once and takes little memory.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping

_NAMED = 8  # hosts in the sentence


class Witness:
    """The witness, from process 0's side."""

    def __init__(self, me: str, others: Mapping[int, str]) -> None:
        """Starts the witness. If that fails, the run goes on without one.

        Args:
          me: names process 0. others: file descriptor of the connection to a process -> its name.
        """
        self._process: subprocess.Popen[bytes] | None = None
        if not hasattr(select, "POLLRDHUP"):  # of Linux
            return
        with contextlib.suppress(OSError):  # no more processes allowed, or it has ended at once
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__], stdin=subprocess.PIPE, pass_fds=[*others]
            )
            self._tell(json.dumps([me, {str(fd): name for fd, name in others.items()}]).encode() + b"\n")

    def dismiss(self) -> None:
        """Tells it that process 0 has said why it ends: it ends too, and says nothing."""
        self._tell(b".")

    def close(self) -> None:
        """Dismisses it, and waits for its end."""
        self.dismiss()
        if self._process is not None:
            self._process.communicate()

    def _tell(self, data: bytes) -> None:
        if self._process is None or self._process.stdin is None or self._process.stdin.closed:
            return
        with contextlib.suppress(OSError):  # it is gone
            self._process.stdin.write(data)
            self._process.stdin.flush()


def _watch(others: dict[int, str]) -> list[str] | None:
    """Returns who had ended when process 0 ended without a word, the first one first; None if it said why it ends."""
    events, ended = select.poll(), []
    events.register(0, select.POLLIN)
    for fd in others:
        events.register(fd, select.POLLRDHUP)  # the other side has closed, however much is unread
    while True:
        now = [fd for fd, _ in events.poll()]
        for fd in (fd for fd in now if fd != 0):
            events.unregister(fd)
            ended.append(others[fd])
        if 0 in now:
            return None if os.read(0, 1) else ended


def _sentence(me: str, ended: list[str]) -> str:
    if not ended:
        return f"{me} has ended without a word"
    more = f" and {len(ended) - _NAMED} more" if len(ended) > _NAMED else ""
    return (
        f"{me} has ended without a word. Before it these had, the first one first: {', '.join(ended[:_NAMED])}{more}; "
        "check their logs"
    )


def main() -> None:
    """Watches until process 0 ends. It sends, and is sent, over its standard input: a line of JSON, and at its end a byte."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # to all processes of a terminal or a job
        signal.signal(number, signal.SIG_IGN)
    with open(0, "rb", buffering=0, closefd=False) as process_0:  # not a byte past the line, which `_watch` waits for
        line = process_0.readline()
    if not line.endswith(b"\n"):
        return  # process 0 has ended before the run began
    me, others = json.loads(line)
    ended = _watch({int(fd): name for fd, name in others.items()})
    for fd in map(int, others):  # first, so that the others hear that process 0 has ended, whoever reads its log
        os.close(fd)
    if ended is not None:
        os.write(2, f"{_sentence(me, ended)}\n".encode())


if __name__ == "__main__":
    main()
