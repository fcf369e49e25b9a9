"""What is costly to make and only read afterwards: made once for all workers of a test session."""

import fcntl
import shutil
from pathlib import Path


def session_folder(tmp_path_factory):
    """Returns the folder of the test session: pytest-xdist gives each worker a folder of its own in it."""
    base = tmp_path_factory.getbasetemp()
    return Path(base.parent if base.name.startswith("popen-") else base)


def once(tmp_path_factory, name, make):
    """Returns the folder that `make(folder)` has filled. The first worker that asks makes it, the others wait for it."""
    root = session_folder(tmp_path_factory)
    folder, done = root / name, root / f"{name}.done"
    with (root / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            make(folder)
            done.touch()
    return folder
