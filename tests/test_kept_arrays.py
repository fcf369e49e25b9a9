"""What a backend's forward keeps for its own backward, beside what the contract says: `Op.register(keeps=...)`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Float

import kernels
from kernels.framework import target
from kernels.framework.contract import Op
from kernels.framework.interpret import interpret
from kernels.toolchains.simulate.compile_for import compile_for

OPS = kernels.operations()


def squaring(x: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """Returns the squares."""
    return x * x


def make(seen, most=8, platforms=("cpu",)):
    """Returns squares, which one backend computes with what its forward kept, and another, "plain", without."""
    op = Op(squaring, local_dims={"B"}, ordered=False, priority=("keeper", "plain"))

    def keeping(x):
        seen.append("kept")
        return x * x, {"twice": 2 * x}

    def backward(saved, x):
        seen.append(sorted(saved))
        return {"x": saved.d_out * saved.get("twice", 2 * x)}

    op.register(
        lambda x: x * x, backward, forward_with_residuals=keeping, name="keeper", platforms=platforms, dtypes={"float32"},
        keeps=lambda call, cfg: {"twice": jax.ShapeDtypeStruct(call.x.shape, call.x.dtype)},
        rejects=lambda call: "too many rows" if call.dims["B"] > most else None,
    )  # fmt: skip
    op.register(squaring, backward, name="plain", platforms={"cpu", "cuda"}, dtypes={"float32"})
    return op


X = jnp.arange(6.0).reshape(2, 3)


def gradient(op, x, **how):
    return jax.grad(lambda x: jnp.sum(op(x, **how) * 3))(x)


def test_a_backward_gets_what_the_forward_of_the_same_backend_kept():
    seen = []
    op = make(seen)
    np.testing.assert_allclose(op(X, platform="keeper"), X * X)
    assert not seen  # nothing is kept where nothing is differentiated
    np.testing.assert_allclose(gradient(op, X, platform="keeper"), 6 * X)
    assert {*map(str, seen)} == {"kept", "['d_out', 'twice']"}
    hessian = jax.grad(lambda x: jnp.sum(gradient(op, x, platform="keeper") ** 2))(X)
    np.testing.assert_allclose(hessian, 72 * X)


def test_a_backward_does_without_what_another_forward_did_not_keep():
    """The caller's residuals; and a program in which another platform's backend keeps arrays."""
    seen = []
    op = make(seen)
    d = op.backward({"d_out": jnp.full((2, 3), 3.0)}, X, platform="keeper")
    np.testing.assert_allclose(d["x"], 6 * X)
    assert seen == [["d_out"]]
    op = make(seen := [], platforms=("tpu",))
    assert list(op.plan(op.bind(X), None, None, differentiated=True).kept) == ["twice"]
    np.testing.assert_allclose(gradient(op, X), 6 * X)
    assert seen == [["d_out"]] and len(jax.tree.leaves(jax.vjp(op, X)[1])) == 2  # zeros, which no backward reads


def test_what_is_kept_has_a_name_for_remat():
    op = make([])
    policy = jax.checkpoint_policies.save_only_these_names("squaring.twice")
    saved, free = (
        str(jax.make_jaxpr(lambda x, p=p: gradient(jax.checkpoint(lambda x: op(x, platform="keeper"), policy=p), x))(X))
        for p in (policy, None)
    )
    assert saved.count("ejdist_call") == 2 < free.count("ejdist_call") == 3


@pytest.mark.parametrize("most", [8, 2])
def test_rows_of_vmap_are_one_call_where_the_backend_takes_them_all(most):
    x = jnp.stack([X + i for i in range(4)])
    op = make(seen := [], most)
    np.testing.assert_allclose(jax.vmap(lambda x: gradient(op, x))(x), 6 * x)
    assert seen.count("kept") == 1
    text = str(jax.make_jaxpr(jax.vmap(lambda x: jax.vjp(op, x)[0]))(x))
    assert ("scan[" in text) == (most < 8)


def test_arrays_of_another_shape_and_facts_that_contradict_are_refused():
    op, facts = make([]), {"name": "wrong", "platforms": {"cpu"}, "dtypes": {"float32"}}
    keeps = {"keeps": lambda call, cfg: {"twice": jax.ShapeDtypeStruct((2,), jnp.float32)}}
    with pytest.raises(
        TypeError, match=r"requires a backward, and `extra_residuals` .* or `keeps`; here it is missing"
    ):
        op.register(squaring, lambda saved, x: {"x": x}, **keeps, **facts)
    op.register(
        squaring, lambda saved, x: {"x": x}, forward_with_residuals=lambda x: (x, {"twice": x}), **keeps, **facts
    )
    with pytest.raises(
        TypeError, match=r"squaring on wrong: residual 'twice' is float32\[2, 3\], expected float32\[2\]"
    ):
        gradient(op, X, platform="wrong")
    fixed = Op(squaring, local_dims={"B"}, ordered=False, extra_residuals=lambda x: {"twice": 2 * x})
    with pytest.raises(TypeError, match="`keeps` is for contracts without `extra_residuals`"):
        fixed.register(squaring, lambda saved, x: {"x": x}, forward_with_residuals=squaring, **keeps, **facts)


def test_programs_for_gpus_keep_nothing_for_tpus(monkeypatch):
    op = make([], platforms=("tpu",))

    def kept():
        return [*op.plan(op.bind(X), None, None, differentiated=True).kept]

    with compile_for(90):
        assert kept() == []
    for backend, names in (("gpu", []), ("tpu", ["twice"])):
        monkeypatch.setattr(target.jax, "default_backend", lambda backend=backend: backend)
        assert kept() == names


CALLS = {
    "linear_attention": {"query": (2, 128), "key": (2, 128), "value": (2, 128), "g": (2,)},
    "state_space_v2": {"x": (2, 64), "dt": (2,), "A": None, "B": (1, 128), "C": (1, 128)},
    "delta_rule": {"query": (2, 128), "key": (2, 128), "value": (2, 128), "beta": (2,), "g": (2, 1)},
    "channels": {"query": (2, 128), "key": (2, 128), "value": (2, 128), "gk": (2, 128)},
    "rwkv7": dict.fromkeys("rwkvab", (4, 64)),
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n == "rwkv7")) for n in CALLS])
def test_recurrences_on_tpus_walk_once_each_way(name):
    """States, and inverses of delta rules, are those of the forward: two kernels in a program of both directions."""
    walks_once(OPS["linear_attention" if name == "channels" else name], CALLS[name])


def test_an_odd_number_of_heads_in_bfloat16_keeps_float32():
    walks_once(OPS["delta_rule"], {n: (3, *x[1:]) for n, x in CALLS["delta_rule"].items()})


def walks_once(op, sizes):
    """Asserts that a program of both directions has two kernels, given the dims after tokens of each argument."""
    shapes = {n: (2,) if x is None else (1, 256, *x) for n, x in sizes.items()}
    arrays = {n: jax.ShapeDtypeStruct(x, jnp.bfloat16) for n, x in shapes.items()}
    step = jax.jit(jax.grad(lambda x: jnp.sum(op(**x, platform="pallas")[0].astype(jnp.float32))))
    text = step.trace(arrays).lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("@tpu_custom_call(") == 2


@pytest.mark.parametrize(
    "name", [n if n == "linear_attention" else pytest.param(n, marks=pytest.mark.slow) for n in CALLS]
)
@pytest.mark.slow
def test_states_are_computed_again_where_they_were_not_kept(name):
    op, rng = OPS["linear_attention" if name == "channels" else name], np.random.default_rng(0)
    sizes = {n: (1, 140, *(min(d, 8) for d in x)) for n, x in CALLS[name].items() if x is not None}
    arrays = {n: jnp.asarray(rng.standard_normal(size), jnp.float32) / 3 for n, size in sizes.items()}
    arrays |= {n: -jnp.abs(arrays[n]) for n in ("g", "gk", "w") if n in arrays} | {
        n: jnp.abs(arrays[n]) for n in ("dt",) if n in arrays
    }
    arrays |= {"A": jnp.full(2, -0.5)} if "A" in CALLS[name] else {}
    with interpret():
        outputs, pull = jax.vjp(lambda x: op(**x, platform="pallas"), arrays)
        d = jax.tree.map(jnp.cos, outputs)
        again = op.backward({f"d_{n}": x for n, x in zip(op.outputs, d, strict=True)}, **arrays, platform="pallas")
        wanted = pull(d)[0]
    assert sum(float(jnp.sum(jnp.abs(x))) for x in wanted.values()) > 0
    for n in wanted:
        np.testing.assert_array_equal(again[n], wanted[n])
