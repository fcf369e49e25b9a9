"""The line of a process to process 0: it says who it is, waits to be let in, and keeps the connection as long as it runs."""

from __future__ import annotations

import json
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict

from ejdist.cluster.door import EVERY, HEARD, SILENT, silence
from ejdist.cluster.lines import Closed, Lines, NoCertificate
from ejdist.cluster.presence import Gone, Presence, Who
from ejdist.cluster.tls import connected

_AGAIN = 1.0  # seconds between two attempts
_TAKEN = 3.0  # seconds in which whoever has a port may say what it is
_ANSWER = 15.0  # seconds without an answer after which what listens there is no door


class TurnedAway(ValueError):
    """Process 0 does not take this process: it is of another start, or another program has the address."""


class NobodyCame(Exception):
    """Not all processes of the start came; the message names those that did not, or says what is known."""


class Line:
    """The connection of a process that was let in.

    Attributes:
      port: of JAX's coordinator, at the address of process 0.
    """

    def __init__(self, lines: Lines, port: int, first: str) -> None:
        """`first` names process 0."""
        self._lines, self.port, self._first = lines, port, first
        self._ended, self._heard, self._said = threading.Event(), threading.Event(), False

    def keep(self, presence: Presence, log: Callable[[str], object], leave: Callable[[Gone], object]) -> None:
        """Listens from now on, in a thread of its own.

        Args:
          log: takes a line for the user.
          leave: is called once process 0 is gone, and JAX's coordinator with it: nothing can go on.
        """
        threading.Thread(target=self._run, args=(presence, log, leave), name="line", daemon=True).start()

    def bye(self, code: int, reason: str) -> None:
        """Tells process 0 that this one is about to end; with a reason, because it has failed. Then it waits until all have
        heard that."""
        self._lines.send({"bye": [code, reason]})
        if reason:
            self._heard.wait(HEARD)

    def close(self) -> None:
        self._ended.set()
        self._lines.close()

    def _run(self, presence: Presence, log: Callable[[str], object], leave: Callable[[Gone], object]) -> None:
        bye: list = []
        sent, silent = time.monotonic(), False
        while not self._ended.is_set():
            try:
                self._lines.wait(min(1.0, EVERY / 2))
                for message in self._lines.receive():
                    if message is None:
                        continue
                    bye = message.get("bye", bye)
                    if "silent" in message:
                        log(message["silent"])
                    if "gone" in message:
                        presence.lose(Gone(message["gone"], message["code"]))
                        self._say(message["gone"], log)
                    if message.get("bye", ["", ""])[1]:
                        self._say(f"{self._first} {_failed(bye[1])}", log)
                    if "heard" in message:
                        self._heard.set()
            except (Closed, OSError, ValueError):
                self._heard.set()
                if self._ended.is_set() or (bye and not bye[1]):
                    return  # it has ended well, as this one does
                code, reason = bye or [None, ""]
                what = _failed(reason) if reason else "is gone: its process has ended without a word"
                gone = Gone(f"{self._first} {what}", code)
                presence.lose(gone)
                leave(presence.gone() or gone)  # the first of them: process 0 may have ended because of another one
                return
            now = time.monotonic()
            if now - sent >= EVERY:
                sent = now
                self._lines.send(None)
            quiet = now - self._lines.heard
            if (quiet > SILENT) is not silent:
                silent = not silent
                log(f"{self._first} {silence(quiet) if silent else 'is heard of again'}")

    def _say(self, text: str, log: Callable[[str], object]) -> None:
        """Says at once why the run ends, before whoever has failed ends, which may abort this process. What others fail by
        later is a consequence."""
        if not self._said:
            self._said = True
            log(text)
        self._lines.send({"heard": True})


def _failed(reason: str) -> str:
    return f"failed, which ends all hosts: {reason}"


