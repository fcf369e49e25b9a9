"""The documented examples of attention, as a user would type them, on eight virtual devices.

Each is checked for its numbers too: an example that only runs can still be wrong.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

# The documented form, which JAX would like to see replaced by `jax.set_mesh`.
pytestmark = pytest.mark.filterwarnings("ignore:.*context manager has been deprecated:DeprecationWarning")

B, T, N, H = 2, 128, 8, 16
RNG = np.random.default_rng(0)


def normal(*shape):
    return jnp.asarray(RNG.standard_normal(shape).astype(np.float32))


QUERY, KEY, VALUE = normal(B, T, N, H), normal(B, T, N, H), normal(B, T, N, H)


def dense(visible=None, bias=None, query=QUERY, key=KEY, value=VALUE):
    """Returns plain softmax attention in NumPy, float64; rows with no key are 0."""
    q, k, v = (np.asarray(x, np.float64) for x in (query, key, value))
    logits = np.einsum("btnh,bsnh->bnts", q, k) / np.sqrt(q.shape[-1])
    logits = logits if bias is None else logits + np.asarray(bias, np.float64)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights = weights if visible is None else weights * visible
    total = weights.sum(-1, keepdims=True)
    return np.einsum("bnts,bsnh->btnh", weights / np.where(total == 0, 1, total), v)


def close(got, want):
    np.testing.assert_allclose(np.asarray(got), want, atol=2e-5)


I, J = np.arange(T)[:, None], np.arange(T)[None]
CAUSAL = I >= J


def of_segments(ids):
    ids = np.asarray(ids)
    return ((ids[:, :, None] == ids[:, None]) & (ids >= 0)[:, :, None])[:, None]


# -- flash_attention ---------------------------------------------------------------------------------------------------


def test_quick_start():
    from ejdist import flash_attention

    q = jnp.ones((2, 128, 8, 64))  # (batch, seq_len, heads, head_dim)
    k = jnp.ones((2, 128, 8, 64))
    v = jnp.ones((2, 128, 8, 64))
    output = flash_attention(q, k, v, causal=True)
    np.testing.assert_allclose(output, v, rtol=1e-6)


def test_basic_causal_window_and_bias():
    from ejdist import flash_attention

    query, key, value = QUERY, KEY, VALUE
    attention_bias = normal(1, N, T, T)
    close(flash_attention(query, key, value), dense())
    close(flash_attention(query, key, value, causal=True), dense(CAUSAL))
    # An integer window means exactly that many keys, up to the query's own.
    close(flash_attention(query, key, value, sliding_window=16), dense(CAUSAL & (J > I - 16)))
    close(flash_attention(query, key, value, sliding_window=(8, 4)), dense((J >= I - 8) & (J <= I + 4)))
    close(flash_attention(query, key, value, bias=attention_bias), dense(bias=attention_bias))


def test_cumulative_lengths():
    from ejdist import flash_attention

    cu_seqlens_q = cu_seqlens_k = jnp.array([0, 32, 75, 128])
    query, key, value = QUERY[:1], KEY[:1], VALUE[:1]
    output = flash_attention(query, key, value, cum_seqlens_q=cu_seqlens_q, cum_seqlens_k=cu_seqlens_k)
    ids = np.searchsorted([32, 75, 128], np.arange(T), side="right")[None]
    close(output, dense(of_segments(ids), query=query, key=key, value=value))


@pytest.mark.parametrize("platform", ["xla", None])
def test_platform_by_name(platform):
    from ejdist import flash_attention

    close(flash_attention(QUERY, KEY, VALUE, platform=platform), dense())


def test_module_and_executor():
    from ejdist import FlashAttention
    from ejdist.ops import ConfigCache, ConfigSelectorChain, Executor

    executor = Executor(ConfigSelectorChain(cache=ConfigCache()))
    attn_module = FlashAttention()
    output = executor(attn_module, query=QUERY, key=KEY, value=VALUE, causal=True)
    close(output, dense(CAUSAL))


def test_scaled_dot_product_attention():
    from ejdist import scaled_dot_product_attention

    mask = jnp.asarray(RNG.random((B, 1, T, T)) < 0.5)
    output = scaled_dot_product_attention(QUERY, KEY, VALUE, attention_mask=mask, causal=True)
    close(output, dense(np.asarray(mask) & CAUSAL))


# -- MaskInfo ----------------------------------------------------------------------------------------------------------


def test_mask_info_from_segments():
    from ejdist import flash_attention
    from ejdist.types import MaskInfo

    segment_ids = jnp.array([[1, 1, 2, 2, -1, -1]])  # -1 = padding
    mask_info = MaskInfo.from_segments(segment_ids)
    q, k, v = QUERY[:1, :6], KEY[:1, :6], VALUE[:1, :6]
    output = flash_attention(q, k, v, mask_info=mask_info)
    close(output, dense(of_segments(segment_ids), query=q, key=k, value=v))


def test_mask_info_of_packed_sequences():
    from ejdist import flash_attention
    from ejdist.types import MaskInfo

    segment_ids = jnp.array([[1, 1, 1, 2, 2, 3, 3, 3, 3, -1]])  # 3 sequences, 1 padding
    mask_info = MaskInfo.from_segments(segment_ids)
    q, k, v = QUERY[:1, :10], KEY[:1, :10], VALUE[:1, :10]
    output = flash_attention(q, k, v, mask_info=mask_info)
    close(output, dense(of_segments(segment_ids), query=q, key=k, value=v))
    assert np.array_equal(output[:, 9], np.zeros((1, N, H))), "padding attends to nothing"


@pytest.mark.parametrize("kind", ["padding", "pairs", "heads"])
def test_mask_info_from_attention_mask(kind):
    from ejdist import flash_attention
    from ejdist.types import MaskInfo

    if kind == "padding":
        attention_mask = jnp.asarray(np.arange(T)[None] < np.array([[100], [128]]))
        visible = np.asarray(attention_mask)[:, None, :, None] & np.asarray(attention_mask)[:, None, None, :]
    else:
        attention_mask = jnp.asarray(RNG.random((B, T, T) if kind == "pairs" else (B, N, T, T)) < 0.5)
        visible = np.asarray(attention_mask)[:, None] if kind == "pairs" else np.asarray(attention_mask)
    mask_info = MaskInfo.from_attention_mask(attention_mask)
    close(flash_attention(QUERY, KEY, VALUE, mask_info=mask_info), dense(visible))


# -- on several devices ------------------------------------------------------------------------------------------------


def test_distributed_execution():
    from ejdist import flash_attention

    devices = np.asarray(jax.devices())
    mesh = Mesh(devices.reshape(2, 4), axis_names=("dp", "tp"))
    output = flash_attention(
        QUERY,
        KEY,
        VALUE,
        mesh=mesh,
        in_specs=(
            P("dp", None, "tp", None),  # query sharding
            P("dp", None, "tp", None),  # key sharding
            P("dp", None, "tp", None),  # value sharding
        ),
        out_specs=P("dp", None, "tp", None),
    )
    close(output, dense())
    assert {s.data.shape for s in output.addressable_shards} == {(B // 2, T, N // 4, H)}


def test_distributed_execution_under_a_mesh():
    from ejdist import flash_attention

    devices = np.asarray(jax.devices())
    mesh = Mesh(devices.reshape(2, 4), axis_names=("dp", "tp"))
    with mesh:
        output = flash_attention(
            QUERY,
            KEY,
            VALUE,
            mesh=mesh,
            in_specs=(P("dp", None, "tp", None),) * 3,
            out_specs=P("dp", None, "tp", None),
        )
    close(output, dense())


def test_ring_attention():
    from ejdist import ring_attention

    devices = jax.devices()
    mesh = jax.sharding.Mesh(devices, axis_names=("sp",))
    with mesh:
        output = ring_attention(
            QUERY,
            KEY,
            VALUE,
            axis_name="sp",
            causal=True,
        )
    close(output, dense(CAUSAL))
    assert {s.data.shape for s in output.addressable_shards} == {(B, T // 8, N, H)}


def test_ring_attention_is_causal_under_grad_too():
    """The published library's ring loses its mask when it is differentiated."""
    from ejdist import ring_attention

    mesh = Mesh(jax.devices(), axis_names=("sp",))
    with mesh:
        gradient = jax.jit(
            jax.grad(lambda v: jnp.sum(ring_attention(QUERY, KEY, v, axis_name="sp", causal=True)[:, 50]))
        )
        reached = np.abs(np.asarray(gradient(VALUE))).max((0, 2, 3)) > 0
    assert np.array_equal(reached, np.arange(T) <= 50)


