"""Calls of the router and of the layer of experts: transformations, what is refused, the examples."""

import contextlib
import doctest
import functools
import io
import re
import runpy
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from experts_loop import DEEPSEEK, IDS, SHARED, B, D, E, F, Fs, T, chosen, inputs

import ejdist
import kernels
from ejdist import make_mesh, moe, route
from ejdist.experts import balance_loss, sequence_balance_loss, update_bias, z_loss
from ejdist.operations import bind_ops

ARRAYS = chosen(inputs())


def run(arrays, **more):
    """Returns the result, the statistics, and all gradients, of the DeepSeek layer."""

    def total(arrays):
        out, stats = moe(**arrays, top_k=3, **DEEPSEEK, **more)
        return jnp.sin(out).sum() + 0.1 * stats.balance_loss + 0.01 * stats.z_loss, (out, stats)

    gradients, results = jax.grad(total, has_aux=True)(arrays)
    return results, gradients


def close(got, wanted, tolerance=2e-4):
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=tolerance, atol=tolerance), got, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("weights", [True, False])
def test_vmap(weights):
    """Of tokens alone, and of weights too."""
    two = {n: np.stack([a, 1.5 * a]) if weights or n == "x" else a for n, a in ARRAYS.items()}
    axes = {n: 0 if weights or n == "x" else None for n in two}
    got = jax.jit(jax.vmap(run, (axes,)))(two)
    one = jax.jit(run)
    wanted = [one({n: a[i] if axes[n] == 0 else a for n, a in two.items()}) for i in range(2)]
    close(got, jax.tree.map(lambda *a: np.stack(a), *wanted))


@pytest.mark.slow
def test_second_derivatives():
    """Of every array, in one direction, against differences of the gradient; those are good to a thousandth in float32."""
    rng, step = np.random.default_rng(0), 2e-4
    direction = {n: rng.standard_normal(a.shape).astype(np.float32) for n, a in ARRAYS.items()}
    gradient = jax.jit(lambda arrays: run(arrays)[1])

    def slope(arrays):
        return sum(jnp.vdot(d, direction[n]) for n, d in gradient(arrays).items())

    got = jax.jit(jax.grad(slope))(ARRAYS)
    ends = [gradient({n: a + s * direction[n] for n, a in ARRAYS.items()}) for s in (step, -step)]
    for n, (up, down) in {n: (ends[0][n], ends[1][n]) for n in ARRAYS}.items():
        wanted = (up - down) / (2 * step)
        assert np.linalg.norm(got[n] - wanted) < 2e-3 * np.linalg.norm(wanted), n


@pytest.mark.slow
def test_export_for_every_platform():
    arguments = ARRAYS, jnp.asarray(IDS)
    function = jax.jit(lambda a, ids: run(a, segment_ids=ids))
    with kernels.compile_for(90) as checks:
        exported = jax.export.export(function, platforms=("cpu", "cuda", "tpu"), disabled_checks=checks)(*arguments)
    assert "triton_kernel_call" in exported.mlir_module() and "tpu_custom_call" in exported.mlir_module()
    kept = exported.serialize()
    close(jax.export.deserialize(kept).call(*arguments), function(*arguments), 1e-5)


