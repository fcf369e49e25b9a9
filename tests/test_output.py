"""What commands print beside their results: how long a compiler takes, and nothing of the libraries below."""

import io
import re
import subprocess
import sys
import time

import pytest

from ejdist import progress

_LEAVES = """
import atexit, sys, types
from launch.errors import leaver
leave = leaver()
atexit.register(print, "registered later")
class Leaked:
    def __del__(self, write=sys.__stdout__.write): write("nanobind: leaked\\n")
kept = Leaked()
if {triton}:
    sys.modules["triton._C.libtriton"] = types.ModuleType("libtriton")
print("the answer", end="")
leave(3)
"""


@pytest.mark.parametrize(("triton", "said"), [(True, ""), (False, "nanobind: leaked\n")])
def test_a_command_that_compiled_with_triton_ends_before_its_bindings_complain(triton, said):
    made = subprocess.run(
        [sys.executable, "-c", _LEAVES.format(triton=triton)], capture_output=True, text=True, check=False
    )
    assert (made.returncode, made.stdout) == (3, f"the answerregistered later\n{said}")


def test_what_takes_long_is_told_now_and_then(monkeypatch):
    monkeypatch.setattr(progress, "FIRST", 0.02)
    lines = []
    with progress.waiting("compiling", lines.append, io.StringIO()):
        assert lines == ["compiling"]
        until = time.monotonic() + 20
        while len(lines) < 3 and time.monotonic() < until:
            time.sleep(0.01)
    assert all(re.fullmatch(r"compiling: \d+ s so far", line) for line in lines[1:-1]) and len(lines) > 3
    assert re.fullmatch(r"compiling: \d+ s", lines[-1])


def test_what_is_quick_is_told_once():
    lines = []
    with pytest.raises(ValueError, match="refused"), progress.waiting("compiling", lines.append, io.StringIO()):
        raise ValueError("refused")
    assert lines == ["compiling"]


def test_a_terminal_has_one_live_line():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    stream, lines = Terminal(), []
    with progress.waiting("compiling", lines.append, stream):
        until = time.monotonic() + 20
        while not stream.getvalue() and time.monotonic() < until:
            time.sleep(0.01)
    assert stream.getvalue().startswith("\r\x1b[Kcompiling: 1 s") and stream.getvalue().endswith("\r\x1b[K")
    assert lines == ["compiling", "compiling: 1 s"]
