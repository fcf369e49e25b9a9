"""Packed weights of a generation: the texts of the same model with the numbers that they represent, and what is refused."""

import dataclasses
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_generation import Known, finish, placed, prompts

import kernels
from ejdist.experts import moe
from ejdist.generation import Engine
from ejdist.layout import ACTIVATIONS, PARAMETERS, sharding
from ejdist.mesh import make_mesh
from ejdist.models.config import (
    ExpertsShape,
    GatedDeltaShape,
    GlaShape,
    KdaShape,
    LatentShape,
    LightningShape,
    Mamba2Shape,
    Rwkv7Shape,
)
from ejdist.models.decoder import DecoderConfig
from ejdist.models.lora import LoRASection
from ejdist.models.parameters import initialise
from ejdist.models.parts import PARTS
from ejdist.models.stack import used
from ejdist.packed import FORMATS, Packed, _packing, packed_rows
from ejdist.planning.targets import target_of
from ejdist.precision import Narrow
from ejdist.projection import project
from kernels import Unsupported
from launch.generate import parse

# Every matrix has 128 inputs and outputs or more, of which two devices have whole groups, but for what is named below.
SIZES = {"model_dim": 128, "num_heads": 4, "num_kv_heads": 4, "head_dim": 32, "ffn_dim": 128, "num_layers": 2}
LATENT = LatentShape(kv_rank=32, query_rank=128, nope_dim=32, rope_dim=16, value_dim=32)
KINDS = {
    "dense": {"layer_pattern": ["full+mlp"], "attention_bias": True, "attention_gate": True, "tie_embeddings": False},
    "latent": {"layer_pattern": ["latent+ungated_mlp"], "latent": LATENT},
    "mixture": {
        "layer_pattern": ["full+experts"],
        "experts": ExpertsShape(num=4, top_k=2, ffn_dim=128, shared_dim=128, shared_gate=True),
    },
    # Of two devices each has 96 of the features, which are the inputs of a matrix.
    "uneven": {"layer_pattern": ["full+experts"], "experts": ExpertsShape(num=4, top_k=2, ffn_dim=192)},
    "hybrid": {
        "layer_pattern": ["gated_delta+mlp", "full+mlp"],
        "gated_delta": GatedDeltaShape(num_key_heads=4, num_value_heads=4, key_dim=32, value_dim=32),
    },
}
ATTENTION = {"query": 1, "key": 1, "value": 1, "output": 2}
MLP = {"gate": 1, "up": 1, "down": 1}
EXPERTS = {"experts_gate_up": 1, "experts_down": 1}
# Of each kind: what is packed, with how many dims a product sums over; and what is not.
PACKED = {
    "dense": {**ATTENTION, **MLP, "query_gate": 1},
    "latent": {"query_down": 1, "latent_query": 1, "latent_output": 2, "ungated_up": 1, "ungated_down": 1},
    "mixture": {**ATTENTION, **EXPERTS, "shared_gate": 1, "shared_up": 1, "shared_down": 1},
    "uneven": {**ATTENTION, "experts_gate_up": 1},
    "hybrid": {**ATTENTION, **MLP, "gated_delta_in": 1, "gated_delta_gate": 1, "gated_delta_output": 2},
}
SEVERAL, FEW = "multiplied as a batch of matrices, which has no packed form", "fewer than 128 inputs or outputs"
STAYS = {
    "dense": {},
    "latent": {SEVERAL: ["key_up", "value_up"], FEW: ["latent_down"]},
    "mixture": {},
    "uneven": {"192 inputs over 2 devices do not divide into groups of 64, which share a scale": ["experts_down"]},
    "hybrid": {FEW: ["gated_delta_rates"]},
}
# As kernels.quantize and kernels.dequantize take them.
HOW = {
    "int8": {"mode": "affine", "bits": 8, "group_size": 64},
    "int4": {"mode": "affine", "bits": 4, "group_size": 64},
    "nf4": {"mode": "nf4", "group_size": 64},
    "mxfp4": {"mode": "mxfp4", "group_size": 32},
    "mxfp8": {"mode": "mxfp8", "group_size": 32},
}


