"""scaled_matmul's kernel for Hopper, interpreted: its numbers. On a GPU: tests/gpu/test_scaled_matmul_gpu.py."""

import pytest
from hopper import interpreted
from hopper_scaled import CALLS, check

from kernels.ops.scaled_matmul import op, triton_gpu


@pytest.mark.parametrize("call", CALLS, ids=lambda call: "-".join(map(str, call[1:])))
def test_numbers(call, monkeypatch):
    with interpreted(monkeypatch, op, triton_gpu):
        check(*call)
