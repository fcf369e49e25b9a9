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
import kept_programs
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


@pytest.mark.parametrize(
    ("workers", "marks", "code"), [pytest.param("2", "not slow", 1, marks=pytest.mark.slow), ("0", "", 0)]
)
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
def test_takes_much_for_a_while():
    bytes(range(256)) * 2**20

def test_takes_little():
    bytes(range(256)) * 2**12
"""


@pytest.mark.skipif(not memory.resident(), reason="the memory of a process is read from Linux's /proc")
@pytest.mark.parametrize(
    ("workers", "limit", "code"),
    [("2", 200, 1), *(pytest.param("0", limit, code, marks=pytest.mark.slow) for limit, code in ((200, 1), (2000, 0)))],
)
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
    assert (
        re.search(r"most:\n +2\d\d to \d+ MiB  test_grows.py::test_takes_much_for_a_while\n", run.stdout) or code == 0
    ), run.stdout


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
    first, step = memory.DROPS // memory.MIB, memory.AGAIN // memory.MIB
    for held[0] in (
        first - 1,
        first,
        first + 1,
        first + step,
        first + step + 1,
        first + step + 2,
        first + 2 * step + 2,
    ):
        around = plugin.pytest_runtest_protocol(SimpleNamespace(stash=pytest.Stash()))
        next(around)
        with pytest.raises(StopIteration):
            around.send(True)
    assert dropped == [first + 1, first + step + 2]


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ("run.dir=other", True),
        ("run.stop_after=3", True),
        ("checkpoint.every=2", True),
        ("data.source=other.txt", True),
        ("run.steps=7", False),
        ("run.seed=1", False),
        ("data.sequence_length=32", False),
        ("optimizer.learning_rate=0.5", False),
        ("model.num_layers=1", False),
        ("guards.spike=skip", False),
    ],
)
def test_runs_share_a_program_where_it_reads_the_same(change, same):
    from small_run import TINY

    from recipes.schema import compose

    first, other = (kept_programs.read_by_programs(compose(words)) for words in (TINY, [*TINY, change]))
    assert (first == other) == same


@pytest.mark.usefixtures("one_program_for_equal_runs")
def test_equal_runs_have_one_program():
    from small_run import TINY

    from ejdist.training.curriculum import stages_of
    from ejdist.training.setup import stage_program
    from recipes.schema import compose

    def made(*words):
        (stage,) = stages_of(compose([*TINY, "mesh.sp=1", *words]))
        return stage_program(stage, jax.devices()[:1])

    assert made("run.dir=one") is made("run.dir=two") is not made("run.seed=1")


@pytest.mark.usefixtures("one_program_for_equal_runs")
def test_a_test_that_patches_anything_has_programs_of_its_own(monkeypatch):
    from small_run import TINY

    from ejdist.training import setup
    from recipes.schema import compose

    sections = compose([*TINY, "mesh.sp=1"])
    axes = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((1,), ("sp",), devices=jax.devices()[:1], axis_types=axes)
    first, other = (setup.make_program(sections, mesh) for _ in range(2))
    assert setup.make_program.__name__ == "kept" and first is not other


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


CODE = '''
"""What slope is."""
from steep.slope import Slope, d_slope as d

# slope
def bend(x, slope=None, *, deep=False):
    """Returns x bent by slope."""
    if slope is not None:
        x = x * 2

        x = x + d
    else:
        x = -x
    if deep and slope:
        x = x + 1
    if not deep:
        raise ValueError(f"the slope of {x} is wrong: slope")
    return run(x, kind="slope", SLOPE_BATCH=1,
               rest=TABLE["model.slope"].d_slope)


@cached
def slope_of(x):
    """Returns x."""

    # a comment
    return x
'''


def counted(text, *names, **where):
    return sorted(i for _, i in costs.naming({"a/one.py": costs.Source(text)}, *names, **where))


def numbers(*lines):
    """Returns the numbers of the lines that begin so."""
    texts = [line.strip() for line in CODE.splitlines()]
    return sorted(next(i for i, text in enumerate(texts, 1) if text.startswith(line)) for line in lines)


def test_a_name_costs_the_code_that_names_it():
    """As an import, a parameter, a string, an argument, an attribute; its own function whole, and what it alone decides."""
    assert counted(CODE, "slope") == numbers(
        *("from steep", "def bend", "if slope is not None", "x = x * 2", "x = x + d", "if deep and slope"),
        *("return run", "rest=TABLE", "@cached", "def slope_of", "return x"),
    )
    assert counted(CODE, "deep") == numbers("def bend", "if deep and slope", "if not deep")
    assert counted(CODE.replace("slope is not None", "slope is None"), "slope") == sorted(
        {*counted(CODE, "slope"), *numbers("x = -x")} - {*numbers("x = x * 2", "x = x + d")}
    )
    assert counted(CODE, "lope") == counted(CODE, "slope_d") == []
    assert counted(CODE, "slope", where="^b/") == counted(CODE, "slope", but="one") == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("# slope", "# slope, slope and slope"),
        ('"""Returns x bent by slope."""', '"""Returns x\n\n    slope\n    """'),
        ("the slope of {x} is wrong: slope", "{x}"),
        ("x", "hill"),
        ("bend", "turn"),
        ("\n\n", "\n\n\n\n"),
    ],
)
def test_what_costs_nothing(old, new):
    """Words of comments, docstrings and messages, names of other things, and blank lines."""
    assert old in CODE
    assert len(counted(CODE.replace(old, new), "slope")) == len(counted(CODE, "slope"))


def test_whole_files_and_keywords_cost_their_code():
    sources = {
        "a/one.py": costs.Source(CODE),
        "b.py": costs.Source("f(\n    wide=[\n        1,\n    ],\n    x=2,\n)\n"),
    }
    text = [line for line in CODE.splitlines() if line.strip() and "#" not in line and '"""' not in line]
    assert costs.cells(costs.whole(sources, "^a/")) == ["1", str(len(text))]
    assert costs.cells(costs.keywords(sources, "wide", where="")) == ["1", "3"]
    assert costs.cells(costs.whole(sources, "^a/") | costs.naming(sources, "slope")) == ["1", str(len(text))]


