"""Every operation on every backend under the transformations of JAX, as users call it: the numbers of the plain call, or a
refusal by name, on every platform alike."""

import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grid import BUILT_ON_ANOTHER, as_tuple, differentiable, error, on_this_machine
from jax.sharding import PartitionSpec as P

import ejdist
import kernels
from kernels import Unsupported
from kernels.framework.binding import floats_apart, is_array, is_float_array, merged
from kernels.framework.contract import Op
from kernels.framework.interpret import interpret
from kernels.framework.platforms import PLATFORMS

OPS = kernels.operations()


# Transformations are the framework's, which knows no toolchain: it passes arguments on to kernels as to XLA. This one has
# residuals, several outputs and arguments that may be left out; its kernels for TPUs, and those of other operations, are
# transformed in the slow tier.
WITH_KERNELS = {"fused_add_rms_norm"}


# The framework alone decides what a derivative is under `vmap`, `scan`, `jax.checkpoint` and an export, and what a second one
# is. In the quick tests one operation of each kind is transformed so: one output and several, residuals, integers.
OF_EACH_KIND = "rms_norm fused_add_rms_norm flash_attention grouped_matmul".split()


def marks_of(op, backend="xla"):
    kernels = op.name in WITH_KERNELS and backend != "pallas_tpu"
    quick = op.name not in BUILT_ON_ANOTHER and (backend == "xla" or kernels)
    return () if quick else (pytest.mark.slow,)


def of_each_kind(ops, kinds=OF_EACH_KIND):
    """Returns the rows of operations, of which one of each kind is quick."""
    slow = pytest.mark.slow
    return [pytest.param(op, id=name, marks=() if name in kinds else slow) for name, op in ops.items()]


# Numbers are compared in float32; what has none (cuDNN) is transformed in tests of its own.
ROWS = [
    pytest.param(op, b, id=f"{op.name}-{b.name}", marks=marks_of(op, b.name))
    for op in OPS.values()
    for b in op.backends.values()
    if "float32" in b.dtypes
]
each_of_kind = pytest.mark.parametrize(
    ("op", "backend"),
    [r if r.values[0].name in OF_EACH_KIND else pytest.param(*r.values, id=r.id, marks=pytest.mark.slow) for r in ROWS],
)
DIFFERENTIABLE = {name: op for name, op in OPS.items() if differentiable(op)}
DIFFERENTIABLE_ROWS = [row for row in ROWS if differentiable(row.values[0])]
SLOW = [pytest.param(*r.values, id=r.id, marks=pytest.mark.slow) for r in DIFFERENTIABLE_ROWS]
KINDS = [r if r.values[0].name in OF_EACH_KIND else slow for r, slow in zip(DIFFERENTIABLE_ROWS, SLOW)]
each_kind = pytest.mark.parametrize(("op", "backend"), KINDS)
# A device has a row of the batch; `lead` is the batch where there is one dim of it.
FIRST = ("B", "lead")


def batch_of(dims):
    """Returns which dims of arguments are a batch; none where all rows M are one, as of groups of any sizes."""
    return {d[0].name for d in dims.values() if d} & {*FIRST}


@functools.cache
def case_of(op: Op):
    """Returns the first case that every backend with numbers in float32 takes, with a gradient if it has any."""

    def is_for_all(case):
        call = op.bind(**op.case_inputs(case, shapes_only=True))
        of_float32 = [b for b in op.backends.values() if "float32" in b.dtypes]
        return not any(b.refuses(op, call, differentiable(op) and b.backward is not None) for b in of_float32)

    return next(c for c in op.cases if "bench" not in c.tags and is_for_all(c))


def parts(op, seed=0):
    """Returns (float arrays with a gradient, the other arguments) of such a case."""
    arguments = op.case_inputs(case_of(op), seed=seed)
    traced = op.bind(**arguments).traced()
    floats, others = floats_apart(traced, op.no_gradient)
    rest = {n: v for n, v in arguments.items() if n not in traced}
    return floats, others, rest


