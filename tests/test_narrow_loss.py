"""Cross entropy with an output projection in 8 bits: numbers against NumPy, gradients, meshes, kernels, what is refused."""

import collections
import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from kernel_names import names_of_kernels
from test_precision import calls, gathered_bytes, off, rounded

from ejdist import bind_ops, make_mesh, narrow_loss
from ejdist.layout import current_layout, set_layout, sharding
from ejdist.mesh import mesh_shape
from ejdist.models.decoder import DecoderConfig
from ejdist.models.parameters import initialise
from ejdist.models.told import told_of_precision
from ejdist.planning.candidates import candidate_of
from ejdist.planning.search import Predictor
from ejdist.planning.targets import target_of
from ejdist.precision import PRECISIONS, Narrow
from ejdist.training.losses import LossTerms, named_loss, trained_model
from recipes.schema import compose

RNG = np.random.default_rng(0)
FINE, WIDE = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
BLOCKS = {"fp8_tensor": ((0, 0), (0, 0)), "fp8_row": ((1, 0), (1, 0)), "fp8_block": ((1, 128), (128, 128))}
D, V, CAP, Z = 128, 300, 3.0, 1e-2


def arrays(batch=2, length=150, width=D, vocabulary=V):
    """Returns (hidden states, a matrix, targets of which every fifth is none)."""
    x = RNG.standard_normal((batch, length, width)).astype(np.float32)
    w = RNG.standard_normal((width, vocabulary)).astype(np.float32) / np.float32(np.sqrt(width))
    targets = RNG.integers(0, vocabulary, (batch, length)).astype(np.int32)
    targets.ravel()[::5] = -1
    return x, w, targets


def losses_of(logits, targets, cap):
    """Returns (cross entropy, squared log-sum-exp, their cotangents of the logits) in float64, by row."""
    bent = logits if cap is None else cap * np.tanh(logits / cap)
    slope = 1 if cap is None else 1 - (bent / cap) ** 2
    lse = np.log(np.exp(bent).sum(1))
    counted, share = targets >= 0, np.exp(bent - lse[:, None])
    at = bent[np.arange(len(bent)), np.maximum(targets, 0)]
    one = np.zeros_like(bent)
    one[np.arange(len(bent)), np.maximum(targets, 0)] = 1
    d_loss, d_z = (share - one) * slope, 2 * lse[:, None] * share * slope
    return (lse - at) * counted, lse**2 * counted, d_loss * counted[:, None], d_z * counted[:, None]


def by_numpy(x, w, targets, precision, *, cap=CAP, z=Z, rows=None, parts=(1, 1)):
    """Returns (cross entropy, z-loss, gradients of x and w) of sums. rows: tokens whose cotangents are quantised together.
    parts: how much of the gradient is of the cross entropy, and of the z-loss."""
    a, b = BLOCKS[precision]
    of_gradients = WIDE if precision == "fp8_tensor" else FINE
    flat, aims = x.reshape(-1, x.shape[-1]), targets.ravel()
    loss = squares = 0.0
    d_x, d_w = [], np.zeros(w.shape)
    for start in range(0, len(flat), rows or len(flat)):
        here = slice(start, start + (rows or len(flat)))
        logits = rounded(flat[here], *a, FINE) @ rounded(w.T, *b, FINE).T
        mine, square, d_loss, d_z = losses_of(logits, aims[here], cap)
        loss, squares = loss + mine.sum(), squares + square.sum()
        d = parts[0] * d_loss + parts[1] * z * d_z
        d_x.append(rounded(d, *a, of_gradients) @ rounded(w, *b, FINE).T)
        d_w += rounded(flat[here].T, *a, FINE) @ rounded(d.T, *b, of_gradients).T
    return loss, z * squares, np.concatenate(d_x).reshape(x.shape), d_w


