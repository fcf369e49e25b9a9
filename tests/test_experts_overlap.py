"""Two halves of a batch that go through the layers side by side: the same losses, statistics and gradients as the whole."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_moe_model import STYLES, batch_of, state_of

from ejdist.experts import route
from ejdist.experts.halves import halved, joined, of_all
from ejdist.experts.section import ExpertsSection
from ejdist.mesh import make_mesh, mesh_shape
from ejdist.models.decoder import declare, loss
from ejdist.models.model import StepContext
from ejdist.operations import bind_ops
from ejdist.planning.candidates import candidate_of
from ejdist.planning.search import Predictor, search
from ejdist.planning.step_time import EXCHANGE
from ejdist.planning.targets import target_of
from ejdist.sections import validate
from ejdist.training.program import check_sizes
from recipes.schema import compose, unread

ROWS, DEVICES = 3, 4  # rows of a device: the halves are not equal


def test_halves_are_of_the_rows_of_each_device_and_join_to_the_batch():
    mesh = make_mesh(ep=4, devices=jax.devices()[:4])
    x = jnp.arange(12 * 5).reshape(12, 5)
    for where, rows in ((mesh, [0, 3, 6, 9]), (None, range(6))):

        def parts(x, where=where):
            halves = halved(x, mesh=where)
            return halves, joined(halves, mesh=where)

        (first, other), whole = jax.jit(parts)(x)
        np.testing.assert_array_equal(first, x[np.asarray(rows)])
        np.testing.assert_array_equal(whole, x)
        assert first.shape[0] + other.shape[0] == 12
    [alone] = halved(x, mesh=mesh, overlap="none")
    assert alone is x and joined([x], mesh=mesh) is x
    with pytest.raises(ValueError, match=r"experts.overlap = 'halves'.*at least two rows a device"):
        halved(x[:4], mesh=mesh)


@pytest.mark.parametrize("balance", ["batch", "sequence", "global"])
def test_statistics_of_halves_are_those_of_their_tokens_together(balance):
    """Also the gradient of the balance loss."""
    rng = np.random.default_rng(0)
    x, router = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((3, 7, 5), (5, 6)))
    ids = jnp.asarray(rng.integers(-1, 2, (3, 7)))
    load = jnp.arange(1.0, 7.0) if balance == "global" else None
    options = {"top_k": 2, "balance": balance, "load": load}

    def together(x):
        stats = route(x, router, segment_ids=ids, **options).stats
        return stats.balance_loss, stats

    def in_halves(x):
        halves = [route(x[rows], router, segment_ids=ids[rows], **options).stats for rows in (slice(2), slice(2, 3))]
        stats = of_all([half._replace(extra_passes=jnp.int32(i + 1)) for i, half in enumerate(halves)], balance, load)
        return stats.balance_loss, stats

    (d_whole, whole), (d_halves, halves) = (jax.jit(jax.grad(f, has_aux=True))(x) for f in (together, in_halves))
    assert halves.extra_passes == 3 and not np.allclose(d_whole, 0)
    np.testing.assert_allclose(d_halves, d_whole, rtol=1e-5, atol=1e-6)
    for name, value in whole._replace(extra_passes=jnp.int32(3))._asdict().items():
        np.testing.assert_allclose(getattr(halves, name), value, rtol=1e-5, err_msg=name)


def test_what_halves_cannot_be_is_refused():
    with pytest.raises(ValueError, match=r"experts.overlap = 'thirds' is unknown; use one of none, halves"):
        validate(ExpertsSection(overlap="thirds"))
    with pytest.raises(ValueError, match=r"experts.overlap = 'halves' .* experts.capacity = 1.5"):
        validate(ExpertsSection(overlap="halves", capacity=1.5))
    mesh = make_mesh(ep=4, devices=jax.devices()[:4])
    words = ["recipe=moe", "mesh.ep=4", "experts.overlap=halves"]
    for more, each in (
        (["data.global_batch=4"], 1),
        (["data.global_batch=8", "accumulation=2"], 1),
        (["data.global_batch=8"], 2),
    ):
        sections = compose([*words, *more])
        if each == 2:
            check_sizes(sections, sections.model.build(), mesh)
            continue
        with pytest.raises(
            ValueError, match=r"experts.overlap = 'halves' halves the rows of a device, which has 1 of a micro"
        ):
            check_sizes(sections, sections.model.build(), mesh)


def test_where_nothing_is_exchanged_there_are_no_halves():
    """Experts on one device, or on each: as `experts.overlap` is told to change nothing there, one row is enough."""
    four, axes = make_mesh(ep=4, devices=jax.devices()[:4]), {"overlap": "halves"}
    x = jnp.zeros((8, 3))
    for mesh, own, count in (
        (four, axes, 2),
        (four, axes | {"axes": ("ep",)}, 2),
        (four, axes | {"axes": ("sp",)}, 1),
        (make_mesh(fsdp=4, devices=jax.devices()[:4]), axes, 1),
        (make_mesh(devices=jax.devices()[:1]), axes, 1),
    ):
        assert len(jax.eval_shape(bind_ops(mesh, experts=own).halved, x)) == count, (mesh.shape, own)
    sections = compose(["recipe=moe", "mesh.ep=1", "mesh.fsdp=4", "experts.overlap=halves", "data.global_batch=4"])
    check_sizes(sections, sections.model.build(), make_mesh(fsdp=4, devices=jax.devices()[:4]))


def test_a_model_without_experts_has_no_halves():
    """As every key of `experts.*` it changes nothing there (`unread` says so): a row on a device is enough, for a step and for
    a plan."""
    mesh = make_mesh(ep=4, devices=jax.devices()[:4])
    words = ["recipe=moe", "model=nano", "mesh.ep=4", "mesh.sp=1", "data.global_batch=4", "experts.overlap=halves"]
    sections = compose(words)
    check_sizes(sections, sections.model.build(), mesh)
    params = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, jnp.float32), declare(sections.model))
    batch = dict.fromkeys(("tokens", "positions", "segment_ids", "targets"), jax.ShapeDtypeStruct((4, 64), jnp.int32))
    ops = bind_ops(mesh, experts=vars(sections.experts))
    total, _ = jax.eval_shape(lambda p, b: loss(p, b, sections.model, ops), params, batch)
    assert total.shape == ()
    plan = candidate_of(sections, mesh_shape(sections.mesh.sizes, 4))
    assert Predictor(sections, target_of(None, 4, "h200", None))(plan) is not None
    assert unread(words, sections) == ["experts.overlap=halves changes nothing: no layer of the model has experts"]


LAYERS = (
    "recipe=moe_long_context model=qwen3_30b_a3b model.num_layers=4 model.vocab_size=8192 data.sequence_length=8192 mesh.ep=8 "
    "mesh.sp=1 data.global_batch=16 experts.dispatch=all_to_all"
)


def planned(words):
    """Returns what is predicted of four layers of Qwen3-30B-A3B's shape over eight H200s."""
    target, sections = target_of(None, 8, "h200", None), compose([*LAYERS.split(), *words.split()])
    return Predictor(sections, target).checked(candidate_of(sections, mesh_shape(sections.mesh.sizes, 8)))


