"""Mixtures of experts and latent attention in the decoder: steps of published styles against NumPy, and their sizes.

The oracle is float64 and has no JAX: layers one after the other, attention query by query, experts token by token
(`experts_loop`). A gradient is checked by differences of the oracle's loss, along a random direction of each parameter.
"""

import dataclasses
import functools
import itertools
import math

import experts_loop
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from ejdist.experts import Stats
from ejdist.models import parts
from ejdist.models.config import KINDS, ExpertsShape, LatentShape
from ejdist.models.decoder import DecoderConfig, declare, flops, loss
from ejdist.models.model import StepContext
from ejdist.models.parameters import initialise, num_parameters
from ejdist.operations import bind_ops
from ejdist.training.step import init_state, make_train_step
from recipes.schema import compose

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
        layer_pattern=("window_experts", "experts"), sliding_window=4, attention_bias=True, attention_output_bias=True,
        attention_sinks=True, rope_truncate=False, **YARN,
    ),
    # What the others leave out: dense layers of two kinds beside one of experts, whose shared one is gated; both buffers.
    "mixed": style(
        {"shared_dim": 7, "shared_gate": True, "score": "sqrtsoftplus", "normalize": False, "balance": "global",
         "bias_rate": 0.25},
        num_layers=5, first_layers=("experts", "full"), layer_pattern=("experts", "latent"),
        latent=dataclasses.replace(LATENT, query_rank=0),
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


# -- the oracle ----------------------------------------------------------------------------------------------------------


def norm(x, w, c):
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + c.norm_eps) * w


