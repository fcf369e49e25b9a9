"""The contract machinery on a small operation made for the purpose."""

import inspect
import subprocess
import sys
import threading
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jaxtyping import Array, Float
from toy import SEEN, make_op

from kernels.framework.binding import typed
from kernels.framework.config import ConfigCache, FwdParams
from kernels.framework.contract import Op, Unsupported
from kernels.framework.executor import Executor, create_default_executor, module_class
from kernels.framework.interpret import interpret
from kernels.framework.public import Prepared, PublicFunction
from kernels.framework.registry import DeviceKind as Backend
from kernels.framework.registry import KernelRegistry, Platform
from kernels.framework.select import ConfigSelectorChain


@pytest.fixture
def op():
    SEEN.clear()
    return make_op()


def test_value_and_gradient_reach_every_float_argument(op):
    a = op.case_inputs(op.cases[0])
    out, total = op(**a)
    np.testing.assert_allclose(out, a["x"] ** 2 * a["weight"], rtol=1e-6)

    def scalar(f):
        return lambda x, w: sum(jnp.sum(jnp.cos(y)) for y in f(x, w))

    got = jax.grad(scalar(op), (0, 1))(a["x"], a["weight"])
    want = jax.grad(scalar(op.function), (0, 1))(a["x"], a["weight"])
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-5), got, want)


def test_integers_are_traced_and_have_no_gradient(op):
    traced = jax.make_jaxpr(lambda x, s: op(x, shift=s)[0])(jnp.ones((2, 5)), jnp.arange(5))
    assert len(traced.jaxpr.invars) == 2
    grad = jax.jit(jax.grad(lambda x, s: jnp.sum(op(x, shift=s)[0])))(jnp.ones((2, 5)), jnp.arange(5))
    np.testing.assert_allclose(grad, 2 * np.ones((2, 5)))
    # A Python number given for data is data: two values, one program.
    n = len(SEEN)
    op(jnp.ones((2, 5)), shift=np.asarray([3]))
    op(jnp.ones((2, 5)), shift=np.asarray([4]))
    assert len(SEEN) - n <= 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"x": np.ones((2, 5), np.float32), "weight": np.ones(3, np.float32)}, ["'weight'", "D = 3", "'x'", "5"]),
        (
            {"x": np.ones((2, 5), np.float32), "weight": np.ones(5, np.float16)},
            ["'weight'", "float16", "'x'", "astype"],
        ),
        ({"x": np.ones((2, 5), np.int32)}, ["'x'", "float", "int32"]),
        ({"x": np.ones((2, 5), np.float32), "shift": np.ones(4, np.int32)}, ["'shift'", "D", "5", "(or 1)"]),
        ({"x": np.ones((), np.float32)}, ["'x'", "*lead D"]),
        ({"x": np.ones((2, 5), np.float32), "power": jnp.ones(3)}, ["'power'", "Python value"]),
        ({"x": np.ones((2, 5), np.float32), "width": 3}, ["'width'", "unknown"]),
        ({}, ["'x'", "missing"]),
        ({"x": np.ones((2, 5), np.float32), "platform": "tritn"}, ["'platform'", "tritn", "xla"]),
        ({"x": np.ones((2, 5), np.float32), "cfg": FwdParams()}, ["'cfg'", "KernelConfig", "FwdParams"]),
    ],
)
def test_a_wrong_call_is_a_value_error_that_names_the_argument(op, arguments, words):
    with pytest.raises(ValueError) as error:
        op(**arguments)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_what_no_backend_can_do_is_unsupported_by_name(op):
    x = jnp.ones((2, 5))
    with pytest.raises(Unsupported, match=r"xla: it does not support flip"):
        op(x, flip=True)
    with pytest.raises(Unsupported, match="D must not be 13"):
        op(jnp.ones((2, 13)))
    with pytest.raises(Unsupported, match=r"triton_gpu: dtype bfloat16.*platform='xla' can"):
        op(x.astype(jnp.bfloat16), platform="triton")
    with pytest.raises(Unsupported, match="has no pallas backend"):
        op(x, platform="pallas")
    with pytest.raises(Unsupported, match="it has no backward"):
        jax.grad(lambda x: jnp.sum(op(x, platform="triton")[0]))(x)