def call(op, platform, floats, others, rest):
    return as_tuple(op(**merged(floats, others), **rest, platform=platform))


def scalar(op, platform, others, rest, whole=lambda y: y):
    def loss(floats):
        out = map(whole, call(op, platform, floats, others, rest))
        return sum(
            jnp.sum(jnp.sin(jnp.where(jnp.isfinite(y), y, 0).astype(jnp.float32))) for y in out if is_float_array(y)
        )

    return loss


@functools.cache
def plain(op, platform):
    """Returns the compiled function of (value, gradients) of a call, which several tests compare with."""
    _, others, rest = parts(op)
    return jax.jit(jax.value_and_grad(scalar(op, platform, others, rest)))


def close(got, want, allowed=2e-5):
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert error(g, w) < allowed, error(g, w)


@each_of_kind
def test_vmap_of_all_arrays_and_of_one(op, backend):
    floats, others, rest = parts(op)
    again = parts(op, seed=1)[0]
    stacked = jax.tree.map(lambda a, b: np.stack([a, b]), floats, again)
    run, one = functools.partial(call, op, backend.name, others=others, rest=rest), next(iter(floats))

    @jax.jit
    def both(stacked):
        return jax.vmap(run)(stacked), jax.vmap(lambda x: run({**floats, one: x}), out_axes=-1)(stacked[one])

    with on_this_machine(backend):
        got, mixed = jax.device_get(both(stacked))  # indexed by NumPy, without a program for each shape
        for i, f in enumerate((floats, again)):
            close([y[i] for y in got], run(f), 1e-6)
            close([y[..., i] for y in mixed], run({**floats, one: f[one]}), 1e-6)


def scanned(loss):
    """Returns -2 times a loss, summed by a loop."""
    weights = jnp.array([1.0, -3.0])
    return lambda floats: jax.lax.scan(lambda total, x: (total + x * loss(floats), None), 0.0, weights)[0]


def remat_of(backend):
    """Returns `jax.checkpoint`; for Pallas nothing, as remat does not take the ordered host calls of its interpreter."""
    return (lambda f: f) if backend.name == "pallas_tpu" else jax.checkpoint


@each_kind
def test_gradients_under_vmap_and_of_vmap_with_scan_and_remat(op, backend):
    floats, others, rest = parts(op)
    again = parts(op, seed=1)[0]
    stacked = jax.tree.map(lambda a, b: np.stack([a, b]), floats, again)
    loss, remat = scalar(op, backend.name, others, rest), remat_of(backend)

    @jax.jit  # one program: what the two have in common is compiled once
    def both(stacked):
        total = jax.grad(lambda f: jnp.sum(jax.vmap(scanned(loss))(f)))
        return jax.vmap(jax.grad(remat(loss)))(stacked), total(stacked)

    with on_this_machine(backend):
        each, total = jax.device_get(both(stacked))
        for i, f in enumerate((floats, again)):
            want = plain(op, backend.name)(f)[1]
            close(jax.tree.map(lambda g, i=i: g[i], each), want)
            close(jax.tree.map(lambda g, i=i: g[i] / -2, total), want)


def test_a_gradient_through_what_is_forward_only_is_refused_by_name():
    for op in (op for op in OPS.values() if not differentiable(op)):
        floats, others, rest = parts(op)
        if not floats:  # of an operation that has no gradient of any
            floats, others = floats_apart(merged(floats, others), ())
        with pytest.raises(Unsupported, match="it has no backward"):
            jax.grad(scalar(op, None, others, rest))(floats)


@each_kind
def test_scan_and_remat_around_it(op, backend):
    floats, others, rest = parts(op)
    loss = scalar(op, backend.name, others, rest)
    with on_this_machine(backend):
        want = jax.tree.map(lambda g: -2 * g, plain(op, backend.name)(floats)[1])
        for wrap in (lambda f: f, remat_of(backend)):
            close(jax.jit(jax.grad(scanned(wrap(loss))))(floats), want)


