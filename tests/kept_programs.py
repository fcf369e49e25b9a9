"""Runs of one test file that differ in nothing that their program reads have one program, which is traced and compiled once.

A run that is stopped and goes on, or is made again with another checkpoint, would trace and lower the same step anew, half of
its time. A file asks for it with `pytest.mark.usefixtures("one_program_for_equal_runs")`. A test that patches anything has
programs of its own; so have runs with plugins, whose code a test may change, and with stages.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

# Keys that no program of a step reads: where a run lies, when it stops, what it saves, where its tokens come from, what is
# evaluated or traced beside it.
UNREAD = (
    *("run.dir", "run.stop_after", "run.extend", "run.allow_change", "run.profile"),
    *("checkpoint.", "data.source", "data.cache_dir", "evaluation."),
)
_OWN = pytest.StashKey[bool]()


def read_by_programs(sections: Any) -> str:
    """Returns the keys and values of a recipe that its program may depend on."""
    from ejdist.sections import flat

    return repr([(key, value) for key, value in flat(sections).items() if not key.startswith(UNREAD)])


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    item.session.stash[_OWN] = "monkeypatch" in getattr(item, "fixturenames", ())


@pytest.fixture(scope="module")
def one_program_for_equal_runs(request: pytest.FixtureRequest) -> Iterator[None]:
    """Makes the program of a run once for all tests of the file whose recipes it is the same for."""
    from ejdist.training import setup

    programs: dict[Any, Any] = {}

    def kept(sections: Any, mesh: Any, rate: Any = None) -> Any:
        if request.session.stash[_OWN] or sections.plugins or sections.curriculum:
            return make(sections, mesh, rate)
        key = read_by_programs(sections), repr(mesh), tuple(d.id for d in mesh.devices.flat), repr(rate)
        if key not in programs:
            programs[key] = make(sections, mesh, rate)
        return programs[key]

    make, setup.make_program = setup.make_program, kept
    yield
    setup.make_program = make