def sums(x, w, targets, precision, *, mesh=None, weigh=lambda s: s.total, cap=CAP, z=Z):
    """Returns (cross entropy, z-loss, gradients of x and w) by the operation that a model calls."""

    def run(x, w):
        matrix = w if precision is None else Narrow(w, precision)
        made = bind_ops(mesh).fused_loss_sums(x, matrix, targets, z_loss=z, logits_soft_cap=cap)
        return weigh(made), made

    (_, made), gradients = jax.value_and_grad(run, (0, 1), has_aux=True)(x, w)
    return made.loss, made.z_loss, *gradients


def losses(x, w, targets, precision, *, mesh=None, cap=CAP, z=Z):
    """As `sums`, by the losses of each token."""

    def run(x, w):
        made = bind_ops(mesh).fused_token_losses(x, Narrow(w, precision), targets, z_loss=z, logits_soft_cap=cap)
        return made.loss.sum(), made

    (_, made), gradients = jax.value_and_grad(run, (0, 1), has_aux=True)(x, w)
    return (made.loss - made.z_loss).sum(), made.z_loss.sum(), *gradients


def close(got, wanted, most=3e-4):
    for g, want in zip(got, wanted, strict=True):
        assert off(g, want) < most


@pytest.mark.parametrize("function", [sums, losses])
@pytest.mark.parametrize("precision", [pytest.param(p, marks=[pytest.mark.slow] * (p != "fp8_block")) for p in BLOCKS])
def test_all_three_products_are_of_operands_that_were_quantised_along_their_own_sums(function, precision):
    batch = arrays()
    got = jax.jit(functools.partial(function, precision=precision))(*batch)
    close(got, by_numpy(*batch, precision))


@pytest.mark.parametrize("precision", [pytest.param(p, marks=[pytest.mark.slow] * (p == "mxfp8")) for p in PRECISIONS])
def test_gradients_are_those_of_the_exact_product_within_rounding_to_8_bits(precision):
    batch = arrays()
    got = jax.jit(functools.partial(sums, precision=precision))(*batch)
    exact = jax.jit(functools.partial(sums, precision=None))(*batch)
    assert abs(got[0] / exact[0] - 1) < 2e-3
    # The largest magnitude of a cotangent is 1 less the target's share. MX blocks round its scale down, and so clip it to 7/8.
    for g, want in zip(got[2:], exact[2:], strict=True):
        assert 0.01 < off(g, want) < (0.12 if precision in ("fp8_tensor", "mxfp8") else 0.06)


@pytest.mark.slow
def test_rounding_logits_to_bfloat16_is_small_beside_rounding_operands_to_8_bits():
    x, w, targets = arrays(length=512, width=256, vocabulary=512)
    x, w = (jnp.asarray(y, jnp.bfloat16) for y in (x, w))
    wide = x.astype(jnp.float32), w.astype(jnp.float32), targets
    narrow, exact = (jax.jit(functools.partial(sums, precision=p))(*wide) for p in ("fp8_block", None))
    got = jax.jit(functools.partial(sums, precision="fp8_block"))(x, w, targets)
    for g, n, e in zip(got[2:], narrow[2:], exact[2:], strict=True):
        assert off(g, n) < 0.4 * off(n, e)
        assert off(g, e) < 1.05 * off(n, e)


@pytest.mark.parametrize("weigh", ["loss", "z_loss", "both"])
def test_the_gradient_of_each_term_alone_is_its_own(weigh):
    batch = arrays()
    of = {"loss": (1, 0), "z_loss": (0, 1), "both": (3, 2)}[weigh]
    got = jax.jit(functools.partial(sums, precision="fp8_block", weigh=lambda s: of[0] * s.loss + of[1] * s.z_loss))(
        *batch
    )
    close(got, by_numpy(*batch, "fp8_block", parts=of))


@pytest.mark.slow
def test_without_a_z_loss_the_cross_entropy_alone_has_the_gradient_of_the_total():
    batch = arrays()
    for times, weigh in ((1, lambda s: s.loss), (2, lambda s: 3 * s.total - s.loss)):
        got = jax.jit(functools.partial(sums, precision="fp8_block", z=0.0, cap=None, weigh=weigh))(*batch)
        loss, _, *gradients = by_numpy(*batch, "fp8_block", z=0.0, cap=None)
        close((got[0], *got[2:]), (loss, *(times * g for g in gradients)))
        assert got[1] == 0


