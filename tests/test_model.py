"""The decoder: shapes, gradients, masks, patterns, remat, dtypes. On one device, with dense attention in plain jnp."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.interpreters import partial_eval as pe
from jax.sharding import PartitionSpec as P

from ejdist.layout import sharding
from ejdist.models import parts
from ejdist.models.config import ROPE_SCALING, LatentShape
from ejdist.models.decoder import REMAT, DecoderConfig, declare, hidden_states, loss
from ejdist.models.model import Flops, StepContext
from ejdist.models.parameters import Param, initialise, num_parameters, shapes
from ejdist.operations import bind_ops
from ejdist.precision import Normed
from ejdist.projection import parsed, project
from kernels.framework.dims import VOCABULARY
from kernels.ops.rotary_embedding import RopeScaling
from recipes.schema import compose, variants_of

TINY = DecoderConfig(
    vocab_size=61, num_layers=4, model_dim=16, num_heads=4, num_kv_heads=2, head_dim=8, ffn_dim=24, tie_embeddings=False
)
VARIANTS = {
    "llama3": dataclasses.replace(TINY, rope_scaling="llama3", rope_factor=8.0, rope_original_length=16),
    "qwen2": dataclasses.replace(TINY, attention_bias=True, tie_embeddings=True),
    "qwen3": dataclasses.replace(TINY, qk_norm=True, norm_eps=1e-6),
    "windows": dataclasses.replace(TINY, layer_pattern=("window", "full"), sliding_window=5),
    "incomplete_round": dataclasses.replace(
        TINY,
        layer_pattern=("window", "window", "full"),
        sliding_window=3,
        attention_soft_cap=5.0,
        logits_soft_cap=10.0,
        activation="gelu_tanh",
    ),
}
B, T = 2, 24


def dense_attention(query, key, value, *, causal, q_segment_ids, kv_segment_ids, sliding_window, logits_soft_cap):
    """Returns attention by its definition, with the whole square of scores."""
    H, groups, T = query.shape[-1], query.shape[2] // key.shape[2], query.shape[1]
    key, value = (jnp.repeat(x, groups, axis=2) for x in (key, value))
    scores = jnp.einsum("btnh,bsnh->bnts", query, key, precision="highest", preferred_element_type=jnp.float32)
    scores = scores * H**-0.5
    if logits_soft_cap is not None:
        scores = logits_soft_cap * jnp.tanh(scores / logits_soft_cap)
    i, j = jnp.arange(T)[:, None], jnp.arange(T)[None]
    seen = (j <= i) & (i - j < (sliding_window or T))
    assert causal and q_segment_ids is kv_segment_ids
    seen = seen & (q_segment_ids[:, None, :, None] == q_segment_ids[:, None, None, :])
    seen = seen & (q_segment_ids >= 0)[:, None, None, :]
    weights = jnp.where(seen, jax.nn.softmax(jnp.where(seen, scores, -1e30), axis=-1), 0)
    return jnp.einsum("bnts,bsnh->btnh", weights.astype(value.dtype), value, precision="highest")


FLASH = bind_ops(None)
OPS = FLASH.replace(attention=dense_attention)


def init(config, key):
    return initialise(declare(config), key)


def batch_of(config, seed=0, cuts=((7, 15), (11,)), padding=2):
    """Returns a batch in which row b has documents cut at cuts[b], and padding at the end of row 0."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, config.vocab_size, (B, T))
    segments, positions, targets = np.zeros((3, B, T), int)
    for b in range(B):
        edges = [0, *cuts[b], T - padding if b == 0 else T]
        segments[b], targets[b] = -1, -1
        for k, (start, end) in enumerate(itertools.pairwise(edges)):
            segments[b, start:end], positions[b, start:end] = k, np.arange(end - start)
            targets[b, start : end - 1] = tokens[b, start + 1 : end]
    batch = {"tokens": tokens, "targets": targets, "positions": positions, "segment_ids": segments}
    return {k: jnp.asarray(v, jnp.int32) for k, v in batch.items()}