def represented(w, sums, form, experts=False):
    """The matrices [L, inputs, outputs], or [L, experts, inputs, outputs], that packed ones stand for."""
    lead = 1 + experts
    flat = w.reshape(*w.shape[:lead], int(np.prod(w.shape[lead : lead + sums])), -1)
    return kernels.dequantize(*kernels.quantize(flat, **HOW[form]), **HOW[form]).reshape(w.shape)


def with_represented(params, kind, form):
    layers = {
        k: represented(w, PACKED[kind][k], form, k in EXPERTS) if k in PACKED[kind] else w
        for k, w in params["layers"].items()
    }
    return {**params, "layers": layers}


@pytest.mark.parametrize(
    ("kind", "form", "axes"),
    [
        ("latent", "nf4", {}),
        pytest.param("mixture", "mxfp4", {}, marks=pytest.mark.slow),
        pytest.param("hybrid", "int8", {}, marks=pytest.mark.slow),  # which packs what "dense" does
        pytest.param("uneven", "int4", {"tp": 2}, marks=pytest.mark.slow),
        pytest.param("dense", "int4", {}, marks=pytest.mark.slow),
        pytest.param("dense", "int4", {"tp": 2}, marks=pytest.mark.slow),
        pytest.param("mixture", "mxfp8", {"ep": 2, "tp": 2}, marks=pytest.mark.slow),
        pytest.param("mixture", "int4", {"ep": 2}, marks=pytest.mark.slow),
        pytest.param("mixture", "int8", {"tp": 2}, marks=pytest.mark.slow),
        pytest.param("mixture", "nf4", {"fsdp": 2}, marks=pytest.mark.slow),
        pytest.param("latent", "int8", {"tp": 2}, marks=pytest.mark.slow),
        pytest.param("hybrid", "int4", {"tp": 2}, marks=pytest.mark.slow),
        pytest.param("dense", "mxfp4", {"fsdp": 2, "tp": 2}, marks=pytest.mark.slow),
        pytest.param("dense", "nf4", {"sp": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_texts_are_those_of_the_numbers_that_are_packed(kind, form, axes):
    """Prompts in chunks and tokens after them; over tp each device has its part of the words. Log-probabilities too."""
    known = Known(**SIZES, **KINDS[kind])
    params, buffers, mesh = known.params, known.buffers, None
    known.params = with_represented(params, kind, form)  # of the full forward
    if axes:
        mesh = make_mesh(**axes)
        params, buffers = (
            placed(x, d, mesh) for x, d in ((params, known.model.declared), (buffers, known.model.buffers))
        )
    sizes = {"slots": 2, "length": 48, "page": 4, "chunk": 8, "cache": "spread" if "sp" in axes else "whole"}
    engine = Engine(known.model, params, buffers=buffers, mesh=mesh, weights=form, **sizes)
    numbers = [engine.submit(ids, max_tokens=4, temperature=0) for ids in prompts([3, 19])]
    results = finish(engine)
    for number in numbers:
        known.check(results[number])
    assert engine.packing.packed.keys() == PACKED[kind].keys()
    stays = {why: [*names] for why, names in engine.packing.stays.items()}
    outside = ["embedding", "final_norm", *["lm_head"] * (kind == "dense")]
    assert stays == STAYS[kind] | {"outside of the layers": outside}
    of_layers = [(k, x) for layer in engine._weights["layers"] for part, _ in layer.values() for k, x in part.items()]
    assert {k for k, x in of_layers if isinstance(x, Packed)} == PACKED[kind].keys()
    # A latent is whole on each device, and over ep all but the experts.
    over = {*EXPERTS} if axes == {"ep": 2} else PACKED[kind].keys() - {"query_down"}
    split = {k for k, x in of_layers if isinstance(x, Packed) and not x.words.sharding.is_fully_replicated}
    assert split == (over if mesh else set())


RECURRENT = {
    "kda": {"kda": KdaShape(num_heads=4, key_dim=32, value_dim=32, rank=128, gate_bias=True)},
    "mamba2": {"mamba2": Mamba2Shape(num_heads=4, head_dim=32, state_dim=32, num_groups=4)},
    "lightning": {"lightning": LightningShape(num_heads=4, head_dim=32)},
    "gla": {"gla": GlaShape(num_heads=4, key_dim=32, value_dim=32, rank=128)},
    "rwkv7": {"rwkv7": Rwkv7Shape(num_heads=4, head_dim=32, decay_rank=128, rate_rank=32, gate_rank=32)},
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", RECURRENT)
def test_texts_of_every_recurrence(kind):
    """Of which all but the rates and narrow ranks are packed."""
    known = Known(**SIZES, layer_pattern=[f"{kind}+mlp"], **RECURRENT[kind])
    engine, params = known.engine(weights="int4"), known.params
    declared, names = known.model.declared["layers"], {*engine.packing.packed}
    assert {name.partition("_")[0] for name in names} == {kind, "gate", "up", "down"}
    assert {*engine.packing.stays} <= {FEW, "outside of the layers"}
    layers = {k: represented(params["layers"][k], len(declared[k].inputs.split()), "int4") for k in names}
    known.params = {**params, "layers": {**params["layers"], **layers}}
    numbers = [engine.submit(ids, max_tokens=4, temperature=0) for ids in prompts([3, 19])]
    results = finish(engine)
    for number in numbers:
        known.check(results[number])


def largest_errors(form):
    """How far the number that a packed one represents may be from that of `MATRIX`: half of its group's largest step."""
    group = HOW[form]["group_size"]
    groups = MATRIX.reshape(-1, group, MATRIX.shape[-1])
    span, top = np.ptp(groups, 1, keepdims=True), np.abs(groups).max(1, keepdims=True)
    power = 2.0 ** np.floor(np.log2(top))
    # Affine: the span in equal steps. nf4: its widest step, from -1 on. MX: the largest numbers of e2m1 are 4 and 6, and what
    # is above is clipped to 6, by less than 2; of e4m3 those from 256 on are 32 apart, and up to 512 all is clipped to 448.
    half = {
        "int8": span / 255 / 2,
        "int4": span / 15 / 2,
        "nf4": top * (1 - 0.6961928) / 2,
        "mxfp4": power / 4 * 2,
        "mxfp8": power / 256 * 64,
    }
    return np.repeat(half[form], group, 1).reshape(MATRIX.shape)


MATRIX = np.random.default_rng(5).standard_normal((128, 192), np.float32)


def unpacked(x):
    """Returns the matrix that a packed one represents, in float32."""
    return np.asarray(kernels.dequantize(x.words, x.scales, x.biases, **FORMATS[x.form]), np.float32).reshape(x.shape)


@pytest.mark.parametrize("form", FORMATS)
def test_products_are_as_near_as_the_steps_of_the_format(form):
    """In float32, of matrices whose dims are heads; the numbers that a packed one represents are those of its products."""
    x = np.random.default_rng(6).standard_normal((2, 3, 4, 32), np.float32)
    (packed,) = packed_rows(jnp.asarray(MATRIX).reshape(1, 4, 32, 192), 2, form, jnp.float32, donate=False)
    product, whole = project(jnp.asarray(x), packed, "btnh,nhd->btd"), unpacked(packed)
    np.testing.assert_allclose(product, np.einsum("btnh,nhd->btd", x, whole), rtol=1e-5, atol=1e-4)
    off = np.abs(product - np.einsum("btk,kf->btf", x.reshape(2, 3, 128), MATRIX))
    assert 0 < off.max() and (off <= np.abs(x).reshape(2, 3, 128) @ largest_errors(form) * 1.01 + 1e-4).all()
    assert packed.words.nbytes * 8 == MATRIX.size * FORMATS[form]["bits"] and packed.form == form


@pytest.mark.slow
def test_log_probabilities_move_by_the_steps_of_the_formats():
    """A step of 8 bits is a 17th of one of 4, and so is what it moves them by."""
    known, most_likely = Known(**SIZES, **KINDS["dense"]), {}
    for form in (None, "int8", "int4"):
        engine = known.engine(weights=form, chunk=48)
        numbers = [engine.submit(ids, max_tokens=1, temperature=0) for ids in prompts([20] * 6)]
        results = finish(engine)
        most_likely[form] = np.array([results[number].log_probabilities[0] for number in numbers])
    eight, four = (np.linalg.norm(most_likely[form] - most_likely[None]) for form in ("int8", "int4"))
    assert 0 < eight < four / 8 and four < np.linalg.norm(most_likely[None]) / 2


@pytest.mark.parametrize(
    ("width", "form", "axes", "stays"),
    [
        (160, "int4", {}, {"160 inputs do not divide into groups of 64, which share a scale": ["down"]}),
        (
            192,
            "nf4",
            {"tp": 2},
            {"192 inputs over 2 devices do not divide into groups of 64, which share a scale": ["down"]},
        ),
        (192, "mxfp4", {"tp": 2}, {}),
    ],
    ids=str,
)
def test_what_has_no_whole_groups_stays(width, form, axes, stays):
    """And is told by name, with its share of the bytes; on two devices no group may cross to the other."""
    model = DecoderConfig(**SIZES | {"ffn_dim": width}, vocab_size=64, layer_pattern=["full+mlp"]).build()
    params = initialise(model.declared, jax.random.key(0))
    params = placed(params, model.declared, make_mesh(**axes)) if axes else params
    packing = model.cached.packing(params, {}, form)
    matrices = {k for k, p in model.declared["layers"].items() if p.inputs}
    assert packing.packed.keys() == matrices - {name for names in stays.values() for name in names}
    assert {why: [*names] for why, names in packing.stays.items() if why != "outside of the layers"} == stays
    total = sum(x.nbytes for x in jax.tree.leaves(params))
    first, *others = packing.lines(total // 4)
    assert (
        first
        == f"weights={form}: {total / 1e6:.2f} MB of weights, as they are stored, become {total // 4 / 1e6:.2f} MB"
    )
    share = params["layers"]["down"].nbytes / total
    expected = [f"  not packed: down, {share:.1%} of the {total / 1e6:.2f} MB: {why}" for why in stays]
    assert others[:-1] == expected and others[-1].startswith("  not packed: embedding, final_norm, ")


def test_stacks_that_are_taken_over_are_freed():
    """What is packed is of the numbers in the compute dtype; norms stay, and without donation the tree too."""
    model = DecoderConfig(**SIZES, vocab_size=64, layer_pattern=["full+mlp"], compute_dtype="bfloat16").build()
    params = initialise(model.declared, jax.random.key(0))
    expected = represented(params["layers"]["output"].astype(jnp.bfloat16), 2, "int4")
    packing = model.cached.packing(params, {}, "int4")
    for donate in (False, True):
        layers = model.cached.apart(params, {}, donate=donate, packing=packing)["layers"]
        for i, layer in enumerate(layers):
            weights = layer["attention"][0]
            assert weights["output"].scales.dtype == jnp.bfloat16 and weights["attention_norm"].dtype == jnp.float32
            np.testing.assert_array_equal(unpacked(weights["output"]), expected[i])
        assert all(x.is_deleted() == donate for x in params["layers"].values())


@pytest.mark.parametrize("form", FORMATS)
def test_packing_needs_room_for_one_matrix(form):
    """In float32, whatever the number of layers; what is left of it is its bits and scales."""
    stack = jax.ShapeDtypeStruct((8, 512, 1024), jnp.bfloat16)
    memory = _packing(stack.shape[1:], 1, form, jnp.bfloat16, None).lower(stack, 0).compile().memory_analysis()
    bits = {"int8": 8.5, "int4": 4.5, "nf4": 4.25, "mxfp4": 4.25, "mxfp8": 8.25}[form]
    assert memory.temp_size_in_bytes <= 4.01 * 512 * 1024
    assert memory.output_size_in_bytes == pytest.approx(512 * 1024 * bits / 8, rel=1e-3)


def test_experts_are_packed_one_at_a_time():
    """Beside a layer's in the compute dtype."""
    E, D, F = 32, 256, 128
    stack = jax.ShapeDtypeStruct((2, E, D, 2, F), jnp.bfloat16)
    memory = _packing(stack.shape[1:], 1, "int4", jnp.bfloat16, None, True).lower(stack, 0).compile().memory_analysis()
    assert memory.temp_size_in_bytes <= (2 * E + 4 * 8) * D * 2 * F  # in float32 a layer's are 4 E
    assert memory.output_size_in_bytes == pytest.approx(E * D * 2 * F * 4.5 / 8, rel=1e-3)


@pytest.mark.parametrize(
    ("activation", "axes"),
    [
        pytest.param("clamped_swiglu", {"ep": 2}, marks=pytest.mark.slow),
        ("gelu", {}),
        pytest.param("clamped_swiglu", {}, marks=pytest.mark.slow),
        pytest.param("gelu", {"ep": 2}, marks=pytest.mark.slow),
        pytest.param("clamped_swiglu", {"fsdp": 2, "tp": 2}, marks=pytest.mark.slow),
        pytest.param("gelu", {"fsdp": 2, "tp": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_mixture_of_packed_experts(activation, axes):
    """With biases, in value and in the gradient of the tokens: as that of the numbers that are packed."""
    rng, E, D, F = np.random.default_rng(7), 4, 128, 128
    arrays = {"gate": (E, D, 2, F), "down": (E, F, D), "gate_bias": (E, 2, F), "down_bias": (E, D), "router": (D, E)}
    arrays = {n: rng.standard_normal(shape, np.float32) / 8 for n, shape in arrays.items()}
    x, d = (rng.standard_normal((2, 8, D), np.float32) for _ in range(2))
    mesh = make_mesh(**axes) if axes else None
    whole, packed = dict(arrays), {n: jnp.asarray(w) for n, w in arrays.items()}
    for name, dims in (("gate", "E D _ F"), ("down", "E F D")):
        stack = jnp.asarray(arrays[name])[None]
        whole[name] = represented(arrays[name][None], 1, "int4", experts=True)[0]
        if mesh is not None:
            where = sharding(mesh, ("_", *dims.split()), PARAMETERS, shape=stack.shape, what=name)
            stack = jax.device_put(stack, where)
        (packed[name],) = packed_rows(stack, 1, "int4", jnp.float32, False, experts=True)

    @partial(jax.jit, static_argnames="mesh")
    def run(x, weights, mesh):
        of = partial(moe, top_k=2, activation=activation, mesh=mesh, stored_weights=mesh is not None)
        out, pull = jax.vjp(lambda x: of(x, **weights)[0], x)
        return out, pull(d)[0]

    for got, want in zip(run(x, packed, mesh), run(x, whole, None), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


def test_experts_that_do_not_fit_are_one_sentence():
    stack = jnp.ones((1, 4, 128, 2, 128))
    (gate,) = packed_rows(stack, 1, "int4", jnp.float32, False, experts=True)
    (matrix,) = packed_rows(stack[:, 0, :, 0], 1, "int4", jnp.float32, False)
    of = partial(moe, jnp.ones((1, 2, 128)), jnp.ones((128, 4)), gate, top_k=2)
    with pytest.raises(ValueError, match="argument 'gate' is packed, and packed experts have gate and up in one"):
        of(up=jnp.ones((4, 128, 128)), down=jnp.ones((4, 128, 128)))
    with pytest.raises(ValueError, match=r"argument 'down' must be \[E, F, D\] = .*, packed as matrices of experts"):
        of(down=matrix)
    with pytest.raises(ValueError, match="argument 'precision' = 'fp8_block' is of matrices that are not packed"):
        of(down=matrix, precision="fp8_block")
    (down,) = packed_rows(stack[:, :, :, 0], 1, "int4", jnp.float32, False, experts=True)
    with pytest.raises(ValueError, match="of matrices that are not packed, and 'down' is; use bf16"):
        moe(jnp.ones((1, 2, 128)), jnp.ones((128, 4)), stack[0], down=down, top_k=2, precision="fp8_block")
    shared = dict.fromkeys(("shared_gate", "shared_up", "shared_down"), matrix)
    with pytest.raises(ValueError, match="argument 'shared_gate' is packed; 'gate' and 'down' may be"):
        of(down=down, **shared)


def test_columns_that_are_in_the_order_of_other_devices_are_refused():
    """Gate and up of each device's features are side by side: over other devices they would be taken for one another."""
    arrays = {"gate": jnp.ones((1, 4, 128, 2, 128)), "down": jnp.ones((1, 4, 128, 128))}
    mesh = make_mesh(tp=2, devices=jax.devices()[:2])
    where = sharding(mesh, ("_", *"E D _ F".split()), PARAMETERS, shape=arrays["gate"].shape, what="gate")
    alone, split = (
        packed_rows(x, 1, "int4", jnp.float32, False, experts=True)[0]
        for x in (arrays["gate"], jax.device_put(arrays["gate"], where))
    )
    assert (alone.parts, split.parts) == (1, 2)
    (down,) = packed_rows(arrays["down"], 1, "int4", jnp.float32, False, experts=True)
    of = partial(moe, jnp.ones((1, 2, 128)), jnp.ones((128, 4)), down=down, top_k=2)
    with pytest.raises(ValueError, match=r"'gate' was packed with its features over 1 device, in .*; here 2 have them"):
        of(gate=alone, mesh=mesh)
    with pytest.raises(ValueError, match=r"'gate' was packed with its features over 2 devices, in .*; here 1 has them"):
        of(gate=split)


def test_what_is_packed_is_not_quantised_again():
    """Beside products of 8 bits that training has, which are those of the others alone."""
    config = DecoderConfig(**SIZES, layer_pattern=["full+mlp"], precision="fp8_row")
    packed, whole = (packed_rows(jnp.ones((1, 128, 128)), 1, "int4", jnp.float32, False)[0], jnp.ones((128, 128)))
    weights = used(PARTS["mlp"], {"gate": packed, "up": whole}, config, jnp.float32)
    assert weights["gate"] is packed and isinstance(weights["up"], Narrow)


@pytest.mark.slow
def test_what_cannot_be_packed_is_one_sentence():
    with pytest.raises(ValueError, match=r"^weights = 'int5' is unknown; use int8, int4, nf4, mxfp4, mxfp8, or null"):
        parse(["run.dir=x", "weights=int5"])
    assert parse(["run.dir=x", "weights=nf4"])[0].packed == "nf4" and parse(["run.dir=x"])[0].packed is None
    small = DecoderConfig(vocab_size=64, model_dim=32, num_heads=4, num_kv_heads=2, head_dim=8, ffn_dim=48).build()
    with pytest.raises(ValueError, match=r"^Engine: argument 'weights' = 'int5' is unknown"):
        Engine(small, {}, weights="int5")
    with pytest.raises(
        ValueError, match=r"'int4' can pack no matrix .* query, key, .*: fewer than 128 inputs or outputs"
    ):
        Engine(small, initialise(small.declared, jax.random.key(0)), weights="int4")
    with pytest.raises(ValueError, match=r"weights = 'int4' .* have adapters .*python -m launch\.export"):
        Known(lora=LoRASection(rank=2)).engine(weights="int4")


def test_products_that_it_was_not_packed_for_are_refused():
    (packed,) = packed_rows(jnp.asarray(MATRIX).reshape(1, 4, 32, 192), 2, "int4", jnp.float32, donate=False)
    with pytest.raises(
        ValueError, match=r"packed for products that sum over its dims N H, .* of x B T D and gives B T N H"
    ):
        project(jnp.ones((1, 2, 192)), packed, "btd,nhd->btnh")
    with pytest.raises(Unsupported, match="triton"):
        project(jnp.ones((1, 2, 4, 32)), packed, "btnh,nhd->btd", platform="triton")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("device", "platform", "kernel"), [("h200", "triton", "triton_kernel_call"), ("v5e", None, "quantized_matmul_fwd")]
)
@pytest.mark.parametrize("form", ["int4", "mxfp8"])
def test_products_over_two_devices_are_kernels(device, platform, kernel, form):
    """Compiled for two, each with its heads' words: no loop unpacks them, and nothing is as large as the matrix."""
    target = target_of("v5e:2x2", None, None, None) if device == "v5e" else target_of(None, 2, device, None)
    mesh = make_mesh(tp=2, devices=target.devices()[:2])
    stack = jax.ShapeDtypeStruct((1, 8, 128, 1024), jnp.bfloat16)
    (weight,) = jax.eval_shape(lambda stack: packed_rows(stack, 2, form, jnp.bfloat16, False), stack)

    def placed(x, dims):
        where = sharding(mesh, dims.split(), ACTIVATIONS, shape=x.shape, what="x")
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)

    weight = jax.tree.map(lambda x: placed(x, "N D"), weight)
    x = placed(jax.ShapeDtypeStruct((8, 1, 8, 128), jnp.bfloat16), "B T N H")
    with target.lowering():
        lowered = jax.jit(partial(project, subscripts="btnh,nhd->btd", mesh=mesh, platform=platform)).lower(x, weight)
    program = lowered.compile()
    assert kernel in lowered.as_text() and not re.search(r" while\(", program.as_text())
    assert program.memory_analysis().temp_size_in_bytes < 4 * 128 * 1024 * 2


@pytest.mark.slow
@pytest.mark.parametrize("form", ["int4", "mxfp4"])
def test_a_mixture_of_packed_experts_is_kernels_on_tpus(form):
    """Compiled for four, experts over two of them: no loop over experts, and no array as large as a device's words."""
    E, D, F, mesh = 16, 1024, 512, make_mesh(ep=2, tp=2, devices=target_of("v5e:2x2", None, None, None).devices())
    shapes = {"gate": (E, D, 2, F), "down": (E, F, D), "router": (D, E)}
    dims = {"gate": "E D F", "down": "E F D", "router": "D E"}

    def placed(x, dims):
        where = sharding(mesh, dims.split(), PARAMETERS, shape=x.shape, what="x")
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)

    weights = {n: jax.ShapeDtypeStruct(s, jnp.bfloat16) for n, s in shapes.items()}
    for name in ("gate", "down"):
        stack = jax.ShapeDtypeStruct((1, *shapes[name]), jnp.bfloat16)
        (weights[name],) = jax.eval_shape(lambda s: packed_rows(s, 1, form, jnp.bfloat16, False, experts=True), stack)
    weights["gate"] = dataclasses.replace(weights["gate"], parts=2)
    weights = {n: jax.tree.map(lambda x, n=n: placed(x, dims[n]), w) for n, w in weights.items()}
    x = placed(jax.ShapeDtypeStruct((4, 2, D), jnp.bfloat16), "B T _")
    run = jax.jit(lambda x, w: moe(x, **w, top_k=2, mesh=mesh, stored_weights=True)[0])
    with target_of("v5e:2x2", None, None, None).lowering():
        lowered = run.lower(x, weights)
    assert lowered.as_text().count("quantized_grouped_matmul_fwd_kernel") >= 2
    assert (
        lowered.compile().memory_analysis().temp_size_in_bytes < E // 2 * D * F // 2
    )  # words of gate and up of a device
