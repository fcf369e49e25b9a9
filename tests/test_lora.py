"""Adapters of frozen matrices: their products and gradients against the merged matrices, how a base is stored and read, what is
written for others, and what is refused."""

import dataclasses
import functools
import json
import re
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file
from shared import once
from small_run import TINY, losses
from test_moe_model import OPS, STYLES, batch_of, state_of
from test_weights import loaded, made, state_in

from ejdist.frozen import Frozen, quantised
from ejdist.layout import current_layout, sharding
from ejdist.mesh import make_mesh
from ejdist.models.lora import BASE, LoRASection, adapted, base_of, declare_adapter, targets_of
from ejdist.models.model import Flops, StepContext
from ejdist.models.parameters import Param, initialise
from ejdist.projection import project
from ejdist.sections import validate
from ejdist.training.flops import step_flops
from ejdist.training.frozen_base import check_base
from ejdist.training.loop import train
from ejdist.training.program import make_program
from ejdist.training.restore import start_from
from ejdist.training.resume import check_same_run, fingerprint
from ejdist.training.start import open_source
from ejdist.weights.families import family_of
from ejdist.weights.files import WeightsError
from ejdist.weights.lora import Merged
from ejdist.weights.peft import CONFIG, TENSORS, save_adapter
from ejdist.weights.tensors import declared_leaves, expand
from ejdist.weights.writer import save
from launch.errors import DONE, WRONG
from launch.evaluate import main as evaluate
from launch.export import _keys
from launch.export import main as export
from recipes.schema import compose, unread

RNG = np.random.default_rng(0)
SMALL = ["recipe=short_context", "data.sequence_length=32", "data.global_batch=4", "sequence.order=contiguous"]


