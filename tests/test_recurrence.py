"""What every recurrence stands on: arguments, chunks, the scan over them, and states passed between ranks. Shown by the
smallest recurrence there is, S = exp(a) S + x."""

import dataclasses
import functools
import inspect
import re
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

import ejdist
import kernels
from ejdist import Order, make_mesh
from ejdist.execution import run
from ejdist.mapped import map_shards
from ejdist.sequence.runs import Runs
from ejdist.sequence.state_passing import Linear, StatePassing, _Edges, halo
from kernels.engines.scan import chunks, recurrence
from kernels.framework.contract import Op
from kernels.framework.public import Prepared

RNG = np.random.default_rng(0)


def decayed_sum(
    x: Float[Array, "B T D"],
    a: Float[Array, "B T D"],
    segment_ids: Int[Array, "B T"] | None = None,
    initial_state: Float[Array, "B G D"] | None = None,
    *,
    num_states: int = 1,
) -> tuple[Float[Array, "B T D"], Float[Array, "B G D"]]:
    def step(state, now):
        state = jnp.exp(now[1]) * state + now[0]
        return state, state

    return recurrence.loop(step, (x, a), jnp.zeros_like(x[:, 0]), segment_ids, initial_state, num_states)


op = Op(decayed_sum, outputs=("out", "final_state"), local_dims={"B"}, ordered=True, config=chunks.ChunkConfig)


def _prepare(shared, xs, tokens):
    return jnp.exp(xs[1]) * shared, shared * xs[0], tokens.resets


def _walk(parts, state):
    """A chunk, a token at a time."""
    a, x, resets = parts
    outs = []
    for t in range(x.shape[1]):
        if resets is not None:
            state = jnp.where(resets[:, t, None], 0, state)
        state = a[:, t] * state + x[:, t]
        outs.append(state)
    return state, jnp.stack(outs, 1)


STEP = chunks.Step(_prepare, lambda *given: _walk(*given)[0], lambda _, *given: _walk(*given)[1])


def _chunked(x, a, segment_ids, initial_state, num_states, cfg):
    own = jnp.zeros((x.shape[0], num_states, x.shape[2])) if initial_state is None else initial_state
    return chunks.Chunks(*x.shape[:2], cfg, segment_ids, num_states), own, (x, a), jnp.ones(())


def _forward(x, a, segment_ids, initial_state, num_states, cfg):
    cut, own, xs, one = _chunked(x, a, segment_ids, initial_state, num_states, cfg)
    final, out = chunks.forward(STEP, cut, own, xs, one)
    return out, final


def _backward(saved, x, a, segment_ids, initial_state, num_states, cfg):
    cut, own, xs, one = _chunked(x, a, segment_ids, initial_state, num_states, cfg)
    d_own, (dx, da), d_one = chunks.backward(STEP, cut, own, xs, saved.d_final_state, saved.d_out, one)
    assert d_one.shape == ()
    return {"x": dx, "a": da} | ({} if initial_state is None else {"initial_state": d_own})


op.register(
    _forward,
    _backward,
    name="xla",
    platforms={"cpu"},
    dtypes={"float32"},
    **chunks.tunables(4, lambda d: d["B"] * d["D"]),
)


@dataclass(frozen=True)
class DecayedSum(Linear):
    def start(self, arguments):
        return jnp.zeros_like(arguments["x"][:, 0])

    def summary(self, arguments, valid):
        a = jnp.where(valid[..., None], arguments["a"], 0)
        after = jnp.cumsum(a[:, ::-1], 1)[:, ::-1] - a
        x = jnp.where(valid[..., None], arguments["x"], 0)
        return jnp.exp(a.sum(1)), (jnp.exp(after) * x).sum(1)


PASSING = StatePassing(op, DecayedSum())

_ = -1
IDS = {
    "one": None,
    "documents": [[5, 5, 5, 2, 2, 2, 2, 9, 9, 9, 9, 9, 9, 9, 9, 9], [1] * 16],
    "padding": [[_, _, 3, 3, _, 3, _, 4, 4, _, _, _, _, _, 4, 4], [_] * 16],
    "padded to a rank": [[_] * 12 + [7, 7, 7, 8], [3, 3, 4] + [_] * 13],
    "the same id again": [[1, 2, 1, 1, 2, 2, 1, 1, 1, 1, 1, 1, 1, 2, 1, 1]] * 2,
    "packed": [[0, 0, 0, 0, 0, 2, 2, 2, 2, 2, 2, 2, 2, 3, _, _], [0, 1, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3]],
    "packed, long": [[2] * 16, [_] * 6 + [1] + [_] * 5 + [1, 3, 3, 3]],
}


