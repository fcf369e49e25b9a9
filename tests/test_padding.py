"""What lies in padding, NaN or infinity, reaches nothing else: outputs and gradients, of every attention on every backend."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejdist
import kernels
from ejdist import make_mesh
from kernels.framework.interpret import interpret

T, N, K, H = 24, 4, 2, 16
IDS = np.array([[0] * 7 + [-1] * 3 + [1] * 9 + [-1] * 5, [-1] * 2 + [0] * 15 + [-1] * 1 + [3] * 6], np.int32)


def normal(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def rows(*last, seed=0):
    """Returns an array [B, T, ...] of a token each."""
    return normal(2, T, *last, seed=seed)


SINKS = {"softmax_aux": jnp.asarray(normal(N))}
QKV = {"query": rows(N, H), "key": rows(K, H, seed=1), "value": rows(K, H, seed=2)}
SEGMENTS = {"q_segment_ids": IDS, "kv_segment_ids": IDS}


def flash(arrays, **how):
    return kernels.flash_attention(**arrays, **SEGMENTS, causal=True, return_lse=True, **how)


def oracle(arrays):
    call = kernels.flash_attention.prepare(**arrays, **SEGMENTS).call
    return kernels.flash_attention.op.function(**call.arguments)


def ring(scheme):
    return lambda arrays: ejdist.ring_attention(**arrays, **SEGMENTS, causal=True, scheme=scheme, mesh=make_mesh(sp=4))


def latent(arrays):
    w_kc, w_vc = jnp.asarray(normal(8, N, H)), jnp.asarray(normal(8, N, H, seed=1))
    return kernels.flash_mla(arrays["query"], arrays["key_value"], w_kc, w_vc, segment_ids=IDS, causal=True)


def blocksparse(arrays):
    blocks = jnp.ones((1, 1, 3, 3), bool)
    return kernels.blocksparse_attention(**arrays, block_mask=blocks, block_size=8, **SEGMENTS, causal=True)


def differential(arrays):
    lambda_ = jnp.linspace(0.1, 0.4, N)
    return kernels.differential_attention(**arrays, lambda_=lambda_, segment_ids=IDS, causal=True)


def mixture(arrays):
    w_query, w_out = jnp.asarray(normal(4, 8, H)), jnp.asarray(normal(4, H, 8))
    options = {"top_k": 2, "causal": True, "segment_ids": IDS}
    return kernels.mixture_of_attention_heads(**arrays, w_query=w_query, w_out=w_out, **options)


def native_sparse(arrays):
    options = {"block_size": 4, "block_counts": 2, "sliding_window": 3, "segment_ids": IDS}
    return kernels.native_sparse_attention(**arrays, **options)


WIDE = {"x": rows(8), "key": rows(H), "value": rows(H, seed=1), "router_logits": rows(4)}
PAIRS = {"query": rows(N, H), "query_2": rows(N, H, seed=3), "key": rows(K, H, seed=1), "key_2": rows(K, H, seed=4)}
GATES = {name: rows(N, seed=i) for i, name in enumerate(("g_cmp", "g_slc", "g_swa"))}
CALLS = {  # name -> (function of arrays [B, T, ...], them, under what it runs)
    "xla": (lambda a: flash(a, platform="xla"), QKV | SINKS, contextlib.nullcontext),
    "contract": (
        lambda a: kernels.flash_attention.op.function(
            **kernels.flash_attention.prepare(**a, **SEGMENTS).call.arguments
        ),
        QKV,
        contextlib.nullcontext,
    ),
    "triton": (lambda a: flash(a, platform="triton"), QKV | SINKS, interpret),
    "pallas": (lambda a: flash(a, platform="pallas"), QKV | SINKS, interpret),
    "weights": (
        lambda a: kernels.attention(**a, mask_info=kernels.MaskInfo.from_segments(IDS)),
        QKV,
        contextlib.nullcontext,
    ),
    "ring": (ring("ring"), QKV | SINKS, contextlib.nullcontext),
    "all_gather": (ring("all_gather"), QKV | SINKS, contextlib.nullcontext),
    "ulysses": (ring("ulysses"), QKV | SINKS, contextlib.nullcontext),
    "blocksparse": (blocksparse, QKV, contextlib.nullcontext),
    "latent": (latent, {"query": rows(N, H), "key_value": rows(8)}, contextlib.nullcontext),
    "differential": (differential, PAIRS | {"value": rows(K, 2 * H)}, contextlib.nullcontext),
    "quantized": (
        lambda a: kernels.quantized_attention(**a, segment_ids=IDS, block_size=8),
        QKV,
        contextlib.nullcontext,
    ),
    "mixture": (mixture, WIDE, contextlib.nullcontext),
    "native sparse": (native_sparse, QKV | GATES, contextlib.nullcontext),
}


def in_padding(x, fill):
    """Returns an array of tokens with this in its padding, and what is of no token as it is."""
    if x.shape[:2] != (2, T):
        return x
    return jnp.where((IDS >= 0).reshape(2, T, *(1,) * (x.ndim - 2)), x, fill)


# What calls the attention of another row, or is written in the same way; and the longest of those that gather keys.
OF_ANOTHER = ("pallas", "ring", "all_gather", "differential", "quantized", "mixture", "latent", "native sparse")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in OF_ANOTHER)) for n in CALLS])
def test_what_lies_in_padding_reaches_nothing_else(name):
    """NaN and infinity in the padding of every input and cotangent give the outputs and gradients that zeros give."""
    function, arrays, around = CALLS[name]

    @jax.jit
    def run(fill):
        filled = {n: in_padding(x, fill) for n, x in arrays.items()}
        outputs, pull = jax.vjp(function, filled)

        def cotangent(y):
            return in_padding(jnp.cos(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape).astype(y.dtype), fill)

        return outputs, pull(jax.tree.map(cotangent, outputs))

    with around():
        want, *others = (jax.tree.map(np.asarray, run(jnp.float32(fill))) for fill in (0, np.nan, np.inf))
    tokens = [x[IDS >= 0] for x in jax.tree.leaves(want) if x.shape[:2] == (2, T)]
    assert tokens and all(np.isfinite(x).all() for x in tokens)
    for got in others:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), got, want)