def knock(address: str, who: Who, seconds: float, first: str = "host 0", tls: str | None = None) -> Line:
    """Returns the line of this process once process 0 has let it in.

    Args:
      address: HOST:PORT of process 0.
      first: names process 0 in messages.
      tls: `cluster.tls`.

    Raises:
      TurnedAway: this process is of another start, or what listens there is no process 0. NobodyCame: process 0 does not
        answer, or others are missing, after `seconds`.
    """
    name, _, port = address.rpartition(":")
    end, why = time.monotonic() + seconds, ""
    while (left := end - time.monotonic()) > 0:
        try:
            connection = socket.create_connection((name.strip("[]"), int(port)), timeout=min(5.0, left))
            if tls is not None:
                connection = connected(tls, connection)
        except (ssl.SSLZeroReturnError, ssl.SSLEOFError, ConnectionResetError):
            why = f"what listens at {address} is closing, or has no certificates (cluster.tls)" if tls else why
            time.sleep(min(_AGAIN, max(0.0, left)))
            continue
        except ssl.SSLError as error:
            raise TurnedAway(_no_certificate(address, error.reason or error.strerror or str(error))) from error
        except OSError:
            time.sleep(min(_AGAIN, max(0.0, left)))
            continue  # `why_unreachable` finds the words
        lines = Lines(connection)
        lines.send({"hello": asdict(who)})
        try:
            return Line(lines, _let_in(lines, address, end, why), first)
        except _Later as later:
            why = str(later)
            lines.close()
            time.sleep(min(_AGAIN, max(0.0, end - time.monotonic())))
        except BaseException:
            lines.close()
            raise
    raise NobodyCame(why)


def _no_certificate(address: str, why: str) -> str:
    return (
        f"cluster.coordinator = {address}: what listens there and this process do not take each other's certificates ({why}): "
        "all processes of a run need cluster.tls, with certificates by one authority"
    )


def occupant(port: int, who: Who, tls: str | None = None) -> tuple[str, bool]:
    """Returns what uses a port of this machine, as the door there describes it, and whether that is ending; "" and False if
    there is no door."""
    try:
        connection = socket.create_connection(("localhost", port), timeout=_TAKEN)
        lines = Lines(connection if tls is None else connected(tls, connection))
    except OSError:
        return "", False
    lines.send({"hello": asdict(who)})
    end = time.monotonic() + _TAKEN
    try:
        while (left := end - time.monotonic()) > 0:
            lines.wait(left)
            for message in lines.receive():
                if message is not None and "refused" in message:
                    return message["refused"], message["again"]
    except (Closed, OSError, ValueError):
        return "", False
    finally:
        lines.close()
    return "", False


class _Later(Exception):
    """Try again later; the message has the reason, if the other side gave one."""


def _let_in(lines: Lines, address: str, end: float, why: str) -> int:
    """Returns the port of JAX's coordinator. Raises _Later, TurnedAway or NobodyCame."""
    missing, sent = why, time.monotonic()
    while True:
        now = time.monotonic()
        if now > end:
            raise NobodyCame(missing)
        if now - lines.heard > _ANSWER:
            raise _Later(
                f"what listens at {address} does not answer as process 0 of a run does, and may be another program"
            )
        lines.wait(min(1.0, EVERY / 2))
        try:
            for message in lines.receive():
                if message is None:
                    continue
                if "port" in message:
                    return message["port"]
                missing = message.get("missing", missing)
                if "refused" in message:
                    if message.get("lost"):
                        raise NobodyCame(message["refused"])
                    if message["again"]:
                        raise _Later(message["refused"])
                    raise TurnedAway(f"cluster.coordinator = {address}: {message['refused']}")
        except Closed:
            raise _Later(missing) from None
        except NoCertificate as error:
            raise TurnedAway(_no_certificate(address, str(error))) from error
        except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
            raise TurnedAway(
                f"cluster.coordinator = {address}: another program listens there, not process 0 of a run: give a free port of "
                "that machine"
            ) from error
        if now - sent >= EVERY:
            sent = now
            lines.send(None)


def tell(line: str) -> None:
    """Prints a line about the other hosts."""
    print(line, file=sys.stderr, flush=True)
