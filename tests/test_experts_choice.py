"""Which scheme of expert parallelism `auto` takes, and why."""

import pytest

from ejdist.experts.choice import LINKS, MOST_CHOSEN, PRODUCTS, choose, choose_chunks

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


def chunks_of(seconds, rows=4096, kind="NVIDIA H200", scheme="all_to_all", ranks=8):
    """A rank of Qwen3-30B-A3B's experts: 16 of 128, of 768 x 2048."""
    how = {"ranks": ranks, "rows": rows, "weights": 16 * 3 * 768 * 2048, "itemsize": 2, "device_kind": kind}
    return choose_chunks(scheme, seconds, **how)


def test_chunks_are_as_many_as_pay_for_themselves():
    """None where nothing is sent or the rates are not known; more the longer both sending and products take, and the number
    of which the line says the least time."""
    assert chunks_of(0.0, ranks=1) == (1, "1 chunk: nothing is sent")
    for unknown in (chunks_of(1e-2, kind="cpu"), chunks_of(None)):
        assert unknown[0] == 1 and "not known" in unknown[1]
    counts = [
        chunks_of(seconds, rows)[0] for seconds, rows in ((1e-5, 4096), (4e-3, 4096), (20e-3, 20_000), (1, 10**6))
    ]
    assert counts == sorted(counts) and counts[0] == 1 and counts[1] > 1 and counts[-1] == MOST_CHOSEN
    count, reason = chunks_of(8e-3, 8192)
    work = 6 * 8192 * 16 * 3 * 768 * 2048 / (PRODUCTS * 989e12)
    more = 16 * 3 * 768 * 2048 * 20 / 4800e9 + 8 * 7 * LINKS["NVIDIA H200"].latency
    times = {c: max(8e-3, work) + min(8e-3, work) / c + (c - 1) * more for c in range(1, MOST_CHOSEN + 1)}
    assert count == min(times, key=times.get) and f"{times[count] * 1e3:.3g} ms" in reason
    assert f"sending 8 ms and products {work * 1e3:.3g} ms" in reason and f"{times[1] * 1e3:.3g} ms as one" in reason
