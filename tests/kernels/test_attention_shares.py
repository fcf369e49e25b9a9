"""How many programs share a block of keys in the backward of attention on Hopper."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.engines.attention import triton_calls
from kernels.engines.attention.masks import MaskInfo
from kernels.engines.attention.tiles import spans
from kernels.engines.attention.triton_shares import ENOUGH, MULTIPROCESSORS, shares_of_group
from kernels.ops.flash_attention import op
from kernels.toolchains.simulate.ahead_of_time import export_cuda


def of_keys(length: int, mask: MaskInfo) -> np.ndarray:
    return spans(mask, length, length, 64, 128)[1]


CAUSAL = MaskInfo(causal=True)


@pytest.mark.parametrize(
    ("batch", "length", "key_heads", "group", "mask", "divided"),
    [
        (2, 6400, 1, 8, CAUSAL, True),  # 100 programs, of which the longest has twice the mean
        (8, 1024, 1, 16, CAUSAL, True),
        (5, 3072, 2, 12, CAUSAL, True),
        (1, 4096, 1, 8, MaskInfo(), True),  # 32 programs
        (1, 32768, 8, 4, CAUSAL, False),  # 2,048: the last ones are short
        (1, 16896, 1, 8, MaskInfo(), False),  # one for each multiprocessor, all alike
        (1, 2048, 1, 1, CAUSAL, False),
        (1, 32768, 4, 4, MaskInfo(causal=True, window=(4095, 0)), False),  # 1,024, nearly all alike
        (1, 4096, 2, 4, MaskInfo(causal=True, window=(1023, 0)), True),  # 64
        (8, 4096, 8, 8, CAUSAL, False),
    ],
)
def test_a_group_is_divided_where_programs_are_few(batch, length, key_heads, group, mask, divided):
    shares = shares_of_group(of_keys(length, mask), batch, key_heads, group, length // 64)
    assert group % shares == 0 and (shares > 1) == divided


def test_no_more_programs_than_are_worth_it():
    """What they write and add is counted: some of 16 heads stay together, and all where a block of keys meets few queries."""
    assert 1 < shares_of_group(of_keys(12928, CAUSAL), 1, 1, 16, 202) < 16
    assert shares_of_group(of_keys(1024, MaskInfo(causal=True, window=(64, 0))), 4, 1, 4, 16) == 1


@pytest.mark.parametrize(
    ("keys", "key_heads", "queries", "shares"),
    [
        (1024, 2, 1024, 16),  # block means of 65,536 tokens: 16 programs would go through the queries of 16 heads each
        (4096, 1, 64, 8),
        (1024, 2, 1, 1),  # too few steps
        (16896, 1, 264, 1),  # as many programs as multiprocessors
    ],
)
def test_spans_that_only_a_batch_knows_are_taken_for_causal_ones(keys, key_heads, queries, shares):
    @jax.jit
    def of(spans):
        return jnp.zeros(shares_of_group(spans, 1, key_heads, 16, queries))

    assert of(of_keys(keys, CAUSAL)).size == shares


def test_of_very_many_programs_none_is_looked_at(monkeypatch):
    spans = np.broadcast_to(np.array([0, 0, 1, 1]), (1, ENOUGH * MULTIPROCESSORS, 4))
    monkeypatch.setattr("kernels.engines.attention.triton_shares.makespan", None)
    assert shares_of_group(spans, 1, 1, 8, 64) == 1


@pytest.mark.slow  # compiled; the numbers of shares are quick
@pytest.mark.parametrize(
    ("width", "spills"),
    [(128, 36), (256, 24), (64, 0)],
    ids=str,
)
def test_the_code(width, spills):
    """Sums are stored in float32 from registers: no more spills than through the tile, see test_flash_attention_hopper.py."""
    shapes = {"query": (2, 2048, 8, width), "key": (2, 2048, 1, width), "value": (2, 2048, 1, width)}
    arrays = {name: jax.ShapeDtypeStruct(shape, "bfloat16") for name, shape in shapes.items()}

    def loss(x):
        return op(**x, mask=CAUSAL, platform="triton")[0].astype(jnp.float32).sum()

    exported = export_cuda(jax.grad(loss), arrays)
    kernel = exported.kernels[1]
    assert kernel.name in ("warp_specialized_bwd_kernel", "warp_specialized_wide_bwd_kernel")
    assert kernel.resources["serialized"] == 0 and kernel.resources["spill_stores"] <= spills, kernel.resources


def test_key_heads_of_a_call(monkeypatch):
    x, k = jnp.zeros((1, 512, 8, 64), jnp.bfloat16), jnp.zeros((1, 512, 2, 64), jnp.bfloat16)
    call = triton_calls.prepare(x, k, k, CAUSAL, None, None, None, None, None, 0.0, None)
    monkeypatch.setattr(triton_calls, "shares_of_group", lambda *rest: 4)
    shared = call.shared(call.known_spans(64, 128)[1], 8, None)
    assert (shared.options["K"], shared.options["SHARES"], call.options["K"]) == (8, 4, 2)
    assert call.shared(jnp.zeros((1, 4, 4), jnp.int32), 8, 2).options["K"] == 4, "which are asked for"
    with pytest.raises(ValueError, match="shares = 3 must divide the 4 query heads"):
        call.shared(None, 8, 3)
