"""Plans that save memory: moments on the host or in bfloat16, sums of gradients in bfloat16, activations on the host."""

import dataclasses
import json

import pytest

from ejdist.mesh import mesh_shape
from ejdist.models.remat import REMAT
from ejdist.planning.candidates import BATCH, GROUPS, OFFLOAD, SEARCHED, candidate_of
from ejdist.planning.candidates import REMAT as REMAT_KEY
from ejdist.planning.compiled import DoesNotFit
from ejdist.planning.memory import ACTIVATIONS
from ejdist.planning.search import Predictor, search
from ejdist.planning.step_time import TO_HOST
from ejdist.planning.targets import target_of
from launch.plan import main
from recipes.schema import compose

MILLION = "model=qwen3_8b data.sequence_length=1048576"
H100 = target_of(None, 8, "h100", None)
EIGHT = "recipe=long_context model=8b data.sequence_length=8192 data.global_batch=64 mesh.fsdp=64 mesh.sp=1"
TPU = target_of("v5p:4x4x4", None, None, None)


def predicted(words, target=TPU):
    sections = compose(words.split())
    return Predictor(sections, target).checked(candidate_of(sections, mesh_shape(sections.mesh.sizes, target.count)))


@pytest.mark.slow
def test_activations_go_to_the_host_where_attention_would_run_twice(capsys):
    """A step of 2^20 tokens of an 8B model on eight H100s."""
    words = f"device=h100 devices=8 {MILLION} finalists=0".split()
    assert main([*words, "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["fits"] and made["plan"]["remat"] == "offload" and "optimizer.offload" not in made["overrides"]
    said = made["plan"]["predicted"]
    (kept,) = said["bytes_on_host"].values()
    assert kept == 2 * 36 * 4096 * 2**20 // 8 * 2, "the input of each layer, and attention's output"
    assert made["host"]["bytes"] == 8 * kept < made["host"]["memory"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "nothing fits without" not in out, "attention that runs twice would fit, and be slower"
    assert "memory of the host, predicted:" in out and "GB/s each way; PCIe 5.0" in out
    assert "model.remat=offload " in out.splitlines()[-1]
    of = search(compose([*MILLION.split(), "model.remat=full"]), H100, {BATCH, REMAT_KEY}, None).best
    assert of.candidate.remat == "full" and of.time.total > 1.05 * said["step_seconds"]


@pytest.mark.slow
def test_state_goes_to_the_host_where_a_plan_needs_it(capsys):
    """Four times as many tokens, on a ring."""
    words = "device=h100 devices=8 model=qwen3_8b data.sequence_length=4194304 sequence.scheme=ring finalists=0"
    assert main([*words.split(), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)["plan"]["predicted"]
    moments, _ = said["bytes_on_host"].values()
    assert said["seconds_of"]["moments from and to the host"] == pytest.approx(2 * moments / (TO_HOST * 64e9))
    assert main(words.split()) == 0
    out = capsys.readouterr().out
    assert "nothing fits without optimizer.offload=host" in out and "the plan that needs least takes" in out


@pytest.mark.slow
def test_savings_are_not_proposed_where_a_plan_fits_without():
    found = search(compose(EIGHT.split()), TPU, {BATCH}, None)
    assert found.best is not None and not found.best.candidate.savings and found.unsaved is None


@pytest.mark.slow
def test_savings_come_in_order_and_never_against_what_is_given():
    """What changes no loss comes first; what is given stays; a fault of the compiler is no reason to save memory."""
    sections, asked = compose(MILLION.split()), []

    def too_large(s):
        o = s.optimizer
        asked.append((o.offload, o.accumulate, o.moments, s.model.remat))
        raise DoesNotFit("too large", memory=True)

    def faulty(s):
        asked.append(s)
        raise DoesNotFit("a fault", memory=False)

    assert search(sections, target_of(None, 16, "h100", None), {BATCH}, too_large, finalists=1).best is None
    plain = ("none", "float32", "float32")
    assert [a[:3] for a in asked[:3]] == [plain, plain, ("host", "float32", "float32")]
    assert [REMAT[a[3]].host for a in asked[:2]] == [False, True], "activations before moments"
    assert [a[2] for a in asked] == sorted((a[2] for a in asked), reverse=True), "moments in bfloat16 are last"
    assert {a[0] for a in asked} == {"none", "host"} and len(set(asked)) == len(asked)
    asked.clear()
    search(sections, target_of(None, 16, "h100", None), {BATCH}, faulty, finalists=1)
    assert len(asked) == 1
    assert (
        search(sections, H100, {BATCH, *(k for k in SEARCHED if k.startswith("optimizer.")), REMAT_KEY}, None).best
        is None
    )


@pytest.mark.slow
def test_a_host_that_is_too_small_takes_nothing():
    sections = compose(MILLION.split())
    small = dataclasses.replace(H100, chip=dataclasses.replace(H100.chip, host_memory=200 << 30))
    there, away = (search(sections, target, {BATCH, OFFLOAD}, None).best for target in (H100, small))
    assert there.memory.host and not away.memory.host and away.time.total > there.time.total


def test_what_each_way_saves_and_costs():
    plain = predicted(EIGHT)
    half, away = (predicted(f"{EIGHT} {keys}") for keys in ("optimizer.moments=bfloat16", "optimizer.offload=host"))
    moments = plain.memory.classes["optimizer moments"]
    assert half.memory.classes["optimizer moments"] == moments // 2 and half.memory.host == 0
    assert half.time.total < plain.time.total < away.time.total
    assert away.memory.host + away.memory.classes["optimizer moments"] == moments and away.memory.host > 0.99 * moments
    twice = f"{EIGHT} data.global_batch=128 accumulation=2"
    sums, small = (
        predicted(f"{twice} {keys}").memory.classes["gradients"] for keys in ("", "optimizer.accumulate=bfloat16")
    )
    assert sums - small == plain.memory.classes["parameters"] // 2


def test_a_plan_of_millions_of_tokens():
    """An 8B model on eight H100s: the input of each layer on the host, the rest computed again, the MLP a block at a time."""
    found = search(
        compose(["model=qwen3_8b", "data.sequence_length=3670016", "data.global_batch=1"]), H100, {BATCH}, None
    )
    best = found.best
    assert best.candidate.remat == "offload_inputs" and best.candidate.overrides()["mesh.sp"] == "8"
    assert best.memory.on_host[ACTIVATIONS] == 36 * 4096 * 3670016 // 8 * 2
    keys = (
        "model=qwen3_8b data.sequence_length=1048576 data.global_batch=1 mesh.sp=8 sequence.scheme=ulysses model.remat="
    )
    full, away = (predicted(f"{keys}{remat}", H100) for remat in ("full", "offload_inputs"))
    kept = [p.memory.classes["activations kept"] for p in (full, away) if "activations kept" in p.memory.classes]
    assert kept == [36 * 4096 * 131072 * 2] and away.memory.on_host == {ACTIVATIONS: kept[0]}
    seconds = [{k: v for k, v in p.time.seconds.items() if "host" not in k} for p in (full, away)]
    assert seconds[0] == seconds[1]


def test_where_nothing_fits_heads_are_exchanged_in_groups():
    """Rows of 4.7 million tokens: with other schemes, and with Ulysses in one group, a device has too little memory."""
    words = "model=qwen3_8b data.sequence_length=4718592 data.global_batch=1 model.remat=offload_inputs".split()
    found = search(compose(words), H100, {BATCH, REMAT_KEY}, None)
    assert found.best.candidate.sequence == ((GROUPS, 4),) and not found.best.candidate.savings
    assert {**found.best.candidate.overrides()}[GROUPS] == "4"
    assert search(compose(words), H100, {BATCH, REMAT_KEY, GROUPS}, None, save=False).best is None
    least = search(compose(words), H100, {BATCH, REMAT_KEY, GROUPS}, None, save=False).smallest
    assert least.memory.total > found.best.memory.total and least.candidate.scheme == found.best.candidate.scheme


@pytest.mark.slow  # compiles four steps, 40 s
@pytest.mark.parametrize("where", ["v5p:2x2x1", "h200"])
def test_the_compiler_puts_the_moments_on_the_host(where):
    """And streams them: of a stack of 16 layers no more than a few are on the device at once."""
    from ejdist.planning.compiled import compiled_step

    model = "model.compute_dtype=bfloat16 model.num_layers=16 model.model_dim=256 model.num_heads=2 "
    model += "model.num_kv_heads=1 model.head_dim=128 model.ffn_dim=4096"
    words = f"recipe=long_context {model} data.sequence_length=256 data.global_batch=4 mesh.fsdp=4"
    target = target_of(where, None, None, None) if ":" in where else target_of(None, 4, where, None)
    keys = f"{words} mesh.sp=1 platform=xla optimizer.offload="
    made = {place: compiled_step(compose(f"{keys}{place}".split()), target) for place in ("none", "host")}
    expected = {place: predicted(f"{keys}{place}", target).memory for place in made}
    moments = expected["host"].host
    assert made["none"].host == 0 and made["host"].host == pytest.approx(moments, rel=0.01)
    assert made["none"].arguments - made["host"].arguments == pytest.approx(moments, rel=0.01)
    assert made["none"].peak - made["host"].peak > 0.7 * moments
