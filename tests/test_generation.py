"""Texts of the engine: those of the full forward without a cache, whatever else is under way."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejdist.generation import Engine
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
from ejdist.models.model import StepContext
from ejdist.models.parameters import initialise
from ejdist.operations import bind_ops

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

    def __init__(self, **options):
        self.model = DecoderConfig(**{"num_layers": 2, **SIZES, **options}).build()
        drawn = initialise(self.model.declared, jax.random.key(1)), initialise(self.model.buffers, jax.random.key(2))
        self.params, self.buffers = jax.tree.map(
            lambda x: x + 0.1 * jax.random.normal(jax.random.key(x.size), x.shape), drawn
        )
        without_noise = DecoderConfig(**{"num_layers": 2, **SIZES, **options})
        without_noise.experts = ExpertsShape(**vars(without_noise.experts) | {"jitter": 0.0})
        logits_at, ops = without_noise.build().logits_at, bind_ops(None)

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


@pytest.fixture(scope="module", params=["attention", "hybrid"])
def known(request):
    return Known(**KINDS[request.param])


def test_texts_are_those_of_the_full_forward(known):
    """More requests than slots, prompts shorter and longer than a chunk and a page, some of which begin alike; pages and states
    are used again. Two programs serve them all."""
    engine = known.engine()
    first = prompts([17])[0]
    asked = [*prompts([1, 3, 30], seed=1), first, first, first[:9], np.append(first, 3)]
    numbers = [engine.submit(ids, max_tokens=2 + i % 4, temperature=0) for i, ids in enumerate(asked)]
    results = finish(engine)
    drawn = engine.submit(first, max_tokens=6, temperature=0.9, top_k=20, top_p=0.9, min_p=0.01, seed=5)
    known.check(finish(engine)[drawn], greedy=False)
    for i, number in enumerate(numbers):
        assert (len(results[number].tokens), results[number].reason) == (2 + i % 4, "length")
        known.check(results[number])
    assert engine.programs == 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [1, 64])
@pytest.mark.parametrize("chunk", [8, LENGTH])
def test_texts_of_every_kind(kind, count, chunk):
    known = Known(**KINDS[kind])
    engine = known.engine(slots=count, chunk=chunk)
    lengths = np.random.default_rng(3).integers(1, 36, count)
    numbers = [engine.submit(ids, max_tokens=1 + i % 8, temperature=0) for i, ids in enumerate(prompts(lengths))]
    results = finish(engine)
    for number in numbers:
        known.check(results[number])
    assert engine.programs == 2
