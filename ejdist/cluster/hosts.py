"""Communication between hosts through the key-value store of JAX's coordinator.

It uses no collectives, so it cannot hang when hosts differ, and every wait has a timeout. Each host publishes its value, host 0
reads them all and publishes the result, so traffic grows linearly with the number of hosts. All hosts raise the same error.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax

from ejdist.cluster.presence import presence
from ejdist.cluster.verdict import NO_USE

_SLICE = 1.0  # seconds per request; Python handles signals between requests
_RATE = 512  # requests a second of all hosts that wait; a coordinator answers some thousands
_FOR_RESULT = 30.0  # seconds that the others wait beyond host 0's limit, to learn from it who is missing
_FAILED = "ejdist/failed/"
_POSTS = "ejdist/posts/"
_NOTHING = "nothing"  # shown for a fact that a host lacks
_numbers = itertools.count()  # numbers the rounds of this process: all hosts make them in the same order


class HostsDiffer(ValueError):
    """The hosts of a run were started with different things; the message names the host, the key and both values."""

    on_all_hosts = True


class HostLost(RuntimeError):
    """A host of the run does not answer, or has exited; the message names it, or says what is known.

    Attributes:
      code: the exit code that the host reported, which this host exits with too. None: the same command can resume.
      known: whether the other hosts know, or will find out. False if only this host was talking to the lost one.
    """

    def __init__(self, message: str, code: int | None = None, *, known: bool = True) -> None:
        super().__init__(message)
        self.code, self.known = code, known


class Failed(NamedTuple):
    """A failure reported by a host: the message, whether the host's inputs are wrong, and its exit code if known."""

    text: str
    wrong: bool
    code: int | None


# The longest timeout, in seconds. JAX and Orbax store milliseconds in 32-bit integers.
MAX_SECONDS = 1_000_000


def check_limit(limit: float) -> None:
    """Raises ValueError for a run.host_timeout that no host can wait for."""
    if not 0 < limit <= MAX_SECONDS:
        raise ValueError(f"run.host_timeout must be a positive number of seconds, at most {MAX_SECONDS:,}, got {limit}")


