"""The train command: the same losses on every layout, bit for bit after a stop, and clear words for bad input."""

import json
import math
import shutil
import signal
import threading

import jax
import jax.numpy as jnp
import numpy as np
import published_loop
import pytest
from shared import once
from small_run import PLAIN, TINY, losses

from ejdist.evaluation.weights import open_weights
from ejdist.mesh import make_mesh
from ejdist.training import loop
from ejdist.training.checkpoint import CheckpointError, Checkpoints, CheckpointSection
from ejdist.training.data import build as build_data
from ejdist.training.flops import matmul_flops_per_token
from ejdist.training.integrity import digest
from ejdist.training.loop import train
from ejdist.training.metrics import read_rows
from ejdist.training.program import make_program
from ejdist.training.summary import EVENNESS
from launch.errors import BAD_CHECKPOINT, DIVERGED, DONE, PREEMPTED, WRONG
from launch.train import main
from recipes.schema import GROUPS, RecipeError, compose, keys_of, variants_of

pytestmark = pytest.mark.usefixtures("one_program_for_equal_runs")


def run(directory, corpus, *overrides):
    said = []
    outcome = train(compose([*TINY, *corpus, f"run.dir={directory}", *overrides]), log=said.append)
    return outcome, said


# Each scheme of the sequence, order, axis and way to hold the step's memory, in few programs; alone they are in the slow tier.
LAYOUTS = {
    "fsdp2_sp4_balanced_ring": ["mesh.fsdp=2", "mesh.sp=4", "sequence.order=balanced"],
    "tp2_sp2_contiguous_all_gather_kept_products": [
        *("mesh.tp=2", "mesh.sp=2", "sequence.order=contiguous", "sequence.scheme=all_gather", "model.remat=dots"),
    ],
    "dp2_cp2_sp2_zigzag_ulysses_accumulation": [
        *("mesh.dp=2", "mesh.cp=2", "mesh.sp=2", "sequence.scheme=ulysses", "data.global_batch=4", "accumulation=2"),
        *("sequence.outer=all_gather", "sequence.head_groups=2"),
    ],
}
QUICK = ("fsdp2_sp4_balanced_ring",)
MORE_LAYOUTS = {
    "fsdp2_sp4_zigzag_ring_verified": ["mesh.fsdp=2", "mesh.sp=4", "sequence.verify=first_batch"],
    "sp4_zigzag_ring": ["mesh.sp=4"],
    "sp4_balanced_all_gather": ["mesh.sp=4", "sequence.order=balanced", "sequence.scheme=all_gather"],
    "cp2_sp2_balanced_ulysses": ["mesh.cp=2", "mesh.sp=2", "sequence.order=balanced", "sequence.scheme=ulysses"],
    "sp4_auto_ring": ["mesh.sp=4", "sequence.order=auto"],
    "sp4_contiguous_all_gather": ["mesh.sp=4", "sequence.order=contiguous", "sequence.scheme=all_gather"],
    "fsdp2_sp2": ["mesh.fsdp=2", "mesh.sp=2"],
    "cp2_sp2_zigzag_ulysses": ["mesh.cp=2", "mesh.sp=2", "sequence.scheme=ulysses"],
    "tp2_fsdp2_kept_products": ["mesh.tp=2", "mesh.fsdp=2", "mesh.sp=1", "model.remat=dots"],
    "dp2_accumulation": ["mesh.dp=2", "mesh.sp=1", "data.global_batch=4", "accumulation=2"],
    "tp2_sp2": ["mesh.tp=2", "mesh.sp=2"],
    "sp2_zigzag_all_gather": ["mesh.sp=2", "sequence.scheme=all_gather"],
    "sp2_contiguous_ring": ["mesh.sp=2", "sequence.order=contiguous"],
    "sp1": ["mesh.sp=1"],
    "sp4_zigzag_ulysses": ["mesh.sp=4", "sequence.scheme=ulysses"],
    "cp2_sp2_striped_ulysses": ["mesh.cp=2", "mesh.sp=2", "sequence.order=striped", "sequence.scheme=ulysses"],
    "cp2_sp2_zigzag_ring": ["mesh.cp=2", "mesh.sp=2"],
    "sp2_zigzag_ring": ["mesh.sp=2"],
    "sp4_contiguous_ring": ["mesh.sp=4", "sequence.order=contiguous"],
    "sp4_zigzag_all_gather": ["mesh.sp=4", "sequence.scheme=all_gather"],
    "sp2_contiguous_all_gather": ["mesh.sp=2", "sequence.order=contiguous", "sequence.scheme=all_gather"],
}


