"""Turns of the workers of `benchmarks.random_shapes` on one device, and what its files keep."""

from __future__ import annotations

import json
import threading

import pytest

from benchmarks.random_shapes import Turns, main, recorded, together

BRIEFLY, AT_MOST = 0.2, 20.0


def test_nobody_checks_while_one_measures_and_whoever_measures_comes_next(tmp_path):
    turns, log, first = Turns(tmp_path), [], threading.Event()
    measuring, end = threading.Event(), threading.Event()

    def measure():
        with turns.alone():
            log.append("measures")
            measuring.set()
            end.wait(AT_MOST)
            log.append("measured")

    def check():
        with turns.beside_others():
            log.append("checks")

    with turns.beside_others(), turns.beside_others():  # two at once
        waiting = threading.Thread(target=measure)
        waiting.start()
        assert not measuring.wait(BRIEFLY)
        after = threading.Thread(target=lambda: (first.set(), check()))
        after.start()
        first.wait(AT_MOST)
        after.join(BRIEFLY)
        assert log == []  # it asked after the one that measures
    assert measuring.wait(AT_MOST)
    end.set()
    for thread in (waiting, after):
        thread.join(AT_MOST)
    assert log == ["measures", "measured", "checks"]


@pytest.mark.parametrize("words", [["rms_norm", "against=nobody"], ["rms_norm", "shapes=0"], ["no_operation"]])
def test_wrong_words_end_the_command(words):
    with pytest.raises(SystemExit, match=r"must be|name one"):
        main(words)


def test_calls_are_added_to_those_in_a_file_and_take_the_place_of_the_same_alone(tmp_path):
    path = tmp_path / "calls.json"
    assert recorded(path, "rms_norm", "bfloat16") == []
    path.write_text(json.dumps({"operation": "rms_norm", "dtype": "bfloat16", "seed": 3, "calls": [{"case": "a"}]}))
    before = recorded(path, "rms_norm", "bfloat16")
    assert together(before, 4, [{"case": "b"}]) == [{"seed": 3, "case": "a"}, {"seed": 4, "case": "b"}]
    assert together(before, 3, [{"case": "b"}]) == [{"seed": 3, "case": "a"}, {"seed": 3, "case": "b"}]
    assert together(before, 3, [{"case": "a", "again": True}]) == [{"seed": 3, "case": "a", "again": True}]
    kept = path.read_text()
    with pytest.raises(SystemExit, match="has calls of rms_norm in bfloat16; name another file for flash_attention"):
        main(["flash_attention", f"out={path}"])
    assert path.read_text() == kept
