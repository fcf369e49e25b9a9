"""scaled_matmul's kernel for Hopper, interpreted: its numbers. On a GPU: tests/gpu/test_scaled_matmul_gpu.py."""

import pytest
from hopper import interpreted
from hopper_scaled import CALLS, GROUPED, check, check_grouped

from kernels.ops.scaled_matmul import grouped_op, op, triton_gpu


@pytest.mark.parametrize("call", CALLS, ids=lambda call: "-".join(map(str, call[1:])))
def test_numbers(call, monkeypatch):
    with interpreted(monkeypatch, op, triton_gpu):
        check(*call)


@pytest.mark.parametrize("call", GROUPED, ids=lambda call: "-".join(map(str, call[2:])))
def test_numbers_of_groups(call, monkeypatch):
    with interpreted(monkeypatch, grouped_op, triton_gpu):
        check_grouped(*call)
