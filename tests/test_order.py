"""The order of tokens is a fact of the layout: an operation has the numbers of contiguous order in it, or refuses by name."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grid import BUILT_ON_ANOTHER
from jaxtyping import Array, Float
from small_run import TINY

import ejdist
import kernels
from ejdist import Order, Unsupported, bind_ops, make_mesh, ring_attention, set_layout
from ejdist.layout import current_layout
from ejdist.models import parts
from ejdist.models.model import Flops
from ejdist.models.parameters import Param
from ejdist.placement import MASK_DIMS, dims_of
from ejdist.sharded import ShardedFunction
from ejdist.training.program import make_program
from kernels.engines.attention.masks import MaskInfo, map_data
from kernels.framework.binding import is_array
from kernels.framework.contract import Op
from kernels.framework.ordered import SEQUENCE, depends_on_order
from kernels.framework.public import Prepared
from recipes.schema import compose

RANKS, T = 4, 16
ORDER = Order("zigzag", RANKS)
RNG = np.random.default_rng(0)


def normal(*shape):
    return jnp.asarray(RNG.standard_normal(shape).astype(np.float32))


@functools.cache
def mesh_of_ranks():
    return make_mesh(sp=RANKS, devices=jax.devices()[:RANKS])


# -- every operation --------------------------------------------------------------------------------------------------


def has_tokens(op):
    return any(d.name in (*SEQUENCE, "lead") for p in op.parameters.values() for d in p.dims)


def functions():
    """Yields each function of `ejdist` that has an operation with tokens; of those with one form over a mesh, the first."""
    seen = set()
    for name, f in ejdist.operations.FUNCTIONS.items():
        for op in f.ops if isinstance(f, ShardedFunction) else ():
            if has_tokens(op) and (op, f.local) not in seen:
                seen.add((op, f.local))
                marks = pytest.mark.slow if op.name in BUILT_ON_ANOTHER else ()
                yield pytest.param(f, op, id=f"{name}-{op.name}", marks=marks)


@functools.cache
def calls(op):
    """Returns the arguments of a case whose result depends on the order of the tokens, and of one whose does not, as far as
    there are such, with sequences of T tokens."""
    found = {}
    for case in op.cases:
        if case.tags & {"slow", "bench"} or len(found) == 2:
            continue
        sizes = {"T": T, "S": T, "lead": (2, T)}
        case = dataclasses.replace(case, dims={**case.dims, **{d: n for d, n in sizes.items() if d in case.dims}})
        try:
            arguments = op.case_inputs(case)
            call = op.bind(**arguments)
        except (ValueError, IndexError):  # a case that has a length of its own
            continue
        found.setdefault(depends_on_order(op, call), arguments)
    return found


def moved(op, arguments, way):
    """Returns the arguments with the tokens in another order; parameters of a model are no tokens."""

    def along(x, dims):
        for axis, dim in enumerate(dims):
            x = way(x, axis) if dim in SEQUENCE and x.shape[axis] == T else x
        return x

    def of(name, value):
        if isinstance(value, MaskInfo):
            return map_data(value, lambda field, x: along(x, MASK_DIMS[field]))
        return along(value, dims_of(op, name, value)) if is_array(value) and name not in op.weights else value

    return {name: of(name, value) for name, value in arguments.items()}


def outputs_in(op, outputs, way):
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    results = []
    for dims, x in zip(op.output_dims, outputs, strict=True):
        names = ejdist.placement.named(dims, x.ndim)
        for axis, dim in enumerate(names):
            x = way(x, axis) if dim in SEQUENCE and x.shape[axis] == T else x
        results.append(np.asarray(x))
    return results


def alike(got, want):
    def one(g, w):
        size = np.abs(w[np.isfinite(w)]).max(initial=1)
        return np.allclose(g, w, rtol=2e-5, atol=2e-5 * size, equal_nan=True)

    return all(one(g, w) for g, w in zip(got, want, strict=True))


@pytest.mark.parametrize(("function", "op"), list(functions()))
def test_every_operation_on_tokens_in_another_order(function, op):
    """What is declared is so, on one device; and on a mesh the function has the numbers of contiguous order, or refuses."""
    assert calls(op), f"{op.name} has no case that can have {T} tokens"
    for depends, arguments in calls(op).items():
        permuted = moved(op, arguments, ORDER.permute)
        prepared = Prepared(op.bind(**permuted), returns=op.outputs, op=op)
        want = outputs_in(op, op(**arguments), lambda x, axis: x)
        assert alike(outputs_in(op, op(**permuted), ORDER.inverse), want) != depends, f"{op.name}: `ordered` is wrong"
        refusal = re.escape(function.__name__) + ": its result depends on the order.*'zigzag' over 4 ranks.*contiguous"

        # The sequence is whole, and its tokens are permuted.
        with set_layout(replicated="sp", order=ORDER):
            if depends:
                with pytest.raises(Unsupported, match=refusal):
                    function.run(prepared, mesh=mesh_of_ranks())
                with pytest.raises(Unsupported, match=refusal):
                    function.run(prepared)
            else:
                assert alike(outputs_in(op, function.run(prepared), ORDER.inverse), want)

        # It is split, where the operation can have that.
        with set_layout(order="zigzag"):
            if (function.follows and function.handles) or (not depends and splits(function, op)):
                got = jax.jit(lambda p=permuted, f=function: run(f, op, p))()
                assert alike(outputs_in(op, got, ORDER.inverse), want)
            else:
                with pytest.raises(
                    (Unsupported, ValueError), match=f"{refusal}|needs it whole|divided over|split them"
                ):
                    function.run(prepared, mesh=mesh_of_ranks())


def run(function, op, arguments):
    return function.run(Prepared(op.bind(**arguments), returns=op.outputs, op=op), mesh=mesh_of_ranks())


def splits(function, op):
    return "lead" in op.local_dims | op.sum_dims or "T" in op.local_dims | op.sum_dims or "T" in function.handles


OTHERS = {"ring_attention", "moe", "route", "all_gather_matmul", "reduce_scatter_matmul"}


def test_what_is_no_operation_with_a_contract_is_tried_here():
    left = {n for n, f in ejdist.operations.FUNCTIONS.items() if not isinstance(f, ShardedFunction)}
    assert left == OTHERS


WIDTH, EXPERTS = 8, 4
X, ROUTER = normal(2, T, WIDTH), normal(WIDTH, EXPERTS)
GATE, DOWN = normal(EXPERTS, WIDTH, 6), normal(EXPERTS, 6, WIDTH)
SEGMENTS = jnp.asarray(np.sort(RNG.integers(-1, 3, (2, T)), axis=1), jnp.int32)


@pytest.mark.slow
@pytest.mark.parametrize("balance", ["batch", "sequence"])
def test_experts_in_another_order(balance):
    """The statistics are sums over tokens, of a document too."""
    how = {"top_k": 2, "balance": balance}
    want, stats = ejdist.moe(X, ROUTER, GATE, GATE, DOWN, segment_ids=SEGMENTS, **how)
    with set_layout(order="zigzag"):
        got, others = jax.jit(
            lambda x, ids: ejdist.moe(x, ROUTER, GATE, GATE, DOWN, segment_ids=ids, mesh=mesh_of_ranks(), **how)
        )(ORDER.permute(X), ORDER.permute(SEGMENTS))
    np.testing.assert_allclose(ORDER.inverse(got), want, atol=1e-5)
    np.testing.assert_allclose(others.balance_loss, stats.balance_loss, rtol=1e-5)
    np.testing.assert_array_equal(others.counts, stats.counts)


def test_matmuls_of_tokens_in_another_order():
    w = normal(WIDTH, RANKS)
    mesh = make_mesh(tp=RANKS, devices=jax.devices()[:RANKS])
    with set_layout(order=ORDER):
        got = ejdist.all_gather_matmul(ORDER.permute(X), w, mesh=mesh)
        back = ejdist.reduce_scatter_matmul(ORDER.permute(X @ w), w.T, mesh=mesh)
    np.testing.assert_allclose(ORDER.inverse(got), X @ w, atol=1e-5)
    np.testing.assert_allclose(ORDER.inverse(back), X @ w @ w.T, atol=1e-4)


# -- attention, which follows an order ---------------------------------------------------------------------------------

Q, K, V = normal(2, T, 2, 8), normal(2, T, 2, 8), normal(2, T, 2, 8)


def test_a_ring_takes_the_order_and_the_axis_of_the_layout():
    want = kernels.flash_attention(Q, K, V, causal=True)
    permuted = [ORDER.permute(x) for x in (Q, K, V)]
    mesh = jax.make_mesh((RANKS,), ("seq",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:RANKS])
    with set_layout(T="seq", order="zigzag"):
        got = ring_attention(*permuted, causal=True, mesh=mesh)
        assert jnp.allclose(ring_attention(*permuted, causal=True, mesh=mesh, order=ORDER), got)
        with pytest.raises(ValueError, match="'order' = 'striped', but the layout in force has order 'zigzag'"):
            ring_attention(*permuted, mesh=mesh, order="striped")
    np.testing.assert_allclose(ORDER.inverse(got), want, atol=1e-5)
    with set_layout(T="seq", order=Order("zigzag", 2)):
        with pytest.raises(
            ValueError, match=r"set_layout: argument 'order' = Order\(.*for 2 ranks, and this call has 4"
        ):
            ring_attention(*permuted, causal=True, mesh=mesh)


@pytest.mark.slow
def test_latent_attention_follows_the_order():
    latents, up = normal(2, T, 6), (normal(6, 2, 8), normal(6, 2, 8))
    want = kernels.flash_mla(Q, latents, *up, causal=True)
    with set_layout(order="zigzag"):
        got = ejdist.flash_mla(ORDER.permute(Q), ORDER.permute(latents), *up, causal=True, mesh=mesh_of_ranks())
        with pytest.raises(Unsupported, match="flash_mla: argument 'cum_seqlens' cuts a sequence in its own order"):
            ejdist.flash_mla(Q[:1], latents[:1], *up, cum_seqlens=jnp.array([0, T]), mesh=mesh_of_ranks())
    np.testing.assert_allclose(ORDER.inverse(got), want, atol=1e-5)


# -- the layout --------------------------------------------------------------------------------------------------------


def test_an_order_that_does_not_exist_is_refused_in_the_words_of_a_trainer_of_ones_own():
    with pytest.raises(ValueError, match=r"^an order's 'name' = 'zigzags' is unknown; use one of contiguous, zigzag"):
        Order("zigzags", 2)


def test_an_order_of_the_layout():
    with pytest.raises(
        ValueError, match="set_layout: argument 'order' = 'diagonal' is unknown; use one of contiguous, zigzag"
    ):
        set_layout(T="sp", order="diagonal")
    with set_layout(T="seq", order="zigzag") as layout:
        assert layout.order == "zigzag"
        with set_layout(order="contiguous") as inner:  # the axes stay
            assert inner == dataclasses.replace(layout, order="contiguous")
        with set_layout():
            assert current_layout().order is None
        assert current_layout() == layout


def test_an_order_over_one_rank_is_none():
    """But where there is no mesh, nobody knows over how many ranks it is."""
    want = kernels.gla_attention(Q, K, V)
    with set_layout(order="zigzag"):
        got = ejdist.gla_attention(Q, K, V, mesh=make_mesh(dp=2, devices=jax.devices()[:2]))
        np.testing.assert_allclose(got, want, atol=1e-5)
        assert jnp.allclose(ejdist.gla_attention(Q, K, V, mesh=make_mesh(devices=jax.devices()[:1])), want)
        with jax.set_mesh(make_mesh(devices=jax.devices()[:1])):
            assert jnp.allclose(ejdist.gla_attention(Q, K, V), want)
        with pytest.raises(Unsupported, match=r"ranks that are not known, since there is no mesh.*give 'mesh'"):
            ejdist.gla_attention(Q, K, V)
        with pytest.raises(ValueError, match="'order' = 'zigzag' needs ranks, and there is no mesh"):
            ring_attention(Q, K, V)
    with set_layout(order=Order("zigzag", 1)):
        assert jnp.allclose(ejdist.gla_attention(Q, K, V), want)


def test_what_has_positions_of_its_own_needs_no_order():
    """`attention`, which has no form over ranks, on tokens in another order whose positions moved with them."""
    want = kernels.flash_attention(Q, K, V, causal=True)
    at = jnp.asarray(ORDER.indices(T), jnp.int32)[None]
    with set_layout(order=ORDER):
        how = {"causal": True, "q_positions": at, "kv_positions": at}
        got = ejdist.flash_attention(*map(ORDER.permute, (Q, K, V)), **how)
    np.testing.assert_allclose(ORDER.inverse(got), want, atol=1e-5)


@pytest.mark.parametrize(
    "how", [{"alibi_slopes": jnp.ones(2)}, {"dropout_prob": 0.1}, {"sliding_window": (3, 3)}, {"chunk_size": 4}]
)
def test_what_has_no_causal_mask_may_have_its_own_distances(how):
    with set_layout(order=ORDER):
        ejdist.flash_attention(Q, K, V)
        with pytest.raises(Unsupported, match="flash_attention: its result depends on the order"):
            ejdist.flash_attention(Q, K, V, **how)


def test_one_token_has_no_order():
    with set_layout(order=ORDER):
        out = ejdist.gla_attention(Q[:, :1], K[:, :1], V[:, :1])
    np.testing.assert_allclose(out, kernels.gla_attention(Q[:, :1], K[:, :1], V[:, :1]), atol=1e-6)


CUTS = jnp.array([0, 6, T])
# Arguments of a packed row, of every function that takes cuts of a sequence.
PACKED = {
    "mean_pooling": ((X[:1],), "cum_seqlens"),
    "flash_attention": ((Q[:1], K[:1], V[:1]), "cum_seqlens_q"),
    "scaled_dot_product_attention": ((Q[:1], K[:1], V[:1]), "cum_seqlens_q"),
    "blocksparse_attention": ((Q[:1], K[:1], V[:1], jnp.ones((1, 1, 2, 2), bool), 8), "cum_seqlens_q"),
    "native_sparse_attention": ((Q[:1], K[:1], V[:1]), "cu_seqlens"),
    "flash_mla": ((Q[:1], normal(1, T, 6), normal(6, 2, 8), normal(6, 2, 8)), "cum_seqlens"),
    "gla_attention": ((Q[:1], K[:1], V[:1]), "cum_seqlens"),
    "lightning_attention": ((Q[:1], K[:1], V[:1], 0, 2), "cum_seqlens"),
    "recurrent_attention": ((Q[:1], K[:1], V[:1]), "cum_seqlens"),
    "retention": ((Q[:1], K[:1], V[:1]), "cum_seqlens"),
}


@pytest.mark.parametrize("name", PACKED)
def test_cuts_are_of_the_sequence_as_it_was(name):
    """They become segment ids before the operation sees them, so its contract cannot tell."""
    arguments, cut = PACKED[name]
    prepared = getattr(ejdist, name).function.prepare(*arguments, **{cut: CUTS})
    assert prepared.cuts == cut
    with (
        set_layout(order=ORDER),
        pytest.raises(Unsupported, match=f"{name}: argument '{cut}' cuts a sequence in its own order"),
    ):
        getattr(ejdist, name)(*arguments, **{cut: CUTS})


def test_every_operation_states_whether_it_depends_on_the_order():
    def mixing(x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        return jnp.cumsum(x, axis=1)

    with pytest.raises(TypeError, match=r"mixing: state `ordered`: whether the order of tokens along T matters"):
        Op(mixing, local_dims={"B"})
    with pytest.raises(TypeError, match="`ordered` has no meaning without a dim T or S"):
        Op(mixing, local_dims={"B", "T"}, ordered=True)
    op = Op(mixing, local_dims={"B"}, ordered=True)
    assert depends_on_order(op, op.bind(jnp.ones((1, 2, 1)))) and not depends_on_order(op, op.bind(jnp.ones((2, 1, 1))))


# -- models ------------------------------------------------------------------------------------------------------------


class Linear(parts.Part):
    """A layer kind of one's own: gated linear attention of x with itself."""

    name, role = "linear", "mixer"

    def __init__(self, bound):
        self.bound = bound

    def declare(self, c):
        return {"linear": Param((c.model_dim, c.num_heads, c.head_dim), "D N H", std=c.init_std)}

    def apply(self, x, params, at):
        h = jnp.einsum("btd,dnh->btnh", x, at.ops.gather(params["linear"], "D N H"))
        mixed = at.ops.gla_attention(h, h, h) if self.bound else ejdist.gla_attention(h, h, h)
        return x + mixed.reshape(*x.shape[:2], -1)[..., : x.shape[2]], {}

    def flops(self, c):
        return Flops(token=1)


