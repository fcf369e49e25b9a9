"""Where operations on a mesh could give a wrong answer, or an unclear one: each test was red once."""

import functools
import inspect
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import ejdist
import kernels
from ejdist import make_mesh, set_layout
from ejdist.execution import _decided
from ejdist.layout import current_layout, gather, sharding

RNG = np.random.default_rng(0)
B, T, N, K, H, D, F, V = 4, 8, 4, 2, 4, 8, 12, 16


def normal(*shape):
    return jnp.asarray(RNG.standard_normal(shape) / 2, jnp.float32)


X, WEIGHT, HEAD = normal(B, T, D), normal(D), normal(D, V)
MLP = (normal(D, F), normal(D, F), normal(F, D))
QKV = (normal(B, T, N, H), normal(B, T, K, H), normal(B, T, K, H))
TARGETS = jnp.asarray(RNG.integers(0, V, (B, T)), jnp.int32).at[0, :3].set(-100).at[1, 0].set(-1)
POSITIONS = jnp.broadcast_to(jnp.arange(T), (B, T))


def close(got, want):
    jax.tree.map(lambda g, w: np.testing.assert_allclose(np.asarray(g), np.asarray(w), rtol=1e-4, atol=1e-5), got, want)


def said(words, call):
    with pytest.raises(ValueError) as error:
        call()
    assert all(w in str(error.value) for w in words), str(error.value)


def with_gradients(function, count):
    def loss(*arrays):
        out = function(*arrays)
        return sum(jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(out)), out

    return jax.jit(jax.grad(loss, argnums=tuple(range(count)), has_aux=True))


# name -> (name in ejdist and kernels, arrays, how many are differentiated, options)
CALLS = {
    "rms_norm": ("rms_norm", (X, WEIGHT), 2, {}),
    "gated_mlp": ("gated_mlp", (X, *MLP), 4, {}),
    "rotary": ("rotary_embedding", (QKV[0], POSITIONS), 1, {}),
    "flash": ("flash_attention", QKV, 3, {"causal": True}),
    "attention": ("attention", QKV, 3, {"causal": True}),
    "losses": ("fused_token_losses", (X, HEAD, TARGETS), 2, {"z_loss": 1e-2}),
    "sums": ("fused_loss_sums", (X, HEAD, TARGETS), 2, {"z_loss": 1e-2}),
    "mean": ("fused_cross_entropy", (X, HEAD, TARGETS), 2, {}),
    "each": ("fused_cross_entropy", (X, HEAD, TARGETS), 2, {"reduction": "none"}),
}


def call(name, module=ejdist, **more):
    function, arrays, count, options = CALLS[name]
    return functools.partial(getattr(module, function), **options, **more), arrays, count


@functools.cache
def plain(name):
    function, arrays, count = call(name, kernels)
    return with_gradients(function, count)(*arrays)


# -- an axis of the mesh is on one dim of a call -----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gated_mlp", "mean"])
def test_heads_before_a_width_do_not_take_the_axis_that_is_summed_over(name):
    """[B, T, N, D] by a layout that has N and F (and V) on tp: a sum over tp would add different heads."""
    function, (x, *rest), _ = call(name, mesh=make_mesh(tp=2))
    x = normal(B, T, 2, D)
    if name == "mean":
        rest = (rest[0], jnp.asarray(RNG.integers(0, V, (B, T, 2))))
    close(function(x, *rest), getattr(kernels, CALLS[name][0])(x, *rest))


def test_an_axis_on_two_dims_of_a_call_is_refused_and_in_a_layout_yields():
    specs = (P("dp"), P(None, "dp"), P(None, "dp"), P("dp"))
    said(["'dp'", "dim F", "dim B"], lambda: ejdist.gated_mlp(X, *MLP, mesh=make_mesh(dp=2), in_specs=specs))
    ce = functools.partial(ejdist.fused_cross_entropy, X, HEAD, TARGETS, mesh=make_mesh(dp=2))
    said(["'dp'", "dim V", "dim B"], lambda: ce(in_specs=(P("dp"), P(None, "dp"))))
    with set_layout(B="data", F="data"):
        close(ejdist.gated_mlp(X, *MLP, mesh=Mesh(jax.devices()[:2], ("data",))), kernels.gated_mlp(X, *MLP))


