"""The plans that are told beside the best."""

import re
from dataclasses import replace

import pytest

from ejdist.mesh import make_mesh, mesh_shape
from ejdist.planning.candidates import candidate_of, ways
from ejdist.planning.compiled import Compiled
from ejdist.planning.expert_axes import compared
from ejdist.planning.ranking import ALIKE, why_later
from ejdist.planning.search import Predictor, search
from ejdist.planning.step_time import EXCHANGE, NARROW
from ejdist.planning.targets import target_of
from ejdist.training.program import make_program
from kernels.framework.platforms import Unsupported
from recipes.schema import compose


@pytest.mark.slow
def test_the_plans_beside_the_best_differ_and_say_why_they_come_later():
    """Of the same mesh and remat policy only the best is told; each of the others is worse in what it says."""
    recipe = compose(["recipe=long_context", "model=8b", "data.sequence_length=32768"])
    found = search(recipe, target_of(None, None, "v5p-16", None), set(), None)
    told = [found.best, *found.others]
    assert len(found.others) == 3 and len({(p.candidate.mesh, p.candidate.remat) for p in told}) == 4
    for other in found.others:
        why = why_later(found.best, other)
        if "slower" in why:
            assert other.rate < found.best.rate * (1 - ALIKE)
            assert why.startswith(f"{1 - other.rate / found.best.rate:.1%} slower: ")
        else:
            assert other.rate >= found.best.rate * (1 - ALIKE) and why.startswith("as fast within 2%, ")
    slow = replace(
        found.others[0], time=replace(found.best.time, seconds=found.best.time.seconds | {"attention": 99.0})
    )
    assert re.fullmatch(
        r"9\d\.\d% slower: attention takes 9\d\.?\d* s more for as many tokens", why_later(found.best, slow)
    )
    rows = replace(found.best, candidate=replace(found.best.candidate, global_batch=16))
    assert why_later(found.best, rows) == "as fast within 2%, with a batch of 16 rows in place of 4"


MIXED = "recipe=moe model=qwen3_30b_a3b data.sequence_length=4096 data.global_batch=256 model.remat=dots "


FIXED = {"data.global_batch", "model.remat", "accumulation", "mesh.dp", "mesh.cp", "mesh.sp", "mesh.tp"}


def as_given_predicted(sections, target):
    predictor = Predictor(sections, target)
    return predictor.checked(candidate_of(sections, mesh_shape(sections.mesh.sizes, target.count)))


def of_h200s(words, count=32):
    sections = compose((MIXED + words).split())
    return sections, as_given_predicted(sections, target_of(None, count, "h200", None))


def test_experts_over_devices_are_compared_with_all_on_each_and_what_would_change_it_does():
    sections, over = of_h200s("mesh.fsdp=4 mesh.ep=8 experts.dispatch=all_to_all")
    on_each = of_h200s("mesh.fsdp=32")[1]
    assert on_each.time.exchange == (0, 0) and EXCHANGE not in on_each.time.seconds
    assert over.time.seconds[EXCHANGE] == pytest.approx(over.time.waits_exchange)
    said = compared(sections, over, on_each)
    assert said.startswith(
        f"experts over 8 devices (mesh.ep=8): {over.rate:,.0f} tokens/s, all on each device: {on_each.rate:,.0f}; of a "
        f"step of {over.time.total:.3g} s, {over.time.waits_exchange:.3g} s is waiting for tokens and "
        f"{over.time.waits_experts:.3g} s for experts' weights ({on_each.time.waits_experts:.3g} s if every device held all "
        "experts)"
    )
    lost = over.time.total - on_each.time.total
    faster, rate, share, tokens, had = (
        float(n.replace(",", ""))
        for n in re.search(
            r"as fast with an exchange of ([\d,]+) GB/s a device, which has ([\d,]+), or with (\d+)% of its wait hidden, or "
            r"below about ([\d,]+) tokens of a device between gathers, of which it has ([\d,]+)$", said
        ).groups()
    )  # fmt: skip
    sent, alone = over.time.exchange
    assert rate == round(sent / alone / 1e9) and had == 256 * 4096 / 32
    assert over.time.waited * (alone - sent / faster / 1e9) == pytest.approx(lost, rel=0.02)
    assert over.time.waits_exchange * share / 100 == pytest.approx(lost, rel=0.02)
    # With fewer tokens between gathers, weights are gathered more often, and what is lost is lost once for as many tokens.
    assert on_each.time.waits_experts * (had / tokens - 1) == pytest.approx(lost, rel=0.02)
    quick = replace(over, time=replace(over.time, seconds=over.time.seconds | {EXCHANGE: 0.0}))
    assert "as fast" not in compared(sections, quick, on_each)
    assert compared(sections, None, on_each) == "experts: no plan fits with them split over devices"
    assert compared(sections, over, None) == "experts: no plan fits with them all on each device"


