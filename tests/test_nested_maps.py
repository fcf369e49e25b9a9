"""Inside a `shard_map` over some axes, whose others are left to the compiler, an operation is mapped over those by the layout.

A kernel is never left to the partitioner, which would gather its arrays on every device. Numbers, gradients, and what a TPU's
program of it communicates.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import ejdist
import kernels
from ejdist import Order, bind_ops, ring_attention, set_layout
from kernels.toolchains.simulate.ahead_of_time import compile_tpu, mosaic_calls, tpu_topology

AXES = ("stage", "data", "seq")
LAYOUT = {"B": "data", "T": "seq"}
B, T, N, H, F, V = 4, 16, 2, 8, 8, 16
RNG = np.random.default_rng(0)


def normal(*shape):
    return jnp.asarray(RNG.standard_normal(shape).astype(np.float32))


@functools.cache
def mesh():
    return jax.make_mesh((2, 2, 2), AXES, axis_types=(AxisType.Auto,) * 3)


Q, K, VALUES, X = normal(B, T, N, H), normal(B, T, N, H), normal(B, T, N, H), normal(B, T, F)
TARGETS = jnp.asarray(RNG.integers(-1, V, (B, T)), jnp.int32)
ROWS, WHOLE = P("stage"), P()


def ring(q, k, v, **how):
    return ring_attention(q, k, v, causal=True, **how)


def moe(x, router, gate, down):
    return ejdist.moe(x, router, gate, gate, down, top_k=2)[0]


# name -> (function, the plain one, arrays, their specs over the outer axis)
CALLS = {
    "rms_norm": (ejdist.rms_norm, kernels.rms_norm, (X, normal(F)), (ROWS, WHOLE)),
    "gated_mlp": (
        ejdist.gated_mlp, kernels.gated_mlp, (X, normal(F, 6), normal(F, 6), normal(6, F)), (ROWS, WHOLE, WHOLE, WHOLE)
    ),
    "gla_attention": (ejdist.gla_attention, kernels.gla_attention, (Q, K, VALUES), (ROWS,) * 3),
    "ring_attention": (ring, functools.partial(kernels.flash_attention, causal=True), (Q, K, VALUES), (ROWS,) * 3),
    "fused_token_losses": (
        lambda *a: ejdist.fused_token_losses(*a).loss, lambda *a: kernels.fused_token_losses(*a).loss,
        (X, normal(F, V), TARGETS), (ROWS, WHOLE, ROWS),
    ),
    "moe": (moe, moe, (X, normal(F, 4), normal(4, F, 6), normal(4, 6, F)), (ROWS, WHOLE, WHOLE, WHOLE)),
}  # fmt: skip


def both_ways(function, arrays):
    floats = tuple(i for i, x in enumerate(arrays) if jnp.issubdtype(x.dtype, jnp.floating))

    def loss(*arrays):
        out = function(*arrays)
        return jnp.sum(jnp.sin(out)), out

    return jax.jit(jax.value_and_grad(loss, floats, has_aux=True))


def compare(got, want):
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-4, atol=2e-5 * max(1, float(np.abs(w).max())))


@functools.cache
def on_one_device(name):
    _, plain, arrays, _ = CALLS[name]
    return both_ways(plain, arrays)(*arrays)


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] * (n in ("moe", "gla_attention", "fused_token_losses"))) for n in CALLS],
)
@pytest.mark.parametrize("vma", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_numbers_and_gradients_are_those_of_one_device(name, vma):
    function, _, arrays, specs = CALLS[name]
    want = on_one_device(name)
    with set_layout(**LAYOUT), jax.set_mesh(mesh()):
        mapped = jax.shard_map(function, in_specs=specs, out_specs=ROWS, axis_names={"stage"}, check_vma=vma)
        step = both_ways(mapped, arrays)
        compare(step(*arrays), want)
        program = step.lower(*arrays).compile().as_text()
    if name not in ("gla_attention", "moe"):  # which gather by themselves: ids of segments, and tokens
        assert "all-gather(" not in program, "the partitioner handled an operation"


@pytest.mark.parametrize("vma", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["gla_attention", "ring_attention", "mean_pooling"])
def test_a_sequence_on_an_axis_of_the_outer_map(name, vma):
    """The ranks of the outer map communicate, and rows are mapped over the axes that it leaves."""
    if name == "mean_pooling":
        arrays, specs, function, out = (X,), (P(None, "seq"),), ejdist.mean_pooling, WHOLE
        want = both_ways(kernels.mean_pooling, arrays)(*arrays)
    else:
        function, _, arrays, _ = CALLS[name]
        specs, out, want = (P(None, "seq"),) * 3, P(None, "seq"), on_one_device(name)
    with set_layout(B=("stage", "data"), T="seq"), jax.set_mesh(mesh()):
        mapped = jax.shard_map(
            functools.partial(function, axis_name="seq"),
            in_specs=specs,
            out_specs=out,
            axis_names={"seq"},
            check_vma=vma,
        )
        compare(both_ways(mapped, arrays)(*arrays), want)


def test_operations_of_a_model_in_a_stage():
    """Bound to the whole mesh, as a trainer binds them, and called in a map over one of its axes; an order goes with them."""
    order = Order("zigzag", 2)
    want = kernels.flash_attention(Q, K, VALUES, causal=True)
    tokens, table = TARGETS.clip(0), normal(V, F)
    ops = bind_ops(mesh(), order=order)

    def stage(q, k, v, tokens, table):
        return ops.attention(q, k, v, causal=True, axis_name="seq"), ops.constrain(
            ops.embedding(table, tokens), "B T D"
        )

    with set_layout(**LAYOUT, parameters={"D": "data"}):
        mapped = jax.shard_map(
            stage, mesh=mesh(), in_specs=(*(ROWS,) * 4, WHOLE), out_specs=(ROWS, ROWS), axis_names={"stage"}
        )
        got, rows = jax.jit(mapped)(*map(order.permute, (Q, K, VALUES, tokens)), table)
        linear = jax.shard_map(ops.gla_attention, mesh=mesh(), in_specs=ROWS, out_specs=ROWS, axis_names={"stage"})
        states = jax.jit(linear)(*map(order.permute, (Q, K, VALUES)))
    compare(order.inverse(states), kernels.gla_attention(Q, K, VALUES))
    compare(order.inverse(got), want)
    compare(order.inverse(rows), table[tokens])


@pytest.mark.parametrize("name", ["rms_norm", "ring_attention"])
def test_explicit_axes_inside_an_outer_map(name):
    """The sharding over the inner axes is part of an array's type."""
    function, _, arrays, specs = CALLS[name]
    want = on_one_device(name)
    chips = jax.make_mesh((2, 2, 2), AXES, axis_types=(AxisType.Explicit,) * 3)
    how = {"axis_name": "seq"} if name == "ring_attention" else {}
    with jax.set_mesh(chips):
        spec = P(("stage", "data"), "seq")
        placed = [jax.device_put(x, NamedSharding(chips, spec if s == ROWS else WHOLE)) for x, s in zip(arrays, specs)]
        mapped = jax.shard_map(functools.partial(function, **how), in_specs=specs, out_specs=ROWS, axis_names={"stage"})
        compare(both_ways(mapped, placed)(*placed), want)


