"""Mixtures of experts and latent attention in the decoder: steps of published styles against NumPy, and their sizes.

A gradient is checked by differences of the loss of `decoder_loop`, along a random direction of each parameter.
"""

import dataclasses
import functools
import inspect
import itertools
import math

import decoder_loop
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ejdist
from ejdist.experts import Stats
from ejdist.mesh import make_mesh
from ejdist.models.config import ExpertsShape, LatentShape
from ejdist.models.decoder import DecoderConfig, declare, flops, loss
from ejdist.models.model import StepContext
from ejdist.models.parameters import Param, initialise, num_parameters
from ejdist.models.recurrent_shapes import KdaShape, Mamba2Shape
from ejdist.operations import bind_ops
from ejdist.training.program import make_program
from ejdist.training.step import init_state, make_train_step
from recipes.schema import compose, keys_of

OPS = bind_ops(None)
B, T, E = 4, 12, 4
BASE = DecoderConfig(
    vocab_size=37, num_layers=3, model_dim=16, num_heads=4, num_kv_heads=2, head_dim=8, ffn_dim=24, init_std=0.3,
    tie_embeddings=False, layer_pattern=("experts",),
    experts=ExpertsShape(num=E, top_k=2, ffn_dim=10, balance_loss=0.3, z_loss=0.05),
)  # fmt: skip


def style(experts, **options):
    return dataclasses.replace(BASE, **options, experts=dataclasses.replace(BASE.experts, **experts))


LATENT = LatentShape(kv_rank=10, query_rank=9, nope_dim=6, rope_dim=4, value_dim=5)
YARN = {"rope_scaling": "yarn", "rope_factor": 8.0, "rope_original_length": 16}
STYLES = {
    "mixtral": style({}, num_layers=2),
    "qwen3": style({"top_k": 3, "balance": "global"}, num_layers=2, qk_norm=True),
    "deepseek": style(
        {"num": 8, "top_k": 3, "score": "sigmoid", "scaling_factor": 2.5, "num_groups": 4, "topk_groups": 2,
         "shared_dim": 7, "bias_rate": 0.25, "balance": "sequence"},
        first_layers=("latent",), layer_pattern=("latent_experts",), latent=LATENT, attention_scale=0.4, **YARN,
        rope_attention_factor=1.0,
    ),
    "gpt_oss": style(
        {"activation": "clamped_swiglu", "bias": True, "router_bias": True},
        num_layers=2, layer_pattern=("window_experts", "experts"), sliding_window=4, attention_bias=True,
        attention_output_bias=True, attention_sinks=True, rope_truncate=False, **YARN,
    ),
    # What the others leave out: layers of experts among dense ones, a shared expert with a gate, both buffers,
    # groups as good as the best of them; attention with a gate, whose heads RoPE turns in part; norms less 1.
    "mixed": style(
        {"shared_dim": 7, "shared_gate": True, "score": "sqrtsoftplus", "normalize": False, "balance": "global",
         "bias_rate": 0.25, "num_groups": 2, "topk_groups": 1, "group_top": 1},
        num_layers=4, first_layers=("experts",), layer_pattern=("full", "latent_experts"), qk_norm=True,
        latent=dataclasses.replace(LATENT, query_rank=0), attention_gate=True, rotary_dim=4,
        zero_centered_norms=True,
    ),
    # Latent attention without RoPE, positions from a recurrence, and a last layer that is not what the pattern goes on with.
    "kimi": style(
        {"num": 8, "top_k": 3, "score": "sigmoid", "scaling_factor": 2.5, "shared_dim": 7, "bias_rate": 0.25},
        num_layers=2, layer_pattern=("latent+experts",), last_layers=("kda+none",), kda=KdaShape(2, 3, 5, 3, 2),
        latent=dataclasses.replace(LATENT, query_rank=0, rope=False, norm_eps=0.25),
    ),
    # Layers of one part: Mamba-2, an MLP without a gate, attention without RoPE.
    "nemotron": style(
        {"activation": "silu"}, num_layers=4, layer_pattern=("mamba2+none", "none+ungated_mlp", "full+none"),
        last_layers=("none+experts",), activation="relu2", attention_rope=False, mamba2=Mamba2Shape(4, 3, 5, 2, 3),
    ),
}  # fmt: skip