def mean_loss(params, batch, config, ops=OPS):
    total, terms = loss(params, batch, config, ops)
    return total / terms["tokens"].value


def value_and_grad(config, params, batch, ops=OPS):
    return jax.jit(jax.value_and_grad(lambda p: mean_loss(p, batch, config, ops)))(params)


def assert_close(a, b, rtol=1e-5, atol=1e-6):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(np.asarray(x, np.float64), np.asarray(y, np.float64), rtol=rtol, atol=atol)


@pytest.mark.parametrize(
    "config", [pytest.param(c, id=n, marks=[pytest.mark.slow] * (n in ("qwen2", "qwen3"))) for n, c in VARIANTS.items()]
)
def test_against_an_independent_forward_and_every_parameter_has_a_gradient(config):
    """The oracle is NumPy float64, layer after layer and query after query: no scan, no operations of ours, no JAX."""
    params, batch = init(config, jax.random.key(0)), batch_of(config)
    # No bias at zero, no scale at one: what they do must show.
    waves = {k: np.sin(np.arange(v.size, dtype=np.float32)).reshape(v.shape) for k, v in params["layers"].items()}
    params["layers"] = {k: np.asarray(v) + np.float32(0.05) * waves[k] for k, v in params["layers"].items()}
    value, gradients = value_and_grad(config, params, batch)
    wide = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    assert float(value) == pytest.approx(oracle_loss(wide, jax.tree.map(np.asarray, batch), config), rel=2e-5)
    assert abs(float(value) - np.log(config.vocab_size)) < 1.0  # near chance
    for path, g in jax.tree_util.tree_leaves_with_path(gradients):
        assert np.isfinite(g).all() and np.abs(np.asarray(g)).max() > 1e-8, path
    for name, g in gradients["layers"].items():
        assert (np.abs(np.asarray(g)).reshape(config.num_layers, -1).max(axis=1) > 1e-8).all(), name


def oracle_loss(params, batch, c):
    """Returns the mean cross entropy, float64."""

    def norm(x, w):
        return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + c.norm_eps) * w

    def rope(x, positions):
        half = c.head_dim // 2
        w = c.rope_base ** (-np.arange(half) / half)
        if c.rope_scaling == "llama3":
            smooth = np.clip((c.rope_original_length * w / (2 * np.pi) - 1) / 3, 0, 1)
            w = w / c.rope_factor * (1 - smooth) + w * smooth
        a = positions[..., None, None] * w
        one, two = x[..., :half], x[..., half:]
        return np.concatenate([one * np.cos(a) - two * np.sin(a), two * np.cos(a) + one * np.sin(a)], -1)

    def bend(x, cap):
        return x if cap is None else cap * np.tanh(x / cap)

    x, ids = params["embedding"][batch["tokens"]], batch["segment_ids"]
    for layer in range(c.num_layers):
        w = {k: v[layer] for k, v in params["layers"].items()}
        h = norm(x, w["attention_norm"])
        q, k, v = (np.einsum("btd,dnh->btnh", h, w[n]) + w.get(f"{n}_bias", 0) for n in ("query", "key", "value"))
        if c.qk_norm:
            q, k = norm(q, w["query_norm"]), norm(k, w["key_norm"])
        q, k = rope(q, batch["positions"]), rope(k, batch["positions"])
        out = np.zeros_like(q)
        kind = c.layer_pattern[layer % len(c.layer_pattern)]
        for b, t, n in np.ndindex(B, T, c.num_heads):
            m = n // (c.num_heads // c.num_kv_heads)
            first = max(0, t - c.sliding_window + 1) if kind == "window" else 0
            seen = [s for s in range(first, t + 1) if ids[b, s] == ids[b, t] and ids[b, t] >= 0]
            if not seen:
                continue
            z = bend(k[b, seen, m] @ q[b, t, n] / np.sqrt(c.head_dim), c.attention_soft_cap)
            p = np.exp(z - z.max())
            out[b, t, n] = p / p.sum() @ v[b, seen, m]
        x = x + np.einsum("btnh,nhd->btd", out, w["output"])
        h = norm(x, w["mlp_norm"])
        g = h @ w["gate"]
        act = g / (1 + np.exp(-g))
        if c.activation == "gelu_tanh":
            act = 0.5 * g * (1 + np.tanh(np.sqrt(2 / np.pi) * (g + 0.044715 * g**3)))
        x = x + (act * (h @ w["up"])) @ w["down"]
    head = params["embedding"].T if c.tie_embeddings else params["lm_head"]
    z = bend(norm(x, params["final_norm"]) @ head, c.logits_soft_cap)
    lse = np.log(np.sum(np.exp(z), -1))
    keep = batch["targets"] >= 0
    at = np.take_along_axis(z, np.maximum(batch["targets"], 0)[..., None], -1)[..., 0]
    return np.sum((lse - at)[keep]) / keep.sum()


