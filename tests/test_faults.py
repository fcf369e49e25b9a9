"""The faults that are seeded on purpose can be, and what should find them is there. `python tests/mutations.py` seeds them."""

import ast
import shlex
from pathlib import Path

import mutations
import pytest
from faults import Fault, collected
from seeding import Project, Stale

AREAS = collected()
PROJECT = Project(mutations.ROOT)


@pytest.mark.parametrize("area", AREAS)
def test_no_fault_is_stale(area):
    stale = {fault.name: why for fault in AREAS[area] if (why := mutations.stale(fault, PROJECT))}
    assert not stale, f"state it in the code as it is now: {stale}"
    for fault in AREAS[area]:
        assert fault.new != fault.old, fault.name
        files = [part.partition("::")[0] for part in shlex.split(fault.tests) if part.startswith("tests/")]
        assert files and all((mutations.ROOT / file).exists() for file in files), f"{fault.name}: {fault.tests}"


def test_names_tell_faults_apart():
    names = [fault.name for faults in AREAS.values() for fault in faults]
    assert len(names) == len(set(names)), sorted({n for n in names if names.count(n) > 1})


@pytest.mark.slow
def test_what_is_unnoticed_stale_or_broken_is_said(tmp_path, monkeypatch, capsys):
    """A project of two files, in which one fault is found by a quick test, one by a slow test, and the others are not."""
    (tmp_path / "code_of.py").write_text("A = 1\nB = 2\nD = 4\n")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_it.py").write_text(
        "import code_of, pytest\n\ndef test_a():\n    assert code_of.A == 1\n\n"
        "@pytest.mark.slow\ndef test_d():\n    assert code_of.D == 4\n"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -m 'not slow'\nmarkers =\n  slow\n  gpu\n")
    test = "tests/test_it.py"
    faults = (
        Fault("found", "code_of.py", "A = 1", "A = 2", test),
        Fault("of a slow test", "code_of.py", "D = 4", "D = 5", test),
        Fault("unnoticed", "code_of.py", "B = 2", "B = 3", test),
        Fault("old", "code_of.py", "C = 1", "C = 2", test),
        Fault("no such test", "code_of.py", "A = 1", "A = 2", f"{test} -k nothing"),
        Fault("no Python", "code_of.py", "A = 1", "A = (1", test),
    )
    monkeypatch.setattr(mutations, "ROOT", Path(tmp_path))
    monkeypatch.setattr(mutations, "collected", lambda: {"area": faults})
    # Plugins of other packages take longer to import than these tests to run; -n is an option of one of them.
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p xdist")
    assert mutations.main(["-n", "2"]) == 1
    said = capsys.readouterr().out
    assert "2 of 6 faults" in said and "slow: FAILED tests/test_it.py::test_d" in said
    for state, name in (("GREEN", "unnoticed"), ("STALE", "old"), ("STALE", "no Python"), ("BROKEN", "no such test")):
        assert f"{state:6} {name} (" in said
    assert mutations.main(["found"]) == 0


SOURCE = """
STEP = 1

def walk(total, ahead):
    far = 0
    while far < total:
        far = far + STEP
        total = total - ahead
    return far


class Run:
    def walk(self, x):
        return x - 1 if x else 0
"""


def project(tmp_path, **files):
    """Returns a project of these sources; `a__b` is the file b in the folder a."""
    for name, text in files.items():
        path = tmp_path / f"{name if '/' in name else name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Project(tmp_path)


def seed(found, anchor, pattern, replacement):
    """Returns the file, and the lines of it that the replacement changes."""
    file, text = found.mutated(anchor, pattern, replacement)
    before = ast.unparse(ast.parse(found.texts[file])).splitlines()
    return file, [line.strip() for line in text.splitlines() if line not in before]


def test_a_pattern_survives_a_move_and_a_renaming(tmp_path):
    fault = ("walk", "$far = $far + STEP", "$far = $far + 2 * STEP")
    assert seed(project(tmp_path / "one", a__code=SOURCE), *fault) == ("a/code.py", ["far = far + 2 * STEP"])
    moved = SOURCE.replace("far", "way").replace("way + STEP", "way + STEP  # a comment")
    assert seed(project(tmp_path / "two", b__c__other=moved), *fault) == ("b/c/other.py", ["way = way + 2 * STEP"])


def test_two_names_of_a_pattern_are_two_names(tmp_path):
    found = project(tmp_path, code="def f(x, y):\n    return g(x, x) + g(x, y)\n")
    assert seed(found, "f", "g($a, $b)", "g($b, $a)")[1] == ["return g(x, x) + g(y, x)"]
    assert seed(found, "f", "g($a, $a)", "g($a, 1)")[1] == ["return g(x, 1) + g(x, y)"]


