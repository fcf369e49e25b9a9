"""Texts of the engine: those of the full forward without a cache, whatever else is under way."""

import dataclasses
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_names import without_code

from ejdist.generation import Engine
from ejdist.generation.pages import Pages
from ejdist.generation.sampling import Choices, Sampling, sample
from ejdist.generation.streamed import Streamed
from ejdist.layout import PARAMETERS, sharding
from ejdist.mesh import make_mesh
from ejdist.models.attention import Attention
from ejdist.models.config import (
    ExpertsShape,
    GatedDeltaShape,
    GlaShape,
    KdaShape,
    LatentShape,
    LightningShape,
    Mamba2Shape,
    Rwkv7Shape,
    SparseShape,
)
from ejdist.models.decoder import DecoderConfig
from ejdist.models.lora import BASE, LoRASection, adapted
from ejdist.models.model import StepContext
from ejdist.models.parameters import initialise, map_declared, shapes
from ejdist.models.part import Part
from ejdist.models.parts import PARTS
from ejdist.operations import bind_ops
from ejdist.planning.targets import target_of
from kernels.framework.target import in_cuda_graphs

SIZES = {"vocab_size": 64, "model_dim": 32, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "ffn_dim": 48}
EXPERTS = ExpertsShape(num=4, top_k=2, ffn_dim=16, shared_dim=16, bias_rate=0.1, jitter=0.1)
DELTA = GatedDeltaShape(num_key_heads=2, num_value_heads=4, key_dim=8, value_dim=8)
LATENT = LatentShape(kv_rank=16, query_rank=12, nope_dim=8, rope_dim=4, value_dim=6)
# Every option of attention at once.
ATTENTION = {
    "qk_norm": True,
    "attention_bias": True,
    "attention_sinks": True,
    "attention_gate": True,
    "attention_output_bias": True,
    "attention_soft_cap": 5.0,
    "attention_scale": 0.5,
    "logits_soft_cap": 9.0,
    "rotary_dim": 4,
    "sliding_window": 5,
    "zero_centered_norms": True,
    "tie_embeddings": False,
}
KINDS = {
    "attention": {"num_layers": 4, "layer_pattern": ["window+mlp", "full+experts"], "experts": EXPERTS, **ATTENTION},
    "yarn": {"rope_scaling": "yarn", "rope_factor": 4.0, "rope_original_length": 8, "num_kv_heads": 1},
    "no_rope": {"attention_rope": False},
    "hybrid": {
        "num_layers": 2,
        "layer_pattern": ["gated_delta+mlp", "latent+mlp"],
        "gated_delta": DELTA,
        "latent": LATENT,
    },
    "latent": {"layer_pattern": ["latent+mlp"], "latent": LATENT},
    "sparse": {
        "num_layers": 2,
        "layer_pattern": ["sparse+mlp", "full+mlp"],
        "sparse": SparseShape(4, 5, 5),
        "qk_norm": True,
    },
    "kda": {"layer_pattern": ["kda+mlp"], "kda": KdaShape(num_heads=4, key_dim=8, value_dim=8, rank=4, gate_bias=True)},
    "mamba2": {
        "layer_pattern": ["mamba2+none", "none+ungated_mlp"],
        "activation": "relu2",
        "mamba2": Mamba2Shape(num_heads=4, head_dim=8, state_dim=8, num_groups=4),
    },
    "lightning": {"layer_pattern": ["lightning+mlp"], "lightning": LightningShape(num_heads=4, head_dim=8)},
    "gla": {"layer_pattern": ["gla+mlp"], "gla": GlaShape(num_heads=4, key_dim=8, value_dim=8, rank=4)},
    "rwkv7": {
        "layer_pattern": ["rwkv7+mlp"],
        "rwkv7": Rwkv7Shape(num_heads=4, head_dim=8, decay_rank=4, rate_rank=4, gate_rank=4),
    },
}
LENGTH = 48


def text(ids):
    return "".join(chr(48 + i) for i in ids)


