"""Products of a layer in 8 bits: numbers against NumPy, gradients, meshes, kernels, what stays, and what is refused."""

import collections
import dataclasses
import functools
import math
import re
import types

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax._src.interpreters import partial_eval as pe
from kernel_names import names_of_kernels
from small_run import losses

from ejdist import bind_ops, make_mesh
from ejdist.layout import current_layout, sharding
from ejdist.models.decoder import DecoderConfig
from ejdist.models.lora import LoRASection, build
from ejdist.models.parameters import initialise
from ejdist.models.stack import narrow_matrices
from ejdist.models.told import told_of_precision
from ejdist.precision import BF16, PRECISIONS, Narrow, Norm, Normed, check_device
from ejdist.projection import project, project_all, project_mlp
from ejdist.training.loop import train
from kernels import gated_activation, rms_norm
from recipes.schema import compose

RNG = np.random.default_rng(0)
B, T, D, N, H = 2, 100, 256, 4, 64
X, W, D_OUT = (
    RNG.standard_normal(shape).astype(np.float32) * by
    for shape, by in (((B, T, D), 1), ((D, N, H), 1 / 16), ((B, T, N, H), 1e-4))
)
UP, DOWN = "btd,dnh->btnh", "btnh,nhd->btd"


def off(x, wanted):
    x, wanted = (np.asarray(v, np.float64).ravel() for v in (x, wanted))
    return np.linalg.norm(x - wanted) / np.linalg.norm(wanted)


def gradients(x, w, d, precision, mesh=None, subscripts=UP):
    """Returns (product, gradient of x, gradient of w)."""
    matrix = (lambda w: w) if precision == BF16 else functools.partial(Narrow, precision=precision)
    out, pull = jax.vjp(lambda x, w: project(x, matrix(w), subscripts, mesh=mesh), x, w)
    return out, *pull(d)