def test_a_named_backend_never_falls_back_and_refuses_only_when_lowered(op):
    f = jax.jit(lambda x: op(x, platform="triton")[0])
    f.trace(jnp.ones((2, 5)))  # a program for another device may be traced here
    with pytest.raises(Unsupported, match="cannot be compiled for cpu with platform='triton'"):
        f(jnp.ones((2, 5)))
    text = export.export(f, platforms=["cuda"])(jnp.ones((2, 5))).mlir_module()
    assert "stablehlo.sine" in text


def test_dispatch_follows_the_platform_that_is_lowered_for(op):
    f = jax.jit(lambda x: op(x)[0])
    np.testing.assert_allclose(f(jnp.full((1, 5), 3.0)), 9.0)
    assert "sine" in export.export(f, platforms=["cuda"])(jnp.ones((1, 5))).mlir_module()
    assert "sine" not in export.export(f, platforms=["cpu"])(jnp.ones((1, 5))).mlir_module()
    # Differentiated, the backend without a backward steps aside, because nobody named it.
    g = jax.jit(jax.grad(lambda x: jnp.sum(op(x)[0])))
    assert "sine" not in export.export(g, platforms=["cuda"])(jnp.ones((1, 5))).mlir_module()


def test_interpretation_runs_a_named_backend_here(op):
    with interpret():
        np.testing.assert_allclose(op(jnp.ones((1, 5)), platform="triton")[0], np.sin(np.ones((1, 5))), rtol=1e-6)


def test_public_backward_takes_external_residuals(op):
    a = op.case_inputs(op.cases[0])
    d = jnp.ones_like(a["x"])
    grads = op.backward({"d_out": d, "total": jnp.zeros((2, 3)), "d_total": jnp.zeros((2, 3))}, **a)
    np.testing.assert_allclose(grads["x"], 2 * a["x"] * a["weight"], rtol=1e-6)


def test_residuals_are_named_for_remat(op):
    def f(x):
        return jnp.sum(jnp.sin(op(x)[1]))

    policy = jax.checkpoint_policies.save_only_these_names("toy.total")
    kept = jax.make_jaxpr(jax.grad(jax.checkpoint(f, policy=policy)))(jnp.ones((2, 5)))
    free = jax.make_jaxpr(jax.grad(jax.checkpoint(f)))(jnp.ones((2, 5)))
    assert 0 < str(kept).count("ejdist_call") < str(free).count("ejdist_call")


def test_a_backend_that_does_not_fit_the_contract_is_refused_when_it_registers(op):
    facts = {"name": "other", "platforms": {"cpu"}, "dtypes": {"float32"}}
    with pytest.raises(TypeError, match="the contract has no colour"):
        op.register(lambda x, colour: None, **facts)
    with pytest.raises(TypeError, match="it lacks x"):
        op.register(lambda weight: None, **facts)
    with pytest.raises(TypeError, match="must name the parameters"):
        op.register(lambda x, **rest: None, **facts)
    with pytest.raises(TypeError, match="must take saved, and then"):
        op.register(lambda x: None, lambda x: None, **facts)
    with pytest.raises(TypeError, match="unknown features"):
        op.register(lambda x: None, **facts, features={"colour"})
    with pytest.raises(TypeError, match="unknown platforms"):
        op.register(lambda x: None, **{**facts, "platforms": {"gpu"}})


def summing_op():
    """A sum of squares, whose forward may make the gradient."""

    def kept(x: jax.Array) -> dict[str, jax.Array]:
        return {"gradient": 2 * x}

    def summing(x: Float[Array, "*lead D"]) -> Float[Array, ""]:
        return jnp.sum(x * x)

    return Op(summing, sum_dims={"lead"}, extra_residuals=kept)


