"""Which scheme of expert parallelism `auto` takes, and why."""

import pytest

from ejdist.experts.choice import LINKS, choose

CALL = {"tokens": 8192, "top_k": 8, "width": 2048, "itemsize": 2}


@pytest.mark.parametrize(
    ("sizes", "kind", "options", "scheme"),
    [
        ((1,), "NVIDIA H200", {}, "local"),
        ((4,), "NVIDIA H200", {}, "all_gather"),
        ((64,), "NVIDIA H200", {"hosts": 1}, "all_to_all"),
        ((8, 8), "NVIDIA H200", {"hosts": 8, "tokens": 64}, "two_level"),
        ((16,), "TPU v5 lite", {"top_k": 1}, "ragged_all_to_all"),
        ((64,), "TPU v5p", {}, "ragged_all_to_all"),
        ((16,), "something else", {}, "all_to_all"),
    ],
)
def test_auto_takes_the_least_time(sizes, kind, options, scheme):
    choice = choose(axis_sizes=sizes, device_kind=kind, **CALL | options)
    assert choice.scheme == scheme == min(choice.seconds, key=lambda name: choice.seconds[name]), choice
    assert choice.reason.startswith(scheme) and "\n" not in choice.reason


def test_auto_can_be_pinned():
    choice = choose(axis_sizes=(4,), device_kind="NVIDIA H200", pinned="ragged_all_to_all", **CALL)
    assert choice.scheme == "ragged_all_to_all" and "pinned" in choice.reason and "all_gather" in choice.reason
    with pytest.raises(ValueError, match="pinned"):
        choose(axis_sizes=(4,), device_kind="NVIDIA H200", pinned="two_level", **CALL)
    assert all(links.source for links in LINKS.values())


def test_auto_brings_a_rank_no_more_than_twice_the_buffer():
    """Of 8 choices and a buffer of 1.25 that is the tokens of 20 ranks; a scheme that is asked for by name is not bounded."""
    for ranks, gathers in ((16, True), (20, True), (32, False)):
        choice = choose(axis_sizes=(ranks,), hosts=1, device_kind="NVIDIA H200", **CALL)
        assert ("all_gather" in choice.seconds) == gathers
    assert (
        choose(axis_sizes=(32,), hosts=1, device_kind="NVIDIA H200", pinned="all_gather", **CALL).scheme == "all_gather"
    )