@pytest.mark.parametrize("option", ["chunk_size", "sliding_window", "softmax_aux"])
def test_ring_attention_parameters(option):
    from ejdist import flash_attention, ring_attention

    options = {option: {"chunk_size": 32, "sliding_window": 24, "softmax_aux": normal(N)}[option], "causal": True}
    mesh = Mesh(jax.devices()[:4], ("sp",))
    with mesh:
        output = ring_attention(QUERY, KEY, VALUE, axis_name="sp", **options)
    if option == "softmax_aux":
        close(output, np.asarray(flash_attention(QUERY, KEY, VALUE, **options)))
    else:
        near = (I // 32 == J // 32) if option == "chunk_size" else (J > I - 24)
        close(output, dense(CAUSAL & near))


# -- configurations ----------------------------------------------------------------------------------------------------


def test_a_configuration_of_the_callers_own():
    from ejdist import FlashAttentionConfig, Unsupported, flash_attention
    from ejdist.ops import BwdParams, FwdParams

    fwd = FwdParams(q_blocksize=128, kv_blocksize=256, num_warps=4, num_stages=2)
    bwd = BwdParams(q_blocksize=64, kv_blocksize=128)
    config = FlashAttentionConfig(fwd_params=fwd, bwd_params=bwd, platform="xla", backend="any")
    close(flash_attention(QUERY, KEY, VALUE, cfg=config), dense())
    # What the example of the documentation asks for is a GPU's; here it is refused by name and nothing else runs instead.
    gpu = FlashAttentionConfig(fwd_params=fwd, bwd_params=bwd, platform="triton", backend="gpu")
    with pytest.raises(Unsupported):
        jax.block_until_ready(flash_attention(QUERY, KEY, VALUE, cfg=gpu))
