"""The door of a start: at the coordinator's address process 0 hears who each process is, before any of them joins JAX.

JAX's own coordinator takes whoever connects to it, and ends every process when two come with one number. So it has another
port, which is given only to the processes of this start, once all of them are there. Whoever else comes to the address is
turned away with a sentence and the run goes on: a second start of the command, the doctor, any program.

Messages are lines of JSON, one object each; an empty line every few seconds says that a side is alive:

    process -> door   {"hello": {...}}                  who it is, see `Who`
    door -> process   {"missing": "..."}                who has not come yet
                      {"refused": "...", "again": B}    not of this start; B: it may come again, as this start is ending
                      {"port": N}                       all are there: join JAX at this port
                      {"silent": "..."}, {"gone": "..."}
    both              {"bye": [code, reason]}           I am about to end; with a reason, as I have failed
    process -> door   {"heard": true}                   the log of this process says which host is gone, or has failed, and why
    door -> process   {"heard": true}                   so do the logs of all others, and you may end
"""

from __future__ import annotations

import selectors
import socket
import ssl
import threading
import time
from collections.abc import Callable
from typing import Any

from ejdist.cluster.lines import Closed, Lines, NoCertificate
from ejdist.cluster.presence import Gone, Presence, Who
from ejdist.cluster.tls import URI, is_ours
from ejdist.cluster.witness import Witness

EVERY = 5.0  # seconds between signs of life
SILENT = 30.0  # seconds without one after which a host is named
HELLO = 10.0  # seconds in which whoever connects must say who it is
_BYE = (
    2.0  # seconds that a process which ends waits for its own door, whose thread may be blocked by what reads its log
)
HEARD = 5.0  # seconds that a process which fails waits for the others to say so too, as its end may abort them
_NAMED = 8  # processes in a sentence


def listening(name: str, port: int) -> socket.socket:
    """Returns a socket that listens on a port of this machine. Raises OSError.

    Args:
      name: the address of the interface; empty: all of them.
    """
    if name:
        family, _, _, _, address = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address, family=family, backlog=4096)
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server(("", port), family=family, backlog=4096, dualstack_ipv6=both)


class _Guest:
    """A connection to the door."""

    def __init__(self, connection: socket.socket, address: Any) -> None:
        self.lines, self.address, self.came = Lines(connection), str(address[0]), time.monotonic()
        self.who: Who | None = None
        self.bye: list[Any] | None = None
        self.silent = self.heard = False


