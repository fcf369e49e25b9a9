"""flash_attention's kernels for Hopper on a CUDA device. Run with the command in CONTRIBUTING.md.

Every mask and option that they take, beside the plain kernels and the contract in float32. On a CPU they are interpreted, in
tests/kernels/test_flash_attention_hopper_numbers.py: here it is the code that the compiler made of them.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grid import FLOOR, error
from hopper import on_a_gpu
from hopper_attention import THREE, at, calls, hold, hold_hops, ours, outcome
from hopper_attention import arrays as made_arrays

from kernels import MaskInfo
from kernels.engines.attention.triton_calls import WARP_SPECIALIZED, plain_tiles
from kernels.ops.flash_attention.contract import op

pytestmark = on_a_gpu()

B, T, S, N, K = 2, 650, 650, 4, 2
RNG = np.random.default_rng(0)
CALLS = calls(B, T, N)
# Of the longest ones there are more tiles than programs, which take the next one when they are done, some without any key.
LENGTHS = {
    "tails": (T, S),
    "one_key_block": (130, 40),
    "more_keys": (300, 901),
    "more_queries": (500, 200),
    "more_tiles_than_programs": (4500, 4600),
    "more_tiles_and_few_keys": (4500, 700),
}
LONGEST = ["more_tiles_than_programs", "more_tiles_and_few_keys"]


def arrays(t, s, width, value_width, dtype, key_heads=K):
    return made_arrays(B, (t, s), (N, key_heads), (width, value_width), dtype)


def compare(floats, mask, options, *, cfg=None):
    """Holds a call against the contract in float32, and as close to it as the plain kernels are."""
    width = max(floats["query"].shape[3], floats["value"].shape[3])
    plain = functools.partial(ours, cfg=plain_tiles(width, 2))
    hold(floats, mask, options, cfg=cfg, peer=plain, again=1)


@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("call", CALLS)
def test_numbers_of_specialised_warps(call, width):
    mask, options = CALLS[call]
    compare(arrays(T, S, width, width, "bfloat16"), mask, options)


@pytest.mark.parametrize("call", CALLS)
def test_numbers_of_three_warpgroups(call):
    mask, options = CALLS[call]
    compare(arrays(T, S, 64, 64, "bfloat16"), mask, options, cfg=THREE)


@pytest.mark.parametrize("lengths", ["one_key_block", "more_keys", "more_queries", *LONGEST])
@pytest.mark.parametrize(("width", "key_heads", "dtype"), [(64, K, "float16"), (40, 1, "bfloat16")])
def test_lengths_of_three_warpgroups(lengths, width, key_heads, dtype):
    floats = arrays(*LENGTHS[lengths], width, width, dtype, key_heads)
    compare(floats, MaskInfo(causal=True), {}, cfg=THREE)


@pytest.mark.parametrize("call", CALLS)
def test_numbers_of_heads_in_three_tiles(call):
    mask, options = CALLS[call]
    compare(arrays(T, S, 192, 128, "bfloat16"), mask, options)


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize(("key_heads", "dtype"), [(4, "float16"), (1, "bfloat16")])
def test_lengths_of_heads_in_three_tiles(lengths, key_heads, dtype):
    compare(arrays(*LENGTHS[lengths], 192, 128, dtype, key_heads), MaskInfo(causal=True), {})


@pytest.mark.parametrize("call", ["causal", "together"])
@pytest.mark.parametrize("width", [(96, 96), (128, 64), (136, 136), (160, 96), (192, 64), (256, 64)], ids=str)
def test_other_widths(call, width):
    mask, options = CALLS[call]
    compare(arrays(T, S, *width, "bfloat16"), mask, options)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("width", [64, 128, 256])
def test_a_soft_cap_of_large_logits(width, dtype):
    """Of 8 to 16 as a rule, where the cap bends them, and what tanh is off by is multiplied by it."""
    options = {"logits_soft_cap": 50.0, "softmax_scale": 1.0}
    compare(arrays(T, S, width, width, dtype), MaskInfo(causal=True), options)


@pytest.mark.parametrize("width", [64, 128, 256])
def test_a_soft_cap_of_a_deterministic_call(width):
    """Its backward is of the plain kernels, which make the weights of Hopper's lse again."""
    floats, options = arrays(T, S, width, width, "bfloat16"), {"logits_soft_cap": 50.0, "softmax_scale": 1.0}
    d_out = jnp.asarray(RNG.standard_normal((B, T, N, width)), jnp.bfloat16)
    d_lse = jnp.asarray(RNG.standard_normal((B, T, N)), jnp.float32)

    def run(**how):
        return lambda **x: op(**x, mask=MaskInfo(causal=True), platform="triton", **options, **how)

    heuristic = op.backends["triton_gpu"].heuristic(op.bind(**floats, **options, deterministic=True), "cuda")
    assert [p.num_warps == WARP_SPECIALIZED for p in (heuristic.fwd_params, heuristic.bwd_params)] == [True, False]
    got = jax.jit(lambda x: outcome(run(deterministic=True), x, d_out, d_lse))(floats)
    plain = jax.jit(lambda x: outcome(run(cfg=plain_tiles(width, 2)), x, d_out, d_lse))(floats)
    assert error(got["lse"], plain["lse"]) < 1e-5
    for name in ("query", "key", "value"):
        assert error(got[name], plain[name]) <= FLOOR["bfloat16"], name


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("key_heads", [1, 2, 4])
@pytest.mark.parametrize("width", [64, 128, 256])
def test_lengths_and_groups_of_heads(lengths, key_heads, width):
    floats = arrays(*LENGTHS[lengths], width, width, "float16", key_heads)
    compare(floats, MaskInfo(causal=True), {})