def test_a_layout_that_names_no_axis_of_experts():
    with set_layout(B="data"):
        ops = ejdist.bind_ops(Mesh(jax.devices()[:2], ("data",)), experts={"overlap": "halves"})
        assert len(ops.halved(X)) == 1, "nothing is exchanged"


def test_stored_weights_that_share_an_axis_with_the_rows_are_gathered_on_explicit_axes():
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    specs = (P("x"), P(None, "x"), P("x"), P("x"))
    arrays = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip((X, *MLP), specs, strict=True)]
    with jax.set_mesh(mesh):
        close(with_gradients(ejdist.gated_mlp, 4)(*arrays), plain("gated_mlp"))


# -- cross entropy checks on a mesh what it checks on one device -------------------------------------------------------


@pytest.mark.parametrize("name", [pytest.param("fused_cross_entropy", marks=pytest.mark.slow), "fused_token_losses"])
def test_strays_show_in_the_loss_and_in_the_gradients_and_padding_does_not(name):
    def run(module, targets, of_logits, **where):
        function = functools.partial(getattr(module, name), targets=targets, **where)
        arrays = {"logits": X @ HEAD} if of_logits else {"hidden": X, "lm_head": HEAD}

        def loss(arrays):
            out = function(**arrays)
            return jnp.sum(out.loss) / 29 if name == "fused_token_losses" else out

        return jax.jit(jax.value_and_grad(loss))(arrays)

    stray = TARGETS.at[2, 2].set(V + 3)
    mesh = make_mesh(dp=2, tp=2)
    for of_logits in (False,) if name == "fused_token_losses" else (False, True):
        got, want = run(ejdist, TARGETS, of_logits, mesh=mesh), run(kernels, TARGETS, of_logits)
        assert np.isfinite(want[0])
        close(got, want)
        loss, gradients = run(ejdist, stray, of_logits, mesh=mesh)
        assert np.isnan(loss) and all(np.isnan(g).any() for g in gradients.values())


@pytest.mark.slow
def test_a_masked_token_of_the_vocabulary_does_not_make_the_loss_nan():
    logits, targets = (X @ HEAD).at[..., 5].set(-jnp.inf), jnp.zeros((B, T), jnp.int32)
    for mesh in (None, make_mesh(tp=2)):
        loss = functools.partial(ejdist.fused_cross_entropy, targets=targets, mesh=mesh)
        value, gradient = jax.value_and_grad(lambda x: loss(logits=x))(logits)  # noqa: B023
        want = -jnp.mean(jax.nn.log_softmax(logits)[..., 0])
        close(value, want)
        assert np.isfinite(gradient).all() and not gradient[..., 5].any()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"reduction": "avg"}, ["'reduction'", "mean, sum or none"]),
        ({"label_smoothing": 1.5}, ["'label_smoothing'", "1.5"]),
        ({"logits_soft_cap": -1.0}, ["'logits_soft_cap'", "-1"]),
        ({"weights": jnp.ones((B,))}, ["'weights'", "(4, 8)"]),
        ({"targets": None}, ["'targets'", "missing"]),
    ],
)
@pytest.mark.parametrize("sizes", [None, {"dp": 2, "tp": 2}])
def test_cross_entropy_checks_its_arguments_on_a_mesh_too(options, words, sizes):
    mesh = sizes and make_mesh(**sizes)
    said(
        words,
        lambda: ejdist.fused_cross_entropy(**{"hidden": X, "lm_head": HEAD, "targets": TARGETS} | options, mesh=mesh),
    )


# -- out_specs ---------------------------------------------------------------------------------------------------------

RIGHT = {
    "rms_norm": P("fsdp"),
    "gated_mlp": P(("fsdp",), None),
    "rotary": P("fsdp", None, "tp"),
    "flash": P(("dp", "fsdp"), None, ("tp",), None),
    "attention": (P("fsdp", None, "tp"), P("fsdp", "tp")),
    "losses": P(("fsdp", "ep")),
    "sums": P(),
    "mean": P(None),
    "each": P("fsdp", "sp"),
}


@pytest.mark.parametrize("name", list(CALLS))
def test_out_specs_only_say_again_what_follows_from_the_inputs(name):
    function, arrays, _ = call(name, mesh=make_mesh(fsdp=2, tp=2))
    jax.eval_shape(functools.partial(function, out_specs=RIGHT[name]), *arrays)
    for wrong in (P("tp"), P("fsdp", "tp", None)) + ((P(),) if name not in ("mean", "sums") else ()):
        said(["'out_specs'", "follows"], lambda: function(*arrays, out_specs=wrong))  # noqa: B023