def batch_of(c):
    """Returns packed rows; what they count, and how much of that is padding, is another number in each."""
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, c.vocab_size, (B, T))
    segments, positions, targets = np.full((3, B, T), -1)
    for b, edges in enumerate(((0, 5, 12), (0, 3, 4, 10), (0, 12), (0, 6, 11))):
        for k, (start, end) in enumerate(itertools.pairwise(edges)):
            segments[b, start:end], positions[b, start:end] = k, np.arange(end - start)
            targets[b, start : end - 1] = tokens[b, start + 1 : end]
    return {"tokens": tokens, "targets": targets, "positions": np.maximum(positions, 0), "segment_ids": segments}


def state_of(c):
    """Returns parameters and buffers as float64, none of them at zero or one."""
    model, rng = c.build(), np.random.default_rng(2)
    params = jax.tree.map(lambda w: np.asarray(w, np.float64), initialise(model.declared, jax.random.key(0)))
    params["layers"] = {k: v + 0.1 * rng.standard_normal(v.shape) for k, v in params["layers"].items()}
    at_start = initialise(model.buffers, jax.random.key(0))
    return params, jax.tree.map(lambda b: np.asarray(b + 0.3 * rng.random(b.shape), np.float64), at_start)


# -- steps ---------------------------------------------------------------------------------------------------------------

# Keeps the gradient, and changes no parameter.
KEPT = optax.GradientTransformation(lambda p: p, lambda g, _, p: (jax.tree.map(jnp.zeros_like, p), g))
# A bias that moves, losses of sequences, a shared expert, groups of experts and latent attention.
QUICK = [("deepseek", "attention", 1)]
OTHERS = [case for case in itertools.product(STYLES, ("none", "attention", "full"), (1, 2)) if case not in QUICK]


def step_of(c, accumulation):
    total = functools.partial(loss, c=c, ops=OPS)
    return jax.jit(
        make_train_step(total, KEPT, accumulation=accumulation, update=c.build().update, report=c.build().report)
    )


@pytest.mark.parametrize(
    ("name", "remat", "accumulation"), [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in OTHERS)]
)
def test_a_step_against_numpy(name, remat, accumulation):
    """Losses, statistics, buffers and the gradient of every parameter, whatever is computed again and in however many
    microbatches: the losses of the layers are counted once, and a bias moves once, by the counts of all microbatches."""
    c = dataclasses.replace(STYLES[name], remat=remat)
    (params, buffers), batch = state_of(c), batch_of(c)
    narrow = functools.partial(jax.tree.map, lambda x: jnp.asarray(np.asarray(x, np.float32)))
    arrays = {k: jnp.asarray(v, jnp.int32) for k, v in batch.items()}
    state, metrics = step_of(c, accumulation)(init_state(narrow(params), KEPT, narrow(buffers)), arrays)
    wanted = decoder_loop.step(params, buffers, batch, c, accumulation)
    assert float(metrics["loss"]) == pytest.approx(wanted["loss"], rel=1e-5)
    for key in ("balance_loss", "z_loss", "entropy", "auxiliary_loss"):
        np.testing.assert_allclose(metrics[f"experts/{key}"], wanted[key], rtol=2e-5, err_msg=key)
    counts = wanted["counts"]
    np.testing.assert_array_equal(metrics["experts/counts"], counts)
    np.testing.assert_allclose(metrics["experts/max_violation"], counts.max(1) / counts.mean(1) - 1, rtol=1e-5)
    np.testing.assert_array_equal(metrics["experts/dead_experts"], np.sum(counts == 0, 1))
    assert not np.any(metrics["experts/dropped"]) and "experts.counts" not in metrics
    moved = {"load": counts}
    if c.experts.bias_rate:
        moved["bias"] = buffers["experts"]["bias"] + c.experts.bias_rate * np.sign(
            counts.mean(1, keepdims=True) - counts
        )
    for key, found in state.buffers.get("experts", {}).items():
        np.testing.assert_allclose(found, moved[key], rtol=1e-6, err_msg=key)
    check_gradient(state.opt_state, params, lambda p: decoder_loop.step(p, buffers, batch, c, accumulation))