def rounded(x, rows, width, dtype):
    """Returns x [M, D] rounded to 8 bits by blocks, in float64; zeros make its blocks whole."""
    M, size = x.shape
    rows, width = rows or M, width or size
    whole = np.pad(x, ((0, -M % rows), (0, -size % width))).astype(np.float32)
    parts = whole.reshape(whole.shape[0] // rows, rows, -1, width)
    most = np.float32(ml_dtypes.finfo(dtype).max)
    largest = np.abs(parts).max((1, 3), keepdims=True)
    scale = np.where(largest > 0, largest * np.float32(1 / most), np.float32(1))
    values = np.clip(parts * (np.float32(1) / scale), -most, most).astype(dtype).astype(np.float64) * scale
    return values.reshape(whole.shape)[:M, :size]


@pytest.mark.parametrize("precision", ["fp8_tensor", "fp8_row", "fp8_block"])
def test_each_product_is_of_operands_that_were_quantised_along_its_own_sum(precision):
    fine, wide = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
    a, b = {"fp8_tensor": ((0, 0), (0, 0)), "fp8_row": ((1, 0), (1, 0)), "fp8_block": ((1, 128), (128, 128))}[precision]
    of_gradients = wide if precision == "fp8_tensor" else fine
    x, w, d = X.reshape(-1, D), W.reshape(D, -1), D_OUT.reshape(B * T, -1)
    wanted = (
        rounded(x, *a, fine) @ rounded(w.T, *b, fine).T,
        rounded(d, *a, of_gradients) @ rounded(w, *b, fine).T,
        rounded(x.T, *a, fine) @ rounded(d.T, *b, of_gradients).T,
    )
    got = jax.jit(functools.partial(gradients, precision=precision))(X, W, D_OUT)
    for g, want in zip(got, wanted, strict=True):
        assert off(g, want) < 2e-6


@pytest.mark.parametrize("precision", PRECISIONS)
def test_gradients_are_those_of_the_exact_product_within_rounding_to_8_bits(precision):
    got = jax.jit(functools.partial(gradients, precision=precision))(X, W, D_OUT)
    for g, want in zip(got, gradients(X, W, D_OUT, BF16), strict=True):
        assert 0.01 < off(g, want) < (0.08 if precision == "fp8_tensor" else 0.05)


@pytest.mark.slow  # an MLP over three axes is quick, below
@pytest.mark.parametrize("precision", PRECISIONS)
def test_on_a_mesh_each_device_quantises_what_it_multiplies(precision):
    """A sum that is split over tp, and gradients that the ranks of a batch and of a sequence add up."""
    mesh = make_mesh(fsdp=2, sp=2, tp=2)
    x, w = (RNG.standard_normal(shape).astype(np.float32) for shape in ((4, 64, N, H), (N, H, D)))
    d = RNG.standard_normal((4, 64, D)).astype(np.float32)
    run = functools.partial(gradients, subscripts=DOWN)
    got = jax.jit(functools.partial(run, precision=precision, mesh=mesh))(x, w, d)
    alone = jax.jit(functools.partial(run, precision=precision))(x, w, d)
    exact = run(x, w, d, BF16)
    for g, one, want in zip(got, alone, exact, strict=True):
        assert off(g, want) < 1.25 * off(one, want)
    if precision in ("fp8_block", "mxfp8"):  # blocks of features are the same on one device
        assert off(got[0], alone[0]) < 1e-6 and off(got[1], alone[1]) < 1e-6


def kernels_on_hopper(function, *shapes):
    """Returns how often a program for Hopper has each of its kernels."""
    return collections.Counter(names_of_kernels(function, *(jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in shapes)))


def test_on_hopper_all_three_products_are_of_its_kernel_and_each_operand_is_read_once():
    got = kernels_on_hopper(
        functools.partial(gradients, precision="fp8_block"), (3, 128, 256), (256, 8, 64), (3, 128, 8, 64)
    )
    # x, its cotangent and the matrix once each, for two products.
    assert got == {"warp_specialized_scaled_kernel": 3, "quantize_both_ways_kernel": 3}


def test_products_of_one_x_share_its_operands():
    def both(x, w, v, d):
        run = functools.partial(project_all, subscripts=[UP] * 2)
        out, pull = jax.vjp(lambda x, w, v: run(x, [Narrow(w, "fp8_block"), Narrow(v, "fp8_block")]), x, w, v)
        return out, pull((d, d))

    # x once, each cotangent once, each matrix once.
    assert calls(jax.make_jaxpr(both)(X, W, W, D_OUT).jaxpr, "quantize_both_ways") == 5
    got = jax.jit(both)(X, W, 2 * W, D_OUT)
    alone = [gradients(X, w, D_OUT, "fp8_block") for w in (W, 2 * W)]
    for pair, of in ((got[0], 0), (got[1][1:], 2)):
        for g, one in zip(pair, alone, strict=True):
            assert off(g, one[of]) < 1e-6
    assert off(got[1][0], alone[0][1] + alone[1][1]) < 1e-6


MLP = [RNG.standard_normal(s).astype(np.float32) / 16 for s in ((D, 384), (D, 384), (384, D))]


def mlp_gradients(x, matrices, d, precision, mesh=None, fused=True):
    """Returns (the result of a gated MLP, gradients of x and of its matrices): as one, or one product after the other."""

    def run(x, *matrices):
        gate, up, down = (Narrow(w, precision) for w in matrices)
        if fused:
            return project_mlp(x, gate, up, down, activation="silu", mesh=mesh)
        wide = gated_activation(*project_all(x, [gate, up], ["btd,df->btf"] * 2, mesh=mesh))
        return project(wide, down, "btf,fd->btd", mesh=mesh)

    out, pull = jax.vjp(run, x, *matrices)
    return out, *pull(d)


@pytest.mark.parametrize(
    ("split", "precision"),
    [
        pytest.param(False, "fp8_row", marks=pytest.mark.slow),
        (True, "fp8_block"),
        pytest.param(False, "fp8_block", marks=pytest.mark.slow),
        pytest.param(True, "fp8_row", marks=pytest.mark.slow),
    ],
)
def test_an_mlp_as_one_has_the_numbers_of_its_products_one_by_one(precision, split):
    mesh = make_mesh(fsdp=2, sp=2, tp=2) if split else None
    x, d = (RNG.standard_normal((4, 128, D)).astype(np.float32) for _ in range(2))
    got, want = (
        jax.jit(functools.partial(mlp_gradients, precision=precision, mesh=mesh, fused=fused))(x, MLP, d)
        for fused in (True, False)
    )
    for g, w in zip(got, want, strict=True):
        assert off(g, w) < (1e-6 if not split else 2e-3)


@pytest.mark.parametrize(
    ("precision", "names_of"),
    [
        pytest.param(
            *("fp8_block", ["quantize_both_ways", "activate_both_ways", "activation_cotangents"]),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "fp8_row",
            ["largest_both_ways", "quantize_rows_both_ways", "activate_with_largest", "cotangents_with_largest"],
        ),
    ],
)
def test_what_is_wide_in_an_mlp_is_quantised_where_it_is_computed(precision, names_of):
    def run(x, gate, up, down, d):
        return mlp_gradients(x, (gate, up, down), d, precision)

    shapes = (1, 256, D), (D, 384), (D, 384), (384, D), (1, 256, D)
    jaxpr = jax.make_jaxpr(run)(*(jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in shapes)).jaxpr
    # x, the cotangent of the result, and three matrices.
    names = {"quantize_both_ways": 5, "activate_both_ways": 1, "activation_cotangents": 1, "gated_activation": 0}
    assert {name: calls(jaxpr, name) for name in names} == names
    kernels_of_it = {"warp_specialized_scaled_kernel", *(f"{name}_kernel" for name in names_of)}
    assert kernels_on_hopper(run, *shapes).keys() == kernels_of_it


def normed_gradients(x, weight, matrices, d, precision, mesh=None, fused=True):
    """Returns (products of a norm, gradients of x, of the norm's weight and of the matrices), where the norm is quantised as it
    is computed or after it was written: of two products, or with three matrices of an MLP."""

    def run(x, weight, matrices):
        h = rms_norm(x, weight, eps=0.1)
        h = Normed(h, x, Norm(weight, 0.1)) if fused else h
        narrow = [Narrow(w, precision) for w in matrices]
        if len(narrow) == 3:
            return (project_mlp(h, *narrow, activation="silu", mesh=mesh),)
        return project_all(h, narrow, ["btd,df->btf"] * 2, mesh=mesh)

    out, pull = jax.vjp(run, x, weight, matrices)
    return jax.tree.leaves((out, pull((d,) * len(out))))


@pytest.mark.parametrize(
    ("split", "precision", "count"),
    [
        (True, "fp8_block", 3),
        (False, "fp8_row", 2),
        pytest.param(True, "fp8_row", 2, marks=pytest.mark.slow),
        pytest.param(True, "fp8_block", 2, marks=pytest.mark.slow),
        pytest.param(False, "fp8_row", 3, marks=pytest.mark.slow),
    ],
)
def test_a_norm_that_is_quantised_where_it_is_computed_has_the_numbers_of_one_that_is_written(precision, split, count):
    mesh = make_mesh(fsdp=2, sp=2, tp=2) if split else None
    x, weight = RNG.standard_normal((4, 256, D)) * np.exp2(RNG.integers(-9, 9, (4, 256, 1))), RNG.standard_normal(D)
    d = RNG.standard_normal((4, 256, D if count == 3 else 384)) / 64
    x, weight, d = (y.astype(np.float32) for y in (x, weight, d))
    got, want = (
        jax.jit(functools.partial(normed_gradients, precision=precision, mesh=mesh, fused=fused))(
            x, weight, MLP[:count], d
        )
        for fused in (True, False)
    )
    for g, w in zip(got, want, strict=True):
        assert off(g, w) < 2e-6


def test_on_hopper_no_norm_is_written_that_products_in_8_bits_read_alone():
    shapes = (1, 256, D), (D,), (1, 256, 384)

    def run(x, weight, d, precision="fp8_block"):
        return normed_gradients(x, weight, [jnp.asarray(w, jnp.bfloat16) for w in MLP[:2]], d, precision)

    got = kernels_on_hopper(run, *shapes)
    assert got["norm_fwd_kernel"] == 0 and got["norm_bwd_kernel"] == 1
    # That of the norm, of matrices and of cotangents.
    assert got["quantize_both_ways_kernel"] == 3
    assert kernels_on_hopper(functools.partial(run, precision="fp8_tensor"), *shapes)["norm_fwd_kernel"] == 1


def gathered_bytes(text):
    """Returns the bytes of the results of a program's all-gathers, by dtype."""
    sizes, made = {"u8": 1, "bf16": 2, "f32": 4}, collections.Counter()
    for dtype, dims in re.findall(r"= (\w+?)\[([\d,]*)\]\S* all-gather\(", text):
        made[dtype] += math.prod(map(int, dims.split(","))) * sizes[dtype]
    return made


@pytest.mark.parametrize("fused", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_over_fsdp_matrices_are_gathered_in_8_bits_with_the_numbers_of_the_whole(fused):
    mesh, layout = make_mesh(fsdp=2, devices=jax.devices()[:2]), current_layout()
    x, d = (jnp.asarray(RNG.standard_normal((2, 128, 256)), jnp.float32) for _ in range(2))
    matrices = [RNG.standard_normal(s).astype(np.float32) / 16 for s in ((256, 512), (256, 512), (512, 256))]
    stored = [
        jax.device_put(w, sharding(mesh, dims, layout.parameters, shape=w.shape))
        for w, dims in zip(matrices, ("DF", "DF", "FD"), strict=True)
    ]
    run = functools.partial(mlp_gradients, precision="fp8_block", fused=fused)
    program = jax.jit(functools.partial(run, mesh=mesh)).lower(x, stored, d).compile()
    gathered, numbers = gathered_bytes(program.as_text()), sum(w.size for w in matrices)
    # Once in each direction, or for both: a byte a number, and its scales.
    assert gathered["u8"] in (numbers, 2 * numbers) and gathered["f32"] <= 8 * numbers / 128**2, gathered
    alone = jax.jit(run)(x, matrices, d)
    for g, w in zip(program(x, stored, d)[:2], alone[:2], strict=True):
        assert off(g, w) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("size", [128, 384])
def test_a_matrix_that_is_split_inside_of_a_block_is_gathered_whole(size):
    mesh, layout = make_mesh(fsdp=2, devices=jax.devices()[:2]), current_layout()
    x, d = (jnp.asarray(RNG.standard_normal(s), jnp.float32) for s in ((2, 128, size), (2, 128, N, H)))
    w = RNG.standard_normal((size, N, H)).astype(np.float32) / 16
    stored = jax.device_put(w, sharding(mesh, "DNH", layout.parameters, shape=w.shape))
    program = jax.jit(functools.partial(gradients, precision="fp8_block", mesh=mesh)).lower(x, stored, d).compile()
    assert not gathered_bytes(program.as_text())["u8"]
    for g, want in zip(program(x, stored, d)[:2], gradients(x, w, d, "fp8_block")[:2], strict=True):
        assert off(g, want) < 1e-6


# -- models ------------------------------------------------------------------------------------------------------------

CONFIG = DecoderConfig(
    vocab_size=64, num_layers=2, model_dim=128, num_heads=4, num_kv_heads=2, head_dim=32, ffn_dim=192
)


def loss_of(config, mesh=None, tokens=32):
    """Returns (a function from parameters to the loss of one batch, parameters to begin with). `tokens`: of each row."""
    ops, model = bind_ops(mesh), config.build()
    params = initialise(model.declared, jax.random.key(0))
    rng = np.random.default_rng(1)
    drawn = rng.integers(0, 64, (2, tokens + 1))
    batch = {"tokens": drawn[:, :-1], "targets": drawn[:, 1:]}
    batch |= {"positions": np.broadcast_to(np.arange(tokens), (2, tokens)), "segment_ids": np.zeros((2, tokens))}
    batch = {name: jnp.asarray(x, jnp.int32) for name, x in batch.items()}
    return lambda params: model.loss(params, batch, ops)[0], params


def loss_and_gradients(config):
    step, params = loss_of(config)
    return jax.jit(jax.value_and_grad(step))(params)


@pytest.mark.parametrize("remat", ["attention", pytest.param("none", marks=pytest.mark.slow)])
def test_a_model_in_8_bits_has_about_the_same_loss_and_gradients_and_the_same_parameters(remat):
    config = dataclasses.replace(CONFIG, remat=remat)
    narrow = dataclasses.replace(config, precision="fp8_block", precision_keep=("down",))
    assert narrow.build().declared == config.build().declared
    (want, exact), (got, found) = map(loss_and_gradients, (config, narrow))
    assert want != got and abs(got / want - 1) < 2e-3
    for name, gradient in exact["layers"].items():
        assert off(found["layers"][name], gradient) < 0.15, name


def calls(jaxpr, name):
    """Returns how often a program calls an operation, in its loops and rematerialised parts once."""
    count = 0
    for equation in jaxpr.eqns:
        count += equation.params.get("name") == name
        for inner in jax.tree.leaves(tuple(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            count += calls(inner, name) if hasattr(inner, "eqns") else 0
    return count


def test_a_policy_that_keeps_products_keeps_those_in_8_bits():
    made = {}
    for remat in ("none", "dots", "attention"):
        config = dataclasses.replace(CONFIG, remat=remat, precision="fp8_block")
        step, params = loss_of(config)
        jaxpr = pe.dce_jaxpr(jax.make_jaxpr(jax.grad(step))(params).jaxpr, [True] * len(jax.tree.leaves(params)))[0]
        made[remat] = calls(jaxpr, "scaled_matmul"), calls(jaxpr, "quantize_both_ways")
    assert made["none"] == made["dots"]
    assert made["none"][0] < made["attention"][0] and made["none"][1] < made["attention"][1]


@pytest.mark.parametrize("precision", ["fp8_block", pytest.param("fp8_row", marks=pytest.mark.slow)])
def test_over_fsdp_a_matrix_in_blocks_is_quantised_once_a_step_and_others_are_not_kept_whole(precision):
    mesh = make_mesh(fsdp=2, devices=jax.devices()[:2])
    config = DecoderConfig(
        vocab_size=64, num_layers=1, model_dim=256, num_heads=4, num_kv_heads=4, head_dim=64, ffn_dim=256,
        precision=precision, scan_layers=False,
    )  # fmt: skip
    made = {}
    for remat in ("none", "dots"):
        step, params = loss_of(dataclasses.replace(config, remat=remat), mesh)
        jaxpr = pe.dce_jaxpr(jax.make_jaxpr(jax.grad(step))(params).jaxpr, [True] * len(jax.tree.leaves(params)))[0]
        made[remat] = calls(jaxpr, "quantize_both_ways")
    # Seven matrices: of parts in blocks the bytes are kept, of rows the matrix is gathered again.
    assert made["dots"] - made["none"] == (0 if precision == "fp8_block" else 7)


@pytest.mark.parametrize(
    ("keys", "norms"),
    [
        ({}, 2),
        ({"remat": "none"}, 2),
        ({"precision_keep": ("key",)}, 1),  # which reads the norm itself
        ({"attention_gate": True}, 1),
        ({"precision": "fp8_tensor"}, 0),  # whose scale is of the whole array
    ],
)
def test_a_norm_is_written_where_anything_but_products_in_8_bits_reads_it(keys, norms):
    config = dataclasses.replace(
        CONFIG, num_kv_heads=4, head_dim=64, num_layers=1, scan_layers=False,
        **{"precision": "fp8_block", "remat": "dots"} | keys,
    )  # fmt: skip
    step, params = loss_of(config, tokens=128)
    jaxpr = pe.dce_jaxpr(jax.make_jaxpr(jax.grad(step))(params).jaxpr, [True] * len(jax.tree.leaves(params)))[0]
    # Once each: the backward keeps what it reads of them.
    assert calls(jaxpr, "normalize_both_ways") == calls(jaxpr, "rms_norm_cotangents") == norms


def test_small_matrices_and_those_that_are_named_stay():
    narrow = dataclasses.replace(CONFIG, precision="fp8_row")
    assert narrow_matrices(narrow) == (("query", "output", "gate", "up", "down"), ("key", "value"))
    keep = dataclasses.replace(narrow, precision_keep=("*put", "gate"))
    assert narrow_matrices(keep) == (("query", "up", "down"), ("key", "value", "output", "gate"))
    assert narrow_matrices(CONFIG) == ((), ())


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"precision": "fp8"}, "model.precision = 'fp8' is unknown; use bf16, fp8_tensor, fp8_row"),
        ({"precision_keep": ("down",)}, r"model.precision_keep = \['down'\] names matrices that stay"),
        (
            {"precision": "fp8_row", "precision_keep": ("dwn",)},
            "'dwn', which no matrix of a layer matches; there are query",
        ),
        ({"precision": "fp8_row", "precision_keep": ("*",)}, "no matrix of the layers is left for 8 bits"),
    ],
)
def test_a_key_that_is_wrong_is_refused_by_name(keys, words):
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(CONFIG, **keys).build()


