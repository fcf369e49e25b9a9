"""What is decided once for calls of a kind holds for that kind alone: layouts, orders and types of arrays tell kinds apart."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import ejdist
from ejdist import Order, make_mesh, ring_attention, set_layout
from ejdist.execution import _decided
from kernels import Unsupported, flash_attention

X = jnp.asarray(np.random.default_rng(0).standard_normal((4, 8, 2, 6)).astype(np.float32))


def two_devices(kind):
    return jax.make_mesh((2,), ("data",), axis_types=(kind,), devices=jax.devices()[:2])


def test_another_layout_is_another_decision():
    mesh = two_devices(AxisType.Auto)
    for dim, spec in (("B", P("data")), ("T", P(None, "data")), ("B", P("data"))):
        with set_layout(**{dim: "data"}):
            out = ejdist.rms_norm(X, mesh=mesh)
        assert out.sharding.is_equivalent_to(NamedSharding(mesh, spec), 4), dim


def test_another_order_is_another_decision():
    mesh, whole = make_mesh(sp=2, devices=jax.devices()[:2]), flash_attention(X, X, X, causal=True)
    for name in ("contiguous", "zigzag", "striped", "contiguous"):
        order = Order(name, 2)
        x = order.permute(X)
        out = ring_attention(x, x, x, causal=True, order=name, mesh=mesh)
        np.testing.assert_allclose(order.inverse(out), whole, atol=1e-6, err_msg=name)


@pytest.mark.slow
def test_what_an_order_refuses_was_not_decided_under_another():
    mesh = make_mesh(sp=2, devices=jax.devices()[:2])
    for _ in range(2):
        ejdist.causal_conv1d(X[..., 0], jnp.ones((2, 3)), mesh=mesh)
        with set_layout(T="sp", order="balanced"), pytest.raises(Unsupported, match="depends on the order"):
            ejdist.causal_conv1d(X[..., 0], jnp.ones((2, 3)), mesh=mesh)


def test_arrays_of_another_type_are_another_decision():
    mesh = two_devices(AxisType.Explicit)
    with jax.set_mesh(mesh):
        for spec in (P("data"), P(None, "data"), P("data")):
            out = ejdist.rms_norm(jax.device_put(X, NamedSharding(mesh, spec)))
            assert jax.typeof(out).sharding.spec[: len(spec)] == tuple(spec)


def test_specs_in_a_list_are_decided_once_too():
    mesh = two_devices(AxisType.Auto)
    first = ejdist.rms_norm(X, mesh=mesh, in_specs=[P("data")])
    decided = len(_decided)
    for specs in ((P("data"),), [P("data")]):
        np.testing.assert_array_equal(ejdist.rms_norm(X, mesh=mesh, in_specs=specs), first)
    assert len(_decided) == decided