QUICK = ("packed",)


def arguments(name):
    rng, packed = np.random.default_rng(1), name.startswith("packed")

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape).astype(np.float32))

    given = {"x": normal(2, 16, 3), "a": -jnp.exp(normal(2, 16, 3))}
    if IDS[name] is not None:
        given["segment_ids"] = jnp.asarray(IDS[name], jnp.int32)
    given["initial_state"] = normal(2, 4 if packed else 1, 3)
    return given | ({"num_states": 4} if packed else {})


def value_and_gradients(function, given):
    floats = {n: given[n] for n in ("x", "a", "initial_state")}
    rest = {n: v for n, v in given.items() if n not in floats}

    @jax.jit
    def both(floats):
        outputs, pull = jax.vjp(lambda f: function(**f, **rest), floats)
        return outputs, pull(tuple(jnp.cos(jnp.arange(y.size)).reshape(y.shape) for y in outputs))[0]

    return both(floats)


def numpy_loop(x, a, segment_ids=None, initial_state=None, num_states=1):
    """Returns (out, final_state), float64: the words of the contract, a token and a row at a time."""
    out, final = np.zeros(x.shape), np.array(initial_state, np.float64)
    for b in range(x.shape[0]):
        last = None
        for t in range(x.shape[1]):
            i = 0 if segment_ids is None else int(segment_ids[b, t])
            if i < 0:
                continue
            g = i if num_states > 1 else 0
            if num_states == 1 and last not in (None, i):
                final[b, g] = 0
            last = i
            final[b, g] = np.exp(np.float64(a[b, t])) * final[b, g] + x[b, t]
            out[b, t] = final[b, g]
    return out, final


@functools.cache
def truth(name):
    return value_and_gradients(decayed_sum, arguments(name))


def close(got, want):
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=2e-5, atol=2e-6), got, want)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in QUICK)) for n in IDS])
def test_the_loop_and_the_chunks(name):
    close(truth(name)[0], numpy_loop(**arguments(name)))
    for together in (1, 3, 100):  # one after another, some at one time with slots to fill, all
        run = functools.partial(op, cfg=chunks.ChunkConfig(4, together))
        close(value_and_gradients(run, arguments(name)), truth(name))


def test_nothing_of_padding_is_in_a_chunk():
    given = arguments("padding")
    bad = given | {"x": jnp.where(given["segment_ids"][..., None] < 0, jnp.nan, given["x"])}
    want_out, want = truth("padding")
    close(value_and_gradients(op, bad), (want_out, want))


def test_the_places_of_packed_sequences():
    ids = jnp.asarray(IDS["packed"], jnp.int32)
    cut = chunks.Chunks(2, 16, chunks.ChunkConfig(4, 1), ids, num_states=4)
    assert cut.number == (16 + 4 * 3) // 4
    there = cut.spread(ids + 1)  # 0 where there is no token
    for b in range(2):
        for of, tokens in zip(cut.owners.of[:, b], there[:, b], strict=True):
            assert set(np.asarray(tokens)) <= {0, int(of) + 1}
    np.testing.assert_array_equal(cut.collect(there), jnp.maximum(ids + 1, 0))


MESHES = {1: {"dp": 2}, 2: {"sp": 2}, 4: {"dp": 2, "sp": 4}, 8: {"sp": 8}}


def on_mesh(mesh, given, in_specs=None, order=None, passing=PASSING):
    prepared = Prepared(op.bind(**given), returns=op.outputs)
    how = {"local": passing, "handles": ("T",), "order": order, "follows": "fixed"}
    return run(prepared, op, mesh=mesh, in_specs=in_specs, **how)


@pytest.mark.parametrize(
    ("ranks", "name"),
    [(r, n) if (r, n) in {(8, "packed")} else pytest.param(r, n, marks=pytest.mark.slow)
     for r in MESHES for n in IDS],
)  # fmt: skip
def test_states_pass_between_ranks(ranks, name):
    mesh = make_mesh(**MESHES[ranks], devices=jax.devices()[: 2 * ranks if "dp" in MESHES[ranks] else ranks][:8])
    close(value_and_gradients(lambda **a: on_mesh(mesh, a), arguments(name)), truth(name))


ORDERS = {"zigzag": Order("zigzag", 4), "stripes": Order("striped", 4, 2), "tokens": Order("striped", 4)}


