"""The plan command: what it says, and a training step compiled ahead of time by the real TPU compiler."""

import json

import pytest

from ejdist.planning.compiled import Compiled, collectives_of
from launch.plan import main
from recipes.schema import compose

SMALL = [
    "recipe=long_context",
    "model.num_layers=2",
    "model.model_dim=256",
    "model.num_heads=4",
    "model.num_kv_heads=2",
]
SMALL += ["model.head_dim=128", "model.ffn_dim=512", "data.sequence_length=1024", "data.global_batch=2"]


def test_a_step_on_four_chips(capsys):
    """Parameters are stored over fsdp and sp: gathered where they are used, their gradients scattered; keys travel over sp.
    A mesh that uses all chips leaves nothing to search."""
    assert main(["topology=v5p:2x2x1", *SMALL, "mesh.fsdp=2", "mesh.sp=2", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["mesh"]["fsdp"] == made["mesh"]["sp"] == 2 and made["parameters"] > 1e6
    assert 0 < made["arguments"] < made["peak"] < 2**30 and made["temporaries"] > 0
    calls = made["collectives"]
    assert {"all-gather", "reduce-scatter", "collective-permute"} <= set(calls), calls
    # What was predicted: the state to the padding of the compiler, and the whole where small things weigh more.
    assert not made["searched"] and made["fits"] and made["overrides"] == ""
    expected = made["plan"]["predicted"]
    state = sum(expected["bytes_of"][n] for n in ("parameters", "optimizer moments", "batch"))
    assert made["arguments"] == pytest.approx(state, rel=0.02)
    assert made["peak"] == pytest.approx(expected["bytes"], rel=0.35)


def test_microbatches_are_summed_where_parameters_lie(capsys):
    """Left alone the compiler sums whole gradients, and of this program ends in a RET_CHECK of its own (libtpu 0.0.51)."""
    shape = ["num_layers=1", "model_dim=512", "ffn_dim=1024", "vocab_size=1024", "num_heads=4", "num_kv_heads=2"]
    data = ["data.sequence_length=512", "data.global_batch=8", "accumulation=2"]
    keys = ["recipe=long_context", "model=8b", *(f"model.{k}" for k in shape), *data, "mesh.fsdp=4", "mesh.sp=1"]
    assert main(["topology=v5p:2x2x1", *keys, "search=false", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["collectives"].get("reduce-scatter", 0) > 0


@pytest.fixture
def compiler(monkeypatch):
    """A stand-in for the compiler; `peak` is what it says of every step, and `asked` what it was asked."""

    class Stand:
        peak, asked = 2**30, []

        def __call__(self, sections, target):
            self.asked.append(sections)
            return Compiled({"sp": 8}, 1_000_000, 2**29, 2**28, self.peak, {"all-gather": 2}, 1.0, ["a choice"])

    stand = Stand()
    stand.asked = []
    monkeypatch.setattr("ejdist.planning.compiled.compiled_step", stand)
    return stand


LARGE = ["recipe=long_context", "model=8b", "data.sequence_length=131072", "data.global_batch=8"]


def test_what_it_says_of_a_recipe_as_it_is(compiler, capsys):
    compiler.peak = 5 << 30
    assert main(["topology=v5p:4x4x4", *LARGE, "mesh.fsdp=8", "mesh.sp=8"]) == 0
    said = capsys.readouterr().out
    assert len(compiler.asked) == 1 and compiler.asked[0].model.remat == "attention"
    assert "v5p:4x4x4: the recipe as it is" in said and "5.00 GiB of 95 GiB: fits" in said and "2 all-gather" in said
    assert "1,000,000 parameters" in said and "a choice" in said and "optimizer moments" in said and "MFU" in said
    assert "the plan:" not in said


def test_a_step_that_does_not_fit_says_so_and_what_would(compiler, capsys):
    compiler.peak = 97 << 30
    assert main(["topology=v5p:4x4x4", *LARGE, "mesh.fsdp=8", "mesh.sp=8"]) == 1
    said = capsys.readouterr().out
    assert "97.00 GiB of 95 GiB: DOES NOT FIT" in said and "would fit, with" in said


def test_a_plan_is_searched_and_given_keys_stay(compiler, capsys):
    assert main(["topology=v5p:4x4x4", *LARGE, "mesh.sp=8", "model.remat=full"]) == 0
    out = capsys.readouterr()
    assert "compiling mesh.dp=" in out.err and len(compiler.asked) == 1
    asked = compiler.asked[0]
    assert (asked.mesh.sp, asked.model.remat, asked.data.global_batch) == (8, "full", 8)
    pasted = out.out.splitlines()[-1].split("python -m launch.train ")[1].split()
    again = compose(pasted)
    assert again.mesh == asked.mesh and again.accumulation == asked.accumulation
    assert "given: data.global_batch, mesh.sp, model.remat" in out.out and "next: " in out.out


def test_what_the_recipe_has_is_compiled_with_search_false(compiler, capsys):
    assert main(["topology=v5p:4x4x4", *LARGE, "mesh.fsdp=8", "mesh.sp=-1", "search=false", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert not made["searched"] and compiler.asked[0].mesh.sp == 8


def test_a_search_beside_a_given_mesh(compiler, capsys):
    assert main(["topology=v5p:4x4x4", *LARGE, "mesh.fsdp=8", "mesh.sp=8", "search=true"]) == 0
    assert "model.remat=" in capsys.readouterr().out and compiler.asked[0].mesh.sp == 8


def test_gpus_that_cannot_be_compiled_for_are_estimated(monkeypatch, capsys):
    def absent(sections, target):
        raise RuntimeError("there is no plugin")

    monkeypatch.setattr("ejdist.planning.compiled.compiled_step", absent)
    assert main(["devices=64", "device=h200", *LARGE]) == 0
    said = capsys.readouterr().out
    assert "predicted and not compiled" in said
    assert "nothing was compiled, and memory is an estimate: there is no plugin" in said


def test_nothing_is_compiled_where_no_finalist_is_asked_for(compiler, capsys):
    assert main(["devices=64", "device=h200", *LARGE, "finalists=0"]) == 0
    assert not compiler.asked and "predicted and not compiled" in capsys.readouterr().out


@pytest.mark.slow  # a minute of XLA's compiler for GPUs
def test_a_gpu_that_is_not_there_is_compiled_for(capsys):
    """The very bytes that a real H200's compiler took, which are in the benchmark's results."""
    from benchmarks.plan import STEPS

    found = json.loads((STEPS / "1b_8k_h200.json").read_text())
    assert main(["devices=1", "device=h200", *found["recipe"], "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["compiled"], made["notes"]
    assert made["arguments"] / 2**30 == pytest.approx(found["arguments_gib"], rel=1e-3)
    assert made["temporaries"] / 2**30 == pytest.approx(found["temporaries_gib"], rel=0.05)


@pytest.mark.slow  # a second minute of the TPU compiler, for what the step on four chips shows of another mesh
def test_what_it_says_of_eight_chips(capsys):
    assert main(["topology=v5e:2x4", *SMALL, "mesh.sp=4", "mesh.tp=2", "sequence.scheme=all_gather"]) == 0
    said = capsys.readouterr().out
    assert "mesh {'sp': 4, 'tp': 2}" in said and "GiB of 16 GiB: fits" in said and "collective" in said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "topology=GENERATION:SHAPE"),
        (["topology=v5p"], "topology"),
        (["topology=v9:2x2"], "v9:2x2"),
        (["topology=v5p:2x2x1", "mesh.sp=8"], "8"),
        (["topology=v5p:2x2x1", "mesh.sp=2", "search=false"], "4"),
        (["topology=v5p:2x2x1", "mesh.sp=3"], "4 devices cannot be divided by 3"),
        (["topology=v5p:2x2x1", "devices=4", "device=h200"], "not both"),
        (["devices=four", "device=h200"], "devices must be a number"),
        (["topology=v5p:2x2x1", "topology=v5p:4x4x4"], "topology is given twice"),
        (["topology=v5p:2x2x1", "search=yes"], "search must be auto, true or false"),
        (["topology=v5p:2x2x1", "mesh.sp=4", "model.num_hedas=4"], "model.num_heads"),
    ],
)
def test_what_it_refuses(arguments, words, capsys):
    assert main([*SMALL, *arguments]) == 2
    message = capsys.readouterr().err
    assert "error: " in message and words in message and "Traceback" not in message


def test_collectives_are_counted_by_what_they_are():
    text = """
%all-reduce-scatter.1 (a: f32[8]) -> f32[4] {
  %x = f32[8]{0} all-reduce(%a), to_apply=%add
}
ENTRY %main {
  %y = (f32[8], f32[8]) all-gather-start(%b), dimensions={0}
  %z = f32[8] all-gather-done(%y)
  ROOT %w = f32[] all-reduce(%z), to_apply=%add
}
"""
    assert collectives_of(text) == {"all-gather": 1, "all-reduce": 1, "reduce-scatter": 1}


@pytest.mark.slow
def test_eight_billion_parameters_and_131072_tokens_fit_a_slice_of_64_chips(capsys):
    sizes = ["model=8b", "data.sequence_length=131072", "data.global_batch=8", "mesh.fsdp=8", "mesh.sp=8"]
    assert main(["topology=v5p:4x4x4", "recipe=long_context", *sizes, "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["parameters"] == 8_030_261_248 and made["peak"] < 40 * 2**30