def test_out_specs_of_a_ring_and_of_a_result_that_lies_elsewhere():
    said(["'out_specs'"], lambda: ejdist.rms_norm(jnp.ones((4, 2)), mesh=make_mesh(fsdp=2), out_specs=P()))
    ring = functools.partial(ejdist.ring_attention, *QKV, mesh=make_mesh(fsdp=2, sp=2))
    said(["'out_specs'", "follows"], lambda: ring(out_specs=P("sp", "fsdp")))
    jax.eval_shape(lambda: ring(out_specs=P("fsdp", "sp")))
    for specs in ((P("fsdp", "sp"),), (None, P("fsdp", "sp")), P("fsdp", "sp")):  # what is not shown follows
        assert jax.eval_shape(lambda: ring(in_specs=specs)).shape == (B, T, N, H)  # noqa: B023
    said(["in_specs", "nothing", "'sp'"], lambda: ring(in_specs=P("fsdp")))


# -- inside a shard_map, on explicit axes, on a mesh of one's own ------------------------------------------------------


@pytest.mark.parametrize("name", [n for n in CALLS if n not in ("mean", "sums")])  # each device has one of its own
def test_inside_the_callers_own_shard_map(name):
    """A device's own arrays, with JAX's own check of what varies; weights are on every device, and their gradient is summed
    once. A mapping may be over one axis of two."""
    function, arrays, count = call(name)
    mesh = make_mesh(dp=2, tp=2)
    specs = [P("dp") if x.shape[0] == B else P() for x in arrays]
    for names in {"rms_norm": ({"dp", "tp"}, {"dp"}), "gated_mlp": ({"dp"},), "flash": ({"dp"},)}.get(
        name, ({"dp", "tp"},)
    ):
        mapped = jax.shard_map(function, mesh=mesh, in_specs=tuple(specs), out_specs=P("dp"), axis_names=names)
        close(with_gradients(mapped, count)(*arrays), plain(name))


@pytest.mark.parametrize(
    "where", ["local", "batch", *(pytest.param(where, marks=pytest.mark.slow) for where in ("ring", "mapped"))]
)
def test_where_nothing_is_compiled(where):
    """Under jax.disable_jit, by which programs are looked at step by step, an operation called itself without end."""
    mesh = make_mesh(sp=2) if where == "ring" else make_mesh(dp=2)
    split = {"in_specs": (P("dp"),) * 3, "out_specs": P("dp")}
    function = {
        "local": kernels.flash_attention,
        "batch": lambda *x: ejdist.flash_attention(*x, mesh=mesh),
        "ring": lambda *x: ejdist.ring_attention(*x, mesh=mesh),
        "mapped": lambda *x: jax.shard_map(kernels.flash_attention, mesh=mesh, **split)(*x),
    }[where]
    gradients = jax.grad(lambda x: jnp.sum(jnp.sin(function(*x))))
    want = gradients(QKV)
    with jax.disable_jit():
        close(gradients(QKV), want)


@pytest.mark.slow
def test_a_ring_inside_a_shard_map_over_some_axes():
    where = {"mesh": make_mesh(dp=2, sp=2, tp=2), "in_specs": (P("dp", "sp"),) * 3, "out_specs": P("dp", "sp")}
    mapped = jax.shard_map(functools.partial(ejdist.ring_attention, causal=True), axis_names={"dp", "sp"}, **where)
    close(with_gradients(mapped, 3)(*QKV), plain("flash"))


CUTS = jnp.asarray([0, 3, T] * 2, jnp.int32)
IDS = jnp.asarray(np.sort(RNG.integers(-1, 3, (B, T)), axis=1), jnp.int32)


@pytest.mark.parametrize(
    ("function", "arrays"),
    [
        (lambda q, ids: kernels.flash_attention(q, q, q, q_segment_ids=ids, chunk_size=3), (QKV[0], IDS)),
        (lambda q, cuts: kernels.flash_attention(q[:1], q[:1], q[:1], cum_seqlens_q=cuts), (QKV[0], CUTS)),
        (
            lambda x, w, ids: kernels.grouped_matmul(x, w, group_ids=ids),
            (X[0], normal(B, D, F), IDS[:2].reshape(-1)[:T]),
        ),
    ],
    ids=["chunks of segments", "cuts", "groups"],
)
def test_integers_that_differ_between_devices_inside_a_shard_map_over_some_axes(function, arrays):
    """What is looked up among them is found by a search of our own, see `kernels.framework.segments.searchsorted`."""

    gradient = jax.grad(lambda x, *rest: jnp.sum(function(x, *rest)))
    mapped = jax.shard_map(gradient, mesh=make_mesh(dp=2, tp=2), in_specs=P("dp"), out_specs=P("dp"), axis_names={"dp"})
    assert jax.eval_shape(mapped, *arrays).shape == arrays[0].shape


