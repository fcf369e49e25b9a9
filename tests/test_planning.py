"""Plans: what is predicted, searched, and told where nothing fits. The compiler is a stand-in, but for one step."""

import dataclasses
import json
import math
import re
from pathlib import Path

import jax
import numpy as np
import pytest

from ejdist.documents import ONE_DOCUMENT, documents_of
from ejdist.mesh import AXES, make_mesh, mesh_shape
from ejdist.models.part import Costs
from ejdist.models.stack import counted_parts
from ejdist.order import Order
from ejdist.planning.candidates import BATCH, SEARCHED, Candidate, candidate_of, candidates, meshes
from ejdist.planning.candidates import REMAT as REMAT_KEY
from ejdist.planning.chips import CHIPS
from ejdist.planning.compiled import Compiled, DoesNotFit
from ejdist.planning.links import Links
from ejdist.planning.measured import MeasuredAxis
from ejdist.planning.memory import held, memory
from ejdist.planning.nearest import nearest
from ejdist.planning.ranking import ranked
from ejdist.planning.search import (
    MARGIN,
    Predictor,
    as_given,
    search,
)
from ejdist.planning.share import share_of
from ejdist.planning.targets import NoCompiler, target_of
from ejdist.sequence.cost import needed_hops
from ejdist.sequence.schedule import hops, imbalance
from ejdist.training.program import make_program
from kernels.engines.attention.masks import MaskInfo
from recipes.schema import compose

TPU = target_of("v5p:4x4x4", None, None, None)
GPU = target_of(None, 64, "h200", None)


def predicted(words, target=TPU):
    sections = compose(words.split())
    return Predictor(sections, target).checked(candidate_of(sections, mesh_shape(sections.mesh.sizes, target.count)))


EIGHT = "recipe=long_context model=8b data.sequence_length=8192 data.global_batch=64 mesh.fsdp=64 mesh.sp=1"


# -- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        "recipe=long_context mesh.fsdp=2 mesh.sp=2 mesh.tp=2 data.global_batch=4",
        "recipe=long_context mesh.fsdp=2 mesh.sp=2 data.global_batch=8 accumulation=2",
        "recipe=moe mesh.ep=4 mesh.fsdp=2",
        "recipe=moe mesh.ep=4 mesh.fsdp=2 optimizer.offload=host",
        "recipe=long_context mesh.fsdp=2 mesh.sp=2 mesh.tp=2 optimizer.moments=bfloat16",
        "recipe=long_context mesh.fsdp=2 mesh.sp=2 mesh.tp=2 optimizer.offload=host optimizer.moments=bfloat16",
        "recipe=moe mesh.dp=2 mesh.ep=2 mesh.sp=2 model.experts.bias_rate=0.001 model.experts.balance=global",
        "recipe=moe mesh.ep=2 mesh.fsdp=2 model.experts.bias_rate=0.001 lora.rank=4 lora.base=int8 optimizer.offload=host",
        "recipe=long_context mesh.fsdp=2 mesh.tp=2 mesh.sp=2 lora.rank=4 model.compute_dtype=bfloat16",
    ],
)
def test_state_and_batch_are_exact(words):
    """Every byte that the program's own shapes and shardings say."""
    sections = compose(words.split())
    program = make_program(sections, make_mesh(**vars(sections.mesh)))
    found = memory(
        sections, held(sections, program.model, program.mesh.abstract_mesh), program.mesh.abstract_mesh, "tpu"
    )

    def local(tree, kind="device"):
        mine = [x for x in jax.tree.leaves(tree) if x.sharding.memory_kind == kind]
        return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in mine)

    assert found.classes["parameters"] == local(program.state.params)
    moments = [x for x in jax.tree.leaves(program.state.opt_state) if x.ndim]
    assert found.classes["optimizer moments"] == local(moments)
    assert found.host == local(moments, "pinned_host")
    assert found.classes["buffers"] + found.classes.get("frozen parameters", 0) == local(program.state.buffers)
    assert ("frozen parameters" in found.classes) == ("lora.rank" in words)
    assert found.classes["batch"] == local(program.batch)


