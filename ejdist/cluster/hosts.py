"""Hosts talk through the store of JAX's coordinator: no collective, so nothing hangs where they differ; every wait has an end.

Each host says what it has, host 0 reads all of it, and says the outcome: what goes over the network grows with the number of
hosts, not with its square. All of them raise the same error.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax

_SLICE = 1.0  # seconds of one request; between two of them Python hears signals
_FOR_THE_VERDICT = 30.0  # seconds more than host 0 has, in which the others hear from it who is missing
_FAILED = "ejdist/failed/"
_POSTS = "ejdist/posts/"
_NOTHING = "nothing"  # a fact that a host does not know
# In the errors of Gloo, NCCL and JAX's coordinator where the other side has ended.
_OF_ANOTHER = ("gloo", "nccl", "connection", "peer", "socket", "coordination service", "barrier")
_STATUS = re.compile(r"(UNKNOWN|UNAVAILABLE|INTERNAL|ABORTED|CANCELLED|DEADLINE_EXCEEDED): ")
_numbers = itertools.count()  # of comparisons in this process: all hosts make them in the same order


class HostsDiffer(ValueError):
    """The hosts of a run were started with different things; the message names the host, the key and both values."""


class HostLost(RuntimeError):
    """A host of the run does not answer, or has ended; the message names it, or says what is known.

    Attributes:
      code: the exit code with which it ends, where it has said so: this one ends with it too. None: the same command may go on.
      known: the others know of it, or find out: not so where only this one was talking with the host.
    """

    def __init__(self, message: str, code: int | None = None, *, known: bool = True) -> None:
        super().__init__(message)
        self.code, self.known = code, known


class Failed(NamedTuple):
    """What a host has said that failed: in words, whether what it was started with is wrong, and its exit code if it knows."""

    text: str
    wrong: bool
    code: int | None


# Seconds, of what any host waits for. JAX and Orbax hold them, and their milliseconds, in small integers.
LONGEST = 1_000_000


def check_limit(limit: float) -> None:
    """Raises ValueError for a run.host_timeout that no host can wait for."""
    if not 0 < limit <= LONGEST:
        raise ValueError(f"run.host_timeout must be a positive number of seconds, at most {LONGEST:,}, got {limit}")


class Hosts:
    """The processes of this run, each called a host: on a pod there is one on each.

    Attributes:
      index, count: this one's number, and how many there are.
      limit: seconds that one waits for the others.
    """

    def __init__(self, limit: float, *, before_devices: bool = False) -> None:
        """With `before_devices` the numbers are those that the processes joined with: to make the devices waits for all."""
        check_limit(limit)
        self.limit = limit
        self.index, self.count = _joined() if before_devices else (jax.process_index(), jax.process_count())

    def compare(self, moment: str, facts: Mapping[str, Any]) -> None:
        """Returns when all hosts have come here with the same facts.

        Args:
          moment: where this is, in words that complete "has not come to": for the message that names who is missing.
          facts: name -> anything that JSON holds. Compared with host 0's.

        Raises:
          HostsDiffer: they have not; of the first difference, the host, the name and both values.
          HostLost: a host has not come within `limit` seconds.
        """
        if found := self.judged(moment, facts, differences):
            raise HostsDiffer(found[0])

    def first(self, moment: str, what: str | None) -> str | None:
        """Returns what the first host says that says anything, on all hosts, with its name if there are several.

        Raises:
          HostLost: a host has not come within `limit` seconds.
        """
        return self.judged(moment, what, _first_word)

    def all_say(self, moment: str, what: Any) -> list[Any]:
        """Returns what each host says, by its number, on all hosts.

        Raises:
          HostLost: a host has not come within `limit` seconds.
        """
        return self.judged(moment, what, lambda said: [said[i][1] for i in sorted(said)])

    def say(self, name: str, value: Any = None) -> Any:
        """Returns what host 0 says under this name, on all hosts. The others' value is ignored.

        Raises:
          HostLost: it has said nothing within `limit` seconds.
        """
        if self.count == 1:
            return value
        at = f"ejdist/{next(_numbers)}/{name}"
        if self.index == 0:
            _put(at, value)
            return value
        return self._get(at, f"host 0 has not said {name}")

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """What fails in here on one host ends the others too, with its reason; else they would wait for it."""
        try:
            yield
        except HostsDiffer:
            raise  # the others have it too
        except HostLost as error:
            if not error.known:
                tell_others(str(error))
            raise
        except Exception as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            tell_others(reason, wrong=isinstance(error, ValueError), code=_code_of(error))
            raise

    def failed(self) -> Failed | None:
        """Returns what a host has said that failed inside `together`, None if none has."""
        said = {i: what for i, what in sorted(_under(_FAILED).items()) if i != self.index} if self.count > 1 else {}
        for i, (host, wrong, code, reason) in said.items():
            return Failed(f"host {i} ({host}) ended, and so do all: {reason}", wrong, code)
        return None

    def _check_failed(self) -> None:
        if said := self.failed():
            raise HostsDiffer(said.text) if said.wrong else HostLost(said.text, said.code)

    def judged(self, moment: str, mine: Any, judge: Callable[[dict[int, Any]], Any]) -> Any:
        """Returns, on all hosts, what `judge` makes on host 0 of what all say: host -> [its name, what it says].

        Raises:
          HostLost: a host has not come within `limit` seconds.
        """
        question = self.ask(moment, mine)
        question.judge(judge)
        return question.answer()

    def ask(self, moment: str, mine: Any) -> Question:
        """Says this host's part of what is to be judged, and the caller waits later. All hosts ask the same, in one order."""
        return Question(self, moment, mine)

    def _wait_for_all(self, prefix: str, moment: str) -> str | None:
        """Returns who has not come, in words; None when all have."""
        end = time.monotonic() + self.limit
        while len(said := _under(prefix)) < self.count - 1:
            self._check_failed()
            if time.monotonic() > end:
                absent = [i for i in range(1, self.count) if i not in said]
                return f"{_named(absent)} not come to {moment}{self._after(self.limit)}"
            time.sleep(min(_SLICE, 0.05 * self.count))
        return None

    def _get(self, key: str, otherwise: str, limit: float | None = None) -> Any:
        limit = self.limit if limit is None else limit
        end = time.monotonic() + limit
        while True:
            try:
                return json.loads(_store().blocking_key_value_get(key, round(_SLICE * 1000)))
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    reason = (str(error).splitlines() or [""])[0]
                    raise HostLost(f"{otherwise}: the coordinator on host 0 does not answer ({reason})") from error
            self._check_failed()
            if time.monotonic() > end:
                raise HostLost(f"{otherwise}{self._after(limit)}")

    def _after(self, limit: float) -> str:
        return (
            f" within {limit:g} s (run.host_timeout = {self.limit:g}): look at its log, and start all of them again; "
            "or give them more time"
        )


