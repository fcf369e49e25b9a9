"""Native sparse attention over ranks by its blocks: the numbers of one device in every order, what is sent, what is refused."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grid import error
from sparse_calls import MESHES, contract_of, with_gradients

import ejdist
from ejdist import Unsupported, make_mesh
from ejdist.costs import ALL_GATHER, ALL_TO_ALL, PERMUTE, REDUCE_SCATTER
from ejdist.layout import set_layout
from ejdist.operations import bind_ops
from ejdist.order import Order
from ejdist.sequence import Exchange, GroupCast, Halo, sparse_blocks
from ejdist.sequence.cost import attention_shape
from ejdist.sequence.group_cast import capacity
from ejdist.sequence.native_sparse import BLOCKS
from kernels.framework.interpret import interpret
from kernels.ops.native_sparse_attention import native_sparse_attention, op

RNG = np.random.default_rng(0)
B, T, N, K, H, HV = 2, 32, 4, 2, 8, 6
GATES = ("g_cmp", "g_slc", "g_swa")
FEW, MANY = 0.3, 4.0  # buffers: of one block of each rank, so that most calls make several passes; of all


def normal(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


ARRAYS = {"query": normal(B, T, N, H), "key": normal(B, T, K, H), "value": normal(B, T, K, HV)}
ARRAYS |= {name: normal(B, T, N) for name in GATES}
# Documents begin anywhere, some go on over several ranks; and padding.
IDS = np.stack([np.repeat([0, -1, 1, 2], [7, 2, 17, 6]), np.repeat([0, 1], [3, 29])]).astype(np.int32)
# Blocks that are named twice, that are none, and past the query.
GIVEN = RNG.integers(-1, 8, (B, T, K, 3)).astype(np.int32)
COUNTS = RNG.integers(0, 4, (B, T, K)).astype(np.int32)
CALLS = {
    "chosen": (ARRAYS, {"segment_ids": IDS}, {"block_size": 2, "block_counts": 4, "sliding_window": 11}),
    "given": (ARRAYS, {"block_indices": GIVEN}, {"block_size": 4, "sliding_window": 3}),
    "given in documents": (
        {n: ARRAYS[n] for n in ("query", "key", "value")},
        {"block_indices": GIVEN, "segment_ids": IDS, "block_counts": COUNTS},
        {"block_size": 2, "softmax_scale": 0.6},
    ),
    "one document": ({n: ARRAYS[n] for n in ARRAYS if n != "g_swa"}, {}, {"block_size": 4, "block_counts": 5}),
}


@functools.cache
def on_one_device(name):
    arrays, data, options = CALLS[name]
    return with_gradients(functools.partial(contract_of(native_sparse_attention, op), **options))(arrays, data)


def mesh_of(n):
    return make_mesh(sp=n, devices=jax.devices()[:n])


def check(got, wanted, limit=3e-6):
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert error(g, w) < limit


QUICK = {("chosen", "sp4", FEW)}


@pytest.mark.parametrize(
    ("name", "mesh", "buffer"),
    [
        pytest.param(*row, marks=() if row in QUICK else pytest.mark.slow)
        for row in ((name, mesh, buffer) for name in CALLS for mesh in MESHES for buffer in (FEW, MANY))
    ],
)
def test_the_numbers_of_one_device(name, mesh, buffer):
    """Value and every gradient, with as many passes as the batch needs: nothing is dropped."""
    arrays, data, options = CALLS[name]
    mesh = make_mesh(**MESHES[mesh], devices=jax.devices()[: np.prod([*MESHES[mesh].values()])])
    run = functools.partial(ejdist.native_sparse_attention, **options, mesh=mesh, exchange=Exchange(BLOCKS, buffer))
    check(with_gradients(run)(arrays, data), on_one_device(name))


@pytest.mark.parametrize(
    ("order", "name"),
    [
        pytest.param(Order("zigzag", 4), "given in documents", marks=pytest.mark.slow),
        *(
            pytest.param(order, name, marks=pytest.mark.slow)
            for order in (Order("striped", 4), Order("striped", 2, 4), Order("zigzag", 2))
            for name in ("chosen", "given in documents", "one document")
        ),
    ],
    ids=str,
)
def test_tokens_in_another_order_and_a_scheme_that_sends_what_is_needed(order, name):
    """`group_cast` is what a recipe says: its layers exchange blocks, in its buffer."""
    arrays, data, options = CALLS[name]
    permuted, more = ({n: order.permute(x) for n, x in some.items()} for some in (arrays, data))
    call = bind_ops(mesh_of(order.shards), order=order, scheme=GroupCast(FEW)).native_sparse_attention
    weight = np.cos(np.arange(B * T * N * HV)).reshape(B, T, N, HV).astype(np.float32)

    @jax.jit
    def run(arrays, data):
        out, back = jax.vjp(lambda x: call(**x, **data, **options), arrays)
        return out, back(order.permute(weight))[0]

    got = jax.tree.map(order.inverse, run(permuted, more))
    check(got, on_one_device(name))


@pytest.mark.slow
def test_padding_is_never_read():
    """NaN in it, in every array: other tokens, and their gradients, are the same."""
    arrays, data, options = CALLS["chosen"]
    worse = {n: np.where((IDS < 0).reshape(B, T, *(1,) * (x.ndim - 2)), np.nan, x) for n, x in arrays.items()}
    run = functools.partial(ejdist.native_sparse_attention, **options, mesh=mesh_of(2), exchange=Exchange(BLOCKS, FEW))
    check(with_gradients(run)(worse, data), on_one_device("chosen"))


@pytest.mark.slow
def test_half_precision_is_as_near_as_its_roundings():
    arrays, data, options = CALLS["given in documents"]
    narrow = {n: jnp.asarray(x, jnp.bfloat16) for n, x in arrays.items()}
    wide = {n: np.float32(x) for n, x in narrow.items()}
    run = functools.partial(ejdist.native_sparse_attention, **options, mesh=mesh_of(4), exchange=Exchange(BLOCKS, FEW))
    out, gradients = with_gradients(run)(narrow, data)
    assert out.dtype == jnp.bfloat16 and all(g.dtype == jnp.bfloat16 for g in gradients.values())
    check((out, gradients), with_gradients(functools.partial(native_sparse_attention, **options))(wide, data), 2e-2)


# -- what is sent ----------------------------------------------------------------------------------------------------------


LONG, SIZE, WINDOW = 64, 4, 7  # sizes that no two of its arrays share


def program(buffer, differentiated, n=4):
    """Returns the compiled text of a call of one row, without documents."""
    shapes = {"query": (1, LONG, 4, 8), "key": (1, LONG, 2, 8), "value": (1, LONG, 2, 6)} | dict.fromkeys(
        GATES, (1, LONG, 4)
    )
    mesh = mesh_of(n)
    with set_layout(T="sp"):
        run = functools.partial(
            ejdist.native_sparse_attention, block_size=SIZE, block_counts=3, sliding_window=WINDOW, mesh=mesh,
            exchange=Exchange(BLOCKS, buffer),
        )  # fmt: skip

        def loss(arrays):
            return jnp.sum(jnp.sin(run(**arrays)))

        arrays = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
        return jax.jit(jax.grad(loss) if differentiated else loss).lower(arrays).compile().as_text()


def transfers(text):
    """Returns (collective, whether it is inside of a loop) -> the numbers in float32 that its results have, of all of them."""
    sent = {}
    bodies = set(re.findall(r"body=%?([\w.\-]+)", text))
    inside = False
    for line in text.splitlines():
        if start := re.match(r"(?:ENTRY )?%?([\w.\-]+) .*{$", line):
            inside = start[1] in bodies
        made = re.search(r"= (.*) (all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(", line)
        for shape in re.findall(r"f32\[([\d,]+)\]", made[1]) if made else ():
            key = made[2], inside
            sent[key] = sent.get(key, 0) + int(np.prod([int(size) for size in shape.split(",")]))
    return sent


@pytest.mark.slow
@pytest.mark.parametrize("buffer", [0.4, pytest.param(MANY, marks=pytest.mark.slow)])
def test_what_is_sent_is_what_is_declared(buffer):
    """No rank gathers keys: means, the tokens before its own, and as many blocks as a pass has room for."""
    n, own = 4, LONG // 4
    sent = transfers(program(buffer, differentiated=True))
    shape = attention_shape((("sp", n),), {"B": 1, "T": own, "N": 4, "K": 2, "H": 8, "Hv": 6}, 4, n - 1)
    room = capacity(buffer, n, own // SIZE)
    passes = -(-own // SIZE // room)
    declared = sparse_blocks.cost(shape, own, SIZE, WINDOW, buffer).bytes
    loops = {name: sent.get((name, True), 0) * 4 for name in ("all-to-all", "all-gather", "collective-permute")}
    assert loops["all-gather"] == loops["collective-permute"] == 0
    # The first pass is before the loop, whose turns are the others; gradients of the last one go back after it.
    by_all = (sent["all-to-all", False] * 4 + (passes - 1) * loops["all-to-all"]) * (n - 1) / n
    assert by_all == declared["sp", ALL_TO_ALL] == 3 * passes * (n - 1) * room * SIZE * 2 * (8 + 6) * 4
    assert sent["all-gather", False] * 4 * (n - 1) / n == declared["sp", ALL_GATHER] < 4 * LONG * 2 * 14 * (n - 1) / n
    assert sent["reduce-scatter", False] * 4 * (n - 1) == declared["sp", REDUCE_SCATTER]
    assert sent["collective-permute", False] * 4 == declared["sp", PERMUTE] == 2 * (WINDOW - 1) * 2 * 14 * 4


def test_what_the_readme_says_that_a_rank_sends():
    shape = attention_shape((("sp", 8),), {"B": 1, "T": 8192, "N": 32, "K": 2, "H": 128, "Hv": 128}, 2, 7)
    for share, wanted, passes in ((10 / 128, 17.6, 1), (1.0, 175, 13)):
        made = sparse_blocks.cost(shape, 8192, 64, 512, 0.5, share)
        assert sum(made.bytes.values()) / 2**20 == pytest.approx(wanted, abs=0.2)
        assert made.calls["sp", ALL_TO_ALL] == 3 * passes
    assert 2 * 7 * shape.travelling == 112 * 2**20 and capacity(0.5, 8, 128) == 10


def test_what_a_layer_declares_follows_documents():
    """Of short documents few blocks of other ranks are needed."""
    shape = attention_shape((("sp", 8),), {"B": 1, "T": 1024, "N": 4, "K": 2, "H": 8, "Hv": 8}, 2, 7)
    every, few = (sum(sparse_blocks.cost(shape, 1024, 64, 128, 0.5, part).bytes.values()) for part in (1.0, 0.125))
    assert few < every / 4
    assert sparse_blocks.cost(shape, 1024, 64, 128, 0.5).calls["sp", ALL_TO_ALL] == 3 * 8


# -- what is refused -------------------------------------------------------------------------------------------------------


def test_what_is_refused():
    arrays, _, _ = CALLS["given"]
    three = {n: arrays[n] for n in ("query", "key", "value")}
    call = functools.partial(ejdist.native_sparse_attention, mesh=mesh_of(4), exchange=BLOCKS)
    with pytest.raises(ValueError, match=r"'block_size' = 3 does not divide the 8 tokens of a rank.*exchange='gather'"):
        call(**three, block_size=3)
    with pytest.raises(
        ValueError, match=r"'exchange' = 'blocks' is for queries of all tokens.* 4 on a rank for 8 keys"
    ):
        call(**three | {"query": arrays["query"][:, :16]}, block_size=4)
    with pytest.raises(
        ValueError, match=r"'exchange' = 'ring' is unknown; use 'gather', 'blocks' or an ejdist.sequence.Exchange"
    ):
        call(**three, exchange="ring")
    for other in (3, True, ["blocks"]):
        with pytest.raises(
            ValueError, match=r"'exchange' = .* is unknown; use 'gather', 'blocks' or an ejdist.sequence.Exchange"
        ):
            call(**three, exchange=other)
    assert Halo(GroupCast(0.25)).blocks == 0.25, "a halo is of windows, and sparse layers have none of their own"
    with pytest.raises(ValueError, match=r"'buffer' = 0 of an Exchange must be a number above 0"):
        Exchange(BLOCKS, 0)
    for platform, more in (("triton", {}), ("pallas", {}), ("triton", {"block_indices": GIVEN})):
        with pytest.raises(Unsupported, match=rf"^native_sparse_attention .*for cpu with platform='{platform}'"):
            call(**three, **more, block_size=4, platform=platform)
    with interpret(), pytest.raises(Unsupported, match=r"^native_sparse_attention .* has no backend for this call"):
        call(**{n: np.repeat(x, 256, -1) for n, x in three.items()}, block_size=4, platform="triton")
    alone = ejdist.native_sparse_attention(**three, block_size=3, exchange=BLOCKS)  # without a mesh nothing travels
    assert error(alone, native_sparse_attention(**three, block_size=3)) == 0
    with pytest.raises(Exception, match="native_sparse_attention: forward-mode differentiation"):
        jax.jvp(lambda q: call(**three | {"query": q}, block_size=4), (three["query"],), (three["query"],))
    with pytest.raises(Unsupported, match="native_sparse_attention: second derivatives are not supported"):
        jax.grad(lambda q: jnp.sum(jax.grad(lambda q: jnp.sum(call(**three | {"query": q}, block_size=4)))(q)))(
            three["query"]
        )
