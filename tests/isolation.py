"""A test reads and writes in folders of its own alone: it starts in an empty one, with a home and a temporary folder that are
the session's, and children/outside.py refuses everything else, in this process and in those that it starts.

What is refused fails the test that did it, whether or not the code under test caught the error, and so does a file that is left
in the folder where tests start. So a fresh clone, one in which the main job has run, and one beside a full cache give the same
results.
"""

from __future__ import annotations

import os
import shutil
import site
import sys
import tempfile
from pathlib import Path

import pytest
from shared import session_folder

ROOT = Path(__file__).resolve().parent.parent
CHILDREN = ROOT / "tests" / "children"
sys.path.insert(0, str(CHILDREN))
import outside  # noqa: E402

HOME = Path.home()
# What a run, and the caches of data and of tuned configurations, leave where nothing else is said.
KEPT = (ROOT / "outputs", HOME / ".cache" / "ejdist")


def pytest_configure() -> None:
    # What is collected may not depend on it either.
    os.environ[outside.KEPT] = os.pathsep.join(map(os.path.realpath, KEPT))
    outside.install()
    outside.refuse_writes(False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol():
    outside.refuse_writes(True)
    try:
        return (yield)
    finally:
        outside.refuse_writes(False)


def watched() -> dict[str, str]:
    """Returns the variables that a child process with none of the others still needs."""
    return {name: os.environ[name] for name in ("PYTHONPATH", "TMPDIR", outside.OWN, outside.KEPT, outside.BREACHES)}


def taken(breaches: Path) -> list[str]:
    """Returns the refusals since the last call."""
    lines = breaches.read_text().splitlines() if breaches.exists() else []
    breaches.unlink(missing_ok=True)
    return lines


@pytest.fixture(scope="session", autouse=True)
def _folders(tmp_path_factory):
    """Returns the folder where tests start and the file of refusals; changes where this process reads and writes."""
    session, own = session_folder(tmp_path_factory), tmp_path_factory.getbasetemp()
    places = {name: folder / name for name, folder in (("home", session), ("temporary", own), ("start", own))}
    for place in places.values():
        place.mkdir(exist_ok=True)
    cache = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    may = [session, *([Path(cache).absolute()] if cache else []), Path("/dev"), Path("/proc")]
    path = [str(CHILDREN), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = {
        "HOME": str(places["home"]),
        "TMPDIR": str(places["temporary"]),
        # Packages that stand in the real home stay importable.
        "PYTHONUSERBASE": site.getuserbase(),
        "PYTHONPATH": os.pathsep.join(path),
        outside.OWN: os.pathsep.join(map(os.path.realpath, may)),
        outside.BREACHES: str(own / "breaches"),
    }
    with pytest.MonkeyPatch.context() as patch:
        for name in ("EJDIST_CACHE_DIR", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "TRITON_CACHE_DIR", "TRITON_HOME"):
            patch.delenv(name, raising=False)
        for name, value in variables.items():
            patch.setenv(name, value)
        patch.setattr(tempfile, "tempdir", None)
        patch.chdir(places["start"])
        # Else examples that failed in another session are tried again. What it writes at import are tables of characters.
        if "hypothesis" in sys.modules:
            sys.modules["hypothesis.configuration"].set_hypothesis_home_dir(places["home"] / "hypothesis")
        yield places["start"], own / "breaches"


@pytest.fixture(autouse=True)
def stays_inside(_folders):
    """Fails a test that left its own folders."""
    start, breaches = _folders
    yield
    os.chdir(start)
    wrong = taken(breaches)
    for path in sorted(start.iterdir()):
        wrong.append(f"it left {path.name} in the folder where it was started; write to tmp_path")
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    if wrong:
        pytest.fail("the test left its own folders:\n" + "\n".join(wrong))