def test_what_a_forward_keeps_is_made_where_it_is_differentiated_alone():
    op, facts = summing_op(), {"name": "xla", "platforms": {"cpu"}, "dtypes": {"float32"}}
    made = []

    def keeping(x):
        made.append(x.shape)
        return jnp.sum(x * x), {"gradient": 2 * x}

    def backward(saved, x):
        return {"x": saved.d_out * saved.gradient}

    with pytest.raises(TypeError, match=r"`forward_with_residuals` requires a backward, .* it is missing"):
        op.register(op.function, backward, **facts)
    with pytest.raises(TypeError, match="must have the same parameters as summing"):
        op.register(op.function, backward, forward_with_residuals=lambda y: None, **facts)
    op.register(op.function, backward, forward_with_residuals=keeping, **facts)
    x = jnp.arange(6.0).reshape(2, 3)
    assert op(x) == 55 and not made
    np.testing.assert_allclose(jax.grad(lambda x: 3 * op(x))(x), 6 * x)
    assert set(made) == {(2, 3)}
    np.testing.assert_allclose(jax.vmap(op)(x), jnp.sum(x * x, 1))  # a sum over rows is not one over the batch
    np.testing.assert_allclose(jax.vmap(jax.grad(op))(x), 2 * x)
    policy = jax.checkpoint_policies.save_only_these_names("summing.gradient")
    saved, free = (jax.make_jaxpr(jax.grad(jax.checkpoint(op, policy=p)))(x) for p in (policy, None))
    assert 0 < str(saved).count("ejdist_call") < str(free).count("ejdist_call")
    op.register(op.function, backward, forward_with_residuals=lambda x: (jnp.sum(x), {"other": x}), **facts)
    with pytest.raises(TypeError, match=r"residuals \['other'\], expected \['gradient'\]"):
        jax.grad(op)(x)
    with pytest.raises(TypeError, match="must have the parameters of the contract"):
        Op(op.function, extra_residuals=lambda y: {})


def test_an_option_that_only_the_forward_names_is_refused_where_there_is_a_gradient(op):
    op.register(lambda x, flip: op.function(x, flip=flip), lambda saved, x: {"x": x}, name="flips",
                platforms={"cpu"}, dtypes={"float32"})  # fmt: skip
    x = jnp.ones((1, 5))
    np.testing.assert_allclose(op(x, flip=True, platform="flips")[0], -1)
    with pytest.raises(Unsupported, match="flips: it does not support flip"):
        jax.grad(lambda x: jnp.sum(op(x, flip=True, platform="flips")[0]))(x)


# -- executor ---------------------------------------------------------------------------------------------------------


def test_executor_runs_functions_and_modules(op):
    def toy(x, weight=None, *, power=2.0, cfg=None):
        """Returns the toy."""
        return op(x, weight, power=power, cfg=cfg)[0]

    Toy = module_class("Toy", toy)
    x = jnp.full((1, 5), 2.0)
    executor = Executor(ConfigSelectorChain(cache=ConfigCache(), autotune=False))
    np.testing.assert_allclose(executor(Toy(), x=x), 4.0)
    np.testing.assert_allclose(executor(Toy(power=3.0), x), 8.0)
    assert Toy.__name__ == "Toy" and "Returns the toy" in Toy.__doc__ and repr(Toy(power=3.0)) == "Toy(power=3.0)"
    assert create_default_executor().chain.persistent is not None
    with pytest.raises(ValueError, match="chain"):
        Executor(None)


# -- registry ---------------------------------------------------------------------------------------------------------


def test_registry_as_the_documentation_shows_it():
    kernel_registry = KernelRegistry()

    @kernel_registry.register("my_kernel", Platform.TRITON, Backend.GPU, priority=100)
    def my_kernel_triton(x, y):
        return "triton"

    @kernel_registry.register("my_kernel", Platform.XLA, Backend.ANY, priority=50)
    def my_kernel_xla(x, y):
        return "xla"

    assert kernel_registry.get("my_kernel") is my_kernel_xla, "must not be the kernel of an absent device"
    assert kernel_registry.get("my_kernel", platform=Platform.TRITON) is my_kernel_triton
    assert kernel_registry.get(algorithm="my_kernel", platform="triton", backend=Backend.GPU) is my_kernel_triton
    with pytest.raises(Unsupported, match=r"my_kernel has no implementation for pallas; it has triton/gpu, xla/any"):
        kernel_registry.get("my_kernel", Platform.PALLAS)
    with pytest.raises(ValueError, match="unknown algorithm 'nothing'; there are my_kernel"):
        kernel_registry.get("nothing")
    with pytest.raises(ValueError, match="registered already"):
        kernel_registry.register("my_kernel", Platform.XLA, Backend.ANY, priority=50)(my_kernel_xla)