class Hosts:
    """The processes of this run, each called a host: a pod runs one process per host.

    Attributes:
      index, count: the number of this host, and of all hosts.
      limit: seconds that a host waits for the others.
    """

    def __init__(self, limit: float, *, before_devices: bool = False) -> None:
        """`before_devices` takes the numbers from the coordinator instead of JAX, which would initialise the devices and so
        wait for all hosts."""
        check_limit(limit)
        self.limit = limit
        self.index, self.count = _joined() if before_devices else (jax.process_index(), jax.process_count())

    def compare(self, moment: str, facts: Mapping[str, Any]) -> None:
        """Waits for all hosts, and checks that they pass the same facts.

        Args:
          moment: completes "has not reached", in the message that names a missing host.
          facts: name -> a JSON value. Compared with host 0's.

        Raises:
          HostsDiffer: the facts differ; the message gives the host, the name and both values of the first difference.
          HostLost: a host does not arrive within `limit` seconds.
        """
        text = json.dumps(dict(facts), sort_keys=True)
        odd = self.reduce(moment, hashlib.sha256(text.encode()).hexdigest()[:32], _first_other)
        if odd is None:
            return
        # Only these two send their facts: of thousands of hosts, facts and answers would be as many megabytes.
        mine = dict(facts) if self.index in (0, odd) else None
        (message,) = self.reduce(
            f"the comparison of {moment}", mine, lambda values: differences({i: values[i] for i in (0, odd)})[:1]
        )
        raise HostsDiffer(message)

    def first_error(self, moment: str, message: str | None) -> str | None:
        """Returns, on all hosts, the message of the first host that passes one, with its name if there are several.

        Raises:
          HostLost: a host does not arrive within `limit` seconds.
        """
        return self.reduce(moment, message, _first_message)

    def broadcast(
        self, name: str, value: Any = None, limit: float | None = None, *, source: int = 0, needed: bool = True
    ) -> Any:
        """Returns, on all hosts, the value of host 0; the others' values are ignored.

        Args:
          name: completes "host 0 has not sent", in the message of a timeout.
          limit: seconds; default: that of the hosts.
          source: the host whose value it is, instead of host 0.
          needed: if not, this host waits for nothing, and gets its own value.

        Raises:
          HostLost: the host sends nothing within `limit` seconds, or is gone.
        """
        if self.count == 1:
            return value
        key = f"ejdist/{next(_numbers)}/{name}"
        if self.index == source:
            _put(key, value)
        if self.index == source or not needed:
            return value
        return self._get(key, f"host {source} has not sent {name}", limit)

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """An exception in the body on one host ends the other hosts too, with its message, so that they do not wait for
        it."""
        try:
            yield
        except HostsDiffer:
            raise  # the others raise it too
        except HostLost as error:
            _tell(error)
            if not error.known:
                notify_failure(str(error))
            raise
        except Exception as error:
            _tell(error)  # before anything is waited for
            code, reason = _code_of(error), (str(error).splitlines() or [""])[0]
            if code is None or not reason:
                reason = f"{type(error).__name__}: {reason}".removesuffix(": ")
            notify_failure(reason, wrong=isinstance(error, ValueError), code=code)
            raise

    def failed(self) -> Failed | None:
        """Returns the failure that another host reported inside `together`, or that it is gone; None if neither."""
        if self.count == 1:
            return None
        gone = presence().gone()
        reports = {}
        with contextlib.suppress(*([Exception] if gone else [])):  # the coordinator may be what is gone
            reports = {i: report for i, report in sorted(_read(_FAILED).items()) if i != self.index}
        for i, (host, wrong, code, reason) in reports.items():
            if gone is None or code in NO_USE:  # else it has failed because of the one that is gone
                return Failed(f"host {i} ({host}) failed, which ends all hosts: {reason}", wrong, code)
        return Failed(gone.text, False, gone.code if gone.code in NO_USE else None) if gone else None

    def _check_failed(self) -> None:
        if failure := self.failed():
            raise HostsDiffer(failure.text) if failure.wrong else HostLost(failure.text, failure.code)

    def reduce(self, moment: str, value: Any, function: Callable[[dict[int, Any]], Any]) -> Any:
        """Returns, on all hosts, the result of `function`, which host 0 calls with host -> [its name, its value]. All hosts
        read the result, so it must not grow with their number.

        Raises:
          HostLost: a host does not arrive within `limit` seconds.
        """
        round = self.begin_round(moment, value)
        round.reduce(function)
        return round.result()

    def begin_round(self, moment: str, value: Any) -> Round:
        """Publishes this host's value without waiting. All hosts must begin the same rounds in the same order."""
        return Round(self, moment, value)

    def _wait_for_all(self, prefix: str, moment: str) -> str | None:
        """Returns None when all hosts have arrived, or a message that names the missing ones."""
        end = time.monotonic() + self.limit
        while True:
            began = time.monotonic()
            # Which hosts, not what they sent: that is read once.
            values = {int(key.rpartition("/")[2]) for key, _ in _store().key_value_dir_get(prefix)}
            listed = time.monotonic() - began
            if len(values) >= self.count - 1:
                return None
            self._check_failed()
            if time.monotonic() > end:
                absent = [i for i in range(1, self.count) if i not in values]
                return f"{_named(absent)} not reached {moment}{self._after(self.limit)}"
            # Often, but of many hosts, whose values take a while to list, not all the time.
            time.sleep(min(_SLICE, max(0.05, 3 * listed)))

    def _get(self, key: str, otherwise: str, limit: float | None = None) -> Any:
        limit = self.limit if limit is None else limit
        end, each = time.monotonic() + limit, max(_SLICE, self.count / _RATE)
        while True:
            try:
                return json.loads(_store().blocking_key_value_get(key, round(min(each, limit) * 1000)))
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    reason = (str(error).splitlines() or [""])[0]
                    raise HostLost(f"{otherwise}: the coordinator on host 0 does not answer ({reason})") from error
            self._check_failed()
            if time.monotonic() > end:
                raise HostLost(f"{otherwise}{self._after(limit)}")

    def _after(self, limit: float) -> str:
        return (
            f" within {limit:g} s (run.host_timeout = {self.limit:g}): check its log and start all hosts again, or "
            "raise run.host_timeout"
        )


class Round:
    """A gather, reduction and broadcast in three steps: each host publishes a value on construction, host 0 reduces, and all
    read the result. With time between the steps, no host waits for one that keeps up."""

    def __init__(self, hosts: Hosts, moment: str, value: Any) -> None:
        self._hosts, self._moment = hosts, moment
        self._value = json.loads(json.dumps([socket.gethostname(), value]))
        self._missing: str | None = None
        self._result: Any = None
        if hosts.count > 1:
            self._key = f"ejdist/{next(_numbers)}/{moment}"
            if hosts.index > 0:
                _put(f"{self._key}/values/{hosts.index}", self._value)

    def reduce(self, function: Callable[[dict[int, Any]], Any]) -> None:
        """On host 0: waits for all hosts and publishes `function(host -> [its name, its value])`."""
        hosts = self._hosts
        if hosts.index > 0:
            return
        if hosts.count == 1:
            self._result = function({0: self._value})
            return
        self._missing = hosts._wait_for_all(f"{self._key}/values/", self._moment)
        if not self._missing:
            self._result = function({0: self._value} | _read(f"{self._key}/values/"))
        _put(f"{self._key}/result", [self._missing, self._result])

    def result(self) -> Any:
        """Returns the result, on all hosts.

        Raises:
          HostLost: a host does not arrive within `limit` seconds.
        """
        hosts = self._hosts
        if hosts.index > 0:
            timeout = f"host 0 has not reached {self._moment}"
            self._missing, self._result = hosts._get(f"{self._key}/result", timeout, hosts.limit + _FOR_RESULT)
        if self._missing:
            raise HostLost(self._missing)
        return self._result

    def delete_values(self) -> None:
        """Deletes the published values from the store once they are reduced, so that repeated rounds do not fill it."""
        if self._hosts.index == 0 and self._hosts.count > 1:
            _store().key_value_delete(f"{self._key}/values/")


