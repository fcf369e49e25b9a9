"""scaled_matmul's kernel for Hopper, interpreted: its numbers. On a GPU: tests/gpu/test_scaled_matmul_gpu.py."""

import pytest
from hopper import interpreted
from hopper_scaled import CALLS, GROUPED, check, check_grouped

from kernels.ops.scaled_matmul import grouped_op, op, triton_gpu


def some(calls, *quick):
    return [pytest.param(call, marks=() if i in quick else pytest.mark.slow) for i, call in enumerate(calls)]


@pytest.mark.parametrize("call", some(CALLS, 1, 2, 5, 7, 10), ids=lambda call: "-".join(map(str, call[1:])))
def test_numbers(call, monkeypatch):
    with interpreted(monkeypatch, op, triton_gpu):
        check(*call)


@pytest.mark.parametrize("call", some(GROUPED, 1), ids=lambda call: "-".join(map(str, call[2:])))
def test_numbers_of_groups(call, monkeypatch):
    with interpreted(monkeypatch, grouped_op, triton_gpu):
        check_grouped(*call)
