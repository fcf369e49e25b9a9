"""flash_attention's kernels for Hopper, without one: who is chosen, what is refused, and the code. Their numbers are held in
test_flash_attention_hopper_numbers.py, and in tests/gpu/test_flash_attention_gpu.py."""

import contextlib
import os
import re
import runpy
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_names import names_of_kernels

from kernels import MaskInfo, compile_for
from kernels.engines.attention import triton_calls
from kernels.framework.config import BwdParams, FwdParams, KernelConfig
from kernels.framework.interpret import interpret
from kernels.ops.flash_attention import op, triton_gpu
from kernels.ops.flash_attention.triton_gpu import THREE_WARPGROUPS, WARP_SPECIALIZED
from kernels.toolchains.simulate.ahead_of_time import export_cuda
from kernels.toolchains.simulate.simulated_hopper import Barrier

LENGTH = 512
PLAIN = ["forward_kernel", "query_gradient_kernel", "key_gradient_kernel"]
HOPPERS = ["warp_specialized_fwd_kernel", "warp_specialized_bwd_kernel"]
WIDE = ["warp_specialized_fwd_kernel", "warp_specialized_wide_bwd_kernel"]
EVERYTHING = {"logits_soft_cap": 30.0, "softmax_aux": jax.ShapeDtypeStruct((4, 1), "float32")}


def call(width=128, value_width=None, dtype="bfloat16", length=LENGTH, batch=1, **options):
    """Returns the arguments of a call, as shapes."""
    wide, tall = (batch, length, 4, width), (batch, length, 2, value_width or width)
    given = {"query": wide, "key": (*wide[:2], 2, width), "value": tall}
    return {n: jax.ShapeDtypeStruct(shape, dtype) for n, shape in given.items()} | options


def warps(**given):
    found = op.backends["triton_gpu"].heuristic(op.bind(**given), "cuda")
    return found.fwd_params.num_warps, found.bwd_params.num_warps


def shape(*sizes):
    return jax.ShapeDtypeStruct(sizes, "float32")


@pytest.mark.parametrize(
    ("given", "forward", "backward"),
    [
        ({}, True, True),
        ({"width": 64}, True, True),
        ({"width": 96}, True, True),
        ({"dtype": "float16"}, True, True),
        ({"mask": MaskInfo(causal=True, window=(100, 0), chunk_size=200)}, True, True),
        (EVERYTHING, True, True),
        ({"width": 256}, True, True),
        ({"width": 192, "value_width": 128}, True, True),
        ({"width": 256, **EVERYTHING}, True, True),
        ({"width": 128, "value_width": 64}, True, True),
        ({"width": 64, "value_width": 128}, False, False),
        ({"width": 128, "value_width": 192}, False, False),
        ({"width": 32}, False, False),
        ({"width": 100}, False, False),
        ({"width": 128, "value_width": 68}, False, False),
        ({"dtype": "float32"}, False, False),
        ({"length": 64}, False, False),
        ({"softmax_scale": -1.0}, False, False),
        ({"bias": shape(1, 1, LENGTH, LENGTH)}, False, False),
        ({"alibi_slopes": shape(1, 4)}, False, False),
        ({"mask": MaskInfo(attention_mask=jnp.ones((1, 1, LENGTH, LENGTH), bool))}, False, False),
        ({"deterministic": True}, True, False),
        ({"width": 256, "deterministic": True}, True, False),
        ({"width": 256, "dtype": "float32"}, False, False),
        ({"width": 256, "alibi_slopes": shape(1, 4)}, False, False),
    ],
    ids=str,
)
def test_who_is_chosen(given, forward, backward):
    assert [w == WARP_SPECIALIZED for w in warps(**call(**given))] == [forward, backward]


THREE = KernelConfig(FwdParams(THREE_WARPGROUPS, 128, WARP_SPECIALIZED, 2))


LONG = {"width": 64, "length": triton_gpu.LONG, "batch": 32}
ALL = MaskInfo()