@pytest.mark.parametrize("precision", ["fp8_block", "fp8_row"])
@pytest.mark.parametrize("vocabulary", [50304, 128256, 151936, 262144])
def test_few_rows_are_no_tokens(vocabulary, precision):
    for tokens in (8192, 12288, 16384, 24576, 32768, 65536):
        rows, together = narrow_loss.sizes(tokens, vocabulary, precision)
        whole = -(-tokens // (rows * together)) * rows * together
        assert tokens <= whole <= 1.07 * tokens, (tokens, rows, together)
        assert (
            rows * vocabulary <= 2.2 * narrow_loss.BLOCK and rows * together * vocabulary <= 1.1 * narrow_loss.WAITING
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "waiting", "rows"), [("fp8_block", 2, 640), ("fp8_block", 1, 896), ("fp8_row", 1, 896)]
)
def test_many_blocks_of_tokens_have_the_numbers_of_one(precision, waiting, rows, monkeypatch):
    """2,500 tokens are 3 blocks, or 4 where cotangents wait for one product by two; the last is not whole."""
    x, w, targets = arrays(batch=1, length=2500, vocabulary=256)
    monkeypatch.setattr(narrow_loss, "BLOCK", 2**17)
    # Of rows none may wait, however many could: a row's scale is of all tokens that a product adds up.
    monkeypatch.setattr(narrow_loss, "WAITING", (2 if precision == "fp8_row" else waiting) * 256 * 1024)
    assert narrow_loss.sizes(2500, 256, precision) == (rows, waiting)
    wanted = by_numpy(x, w, targets, precision, rows=rows if precision == "fp8_row" else None)
    close(jax.jit(functools.partial(sums, precision=precision))(x, w, targets), wanted)
    if waiting == 2:
        close(jax.jit(functools.partial(losses, precision=precision))(x, w, targets), wanted)


@pytest.mark.parametrize(
    ("function", "axes"),
    [
        (sums, {"fsdp": 2, "sp": 2, "tp": 2}),
        pytest.param(losses, {"fsdp": 2, "sp": 2, "tp": 2}, marks=pytest.mark.slow),
        *(pytest.param(f, {"dp": 2, "fsdp": 2}, marks=pytest.mark.slow) for f in (sums, losses)),
    ],
)
def test_on_a_mesh_each_device_quantises_what_it_multiplies(function, axes):
    """The vocabulary is split over tp, and the ranks of a batch and of a sequence add up their gradients. Blocks of 128 tokens
    and of 128 of a vocabulary are the same on one device."""
    batch = arrays(batch=4, length=256, vocabulary=512)
    mesh = make_mesh(**axes, devices=jax.devices()[: int(np.prod([*axes.values()]))])
    got = jax.jit(functools.partial(function, precision="fp8_block", mesh=mesh))(*batch)
    close(got, by_numpy(*batch, "fp8_block"))


@pytest.mark.parametrize(("axis", "count"), [pytest.param("dp", 3, marks=pytest.mark.slow), ("tp", 4)])
def test_a_sum_computes_its_logits_once_unless_the_vocabulary_is_split(axis, count):
    mesh = make_mesh(**{axis: 2}, devices=jax.devices()[:2])
    run = jax.jit(functools.partial(sums, precision="fp8_block", mesh=mesh))
    text = run.lower(*arrays(length=128, vocabulary=512)).as_text()
    assert text.count("call @scaled_matmul") == count