class Known:
    """A small model with random parameters, whose texts the full forward knows."""

    def __init__(self, lora=None, **options):
        self.model = DecoderConfig(**{"num_layers": 2, **SIZES, **options}).build()
        drawn = initialise(self.model.declared, jax.random.key(1)), initialise(self.model.buffers, jax.random.key(2))
        moved = jax.jit(lambda x: x + 0.1 * jax.random.normal(jax.random.key(x.size), x.shape))
        self.params, self.buffers = jax.tree.map(moved, drawn)
        without_noise = DecoderConfig(**{"num_layers": 2, **SIZES, **options})
        without_noise.experts = ExpertsShape(**vars(without_noise.experts) | {"jitter": 0.0})
        without_noise, ops = without_noise.build(), bind_ops(None)
        if lora is not None:
            self.model, without_noise = (adapted(model, lora) for model in (self.model, without_noise))
            base = jax.tree_util.tree_map_with_path(
                lambda path, x: self.model.base.frozen(".".join(str(k.key) for k in path), x), self.params
            )
            self.buffers |= {BASE: base}
            self.params = jax.tree.map(moved, initialise(self.model.declared, jax.random.key(3)))
        logits_at = without_noise.logits_at

        @jax.jit
        def log_probabilities(tokens):
            place, whole = jnp.arange(LENGTH)[None], jnp.zeros((1, LENGTH), jnp.int32)
            batch = {"tokens": tokens, "positions": place, "segment_ids": whole}
            context = StepContext(buffers=self.buffers)
            logits = logits_at(self.params, batch, place, ops=ops, count=LENGTH, context=context)
            return jax.nn.log_softmax(logits[0])

        self._log_probabilities = log_probabilities

    def engine(self, **options):
        sizes = {"slots": 3, "length": LENGTH, "page": 4, "chunk": 8, "decode": text, "buffers": self.buffers}
        return Engine(self.model, self.params, **sizes | options)

    def check(self, result, greedy=True):
        """The tokens are the most likely ones of the full forward, and the log-probabilities its own."""
        ids = [*result.prompt.tolist(), *result.tokens]
        expected = self._log_probabilities(jnp.asarray([ids + [0] * (LENGTH - len(ids))], jnp.int32))
        expected = np.asarray(expected)[len(result.prompt) - 1 : len(ids) - 1]
        if greedy:
            assert result.tokens == expected.argmax(-1).tolist()
        np.testing.assert_allclose(
            result.log_probabilities, expected[np.arange(len(result.tokens)), result.tokens], atol=2e-5
        )


def finish(engine):
    while not engine.idle:
        engine.step()
    return engine.results()


def prompts(lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, SIZES["vocab_size"], n) for n in lengths]


@pytest.fixture(scope="module", params=[pytest.param("attention", marks=pytest.mark.slow), "hybrid"])
def known(request):
    return Known(**KINDS[request.param])


@pytest.fixture(scope="module")
def engine(known):
    """One for all tests of a model, so that its programs are compiled once; idle after each."""
    return known.engine()


def test_texts_are_those_of_the_full_forward(known, engine):
    """More requests than slots, prompts shorter and longer than a chunk and a page, some of which begin alike; pages and states
    are used again. Two programs serve them all."""
    first = prompts([17])[0]
    asked = [*prompts([1, 3, 30], seed=1), first, first, first[:9], np.append(first, 3)]
    numbers = [engine.submit(ids, max_tokens=2 + i % 4, temperature=0) for i, ids in enumerate(asked)]
    results = finish(engine)
    for i, number in enumerate(numbers):
        assert (len(results[number].tokens), results[number].reason) == (2 + i % 4, "length")
        known.check(results[number])
    assert engine.programs == 2 and not engine._started  # nothing runs past the last token
    number = engine.submit(first, max_tokens=2, temperature=0)
    assert not engine.step()  # tokens are read while the next step runs
    # All but one token of three chunks is known, if there is no state.
    assert bool(engine.step()) == engine._pages.shares
    known.check(finish(engine)[number])


