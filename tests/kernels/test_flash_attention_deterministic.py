"""`deterministic=True` of flash attention: who refuses it, who is passed over, and that every wrapper hands it on.

That the same bits come twice is tested on a device, in tests/gpu.
"""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_names import without_code

import ejdist
import kernels
from ejdist import make_mesh, ring_attention
from ejdist.operations import bind_ops
from ejdist.training.program import make_program
from kernels import MaskInfo, Unsupported
from kernels.framework.config import BwdParams, KernelConfig
from kernels.framework.contract import Op
from kernels.ops.flash_attention import (
    attention,
    flash_attention,
    flash_attention_backward,
    scaled_dot_product_attention,
)
from kernels.ops.flash_attention.contract import attention_op, op
from kernels.ops.flash_attention.triton_gpu import WARP_SPECIALIZED
from kernels.ops.multi_latent_attention.contract import op as latent_op
from kernels.toolchains.simulate.compile_for import custom_call_target
from recipes.schema import compose

RNG = np.random.default_rng(0)
B, T, N, H = 2, 16, 2, 8
QUERY, KEY, VALUE = (jnp.asarray(RNG.standard_normal((B, T, N, H)), jnp.bfloat16) for _ in range(3))


def lowered(*, differentiated, **options):
    """Returns the program for CUDA, as text."""

    def function(q, k, v):
        return jnp.sum(flash_attention(q, k, v, causal=True, **options).astype(jnp.float32))

    with kernels.compile_for(90) as checks:
        program = jax.jit(jax.grad(function, (0, 1, 2)) if differentiated else function)
        return jax.export.export(program, platforms=["cuda"], disabled_checks=checks)(QUERY, KEY, VALUE).mlir_module()


@pytest.mark.parametrize("differentiated", [pytest.param(False, marks=pytest.mark.slow), True])
def test_cudnn_is_passed_over(differentiated):
    assert "__cudnn$fmhaSoftmax" in lowered(differentiated=differentiated)
    with without_code():
        text = lowered(differentiated=differentiated, deterministic=True)
    kernels_in_it = text.count(f"stablehlo.custom_call @{custom_call_target()}")
    assert "__cudnn$" not in text and kernels_in_it == (3 if differentiated else 1)


def test_cudnn_refuses_by_name_and_says_who_can():
    with pytest.raises(Unsupported, match=r"cudnn_gpu: it does not support deterministic; platform='triton_gpu' can"):
        flash_attention(QUERY, KEY, VALUE, deterministic=True, platform="cudnn")


@pytest.mark.parametrize("keys", [64, 128])  # of wide heads, and of narrow ones
def test_specialised_warps_add_in_any_order_and_refuse(keys):
    """Nobody chooses them for such a call; a configuration that asks for them is told so."""
    specialised = BwdParams(q_blocksize=64, kv_blocksize=keys, num_warps=WARP_SPECIALIZED, num_stages=2)
    with pytest.raises(
        Unsupported, match=r"cfg.bwd_params.num_warps = 12 does not support deterministic=True: .* adds the gradient"
    ):
        lowered(differentiated=True, deterministic=True, platform="triton", cfg=KernelConfig(bwd_params=specialised))


@pytest.mark.parametrize("width", [128, 256])
def test_no_configuration_for_such_a_call_has_them(width):
    backend = op.backends["triton_gpu"]
    x = jax.ShapeDtypeStruct((1, 8192, 8, width), "bfloat16")
    with_and_without = []
    for deterministic in (True, False):
        call = op.bind(x, x, x, MaskInfo(causal=True), deterministic=deterministic)
        configs = (backend.heuristic(call, "cuda"), *backend.candidates(call))
        with_and_without.append(any(cfg.bwd_params.num_warps == WARP_SPECIALIZED for cfg in configs))
    assert with_and_without == [False, True]


@pytest.mark.parametrize("name", [name for name in op.backends if name != "cudnn_gpu"])
def test_every_other_backend_can(name):
    call = op.bind(QUERY, KEY, VALUE, deterministic=True)
    assert op.backends[name].refuses(op, call, True) is None