def test_registry_holds_the_backends_of_an_op(op):
    toy = PublicFunction((op,), lambda x: Prepared(op.bind(x)), inspect.signature(lambda x: x), "Toy")
    registry = KernelRegistry(lambda: {"toy": toy})
    assert [(i.platform, i.backend) for i in registry.list("toy")] == [("triton", "gpu"), ("xla", "any")]
    np.testing.assert_allclose(registry.get("toy")(jnp.full((1, 5), 3.0)), 9.0)
    assert registry.algorithms() == ["toy"]


def run_python(code):
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


@pytest.mark.slow
def test_a_backend_file_may_be_imported_by_hand():
    run_python(
        "import kernels.ops.mean_pooling.xla as module\n"
        "from kernels.ops.mean_pooling import op\n"
        "assert op.backends['xla'].backward is module.backward"
    )


def test_eight_first_calls_at_once_load_the_backends_once_and_all_succeed():
    run_python(
        "import threading, jax.numpy as jnp, kernels\n"
        "failed, start = [], threading.Barrier(8)\n"
        "def first():\n"
        "    try:\n"
        "        start.wait(); kernels.rms_norm(jnp.ones((2, 8)))\n"
        "    except BaseException as error: failed.append(repr(error))\n"
        "threads = [threading.Thread(target=first) for _ in range(8)]\n"
        "[t.start() for t in threads]; [t.join() for t in threads]\n"
        "assert not failed, failed"
    )


def test_a_backend_whose_import_fails_says_so_every_time(op, monkeypatch):
    from kernels.framework import contract

    def broken(name):
        raise AttributeError("no such symbol")

    fresh = make_op()
    monkeypatch.setattr(fresh, "package", "kernels.ops.rms_norm")
    monkeypatch.setattr(contract.importlib, "import_module", broken)
    for _ in range(3):
        with pytest.raises(ImportError, match=r"toy: the backend triton_gpu cannot be imported .*no such symbol"):
            fresh(jnp.ones((2, 5)))


def test_kernels_that_are_missing_on_a_gpu_are_named_once(op, monkeypatch):
    """Dispatch takes XLA where Triton cannot be imported, many times slower: a process says so, on a GPU and there only."""
    from kernels.framework import contract, dispatch

    def without(error):
        """Returns a fresh operation whose Triton backend fails to be imported so."""

        def load(name):
            raise error

        fresh = make_op()
        fresh._backends.pop("triton_gpu")
        monkeypatch.setattr(fresh, "package", "kernels.ops.rms_norm")
        monkeypatch.setattr(fresh, "priority", ("triton_gpu",))
        monkeypatch.setattr(contract.importlib, "import_module", load)
        return fresh

    def warned(operation, device="NVIDIA H200", lowered_for="cuda", **how):
        """Returns the warnings of a program that is lowered twice, with its gradient, in a process of its own."""
        monkeypatch.setattr(dispatch, "device_kind", lambda platform: device)
        monkeypatch.setattr(dispatch, "_silent", threading.Lock())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                loss = jax.jit(jax.grad(lambda x: operation(x, jnp.ones(5), **how)[0].sum()))
                loss.trace(jnp.ones((2, 5))).lower(lowering_platforms=(lowered_for,))
        return [str(w.message) for w in caught if w.category is RuntimeWarning]

    absent = without(ModuleNotFoundError("no", name="jax_triton"))
    (said,) = warned(absent)
    assert said.startswith("toy: jax_triton is not installed: pip install 'ejdist[cuda]'. Without it")
    (said,) = warned(without(ModuleNotFoundError("no", name="triton.experimental.gluon")))
    assert said.startswith(
        "toy: the installed version of triton has no triton.experimental.gluon: pip install 'ejdist[cuda]'"
    )
    # Not without a GPU, not for a CPU, not where XLA was asked for, not where nothing is missing.
    assert not warned(absent, device=None) and not warned(absent, lowered_for="cpu")
    assert not warned(absent, platform="xla") and not warned(op)