@pytest.mark.parametrize(
    ("given", "queries", "tried"),
    [
        (LONG, THREE_WARPGROUPS, True),
        ({**LONG, "width": 40}, THREE_WARPGROUPS, True),
        ({**LONG, "mask": ALL}, THREE_WARPGROUPS, True),
        # Of 132 multiprocessors: 408 tiles of 192 are 4 rounds, 608 of 128 are 5; 352 are 3, 512 are 4.
        ({**LONG, "mask": ALL, "batch": 2, "length": 9728}, 128, True),
        ({**LONG, "mask": ALL, "batch": 4}, THREE_WARPGROUPS, True),
        ({**LONG, "batch": 2, "length": 9728}, THREE_WARPGROUPS, True),  # the last tiles see few keys
        ({**LONG, "batch": 1}, 128, True),
        ({**LONG, "deterministic": True}, THREE_WARPGROUPS, True),
        ({**LONG, "mask": MaskInfo(q_positions=shape(1, triton_gpu.LONG), causal=True)}, THREE_WARPGROUPS, True),
        ({**LONG, "length": triton_gpu.LONG - 1}, 128, True),
        ({**LONG, "mask": MaskInfo(causal=True, window=(1000, 0))}, 128, True),
        ({**LONG, "mask": MaskInfo(causal=True, chunk_size=1000)}, 128, True),
        ({**LONG, "mask": MaskInfo(causal=True, prefix_lengths=shape(32))}, 128, True),
        ({**LONG, "mask": MaskInfo(q_segment_ids=shape(1, 1), kv_segment_ids=shape(1, 1))}, 128, True),
        ({**LONG, "logits_soft_cap": 30.0}, 128, True),
        ({**LONG, "softmax_aux": EVERYTHING["softmax_aux"]}, 128, True),
        ({**LONG, "width": 96}, 128, False),
        ({**LONG, "dtype": "float32"}, 32, False),
        ({**LONG, "alibi_slopes": shape(1, 4)}, 64, False),
    ],
    ids=str,
)
def test_who_has_three_warpgroups(given, queries, tried):
    """Narrow heads, of long rows that are full or causal; tuning tries them of others too, and two of these."""
    bound, backend = op.bind(**{"mask": MaskInfo(causal=True), **call(**given)}), op.backends["triton_gpu"]
    assert backend.heuristic(bound, "cuda").fwd_params.q_blocksize == queries
    found = {c.fwd_params.q_blocksize for c in backend.candidates(bound) if c.fwd_params.num_warps == WARP_SPECIALIZED}
    assert (found == {128, THREE_WARPGROUPS}) == tried


def program(given, cfg=None):
    """Returns (a call with its gradients, the shapes of its arguments)."""
    floats = {n: x for n, x in given.items() if n in ("query", "key", "value", "softmax_aux", "segments")}
    rest = {n: x for n, x in given.items() if n not in floats and n != "mask"}

    def run(floats):
        def loss(floats):
            mask, ids = given.get("mask", MaskInfo(causal=True)), floats.get("segments")
            mask = mask if ids is None else mask.replace(q_segment_ids=ids, kv_segment_ids=ids)
            arrays = {n: x for n, x in floats.items() if n != "segments"}
            out, lse = op(**arrays, **rest, mask=mask, platform="triton", cfg=cfg)
            return jnp.sum(out.astype(jnp.float32)) + jnp.sum(lse)

        return jax.grad(loss, allow_int=True)(floats)

    return run, floats


def made(given, cfg=None):
    """Returns the kernels of a call with its gradients, compiled."""
    return export_cuda(*program(given, cfg)).kernels


# Bytes that a kernel may spill at most, and with every option at once, where limits of masks and documents are held around the
# loop as well. What is not here spills nothing.
SPILLS = {
    "warp_specialized_fwd_kernel": (44, 48),  # of heads past 128, whose sums are half of the registers of a thread
    # Two sums, logits and their gradients fill the registers of a thread.
    "warp_specialized_bwd_kernel": (136, 60),
    # One sum of 64 x 256 does so, beside logits or their gradients. Other shares of the registers spill more, or have products
    # wait for one another.
    "warp_specialized_wide_bwd_kernel": (64, 216),
    # The plain gradient of the keys holds two sums beside its logits. Blocks without a spill were slower on an H200: 369
    # TFLOP/s as it is, 320 with half of the queries at once, 287 and 319 with 8 warps.
    "key_gradient_kernel": (496, 0),
    "query_gradient_kernel": (4, 0),  # a sum of 64 x 256 beside the logits
}