def normal(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


# -- one product ----------------------------------------------------------------------------------------------------------

PRODUCTS = {
    "btd,dnh->btnh": ((4, 8, 16), (16, 4, 6), ("D", "N", "H"), (0,)),
    "btnh,nhd->btd": ((4, 8, 4, 6), (4, 6, 16), ("N", "H", "D"), (0, 1)),
}


def adapter_of(shape, axes, rank=3):
    taken, made = ([n for i, n in enumerate(shape) if (i in axes) == inside] for inside in (True, False))
    return normal(*taken, rank), normal(rank, *made)


def sine(x, a, b, *, values, scale, subscripts, mesh=None):
    """Returns a number that depends on all of a product with a frozen matrix and its adapter."""
    return jnp.sum(jnp.sin(project(x, Frozen(values, scale, a, b, 0.7), subscripts, mesh=mesh)))


@pytest.mark.parametrize("subscripts", PRODUCTS)
@pytest.mark.parametrize("base", ["float32", "int8"])
def test_a_product_is_that_with_the_merged_matrix_and_so_are_the_gradients(subscripts, base):
    """By the chain rule from the gradient of the merged matrix, in float64; on one device and on a mesh of three axes."""
    shape_x, shape, dims, axes = PRODUCTS[subscripts]
    x, (a, b) = normal(*shape_x), adapter_of(shape, axes)
    values, scale = normal(*shape), None
    whole = values.astype(np.float64)
    if base == "int8":
        values, scale = map(np.asarray, quantised(jnp.asarray(values), axes))
        whole = values * scale.astype(np.float64)
    n = int(np.prod([shape[i] for i in axes]))
    flat_a, flat_b, flat_x = a.reshape(n, -1), b.reshape(len(b), -1), x.reshape(-1, n).astype(np.float64)
    merged = whole.reshape(n, -1) + 0.7 * flat_a.astype(np.float64) @ flat_b
    y = flat_x @ merged
    of_merged = flat_x.T @ np.cos(y)
    wanted = (np.cos(y) @ merged.T, 0.7 * of_merged @ flat_b.T, 0.7 * flat_a.T @ of_merged)

    mesh = make_mesh(fsdp=2, sp=2, tp=2)
    stored = sharding(mesh, dims, current_layout().parameters, shape=shape)
    for where in (None, mesh):
        kept = {"values": values, "scale": scale, "subscripts": subscripts, "mesh": where}
        if where is not None:
            kept["values"] = jax.device_put(values, stored)
        step = jax.jit(jax.value_and_grad(functools.partial(sine, **kept), argnums=(0, 1, 2)))
        value, found = step(x, a, b)
        assert float(value) == pytest.approx(np.sum(np.sin(y)), rel=1e-4, abs=1e-3)
        for got, want in zip(found, wanted, strict=True):
            np.testing.assert_allclose(np.asarray(got).reshape(want.shape), want, rtol=1e-4, atol=2e-4)


def test_a_frozen_matrix_has_no_gradient_whoever_asks():
    x, values = normal(2, 3, 4), normal(4, 5)
    found = jax.grad(lambda w: jnp.sum(project(x, Frozen(w), "btd,df->btf")))(values)
    assert found.shape == values.shape and not np.any(found)


def test_int8_is_gathered_as_int8():
    mesh = make_mesh(fsdp=2, sp=1, tp=1, devices=jax.devices()[:2])
    stored = sharding(mesh, ("D", "F"), current_layout().parameters, shape=(16, 8))
    at = [jax.ShapeDtypeStruct((16, 8), jnp.int8, sharding=stored), jax.ShapeDtypeStruct((1, 8), jnp.float32)]
    x = jax.ShapeDtypeStruct(
        (2, 4, 16), jnp.float32, sharding=sharding(mesh, ("B", "T", "D"), current_layout().activations)
    )
    product = jax.jit(lambda x, values, scale: project(x, Frozen(values, scale), "btd,df->btf", mesh=mesh))
    lowered = product.lower(x, *at)
    assert re.findall(r"sharding_constraint.*: tensor<16x8x(\w+)>", lowered.as_text()) == ["i8"], (
        "not by the compiler's grace"
    )
    gathers = re.findall(r"= (\w+)\[[\d,]*\]\S* all-gather", lowered.compile().as_text())
    assert gathers == ["s8"]


def test_each_channel_has_its_own_scale_and_its_largest_number_is_exact():
    x = normal(3, 5, 4) * np.array([1, 100, 0.01, 0], np.float32)
    values, scale = quantised(jnp.asarray(x), (1,))
    assert values.dtype == jnp.int8 and scale.shape == (3, 1, 4) and np.abs(values).max(1).max() == 127
    np.testing.assert_allclose(values * scale, x, atol=0.5001 * np.abs(x).max(1, keepdims=True).max() / 127)
    off = np.abs(np.asarray(values * scale) - x)
    assert np.all(off <= 0.5001 * np.asarray(scale)) and np.all(np.asarray(values)[..., 3] == 0)


# -- a model --------------------------------------------------------------------------------------------------------------


def state_with(c, section, params):
    """Returns (the adapted model, adapters that are not zero, buffers with these parameters as the base)."""
    model = adapted(c.build(), section, c.compute_dtype)
    rng = np.random.default_rng(3)
    adapters = jax.tree.map(
        lambda p: jnp.asarray((0.2 * rng.standard_normal(p.shape)).astype(np.float32)),
        model.declared,
        is_leaf=lambda p: isinstance(p, Param),
    )
    frozen = jax.tree_util.tree_map_with_path(
        lambda path, x: model.base.frozen(".".join(k.key for k in path), jnp.asarray(x, jnp.float32)), params
    )
    return model, adapters, {BASE: frozen}


# Every kind of projection, an MLP and experts with a shared one, and both buffers.
MIXED = dataclasses.replace(STYLES["mixed"], num_layers=2, first_layers=(), layer_pattern=("full", "latent_experts"))
SECTION = LoRASection(rank=2, alpha=3.0)


def total(model, params, buffers, batch):
    return model.loss(params, batch, OPS, context=StepContext(buffers=buffers))[0]


@functools.cache
def numbers_of(c):
    """Returns the parameters, buffers and batch of a model, and its loss with the gradient of the parameters, compiled once."""
    params, buffers = state_of(c)
    batch = {k: jnp.asarray(v, jnp.int32) for k, v in batch_of(c).items()}
    narrow = functools.partial(jax.tree.map, lambda x: jnp.asarray(np.asarray(x, np.float32)))
    return narrow(params), narrow(buffers), batch, jax.jit(jax.value_and_grad(functools.partial(total, c.build())))


@functools.cache
def adapted_of(c):
    """Returns what `state_with` does, of `SECTION`, and the loss with the gradient of the adapters."""
    model, adapters, base = state_with(c, SECTION, numbers_of(c)[0])
    return model, adapters, base, jax.jit(jax.value_and_grad(functools.partial(total, model)))


LATENT = ("latent_query", "latent_down", "key_up", "value_up", "latent_output")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("c", "names"),
    [
        (MIXED, {"query", "query_gate", "key", "value", "output", "gate", "up", "down", *LATENT}),
        (STYLES["kimi"], {"kda_in", "kda_beta", "kda_down", "kda_decay", "kda_gate", "kda_output", *LATENT}),
    ],
    ids=["mixed", "kimi"],
)
def test_gradients_of_adapters_are_those_of_the_merged_model_by_the_chain_rule(c, names):
    (params, buffers, batch, full), (_, adapters, base, step) = numbers_of(c), adapted_of(c)
    assert set(adapters["layers"]) == names, "all projections of mixers and of the MLP, and no other matrix"
    value, found = step(adapters, base | buffers, batch)
    merged, flat = {**params, "layers": dict(params["layers"])}, {}
    for name, adapter in adapters["layers"].items():
        w = params["layers"][name]
        a, b = (np.asarray(adapter[part], np.float64) for part in "ab")
        flat[name] = a.reshape(len(w), -1, 2), b.reshape(len(w), 2, -1)
        added = 1.5 * np.einsum("lir,lro->lio", *flat[name]).reshape(w.shape)
        merged["layers"][name] = np.asarray(w + added, np.float32)
    wanted, of_merged = full(merged, buffers, batch)
    assert float(value) == pytest.approx(float(wanted), rel=1e-6)
    for name, (a, b) in flat.items():
        g = np.asarray(of_merged["layers"][name], np.float64).reshape(len(a), a.shape[1], -1)
        for part, want in (("a", np.einsum("lio,lro->lir", g, b)), ("b", np.einsum("lir,lio->lro", a, g))):
            got = np.asarray(found["layers"][name][part]).reshape(want.shape)
            np.testing.assert_allclose(got, 1.5 * want, rtol=1e-3, atol=2e-5 * np.abs(want).max(), err_msg=name)


