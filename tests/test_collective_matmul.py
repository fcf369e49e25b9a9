"""all_gather_matmul and reduce_scatter_matmul: numbers and gradients of the plain product, and what travels for it."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import ejdist
from ejdist import all_gather_matmul, make_mesh, reduce_scatter_matmul
from kernels import Unsupported

RNG = np.random.default_rng(0)
FUNCTIONS = {"gather": all_gather_matmul, "scatter": reduce_scatter_matmul}


def arrays(*lead, D=6, F=16):
    return [jnp.asarray(RNG.standard_normal(shape).astype(np.float32)) for shape in ((*lead, D), (D, F))]


def value_and_gradients(product, x, w):
    @jax.jit
    def run(x, w):
        out, pull = jax.vjp(product, x, w)
        return out, *pull(jnp.cos(jnp.arange(out.size, dtype=x.dtype)).reshape(out.shape))

    return run(x, w)


def close(got, want, tolerance=1e-5):
    for g, w in zip(got, want, strict=True):
        w = np.asarray(w, np.float64)
        assert g.shape == w.shape and np.abs(np.asarray(g, np.float64) - w).max() < tolerance * np.abs(w).max()


def plain(x, w):
    """Returns out and both gradients in float64."""
    x, w = np.asarray(x, np.float64), np.asarray(w, np.float64)
    out = x @ w
    d = np.cos(np.arange(out.size)).reshape(out.shape)
    return out, d @ w.T, x.reshape(-1, x.shape[-1]).T @ d.reshape(-1, d.shape[-1])


MESHES = {
    "tp2": ({"tp": 2}, P("tp"), P(None, "tp"), (8,)),
    "tp4, both ways": ({"tp": 4}, P("tp"), P(None, "tp"), (8,)),
    "dp2_sp2_tp2": ({"dp": 2, "sp": 2, "tp": 2}, P("dp", ("sp", "tp")), P("dp", "sp", "tp"), (2, 12)),
    "tp4, odd rows": ({"tp": 4}, P("tp"), P(None, "tp"), (12,)),
}


@pytest.mark.parametrize("name", [*list(MESHES)[:3], pytest.param("tp4, odd rows", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", FUNCTIONS)
def test_numbers_and_gradients(kind, name):
    sizes, scattered, gathered, lead = MESHES[name]
    x, w = arrays(*lead, D=6, F=16) if kind == "gather" else arrays(*lead, D=16, F=6)
    run = functools.partial(FUNCTIONS[kind], mesh=make_mesh(**sizes))
    got = value_and_gradients(run, x, w)
    close(got, plain(x, w))
    lies = got[0].sharding.spec
    assert tuple(lies) == tuple(gathered if kind == "gather" else scattered)


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_specs_may_be_given_and_the_axis_is_anyones(kind):
    mesh = jax.make_mesh(
        (2, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2, devices=jax.devices()[:4]
    )
    whole, split = P("data", None, "model"), P("data", "model")
    x, w = arrays(2, 4, D=8, F=8)
    in_specs, out = ((split, P(None, "model")), whole) if kind == "gather" else ((whole, P("model")), split)
    got = FUNCTIONS[kind](x, w, axis_name="model", mesh=mesh, in_specs=in_specs, out_specs=out)
    close([got], plain(x, w)[:1])
    with pytest.raises(ValueError, match="'out_specs' says"):
        FUNCTIONS[kind](x, w, axis_name="model", mesh=mesh, in_specs=in_specs, out_specs=P("model"))


def test_a_layer_inside_a_shard_map_of_the_callers_own():
    """Tokens split before and after, features between: the two follow each other, and the gradients are those of one device."""
    x, up = arrays(8, D=6, F=16)
    down = jnp.asarray(RNG.standard_normal((16, 6)).astype(np.float32))

    def layer(x, up, down):
        return reduce_scatter_matmul(jax.nn.silu(all_gather_matmul(x, up, axis_name="t")), down, axis_name="t")

    mesh = jax.make_mesh((2, 4), ("b", "t"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    mapped = jax.shard_map(layer, mesh=mesh, in_specs=(P(("b", "t")), P(None, "t"), P("t")), out_specs=P(("b", "t")))

    def loss(function, *a):
        return jnp.sum(jnp.sin(function(*a)))

    got = jax.jit(jax.value_and_grad(functools.partial(loss, mapped), (0, 1, 2)))(x, up, down)
    want = jax.value_and_grad(functools.partial(loss, lambda x, up, down: jax.nn.silu(x @ up) @ down), (0, 1, 2))(
        x, up, down
    )
    close([got[0], *got[1]], [want[0], *want[1]])


def test_a_second_derivative():
    x, w = arrays(4, D=3, F=4)

    def twice(product):
        return jax.grad(lambda w: jnp.sum(jax.grad(lambda x: jnp.sum(jnp.sin(product(x, w))))(x) ** 2))(w)

    close(
        [jax.jit(lambda: twice(functools.partial(all_gather_matmul, mesh=make_mesh(tp=2))))()],
        [twice(jnp.matmul)],
        1e-4,
    )


def traffic(kind, dtype="bfloat16", T=64, D=32, F=48, ranks=4):
    """Returns (kinds of collectives, bytes that a device sends) of the forward, and of the forward and backward."""
    widths = (D, F) if kind == "gather" else (F, D)
    shapes = [jax.ShapeDtypeStruct(s, dtype) for s in ((T, widths[0]), widths)]
    run = functools.partial(FUNCTIONS[kind], mesh=make_mesh(tp=ranks))

    def both(x, w):
        out, pull = jax.vjp(run, x, w)
        return out, pull(out)

    found = []
    for f in (run, both):
        text = jax.jit(f).lower(*shapes).as_text()
        kinds = set(
            re.findall(r"stablehlo\.(collective_permute|all_gather|reduce_scatter|all_reduce|all_to_all)", text)
        )
        sent = re.findall(r"stablehlo\.collective_permute.*-> tensor<(\d+)x(\d+)xbf16>", text)
        found.append((kinds, sum(2 * int(a) * int(b) for a, b in sent)))
    return found


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_only_blocks_of_rows_travel(kind):
    """Each block of rows goes to each other device once: what an all-gather or a reduce-scatter sends, and no more."""
    (kinds, forward), (all_kinds, both) = traffic(kind)
    block = 2 * (64 // 4) * 32
    assert kinds == all_kinds == {"collective_permute"}
    assert forward == 3 * block
    # The gather's backward sends the rows again and scatters their gradient; the scatter's sends the cotangent once.
    assert both == 3 * block * (3 if kind == "gather" else 2)


def test_the_compiled_program_has_the_same_collectives():
    mesh, (x, w) = make_mesh(tp=4), arrays(8, D=4, F=8)
    text = jax.jit(functools.partial(all_gather_matmul, mesh=mesh)).lower(x, w).compile().as_text()
    sent = [int(a) * int(b) for a, b in re.findall(r"= f32\[(\d+),(\d+)\]\S* collective-permute(?:-start)?\(", text)]
    assert sum(sent) == 3 * 2 * 4 and len(sent) == 6 and "all-gather" not in text


def test_narrow_dtypes_are_summed_in_float32_on_a_device():
    x, w = (a.astype(jnp.bfloat16) for a in arrays(4, D=64, F=4))
    out = reduce_scatter_matmul(x, w, mesh=make_mesh(tp=2))
    assert out.dtype == jnp.bfloat16
    close([out], [np.asarray(x, np.float64) @ np.asarray(w, np.float64)], 2e-2)


def test_without_a_mesh_it_is_the_product():
    x, w = arrays(4)
    for function in FUNCTIONS.values():
        close(value_and_gradients(function, x, w), plain(x, w))
    np.testing.assert_array_equal(ejdist.AllGatherMatmul()(x, w), all_gather_matmul(x, w))
    assert ejdist.ReduceScatterMatmul()(x, w).shape == (4, 16)


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_no_axis_of_a_mesh_of_ones_own_does_the_same_work_in_silence(kind):
    meshes = [
        jax.make_mesh((2, 2), ("data", "model"), axis_types=(t,) * 2, devices=jax.devices()[:4])
        for t in (jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit)
    ]
    x, w = arrays(2, 4, D=8, F=8)
    with pytest.raises(ValueError, match="has the axes 'data', and nothing says"):
        FUNCTIONS[kind](x, w, axis_name="model", mesh=meshes[0])
    with jax.set_mesh(meshes[1]):
        out = FUNCTIONS[kind](jax.reshard(x, P("data")), w, axis_name="model")
    assert jax.typeof(out).sharding.spec[0] == "data"
    close([out], plain(x, w)[:1])


X, W = (np.zeros(s, np.float32) for s in ((8, 4), (4, 8)))


@pytest.mark.parametrize(
    ("said", "args", "options"),
    [
        ("'x' must be a float array .* got int64", (X.astype(int), W), {}),
        ("'x' must be a float array .* got float32 of shape \\(4,\\)", (X[0], W), {}),
        ("'w' must be a float array .* shape \\(1, 4, 8\\)", (X, W[None]), {}),
        ("'w' is bfloat16 but 'x' is float32; cast", (X, jnp.asarray(W, "bfloat16")), {}),
        ("'w' of shape \\(8, 4\\) must have 4 rows", (X, W.T), {}),
        ("'w' of shape \\(0, 8\\) has no rows", (X[:, :0], W[:0]), {}),
        ("'axis_name' must be the name of a mesh axis, got \\('tp',\\)", (X, W), {"axis_name": ("tp",)}),
        ("'cfg' = 1: this operation has no configurations", (X, W), {"cfg": 1}),
    ],
)
def test_a_wrong_call_is_a_value_error(said, args, options):
    for name in ("all_gather_matmul", "reduce_scatter_matmul"):
        with pytest.raises(ValueError, match=f"{name}: argument {said}"):
            getattr(ejdist, name)(*args, **options)


def test_what_is_no_mesh_is_a_value_error():
    for name in ("all_gather_matmul", "reduce_scatter_matmul"):
        with pytest.raises(ValueError, match=r"argument 'mesh' must be a jax\.sharding\.Mesh, got tuple"):
            getattr(ejdist, name)(X, W, mesh=("tp",))


def test_a_wrong_place_is_a_value_error():
    mesh = make_mesh(dp=2, tp=2)
    for said, function, options in (
        ("split dim T, .* must be split over 'tp', as the last", all_gather_matmul, {"in_specs": (P(("tp", "dp")),)}),
        (r"split dim F over \(\), but .* \('tp',\)", reduce_scatter_matmul, {"in_specs": (P("tp"), P())}),
        (
            r"split dim F over \(\), but it must be split over \('tp',\)",
            all_gather_matmul,
            {"in_specs": (P("tp"), P())},
        ),
        ("split dim D over", all_gather_matmul, {"in_specs": (P("tp", "dp"),)}),
        ("dim T = 7", all_gather_matmul, {"x": X[:7]}),
        (r"'x' of shape \(0, 4\) is empty", all_gather_matmul, {"x": X[:0]}),
        (r"'w' of shape \(4, 0\) is empty", reduce_scatter_matmul, {"w": W[:, :0]}),
        ("dim T = 7", reduce_scatter_matmul, {"x": X[:7]}),
        ("'axis_name' = 'model' .* is not an axis", all_gather_matmul, {"axis_name": "model"}),
    ):
        with pytest.raises(ValueError, match=said):
            function(**{"x": X, "w": W, "mesh": mesh, **options})
    with pytest.raises(Unsupported, match="has no triton backend; it has xla"):
        all_gather_matmul(X, W, platform="triton")
    # It would be multiplied in float32.
    with pytest.raises(Unsupported, match="dtype float64 is not among bfloat16, float16, float32"):
        reduce_scatter_matmul(X.astype(np.float64), W.astype(np.float64), mesh=mesh)