@pytest.mark.parametrize(
    ("name", "specs"),
    [
        ("rms_norm", [P(), P()]),
        ("rms_norm", [P("x", "y"), P()]),
        ("rms_norm", [P(("x", "one")), P()]),
        ("gated_mlp", [P("x"), P("x", "y"), P(None, "y"), P("y", "x")]),
        ("gated_mlp", [P("one"), P(None, "one"), P(None, "one"), P("one")]),
        ("mean", [P("x"), P(None, "y"), P()]),
        pytest.param("mean", [P("x", "y"), P(), P("x")], marks=pytest.mark.slow),
        pytest.param("mean", [P("one"), P(), P("one")], marks=pytest.mark.slow),
        ("each", [P("one"), P(None, "one"), P("one")]),
        ("flash", [P("x", None, "y")] * 3),
        ("ring", [P("x", "y")] * 3),
        pytest.param("ring of one", [P("x", "one")] * 3, marks=pytest.mark.slow),
    ],
)
def test_on_explicit_axes_results_go_with_the_inputs(name, specs):
    mesh = jax.make_mesh((2, 2, 1), ("x", "y", "one"), devices=jax.devices()[:4])
    assert AxisType.Explicit in mesh.axis_types
    base = "flash" if "ring" in name else name
    function, arrays, count = call(base)
    if "ring" in name:
        function = functools.partial(ejdist.ring_attention, causal=True, axis_name="one" if "one" in name else "y")

    def residual(*arrays):
        out = function(*arrays)
        return (arrays[0] + out) - arrays[0] if out.shape == arrays[0].shape else out

    arrays = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(arrays, specs, strict=True)]
    with jax.set_mesh(mesh):
        close(with_gradients(residual, count)(*arrays), plain(base))


def test_explicit_axes_of_one_device_and_of_the_wrong_function():
    one = jax.make_mesh((1,), ("x",), devices=jax.devices()[:1])
    two = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    with jax.set_mesh(one):
        close(ejdist.rms_norm(jax.device_put(X, NamedSharding(one, P("x"))), WEIGHT), kernels.rms_norm(X, WEIGHT))
    with jax.set_mesh(two):
        x = jax.device_put(X, NamedSharding(two, P("x")))
        close(ejdist.rms_norm(x, WEIGHT, mesh=two), kernels.rms_norm(X, WEIGHT))
        said(["rms_norm", "explicit", "`ejdist`"], lambda: kernels.rms_norm(x, WEIGHT))
        weight = jax.device_put(WEIGHT, NamedSharding(two, P("x")))
        said(["'weight'", "dim D", "x"], lambda: ejdist.rms_norm(X, weight))
        said(
            ["'query'", "dim T", "ring_attention"],
            lambda: ejdist.flash_attention(*[jax.reshard(a, P(None, "x")) for a in QKV]),
        )

    said(["'x'", "a mesh other than", "'dp': 2"], lambda: ejdist.rms_norm(x, WEIGHT, mesh=make_mesh(dp=2)))
    # The type of an array includes its sharding, also where no mesh is in force.
    said(["rms_norm", "explicit", "`ejdist`"], lambda: kernels.rms_norm(x, WEIGHT))
    experts = normal(D, 2), normal(2, D, F), normal(2, D, F), normal(2, F, D)
    for name, arrays in {"rms_norm": (WEIGHT,), "all_gather_matmul": MLP[:1], "moe": experts}.items():
        call = functools.partial(getattr(ejdist, name), x, *arrays, **({"top_k": 1} if name == "moe" else {}))
        said([f"{name}: argument 'x'", "explicit axes x", "jax.set_mesh"], call)
    four = jax.make_mesh((2, 2), ("x", "y"), devices=jax.devices()[:4])
    with jax.set_mesh(four):
        some = jax.shard_map(ejdist.rms_norm, in_specs=P(None, "y"), out_specs=P(None, "y"), axis_names={"y"})
        close(some(jax.reshard(X, P("x", "y"))), kernels.rms_norm(X))