@each_kind
def test_second_derivatives_are_those_of_the_contract(op, backend):
    floats, others, rest = parts(op)
    way = jax.tree.map(lambda x: np.cos(np.arange(x.size, dtype=x.dtype)).reshape(x.shape), floats)

    def product(loss):  # with a Hessian, in reverse mode twice

        def dot(g):
            return sum(jnp.vdot(a, b) for a, b in zip(jax.tree.leaves(g), jax.tree.leaves(way), strict=True))

        return jax.jit(jax.grad(lambda f: dot(jax.grad(loss)(f))))(floats)

    class Contract:
        def __call__(self, platform, **arguments):
            return op.function(**arguments)

    with jax.default_matmul_precision("highest"):
        want = product(scalar(Contract(), None, others, rest))
    with on_this_machine(backend):
        close(product(scalar(op, backend.name, others, rest)), want, 5e-4)


@pytest.mark.parametrize("op", DIFFERENTIABLE.values(), ids=DIFFERENTIABLE)
def test_forward_mode_and_foreign_residuals_are_refused_by_name(op):
    floats, others, rest = parts(op)
    with pytest.raises(Unsupported, match=f"^{op.name}: forward-mode differentiation .* use reverse mode"):
        jax.jvp(lambda f: call(op, None, f, others, rest), (floats,), (floats,))
    shapes = jax.eval_shape(lambda: call(op, None, floats, others, rest))
    saved = {f"d_{n}": jnp.ones(y.shape, y.dtype) for n, y in zip(op.outputs, shapes)}
    residuals = {n: jnp.ones(y.shape, y.dtype) for n, y in zip(op.outputs, shapes) if n in op.residuals}
    saved = op.backward_inputs(residuals, saved) if op.backward_inputs else residuals | saved
    arrays = merged(floats, others)

    def total(saved):
        return sum(jnp.sum(g) for g in jax.tree.leaves(op.backward(saved, **arrays, **rest)))

    with pytest.raises(Unsupported, match=f"{op.name}_backward: this derivative is not supported"):
        jax.grad(total)(saved)


X = jnp.ones((1, 4, 2, 8))
ON_DEVICES = {  # name in the message -> function of one array
    "flash_attention": lambda x: kernels.flash_attention(x, x, x, causal=True),
    "ring_attention": lambda x: ejdist.ring_attention(x, x, x, causal=True, mesh=ejdist.make_mesh(sp=2)),
    "moe": lambda x: ejdist.moe(x[:, :, 0], jnp.ones((8, 2)), *(jnp.ones((2, 8, 8)),) * 3, top_k=1)[0],
    "all_gather_matmul": lambda x: ejdist.all_gather_matmul(x[0], jnp.ones((8, 2)), mesh=ejdist.make_mesh(tp=2)),
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n == "moe")) for n in ON_DEVICES])
def test_forward_mode_is_refused_by_name_through_every_transformation(name):
    function = ON_DEVICES[name]

    def jvp(f):
        return lambda x: jax.jvp(f, (x,), (x,))[1]

    def scanned(x):
        return jax.lax.scan(lambda carry, _: (carry + jnp.sum(function(x * carry)), None), 1.0, None, length=2)[0]

    ways = {
        "jvp": jvp(function),
        "jit of jvp": jax.jit(jvp(function)),
        "jvp of jit": jvp(jax.jit(function)),
        "scan": jvp(scanned),
        "remat": jvp(jax.checkpoint(function)),
        "linearize": lambda x: jax.linearize(function, x)[1](x),
        "jacfwd": jax.jacfwd(lambda x: function(X * x)),
    }
    if name == "flash_attention":
        ways |= {
            "vmap": lambda x: jvp(jax.vmap(function))(x[None]),
            "jvp of grad": jvp(jax.grad(lambda x: function(x).sum())),
        }
        ways["hessian"] = jax.hessian(lambda x: function(X * x).sum())
    for way, run in ways.items():
        with pytest.raises(Unsupported, match=f"^{name}: forward-mode differentiation") as refused:
            run(jnp.float32(1) if way in ("jacfwd", "hessian") else X)
        assert "jax.grad" in str(refused.value), way
    assert np.isfinite(jax.grad(lambda x: jnp.sum(function(x)))(X)).all()


