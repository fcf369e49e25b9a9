"""The faults that are seeded on purpose can be, and what should find them is there. `python tests/mutations.py` seeds them."""

import shlex
from pathlib import Path

import mutations
import pytest
from faults import Fault, collected

AREAS = collected()


@pytest.mark.parametrize("area", AREAS)
def test_no_fault_is_stale(area):
    stale = {fault.name: why for fault in AREAS[area] if (why := mutations.stale(fault))}
    assert not stale, f"state it in the code as it is now: {stale}"
    for fault in AREAS[area]:
        assert fault.new != fault.old, fault.name
        files = [part.partition("::")[0] for part in shlex.split(fault.tests) if part.startswith("tests/")]
        assert files and all((mutations.ROOT / file).exists() for file in files), f"{fault.name}: {fault.tests}"


def test_names_tell_faults_apart():
    names = [fault.name for faults in AREAS.values() for fault in faults]
    assert len(names) == len(set(names)), sorted({n for n in names if names.count(n) > 1})


def test_what_is_unnoticed_stale_or_broken_is_said(tmp_path, monkeypatch, capsys):
    """A project of two files, in which one fault is found and the others are not."""
    (tmp_path / "code.py").write_text("A = 1\nB = 2\n")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_it.py").write_text("import code_of\n\ndef test_a():\n    assert code_of.A == 1\n")
    (tmp_path / "code.py").rename(tmp_path / "code_of.py")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    test = "tests/test_it.py"
    faults = (
        Fault("found", "code_of.py", "A = 1", "A = 2", test),
        Fault("unnoticed", "code_of.py", "B = 2", "B = 3", test),
        Fault("old", "code_of.py", "C = 1", "C = 2", test),
        Fault("no such test", "code_of.py", "A = 1", "A = 2", f"{test} -k nothing"),
    )
    monkeypatch.setattr(mutations, "ROOT", Path(tmp_path))
    monkeypatch.setattr(mutations, "collected", lambda: {"area": faults})
    assert mutations.main(["-n", "2"]) == 1
    said = capsys.readouterr().out
    assert "1 of 4 faults" in said
    for state, name in (("GREEN", "unnoticed"), ("STALE", "old"), ("BROKEN", "no such test")):
        assert f"{state:6} {name} (" in said
    assert mutations.main(["found"]) == 0