BFLOAT16 = dataclasses.replace(MIXED, compute_dtype="bfloat16", remat="dots")


@pytest.mark.slow  # two models are compiled; products with adapters and merged models have tests of their own
@pytest.mark.parametrize("c", [MIXED, BFLOAT16], ids=["float32", "bfloat16"])
def test_before_the_first_step_the_loss_is_that_of_the_base_to_the_bit(c):
    (params, buffers, batch, full), (model, _, base, step) = numbers_of(c), adapted_of(c)
    start = initialise(model.declared, jax.random.key(0))
    for name, adapter in start["layers"].items():
        assert np.any(adapter["a"]) and not np.any(adapter["b"]), name
    matrix = base[BASE]["layers"]["query"]
    assert matrix.dtype == c.compute_dtype and base[BASE]["layers"]["attention_norm"].dtype == jnp.float32
    value, gradient = step(start, base | buffers, batch)
    assert float(value) == float(full(params, buffers, batch)[0])
    for name, adapter in gradient["layers"].items():
        assert np.any(adapter["b"]) and not np.any(adapter["a"]), name


@pytest.mark.slow
def test_what_is_in_int8_is_used_as_its_rounded_numbers():
    """Projections and, without an adapter, experts: the loss is that of a model with the rounded matrices as its own."""
    params, buffers, batch, full = numbers_of(MIXED)
    model, _, base = state_with(MIXED, LoRASection(rank=2, base="int8", targets=("query",)), params)
    rounded = jax.tree.map(
        lambda x: np.asarray(x["values"] * x["scale"]) if isinstance(x, dict) and "values" in x else x,
        base[BASE],
        is_leaf=lambda x: isinstance(x, dict) and "values" in x,
    )
    stored = {name for name, x in base[BASE]["layers"].items() if isinstance(x, dict)}
    assert {"gate", "query", "experts_gate_up", "experts_down", "shared_down", "latent_output"} <= stored
    assert not stored & {"router", "attention_norm"}
    start = initialise(model.declared, jax.random.key(0))
    found = jax.jit(functools.partial(total, model))(start, base | buffers, batch)
    wanted, exact = (full(p, buffers, batch)[0] for p in (rounded, params))
    assert float(found) == pytest.approx(float(wanted), rel=2e-6)
    assert abs(float(exact - wanted)) > 2e-5 * float(exact), "the rounding is seen"
    with pytest.raises(ValueError, match="has no form as one array"):
        Frozen(jnp.ones((2, 2)), None, jnp.ones((2, 1)), jnp.ones((1, 2))).whole("float32")


