"""Layers of several kinds in one pattern: what they compute, report, add to the loss, and change without a gradient.

The part that reports stands here alone: it has parameters, a bias that no gradient reaches, and one metric of each kind.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from small_run import TINY, losses

from ejdist.models import decoder, parts, stack
from ejdist.models.config import ALIASES, MIXERS, ExpertsShape, LatentShape, SparseShape, parts_of_kind
from ejdist.models.model import BatchContext, Flops, Metric, StepContext
from ejdist.models.parameters import Param, initialise, num_parameters
from ejdist.models.parts import PARTS
from ejdist.models.recurrent_shapes import GatedDeltaShape, GlaShape, KdaShape, LightningShape, Mamba2Shape, Rwkv7Shape
from ejdist.operations import bind_ops
from ejdist.training.checkpoint import CheckpointError, Checkpoints
from ejdist.training.flops import step_flops
from ejdist.training.loop import train
from ejdist.training.metrics import MetricsWriter, RowsOfRun, read_rows, tables_in
from ejdist.training.program import make_program
from ejdist.training.resume import check_same_run, fingerprint
from ejdist.training.step import init_state, make_train_step
from recipes.schema import compose

CLASSES = 4  # of tokens, which stand for experts
RATE = 0.25


class Probe(parts.Part):
    """x + scale tanh(x) + bias of the token's class; the bias moves to the classes that were seen less."""

    role = "feed_forward"
    name = "probe"

    def declare(self, c):
        return {"probe_scale": Param((c.model_dim,), "D", "ones", cast=False)}

    def buffers(self, c):
        return {"bias": Param((CLASSES,), "E", "zeros")}

    def apply(self, x, params, at):
        scale = at.ops.gather(params["probe_scale"], "D")
        kind, real = at.batch["tokens"] % CLASSES, at.batch["segment_ids"] >= 0
        y = x + (scale * jnp.tanh(x) + at.buffers["bias"][kind][..., None]).astype(x.dtype)
        counted = at.batch["targets"] >= 0
        square = jnp.where(counted, jnp.mean(jnp.square(y.astype(jnp.float32)), -1), 0)
        load = jnp.sum(jax.nn.one_hot(kind, CLASSES) * real[..., None], (0, 1))
        return y, {
            # Grows with the step, so that the step must be right.
            "probe_loss": Metric(0.01 * (1 + at.step) * jnp.sum(square), "loss"),
            "probe_share": Metric(at.tokens / at.config.num_layers, "mean"),
            "probe_tokens": Metric(jnp.sum(real), "sum"),
            "probe_load": Metric(load, "sum"),
            "probe_largest": Metric(jnp.max(jnp.where(real, at.batch["tokens"], 0)), "max"),
            "probe_layer": Metric(at.layer, "max"),
            "probe_microbatch": Metric(at.microbatch, "sum"),
            "load": Metric(load, "update"),
        }

    def update(self, c, buffers, seen):
        return {"bias": buffers["bias"] + RATE * jnp.sign(jnp.mean(seen["load"]) - seen["load"])}

    def flops(self, c):
        return Flops(token=7)


@pytest.fixture(autouse=True)
def probe(monkeypatch):
    """One more feed-forward; its line is all that a pattern needs."""
    monkeypatch.setitem(parts.PARTS, "probe", Probe())


MIXED = decoder.DecoderConfig(
    vocab_size=61, num_layers=5, model_dim=16, num_heads=4, num_kv_heads=2, head_dim=8, ffn_dim=24,
    layer_pattern=("window", "full+probe"), sliding_window=5,
)  # fmt: skip
OF_PROBES = (1, 3)  # its layers with a probe


def attention(query, key, value, *, sliding_window, **_):
    """Returns causal attention with a window, over whole rows."""
    window = None if sliding_window is None else (sliding_window - 1, 0)
    return jax.nn.dot_product_attention(query, key, value, is_causal=True, local_window_size=window)


OPS = bind_ops(None).replace(attention=attention)


def batch_of(c, rows=4, length=12):
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, c.vocab_size, (rows, length))
    targets, segments = np.roll(tokens, -1, 1), np.zeros((rows, length), int)
    for row in range(rows):  # rows count very different numbers of tokens
        targets[row, 2 + 3 * row :] = -1
        segments[row, length - row :] = -1
    positions = np.broadcast_to(np.arange(length), tokens.shape)
    batch = {"tokens": tokens, "targets": targets, "positions": positions, "segment_ids": segments}
    return {k: jnp.asarray(v, jnp.int32) for k, v in batch.items()}