@pytest.mark.slow
def test_a_prompt_may_go_token_by_token_through_adapters():
    """Beside a base in 8 bits, of which the engine's rows are in 8 bits too."""
    known = Known(lora=LoRASection(rank=2, base="int8"))
    engine = known.engine(chunk=1)
    rows = engine._weights["layers"][1]["mlp"][0]["gate"]
    assert rows.values.dtype == jnp.int8 and rows.shape == (32, 48) and rows.a.shape == (32, 2)
    numbers = [engine.submit(ids, max_tokens=3, temperature=0) for ids in prompts([1, 3])]
    results = finish(engine)
    for number in numbers:
        known.check(results[number])


def test_draws_depend_on_the_seed_alone(known, engine):
    """Not on what else is under way, in which slot or in which order."""
    ids, how = prompts([11])[0], {"max_tokens": 6, "temperature": 0.9, "top_k": 20, "top_p": 0.9, "min_p": 0.01}
    alone = engine.submit(ids, seed=5, **how)
    alone = finish(engine)[alone]
    others = [engine.submit(p, max_tokens=9, temperature=2.0, seed=i) for i, p in enumerate(prompts([5, 21], seed=2))]
    again, other = (engine.submit(ids, seed=seed, **how) for seed in (5, 6))
    results = finish(engine)
    assert results[again].tokens == alone.tokens != results[other].tokens and len(results) == 2 + len(others)
    for number in (again, other, *others):
        known.check(results[number], greedy=False)


def test_a_text_ends_where_it_should(known, engine):
    ids = prompts([6], seed=4)[0]
    how = {"max_tokens": 12, "temperature": 1.5, "seed": 3}
    number = engine.submit(ids, **how)
    whole = finish(engine)[number]
    assert (whole.reason, whole.text) == ("length", text(whole.tokens))
    stop = whole.text[4:6]
    number = engine.submit(ids, stop=["\u1234", stop], **how)
    stopped = finish(engine)[number]
    place = whole.text.find(stop)
    assert (stopped.reason, stopped.text, len(stopped.tokens)) == ("stop", whole.text[:place], place + 2)
    engine._ends = frozenset({whole.tokens[5]})
    number = engine.submit(ids, **how)
    ended, count = finish(engine)[number], whole.tokens.index(whole.tokens[5])
    engine._ends = frozenset()
    assert (ended.reason, ended.tokens, ended.text) == ("end", whole.tokens[: count + 1], whole.text[:count])