def test_over_fsdp_the_matrix_is_gathered_in_8_bits():
    mesh, layout = make_mesh(fsdp=2, devices=jax.devices()[:2]), current_layout()
    x, w, targets = arrays(length=128, width=256, vocabulary=512)
    stored = jax.device_put(w, sharding(mesh, "DV", layout.parameters, shape=w.shape))
    program = jax.jit(functools.partial(sums, precision="fp8_block", mesh=mesh)).lower(x, stored, targets).compile()
    gathered = gathered_bytes(program.as_text())
    assert gathered["u8"] == w.size and gathered["f32"] <= 8 * w.size / 128**2, gathered
    close(program(x, stored, targets), by_numpy(x, w, targets, "fp8_block"))


def on_hopper(function, *shapes):
    """Returns how often a program for Hopper has each of its kernels."""
    dtypes = jnp.bfloat16, jnp.bfloat16, jnp.int32
    like = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
    return collections.Counter(names_of_kernels(function, *like))


@pytest.mark.slow
def test_on_hopper_all_products_are_of_its_kernel_and_logits_of_two_passes():
    got = on_hopper(functools.partial(sums, precision="fp8_block"), (3, 128, 256), (256, 512), (3, 128))
    # The matrix and the tokens once, and the cotangents of logits.
    assert got == {
        "warp_specialized_scaled_kernel": 3,
        "quantize_both_ways_kernel": 3,
        "cross_entropy_fwd_kernel": 1,
        "cross_entropy_bwd_kernel": 1,
    }


# -- models ------------------------------------------------------------------------------------------------------------

CONFIG = DecoderConfig(
    vocab_size=256, num_layers=1, model_dim=128, num_heads=4, num_kv_heads=4, head_dim=32, ffn_dim=128,
    precision="fp8_block",
)  # fmt: skip


def loss_and_gradients(config, mesh=None):
    model, ops = config.build(), bind_ops(mesh)
    params = initialise(model.declared, jax.random.key(0))
    tokens = np.random.default_rng(1).integers(0, 256, (4, 65))
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "positions": np.tile(np.arange(64), (4, 1))}
    batch = {name: jnp.asarray(x, jnp.int32) for name, x in (batch | {"segment_ids": 0 * tokens[:, 1:]}).items()}
    step = jax.value_and_grad(lambda params: model.loss(params, batch, ops, z_loss=1e-4)[0])
    each = jax.jit(functools.partial(model.token_losses, ops=ops))(params, batch)
    return jax.jit(step)(params), each, calls(jax.make_jaxpr(step)(params).jaxpr, "scaled_matmul")


def products():
    """Returns how often a program names an operation that it has three times: the products of a loss."""
    run = functools.partial(sums, precision="fp8_block")
    return calls(jax.make_jaxpr(run)(*arrays()).jaxpr, "scaled_matmul")


# The gradient of a matrix of its own is held to one device's over tp.
@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_a_model_multiplies_its_output_projection_in_8_bits_by_choice(tied):
    config = dataclasses.replace(CONFIG, tie_embeddings=tied)
    narrow = dataclasses.replace(config, precision_head=True)
    assert narrow.build().declared == config.build().declared
    ((want, exact), each, before), ((got, found), mine, after) = map(loss_and_gradients, (config, narrow))
    assert after == before + products() > before
    assert want != got and abs(got / want - 1) < 2e-3
    assert 0 < off(mine, each) < 1e-2
    name = "embedding" if tied else "lm_head"
    assert 1e-3 < off(found[name], exact[name]) < 0.1


@pytest.mark.slow
def test_multi_token_prediction_multiplies_with_it_too():
    config = dataclasses.replace(CONFIG, precision_head=True, mtp=dataclasses.replace(CONFIG.mtp, modules=1))
    exact = dataclasses.replace(config, precision_head=False)
    (((want, _), _, before), ((got, _), _, after)) = map(loss_and_gradients, (exact, config))
    assert after == before + 2 * products() and abs(got / want - 1) < 2e-3


@pytest.mark.slow
def test_over_tp_a_model_has_the_loss_of_one_device():
    """Of sizes that keep the blocks of layers as they are on one device."""
    wide = {"num_heads": 4, "num_kv_heads": 4, "head_dim": 64, "ffn_dim": 256}
    config = dataclasses.replace(CONFIG, precision_head=True, tie_embeddings=False, **wide)
    alone, split = (loss_and_gradients(config, mesh)[0] for mesh in (None, make_mesh(tp=2, devices=jax.devices()[:2])))
    assert abs(split[0] / alone[0] - 1) < 1e-5
    assert off(split[1]["lm_head"], alone[1]["lm_head"]) < 2e-2


