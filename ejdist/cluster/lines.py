"""A connection between two processes of a start, as lines of JSON: see `ejdist.cluster.door` for what they say."""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from typing import Any

_LONGEST = 65536  # bytes of a line


class Closed(Exception):
    """The other side has closed the connection, or the network has."""


class NoCertificate(ValueError):
    """The other side has no certificate of this run, does not take this side's, or does not speak TLS."""


class Lines:
    """A connection as lines of JSON. Not for several threads at once, but for `send`."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket, self._read, self._lock = connection, b"", threading.Lock()
        self.heard = time.monotonic()  # when something came last

    def send(self, message: dict[str, Any] | None) -> None:
        """Sends a message, or a sign of life. A peer that no longer reads misses it."""
        line = b"\n" if message is None else json.dumps(message).encode() + b"\n"
        with self._lock, contextlib.suppress(OSError):
            self.socket.sendall(line)

    def wait(self, seconds: float) -> None:
        """Returns once something has arrived, or after `seconds`."""
        with selectors.DefaultSelector() as ready:  # not `select`, which takes no file past the 1,024th
            ready.register(self.socket, selectors.EVENT_READ)
            ready.select(seconds)

    def _recv(self) -> bytes:
        with self._lock:  # of TLS, reading and writing share their state
            return self.socket.recv(_LONGEST)

    def receive(self) -> Iterator[dict[str, Any] | None]:
        """Yields what has come: messages, and None for signs of life.

        Raises:
          Closed: nothing more will come. ValueError: the peer sends something other than lines of JSON objects, or has no
            certificate of this run.
        """
        try:
            more = self._recv()
        except (BlockingIOError, TimeoutError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return
        except ssl.SSLEOFError as error:
            raise Closed from error
        except ssl.SSLError as error:
            raise NoCertificate(error.reason or str(error)) from error
        except OSError as error:
            raise Closed from error
        if not more:
            raise Closed
        self.heard = time.monotonic()
        *lines, self._read = (self._read + more).split(b"\n")
        for line in lines:
            message = json.loads(line) if line.strip() else None
            if message is not None and not isinstance(message, dict):
                raise ValueError(f"{line[:40]!r} is no message")
            yield message
        if len(self._read) > _LONGEST or not b"{".startswith(self._read[:1]):
            raise ValueError(f"{self._read[:40]!r}... has no end")

    def close(self) -> None:
        with contextlib.suppress(OSError):  # for the other side too, though the witness has the connection as well
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()