SMALL = dataclasses.replace(VARIANTS["windows"], num_layers=2)


@pytest.fixture(scope="module")
def with_flash_attention():
    """Value and gradient of SMALL through the operations of `kernels`, under the default remat policy."""
    return value_and_grad(SMALL, init(SMALL, jax.random.key(0)), batch_of(SMALL), FLASH)


@pytest.mark.slow  # and the layers of test_model.py against a forward of their own
def test_flash_attention_gives_what_dense_attention_gives(with_flash_attention):
    dense = value_and_grad(SMALL, init(SMALL, jax.random.key(0)), batch_of(SMALL))
    assert_close(with_flash_attention, dense, 1e-4, 5e-6)


@pytest.mark.slow
def test_layers_without_a_scan():
    """The numbers of a scan, from a program without a loop, whose gradients of stacks are joined and never added to zeros."""
    config = dataclasses.replace(SMALL, num_layers=3, last_layers=("full",))
    params, batch, unrolled = (
        init(config, jax.random.key(0)),
        batch_of(config),
        dataclasses.replace(config, scan_layers=False),
    )
    assert_close(value_and_grad(config, params, batch), value_and_grad(unrolled, params, batch))
    jaxpr = str(jax.make_jaxpr(lambda p: value_and_grad(unrolled, p, batch))(params))
    assert " scan[" not in jaxpr and " pad[" not in jaxpr and "concatenate[" in jaxpr
    assert " scan[" in str(jax.make_jaxpr(lambda p: value_and_grad(config, p, batch))(params))


def test_a_window_as_wide_as_the_row_is_full_attention_and_a_narrower_one_is_not():
    params, batch = init(TINY, jax.random.key(0)), batch_of(TINY)

    def value(config):
        return float(jax.jit(lambda p: mean_loss(p, batch, config))(params))

    full = value(TINY)

    def same(w):
        return dataclasses.replace(TINY, layer_pattern=("window", "full"), sliding_window=w)

    assert value(same(T)) == pytest.approx(full, rel=1e-6)
    assert abs(value(same(2)) - full) > 1e-5


def test_documents_do_not_see_each_other():
    """Changing one document leaves what comes out for the others, and their loss, bit for bit."""
    config = VARIANTS["windows"]
    params, batch = init(config, jax.random.key(0)), batch_of(config)

    def of_second(b):
        return {**b, "targets": jnp.where(b["segment_ids"] == 1, b["targets"], -1)}

    changed = {**batch, "tokens": jnp.where(batch["segment_ids"] == 0, 3, batch["tokens"])}
    assert np.any(changed["tokens"] != batch["tokens"])
    hidden = jax.jit(lambda b: hidden_states(params, b, config, OPS))
    inside = np.asarray(batch["segment_ids"] == 1)
    np.testing.assert_array_equal(np.asarray(hidden(batch))[inside], np.asarray(hidden(changed))[inside])
    value = jax.jit(lambda b: mean_loss(params, b, config))
    np.testing.assert_array_equal(value(of_second(batch)), value(of_second(changed)))
    assert value(batch) != value(changed)
    # A row packed is the rows apart.
    alone = {k: v[1:2, 11:] for k, v in batch.items()}
    np.testing.assert_allclose(hidden(batch)[1:2, 11:], hidden(alone), rtol=1e-5, atol=1e-5)


