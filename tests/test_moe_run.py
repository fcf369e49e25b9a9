"""A run of a mixture of experts: what it says and writes, where its experts lie, and how it goes on elsewhere."""

import math
import re
from pathlib import Path

import jax
import numpy as np
import pytest
from small_run import TINY, losses

from ejdist.mesh import make_mesh
from ejdist.planning.compiled import collectives_of
from ejdist.training.checkpoint import CheckpointError, Checkpoints
from ejdist.training.loop import train
from ejdist.training.metrics import Progress, RowsOfRun, read_rows, tables_in
from ejdist.training.program import make_program
from ejdist.training.resume import check_same_run, fingerprint
from recipes.schema import compose

E, LAYERS, K = 8, 2, 2
MOE = [
    *("recipe=moe", *(o for o in TINY if not o.startswith(("recipe=", "model.ffn_dim", "data.global_batch", "mesh.")))),
    *("model.experts.ffn_dim=24", "data.global_batch=8", "optimizer.learning_rate=0.01"),
]
DEVICES = 8


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return f"data.cache_dir={tmp_path_factory.mktemp('cache')}"


def run(directory, corpus, *more, devices=DEVICES):
    said = []
    outcome = train(
        compose([*MOE, corpus, f"run.dir={directory}", *more]), devices=jax.devices()[:devices], log=said.append
    )
    return outcome, said


@pytest.fixture(scope="module")
def first(corpus, tmp_path_factory):
    """Eight steps over eight ranks, with a checkpoint in the middle, and a bias that balances."""
    directory = tmp_path_factory.mktemp("run")
    more = ["mesh.ep=8", "run.steps=8", "checkpoint.every=4", "model.experts.bias_rate=0.01", "experts.load_every=3"]
    return directory, *run(directory, corpus, *more)


@pytest.mark.slow
def test_what_a_run_says_and_writes(first):
    directory, outcome, said = first
    assert outcome.finished
    [reason] = [line for line in said if "(chosen)" in line]
    assert "over 8 ranks of cpu" in reason and "ms per layer and step" in reason
    rows = read_rows(directory / "metrics.jsonl")
    tokens = 8 * 64
    for row in rows:
        for name in ("balance_loss", "z_loss", "entropy", "max_violation", "max_violation_micro", "dead_experts",
                     "extra_passes", "buffer_high_water", "dropped", "dropped_fraction", "rank_violation",
                     "host_violation"):  # fmt: skip
            assert len(row[f"experts/{name}"]) == LAYERS, name
        assert all(0.9 <= x <= E for x in row["experts/balance_loss"]) and row["experts/dropped"] == [0, 0]
        assert all(0 < x <= math.log(E) + 1e-6 for x in row["experts/entropy"])
        auxiliary = 0.01 * sum(row["experts/balance_loss"]) + 0.001 * sum(row["experts/z_loss"])
        assert row["experts/auxiliary_loss"] == pytest.approx(auxiliary, rel=1e-5)
    shown = RowsOfRun(directory)
    assert list(shown) == rows
    with_load = [row for row in shown.for_pictures() if "experts/counts" in row]
    assert [row["step"] for row in with_load] == [1, 3, 6, 8]
    for row in with_load:
        counts, ranks = np.array(row["experts/counts"]), np.array(row["experts/rank_counts"])
        assert counts.shape == ranks.shape == (LAYERS, E) and (counts.sum(1) <= K * tokens).all()
        assert (counts == ranks).all()  # of eight ranks each has one
        worst = counts.max(1) / counts.mean(1) - 1
        np.testing.assert_allclose(row["experts/max_violation"], worst, rtol=1e-5)
        assert row["experts/dead_experts"] == (counts == 0).sum(1).tolist()
        assert row["experts/rank_violation"] == row["experts/max_violation"] and row["experts/host_violation"] == [0, 0]
        assert row["experts/host_counts"] == counts.sum(1, keepdims=True).tolist()
    assert (directory / "experts.png").stat().st_size > 10_000
    [events] = (directory / "tensorboard").iterdir()
    assert b"experts/counts/1" in events.read_bytes() and b"experts/entropy/0" in events.read_bytes()


def test_the_line_of_a_step_says_how_many_extra_passes_there_were(capsys):
    row = {"step": 1, "loss": 2.0, "tokens_per_second": 10.0, "step_time": 0.5}
    for passes, words in (([0, 0], ""), ([3, 1], "  4 extra passes to experts")):
        Progress(9).show(row | {"experts/extra_passes": passes})
        assert capsys.readouterr().out.endswith(f"ETA 0:04{words}\n")


