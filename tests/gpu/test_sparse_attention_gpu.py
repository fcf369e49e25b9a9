"""Native sparse attention on a CUDA device at the widths of models: the numbers of XLA in float32, and the same bits twice.

Run with the command in CONTRIBUTING.md. Small cases and every tuning candidate are in test_operations_gpu.py.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grid import error
from test_operations_gpu import has_cuda

from kernels import native_sparse_attention
from kernels.ops.native_sparse_attention import selected_op

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not has_cuda(), reason="JAX sees no CUDA device here")]

RNG = np.random.default_rng(0)
# Where weights agree to about 1e-5, another block may be chosen (README, "The choice"): for how many tokens, how far off each.
SWAPPED, OTHER_CHOICE = 5, 0.05
# T, N, K, H, Hv; dtype; how far a result may be off; options.
CALLS = {
    "chosen": (
        (1024, 32, 2, 128, 128), "bfloat16", 1.5e-2, {"block_size": 64, "block_counts": 8, "sliding_window": 128},
    ),
    "documents": (
        (1500, 16, 1, 128, 64), "bfloat16", 1.5e-2,
        {"block_size": 32, "block_counts": 8, "sliding_window": 100, "cu_seqlens": np.array([0, 333, 340, 1100, 1450])},
    ),
    "given": (
        (1024, 8, 2, 64, 64), "float16", 2e-3,
        {"block_size": 16, "sliding_window": 64, "block_indices": RNG.integers(-1, 64, (1, 1024, 2, 6))},
    ),
    "float32": ((700, 6, 2, 64, 48), "float32", 2e-6, {"block_size": 20, "block_counts": 6, "sliding_window": 33}),
    "wide": (
        (1024, 16, 1, 192, 128), "bfloat16", 1.5e-2, {"block_size": 128, "block_counts": 4, "sliding_window": 64},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_numbers_are_those_of_xla(name):
    (T, N, K, H, HV), dtype, limit, options = CALLS[name]
    shapes = {"query": (1, T, N, H), "key": (1, T, K, H), "value": (1, T, K, HV)}
    shapes |= dict.fromkeys(("g_cmp", "g_slc", "g_swa"), (1, T, N))
    rng = np.random.default_rng(sorted(CALLS).index(name))
    arrays = {n: jnp.asarray(rng.standard_normal(s), dtype) for n, s in shapes.items()}

    @functools.partial(jax.jit, static_argnames="platform")
    def both(arrays, platform):
        out, pull = jax.vjp(lambda a: native_sparse_attention(**a, **options, platform=platform), arrays)
        d = jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape).astype(out.dtype)
        return {"out": out} | pull(d)[0]

    got, again = (both(arrays, "triton") for _ in range(2))
    assert all((got[n] == again[n]).all() for n in got)
    with jax.default_matmul_precision("highest"):
        wanted = both({n: x.astype(jnp.float32) for n, x in arrays.items()}, "xla")
    gate, exact = (np.asarray(x["g_slc"], np.float32)[0] for x in (got, wanted))
    chosen_alike = np.linalg.norm(gate - exact, axis=-1) <= OTHER_CHOICE * np.linalg.norm(exact, axis=-1).clip(1)
    assert (~chosen_alike).sum() <= SWAPPED
    for n, x in got.items():
        # A gradient of keys or values has something of every query.
        rows = slice(None) if n in ("key", "value") else chosen_alike
        assert error(x[0, rows], wanted[n][0, rows]) <= limit, n


@pytest.mark.parametrize("name", ["documents", "after fewer keys than queries"])
def test_the_selected_branch_by_itself(name):
    """What a rank runs over its own keys, and over blocks of others: (out, lse), and gradients."""
    T, S, named = (1024, 1536, 24) if name == "documents" else (1024, 512, 8)
    starts = {"starts": jnp.asarray(np.repeat([0, 301, 1001], [301, 700, 535])[None], jnp.int32)}
    options = {"q_start": jnp.int32(512), "block_size": 64} | (starts if name == "documents" else {})
    indices = jnp.asarray(RNG.integers(-1, named, (1, T, 2, 6)), jnp.int32)
    arrays = [
        jnp.asarray(RNG.standard_normal((1, n, heads, 128)), "bfloat16") for n, heads in ((T, 32), (S, 2), (S, 2))
    ]

    @functools.partial(jax.jit, static_argnames="platform")
    def both(arrays, platform):
        call = functools.partial(selected_op, block_indices=indices, **options, platform=platform)
        (out, lse), pull = jax.vjp(lambda a: call(*a), arrays)
        d = jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape).astype(out.dtype)
        return out, jnp.where(jnp.isfinite(lse), lse, 0), pull((d, jnp.zeros_like(lse)))[0]

    got, again = (jax.tree.leaves(both(arrays, "triton")) for _ in range(2))
    assert all((a == b).all() for a, b in zip(got, again, strict=True))
    with jax.default_matmul_precision("highest"):
        wanted = jax.tree.leaves(both([x.astype(jnp.float32) for x in arrays], "xla"))
    for a, w in zip(got, wanted, strict=True):
        assert error(a, w) <= 1.5e-2
