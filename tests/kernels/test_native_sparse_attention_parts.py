"""The choice and the selected branch of native sparse attention by themselves, on each backend, and joined by their lse."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grid import error, value_and_gradients

from kernels import Unsupported
from kernels.engines.attention.softmax import merge
from kernels.framework.interpret import interpret
from kernels.ops.native_sparse_attention import (
    block_rows,
    choice_op,
    means,
    native_sparse_attention,
    selected_op,
)

RNG = np.random.default_rng(0)
B, T, S, N, K, H, HV, SIZE = 2, 16, 24, 4, 2, 8, 6, 4
BACKENDS = ["xla", "triton", "pallas"]


def normal(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


# Padding between two documents, and one that begins late.
STARTS = np.stack([np.repeat([0, -1, 9, 20], [7, 2, 11, 4]), np.repeat([0, 3], [3, 21])]).astype(np.int32)
ARRAYS = {"query": normal(B, T, N, H), "key": normal(B, S, K, H), "value": normal(B, S, K, HV)}
NAMED = RNG.integers(-1, 6, (B, T, K, 5)).astype(np.int32)
CALLS = {
    "documents": ARRAYS | {"block_indices": NAMED, "starts": STARTS, "q_start": np.int32(5)},
    "after fewer keys than queries": ARRAYS
    | {n: ARRAYS[n][:, :12] for n in ("key", "value")}
    | {"block_indices": NAMED % 3, "q_start": np.int32(12)},
    "after keys that end within a block": ARRAYS
    | {n: ARRAYS[n][:, :10] for n in ("key", "value")}
    | {"block_indices": NAMED % 3, "q_start": np.int32(12)},
}


def on(backend):
    return contextlib.nullcontext() if backend == "xla" else interpret()


def finite(x):
    return np.where(np.isfinite(x), x, 0)


@pytest.mark.parametrize("backend", ["triton", *(pytest.param(b, marks=pytest.mark.slow) for b in ("xla", "pallas"))])
# With documents, a position and named blocks at once; the others have fewer keys.
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n != "documents")) for n in CALLS])
def test_the_selected_branch_is_its_contract(name, backend):
    arguments = CALLS[name] | {"block_size": SIZE}
    wanted, slopes, d = value_and_gradients(selected_op.function, arguments)
    with on(backend):
        run = functools.partial(selected_op, platform=backend)
        got, gradients, _ = value_and_gradients(lambda **a: run(**a), arguments, d)
    for one, other in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(np.isfinite(one), np.isfinite(other))
        assert error(finite(one), finite(other)) < 3e-6
    assert (got[1] == -np.inf).any() == (name == "documents"), "of a query without a key"
    for argument, slope in slopes.items():
        assert error(gradients[argument], slope) < 3e-6, argument


@pytest.mark.parametrize("backend", [pytest.param(b, marks=[pytest.mark.slow] * (b == "xla")) for b in BACKENDS])
def test_the_choice_is_its_contract_and_that_of_the_operation(backend):
    of_keys = means(jnp.asarray(ARRAYS["key"]), block_rows(jnp.asarray(STARTS), SIZE)[0])
    arguments = {"means": of_keys, "starts": STARTS, "q_start": np.int32(8), "block_size": SIZE, "num_blocks": 4}
    wanted = choice_op.function(ARRAYS["query"], **arguments)
    with on(backend):
        got = choice_op(ARRAYS["query"], **arguments, platform=backend)
    np.testing.assert_array_equal(np.sort(got), np.sort(wanted))
    options = {"segment_ids": np.stack([np.repeat([0, -1, 1, 2], [7, 2, 11, 4]), np.repeat([0, 1], [3, 21])])}
    options |= {"block_size": SIZE}
    chosen = native_sparse_attention(**ARRAYS, **options, block_counts=4)
    given = native_sparse_attention(**ARRAYS, **options, block_indices=got)
    assert error(given, chosen) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_parts_of_the_keys_merge_to_the_whole(backend):
    """The first blocks by themselves, before all queries, and the others: as one call, also backward with the lse of both."""
    query, split = ARRAYS["query"], 8
    keys, rest = ([ARRAYS[n][:, part] for n in ("key", "value")] for part in (slice(split), slice(split, None)))
    named, size = np.where(NAMED < 0, -1, NAMED), {"block_size": SIZE}
    calls = [
        (keys, np.where(named < split // SIZE, named, -1), split),
        (rest, np.where(named < split // SIZE, -1, named - split // SIZE), S - T - split),
    ]
    run = functools.partial(selected_op, platform=backend, **size)
    d_out = normal(B, T, N, HV)
    with on(backend):
        # Of the first part every query is after all keys.
        parts = [run(query, *x, n, q_start=jnp.int32(first)) for x, n, first in calls]
        out, lse = merge(parts[0][0], parts[0][1], *parts[1])
        delta = np.sum(d_out * out, -1)
        saved = {"d_out": jnp.asarray(d_out), "lse": lse, "delta": jnp.asarray(delta)}
        d = [
            selected_op.backward(saved, query, *x, n, q_start=jnp.int32(first), platform=backend, **size)
            for x, n, first in calls
        ]
    (whole, wanted_lse), slopes, _ = value_and_gradients(
        selected_op.function,
        ARRAYS | {"block_indices": NAMED} | size,
        (d_out, np.zeros((B, T, N), np.float32)),
    )
    assert error(out, whole) < 3e-6 and error(finite(lse), finite(wanted_lse)) < 3e-6
    assert error(d[0]["query"] + d[1]["query"], slopes["query"]) < 3e-6
    for name in ("key", "value"):
        assert error(jnp.concatenate([d[0][name], d[1][name]], 1), slopes[name]) < 3e-6, name


def test_heads_that_are_too_wide_are_refused_by_name():
    wide = jax.ShapeDtypeStruct((1, 8, 1, 300), jnp.float32)
    indices, number = (jax.ShapeDtypeStruct(s, jnp.int32) for s in ((1, 8, 1, 2), ()))
    with pytest.raises(Unsupported, match="H = 300 exceeds the maximum of 256"):
        jax.eval_shape(functools.partial(selected_op, platform="triton", block_size=4), wide, wide, wide, indices)
    means_of, starts = jax.ShapeDtypeStruct((1, 1, 2, 300), jnp.float32), jax.ShapeDtypeStruct((1, 8), jnp.int32)
    with pytest.raises(Unsupported, match="H = 300 exceeds the maximum of 256"):
        jax.eval_shape(functools.partial(choice_op, platform="triton", block_size=4), wide, means_of, starts, number)