def test_a_plan_knows_the_memory_of_halves():
    """As compiled for them, in MiB, within a tenth: what is saved, and the rest of it."""
    for scan, plain, halves in (("true", 12951, 11338), ("false", 12139, 10756)):
        words = f"model.scan_layers={scan} experts.overlap="
        one, two = (planned(words + name).memory for name in ("none", "halves"))
        assert one.total / 2**20 == pytest.approx(plain, rel=0.1) and two.total / 2**20 == pytest.approx(
            halves, rel=0.1
        )
        assert (one.total - two.total) / 2**20 == pytest.approx(plain - halves, rel=0.35)
    assert {n: one.classes[n] - two.classes.get(n, 0) for n in ("activations kept", "gradients")} == {
        "activations kept": 0,
        "gradients": 0,
    }
    # A layer's gradients of one half: those of sixteen experts, gathered over no axis.
    assert two.classes["gathered weights"] == 2 * 16 * 3 * 2048 * 768 and "gathered weights" not in one.classes


def test_a_search_takes_halves_where_a_device_has_two_rows():
    """Whichever batch of a mesh is looked at first."""
    target, sections = target_of(None, 8, "h200", None), compose([*LAYERS.split(), "experts.overlap=halves"])
    plan = candidate_of(sections, mesh_shape(sections.mesh.sizes, 8))
    few, parts = (dataclasses.replace(plan, **one) for one in ({"global_batch": 8}, {"accumulation": 2}))
    for order in ((few, plan, parts), (plan, parts, few)):
        predictor = Predictor(sections, target)
        assert {one for one in order if predictor(one) is not None} == {plan}
    sections = compose([*LAYERS.split(), "experts.overlap=halves", "data.global_batch=8"])
    with pytest.raises(ValueError, match="'halves' halves the rows of a device, which has 1"):
        search(sections, target, {"data.global_batch", "mesh.ep", "mesh.sp"}, None)