def held(kernels, names, every_option=False, launch=(WARP_SPECIALIZED, 168)):
    assert [k.name for k in kernels] == names
    for kernel in kernels:
        assert kernel.shared_memory_bytes <= 227 * 1024
        resources, spills = kernel.resources, SPILLS.get(kernel.name, (0, 0))[every_option]
        assert resources["serialized"] == 0 and resources["spill_stores"] <= spills, (kernel.name, resources)
        if (
            kernel.name in HOPPERS + WIDE
        ):  # the one warp that loads counts as a warpgroup; registers, before they change hands
            assert (kernel.num_warps, resources["registers"]) == launch and "setmaxnreg" in kernel.ptx


SEGMENTS = {"segments": jax.ShapeDtypeStruct((1, LENGTH), "int32")}


@pytest.mark.slow  # compiled; the numbers with every option are quick
@pytest.mark.parametrize(
    ("width", "value_width", "names"),
    [(192, 128, WIDE), (128, 128, HOPPERS), (256, 256, WIDE)],
)
def test_the_code_with_every_option(width, value_width, names):
    """A soft cap, sinks, a window and documents."""
    given = call(width, value_width, **EVERYTHING, **SEGMENTS, mask=MaskInfo(causal=True, window=(100, 0)))
    kernels = made(given)
    held(kernels, names, every_option=True)
    assert all("tanh.approx" in k.ptx for k in kernels)
    if names == WIDE:
        # Who loads into a stage has read it: all warps must have, and it is the compiler that lets them meet.
        marks = re.findall(r"bar\.sync|wgmma\.wait_group|try_wait|expect_tx", kernels[1].ptx)
        assert {before for before, mark in pairwise(marks) if mark == "expect_tx"} == {"bar.sync"}


IDS = jax.ShapeDtypeStruct((1, 4096), "int32")


