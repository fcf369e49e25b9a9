"""native_sparse_attention in Triton, interpreted: shapes that the cases of the contract do not have, ties, long lists."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grid import error, value_and_gradients

from kernels.framework.interpret import interpret
from kernels.ops.native_sparse_attention import NativeSparseConfig, native_sparse_attention, op, triton_lists

RNG = np.random.default_rng(0)
PLAIN = NativeSparseConfig(block_rows=32)


def arrays(t, heads, widths=(8, 8), gates=()):
    (n, k), (h, hv) = heads, widths
    shapes = {"query": (1, t, n, h), "key": (1, t, k, h), "value": (1, t, k, hv)} | dict.fromkeys(gates, (1, t, n))
    return {name: RNG.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def check(arguments, cfg=PLAIN, limit=3e-6, platform="triton"):
    """Asserts outputs and gradients of the contract."""
    want, slopes, d = value_and_gradients(op.function, arguments)
    with interpret():
        run = functools.partial(op, platform=platform, cfg=cfg)
        got, gradients, _ = value_and_gradients(lambda **a: run(**a), arguments, d)
    assert error(got[0], want[0]) < limit
    for name, slope in slopes.items():
        assert error(gradients[name], slope) < limit, name


def starts_of(t, *cuts):
    starts = np.zeros((1, t), np.int32)
    for begin in cuts:
        starts[:, begin:] = begin
    return starts


@pytest.mark.slow
def test_a_padded_group_blocks_of_two_tiles_and_lists_of_many_parts(monkeypatch):
    monkeypatch.setattr(triton_lists, "PART", 16)
    t = 150
    arguments = arrays(t, (5, 1), (8, 4))
    arguments |= {"block_indices": RNG.integers(-1, 4, (1, t, 1, 3)).astype(np.int32), "starts": starts_of(t, 9, 61)}
    check(arguments | {"block_size": 70})


def test_equal_weights_choose_the_first_blocks_in_their_order():
    arguments = arrays(44, (4, 2), gates=("g_cmp",))
    arguments["query"][:, :, 2:] = 0
    counts = RNG.integers(0, 6, (1, 44, 2)).astype(np.int32)
    check(arguments | {"block_counts": counts, "block_size": 3, "num_blocks": 6})


@pytest.mark.slow
@pytest.mark.parametrize("heads", [(1, 1), (16, 1), (32, 2), (6, 2)])
@pytest.mark.parametrize("size", [16, 33, 128])
def test_groups_and_sizes_of_blocks(heads, size):
    arguments = arrays(140, heads, gates=("g_slc", "g_swa"))
    check(arguments | {"block_size": size, "num_blocks": 3, "window": 20}, NativeSparseConfig(block_rows=64))


@pytest.mark.slow
def test_another_number_of_rows_gives_the_same():
    arguments = {**arrays(40, (4, 2)), "block_indices": RNG.integers(-1, 10, (1, 40, 2, 24)).astype(np.int32)}
    for rows in (16, 64):
        check(arguments | {"block_size": 4}, NativeSparseConfig(block_rows=rows))


def largest(function, *arguments):
    """Returns the number of elements of the largest array of a program, kernels' results among them."""
    sizes = []

    def visit(jaxpr):
        for equation in jaxpr.eqns:
            sizes.extend(x.aval.size for x in equation.outvars if hasattr(x.aval, "size"))
            for inner in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    visit(inner)

    visit(jax.make_jaxpr(function)(*arguments).jaxpr)
    return max(sizes)


def largest_at(length, platform):
    """Returns the number of elements of the largest array of all branches and their gradients."""
    shapes = (1, length, 4, 16), (1, length, 1, 16), (1, length, 4)
    q, k, gate = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)
    options = {"block_size": 16, "block_counts": 4, "sliding_window": 64, "platform": platform}

    def loss(q, k, gate):
        return jnp.sum(native_sparse_attention(q, k, k, gate, gate, gate, **options).astype(jnp.float32))

    with interpret():
        return largest(jax.grad(loss, (0, 1, 2)), q, k, gate)


def test_no_array_grows_faster_than_the_tokens():
    assert largest_at(65536, "triton") <= 4 * largest_at(16384, "triton") < 16384**2 // 16