@pytest.mark.parametrize("op", of_each_kind(OPS, OF_EACH_KIND[:2]))
def test_one_export_for_every_platform_gives_the_numbers_here(op):
    """Also on a machine without the accelerator, and differentiated."""
    floats, others, rest = parts(op)
    loss = scalar(op, None, others, rest)
    loss = jax.value_and_grad(loss) if differentiable(op) else loss
    platforms = [p for p in PLATFORMS if p != "rocm"]
    with kernels.compile_for(90) as checks, on_this_machine(op.backends["xla"]):
        exported = jax.export.export(jax.jit(loss), platforms=platforms, disabled_checks=checks)(floats)
    assert exported.platforms == tuple(platforms)
    want = plain(op, None) if differentiable(op) else jax.jit(loss)
    close(exported.call(floats), want(floats), 1e-6)


@pytest.mark.parametrize("op", of_each_kind(DIFFERENTIABLE))
def test_the_size_of_the_batch_may_be_a_symbol(op):
    """In an export for any size of it; a backend that needs the size is refused by name."""
    floats, others, rest = parts(op)
    arrays = merged(floats, others)
    (symbol,) = jax.export.symbolic_shape("b")
    dims = {n: op.parameters[n].dims for n in arrays}
    first = batch_of(dims) or {"M"}
    if not any(d and d[0].name in first for d in dims.values()):
        pytest.fail("an operation has a batch, B or *lead, or rows M")

    def symbolic(name, x):
        if is_array(x) and dims[name] and dims[name][0].name in first and x.shape[0] > 1:
            return jax.ShapeDtypeStruct((symbol, *x.shape[1:]), x.dtype)
        return jax.tree.map(lambda y: jax.ShapeDtypeStruct(y.shape, y.dtype), x)

    def run(arrays):
        floats, others = floats_apart(arrays, op.no_gradient)
        return jax.value_and_grad(scalar(op, None, others, rest))(floats)

    exported = jax.export.export(jax.jit(run))({n: symbolic(n, x) for n, x in arrays.items()})
    close(exported.call(arrays), plain(op, None)(floats), 1e-6)
    for backend in op.backends.values():
        if not backend.symbolic and "float32" in backend.dtypes:
            with pytest.raises(Unsupported, match=r"needs the size of .* at compile time"):
                jax.export.export(jax.jit(lambda a: op(**a, **rest, platform=backend.name)))(  # noqa: B023
                    {n: symbolic(n, x) for n, x in arrays.items()}
                )