@pytest.fixture(scope="session")
def reference(corpus, tmp_path_factory):
    """Global batch -> losses on one device, computed when they are asked for."""

    def of(batch):
        def make(folder):
            run(folder, corpus, "mesh.sp=1", "sequence.order=contiguous", f"data.global_batch={batch}")

        return losses(once(tmp_path_factory, f"reference_{batch}", make))

    return of


@pytest.fixture(scope="session")
def whole(corpus, tmp_path_factory):
    """The losses of a run of six steps that was never stopped."""
    return losses(once(tmp_path_factory, "whole", lambda folder: run(folder, corpus, "run.steps=6")))


def layouts():
    for name in LAYOUTS | MORE_LAYOUTS:
        yield pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)


@pytest.mark.parametrize("layout", list(layouts()))
def test_ten_losses_are_the_same_on_every_layout(layout, corpus, reference, tmp_path):
    overrides = (LAYOUTS | MORE_LAYOUTS)[layout]
    run(tmp_path, corpus, *overrides)
    got = losses(tmp_path)
    assert len(got) == 10
    np.testing.assert_allclose(got, reference(4 if "data.global_batch=4" in overrides else 2), rtol=1e-4)


def test_parameters_and_moments_are_split_over_the_sequence_too():
    sections = compose([*TINY, "mesh.sp=4", "mesh.fsdp=2"])
    state = make_program(sections, make_mesh(**vars(sections.mesh))).state
    leaves = [x for x in jax.tree.leaves((state.params, state.opt_state)) if x.ndim > 2]
    assert leaves and {math.prod(x.shape) // math.prod(x.sharding.shard_shape(x.shape)) for x in leaves} == {8}


# Quick: the last but one.
@pytest.mark.parametrize("stops", [(5,), pytest.param((1, 2, 3, 4, 5), marks=pytest.mark.slow)])
def test_a_run_stopped_after_any_step_goes_on_bit_for_bit(stops, whole, corpus, tmp_path):
    for stop in stops:
        outcome, _ = run(tmp_path / "parts", corpus, "run.steps=6", f"run.stop_after={stop}")
        assert outcome.step == stop and not outcome.finished
    outcome, said = run(tmp_path / "parts", corpus, "run.steps=6")
    assert outcome.finished and any("resuming from step 5" in line for line in said)
    assert losses(tmp_path / "parts") == whole, "every loss must be the same number"
    outcome, said = run(tmp_path / "parts", corpus, "run.steps=6")
    assert any("nothing to do" in line for line in said) and losses(tmp_path / "parts") == whole


@pytest.mark.slow
def test_a_run_goes_on_with_another_mesh(whole, corpus, tmp_path):
    run(tmp_path, corpus, "run.steps=6", "run.stop_after=2")
    run(tmp_path, corpus, "run.steps=6", "mesh.fsdp=2", "mesh.sp=4")
    np.testing.assert_allclose(losses(tmp_path), whole, rtol=1e-4)


def test_what_a_run_writes(corpus, tmp_path):
    outcome, _ = run(tmp_path, corpus, "run.steps=6", "checkpoint.every=1", "checkpoint.keep=2")
    rows = read_rows(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert {"loss", "grad_norm", "learning_rate", "tokens", "step_time", "tokens_per_second"} <= set(rows[0])
    assert 1 <= rows[0]["imbalance_sp"] < 2 and rows[0]["imbalance_dp"] == 1 and rows[0]["padding_share"] == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    wanted = "loss_first loss_last steps tokens_per_second tflops_per_device mfu_causal mfu_full".split()
    assert {*wanted, *EVENNESS} <= set(summary) and outcome.summary == summary
    assert summary["loss_first"] == rows[0]["loss"] and summary["steps"] == 6
    assert 0 < summary["tflops_per_device"]
    assert (tmp_path / "loss.png").read_bytes()[:4] == b"\x89PNG"
    assert next(iter((tmp_path / "tensorboard").glob("events*"))).stat().st_size > 500
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["5", "6"]


@pytest.mark.slow
@pytest.mark.parametrize("sheet", [None, 1e12])
def test_the_mfu_is_a_share_of_a_data_sheet_or_left_out(sheet, corpus, tmp_path, capsys, monkeypatch):
    """A peak that is measured beside other work is beaten by the run itself: 129% was seen on a busy CPU."""
    if sheet is not None:
        monkeypatch.setattr(loop, "peak_flops", lambda kind: sheet)
    assert main([*TINY, *corpus, f"run.dir={tmp_path}", "mesh.sp=1", "run.steps=3"]) == DONE
    s, said = json.loads((tmp_path / "summary.json").read_text()), capsys.readouterr().out
    if sheet is None:
        assert s["mfu_causal"] is s["mfu_full"] is s["peak_tflops_per_device"] is None and "MFU" not in said
        assert f"TFLOP/s per device; written to {tmp_path}" in said
        assert s["peak_source"] == "none: no data sheet is known for 'cpu'"
    else:
        rate = 1e12 * s["tflops_per_device"]
        np.testing.assert_allclose([s["mfu_causal"], s["peak_tflops_per_device"]], [rate / sheet, 1.0])
        assert s["mfu_causal"] < s["mfu_full"] and f"MFU {s['mfu_causal']:.1%} causal, {s['mfu_full']:.1%} full" in said
        assert s["peak_source"] == "data sheet, dense bf16"


def test_flops_are_counted_from_the_documents_of_the_batches(stopped_run, corpus):
    """A row may be packed from several documents, and no query sees a key of another."""
    recipe = compose([*TINY, *corpus])
    config, data = recipe.model, build_data(recipe.data, seed=recipe.run.seed)
    rows = read_rows(stopped_run / "metrics.jsonl")
    assert len({row["flops_causal"] for row in rows}) > 1, "batches must be packed differently"
    for row in rows:
        ids = data.batch(row["step"] - 1)["segment_ids"]
        same = (ids[:, :, None] == ids[:, None, :]) & (ids >= 0)[:, :, None]
        pairs = int(np.tril(same).sum())
        attention = 4 * config.num_heads * config.head_dim * config.num_layers * pairs
        assert row["flops_causal"] == 3 * (matmul_flops_per_token(config.build().flops) * ids.size + attention)


@pytest.mark.slow  # two starts; tests/test_run_files.py has signals, the test above runs that go on
def test_a_signal_saves_and_the_run_goes_on(whole, corpus, tmp_path, monkeypatch):
    from ejdist.training import steps

    place, calls = steps.place_batch, []

    def count(*arguments):
        calls.append(1)
        if len(calls) == 3:
            signal.raise_signal(signal.SIGTERM)
        return place(*arguments)

    monkeypatch.setattr(steps, "place_batch", count)
    assert threading.current_thread() is threading.main_thread()
    outcome, said = run(tmp_path, corpus, "run.steps=6")
    assert outcome.step == 3 and not outcome.finished and any("SIGTERM after step 3" in line for line in said)
    monkeypatch.setattr(steps, "place_batch", place)
    run(tmp_path, corpus, "run.steps=6")
    assert losses(tmp_path) == whole


@pytest.mark.parametrize("every", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_loss_that_is_no_number_stops_the_run_and_is_not_saved(every, corpus, tmp_path, capsys):
    overrides = ["run.steps=30", "optimizer.learning_rate=1e30", "optimizer.clip_norm=0", "optimizer.schedule=constant"]
    arguments = [*PLAIN, *corpus, f"run.dir={tmp_path}", *overrides, f"checkpoint.every={every}"]
    assert main(arguments) == DIVERGED
    message = capsys.readouterr().err
    assert "has loss" in message and "optimizer.learning_rate" in message and "Traceback" not in message
    rows = [json.loads(line, parse_constant=pytest.fail) for line in (tmp_path / "metrics.jsonl").open()]
    assert rows[0]["loss"] > 0 and None in (rows[-1]["loss"], rows[-1]["grad_norm"]) and len(rows) < 20
    bad = next(row["step"] for row in rows if row["loss"] is None or row["grad_norm"] is None)
    saved = [int(p.name) for p in (tmp_path / "checkpoints").glob("*") if p.name.isdigit()]
    assert all(step < bad for step in saved)


# -- bad input: one clear message, nothing written ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["data.sequence_lenght=64"], ["'data.sequence_lenght'", "'data.sequence_length'"]),
        (["seqence.order=zigzag"], ["'seqence.order'", "'sequence.order'"]),
        (["model=nanno"], ["model=nanno", "nano"]),
        (["recipe=longcontext"], ["recipe=longcontext", "long_context"]),
        (["run"], ["'run'", "KEY=VALUE"]),
        (["run=3"], ["'run'", "section", "run.steps"]),
        (["run.steps=many"], ["run.steps", "many"]),
        (["data.sequence_length=62", "mesh.sp=4"], ["62", "multiple of 8", "64"]),
        (["mesh.tp=4", "mesh.sp=1"], ["K = 2", "tp=4"]),
        (["mesh.dp=4", "mesh.sp=1"], ["B = 2", "data.global_batch", "dp=4"]),
        (["mesh.sp=16"], ["mesh.sp=16", "16 devices", "8"]),
        (["mesh.sp=-1", "mesh.fsdp=-1"], ["-1"]),
        (["accumulation=3"], ["data.global_batch = 2", "accumulation = 3"]),
        (["sequence.order=spiral"], ["sequence.order", "spiral", "zigzag"]),
        (["sequence.scheme=tree"], ["scheme", "tree", "all_gather"]),
        (
            ["sequence.scheme=ulysses", "mesh.sp=8"],
            ["'ulysses'", "model.num_heads = 4", "sp=8", "divisor of 4", "mesh.sp=4 mesh.cp=2"],
        ),
        (["sequence.head_groups=2"], ["sequence.head_groups = 2", "'ring'", "sequence.scheme=all_gather or ulysses"]),
        (["sequence.scheme=ulysses", "sequence.outer=tree"], ["sequence.outer = 'tree'", "all_gather"]),
        (
            ["sequence.scheme=ulysses", "sequence.head_groups=3", "mesh.sp=2"],
            ["'ulysses'", "3 groups", "head_groups=2"],
        ),
        (["model.num_kv_heads=3"], ["model.num_heads = 4", "model.num_kv_heads = 3"]),
        (["model.vocab_size=100"], ["model.vocab_size = 100", "257"]),
        (["model.remat=some"], ["model.remat", "some"]),
        (["model.compute_dtype=int8"], ["model.compute_dtype", "int8"]),
        (["optimizer.schedule=steps"], ["optimizer.schedule", "steps"]),
        (["data.source=/no/such/*.txt"], ["data.source", "matches no file"]),
        (["platform=tritn"], ["platform", "tritn"]),
        (["platform=pallas_gpu"], ["pallas_gpu"]),
        (["run.steps=0"], ["run.steps"]),
        (["checkpoint.keep=0"], ["checkpoint.keep must be >= 1", "got 0"]),
        (["run.stop_after=0"], ["run.stop_after", "0"]),
        (["run.seed=-1"], ["run.seed", "-1"]),
        (["run.cpu_devices=0"], ["run.cpu_devices", "0"]),
        (["run.dir="], ["run.dir is empty"]),
        (["run.dir=/proc/run"], ["run.dir = '/proc/run'", "/proc cannot be written", "choose another folder"]),
        (["run.dir=a=b"], ["'run.dir=a=b'", "quotes", "'run.dir=\"a=b\"'"]),
        (["data.source=a,b"], ["'data.source=a,b'", "[a,b]"]),
        (["z_loss=-1"], ["z_loss", "-1"]),
        (["z_loss=nan"], ["z_loss", "nan"]),
        (["optimizer.learning_rate=inf"], ["optimizer.learning_rate", "inf"]),
        (["optimizer.warmup_steps=-1"], ["optimizer.warmup_steps", "-1"]),
        (["optimizer.eps=-1"], ["optimizer.eps", "-1"]),
        (["model.init_std=nan"], ["model.init_std", "nan"]),
        (["model.init_std=1e39"], ["model.init_std", "representable in float32, got 1e+39"]),
        (
            ["model.logits_soft_cap=1e-50"],
            ["model.logits_soft_cap", "representable in float32", "or null for none, got 1e-50"],
        ),
        (["model.sliding_window=8"], ["model.sliding_window = 8", "layer_pattern"]),
        (["checkpoint.minutes=inf"], ["checkpoint.minutes", "inf"]),
        (["checkpoint.keep_hours=inf"], ["checkpoint.keep_hours", "inf"]),
        (["checkpoint.dir="], ["checkpoint.dir is empty"]),
        (["run.host_timeout=inf"], ["run.host_timeout", "inf"]),
        (["run.host_timeout=1e20"], ["run.host_timeout", "1,000,000"]),
        (["cluster=manual", "cluster.timeout=9999999999"], ["cluster.timeout = 9999999999", "1,000,000"]),
        (["data.source=null", "data.mixture=[{source: 2024, weight: 1}]"], ["data.source = 2024", "glob"]),
        (["run.extend=3"], ["run.extend=3", "true or false"]),
        (["model.layer_pattern=full"], ["model.layer_pattern", "not a list", "[a,b]"]),
    ],
)
def test_bad_input(overrides, words, corpus, tmp_path, capsys):
    arguments = [*TINY, *corpus, f"run.dir={tmp_path}/run", *overrides]
    assert main(arguments) == WRONG
    message = capsys.readouterr().err
    assert message.startswith("error: ") and "Traceback" not in message
    assert all(w in message for w in words), message
    assert not (tmp_path / "run").exists(), "nothing may be written"


def test_files_need_a_source(tmp_path, capsys):
    """And do not stand for the standard library, whose variant of the group still works."""
    assert (
        main([*TINY, "data=files", f"run.dir={tmp_path}/run", f"data.cache_dir={tmp_path}/cache", "run.steps=1"])
        == WRONG
    )
    message = capsys.readouterr().err
    assert message.startswith("error: data.source is not set") and "data.source='corpus/**/*.jsonl.gz'" in message
    assert message.count("\n") == 1 and not list(tmp_path.iterdir()), "expected one line, and no files"
    assert compose(["data=stdlib"]).data.source == compose([]).data.source == "stdlib"
    assert compose(["data=files", "data.source=[a,b]"]).data.source == ["a", "b"]


@pytest.fixture
def stopped_run(corpus, tmp_path_factory, tmp_path):
    """A run of its own that was stopped after step 3, of which a test may make what it likes."""

    def make(folder):
        run(folder / "run", corpus, "run.steps=6", "run.stop_after=3", "checkpoint.every=1")

    directory = tmp_path / "run"
    shutil.copytree(once(tmp_path_factory, "stopped", make) / "run", directory)
    return directory


def command(directory, corpus, *overrides):
    return main([*TINY, *corpus, f"run.dir={directory}", "run.steps=6", "checkpoint.every=1", *overrides])


def damage(directory, step):
    for file in (directory / "checkpoints" / str(step) / "state").rglob("*"):
        if file.is_file():
            file.write_bytes(b"damaged")


def test_a_damaged_checkpoint_is_set_aside_for_the_one_before_it(stopped_run, whole, corpus, capsys):
    directory = stopped_run
    damage(directory, 3)
    assert command(directory, corpus) == DONE
    said = capsys.readouterr().out
    assert "checkpoints/3 cannot be read" in said and "checkpoints/3.damaged" in said
    assert f"resuming from step 2 of {directory}" in said
    assert losses(directory) == whole
    assert (directory / "checkpoints" / "3.damaged").is_dir() and (directory / "checkpoints" / "6").is_dir()
    assert command(directory, corpus) == DONE, (
        "a checkpoint that was set aside is neither a checkpoint nor a foreign file"
    )


def test_where_no_checkpoint_can_be_read_nothing_is_touched(stopped_run, corpus, capsys):
    directory = stopped_run
    for step in (1, 2, 3):
        damage(directory, step)
    before = sorted(p.relative_to(directory) for p in directory.rglob("*"))
    rows = (directory / "metrics.jsonl").read_text()
    assert command(directory, corpus) == BAD_CHECKPOINT
    message = capsys.readouterr().err
    assert "checkpoints/3 cannot be read" in message and "nor can the 2 before it" in message
    assert sorted(p.relative_to(directory) for p in directory.rglob("*")) == before
    assert (directory / "metrics.jsonl").read_text() == rows


def test_storage_that_gives_other_bits_back_is_noticed(stopped_run, corpus, monkeypatch, capsys):
    """Whatever the library below does not check: one bit of one element of the restored state."""
    import orbax.checkpoint as ocp

    restore = ocp.PyTreeCheckpointHandler.restore

    def flipped(self, *args, **kwargs):
        state = restore(self, *args, **kwargs)
        bits = jax.lax.bitcast_convert_type(state["params"]["embedding"], "uint32")
        bits = bits.at[3, 5].set(bits[3, 5] ^ 1)
        return state | {"params": state["params"] | {"embedding": jax.lax.bitcast_convert_type(bits, "float32")}}

    directory = stopped_run
    monkeypatch.setattr(ocp.PyTreeCheckpointHandler, "restore", flipped)
    assert command(directory, corpus) == BAD_CHECKPOINT
    message = capsys.readouterr().err
    assert "checkpoints/3 cannot be read" in message and "embedding is not what was saved" in message


def test_a_digest_is_of_the_bits_and_their_places_wherever_they_lie():
    x = jax.random.normal(jax.random.key(0), (16, 6))
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]), "d")
    spread = jax.device_put(x, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d")))
    assert int(digest(x)) == int(digest(spread))
    others = [x.at[3, 2].add(1e-6), x[::-1], x.T.reshape(16, 6), -x, x.at[0, 0].set(x[0, 1]).at[0, 1].set(x[0, 0])]
    for dtype in ("float32", "bfloat16", "float16"):
        found = [int(digest(y.astype(dtype))) for y in [x, *others[1:]]]
        assert len(set(found)) == len(found), dtype
    assert int(digest(others[0])) != int(digest(x))
    assert int(digest(jnp.int8(-3))) != int(digest(jnp.int8(3)))
    assert int(digest(jnp.array([True]))) != int(digest(jnp.array([False])))


def test_a_foreign_folder_is_left_alone(corpus, tmp_path, capsys):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "weights.pt").write_text("someone else's")
    assert command(tmp_path, corpus) == BAD_CHECKPOINT
    assert "weights.pt" in capsys.readouterr().err
    assert command(tmp_path / "run", corpus, f"checkpoint.dir={tmp_path}/checkpoints") == BAD_CHECKPOINT
    assert "choose another checkpoint.dir" in capsys.readouterr().err
    assert [p.name for p in tmp_path.rglob("*")] == ["checkpoints", "weights.pt"]