def inside(function, *arrays, over="stage", **layout):
    with set_layout(**(layout or LAYOUT)), jax.set_mesh(mesh()):
        mapped = jax.shard_map(function, in_specs=WHOLE, out_specs=WHOLE, axis_names={over}, check_vma=False)
        return jax.jit(mapped)(*arrays)


def test_axes_that_nobody_placed_are_refused():
    with pytest.raises(ValueError, match=r"the axes 'seq', and nothing says which dims are sharded over them"):
        inside(ejdist.rms_norm, X, B="data")


def test_a_mesh_of_another_map_is_refused():
    other = jax.make_mesh((4, 2), ("data", "seq"), axis_types=(AxisType.Auto,) * 2)
    with pytest.raises(ValueError, match=r"'mesh' is .*, but this call is inside a shard_map of"):
        inside(functools.partial(ejdist.rms_norm, mesh=other), X)


def test_experts_on_an_axis_of_the_outer_map_alone_are_refused():
    _, _, (x, router, gate, down), _ = CALLS["moe"]
    with pytest.raises(
        ValueError, match=r"moe: argument 'axis' = 'data' is mapped, but the axes 'stage', 'seq' are left"
    ):
        inside(lambda x: ejdist.moe(x, router, gate[:2], gate[:2], down[:2], top_k=1, axis="data")[0], x, over="data")


def test_a_ring_over_axes_of_two_maps_is_refused():
    with pytest.raises(ValueError, match=r"names axes of which this is mapped over \('stage',\) alone"):
        inside(functools.partial(ring, axis_name=("stage", "seq")), Q, K, VALUES)


@pytest.mark.slow
def test_on_tpus_a_kernel_is_mapped_and_nothing_is_gathered():
    devices = np.asarray(tpu_topology("v5e:2x4").devices).reshape(2, 2, 2)
    chips = jax.sharding.Mesh(devices, AXES)

    def loss(x, weight, q, k, v):
        def stage(x, weight, q, k, v):
            return ejdist.rms_norm(x, weight), ring(q, k, v)

        specs = (ROWS, WHOLE, *(ROWS,) * 3)
        mapped = jax.shard_map(stage, mesh=chips, in_specs=specs, out_specs=(ROWS, ROWS), axis_names={"stage"})
        return sum(jnp.sum(jnp.sin(y)) for y in mapped(x, weight, q, k, v))

    def array(*shape):
        spec = WHOLE if len(shape) == 1 else P(("stage", "data"), "seq")
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(chips, spec))

    heads = [array(8, 512, 2, 128) for _ in range(3)]
    with set_layout(**LAYOUT):
        made = compile_tpu(jax.value_and_grad(loss, (0, 1, 2, 3, 4)), array(8, 512, 256), array(256), *heads)
    assert mosaic_calls(made) > 2
    assert "all-gather" not in made.as_text()


@pytest.mark.slow
def test_on_tpus_the_rows_of_a_rank_are_mapped_too():
    """Of attention that communicates over the axis of the outer map, whose rows lie on the others."""
    chips = jax.sharding.Mesh(np.asarray(tpu_topology("v5e:2x4").devices).reshape(2, 2, 2), AXES)
    heads = jax.ShapeDtypeStruct(
        (8, 512, 2, 128), jnp.float32, sharding=NamedSharding(chips, P(("stage", "data"), "seq"))
    )
    part = P(None, "seq")
    mapped = jax.shard_map(
        functools.partial(ring, axis_name="seq"), mesh=chips, in_specs=(part,) * 3, out_specs=part, axis_names={"seq"}
    )
    with set_layout(B=("stage", "data"), T="seq"):
        made = compile_tpu(mapped, heads, heads, heads)
    assert mosaic_calls(made) and "all-gather" not in made.as_text()