def test_the_future_and_padding_are_not_seen():
    params, batch = init(TINY, jax.random.key(0)), batch_of(TINY, cuts=((), ()))
    run = jax.jit(lambda b: hidden_states(params, b, TINY, OPS))

    def hidden(b):
        return np.asarray(run(b))

    later = {**batch, "tokens": batch["tokens"].at[:, 10:].set(1)}
    np.testing.assert_array_equal(hidden(batch)[:, :10], hidden(later)[:, :10])
    assert np.abs(hidden(batch)[:, 10:] - hidden(later)[:, 10:]).max() > 1e-3
    padded = {**batch, "tokens": batch["tokens"].at[0, T - 2 :].set(1)}
    assert float(mean_loss(params, batch, TINY)) == float(mean_loss(params, padded, TINY))


@pytest.mark.parametrize(
    "remat",
    [pytest.param(p, marks=() if p == "offload" else pytest.mark.slow) for p in REMAT if p != "attention"],
)
def test_remat_changes_memory_not_numbers(remat, with_flash_attention):
    params, batch = init(SMALL, jax.random.key(0)), batch_of(SMALL)
    got = value_and_grad(dataclasses.replace(SMALL, remat=remat), params, batch, FLASH)
    assert_close(got, with_flash_attention, 1e-5, 1e-6)


def test_what_a_remat_policy_computes_again():
    """Counted in calls of the gradient's program, after what is not needed was removed."""
    params, batch = init(TINY, jax.random.key(0)), batch_of(TINY)

    def calls(remat):
        config = dataclasses.replace(TINY, remat=remat)
        gradient = jax.grad(lambda p: mean_loss(p, batch, config, FLASH))
        closed = jax.make_jaxpr(gradient)(params)
        needed, _ = pe.dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars))
        names = ("flash_attention", "gated_mlp", "gated_activation")
        named = [(calls_of(needed, name), calls_of(needed, f"{name}_backward")) for name in names]
        return *named, products_of(needed)

    counts = {remat: calls(remat) for remat in REMAT}
    attention, mlp, activation, products = counts["none"]
    assert (attention, mlp, activation) == ((1, 1), (0, 0), (1, 1)), "with everything saved, so are the MLP's products"
    assert counts["dots"] == (attention, mlp, (2, 1), products), "no product is made twice"
    # Four projections are, and the operation that is the MLP then has its three forward and eight backward for itself.
    assert counts["attention"] == (attention, (1, 1), (0, 0), products + 4 - 9)
    assert counts["offload"] == counts["attention"]
    assert counts["full"] == ((2, 1), *counts["attention"][1:])


def products_of(jaxpr):
    """Returns how many products of matrices a program has."""
    count = 0
    for eqn in jaxpr.eqns:
        count += eqn.primitive.name == "dot_general"
        for p in jax.tree.leaves(list(eqn.params.values()), is_leaf=is_jaxpr):
            count += products_of(getattr(p, "jaxpr", p)) if is_jaxpr(p) else 0
    return count


def calls_of(jaxpr, name):
    """Returns how many calls of an operation a program has."""
    count = 0
    for eqn in jaxpr.eqns:
        count += eqn.primitive.name == "ejdist_call" and eqn.params["branches"].name == name
        for p in jax.tree.leaves(list(eqn.params.values()), is_leaf=is_jaxpr):
            count += calls_of(getattr(p, "jaxpr", p), name) if is_jaxpr(p) else 0
    return count


def is_jaxpr(p):
    return isinstance(p, (jax.extend.core.Jaxpr, jax.extend.core.ClosedJaxpr))


def test_bfloat16_compute_keeps_float32_masters():
    params, batch = init(TINY, jax.random.key(0)), batch_of(TINY)
    exact, wide = value_and_grad(TINY, params, batch)
    short = dataclasses.replace(TINY, compute_dtype="bfloat16")
    rounded, narrow = value_and_grad(short, params, batch)
    assert float(rounded) == pytest.approx(float(exact), rel=0.02)
    for w, n in zip(jax.tree.leaves(wide), jax.tree.leaves(narrow), strict=True):
        assert n.dtype == jnp.float32
        assert np.linalg.norm(n - w) < 0.1 * np.linalg.norm(w)
    assert hidden_states(params, batch, short, OPS).dtype == jnp.bfloat16