@pytest.mark.parametrize("kinds", [(AxisType.Explicit, AxisType.Auto), (AxisType.Auto, AxisType.Explicit)])
def test_a_mesh_with_axes_of_two_types_needs_specs(kinds):
    """Types say nothing of the automatic axes, and a layout nothing of the explicit ones: all was computed along the former."""
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=kinds, devices=jax.devices()[:4])
    wide = P(None, "model")
    run, arrays, _ = call("gated_mlp", mesh=mesh)
    with set_layout(**OWN):
        said(["'model'" if kinds[1] == AxisType.Auto else "'data'", "in_specs"], lambda: run(*arrays))
        close(run(*arrays, in_specs=(P("data"), wide, wide, P("model"))), plain("gated_mlp")[1])
        ring = functools.partial(ejdist.ring_attention, axis_name="data", mesh=mesh, in_specs=(P(None, "data"),) * 3)
        assert jax.eval_shape(ring, *QKV).shape == QKV[0].shape
        experts = normal(D, 2), normal(2, D, F), normal(2, D, F), normal(2, F, D)
        split = functools.partial(ejdist.moe, top_k=1, mesh=mesh, in_specs=(P("data"), P("data", None, "model")))
        assert jax.eval_shape(split, X, *experts)[0].shape == X.shape


OWN = {"B": "data", "N": "model", "K": "model", "F": "model", "V": "model"}


