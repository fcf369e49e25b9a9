"""Refuses what a test has no business with, by an audit hook: writes outside folders of its own, and reads of earlier runs.

Python alone, since every process that a test starts imports it first (sitecustomize.py beside this file). What it may do stands
in the environment:

  EJDIST_TESTS_OWN: folders that may be written, joined by os.pathsep; unset: nothing is watched.
  EJDIST_TESTS_KEPT: folders whose content no test may read: what runs before left there.
  EJDIST_TESTS_BREACHES: a file that gets a line for each refusal, since code under test may catch the error.
"""

from __future__ import annotations

import os
import sys
import traceback

OWN, KEPT, BREACHES = "EJDIST_TESTS_OWN", "EJDIST_TESTS_KEPT", "EJDIST_TESTS_BREACHES"
HERE = os.path.dirname(os.path.abspath(__file__))
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# Whether writes are refused: where tests are run, only while one is, since pytest writes too.
_state = {"installed": False, "writes": True}


class Outside(Exception):
    """A test left its own folders."""


def refuse_writes(now: bool) -> None:
    """Says whether this process is in a test."""
    _state["writes"] = now


def _folders(name: str) -> list[str]:
    if name == OWN and not _state["writes"]:
        return []
    return [folder for folder in os.environ.get(name, "").split(os.pathsep) if folder]


def _within(path: str, folders: list[str]) -> bool:
    return any(path == folder or path.startswith(folder + os.sep) for folder in folders)


def _path(given: object, folder: object = None) -> str | None:
    """Returns the absolute path that a system call is given, None for a descriptor, which was opened before."""
    if given is None or isinstance(given, int):
        return None
    path = os.fsdecode(given)  # type: ignore[arg-type]
    if isinstance(folder, int) and folder >= 0 and not os.path.isabs(path):
        path = os.path.join(os.path.realpath(f"/proc/self/fd/{folder}"), path)
    return os.path.join(os.path.realpath(os.path.dirname(os.path.abspath(path))), os.path.basename(path))


def _refuse(what: str) -> None:
    test = os.environ.get("PYTEST_CURRENT_TEST", "no test")
    where = [f"{os.path.basename(f.filename)}:{f.lineno}" for f in traceback.extract_stack(limit=12)[:-3]]
    line = f"{test} {what}, from {' > '.join(where[-5:])}"
    if file := os.environ.get(BREACHES):
        with open(file, "a") as breaches:
            breaches.write(line + "\n")
    raise Outside(line)


def _read(given: object, folder: object = None) -> None:
    kept = _folders(KEPT)
    if kept and (path := _path(given, folder)) and _within(path, kept):
        _refuse(f"reads {path}, which an earlier run left")


def _write(given: object, folder: object = None) -> None:
    own = _folders(OWN)
    # Python's compiled modules: known by the sources that they are of, and made by whoever imports first.
    if own and (path := _path(given, folder)) and not _within(path, own) and "__pycache__" not in path:
        _refuse(f"writes {path}, outside {own[0]}")


def _enter(given: object) -> None:
    if (own := _folders(OWN)) and (path := _path(given)) and not _within(path, own):
        _refuse(f"enters {path}, outside {own[0]}")


def _open(path: object, mode: object, flags: int) -> None:
    # Which open folder a name is in, as where a tree is removed, is not said; from a test's own folder it leads nowhere else.
    if not isinstance(path, int) and not os.path.isabs(os.fsdecode(path)) and not _within(os.getcwd(), _folders(OWN)):  # type: ignore[arg-type]
        return
    (_write if flags & _WRITES else _read)(path)


def _child(executable: object, arguments: object, cwd: object, environment: dict | None) -> None:
    """A process starts in a folder of the test, and with this file first on its path."""
    if not (own := _folders(OWN)):
        return
    if (path := _path(cwd or os.curdir)) and not _within(path, own):
        _refuse(f"starts a process in {path}")
    given = os.environ if environment is None else environment
    missing = [name for name in (OWN, KEPT, BREACHES) if name not in given]
    if missing or HERE not in given.get("PYTHONPATH", "").split(os.pathsep):
        _refuse(
            f"starts {arguments!r:.80} without {missing or HERE}: give it `os.environ | {{...}}`, PYTHONPATH as it is"
        )


# Event of sys.audit -> what is asked of its arguments.
_CHECKS = {
    "open": _open,
    "os.listdir": lambda path: _read(path),
    "os.scandir": lambda path: _read(path),
    "os.mkdir": lambda path, mode, folder: _write(path, folder),
    "os.remove": lambda path, folder: _write(path, folder),
    "os.rmdir": lambda path, folder: _write(path, folder),
    "os.truncate": lambda path, length: _write(path),
    "os.utime": lambda path, times, ns, folder: _write(path, folder),
    "os.chmod": lambda path, mode, folder: _write(path, folder),
    "os.symlink": lambda old, new, folder: _write(new, folder),
    "os.link": lambda old, new, old_folder, folder: _write(new, folder),
    "os.rename": lambda old, new, old_folder, folder: (_write(old, old_folder), _write(new, folder)),
    "os.chdir": lambda path: _enter(path),
    "subprocess.Popen": _child,
}


def _hook(event: str, arguments: tuple) -> None:
    check = _CHECKS.get(event)
    if check is not None:
        check(*arguments)


def install() -> None:
    """Watches this process from here on; a hook cannot be taken away, but does nothing without the variables."""
    if not _state["installed"]:
        _state["installed"] = True
        sys.addaudithook(_hook)
