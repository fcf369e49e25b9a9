"""Prompts over pages on Hopper: flash attention's kernel, which loads its blocks of keys from pages, interpreted."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grid import FLOOR, error
from hopper import interpreted
from kernel_names import names_of_kernels

from kernels.engines.attention import triton_calls
from kernels.framework.interpret import interpret
from kernels.ops.paged_attention import op, page_op
from kernels.ops.paged_attention.contract import HOPPER
from kernels.toolchains.simulate import ahead_of_time as checks

BF16 = FLOOR["bfloat16"]


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(op, "_programs", {})
    with interpreted(monkeypatch, page_op, triton_calls):
        yield


def arguments_of(lens, T, heads, widths, page, longest, seed=0):
    """Returns queries, and pages that hold NaN where there is no token; entries of a table past the last page point nowhere."""
    rng = np.random.default_rng(seed)
    (N, K), B, each = heads, len(lens), -(-longest // page)
    pages = B * each + 2
    tables = rng.permutation(pages)[: B * each].reshape(B, each)
    caches = [np.full((pages, page, K, width), np.nan, np.float32) for width in widths]
    for b, n in enumerate(lens):
        for x in caches:
            at = np.arange(n)
            x[tables[b, at // page], at % page] = rng.standard_normal((n, K, x.shape[3]))
        tables[b, -(-n // page) :] = 10**6
    query = rng.standard_normal((B, T, N, widths[0]))
    key, value = (jnp.asarray(x, jnp.bfloat16) for x in caches)
    return {
        "query": jnp.asarray(query, jnp.bfloat16),
        "key_cache": key,
        "value_cache": value,
        "kv_lens": jnp.asarray(lens, jnp.int32),
        "block_tables": jnp.asarray(tables, jnp.int32),
    }


CALLS = {
    "pages_of_16": ((300, 150), 150, (2, 1), (128, 128), 16, {}),
    "window": ((290, 131), 140, (2, 2), (64, 64), 64, {"window": (70, None)}),
    "all_keys": ((200, 333), 128, (1, 1), (64, 64), 8, {"causal": False, "logits_soft_cap": 3.0}),
    "both_sides": ((129, 256), 130, (2, 1), (128, 64), 256, {"causal": False, "window": (60, 20)}),
    "three_tiles": ((257, 40), 129, (1, 1), (192, 160), 32, {"softmax_aux": np.ones((1, 2), np.float32)}),
    "nothing": ((0, 128), 128, (1, 1), (80, 80), 128, {}),
}


def tiles_of(**arguments):
    return page_op.backends["triton_gpu"].heuristic(page_op.bind(**arguments), "cuda")


SLOW = (
    "two_prompts",
    "window",
    "all_keys",
    "pages_of_16",
    "nothing",
    "three_tiles",
    "none_is_long",
)  # whose options are each in another call of this file, or in the other kernels' tests


def some(calls):
    return [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in calls]


@pytest.mark.parametrize("call", some(CALLS))
@pytest.mark.usefixtures("hopper")
def test_numbers(call):
    lens, T, heads, widths, page, options = CALLS[call]
    arguments = arguments_of(lens, T, heads, widths, page, max(lens) + 3 * page)
    array = {n: jnp.asarray(x, jnp.bfloat16) for n, x in options.items() if n == "softmax_aux"}
    options = {n: x for n, x in options.items() if n not in array}
    assert (
        page_op.backends["triton_gpu"].heuristic(page_op.bind(**arguments, **array, **options), "cuda").mixed_num_warps
        == HOPPER
    )
    got = page_op(**arguments, **array, **options, platform="triton")
    clean = {n: jnp.nan_to_num(x) if n.endswith("cache") else x for n, x in (arguments | array).items()}
    exact = {n: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x for n, x in clean.items()}
    wanted, rounded = (page_op(**a, **options, platform="xla") for a in (exact, clean))
    assert error(got, wanted) <= 2 * error(rounded, wanted) + BF16


def test_other_calls_take_the_other_kernel():
    """And are refused where a configuration asks for this one."""
    arguments = arguments_of((140,), 128, (2, 1), (64, 64), 16, 160)
    scale, slopes = jnp.ones((1, 1, 1)), jnp.ones(2, jnp.bfloat16)
    int8 = {n: arguments[n].astype(jnp.int8) for n in ("key_cache", "value_cache")}
    float8 = {n: arguments[n].astype(jnp.float8_e4m3fn) for n in int8}
    float32 = {n: x.astype(jnp.float32) for n, x in arguments.items() if x.dtype == jnp.bfloat16}
    pages_of_12 = {n: arguments[n][:, :12] for n in ("key_cache", "value_cache")}
    few = {"query": arguments["query"][:, :127]}
    cfg = tiles_of(**arguments)
    for other in (
        int8 | {"k_scale": scale, "v_scale": scale},
        float8,
        float32,
        pages_of_12,
        few,
        {"alibi_slopes": slopes},
    ):
        assert tiles_of(**(arguments | other)).mixed_num_warps == 8 if other is not float32 else 4
        with interpret(90), pytest.raises(ValueError, match="mixed_num_warps = 12 selects flash attention's kernel"):
            page_op(**(arguments | other), cfg=cfg, platform="triton")
    with pytest.raises(ValueError, match="mixed_num_warps = 24 is not a power of 2"):
        dataclasses.replace(cfg, mixed_num_warps=24)


def prompts_over_pages():
    """Returns a call of two rows of 128 queries, and its arrays."""
    shape, pages = jax.ShapeDtypeStruct, jax.ShapeDtypeStruct((64, 16, 2, 128), jnp.bfloat16)
    arrays = shape((2, 128, 4, 128), jnp.bfloat16), pages, shape((2,), jnp.int32), shape((2, 20), jnp.int32), pages
    return functools.partial(page_op, platform="triton"), *arrays


@pytest.mark.slow  # its numbers are quick
@pytest.mark.parametrize(
    ("capability", "kernel"),
    [(80, "paged_kernel"), (90, "warp_specialized_fwd_kernel")],
)
def test_the_kernel_of_each_gpu(capability, kernel):
    assert names_of_kernels(*prompts_over_pages(), compute_capability=capability)[0] == kernel


@pytest.mark.slow  # the numbers of these kernels are quick
@pytest.mark.parametrize("capability", [80, 90])
def test_the_kernels_of_prompts_do_not_spill(capability):
    report = checks.export_cuda(*prompts_over_pages(), compute_capability=capability)
    assert all(k.resources["spill_stores"] <= 8 for k in report.kernels)


# Counts and lengths of requests: short ones before, between and after long ones, of which one ends within a tile, one is a
# tile, and one is longer than its keys; rows before the first request and after the last.
RAGGED = {
    "prompts_and_decodes": ((1, 130, 0, 9), (77, 150, 40, 9), (2, 1), (128, 128), 16, {}),
    "two_prompts": ((1, 200, 1, 128, 0, 9), (77, 250, 0, 128, 40, 9), (2, 1), (128, 128), 16, {}),
    "window": ((260, 3, 130), (290, 200, 100), (4, 2), (64, 64), 64, {"window": (70, None)}),
    "all_keys": ((1, 129), (50, 333), (1, 1), (64, 64), 8, {"causal": False, "logits_soft_cap": 3.0, "softmax_aux": 1}),
    "none_is_long": ((1, 60, 70), (9, 80, 70), (1, 1), (64, 64), 16, {}),
}


@pytest.mark.parametrize("call", some(RAGGED))
@pytest.mark.usefixtures("hopper")
def test_ragged_batches(call):
    """Long requests take this kernel and the others their own, each where its rows are."""
    counts, lens, heads, widths, page, options = RAGGED[call]
    before, after = 3, 5
    rows = before + sum(counts) + after
    arguments = arguments_of(lens, 1, heads, widths, page, max(lens) + page)
    query = np.random.default_rng(1).standard_normal((rows, heads[0], widths[0]))
    query[:before] = query[rows - after :] = np.nan
    cuts = jnp.asarray(before + np.cumsum([0, *counts]), jnp.int32)
    arguments |= {"query": jnp.asarray(query, jnp.bfloat16), "query_start_loc": cuts}
    array = {n: jnp.ones((heads[0], x), jnp.bfloat16) for n, x in options.items() if n == "softmax_aux"}
    options = {n: x for n, x in options.items() if n not in array}
    got = op(**arguments, **array, **options, platform="triton")
    clean = {n: jnp.nan_to_num(x) if n.endswith(("cache", "query")) else x for n, x in (arguments | array).items()}
    exact = {n: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x for n, x in clean.items()}
    wanted, rounded = (op(**a, **options, platform="xla") for a in (exact, clean))
    assert error(got, wanted) <= 2 * error(rounded, wanted) + BF16
    np.testing.assert_array_equal(np.asarray(got, np.float32)[[0, before - 1, -after, -1]], 0)


@pytest.mark.slow  # compiles three kernels; the numbers of such a batch are quick
def test_a_mixed_batch_has_three_kinds_of_tiles():
    """Of few queries, of some and of many: the kernels in this order, each in the output's memory, and none that spills."""
    shape, pages = jax.ShapeDtypeStruct, jax.ShapeDtypeStruct((256, 16, 2, 128), jnp.bfloat16)
    arrays = shape((300, 8, 128), jnp.bfloat16), pages, shape((6,), jnp.int32), shape((5,), jnp.int32)
    arrays = *arrays, shape((5, 16), jnp.int32), pages
    report = checks.export_cuda(lambda *a: op(*a, platform="triton"), *arrays)
    assert [k.name for k in report.kernels] == ["paged_kernel", "paged_kernel", "warp_specialized_fwd_kernel"]
    assert all(k.resources["spill_stores"] <= 8 for k in report.kernels)