@pytest.mark.slow
def test_a_mesh_of_ones_own():
    mesh = Mesh(np.asarray(jax.devices()).reshape(4, 2), ("data", "model"))
    said(["'data'", "'model'", "set_layout", "in_specs"], lambda: ejdist.rms_norm(X, WEIGHT, mesh=mesh))
    said(["'model'"], lambda: set_layout(B="data") and ejdist.rms_norm(X, mesh=mesh))
    set_layout(**OWN)
    for name in ("gated_mlp", "mean"):
        function, arrays, _ = call(name, mesh=mesh)
        close(function(*arrays), plain(name)[1])
    flops = [
        f.lower(X, *MLP).compile().cost_analysis()["flops"]
        for f in map(jax.jit, (call("gated_mlp", mesh=mesh)[0], kernels.gated_mlp))
    ]
    assert 7 < flops[1] / flops[0] < 9
    set_layout()
    said(["set_layout"], lambda: ejdist.rms_norm(X, WEIGHT, mesh=mesh))
    ring = Mesh(np.asarray(jax.devices()).reshape(4, 2), ("data", "ring"))
    with set_layout(B="data") as layout:
        assert current_layout() is layout
        got = ejdist.ring_attention(*QKV, causal=True, axis_name="ring", mesh=ring)
        assert got.sharding.shard_shape(got.shape)[:2] == (1, T // 2)
    close(got, plain("flash")[1])
    assert "sp" in str(current_layout())
    with set_layout(B="data", replicated="model"):
        x = normal(B, 1, 1, 2, D)
        close(ejdist.rms_norm(x, WEIGHT, mesh=mesh), kernels.rms_norm(x, WEIGHT))


def test_a_layout_is_of_one_thread():
    seen, inside, left = [], threading.Event(), threading.Event()

    def other():
        with set_layout(B="other"):
            inside.set()
            left.wait()
        seen.append(current_layout())

    before, thread = current_layout(), threading.Thread(target=other)
    with set_layout(B="mine"):
        thread.start()
        inside.wait()
        assert current_layout().activations["B"] == ("mine",)
    left.set()
    thread.join()
    assert current_layout() is before and seen == [before]


# -- what is compiled --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["rms_norm", "gated_mlp", "mean", "ring"])
def test_a_second_eager_call_compiles_nothing(name, caplog):
    if name == "ring":
        run = functools.partial(ejdist.ring_attention, *QKV, causal=True, mesh=make_mesh(sp=2))
    else:
        function, arrays, _ = call(name, mesh=make_mesh(dp=2, tp=2))
        run = functools.partial(function, *arrays)
    run()
    decided = len(_decided)
    with jax.log_compiles(), caplog.at_level("WARNING"):
        run()
    assert len(_decided) == decided and "ompil" not in caplog.text, caplog.text


def test_the_backward_of_a_split_mlp_has_one_all_reduce():
    mesh = make_mesh(tp=2)
    text = (
        jax.jit(jax.value_and_grad(lambda x: jnp.sum(jnp.sin(ejdist.gated_mlp(x, *MLP, mesh=mesh)))))
        .lower(X)
        .compile()
        .as_text()
    )
    assert text.count("all-reduce(") == 2  # one of the forward


def test_gradients_of_stored_weights_are_scattered_as_they_are_summed():
    mesh = make_mesh(fsdp=2)
    weights = [
        jax.device_put(w, sharding(mesh, d, current_layout().parameters))
        for w, d in zip(MLP, ("DF", "DF", "FD"), strict=True)
    ]
    stored = jax.grad(lambda *w: jnp.sum(jnp.sin(ejdist.gated_mlp.with_stored_weights(X, *w, mesh=mesh))), (0, 1, 2))
    compiled = jax.jit(stored).lower(*weights).compile()
    text = compiled.as_text()
    assert "reduce-scatter(" in text and not any(f"all-reduce(f32[{a},{b}]" in text for a, b in ((D, F), (F, D)))
    assert [s.spec for s in compiled.output_shardings] == [w.sharding.spec for w in weights]
    close(stored(*weights), jax.grad(lambda *w: jnp.sum(jnp.sin(kernels.gated_mlp(X, *w))), (0, 1, 2))(*MLP))


def test_stored_weights_with_a_batch_of_one_row_which_is_whole():
    function = functools.partial(ejdist.gated_mlp.with_stored_weights, mesh=make_mesh(fsdp=2, tp=2))
    close(with_gradients(function, 4)(X[:1], *MLP), with_gradients(kernels.gated_mlp, 4)(X[:1], *MLP))


def test_gathered_experts_stay_on_their_axis():
    mesh, w = make_mesh(ep=4), jnp.ones((4, D, F))
    got = jax.jit(lambda w: gather(w, "E D F", mesh))(w)
    assert got.sharding.shard_shape(w.shape) == (1, D, F)


# -- wrong calls -------------------------------------------------------------------------------------------------------

DP2, TP2, ALONG = {"dp": 2}, {"tp": 2}, P(None, "sp")


def norm(**where):
    return lambda: ejdist.rms_norm(X, WEIGHT, **{"mesh": make_mesh(**DP2)} | where)


def under(mesh, function):
    def run():
        with jax.set_mesh(mesh):
            return function()

    return run


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (norm(mesh=[1]), ["'mesh'", "list", "make_mesh"]),
        (lambda: ejdist.ring_attention(*QKV, mesh=(2,)), ["'mesh'", "tuple", "make_mesh"]),
        (norm(in_specs={"x": P()}), ["'in_specs'", "dict"]),
        (norm(in_specs=NamedSharding(make_mesh(**DP2), P())), ["'in_specs'", "NamedSharding", ".spec"]),
        (norm(in_specs=("dp",)), ["'in_specs'", "str"]),
        (norm(in_specs=P("dp", "dp")), ["in_specs", "'dp'", "twice"]),
        (norm(in_specs=P(P.UNCONSTRAINED)), ["'in_specs'", "UNCONSTRAINED"]),
        (lambda: set_layout(B=3), ["set_layout", "B = 3", "axis name"]),
        (norm(out_specs=(None, None)), ["'out_specs'", "2", "1 results"]),
        (norm(mesh=make_mesh(**DP2).abstract_mesh), ["'mesh'", "AbstractMesh", "jax.jit"]),
        (under(make_mesh(**TP2), norm()), ["'mesh'", "'dp': 2", "'tp': 2", "in force"]),
        (lambda: ejdist.flash_attention(*QKV, mesh=make_mesh(tp=8)), ["'query'", "N = 4", "tp=8"]),
        (
            lambda: ejdist.flash_attention(*QKV, jnp.ones((T, T), bool), mesh=make_mesh(**DP2)),
            ["'attention_mask'", "[B, T, S]"],
        ),
        (
            lambda: ejdist.flash_attention(*[x[:, :B] for x in QKV], jnp.ones((B, B), bool), mesh=make_mesh(**DP2)),
            ["'attention_mask'", "B = T", "q_segment_ids"],
        ),
        (
            lambda: jax.shard_map(norm(), mesh=make_mesh(**DP2), in_specs=(), out_specs=P())(),
            ["'mesh'", "inside a shard_map"],
        ),
        (norm(platform=["xla"]), ["'platform'", "a name", "['xla']"]),
        (norm(cfg={"block_rows": 8}), ["'cfg'", "NormConfig", "dict"]),
        (lambda: ejdist.ring_attention(*QKV, mesh=make_mesh(sp=2), platform=["xla"]), ["'platform'", "a name"]),
        (
            lambda: jax.shard_map(
                lambda *x: ejdist.ring_attention(*x, cfg={}), mesh=make_mesh(sp=2), in_specs=ALONG, out_specs=ALONG
            )(*QKV),
            ["'cfg'", "KernelConfig", "dict"],
        ),
        (lambda: ejdist.moe(X, normal(D, 2), *[normal(2, *w.shape) for w in MLP], top_k=1, platform=[]), ["moe", "'platform'"]),
    ],
)  # fmt: skip
def test_a_wrong_call_says_what_is_wrong(wrong, words):
    said(words, wrong)