@pytest.mark.parametrize(
    ("order", "exchanged", "name"),
    [(o, e, n) if (o, e, n) in {("zigzag", False, "packed"), ("tokens", True, "documents")}
     else pytest.param(o, e, n, marks=pytest.mark.slow)
     for o in ORDERS for e in (False, True) for n in IDS],
)  # fmt: skip
def test_states_pass_between_the_runs_of_ranks(order, exchanged, name):
    order, passing = ORDERS[order], dataclasses.replace(PASSING, exchanged=exchanged)
    mesh, tokens = make_mesh(sp=4, devices=jax.devices()[:4]), ("x", "a", "segment_ids")

    def in_order(**given):
        there = {n: order.permute(v) if n in tokens else v for n, v in given.items()}
        out, final = on_mesh(mesh, there, order=order, passing=passing)
        return order.inverse(out), final

    close(value_and_gradients(in_order, arguments(name)), truth(name))


def test_as_many_hops_as_ranks_that_a_document_spans():
    short = [0, 1] * 8

    @jax.jit
    def needed(ids):
        runs = Runs(Order("contiguous", 8), 2, ("sp",))
        return map_shards(lambda ids: _Edges.of(ids, runs, False, True).hops, make_mesh(sp=8), (P(None, "sp"),), P())(
            ids
        )

    for hops, row in (
        (0, [0, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 6]),  # no rank from end to end, but the first and the last
        (1, [0] * 3 + [1] * 4 + [2, 3, 3, 4, 4, 5, 5, 6, 6]),  # one of them
        (2, [0] + [1] * 7 + [2, 3] * 4),
        (2, [0] * 8 + [1, 2] * 4),  # nothing comes before the first rank
        (3, [0] + [1] * 9 + [2, 3] * 3),
        (3, [0] * 8 + [_] * 8),  # a state goes on where there is no token
    ):
        assert int(needed(jnp.asarray([short, row], jnp.int32))) == hops, row


@pytest.mark.slow
def test_ranks_over_two_axes():
    """Whichever of them the mesh lists first."""
    mesh = jax.make_mesh((4, 2), ("minor", "major"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    lies = (P(None, ("major", "minor")),) * 2
    got = value_and_gradients(lambda **a: on_mesh(mesh, a, lies), arguments("padded to a rank"))
    close(got, truth("padded to a rank"))


@pytest.mark.parametrize("size", [0, 3, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 5))])
def test_halo(size):
    """Two tokens a rank, so up to three ranks before it are asked."""
    x = jnp.arange(1, 17.0).reshape(1, 16, 1)
    ids = jnp.arange(16)[None]
    mesh = make_mesh(sp=8)
    both = map_shards(lambda t: halo(t, ("sp",), size), mesh, ((P(None, "sp"),) * 2,), (P(None, "sp"),) * 2)
    got, got_ids = both((x, ids))
    padded = np.pad(np.arange(1, 17.0), (size, 0))
    np.testing.assert_array_equal(got.ravel(), [padded[t + i] for t in range(0, 16, 2) for i in range(size)])
    np.testing.assert_array_equal(got_ids.ravel(), got.ravel() - 1)
    if size == 3:
        slope = jax.grad(lambda x: jnp.sum(both((x, ids))[0]))(x)
        np.testing.assert_array_equal(slope.ravel(), _handed_on(size))


def _handed_on(size):
    """How many ranks get each token."""
    return [sum(1 for begin in range(0, 16, 2) if begin - size <= t < begin) for t in range(16)]


# -- arguments ---------------------------------------------------------------------------------------------------------


def test_what_every_recurrence_takes_is_in_its_signature_and_documentation():
    for name in ("gla_attention", "rwkv7", "causal_conv1d", "recurrent", "rwkv4"):
        for library in (kernels, ejdist):
            function = getattr(library, name)
            assert recurrence.Where.__annotations__.keys() < inspect.signature(function).parameters.keys()
            assert function.__doc__.count("segment_ids: int [B, T]. The state is reset where the id changes.") == 1
            with pytest.raises(TypeError, match=f"{name}\\(\\) got an unexpected keyword argument 'segments'"):
                function(segments=None)


def sequences(B=2, T=8, **given):
    return recurrence.sequences("op", (B, T), (3,), **given)


