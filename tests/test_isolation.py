"""A test that reads what an earlier run left, or writes outside its own folders, fails, whatever becomes of the error."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import isolation
import outside
import pytest

ROOT = Path(__file__).resolve().parent.parent
OUTPUTS = ROOT / "outputs" / "long_context" / "metrics.jsonl"
NEW = ROOT / "left_by_a_test"

REFUSED = {
    "reads a run": lambda: OUTPUTS.read_text(),
    "lists runs": lambda: os.listdir(OUTPUTS.parent),
    "looks for runs": lambda: list(os.scandir(ROOT / "outputs")),
    "reads a cache": lambda: open(isolation.HOME / ".cache" / "ejdist" / "tuning" / "x.json"),
    "writes a file": lambda: NEW.write_text("x"),
    "appends": lambda: os.open(NEW, os.O_APPEND | os.O_CREAT | os.O_WRONLY),
    "writes to the home": lambda: (isolation.HOME / "left_by_a_test").touch(),
    "makes a folder": lambda: NEW.mkdir(),
    "makes a link": lambda: NEW.symlink_to(os.curdir),
    "removes": lambda: (ROOT / "README.md").unlink(),
    "moves in": lambda: Path("here").rename(NEW),
    "moves out": lambda: (ROOT / "README.md").rename("here"),
    "touches": lambda: os.utime(ROOT / "README.md"),
    "through a link": lambda: (Path(tempfile.gettempdir()) / "link" / "left_by_a_test").touch(),
    "enters": lambda: os.chdir(ROOT),
    "starts a process there": lambda: subprocess.run([sys.executable, "-c", ""], cwd=ROOT),
    "starts a process unwatched": lambda: subprocess.run([sys.executable, "-c", ""], env={"PATH": os.environ["PATH"]}),
    "starts a process on another path": lambda: subprocess.run(["true"], env=os.environ | {"PYTHONPATH": str(ROOT)}),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_its_own_is_refused_to_a_test(what, _folders):
    link = Path(tempfile.gettempdir()) / "link"
    link.unlink(missing_ok=True)
    link.symlink_to(ROOT)
    before = (ROOT / "README.md").stat().st_mtime_ns
    with pytest.raises(outside.Outside):
        REFUSED[what]()
    said = isolation.taken(_folders[1])
    assert len(said) == 1 and "test_what_is_not_its_own" in said[0] and "test_isolation.py" in said[0], said
    assert not NEW.exists() and not NEW.is_symlink() and (ROOT / "README.md").stat().st_mtime_ns == before


def test_its_own_folders_and_the_sources_are_not(tmp_path, _folders):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b").write_text((ROOT / "README.md").read_text())
    (tmp_path / "a").rename(tmp_path / "c")
    for folder in (Path.home(), Path(tempfile.mkdtemp())):
        assert folder.is_relative_to(tmp_path.parent.parent)
        (folder / "x").touch()
        (folder / "x").unlink()
    Path(os.devnull).write_text("x")
    subprocess.run([sys.executable, "-c", "import kernels.__main__"], check=True)
    assert not isolation.taken(_folders[1])


def test_a_name_in_an_open_folder_is_not_one_in_the_checkout(tmp_path, monkeypatch, _folders):
    """As where pytest, which starts there, removes what a test before made."""
    (tmp_path / "outputs").mkdir()
    folder = os.open(tmp_path, os.O_RDONLY)
    with monkeypatch.context() as patch:
        patch.setattr(os, "getcwd", lambda: str(ROOT))
        os.close(os.open("outputs", os.O_RDONLY, dir_fd=folder))
    os.close(folder)
    assert not isolation.taken(_folders[1])


def test_processes_that_a_test_starts_are_watched_too(_folders):
    """So are those that they start in turn."""
    code = f"open({str(NEW)!r}, 'w')"
    again = f"import subprocess, sys; sys.exit(subprocess.run([sys.executable, '-c', {code!r}]).returncode)"
    for words in (code, again):
        done = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True)
        assert done.returncode == 1 and "outside.Outside" in done.stderr
        assert [str(NEW) in line for line in isolation.taken(_folders[1])] == [True]
    assert not NEW.exists()


TESTS = f"""
import contextlib, os, subprocess, sys
from pathlib import Path

def test_hides_it():
    with contextlib.suppress(Exception):
        Path({str(NEW)!r}).write_text("x")

def test_hides_it_in_a_child():
    subprocess.run([sys.executable, "-c", "open({str(NEW)!r}, 'w')"], capture_output=True)

def test_reads():
    with contextlib.suppress(Exception):
        Path({str(OUTPUTS)!r}).read_text()

def test_leaves_a_file():
    Path("left").write_text("x")

def test_leaves_nothing(tmp_path):
    assert not os.listdir() and Path.home().is_relative_to(tmp_path.parent.parent)
    (tmp_path / "x").write_text("x")
    os.chdir(tmp_path)

def test_starts_where_all_do(tmp_path):
    assert not os.listdir()
"""


@pytest.mark.parametrize("workers", [pytest.param("0", marks=pytest.mark.slow), "2"])
def test_a_breach_fails_the_test_that_did_it(workers, tmp_path):
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    path = os.pathsep.join([os.environ["PYTHONPATH"], str(ROOT / "tests")])
    options = [
        "-p",
        "isolation",
        "-p",
        "xdist",
        "-n",
        workers,
        "-p",
        "no:cacheprovider",
        f"--basetemp={tmp_path / 'base'}",
    ]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": path, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )
    said = sorted(line.split(" - ")[0] for line in run.stdout.splitlines() if line.startswith(("ERROR ", "FAILED ")))
    wanted = ("hides_it", "hides_it_in_a_child", "leaves_a_file", "reads")
    assert said == [f"ERROR test_it.py::test_{name}" for name in wanted], run.stdout
    assert "6 passed, 4 errors" in run.stdout and not NEW.exists()


def test_a_session_that_is_cut_short_ends_as_ever(tmp_path):
    """pytest goes back to where it was started before it takes the fixtures of the session down."""
    (tmp_path / "test_it.py").write_text("def test_a():\n    raise KeyboardInterrupt\n\ndef test_b(): pass\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    path = os.pathsep.join([os.environ["PYTHONPATH"], str(ROOT / "tests")])
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "isolation", f"--basetemp={tmp_path / 'base'}", str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": path, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )
    assert run.returncode == 2 and "no tests ran" in run.stdout and "Outside" not in run.stderr, run.stdout + run.stderr