@pytest.mark.parametrize("name", ["03", "\u00b2"])
def test_a_name_that_is_not_written_as_that_of_a_step_is_a_strangers(name, corpus, tmp_path, capsys):
    """Someone has renamed a checkpoint: it is whole, and not what is left of a save that was cut off."""
    (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert command(tmp_path, corpus) == BAD_CHECKPOINT
    assert f"holds {name}, which" in capsys.readouterr().err and (tmp_path / "checkpoints" / name).is_dir()


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        ("model.ffn_dim=64", WRONG, ["model.ffn_dim: was 48, is 64"]),
        ("model.qk_norm=false", WRONG, ["model.qk_norm: was True, is False"]),
        ("optimizer.learning_rate=0.5", WRONG, ["optimizer.learning_rate: was 0.003, is 0.5"]),
        ("data.sequence_length=128", WRONG, ["data.sequence_length: was 64, is 128"]),
        ("run.seed=1", WRONG, ["run.seed: was 0, is 1"]),
    ],
)
def test_another_recipe_does_not_go_on_with_this_run(change, code, words, stopped_run, corpus, capsys):
    before = (stopped_run / "metrics.jsonl").read_text()
    assert command(stopped_run, corpus, change) == code
    message = capsys.readouterr().err
    assert all(w in message for w in words), message
    assert (stopped_run / "metrics.jsonl").read_text() == before


