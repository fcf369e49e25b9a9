"""A budget of the quick tests, in seconds of CPU for each operation: past it the test run fails.

A test belongs to an operation if it is parametrised by it, or stands in tests/kernels/test_<operation>*.py. Time is that of the
CPU, of a test's own worker and its child processes, so another load on the machine changes it little.
"""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path

import pytest

SECONDS = 40.0
# A CPU second does less on a machine that does other work beside (1.4 to 1.7 times as many were counted), and a run must not
# fail by that: it fails past this many budgets, and says in every run how much of its budget an operation took.
STRAIN = 2.5
# Operations that have more than `SECONDS`, and why.
MORE: dict[str, tuple[float, str]] = {
    "paged_attention": (
        90,
        "six operations: ragged, of rows, of rows with their lse, of a dense cache, the writing of a cache, and both at once, "
        "on Triton, Pallas and Hopper's kernel for prompts",
    ),
    "flash_attention": (
        240,
        "26 cases, for each kind of mask and each option alone, 15 of them again that return the weights, 8 on each kernel, "
        "and 27 on those for Hopper",
    ),
    "attention_variants": (90, "five operations, all of them differentiated"),
    "multi_latent_attention": (60, "three operations, two of them differentiated"),
    "cross_entropy": (60, "three operations, one of which has two forwards"),
    "blocksparse_attention": (
        60,
        "kernels of three toolchains, those in Gluon and Pallas interpreted, and compiled for GPUs and TPUs",
    ),
    "native_sparse_attention": (
        120,
        "three branches: kernels of its own in Triton and in Pallas, and those of flash attention, interpreted and compiled",
    ),
    "scaled_matmul": (
        60,
        "products, dense and of groups, and six ways to make their operands; in Triton, Gluon and Pallas, interpreted and "
        "compiled",
    ),
    "layer_norm": (60, "two operations on three backends, and a third with a projection"),
    "state_space": (110, "three operations, each with documents, packed sequences and states, and on meshes"),
    "recurrent": (100, "two operations, one of them with three cells and two directions"),
    "grouped_matmul": (
        100,
        "two operations, three backends of each: two compiled for GPUs and TPUs, and as many kernels interpreted",
    ),
    "delta_rule": (
        100,
        "three operations, five functions: no decay, that of a head and of each channel, packed, in a pool, split over ranks",
    ),
}
FOLDERS = Path(__file__).resolve().parent.parent / "kernels" / "ops"


def budget_of(operation: str) -> float:
    """Returns the seconds that the quick tests of an operation should take at most."""
    return MORE.get(operation, (SECONDS, ""))[0]


def operation_of(path: str, params: dict) -> str | None:
    """Returns the folder in kernels/ops of the operation that a test belongs to, from its file and its parameters."""
    for value in params.values():
        for op in getattr(value, "ops", (value,)):  # a public function has the operations that it is made of
            package = getattr(op, "package", None)
            if isinstance(package, str) and package.startswith("kernels.ops."):
                return package.split(".")[2]
    name = Path(path).name
    if Path(path).parent.name != "kernels":
        return None
    names = [p.parent.name for p in FOLDERS.glob("*/contract.py") if name.startswith(f"test_{p.parent.name}")]
    return max(names, key=len, default=None)


def over_budget(spent: dict[str, list[tuple[float, str]]]) -> list[str]:
    """Returns a message for each operation whose tests, as (seconds, test), took more than its budget."""
    said = []
    for operation, tests in sorted(spent.items()):
        total, limit = sum(seconds for seconds, _ in tests), budget_of(operation)
        if total > STRAIN * limit:
            slowest = "".join(f"\n    {seconds:6.1f} s  {test}" for seconds, test in sorted(tests, reverse=True)[:5])
            said.append(
                f"{operation}: its quick tests took {total:.0f} s of CPU, past its budget of {limit:.0f} s by more than a "
                f"loaded machine explains (tests/budget.py); make them cheaper or mark what is not needed every time `slow`. "
                f"The slowest:{slowest}"
            )
    return said


def _cpu() -> float:
    """Returns the seconds of CPU of this process and of its children that have ended."""
    t = os.times()
    return t.user + t.system + t.children_user + t.children_system


class Budget:
    """Measures in a worker, adds up where the session is controlled."""

    def __init__(self, config: pytest.Config):
        self.controls = not hasattr(config, "workerinput")
        self.applies = "not slow" in (config.option.markexpr or "")
        self.spent: dict[str, list[tuple[float, str]]] = defaultdict(list)
        self.messages: list[str] = []

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        item.stash[_START] = _cpu()
        return (yield)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_makereport(self, item, call):
        # The report carries it from a worker to the controller.
        operation = operation_of(str(item.path), item.callspec.params if hasattr(item, "callspec") else {})
        if call.when == "teardown" and operation:
            item.user_properties.append(("cpu of operation", (operation, _cpu() - item.stash[_START])))

    def pytest_runtest_logreport(self, report):
        if report.when == "teardown":
            for name, value in report.user_properties:
                if name == "cpu of operation":
                    self.spent[value[0]].append((value[1], report.nodeid))

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session):
        if self.controls and self.applies:
            self.messages = over_budget(self.spent)
            if self.messages and session.exitstatus == pytest.ExitCode.OK:
                session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter):
        if self.controls and self.spent and self.applies:
            each = (
                f"{name} {sum(s for s, _ in tests):.0f} of {budget_of(name):.0f}"
                for name, tests in sorted(self.spent.items())
            )
            terminalreporter.write_line(f"seconds of CPU of each operation: {', '.join(each)}")
        for message in self.messages:
            terminalreporter.section("over budget", red=True, bold=True)
            terminalreporter.write_line(message)


_START = pytest.StashKey[float]()


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Budget(config), "budget of operations")
