"""The goodput ledger: every second of a run is in one class, over kills, restarts and rewinds."""

import itertools
import json
import random

import pytest

from ejdist.training import goodput
from ejdist.training.goodput import CLASSES, NAME, Goodput, Ledger, account, read
from ejdist.training.step_timer import in_few


def rows(*made):
    """Returns rows from (at, phase, what else)."""
    return [{"at": at, "phase": phase, **(rest[0] if rest else {})} for at, phase, *rest in made]


START = [
    (0, "restart", {"start": True}),
    (2, "compile"),
    (12, "restart", {"resumed": 0}),
    (15, "productive", {"step": 0}),
]


def seconds(found: Goodput) -> dict:
    return {name: getattr(found, name) for name in CLASSES if getattr(found, name)}


def test_a_run_in_one_start():
    found = account(
        rows(
            *START,
            (25, "productive", {"step": 10, "data_wait": 1}),
            (35, "checkpoint", {"step": 20, "data_wait": 0.5}),
            (37, "productive", {"step": 20}),
            (47, "end", {"step": 30, "data_wait": 0}),
        )
    )
    assert seconds(found) == {"productive": 28.5, "compile": 10, "data_wait": 1.5, "checkpoint": 2, "restart": 5}
    assert found.wall == 47 and found.starts == 1 and found.fraction == pytest.approx(28.5 / 47)


def killed_and_again():
    return rows(
        *START,
        (35, "checkpoint", {"step": 20}),
        (36, "productive", {"step": 20}),
        (46, "productive", {"step": 30, "data_wait": 1}),
        # Killed; the next start is 14 s later, and goes on from step 20.
        (60, "restart", {"start": True}),
        (63, "compile"),
        (64, "restart", {"resumed": 20}),
        (66, "productive", {"step": 20}),
        (86, "end", {"step": 40}),
    )


def test_steps_that_are_made_again_are_lost_and_the_time_between_two_processes_is_down():
    found = account(killed_and_again())
    wanted = {"productive": 20 + 20, "compile": 11, "checkpoint": 1, "restart": 5 + 5, "lost": 10, "down": 14}
    assert seconds(found) == wanted and found.wall == 86 and found.starts == 2


def test_of_a_span_with_steps_on_both_sides_of_the_checkpoint_the_later_part_is_lost():
    """The save of step 20 was cut off: the run goes on from step 10, in the middle of what was told."""
    again = [dict(row) for row in killed_and_again()]
    next(row for row in again if row.get("resumed") == 20)["resumed"] = 10
    found = account(again)
    assert found.lost == pytest.approx(10 + 10) and found.productive == pytest.approx(10 + 20) and found.wall == 86


def test_what_a_guard_gives_up_is_rewound():
    made = [
        *START,
        (25, "checkpoint", {"step": 10}),
        (26, "productive", {"step": 10}),
        (36, "rewind", {"step": 18, "to": 10, "data_wait": 2}),
        (39, "productive", {"step": 10}),
        (49, "end", {"step": 20}),
    ]
    found = account(rows(*made))
    assert seconds(found) == {"productive": 20, "compile": 10, "checkpoint": 1, "restart": 5, "rewound": 13}
    assert found.rewinds == 1 and "1 rewind:" in str(found)


@pytest.mark.parametrize("seed", range(20))
def test_classes_add_up_to_the_wall_time(seed):
    """Of any run: kills, rewinds and ends at random, and rows that say nothing of a phase."""
    chance, at, step, made, saved = random.Random(seed), 1.7e9, 0, [], 0

    def row(phase, **rest):
        nonlocal at
        at += chance.random() * 5
        made.append({"at": at, "phase": phase, **rest})

    for _ in range(chance.randrange(1, 6)):
        row("restart", start=True)
        row("compile")
        row("restart", resumed=saved)
        step = saved
        row("productive", step=step)
        for _ in range(chance.randrange(12)):
            kind, step = chance.choice(["productive", "checkpoint", "rewind", "hosts"]), step + chance.randrange(5)
            if kind == "hosts":
                made.append({"at": at, "hosts": {}})
            elif kind == "rewind":
                row(kind, step=step, to=saved)
                step = saved
                row("productive", step=step)
            else:
                row(kind, step=step, data_wait=chance.random() * 10)
            if kind == "checkpoint":
                saved = step
                row("productive", step=step)
        if chance.random() < 0.5:
            row("end", step=step)
    found = account(made)
    assert sum(seconds(found).values()) == pytest.approx(made[-1]["at"] - made[0]["at"])
    assert found.starts == sum("start" in r for r in made) and min(getattr(found, name) for name in CLASSES) >= 0
    assert found.wall == pytest.approx(found.as_json()["wall"])