def _no_code(error: Exception) -> int | None:
    return None


_code_of: Callable[[Exception], int | None] = _no_code
_tell: Callable[[Exception], object] = _no_code


def end_with(code_of: Callable[[Exception], int | None], tell: Callable[[Exception], object] = _no_code) -> None:
    """From now on a failing host reports its exit code to the others, so that all exit with the same code and a launcher can
    see whether a restart would help. For commands.

    Args:
      code_of: error -> exit code, None for a bug.
      tell: prints an error, once, and states it as the reason of this process' end.
    """
    global _code_of, _tell
    _code_of, _tell = code_of, tell


def notify_failure(reason: str, *, wrong: bool = False, code: int | None = None) -> None:
    """Tells the other hosts, if there are any and the coordinator answers, that this one is exiting.

    Args:
      wrong: its inputs are wrong, so a restart would not help.
      code: its exit code; None if the others should exit with the code of a lost host.
    """
    # Not `jax.process_index()`, which may initialise the devices and so wait for the other hosts.
    index = _index()
    if index is not None:
        with contextlib.suppress(Exception):  # the coordinator may be what has failed
            _put(f"{_FAILED}{index}", [socket.gethostname(), wrong, code, reason])


def _first_other(values: dict[int, Any]) -> int | None:
    """Returns the first host that has another value than host 0, None if all have the same."""
    return next((i for i in sorted(values) if values[i][1] != values[0][1]), None)


def differences(values: dict[int, Any]) -> list[str]:
    """Returns a sentence for each fact in which a host differs from host 0.

    Args:
      values: host -> [its name, facts].
    """
    (first, theirs), messages = values[0], []
    for i in sorted(values):
        host, mine = values[i]
        for name in {**theirs, **mine}:
            expected, value = theirs.get(name, _NOTHING), mine.get(name, _NOTHING)
            if json.dumps(expected) != json.dumps(value):  # as text, NaN equals itself
                messages.append(
                    f"host {i} ({host}) has {name} = {value}, and host 0 ({first}) has {expected}: start all hosts with "
                    "the same"
                )
    return messages


def _first_message(values: dict[int, Any]) -> str | None:
    for i in sorted(values):
        host, message = values[i]
        if message is not None:
            return message if len(values) == 1 else f"{message} (on host {i}, {host})"
    return None


def _named(hosts: list[int], most: int = 8) -> str:
    shown = ", ".join(map(str, hosts[:most])) + (f" and {len(hosts) - most} more" if len(hosts) > most else "")
    return f"host {shown} has" if len(hosts) == 1 else f"hosts {shown} have"


def _store() -> Any:
    from jax._src import distributed

    return distributed.global_state.client


def _index() -> int | None:
    """Returns the number of this process, None without a coordinator."""
    from jax._src import distributed

    return None if distributed.global_state.client is None else distributed.global_state.process_id


def coordinator() -> tuple[str, int]:
    """Returns (the host name of JAX's coordinator, its port), as this process knows them."""
    from jax._src import distributed

    name, _, port = (distributed.global_state.coordinator_address or "localhost:1").rpartition(":")
    return name.strip("[]"), int(port)


def _joined() -> tuple[int, int]:
    """Returns (the number of this process, the number of processes), as the coordinator knows them."""
    from jax._src import distributed

    state = distributed.global_state
    return (0, 1) if state.client is None else (state.process_id, state.num_processes)


def _put(key: str, value: Any) -> None:
    _store().key_value_set(key, json.dumps(value))


def post(name: str, value: Any) -> None:
    """Publishes this host's latest value under a name, replacing the one before. Read it with `posted`; nobody waits for
    it."""
    _store().key_value_set(
        f"{_POSTS}{name}/{_index()}", json.dumps([socket.gethostname(), value]), allow_overwrite=True
    )


def posted(name: str) -> dict[int, Any]:
    """Returns the latest values posted under a name: host -> [its name, value]."""
    return dict(sorted(_read(f"{_POSTS}{name}/").items()))


def _read(prefix: str) -> dict[int, Any]:
    """Returns the values that hosts have published, by host number."""
    return {int(key.rpartition("/")[2]): json.loads(value) for key, value in _store().key_value_dir_get(prefix)}
