"""What an operation costs: the budget of its tests, the choice of what a change must run, and the table in CONTRIBUTING."""

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import budget
import changed
import costs
import jax
import memory
import pytest

TESTS = Path(__file__).parent
OPERATIONS = ("attention", "attention_sinks", "rms_norm")

SPIN = """
import time, pytest

@pytest.mark.parametrize("which", [1, 2])
def test_spins(which):
    until = time.process_time() + 0.4
    while time.process_time() < until:
        pass
"""


@pytest.mark.parametrize(("workers", "marks", "code"), [("2", "not slow", 1), ("0", "", 0)])
def test_a_session_past_the_budget_of_an_operation_fails(workers, marks, code, tmp_path):
    """The two tests run in two workers, and neither is past the budget by itself; the full grids have no budget."""
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "test_rms_norm_spins.py").write_text(SPIN)
    (tmp_path / "conftest.py").write_text("import budget\nbudget.MORE['rms_norm'] = (0.3, 'a test')\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow\n")
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "budget", "-p", "xdist", "-n", workers, "-m", marks, str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        # Plugins of other packages take longer to import than these tests to run.
        env={**os.environ, "PYTHONPATH": f"{os.environ['PYTHONPATH']}:{TESTS}", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )
    assert run.returncode == code, run.stdout + run.stderr
    said = "rms_norm: its quick tests took 1 s of CPU, past its budget of 0 s" in run.stdout
    assert said == (code == 1) and (not said or "s  kernels/test_rms_norm_spins.py::test_spins[1]" in run.stdout), (
        run.stdout
    )


GROWS = """
held = []

def test_takes_little():
    held.append(b"x" * 2**20)

def test_takes_much():
    held.append(b"x" * 2**28)
"""


@pytest.mark.skipif(not memory.resident(), reason="the memory of a process is read from Linux's /proc")
@pytest.mark.parametrize(("workers", "limit", "code"), [("2", 200, 1), ("0", 200, 1), ("0", 2000, 0)])
def test_a_session_with_a_worker_past_the_limit_of_memory_fails(workers, limit, code, tmp_path):
    (tmp_path / "test_grows.py").write_text(GROWS)
    (tmp_path / "conftest.py").write_text(f"import memory\nmemory.LIMIT = {limit} * memory.MIB\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow\n")
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "memory", "-p", "xdist", "-n", workers, "-m", "not slow", str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{os.environ['PYTHONPATH']}:{TESTS}", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )
    assert run.returncode == code, run.stdout + run.stderr
    assert (f"past the limit of {limit} MiB" in run.stdout) == (code == 1), run.stdout
    assert re.search(r"most:\n +2\d\d MiB  test_grows.py::test_takes_much\n", run.stdout) or code == 0, run.stdout


def test_programs_that_are_kept_are_dropped():
    def live():
        return len(jax.devices()[0].client.live_executables())

    functions = [jax.jit(lambda x, i=i: x + i) for i in range(8)]
    assert [float(f(1.0)) for f in functions] == list(range(1, 9))
    before = live()
    memory.drop_programs()
    assert live() <= before - len(functions)
    assert functions[3](1.0) == 4.0


def test_a_worker_drops_its_programs_when_it_holds_much_and_has_grown(monkeypatch):
    """After a test, and not after every one where what is left is as much."""
    held, dropped = [0], []
    monkeypatch.setattr(memory, "resident", lambda name="VmRSS": held[0] * memory.MIB)
    monkeypatch.setattr(memory, "drop_programs", lambda: dropped.append(held[0]))
    plugin = memory.Memory(SimpleNamespace(option=SimpleNamespace(markexpr="not slow")))
    for held[0] in (1000, 1500, 1600, 1700, 1800, 1900, 2000):
        around = plugin.pytest_runtest_protocol(SimpleNamespace(stash=pytest.Stash()))
        next(around)
        with pytest.raises(StopIteration):
            around.send(True)
    assert dropped == [1600, 1900]


def test_a_test_belongs_to_the_operation_of_its_parameter_or_of_its_file():
    import kernels

    ops = kernels.operations()
    assert (
        budget.operation_of("tests/test_ops.py", {"op": ops["cross_entropy_of_logits"], "dtype": "float32"})
        == "cross_entropy"
    )
    assert (
        budget.operation_of("tests/test_sharded.py", {"f": kernels.public_functions()["attention"]})
        == "flash_attention"
    )
    assert budget.operation_of("tests/kernels/test_rms_norm.py", {}) == "rms_norm"
    assert budget.operation_of("tests/test_masks.py", {"op": "rms_norm"}) is None
    assert budget.operation_of("tests/kernels/test_of_another_kind.py", {}) is None


def test_more_than_the_budget_has_a_reason():
    for operation, (seconds, why) in budget.MORE.items():
        assert (budget.FOLDERS / operation / "contract.py").exists() and seconds > budget.SECONDS and len(why) > 20