def test_export_for_any_size():
    b, t = jax.export.symbolic_shape("b, t")
    function = jax.jit(lambda a, ids: moe(**a, segment_ids=ids, top_k=3, **DEEPSEEK))
    shapes = {n: jax.ShapeDtypeStruct((b, t, D) if n == "x" else a.shape, a.dtype) for n, a in ARRAYS.items()}
    exported = jax.export.export(function)(shapes, jax.ShapeDtypeStruct((b, t), jnp.int32))
    arguments = ARRAYS, jnp.asarray(IDS, jnp.int32)
    close(exported.call(*arguments), function(*arguments), 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_gradients_of_narrow_dtypes(dtype):
    """About as far from those of the same numbers in float32 as one rounding of each step leads."""
    arrays = {n: jnp.asarray(a, dtype) for n, a in chosen(inputs(), *SHARED).items()}
    function = jax.jit(run)
    got, wanted = function(arrays), function({n: a.astype(jnp.float32) for n, a in arrays.items()})
    assert got[0][0].dtype == dtype and all(d.dtype == dtype for d in got[1].values())
    np.testing.assert_array_equal(got[0][1].counts, wanted[0][1].counts)
    for n, d in got[1].items():
        error = np.linalg.norm(d.astype(np.float32) - wanted[1][n]) / np.linalg.norm(wanted[1][n])
        assert error < 128 * jnp.finfo(dtype).eps, (n, error)


@pytest.mark.slow
def test_layers_under_scan_and_remat():
    weights = {n: a for n, a in ARRAYS.items() if n != "x"}

    def layer(x, key):
        out, stats = moe(x, **weights, top_k=2, jitter=0.1, key=key)
        return x + out, stats

    def total(x, step):
        return jnp.sin(jax.lax.scan(step, x, jax.random.split(jax.random.key(0), 3))[0]).sum()

    got, wanted = (
        jax.jit(jax.grad(functools.partial(total, step=s)))(ARRAYS["x"]) for s in (jax.checkpoint(layer), layer)
    )
    close(got, wanted, 1e-5)


@pytest.mark.slow
def test_rows_and_sequence_split_over_devices():
    """Arrays are global under jit: the same numbers, each token and each loss counted once."""
    mesh = ejdist.make_mesh(fsdp=2, sp=2, devices=jax.devices()[:4])
    arrays = chosen(inputs())
    ids = np.where(np.arange(6) < 4, [[0], [1]], -1)
    arrays["x"] = arrays["x"][:, :6]
    static = {"top_k": 2, "balance": "sequence"}

    @jax.jit
    def both(arrays, ids):
        def total(arrays):
            out, stats = moe(**arrays, segment_ids=ids, **static)
            return out.sum() + 0.3 * stats.balance_loss + 0.2 * stats.z_loss, stats

        return jax.value_and_grad(total, has_aux=True)(arrays)

    wanted = both(arrays, ids)
    where = ejdist.layout.sharding(mesh, ("B", "T"), ejdist.layout.ACTIVATIONS)
    spread = {**jax.device_put(arrays, ejdist.layout.sharding(mesh, (), ejdist.layout.ACTIVATIONS))}
    spread["x"] = jax.device_put(arrays["x"], where)
    got = both(spread, jax.device_put(ids, where))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), got, wanted)


def test_a_router_on_a_mesh_gathers_no_token():
    """Nor do its losses and gradients: what devices send each other are sums over tokens."""
    mesh = ejdist.make_mesh(fsdp=2, sp=2, devices=jax.devices()[:4])
    arrays, ids = inputs(), np.zeros((2, 6), np.int32)

    def total(x, router, ids):
        options = {"num_groups": 4, "topk_groups": 2, "segment_ids": ids, "score": "sigmoid"}
        _, weights, stats = route(x, router, top_k=2, **options)
        return weights.sum() + stats.balance_loss + stats.z_loss, stats

    where = ejdist.layout.sharding(mesh, ("B", "T"), ejdist.layout.ACTIVATIONS)
    x, ids = (jax.device_put(a, where) for a in (arrays["x"][:, :6], ids))
    router = jax.device_put(arrays["router"], ejdist.layout.sharding(mesh, (), ejdist.layout.ACTIVATIONS))
    program = jax.jit(jax.grad(total, (0, 1), has_aux=True)).lower(x, router, ids).compile().as_text()
    assert "all-reduce" in program
    for name in ("all-gather", "all-to-all", "collective-permute"):
        assert f" {name}(" not in program, name


@pytest.mark.slow
def test_memory_is_that_of_the_rows():
    """However many experts there are: nothing is tokens by experts by width."""

    def size(tokens, experts):
        shapes = {"x": (1, tokens, 64), "router": (64, experts), "gate": (experts, 64, 32), "up": (experts, 64, 32)}
        shapes["down"] = (experts, 32, 64)
        arrays = {n: jax.ShapeDtypeStruct(s, jnp.float32) for n, s in shapes.items()}
        compiled = jax.jit(functools.partial(moe, top_k=2)).lower(**arrays).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    small, long, many = size(512, 4), size(2048, 4), size(2048, 32)
    assert long < 4.5 * small and many < long + 2048 * 32 * 4 * 8


