"""Where the step loop is and what its time goes into: for the goodput ledger, for whoever looks for slow hosts, and for the
watchdog. The loop says it, others read it."""

from __future__ import annotations

import collections
import contextlib
import statistics
import time
from collections.abc import Iterator
from typing import Any

from ejdist.cluster.hosts import Hosts, post, posted
from ejdist.training.goodput import Ledger

# What the loop does. CALLS and WAITS may be for the devices, and with them for all other hosts; SAVES has limits of its own.
DATA, HOST, CALLS = "waiting for data", "making a step ready", "handing a step over"
WAITS, SAVES = "waiting for its devices", "saving"
_LATE = 8  # steps after which the others have put up what they needed
_SLOW = 1.5  # times the median host
_NOTICED = 0.1  # of the time of a step, so much more than the median host


class Pace:
    """What a host does now.

    Attributes:
      step: the last one that was handed to the devices.
      doing: one of the words above.
      ended: when the last step or save ended, by `time.monotonic`; before the first step, when the loop began.
      made: steps since the loop began.
    """

    def __init__(self, step: int, hosts: Hosts, ledger: Ledger, every: int, log: Any) -> None:
        self.step, self.doing, self.ended, self.made = step, HOST, time.monotonic(), 0
        self._hosts, self._ledger, self._every, self._log = hosts, ledger, every, log
        self._seconds: dict[str, float] = collections.defaultdict(float)
        self._waited = 0.0  # for data, since the last row of the ledger
        self._reported = (step, time.monotonic())
        self._own: dict[str, float] = {}  # of the last report

    def begins(self, step: int) -> None:
        """Says that steps are made from here on, this one having been the last."""
        self.step, self.ended, self.made = step, time.monotonic(), 0
        self._reported, self._waited = (step, self.ended), 0.0
        self._seconds.clear()
        self._ledger.phase("productive", step=step)

    def goes_back(self, step: int) -> None:
        """Says that the steps after this one are given up."""
        self._ledger.phase("rewind", step=self.step, to=step, data_wait=self._taken())

    def close(self) -> None:
        """Says that nothing more is done."""
        self._ledger.close(step=self.step, data_wait=self._taken())

    @contextlib.contextmanager
    def at(self, doing: str) -> Iterator[None]:
        """Says what is done in here, and counts its time."""
        before, self.doing, began = self.doing, doing, time.monotonic()
        try:
            yield
        finally:
            spent = time.monotonic() - began
            self._seconds[doing] += spent
            if doing == DATA:
                self._waited += spent
            self.doing = before

    @contextlib.contextmanager
    def saving(self, step: int) -> Iterator[None]:
        """Says that the loop waits for a save of this step."""
        self._ledger.phase("checkpoint", step=step, data_wait=self._taken())
        with self.at(SAVES):
            yield
        self._ledger.phase("productive", step=step)
        self.ended = time.monotonic()

    def ends(self, step: int) -> None:
        """Says that the loop is done with a step."""
        self.step, self.ended, self.made = step, time.monotonic(), self.made + 1
        if self._ledger.sign(step, self._waited):
            self._waited = 0.0
        if self._every and step % self._every == 0:
            self._report(step)
        if self._own and self._hosts.index == 0 and step >= self._reported[0] + min(_LATE, self._every - 1):
            self._compare()

    def _taken(self) -> float:
        waited, self._waited = self._waited, 0.0
        return round(waited, 4)

    def _report(self, step: int) -> None:
        """Puts up what this host needed for a step since the last time."""
        now, (first, began) = time.monotonic(), self._reported
        steps, self._reported = max(1, step - first), (step, now)
        spent = {"host": self._seconds[HOST], "data_wait": self._seconds[DATA]}
        spent["waits"] = self._seconds[CALLS] + self._seconds[WAITS]
        spent["step_time"] = now - began
        self._own = {name: round(seconds / steps, 5) for name, seconds in spent.items()}
        self._seconds.clear()
        if self._hosts.count > 1 and self._hosts.index > 0:
            post("own time", self._own)

    def _compare(self) -> None:
        """Says which hosts are slow, by what they have put up."""
        found, self._own = {0: self._own}, {}
        if self._hosts.count > 1:
            found |= {host: said for host, (_, said) in posted("own time").items()}
        slow, step = stragglers(found), self._reported[0]
        self._ledger.note(
            hosts={str(host): times for host, times in found.items()}, step=step, steps=self._every, slow=sorted(slow)
        )
        for line in slow.values():
            self._log(f"up to step {step}: {line}")


def stragglers(found: dict[int, dict[str, float]]) -> dict[int, str]:
    """Returns the hosts that hold up the others -> what there is to say.

    All hosts end a step together, whoever is late; what tells them apart is the time that each has for itself, `host` to make
    a step ready, and `data_wait` for its batch. A slow device does not show in it, and makes all hosts wait alike.

    Args:
      found: host -> seconds a step: host, data_wait, waits (for its devices, and so for others), and step_time.
    """
    if len(found) < 2:
        return {}
    own = {host: times["host"] + times["data_wait"] for host, times in found.items()}
    usual = statistics.median_low(own.values())
    late = [h for h, t in own.items() if t > _SLOW * usual and t - usual > _NOTICED * found[h]["step_time"]]
    return {
        host: (
            f"host {host} needs {own[host]:.3f} s of its own for a step of {found[host]['step_time']:.3f} s, the median host "
            f"{usual:.3f} s: {found[host]['data_wait']:.3f} s for its data and {found[host]['host']:.3f} s to make it ready"
        )
        for host in sorted(late)
    }
