"""The documented use of registry, executor and configurations, beside what tests/test_framework_examples.py has; and of mean
pooling, whose documents show two forms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grid import on_this_machine

import ejdist
import kernels
from kernels import Backend, ConfigCache, ConfigSelectorChain, Executor, KernelRegistry, Platform


@pytest.fixture
def qkv():
    return tuple(jax.random.normal(k, (2, 32, 4, 16)) for k in jax.random.split(jax.random.key(0), 3))


def test_registering_kernels_of_ones_own_by_priority():
    kernel_registry = KernelRegistry()

    @kernel_registry.register("my_kernel", Platform.TRITON, Backend.GPU, priority=100)
    def my_kernel_triton(x, y):
        return "triton"

    @kernel_registry.register("my_kernel", Platform.XLA, Backend.ANY, priority=50)
    def my_kernel_xla(x, y):
        return x + y

    # On this CPU a kernel of a GPU is never the best one, whatever its priority; asked for by name it is given.
    impl = kernel_registry.get("my_kernel")
    assert impl is my_kernel_xla and impl(1, 2) == 3
    assert kernel_registry.get("my_kernel", Platform.TRITON) is my_kernel_triton
    assert kernel_registry.get(algorithm="my_kernel", platform=Platform.TRITON, backend=Backend.GPU) is my_kernel_triton


def test_backends_of_the_registry_agree():
    """The documented check of one backend against another, in value and gradient."""
    inputs = {"x": jnp.asarray(np.random.default_rng(0).standard_normal((8, 64)), "float32"), "weight": jnp.ones(64)}
    outputs = {}
    for platform in (Platform.TRITON, Platform.PALLAS, Platform.XLA):
        implementation = kernels.kernel_registry.get("rms_norm", platform)
        with on_this_machine(kernels.operations()["rms_norm"].backends[implementation.keywords["platform"]]):
            outputs[platform] = jax.value_and_grad(lambda x: jnp.sum(jnp.sin(implementation(x, inputs["weight"]))))(  # noqa: B023
                inputs["x"]
            )
    for value, gradient in outputs.values():
        np.testing.assert_allclose(value, outputs[Platform.XLA][0], rtol=1e-5)
        np.testing.assert_allclose(gradient, outputs[Platform.XLA][1], atol=1e-5)


def test_an_executor_runs_any_module_class(qkv):
    query, key, value = qkv
    executor = Executor(ConfigSelectorChain(cache=ConfigCache(), autotune=False))
    x, mask = query[:, :, 0], jnp.ones((2, 32), jnp.int32)
    for module, arguments, function in (
        (
            ejdist.FlashAttention(),
            {"query": query, "key": key, "value": value, "causal": True},
            kernels.flash_attention,
        ),
        (ejdist.MeanPooling(), {"x": x, "attention_mask": mask}, kernels.mean_pooling),
        (ejdist.RMSNorm(eps=1e-3), {"x": x}, lambda x: kernels.rms_norm(x, eps=1e-3)),
        (ejdist.LayerNorm(), {"x": x}, kernels.layer_norm),
    ):
        np.testing.assert_allclose(executor(module, **arguments), function(**arguments), atol=1e-6)


def test_subsequent_calls_use_the_configuration_that_was_chosen(qkv):
    cache = ConfigCache()
    executor = Executor(ConfigSelectorChain(cache=cache, autotune=False))
    first = executor(ejdist.FlashAttention(), *qkv)
    version = cache.version
    np.testing.assert_array_equal(executor(ejdist.FlashAttention(), *qkv), first)
    assert cache.version == version


def test_mean_pooling_as_shown():
    hidden_states = jnp.asarray(np.random.default_rng(1).standard_normal((3, 8, 5)), "float32")
    lengths = np.array([8, 3, 0])
    attention_mask = jnp.asarray(np.arange(8)[None] < lengths[:, None])
    pooled = ejdist.mean_pooling(hidden_states, attention_mask)
    assert pooled.shape == (3, 5)
    wanted = [row[:n].mean(0) if n else np.zeros(5) for row, n in zip(np.asarray(hidden_states), lengths, strict=True)]
    np.testing.assert_allclose(pooled, wanted, atol=1e-6)
    packed = ejdist.mean_pooling(hidden_states[:1], cu_seqlens=jnp.array([0, 3, 8]))
    np.testing.assert_allclose(packed, [hidden_states[0, :3].mean(0), hidden_states[0, 3:].mean(0)], atol=1e-6)
    with pytest.raises(ValueError, match="'cu_seqlens' is 'cum_seqlens' by another name; pass only one"):
        ejdist.mean_pooling(hidden_states[:1], cu_seqlens=[0, 8], cum_seqlens=[0, 8])
