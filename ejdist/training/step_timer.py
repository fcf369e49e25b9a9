"""Tracks the position of the step loop and where its time goes, for the goodput ledger, the straggler check and the
watchdog."""

from __future__ import annotations

import collections
import contextlib
import statistics
import time
from collections.abc import Iterator
from typing import Any

from ejdist.cluster.hosts import Hosts, post, posted
from ejdist.training.goodput import Ledger
from ejdist.training.profiling import peak_memory

# What the loop does. CALLS and WAITS may wait for the devices, and so for all other hosts; SAVES has its own time limit.
DATA, HOST, CALLS = "waiting for data", "preparing a step", "dispatching a step"
WAITS, SAVES, EVALUATES = "waiting for its devices", "saving", "evaluating"
_LATE = 8  # steps to wait before reading the other hosts' reports
_SLOW = 1.5  # a slow host needs this many times the median host's own time,
_SHOWN = 8  # hosts of which the ledger keeps the times
_NOTICED = 0.1  # and exceeds it by this fraction of the step time


class StepTimer:
    """What this host is doing now.

    Attributes:
      step: the last dispatched step.
      doing: one of the constants above.
      ended: when the last step, save or batch of an evaluation ended, by `time.monotonic`; before the first step, when the
        loop began.
      made: steps since the loop began.
    """

    def __init__(self, step: int, hosts: Hosts, ledger: Ledger, every: int, log: Any) -> None:
        self.step, self.doing, self.ended, self.made = step, HOST, time.monotonic(), 0
        self._hosts, self._ledger, self._every, self._log = hosts, ledger, every, log
        self._seconds: dict[str, float] = collections.defaultdict(float)
        self._waited = 0.0  # seconds for data since the last row of the ledger
        self._reported = (step, time.monotonic())
        self._own: dict[str, float] = {}  # this host's last report

    def start(self, step: int) -> None:
        """Starts timing the steps after this one."""
        self.step, self.ended, self.made = step, time.monotonic(), 0
        self._reported, self._waited = (step, self.ended), 0.0
        self._seconds.clear()
        self._ledger.phase("productive", step=step)

    def rewind(self, step: int) -> None:
        """Records a rewind to this step."""
        self._ledger.phase("rewind", step=self.step, to=step, data_wait=self._taken())

    def close(self) -> None:
        """Records the end of the loop."""
        self._ledger.close(step=self.step, data_wait=self._taken())

    @contextlib.contextmanager
    def during(self, doing: str) -> Iterator[None]:
        """Sets `doing` for the body, and counts its time."""
        before, self.doing, began = self.doing, doing, time.monotonic()
        try:
            yield
        finally:
            spent = time.monotonic() - began
            self._seconds[doing] += spent
            if doing == DATA:
                self._waited += spent
            self.doing = before

    def saving(self, step: int) -> contextlib.AbstractContextManager:
        """Records that the loop waits for a save of this step."""
        return self._between_steps("checkpoint", SAVES, step)

    def evaluating(self, step: int) -> contextlib.AbstractContextManager:
        """Records that the loop evaluates the state after this step. It calls `alive` before each batch."""
        return self._between_steps("evaluation", EVALUATES, step)

    @contextlib.contextmanager
    def _between_steps(self, phase: str, doing: str, step: int) -> Iterator[None]:
        self._ledger.phase(phase, step=step, data_wait=self._taken())
        with self.during(doing):
            yield
        self._ledger.phase("productive", step=step)
        self.alive()

    def alive(self) -> None:
        """Tells the watchdog that the loop goes on, though no step ends."""
        self.ended = time.monotonic()

    def end_step(self, step: int) -> None:
        """Records the end of a step, and reports and compares the hosts' times if due."""
        self.step, self.ended, self.made = step, time.monotonic(), self.made + 1
        if self._ledger.heartbeat(step, self._waited):
            self._waited = 0.0
        if self._every and step % self._every == 0:
            self._report(step)
        if self._own and self._hosts.index == 0 and step >= self._reported[0] + min(_LATE, self._every - 1):
            self._compare()

    def _taken(self) -> float:
        waited, self._waited = self._waited, 0.0
        return round(waited, 4)

    def _report(self, step: int) -> None:
        """Posts this host's time per step since the last report."""
        now, (first, began) = time.monotonic(), self._reported
        steps, self._reported = max(1, step - first), (step, now)
        spent = {"host": self._seconds[HOST], "data_wait": self._seconds[DATA]}
        spent["waits"] = self._seconds[CALLS] + self._seconds[WAITS]
        spent["step_time"] = now - began
        self._own = {name: round(seconds / steps, 5) for name, seconds in spent.items()}
        self._own |= {"peak_memory_gib": max(peaks)} if (peaks := peak_memory()) else {}
        self._seconds.clear()
        if self._hosts.count > 1 and self._hosts.index > 0:
            post("own time", self._own)

    def _compare(self) -> None:
        """Logs which hosts are slow, by the times they posted."""
        times, self._own = {0: self._own}, {}
        if self._hosts.count > 1:
            times |= {host: report for host, (_, report) in posted("own time").items()}
        slow, step = stragglers(times), self._reported[0]
        self._ledger.note(**in_few(times), step=step, steps=self._every, slow=sorted(slow)[:_SHOWN])
        for line in slow.values():
            self._log(f"up to step {step}: {line}")


def in_few(reports: dict[int, dict[str, float]]) -> dict[str, Any]:
    """Returns what the ledger keeps of the hosts' times: of each host where there are few, else of those that needed most for
    themselves; "of" how many, and their medians. So a row has one size, whatever the number of hosts."""
    own = {host: times["host"] + times["data_wait"] for host, times in reports.items()}
    worst = sorted(sorted(own), key=lambda host: -own[host])[:_SHOWN]
    found: dict[str, Any] = {"hosts": {str(host): reports[host] for host in sorted(worst)}}
    if len(reports) > _SHOWN:
        medians = {
            name: statistics.median_low(times[name] for times in reports.values() if name in times)
            for name in reports[worst[0]]
        }
        found |= {"of": len(reports), "median": medians}
    return found


def stragglers(reports: dict[int, dict[str, float]]) -> dict[int, str]:
    """Returns the hosts that hold up the others -> a message about each.

    All hosts end a step together, so slow ones are identified by their own time: `host`, to prepare a step, and `data_wait`,
    for its batch. A slow device does not show in it, because it makes all hosts wait alike.

    Args:
      reports: host -> seconds per step: host, data_wait, waits (for its devices, and so for others), and step_time; and
        peak_memory_gib of its devices where they say.
    """
    if len(reports) < 2:
        return {}
    host_times = {host: times["host"] + times["data_wait"] for host, times in reports.items()}
    usual = statistics.median_low(host_times.values())
    late = [h for h, t in host_times.items() if t > _SLOW * usual and t - usual > _NOTICED * reports[h]["step_time"]]
    return {
        host: (
            f"host {host} needs {host_times[host]:.3f} s of its own for a step of {reports[host]['step_time']:.3f} s, the "
            f"median host {usual:.3f} s: {reports[host]['data_wait']:.3f} s for its data and {reports[host]['host']:.3f} s to "
            "prepare it"
        )
        for host in sorted(late)
    }