class Question:
    """A round of all hosts in its parts: each says something when it is made, host 0 judges, the others hear of it. Where time
    passes between the parts, nobody waits for a host that keeps up."""

    def __init__(self, hosts: Hosts, moment: str, mine: Any) -> None:
        self._hosts, self._moment = hosts, moment
        self._mine = json.loads(json.dumps([socket.gethostname(), mine]))
        self._missing: str | None = None
        self._verdict: Any = None
        if hosts.count > 1:
            self._at = f"ejdist/{next(_numbers)}/{moment}"
            if hosts.index > 0:
                _put(f"{self._at}/said/{hosts.index}", self._mine)

    def judge(self, judge: Callable[[dict[int, Any]], Any]) -> None:
        """On host 0 waits for all, and says the verdict: what `judge` makes of host -> [its name, what it says]."""
        hosts = self._hosts
        if hosts.index > 0:
            return
        if hosts.count == 1:
            self._verdict = judge({0: self._mine})
            return
        self._missing = hosts._wait_for_all(f"{self._at}/said/", self._moment)
        if not self._missing:
            self._verdict = judge({0: self._mine} | _under(f"{self._at}/said/"))
        _put(f"{self._at}/verdict", [self._missing, self._verdict])

    def answer(self) -> Any:
        """Returns the verdict, on all hosts.

        Raises:
          HostLost: a host has not come within `limit` seconds.
        """
        hosts = self._hosts
        if hosts.index > 0:
            otherwise = f"host 0 has not come to {self._moment}"
            self._missing, self._verdict = hosts._get(f"{self._at}/verdict", otherwise, hosts.limit + _FOR_THE_VERDICT)
        if self._missing:
            raise HostLost(self._missing)
        return self._verdict

    def forget(self) -> None:
        """Takes what the hosts have said out of the store, once it is judged: for what is asked again and again."""
        if self._hosts.index == 0 and self._hosts.count > 1:
            _store().key_value_delete(f"{self._at}/said/")


def _no_code(error: Exception) -> int | None:
    return None


_code_of: Callable[[Exception], int | None] = _no_code


