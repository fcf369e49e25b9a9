"""quantized_matmul's kernel for Hopper, interpreted: its numbers. On a GPU: tests/gpu/test_quantized_matmul_gpu.py."""

import types

import jax.numpy as jnp
import numpy as np
import pytest
from hopper import interpreted
from hopper_quantized import CALLS, arrays_of, check
from triton.experimental.gluon._runtime import GluonJITFunction

from kernels import quantized_matmul
from kernels.framework.interpret import interpret
from kernels.ops.quantized_matmul import gluon_kernels, gluon_weights, op, triton_gpu
from kernels.ops.quantized_matmul.contract import QuantizedMatmulConfig

QUICK = {0, 6, 8, 9, 10, 13}  # each format and number of bits, and two teams


@pytest.mark.parametrize(
    "call",
    [pytest.param(call, marks=() if i in QUICK else pytest.mark.slow) for i, call in enumerate(CALLS)],
    ids=lambda call: "-".join(map(str, call)),
)
def test_numbers(call, monkeypatch):
    with interpreted(monkeypatch, op, triton_gpu):
        check(*call)


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_the_code_of_e4m3_that_is_no_number(code, monkeypatch):
    """And its neighbours are numbers, 448 among them; a scale of 255 is none either."""
    words = np.zeros((8, 16), np.uint32)
    words[0, 0], words[1, 1], words[2, 2] = code << 24, (code - 1) << 8, 0x01
    scales = np.full((1, 16), 127, np.uint8)
    words[:, 5], scales[0, 5] = 0x38383838, 255
    with interpreted(monkeypatch, op, triton_gpu):
        x = jnp.ones((2, 32), jnp.bfloat16)
        got = np.asarray(quantized_matmul(x, jnp.asarray(words), jnp.asarray(scales), mode="mxfp8", platform="triton"))
    assert np.isnan(got[:, [0, 5]]).all()
    assert got[0, [1, 2, 3]].astype(np.float32).tolist() == [-448.0 if code > 128 else 448.0, 2.0**-9, 0.0]


@pytest.mark.parametrize(("mode", "power"), [("affine", 50), ("affine", -55), ("mxfp4", 40)])
def test_the_bits_of_a_product_do_not_depend_on_how_large_its_weights_are(mode, power, monkeypatch):
    x, w, *scales = arrays_of(mode, 4, 64 if mode == "affine" else 32, "bfloat16", 5, 128, 16)
    scales = [s for s in scales if s is not None]
    larger = [s + power if s.dtype == jnp.uint8 else s * jnp.asarray(2.0**power, s.dtype) for s in scales]
    with interpreted(monkeypatch, op, triton_gpu):
        few, many = (quantized_matmul(x, w, *s, mode=mode, bits=4, platform="triton") for s in (scales, larger))
    np.testing.assert_array_equal(np.asarray(few, np.float32) * 2.0**power, np.asarray(many, np.float32))


def test_the_first_trace_of_its_functions():
    """A function of NumPy in one of them fails the first trace of a process, and no later one."""
    found = vars(gluon_kernels) | vars(gluon_weights)
    functions = [f for f in found.values() if isinstance(f, GluonJITFunction)]
    assert len(functions) > 10
    for function in functions:
        assert GluonJITFunction(function.fn).cache_key


REFUSED = [
    ({"block_d": 32}, {}, "block_d = 32"),
    ({"block_m": 24}, {}, "block_m = 24"),
    ({"num_warps": 8}, {}, "block_f = 128, block_d = 64, num_warps = 8"),
    ({"teams": 2}, {}, "num_warps = 4, teams = 2"),
    ({"num_stages": 1}, {}, "num_stages = 1"),
    ({"num_warps": 3, "block_f": 96}, {}, "block_f = 96, block_d = 64, num_warps = 3"),
    ({"turned": False, "chunks": 3}, {}, "chunks = 3, which must be 1, 2 or 4"),
    ({}, {"scales": "float32"}, "scales of x's dtype"),
    ({"turned": False, "dense": False}, {"x": "float32"}, "dense = False"),
]


@pytest.mark.parametrize(("fields", "dtypes", "message"), REFUSED, ids=[message for *_, message in REFUSED])
def test_a_configuration_that_a_call_does_not_fit(fields, dtypes, message):
    arrays = types.SimpleNamespace()
    arrays.x, arrays.w, arrays.scales, arrays.biases = arrays_of("affine", 4, 64, "bfloat16", 4, 128, 128)
    for name, dtype in dtypes.items():
        setattr(arrays, name, getattr(arrays, name).astype(dtype))
    small = {"block_m": 8, "block_f": 128, "block_d": 64, "splits": 1, "chunks": 1, "num_warps": 4, "num_stages": 2}
    small |= {"programs": 1, "teams": 1, "turned": True, "dense": False}
    cfg = QuantizedMatmulConfig(**small | fields)
    with interpret(90), pytest.raises(ValueError, match=message):
        quantized_matmul(**vars(arrays), bits=4, platform="triton", cfg=cfg)
