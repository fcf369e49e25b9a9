"""Inside a `shard_map` of the caller's that splits the sequence: what needs all of it communicates over the axes that the call
names, with the numbers and gradients of one device, and refuses where it is told of none."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import ejdist
import kernels
from ejdist import Order, Unsupported, set_layout
from ejdist.sharded import ShardedFunction

B, T, N, H, F = 4, 64, 2, 8, 8
RNG = np.random.default_rng(0)


def normal(*shape):
    return jnp.asarray(RNG.standard_normal(shape).astype(np.float32))


@functools.cache
def mesh():
    return jax.make_mesh((2, 4), ("data", "seq"), axis_types=(AxisType.Auto,) * 2)


Q, K, V, X, BETA = normal(B, T, N, H), normal(B, T, N, H) / 3, normal(B, T, N, H), normal(B, T, F), normal(B, T, N)
DECAY, BETA = -jnp.abs(BETA), jax.nn.sigmoid(BETA)
IDS = jnp.asarray(np.sort(RNG.integers(-1, 5, (B, T)), axis=1), jnp.int32)
WIDE = normal(B, T, N, H)
TOKENS, ROWS, WHOLE = P("data", "seq"), P("data"), P()
GIVEN = {"segment_ids": IDS}
CELL = {"weight_ih": normal(F, F) / 3, "weight_hh": normal(F, F) / 3}
LATENT = (normal(B, T, 6), normal(6, N, H), normal(6, N, H))
# name -> (arrays, their specs, options): one call at least of each function that has a form over ranks.
CALLS = {
    "causal_conv1d": ((X, normal(F, 4)), (TOKENS, WHOLE), GIVEN),
    "delta_rule": ((Q, K, V, BETA), (TOKENS,) * 4, {}),
    "gated_delta_rule": ((Q, K, V, BETA, DECAY), (TOKENS,) * 5, GIVEN),
    "kernel_delta_attention": ((Q, K, V, BETA, -jnp.abs(WIDE)), (TOKENS,) * 5, {}),
    "rwkv7": ((Q, -jnp.abs(WIDE), K, V, -K, K), (TOKENS,) * 6, {}),
    "gla_attention": ((Q, K, V), (TOKENS,) * 3, GIVEN),
    "lightning_attention": ((Q, K, V, 0, 2), (TOKENS,) * 3, {}),
    "recurrent_attention": ((Q, K, V), (TOKENS,) * 3, {}),
    "retention": ((Q, K, V), (TOKENS,) * 3, {}),
    "rwkv6": ((Q, K, V, -jnp.abs(WIDE), normal(N, H)), (*(TOKENS,) * 4, WHOLE), {}),
    "rwkv4": ((normal(F), normal(F), X, X + 1), (WHOLE, WHOLE, TOKENS, TOKENS), {}),
    "recurrent": ((X, None, CELL, "rnn"), (TOKENS,), {}),
    "state_space_v1": (
        (X, jax.nn.softplus(X), -jnp.abs(normal(F, 4)), normal(B, T, 4), normal(B, T, 4)),
        (TOKENS, TOKENS, WHOLE, TOKENS, TOKENS),
        {},
    ),
    "state_space_v2": (
        (V, jax.nn.softplus(BETA), -jnp.abs(normal(N)), Q, K),
        (TOKENS, TOKENS, WHOLE, TOKENS, TOKENS),
        {},
    ),
    "flash_attention": ((Q, K, V), (TOKENS,) * 3, {"causal": True, "q_segment_ids": IDS}),
    "scaled_dot_product_attention": ((Q, K, V), (TOKENS,) * 3, {"causal": True}),
    "flash_mla": ((Q, *LATENT), (TOKENS, TOKENS, WHOLE, WHOLE), {"causal": True}),
    "mean_pooling": ((X, IDS >= 0), (TOKENS, TOKENS), {}),
}
DECODING = {"mla_decode"}  # of which the cache is split; tried below
PLAIN = "ragged_gated_delta_rule"  # requests in one packed row, cut in its own order: no form over ranks


def test_every_function_with_a_form_over_ranks_is_tried():
    of_sequences = {
        n: f for n, f in ejdist.operations.FUNCTIONS.items() if isinstance(f, ShardedFunction) and f.of_sequences
    }
    forms = {n for n, f in of_sequences.items() if f.on_rank is not None or "T" in f.function.op.sum_dims}
    assert forms == {*CALLS, *DECODING, PLAIN}


def mapped(name, options, axes, out, **how):
    """Returns the function of the arrays of a call inside a `shard_map`: its first result."""
    arrays, specs, _ = CALLS[name]
    data = {n: x for n, x in options.items() if isinstance(x, jax.Array)}
    static = {n: x for n, x in options.items() if n not in data} | ({} if axes is None else {"axis_name": axes})

    def body(arrays, data):
        found = getattr(ejdist, name)(*arrays, *CALLS[name][0][len(specs) :], **data, **static)
        return found[0] if isinstance(found, tuple) else found

    return jax.shard_map(body, in_specs=(specs, dict.fromkeys(data, TOKENS)), out_specs=out, **how)


# The same operation as another call here with other arguments, with one of them fixed, or over the same engine: slow. So is
# the convolution, whose halo is in tests/test_recurrence.py.
OF_ANOTHER = {
    "gated_delta_rule",
    "recurrent",
    "causal_conv1d",
    "delta_rule",
    "flash_mla",
    "gla_attention",
    "kernel_delta_attention",
    "lightning_attention",
    "recurrent_attention",
    "retention",
    "rwkv4",
    "rwkv6",
    "rwkv7",
    "state_space_v1",
    "state_space_v2",
    "scaled_dot_product_attention",
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n in OF_ANOTHER else ()) for n in CALLS])
def test_an_axis_gives_the_numbers_and_gradients_of_one_device(name):
    arrays, specs, options = CALLS[name]
    arrays, rest = arrays[: len(specs)], arrays[len(specs) :]
    data = {n: x for n, x in options.items() if isinstance(x, jax.Array)}
    out = ROWS if name == "mean_pooling" else TOKENS
    floats = tuple(i for i, x in enumerate(arrays) if jnp.issubdtype(x.dtype, jnp.floating))

    def of_one(arrays, data):
        found = getattr(kernels, name)(*arrays, *rest, **{**options, **data})
        return found[0] if isinstance(found, tuple) else found

    def both_ways(function):
        def loss(*floats_of):
            full = list(arrays)
            for i, x in zip(floats, floats_of, strict=True):
                full[i] = x
            result = function(tuple(full), data)
            return jnp.sum(jnp.sin(result)), result

        return jax.jit(jax.value_and_grad(loss, tuple(range(len(floats))), has_aux=True))(*(arrays[i] for i in floats))

    (_, want), wanted = both_ways(of_one)
    with set_layout(B="data", T="seq"), jax.set_mesh(mesh()):
        (_, got), gradients = both_ways(mapped(name, options, "seq", out))
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5 * max(1, float(jnp.abs(want).max())))
        for g, w in zip(gradients, wanted, strict=True):
            np.testing.assert_allclose(g, w, rtol=1e-4, atol=2e-5 * max(1, float(jnp.abs(w).max())))
        with pytest.raises(ValueError, match=f"{name}: dim [TS] is split over the axis 'seq'.*give axis_name='seq'"):
            mapped(name, options, None, out)(arrays, data)
        # Said to be whole on each rank, which is then what is computed.
        sees = jax.jit(
            jax.shard_map(
                lambda: mapped_whole(name, arrays, rest, options), in_specs=(), out_specs=P(), check_vma=False
            )
        )
        np.testing.assert_allclose(sees(), want, rtol=2e-5, atol=2e-5 * max(1, float(jnp.abs(want).max())))


def mapped_whole(name, arrays, rest, options):
    found = getattr(ejdist, name)(*arrays, *rest, **options, axis_name=())
    return found[0] if isinstance(found, tuple) else found


def inside(function, *arrays, specs=TOKENS, out=TOKENS, layout=None, jit=jax.jit, **how):
    """Returns the result of a function inside a `shard_map` over both axes, jitted: else every primitive is a program."""
    with set_layout(**(layout or {"B": "data", "T": "seq"})), jax.set_mesh(mesh()):
        return jit(jax.shard_map(function, in_specs=specs, out_specs=out, **how))(*arrays)


def test_a_cache_whose_entries_are_split():
    query, rope, cache = normal(B, 1, N, 8), normal(B, 1, N, 4), normal(B, T, 12)
    lens = jnp.array([64, 17, 30, 1], jnp.int32)
    decode = functools.partial(ejdist.mla_decode, softmax_scale=0.3)
    want = decode(query, rope, cache, lens)
    specs = (ROWS, ROWS, TOKENS, ROWS)
    got = inside(lambda *a: decode(*a, axis_name="seq"), query, rope, cache, lens, specs=specs, out=ROWS)
    np.testing.assert_allclose(got, want, atol=1e-5)
    with pytest.raises(ValueError, match=r"mla_decode: dim S is split over the axis 'seq'.*give axis_name='seq'"):
        inside(decode, query, rope, cache, lens, specs=specs, out=ROWS)


@pytest.mark.parametrize("vma", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("documents", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_loss_of_sequences_counts_over_all_of_one(documents, vma):
    router, gate, down = normal(F, 4), normal(4, F, 6), normal(4, 6, F)
    how = {"top_k": 2, "balance": "sequence"}
    ids = (IDS,) if documents else ()

    def loss(x, *ids, **more):
        more |= {"segment_ids": ids[0]} if ids else {}
        return ejdist.moe(x, router, gate, gate, down, **how, **more)[1].balance_loss

    want, wanted = jax.jit(jax.value_and_grad(loss))(X, *ids)

    def whole(x, *ids):
        def parts(*arrays):
            return jax.lax.psum(loss(*arrays, axis_name="seq"), ("data", "seq"))

        return jax.shard_map(parts, in_specs=TOKENS, out_specs=WHOLE, check_vma=vma)(x, *ids)

    with set_layout(B="data", T="seq"), jax.set_mesh(mesh()):
        got, gradient = jax.jit(jax.value_and_grad(whole))(X, *ids)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    np.testing.assert_allclose(gradient, wanted, atol=1e-5)
    with pytest.raises(ValueError, match=r"moe: argument 'balance' = 'sequence'.*dim T on 'seq'.*give axis_name='seq'"):
        inside(lambda *arrays: jax.lax.psum(loss(*arrays), ("data", "seq")), X, *ids, out=WHOLE)


def test_a_loss_of_a_batch_has_no_axis():
    with pytest.raises(ValueError, match="route: argument 'axis_name' is of balance='sequence', and it is 'batch'"):
        ejdist.route(X, normal(F, 4), top_k=1, axis_name="seq")


BLOCKS = jnp.ones((1, 1, 2, 2), bool)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda q, k, v: ejdist.attention(q, k, v, axis_name="seq")[0], "attention: .*split over ranks; use ejdist.ring_att"),
        (lambda q, k, v: ejdist.attention(q, k, v)[0], r"attention: dim T is split .*ring_attention\(..., axis_name='seq'\)"),
        (
            lambda q, k, v: ejdist.blocksparse_attention(q, k, v, BLOCKS, 8),
            r"blocksparse_attention: dim T is split over .*gather the sequence, and give axis_name=\(\)",
        ),
        (
            lambda q, k, v: ejdist.native_sparse_attention(q, k, v, axis_name="seq"),
            "native_sparse_attention: .*does not support a sequence split over",
        ),
        (lambda q, k, v: ejdist.performer_attention(q, k, v, normal(8, H)), "performer_attention: dim T is split .*gather"),
        (
            lambda q, k, v: ejdist.gla_attention(q[:1], k[:1], v[:1], cum_seqlens=[0, 16], axis_name="seq"),
            "gla_attention: argument 'cum_seqlens' cuts a whole sequence",
        ),
        (
            lambda q, k, v: ejdist.flash_attention(q, k, v, bias=jnp.ones((1, 1, 16, 16)), axis_name="seq"),
            "'bias' is as large as T x T",
        ),
        (lambda q, k, v: ejdist.gla_attention(q, k, v, axis_name="tensor"), "axis_name' = 'tensor' is for a call inside"),
        (lambda q, k, v: ejdist.gla_attention(q, k, v, axis_name=3), "axis_name' = 3 must be the name of a mesh axis"),
        (
            lambda q, k, v: ejdist.gla_attention(q, k, v, axis_name="seq", in_specs=(TOKENS,)),
            "arguments 'in_specs' are for global arrays",
        ),
    ],
)  # fmt: skip
def test_what_has_no_form_over_ranks_says_so(call, message):
    with pytest.raises((ValueError, Unsupported), match=message):
        inside(call, Q, K, V)


def test_an_axis_is_for_a_shard_map():
    with pytest.raises(
        ValueError, match="gla_attention: argument 'axis_name' = 'seq' is for a call inside a shard_map"
    ):
        ejdist.gla_attention(Q, K, V, axis_name="seq")
    with pytest.raises(TypeError, match="axis_name"):
        ejdist.rms_norm(X, axis_name="seq")


def test_other_axes_than_those_of_the_sequence_are_no_matter():
    """The layout has the sequence on an axis that this is not mapped over, or on none."""
    want = kernels.gla_attention(Q, K, V)
    got = inside(
        ejdist.gla_attention, Q, K, V, specs=ROWS, out=ROWS, layout={"B": "data", "T": "time"}, check_vma=False
    )
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5 * float(jnp.abs(want).max()))


def test_two_axes_are_counted_from_the_major_one():
    want = kernels.gla_attention(Q, K, V)
    specs = P(None, ("data", "seq"))
    got = inside(lambda *a: ejdist.gla_attention(*a, axis_name=("data", "seq")), Q, K, V, specs=specs, out=specs)
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5 * float(jnp.abs(want).max()))


@pytest.mark.slow
def test_an_order_inside():
    """Attention and recurrences follow the layout's order; with the sequence whole a recurrence refuses."""
    order = Order("zigzag", 4)
    permuted = [order.permute(x) for x in (Q, K, V)]
    layout = {"B": "data", "T": "seq", "order": "zigzag"}
    want = kernels.flash_attention(Q, K, V, causal=True)
    for f in (ejdist.flash_attention, ejdist.ring_attention):
        got = inside(lambda *a, f=f: f(*a, causal=True, axis_name="seq"), *permuted, layout=layout)
        np.testing.assert_allclose(order.inverse(got), want, atol=1e-5)
    want = kernels.gla_attention(Q, K, V)
    got = inside(lambda *a: ejdist.gla_attention(*a, axis_name="seq"), *permuted, layout=layout)
    np.testing.assert_allclose(order.inverse(got), want, rtol=2e-5, atol=2e-5 * float(jnp.abs(want).max()))
    with pytest.raises(Unsupported, match=r"gla_attention: its result depends on the order.*'zigzag' over 4 ranks"):
        inside(lambda *a: ejdist.gla_attention(*a, axis_name=()), *permuted, specs=ROWS, layout=layout)


@pytest.mark.slow
def test_a_ring_runs_over_the_axis_of_the_layout():
    want = kernels.flash_attention(Q, K, V, causal=True)
    got = inside(lambda *a: ejdist.ring_attention(*a, causal=True), Q, K, V, jit=lambda f: f)
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_states_are_those_of_the_whole_sequence():
    want, state = kernels.gla_attention(Q, K, V, return_state=True)

    def both(*arrays):
        return ejdist.gla_attention(*arrays, return_state=True, axis_name="seq")

    got, final = inside(both, Q, K, V, out=(TOKENS, ROWS))
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5 * float(jnp.abs(want).max()))
    np.testing.assert_allclose(final, state, rtol=2e-5, atol=2e-5 * float(jnp.abs(state).max()))
