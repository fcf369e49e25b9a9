"""Files with a row a step: cut from their end, read as they come, and the same summary of any number of rows."""

import itertools
import json
import random
import statistics
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ejdist.training import step_rows
from ejdist.training.metrics import rows_in
from ejdist.training.step_rows import RowsFile, StepRows, Thinned, cut_after
from ejdist.training.summary import summarise

STEP = '{"step": %d, "loss": 1.5}'


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 30), max_size=12), st.integers(1, 9), st.integers(0, 14), st.sampled_from(["", "\n"]))
def test_a_file_is_cut_behind_the_step_that_the_run_goes_on_from(tmp_path_factory, widths, read, start, end):
    """Whatever the lengths of its lines are, and where a read of it begins."""
    path = tmp_path_factory.mktemp("cut") / "rows.jsonl"
    rows = [{"step": step, "text": "é\r" * width} for step, width in enumerate(widths, 1)]
    path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + (end if rows else ""), newline="")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_rows, "_READ", read)
        stored = StepRows(path, lambda row: "step" in row)
        assert list(stored) == rows and list(stored.backwards()) == rows[::-1]
        file = RowsFile(path, start)
        file.put({"step": start + 1})
        file.close()
    assert [json.loads(line) for line in path.read_bytes().splitlines()] == [*rows[:start], {"step": start + 1}]


def test_what_a_kill_left_at_the_end_is_cut_and_damage_before_it_stays(tmp_path):
    path = tmp_path / "rows.jsonl"
    lines = [STEP % 1, "damaged", STEP % 3, STEP % 4, '{"step": "5"}', STEP % 6, '{"step": 4, "lo']
    path.write_text("\n".join(lines))
    cut_after(path, 4)
    assert path.read_text() == "\n".join(lines[:4]) + "\n"
    cut_after(path, 9)
    assert path.read_text() == "\n".join(lines[:4]) + "\n"
    cut_after(path, 0)
    assert path.read_text() == ""
    cut_after(tmp_path / "none", 3)
    assert not (tmp_path / "none").exists()


def test_a_start_reads_and_keeps_no_more_of_a_long_run(tmp_path, monkeypatch):
    """What a start reads of the rows does not depend on how many there are, and what their pictures hold neither."""
    monkeypatch.setattr(step_rows, "_READ", 1 << 12)
    rows = {"step_time": 0.5, "tokens": 8, "flops_causal": 4.0, "flops_full": 8.0, "many": [0.123456789] * 40}
    peaks = []
    for count in (300, 3000):
        path = tmp_path / f"{count}.jsonl"
        with path.open("w") as file:
            file.writelines(json.dumps({"step": step, "loss": 1 / step, **rows}) + "\n" for step in range(1, count + 1))
        tracemalloc.start()
        cut_after(path, count - 100)
        some = Thinned(also=[count // 2 + 1], most=200)
        found, shown = summarise(some.passing(rows_in(path)), devices=1, peak=None), some.rows()
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert found["steps"] == count - 100 and found["step_time"] == 0.5 and found["loss_first"] == 1
        assert shown[-1]["step"] == count - 100 and shown[0]["step"] == 1 and 100 <= len(shown) <= 202
        assert count // 2 + 1 in [row["step"] for row in shown]
    assert peaks[1] < peaks[0] + 4e5 and peaks[1] < path.stat().st_size / 2


def test_rows_at_even_distances_are_those_of_moments_of_the_run(tmp_path):
    path = tmp_path / "rows.jsonl"
    for count in (0, 1, 3, 4, 5, 17, 101):
        rows = ({"step": step, "of": "x" * (4 - len(str(step)))} for step in range(1, count + 1))
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        steps = [row["step"] for row in StepRows(path, lambda row: True).spread(5)]
        assert len(steps) == min(5, count) and steps == sorted(steps)
        assert not count or (steps[0] == 1 and steps[-1] == count)
        assert count < 17 or max(b - a for a, b in itertools.pairwise(steps)) <= count / 4 + 2


def summary_of_all(rows, devices, since):
    """The same in the words of its docstring, with all rows in memory."""
    measured = [row for row in rows if row["step"] > since] or rows
    measured = [row for row in measured if row.get("devices", devices) == devices] or measured
    measured = [row for row in measured if row.get("mesh") == measured[-1].get("mesh")]
    measured = [row for row in measured if "tokens" in row]
    return statistics.median(row["step_time"] for row in (measured[2:] or measured))


@pytest.mark.parametrize("seed", range(20))
def test_a_summary_of_rows_that_are_read_once_is_that_of_all(seed):
    rng = random.Random(seed)
    rows = []
    for step in range(1, rng.randint(2, 40)):
        row = {"step": step, "step_time": rng.random() + 0.1, "flops_causal": 1.0, "flops_full": 1.0, "tokens": 1}
        row |= {"devices": rng.choice([2, 4])} if rng.random() < 0.8 else {}
        row |= {"mesh": rng.choice(["sp=2", "dp=2"])} if rng.random() < 0.8 else {}
        rows.append(row)
    for since, devices in ((0, 4), (rng.randint(0, 40), 2), (99, 8)):
        found = summarise(iter(rows), devices=devices, peak=None, since=since)
        assert found["step_time"] == summary_of_all(rows, devices, since) and found["steps"] == rows[-1]["step"]