@pytest.mark.slow  # compiled; the numbers of three warpgroups are quick
@pytest.mark.parametrize(
    "mask",
    [MaskInfo(), MaskInfo(causal=True), MaskInfo(causal=True, q_positions=IDS, kv_positions=IDS)],
)
def test_the_code_of_three_warpgroups(mask):
    x = jax.ShapeDtypeStruct((1, 4096, 4, 64), "bfloat16")
    given = {n: p for n, p in (("q_positions", mask.q_positions), ("kv_positions", mask.kv_positions)) if p is not None}

    def run(x, given):
        return op(x, x, x, mask=mask.replace(**given), platform="triton", cfg=THREE)

    (kernel,) = export_cuda(run, x, given, compute_capability=90).kernels
    held([kernel], ["warp_specialized_fwd_kernel"], launch=(16, 128))
    assert kernel.resources["spill_stores"] == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({"width": 64}, HOPPERS),
        ({"width": 96}, HOPPERS),
        ({"width": 128, "value_width": 64}, HOPPERS),
        ({"dtype": "float16", **SEGMENTS}, HOPPERS),
        ({"mask": MaskInfo()}, HOPPERS),
        ({"width": 256}, WIDE),
        ({"width": 256, "mask": MaskInfo()}, WIDE),
        ({"width": 136}, WIDE),
        ({"width": 192, "value_width": 128}, WIDE),
        ({"width": 256, "value_width": 64}, WIDE),
        ({"deterministic": True}, [HOPPERS[0], *PLAIN[1:]]),
        ({"width": 256, "deterministic": True}, [HOPPERS[0], *PLAIN[1:]]),
    ],
    ids=str,
)
def test_the_code(given, names):
    kernels = made(call(**given))
    held(kernels, names)
    if names == WIDE:  # of a padded head, products for 64 columns at a time that it has
        assert kernels[1].ptx.count("cp.reduce.async.bulk.tensor") == 2 * -(-given["width"] // 64)


@pytest.mark.parametrize(
    ("width", "value_width", "cap", "kernel", "queries", "keys", "columns"),
    [
        (128, 128, None, "warp_specialized_bwd_kernel", 64, 128, 128),
        (64, 64, None, "warp_specialized_bwd_kernel", 128, 128, 64),
        (64, 64, 30.0, "warp_specialized_bwd_kernel", 64, 128, 64),
        (192, 128, None, "warp_specialized_wide_bwd_kernel", 64, 64, 32),
        (256, 256, None, "warp_specialized_wide_bwd_kernel", 64, 64, 32),
    ],
)
def test_what_is_launched(launches, width, value_width, cap, kernel, queries, keys, columns):
    """Which kernel makes the gradients, of which blocks, and in which order its programs run."""
    B, T, S, N, K, bfloat16 = 3, 500, 300, 4, 2, jnp.bfloat16
    rows = jnp.zeros((B, T, N))
    saved = {"d_out": jnp.zeros((B, T, N, value_width), bfloat16), "lse": rows, "delta": rows}
    arrays = {"query": (B, T, N, width), "key": (B, S, K, width), "value": (B, S, K, value_width)}
    arrays = {name: jnp.zeros(size, bfloat16) for name, size in arrays.items()}
    with compile_for(90) as checks:
        how = {"mask": MaskInfo(causal=True), "logits_soft_cap": cap, "platform": "triton"}
        program = jax.jit(lambda x: op.backward(saved, **x, **how))
        jax.export.export(program, platforms=["cuda"], disabled_checks=checks)(arrays)
    ((name, (d_query, d_out, query, key, value, lse, delta, spans), rest),) = launches
    blocks, padded = -(-S // keys), 256 if width > 128 else width
    assert (name, rest["side_ptr"].shape, rest["grid"]) == (kernel, (1,), (blocks * K * B,))
    assert (rest["O"].BLOCK_Q, rest["O"].BLOCK_K, rest["O"].BLOCK_H, rest["O"].BLOCK_V) == (
        queries,
        keys,
        padded,
        value_width,
    )
    assert spans.shape[-2:] == (blocks, 4)
    assert [list(x.block_shape) for x in (d_query, d_out, query, key, value, lse, delta)] == [
        [1, queries, 1, columns],
        [1, queries, 1, value_width],
        [1, queries, 1, padded],
        [1, keys, 1, padded],
        [1, keys, 1, value_width],
        [1, queries],
        [1, queries],
    ]


@pytest.mark.parametrize(
    ("length", "padding", "document", "heads", "width", "wanted"),
    [
        (8192, 0, 8192, 8, 128, 8),
        # a block of keys meets half of the queries, of 1 KiB: 8 heads are a little too many
        pytest.param(16384, 0, 16384, 8, 128, 4, marks=pytest.mark.slow),
        (65536, 0, 65536, 8, 128, 1),
        (65536, 32768, 65536, 8, 128, 2),  # blocks that meet nobody do not count
        (65536, 0, 4096, 8, 128, 8),  # the queries of its document alone
        (65536, 0, 4096, 6, 128, 2),  # sides divide the heads
        (65536, 0, 4096, 3, 128, 1),
        (1024, 0, 1024, 8, 256, 1),  # of wide heads one at a time is faster
    ],
)
def test_as_many_heads_run_side_by_side_as_fit_in_the_cache(length, padding, document, heads, width, wanted):
    at = np.arange(length, dtype=np.int32)[None]

    @jax.jit
    def heads_of(ids):
        x = jnp.zeros((1, length, heads, width), jnp.bfloat16)
        mask = MaskInfo(causal=True, q_segment_ids=ids, kv_segment_ids=ids)
        call = triton_calls.prepare(x, x, x, mask, None, None, None, None, None, 0.0, None)
        return call.side_by_side(call.spans(64, 128)[1], 64, 2)

    assert heads_of(np.where(at < length - padding, at // document, -1)).tolist() == [wanted]


@pytest.fixture
def launches(monkeypatch):
    """What would be launched: the name of each kernel, its inputs, and how."""
    found = []

    def launch(kernel, *inputs, out_shape, **rest):
        found.append((kernel.fn.__name__, inputs, rest))
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), out_shape)

    monkeypatch.setattr(triton_calls, "triton_launch", launch)
    return found


@pytest.mark.parametrize(
    ("width", "queries", "stages", "room"),
    [(64, 128, 3, 2), (64, THREE_WARPGROUPS, 3, 2), (128, 128, 2, 2), (128, 128, 3, 1), (192, 128, 2, 2)],
)
@pytest.mark.parametrize(("length", "programs"), [(130, {128: 24, THREE_WARPGROUPS: 12}), (4500, 132)], ids=str)
def test_how_many_programs_take_tiles(launches, width, queries, stages, room, length, programs):
    """One for each tile of 128 or 192 queries, or each multiprocessor, and a counter that they share, which is zero before;
    with room for the queries of the next tile where stages leave it."""
    x = jax.ShapeDtypeStruct((3, length, 4, width), "bfloat16")
    with compile_for(90) as checks:
        cfg = KernelConfig(FwdParams(queries, num_stages=stages))
        program = jax.jit(lambda x: op(x, x, x, mask=MaskInfo(causal=True), platform="triton", cfg=cfg))
        jax.export.export(program, platforms=["cuda"], disabled_checks=checks)(x)
    ((name, (turn, *_), rest),) = launches
    programs = programs if isinstance(programs, int) else programs[queries]
    assert (name, rest["grid"], rest["QUEUED"]) == ("warp_specialized_fwd_kernel", (programs,), room)
    assert (turn.shape, turn.dtype, rest["input_output_aliases"]) == ((1,), "int32", {0: 2})
    # Of 64 k registers and what the warp that loads has, in whole warpgroups.
    assert (rest["O"].BLOCK_Q, rest["CONSUMER_REGISTERS"], rest["PRODUCER_REGISTERS"]) == (
        queries,
        240 if queries == 128 else 160,
        24,
    )
    assert 128 * (queries // 64 * rest["CONSUMER_REGISTERS"] + rest["PRODUCER_REGISTERS"]) <= 65536


@pytest.mark.parametrize(
    ("width", "value_width", "columns", "keys", "room"),
    [
        (64, 64, 64, 128, 2),
        (96, 96, 128, 128, 2),
        (128, 64, 128, 128, 2),
        (136, 128, 64, 128, 1),
        (192, 64, 64, 128, 1),
        (192, 136, 64, 64, 2),
        (136, 192, 64, 64, 2),
        (136, 200, 256, 64, 1),
        (200, 128, 256, 64, 1),
        (256, 256, 256, 64, 1),
    ],
)
def test_tiles_of_the_forward(launches, width, value_width, columns, keys, room):
    """Heads of 129 to 192 lie in three tiles, and so do values of more than two. With fewer, there are 128 keys at a time."""
    arrays = {n: x for n, x in call(width, value_width).items() if n in ("query", "key", "value")}
    with compile_for(90) as checks:
        program = jax.jit(lambda x: op(**x, platform="triton"))
        jax.export.export(program, platforms=["cuda"], disabled_checks=checks)(arrays)
    ((name, (_, query, key, value, spans), rest),) = launches
    of_values = value.block_shape[3]
    assert (name, rest["QUEUED"], rest["O"].BLOCK_K) == ("warp_specialized_fwd_kernel", room, keys)
    assert [list(x.block_shape) for x in (query, key, value)] == [
        [1, 64, 1, columns],
        [1, keys, 1, columns],
        [1, keys, 1, of_values],
    ]
    tiles, value_tiles = -(-width // columns), -(-value_width // of_values)
    assert tiles in (1, 3) and value_tiles in (1, tiles)
    assert of_values <= (columns if value_tiles == 3 else 2 * columns), "the output leaves through the tiles of queries"
    tall = value_tiles * of_values
    assert 2 * (room * 128 * tiles * columns + 2 * keys * (tiles * columns + tall)) <= triton_calls.SHARED_MEMORY


@pytest.mark.parametrize(
    ("width", "steps"), [(256, 16), *(pytest.param(w, 12, marks=pytest.mark.slow) for w in (136, 192))]
)
@pytest.mark.slow
def test_products_of_padded_heads(width, steps):
    """Those of 129 to 192 are multiplied as 192: 12 steps of 16 columns, in logits of either direction."""
    forward, backward = made(call(width, 128))
    # A first product and those of a loop, by two warpgroups; with the values, two times BLOCK_K columns.
    keys = 128 if width <= 192 else 64
    assert forward.ptx.count("wgmma.mma_async") == 2 * (2 * steps + 2 * keys // 16)
    # Logits twice; the gradients of weights twice, over 128 columns; of values, of keys in one part or two, and of queries, 64
    # columns at a time, over 64 queries or keys.
    of_keys, of_queries = 2 if width <= 192 else 1, -(-width // 64)
    assert backward.ptx.count("wgmma.mma_async") == 2 * steps + 2 * 8 + 4 * (1 + of_keys + of_queries)


@pytest.mark.parametrize(("width", "turns"), [(64, 0), (128, 2), (256, 0)])
def test_turns_in_windows(monkeypatch, width, turns):
    """Each of two warpgroups has a barrier more where they begin their products in turns."""
    made, init = [], Barrier.init
    monkeypatch.setattr(Barrier, "init", lambda self, count: made.append(count) or init(self, count))

    def barriers(mask):
        made.clear()
        x = jnp.ones((1, 100, 1, width), "bfloat16")
        with interpret(90):
            jax.block_until_ready(op(x, x, x, mask=mask, platform="triton"))
        return len(made)

    assert barriers(MaskInfo(causal=True, window=(100, 0))) - barriers(MaskInfo(causal=True)) == turns


@pytest.mark.parametrize(
    ("given", "exact"),
    [
        ({"logits_soft_cap": 30.0}, [False, False]),
        ({"logits_soft_cap": 30.0, "dtype": "float16"}, [True, True]),
        ({"logits_soft_cap": 30.0, "deterministic": True}, [True, True, True]),
        ({}, [False, False]),
    ],
    ids=str,
)
def test_when_tanh_is_exact(monkeypatch, given, exact):
    """In both directions alike, since one makes the weights of the other's lse again."""
    found = []

    def launch(kernel, *inputs, out_shape, **rest):
        found.append(rest["O"].EXACT)
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), out_shape)

    monkeypatch.setattr(triton_calls, "triton_launch", launch)
    monkeypatch.setattr(op, "_programs", {})
    floats = {n: x for n, x in call(**given).items() if n in ("query", "key", "value")}
    options = {n: x for n, x in given.items() if n != "dtype"}
    with compile_for(90) as checks:
        program = jax.jit(jax.grad(lambda x: op(**x, **options, platform="triton")[0].astype("float32").sum()))
        jax.export.export(program, platforms=["cuda"], disabled_checks=checks)(floats)
    assert found == exact


@pytest.mark.slow
def test_other_gpus_have_the_plain_kernels():
    assert names_of_kernels(*program(call(**LONG)), compute_capability=80) == PLAIN


CONFIG = KernelConfig(FwdParams(128, 128, WARP_SPECIALIZED, 2), BwdParams(64, 128, WARP_SPECIALIZED, 2))


@pytest.mark.parametrize(
    ("given", "cfg", "message"),
    [
        ({"bias": shape(1, 1, 64, 64)}, CONFIG, "fwd_params has 12 warps, .* it does not take bias: use 4 or 8 warps"),
        ({"alibi_slopes": shape(1, 4)}, CONFIG, "it does not take alibi_slopes"),
        ({"dropout_prob": 0.1, "dropout_seed": shape(1, 1)}, CONFIG, "it does not take dropout_prob"),
        ({"dtype": "float32"}, CONFIG, "for this call it has FwdParams"),
        (
            {"width": 256},
            CONFIG,
            "blocks of 128 queries and 128 keys; for this call it has .*kv_blocksize=64, num_warps=12",
        ),
        (
            {},
            KernelConfig(FwdParams(64, 64, WARP_SPECIALIZED, 2)),
            "blocks of 64 queries and 64 keys; for this call it has",
        ),
        (
            {},
            THREE,
            "blocks of 192 queries and 128 keys; for this call",
        ),
        (
            {"width": 36},
            KernelConfig(FwdParams(64, 64, WARP_SPECIALIZED, 2)),
            "for this call it has FwdParams.*num_warps=4",
        ),
    ],
    ids=["bias", "slopes", "dropout", "float32", "256", "blocks", "three_of_128", "plain_blocks"],
)
def test_a_configuration_that_no_kernel_has_is_told(given, cfg, message):
    arrays = {
        n: jnp.zeros(x.shape, "int32" if n == "dropout_seed" else x.dtype) if hasattr(x, "shape") else x
        for n, x in call(length=64, **given).items()
    }
    with interpret(), pytest.raises(ValueError, match=message):
        op(**arrays, platform="triton", cfg=cfg)


@pytest.mark.parametrize(("queries", "cap", "refused"), [(64, None, False), (128, None, False), (128, 30.0, True)])
def test_blocks_of_queries_of_the_backward(queries, cap, refused):
    """Heads of 64 have the larger ones, and the smaller too, as a configuration of before may say."""
    x = jnp.ones((1, 128, 1, 64), "bfloat16")
    cfg = KernelConfig(bwd_params=BwdParams(queries, 128, WARP_SPECIALIZED, 2))
    message = "bwd_params has 12 warps, .* blocks of 128 queries and 128 keys; for this call it has"
    expected = pytest.raises(ValueError, match=message) if refused else contextlib.nullcontext()
    with interpret(), expected:
        jax.grad(lambda x: op(x, x, x, logits_soft_cap=cap, platform="triton", cfg=cfg)[0].sum().astype("float32"))(x)


@pytest.mark.parametrize(("width", "keys"), [(128, 64), (256, 128)])
def test_blocks_of_the_other_backward_are_told(width, keys):
    """Heads of up to 128 have 128 keys in a program, wider ones 64."""
    arrays = {name: jnp.zeros(x.shape, x.dtype) for name, x in call(width, length=64).items()}
    rows = jnp.zeros(arrays["query"].shape[:3])
    cfg = KernelConfig(bwd_params=BwdParams(64, keys, WARP_SPECIALIZED, 2))
    message = f"bwd_params has 12 warps, .* {keys} keys; for this call it has BwdParams.*kv_blocksize={192 - keys}"
    with interpret(), pytest.raises(ValueError, match=message):
        saved = {"d_out": arrays["query"], "lse": rows, "delta": rows}
        op.backward(saved, **arrays, platform="triton", cfg=cfg)


@pytest.mark.slow  # a tool for those who have a GPU
def test_what_the_sanitizer_runs(launches):
    """The calls of tests/gpu/sanitize.py are of Hopper's kernels, in both directions; without the tool it says so."""
    path = Path(__file__).parents[1] / "gpu" / "sanitize.py"
    sanitize = runpy.run_path(str(path))
    with compile_for(90) as checks:
        for name in sanitize["CALLS"]:
            function, arrays = sanitize["call"](name)
            jax.export.export(jax.jit(function), platforms=["cuda"], disabled_checks=checks)(*arrays)
    names = [name for name, _, _ in launches]
    assert names[::2] == ["warp_specialized_fwd_kernel"] * 7
    assert names[1::2] == ["warp_specialized_bwd_kernel"] * 5 + ["warp_specialized_wide_bwd_kernel"] * 2
    environment = {**os.environ, "PATH": str(path.parent)}
    done = subprocess.run([sys.executable, path, "racecheck"], capture_output=True, text=True, env=environment)
    assert done.returncode == 1 and "compute-sanitizer is not on PATH" in done.stderr