def check_gradient(gradient, params, numbers):
    """Compares with differences of the loss, along a random direction of each parameter."""
    rng, eps = np.random.default_rng(3), 1e-5
    leaves, tree = jax.tree_util.tree_flatten_with_path(params)

    def total(i, x):
        found = numbers(jax.tree.unflatten(tree, [x if i == j else w for j, (_, w) in enumerate(leaves)]))
        return found["loss"] + found["auxiliary_loss"]

    for i, ((path, w), g) in enumerate(zip(leaves, jax.tree.leaves(gradient), strict=True)):
        along = rng.standard_normal(w.shape)
        slope = (total(i, w + eps * along) - total(i, w - eps * along)) / (2 * eps)
        size = np.linalg.norm(g)
        assert abs(np.sum(np.asarray(g) * along) - slope) < 1e-4 * size, (
            path,
            np.sum(np.asarray(g) * along),
            slope,
            size,
        )
        rows = np.abs(np.asarray(g)).reshape(len(g) if path[0].key == "layers" else 1, -1)
        assert (rows.max(axis=1) > 1e-7).all(), path


def drawing(x, *_, key, **__):
    """Stands for `moe`: multiplies by what it draws, and tells it as its z-loss."""
    draw, none = jax.random.uniform(key, x.shape), jnp.zeros(())
    stats = Stats(jnp.int32(1), jnp.zeros(E, jnp.int32), jnp.zeros(E), none, draw.sum(), none, none, jnp.int32(0), none)
    return x * draw, stats


@pytest.mark.slow
def test_noise_differs_by_layer_microbatch_and_step_and_is_the_same_when_it_is_computed_again():
    c = style({"jitter": 0.2}, first_layers=("experts",))
    params, batch = initialise(declare(c), jax.random.key(0)), {k: jnp.asarray(v) for k, v in batch_of(c).items()}
    ops = OPS.replace(moe=drawing, attention=lambda query, *_, **__: query)

    def run(remat):
        config = dataclasses.replace(c, remat=remat)

        @jax.jit
        def one(step, microbatch):
            context = StepContext(step, microbatch, {})
            total = functools.partial(loss, batch=batch, c=config, ops=ops, context=context)
            gradient, metrics = jax.grad(total, has_aux=True)(params)
            return gradient, metrics["experts/z_loss"].value

        return [one(*at) for at in itertools.product(range(2), range(2))]

    kept, again = run("none"), run("full")
    draws = np.concatenate([numbers for _, numbers in kept])
    assert len(set(draws.tolist())) == len(draws) == 4 * c.num_layers
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=1e-6), kept, again)


@pytest.mark.slow
def test_noise_of_the_router_is_the_same_when_it_is_computed_again():
    found = []
    for remat in ("none", "full"):
        c = dataclasses.replace(style({"jitter": 0.3}), remat=remat)
        params, batch = initialise(declare(c), jax.random.key(0)), {k: jnp.asarray(v) for k, v in batch_of(c).items()}
        found.append(step_of(c, 2)(init_state(params, KEPT), batch))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=1e-6), *found)
    still = step_of(style({}), 2)(init_state(params, KEPT), batch)[1]
    assert abs(float(still["loss"] - found[0][1]["loss"])) > 1e-5, "the noise is seen"


# -- shapes, FLOPs, configurations ----------------------------------------------------------------------------------------

