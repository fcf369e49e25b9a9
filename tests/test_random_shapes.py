"""Turns of the workers of `benchmarks.random_shapes` on one device."""

from __future__ import annotations

import threading

import pytest

from benchmarks.random_shapes import Turns, main

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