@pytest.mark.parametrize(
    ("files", "found"),
    [
        (["kernels/ops/rms_norm/triton_gpu.py"], ["rms_norm"]),
        (["kernels/ops/rms_norm/README.md", "README.md", "ejdist/mesh.py"], []),
        (["tests/kernels/test_attention_sinks.py"], ["attention_sinks"]),
        (["tests/kernels/test_attention.py", "tests/gpu/test_rms_norm_gpu.py"], ["attention", "rms_norm"]),
        (["kernels/framework/dims.py"], [*OPERATIONS]),
        (["tests/grid.py"], [*OPERATIONS]),
        (["tests/test_ops.py"], [*OPERATIONS]),
        (["kernels/ops/gone/contract.py", "kernels/ops/__init__.py"], []),
    ],
)
def test_operations_that_changed(files, found):
    assert changed.changed_operations(files, OPERATIONS) == found


def test_an_engine_changes_the_operations_that_import_it():
    recurrences = ["delta_rule", "linear_attention", "recurrent", "state_space"]
    assert changed.changed_operations(["kernels/engines/scan/chunks.py"], changed.folders()) == recurrences
    assert changed.changed_operations(["kernels/engines/README.md"], changed.folders()) == []


def test_what_is_run_for_a_changed_operation():
    own, generic = changed.commands(["cross_entropy"], changed.folders())
    assert own[-1] == "tests/kernels/test_cross_entropy.py" and "tests/test_code.py" in generic
    words = generic[generic.index("-k") + 1].split(" or ")
    assert {"cross_entropy", "cross_entropy_of_logits", "fused_cross_entropy"} <= set(words) and "rms_norm" not in words
    [everything] = changed.commands(changed.folders(), changed.folders())
    assert "-k" not in everything and set(changed.GENERIC) <= set(everything)
    assert changed.commands([], changed.folders()) == []
    assert all("slow or not slow" in command[1] for command in (own, generic, everything))


def test_the_revision_to_compare_with_is_not_this_one(tmp_path, monkeypatch):
    def git(*arguments):
        settings = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
        subprocess.run(["git", *settings, *arguments], cwd=tmp_path, check=True, capture_output=True)

    monkeypatch.setattr(changed, "ROOT", tmp_path)
    git("init", "-b", "main")
    for name in ("one", "two"):
        (tmp_path / name).write_text(name)
        git("add", "."), git("commit", "-m", name)
    assert changed.changed_files(changed.base_of(None)) == ["two"]
    git("checkout", "-b", "work")
    (tmp_path / "three").write_text("three")
    git("add", "."), git("commit", "-m", "three")
    (tmp_path / "four").write_text("four")
    (tmp_path / "one").write_text("changed")
    assert changed.changed_files(changed.base_of(None)) == ["four", "one", "three"]
    assert changed.changed_files(changed.base_of("main~1")) == ["four", "one", "three", "two"]


def test_the_table_of_costs_is_what_is_counted():
    """Files exactly, and what it says of the past; the lines of today within a quarter, since any commit may change them."""
    cells = {
        line.split("|")[1].strip(): [c.strip() for c in line.split("|")[2:-1]]
        for line in costs.table().splitlines()[2:]
    }
    have = costs.written()
    assert list(cells) == list(have) == [what for what, _, _ in costs.ROWS], "run python tests/costs.py --write"
    for what, (*exact, lines) in cells.items():
        assert have[what][:-1] == exact, f"{what}: run python tests/costs.py --write"
        assert abs(int(have[what][-1]) - int(lines)) <= max(1, int(lines) / 4), (
            f"{what}: run python tests/costs.py --write"
        )


def test_costs_are_of_code():
    sources = {
        "a/one.py": costs.code_of('"""Doc of x."""\n\n# x\ndef f(x):\n    """x"""\n    y = x\n\n    return y\n'),
        "b.py": "z = x",
    }
    assert sources["a/one.py"].splitlines() == ["def f(x):", "    y = x", "    return y"]
    assert costs.whole(sources, "^a/") == costs.Cost(1, 3)
    assert costs.naming(sources, r"\bx\b") == costs.Cost(2, 3)
    assert costs.naming(sources, r"\bx\b", but="^b") == costs.naming(sources, r"\bx\b", where="^a/") == costs.Cost(1, 2)
    assert costs.body(sources, "a/one.py", "f") == costs.Cost(1, 3) and costs.body(
        sources, "gone.py", "f"
    ) == costs.Cost(0, 0)


def test_without_the_base_the_table_keeps_what_it_says_of_it(monkeypatch):
    whole = costs.table()
    monkeypatch.setattr(costs, "BASE", "0" * 40)
    assert costs.sources_at(costs.BASE) is None and costs.table() == whole
