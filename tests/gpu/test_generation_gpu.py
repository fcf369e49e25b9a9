"""Texts of the engine on a CUDA device: those of the full forward without a cache."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_generation import KINDS, LENGTH, Known, finish, placed, prompts
from test_operations_gpu import has_cuda
from test_packed import with_represented

from ejdist.generation import Engine
from ejdist.mesh import make_mesh

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not has_cuda(), reason="JAX sees no CUDA device here")]

WIDE = {"model_dim": 256, "num_heads": 4, "num_kv_heads": 2, "head_dim": 128, "ffn_dim": 512, "qk_norm": True}
MODELS = {
    "attention": (KINDS["attention"], 2e-3),
    "hybrid": (KINDS["hybrid"], 2e-3),
    "sparse": (KINDS["sparse"], 2e-3),
    "wide": (WIDE | {"compute_dtype": "bfloat16"}, 0.1),  # log-probabilities of products that are rounded to 8 bits
}


PROMPTS = [*prompts([1, 3, 30, 17, 33, 9]), prompts([30])[0]]


def check(known, engine, limit):
    """Each token is the most likely one, but for what rounding decides, and its log-probability that of the full forward."""
    numbers = [engine.submit(ids, max_tokens=8, temperature=0) for ids in PROMPTS]
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


@pytest.mark.parametrize("name", MODELS)
def test_texts_are_those_of_the_full_forward(name):
    options, limit = MODELS[name]
    known = Known(**options)
    check(known, known.engine(slots=5, page=16, chunk=16), limit)


@pytest.mark.parametrize("form", ["int4", "mxfp4"])
def test_texts_of_packed_weights(form):
    """Against a full forward with the numbers that are packed. Products of bfloat16 are compared in test_operations_gpu.py: a
    full forward rounds those numbers once more."""
    known = Known(**WIDE)
    engine = known.engine(slots=5, page=16, chunk=16, weights=form, platform="triton")
    known.params = with_represented(known.params, "dense", form)
    check(known, engine, 2e-3)


@pytest.mark.parametrize("platform", [None, "triton"])
def test_texts_over_the_pages_of_two_devices(platform):
    if jax.device_count() < 2:
        pytest.skip("JAX sees one CUDA device here")
    known, mesh = Known(**WIDE, compute_dtype="bfloat16"), make_mesh(sp=2)
    params, buffers = placed(known.params, known.model.declared, mesh), placed(known.buffers, known.model.buffers, mesh)
    options = {"slots": 5, "length": LENGTH, "page": 16, "chunk": 16, "cache": "spread", "platform": platform}
    check(known, Engine(known.model, params, buffers=buffers, mesh=mesh, **options), 0.1)
