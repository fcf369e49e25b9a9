"""The documented use of the executor and of the registry, on the operations of this project."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels import Backend, Platform, Unsupported, flash_attention, kernel_registry


@pytest.fixture
def qkv():
    return tuple(jax.random.normal(k, (2, 64, 4, 16)) for k in jax.random.split(jax.random.key(0), 3))


def test_module_and_executor(qkv):
    from ejdist import FlashAttention
    from ejdist.ops import ConfigCache, ConfigSelectorChain, Executor

    query, key, value = qkv
    executor = Executor(ConfigSelectorChain(cache=ConfigCache(), autotune=False))
    output = executor(FlashAttention(), query=query, key=key, value=value, causal=True)
    np.testing.assert_allclose(output, flash_attention(query, key, value, causal=True), atol=1e-6)


def test_default_executor_with_dropout(qkv):
    from ejdist import FlashAttention, create_default_executor

    q, k, v = qkv
    executor = create_default_executor()
    executor.chain.autotune, executor.chain.persistent = False, None
    output = executor(FlashAttention(), q, k, v, causal=True, dropout_prob=0.1)
    assert output.shape == q.shape and not np.allclose(output, flash_attention(q, k, v, causal=True))


def test_a_configuration_of_ones_own(qkv):
    from ejdist import FlashAttentionConfig, flash_attention
    from ejdist.ops import BwdParams, FwdParams

    query, key, value = qkv
    config = FlashAttentionConfig(
        fwd_params=FwdParams(q_blocksize=32, kv_blocksize=16, num_warps=4, num_stages=2),
        bwd_params=BwdParams(q_blocksize=16, kv_blocksize=32),
        platform="xla",
        backend="any",
    )
    np.testing.assert_allclose(
        flash_attention(query, key, value, cfg=config), flash_attention(query, key, value), atol=1e-6
    )
    on_triton = FlashAttentionConfig(platform="triton", backend="gpu")
    with pytest.raises(Unsupported, match="cannot be compiled for cpu with platform='triton'"):
        flash_attention(query, key, value, cfg=on_triton)


def test_forced_platforms(qkv):
    output = flash_attention(*qkv, platform="xla")
    assert output.shape == qkv[0].shape
    with pytest.raises(Unsupported, match="flash_attention cannot be compiled for cpu with platform='triton'"):
        flash_attention(*qkv, platform="triton")


def test_registry(qkv):
    query, key, value = qkv
    chosen = kernel_registry.get("flash_attention")
    np.testing.assert_allclose(chosen(query, key, value, causal=True), flash_attention(query, key, value, causal=True))
    exact = kernel_registry.get(algorithm="flash_attention", platform=Platform.XLA, backend=Backend.ANY)
    assert exact(query, key, value).shape == query.shape
    with pytest.raises(Unsupported, match="it has xla/any"):
        kernel_registry.get(algorithm="performer_attention", platform=Platform.TRITON, backend=Backend.GPU)
    on_gpu = kernel_registry.get(algorithm="rms_norm", platform=Platform.TRITON, backend=Backend.GPU)
    with pytest.raises(Unsupported, match="cannot be compiled for cpu"):
        on_gpu(jnp.ones((4, 64)))
    # On this CPU the best implementation is never another device's.
    assert kernel_registry.get("rms_norm")(jnp.ones((4, 64))).shape == (4, 64)
