"""grouped_matmul's kernels for Hopper, interpreted: their numbers. On a GPU: tests/gpu/test_grouped_matmul_gpu.py.

What Hopper may do late is done as late as it can be (`gluon_interpreter.py`), and programs are three, so that
tiles come from the queue.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import pytest
from hopper import interpreted
from hopper_products import ACTIVATED, SIZES, arguments, check, check_gathered, run

from kernels.ops.grouped_matmul import gathered_op, op, triton_gpu
from kernels.ops.grouped_matmul.contract import GroupedMatmulConfig, Tile


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    monkeypatch.setattr(gathered_op, "_programs", {})
    with interpreted(monkeypatch, op, triton_gpu):
        yield


# Each activation and none, gated and alone, with a bias and without, turned and as it is.
EACH_ACTIVATION = {("tall", 5), ("tall", 6), ("wide", 3)}
QUICK = {("tall", True, "ragged"), ("wide", True, "empty")}


@pytest.mark.parametrize(
    ("specialised", "transposed", "sizes"),
    [
        pytest.param(*how, marks=() if how in QUICK else pytest.mark.slow)
        for how in itertools.product(("tall", "wide"), (False, True), SIZES)
    ],
)
def test_numbers(specialised, transposed, sizes):
    check(specialised, 128, 320, "bfloat16", transposed, 1 if len(SIZES[sizes]) > 3 else None, SIZES[sizes])


@pytest.mark.parametrize(
    ("specialised", "activation", "gated", "bias", "transposed", "dtype"),
    [
        pytest.param(specialised, *how, marks=() if (specialised, i) in EACH_ACTIVATION else pytest.mark.slow)
        for i, how in enumerate(ACTIVATED)
        for specialised in ("tall", "wide")
    ],
)
def test_numbers_of_activations(specialised, activation, gated, bias, transposed, dtype):
    sizes = (100, 0, 40)
    check(specialised, 64, 192, dtype, transposed, None, sizes, activation, gated=gated, bias=bias)


@pytest.mark.parametrize(
    ("specialised", "activation", "gated", "transposed", "sizes"),
    [
        pytest.param("tall", None, False, False, (100, 0, 40), marks=pytest.mark.slow),
        ("wide", "silu", True, False, (100, 0, 40)),
        pytest.param("tall", "silu", True, False, SIZES["ragged"], marks=pytest.mark.slow),
        pytest.param("wide", None, False, True, SIZES["ragged"], marks=pytest.mark.slow),
        pytest.param("wide", "relu", False, False, SIZES["whole"], marks=pytest.mark.slow),
    ],
)
def test_numbers_of_rows_that_are_gathered(specialised, activation, gated, transposed, sizes):
    check_gathered(specialised, 72, 136, "bfloat16", transposed, sizes, activation, gated=gated)


@pytest.mark.parametrize(
    ("specialised", "activation", "gated", "bias", "gathered"),
    [
        ("wide", "silu", True, True, True),
        pytest.param("tall", "gelu_tanh", False, False, False, marks=pytest.mark.slow),
    ],
)
def test_numbers_where_products_are_kept(specialised, activation, gated, bias, gathered, monkeypatch):
    """The activation's products, for the backward, in place of computing them again."""
    monkeypatch.setattr(triton_gpu, "WORTH_KEEPING", 8)
    how = {"activation": activation, "gated": gated, "bias": bias}
    if gathered:
        check_gathered(specialised, 72, 136, "bfloat16", False, (100, 0, 40), **how)
    else:
        check(specialised, 72, 136, "bfloat16", False, None, (100, 0, 40), **how)


@pytest.mark.slow
@pytest.mark.parametrize("specialised", ["tall", "wide"])
def test_one_row_of_columns_that_end_in_a_tile(specialised):
    check(specialised, 64, 72, "bfloat16", False, None, SIZES["one"], "silu", gated=True)


@pytest.mark.parametrize(
    ("specialised", "transposed"),
    [
        pytest.param("tall", False, marks=pytest.mark.slow),
        ("wide", True),
        pytest.param("tall", True, marks=pytest.mark.slow),
    ],
)
def test_a_depth_that_ends_in_a_step(specialised, transposed):
    check(specialised, 88, 136, "bfloat16", transposed, None, (100, 0, 40))


def test_a_step_past_the_depth_reads_nothing_of_the_next_matrix():
    """Which belongs to a group without rows, and holds NaN."""
    floats, d, _ = arguments((60, 0, 40), 72, 88, "bfloat16", False, None)
    floats["rhs"] = floats["rhs"].at[1].set(jnp.nan)
    cfg = GroupedMatmulConfig(*[Tile(specialised="tall")] * 3)
    found = jax.jit(functools.partial(run, "triton", cfg, (60, 0, 40), None, False, None))(floats, d)
    assert all(jnp.isfinite(x).all() for x in found.values())
