"""The mesh, and where dims lie on it: sizes, specs, and errors that name the remedy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from ejdist import make_mesh
from ejdist.layout import ACTIVATIONS, PARAMETERS, axes_of_specs, constrain, gather, on_mesh, replicated, sharding, spec
from ejdist.mesh import AXES, axis_is_bound, current_mesh, mesh_shape
from ejdist.sharded import map_shards

# The documented form, which JAX would like to see replaced by `jax.set_mesh`.
pytestmark = pytest.mark.filterwarnings("ignore:.*context manager has been deprecated:DeprecationWarning")


def shape(**sizes):
    return tuple(make_mesh(**sizes).shape[a] for a in AXES)


def test_axes_are_in_the_order_of_the_design():
    assert AXES == ("dp", "fsdp", "ep", "sp", "tp")
    assert make_mesh().axis_names == AXES


@pytest.mark.parametrize(
    ("sizes", "wanted"),
    [
        ({}, (1, 1, 1, 1, 1)),
        ({"sp": 4}, (1, 1, 1, 4, 1)),
        ({"fsdp": 2, "sp": 2, "tp": 2}, (1, 2, 1, 2, 2)),
        ({"dp": -1, "tp": 2}, (4, 1, 1, 1, 2)),
        ({"sp": -1}, (1, 1, 1, 8, 1)),
    ],
)
def test_sizes(sizes, wanted):
    assert shape(**sizes) == wanted


def test_a_smaller_mesh_takes_the_first_devices():
    assert list(make_mesh(sp=2).devices.flat) == jax.devices()[:2]
    some = jax.devices()[3:5]
    assert list(make_mesh(tp=2, devices=some).devices.flat) == some


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"sp": 16}, ["mesh.sp=16", "16 devices", "there are 8"]),
        ({"fsdp": 3, "tp": 4}, ["mesh.fsdp=3", "mesh.tp=4", "12"]),
        ({"dp": -1, "sp": 3}, ["mesh.sp=3", "8 devices", "divided"]),
        ({"dp": -1, "sp": -1}, ["at most one -1"]),
        ({"tp": 0}, ["positive"]),
        ({"tp": -2}, ["positive"]),
        ({"sp": 2.0}, ["integers"]),
        ({"sp": "2"}, ["integers"]),
    ],
)
def test_a_mesh_that_does_not_fit_says_why(sizes, words):
    with pytest.raises(ValueError) as error:
        mesh_shape(sizes, 8)
    assert all(w in str(error.value) for w in words), str(error.value)


def test_the_mesh_in_force():
    mesh = Mesh(np.asarray(jax.devices()).reshape(2, 4), ("a", "b"))
    assert current_mesh() is None
    with jax.set_mesh(mesh):
        assert dict(current_mesh().shape) == {"a": 2, "b": 4}
    with mesh:  # the form that the documentation of the field shows
        assert dict(current_mesh().shape) == {"a": 2, "b": 4}
    assert current_mesh() is None
    seen = []

    def body(x):
        seen.append((current_mesh(), axis_is_bound("a"), axis_is_bound("c")))
        return x

    map_shards(body, mesh, P("a"), P("a"))(jnp.arange(4))
    assert seen == [(None, True, False)], "inside a shard_map there is no mesh to place arrays on"


@pytest.mark.parametrize(
    ("dims", "table", "sizes", "wanted"),
    [
        ("B T D", ACTIVATIONS, {"dp": 2, "fsdp": 2, "sp": 2}, P(("dp", "fsdp"), "sp", None)),
        ("B T D", ACTIVATIONS, {"fsdp": 4, "tp": 2}, P("fsdp", None, None)),
        ("B T N H", ACTIVATIONS, {"sp": 2, "tp": 4}, P(None, "sp", "tp", None)),
        ("B S K H", ACTIVATIONS, {"sp": 2, "tp": 4}, P(None, "sp", "tp", None)),
        ("B T F", ACTIVATIONS, {"tp": 4}, P(None, None, "tp")),
        ("D F", PARAMETERS, {"fsdp": 4, "tp": 2}, P("fsdp", "tp")),
        ("layers D N H", PARAMETERS, {"fsdp": 2, "tp": 2, "sp": 2}, P(None, ("fsdp", "sp"), "tp", None)),
        ("D F", PARAMETERS, {"sp": 4}, P("sp", None)),
        ("V D", PARAMETERS, {"fsdp": 2, "tp": 2}, P("tp", "fsdp")),
        ("R N H", PARAMETERS, {"fsdp": 2, "tp": 2}, P("fsdp", "tp", None)),
        ("D R", PARAMETERS, {"fsdp": 2}, P("fsdp", None)),
        ("E D F", PARAMETERS, {"ep": 4, "fsdp": 2}, P("ep", "fsdp", None)),
        ("D", PARAMETERS, {"dp": 8}, P(None)),
    ],
)
def test_tables(dims, table, sizes, wanted):
    mesh = make_mesh(**sizes)
    assert sharding(mesh, dims.split(), table).spec == wanted


def test_fully_sharded_data_parallelism_is_the_difference_of_the_tables():
    mesh = make_mesh(fsdp=8)
    assert sharding(mesh, ("B", "T", "D"), ACTIVATIONS).spec == P("fsdp", None, None)
    assert sharding(mesh, ("D", "F"), PARAMETERS).spec == P("fsdp", None)


def test_a_dim_of_one_is_broadcast():
    axes = on_mesh(ACTIVATIONS, make_mesh(dp=2, tp=4))
    assert spec(("B", "N", "T", "S"), axes, shape=(1, 4, 8, 8)) == P(None, "tp", None, None)


def test_a_dim_that_does_not_divide_names_everything():
    mesh = make_mesh(dp=2, fsdp=2, tp=2)
    with pytest.raises(ValueError) as error:
        sharding(mesh, ("B", "T"), ACTIVATIONS, shape=(6, 8), what="batch key 'tokens'")
    for word in ("batch key 'tokens'", "dim B = 6", "dp=2 x fsdp=2", "multiple of 4"):
        assert word in str(error.value)


def test_specs_say_where_dims_are():
    dims, shapes = (("B", "T", "N", "H"),), ((4, 8, 2, 16),)
    assert axes_of_specs(dims, (P(("dp", "ep"), None, "tp"),), shapes) == {
        "B": ("dp", "ep"),
        "T": (),
        "N": ("tp",),
        "H": (),
    }
    # A dim of size 1 is whole everywhere, whatever holds for the dim elsewhere.
    same = (("B", "N"), ("B", "N"))
    assert axes_of_specs(same, (P("dp", "tp"), P(None, "tp")), ((4, 2), (1, 2))) == {"B": ("dp",), "N": ("tp",)}
    with pytest.raises(ValueError, match="dim B is split over"):
        axes_of_specs(same, (P("dp"), P("tp")), ((4, 2), (4, 2)))
    with pytest.raises(ValueError, match="3 entries"):
        axes_of_specs(same[:1], (P("dp", None, "tp"),), ((4, 2),))


def test_constrain_places_an_array_and_is_nothing_without_a_mesh():
    mesh = make_mesh(dp=2, sp=4)
    x = jnp.arange(4 * 8 * 2.0).reshape(4, 8, 2)
    assert constrain(x, "B T D", None) is x
    y = jax.jit(lambda x: constrain(x, "B T D", mesh) + 1)(x)
    assert y.sharding.spec == P("dp", "sp") or y.sharding.spec == P("dp", "sp", None)
    np.testing.assert_array_equal(y, x + 1)
    with pytest.raises(ValueError, match="dim T = 6"):
        constrain(x[:, :6], "B T D", mesh)
    assert replicated(mesh).spec == P()


def test_gather_brings_a_parameter_to_its_use_and_its_gradient_home():
    """Each device ends with its part of the gradient. Told nothing, the compiler leaves all of it everywhere."""
    mesh = make_mesh(fsdp=2, sp=2, tp=2)
    w, x = jax.random.normal(jax.random.key(0), (8, 12)), jax.random.normal(jax.random.key(1), (2, 4, 8))
    stored = sharding(mesh, ("D", "F"), PARAMETERS)
    assert stored.spec == P(("fsdp", "sp"), "tp") and gather(w, "D F", None) is w

    def loss(w):
        used = gather(w, "D F", mesh)
        return jnp.sum(jnp.sin(jnp.einsum("btd,df->btf", constrain(x, "B T D", mesh), used)))

    used = jax.jit(lambda w: gather(w, "D F", mesh))(jax.device_put(w, stored))
    assert used.sharding.spec == P(None, "tp")
    gradient = jax.jit(jax.grad(loss))(jax.device_put(w, stored))
    assert gradient.sharding.is_equivalent_to(stored, 2)
    np.testing.assert_allclose(gradient, jax.grad(lambda w: jnp.sum(jnp.sin(x @ w)))(w), rtol=1e-5, atol=1e-5)