class Door:
    """Process 0's side. It stays open for the whole run, so that others are turned away."""

    def __init__(
        self,
        me: Who,
        server: socket.socket,
        presence: Presence,
        log: Callable[[str], object],
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """`log` takes a line for the user, from the door's own thread. With `tls` who joins must show a certificate."""
        self._tls = tls
        self._me, self._server, self._presence, self._log = me, server, presence, log
        self._guests: dict[socket.socket, _Guest] = {}
        self._members: dict[int, _Guest] = {}
        self._began, self._port, self._ending = time.time(), 0, False
        self._turned: dict[str, float] = {}  # a sentence about a stranger -> when it was logged
        self._all, self._ended, self._lock = threading.Event(), threading.Event(), threading.RLock()
        self._heard = threading.Event()
        self._witness: Witness | None = None
        self._look()
        self._thread = threading.Thread(target=self._run, name="door", daemon=True)
        self._thread.start()

    def wait(self, seconds: float) -> list[Who]:
        """Returns all processes, by index, once all are there.

        Raises:
          TimeoutError: some are missing after `seconds`; the message names them, and the processes that came are told.
        """
        end = time.monotonic() + seconds
        while True:
            arrived = self._all.wait(max(0.0, end - time.monotonic()))
            with self._lock:  # one may have left again
                if self._all.is_set():
                    break
                if not arrived:
                    self._ending = True
                    why = f"{self._missing()}, within {seconds:g} s (cluster.timeout)"
                    for guest in self._members.values():
                        guest.lines.send({"refused": why, "again": False, "lost": True})
                    raise TimeoutError(why)
        return [self._me, *(guest.who for _, guest in sorted(self._members.items()) if guest.who is not None)]

    def admit(self, port: int) -> None:
        """Lets the processes join JAX, at a port of this machine."""
        with self._lock:
            self._port = port
            if self._members:
                names = {guest.lines.socket.fileno(): str(guest.who) for guest in self._members.values()}
                self._witness = Witness(str(self._me), names)
            for guest in self._members.values():
                guest.lines.send({"port": port})

    def bye(self, code: int, reason: str) -> None:
        """Tells the others that this process is about to end; with a reason, because it has failed. Then it waits until all
        have heard that."""
        if not self._lock.acquire(timeout=_BYE):
            return
        try:
            self._ending = True
            if self._witness is not None:
                self._witness.dismiss()
            for guest in self._members.values():
                guest.lines.send({"bye": [code, reason]})
            self._look_who_heard()
        finally:
            self._lock.release()
        if reason:
            self._heard.wait(HEARD)

    def close(self) -> None:
        self._ended.set()
        self._thread.join(5)
        for guest in self._guests.values():
            guest.lines.close()
        self._server.close()
        if self._witness is not None:
            self._witness.close()

    def _look(self) -> None:
        if len(self._members) == self._me.count - 1:
            self._all.set()

    def _missing(self) -> str:
        absent = [i for i in range(1, self._me.count) if i not in self._members]
        shown = ", ".join(map(str, absent[:_NAMED])) + (
            f" and {len(absent) - _NAMED} more" if len(absent) > _NAMED else ""
        )
        present = [self._me, *(self._members[i].who for i in sorted(self._members))]
        here = ", ".join(map(str, present[:_NAMED])) + (
            f" and {len(present) - _NAMED} more" if len(present) > _NAMED else ""
        )
        return (
            f"process{'es' * (len(absent) > 1)} {shown} of {self._me.count} never came, while {here} "
            f"{'are' if len(present) > 1 else 'is'} there"
        )

    def _run(self) -> None:
        with selectors.DefaultSelector() as ready:
            self._server.setblocking(False)
            ready.register(self._server, selectors.EVENT_READ)
            signed = 0.0
            while not self._ended.is_set():
                events = ready.select(min(1.0, EVERY / 2))
                with self._lock:
                    for key, _ in events:
                        if key.fileobj is self._server:
                            self._accept(ready)
                        else:
                            self._hear(ready, self._guests[key.fileobj])  # type: ignore[index]
                    now = time.monotonic()
                    if now - signed >= EVERY:
                        signed = now
                        self._sign()
                    for guest in [*self._guests.values()]:
                        self._watch(ready, guest, now)

    def _accept(self, ready: selectors.BaseSelector) -> None:
        try:
            connection, address = self._server.accept()
            if self._tls is not None:  # the other side is heard of before anything is waited for
                connection.setblocking(False)
                connection = self._tls.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
            self._guests[connection] = _Guest(connection, address)
            ready.register(connection, selectors.EVENT_READ)
        except OSError:  # it is gone again, or this process may open no more files for now
            time.sleep(0.05)

    def _hear(self, ready: selectors.BaseSelector, guest: _Guest) -> None:
        try:
            for message in guest.lines.receive():
                if message is None:
                    continue
                if guest.who is None and self._tls is not None and not is_ours(guest.lines.socket):
                    why = f"the certificate of this process has no URI that begins with {URI} (cluster.tls)"
                    guest.lines.send({"refused": why, "again": False})
                    raise NoCertificate
                if guest.who is None:
                    self._greet(ready, guest, Who(**message["hello"]))
                elif "bye" in message:
                    guest.bye = code, reason = message["bye"]
                    if reason and self._port and self._members.get(guest.who.index) is guest:
                        guest.heard = True
                        self._lose(f"{guest.who} failed, which ends all hosts: {reason}", code)
                elif "heard" in message:
                    guest.heard = True
                    self._look_who_heard()
                if guest.lines.socket not in self._guests:
                    return
        except Closed:
            self._part(ready, guest)
        except NoCertificate:
            whom = f"a program at {guest.address}, which has no certificate of this run (cluster.tls)"
            self._turn_away(ready, guest, whom)
        except (ValueError, KeyError, TypeError, RecursionError):
            self._turn_away(ready, guest, f"a program at {guest.address}, which is no process of ejdist")

    def _greet(self, ready: selectors.BaseSelector, guest: _Guest, who: Who) -> None:
        guest.who = who
        if (refused := self._refusal(who)) is not None:
            guest.lines.send({"refused": refused, "again": self._ending, "lost": self._is_replaced(who)})
            self._turn_away(ready, guest, f"{who.command} as {who}")
            return
        if (before := self._members.pop(who.index, None)) is not None:
            self._drop(ready, before)
        self._members[who.index] = guest
        self._look()

    def _refusal(self, who: Who) -> str | None:
        """Returns why a process is not of this start, None if it is."""
        me, since = self._me, time.strftime("%H:%M:%S", time.localtime(self._began))
        mine = f"{me.command} with run.dir = {me.run}, started at {since}, has this address by {me}"
        if self._ending:
            return f"{mine}, and is ending"
        same = (who.command, who.run, who.start) == (me.command, me.run, me.start)
        if not same or who.index == 0:
            return f"{mine}, and this is another start: let that one end, or give this one another port"
        if who.count != me.count:
            return f"{mine}, and has {me.count} processes (cluster.num_processes), not {who.count}"
        if not 0 < who.index < me.count:
            return f"{mine}, and has no process {who.index}"
        member = self._members.get(who.index)
        if self._port or (member is not None and time.monotonic() - member.lines.heard < 2 * EVERY):
            theirs = "all its processes are there" if self._port else f"its process {who.index} is there"
            named = f": {member.who}" if member is not None else ""
            return f"{mine}, and {theirs}{named}; let it end, or give this start another port"
        return None

    def _is_replaced(self, who: Who) -> bool:
        """Returns whether a process takes the place of one of this start after all had come: the launcher's cluster has made a
        lost one again, alone, and all are to be started."""
        me = self._me
        same = (who.command, who.run, who.start, who.count) == (me.command, me.run, me.start, me.count)
        return bool(me.start and same and 0 < who.index < me.count and (self._port or self._ending))

    def _turn_away(self, ready: selectors.BaseSelector, guest: _Guest, whom: str) -> None:
        now, line = time.monotonic(), f"{whom} (at {guest.address})" if guest.who else whom
        if now - self._turned.get(line, -60.0) >= 60.0:
            if len(self._turned) > 1000:
                self._turned.clear()
            self._turned[line] = now
            self._log(f"turned away at port {self._server.getsockname()[1]}: {line}; this run goes on")
        self._drop(ready, guest)

    def _part(self, ready: selectors.BaseSelector, guest: _Guest) -> None:
        """A connection is closed: that of a stranger, of a process that is ending, or of one that is gone."""
        self._drop(ready, guest)
        who = guest.who
        if who is None or self._members.get(who.index) is not guest:
            return
        if not self._port:
            del self._members[who.index]
            if not self._ending:
                self._all.clear()
                self._log(f"{who} ended before all were there")
            return
        if guest.bye is None:
            self._lose(f"{who} is gone: its process has ended without a word; check its log", None)
        self._look_who_heard()

    def _lose(self, text: str, code: int | None) -> None:
        """Notes that a host is gone or about to end, and tells all others about the first one."""
        self._presence.lose(Gone(text, code))
        if not self._ending:
            self._ending = True
            self._log(text)
            for other in self._members.values():
                other.lines.send({"gone": text, "code": code})
        self._look_who_heard()

    def _look_who_heard(self) -> None:
        """Once all know why the run ends, whoever has waited for that may end."""
        present = [guest for guest in self._members.values() if guest.lines.socket in self._guests]
        if all(guest.heard for guest in present):
            self._heard.set()
            for guest in present:
                if guest.bye is not None and guest.bye[1]:
                    guest.lines.send({"heard": True})

    def _sign(self) -> None:
        missing = None if self._port else {"missing": self._missing()}
        for guest in self._members.values():
            guest.lines.send(missing)

    def _watch(self, ready: selectors.BaseSelector, guest: _Guest, now: float) -> None:
        quiet = now - guest.lines.heard
        if guest.who is None:
            if quiet > HELLO:
                self._turn_away(ready, guest, f"a program at {guest.address}, which never said who it is")
        elif quiet > SILENT and not guest.silent:
            guest.silent = True
            self._tell_all(f"{guest.who} {silence(quiet)}")
        elif quiet < SILENT and guest.silent:
            guest.silent = False
            self._tell_all(f"{guest.who} is heard of again")

    def _tell_all(self, text: str) -> None:
        self._log(text)
        for guest in self._members.values():
            guest.lines.send({"silent": text})

    def _drop(self, ready: selectors.BaseSelector, guest: _Guest) -> None:
        if self._guests.pop(guest.lines.socket, None) is not None:
            ready.unregister(guest.lines.socket)
            guest.lines.close()


def silence(seconds: float) -> str:
    """Returns the phrase about a host that has been silent."""
    return (
        f"has shown no sign of life for {seconds:.0f} s: it is stopped, overloaded, or its network is down. If that lasts, JAX "
        "ends the run (cluster.heartbeat)"
    )
