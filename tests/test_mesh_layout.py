"""The mesh, and where dims lie on it: sizes, specs, and errors that name the remedy."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from ejdist import make_mesh, ring_attention, rms_norm, set_layout
from ejdist.layout import ACTIVATIONS, PARAMETERS, axes_of_specs, constrain, gather, on_mesh, replicated, sharding, spec
from ejdist.mapped import map_shards
from ejdist.mesh import AXES, axis_is_bound, current_mesh, mesh_shape, slices_of

# The documented form, which JAX would like to see replaced by `jax.set_mesh`.
pytestmark = pytest.mark.filterwarnings("ignore:.*context manager has been deprecated:DeprecationWarning")


def shape(**sizes):
    return tuple(make_mesh(**sizes).shape[a] for a in AXES)


def test_axes_are_in_the_order_of_the_design():
    assert AXES == ("dp", "fsdp", "ep", "cp", "sp", "tp")
    assert make_mesh().axis_names == AXES


@pytest.mark.parametrize(
    ("sizes", "wanted"),
    [
        ({}, (1, 1, 1, 1, 1, 1)),
        ({"sp": 4}, (1, 1, 1, 1, 4, 1)),
        ({"fsdp": 2, "sp": 2, "tp": 2}, (1, 2, 1, 1, 2, 2)),
        ({"cp": 2, "sp": 2, "tp": 2}, (1, 1, 1, 2, 2, 2)),
        ({"dp": -1, "tp": 2}, (4, 1, 1, 1, 1, 2)),
        ({"sp": -1}, (1, 1, 1, 1, 8, 1)),
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
        ({"dp": -1, "sp": 3}, ["mesh.sp=3", "8 devices", "not divisible by 3"]),
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
    assert seen == [(None, True, False)], "inside a shard_map there is no mesh to shard over"


@pytest.mark.parametrize(
    ("dims", "table", "sizes", "wanted"),
    [
        ("B T D", ACTIVATIONS, {"dp": 2, "fsdp": 2, "sp": 2}, P(("dp", "fsdp"), "sp", None)),
        ("B T D", ACTIVATIONS, {"fsdp": 4, "tp": 2}, P("fsdp", None, None)),
        ("B T N H", ACTIVATIONS, {"sp": 2, "tp": 4}, P(None, "sp", "tp", None)),
        ("B S K H", ACTIVATIONS, {"sp": 2, "tp": 4}, P(None, "sp", "tp", None)),
        ("B T F", ACTIVATIONS, {"tp": 4}, P(None, None, "tp")),
        ("D F", PARAMETERS, {"fsdp": 4, "tp": 2}, P("fsdp", "tp")),
        ("L D N H", PARAMETERS, {"fsdp": 2, "tp": 2, "sp": 2}, P(None, ("fsdp", "sp"), "tp", None)),
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


def test_a_dim_that_is_misspelt_is_refused():
    """No axis would split it, so every device would hold all of the array."""
    with pytest.raises(ValueError, match="parameter gate has the dims 'Dd F', but 'Dd' is not in the vocabulary"):
        sharding(make_mesh(fsdp=2), ("Dd", "F"), PARAMETERS, shape=(8, 8), what="parameter gate")


def test_what_a_mesh_does_not_have_is_named():
    """An axis of a layout that is misspelt, and the one that a sequence is split over by default."""
    q = jnp.ones((2, 8, 2, 8))
    mesh = jax.make_mesh((2, 2), ("data", "seq"), axis_types=(AxisType.Auto,) * 2)
    layout = r"has the axes 'data', and nothing .* over them \(the layout names the axis 'dta', which this mesh does not have\)"
    with set_layout(B="dta", T="seq"), pytest.raises(ValueError, match=layout):
        rms_norm(jnp.ones((2, 8, 8)), mesh=mesh)
    with pytest.raises(
        ValueError, match=r"'axis_name' = 'sp' \(that of .*\) is not an axis .* name the one that splits"
    ):
        ring_attention(q, q, q, causal=True, mesh=mesh)
    own = make_mesh(dp=2, sp=2)  # of which a layout for another mesh is in force
    with (
        set_layout(B="data"),
        pytest.raises(ValueError, match=r"Call ejdist.set_layout\(\) to go back to that of ejdist.make"),
    ):
        rms_norm(jnp.ones((2, 8, 8)), mesh=own)
    with pytest.raises(ValueError, match=r"argument 'parameters' must map dims to axes, \{'D': 'data'\}, got 'data'"):
        set_layout(T="seq", parameters="data")  # type: ignore


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


class Chip:
    """A device as far as a mesh asks for it."""

    device_kind, process_index, core_on_chip = "TPU v5e", 0, 0

    def __init__(self, number, piece, inside, platform="tpu"):
        self.id, self.slice_index, self.platform = number, piece, platform
        self.coords = (inside % 2, inside // 2, 0)

    def __repr__(self):
        return f"{self.slice_index}:{self.id}"


def chips(count, pieces, platform="tpu"):
    """Returns devices of so many slices, in the order that is worst."""
    return [Chip(i, i % pieces, i // pieces, platform) for i in range(count)]


@pytest.mark.parametrize(
    ("sizes", "pieces"),
    [
        ({"dp": 2, "fsdp": 4, "sp": 2}, 2),
        ({"dp": 4, "ep": 4}, 2),
        ({"dp": -1, "sp": 2}, 4),
        ({"dp": 4, "tp": 4}, 4),
        ({"fsdp": 8, "sp": 2, "fsdp_across_slices": True}, 2),
        ({"dp": 2, "fsdp": 4, "sp": 2, "fsdp_across_slices": True}, 4),
    ],
)
def test_only_the_outer_axes_go_over_slices(sizes, pieces):
    mesh = make_mesh(**sizes, devices=chips(16, pieces))
    assert mesh.size == 16 and len({d.id for d in mesh.devices.flat}) == 16
    slice_of = np.vectorize(lambda d: d.slice_index)(mesh.devices)
    may = {"dp", "fsdp"} if sizes.get("fsdp_across_slices") else {"dp"}
    for at, axis in enumerate(AXES):
        crosses = bool((slice_of != np.take(slice_of, [0], axis=at)).any())
        assert not crosses or axis in may, f"{axis} leaves a slice"
    # Neighbours along an axis that goes over slices are in one, as far as there are any.
    flat = slice_of.reshape(16)
    assert (np.diff(flat) != 0).sum() == pieces - 1


def test_a_mesh_of_one_of_several_slices_stays_in_it():
    mesh = make_mesh(sp=4, tp=2, devices=chips(16, 2))
    assert {d.slice_index for d in mesh.devices.flat} == {0}
    assert {d.slice_index for d in make_mesh(sp=4, devices=chips(16, 2)).devices.flat} == {0}
    two_of_four = make_mesh(dp=2, sp=4, devices=chips(16, 4))
    assert {d.slice_index for d in two_of_four.devices.flat} == {0, 1}


def test_machines_with_gpus_are_no_slices():
    """Their number is of the host; an axis may go over the network between them, as it may on CPUs."""
    assert make_mesh(fsdp=4, sp=4, devices=chips(16, 2, "gpu")).size == 16


@pytest.mark.parametrize(
    ("sizes", "devices", "words"),
    [
        ({"sp": 16}, chips(16, 2), ["mesh.sp=16 over 2 TPU slices of 8 devices", "only mesh.dp", "a multiple of 2"]),
        ({"ep": 4, "sp": 4}, chips(16, 2), ["only mesh.dp crosses the network"]),
        ({"fsdp": 16}, chips(16, 2), ["mesh.fsdp_across_slices=true"]),
        ({"dp": 2, "sp": 8}, chips(16, 4), ["mesh.dp=2 x mesh.sp=8 over 4 TPU slices", "a multiple of 4"]),
        ({"fsdp": 3, "sp": 4, "fsdp_across_slices": True}, chips(12, 2), ["and mesh.fsdp of 2"]),
        ({"dp": 3, "sp": 4}, chips(16, 2), ["is 12 devices, but a TPU slice has 8", "all devices of each"]),
        ({"dp": 3, "sp": 5}, [*chips(15, 2)], ["the TPU slices have 7 and 8 devices"]),
    ],
)
def test_a_mesh_that_would_leave_a_slice_is_refused(sizes, devices, words):
    with pytest.raises(ValueError) as error:
        make_mesh(**sizes, devices=devices)
    assert all(w in str(error.value) for w in words), str(error.value)


def test_slices_that_the_compiler_knows():
    from kernels.toolchains.simulate.ahead_of_time import tpu_topology

    devices = list(tpu_topology("v5p:2x2x1", slices=2).devices)
    assert [len(one) for one in slices_of(devices)] == [4, 4] and len(slices_of(jax.devices())) == 1
    mesh = make_mesh(dp=2, fsdp=2, sp=2, devices=devices)
    assert [{d.slice_index for d in part.flat} for part in mesh.devices] == [{0}, {1}]
    with pytest.raises(ValueError, match="over 2 TPU slices of 4 devices"):
        make_mesh(sp=8, devices=devices)


@pytest.mark.slow
def test_a_step_over_two_slices_sends_only_sums_between_them():
    """Compiled by the TPU compiler: what crosses has the name of the collective that it was made of."""
    from small_run import TINY

    from ejdist.training.program import make_program
    from kernels.toolchains.simulate.ahead_of_time import tpu_topology
    from recipes.schema import compose

    sizes = ["model.model_dim=128", "model.head_dim=64", "model.ffn_dim=256", "data.sequence_length=512"]
    recipe = compose([*TINY, *sizes, "data.global_batch=4", "mesh.dp=2", "mesh.fsdp=2", "mesh.sp=2"])
    mesh = make_mesh(**vars(recipe.mesh), devices=list(tpu_topology("v5p:2x2x1", slices=2).devices))
    program = make_program(recipe, mesh)
    text = program.lower().compile().as_text()
    crossing = set(re.findall(r'MegascaleRendezvousKeyName="([\w-]+?)[._\d]*"', text))
    assert crossing and crossing <= {"all-reduce", "psum", "psum_invariant"}, crossing
    inside = re.findall(r"replica_groups=\{([\d,{}]+)\}", text)
    assert inside and all(int(n) < 4 for group in inside for n in re.findall(r"\d+", group))