def frequencies(width, c):
    """Returns (frequency of each pair, factor of cos and sin), with the ramp of YaRN."""
    plain = [c.rope_base ** (-2 * i / width) for i in range(width // 2)]
    if c.rope_scaling is None:
        return np.array(plain), 1.0

    def pair_that_turns(times):
        return width / 2 * math.log(c.rope_original_length / (2 * math.pi * times), c.rope_base)

    first, last = pair_that_turns(32), pair_that_turns(1)
    if c.rope_truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    far = [min(max((i - first) / (last - first), 0), 1) for i in range(width // 2)]
    factor = c.rope_attention_factor or 0.1 * math.log(c.rope_factor) + 1
    return np.array([w * (1 - f) + w / c.rope_factor * f for w, f in zip(plain, far, strict=True)]), factor


def turned(x, positions, c, neighbours=False):
    w, factor = frequencies(x.shape[-1], c)
    turn = factor * np.exp(1j * positions[..., None, None] * w)
    half = x.shape[-1] // 2
    one, two = (slice(0, None, 2), slice(1, None, 2)) if neighbours else (slice(half), slice(half, None))
    z, out = (x[..., one] + 1j * x[..., two]) * turn, np.empty_like(x)
    out[..., one], out[..., two] = z.real, z.imag
    return out


def attended(q, k, v, ids, scale, window=None, sinks=None):
    out = np.zeros((*q.shape[:3], v.shape[-1]))
    for b, t, n in np.ndindex(q.shape[:3]):
        m = n // (q.shape[2] // k.shape[2])
        seen = [s for s in range(t + 1) if ids[b, s] == ids[b, t] >= 0 and (window is None or t - s < window)]
        if seen:
            weight = np.exp(scale * k[b, seen, m] @ q[b, t, n])
            total = weight.sum() + (0 if sinks is None else np.exp(sinks[n, 0]))
            out[b, t, n] = weight / total @ v[b, seen, m]
    return out


def attention(x, w, batch, c, windowed=False):
    h = norm(x, w["attention_norm"], c)
    q, k, v = (np.einsum("btd,dnh->btnh", h, w[n]) + w.get(f"{n}_bias", 0) for n in ("query", "key", "value"))
    if c.qk_norm:
        q, k = norm(q, w["query_norm"], c), norm(k, w["key_norm"], c)
    q, k = (turned(y, batch["positions"], c) for y in (q, k))
    window, scale = c.sliding_window if windowed else None, c.attention_scale or c.head_dim**-0.5
    out = attended(q, k, v, batch["segment_ids"], scale, window, w.get("sinks"))
    return x + np.einsum("btnh,nhd->btd", out, w["output"]) + w.get("output_bias", 0)


def latent_attention(x, w, batch, c):
    m, at = c.latent, batch["positions"]
    h = norm(x, w["latent_attention_norm"], c)
    narrow = norm(h @ w["query_down"], w["query_latent_norm"], c) if m.query_rank else h
    q = np.einsum("btr,rnh->btnh", narrow, w["latent_query"])
    q[..., m.nope_dim :] = turned(q[..., m.nope_dim :], at, c, neighbours=True)
    down = h @ w["latent_down"]
    latent, shared = norm(down[..., : m.kv_rank], w["latent_norm"], c), down[..., None, m.kv_rank :]
    shared = np.repeat(turned(shared, at, c, neighbours=True), c.num_heads, axis=2)
    k = np.concatenate([np.einsum("btr,rnh->btnh", latent, w["key_up"]), shared], -1)
    scale = c.attention_scale or (m.nope_dim + m.rope_dim) ** -0.5
    out = attended(q, k, np.einsum("btr,rnh->btnh", latent, w["value_up"]), batch["segment_ids"], scale)
    return x + np.einsum("btnh,nhd->btd", out, w["latent_output"])


def mlp(x, w, batch, c):
    h = norm(x, w["mlp_norm"], c)
    g = h @ w["gate"]
    return x + (g / (1 + np.exp(-g)) * (h @ w["up"])) @ w["down"]


def experts(x, w, batch, c, buffers):
    """Returns (x, the statistics of the layer)."""
    m = c.experts
    others = {"gate": w["experts_gate_up"], "down": w["experts_down"], "gate_bias": w.get("experts_gate_up_bias")}
    others |= {"down_bias": w.get("experts_down_bias")} | {n: w.get(n) for n in experts_loop.SHARED}
    out, stats = experts_loop.moe(
        norm(x, w["experts_norm"], c), w["router"], **others, activation=m.activation or c.activation, top_k=m.top_k,
        score=m.score, normalize=m.normalize, bias=buffers.get("bias", 0.0), router_bias=w.get("router_bias", 0.0),
        num_groups=m.num_groups, topk_groups=m.topk_groups, routed_scaling_factor=m.scaling_factor,
        segment_ids=batch["segment_ids"], balance=m.balance, load=buffers.get("load"),
    )  # fmt: skip
    return x + out, stats


PARTS = {
    "attention": attention,
    "window_attention": functools.partial(attention, windowed=True),
    "latent_attention": latent_attention,
    "mlp": mlp,
}


def forward(params, buffers, batch, c):
    """Returns (the cross entropy, summed over counted tokens; the statistics of each layer of experts)."""
    x, row, found = params["embedding"][batch["tokens"]], dict.fromkeys(params["layers"], 0), []
    for kind in c.kinds():
        for name in KINDS[kind]:
            mine = {n: w[row[n]] for n, w in params["layers"].items() if n in parts.PARTS[name].declare(c)}
            row |= {n: row[n] + 1 for n in mine}  # each layer has the row that counts up to it
            if name == "experts":
                x, stats = experts(x, mine, batch, c, {n: b[len(found)] for n, b in buffers.get("experts", {}).items()})
                found.append(stats)
            else:
                x = PARTS[name](x, mine, batch, c)
    head = params["embedding"].T if c.tie_embeddings else params["lm_head"]
    z = norm(x, params["final_norm"], c) @ head
    keep = batch["targets"] >= 0
    at = np.take_along_axis(z, np.maximum(batch["targets"], 0)[..., None], -1)[..., 0]
    return np.sum((np.log(np.sum(np.exp(z), -1)) - at)[keep]), found


def oracle(params, buffers, batch, c, accumulation=1):
    """Returns the numbers of a step: losses over counted tokens, and the counts of each layer's experts."""
    count = np.sum(batch["targets"] >= 0)
    found = {"loss": 0.0, "balance_loss": 0.0, "z_loss": 0.0, "entropy": 0.0, "counts": 0}
    for first in range(accumulation):
        rows = {k: v[first::accumulation] for k, v in batch.items()}
        value, layers = forward(params, buffers, rows, c)
        found["loss"] += value / count
        # A mean over what is no padding, which weighs as much as the tokens that the microbatch counts.
        share = np.sum(rows["targets"] >= 0) / np.sum(rows["segment_ids"] >= 0) / count
        for name in ("balance_loss", "z_loss", "entropy"):
            found[name] += share * np.array([getattr(stats, name) for stats in layers])
        found["counts"] += np.array([stats.counts for stats in layers])
    m = c.experts
    found["auxiliary_loss"] = np.sum(m.balance_loss * found["balance_loss"] + m.z_loss * found["z_loss"])
    return found


# -- steps ---------------------------------------------------------------------------------------------------------------

# Keeps the gradient, and changes no parameter.
KEPT = optax.GradientTransformation(lambda p: p, lambda g, _, p: (jax.tree.map(jnp.zeros_like, p), g))
QUICK = [
    ("mixtral", "none", 2),
    ("qwen3", "full", 1),
    ("deepseek", "attention", 1),
    ("gpt_oss", "attention", 2),
    ("mixed", "full", 2),
]
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
    narrow = functools.partial(jax.tree.map, lambda x: jnp.asarray(x, jnp.float32))
    arrays = {k: jnp.asarray(v, jnp.int32) for k, v in batch.items()}
    state, metrics = step_of(c, accumulation)(init_state(narrow(params), KEPT, narrow(buffers)), arrays)
    wanted = oracle(params, buffers, batch, c, accumulation)
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
    check_gradient(state.opt_state, params, lambda p: oracle(p, buffers, batch, c, accumulation))


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


def test_noise_differs_by_layer_microbatch_and_step_and_is_the_same_when_it_is_computed_again():
    c = style({"jitter": 0.2}, num_layers=6, first_layers=("experts",), layer_pattern=("experts", "full"))
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
    assert len(set(draws.tolist())) == len(draws) == 4 * 4
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
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_sizes_of_published_models(name):
    model = compose([f"model={name}"]).model.build()
    balances = "bias" in model.buffers.get("experts", {})  # checkpoints have the bias beside the parameters
    found = num_parameters(model.declared) + (num_parameters(model.buffers["experts"]["bias"]) if balances else 0)
    assert found == PUBLISHED[name]


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
        "gpt_oss": [(*plain, 4), two, plain, two, (*plain, 4), two],
    }
    for name, parts_of_it in wanted.items():
        found = [(f.token, f.pair, f.window) for f in flops(STYLES[name])]
        each = [(p, 0, None) if isinstance(p, int) else (*p, None)[:3] for p in [*parts_of_it, head]]
        assert found == each, name
    [_, gated, *_] = flops(STYLES["mixed"])
    assert gated.token == 2 * (16 * 4 + 2 * 3 * 16 * 10 + 3 * 16 * 7 + 16)


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
        ("mixtral", {"num_groups": 4}, {}, "num_groups = 4 must divide .* into groups of two or more"),
        ("mixtral", {"topk_groups": 2}, {}, "model.experts.topk_groups = 2: give num_groups"),
        ("deepseek", {"topk_groups": None}, {}, "topk_groups = None must be at least 1 and at most num_groups = 4"),
        ("deepseek", {"topk_groups": 5}, {}, "topk_groups = 5 must be at least 1"),
        ("deepseek", {"topk_groups": 1}, {}, "top_k = 3 is more than the 2 experts of model.experts.topk_groups = 1"),
        ("deepseek", {"forced_balance": True}, {}, "set bias_rate to 0"),
        ("deepseek", {"activation": "clamped_swiglu"}, {}, "no form for shared experts; set model.experts.shared_dim to 0"),
        ("deepseek", {}, {"attention_sinks": True}, "model.attention_sinks is of plain attention"),
        ("deepseek", {}, {"latent": LatentShape()}, "model.latent.kv_rank must be positive"),
        ("deepseek", {}, {"latent": dataclasses.replace(LATENT, rope_dim=3)}, "model.latent.rope_dim = 3 even"),
        ("deepseek", {}, {"num_layers": 1}, "the 1 layers of model.first_layers"),
        ("deepseek", {}, {"first_layers": ("dense",)}, "model.first_layers = .'dense'. must be made of full"),
        ("gpt_oss", {}, {"sliding_window": None}, "give model.sliding_window"),
        ("gpt_oss", {}, {"rope_scaling": None}, "model.rope_factor is of model.rope_scaling, which is null"),
        ("gpt_oss", {}, {"rope_scaling": "linear"}, "truncate=False belongs to yarn"),
        ("mixtral", {}, {"layer_pattern": ("full",)}, "model.experts is given, but no layer is of it"),
        ("mixtral", {}, {"latent": LATENT}, "model.latent is given, but no layer is of it"),
    ],
)  # fmt: skip
def test_a_wrong_configuration_names_the_key(name, experts, options, words):
    c = STYLES[name]
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(c, **options, experts=dataclasses.replace(c.experts, **experts)).build()