# -- what is differentiable -------------------------------------------------------------------------------------------


def recurrent_op(no_gradient=("scale",)):
    """A cell whose weights are a dict, one of them of integers, and whose scale has no gradient."""

    def cell(
        x: Float[Array, "B D"], weights: dict[str, Array], scale: Float[Array, ""] | None = None
    ) -> Float[Array, "B D"]:
        y = jnp.tanh(x @ weights["w"] + weights["b"])[:, weights["order"]]
        return y if scale is None else y * scale

    op = Op(cell, local_dims={"B"}, no_gradient=no_gradient)

    def backward(saved, x, weights, scale):
        floats = {n: w for n, w in weights.items() if n != "order"}
        dx, dw = jax.vjp(lambda x, w: cell(x, {**w, "order": weights["order"]}, scale), x, floats)[1](saved.d_out)
        return {"x": dx, "weights": {**dw, "order": None}}

    op.register(cell, backward, name="xla", platforms={"cpu"}, dtypes={"float32"})
    return op


def test_a_pytree_has_gradients_by_leaf_and_what_is_declared_has_none():
    op = recurrent_op()
    x, w = jnp.ones((2, 3)), {"w": jnp.eye(3), "b": jnp.arange(3.0), "order": jnp.array([2, 0, 1])}

    def loss(function, x, floats, scale):
        return jnp.sum(jnp.sin(function(x, {**floats, "order": w["order"]}, scale)))

    floats = {n: w[n] for n in ("w", "b")}
    for got, want in zip(*(jax.grad(loss, (1, 2))(f, x, floats, 2.0) for f in (op, op.function))):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), got, want)
    assert jax.grad(loss, 3)(op, x, floats, jnp.float32(2.0)) == 0.0


def test_a_float_that_is_not_differentiated_and_not_declared_so_is_named():
    op = recurrent_op(no_gradient=())
    with pytest.raises(TypeError, match=r"gradients of weights, x, but .* are scale, weights, x; .*no_gradient"):
        jax.grad(lambda x: jnp.sum(op(x, {"w": jnp.eye(3), "b": x[0], "order": jnp.arange(3)}, jnp.float32(1))))(
            jnp.ones((2, 3))
        )


def test_options_that_python_holds_equal_are_not_one_program(op):
    x = jnp.full((1, 5), 3.0)
    assert len({op.bind(x, power=power).program_key() for power in (1, 1.0, 0.0, -0.0)}) == 4
    assert len({typed(value) for value in (1, 1.0, True, 0.0, -0.0, (1,), (1.0,), (True,))}) == 8


def test_facts_of_an_operation_are_checked_when_it_is_declared():
    def toy(x: Float[Array, "B Q"]) -> Float[Array, "B Q"]:
        return x

    with pytest.raises(TypeError, match="dims Q are not in the vocabulary"):
        Op(toy)

    def known(x: Float[Array, "B D"]) -> Float[Array, "B D"]:
        return x

    with pytest.raises(TypeError, match="local_dims names T; there are B, D"):
        Op(known, local_dims={"T"})
    with pytest.raises(TypeError, match="no_gradient"):
        Op(known, no_gradient=("scale",))
    with pytest.raises(TypeError, match="return annotation"):
        Op(known, outputs=("out", "lse"))


def test_what_was_accepted_once_is_accepted_for_its_own_type(op):
    """Checked values are remembered with their types: 1 is a float, True is none, and Python holds them equal."""
    x = jnp.ones((2, 3))
    op.bind(x, power=1)
    with pytest.raises(ValueError, match="'power' must be float, got True"):
        op.bind(x, power=True)
    op.bind(x, flip=True)
    with pytest.raises(ValueError, match="'flip' must be bool, got 1"):
        op.bind(x, flip=1)