def state_of(c):
    """Returns parameters and buffers, none of them at zero or one."""
    model, key = c.build(), jax.random.key(0)
    params = initialise(model.declared, key)

    def moved(x, by, step):  # by NumPy: JAX would compile programs for each shape
        return jnp.asarray(np.asarray(x) + by * step(np.arange(x.size)).astype(x.dtype).reshape(x.shape))

    params["layers"] = {k: moved(v, np.float32(0.05), np.sin) for k, v in params["layers"].items()}
    return params, jax.tree.map(lambda x: moved(x, np.float32(0.1), np.asarray), initialise(model.buffers, key))


def plain_loss(params, buffers, batch, c, step=0):
    """Returns the loss by layers one after the other, each with the row that counts up to it; no scan, no remat."""
    x, row, extra = params["embedding"][batch["tokens"]], dict.fromkeys(("attention", "mlp", "probe"), 0), 0.0
    w = params["layers"]
    for layer in range(c.num_layers):
        kind = c.layer_pattern[layer % len(c.layer_pattern)]
        at = parts.LayerContext(c, OPS, batch, jnp.sum(batch["targets"] >= 0), layer, step, 0, {})
        for part in (parts.PARTS[name] for name in parts_of_kind(kind)):
            mine = {k: w[k][row[part.name]] for k in part.declare(c)}
            if part.name == "probe":
                at = dataclasses.replace(at, buffers={"bias": buffers["probe"]["bias"][row["probe"]]})
            x, given = part.apply(x, mine, at)
            extra += given["probe_loss"].value if given else 0.0
            row[part.name] += 1
    x = OPS.rms_norm(x, params["final_norm"], eps=c.norm_eps)
    z = x @ params["embedding"].T
    each = jax.nn.logsumexp(z, -1) - jnp.take_along_axis(z, jnp.maximum(batch["targets"], 0)[..., None], -1)[..., 0]
    return jnp.sum(jnp.where(batch["targets"] >= 0, each, 0)) + extra


def assert_close(a, b, rtol=2e-5, atol=2e-6):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(np.asarray(x, np.float64), np.asarray(y, np.float64), rtol=rtol, atol=atol)


def test_parameters_are_stacked_by_the_layers_that_have_them():
    declared = decoder.declare(MIXED)
    shapes = {k: p.shape[0] for k, p in declared["layers"].items()}
    assert shapes == {**dict.fromkeys("attention_norm query key value output".split(), 5),
                      **dict.fromkeys("mlp_norm gate up down".split(), 3), "probe_scale": 2}  # fmt: skip
    assert MIXED.build().buffers["probe"]["bias"].shape == (2, CLASSES)
    dense = dataclasses.replace(MIXED, layer_pattern=("window", "full"))
    assert {p.shape[0] for p in decoder.declare(dense)["layers"].values()} == {5}
    assert num_parameters(dense.build().buffers) == 0


STEP = 3


