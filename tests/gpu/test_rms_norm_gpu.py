"""rms_norm on a CUDA device. Run with the command in CONTRIBUTING.md."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grid import FLOOR, error, value_and_gradients

from kernels.framework.backend import Case
from kernels.framework.binding import is_float_array
from kernels.ops.rms_norm import op, rms_norm
from kernels.toolchains.simulate import ahead_of_time as checks


def has_cuda():
    try:
        return bool(jax.devices("cuda"))
    except RuntimeError:
        return False


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not has_cuda(), reason="JAX sees no CUDA device here")]

SMALL = [case for case in op.cases if "bench" not in case.tags]
WIDE = [
    Case(f"{rows}x{D}", {"lead": (rows,), "D": D}, arrays=("weight",))
    for rows, D in ((5003, 128), (1031, 4096), (777, 5120), (300, 8192), (131, 16384), (3, 20000))
]


def check_on_device(case, dtype, platform, cfg=None):
    arguments = op.case_inputs(case, dtype=dtype)
    exact = {k: v.astype(jnp.float32) if is_float_array(v) else v for k, v in arguments.items()}
    truth, true_gradients, d = value_and_gradients(op.function, exact)
    rounded, rounded_gradients, _ = value_and_gradients(op.function, arguments, d)
    got, gradients, _ = value_and_gradients(lambda **a: op(**a, platform=platform, cfg=cfg), arguments, d)
    rows = list(zip(op.outputs, got, truth, rounded))
    rows += [(f"d_{n}", gradients[n], true_gradients[n], rounded_gradients[n]) for n in true_gradients]
    for name, actual, wanted, yardstick in rows:
        assert error(actual, wanted) <= 2 * error(yardstick, wanted) + FLOOR[dtype], (name, cfg)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("case", SMALL + WIDE, ids=lambda c: c.name)
@pytest.mark.parametrize("platform", ["triton", "xla"])
def test_numbers(platform, case, dtype):
    check_on_device(case, dtype, platform)


@pytest.mark.parametrize("case", WIDE, ids=lambda c: c.name)
def test_numbers_of_every_tuning_candidate(case):
    arguments = op.case_inputs(case, dtype="bfloat16")
    candidates = op.backends["triton_gpu"].candidates(op.bind(**arguments))
    assert candidates
    for cfg in candidates:
        check_on_device(case, "bfloat16", "triton", cfg)


def test_the_same_call_gives_the_same_bits():
    arguments = op.case_inputs(WIDE[1], dtype="bfloat16")
    runs = [value_and_gradients(lambda **a: op(**a, platform="triton"), arguments) for _ in range(3)]
    first = [np.asarray(x).tobytes() for x in jax.tree.leaves(runs[0])]
    for run in runs[1:]:
        assert [np.asarray(x).tobytes() for x in jax.tree.leaves(run)] == first


def test_dispatch_takes_triton_on_a_gpu():
    x = jnp.ones((4, 256), jnp.bfloat16)
    assert "triton_kernel_call" in jax.jit(rms_norm).lower(x).as_text()
    np.testing.assert_array_equal(rms_norm(x), rms_norm(x, platform="triton"))


def test_code_for_another_target_leaves_this_device_as_it_was():
    x = jax.random.normal(jax.random.key(0), (8, 256), jnp.bfloat16)
    [kernel] = checks.export_cuda(rms_norm, x, compute_capability=80).kernels
    assert ".target sm_80" in kernel.ptx
    # Another shape, so that it is compiled anew, and for this device.
    assert error(rms_norm(x[:7]), op.reference(x[:7])[0]) < FLOOR["bfloat16"]
