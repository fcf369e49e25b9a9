"""What GPUs run where the experts' last product is apart, beside the gathers of other platforms; and sums over passes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from expert_calls import EP4, PLACES, check, einsum_experts
from experts_loop import Layer

from ejdist import moe
from ejdist.experts import apart, by_rank, own, placed
from ejdist.experts.dispatch import run
from ejdist.experts.mlp import GatedExperts
from ejdist.experts.rows import DispatchSpec, combined, plan_of
from ejdist.experts.schemes import AllToAll
from kernels.framework.interpret import interpret
from kernels.ops.grouped_matmul import triton_gpu

M, K, E, D, F = 24, 3, 4, 32, 16
RNG = np.random.default_rng(0)


@pytest.fixture
def as_on_gpus(monkeypatch):
    """Takes the branch for GPUs, whose operations then run as they do on this platform."""

    def of_gpus(*arrays, default=None, cuda=None, **_):
        return (cuda or default)(*arrays)

    placed._compiled.cache_clear()
    monkeypatch.setattr(jax.lax, "platform_dependent", of_gpus)
    yield
    placed._compiled.cache_clear()


def normal(*shape, dtype="float32", scale=1.0):
    return jnp.asarray(scale * RNG.standard_normal(shape), dtype)


def choices():
    """Returns [M, K], some of no expert."""
    return jnp.int32(RNG.integers(-1, E + 1, (M, K)))


def params_of(kind, dtype):
    params = {"down": normal(E, F, D, dtype=dtype)}
    if kind in ("separate", "clamped"):
        params |= {name: normal(E, D, F, dtype=dtype, scale=0.2) for name in ("gate", "up")}
    else:
        params["gate"] = normal(E, D, 2, F, dtype=dtype, scale=0.2)
    return params | ({"gate_bias": normal(E, 2, F, dtype=dtype)} if kind == "bias" else {})


def job_of(apply, rows):
    return DispatchSpec(apply, (), own.Local(), E, (rows,), 1, gathers=True)


def near(got, want, tolerance):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.abs(a - b).max() <= tolerance * np.abs(b).max(), np.abs(a - b).max() / np.abs(b).max()


@pytest.mark.parametrize("total", [False, True])
@pytest.mark.parametrize(
    ("kind", "activation", "platform", "dtype"),
    [
        ("fused", "silu", "xla", "float32"),
        pytest.param("bias", "relu", "xla", "float32", marks=pytest.mark.slow),
        ("separate", "gelu", "xla", "float32"),
        pytest.param("clamped", "clamped_swiglu", "xla", "float32", marks=pytest.mark.slow),
        ("fused", "silu", "triton", "bfloat16"),
        pytest.param("bias", "gelu_tanh", "triton", "bfloat16", marks=pytest.mark.slow),
    ],
)
def test_gradients_by_index_are_those_of_rows_in_order(kind, activation, platform, dtype, total, monkeypatch):
    """With kernels, whose forward keeps its products, and without. The last rows of the pass are of no pair."""
    monkeypatch.setattr(triton_gpu, "WORTH_KEEPING", 16)
    job, params = job_of(GatedExperts(activation, platform=platform), 90), params_of(kind, dtype)
    x, d, weights = normal(M, D, dtype=dtype), normal(M, D, dtype=dtype), normal(M, K)
    total = normal(M, D, dtype=dtype) if total else None
    plan = plan_of(choices(), E)
    pairs = job.scheme.pairs(job, plan, jnp.int32(0))
    there = (pairs.pair >= 0)[:, None]
    with interpret(90):
        made = own._Made.of(job, own._Params.of(params), x, pairs, True)
        assert bool(made.kept) == (platform == "triton")
        want, got = (
            function(job.apply, made, params, d, pairs, weights, total) for function in (apart.in_order, apart.by_index)
        )
    if got[0] is not None:
        want, got = ((jnp.where(there, found[0], 0), *found[1:]) for found in (want, got))
    near(got, want, 2e-6 if dtype == "float32" else 2e-2)


@pytest.mark.parametrize("rooms", [(90,), (20,)])
def test_one_device_in_passes(rooms, as_on_gpus):
    """A gate and an up projection in one: the gradients of passes are added to where they are."""
    job, params, ids = job_of(GatedExperts("silu"), rooms[0]), params_of("fused", "float32"), choices()
    x, d, weights = normal(M, D), normal(M, D), normal(M, K)

    def layer(x, weights, params):
        return run(job, x, jnp.where(ids < 0, E, ids), weights, params)[0]

    def loop(x, weights, params):
        products = jnp.einsum("md,edsf->mesf", x, params["gate"], precision="highest")
        hidden = jax.nn.silu(products[:, :, 0]) * products[:, :, 1]
        rows = jnp.einsum("mef,efd->med", hidden, params["down"], precision="highest")
        chosen = jnp.sum(jax.nn.one_hot(ids, E) * weights[..., None], axis=1)
        return jnp.einsum("med,me->md", rows, chosen, precision="highest")

    got, want = (jax.jit(lambda *a, f=f: jax.vjp(f, *a)[1](d))(x, weights, params) for f in (layer, loop))
    near(got, want, 1e-5)
    near(jax.jit(layer)(x, weights, params), loop(x, weights, params), 1e-5)


def test_one_device_with_the_kernels_of_hopper(as_on_gpus, monkeypatch):
    """The whole layer and all gradients, interpreted. Tokens of no row, of one and of more; the last rows are of no pair."""
    for name, value in (("SPECIALISED_ROWS", 1), ("WORTH_KEEPING", 16), ("MULTIPROCESSORS", 3)):
        monkeypatch.setattr(triton_gpu, name, value)
    ids = np.where(RNG.random((M, K)) < 0.4, RNG.integers(0, E, (M, K)), E)
    ids = jnp.int32(np.where(np.arange(K) > 0, np.where(ids == ids[:, :1], E, ids), ids))  # an expert once for a token
    assert set(range(3)) <= set((ids < E).sum(axis=1).tolist()) and (ids < E).sum() < 48
    x, d, weights = normal(M, 64, dtype="bfloat16"), normal(M, 64, dtype="bfloat16"), normal(M, K)
    params = {
        "gate": normal(E, 64, 2, 64, dtype="bfloat16", scale=0.1),
        "down": normal(E, 64, 64, dtype="bfloat16", scale=0.1),
    }

    @functools.partial(jax.jit, static_argnums=0)
    def both(platform, x, weights, params, d):
        job = job_of(GatedExperts("silu", platform=platform), 48)
        out, pull = jax.vjp(lambda *a: run(job, a[0], ids, *a[1:])[0], x, weights, params)
        return out, pull(d)

    want = both("xla", *jax.tree.map(lambda a: a.astype(jnp.float32), (x, weights, params, d)))
    with interpret(90):
        near(both("triton", x, weights, params, d), want, 2e-2)


@pytest.mark.parametrize(
    ("scheme", "options"),
    [
        ("all_to_all", {"buffer": 0.4}),
        pytest.param("all_gather", {"buffer": 0.4, "chunks": 2}, marks=pytest.mark.slow),
    ],
)
def test_a_mesh_has_the_numbers_of_the_loop(scheme, options, as_on_gpus):
    """All that GPUs do otherwise: rows on their way out, what goes beside them, sums, and gradients, in several passes."""
    ids = RNG.integers(-1, 9, (16, 3))
    layer = Layer(
        RNG.standard_normal((16, 8)), ids, RNG.random((16, 3)).astype(np.float32),
        *(RNG.standard_normal(s) for s in ((8, 8, 4), (8, 8, 4), (8, 4, 8))),
    )  # fmt: skip
    stats = check(EP4, layer, scheme=scheme, apply=GatedExperts("silu"), gathers=True, **options)
    assert stats.extra_passes > 0


@pytest.mark.slow
def test_features_over_tp(as_on_gpus):
    """Parts of F: gradients of tokens and weights are parts of sums, which are added up."""
    where, x = PLACES["ep x tp"], normal(2, 16, D)
    arrays = normal(D, E), normal(E, D, 2, F), normal(E, F, D)

    def loss(x, *arrays, **options):
        router, gate, down = arrays
        out, _ = moe(x, router, gate, down=down, top_k=K, **options)
        return jnp.sum(out**2)

    on = functools.partial(loss, mesh=where.mesh, axis="ep", dispatch="all_to_all", buffer=0.7)
    near(jax.grad(on, range(4))(x, *arrays), jax.grad(loss, range(4))(x, *arrays), 1e-4)


class Alone(AllToAll):
    """A rank of several whose rows stay where they are."""

    def _ranks(self, job):
        return 4

    def dispatch(self, job, turn, x):
        return x


@pytest.mark.parametrize(("own_experts", "k"), [(4, 6), (1, 3)])
def test_what_goes_beside_rows_is_the_same_by_column(own_experts, k):
    """Choices that are repeated, of no expert, and of more than a rank has columns for."""
    ids = jnp.int32(RNG.integers(0, 4 * own_experts + 1, (40, k)))
    job = DispatchSpec(einsum_experts, (), Alone(), 4 * own_experts, (40, 40 * 4 * k), 1)
    plan = job.scheme.plan(job, ids, normal(40, k))
    pair = plan.turns[0].pair
    how = {"own": own_experts, "columns": min(k, own_experts)}
    got, want = by_rank._by_column(plan, pair, **how), by_rank._by_choice(plan, pair, **how)
    np.testing.assert_array_equal(got, want)
    assert (want > 0).any()


def test_a_sum_of_passes_leaves_tokens_without_rows_as_they_are(as_on_gpus):
    """In bfloat16; the others are rounded once."""
    order = plan_of(choices().at[::2].set(-1), E)
    rows, total = normal(len(order.pairs), D, dtype="bfloat16"), normal(M, D, dtype="bfloat16")
    got = jax.jit(combined)(rows, order.slots, None, total)
    np.testing.assert_array_equal(got[::2], total[::2])
    want = jax.jit(combined)(rows.astype(jnp.float32), order.slots, None, total.astype(jnp.float32))
    np.testing.assert_array_equal(got, want.astype(jnp.bfloat16))