def test_no_rows_are_no_time():
    assert account([]).wall == 0 == account([]).fraction
    assert str(account(rows(*START))).startswith("goodput 0.0% of 15.0 s in 1 start: compile 10.0, restart 5.0")


def test_a_clock_that_goes_backwards_between_processes_takes_no_time_away():
    made = rows(*START, (25, "productive", {"step": 5}), (5, "restart", {"start": True}), (9, "compile"))
    found = account(made)
    assert found.down == 0 and found.wall == 25 + 4


def test_a_ledger_that_was_cut_off_in_a_line_goes_on_in_the_next(tmp_path):
    first = Ledger(True, began=100.0)
    assert not list(tmp_path.iterdir()), "events before it is opened must write nothing"
    first.open(tmp_path)
    first.phase("productive", step=3)
    first.close()
    path = tmp_path / NAME
    path.write_text(path.read_text() + '{"at": 17, "pha')  # as SIGKILL leaves it
    second = Ledger(True)
    second.open(tmp_path)
    second.note(hosts={}, step=4)
    second.close()
    found = read(path)
    assert [row.get("phase") for row in found] == ["restart", "productive", "end", "restart", None, "end"]
    assert found[0]["at"] == 100.0 and account(found).starts == 2
    assert all(json.loads(line) for line in path.read_text().splitlines() if not line.startswith('{"at": 17,'))


@pytest.mark.parametrize(
    "line",
    ["[" * 100000, "1" * 5000, "null", "[1]", '{"at": "2"}', '{"at": true, "phase": "end"}', '{"at": NaN, "phase": "end"}',
     '{"at": 3, "phase": "productive", "step": "x"}', '{"at": 3, "phase": "lunch"}', '{"at": 3, "phase": ["end"]}',
     '{"at": 3, "phase": "rewind"}', '{"at": 3, "phase": "productive", "step": 3, "data_wait": null}'],
)  # fmt: skip
def test_a_line_that_is_no_record_is_left_out(line, tmp_path):
    whole = rows(*START, (25, "productive", {"step": 5}))
    (tmp_path / NAME).write_text("".join(json.dumps(row) + "\n" + line + "\n" for row in whole))
    assert read(tmp_path / NAME) == whole and account(read(tmp_path / NAME)) == account(whole)


def test_a_full_disk_is_told_as_that_of_the_run(tmp_path, monkeypatch):
    ledger = Ledger(True)
    ledger.open(tmp_path)

    def full(text):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(
        ledger, "_file", type("", (), {"write": staticmethod(full), "close": staticmethod(lambda: full(""))})
    )
    with pytest.raises(OSError, match=r"run.dir = .* cannot be written: No space left"):
        ledger.phase("checkpoint", step=3)
    ledger.close(step=3)  # what ended the run is told, and not this


def test_only_host_0_writes(tmp_path):
    other = Ledger(False)
    other.open(tmp_path)
    other.phase("productive", step=1)
    other.close()
    assert not list(tmp_path.iterdir())


def test_signs_of_life_grow_seldom(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(goodput.time, "monotonic", lambda: now[0])
    ledger, signs = Ledger(True), []
    ledger.open(tmp_path)
    for step in range(200_000):
        now[0] += 0.1
        if ledger.heartbeat(step, 0.0):
            signs.append(now[0])
    ledger.close()
    gaps = [b - a for a, b in itertools.pairwise(signs)]
    assert gaps[0] == pytest.approx(0.2) and max(gaps) < 30.2 and gaps[-1] > 10 and len(signs) < 6000


def test_a_row_about_the_hosts_has_one_size_whatever_their_number():
    def times(host):
        return {"host": 0.01 * host, "data_wait": 0.0, "waits": 0.5, "step_time": 1.0 + 0.01 * host}

    few = in_few({host: times(host) for host in range(8)})
    assert few == {"hosts": {str(host): times(host) for host in range(8)}}
    many = in_few({host: times(host) for host in range(2000)})
    assert list(many["hosts"]) == [str(host) for host in range(1992, 2000)], "those that need most for themselves"
    assert many["of"] == 2000 and many["median"]["host"] == pytest.approx(9.99) and len(json.dumps(many)) < 1500
