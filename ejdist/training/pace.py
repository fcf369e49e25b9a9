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

# What the loop does. WAITS is for the devices, and with them for all other hosts; SAVES ends by limits of its own.
DATA, HOST, WAITS, SAVES = "waiting for data", "handing over a step", "waiting for its devices", "saving"
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

    def __init__(self, step: int, hosts: Hosts, ledger: Ledger, every: int, say: Any) -> None:
        self.step, self.doing, self.ended, self.made = step, HOST, time.monotonic(), 0
        self._hosts, self._ledger, self._every, self._say = hosts, ledger, every, say
        self._seconds: dict[str, float] = collections.defaultdict(float)
        self._waited = 0.0  # for data, since the last row of the ledger
        self._reported = (step, time.monotonic())

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
        self._ledger.phase("end", step=self.step, data_wait=self._taken())
        self._ledger.close()

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
            self._compare(step)

    def _taken(self) -> float:
        waited, self._waited = self._waited, 0.0
        return round(waited, 4)

    def _compare(self, step: int) -> None:
        """Puts up what this host needed for a step of its own, and on host 0 says who is slow, by what is put up by then."""
        now, (first, began) = time.monotonic(), self._reported
        steps, self._reported = max(1, step - first), (step, now)
        own = {"host": self._seconds[HOST] / steps, "data_wait": self._seconds[DATA] / steps}
        self._seconds.clear()
        found = {0: own}
        if self._hosts.count > 1:
            if self._hosts.index == 0:
                found |= {host: said for host, (_, said) in posted("own time").items()}
            else:
                post("own time", own)
        if self._hosts.index > 0:
            return
        slow = stragglers(found, (now - began) / steps)
        self._ledger.note(
            hosts={str(host): {k: round(v, 5) for k, v in times.items()} for host, times in found.items()},
            step=step, steps=steps, slow=sorted(slow),
        )  # fmt: skip
        for line in slow.values():
            self._say(f"up to step {step}: {line}")


def stragglers(found: dict[int, dict[str, float]], step_time: float) -> dict[int, str]:
    """Returns the hosts that hold up the others -> what there is to say.

    All hosts end a step together, whoever is late; what tells them apart is the time that each has for itself, in seconds a
    step: `host`, to hand a step over, and `data_wait`, for its batch. A slow device does not show in it.
    """
    if len(found) < 2:
        return {}
    own = {host: sum(times.values()) for host, times in found.items()}
    usual = statistics.median_low(own.values())
    late = [h for h, t in own.items() if t > _SLOW * usual and t - usual > _NOTICED * step_time]
    return {
        host: (
            f"host {host} needs {own[host]:.3f} s of its own for a step of {step_time:.3f} s, the median host {usual:.3f} s: "
            f"{found[host]['data_wait']:.3f} s for its data and {found[host]['host']:.3f} s to hand the step over"
        )
        for host in sorted(late)
    }