@pytest.mark.slow
def test_a_checkpoint_under_the_name_of_another_step_is_set_aside(stopped_run, whole, corpus, capsys):
    """Its moments and rates would go on from one step, and its batches from another."""
    shutil.copytree(stopped_run / "checkpoints" / "2", stopped_run / "checkpoints" / "5")
    with pytest.raises(ValueError, match=r"checkpoints/5 holds the state of step 2: .* give another step"):
        open_weights(str(stopped_run))
    assert open_weights(str(stopped_run), 3).what.startswith("step 3 of")
    assert command(stopped_run, corpus) == DONE
    said = capsys.readouterr().out
    assert "checkpoints/5 holds the state of step 2: resuming from the one before it" in said
    assert "5.damaged" in said and "resuming from step 3" in said
    assert losses(stopped_run) == whole


def test_an_interrupted_save_is_ignored(stopped_run, corpus, capsys):
    directory = stopped_run
    shutil.copytree(directory / "checkpoints" / "3", directory / "checkpoints" / "4.orbax-checkpoint-tmp-0")
    assert command(directory, corpus, "run.stop_after=4") == DONE
    said = capsys.readouterr().out
    assert "resuming from step 3" in said and "an interrupted save" in said


@pytest.mark.slow
def test_a_full_disk_is_reported_and_the_last_checkpoint_stays(corpus, tmp_path, monkeypatch, capsys):
    import orbax.checkpoint as ocp

    run(tmp_path, corpus, "run.steps=6", "run.stop_after=2")
    capsys.readouterr()

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(ocp.CheckpointManager, "save", full)
        assert command(tmp_path, corpus) == BAD_CHECKPOINT
    message = capsys.readouterr().err
    assert "could not be written" in message and "free space" in message
    section = CheckpointSection()
    assert Checkpoints(tmp_path, section).latest() == 2
    assert command(tmp_path, corpus) == DONE


