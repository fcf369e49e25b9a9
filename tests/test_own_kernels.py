"""A machine with another package `kernels`, such as Hugging Face's."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def ran(folders, *words):
    """Runs Python with these folders in PYTHONPATH, of which the project's own stands for all that is there now."""
    there = [os.environ.get("PYTHONPATH", ""), str(ROOT)]
    path = [part for folder in folders for part in (there if folder == ROOT else [str(folder)]) if part]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path), "PYTHONSAFEPATH": "1"}
    return subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True, check=False)


@pytest.fixture
def other(tmp_path):
    """A folder with a package `kernels` of another distribution."""
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("def get_kernel(name): ...\n")
    (tmp_path / "kernels-0.9.0.dist-info").mkdir()
    (tmp_path / "kernels-0.9.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: kernels\nVersion: 0.9.0\n"
    )
    return tmp_path


def test_one_that_comes_first_is_named_with_what_to_do(other):
    made = ran((other, ROOT), "-c", "import ejdist")
    last = made.stderr.splitlines()[-1]
    assert made.returncode == 1 and last.startswith("ImportError: ejdist needs its own package 'kernels'"), made.stderr
    assert f"in {other / 'kernels'}: put {ROOT} first in PYTHONPATH" in last and "pip uninstall kernels" in last
    made = ran((other, ROOT), "-m", "launch.train", "run.steps=3")
    assert made.returncode == 2 and made.stderr.startswith("error: ejdist needs its own package 'kernels'")
    assert made.stderr.count("\n") == 1


@pytest.mark.slow
def test_one_that_comes_later_is_told(other):
    made = ran((ROOT, other), "-c", "import ejdist")
    assert made.returncode == 0 and "the package kernels 0.9.0 is installed too" in made.stderr
    assert made.stderr.count("UserWarning") == 1