@pytest.mark.parametrize("width", [128, 256])
def test_other_rows_of_the_batch_are_not_read(width):
    floats = arrays(T, S, width, width, "bfloat16")
    rows = {name: x.at[1].set(jnp.nan) for name, x in floats.items()}
    d_out, d_lse = jnp.ones((B, T, N, width), jnp.bfloat16), jnp.ones((B, T, N))

    def run(x):
        return outcome(lambda **x: op(**x, mask=MaskInfo(causal=True), platform="triton"), x, d_out, d_lse)

    clean, other = jax.jit(run)(floats), jax.jit(run)(rows)
    for name in ("out", "lse", "key", "value"):
        np.testing.assert_array_equal(np.float32(clean[name][0]), np.float32(other[name][0]), err_msg=name)
    # Summed in any order: not the same bits.
    assert error(other["query"][0], clean["query"][0]) <= FLOOR["bfloat16"]


@pytest.mark.parametrize(
    ("length", "heads", "widths", "dtype", "options"),
    [
        (256, (2, 1), (64, 64), "bfloat16", {}),
        (2048, (8, 2), (128, 128), "bfloat16", {}),
        (4096, (8, 8), (64, 64), "float16", {"logits_soft_cap": 3.0}),
        (1024, (6, 3), (128, 64), "bfloat16", {"softmax_scale": 0.3}),
        (1024, (4, 1), (96, 96), "bfloat16", {}),
    ],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_hops_add_in_place(length, heads, widths, dtype, options, rank):
    hold_hops(length, heads, widths, dtype, options, rank=rank, again=2)


@pytest.mark.parametrize("width", [128, 256])
def test_a_backward_with_lse_and_delta_of_more_keys(width):
    """What a ring needs: two halves of the keys, each with the whole's lse and delta, add up to the whole's gradients."""
    floats = arrays(T, S, width, width, "bfloat16")
    d_out = jnp.asarray(RNG.standard_normal((B, T, N, width)), jnp.bfloat16)
    whole = at(np.arange(T)[None], causal=True)
    out, lse = op(**floats, mask=whole, platform="triton")
    saved = {"d_out": d_out, "lse": lse, "delta": jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32), -1)}

    def back(x, mask):
        return op.backward(saved, **x, mask=mask, platform="triton")

    want, half = back(floats, whole), S // 2
    parts = []
    for keys in (slice(0, half), slice(half, None)):
        x = {name: v if name == "query" else v[:, keys] for name, v in floats.items()}
        parts.append(back(x, dataclasses.replace(whole, kv_positions=whole.kv_positions[:, keys])))
    joined = {name: jnp.concatenate([p[name] for p in parts], 1) for name in ("key", "value")}
    joined["query"] = sum(p["query"].astype(jnp.float32) for p in parts)
    for name, x in joined.items():
        assert error(x, want[name].astype(jnp.float32)) <= 2 * FLOOR["bfloat16"], name
    assert WARP_SPECIALIZED == 12