def test_a_loss_of_your_own_is_refused_with_it():
    def own(trained, batch):
        return LossTerms(jnp.float32(0), jnp.float32(1), {})

    sections = compose(["recipe=short_context", "model=nano", "model.precision=fp8_block", "model.precision_head=true"])
    with named_loss(own) as name:
        sections.loss = name
        with pytest.raises(ValueError, match=r"model.precision_head = true and loss = .*own.*; use loss=cross_entropy"):
            trained_model(sections)


def test_a_plan_holds_what_a_loss_makes_in_8_bits():
    """At the height of a program with one layer."""
    words = "recipe=long_context model=8b model.num_layers=1 mesh=single data.sequence_length=8192 data.global_batch=2 "
    sections = compose(f"{words} model.precision=fp8_block model.precision_head=true".split())
    candidate = candidate_of(sections, mesh_shape(sections.mesh.sizes, 1))
    memory = Predictor(sections, target_of(None, 1, "h200", None)).checked(candidate).memory
    # Logits of 2,048 tokens and their cotangents in 16 bits, two operands of these in 8, and one of 16,384 tokens that waits.
    # The matrix in 8 bits both ways and its gradient in 16 are as large as a gradient in 32.
    assert memory.moment == "the loss"
    assert memory.classes["logits"] == 128256 * (2048 * (2 + 2 + 2) + 16384)
    assert (
        narrow_loss.bytes_at_work(32768, 4096, 128256, "fp8_block", 2) == memory.classes["logits"] + 4 * 4096 * 128256
    )


def test_a_run_says_that_losses_multiply_in_8_bits():
    (line,) = told_of_precision(dataclasses.replace(CONFIG, precision_head=True))
    assert "gate, up, down, and of losses with the output projection, are in 8 bits" in line


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (
            {"precision": "bf16"},
            "model.precision_head = true has losses multiply .* give model.precision, one of fp8_tensor",
        ),
        ({"vocab_size": 100}, "the output projection is 128 by 100, and of fewer than 128"),
    ],
)
def test_what_cannot_be_is_refused_by_name(keys, words):
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(CONFIG, precision_head=True, **keys).build()


@pytest.mark.parametrize("name", ["fused_loss_sums", "fused_token_losses"])
@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"targets": (2, 4)}, r"{name}: argument 'targets' must have shape \(2, 8\), got \(2, 4\)"),
        ({"targets": (8, 2)}, r"{name}: argument 'targets' must have shape \(2, 8\), got \(8, 2\)"),
        (
            {"matrix": (300, 128)},
            r"{name}: argument 'lm_head' must have shape \(128,\) and the vocabulary, got \(300,\)",
        ),
    ],
)
def test_shapes_that_do_not_fit_are_refused_by_name(name, shapes, message):
    shapes = {"hidden": (2, 8, 128), "matrix": (128, 300), "targets": (2, 8)} | shapes
    head = Narrow(jnp.ones(shapes["matrix"]), "fp8_block")
    with pytest.raises(ValueError, match=message.format(name=name)):
        getattr(bind_ops(None), name)(jnp.ones(shapes["hidden"]), head, jnp.zeros(shapes["targets"], jnp.int32))


def test_a_layout_that_splits_the_width_is_refused():
    x, w, targets = arrays(length=8)
    with (
        set_layout(B="dp", V="tp", D="tp", E=(), T=()),
        pytest.raises(
            ValueError, match="'hidden' has dim D split over tp, but this operation needs it whole; gather it first"
        ),
    ):
        bind_ops(make_mesh(dp=2, tp=2, devices=jax.devices()[:4])).fused_loss_sums(x, Narrow(w, "fp8_block"), targets)
