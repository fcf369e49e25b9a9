"""Hands pieces of a local checkpoint from the hosts that have them to those that lack them, over TCP.

Each host offers its pieces at a port of its own while a checkpoint is restored, and posts address and key in the store of
JAX's coordinator: whoever can read that store may have the pieces. A host that lacks a piece asks for it by array and span,
writes what comes to its own disk, and compares its checksum; so neither side holds more than a part of a piece in memory, and
a host that dies delays one request, not all hosts. Collectives would need both hosts at the same position of the mesh, and
memory of the devices; the store would send everything through host 0. With `cluster.tls` the connections are encrypted, and
both sides show certificates.

    asks        KEY                   once
                [NAME, SPAN]          for each piece
    answers     [BYTES, CRC32, SHAPE] and then the bytes; null: this host does not have it
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import socket
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from ejdist.cluster.door import listening
from ejdist.cluster.hosts import coordinator, post, posted
from ejdist.cluster.presence import presence
from ejdist.cluster.tls import connected, context, is_ours
from ejdist.training.integrity import Changed
from ejdist.training.local_pieces import Piece, Pieces, PieceWriter

_PART = 1 << 20  # bytes read or sent at once
_LINE = 1 << 16  # bytes of a line, at most
_CONNECT = 10.0  # seconds
_IDLE = 60.0  # seconds without a byte after which a connection is given up
_AT_ONCE = 32  # connections that are served; others wait
_OTHERS = 32  # hosts with other shares that are asked: arrays that all hosts have are on any of them
_FAILED = 4  # hosts that do not answer, after which no other is asked: the network does not let this host through


class Place(NamedTuple):
    """Where a host offers its pieces, and what it wants to hear first."""

    address: str
    port: int
    key: str


class PeerFailed(Exception):
    """A host does not give what it offers; the message says why."""


class PieceServer:
    """Offers the pieces of one save to hosts that know the key."""

    def __init__(self, pieces: Pieces, address: str, tls: str | None = None) -> None:
        """Raises OSError if no port is free.

        Args:
          address: of this machine, as the others reach it. tls: `cluster.tls`.
        """
        self._pieces, self._tls = pieces, None if tls is None else context(tls, server=True)
        self._server = listening("", 0)
        self.place = Place(address, self._server.getsockname()[1], secrets.token_hex(16))
        self._free, self._ended = threading.Semaphore(_AT_ONCE), threading.Event()
        self._thread = threading.Thread(target=self._run, name="pieces", daemon=True)
        self._thread.start()

    def __enter__(self) -> PieceServer:
        return self

    def __exit__(self, *error: Any) -> None:
        self._ended.set()
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # ends the wait for the next connection
        self._server.close()
        self._thread.join(5)

    def _run(self) -> None:
        while not self._ended.is_set():
            self._free.acquire()
            try:
                connection, _ = self._server.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), name="piece", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with contextlib.suppress(OSError, ValueError, TypeError, RecursionError):  # the other side may be anything
                connection.settimeout(_CONNECT)
                if self._tls is not None:
                    connection = self._tls.wrap_socket(connection, server_side=True)
                    if not is_ours(connection):
                        return
                with connection, connection.makefile("rb") as asked:
                    if not hmac.compare_digest(asked.readline(_LINE).strip(), self.place.key.encode()):
                        return
                    connection.settimeout(_IDLE)
                    while line := asked.readline(_LINE):
                        self._answer(connection, Piece(*json.loads(line)))
        finally:
            connection.close()
            self._free.release()

    def _answer(self, connection: socket.socket, piece: Piece) -> None:
        found = self._pieces.find(piece)
        if found is None:
            connection.sendall(b"null\n")
            return
        connection.sendall(json.dumps([len(found.data), found.crc32, found.shape]).encode() + b"\n")
        for start in range(0, len(found.data), _PART):
            connection.sendall(found.data[start : start + _PART])


def fetch(place: Sequence[Any], wanted: Iterable[Piece], writer: PieceWriter, tls: str | None = None) -> None:
    """Writes those of these pieces that a host has.

    Raises:
      PeerFailed: it does not answer, or no longer. What came before is written. OSError: this disk cannot be written.
    """
    address, port, key = place
    name = f"{address}:{port}"
    with contextlib.ExitStack() as stack:
        with _of_peer(name):
            connection = socket.create_connection((address, port), timeout=_CONNECT)
            stack.callback(connection.close)
            if tls is not None:
                connection = stack.enter_context(connected(tls, connection))
            connection.settimeout(_IDLE)
            connection.sendall(f"{key}\n".encode())
            answers = stack.enter_context(connection.makefile("rb"))
        for piece in wanted:
            with _of_peer(name):
                connection.sendall(json.dumps(piece).encode() + b"\n")
                header = json.loads(answers.readline(_LINE))
                size, crc32, shape = header or (0, 0, ())
            if header is not None:
                writer.add(piece, shape, _parts(answers, size, name), crc32)


def _parts(answers: Any, size: int, name: str) -> Iterator[memoryview]:
    buffer = memoryview(bytearray(min(size, _PART)))
    while size:
        with _of_peer(name):
            count = answers.readinto(buffer[: min(size, _PART)])
            if not count:
                raise OSError("the connection is closed")
        size -= count
        yield buffer[:count]


@contextlib.contextmanager
def _of_peer(name: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, TypeError) as error:
        raise PeerFailed(f"{name} does not give its pieces ({type(error).__name__}: {error})") from error


@contextlib.contextmanager
def offered(topic: str, shares: Iterable[str], pieces: Pieces, me: int) -> Iterator[None]:
    """Offers this host's pieces of a save while the body runs.

    Args:
      topic: of the save, the same on all hosts. shares: digests of those of which this host has all pieces.
      me: the number of this host.
    """
    try:
        server = PieceServer(pieces, _own_address(me), presence().tls)
    except OSError:  # it may still get pieces from others
        yield
        return
    with server:
        for share in sorted(shares) or ["some"]:
            post(f"{topic}/{share}", server.place)
        yield


def gather(topic: str, shares: dict[str, list[Piece]], lacking: Iterable[Piece], writer: PieceWriter, me: int) -> None:
    """Writes the pieces that this host lacks, from hosts that offer them.

    Args:
      shares: digest -> pieces, as this host's devices need them. me: the number of this host.

    Raises:
      Changed: no host gives a piece. OSError: this disk cannot be written.
    """
    absent, failed = set(lacking), dict[int, str]()

    def ask(topic: str, wanted: Iterable[Piece], most: int | None = None) -> None:
        places = {host: place for host, (_, place) in posted(topic).items() if host != me}
        first = me % max(1, len(places))  # hosts that lack the same share do not all begin with the same one
        for host in ([*places][first:] + [*places][:first])[:most]:
            missing = [piece for piece in wanted if piece not in writer.index]
            if missing and host not in failed and len(failed) < _FAILED:
                try:
                    fetch(places[host], missing, writer, presence().tls)
                except PeerFailed as error:
                    failed[host] = f"host {host} at {error}"

    for digest, share in shares.items():
        ask(f"{topic}/{digest}", [piece for piece in share if piece in absent])
    ask(topic, sorted(absent), _OTHERS)
    if missing := [piece for piece in sorted(absent) if piece not in writer.index]:
        which = f"{missing[0]}" + (f" and {len(missing) - 1:,} more pieces" if len(missing) > 1 else "")
        why = next(iter(failed.values()), "no host has it intact on its disk")
        raise Changed(f"{which} did not come from another host: {why}")


def _own_address(host: int) -> str:
    """Returns the address of this machine for the other hosts: that of its interface to the coordinator, and on host 0 the
    coordinator's own."""
    name, port = coordinator()
    if host == 0:
        return name
    family, _, _, _, address = socket.getaddrinfo(name, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # sends nothing
        return probe.getsockname()[0]