@pytest.mark.parametrize("bound", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_layer_that_depends_on_the_order_is_refused_when_it_is_traced(bound, monkeypatch):
    """By operations that are bound to the mesh, which have a form for one order of all rows, and by those of `ejdist`, which do
    not know that the sequence is split."""
    monkeypatch.setitem(parts.PARTS, "linear", Linear(bound))
    small = [*TINY, "model.layer_pattern=[linear+mlp,full]", f"mesh.sp={RANKS}"]

    def traced(order):
        program = make_program(compose([*small, f"sequence.order={order}"]), mesh_of_ranks())
        return program.step.trace(program.state, program.batch)

    refused, taken = ("balanced", "zigzag") if bound else ("zigzag", "contiguous")
    with pytest.raises(
        Unsupported, match=rf"gla_attention: .*order '{refused}' over 4 ranks.*sequence.order=contiguous"
    ):
        traced(refused)
    traced(taken)


def test_bound_operations_have_one_order():
    mesh, permuted = mesh_of_ranks(), [ORDER.permute(x) for x in (Q, K, V)]
    ops = bind_ops(mesh, order=ORDER)
    np.testing.assert_allclose(ORDER.inverse(ops.gla_attention(*permuted)), kernels.gla_attention(Q, K, V), atol=1e-5)
    want = kernels.flash_attention(Q, K, V, causal=True)
    np.testing.assert_allclose(ORDER.inverse(ops.attention(*permuted, causal=True)), want, atol=1e-5)
    np.testing.assert_allclose(ops.rms_norm(X), kernels.rms_norm(X), atol=1e-6)
    with set_layout(order="zigzag"):
        ops = bind_ops(mesh)
        np.testing.assert_allclose(ORDER.inverse(ops.attention(*permuted, causal=True)), want, atol=1e-5)
    with set_layout(order="striped"), pytest.raises(ValueError, match="but the layout in force has order 'striped'"):
        bind_ops(mesh, order=ORDER).gla_attention(*permuted)
