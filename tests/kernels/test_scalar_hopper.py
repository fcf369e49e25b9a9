"""Hopper's kernel of the walks of linear attention with one decay a head: interpreted, against the reference and the kernels in
Triton."""

import functools
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from grid import error, value_and_gradients
from hopper import interpreted
from test_delta_triton import spoiled
from test_delta_walks_hopper import documents_of

from kernels.engines.scan import gluon_delta_calls, gluon_scalar_calls
from kernels.engines.scan.chunks import ChunkConfig
from kernels.engines.scan.triton_scalar_calls import Tokens
from kernels.framework.interpret import interpret
from kernels.ops.linear_attention import op
from kernels.toolchains.simulate.ahead_of_time import call_of, export_cuda
from kernels.toolchains.triton import SHARED_MEMORY

OUTPUTS = ("out", "final_state")
TILES = ChunkConfig(64, None, 128, 8, 3, 1, 1, 8)
FLOATS = ("query", "key", "value")


def drawn(T, N, dtype, ids, decay, states):
    rng = np.random.default_rng(3)
    arrays = {name: rng.standard_normal((1, T, N, 128)) for name in FLOATS}
    g = -np.exp(rng.standard_normal((1, T, N)) - 3)
    arrays = {name: jnp.asarray(x.astype(np.float32)).astype(dtype) for name, x in arrays.items()}
    if decay is not None:
        arrays["g"] = jnp.asarray(np.where(rng.random(g.shape) < 0.1, decay, g).astype(np.float32))
    if states:
        arrays["initial_state"] = jnp.asarray(rng.standard_normal((1, 1, N, 128, 128)).astype(np.float32))
    return arrays | ({} if ids is None else {"segment_ids": jnp.asarray(ids)})


def values_and_gradients(arguments, d, **how):
    outputs, gradients, d = value_and_gradients(functools.partial(op, **how), arguments, d)
    return dict(zip(OUTPUTS, outputs, strict=True)) | gradients, d


@pytest.mark.parametrize(
    ("dtype", "documents", "decay", "states", "splits"),
    [
        ("bfloat16", True, -np.inf, True, 2),
        pytest.param("float16", False, None, False, 1, marks=pytest.mark.slow),
        pytest.param("bfloat16", False, -20.0, True, 4, marks=pytest.mark.slow),
        pytest.param("float16", True, -100.0, False, 3, marks=pytest.mark.slow),
        pytest.param("bfloat16", True, 0.0, True, 1, marks=pytest.mark.slow),
    ],
)
def test_walks(monkeypatch, dtype, documents, decay, states, splits):
    """Rows that are whole, or of parts, the last of them shorter: more chunks than a ring has tiles, decays of every size or none,
    states in and out, and NaN in padding at both ends and inside. Operands are rounded as in Triton."""
    T = 320
    ids = documents_of(T) if documents else None
    clean = drawn(T, 2, dtype, ids, decay, states)
    wide = {n: x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x for n, x in clean.items()}
    wanted, d = values_and_gradients(wide, None, platform="xla")
    arguments = clean if ids is None else spoiled(clean, ids, *FLOATS)
    if documents:
        d = (jnp.where(jnp.asarray(ids < 0)[..., None, None], jnp.nan, d[0]), *d[1:])
    tiles = replace(TILES, splits=splits)
    with interpreted(monkeypatch, op, gluon_delta_calls):
        one = values_and_gradients(arguments, d, platform="triton", cfg=replace(tiles, hopper_walks=True))[0]
        other = values_and_gradients(arguments, d, platform="triton", cfg=tiles)[0]
    for name in wanted:
        assert error(one[name], wanted[name]) <= min(1.2e-2, 1.05 * error(other[name], wanted[name])), name
        assert error(one[name], other[name]) <= 2e-3, name
