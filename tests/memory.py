"""A limit of the memory that a worker of the tests holds, child processes not counted: past it the test run fails.

What grows is programs: JAX keeps every one that it has compiled, about 0.6 MiB each, for as long as its function is there. So
once a worker holds much, they are dropped, and the few that later tests call again are compiled again, or read from the cache.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys
from collections import defaultdict
from pathlib import Path

import pytest

MIB = 2**20
LIMIT = 2560 * MIB
# Where programs are dropped: no test needs as much as is left to the limit. And not again before it has grown by so much: with
# a GPU a process may hold as much by itself.
DROPS, AGAIN = 1280 * MIB, 192 * MIB
_STATUS = Path("/proc/self/status")  # of Linux; elsewhere nothing is measured, and nothing is dropped
_CLEAR = Path("/proc/self/clear_refs")


def resident(name: str = "VmRSS") -> int:
    """Returns the bytes of memory that this process holds, or held at most ("VmHWM"); 0 where the system does not say."""
    if not _STATUS.exists():
        return 0
    return next(int(line.split()[1]) for line in _STATUS.read_text().splitlines() if line.startswith(name)) * 1024


def forget_peak() -> None:
    """Lets the next peak ("VmHWM") count from what this process holds now."""
    with contextlib.suppress(
        OSError
    ):  # not Linux, or a kernel that does not allow it: a peak is then that of the worker so far
        _CLEAR.write_text("5")


def drop_programs() -> None:
    """Gives back the memory of the programs that JAX has compiled."""
    if "jax" in sys.modules:
        sys.modules["jax"].clear_caches()
        gc.collect()
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc, which keeps what was freed
        if trim is not None:
            trim(0)


def over_limit(peaks: dict[str, list[tuple[int, int, str]]]) -> list[str]:
    """Returns a message for each worker whose tests, as (bytes before, peak, test), held more than `LIMIT`."""
    messages = []
    for worker, tests in sorted(peaks.items()):
        peak = max(peak for _, peak, _ in tests)
        if peak > LIMIT:
            rises = sorted(((peak - before, peak, test) for before, peak, test in tests), reverse=True)[:5]
            most = "".join(f"\n    {rise / MIB:6.0f} to {peak / MIB:.0f} MiB  {test}" for rise, peak, test in rises)
            messages.append(
                f"worker {worker} held {peak / MIB:.0f} MiB, past the limit of {LIMIT / MIB:.0f} MiB (tests/memory.py); make "
                f"these smaller, or run what they need in a process of its own. The tests that rose most:{most}"
            )
    return messages


class Memory:
    """Measures in a worker, compares where the session is controlled."""

    def __init__(self, config: pytest.Config):
        self.controls = not hasattr(config, "workerinput")
        self.worker = getattr(config, "workerinput", {}).get("workerid", "main")
        self.applies = "not slow" in (config.option.markexpr or "")
        self.peaks: dict[str, list[tuple[int, int, str]]] = defaultdict(list)
        self.messages: list[str] = []
        self.kept = 0  # bytes that the last drop has left

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        forget_peak()
        item.stash[_START] = resident()
        result = yield
        if resident() > max(DROPS, self.kept + AGAIN):
            drop_programs()
            self.kept = resident()
        return result

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_makereport(self, item, call):
        if call.when == "teardown":
            item.user_properties.append(("memory", (self.worker, item.stash[_START], resident("VmHWM"))))

    def pytest_runtest_logreport(self, report):
        if report.when == "teardown":
            for name, value in report.user_properties:
                if name == "memory":
                    worker, before, peak = value
                    self.peaks[worker].append((before, peak, report.nodeid))

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session):
        if self.controls and self.applies:
            self.messages = over_limit(self.peaks)
            if self.messages and session.exitstatus == pytest.ExitCode.OK:
                session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter):
        if self.controls and self.applies and self.peaks:
            peaks = {name: max(peak for _, peak, _ in tests) / MIB for name, tests in sorted(self.peaks.items())}
            each = (f"{name} {peak:.0f} of {LIMIT / MIB:.0f}" for name, peak in peaks.items())
            terminalreporter.write_line(f"MiB of memory of each worker, at most: {', '.join(each)}")
        for message in self.messages:
            terminalreporter.section("over the limit of memory", red=True, bold=True)
            terminalreporter.write_line(message)


_START = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Memory(config), "memory of workers")