def test_a_run_says_which_matrices_are_in_8_bits_and_which_stay():
    assert told_of_precision(CONFIG) == []
    assert told_of_precision(dataclasses.replace(CONFIG, precision="fp8_row")) == [
        "model.precision = fp8_row: products of query, output, gate, up, down are in 8 bits; key, value stay in float32"
    ]


def test_frozen_matrices_are_refused():
    with pytest.raises(ValueError, match=r"lora.rank = 4: products with frozen matrices"):
        build(dataclasses.replace(CONFIG, precision="fp8_row"), LoRASection(rank=4))


@pytest.mark.parametrize(
    ("device", "capability", "precision", "words"),
    [
        ("NVIDIA A100-SXM4-80GB", "8.0", "fp8_block", "no kernel for its products.* use model.precision=bf16"),
        ("NVIDIA H200", "9.0", "mxfp8", "use bf16 or fp8_tensor, fp8_row, fp8_block"),
        (
            "TPU v5p",
            None,
            "fp8_row",
            "TPU v5p takes longer for its products and their operands than .* use model.precision=bf16",
        ),
        ("TPU7x", None, "fp8_block", "TPU7x takes longer for its products and .* use bf16 or fp8_row$"),
        ("NVIDIA H200", "9.0", "fp8_row", None),
        ("TPU7x", None, "fp8_row", None),
        ("TPU v5p", None, "bf16", None),
    ],
)
def test_a_precision_that_a_device_has_not_is_refused_at_the_start(device, capability, precision, words):
    platform = "tpu" if capability is None else "gpu"
    this = types.SimpleNamespace(platform=platform, device_kind=device)
    if capability:
        this.compute_capability = capability
    if words is None:
        check_device(precision, this)
        return
    with pytest.raises(ValueError, match=words) as caught:
        check_device(precision, this)
    assert re.match(rf"model.precision = {precision}: {device}", str(caught.value))


@pytest.mark.slow
def test_fifty_steps_in_8_bits_have_the_losses_of_bfloat16(tmp_path):
    common = ["recipe=short_context", "model=nano", "run.steps=50", "data.sequence_length=256", "data.global_batch=4"]
    common += ["optimizer.warmup_steps=5", "checkpoint.every=0", "model.compute_dtype=bfloat16", "model.num_layers=2"]
    said, curves = [], {}
    for precision in (BF16, "fp8_block"):
        folder = tmp_path / precision
        train(compose([*common, f"run.dir={folder}", f"model.precision={precision}"]), log=said.append)
        curves[precision] = np.asarray(losses(folder))
    assert any("in 8 bits; key, value stay in bfloat16" in line for line in said)
    assert curves[BF16][-1] < 0.9 * curves[BF16][0]
    np.testing.assert_allclose(curves["fp8_block"][-10:].mean(), curves[BF16][-10:].mean(), rtol=5e-3)
