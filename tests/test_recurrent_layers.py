"""Layers that are recurrences: each against a loop in NumPy, on every mesh, in every order that there is a form for, and in
runs of hybrids."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy_recurrence import slope
from recurrent_layers_loop import LAYERS
from small_recurrences import IDS, KINDS, config, drawn, layer
from small_run import TINY, losses

from ejdist import make_mesh
from ejdist.layout import ACTIVATIONS, PARAMETERS, sharding
from ejdist.models import parts
from ejdist.models.parameters import Param, initialise, map_declared
from ejdist.operations import bind_ops
from ejdist.order import Order
from ejdist.training.loop import train
from ejdist.training.program import make_program
from recipes.schema import compose


@pytest.mark.parametrize("kind", [pytest.param(k, marks=[pytest.mark.slow] * (k == "gla")) for k in KINDS])
def test_a_layer_is_what_it_is_published_as(kind):
    """Its result, and its derivative along a direction of everything at once, for documents packed into rows."""
    c, number = config(kind, zero_centered_norms=kind == "gated_delta"), 1
    params = drawn(parts.PARTS[kind], c)
    rng = np.random.default_rng(1)
    x = rng.standard_normal((*IDS.shape, c.model_dim)).astype(np.float32)
    weight = np.cos(np.arange(x.size)).reshape(x.shape)
    loop = functools.partial(LAYERS[kind], batch={"segment_ids": IDS}, c=c, layer=number)

    @jax.jit
    def of(params, x):
        made, back = jax.vjp(layer(kind, c, number), params, x)
        return made, back(jnp.asarray(weight, jnp.float32))

    made, (grads, dx) = of(params, x)
    floats = {n: np.float64(p) for n, p in params.items()} | {"x": np.float64(x)}
    np.testing.assert_allclose(made, loop(floats["x"], floats), rtol=1e-5, atol=1e-5)
    along = {n: rng.standard_normal(p.shape) for n, p in floats.items()}
    want = slope(lambda a: float(np.sum(weight * loop(a["x"], a))), floats, along)
    every = {**grads, "x": dx}
    assert sum(float(np.sum(along[n] * np.float64(every[n]))) for n in along) == pytest.approx(want, rel=2e-4)
    assert all(np.abs(g).max() > 0 for g in every.values()), "every parameter has an effect"


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_leaks_from_a_document_into_another(kind):
    """Also not of a document into padding, and of padding into anything."""
    c = config(kind)
    params, rng = drawn(parts.PARTS[kind], c), np.random.default_rng(2)
    x = rng.standard_normal((*IDS.shape, c.model_dim)).astype(np.float32)
    run = jax.jit(layer(kind, c, 0))
    made = np.asarray(run(params, x))
    for where in (IDS == 0, IDS == 5, IDS == -1):
        changed = np.asarray(run(params, np.where(where[..., None], x + 1, x)))
        np.testing.assert_array_equal(changed[~where], made[~where])
    np.testing.assert_array_equal(made[IDS < 0], x[IDS < 0])


@pytest.mark.slow  # operations in bfloat16 are quick in test_ops.py
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_in_bfloat16_is_as_near_as_its_roundings(kind):
    """The stream stays in the compute dtype; what decides how long a state remembers is in float32."""
    c = config(kind, compute_dtype="bfloat16")
    declared = parts.PARTS[kind].declare(c)
    params = drawn(parts.PARTS[kind], c)
    x = np.random.default_rng(4).standard_normal((*IDS.shape, c.model_dim))
    x = np.asarray(jnp.asarray(x, jnp.bfloat16))
    cast = {n: jnp.asarray(w, jnp.bfloat16) if declared[n].cast else w for n, w in params.items()}
    made = jax.jit(layer(kind, c, 1))(cast, x)
    want = LAYERS[kind](np.float64(x), {n: np.float64(w) for n, w in cast.items()}, {"segment_ids": IDS}, c, 1)
    assert made.dtype == jnp.bfloat16
    assert np.abs(np.float64(made) - want).max() < 0.03 * np.abs(want - np.float64(x)).max() + 0.02


def test_decays_start_as_they_are_published():
    declared = {n: dataclasses.replace(p, shape=(4096,)) for n, p in parts.PARTS["mamba2"].declare(config("mamba2")).items()
                if n in ("mamba2_a_log", "mamba2_dt_bias")}  # fmt: skip
    made = {n: np.asarray(x, np.float64) for n, x in initialise(declared, jax.random.key(0)).items()}
    rates, steps = np.exp(made["mamba2_a_log"]), np.log1p(np.exp(made["mamba2_dt_bias"]))
    for values, low, high in ((rates, 1, 16), (np.log(steps), np.log(1e-3), np.log(1e-1))):
        assert (
            low - 1e-4 < values.min() < low + 0.02 * (high - low)
            and high - 0.02 * (high - low) < values.max() < high + 1e-4
        )
        assert values.mean() == pytest.approx((low + high) / 2, abs=0.02 * (high - low))
    ramp = initialise({"x": Param((2, 3, 4), "L N H", "ramp", between=(-5.5, 0.5))}, jax.random.key(0))["x"]
    np.testing.assert_allclose(ramp, np.broadcast_to([-5.5, -3.5, -1.5, 0.5], (2, 3, 4)), rtol=1e-6)
    with pytest.raises(ValueError, match="init 'uniform' is unknown; use one of normal, zeros, ones, log"):
        Param((2,), "N", "uniform")


def test_what_weight_decay_leaves_alone():
    for kind in KINDS:
        declared = parts.PARTS[kind].declare(config(kind))
        alone = {n.removeprefix(f"{kind}_") for n, p in declared.items() if not p.decay}
        assert alone >= {"norm", "out_norm"} and not {n for n, p in declared.items() if not p.decay and p.inputs}
        if kind in ("gated_delta", "kda", "mamba2"):
            assert alone >= {"a_log", "dt_bias"}
    assert not parts.PARTS["mamba2"].declare(config("mamba2"))["mamba2_skip"].decay


# -- on a mesh, and in runs -----------------------------------------------------------------------------------------------


def value_and_gradient(kind, mesh=None, order="contiguous"):
    """Returns the loss of a model of such layers on packed rows, and its gradient; on a mesh, of parameters as stored."""
    c = config(kind, vocab_size=16, remat="none")
    c = dataclasses.replace(c, num_layers=1, layer_pattern=(f"{kind}+none",))
    model, rng = c.build(), np.random.default_rng(3)
    batch = {n: rng.integers(0, 16, IDS.shape).astype(np.int32) for n in ("tokens", "targets")}
    batch |= {"positions": np.zeros_like(batch["tokens"]), "segment_ids": IDS.astype(np.int32)}
    params = initialise(model.declared, jax.random.key(0))
    params["layers"] |= {n: jnp.asarray(x)[None] for n, x in drawn(parts.PARTS[kind], c).items()}
    if mesh is not None:
        order = Order(order, mesh.shape["sp"])
        places = map_declared(lambda _, p: sharding(mesh, p.dims.split(), PARAMETERS, shape=p.shape), model.declared)
        params = jax.device_put(params, places)
        batch = {n: jax.device_put(order.permute(x), sharding(mesh, "BT", ACTIVATIONS)) for n, x in batch.items()}
    ops = bind_ops(mesh, order=None if mesh is None else order)
    return jax.jit(jax.value_and_grad(lambda p: model.loss(p, batch, ops)[0]))(params)


@pytest.mark.parametrize(
    ("kind", "sizes", "order"),
    [
        pytest.param("gated_delta", {"sp": 2, "tp": 2}, "contiguous", marks=pytest.mark.slow),
        pytest.param("mamba2", {"sp": 4}, "zigzag", marks=pytest.mark.slow),
        *(pytest.param(kind, {"sp": 2, "tp": 2}, "striped", marks=pytest.mark.slow) for kind in KINDS),
        *(pytest.param(kind, {"sp": 4}, "contiguous", marks=pytest.mark.slow) for kind in KINDS),
    ],
)
def test_a_mesh_changes_neither_loss_nor_gradient(kind, sizes, order):
    mesh = make_mesh(**sizes, devices=jax.devices()[:4])
    want, gradient = value_and_gradient(kind)
    made, split = value_and_gradient(kind, mesh, order)
    assert float(made) == pytest.approx(float(want), rel=1e-6)
    for one, other in zip(jax.tree.leaves(gradient), jax.tree.leaves(split), strict=True):
        np.testing.assert_allclose(other, one, atol=2e-5 * np.abs(np.asarray(one)).max())


@pytest.mark.parametrize(
    ("kind", "recurrences"),
    [
        pytest.param("kda", 2, marks=pytest.mark.slow),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("gated_delta", 2), ("mamba2", 2), ("lightning", 1), ("gla", 1), ("rwkv7", 2))
        ),
    ],
)
def test_how_many_hops_are_made_is_one_choice_of_a_recurrence(kind, recurrences):
    """In a zigzag too, in which states go both ways; a convolution counts as one. XLA for CPUs runs conditionals that do not
    wait for each other side by side, and may take a transfer in one for a transfer in the other."""
    mesh = make_mesh(sp=4, devices=jax.devices()[:4])
    c, order = config(kind), Order("zigzag", 4)
    at = parts.LayerContext(c, bind_ops(mesh, order=order), {"segment_ids": order.permute(IDS)}, 0, 0, 0, 0, {})
    x = jax.ShapeDtypeStruct((*IDS.shape, c.model_dim), jnp.float32)
    text = jax.jit(lambda p, x: parts.PARTS[kind].apply(x, p, at)[0]).lower(drawn(parts.PARTS[kind], c), x).as_text()
    assert text.count("stablehlo.case") == recurrences


HYBRID = [
    *TINY, "model.num_layers=4", "model.layer_pattern=[gated_delta+mlp,mamba2+ungated_mlp,lightning+none,full+mlp]",
    "model.gated_delta.num_key_heads=2", "model.gated_delta.num_value_heads=4", "model.gated_delta.key_dim=8",
    "model.gated_delta.value_dim=8", "model.mamba2.num_heads=4", "model.mamba2.head_dim=8", "model.mamba2.state_dim=8",
    "model.lightning.num_heads=4", "model.lightning.head_dim=8", "run.steps=3", "optimizer.learning_rate=1e-2",
]  # fmt: skip
# The others, that HYBRID's losses stay what they were.
GATED = [
    *TINY, "model.num_layers=3", "model.layer_pattern=[gla+mlp,rwkv7+none,full+mlp]", "model.gla.num_heads=4",
    "model.gla.key_dim=8", "model.gla.value_dim=16", "model.rwkv7.num_heads=4", "model.rwkv7.head_dim=8",
    "model.rwkv7.decay_rank=8", "model.rwkv7.rate_rank=8", "model.rwkv7.gate_rank=8", "run.steps=3",
    "optimizer.learning_rate=1e-2",
]  # fmt: skip


@pytest.fixture(scope="module")
def of_one_device(corpus, tmp_path_factory):
    return run(tmp_path_factory.mktemp("one"), corpus, "mesh.sp=1")


def run(directory, corpus, *overrides, words=HYBRID):
    train(compose([*words, *corpus, f"run.dir={directory}", *overrides]), log=lambda line: None)
    return losses(directory)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        ["mesh.sp=2", "mesh.tp=2", "sequence.order=contiguous"],
        ["mesh.sp=4", "sequence.order=zigzag"],
        ["mesh.sp=4", "sequence.order=striped"],
        ["mesh.sp=1", "mesh.tp=4", "model.num_kv_heads=4", "model.gated_delta.num_key_heads=4"],
        ["mesh.sp=2", "mesh.fsdp=2", "model.mamba2.num_groups=2"],
    ],
    ids=" ".join,
)
def test_losses_are_the_same_on_every_mesh(layout, of_one_device, corpus, tmp_path):
    """Of several steps of packed documents, so that gradients are right too."""
    sizes = [word for word in layout if word.startswith("model.")]
    want = of_one_device if not sizes else run(tmp_path / "one", corpus, "mesh.sp=1", *sizes)
    assert run(tmp_path / "many", corpus, *layout) == pytest.approx(want, abs=2e-5) and want[-1] < want[0]


@pytest.mark.slow
def test_losses_of_gated_layers_are_the_same_on_every_mesh(corpus, tmp_path):
    layouts = {
        "one": ["mesh.sp=1"],
        "two": ["mesh.sp=2", "mesh.tp=2", "sequence.order=contiguous"],
        "four": ["mesh.sp=4", "sequence.order=zigzag"],
    }
    one, *others = (run(tmp_path / name, corpus, *layout, words=GATED) for name, layout in layouts.items())
    assert all(other == pytest.approx(one, abs=2e-5) for other in others) and one[-1] < one[0]


@pytest.mark.slow
def test_layers_of_one_part_have_the_same_losses_on_every_mesh(corpus, tmp_path):
    """A small Nemotron-H, of packed documents."""
    kinds = ["mamba2+none", "none+ungated_mlp", "full+none", "none+ungated_mlp"]
    sizes = [f"model.layer_pattern=[{','.join(kinds)}]", "model.activation=relu2", "model.attention_rope=false"]
    sizes += [f"model.{name}.num_{heads}_heads=0" for name, heads in (("gated_delta", "key"), ("gated_delta", "value"))]
    sizes += [f"model.gated_delta.{name}_dim=128" for name in ("key", "value")]
    sizes += ["model.lightning.num_heads=0", "model.lightning.head_dim=128", "model.mamba2.num_groups=2"]
    want = run(tmp_path / "one", corpus, "mesh.sp=1", *sizes)
    layouts = (["mesh.sp=2"], ["mesh.sp=2", "mesh.tp=2"], ["mesh.fsdp=2", "mesh.sp=1"])
    for number, layout in enumerate(layouts):
        found = run(tmp_path / f"layout{number}", corpus, *layout, *sizes)
        assert found == pytest.approx(want, abs=2e-5) and want[-1] < want[0]


@pytest.mark.slow
def test_a_hybrid_goes_on_where_it_stopped(of_one_device, corpus, tmp_path):
    """On another mesh, and with adapters beside a base of 8 bits."""
    keep = ["checkpoint.every=1", "sequence.order=contiguous"]
    run(tmp_path, corpus, "mesh.sp=1", "run.stop_after=2", *keep)
    assert run(tmp_path, corpus, "mesh.sp=2", *keep) == pytest.approx(of_one_device, abs=2e-5)
    tuned = run(tmp_path / "tuned", corpus, f"model.init_from={tmp_path}", "lora.rank=2", "lora.base=int8")
    assert tuned[-1] < tuned[0] < of_one_device[0]


# -- what is refused -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "changes", "said"),
    [
        ("gated_delta", [], "model.gated_delta.num_key_heads must be positive, got 0: model.layer_pattern has layers with"),
        ("kda", [], "model.kda.num_heads must be positive, got 0: model.layer_pattern has layers with kda"),
        ("mamba2", [], "model.mamba2.num_heads must be positive, got 0: model.layer_pattern has layers with mamba2"),
        ("lightning", [], "model.lightning.num_heads must be positive, got 0"),
        ("none", ["mamba2.num_heads=4"], r"model.mamba2 is given, but no layer has mamba2: .* for example mamba2\+mlp"),
        ("gated_delta", ["gated_delta.num_key_heads=2"], "model.gated_delta.num_value_heads must be positive, got 0"),
        ("gated_delta", ["gated_delta.num_key_heads=3", "gated_delta.num_value_heads=4"],
         "model.gated_delta.num_value_heads = 4 must be a multiple of model.gated_delta.num_key_heads = 3"),
        ("kda", ["kda.num_heads=2", "kda.rank=0"], "model.kda.rank must be positive, got 0"),
        ("none", ["kda.gate_bias=true"], r"model.kda is given, but no layer has kda: .* for example kda\+mlp"),
        ("mamba2", ["mamba2.num_heads=4", "mamba2.num_groups=3"],
         "model.mamba2.num_heads = 4 must be a multiple of model.mamba2.num_groups = 3"),
        ("lightning", ["lightning.num_heads=4", "lightning.head_dim=0"], "model.lightning.head_dim must be positive"),
        ("gla", [], "model.gla.num_heads must be positive, got 0: model.layer_pattern has layers with gla"),
        ("gla", ["gla.num_heads=2", "gla.rank=0"], "model.gla.rank must be positive, got 0"),
        ("gla", ["gla.num_heads=2", "gla.normalizer=0"], "model.gla.normalizer must be positive, got 0.0"),
        ("none", ["gla.num_heads=2"], r"model.gla is given, but no layer has gla: .* for example gla\+mlp"),
        ("rwkv7", [], "model.rwkv7.num_heads must be positive, got 0"),
        ("rwkv7", ["rwkv7.num_heads=2", "rwkv7.gate_rank=0"], "model.rwkv7.gate_rank must be positive, got 0"),
        ("rwkv7", ["rwkv7.num_heads=2", "rwkv7.value_residual=true"],
         "model.rwkv7.value_residual = true mixes values with those of the first layer, and a layer here gets nothing"),
        ("mamba3", [], r"'mamba3\+mlp' is not MIXER\+FEED_FORWARD; did you mean 'mamba2\+mlp'\? Mixers: .* mamba2,"),
    ],
)  # fmt: skip
def test_sizes_that_make_no_layer_are_refused_by_their_key(kind, changes, said):
    with pytest.raises(ValueError, match=said):
        compose([*TINY, f"model.layer_pattern=[{kind}+mlp,full]", *(f"model.{c}" for c in changes)]).model.build()


@pytest.mark.parametrize(
    ("changes", "mesh", "error", "said"),
    [
        ([], {"tp": 4}, ValueError,
         "model.gated_delta.num_key_heads: dim K = 2 cannot be divided over tp=4; make it a multiple of 4"),
        (["sequence.order=balanced"], {"sp": 2}, ValueError,
         "sequence.order = 'balanced' is another one for each row, and layers with gated_delta have no form for it: use "
         "contiguous, zigzag, striped or auto"),
    ],
)  # fmt: skip
def test_a_mesh_or_an_order_that_a_recurrence_has_no_form_for(changes, mesh, error, said):
    devices = make_mesh(**mesh, devices=jax.devices()[: max(mesh.values())])
    with pytest.raises(error, match=said):
        recipe = compose([*HYBRID, "model.num_kv_heads=4", *(f"mesh.{a}={n}" for a, n in mesh.items()), *changes])
        program = make_program(recipe, devices)
        program.step.trace(program.state, program.batch)