def test_a_plan_needs_no_device_and_less_with_more_of_remat():
    bytes_of = {r: predicted(f"{EIGHT} model.remat={r}").memory for r in ("none", "dots", "attention", "full")}
    totals = [m.total for m in bytes_of.values()]
    assert totals == sorted(totals, reverse=True) and totals[0] > 2 * totals[3]
    layers, tokens, width = 32, 8192, 4096
    kept = {r: m.classes["activations kept"] for r, m in bytes_of.items()}
    assert kept["full"] == layers * tokens * width * 2  # the input of each layer
    assert kept["attention"] == kept["full"] + layers * tokens * (width * 2 + 32 * 4)  # and attention's output and lse


def test_gradients_of_microbatches_are_summed_in_float32():
    once, twice = (predicted(f"{EIGHT} data.global_batch=128 accumulation={n}").memory for n in (1, 2))
    sums = twice.classes["gradients"] - once.classes["gradients"]
    assert sums == once.classes["parameters"]
    assert once.classes["activations kept"] == 2 * twice.classes["activations kept"]


def test_zeros_of_a_gathered_table_are_there_early_on_a_gpu():
    """XLA makes those of its gradient with those of the head's, before any layer's backward."""
    words = "recipe=long_context model=8b data.sequence_length=8192 data.global_batch=64 mesh.sp=1 mesh.fsdp="
    gpu, tpu = (predicted(f"{words}64", target).memory.classes["gradients"] for target in (GPU, TPU))
    assert gpu - tpu == 4 * 128256 * 4096
    alone = target_of(None, 1, "h200", None), target_of("v5p:1x1x1", None, None, None)
    whole = [predicted(f"{words}1", target).memory for target in alone]
    assert whole[0].classes["gradients"] == whole[1].classes["gradients"]


# -- time -------------------------------------------------------------------------------------------------------------


def test_measured_steps_of_an_h200_are_predicted_within_a_fifth():
    from benchmarks.plan import measured_rows

    rows = measured_rows()
    assert len(rows) >= 6 and all(abs(r["error"]) < 0.2 for r in rows), rows


def test_steps_in_8_bits_are_predicted_beside_bfloat16():
    """What 8 bits save of a step, which is what `model.precision` is chosen by, to a fortieth of the step."""
    from benchmarks.plan import measured_rows

    rows = {row["name"]: row for row in measured_rows()}
    pairs = [(row, rows[re.sub("fp8_[a-z]+", "bf16", name)]) for name, row in rows.items() if "fp8" in name]
    off = {narrow["name"]: (1 + narrow["error"]) / (1 + wide["error"]) - 1 for narrow, wide in pairs}
    assert len(off) >= 5 and all(abs(error) < 0.025 for error in off.values()), off


def test_flops_are_those_of_training():
    found = predicted(EIGHT)
    tokens = 64 * 8192
    pairs = 64 * 8192 * 8193 / 2
    by_hand = 3 * (2 * (found.candidate.devices and 7_504_658_432) * tokens + 32 * 4 * 32 * 128 * pairs)
    assert found.time.flops == pytest.approx(by_hand, rel=1e-3)
    assert 0.1 < found.time.mfu < 0.8


def test_a_link_is_slower_between_hosts():
    sizes = dict(zip(AXES, (1, 8, 1, 1, 8, 1), strict=True))
    inside, outside = (Links(GPU.chip, 8).rate(axis, sizes) for axis in ("sp", AXES[1]))
    assert inside == GPU.chip.link and outside == GPU.chip.network
    # Of groups of three on hosts of eight some lie over two of them.
    odd = dict(zip(AXES, (1, 8, 1, 1, 3, 1), strict=True))
    assert Links(GPU.chip, 8).rate("sp", odd) == GPU.chip.network < Links(GPU.chip, 8).rate("sp", odd | {"fsdp": 2})
    assert Links(TPU.chip, 4).rate("sp", sizes) == Links(TPU.chip, 4).rate(AXES[1], sizes) == TPU.chip.link
    assert Links(TPU.chip, 4, slices=2).rate("network", sizes) == TPU.chip.between_slices == 6.25e9


