"""Configurations: which one a call runs with, what their values may be, and where tuned ones are kept."""

import dataclasses
import warnings

import jax
import jax.numpy as jnp
import pytest
from grid import BUILT_ON_ANOTHER
from toy import SEEN, make_op

import kernels
from kernels import Unsupported
from kernels.framework.binding import is_float_array
from kernels.framework.config import (
    BwdParams,
    ConfigCache,
    FwdParams,
    KernelConfig,
    PersistentCache,
    Tunables,
    completed,
)
from kernels.framework.interpret import interpret
from kernels.framework.registry import Platform
from kernels.framework.select import ConfigSelectorChain, Request, config_overlay, use_chain
from kernels.ops.grouped_matmul.contract import Tile


@pytest.fixture
def op():
    SEEN.clear()
    return make_op()


def run_config(op, x, **kwargs):
    """Returns the configuration that a fresh trace ran with."""
    op._programs.clear()
    SEEN.clear()
    op(x, **kwargs)
    return SEEN[-1]


def test_the_tiers_are_asked_in_order(op, tmp_path):
    x = jnp.ones((2, 5))
    heuristic = KernelConfig(FwdParams(q_blocksize=8, kv_blocksize=4), BwdParams(q_blocksize=2))
    chain = ConfigSelectorChain(persistent=PersistentCache(tmp_path / "cache"), autotune=False)
    with use_chain(chain):
        assert run_config(op, x) == heuristic
        given = KernelConfig(FwdParams(q_blocksize=64))
        used = run_config(op, x, cfg=given)
        assert used.fwd_params == FwdParams(q_blocksize=64, kv_blocksize=4)  # the rest is completed
        assert run_config(op, x) == heuristic, "an override must not be stored"
        with config_overlay({"toy": KernelConfig(FwdParams(q_blocksize=128))}):
            assert run_config(op, x).fwd_params.q_blocksize == 128
            assert run_config(op, x, cfg=given).fwd_params.q_blocksize == 64
        assert run_config(op, x) == heuristic
    assert not (tmp_path / "cache").exists(), "reading must not create the cache"
    assert len(chain.cache) == 0


def test_autotune_keeps_a_right_candidate_and_persists_it(op, tmp_path, monkeypatch):
    from kernels.framework import tuning

    # Time is decided here, so that the test does not depend on it: the wrong candidate is the fastest.
    speed = {8: 3.0, 16: 2.0, 32: 1.0}
    monkeypatch.setattr(tuning, "seconds", lambda f, *a: speed[SEEN[-1].fwd_params.q_blocksize])
    x = jax.random.normal(jax.random.key(0), (2, 5))
    chain = ConfigSelectorChain(persistent=PersistentCache(tmp_path))
    with use_chain(chain), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert run_config(op, x).fwd_params.q_blocksize == 16
    assert any("wrong numbers" in str(w.message) for w in caught)
    again = ConfigSelectorChain(cache=ConfigCache(), persistent=PersistentCache(tmp_path), autotune=False)
    with use_chain(again):
        assert run_config(op, x).fwd_params.q_blocksize == 16
        assert run_config(op, jnp.ones((3, 5))).fwd_params.q_blocksize == 8, "a different shape has a different key"


def test_autotune_never_runs_under_a_trace(op):
    constant = jnp.ones((2, 5))
    with use_chain(ConfigSelectorChain(autotune=True)):
        for traced in (lambda: jax.jit(lambda x: op(x)[0])(constant), lambda: jax.jit(lambda: op(constant)[0])()):
            op._programs.clear()
            SEEN.clear()
            traced()
            assert {c.fwd_params.q_blocksize for c in SEEN} == {8}


