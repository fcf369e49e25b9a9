"""flash_attention's kernels for Hopper, interpreted: their numbers, over every mask and option that they take.

The same calls run on a GPU in tests/gpu/test_flash_attention_gpu.py, at twice the length. Here what Hopper may do late is done
as late as it can be (`gluon_interpreter.py`), and programs are three, so that tiles come from the queue.
"""

import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grid import FLOOR, error
from hopper import interpreted
from hopper_attention import THREE, arrays, at, calls, hold, hold_hops, ours

from kernels import MaskInfo
from kernels.engines.attention import triton_calls
from kernels.framework.config import BwdParams, FwdParams, KernelConfig
from kernels.ops.flash_attention import op, triton_gpu

B, T, N, K = 2, 330, 2, 1
CALLS = calls(B, T, N)
# Widths of keys and values, and a configuration: two warpgroups and three, one tile of columns and three, of keys or
# of values too, both backwards.
KINDS = {
    "128": ((128, 128), None),
    "64": ((64, 64), None),
    "three_warpgroups": ((64, 64), THREE),
    "192": ((192, 128), None),
    "192_values": ((192, 160), None),
    "256": ((256, 256), None),
}
# Documents, logits that are capped, a window with sinks and any order; the rest of the grid is slow.
QUICK = {("packed", "192_values"), ("soft_cap", "128"), ("sink_window", "three_warpgroups"), ("shuffled", "256")}


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    with interpreted(monkeypatch, op, triton_calls):
        yield


@pytest.mark.parametrize(
    ("call", "kind"),
    [pytest.param(*how, marks=() if how in QUICK else pytest.mark.slow) for how in itertools.product(CALLS, KINDS)],
)
def test_numbers(call, kind):
    (mask, options), (widths, cfg) = CALLS[call], KINDS[kind]
    hold(arrays(B, (T, T), (N, K), widths, "bfloat16"), mask, options, cfg=cfg)


@pytest.mark.parametrize(
    ("lengths", "heads", "kind"),
    [
        pytest.param((130, 40), (2, 2), "64", marks=pytest.mark.slow),
        pytest.param((200, 500), (4, 2), "three_warpgroups", marks=pytest.mark.slow),
        pytest.param((500, 200), (4, 1), "192", marks=pytest.mark.slow),  # rows without a key
        pytest.param((300, 130), (2, 1), "256", marks=pytest.mark.slow),
        ((1, 700), (3, 1), "128"),
    ],
    ids=str,
)
def test_lengths_and_groups_of_heads(lengths, heads, kind):
    widths, cfg = KINDS[kind]
    if lengths[0] == 1:  # of few queries the plain kernels are chosen
        cfg = triton_gpu.warp_specialized_tiles(*widths, 2, 0.1, None)
    hold(arrays(B, lengths, heads, widths, "float16"), MaskInfo(causal=True), {}, cfg=cfg)