@pytest.mark.slow
def test_of_the_buffers_what_is_of_the_base_stays_and_counts_move():
    (_, buffers, _, _), (model, _, base, _) = numbers_of(MIXED), adapted_of(MIXED)
    counts = jnp.arange(4, dtype=jnp.int32)[None]
    moved = model.update(base | buffers, {"experts.counts": counts})
    assert moved[BASE] is base[BASE]
    np.testing.assert_array_equal(moved["experts"]["bias"], buffers["experts"]["bias"])
    np.testing.assert_array_equal(moved["experts"]["load"], counts)


def test_the_backward_of_a_frozen_matmul_is_counted_once():
    segments = np.zeros((2, 8), int)
    model = compose(["model=nano"]).model
    full, trained = (
        step_flops(m.flops, segments) for m in (model.build(), adapted(model.build(), LoRASection(rank=4)))
    )
    matmuls = sum(p.token for p in model.build().flops) * 16
    adapters = 3 * 16 * 2 * sum(
        p.size for q in targets_of(model.build().declared["layers"], LoRASection(rank=4))
        for p in declare_adapter(model.build().declared["layers"][q], 4).values()
    )  # fmt: skip
    assert full.causal - trained.causal == matmuls - adapters
    assert step_flops([Flops(10, frozen=10)], segments).full == 2 * 10 * 16