def test_other_requests_go_on_past_a_wrong_one(known, engine):
    ids = prompts([5])[0]
    number = engine.submit(ids, max_tokens=3, temperature=0)
    for prompt, options, message in (
        ([], {}, "prompt is empty"),
        ([1, 64], {}, "token 64.*0 to 63.*use the tokenizer"),
        ([-1], {}, "token -1.*use the tokenizer"),
        ([0.5], {}, "must be a list of token ids"),
        (np.ones(40, int), {"max_tokens": 9}, "40 tokens and max_tokens = 9 exceed the 48"),
        (np.ones(48, int), {}, "48 tokens and max_tokens = 1 exceed"),
        (ids, {"max_tokens": 0}, "max_tokens = 0"),
        (ids, {"temperature": -1.0}, "temperature = -1.0"),
        (ids, {"top_k": -1}, "top_k = -1"),
        (ids, {"top_p": 0.0}, "top_p = 0.0"),
        (ids, {"min_p": 2.0}, "min_p = 2.0"),
        (ids, {"seed": -1}, "seed = -1"),
        (ids, {"stop": [""]}, "non-empty"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.submit(prompt, **options)
    results = finish(engine)
    assert [*results] == [number]
    known.check(results[number])


def test_new_parameters_share_nothing_of_the_old(known, engine):
    ids = prompts([19], seed=7)[0]
    for params in (jax.tree.map(lambda x: 1.1 * x, known.params), known.params):
        engine.use(params, known.buffers)
        number = engine.submit(ids, max_tokens=4, temperature=0)
        result = finish(engine)[number]
    known.check(result)


def test_what_cannot_generate_is_refused():
    class Silent(Attention):
        name = "silent"
        keeps = Part.keeps

    class Forgetful(Attention):
        name = "forgetful"

        def keeps(self, c):
            return {}

    PARTS.update(silent=Silent(), forgetful=Forgetful())
    try:
        with pytest.raises(ValueError, match=r"layers with silent, which cannot generate.*launch\.evaluate"):
            Engine(DecoderConfig(**SIZES, layer_pattern=["silent+mlp"]).build(), {})
        known = Known(layer_pattern=["forgetful+mlp"])
        engine = known.engine()
        engine.submit([1], max_tokens=1)
        with pytest.raises(
            ValueError, match=r"layers with forgetful call attention but declare no cache.*launch\.evaluate"
        ):
            engine.step()
    finally:
        del PARTS["silent"], PARTS["forgetful"]
    forced = dataclasses.replace(EXPERTS, forced_balance=True, bias_rate=0.0)
    with pytest.raises(ValueError, match="forced_balance"):
        Engine(DecoderConfig(**SIZES, layer_pattern=["full+experts"], experts=forced).build(), {})
    with pytest.raises(ValueError, match="drops tokens"):
        Engine(DecoderConfig(**SIZES).build(), {}, experts={"capacity": 1.5})
    with pytest.raises(ValueError, match="'slots' must be at least 1"):
        Engine(DecoderConfig(**SIZES).build(), {}, slots=0)
    with pytest.raises(ValueError, match="has no form for generation"):
        Engine(dataclasses.replace(DecoderConfig(**SIZES).build(), cached=None), {})


def test_rows_of_a_donated_tree_take_its_place():
    """In the compute dtype, where a step would cast; norms and the embedding as they are. Without donation the tree stays."""
    model = DecoderConfig(**{**SIZES, "tie_embeddings": False}, num_layers=2, compute_dtype="bfloat16").build()
    params = initialise(model.declared, jax.random.key(0))
    expected = jax.tree.map(np.asarray, params)
    kept = model.cached.apart(params, {})
    weights = model.cached.apart(params, {}, donate=True)
    for one in (kept, weights):
        for i, layer in enumerate(one["layers"]):
            for name, x in {**layer["attention"][0], **layer["mlp"][0]}.items():
                assert x.dtype == (jnp.float32 if name.endswith("_norm") else jnp.bfloat16)
                np.testing.assert_array_equal(x, expected["layers"][name][i].astype(x.dtype))
    assert all(x.is_deleted() for x in (*params["layers"].values(), params["lm_head"]))
    assert weights["embedding"] is params["embedding"] and weights["lm_head"].dtype == jnp.bfloat16


def step_on_an_h200(model, tp=1):
    """Returns a step of eight single tokens, lowered for one or several."""
    target = target_of(None, tp, "h200", None)
    mesh = make_mesh(tp=tp, devices=target.devices())
    engine = Engine(model, None, mesh=mesh, slots=8, length=256)

    def placed(x, dims=""):
        where = sharding(mesh, dims.split() or ["_"] * x.ndim, PARAMETERS, shape=x.shape, what="x")
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)

    declared = model.declared | model.declared["layers"]
    weights = jax.tree_util.tree_map_with_path(
        lambda path, x: placed(x, declared[path[-1].key].dims.removeprefix("L ") if path[-1].key in declared else ""),
        jax.eval_shape(model.cached.apart, shapes(model.declared), shapes(model.buffers)),
    )
    dims = {"attention": "_ _ _ _ K _"} if tp > 1 else {}
    kept, last = jax.eval_shape(engine._empty)
    kept = {part: jax.tree.map(partial(placed, dims=dims.get(part, "")), arrays) for part, arrays in kept.items()}
    data = jax.tree.map(placed, (last, engine._tables, np.zeros((8, 4), np.int32)))
    with target.lowering(), in_cuda_graphs():
        return engine._step.lower(weights, kept, *data)


@pytest.mark.parametrize("tp", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.slow
def test_a_step_on_an_h200_copies_no_matrix(tp):
    """Compiled for one, or two: what a step needs beside weights and cache is less than any matrix of an MLP."""
    sizes = {"model_dim": 1024, "num_heads": 8, "num_kv_heads": 2, "head_dim": 128, "ffn_dim": 4096, "vocab_size": 8192}
    model = DecoderConfig(**sizes, num_layers=2, compute_dtype="bfloat16", tie_embeddings=False).build()
    with without_code():  # the kernels' own memory is not asked for
        lowered = step_on_an_h200(model, tp)
    # Without a GPU to time products on.
    program = lowered.compile(compiler_options={"xla_gpu_autotune_level": 0})
    # The host waits for nothing that the device computes: it starts the next step meanwhile.
    assert not re.search(r" (conditional|while)\(", program.as_text())
    memory, cache = program.memory_analysis(), 8 * 256 * 2 * 2 * 2 * 128 * 2 // tp
    assert memory.alias_size_in_bytes >= cache and memory.temp_size_in_bytes < 1024 * 1024 * 2, memory


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_of_every_kind_is_made_for_an_h200(kind):
    """Its kernels take single tokens that go on from states, in bfloat16."""
    options = {"num_layers": 2, **SIZES, "compute_dtype": "bfloat16", **KINDS[kind]}
    text = step_on_an_h200(DecoderConfig(**options).build()).as_text()
    assert "xla.gpu.ptx" in text


draw = jax.jit(sample)


def chosen(logits, count, **options):
    """Returns how often each token is drawn: first of as many seeds, then of one seed at as many places."""
    shares, rows = [], jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (count, len(logits)))
    for asked in (
        [(Sampling(**options, seed=i), 0) for i in range(count)],
        [(Sampling(**options), i) for i in range(count)],
    ):
        tokens, scores = draw(rows, Choices.of(asked))
        np.testing.assert_allclose(scores, jax.nn.log_softmax(rows[0])[tokens], rtol=1e-5)
        shares.append(np.bincount(tokens, minlength=len(logits)) / count)
    return np.stack(shares)


@pytest.mark.parametrize("options", [{"temperature": 0}, {}, {"top_k": 3}], ids=str)
def test_which_tokens_are_drawn_is_decided_before_a_step(options):
    """By the requests, and not on the device, for whose answer the host would wait."""
    choices = Choices.of([(Sampling(temperature=0, top_k=2), 0), (Sampling(**options), 0)])
    assert (choices is None, getattr(choices, "top_k", None) is None) == (
        options == {"temperature": 0},
        "top_k" not in options,
    )
    assert not re.search(r"\b(cond|while)\[", str(jax.make_jaxpr(sample)(jnp.zeros((2, 8)), choices)))


def test_tokens_are_drawn_as_often_as_they_are_likely():
    p = np.array([0.4, 0.3, 0.15, 0.1, 0.05])
    for options, stay in (
        ({}, 5),
        ({"top_k": 3}, 3),
        ({"top_p": 0.7}, 2),
        ({"top_p": 0.71}, 3),
        ({"min_p": 0.3}, 3),
        ({"top_k": 4, "top_p": 0.8}, 3),  # of the four that stay, 0.95 in all, two have less than 0.8 and three more
        ({"temperature": 0.0}, 1),
    ):
        expected = np.where(np.arange(5) < stay, p, 0)
        assert np.abs(chosen(np.log(p) + 7, 4096, **options) - expected / expected.sum()).max() < 0.03, options
    expected = p**2 / (p**2).sum()
    assert np.abs(chosen(np.log(p), 4096, temperature=0.5) - expected).max() < 0.03


def test_pages_are_shared_and_come_back():
    pages = Pages(6, 4, shares=True)
    prompt = np.arange(13)
    digests = pages.digests(prompt)
    assert len(digests) == 3 and pages.digests(prompt[:12]) == digests[:2]  # the last token is always computed
    assert not {*digests} & {*pages.digests(np.append([50] * 4, prompt[4:]))}  # keys depend on all tokens before
    first = pages.take(4)
    for page, digest in zip(first, digests, strict=False):
        pages.publish(page, digest)
    assert pages.shared(digests) == first[:3]
    pages.release(first)
    assert pages.room == 6 - 3  # the other request still has what it shares
    pages.release(first[:3])
    assert pages.room == 6 and pages.shared(pages.digests(np.append(prompt[:9], 50))) == first[:2]
    others = pages.take(4)  # all but the two in use: what is known goes last
    assert not {*others} & {*first[:2]} and pages.room == 0 and pages.shared(digests[2:]) == []
    pages.release(others)
    pages.forget()
    assert pages.shared(digests) == [] and Pages(6, 4, shares=False).digests(prompt) == []


def test_streamed_text_never_changes():
    def decode(ids):
        return bytes(ids).decode("utf-8", errors="replace")

    streamed, shown = Streamed(decode, ["END"]), []
    for token in "aé EEN".encode():
        shown.append(streamed.add(token))
    assert shown == ["a", "", "é", " ", "", "E", ""] and streamed.rest("aé EENx") == "ENx"


def check_that_steps_copy_nothing(engine):
    """All that is kept is the same memory before and after a step, and what a step needs beside it does not grow with it."""
    programs, step = [], engine._step

    def compiled(*data):
        programs.append(step.lower(*data).compile())
        return step(*data)

    engine._step = compiled
    engine.submit([1, 2, 3], max_tokens=2)
    while not engine.idle:
        engine.step()
    for program in programs:
        memory = program.memory_analysis()
        assert memory.alias_size_in_bytes >= engine.cache_bytes > 5e6
        assert memory.temp_size_in_bytes < engine.cache_bytes / 10


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["attention", "hybrid", "sparse"])
def test_a_step_copies_nothing_of_what_is_kept(kind):
    engine = Known(**KINDS[kind]).engine(pages=20_000)
    check_that_steps_copy_nothing(engine)
    assert engine.cache_bytes == sum(x.nbytes for x in jax.tree.leaves(engine._kept[0]))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [1, 64])