@pytest.mark.parametrize(
    ("anchor", "pattern", "replacement", "lines"),
    [
        ("STEP", "1", "2", ["STEP = 2"]),
        ("code:", "STEP = 1", "STEP = 3", ["STEP = 3"]),
        ("Run.walk", "$x - 1 if $x else 0", "$x - 1", ["return x - 1"]),
        ("Run.walk", "def walk(self, x): $$body", "def walk(self, x=1): $$body", ["def walk(self, x=1):"]),
        ("walk", "while $far < $total: $$body", "while $far <= $total: $$body", ["while far <= total:"]),
        ("walk", "$far = $far + STEP\n$$rest", "pass", ["pass"]),
        ("walk", "$total = $total - $ahead", "", []),
        ("Run", "return $x - 1 if $x else 0", "", ["pass"]),
    ],
)
def test_what_a_fault_can_name(tmp_path, anchor, pattern, replacement, lines):
    found = project(tmp_path, code=SOURCE)
    assert seed(found, anchor, pattern, replacement) == ("code.py", lines)


def test_any_number_of_arguments(tmp_path):
    found = project(tmp_path, code="def f(x):\n    return g(x, 1, *x, deep=True, wide=x, **x) + h(x)\n")
    changed = seed(found, "f", "g($$args, **$$before, wide=$x, **$$after)", "g($$args, **$$before, **$$after)")
    assert changed[1] == ["return g(x, 1, *x, deep=True, **x) + h(x)"]


def test_what_a_replacement_binds_itself_is_a_name(tmp_path):
    found = project(tmp_path, code="from a import b, c\n\ndef f(x):\n    return b(x)\n")
    assert seed(found, "code:", "from a import $$names", "from b import $$names")[1] == ["from b import b, c"]
    new = "import json.tool\nclass Box:\n    $x = json\n$y = [z for z in Box.$x]\nreturn $y"
    assert len(seed(found, "f", "return b($x)", new.replace("$y", "y"))[1]) == 5


def test_a_string_keeps_its_dollars(tmp_path):
    found = project(tmp_path, code='def f(x):\n    return x + "$HOME $$"\n')
    assert seed(found, "f", '$x + "$HOME $$"', '"$x" + $x')[1] == ["return '$x' + x"]


@pytest.mark.parametrize(
    ("anchor", "pattern", "replacement", "why"),
    [
        ("walked", "1", "2", r"nothing is defined as walked; walk"),
        ("other/module:walk", "1", "2", "no file's path ends in other/module"),
        ("two:Run", "1", "2", r"nothing is defined as Run in two; one.py has one"),
        ("walk", "$far = $far - STEP", "pass", r"walk \(one.py, two.py\) has no"),
        ("walk", "$far = $far + STEP", "pass", r"2 places that match .*: 1 in one.py, 1 in two.py"),
        ("one:walk", "$a", "1", r"places that match '\$a': \d+ in one.py"),
        ("one:walk", "$a - $b)", "1", "is not Python"),
        ("one:walk", "$a - $b", "$a - $c", r"\$c is in the replacement and not in the pattern"),
        ("one:walk", "$a - $b", "$a - ahaed", "ahaed in the replacement is no name"),
    ],
)
def test_a_stale_fault_says_what_is_missing_or_ambiguous(tmp_path, anchor, pattern, replacement, why):
    found = project(tmp_path, one=SOURCE, two=SOURCE.partition("class")[0])
    with pytest.raises(Stale, match=why):
        found.find(anchor, pattern, replacement)


def test_a_path_in_an_anchor_tells_files_apart_and_survives_a_renamed_folder(tmp_path):
    found = project(tmp_path, ops__one__xla=SOURCE, ops__two__xla=SOURCE, **{"data/__init__": SOURCE})
    assert found.find("two/xla:walk", "$far < $total", "$far") == "ops/two/xla.py"
    assert found.find("old/ops/two/xla:walk", "$far < $total", "$far") == "ops/two/xla.py"
    assert found.find("data:walk", "$far < $total", "$far") == "data/__init__.py"
    with pytest.raises(Stale, match="2 places"):
        found.find("old/xla:walk", "$far < $total", "$far")


def test_what_tests_stand_on_is_named_by_its_whole_path(tmp_path):
    found = project(tmp_path, code=SOURCE, tests__helper=SOURCE.replace("def walk", "def stroll"), tests__code=SOURCE)
    assert found.find("tests/helper:stroll", "$far < $total", "$far") == "tests/helper.py"
    assert found.find("code:walk", "$far < $total", "$far") == found.find("walk", "$far < $total", "$far") == "code.py"
    assert found.find("tests/code:walk", "$far < $total", "$far") == "tests/code.py"
    for anchor in ("stroll", "helper:stroll"):
        with pytest.raises(Stale):
            found.find(anchor, "$far < $total", "$far")