def test_a_damaged_tuning_file_is_ignored_aloud(op, tmp_path):
    cache = PersistentCache(tmp_path)
    cache.put("key", KernelConfig())
    assert cache.get("key", KernelConfig()) == KernelConfig()
    next(tmp_path.glob("*.json")).write_text("{")
    with pytest.warns(UserWarning, match="unreadable tuning file"):
        assert cache.get("key", KernelConfig()) is None


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FwdParams(q_blocksize=0), "FwdParams: q_blocksize must be a positive integer or None, got 0"),
        (lambda: BwdParams(num_warps=True), "BwdParams: num_warps must be a positive integer or None, got True"),
        (lambda: KernelConfig((64, 64)), r"KernelConfig: fwd_params must be a FwdParams, got \(64, 64\)"),
        (lambda: KernelConfig(backend=None), "KernelConfig: backend must be a string, got None"),
        (lambda: Tile(flatten=1), "Tile: flatten must be True or False or None, got 1"),
        (lambda: Tile(specialised="big"), "Tile: specialised must be 'tall', 'wide', 'none' or None, got 'big'"),
    ],
)
def test_values_of_configurations_are_checked(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_every_operation_checks_its_configurations():
    found = [op.config for op in kernels.operations().values() if op.config is not None]
    assert len(found) > 20
    for config in found:
        (name, *_) = (f.name for f in dataclasses.fields(config))
        with pytest.raises(ValueError, match=f"{config.__name__}: {name} must be "):
            config(**{name: 0})


def test_a_configuration_takes_a_platform_as_the_registry_names_it():
    assert KernelConfig(platform=Platform.TRITON).platform == "triton"


def test_configs_complete():
    assert completed(FwdParams(num_warps=2), FwdParams(num_warps=8, num_stages=3)) == FwdParams(
        num_warps=2, num_stages=3
    )


def test_config_can_ask_for_a_platform_and_a_device(op):
    x = jnp.ones((2, 5))
    with pytest.raises(Unsupported, match="has no pallas backend"):
        op(x, cfg=KernelConfig(platform="pallas"))
    with pytest.raises(Unsupported, match=r"cannot be compiled for cpu"):
        op(x, cfg=KernelConfig(platform="triton", backend="gpu"))
    with pytest.raises(Unsupported, match=r"not for cfg.backend = 'tpu'"):
        op(x, cfg=KernelConfig(platform="triton", backend="tpu"))
    assert op(x, cfg=KernelConfig(platform="xla", backend="cpu"))[0].shape == (2, 5)


def test_tuned_configs_are_plain_dataclasses():
    assert dataclasses.asdict(KernelConfig())["fwd_params"]["num_warps"] is None


def test_a_tuned_configuration_is_of_one_kind_of_device(op, monkeypatch):
    """Tuned on one kind, a configuration is no answer on another."""
    from kernels.framework import select

    call = op.bind(jnp.ones((2, 5)))
    request = Request(op, op.backends["xla"], call, "cpu", None, lambda r: None)
    chain = ConfigSelectorChain(autotune=False)
    chain.cache.put(request.key(), KernelConfig(FwdParams(q_blocksize=16, kv_blocksize=4)))
    assert chain.select(request).fwd_params.q_blocksize == 16
    monkeypatch.setattr(select.Request, "device_kind", property(lambda self: "another chip"))
    assert chain.select(request).fwd_params.q_blocksize == 8


def test_a_call_follows_a_configuration_that_was_tuned_since(op):
    x = jnp.ones((2, 5))
    chain = ConfigSelectorChain(autotune=False)
    with use_chain(chain):
        op(x)
        request = Request(op, op.backends["xla"], op.bind(x), "cpu", None, lambda r: None)
        chain.cache.put(request.key(), KernelConfig(FwdParams(q_blocksize=64), BwdParams()))
        op(x)
    assert [c.fwd_params.q_blocksize for c in SEEN] == [8, 64]


# -- Triton's tiles ----------------------------------------------------------------------------------------------------

# Integers of configurations that are no side of a tile and no warps, of some operation at least.
COUNTS = {
    "block_rows", "num_stages", "programs", "band", "splits", "heads", "backward_programs", "backward_num_stages", "parallel",
    "dq_num_stages", "mixed_num_stages", "num_buffers", "chunks", "teams",
}  # fmt: skip


def integers(cfg, above=()):
    """Yields where a configuration has an integer, as the names that lead there."""
    for f in dataclasses.fields(cfg):
        value = getattr(cfg, f.name)
        if isinstance(value, Tunables):
            yield from integers(value, (*above, f.name))
        elif type(value) is int:
            yield (*above, f.name)


def put(cfg, path, value):
    name, *rest = path
    return dataclasses.replace(cfg, **{name: put(getattr(cfg, name), rest, value) if rest else value})


# Quantized weights have no gradient.
NOT_READ = {("grouped_matmul_quantized", "d_rhs")}
TRITON = [op for op in kernels.operations().values() if op.backends.get("triton_gpu") and op.config]


@pytest.mark.parametrize(
    "op", [pytest.param(op, id=op.name, marks=[pytest.mark.slow] * (op.name in BUILT_ON_ANOTHER)) for op in TRITON]
)
def test_sides_of_tiles_and_warps_are_powers_of_2(op):
    """Triton itself says so in the middle of a kernel, or by an assertion, and where it is interpreted not at all."""
    backend = op.backends["triton_gpu"]
    trains = backend.backward is not None
    made = (op.case_inputs(c, dtype=dtype) for c in op.cases for dtype in ("float32", "float8_e4m3fn"))
    arguments = next(a for a in made if not backend.refuses(op, op.bind(**a), trains))
    floats = {n: x for n, x in arguments.items() if is_float_array(x)}
    cfg = backend.heuristic(op.bind(**arguments), "cuda")

    def both(cfg):
        def loss(floats):
            outputs = jax.tree.leaves(op(**{**arguments, **floats}, platform="triton", cfg=cfg))
            return sum(jnp.sum(x.astype(jnp.float32)) for x in outputs if jnp.issubdtype(x.dtype, jnp.floating))

        with interpret():
            # Kernels are traced when a program is lowered.
            jax.jit(jax.value_and_grad(loss) if trains else loss).lower(floats)

    refused = 0
    for path in integers(cfg):
        try:
            both(put(cfg, path, 24))
        except ValueError as error:
            refused += 1
            assert "= 24 is not a power of 2" in str(error) and "'cfg'" in str(error), path
        else:
            assert path[-1] in COUNTS or (op.name, path[0]) in NOT_READ, path
    assert refused