ILLEGAL = {
    "top_k of more experts than there are": ({"top_k": 9}, "top_k"),
    "top_k of none": ({"top_k": 0}, "top_k"),
    "top_k that is no integer": ({"top_k": 2.0}, "top_k"),
    "top_k past the groups": ({"top_k": 5, "num_groups": 4, "topk_groups": 2}, "top_k"),
    "groups that do not divide": ({"num_groups": 3, "topk_groups": 1}, "num_groups"),
    "more groups than there are": ({"num_groups": 4, "topk_groups": 5}, "topk_groups"),
    "groups without a limit": ({"num_groups": 4}, "topk_groups"),
    "a limit without groups": ({"topk_groups": 2}, "topk_groups"),
    "best of more than a group has": ({"num_groups": 8, "topk_groups": 2}, "group_top"),
    "a score that is none": ({"score": "tanh"}, "score"),
    "a balance that is none": ({"balance": "rank"}, "balance"),
    "a global batch without its counts": ({"balance": "global"}, "load"),
    "counts of no global batch": ({"load": np.ones(E)}, "load"),
    "jitter without a key": ({"jitter": 0.1}, "key"),
    "a key without jitter": ({"key": jax.random.key(0)}, "key"),
    "jitter that is no number": ({"jitter": float("nan"), "key": jax.random.key(0)}, "jitter"),
    "jitter past 1": ({"jitter": 1.5, "key": jax.random.key(0)}, "jitter"),
    "a factor that is no number": ({"routed_scaling_factor": float("nan")}, "routed_scaling_factor"),
    "a factor of 0": ({"routed_scaling_factor": 0.0}, "routed_scaling_factor"),
    "a key that is a number": ({"jitter": 0.1, "key": 3}, "key"),
    "several keys": ({"jitter": 0.1, "key": jax.random.split(jax.random.key(0))}, "key"),
    "a group's best without groups": ({"group_top": 3}, "group_top"),
    "a bias of integers": ({"bias": np.ones(E, int)}, "bias"),
    "a part of the experts on one device": ({n: ARRAYS[n][:4] for n in ("gate", "up", "down")}, "gate"),
    "an alpha without its activation": ({"alpha": 1.0}, "alpha"),
    "a limit that is no number": ({"activation": "clamped_swiglu", "limit": float("nan")}, "limit"),
    "a limit of 0": ({"activation": "clamped_swiglu", "limit": 0.0}, "limit"),
    "a dispatch that is a function": ({"dispatch": len}, "dispatch"),
    "a buffer of nothing": ({"buffer": 0.0}, "buffer"),
    "no chunks": ({"chunks": 0}, "chunks"),
    "more chunks than are ever compiled": ({"chunks": 100_000}, "chunks"),
    "a capacity below a choice of every token": ({"capacity": 0.4}, "capacity"),
    "an axis of no mesh": ({"axis": "ep"}, "axis"),
    "an axis twice": ({"axis": ("ep", "ep")}, "axis"),
    "a mesh that is none": ({"mesh": "ep"}, "mesh"),
    "specs without a mesh": ({"in_specs": jax.sharding.PartitionSpec("ep")}, "in_specs"),
    "a bias of other experts": ({"bias": np.ones(E + 1, np.float32)}, "bias"),
    "a router of another width": ({"router": np.ones((D + 1, E), np.float32)}, "router"),
    "a router of one dim": ({"router": np.ones(E, np.float32)}, "router"),
    "a router of other experts": ({"router": np.ones((D, E + 1), np.float32)}, "gate"),
    "tokens without rows": ({"x": ARRAYS["x"][0]}, "x"),
    "ids of other tokens": ({"segment_ids": np.zeros((B, T + 1), int)}, "segment_ids"),
    "ids that are no integers": ({"segment_ids": np.zeros((B, T))}, "segment_ids"),
    "down of another width": ({"down": ARRAYS["down"][:, :-1]}, "down"),
    "no down": ({"down": None}, "down"),
    "no up": ({"up": None}, "gate"),
    "an up of another dtype": ({"up": ARRAYS["up"].astype(np.float16)}, "up"),
    "a bias of other features": ({"gate_bias": np.ones((E, F + 1), np.float32)}, "gate_bias"),
    "an activation that is none": ({"activation": "swish"}, "activation"),
    "a limit without a clamp": ({"limit": 1.0}, "limit"),
    "half of a shared expert": ({"shared_gate": np.ones((D, Fs), np.float32)}, "shared_up"),
    "the gate of no shared expert": ({"shared_expert_gate": np.ones((D, 1), np.float32)}, "shared_expert_gate"),
    "a dispatch that is none": ({"dispatch": "ring"}, "dispatch"),
    "a platform that is none": ({"platform": "abacus"}, "platform"),
}


@pytest.mark.parametrize("what", ILLEGAL)
def test_illegal_calls_are_refused_by_name(what):
    change, argument = ILLEGAL[what]
    arrays = {**ARRAYS, "top_k": 2, **change}
    with pytest.raises((ValueError, ejdist.Unsupported), match=rf"moe: .*'?{argument}'?"):
        jax.eval_shape(lambda: moe(**arrays))


