"""The evaluate command with packed weights: what it measures is what the numbers give that are packed."""

import json

import pytest
from small_run import TINY
from test_packed import ATTENTION, EXPERTS, MLP, represented

from ejdist.cluster.hosts import Hosts
from ejdist.training.setup import open_run
from launch.errors import DONE, WRONG
from launch.evaluate import main, parse
from recipes.schema import compose

# Every matrix has 128 inputs and outputs or more, of which two devices have whole groups.
WIDE = ["model.model_dim=128", "model.num_kv_heads=4", "model.head_dim=32", "model.ffn_dim=128", "model.init_std=0.2"]
MIXTURE = ["model.layer_pattern=[full+experts]", "model.experts.num=4", "model.experts.top_k=2"]
KINDS = {
    "dense": (WIDE, {**ATTENTION, **MLP}),
    "mixture": ([*WIDE, *MIXTURE, "model.experts.ffn_dim=128"], {**ATTENTION, **EXPERTS}),
}
MEASURE = ["lengths=64", "batches=1", "examples=2", "depths=1", "data.global_batch=2"]
TASKS = "needle", "spelled"
EVERY = "tasks=loss,needle,spelled"


def save(folder, words, change=lambda params: params):
    """Saves a checkpoint of a run's first parameters, changed, and returns the folder."""
    run = open_run(compose([*TINY, *words, f"run.dir={folder}"]), Hosts(60))
    state = run.program.init()
    run.checkpoints.save(2, state._replace(params=change(state.params)), run.checkpoint_metadata(2))
    run.checkpoints.close()
    return folder


def measured(folder, corpus, *words):
    """Returns what the command finds, as it writes it."""
    path = folder / "results.json"
    assert main([f"run.dir={folder}", *corpus, *MEASURE, *words, f"to={path}"]) == DONE
    return json.loads(path.read_text())


@pytest.mark.parametrize(
    ("kind", "form", "words"),
    [
        pytest.param("dense", "int4", ["mesh.sp=2", "tasks=loss,spelled"], marks=pytest.mark.slow),
        pytest.param("dense", "mxfp8", ["mesh.sp=2", "model.scan_layers=false", EVERY], marks=pytest.mark.slow),
        pytest.param("dense", "nf4", ["mesh.sp=2", "mesh.tp=2", EVERY], marks=pytest.mark.slow),
        pytest.param("mixture", "mxfp4", ["mesh.sp=1", "mesh.ep=2", EVERY], marks=pytest.mark.slow),
        pytest.param("mixture", "int8", ["mesh=single", EVERY], marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_losses_and_answers_are_those_of_the_numbers_that_are_packed(kind, form, words, corpus, tmp_path, capsys):
    """Of a run whose checkpoint has them: losses by position, recall that is scored, and recall that is written."""
    model, sums = KINDS[kind]

    def as_packed(params):
        layers = {
            k: represented(w, sums[k], form, k in EXPERTS) if k in sums else w for k, w in params["layers"].items()
        }
        return {**params, "layers": layers}

    whole = save(tmp_path / "whole", [*corpus, *model])
    rounded = save(tmp_path / "rounded", [*corpus, *model], as_packed)
    capsys.readouterr()
    packed = measured(whole, corpus, *words, f"weights={form}")
    told = capsys.readouterr().out
    wanted = measured(rounded, corpus, *words)
    assert f"weights={form}: " in told and "  not packed: embedding, final_norm" in told
    assert (packed["packed"], wanted["packed"], wanted["not_packed"]) == (form, None, None)
    assert {"embedding", "final_norm"} <= {*packed["not_packed"]} and not {"query", "down"} & {*packed["not_packed"]}
    for place in ("document", "row"):
        for a, b in zip(packed["loss"]["64"][place], wanted["loss"]["64"][place], strict=True):
            assert a["tokens"] == b["tokens"] and a["sum"] == pytest.approx(b["sum"], rel=2e-5)
    assert [cell["task"] for cell in packed["recall"]] == [task for task in TASKS if task in words[-1]]
    for a, b in zip(packed["recall"], wanted["recall"], strict=True):
        assert (a["correct"], a["tokens_correct"]) == (b["correct"], b["tokens_correct"])
        assert a["log_probability"] == pytest.approx(b["log_probability"], rel=1e-4)


def test_what_cannot_be_packed_is_one_sentence(corpus, tmp_path, capsys):
    """Of a run whose matrices are narrow."""
    save(tmp_path, corpus)
    capsys.readouterr()
    with pytest.raises(ValueError, match=r"^weights = 'int5' is unknown; use int8, int4, nf4, mxfp4, mxfp8, or null"):
        parse(["run.dir=x", "weights=int5"])
    assert parse(["run.dir=x", "weights=nf4"])[0].packed == "nf4" and parse(["run.dir=x"])[0].packed is None
    for words, message in (
        ([], "weights = 'int4' can pack no matrix of this model, in groups of 64 inputs: query, key"),
        (["lora.rank=4"], "weights = int4 packs matrices as they are stored, and those of this run have adapters"),
    ):
        assert main([f"run.dir={tmp_path}", *corpus, *MEASURE, "mesh=single", "weights=int4", *words]) == WRONG
        told = capsys.readouterr().err
        assert message in told and told.count("\n") == 1, told