def test_an_exchange_between_hosts_is_as_slow_as_each_devices_way_out():
    inside, between = (of_h200s(f"mesh.ep={n} experts.dispatch=all_to_all", n)[1].time.exchange for n in (8, 32))
    slower = (between[1] / between[0]) / (inside[1] / inside[0])
    # 24 of 31 other devices are on other hosts, and 50 GB/s lead there.
    assert slower == pytest.approx(24 / 31 * 283 / 50)


def test_products_in_8_bits_take_less_time_and_their_operands_some():
    words = "recipe=long_context model=1b mesh=single data.sequence_length=8192 data.global_batch=4 model.remat=dots "
    found, kept = {}, "model.precision=fp8_row model.precision_keep=[gate,up,down]"
    for more in ("", "model.precision=fp8_row", kept, "model.precision=fp8_row model.precision_head=true"):
        sections = compose((words + more).split())
        found[more] = Predictor(sections, target_of(None, 1, "h200", None)).checked(
            candidate_of(sections, mesh_shape(sections.mesh.sizes, 1))
        )
    plain, narrow, few, head = (found[more].time for more in found)
    assert narrow.flops == plain.flops and NARROW not in plain.seconds
    assert narrow.seconds["matmuls"] < few.seconds["matmuls"] < plain.seconds["matmuls"]
    assert narrow.seconds[NARROW] > few.seconds[NARROW] > 0
    # Of 2,048 features and 128,256 outputs, three products at 1.7 times the speed.
    less = narrow.seconds["matmuls"] - head.seconds["matmuls"]
    assert less == pytest.approx(6 * 2048 * 128256 * 32768 * (1 - 1 / 1.7) / (0.78 * head.peak), rel=1e-6)
    assert head.seconds[NARROW] > narrow.seconds[NARROW] and head.total < narrow.total