def test_a_plan_knows_what_halves_hide():
    """Shares of the exchange that wait, by the schedules that were compiled; no more than without halves."""
    shared = "model.experts.shared_dim=768"
    for words, times in (
        (f"model.scan_layers=false {shared}", 1 / 8),
        (f"model.scan_layers=true {shared}", 1),
        ("model.scan_layers=false", 1),
        ("model.scan_layers=true", 1),
    ):
        one, two = (planned(f"{words} experts.overlap={name}").time for name in ("none", "halves"))
        assert two.seconds[EXCHANGE] / one.seconds[EXCHANGE] == pytest.approx(times, rel=2e-3), words
        assert two.exchange[0] == pytest.approx(one.exchange[0], rel=1e-3)
        assert two.seconds["passes over memory"] > one.seconds["passes over memory"]
        assert two.seconds["collectives, exposed"] == pytest.approx(one.seconds["collectives, exposed"])
        assert two.waits_exchange == two.seconds[EXCHANGE] and two.waited == one.waited


def step(name, overlap, **options):
    """Returns (loss, metrics, gradients) of a microbatch over four devices that have the experts between them."""
    c = dataclasses.replace(STYLES[name], compute_dtype="float32", **options)
    params, buffers = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), state_of(c))
    batch = {k: jnp.asarray(np.resize(x, (ROWS * DEVICES, x.shape[1])), jnp.int32) for k, x in batch_of(c).items()}
    # Rows that choose other experts, so that no half is as the whole.
    batch["tokens"] = (batch["tokens"] * (1 + jnp.arange(ROWS * DEVICES))[:, None]) % c.vocab_size
    mesh = make_mesh(ep=DEVICES, devices=jax.devices()[:DEVICES])
    ops = bind_ops(mesh, experts={"axes": ("ep",), "dispatch": "all_to_all", "overlap": overlap})
    context = StepContext(jnp.int32(3), jnp.int32(0), buffers)

    def of(params):
        return loss(params, batch, c, ops, context=context)

    (total, metrics), grads = jax.jit(jax.value_and_grad(of, has_aux=True))(params)
    return total, {name: m.value for name, m in metrics.items()}, grads


# Losses of the batch, of the global batch and of sequences; gathered attention, latent attention; a shared expert with a gate.
CASES = [
    ("mixtral", {}),
    ("mixed", {"remat": "attention"}),
    ("deepseek", {}),
    ("qwen3", {"scan_layers": False, "remat": "full"}),
    ("gpt_oss", {"scan_layers": False}),
]


@pytest.mark.slow  # two programs with exchanges of experts, half a minute of compilation whatever the sizes
@pytest.mark.parametrize(("name", "options"), CASES)
def test_halves_are_the_batch(name, options):
    """Value, every metric and every gradient; passes are those of both halves."""
    plain, halves = (step(name, overlap, **options) for overlap in ("none", "halves"))
    np.testing.assert_allclose(halves[0], plain[0], rtol=1e-6)
    assert halves[1].keys() == plain[1].keys()
    for key, value in plain[1].items():
        if key not in ("experts/extra_passes", "experts/buffer_high_water"):  # each half has a buffer of its own
            np.testing.assert_allclose(halves[1][key], value, rtol=2e-5, err_msg=key)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5), halves[2], plain[2])