def test_a_frequent_tokens_gradient_is_summed_in_float32():
    """The row of a token that is everywhere is a sum of thousands; in bfloat16 it would stop growing after 256 terms."""
    config = dataclasses.replace(TINY, num_layers=1, compute_dtype="bfloat16")
    table = jnp.zeros((config.vocab_size, config.model_dim))
    params = {**init(config, jax.random.key(0)), "embedding": table + 0.02}
    batch = {k: jnp.zeros((1, 2048), jnp.int32) for k in ("tokens", "positions")}
    batch |= {"segment_ids": jnp.arange(2048, dtype=jnp.int32)[None], "targets": jnp.ones((1, 2048), jnp.int32)}
    see_nothing = OPS.replace(attention=lambda query, *_, **__: jnp.zeros_like(query))
    few = {k: v[:, :64] for k, v in batch.items()}
    gradient = jax.jit(jax.grad(lambda p, b: loss(p, b, config, see_nothing)[0]))
    rows = [gradient(params, b)["embedding"][0] for b in (few, batch)]
    np.testing.assert_allclose(rows[1], 32 * rows[0], rtol=1e-3)


def test_init_depends_on_seed_and_name_alone():
    params = init(TINY, jax.random.key(0))
    assert_close(params, init(TINY, jax.random.key(0)), 0, 0)
    wider = init(dataclasses.replace(TINY, qk_norm=True, attention_bias=True), jax.random.key(0))
    np.testing.assert_array_equal(params["layers"]["query"], wider["layers"]["query"])
    assert not np.allclose(params["embedding"], init(TINY, jax.random.key(1))["embedding"])
    assert not np.allclose(params["layers"]["gate"], params["layers"]["up"])
    sharding = jax.sharding.NamedSharding(jax.make_mesh((4,), ("x",)), jax.sharding.PartitionSpec(None, "x"))
    split = jax.jit(lambda key: init(TINY, key)["layers"]["query"], out_shardings=sharding)(jax.random.key(0))
    np.testing.assert_array_equal(split, params["layers"]["query"])


@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)
def test_declared_shapes_are_the_shapes(config):
    declared, params = declare(config), init(config, jax.random.key(0))
    assert jax.tree.map(lambda p: p.shape, declared) == jax.tree.map(jnp.shape, params)
    assert jax.tree.map(jnp.shape, shapes(declared)) == jax.tree.map(jnp.shape, params)
    assert num_parameters(declared) == sum(x.size for x in jax.tree.leaves(params))
    for p in jax.tree.leaves(declared):
        assert p.decay == (p.init == "normal")  # what starts at one or zero is a scale or a bias


def test_the_size_of_llama_3_8b():
    config = DecoderConfig(128256, 32, 4096, 32, 8, 128, 14336, tie_embeddings=False)
    assert num_parameters(declare(config)) == 8_030_261_248