def test_plans_count_the_matrices_that_are_kept_in_8_bits():
    words = "recipe=long_context model=1b data.sequence_length=8192 data.global_batch=4 "
    kept = {}
    one = ((1, "fp8_row", "dots"), (1, "fp8_row", "attention"), (1, "bf16", "dots"))
    four = ((4, "fp8_row", "dots"), (4, "fp8_block", "dots"), (4, "fp8_row", "none"))
    for devices, precision, remat in (*one, *four):
        more = f"mesh.fsdp={devices} mesh.sp=1 model.precision={precision} model.remat={remat}"
        sections, target = compose((words + more).split()), target_of(None, devices, "h200", None)
        classes = (
            Predictor(sections, target)
            .checked(candidate_of(sections, mesh_shape(sections.mesh.sizes, devices)))
            .memory.classes
        )
        classes = [classes.get(f"weights in {kind}", 0) for kind in ("8 bits", "the compute dtype")]
        kept[devices, precision, remat] = tuple(classes)
    numbers = 16 * (2 * 2048**2 + 2 * 2048 * 512 + 3 * 2048 * 8192)
    assert kept == {
        (1, "fp8_row", "dots"): (numbers, 0),
        (1, "fp8_row", "attention"): (0, 2 * numbers),
        (1, "bf16", "dots"): (0, 2 * numbers),
        (4, "fp8_row", "dots"): (0, numbers // 2),
        (4, "fp8_block", "dots"): (numbers // 4, 0),
        (4, "fp8_row", "none"): (numbers, 0),  # all that a forward has is kept, gathered matrices too
    }


def test_a_search_tells_the_best_plan_of_either_kind():
    recipe = compose(
        "recipe=moe model=qwen3_30b_a3b data.sequence_length=4096 data.global_batch=16 model.remat=dots".split()
    )
    target = target_of(None, 8, "h200", None)
    given = {"data.global_batch", "model.remat", "accumulation", "mesh.tp", "mesh.sp", "mesh.dp"}
    over, on_each = search(recipe, target, given, None).experts
    assert over.candidate.sizes["ep"] > 1 == on_each.candidate.sizes["ep"] and over.candidate.dispatch is not None
    recipe.mesh.ep = 8
    assert search(recipe, target, {*given, "mesh.ep"}, None).experts is None


def test_experts_are_dispatched_only_as_their_layer_takes_their_rows():
    words, given = MIXED + "mesh.fsdp=1 mesh.ep=8 experts.exchange=fp8 ", {"mesh.fsdp", "mesh.ep", *FIXED}
    found = [
        dispatch
        for of in ("auto", "all_gather")  # of a recipe, which the search may change
        for *_, dispatch in ways(compose(f"{words} experts.dispatch={of}".split()), (1, 1, 8, 1, 1, 1), given)
    ]
    assert found == ["all_to_all", "ragged_all_to_all"] * 2
    target = target_of(None, 8, "h200", None)
    said = (
        r"experts.exchange = 'fp8' sends sums in 8 bits, but experts.dispatch = 'all_gather' adds rows up on their way back; "
        r"use experts.exchange=bf16 or fp8_tokens, or experts.dispatch=all_to_all or ragged_all_to_all$"
    )
    sections = compose(f"{words} experts.dispatch=all_gather".split())
    for keys in (given, FIXED):
        with pytest.raises(ValueError, match=said):
            search(sections, target, {*keys, "experts.dispatch"}, None)
    with pytest.raises(ValueError, match=said):
        as_given_predicted(sections, target)
    with pytest.raises(ValueError, match=said):  # a run says so too, and not in the arguments of `ejdist.moe`
        make_program(sections, make_mesh(ep=8))
    alone = compose((MIXED + "mesh.fsdp=8 mesh.ep=1 experts.exchange=fp8 experts.dispatch=all_gather").split())
    assert as_given_predicted(alone, target).rate > 0  # nothing is sent


def test_a_scheme_of_two_axes_is_why_no_experts_are_split_over_one():
    sections, on_each = of_h200s("mesh.fsdp=32 experts.dispatch=two_level")
    assert compared(sections, None, on_each) == (
        "experts: none are split over devices, as experts.dispatch = 'two_level' is for experts on two axes, and experts.axes "
        "= ['ep']; leave experts.dispatch out, or use auto"
    )
    assert compared(sections, None, on_each, ()) == "experts: no plan fits with them split over devices"


@pytest.mark.parametrize("error", [ValueError, Unsupported])
def test_what_a_layer_refuses_of_one_plan_is_tried_with_the_next(error):
    sections, target = compose("recipe=long_context model=1b".split()), target_of(None, 2, "h200", None)
    asked = []

    def compiler(of):
        asked.append(of)
        if len(asked) == 1:
            raise error("a layer refuses")
        return Compiled({}, 1, 1, 1, 1, {}, 0.0)

    found = search(sections, target, FIXED, compiler)
    assert [why for _, why in found.refused] == ["a layer refuses"] and found.best is not None and len(asked) == 2
    asked.clear()
    with pytest.raises(error, match=r"^a layer refuses$"):  # where no other is asked, it is the recipe's own fault
        search(sections, target, FIXED, compiler, finalists=1)


@pytest.mark.parametrize(("device", "count"), [("a100", 8), ("v5e-8", None), ("b200", 8)])
def test_a_precision_that_the_chip_has_not_is_refused_without_a_compiler(device, count):
    sections = compose("recipe=long_context model=1b model.precision=fp8_block".split())
    target = target_of(None, count, device, None)
    with pytest.raises(
        ValueError, match=r"^model\.precision = fp8_block: .* (has no kernel for|takes longer for) its products"
    ):
        search(sections, target, FIXED, None)
    Predictor(sections, target_of(None, 8, "h100", None))