def test_a_word_of_two_meanings_costs_where_it_stands_beside_its_own():
    code = "A = ('ring', 'gather')\nB = (('ring', 'x'), ('gather', 'y'))\nC = s.scheme == 'gather'\nsend(scheme, 'gather')\n"
    lines = costs.strings({"a.py": costs.Source(code)}, "gather", "ring", "scheme", where="")
    assert sorted(i for _, i in lines) == [1, 3]


def test_the_lines_of_a_row_are_shown(capsys, monkeypatch):
    monkeypatch.setattr(costs, "PACKAGES", ("ejdist/sequence",))  # to parse all takes ten seconds
    assert costs.main(["--lines", "a scheme of sequence parallelism"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(line.startswith("ejdist/sequence/schemes.py:") for line in lines) and "all_gather" in lines[-1]
    with pytest.raises(SystemExit, match="no row 'a schema'; there are 'an operation'"):
        costs.main(["--lines", "a schema"])


def test_without_the_base_the_table_keeps_what_it_says_of_it(monkeypatch):
    monkeypatch.setattr(costs, "ROWS", (("a mask rule", "`prefix`", lambda sources: frozenset({("a.py", 1)})),))
    monkeypatch.setattr(costs, "BASE", "0" * 40)
    monkeypatch.setattr(costs, "sources_now", dict)
    assert costs.sources_at(costs.BASE) is None
    assert costs.table().splitlines()[2].split("|")[3:5] == [f" {n} " for n in costs.written()["a mask rule"][1:3]]