@pytest.mark.parametrize(
    ("devices", "where"),
    [
        pytest.param(2, ["mesh.ep=2", "experts.dispatch=all_to_all"], marks=pytest.mark.slow),
        pytest.param(1, ["mesh.ep=1"], marks=pytest.mark.slow),
        pytest.param(
            8,
            ["mesh.ep=2", "mesh.sp=2", "mesh.fsdp=2", "experts.axes=[fsdp,ep]", "experts.dispatch=all_gather"],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_it_goes_on_where_experts_lie_otherwise(first, corpus, tmp_path, devices, where):
    directory, *_ = first
    more = ["run.steps=8", "checkpoint.every=4", "model.experts.bias_rate=0.01", "run.stop_after=8"]
    copy = tmp_path / "run"
    (copy / "checkpoints").mkdir(parents=True)
    (copy / "checkpoints" / "4").symlink_to(directory / "checkpoints" / "4")
    _, said = run(copy, corpus, *more, *where, devices=devices)
    assert any("resuming from step 4" in line for line in said)
    assert not any("(chosen)" in line for line in said)  # named, or of one rank
    np.testing.assert_allclose(losses(copy), losses(directory)[4:], rtol=2e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("model.experts.num=4", "model.experts.num: was 8, is 4"),
        ("model.experts.top_k=1", "model.experts.top_k: was 2, is 1"),
        ("model.experts.bias_rate=0.0", "model.experts.bias_rate: was 0.01, is 0.0"),
        ("experts.capacity=2.0", "experts.capacity: was None, is 2.0"),
    ],
)
def test_a_run_of_other_experts_is_refused(change, message):
    more = [*MOE, "run.steps=8", "model.experts.bias_rate=0.01"]
    stored = fingerprint(compose(more))
    check_same_run(stored, compose([*more, "mesh.ep=2", "experts.dispatch=all_gather"]), 4, Path("run"))
    with pytest.raises(ValueError, match=message):
        check_same_run(stored, compose([*more, change]), 4, Path("run"))


def test_a_run_from_before_there_were_experts_goes_on():
    """Keys that a checkpoint does not know had the meaning that their defaults have."""
    recipe = compose(["recipe=long_context"])
    stored = {
        k: v
        for k, v in fingerprint(recipe).items()
        if not k.startswith(("model.experts.", "experts.", "model.latent."))
    }
    assert len(stored) < len(fingerprint(recipe))
    check_same_run(stored, recipe, 4, Path("run"))


@pytest.mark.slow
def test_a_checkpoint_of_other_experts_is_refused(first):
    checkpoints = Checkpoints(first[0], compose(MOE).checkpoint)
    recipe = compose([*MOE, "model.experts.bias_rate=0.01", "model.experts.num=4"])
    like = make_program(recipe, make_mesh(devices=jax.devices()[:1])).state
    with pytest.raises(CheckpointError, match=r"another model.*\(2, 8\).*\(2, 4\)|another model"):
        checkpoints.restore(8, like)
    checkpoints.close()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["mesh.ep=8", "model.experts.num=12"], r"model\.experts\.num.*12.*ep=8"),
        (["mesh.ep=8", "model.experts.top_k=9"], r"model\.experts\.top_k = 9 is more than model\.experts\.num = 8"),
        (["mesh.ep=8", "experts.capacity=0.3"], r"capacity.*1 / 2"),
        (
            ["mesh.ep=8", "experts.dispatch=teleport"],
            r"experts\.dispatch = 'teleport' is unknown; use auto, all_to_all",
        ),
        (["mesh.ep=8", "experts.axes=[tp]"], r"experts\.axes = \['tp'\]"),
        (["mesh.ep=8", "experts.buffer=0"], "buffer.*above 0"),
        (["mesh.ep=8", "experts.load_every=-1"], r"experts\.load_every"),
        (["mesh.ep=8", "model.experts.num_groups=3", "model.experts.topk_groups=1"], "num_groups"),
        (["mesh.ep=8", "model.experts.balance=rank"], r"model\.experts\.balance = 'rank'"),
        (["mesh.ep=8", "model.layer_pattern=[full]"], r"model\.experts is given, but no layer has experts"),
    ],
)
def test_wrong_recipes_name_the_key_before_anything_runs(more, message):
    recipe = compose([*MOE, *more])
    with pytest.raises(ValueError, match=message):
        program_of(recipe)


def program_of(recipe):
    program = make_program(recipe, make_mesh(**vars(recipe.mesh)))
    program.lower()
    return program


@pytest.mark.slow
def test_tokens_are_gathered_nowhere_but_for_their_experts():
    """In the compiled step, a router's scores stay where their tokens are. Its weights are gathered, as all weights are."""
    experts = 12  # as no other dimension of this model is
    recipe = compose([*MOE, f"model.experts.num={experts}", "mesh.ep=4", "mesh.sp=2", "experts.dispatch=all_to_all"])
    program = program_of(recipe)
    text = program.lower().compile().as_text()
    gathered = {tuple(map(int, dims.split(","))) for dims in re.findall(r"= f32\[([\d,]+)\]\S* all-gather\(", text)}
    weights = (1, recipe.model.model_dim, experts)
    assert {dims for dims in gathered if dims[-1] == experts} == {weights}
    assert collectives_of(text)["all-to-all"]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["moe", "moe_long_context"])
def test_the_recipes_train(recipe, corpus, tmp_path):
    folder = tmp_path / recipe
    more = [
        f"recipe={recipe}",
        corpus,
        f"run.dir={folder}",
        "run.steps=50",
        "checkpoint.every=0",
        "experts.load_every=1",
    ]
    outcome = train(compose(more), devices=jax.devices()[:4], log=lambda line: None)
    assert outcome.summary["loss_last"] < outcome.summary["loss_first"] - 1.5
    # One step may leave an expert out while scores still move; ten may not.
    counts = np.array([row["experts/counts"] for row in list(tables_in(folder))[-10:]])
    assert counts.shape[:2] == (10, 4) and counts.sum(0).all()