def test_losses_refuse_by_name():
    for rate in (float("nan"), -1.0, "0.1"):
        with pytest.raises(ValueError, match="rate"):
            update_bias(jnp.zeros(3), jnp.zeros(3, int), rate)
    with pytest.raises(ValueError, match="rate"):
        update_bias(jnp.zeros(3), jnp.zeros(3, int), jnp.zeros(3))
    for call, argument in {
        lambda: update_bias(jnp.zeros(3), jnp.zeros(4, int), 0.1): "counts",
        lambda: update_bias(jnp.zeros(3), jnp.zeros(3), 0.1): "counts",
        lambda: balance_loss(jnp.zeros(4), jnp.zeros(3)): "counts",
        lambda: sequence_balance_loss(jnp.zeros((2, 3, 1), int), jnp.zeros((2, 4, 5))): "experts",
        lambda: sequence_balance_loss(jnp.zeros((2, 4, 1), int), jnp.zeros((2, 4, 5)), jnp.zeros(4)): "segment_ids",
        lambda: z_loss(jnp.zeros((2, 3, 4)), jnp.ones((3, 2), bool)): "counted",
    }.items():
        with pytest.raises(ValueError, match=f"'{argument}'"):
            call()


def test_a_document_counts_every_choice_in_the_balance_of_a_sequence():
    """Against its formula, document by document: E sum_t sum_e (choices of e in the document of t / all of it) p_te."""
    rng = np.random.default_rng(0)
    experts = np.array([[[0, 1], [0, 2], [0, 1], [3, 2], [3, 0]], [[2, 1], [2, 1], [-1, -1], [2, 3], [0, 1]]])
    ids = np.array([[7, 7, 7, 3, 3], [5, 5, 5, 5, 0]])
    p = rng.dirichlet(np.ones(4), (2, 5))
    wanted = 0.0
    for row in range(2):
        for document in set(ids[row].tolist()):
            own = ids[row] == document
            chosen = experts[row][own]
            share = np.bincount(chosen[chosen >= 0], minlength=4) / (chosen >= 0).sum()
            wanted += 4 * (p[row][own][(chosen >= 0).any(-1)] @ share).sum()
    got = sequence_balance_loss(jnp.asarray(experts), jnp.asarray(p, jnp.float32), jnp.asarray(ids))
    np.testing.assert_allclose(got, wanted, rtol=1e-6)


def test_a_balance_loss_of_more_experts_than_a_dtype_counts():
    experts, probabilities = jnp.array([[[0], [1], [-1]]]), jnp.ones((1, 3, 300)) / 300
    got, want = (
        sequence_balance_loss(e, probabilities, jnp.zeros((1, 3), int)) for e in (experts.astype(jnp.int8), experts)
    )
    np.testing.assert_array_equal(got, want)


def test_an_option_that_is_none_is_no_option():
    with pytest.raises(TypeError, match="scoring"):
        moe(**ARRAYS, top_k=2, scoring="softmax")


@pytest.mark.slow
def test_the_example_trains_and_balances():
    example = Path(__file__).resolve().parent.parent / "examples" / "moe_layer.py"
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        runpy.run_path(str(example), run_name="__main__")
    losses, violations = (
        [float(x) for x in re.findall(pattern, said.getvalue())]
        for pattern in (r"step +\d+ loss ([\d.]+)", r"load_violation ([\d.]+)")
    )
    assert len(losses) == 5 and losses[-1] < 0.8 * losses[0], said.getvalue()
    assert violations[-1] < 0.7 * violations[0], said.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["route", "moe", "update_bias"])
def test_the_example_of_a_function_runs(name):
    function = getattr(ejdist.experts, name)
    example = doctest.DocTestParser().get_doctest(function.__doc__, {name: function}, name, None, None)
    assert example.examples and doctest.DocTestRunner().run(example).failed == 0


@pytest.mark.slow
def test_told_still_works_under_its_old_name_and_warns():
    x, router = jnp.ones((1, 4, 4)), jnp.zeros((4, 2))
    gate, down = jnp.ones((2, 4, 5)), jnp.ones((2, 5, 4))
    mesh, lines = make_mesh(ep=2, devices=jax.devices()[:2]), {}
    for name, warns in (("told", pytest.warns(DeprecationWarning, match="moe: argument 'told' is now 'on_choice'")),
                        ("on_choice", contextlib.nullcontext())):  # fmt: skip
        with warns:
            moe(
                jnp.tile(x, (2, 1, 1)),
                router,
                gate,
                gate,
                down,
                top_k=1,
                mesh=mesh,
                **{name: lines.setdefault(name, []).append},
            )
    assert lines["told"] and lines["told"] == lines["on_choice"]
    lines = []
    with pytest.warns(DeprecationWarning, match="bind_ops: argument 'told' is now 'on_choice'"):
        ops = bind_ops(mesh, told=lines.append)
    ops.moe(jnp.tile(x, (2, 1, 1)), router, gate, gate, down, top_k=1)
    assert lines