def test_an_abstract_mesh_under_jit_numpy_arrays_lists_and_empty_arrays():
    mesh, want = make_mesh(**DP2), kernels.rms_norm(X, WEIGHT)
    with jax.set_mesh(mesh):
        close(jax.jit(lambda x: ejdist.rms_norm(x, WEIGHT, mesh=jax.sharding.get_abstract_mesh()))(X), want)
    close(ejdist.rms_norm(np.asarray(X), np.asarray(WEIGHT), mesh=mesh), want)
    close(kernels.rms_norm(X[0].tolist(), WEIGHT), want[0])
    assert ejdist.rms_norm(X[:0], WEIGHT, mesh=mesh).shape == (0, T, D)
    close(jax.vmap(lambda x: ejdist.rms_norm(x, WEIGHT, mesh=mesh))(X), want)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize(
    ("name", "shape"), [("rms_norm", (0, T)), ("gated_mlp", (B, 0)), ("losses", (0, T)), ("mean", (B, 0))]
)
def test_the_gradients_of_an_empty_batch_on_a_mesh_are_zeros(name, shape, kind):
    """XLA ended the process over their `shard_map`, whose arrays are all empty."""
    mesh = jax.make_mesh((2, 2), ("data", "seq"), axis_types=(kind,) * 2, devices=jax.devices()[:4])
    run, arrays, count = call(name)
    lies = NamedSharding(mesh, P("data", "seq"))
    arrays = [
        jax.device_put(jnp.zeros((*shape, *x.shape[2:]), x.dtype), lies) if x.shape[:2] == (B, T) else x for x in arrays
    ]
    with set_layout(B="data", T="seq"), jax.set_mesh(mesh):
        run = with_gradients(run, count)
        assert "shard_map" not in str(jax.make_jaxpr(run)(*arrays)), "the process would end"
        gradients, out = run(*arrays)
    close(gradients, tuple(jnp.zeros_like(x) for x in arrays[:count]))
    close(out, call(name, kernels)[0](*(np.asarray(x) for x in arrays)))


# -- every function ----------------------------------------------------------------------------------------------------


def test_every_function_has_the_arguments_and_documentation_of_the_plain_one_and_a_mesh():
    where = ["mesh", "in_specs", "out_specs"]
    for name, function in kernels.public_functions().items():
        ours = getattr(ejdist, name)
        extra = [n for n in inspect.signature(ours).parameters if n not in inspect.signature(function).parameters]
        needs_whole = (
            ["axis_name"] if "axis_name" in extra else []
        )  # what depends on a whole sequence, see test_order.py
        what_travels = ["exchange"] if name == "native_sparse_attention" else []
        assert extra == [*where, *needs_whole, *what_travels], name
        assert "mesh" in ours.__doc__ and (function.__doc__ or "").split("\n")[0] in ours.__doc__, name
        assert getattr(ejdist, function.Module.__name__).function is ours
    ring = inspect.signature(ejdist.ring_attention).parameters
    assert set(inspect.signature(kernels.flash_attention).parameters) | {*where, "axis_name", "scheme", "order"} == set(
        ring
    )


@pytest.mark.parametrize("name", list(CALLS))
def test_module_classes_run(name):
    function, arrays, _ = call(name)
    made = getattr(ejdist, getattr(kernels, CALLS[name][0]).Module.__name__)(**function.keywords, mesh=make_mesh(**DP2))
    jax.eval_shape(made, *arrays)
    assert isinstance(repr(made), str) and ejdist.RingAttention(causal=True).defaults == {"causal": True}