def test_a_message_takes_the_time_that_one_of_its_size_took():
    """Between two measured sizes linear; below the smallest its latency; above the largest its rate."""
    points = dict.fromkeys(("all_gather", "all_to_all"), ((1000000.0, 0.0001), (100000000.0, 0.001)))
    axis = MeasuredAxis("sp", 2, "devices", points)
    assert axis.seconds("all_gather", 10) == axis.seconds("all_gather", 1e6) == 1e-4
    assert axis.seconds("all_gather", (1e6 + 1e8) / 2) == pytest.approx(5.5e-4)
    assert axis.seconds("all_gather", 1e9) == pytest.approx(1e-2) == axis.seconds("ragged_all_to_all", 1e9)


def test_microbatches_gather_the_weights_again_and_move_the_same_tokens():
    """Of one global batch: weights travel with every microbatch, keys and activations once."""
    words = f"{EIGHT} data.global_batch=128 mesh.fsdp=8 mesh.sp=8"
    once, four = (predicted(f"{words} accumulation={n}").time for n in (1, 4))
    assert four.sent["fsdp"] == 4 * once.sent["fsdp"]
    assert once.sent["sp"] < four.sent["sp"] < 4 * once.sent["sp"], "sp communicates weights and keys"
    passes = "passes over memory"
    assert four.seconds[passes] == pytest.approx(once.seconds[passes], rel=1e-3)


