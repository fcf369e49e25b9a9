"""The plan command: a training step compiled ahead of time by the real TPU compiler."""

import dataclasses
import json

import pytest

from launch.plan import Fit, collectives_of, main

SMALL = [
    "recipe=long_context",
    "model.num_layers=2",
    "model.model_dim=256",
    "model.num_heads=4",
    "model.num_kv_heads=2",
]
SMALL += ["model.head_dim=128", "model.ffn_dim=512", "data.sequence_length=2048", "data.global_batch=2"]


def test_a_step_on_four_chips(capsys):
    """Parameters are stored over fsdp and sp: gathered where they are used, their gradients scattered; keys travel over sp."""
    assert main(["topology=v5p:2x2x1", *SMALL, "mesh.fsdp=2", "mesh.sp=2", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["mesh"]["fsdp"] == made["mesh"]["sp"] == 2 and made["parameters"] > 1e6
    assert 0 < made["arguments"] < made["peak"] < 2**30 and made["temporaries"] > 0
    calls = made["collectives"]
    assert {"all-gather", "reduce-scatter", "collective-permute"} <= set(calls), calls


def test_what_it_says():
    fit = Fit("v5e:2x4", {"dp": 1, "sp": 4, "tp": 2}, 1_000_000, 3 << 28, 1 << 30, 5 << 30, {"all-gather": 2}, 1.0)
    said = fit.text()
    assert "v5e:2x4, mesh {'sp': 4, 'tp': 2}" in said and "5.00 GiB of 16 GiB: fits" in said and "2 all-gather" in said
    assert "DOES NOT FIT" in dataclasses.replace(fit, peak=17 << 30).text()


@pytest.mark.slow  # a second minute of the TPU compiler, for what the step on four chips shows of another mesh
def test_what_it_says_of_eight_chips(capsys):
    assert main(["topology=v5e:2x4", *SMALL, "mesh.sp=4", "mesh.tp=2", "sequence.scheme=all_gather"]) == 0
    said = capsys.readouterr().out
    assert "v5e:2x4, mesh {'sp': 4, 'tp': 2}" in said and "GiB of 16 GiB: fits" in said and "collective" in said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "topology=GENERATION:SHAPE"),
        (["topology=v5p"], "topology"),
        (["topology=v9:2x2"], "v9:2x2"),
        (["topology=v5p:2x2x1", "mesh.sp=8"], "8"),
        (["topology=v5p:2x2x1", "mesh.sp=2"], "4"),
        (["topology=v5p:2x2x1", "mesh.sp=4", "model.num_hedas=4"], "model.num_heads"),
    ],
)
def test_what_it_refuses(arguments, words, capsys):
    assert main([*SMALL, *arguments]) == 2
    message = capsys.readouterr().err
    assert "error: " in message and words in message and "Traceback" not in message


def test_a_step_that_does_not_fit_says_so():
    fit = Fit("v5e:2x4", {"sp": 8}, 10, 2**34, 2**30, 17 * 2**30, {}, 1.0)
    assert "17.00 GiB of 16 GiB: DOES NOT FIT" in fit.text()


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