PUBLISHED = {  # numbers in the checkpoints
    "mixtral_8x7b": 46_702_792_704,
    "qwen3_30b_a3b": 30_532_122_624,
    "qwen3_235b_a22b": 235_093_634_560,
    "deepseek_v3": 671_026_419_200,  # without the module that predicts a second token
    "gpt_oss_20b": 20_914_757_184,
    "kimi_linear_48b_a3b": 49_122_681_728,
    "nemotron_h_8b": 8_100_852_736,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_sizes_of_published_models(name):
    model = compose([f"model={name}"]).model.build()
    balances = "bias" in model.buffers.get("experts", {})  # checkpoints have the bias beside the parameters
    found = num_parameters(model.declared) + (num_parameters(model.buffers["experts"]["bias"]) if balances else 0)
    assert found == PUBLISHED[name]


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_matrix_of_a_published_model_is_split_by_fsdp(name):
    sections = compose([f"model={name}", "mesh.fsdp=8", "mesh.sp=1", "data.global_batch=8", "data.sequence_length=512"])
    program = make_program(sections, make_mesh(**vars(sections.mesh)))
    params = jax.tree.leaves(program.state.params)
    declared = jax.tree.leaves(program.model.declared, is_leaf=lambda p: isinstance(p, Param))
    for at, p in zip(params, declared, strict=True):
        taps = p.dims.endswith(" _")  # of a convolution, a few for each channel: no matrix
        assert p.init != "normal" or taps or at.sharding.shard_shape(at.shape) != at.shape, p


def test_as_many_weights_multiply_a_token_of_moe_nano_as_of_nano():
    nano, mixed = (compose([f"model={name}"]).model for name in ("nano", "moe_nano"))
    routers = 2 * mixed.num_layers * mixed.model_dim * mixed.experts.num
    assert sum(f.token for f in flops(mixed)) == sum(f.token for f in flops(nano)) + routers
    assert [f.pair for f in flops(mixed)] == [f.pair for f in flops(nano)]


def test_flops_of_a_token_and_of_a_pair():
    """Counted matrix by matrix: [16, 4 heads of 8] and so on; norms, biases and lookups are none."""
    plain = 2 * (16 * 4 * 8 + 2 * 16 * 2 * 8 + 4 * 8 * 16), 4 * (2 * 8 + 2 * 8)
    latent = 2 * (16 * 9 + 9 * 4 * 10 + 16 * 14 + 10 * 4 * 6 + 10 * 4 * 5 + 4 * 5 * 16), 4 * (2 * 10 + 2 * 5)
    head, two = 2 * 16 * 37, 2 * (16 * 4 + 2 * 3 * 16 * 10)
    wanted = {
        "mixtral": [plain, two] * 2,
        "qwen3": [plain, 2 * (16 * 4 + 3 * 3 * 16 * 10)] * 2,
        "deepseek": [latent, 2 * 3 * 16 * 24, *[latent, 2 * (16 * 8 + 3 * 3 * 16 * 10 + 3 * 16 * 7)] * 2],
        "gpt_oss": [(*plain, (3, 0)), two, plain, two],
        "nemotron": [
            2 * (16 * (2 * 4 * 3 + 2 * 2 * 5 + 4 + 4 * 3) + 3 * (4 * 3 + 2 * 2 * 5) + 2 * 4 * 3 * 5),
            2 * 2 * 16 * 24,
            plain,
            two,
        ],
    }
    for name, parts_of_it in wanted.items():
        found = [(f.token, f.pair, f.mask.window) for f in flops(STYLES[name])]
        each = [(p, 0, None) if isinstance(p, int) else (*p, None)[:3] for p in [*parts_of_it, head]]
        assert found == each, name
    _, gated, *_ = flops(STYLES["mixed"])
    assert gated.token == 2 * (16 * 4 + 2 * 3 * 16 * 10 + 3 * 16 * 7 + 16)


# What `route` takes that `moe` says, which knows where experts lie; that a step makes, and no recipe says; what a recipe says
# by another name, or makes an array for.
OF_THE_PLACE = {"axis_name", "ranks", "max_ranks"}
OF_THE_STEP = {"segment_ids", "key", "load", *OF_THE_PLACE}
KEYS = {"routed_scaling_factor": "scaling_factor", "bias": "bias_rate"}
# name -> a value that is not the default, and is of a recipe.
SAID = {
    "top_k": 3, "score": "sigmoid", "normalize": False, "bias_rate": 0.5, "router_bias": True, "num_groups": 2,
    "topk_groups": 1, "group_top": 1, "scaling_factor": 3.0, "balance": "sequence", "jitter": 0.25, "forced_balance": True,
}  # fmt: skip


def test_every_option_of_the_router_is_a_key_of_a_recipe_and_reaches_it():
    options = {
        n: p for n, p in inspect.signature(ejdist.route).parameters.items() if p.kind is inspect.Parameter.KEYWORD_ONLY
    }
    keys = {n: KEYS.get(n, n) for n in options if n not in OF_THE_STEP}
    assert set(keys.values()) == set(SAID)
    assert {f"model.experts.{key}" for key in SAID} <= set(keys_of())
    for key, value in SAID.items():
        shape = {"num": 8, "ffn_dim": 10, "top_k": 2, "num_groups": 4, "topk_groups": 2} | {key: value}
        given = given_to_moe(dataclasses.replace(BASE, experts=ExpertsShape(**shape)))
        assert set(given) >= set(options) - OF_THE_PLACE
        (option,) = (n for n, k in keys.items() if k == key)
        if key in ("bias_rate", "router_bias"):  # there is such an array
            assert given[option].shape == (8,)
        else:
            assert given[option] == value, key


def given_to_moe(c):
    """Returns what a layer of experts says to `ejdist.moe`, by name."""
    given = {}

    def moe(x, *weights, **more):
        given.update(more)
        return x, Stats(*(jnp.zeros(c.experts.num if n == "counts" else ()) for n in Stats._fields))

    ops = OPS.replace(moe=moe)
    params, buffers = (initialise(d, jax.random.key(0)) for d in (c.build().declared, c.build().buffers))
    jax.eval_shape(lambda p, b: loss(p, batch_of(c), c, ops, context=StepContext(0, 0, b)), params, buffers)
    return given


@pytest.mark.parametrize(
    ("name", "experts", "options", "words"),
    [
        ("mixtral", {"num": 0}, {}, "model.experts.num must be positive"),
        ("mixtral", {"top_k": 5}, {}, "model.experts.top_k = 5 is more than model.experts.num = 4"),
        ("mixtral", {"ffn_dim": 0}, {}, "model.experts.ffn_dim must be positive"),
        ("mixtral", {"score": "tanh"}, {}, "model.experts.score = 'tanh' is unknown; use one of softmax, sigmoid"),
        ("mixtral", {"balance": "all"}, {}, "model.experts.balance = 'all' is unknown; use one of batch, sequence, global"),
        ("mixtral", {"activation": "swish"}, {}, "model.experts.activation = 'swish' is unknown; use one of null, silu"),
        ("mixtral", {"balance_loss": -1.0}, {}, "model.experts.balance_loss must be 0 or positive"),
        ("mixtral", {"z_loss": math.inf}, {}, "model.experts.z_loss must be 0 or positive"),
        ("mixtral", {"scaling_factor": 0.0}, {}, "model.experts.scaling_factor must be positive"),
        ("mixtral", {"jitter": 1.0}, {}, r"model.experts.jitter must be in \[0, 1\)"),
        ("mixtral", {"shared_gate": True}, {}, "no model.experts.shared_gate"),
        ("mixtral", {"num_groups": 3}, {}, "model.experts.num_groups = 3 must divide model.experts.num = 4"),
        ("deepseek", {"num_groups": 8, "topk_groups": 3}, {}, "model.experts.group_top = 2 must be at least 1 and at most 1"),
        ("deepseek", {"group_top": 0}, {}, "model.experts.group_top = 0 must be at least 1"),
        ("mixtral", {"group_top": 1}, {}, "model.experts.group_top = 1: give model.experts.num_groups"),
        ("mixtral", {"topk_groups": 2}, {}, "model.experts.topk_groups = 2: give model.experts.num_groups"),
        ("deepseek", {"topk_groups": None}, {}, "num_groups = 4 needs model.experts.topk_groups.*at most 4, got null"),
        ("deepseek", {"topk_groups": 5}, {}, "topk_groups, how many of them, at least 1 and at most 4, got 5"),
        ("deepseek", {"topk_groups": 1}, {}, "top_k = 3 is more than the 2 experts of model.experts.topk_groups = 1"),
        ("deepseek", {"forced_balance": True}, {}, "set bias_rate to 0"),
        ("deepseek", {"activation": "clamped_swiglu"}, {}, "not support shared experts; set model.experts.shared_dim to 0"),
        ("deepseek", {}, {"attention_sinks": True}, "model.attention_sinks applies to plain attention"),
        ("deepseek", {}, {"rotary_dim": 4}, "model.rotary_dim applies to plain attention"),
        ("qwen3", {}, {"rotary_dim": 5}, "model.rotary_dim = 5 must be even, positive and at most model.head_dim"),
        ("deepseek", {}, {"latent": LatentShape()}, "model.latent.kv_rank must be positive"),
        ("deepseek", {}, {"latent": dataclasses.replace(LATENT, rope_dim=3)}, "model.latent.rope_dim = 3 must be even"),
        ("deepseek", {}, {"latent": dataclasses.replace(LATENT, norm_eps=0.0)}, "model.latent.norm_eps must be positive"),
        ("deepseek", {}, {"latent": dataclasses.replace(LATENT, rope=False)}, "rope_scaling = 'yarn' is RoPE's, and with"),
        ("nemotron", {}, {"rope_base": 5e5}, "model.rope_base = 500000.0 is RoPE's, and with model.attention_rope = false no"),
        ("nemotron", {}, {"rotary_dim": 4}, "model.rotary_dim = 4 is RoPE's, and model.attention_rope = false"),
        ("nemotron", {"activation": None}, {}, "and experts has one: give model.experts.activation, or put ungated_mlp in"),
        ("nemotron", {}, {"activation": "relu3"}, "model.activation = 'relu3' is unknown; use one of silu, .* relu, relu2"),
        ("nemotron", {}, {"num_layers": 5, "last_layers": ("none+experts", "none+mlp")}, "without a gate, and mlp has one"),
        ("deepseek", {}, {"attention_rope": False}, "model.attention_rope applies to plain attention"),
        ("deepseek", {}, {"num_layers": 1}, "the 1 layers of model.first_layers"),
        ("deepseek", {}, {"last_layers": ("latent", "latent")}, "1 of model.layer_pattern and the 2 of model.last_layers"),
        ("deepseek", {}, {"first_layers": ("dense",)}, "model.first_layers = .'dense'.: 'dense' is not MIXER.FEED_FORWARD"),
        ("gpt_oss", {}, {"sliding_window": None}, "give model.sliding_window"),
        ("gpt_oss", {}, {"rope_scaling": None}, "model.rope_factor belongs to model.rope_scaling, which is null"),
        ("gpt_oss", {}, {"rope_scaling": "linear"}, "model.rope_original_length is for yarn and llama3"),
        ("gpt_oss", {}, {"rope_scaling": "llama3", "rope_original_length": 64}, "truncate=False applies to yarn"),
        ("mixtral", {}, {"layer_pattern": ("full",)}, "model.experts is given, but no layer has experts"),
        ("mixtral", {}, {"latent": LATENT}, "model.latent is given, but no layer has latent_attention"),
    ],
)  # fmt: skip
def test_a_wrong_configuration_names_the_key(name, experts, options, words):
    c = STYLES[name]
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(c, **options, experts=dataclasses.replace(c.experts, **experts)).build()