@pytest.fixture(scope="module")
def by_plain_layers():
    """The loss of MIXED and its gradient, over counted tokens; the probe is there while this is made."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(parts.PARTS, "probe", Probe())
        params, buffers = state_of(MIXED)
        batch = batch_of(MIXED)
        value = jax.jit(jax.value_and_grad(lambda p: plain_loss(p, buffers, batch, MIXED, STEP)))(params)
        return jax.tree.map(lambda x: x / jnp.sum(batch["targets"] >= 0), value)


@pytest.mark.parametrize(
    ("remat", "accumulation"),
    [("full", 2), *(pytest.param(*how, marks=pytest.mark.slow) for how in (("attention", 1), ("none", 4)))],
)
def test_a_step_of_mixed_layers(remat, accumulation, by_plain_layers):
    """Loss, gradient, metrics and buffers, whatever is computed again and in however many microbatches."""
    config = dataclasses.replace(MIXED, remat=remat)
    (params, buffers), batch = state_of(MIXED), batch_of(MIXED)
    loss = functools.partial(decoder.loss, c=config, ops=OPS)
    sgd = optax.sgd(1.0)  # its update is the gradient itself
    step = jax.jit(make_train_step(loss, sgd, accumulation=accumulation, update=config.build().update))
    state, metrics = step(init_state(params, sgd, buffers)._replace(step=jnp.int32(STEP)), batch)
    value, gradient = by_plain_layers
    assert_close(metrics["loss"] + metrics["probe_loss"], value)
    assert_close(jax.tree.map(jnp.subtract, params, state.params), gradient, 2e-4, 5e-6)
    tokens, real = np.asarray(batch["tokens"]), np.asarray(batch["segment_ids"]) >= 0
    load = np.bincount(tokens[real] % CLASSES, minlength=CLASSES)
    probes = len(OF_PROBES)
    assert metrics["probe_tokens"] == probes * real.sum() and metrics["probe_largest"] == tokens[real].max()
    assert metrics["probe_layer"] == max(OF_PROBES)
    assert metrics["probe_microbatch"] == probes * sum(range(accumulation))
    assert float(metrics["probe_share"]) == pytest.approx(probes / config.num_layers)
    np.testing.assert_array_equal(metrics["probe_load"], probes * load)
    assert "load" not in metrics and "probe.load" not in metrics, "inputs of buffer updates must not be reported"
    moved = np.asarray(buffers["probe"]["bias"]) + RATE * np.sign(load.mean() - load)
    np.testing.assert_allclose(state.buffers["probe"]["bias"], moved, rtol=1e-6)
    assert int(state.step) == STEP + 1 and np.abs(np.asarray(moved - buffers["probe"]["bias"])).max() > 0


@pytest.mark.parametrize("config", [MIXED, dataclasses.replace(MIXED, layer_pattern=("window",))], ids=["two", "one"])
@pytest.mark.slow
def test_the_forward_writes_no_second_copy_of_the_weights_for_the_backward(config):
    """What a scan hands to the backward is written, a row a layer, unless it is what was scanned over."""
    (params, buffers), batch = state_of(config), batch_of(config)
    context = StepContext(jnp.int32(0), jnp.int32(0), buffers)
    loss = functools.partial(decoder.loss, c=config, ops=OPS, context=context)
    closed = jax.make_jaxpr(jax.grad(lambda p: loss(p, batch)[0]))(params)
    forward = next(e for e in closed.jaxpr.eqns if e.primitive.name == "scan")
    written = {v.aval.shape[1:] for v in forward.outvars}
    weights = {w.shape[1:] for name, w in params["layers"].items() if "norm" not in name}
    assert (*batch["tokens"].shape, config.model_dim) in written and not written & weights


def test_gradients_of_a_layer_are_done_before_the_backward_of_the_one_before_it():
    """Else a compiler may leave those of several layers for later, with all that they read."""
    (params, buffers), batch = state_of(MIXED), batch_of(MIXED)
    loss = functools.partial(decoder.loss, c=MIXED, ops=OPS, context=StepContext(jnp.int32(0), jnp.int32(0), buffers))
    closed = jax.make_jaxpr(jax.grad(lambda p: loss(p, batch)[0]))(params)
    backward = [e for e in closed.jaxpr.eqns if e.primitive.name == "scan"][-1].params["jaxpr"]
    (barrier,) = (e for e in backward.eqns if e.primitive.name == "optimization_barrier")  # two layers a round
    shapes, D = [v.aval.shape for v in barrier.outvars], MIXED.model_dim
    assert (*batch["tokens"].shape, D) in shapes and (D, MIXED.num_heads, MIXED.head_dim) in shapes, shapes


# A layer before the pattern, two rounds of it, and half of one.
STAGED = dataclasses.replace(
    MIXED, num_layers=6, first_layers=("full",), layer_pattern=("window", "full+probe"), remat="full"
)


def loss_of_stages(c, params, buffers, batch, context, cuts):
    """Returns (the loss, the metrics of each stage) of stages that have the rows of their own layers and no others."""
    model = c.build()
    ctx = BatchContext.of(batch, OPS, context, model.buffers)
    x, metrics = model.embed(params, ctx), []
    for which in map(range, (0, *cuts), (*cuts, c.num_layers)):
        rows = stack.rows_of(c, which)
        mine = {k: params["layers"][k][rows[n]] for n, part in stack.parts_of(c).items() for k in part.declare(c)}
        held = {n: {k: b[rows[n]] for k, b in given.items()} for n, given in buffers.items()}
        x, given = model.layers(mine, x, ctx._replace(buffers=held), which)
        metrics.append(given)
    total, _ = model.head(params, x, ctx, z_loss=1e-3)
    return total + sum(m["probe_loss"].value for m in metrics if "probe_loss" in m), metrics


@pytest.mark.parametrize(
    "cuts", [(2, 4), *(pytest.param(cuts, marks=pytest.mark.slow) for cuts in ((1,), (1, 2, 3, 4, 5)))], ids=str
)
@pytest.mark.slow
def test_stages_are_a_split_of_the_layers(cuts):
    """Wherever they are cut, loss, gradient and metrics are those of the whole model."""
    (params, buffers), batch = state_of(STAGED), batch_of(STAGED)
    context = StepContext(jnp.int32(2), jnp.int32(0), buffers)

    def whole(p):
        return STAGED.build().loss(p, batch, OPS, z_loss=1e-3, context=context)

    def staged(p):
        return loss_of_stages(STAGED, p, buffers, batch, context, cuts)

    (value, metrics), gradient = jax.jit(jax.value_and_grad(whole, has_aux=True))(params)
    (total, of_stages), pulled = jax.jit(jax.value_and_grad(staged, has_aux=True))(params)
    assert_close(total, value, 1e-6)
    assert_close(pulled, gradient, 2e-5, 2e-5)
    of_stages = [m for m in of_stages if "probe_layer" in m]
    layers = [int(m["probe_layer"].value) for m in of_stages]
    assert layers == sorted(layers) and layers[-1] == int(metrics["probe_layer"].value) == 4
    load = np.concatenate([m["probe.load"].value for m in of_stages])
    np.testing.assert_array_equal(load, metrics["probe.load"].value)


@pytest.mark.parametrize("which", [range(2, 2), range(0, 7), range(0, 6, 2), range(-1, 3)], ids=str)
def test_a_stage_is_a_range_of_layers(which):
    with pytest.raises(ValueError, match="must be a contiguous range of the 6 layers"):
        stack.run_layers(jnp.zeros((1, 4, 16)), {}, {}, STAGED, None, which)


def test_a_stage_has_no_rows_of_other_layers():
    params, buffers = state_of(STAGED)
    with pytest.raises(
        ValueError,
        match=r"attention_norm has 6 rows, but layers 1 to 2 need 2, one per layer with the part 'attention'",
    ):
        stack.run_layers(jnp.zeros((1, 4, 16)), params["layers"], buffers, STAGED, None, range(1, 3))


def test_flops_of_mixed_layers():
    ids = np.zeros((1, 32), int)
    per_layer = 2 * 16 * 8 * 12 + 2 * 3 * 16 * 24, 2 * 16 * 8 * 12 + 7
    matmuls = 32 * (3 * per_layer[0] + 2 * per_layer[1] + 2 * 61 * 16)
    pairs = 3 * (15 + 27 * 5) + 2 * 32 * 33 // 2
    found = step_flops(decoder.flops(MIXED), ids)
    assert found.causal == 3 * (matmuls + 4 * 4 * 8 * pairs) and found.full == 3 * (matmuls + 4 * 4 * 8 * 5 * 32**2)


# -- in a run: files, meshes, checkpoints -------------------------------------------------------------------------------

RUN = [*TINY, "model.layer_pattern=[full,none+probe]", "model.num_layers=3", "run.steps=4", "data.global_batch=4"]


def run(directory, corpus, *overrides):
    train(compose([*RUN, *corpus, f"run.dir={directory}", *overrides]), log=lambda line: None)
    return read_rows(directory / "metrics.jsonl")


@pytest.fixture(scope="module")
def whole(corpus, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(parts.PARTS, "probe", Probe())
        return run(tmp_path_factory.mktemp("whole"), corpus, "mesh.sp=1")


OF_LAYERS = ("probe_loss", "probe_share", "probe_tokens", "probe_load", "probe_largest", "probe_layer")


@pytest.mark.slow  # a run each; tests/test_train.py has the losses of a run on a mesh
@pytest.mark.parametrize(
    "layout",
    [
        ["mesh.fsdp=2", "mesh.sp=2"],
        ["mesh.dp=2", "mesh.fsdp=2", "mesh.sp=2"],
        ["mesh.sp=4"],
        ["mesh.ep=2", "mesh.tp=2", "mesh.sp=1"],
        ["mesh.dp=2", "mesh.sp=1", "accumulation=2"],
    ],
    ids=" ".join,
)
def test_rows_are_the_same_on_every_mesh(layout, whole, corpus, tmp_path):
    rows = run(tmp_path, corpus, *layout)
    assert len(rows) == 4 and all(len(row["probe_load"]) == CLASSES for row in rows)
    for row, wanted in zip(rows, whole, strict=True):
        for name in ("loss", "grad_norm", *OF_LAYERS):
            np.testing.assert_allclose(row[name], wanted[name], rtol=2e-4, err_msg=name)
        assert sum(row["probe_load"]) == row["probe_tokens"] and row["probe_layer"] == 1


@pytest.mark.slow  # two runs; buffers in checkpoints are in tests/test_moe_run.py too
def test_a_run_that_was_stopped_goes_on_with_its_buffers(whole, corpus, tmp_path):
    """Bit for bit; and what changes without a gradient does change the losses."""
    parts_of_it = tmp_path / "parts"
    run(parts_of_it, corpus, "mesh.sp=1", "run.stop_after=2")
    recipe = compose([*RUN, *corpus, f"run.dir={parts_of_it}", "mesh.sp=1"])
    mesh = jax.make_mesh((1,), ("sp",), devices=jax.devices()[:1], axis_types=(jax.sharding.AxisType.Auto,))
    checkpoints = Checkpoints(parts_of_it, recipe.checkpoint)
    state, _ = checkpoints.restore(2, make_program(recipe, mesh).state)
    bias = np.asarray(state.buffers["probe"]["bias"])
    assert (
        int(state.step) == 2 and set(np.abs(bias).ravel() / RATE) <= {0.0, 1.0, 2.0} and np.abs(bias).max() == 2 * RATE
    )
    dense = dataclasses.replace(recipe, model=dataclasses.replace(recipe.model, layer_pattern=("full",)))
    with pytest.raises(CheckpointError, match=r"another model.*in this recipe|one side only"):
        checkpoints.restore(2, make_program(dense, mesh).state)
    checkpoints.close()
    rows = run(parts_of_it, corpus, "mesh.sp=1")
    for name in ("loss", "grad_norm", *OF_LAYERS):
        assert [row[name] for row in rows] == [row[name] for row in whole], name
    assert losses(parts_of_it) == [row["loss"] for row in whole]


def test_an_array_is_a_list_in_the_rows_and_a_tag_an_element_in_the_events(tmp_path, monkeypatch):
    from ejdist.training import metrics

    told = []
    monkeypatch.setattr(metrics.Events, "add", lambda self, *more: told.append(more))
    writer = MetricsWriter(tmp_path, 0, 1)
    row = {"loss": jnp.float32(2), "tokens": jnp.float32(8), "load": jnp.array([1.0, jnp.nan]), "count": jnp.int32(3)}
    row["table"] = jnp.array([[1, 2], [3, 5]])
    writer.put(1, row, {"flops_causal": 1.0})
    writer.close()
    [(step, events, tables)], [written] = told, read_rows(tmp_path / "metrics.jsonl")
    assert written["load"] == [1.0, None] and written["count"] == 3 and step == 1
    assert events["load/0"] == 1.0 and np.isnan(events["load/1"]) and "load" not in events and events["loss"] == 2.0
    assert tables == {"table": [[1, 2], [3, 5]]} and "table" not in written and "table/0" not in events
    assert list(tables_in(tmp_path)) == [{"step": 1, "table": [[1, 2], [3, 5]]}]


def test_tables_are_in_some_rows_and_histograms_in_the_events(tmp_path):
    writer = MetricsWriter(tmp_path, 0, 5, tables_every=2)
    for step in range(1, 6):
        table = jnp.array([[1.0, jnp.nan, 3.0], [jnp.nan] * 3])
        writer.put(step, {"loss": jnp.float32(step), "tokens": jnp.float32(8), "of": table}, {"flops_causal": 1.0})
    writer.close()
    assert [row["step"] for row in tables_in(tmp_path)] == [1, 2, 4, 5]
    assert not any("of" in row for row in read_rows(tmp_path / "metrics.jsonl"))
    rows = RowsOfRun(tmp_path)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert [row["step"] for row in rows.for_pictures() if "of" in row] == [1, 2, 4, 5]
    [file] = (tmp_path / "tensorboard").iterdir()
    assert b"of/0" in file.read_bytes() and b"of/1" not in file.read_bytes()  # no finite value, no histogram


def test_a_writer_that_is_opened_at_once_keeps_the_events_of_the_one_before(tmp_path):
    for start in (0, 1):
        writer = MetricsWriter(tmp_path, start, 2)
        writer.put(start + 1, {"loss": jnp.float32(1), "tokens": jnp.float32(8)}, {"flops_causal": 1.0})
        writer.close()
    assert [b"loss" in file.read_bytes() for file in (tmp_path / "tensorboard").iterdir()] == [True, True]


def test_events_of_steps_that_are_made_again_are_hidden(tmp_path):
    """Also where the run goes back to its very beginning: it may have ended before its first checkpoint."""
    from tensorboardX.proto import event_pb2

    for start in (0, 0, 2):
        writer = MetricsWriter(tmp_path, start, 5)
        for step in range(start + 1, start + 4):
            writer.put(step, {"loss": jnp.float32(step), "tokens": jnp.float32(8)}, {"flops_causal": 1.0})
        writer.close()
    shown = []
    for file in sorted((tmp_path / "tensorboard").iterdir()):
        content = file.read_bytes()
        while content:  # its length, a checksum, the event, a checksum
            size = int.from_bytes(content[:8], "little")
            event = event_pb2.Event.FromString(content[12 : 12 + size])
            content = content[16 + size :]
            if event.HasField("session_log"):
                shown = [step for step in shown if step < event.step]
            elif event.summary.value:
                shown.append(event.step)
    assert shown == [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4, 5]


# -- what a part must not do ---------------------------------------------------------------------------------------------


def test_a_reduction_that_does_not_exist():
    with pytest.raises(ValueError, match="'how' = 'average' is unknown; use one of loss, mean, sum, max, update"):
        Metric(1.0, "average")


def test_the_largest_of_negative_numbers_and_of_integers():
    for value in (jnp.float32(-3.5), jnp.int32(-3)):
        m = Metric(value, "max")
        assert m.start().plus(m).value == value and m.plus(Metric(value - 1, "max")).value == value


def giving(name, metric, monkeypatch):
    class Other(Probe):
        def apply(self, x, params, at):
            return x, {name: metric}

    monkeypatch.setitem(parts.PARTS, "probe", Other())


@pytest.mark.parametrize(
    ("kind", "name", "how", "words"),
    [
        ("full+probe", "loss", "mean", "'loss', which the model uses itself"),
        ("other+probe", "probe_tokens", "sum", "two parts of a layer return the metric 'probe_tokens'"),
        ("other+twin", "x", "sum", "'other.twin' has two parts with the same name"),
        ("other+clash", "x", "sum", "declare the parameter 'other_scale'"),
    ],
)
def test_names_that_are_taken(kind, name, how, words, monkeypatch):
    class Other(Probe):
        def __init__(self, name, role):
            self.name, self.role = name, role

        def declare(self, c):
            return {"other_scale": Param((c.model_dim,), "D", "ones")}

        def apply(self, x, params, at):
            return x, {name: Metric(jnp.float32(1), how)}

    monkeypatch.setitem(parts.PARTS, "other", Other("other", "mixer"))
    monkeypatch.setitem(parts.PARTS, "twin", Other("other", "feed_forward"))
    monkeypatch.setitem(parts.PARTS, "clash", Other("clash", "feed_forward"))
    if name == "loss":
        giving(name, Metric(jnp.float32(1), how), monkeypatch)
    c, batch = dataclasses.replace(MIXED, remat="none", layer_pattern=("window", kind)), batch_of(MIXED)

    def trace():
        params, buffers = state_of(c)
        jax.eval_shape(lambda p: decoder.loss(p, batch, c, OPS, context=StepContext(0, 0, buffers)), params)

    with pytest.raises(ValueError, match=words):
        trace()


def test_buffers_that_were_not_given():
    params, _ = state_of(MIXED)
    with pytest.raises(ValueError, match=r"no buffers of probe; give StepContext\(buffers=...\)"):
        jax.eval_shape(lambda p: decoder.loss(p, batch_of(MIXED), MIXED, OPS), params)


@pytest.mark.parametrize(
    "kind", ["moe", "probe", "mlp+full", "full+full", "none+none", "full+", "full+mlp+mlp", "full+moe"]
)
def test_a_pattern_is_made_of_mixers_and_feed_forwards(kind):
    short = {part: mixer for mixer, part in MIXERS.items()}
    mixers = ", ".join(short.get(name, name) for name, part in PARTS.items() if part.role == "mixer")
    others = ", ".join(name for name, part in PARTS.items() if part.role == "feed_forward")
    assert mixers.startswith("full, window, latent, ") and others.endswith(", experts, probe")
    meant = {"mlp+full": "full+mlp", "full+": "full+mlp"}.get(kind)
    meant = "." if meant is None else re.escape(f"; did you mean {meant!r}?")
    words = rf"not MIXER\+FEED_FORWARD{meant} Mixers: {mixers}; feed-forwards: {others}; none in"
    for key in ("layer_pattern", "first_layers", "last_layers"):
        with pytest.raises(ValueError, match=f"model.{key} = .*{re.escape(repr(kind))} is {words}"):
            dataclasses.replace(MIXED, **{key: (kind,)}).validate()


def test_old_names_of_kinds_are_what_they_were():
    meanings = {
        "full": ("attention", "mlp"), "window": ("window_attention", "mlp"), "latent": ("latent_attention", "mlp"),
        "experts": ("attention", "experts"), "window_experts": ("window_attention", "experts"),
        "latent_experts": ("latent_attention", "experts"), "sparse": ("sparse_attention", "mlp"),
    }  # fmt: skip
    assert {kind: parts_of_kind(kind) for kind in ALIASES} == meanings
    for kind, (mixer, feed_forward) in meanings.items():
        assert parts_of_kind(ALIASES[kind]) == parts_of_kind(f"{mixer}+{feed_forward}") == (mixer, feed_forward)
    assert parts_of_kind("none+mlp") == ("mlp",) and parts_of_kind("window+none") == ("window_attention",)


def test_every_mixer_goes_with_every_feed_forward():
    roles = {role: [n for n, p in parts.PARTS.items() if p.role == role] for role in ("mixer", "feed_forward")}
    kinds = [f"{m}+{f}" for m in roles["mixer"] for f in roles["feed_forward"]]
    assert len(kinds) == 40
    sections = {"experts": ExpertsShape(num=4, top_k=2, ffn_dim=8), "latent": LatentShape(kv_rank=8)}
    sections |= {"gated_delta": GatedDeltaShape(2, 4), "kda": KdaShape(4), "mamba2": Mamba2Shape(4)}
    sections |= {"sparse": SparseShape(4), "lightning": LightningShape(4), "gla": GlaShape(4), "rwkv7": Rwkv7Shape(4)}
    c = dataclasses.replace(MIXED, num_layers=40, layer_pattern=tuple(kinds), **sections)
    c.validate()
    stacks = decoder.declare(c)["layers"]
    names = ("query", "latent_query", "mamba2_in", "sparse_gates", "gate", "ungated_up", "router", "probe_scale")
    of = {n: stacks[n].shape[0] for n in names}
    assert of == {"query": 8, "latent_query": 4, "mamba2_in": 4, "sparse_gates": 4} | dict.fromkeys(names[4:], 10)


def test_what_is_added_to_the_stream_starts_smaller_the_more_parts_add_to_it():
    """Six parts in both: a layer of two is as two layers of one."""
    two = dataclasses.replace(MIXED, num_layers=3, layer_pattern=("full+mlp",), sliding_window=None)
    one = dataclasses.replace(two, num_layers=6, layer_pattern=("full+none", "none+mlp"))
    for c in (one, two):
        declared = decoder.declare(c)["layers"]
        assert declared["output"].std == declared["down"].std == pytest.approx(c.init_std / 6**0.5)


def test_a_run_goes_on_with_another_spelling_of_its_layers(tmp_path):
    stored = fingerprint(compose([*TINY, "model.layer_pattern=[full]"]))
    check_same_run(stored, compose([*TINY, "model.layer_pattern=[attention+mlp]"]), 1, tmp_path)
    with pytest.raises(ValueError, match=r"model.layer_pattern: was \['full'\], is \['full\+probe'\]"):
        check_same_run(stored, compose([*TINY, "model.layer_pattern=[full+probe]"]), 1, tmp_path)