@pytest.mark.parametrize("chunk", [8, LENGTH])
def test_texts_of_every_kind(kind, count, chunk):
    known = Known(**KINDS[kind])
    engine = known.engine(slots=count, chunk=chunk)
    lengths = np.random.default_rng(3).integers(1, 36, count)
    numbers = [engine.submit(ids, max_tokens=8 - i % 8, temperature=0) for i, ids in enumerate(prompts(lengths))]
    results = finish(engine)
    for number in numbers:
        known.check(results[number])
    assert engine.programs == 2


def placed(tree, declared, mesh):
    return jax.tree.map(
        jax.device_put,
        tree,
        map_declared(lambda path, p: sharding(mesh, p.dims.split(), PARAMETERS, shape=p.shape, what=path), declared),
    )


MESHES = ({"tp": 2}, {"tp": 4}, {"ep": 2, "tp": 2}, {"sp": 2}, {"fsdp": 2, "tp": 2})


@pytest.mark.slow
@pytest.mark.parametrize("sizes", MESHES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_texts_of_every_kind_on_a_mesh(kind, sizes):
    """Parameters stay as training stores them; over sp rows are split, and no request is."""
    options = {"num_kv_heads": 4} | KINDS[kind]
    if "gated_delta" in options:
        options |= {"gated_delta": dataclasses.replace(DELTA, num_key_heads=4)}
    known, mesh = Known(**options), make_mesh(**sizes)
    params, buffers = placed(known.params, known.model.declared, mesh), placed(known.buffers, known.model.buffers, mesh)
    sizes = {"slots": 3, "length": LENGTH, "page": 4, "chunk": 8}
    engine = Engine(known.model, params, buffers=buffers, mesh=mesh, **sizes)
    numbers = [engine.submit(ids, max_tokens=4, temperature=0) for ids in prompts([1, 3, 30, 17, 9])]
    results = finish(engine)
    for number in numbers:
        known.check(results[number])
    assert engine.programs == 2
