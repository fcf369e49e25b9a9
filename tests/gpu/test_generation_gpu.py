"""Texts of the engine on a CUDA device: those of the full forward without a cache."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_generation import KINDS, LENGTH, Known, finish, prompts
from test_operations_gpu import has_cuda

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not has_cuda(), reason="JAX sees no CUDA device here")]

WIDE = {"model_dim": 256, "num_heads": 4, "num_kv_heads": 2, "head_dim": 128, "ffn_dim": 512, "qk_norm": True}
MODELS = {
    "attention": (KINDS["attention"], 2e-3),
    "hybrid": (KINDS["hybrid"], 2e-3),
    "wide": (WIDE | {"compute_dtype": "bfloat16"}, 0.1),  # log-probabilities of products that are rounded to 8 bits
}


@pytest.mark.parametrize("name", MODELS)
def test_texts_are_those_of_the_full_forward(name):
    """Each token is the most likely one, but for what rounding decides, and its log-probability that of the full forward."""
    options, limit = MODELS[name]
    known = Known(**options)
    engine = known.engine(slots=5, page=16, chunk=16)
    asked = [*prompts([1, 3, 30, 17, 33, 9]), prompts([30])[0]]
    numbers = [engine.submit(ids, max_tokens=8, temperature=0) for ids in asked]
    results = finish(engine)
    for number in numbers:
        result = results[number]
        ids = [*result.prompt.tolist(), *result.tokens]
        expected = known._log_probabilities(jnp.asarray([ids + [0] * (LENGTH - len(ids))], jnp.int32))
        expected = np.asarray(expected)[len(result.prompt) - 1 : len(ids) - 1]
        written = expected[np.arange(len(result.tokens)), result.tokens]
        np.testing.assert_allclose(result.log_probabilities, written, atol=limit)
        assert (expected.max(-1) - written).max() <= limit
    assert engine.programs == 2
    jax.block_until_ready(engine._kept)