# -- the base of a run ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("base", "mesh"),
    [
        ("bfloat16", ["mesh.fsdp=2", "mesh.sp=2"]),
        pytest.param("int8", ["mesh.fsdp=2", "mesh.sp=1"], marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_a_base_is_read_in_the_dtype_that_it_is_kept_in_on_a_mesh(base, mesh, tmp_path):
    made(tmp_path, "deepseek")
    c, leaves = loaded(tmp_path)
    sections = compose([*SMALL, *mesh, "lora.rank=2", f"lora.base={base}", "lora.targets=[value_up,down]"])
    sections.model = c
    program = make_program(
        sections, make_mesh(**vars(sections.mesh), devices=jax.devices()[: 4 if base == "bfloat16" else 2])
    )
    said = []
    state = start_from(program, open_source(str(tmp_path), c), said.append)
    assert f"{sum(x.size for x in leaves.values()):,} parameters read" in said[-1]
    assert "trains" in program.notes[0] and program.num_parameters > sum(p.size for p in leaves.values()) * 0.9
    assert set(state.params["layers"]) == {"value_up", "down"} and not np.any(state.params["layers"]["down"]["b"])
    frozen = state.buffers[BASE]
    for leaf, wanted in leaves.items():
        if leaf.startswith("buffers."):
            np.testing.assert_array_equal(state.buffers["experts"]["bias"], wanted)
            continue
        at = frozen
        for name in leaf.split(".")[1:]:
            at = at[name]
        p = declared_leaves(c)[leaf]
        if base == "int8" and p.inputs:
            values, scale = quantised(
                jnp.asarray(wanted), tuple(i for i, d in enumerate(p.dims.split()) if d in p.inputs)
            )
            np.testing.assert_array_equal(at["values"], values, err_msg=leaf)
            np.testing.assert_array_equal(at["scale"], scale, err_msg=leaf)
            continue
        narrow = base == "bfloat16" and (p.inputs or leaf in ("params.embedding", "params.lm_head"))
        np.testing.assert_array_equal(at, jnp.asarray(wanted, "bfloat16") if narrow else wanted, err_msg=leaf)
    for got, like in zip(jax.tree.leaves(state), jax.tree.leaves(program.state), strict=True):
        assert got.sharding.is_equivalent_to(like.sharding, got.ndim) and got.dtype == like.dtype


# -- for others -----------------------------------------------------------------------------------------------------------


def checkpoint_of(c, section, leaves):
    """Returns (name -> array of a checkpoint with adapters that are not zero, how its leaves are merged)."""
    arrays = {}
    for name, p in base_of(c.build().declared, section, c.compute_dtype).stored()["layers"].items():
        leaf = f"params.layers.{name}"
        if isinstance(p, dict):
            declared = declared_leaves(c)[leaf]
            axes = tuple(i for i, d in enumerate(declared.dims.split()) if d in declared.inputs)
            values, scale = quantised(jnp.asarray(leaves[leaf]), axes)
            arrays |= {f"buffers.base.layers.{name}.values": values, f"buffers.base.layers.{name}.scale": scale}
        else:
            arrays[f"buffers.base.layers.{name}"] = leaves[leaf]
    for leaf, x in leaves.items():
        if leaf.startswith("params.") and ".layers." not in leaf:
            arrays[f"buffers.base.{leaf.removeprefix('params.')}"] = x
        elif leaf.startswith("buffers."):
            arrays[leaf] = x
    merged = Merged(c, section)
    for name in merged.targets:
        adapter = declare_adapter(c.build().declared["layers"][name], section.rank)
        arrays |= {f"params.layers.{name}.{part}": normal(*p.shape) for part, p in adapter.items()}
    return {name: np.asarray(x) for name, x in arrays.items()}, merged


@pytest.mark.parametrize(
    ("name", "targets", "base", "modules"),
    [
        pytest.param("qwen3", (), None, ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
                     marks=pytest.mark.slow),
        ("llama_tied", ("query", "down"), "int8", ["q_proj", "down_proj"]),
        ("deepseek_no_rank", ("latent_query", "key_up", "value_up"), None, ["q_proj", "kv_b_proj"]),
        pytest.param("qwen3_moe", ("key",), None, ["k_proj"], marks=pytest.mark.slow),
        ("qwen3_next", (), None, ["in_proj_qkvz", "in_proj_ba", "out_proj", "q_proj", "k_proj", "v_proj", "o_proj"]),
        pytest.param("kimi", ("kda_in", "kda_down", "kda_gate", "latent_query"), None,
         ["q_proj", "k_proj", "v_proj", "f_a_proj", "g_a_proj", "g_b_proj"], marks=pytest.mark.slow),
        pytest.param(
            "nemotron_h",
            ("mamba2_in", "mamba2_gate", "mamba2_bc", "mamba2_dt", "ungated_up", "ungated_down", "value"),
            None,
            ["in_proj", "up_proj", "down_proj", "v_proj"],
            marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_a_merged_model_is_the_base_and_its_adapter_as_peft_adds_them(name, targets, base, modules, tmp_path):
    """W + lora_alpha / r B A of what is written, tensor by tensor, in float64."""
    made(tmp_path / "theirs", name)
    c, leaves = loaded(tmp_path / "theirs")
    section = LoRASection(rank=2, alpha=5.0, targets=targets, base=base)
    arrays, merged = checkpoint_of(c, section, leaves)

    def leaf(leaf):
        own = merged.likes(leaf)
        assert all(arrays[n].shape == x.shape and arrays[n].dtype == x.dtype for n, x in own.items()), leaf
        return merged.rows(leaf, {n: arrays[n] for n in own})[...] if own else arrays[leaf]

    save(tmp_path / "merged", c, leaf)
    plain = Merged(
        c,
        dataclasses.replace(
            section, targets=("latent_output",) if name in ("deepseek_no_rank", "kimi") else ("query",)
        ),
    )
    save(tmp_path / "base", c, lambda n: plain._make(n, {k: v for k, v in arrays.items() if "params" not in k}, "float32")
         if n.startswith("params.") else arrays[n])  # fmt: skip
    count = save_adapter(tmp_path / "adapter", c, section, arrays.__getitem__, base="theirs")
    config = json.loads((tmp_path / "adapter" / CONFIG).read_text())
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (2, 5.0, "theirs")
    assert config["target_modules"] == modules
    tensors = load_file(tmp_path / "adapter" / TENSORS)
    assert count == sum(x.size for x in tensors.values())
    whole, written, adapters = state_in(tmp_path / "merged"), state_in(tmp_path / "base"), 0
    for tensor, wanted in whole.items():
        module = tensor.removesuffix(".weight")
        a, b = (tensors.get(f"base_model.model.{module}.lora_{part}.weight") for part in "AB")
        found = written[tensor].astype(np.float64)
        if a is not None:
            last, adapters = module.rpartition(".")[2], adapters + 1
            rank, alpha = config["rank_pattern"].get(last, 2), config["alpha_pattern"].get(last, 5.0)
            assert a.shape[0] == b.shape[1] == rank
            found = found + alpha / rank * b.astype(np.float64) @ a
        np.testing.assert_allclose(wanted, found, rtol=1e-5, atol=2e-5, err_msg=tensor)
    assert len(tensors) == 2 * adapters > 0
    one = next(iter(merged.targets))
    rows = merged.rows(f"params.layers.{one}", {n: arrays[n] for n in merged.likes(f"params.layers.{one}")})
    np.testing.assert_array_equal(rows[0], rows[...][0])


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("qwen3_moe", r"cannot name model.layers.1.mlp.gate_proj without model.layers.0.mlp.experts.0"),
        (
            "nemotron_h",
            r"backbone.layers.0.mixer.out_proj, which PEFT refuses in models of nemotron_h: .*without mamba2_output",
        ),
    ],
)
def test_an_adapter_that_peft_cannot_name_or_takes_not_is_not_written(name, said, tmp_path):
    made(tmp_path / "theirs", name)
    c, leaves = loaded(tmp_path / "theirs")
    arrays, _ = checkpoint_of(c, LoRASection(rank=2), leaves)
    with pytest.raises(WeightsError, match=said):
        save_adapter(tmp_path / "to", c, LoRASection(rank=2), arrays.__getitem__)
    assert not [p for p in tmp_path.iterdir() if p.name.startswith("to")]


# -- what is refused ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("lora.rank=-1", "lora.rank must be positive, or 0 for no adapters, got -1"),
        ("lora.rank=2 lora.alpha=0", "lora.alpha must be positive, got 0"),
        ("lora.rank=2 lora.base=int4", "lora.base = 'int4' is unknown; use null, bfloat16, float32, int8"),
        ("lora.rank=2 lora.targets=[query,query]", "names 'query' twice"),
        (
            "lora.rank=2 lora.targets=[qery]",
            "did you mean 'query'? there are query, key, value, output, gate, up, down",
        ),
        ("lora.rank=2 lora.targets=[attention_norm]", "'attention_norm', a parameter of no projection"),
        ("recipe=moe lora.rank=2 lora.targets=[experts_down]", "'experts_down', a parameter of experts or beside them"),
        (
            "lora.rank=65",
            "lora.rank = 65 is more than 64, the smaller side of 'key': give at most that, or lora.targets=[query,output,gate,",
        ),
    ],
)
def test_a_wrong_key_is_named_with_what_to_do(words, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        s = compose(words.split())
        validate(s)
        make_program(s, make_mesh(devices=jax.devices()[:1], sp=1))


def test_keys_that_nothing_reads_or_that_change_a_run_are_told(tmp_path):
    words = ["lora.alpha=8"]
    assert unread(words, compose(words)) == ["lora.alpha=8 changes nothing: lora.rank = 0 trains all parameters"]
    assert not unread([*words, "lora.rank=2"], compose([*words, "lora.rank=2"]))
    with pytest.raises(
        ValueError, match=r"lora.rank = 4 trains adapters of a model that is there: give model.init_from=DIR"
    ):
        check_base(LoRASection(rank=4), None)
    full, adapters = (fingerprint(compose(w)) for w in ([], ["lora.rank=4", "lora.targets=[query]"]))
    for stored, words in ((full, ["lora.rank=4"]), (adapters, ["lora.rank=4"]), (adapters, ["lora.targets=[query]"])):
        with pytest.raises(ValueError, match=r"started with another recipe: lora\.\w+: was"):
            check_same_run(stored, compose(words), 3, tmp_path)
    older = {k: v for k, v in full.items() if not k.startswith("lora.")}
    check_same_run(older, compose([]), 3, tmp_path)
    for words, said in (
        (["adapter=loha"], "use peft"),
        (["adapter=peft", "data.tokenizer=a"], "does not read data.tokenizer"),
    ):
        with pytest.raises(ValueError, match=said):
            _keys(["run.dir=a", "to=b", *words])


def test_a_family_has_no_rule_for_what_its_tensors_do_not_hold(tmp_path):
    """Every matrix that may have an adapter lies in its tensor as PEFT has a linear layer: [what it makes, what it takes]."""
    for name in ("llama", "qwen3_moe", "deepseek", "gpt_oss"):
        made(tmp_path / name, name)
        c, _ = loaded(tmp_path / name)
        layers = c.build().declared["layers"]
        for tensor in expand(family_of(c)[1].rules[0], c):
            for piece in tensor.pieces:
                p = layers.get(piece.leaf.removeprefix("params.layers."))
                if p is not None and p.adapts:
                    taken = {piece.order[i] for i, d in enumerate(p.dims.split()[1:]) if d in p.inputs.split()}
                    assert taken == set(range(len(tensor.split[0]), sum(map(len, tensor.split)))), tensor.name


# -- runs -----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def base_run(corpus, tmp_path_factory):
    """A folder with a run of two steps, to adapt."""
    return once(tmp_path_factory, "base_run", lambda folder: ran(folder / "run", corpus, "run.steps=2"))


def ran(directory, corpus, *words):
    """Runs a recipe, and returns what it logs."""
    said = []
    keys = ["mesh.sp=1", "sequence.order=contiguous", "optimizer.schedule=constant", "optimizer.learning_rate=1e-2"]
    train(compose([*TINY, *corpus, *keys, f"run.dir={directory}", *words]), log=said.append)
    return "\n".join(said)


@pytest.mark.slow  # six runs, 60 s
@pytest.mark.parametrize("base", ["null", "int8"])
def test_a_run_with_adapters_resumes_bit_for_bit_and_its_model_is_read_as_any(base, base_run, corpus, tmp_path, capsys):
    words = [
        "run.steps=6",
        "lora.rank=4",
        f"lora.base={base}",
        "checkpoint.every=3",
        "guards.nonfinite=skip",
        "mesh.fsdp=2",
    ]
    (tmp_path / "held_out.txt").write_text(Path(re.__file__).read_text()[:4000])
    words += ["guards.replicas_every=1", "evaluation.every=3", f"evaluation.data={tmp_path}/held_out.txt"]
    words += ["evaluation.batches=2", f"model.init_from={base_run}/run"]
    said = ran(tmp_path / "whole", corpus, *words)
    assert "lora.rank = 4 trains 3,712 of 29,504 parameters, the adapters of query, key" in said
    assert losses(tmp_path / "whole")[0] < losses(base_run / "run")[0] - 0.1, "it starts from the base"
    ran(tmp_path / "parts", corpus, *words, "run.stop_after=3")
    copy = shutil.copytree(tmp_path / "parts", tmp_path / "copy")
    shutil.move(base_run / "run", base_run / "gone")  # a resumed run reads nothing of its source
    try:
        said = ran(tmp_path / "parts", corpus, *words)
        assert "resuming from step 3" in said
        assert losses(tmp_path / "parts") == losses(tmp_path / "whole"), "to the bit"
        ran(copy, corpus, *words, "mesh.fsdp=1", "mesh.tp=2", "mesh.sp=2")
    finally:
        shutil.move(base_run / "gone", base_run / "run")
    np.testing.assert_allclose(losses(copy), losses(tmp_path / "whole"), rtol=1e-5)

    def held_out(name):
        return [json.loads(line)["loss"] for line in (tmp_path / name / "evaluation.jsonl").read_text().splitlines()]

    last = held_out("whole")[-1]
    assert last < held_out("whole")[0] - 5e-3

    # The merged model: as files, as the start of another run with or without adapters, and evaluated.
    assert export([f"run.dir={tmp_path}/whole", f"to={tmp_path}/merged"]) == DONE
    assert export([f"run.dir={tmp_path}/whole", f"to={tmp_path}/adapter", "adapter=peft"]) == DONE
    assert "base_model_name_or_path is null" in capsys.readouterr().out
    assert json.loads((tmp_path / "adapter" / CONFIG).read_text())["r"] == 4
    steps = ["run.steps=1", "lora.rank=0", *(w for w in words if w.startswith("evaluation."))]
    for name, source in (("of_run", tmp_path / "whole"), ("of_files", tmp_path / "merged")):
        ran(tmp_path / name, corpus, *steps, f"model.init_from={source}")
        assert held_out(name)[0] == pytest.approx(last, rel=1e-5), "it has what was trained"
    ran(tmp_path / "again", corpus, *steps, "lora.rank=2", f"model.init_from={tmp_path}/whole")
    assert held_out("again")[0] == pytest.approx(last, rel=1e-5)
    assert evaluate([f"run.dir={tmp_path}/whole", *corpus, "batches=1", "lengths=64"]) == DONE


@pytest.mark.slow  # it compiles a step twice, 15 s
def test_what_does_not_go_together_is_refused_before_anything_is_written(base_run, corpus, tmp_path):
    with pytest.raises(
        ValueError, match=r"lora.rank = 2 trains adapters of a model that is there: give model.init_from"
    ):
        ran(tmp_path / "new", corpus, "lora.rank=2")
    assert not (tmp_path / "new").exists()
    copy = shutil.copytree(base_run / "run", tmp_path / "full")
    with pytest.raises(ValueError, match=r"with another recipe: lora.rank: was 0, is 2; restore it, or"):
        ran(copy, corpus, "run.steps=2", "lora.rank=2", f"model.init_from={base_run}/run")
    assert export([f"run.dir={base_run}/run", f"to={tmp_path}/adapter", "adapter=peft"]) == WRONG