@each_kind
def test_inside_a_shard_map_of_the_callers_own(op, backend):
    """With JAX's own defaults: what varies over the mesh is tracked. The batch lies on two devices, the rest on both; where
    there is no batch both have all, typed as if it were their own, and half of the result."""
    floats, others, rest = parts(op)
    dims = {n: op.parameters[n].dims for n in others}
    rows = {n: x.shape[0] for n, x in merged(floats, others).items() if is_array(x) and x.ndim}
    first = {n for n, d in dims.items() if d and d[0].name in FIRST and rows.get(n, 1) > 1}
    alone = not batch_of({n: op.parameters[n].dims for n in merged(floats, others)})
    assert alone or (first and all(rows[n] % 2 == 0 for n in first)), (
        "the first case of an operation must have an even batch"
    )
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])

    def spec(name, x):
        return P("x") if name in first else jax.tree.map(lambda _: P(), x)

    specs = ({n: spec(n, x) for n, x in floats.items()}, {n: spec(n, x) for n, x in others.items()})

    def local(floats, others):
        if alone:
            floats = jax.tree.map(lambda x: jax.lax.pcast(x, "x", to="varying"), floats)
        if op.sum_dims & {*FIRST}:  # a device has a part of every output
            return scalar(op, backend.name, others, rest, lambda y: jax.lax.psum(y, "x"))(floats)
        return jax.lax.psum(scalar(op, backend.name, others, rest)(floats), "x") / (2 if alone else 1)

    mapped = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P())
    run = jax.jit(jax.value_and_grad(lambda f, o: mapped(f, o)))
    with on_this_machine(backend):
        got = run(floats, others)
    close(got, plain(op, "xla")(floats))


@pytest.mark.parametrize("op", of_each_kind(OPS))
def test_threads_may_call_it_at_once(op):
    floats, others, rest = parts(op)
    want, results = call(op, None, floats, others, rest), [None] * 4

    def work(i):
        results[i] = call(op, None, floats, others, rest)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    [t.start() for t in threads], [t.join() for t in threads]
    for got in results:
        close(got, want, 1e-9)


def test_a_backward_keeps_nothing_of_its_trace():
    """As `jax.checking_leaks` sees it: a program's branches had the arrays in them that it was traced with."""
    op, x, rows = OPS["rms_norm"], jnp.ones((3, 7)), jnp.ones(3)
    with jax.checking_leaks():
        gradients = jax.jit(lambda x: op.backward({"d_out": x, "rstd": rows, "d_rstd": rows}, x=x))(x)
    assert gradients["x"].shape == x.shape


def test_a_second_call_of_the_same_kind_is_not_traced_again(monkeypatch):
    x = jnp.ones((3, 8))
    kernels.rms_norm(x)
    op = OPS["rms_norm"]
    monkeypatch.setattr(op, "plan", None)  # a call of another kind would need it
    kernels.rms_norm(x + 1)
    with pytest.raises(TypeError):
        kernels.rms_norm(jnp.ones((4, 8)))


@pytest.mark.parametrize(
    "op", [pytest.param(op, id=name, marks=[pytest.mark.slow] * (name in BUILT_ON_ANOTHER)) for name, op in OPS.items()]
)
def test_float32_stays_float32_where_64_bits_are_enabled(op):
    """As a program that says no dtype for a constant or a state would not: it is lowered, and has no float64 output."""
    floats, others, rest = parts(op)
    run = scalar(op, "xla", others, rest)
    with jax.enable_x64(True):
        lowered = jax.jit(jax.grad(run) if differentiable(op) else run).lower(floats)
        outputs = jax.eval_shape(lambda f: op(**merged(f, others), **rest, platform="xla"), floats)
    assert "func.func public @main" in lowered.as_text()
    assert jnp.float64 not in {y.dtype for y in jax.tree.leaves(outputs)}


@pytest.mark.parametrize(("platform", "given"), [("xla", ("bias", "mask_info")), ("pallas", ())])
def test_attention_where_64_bits_are_enabled(platform, given):
    """Integers that count are of 32 bits there too: places in a bias and a dense mask, and the index maps of Pallas."""
    x = jnp.ones((1, 16, 2, 8))
    options = {
        "bias": jnp.ones((1, 1, 16, 16)),
        "mask_info": kernels.MaskInfo(attention_mask=jnp.ones((1, 1, 16, 16), bool)),
    }
    options = {name: options[name] for name in given}
    loss = jax.jit(jax.grad(lambda x: jnp.sum(kernels.flash_attention(x, x, x, platform=platform, **options))))
    with jax.enable_x64(True), interpret():
        assert "func.func public @main" in loss.lower(x).as_text()