def test_it_is_no_part_of_the_meaning():
    def run(**options):
        return jax.vjp(lambda *x: flash_attention(*x, causal=True, **options), QUERY, KEY, VALUE)[1](QUERY)

    for got, want in zip(run(deterministic=True), run(), strict=True):
        np.testing.assert_array_equal(got, want)
    for got, want in zip(attention(QUERY, KEY, VALUE, deterministic=True), attention(QUERY, KEY, VALUE), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("value", [1, "yes", None, jnp.asarray(True)])
def test_it_is_true_or_false(value):
    with pytest.raises(ValueError, match="'deterministic'"):
        flash_attention(QUERY, KEY, VALUE, deterministic=value)


def mesh(**axes):
    return make_mesh(**axes, devices=jax.devices()[:2])


def in_a_shard_map(scheme):
    def run(*arrays, **options):
        function = lambda q, k, v: ring_attention(q, k, v, scheme=scheme, **options)  # noqa: E731
        spec = jax.P(None, "sp")
        return jax.shard_map(function, mesh=mesh(sp=2), in_specs=(spec, spec, spec), out_specs=spec)(*arrays)

    return run


LSE = jnp.zeros((B, T, N), jnp.float32)
WRAPPERS = {
    "flash_attention": flash_attention,
    "scaled_dot_product_attention": scaled_dot_product_attention,
    "flash_attention_backward": lambda *x, **a: flash_attention_backward(QUERY, *x, lse=LSE, delta=LSE, **a),
    "module": lambda q, k, v, deterministic, platform: kernels.public_functions()["flash_attention"].Module(
        deterministic=deterministic, platform=platform
    )(q, k, v),
    "on a mesh": lambda *x, **a: ejdist.flash_attention(*x, mesh=mesh(dp=2), **a),
    "under its other name on a mesh": lambda *x, **a: ejdist.scaled_dot_product_attention(*x, mesh=mesh(tp=2), **a),
    "ring": lambda *x, **a: ring_attention(*x, mesh=mesh(sp=2), **a),
    "ring of one": ring_attention,
    "ring of zigzag": lambda *x, **a: ring_attention(*x, mesh=mesh(sp=2), order="zigzag", **a),
    "all_gather": lambda *x, **a: ring_attention(*x, mesh=mesh(sp=2), scheme="all_gather", **a),
    "ring in a shard_map": in_a_shard_map("ring"),
    "all_gather in a shard_map": in_a_shard_map("all_gather"),
    "a model's": lambda *x, deterministic, platform: bind_ops(
        mesh(sp=2), platform=platform, deterministic_attention=deterministic
    ).attention(*x),
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_every_wrapper_hands_it_on(name):
    """To both directions: who cannot refuses each of them, for this reason too."""
    wrapper = WRAPPERS[name]

    def run(*arrays):
        return wrapper(*arrays, deterministic=True, platform="cudnn")

    with pytest.raises(Unsupported, match=r"it does not support .*deterministic"):
        run(QUERY, KEY, VALUE)


def test_every_function_of_this_operation_takes_it():
    wrapped = [f for f in kernels.public_functions().values() if set(f.ops) & {op, attention_op, latent_op}]
    assert len(wrapped) == 4
    for function in (*wrapped, *(ejdist.operations.FUNCTIONS[f.__name__] for f in wrapped), ring_attention):
        assert "deterministic" in inspect.signature(function).parameters, function


@pytest.fixture
def asked(monkeypatch):
    """Returns what calls of flash attention are asked for: (direction, deterministic)."""
    found, program = [], Op.program

    def spy(self, direction, call, *rest):
        if self is op:
            found.append((direction, call.deterministic))
        return program(self, direction, call, *rest)

    monkeypatch.setattr(Op, "program", spy)
    return found


@pytest.mark.parametrize(
    "window", [pytest.param(None, marks=pytest.mark.slow), (5, 0)], ids=["plain_hops", "masked_hops"]
)
@pytest.mark.parametrize("scheme", ["ring", "all_gather"])
def test_the_backward_of_a_ring_is_asked_too(asked, scheme, window):
    x = jnp.ones((1, 24, 2, 8))

    def loss(x, deterministic):
        how = {"causal": True, "sliding_window": window, "deterministic": deterministic}
        out = ring_attention(x, x, x, scheme=scheme, mesh=mesh(sp=2), **how)
        return jnp.sum(jnp.sin(out))

    for deterministic in (True, False):
        asked.clear()
        jax.jit(jax.grad(loss), static_argnums=1).lower(x, deterministic)
        assert set(asked) == {("forward", deterministic), ("backward", deterministic)}


def test_latent_attention_in_a_ring_is_asked_too(asked):
    q, latent, up = jnp.ones((1, 40, 2, 4)), jnp.ones((1, 40, 6)), jnp.ones((6, 2, 4))

    def loss(q, deterministic):
        spec = jax.P(None, "sp")
        out = ejdist.flash_mla(q, latent, up, up, mesh=mesh(sp=2), in_specs=(spec, spec), deterministic=deterministic)
        return jnp.sum(out)

    for deterministic in (True, False):
        asked.clear()
        jax.jit(jax.grad(loss), static_argnums=1).lower(q, deterministic)
        assert set(asked) == {("forward", deterministic), ("backward", deterministic)}


SMALL = ["recipe=long_context", "mesh=sequence", "mesh.sp=2", "data.sequence_length=32", "data.global_batch=2"]


@pytest.mark.parametrize("said", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_recipe_asks_for_it(asked, said):
    recipe = compose([*SMALL, f"deterministic_attention={str(said).lower()}"])
    program = make_program(recipe, mesh(sp=2))
    asked.clear()
    program.lower()
    assert set(asked) == {("forward", said), ("backward", said)}