def test_checkpoint_errors_are_of_one_kind():
    assert issubclass(CheckpointError, RuntimeError) and PREEMPTED == 75


# -- recipes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [name for name in variants_of("model") if name != "hf"])  # which is of no folder
def test_every_model_composes_and_is_sound(model):
    recipe = compose([f"model={model}"])
    recipe.model.validate()
    assert recipe.model.vocab_size >= 257


@pytest.mark.parametrize("group", GROUPS)
def test_every_variant_composes(group, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(published_loop.MODELS["qwen3"]))
    extra = {"files": ["data.source=x"], "hf": [f"model.init_from={tmp_path}"]}
    for option in variants_of(group):
        compose([f"{group}={option}", *extra.get(option, [])])


def test_a_recipe_has_the_documented_keys():
    wanted = """run.dir run.steps run.seed mesh.dp mesh.fsdp mesh.ep mesh.cp mesh.sp mesh.tp sequence.scheme sequence.order
    data.source data.sequence_length data.global_batch checkpoint.every checkpoint.keep model.compute_dtype""".split()
    assert set(wanted) <= set(keys_of())
    with pytest.raises(RecipeError, match=r"did you mean 'mesh.sp'"):
        compose(["mash.sp=2"])


def test_help_lists_groups_and_keys(capsys):
    assert main(["--help"]) == DONE
    said = capsys.readouterr().out
    assert "long_context" in said and "sequence.order" in said


def test_the_command_runs_on_this_machine():
    assert jax.default_backend() == "cpu" and len(jax.devices()) == 8
