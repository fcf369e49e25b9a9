"""One run that is disturbed again and again: what each disturbance may cost, and what is said where it costs more."""

import json
import random

import pytest

from launch.errors import DONE, HOST_LOST, PREEMPTED
from launch.scenes import GONE
from launch.series import IN_SERIES, Left, faults_of, left_by, rehearse_series, round_of

HOSTS, STEPS, EVERY = 2, 40, 4
SAVED = "stopped by SIGTERM after step 9; the same command resumes"
AT_ONCE = "stopped at once by SIGTERM, as no step was running"


def a_round(fault, saved=4, seed=0, steps=STEPS):
    return round_of(fault, random.Random(seed), HOSTS, steps, EVERY, saved, 30.0)


@pytest.mark.parametrize("fault", IN_SERIES)
@pytest.mark.parametrize("saved", [0, 4, 9, STEPS - 1])
def test_a_round_hits_the_run_before_its_end(fault, saved):
    for seed in range(50):
        r = a_round(fault, saved, seed)
        spec = [one for one in r.disturbance.inside.values() if one["do"] != "sleep"]
        if r.fault == "sigterm":
            moment, host = r.signalled
            most = 10 if r.since else 30
            assert 0 <= moment <= most and 0 <= host < HOSTS and not spec
            assert min(one["seconds"] for one in r.disturbance.inside.values()) * (STEPS - saved) >= 2 * most - 1e-6
        elif r.fault == "kill_in_save":
            assert saved < spec[0]["step"] < STEPS and spec[0]["step"] % EVERY == 0
        else:
            assert r.fault == "kill" and saved < spec[0]["step"] <= max(saved + 1, STEPS - 1)


@pytest.mark.parametrize(
    ("fault", "codes", "said", "after", "words"),
    [
        ("kill", [-9, 69], "", Left(8, None, 11), None),
        ("kill", [-9, 69], "", Left(8, None, 12), None),
        ("kill", [-9, 69], "", Left(8, None, 13), "step 13 was begun to be saved, or made, and only 8 is on disk"),
        # What is made while the next one is written does not count: that one was begun.
        ("kill", [-9, 69], "", Left(8, 12, 15), None),
        ("kill", [-9, 69], "", Left(8, 16, 17), "step 16 was begun to be saved"),
        ("kill", [-9, 69], "", Left(0, None, 2), "checkpoint 4 is gone"),
        ("kill", [-9, 0], "", Left(8, None, 9), "exit codes [-9, 0]"),
        ("sigterm", [75, 75], SAVED, Left(9, None, 9), None),
        ("sigterm", [75, 75], SAVED, Left(8, None, 9), "it stopped after step 9 with [75, 75]"),
        ("sigterm", [75, 69], SAVED, Left(9, None, 9), "it stopped after step 9 with [75, 69]"),
        ("sigterm", [75, 69], AT_ONCE, Left(4, None, 4), None),
        ("sigterm", [75, 69], AT_ONCE, Left(8, None, 9), "a checkpoint was written anyway"),
        ("sigterm", [75, 69], "", Left(4, None, 4), "no host said that it was stopped at once"),
    ],
)
def test_what_a_round_may_cost(fault, codes, said, after, words):
    found = faults_of(a_round(fault), codes, said, Left(4, None, 5), after, EVERY)
    assert found == [] if words is None else any(words in one for one in found), found
    assert {PREEMPTED, HOST_LOST} <= set(a_round("sigterm").disturbance.codes) and a_round(
        "kill"
    ).disturbance.codes == GONE


def test_what_is_left_is_read_from_the_run(tmp_path):
    assert left_by(tmp_path) == Left(0, None, 0)
    for name in ("4", "8", "12.orbax-checkpoint-tmp-7", "2.damaged"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps({"step": n}) + "\n" for n in (1, 13)) + '{"step": 1')
    assert left_by(tmp_path) == Left(8, 12, 13) and left_by(tmp_path).lost() == 5


@pytest.mark.parametrize(
    ("goes_on_from", "unlike", "codes", "words"),
    [
        (8, None, [DONE, DONE], None),
        (4, None, [DONE, DONE], "it resumed from step 4, but the last complete checkpoint was of 8"),
        (8, "an array is not", [DONE, DONE], "an array is not"),
        (8, None, [DONE, 1], "left alone it ended with [0, 1]"),
    ],
)
def test_a_series_tells_a_run_apart(tmp_path, goes_on_from, unlike, codes, words):
    lines = []

    def start(folder, r):
        if r is None:
            return codes, f"resuming from step {goes_on_from} of here"
        (folder / "run" / "checkpoints" / "8").mkdir(parents=True, exist_ok=True)
        (folder / "run" / "metrics.jsonl").write_text(json.dumps({"step": 9}))
        return [-9, 69], ""

    shape = (HOSTS, STEPS, EVERY)
    same = lambda folder: unlike  # noqa: E731
    ok = rehearse_series(tmp_path / "s", 3, ("kill",), shape, 30.0, random.Random(0), start, same, lines.append)
    said = "\n".join(lines)
    assert ok is (words is None) and (words is None or f"UNEXPECTED: {words}" in said), said
    assert "3 of 3 ended as expected, 3 of them while steps were made; 3 steps lost in all, at most 1 at once" in said


def test_a_run_that_is_done_before_its_rounds_are_is_told(tmp_path):
    lines, starts = [], []

    def start(folder, r):
        starts.append(r)
        (folder / "run" / "checkpoints" / str(STEPS)).mkdir(parents=True, exist_ok=True)
        return [DONE] * HOSTS, "" if r else f"resuming from step {STEPS} of here"

    shape, chance = (HOSTS, STEPS, EVERY), random.Random(0)
    assert not rehearse_series(
        tmp_path / "s", 5, ("sigterm",), shape, 30.0, chance, start, lambda _: None, lines.append
    )
    assert (
        f"the run had made its {STEPS} steps after 0 of 5 rounds: give it more" in "\n".join(lines)
        and len(starts) == 2
        and sum("UNEXPECTED" in line for line in lines) == 1
    )