@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
@pytest.mark.parametrize("window", [1, 2, 7, 8, 9, 16, 17, 33, 64, None])
def test_a_window_takes_as_many_hops_as_the_ring_makes(order, window):
    """As the ring itself counts them, before anything is traced: to every rank, or to those whose queries see them."""
    mask = MaskInfo(causal=True, window=None if window is None else (window - 1, 0))
    # A rank's two parts of a zigzag follow parts of both neighbours, so a window is met on either side.
    each = 1 if order == "contiguous" else 2
    wanted = 7 if window is None else min(7, each * -(-(window - 1) // (16 // each)))
    assert needed_hops(Order(order, 8), 128, mask) == len(hops(Order(order, 8), 128, mask)) - 1 == wanted


def test_what_travels_along_each_axis():
    """Parameters over the axes that store them, keys around the ring, and nothing along an axis of one device."""
    sent = predicted(EIGHT).time.sent
    gathered = 2 * (8_030_261_248 - 2 * 128256 * 4096) * 63 / 64  # bytes of a gather of all layers in bfloat16
    assert set(sent) == {AXES[1]} and 3 * gathered < sent[AXES[1]] < 4 * gathered
    ring = predicted(f"{EIGHT} mesh.fsdp=8 mesh.sp=8").time.sent
    assert set(ring) == {AXES[1], "sp"} and ring["sp"] > 32 * 2 * 2 * 8 * 128 * 8192 * 7


def test_contiguous_parts_are_as_slow_as_the_last_rank():
    zigzag, contiguous = (
        predicted(f"{EIGHT} mesh.fsdp=8 mesh.sp=8 sequence.order={order}").time.seconds
        for order in ("zigzag", "contiguous")
    )
    own = 8192 // 8
    assert contiguous["attention"] == pytest.approx(zigzag["attention"] * (15 * own + 1) / (8 * own + 1))
    assert contiguous["matmuls"] == zigzag["matmuls"]


def test_packed_rows_have_fewer_pairs_and_another_busiest_rank():
    """The time of attention is that of the pairs of the documents, on the rank that has most."""
    words, documents = f"{EIGHT} mesh.fsdp=8 mesh.sp=8", documents_of("512")
    sections = compose([*words.split(), "sequence.order=zigzag"])
    candidate = candidate_of(sections, mesh_shape(sections.mesh.sizes, TPU.count))
    one, packed = (Predictor(sections, TPU, None, of).checked(candidate).time for of in (ONE_DOCUMENT, documents))
    order, rows = Order("zigzag", 8), np.array(documents.rows(8192)) + 1
    uneven = np.mean([pairs.max() / pairs.mean() for pairs in order.of_ranks(rows)])
    pairs = rows.sum(1).mean() / (8192 * 8193 / 2)
    assert one.uneven == 1 and packed.uneven == pytest.approx(uneven) and uneven > 1.1
    assert packed.seconds["attention"] == pytest.approx(one.seconds["attention"] * pairs * uneven)
    assert packed.flops < one.flops and packed.seconds["matmuls"] == one.seconds["matmuls"]


@pytest.mark.parametrize("order", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize(
    "rules", [{}, {"window": (19, 0)}, {"window": (7, 0), "sink_tokens": 3}, {"window": (63, 0)}, {"chunk_size": 24}]
)
def test_the_rank_with_the_most_pairs_is_waited_for(order, rules):
    mask, order = MaskInfo(causal=True, **rules), Order(order, 4)
    of_ranks = np.asarray(mask.visible(64, 64))[0, 0].sum(1)[order.indices(64)].reshape(4, 16).sum(1)
    assert imbalance(order, 4 * 16, mask) == of_ranks.max() / of_ranks.mean()


def test_keys_that_are_gathered_come_at_once():
    ring, gathered = (
        predicted(f"{EIGHT} mesh.fsdp=8 mesh.sp=8 sequence.scheme={scheme}") for scheme in ("ring", "all_gather")
    )
    # All gradients of keys are sent in float32 there; the last hop of a ring sends them home in bfloat16.
    assert ring.time.sent["sp"] < gathered.time.sent["sp"] and gathered.memory.total >= ring.memory.total


def test_an_exchange_without_rates_of_its_own_is_as_slow_as_it_is_known_to_be():
    """A ragged all-to-all is 27 times as slow on an H200; and on a ring of TPUs rows pass several links."""
    words = "recipe=moe model=qwen3_30b_a3b data.sequence_length=4096 data.global_batch=64 mesh.ep=64 experts.dispatch="
    ways = ("all_to_all", "ragged_all_to_all")
    gpu = {way: predicted(words + way, GPU).time.exchange[1] for way in ways}
    assert gpu["ragged_all_to_all"] > 10 * gpu["all_to_all"]
    tpu = {way: predicted(words + way).time.exchange[1] for way in ways}
    assert tpu["ragged_all_to_all"] < tpu["all_to_all"]
    # 64 chips are a ring of 64 at worst, and three of four sides each where they are a cube.
    line = predicted(words + "all_to_all", target_of("v5p:64x1x1", None, None, None)).time.exchange[1]
    assert line > 4 * tpu["all_to_all"]


# -- the search -------------------------------------------------------------------------------------------------------

RECIPE = "recipe=long_context model=8b data.sequence_length=131072 data.global_batch=8"


def fake(peak_of):
    """Returns (a compiler, what it was asked): it says `peak_of(sections)`, or raises what that gives."""
    asked = []

    def compiler(sections):
        asked.append(sections)
        peak = peak_of(sections)
        if isinstance(peak, Exception):
            raise peak
        return Compiled({}, 1, 1, 1, peak, {}, 0.0)

    return compiler, asked


def test_every_mesh_of_so_many_devices_once():
    found = list(meshes(8, {}, has_experts=True))
    assert len(found) == len(set(found)) == math.comb(3 + 4, 4) and all(math.prod(m) == 8 for m in found)
    assert all(m[2] == 1 for m in meshes(8, {}, has_experts=False))
    assert set(meshes(8, {"sp": 4}, has_experts=False)) == {(2, 1, 1, 1, 4, 1), (1, 2, 1, 1, 4, 1), (1, 1, 1, 1, 4, 2)}


def test_given_keys_are_never_changed():
    sections = compose([*RECIPE.split(), "mesh.sp=8", "model.remat=full"])
    found = list(candidates(sections, 64, {"mesh.sp", REMAT_KEY, BATCH}))
    assert found and {(c.sizes["sp"], c.remat, c.global_batch) for c in found} == {(8, "full", 8)}
    assert {c.accumulation for c in found} > {1} and len({c.mesh for c in found}) > 3
    assert all(c.global_batch // c.accumulation % math.prod(c.mesh[:3]) == 0 for c in found)


def test_the_outer_axis_of_the_sequence_is_what_is_given():
    sections = compose([*RECIPE.split(), "mesh.cp=2"])
    assert {c.sizes["cp"] for c in candidates(sections, 16, {"mesh.cp", BATCH})} == {2}
    assert {c.sizes["cp"] for c in candidates(sections, 16, {BATCH})} == {1}
    sections.mesh.cp = -1
    with pytest.raises(ValueError, match=r"mesh.cp = -1: a plan itself divides the devices of the sequence"):
        next(candidates(sections, 16, {"mesh.cp", BATCH}))


@pytest.mark.slow
def test_the_sequence_and_the_experts_are_searched_where_they_are_open():
    dense = compose([*RECIPE.split(), "sequence.order=contiguous"])
    dense.mesh.sp = 8
    found = search(dense, TPU, {BATCH, "mesh.sp"}, None).best
    assert found is not None and (found.candidate.scheme, found.candidate.order) == ("ring", "zigzag")
    assert found.candidate.overrides()["sequence.order"] == "zigzag"
    given = {BATCH, "mesh.sp", "sequence.order", "sequence.scheme"}
    kept = search(dense, TPU, given, None).best
    assert kept is not None and kept.candidate.scheme is kept.candidate.order is None and kept.rate < found.rate
    assert kept.candidate.applied(dense).sequence == dense.sequence
    mixed = compose("recipe=moe model=qwen3_30b_a3b data.sequence_length=4096 data.global_batch=256 mesh.ep=8".split())
    best = search(mixed, GPU, {BATCH, "mesh.ep"}, None).best
    assert best is not None and best.candidate.dispatch in ("all_to_all", "all_gather")
    mixed.experts.dispatch = "ragged_all_to_all"
    kept = search(mixed, GPU, {BATCH, "mesh.ep", "experts.dispatch"}, None).best
    assert kept is not None and kept.candidate.dispatch is None and kept.rate < best.rate


@pytest.mark.slow
def test_a_length_that_a_zigzag_cannot_be_made_of_is_split_otherwise():
    sections = compose(
        ["recipe=long_context", "model=8b", "data.sequence_length=120", "data.global_batch=8", "mesh.sp=8"]
    )
    found = search(sections, TPU, {BATCH, "mesh.sp"}, None).best
    assert found is not None and found.candidate.order not in (None, "zigzag")


def test_tokens_that_are_gathered_need_the_room_of_all_ranks():
    words = (
        "recipe=moe model=qwen3_30b_a3b data.sequence_length=4096 data.global_batch=256 mesh.ep=64 experts.dispatch="
    )
    gathered, sent = (predicted(words + way, GPU).memory for way in ("all_gather", "all_to_all"))
    tokens = 256 * 4096 // 64
    assert gathered.total - sent.total > 2 * tokens * 64 * 2048 * 2


@pytest.mark.slow  # a search of several seconds
def test_the_first_that_compiles_and_fits_is_taken():
    """A plan that turns out too large is followed by one that is expected to need less by as much."""
    sections = compose(RECIPE.split())
    compiler, asked = fake(lambda s: TPU.chip.memory + 1 if len(asked) == 1 else 2**30)
    found = search(sections, TPU, {BATCH}, compiler)
    assert len(asked) == 2 and len(found.refused) == 1 and "GiB" in found.refused[0][1]
    assert found.best is not None and found.compiled is not None and found.best.candidate.global_batch == 8
    assert found.best.candidate.remat == asked[1].model.remat and found.best.candidate != found.refused[0][0].candidate
    assert found.best.memory.total * TPU.chip.memory <= found.refused[0][0].memory.total * TPU.chip.memory
    assert all(p.memory.total * (1 + MARGIN) <= TPU.chip.memory for p in found.others)


@pytest.mark.slow
def test_a_compiler_that_refuses_is_not_asked_the_same_again():
    sections = compose(RECIPE.split())
    compiler, asked = fake(lambda s: DoesNotFit("too large by 3 G", memory=True))
    found = search(sections, TPU, {BATCH}, compiler, finalists=2, save=False)
    sizes = [p.memory.total for p, _ in found.refused]
    assert found.best is None and len(asked) == 2 and sizes[1] < (1 - MARGIN) * sizes[0]
    compiler, asked = fake(lambda s: DoesNotFit("a fault", memory=False))
    search(sections, TPU, {BATCH}, compiler, finalists=2)
    assert asked[0].model.remat != asked[1].model.remat


@pytest.mark.slow
def test_where_nothing_is_expected_to_fit_nothing_is_compiled():
    sections = compose(["recipe=long_context", "model=70b", "data.sequence_length=8192", "data.global_batch=4"])
    target = target_of("v5e:2x2", None, None, None)
    compiler, asked = fake(lambda s: 0)
    found = search(sections, target, {BATCH}, compiler)
    assert found.best is None and not asked and found.smallest is not None
    assert found.smallest.memory.total > target.chip.memory


def test_the_nearest_plans_that_fit():
    sections = compose(["recipe=long_context", "model=8b", "data.sequence_length=131072", "data.global_batch=16"])
    sections.model.remat, sections.mesh.fsdp, sections.mesh.sp = "attention", 16, 1
    target = target_of("v5e:4x4", None, None, None)
    given = {REMAT_KEY, BATCH, *(k for k in SEARCHED if k.startswith("mesh."))}
    assert search(sections, target, given, None).best is None
    found = {what: (p, new) for what, p, new in nearest(sections, target, given)}
    shorter, new = found["fewer tokens"]
    assert int(new["data.sequence_length"]) < 131072 and shorter.candidate.remat == "attention" and REMAT_KEY not in new
    assert all(p.memory.total * (1 + MARGIN) <= target.chip.memory for p, _ in found.values())


@pytest.mark.slow
def test_what_keeps_the_tokens_and_the_devices_is_told_first():
    """A complete recipe that does not fit: another remat policy, more microbatches, with both where neither is enough, and then
    with what saves memory of the optimizer."""
    target = target_of(None, 8, "h100", None)

    def told(words):
        sections = compose(f"recipe=long_context mesh.sp=1 mesh.fsdp=8 {words}".split())
        return {what: (p, new) for what, p, new in nearest(sections, target, SEARCHED)}

    found = told("model=8b data.sequence_length=32768 data.global_batch=32")
    assert list(found)[:2] == ["another remat policy", "more microbatches"]
    assert found["another remat policy"][1] == {REMAT_KEY: "full"}
    assert found["more microbatches"][1] == {"accumulation": "2"}
    assert found["more microbatches"][0].tokens == 2**20
    # One row a device, of which nothing is cut.
    found = told("model=8b data.sequence_length=262144 data.global_batch=8")
    assert found["another remat policy"][1][REMAT_KEY].startswith("offload") and "more microbatches" not in found
    found = told("model=8b data.sequence_length=262144 data.global_batch=32")
    both, new = found["another remat policy and more microbatches"]
    assert (
        {*new} == {REMAT_KEY, "accumulation"} and int(new["accumulation"]) > 1 and both.candidate.remat != "attention"
    )
    found = told("model=8b model.num_layers=160 data.sequence_length=8192 data.global_batch=8")
    assert next(iter(found)) == "the optimizer's memory saved"
    assert found["the optimizer's memory saved"][1]["optimizer.offload"] == "host"


@pytest.mark.slow
def test_no_plan_for_hosts_of_which_one_has_fewer_gpus():
    sections = compose(["recipe=long_context", "model=8b", "data.sequence_length=131072", "data.global_batch=24"])
    sections.model.remat, sections.mesh.fsdp = "attention", 6
    target = target_of(None, 6, "h100", None)
    given = {REMAT_KEY, BATCH, *(k for k in SEARCHED if k.startswith("mesh."))}
    found = {what for what, _, _ in nearest(sections, target, given)}
    assert "24 devices" in found and "12 devices" not in found


def test_the_fastest_is_first_and_of_alike_ones_the_smallest_batch():
    base = predicted(EIGHT)

    def made(rows, seconds, tokens):
        time = dataclasses.replace(base.time, seconds={"all": seconds})
        return dataclasses.replace(
            base, time=time, candidate=Candidate(base.candidate.mesh, "full", 1, rows), tokens=tokens
        )

    slow, large, small = made(1, 2.0, 100), made(64, 1.0, 100), made(8, 1.01, 100)
    assert ranked([slow, large, small]) == [small, large, slow]


@pytest.mark.slow
def test_the_batch_is_open_where_it_is_not_given():
    sections = compose(["recipe=long_context", "model=8b", "data.sequence_length=131072"])
    found = list(candidates(sections, 64, set()))
    assert len({c.global_batch for c in found}) > 3 and max(c.global_batch for c in found) * 131072 <= 2**24
    alone = compose(["recipe=long_context", "model=8b", f"data.sequence_length={2**25}"])
    assert {c.global_batch for c in candidates(alone, 64, set())} == {1}


def test_experts_over_two_axes_send_what_changes_its_place_along_each():
    """Of rows that are spread over 2 x 4 ranks half go to the other place of dp, here between slices, and 3 of 4 along ep.
    Tokens that travel by rank are rows for each rank that they meet, and numbers beside: 3 times 8 for each row."""
    words = (
        "recipe=moe model=qwen3_30b_a3b data.sequence_length=4096 data.global_batch=64 experts.axes=[dp,ep] mesh.dp=2 "
    )
    two = target_of("v5p:2x2x1", None, None, None, 2)
    missed = math.prod((128 - 16 - i) / (128 - i) for i in range(8))
    for way, rows in (("all_to_all", 8 * min(1.25 * (1 - missed), 1)), ("all_gather", 1)):
        s = compose([*words.split(), "mesh.ep=4", f"experts.dispatch={way}"])
        links = Links(two.chip, 4, slices=2)
        share = share_of(s, as_given(Predictor(s, two)).abstract_mesh(), links)
        experts = next(part for part in counted_parts(s.model) if part.flops(s.model).grouped)
        made = Costs(experts).traffic(s.model, share)
        row = s.model.model_dim * share.itemsize
        sent = {axis: made.bytes[axis, way] / (share.tokens * row * rows) for axis in ("network", "ep")}
        calls = {axis: made.calls[axis, way] for axis in ("network", "ep")}
        times = 4 + int(not share.remat.rest)
        beside = (3 + 2 * int(not share.remat.rest)) * 4 * 8 / row
        parts = {"network": (times + beside) / 2, "ep": 3 * (times + beside) / 4}
        if way == "all_gather":
            parts = {"network": calls["network"], "ep": 2 * 3 * calls["ep"]}
        assert sent == pytest.approx(parts, rel=1e-4)


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("v5p:4x4x4", 64, "h200", None), "not both"),
        ((None, None, None, None), "topology=v5p:4x4x4"),
        ((None, 64, None, None), "device=h200"),
        (("v9:2x2", None, None, None), "v9:2x2"),
        (("v5p", None, None, None), "topology = 'v5p' has no size"),
        (("v5p:4x0x4", None, None, None), "GENERATION:SHAPE"),
        ((None, 64, "h999", None), "h100"),
        ((None, 65, "v5p", None), "there is no v5p slice of 65 chips"),
        ((None, 12, "h200", None), "devices_per_host = 8"),
    ],
)
def test_targets_that_are_refused(given, words):
    with pytest.raises(ValueError, match=words):
        target_of(*given)


def test_a_plugin_that_is_not_there_is_said_to_be_and_other_faults_are_raised(monkeypatch):
    from jax.experimental import topologies

    for error, expected in ((NotImplementedError("no cuda"), NoCompiler), (TypeError("a fault"), TypeError)):

        def absent(*_, error=error, **__):
            raise error

        monkeypatch.setattr(topologies, "get_topology_desc", absent)
        with pytest.raises(expected, match=str(error)):
            target_of(None, 3, "h100", None).devices()


@pytest.mark.parametrize(
    ("words", "given", "said"),
    [
        ("mesh.sp=7", {"mesh.sp"}, "64 devices are not divisible by 7"),
        ("mesh.sp=-1 mesh.fsdp=-1", {"mesh.sp", "mesh.fsdp"}, "at most one -1"),
        ("data.global_batch=3 mesh.fsdp=64", {BATCH, "mesh.fsdp"}, "data.global_batch = 3 does not divide"),
        # Over heads and a sequence of this length it goes no more than over rows, and yet it is the batch that is wrong.
        ("data.global_batch=3 data.sequence_length=100001", {BATCH}, "data.global_batch = 3 does not divide"),
        ("mesh.tp=64 data.global_batch=3", {"mesh.tp", BATCH}, "num_heads|num_kv_heads"),
        ("mesh.tp=64", {"mesh.tp"}, "num_heads|num_kv_heads"),
        ("data.sequence_length=100001 mesh.sp=64", {"mesh.sp"}, "100001"),
    ],
)
def test_sizes_that_fit_no_plan(words, given, said):
    with pytest.raises(ValueError, match=said):
        search(compose(["recipe=long_context", "model=8b", *words.split()]), TPU, given, None)


def test_every_device_has_its_facts():
    assert all(chip.memory > 2**33 and chip.flops > 1e14 and chip.source for chip in CHIPS.values())
    assert CHIPS["v5p"].flops == 459e12 and CHIPS["h200"].flops == 989e12


@pytest.mark.parametrize(
    ("topology", "devices"), [("v4:2x2x1", 4), ("v5e:2x4", 8), ("v5p:2x2x1", 4), ("v6e:2x2", 4), ("tpu7x:2x2x1", 8)]
)
def test_a_slice_has_as_many_devices_as_the_compiler_knows(topology, devices):
    """A chip of the seventh generation is two devices, which share its memory and its speed."""
    target = target_of(topology, None, None, None)
    assert target.count == len(target.devices()) == devices and target.devices()[0].device_kind == target.chip.kind
    assert target.chip.memory <= 96 * 2**30
    twice = target_of(topology, None, None, None, 2)
    assert twice.count == len(twice.devices()) == 2 * devices and twice.slices == 2


# -- the results that were kept ---------------------------------------------------------------------------------------

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results" / "plans" / "plans.json"


FARTHER = {"8b_8k_lora": 0.11, "8b_8k_tp": 0.06, "kimi_linear_32k_h200": 0.07}


def test_predictions_are_within_a_twentieth_of_what_compilers_said():
    """The committed results, predicted again by the code as it is; three of them are farther off. Of Kimi Linear XLA for GPUs
    turns a whole stack of what is kept, and makes residuals of other layers of a round again before they are read."""
    from benchmarks.plan import CASES

    rows = json.loads(RESULTS.read_text())
    assert len(rows) >= 6 and set(rows) <= set(CASES)
    for name, row in rows.items():
        where, words = CASES[name]
        target = target_of(where, None, None, None) if isinstance(where, str) else target_of(None, *where, None)
        error = predicted(words, target).memory.total / row["compiled"]["bytes"] - 1
        assert abs(error) < FARTHER.get(name, 0.05), (name, error)


def test_the_readme_has_the_table_of_the_results():
    from benchmarks.plan import BEGIN, END, README, tables

    written = README.read_text().partition(BEGIN)[2].partition(END)[0].strip()
    assert written == tables(json.loads(RESULTS.read_text())), "run: python -m benchmarks.plan case=none write=true"


# -- the two that were asked for --------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        "recipe=long_context model=8b data.sequence_length=1048576",
        "recipe=moe_long_context model=qwen3_235b_a22b data.sequence_length=131072",
    ],
)
def test_large_plans_for_512_chips(words, capsys):
    import time

    from launch.plan import main

    start = time.process_time()
    assert main(["topology=v5p:8x8x8", *words.split(), "--json"]) == 0
    cpu = time.process_time() - start
    made = json.loads(capsys.readouterr().out)
    assert made["compiled"] and made["fits"] and made["peak"] < 95 * 2**30
    assert abs(made["plan"]["predicted"]["bytes"] / made["peak"] - 1) < 0.10
    assert cpu < 2 * 300, f"{cpu:.0f} s of CPU exceed what two cores have in five minutes"