def test_what_arguments_mean():
    found = sequences()
    assert (found.segment_ids, found.initial_state, found.num_states, found.arguments) == (None, None, 1, {})
    state = jnp.ones((2, 3), "bfloat16")
    found = sequences(initial_state=state)
    assert found.initial_state.shape == (2, 1, 3) and found.initial_state.dtype == jnp.float32
    assert found.state(found.initial_state).shape == (2, 3) and found.state_dims(("D",)) == ("B", "D")
    cuts = [0, 3, 3, 6]
    found = sequences(B=1, cu_seqlens=cuts)
    assert found.num_states == 1 and found.segment_ids.tolist() == [[0, 0, 0, 2, 2, 2, -1, -1]]
    found = sequences(B=1, cum_seqlens=cuts, return_state=True)
    assert found.num_states == 3 and found.state_dims(("D",)) == ("G", "D")
    found = sequences(B=1, cum_seqlens=jnp.asarray(cuts), initial_state=jnp.ones((3, 3)))
    assert found.initial_state.shape == (1, 3, 3) and found.state(found.initial_state).shape == (3, 3)
    assert sequences(B=1, segment_ids=np.zeros(8, int)).segment_ids.shape == (1, 8)
    # As an int32 it would be negative, and so padding.
    assert (sequences(segment_ids=jnp.full((2, 8), 2**31 + 5, jnp.uint32)).segment_ids == 5).all()
    with jax.enable_x64(True):
        found = sequences(segment_ids=jnp.arange(16).reshape(2, 8), initial_state=jnp.ones((2, 3)))
    assert found.segment_ids.dtype == jnp.int32 and found.initial_state.dtype == jnp.float32


@pytest.mark.parametrize(
    ("said", "given"),
    [
        ("arguments 'cum_seqlens' and 'cu_seqlens' are two names", {"B": 1, "cum_seqlens": [0, 8], "cu_seqlens": [0, 8]}),
        ("'segment_ids' and 'cum_seqlens' both define", {"cum_seqlens": [0, 8], "segment_ids": np.zeros((2, 8), int)}),
        ("'segment_ids' must hold integers [B, T], got float64 of shape (2, 8)", {"segment_ids": np.zeros((2, 8))}),
        ("'segment_ids' must have the shape [B, T] = (2, 8), got (2, 7)", {"segment_ids": np.zeros((2, 7), int)}),
        ("'cum_seqlens' splits one packed row, but B = 2", {"cum_seqlens": [0, 8]}),
        ("'cum_seqlens' must be integers [0, n1", {"B": 1, "cum_seqlens": [0.0, 8.0]}),
        ("'cum_seqlens' must rise from 0 to at most 8, [0, n1, n1 + n2, ...], got [0, 9]", {"B": 1, "cum_seqlens": [0, 9]}),
        ("'cum_seqlens' must rise from 0 to at most 8", {"B": 1, "cum_seqlens": jnp.asarray([0, 5, 3])}),
        ("pass cumulative sums of the lengths", {"B": 1, "cum_seqlens": [3, 2, 3]}),
        ("'cum_seqlens' must rise from 0", {"B": 1, "cum_seqlens": [2, 8]}),
        ("'cum_seqlens' must be integers [0, n1, n1 + n2, ...], with one more entry than sequences, got str",
         {"B": 1, "cum_seqlens": "x"}),
        ("'segment_ids' must hold integers [B, T], got list", {"segment_ids": [[0], [1, 2]]}),
        ("'segment_ids' must be at most 2147483647, got 1099511627776", {"segment_ids": np.full((2, 8), 2**40)}),
        ("'initial_state' must be a float array [B, ...] = [2, 3], got float32 of shape (1, 3)",
         {"initial_state": jnp.ones((1, 3))}),
        ("'initial_state' must be a float array [sequences, ...] = [2, 3]",
         {"B": 1, "cum_seqlens": [0, 4, 8], "initial_state": jnp.ones((1, 3))}),
        ("'initial_state' must be a float array", {"initial_state": "zeros"}),
    ],
)  # fmt: skip
def test_a_wrong_argument_is_named(said, given):
    with pytest.raises(ValueError, match="op: argument.*" + re.escape(said.removeprefix("arguments "))):
        sequences(**given)


def test_transitions_between_ranks_are_float32_where_64_bits_are_enabled():
    with jax.enable_x64(True):
        x = jnp.ones((1, 4, 1, 2), jnp.float32)
        call = functools.partial(ejdist.delta_rule, mesh=make_mesh(sp=2), return_state=True)
        program = jax.jit(lambda x: call(x, x, x, x[..., 0])).lower(x)
        assert {y.dtype for y in program.out_info} == {jnp.dtype("float32")}