def end_with(code_of: Callable[[Exception], int | None]) -> None:
    """From here on a host that fails tells the others with which exit code it ends, so that all end with the same: what starts
    runs again then sees that there is no use in it. For commands.

    Args:
      code_of: error -> exit code, None for a fault of the program.
    """
    global _code_of
    _code_of = code_of


def tell_others(reason: str, *, wrong: bool = False, code: int | None = None) -> None:
    """Lets the other hosts know that this one ends, if there are any and the coordinator answers.

    Args:
      wrong: what it was started with is, so that to start again changes nothing.
      code: the exit code that it ends with; None where the others end with that of a lost host.
    """
    # Not `jax.process_index()`: that makes the devices where there are none yet, which waits for the other hosts.
    index = _index()
    if index is not None:
        with contextlib.suppress(Exception):  # the coordinator may be what has failed
            _put(f"{_FAILED}{index}", [socket.gethostname(), wrong, code, reason])


def lost(error: BaseException) -> HostLost | None:
    """Returns what an error of a program that runs on several hosts means, if it is that one of them is gone.

    Args:
      error: one of JAX, or one that a library has raised from it; a HostLost is what it says.
    """
    if isinstance(error, HostLost):
        return error
    text = next((str(e) for e in _causes(error) if _of_runtime(e)), None)
    # Not `jax.process_count()` of any error: that makes the devices where there are none yet.
    if text is None or jax.process_count() == 1:
        return None
    if not any(word in text.lower() for word in _OF_ANOTHER):
        return None
    with contextlib.suppress(Exception):  # the coordinator may be what is gone
        if said := Hosts(1.0).failed():
            return HostLost(said.text, said.code)
    return HostLost(
        f"another host is gone, or its network ({(text.splitlines() or [''])[0][:300]}); look at its log. The same command, "
        "started on all hosts, goes on from the last checkpoint",
        known=False,
    )


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _of_runtime(error: BaseException) -> bool:
    # An array that cannot be read, since what was to compute it has failed, is a ValueError with the runtime's own words.
    return isinstance(error, jax.errors.JaxRuntimeError) or (
        isinstance(error, ValueError) and _STATUS.match(str(error)) is not None
    )


def differences(said: dict[int, Any]) -> list[str]:
    """Returns a sentence for each fact in which a host differs from host 0: host -> [its name, facts]."""
    (first, theirs), found = said[0], []
    for i in sorted(said):
        host, mine = said[i]
        for name in {**theirs, **mine}:
            there, here = theirs.get(name, _NOTHING), mine.get(name, _NOTHING)
            if json.dumps(there) != json.dumps(here):  # NaN is itself
                found.append(
                    f"host {i} ({host}) has {name} = {here}, and host 0 ({first}) has {there}: start all with the same"
                )
    return found


def _first_word(said: dict[int, Any]) -> str | None:
    for i in sorted(said):
        host, word = said[i]
        if word is not None:
            return word if len(said) == 1 else f"{word} (on host {i}, {host})"
    return None


def _named(hosts: list[int], most: int = 8) -> str:
    shown = ", ".join(map(str, hosts[:most])) + (f" and {len(hosts) - most} more" if len(hosts) > most else "")
    return f"host {shown} has" if len(hosts) == 1 else f"hosts {shown} have"


def _store() -> Any:
    from jax._src import distributed

    return distributed.global_state.client


def _index() -> int | None:
    """Returns the number of this process, None where it has joined no other."""
    from jax._src import distributed

    return None if distributed.global_state.client is None else distributed.global_state.process_id


def _joined() -> tuple[int, int]:
    """Returns (the number of this process, how many have joined)."""
    from jax._src import distributed

    state = distributed.global_state
    return (0, 1) if state.client is None else (state.process_id, state.num_processes)


def _put(key: str, value: Any) -> None:
    _store().key_value_set(key, json.dumps(value))


def post(name: str, value: Any) -> None:
    """Puts up what this host says under a name, in the place of what it said before. For `posted`, and nobody waits for it."""
    _store().key_value_set(
        f"{_POSTS}{name}/{_index()}", json.dumps([socket.gethostname(), value]), allow_overwrite=True
    )


def posted(name: str) -> dict[int, Any]:
    """Returns what is put up under a name: host -> [its name, what it said last]."""
    return dict(sorted(_under(f"{_POSTS}{name}/").items()))


def _under(prefix: str) -> dict[int, Any]:
    """Returns what hosts have said, by their number."""
    return {int(key.rpartition("/")[2]): json.loads(value) for key, value in _store().key_value_dir_get(prefix)}