def test_the_size_of_qwen3_8b():
    config = DecoderConfig(151936, 36, 4096, 32, 8, 128, 12288, qk_norm=True, tie_embeddings=False)
    assert num_parameters(declare(config)) == 8_190_735_360


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_heads": 3}, r"model.num_heads = 3 must be a multiple of model.num_kv_heads = 2"),
        ({"head_dim": 7}, "model.head_dim = 7 must be even"),
        ({"num_layers": 0}, "model.num_layers must be positive"),
        ({"layer_pattern": ("mlp+full",)}, r"'mlp\+full' is not MIXER.FEED_FORWARD; did you mean 'full\+mlp'\? Mixers"),
        ({"layer_pattern": ("window+expert",)}, r"did you mean 'window\+experts'\?"),
        ({"layer_pattern": ("mamba",)}, r"did you mean 'mamba2\+mlp'\?"),
        ({"layer_pattern": ("full", "local")}, "'local' is not MIXER.FEED_FORWARD. Mixers: full, window, latent"),
        ({"layer_pattern": ()}, r"model.layer_pattern = \[\] must list kinds of layers, for example"),
        ({"layer_pattern": ("full",) * 5}, "shorten them or add layers"),
        ({"layer_pattern": ("window",)}, "give model.sliding_window"),
        ({"rope_scaling": "dynamic"}, "linear, ntk, yarn or llama3"),
        ({"rope_low": 2.0}, "model.rope_low belongs to model.rope_scaling, which is null"),
        ({"rope_scaling": "linear", "rope_factor": 2.0, "rope_high": 2.0}, "'linear'.*high is model.rope_high"),
        (
            {"rope_scaling": "ntk", "rope_factor": 2.0, "rope_original_length": 9},
            "model.rope_original_length is for yarn",
        ),
        ({"rope_scaling": "yarn", "rope_factor": 0.5}, "factor must be at least 1.*factor is model.rope_factor"),
        ({"rope_scaling": "yarn", "rope_low": 9.0, "rope_high": 2.0}, "below high.*low is model.rope_low"),
        ({"rope_scaling": "yarn", "rope_attention_factor": 0.0}, "attention_factor is model.rope_attention_factor"),
        ({"remat": "some"}, "use one of none, dots, attention, offload, full, offload_inputs"),
        ({"compute_dtype": "float16"}, "use bfloat16 or float32"),
        ({"activation": "swish"}, "use one of silu"),
        ({"logits_soft_cap": 0.0}, "model.logits_soft_cap must be positive"),
        ({"rope_base": -1.0}, "model.rope_base"),
        ({"rope_exact_from": -1}, "model.rope_exact_from = -1 must be a position"),
    ],
)
def test_a_wrong_configuration_names_the_field(change, words):
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(TINY, **change).validate()


@pytest.mark.parametrize("kind", ["full", pytest.param("latent", marks=pytest.mark.slow)])
def test_attention_depends_on_distances_alone_wherever_a_text_begins(kind):
    latent = LatentShape(kv_rank=10, query_rank=9, nope_dim=6, rope_dim=4, value_dim=5)
    config = dataclasses.replace(
        TINY, num_layers=1, layer_pattern=(kind,), init_std=0.5, rope_base=100.0,
        latent=latent if kind == "latent" else LatentShape(),
    )  # fmt: skip
    params, batch = init(config, jax.random.key(0)), batch_of(config)

    @functools.partial(jax.jit, static_argnums=1)
    def loss_at(start, exact_from):
        moved = batch | {"positions": batch["positions"] + start}
        return mean_loss(params, moved, dataclasses.replace(config, rope_exact_from=exact_from), FLASH)

    first = float(loss_at(0, 100))
    assert float(loss_at(2**24 - 10, 100)) == pytest.approx(first, abs=2e-6)
    assert float(loss_at(2**24 - 10, None)) != pytest.approx(first, abs=5e-5)


def test_a_model_places_its_activations_by_logical_dims_only():
    seen = []

    def note(x, dims):
        return seen.append((dims, x.ndim)) or x

    def product(x, weight, subscripts, **bias):
        for array, dims in zip((x, weight), parsed(subscripts)):
            note(array, " ".join(dims))
        return note(project(x, weight, subscripts, **bias), " ".join(parsed(subscripts)[2]))

    def products(x, weights, subscripts, biases=()):
        x, biases = x.values if isinstance(x, Normed) else x, biases or [None] * len(weights)
        return tuple(product(x, w, s, bias=b) for w, s, b in zip(weights, subscripts, biases, strict=True))

    ops = OPS.replace(project=product, project_all=products)
    ops.constrain = ops.gather = note
    mean_loss(init(TINY, jax.random.key(0)), batch_of(TINY), TINY, ops)
    assert {"B T D", "B T N H", "B T K H", "D N H"} <= {d for d, _ in seen}
    assert all(len(d.split()) == n for d, n in seen)