@pytest.mark.parametrize(
    ("kind", "heads", "shares"),
    [
        ("128", (6, 2), 3),
        pytest.param("192", (4, 1), 2, marks=pytest.mark.slow),
        pytest.param("64", (4, 1), 4, marks=pytest.mark.slow),
    ],
)
def test_programs_that_share_a_block_of_keys(monkeypatch, kind, heads, shares):
    """Gradients of keys and values are sums of what each has for its heads, and rounded once."""
    asked = []
    monkeypatch.setattr(triton_calls, "shares_of_group", lambda *call: asked.append(call) or shares)
    hold(arrays(B, (150, 140), heads, KINDS[kind][0], "bfloat16"), MaskInfo(causal=True, window=(90, 0)), {})
    # 150 queries are three blocks.
    assert {call[1:] for call in asked} == {(B, heads[1], heads[0] // heads[1], 3, 1 if kind == "192" else 8)}
    assert all(isinstance(spans, np.ndarray) for spans, *_ in asked)


@pytest.mark.slow  # shares without documents are quick
@pytest.mark.parametrize("kind", ["128", "256"])
def test_programs_share_blocks_of_keys_of_documents_where_they_are_asked_to(kind):
    """Whose steps only a batch knows."""
    mask, options = CALLS["packed"]
    cfg = triton_gpu.warp_specialized_tiles(*KINDS[kind][0], 2, 0.1, None)
    cfg = replace(cfg, bwd_params=replace(cfg.bwd_params, shares=2))
    hold(arrays(B, (T, T), (4, 1), KINDS[kind][0], "bfloat16"), mask, options, cfg=cfg)


@pytest.mark.parametrize(
    ("length", "heads", "widths", "dtype", "options", "rank"),
    [
        pytest.param(256, (2, 1), (64, 64), "bfloat16", {}, 0, marks=pytest.mark.slow),
        pytest.param(512, (2, 2), (128, 128), "float16", {"logits_soft_cap": 3.0}, 1, marks=pytest.mark.slow),
        pytest.param(256, (2, 1), (128, 64), "bfloat16", {"softmax_scale": 0.3}, 1, marks=pytest.mark.slow),
    ],
)
def test_hops_add_in_place(length, heads, widths, dtype, options, rank):
    hold_hops(length, heads, widths, dtype, options, rank=rank)


@pytest.mark.parametrize(
    ("in_use", "kind"),
    [
        pytest.param(0, "128", marks=pytest.mark.slow),
        pytest.param(2**30, "128", marks=pytest.mark.slow),
        pytest.param(2**30, "192", marks=pytest.mark.slow),
    ],
)
def test_heads_one_by_one_and_side_by_side(monkeypatch, in_use, kind):
    monkeypatch.setattr(triton_calls, "IN_USE", in_use)
    mask, options = CALLS["packed"]
    hold(arrays(B, (T, T), (4, 4), KINDS[kind][0], "bfloat16"), mask, options)


@pytest.mark.slow  # a configuration that no heuristic takes
@pytest.mark.parametrize("queries", [128, triton_gpu.THREE_WARPGROUPS])
def test_three_stages(queries):
    """More room than is needed: who loads is farther ahead of those who attend."""
    cfg = KernelConfig(
        FwdParams(queries, 128, triton_gpu.WARP_SPECIALIZED, 3), BwdParams(64, 128, triton_gpu.WARP_SPECIALIZED, 4)
    )
    mask, options = CALLS["packed"]
    hold(arrays(B, (T, T), (N, K), (64, 64), "bfloat16"), mask, options, cfg=cfg)


@pytest.mark.parametrize(
    "widths",
    [
        *(
            pytest.param(w, marks=pytest.mark.slow)
            for w in [(96, 96), (128, 64), (136, 136), (160, 96), (192, 192), (256, 64)]
        ),
    ],
)
def test_other_widths(widths):
    mask, options = CALLS["together"]
    hold(arrays(B, (T, T), (N, K), widths, "bfloat16"), mask, options)


@pytest.mark.slow  # what lies in padding reaches nothing else, which is quick
@pytest.mark.parametrize("widths", [(128, 128), (192, 128)], ids=str)
def test_other_rows_of_the_batch_are_not_read(widths):
    floats = arrays(B, (T, T), (N, K), widths, "bfloat16")
    other = {name: x.at[1].set(jnp.nan) for name, x in floats.items()}

    def run(x):
        out, lse = ours(MaskInfo(causal=True), {}, **x)
        return out[0].astype("float32").sum() + lse[0].sum()

    gradients = jax.grad(run)(floats)
    for name, x in jax.grad(run)(other).items():
        np.testing.assert_array_equal(x[0], gradients[name][0], err_msg=name)


@pytest.mark.parametrize("width", [128, pytest.param(256, marks=pytest.mark.slow)])
def test_a_backward_with_lse_and_delta_of_more_keys(width):
    """What a ring needs: two halves of the keys, each with the whole's lse and delta, add up to the whole's gradients."""
    floats, whole, half = (
        arrays(B, (T, T), (N, K), (width, width), "bfloat16"),
        at(np.arange(T)[None], causal=True),
        T // 2,
    )
    d_out = jnp.cos(jnp.arange(floats["query"].size)).reshape(floats["query"].shape).astype("bfloat16")
    out, lse = ours(whole, {}, **floats)
    saved = {"d_out": d_out, "lse": lse, "delta": jnp.sum(d_out.astype("float32") * out.astype("float32"), -1)}
    want, parts = op.backward(saved, **floats, mask=whole, platform="triton"), []
    for keys in (slice(0, half), slice(half, None)):
        x = {name: v if name == "query" else v[:, keys] for name, v in floats.items()}
        mask = whole.replace(kv_positions=whole.kv_positions[:, keys])
        parts.append(op.backward(saved, **x, mask=mask, platform="triton"))
    joined = {name: jnp.concatenate([p[name] for p in parts], 1) for name in ("key", "value")}
    joined["query"] = sum(p["query"].astype("float32") for p in parts)
    for name, x in joined.items():
        assert error(x, want[name].astype("float32")) <= 2 * FLOOR["bfloat16"], name


def test_a_row_of_nan_is_nan():
    """And its lse too; those beside it are as they were."""
    floats = arrays(B, (T, T), (N, K), (128, 128), "bfloat16")
    floats["query"] = floats["query"].at[0, 7].set(jnp.nan)
    for x in ours(MaskInfo(causal=True), {}, **floats):
        bad = np.isnan(np.asarray(x, "float32").reshape(B, T, -1)).all(-1)
        assert bad[0, 7] and bad.sum() == 1


@pytest.mark.parametrize("kind", ["64", pytest.param("256", marks=pytest.mark.slow)])
def test_what_lies_in_padding_reaches_nothing_else(kind):
    """The bits that zeros give, outputs and gradients, with NaN there in inputs and cotangents."""
    ids = jnp.where(jnp.arange(200)[None] % 90 < 70, jnp.arange(200)[None] // 90, -1)
    mask, there = MaskInfo(causal=True, q_segment_ids=ids, kv_segment_ids=ids), (ids >= 0)[..., None, None]
    floats = arrays(1, (200, 200), (2, 1), KINDS[kind][0], "bfloat16")

    @jax.jit
    def run(fill):
        filled = jax.tree.map(lambda x: jnp.where(there, x, fill.astype(x.dtype)), floats)
        (out, lse), pull = jax.vjp(lambda x: ours(mask, {}, **x), filled)
        return (
            out,
            lse,
            pull(
                (
                    jnp.where(there, jnp.cos(out), fill.astype(out.dtype)),
                    jnp.where(there[..., 0], jnp.ones_like(lse), fill),
                )
            ),
        )

    jax.tree.map(np.testing.assert_array_equal, run(jnp.float32(np.nan)), run(jnp.float32(0)))