class Misspelt(parts.Part):
    """A feed-forward whose parameter, or buffer, has a dim that does not exist."""

    role, name = "feed_forward", "misspelt"

    def __init__(self, dims="D F", buffer="_"):
        self.dims, self.buffer = dims, buffer

    def declare(self, c):
        return {"misspelt_gate": Param((c.model_dim, c.ffn_dim), self.dims)}

    def buffers(self, c):
        return {"count": Param((4,), self.buffer, "zeros")}

    def apply(self, x, params, at):
        return x + at.ops.gather(params["misspelt_gate"], "D Ff").sum().astype(x.dtype), {}

    def flops(self, c):
        return Flops(0)


def test_dims_are_of_the_vocabulary(monkeypatch):
    """Any other dim would be stored whole on every device, without a word."""
    config = dataclasses.replace(TINY, layer_pattern=("full+misspelt",))
    for part, words in (
        (
            Misspelt("Dd F"),
            r"parameter layers.misspelt_gate has the dims 'L Dd F', but 'Dd' is not in the vocabulary.*B, T",
        ),
        (Misspelt(buffer="norm"), r"buffer misspelt.count has the dims 'L norm', but 'norm' is not in the vocabulary"),
    ):
        monkeypatch.setitem(parts.PARTS, "misspelt", part)
        with pytest.raises(ValueError, match=words):
            config.build()
    monkeypatch.setitem(parts.PARTS, "misspelt", Misspelt())
    model = config.build()
    with pytest.raises(ValueError, match=r"gather: an array of shape \(16, 24\) has the dims 'D Ff', but 'Ff' is not"):
        context = StepContext(buffers=initialise(model.buffers, jax.random.key(0)))
        jax.eval_shape(lambda p: model.loss(p, batch_of(TINY), ops=OPS, context=context), shapes(model.declared))
    with pytest.raises(ValueError, match=r"dims 'D' must name each dim of the shape \(4, 4\)"):
        Param((4, 4), "D")


SAME = ("8b", "70b", "qwen3_8b", "qwen3_235b_a22b", "sparse_8b")  # but for its sizes as one that is quick


@pytest.mark.parametrize(
    "name",
    [  # that of Hugging Face is of no folder
        pytest.param(name, marks=[pytest.mark.slow] * (name in SAME)) for name in variants_of("model") if name != "hf"
    ],
)
def test_every_part_of_every_model_has_dims_of_the_vocabulary(name):
    model = compose([f"model={name}"]).model.build()
    declared = jax.tree.leaves([model.declared, model.buffers], is_leaf=lambda x: isinstance(x, Param))
    assert declared and {d for p in declared for d in p.dims.split()} <= {*VOCABULARY, "_"}
    assert all(p.dims.startswith("L ") for p in model.declared["layers"].values())


def test_layers_are_a_dim_of_the_layout():
    """So that the stages of a pipeline are a split of the stacks."""
    mesh = jax.sharding.AbstractMesh((4, 2), ("stage", "fsdp"))
    gate = declare(TINY)["layers"]["gate"]
    table = {"L": ("stage",), "D": ("fsdp",)}
    assert sharding(mesh, gate.dims.split(), table, shape=gate.shape).spec == P("stage", "fsdp", None)
    with pytest.raises(ValueError, match="dim L = 4 cannot be divided over stage=3"):
        sharding(jax.sharding.AbstractMesh((3,), ("stage",)), gate.dims.split(), table, shape=gate.shape, what="gate")


def test_every_field_of_the_scaling_of_positions_is_a_key_of_the_recipe():
    given = {"kind": "yarn", "factor": 3.0, "original_length": 99, "low": 0.5, "high": 7.0, "attention_factor": 1.5}
    given |= {"truncate": False}
    assert set(given) == {f.name for f in dataclasses.fields(RopeScaling)}
    keys = {"kind": "rope_scaling"} | {field: key for key, field in ROPE_SCALING.items()}
    config = dataclasses.replace(TINY, **{keys[field]: value for field, value in given.items()})
    config.validate()
    assert config.scaling() == RopeScaling(**given)
