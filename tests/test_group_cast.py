"""Group-cast: which chunks of keys a rank needs, that these are sent in passes of a bounded buffer and no more, and the numbers
of one device."""

import dataclasses
import functools
import itertools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_scheme_choice import PACKED as RECIPE
from test_scheme_choice import chosen
from test_sequence import MASKS, TWO_AXES, assert_close, on_one_device, outputs_and_gradients
from test_trips import BATCHES, HEADS, KEY_HEADS, WIDTH, T, arrays, everything, first_seen, ids_of, sent

from ejdist import Order, make_mesh, ring_attention
from ejdist.documents import Documents, documents_of
from ejdist.models.model import CAUSAL, Flops
from ejdist.order import order_for
from ejdist.sequence import GroupCast, Ring, Ulysses, exchange
from ejdist.sequence.cost import AttentionShape, chunks_of_documents
from ejdist.sequence.group_cast import Cast, Listed, capacity
from ejdist.sequence.schedule import chunk_of, chunks_by_rules, chunks_of_rows
from ejdist.sequence.section import SequenceSection
from ejdist.training.attended import Attended
from kernels import MaskInfo, Unsupported, flash_attention
from recipes.schema import compose

__all__ = ["sent"]  # a fixture
ORDERS = ("contiguous", "zigzag", "striped", "balanced")


def order_of(name, ranks):
    return Order(name, ranks, {2: 4, 4: 4, 8: 2}[ranks] if name in ("striped", "balanced") else 1)


def chunks_seen(order, seen, index):
    """Returns bool [ranks, ranks, chunks], from all pairs of tokens of a row, bool [T, T] in the order of the text."""
    n, chunk = order.shards, chunk_of(order, T // order.shards)
    placed = seen[np.ix_(index, index)].reshape(n, T // n, n, -1, chunk).any((1, 4))
    placed[np.arange(n), np.arange(n)] = False
    return placed


# -- which chunks -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_chunks_are_those_of_pairs(name, ranks):
    """Against all pairs of tokens of rows whose documents are drawn, and of masks by rules."""
    rng, order = np.random.default_rng(0), order_of(name, ranks)
    ids = np.sort(rng.integers(0, 12, (8, T)), 1)
    ids[::2, -9:] = -1
    first, at = first_seen(ids), np.arange(T)
    index = order.text_indices(at + 1.0 - first)
    made = chunks_of_rows(order, first, index if order.carried else None)
    pairs = [(at <= at[:, None]) & (at >= low[:, None]) for low in first]
    wanted = [chunks_seen(order, *row).sum(-1).max() for row in zip(pairs, index, strict=True)]
    assert made.tolist() == wanted
    for rules in (
        MaskInfo(causal=True), MaskInfo(), MaskInfo(causal=True, window=(9, 0)), MaskInfo(window=(6, 3)),
        MaskInfo(causal=True, chunk_size=12), MaskInfo(causal=True, window=(8, 0), sink_tokens=3),
    ):  # fmt: skip
        table = chunks_by_rules(order, T, rules)
        assert (table is None) == order.carried
        if table is not None:
            np.testing.assert_array_equal(table, chunks_seen(order, np.asarray(rules.visible(T, T))[0, 0], index[0]))


def test_a_chunk_is_a_part_of_a_run_or_stripes():
    for order, own, chunk in (
        (Order("contiguous", 8), 16384, 128), (Order("zigzag", 8), 16384, 128), (Order("contiguous", 8), 131072, 1024),
        (Order("contiguous", 8), 16640, 130 * 128 // 65), (Order("zigzag", 4), 16, 1), (Order("contiguous", 4), 26, 13),
        (Order("balanced", 8, 256), 16384, 256), (Order("striped", 8, 128), 131072, 256), (Order("striped", 4, 1), 16, 1),
    ):  # fmt: skip
        assert chunk_of(order, own) == chunk and own % chunk == 0, (order, own)
    assert chunk_of(Order("zigzag", 8), 24 * 1024) % 128 == 0, "of whole tiles"


def test_room_is_of_the_tokens_that_a_device_has_beside_its_own():
    assert [capacity(buffer, 8, 128) for buffer in (1, 2, 0.001, 100)] == [19, 37, 1, 128]
    assert GroupCast(1).brought(8, (128, 128)) == (7, 7 * 19 * 7 / 128) and GroupCast().brought(8, (0, 128))[0] == 1
    assert GroupCast(8).brought(8, (128, 128)) == (1, 7)


def test_lists_have_what_is_needed_first_and_nothing_twice():
    table = np.random.default_rng(0).random((2, 3, 7)) < 0.4
    ranks, room = jnp.asarray([2, 0]), 3
    listed = Listed.of(jnp.asarray(table), ranks, room)
    for row, (at, rank) in itertools.product(range(2), enumerate((2, 0))):
        chunks = np.asarray(listed.chunks)[row, at]
        wanted = np.flatnonzero(table[row, rank])
        assert len(chunks) == 9 and [*chunks[: len(wanted)]] == [*wanted] and sorted(chunks[:7]) == [*range(7)]
        came = [listed.slots(room, turn) for turn in range(3)]
        slots = [(c, t) for r, c, t in (np.stack(x)[:, row] for x in came) for c, t, r in zip(c, t, r) if r == rank]
        assert [c for c, there in slots if there] == [*wanted]


# -- the numbers of one device, and what is sent ---------------------------------------------------------------------------


CALLS = [
    (GroupCast(0.5), "balanced", {"dp": 2, "sp": 4}, jnp.float32),
    (GroupCast(1), "zigzag", {"sp": 8}, jnp.bfloat16),
    (GroupCast(1), "contiguous", {"dp": 2, "sp": 4}, jnp.float32),
    (GroupCast(3), "striped", {"sp": 4}, jnp.float32),
    (GroupCast(0.1), "contiguous", {"sp": 2}, jnp.float32),
    (GroupCast(), "balanced", {"sp": 8}, jnp.float32),
]


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "name", "sizes", "dtype"), CALLS)
def test_what_documents_need_is_sent_and_no_more(sent, scheme, name, sizes, dtype):
    """One program over batches of several documents: the numbers of one device, and the bytes that the scheme declares for the
    chunks that pairs of tokens need. More than there is room for takes more passes; one document is sent whole. Another token
    changes later ones of its document alone."""
    ranks, rows = sizes["sp"], sizes.get("dp", 1)
    mesh, order = make_mesh(**sizes), order_of(name, ranks)
    attend = functools.partial(ring_attention, mesh=mesh, order=order, scheme=scheme, platform="xla")
    run = jax.jit(functools.partial(everything, attend))
    alone = jax.jit(functools.partial(everything, functools.partial(flash_attention, platform="xla")))
    passes, at, size = [], np.arange(T), jnp.dtype(dtype).itemsize
    for lengths in BATCHES.values():
        ids = ids_of(*itertools.islice(itertools.cycle(lengths), rows))
        first, inputs = first_seen(ids), [np.asarray(x) for x in arrays(rows, dtype)]
        index = order.text_indices(at + 1.0 - first)

        def made(inputs, ids=ids, index=index):
            placed = [order.permute(x, index=index) for x in (*inputs, ids)]
            found = jax.block_until_ready(run(*placed, *([jnp.asarray(index)] if order.carried else [])))
            jax.effects_barrier()
            return [np.asarray(order.inverse(np.asarray(x), index=index), np.float32) for x in found]

        sent["bytes"] = 0
        found = made(inputs)
        count = sent["bytes"]
        wanted = alone(*(jnp.asarray(x, jnp.float32) for x in inputs), ids)
        for x, y in zip(found, wanted, strict=True):
            np.testing.assert_allclose(x, y, atol=2e-5 if dtype == jnp.float32 else 6e-2, rtol=2e-2)
        same = (ids[:, :, None] == ids[:, None]) & (ids >= 0)[:, None]
        tables = [chunks_seen(order, s & (at <= at[:, None]), i) for s, i in zip(same, index, strict=True)]
        most, own = max(int(table.sum(-1).max()) for table in tables), tables[0].shape[2]
        query, key, lse = (T // ranks * n for n in (HEADS * WIDTH * size, KEY_HEADS * WIDTH * size, 4 * HEADS))
        shape = AttentionShape(
            (("sp", ranks),), ranks - 1, query, key, key, query, lse, HEADS, KEY_HEADS, size, chunks=(most, own)
        )
        assert count == rows * ranks * sum(scheme.cost(shape).bytes.values())
        passes.append(scheme.brought(ranks, (most, own))[0])
        if lengths is not BATCHES["long"]:
            continue
        token = 20
        other = [np.where((at == token)[:, None, None], 1 - x, x) if i in (1, 2) else x for i, x in enumerate(inputs)]
        changed = np.abs(made(other)[0] - found[0]).max((2, 3)) > 0
        assert not (changed & ~(same[:, token] & (at >= token))).any() and changed[:, token:].any()
    assert passes[-1] == -(-own // capacity(scheme.buffer, ranks, own)), "one document needs all"
    assert passes[-1] > passes[0] or scheme.buffer > 2


@pytest.mark.slow
@pytest.mark.parametrize("name", [*MASKS])
@pytest.mark.parametrize("order", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("sizes", [{"sp": 2}, {"sp": 4, "tp": 2}, {"sp": 8}], ids=str)
@pytest.mark.parametrize("buffer", [0.3, 1])
def test_every_mask_of_one_device(name, order, sizes, buffer):
    check_numbers(name, order, sizes, buffer)


@pytest.mark.parametrize(
    ("name", "order", "sizes", "buffer"),
    [
        ("sinks_packed_window", "zigzag", {"sp": 4, "tp": 2}, 0.3),
        pytest.param("packed_chunk", "striped", {"sp": 4}, 1, marks=pytest.mark.slow),
        pytest.param("soft_cap", "contiguous", {"sp": 8}, 1, marks=pytest.mark.slow),
    ],
)
def test_the_numbers_of_one_device(name, order, sizes, buffer):
    check_numbers(name, order, sizes, buffer)


def check_numbers(name, order, sizes, buffer):
    made = order_of(order, sizes["sp"])
    cast = functools.partial(ring_attention, mesh=make_mesh(**sizes), order=made, scheme=GroupCast(buffer))
    assert_close(
        outputs_and_gradients(cast, made, MASKS[name]), on_one_device(name), f"{name} {order} {sizes} {buffer}"
    )


@pytest.mark.slow
@pytest.mark.parametrize("order", ["zigzag", "striped"])
def test_by_a_transfer_for_each_pair_of_ranks(order, monkeypatch):
    """As on a torus. Two ranks: XLA's CPU runtime lets several transfers begin at once, which can end the process."""
    monkeypatch.setattr(exchange, "on_torus", lambda: True)
    check_numbers("sinks_packed_window", order, {"sp": 2}, 0.3)


def test_a_transfer_for_each_pair_goes_as_far_as_it_says(monkeypatch):
    """And what goes back as far the other way: to the ranks that the lists name, of those that these name."""
    far = []
    monkeypatch.setattr(exchange, "shift", lambda x, axis, by: far.append(by) or x)
    monkeypatch.setattr(exchange, "on_torus", lambda: True)
    monkeypatch.setattr(exchange, "rank", lambda axis: jnp.int32(1))
    order = Order("zigzag", 4)
    own = {"query": jnp.zeros((1, 16, 1, 1))}
    local = SimpleNamespace(
        own=own, query=own["query"], ranks=4, axis="sp", mask=MaskInfo(causal=True), static=SimpleNamespace(order=order)
    )
    cast = Cast.of(local, 1)
    x = jnp.zeros((1, 3 * cast.room, 2, 1))
    assert [y.shape for y in cast.moved(x, x)] == [x.shape] * 2 and far == [1, 2, 3, -1, -2, -3]
    # The receiver is as far after a rank as the chunks are sent, and the sender as far before.
    assert cast.leaving.ranks.tolist() == [2, 3, 0] and cast.coming.ranks.tolist() == [0, 3, 2]


@pytest.mark.slow
@pytest.mark.parametrize("scheme", [GroupCast(), Ulysses(GroupCast())], ids=lambda s: type(s).__name__)
@pytest.mark.parametrize("order", ["contiguous", "zigzag", "striped"])
def test_over_two_axes(scheme, order):
    made = Order(order, 8, 2 if order == "striped" else 1)
    cast = functools.partial(ring_attention, mesh=TWO_AXES, axis_name=("a", "b"), order=made, scheme=scheme)
    name = "sinks_packed_window"
    assert_close(outputs_and_gradients(cast, made, MASKS[name]), on_one_device(name), order)


@pytest.mark.slow
def test_rows_of_a_vmap_have_as_many_passes():
    attend = functools.partial(ring_attention, mesh=make_mesh(sp=4), scheme=GroupCast(), causal=True, platform="xla")
    q, k, v, *_ = (jnp.stack([jnp.asarray(x)] * 2) for x in arrays(1, jnp.float32))
    ids = jnp.stack([jnp.arange(T)[None] // (T // 4), jnp.zeros((1, T), int)]).astype(jnp.int32)
    found = jax.jit(jax.vmap(lambda *a: attend(*a[:3], q_segment_ids=a[3], kv_segment_ids=a[3])))(q, k, v, ids)
    for row, x in enumerate(found):
        wanted = flash_attention(q[row], k[row], v[row], causal=True, q_segment_ids=ids[row], kv_segment_ids=ids[row])
        np.testing.assert_allclose(x, wanted, atol=2e-5)


# -- what is planned, chosen, logged and refused ---------------------------------------------------------------------------


def test_a_plan_counts_the_chunks_of_documents():
    """Of 131,072 tokens over eight devices packed documents need some, where chunks are dealt out, and one document all."""
    length, documents = 2**17, documents_of("1024")
    need = {n: chunks_of_documents(order_for(n, 8, length), length, CAUSAL, documents) for n in ORDERS}
    assert all(need[name][0] <= 0.7 * need[name][1] for name in ("contiguous", "zigzag", "balanced"))
    for name in ("zigzag", "striped"):
        most, every = chunks_of_documents(order_for(name, 8, length), length, CAUSAL, Documents())
        assert most == every
    shape = AttentionShape((("sp", 8),), 7, *(1000,) * 5, 8, 8, 2)
    few, all_of = (
        sum(GroupCast().cost(dataclasses.replace(shape, chunks=c)).bytes.values()) for c in (need["balanced"], None)
    )
    assert few < all_of < sum(Ring().cost(shape).bytes.values()), "gradients go back in the dtype of the keys"
    shape = dataclasses.replace(shape, chunks=(128, 128))
    switch, torus = (GroupCast(1).cost(dataclasses.replace(shape, torus=t)) for t in (False, True))
    assert switch.bytes == torus.bytes
    assert (sum(switch.calls.values()), sum(torus.calls.values())) == (2 * 7 + 2, 3 * 7 * 7), (
        "a pass with what goes back"
    )
    in_place, merged = (GroupCast(1).passes(dataclasses.replace(shape, tiles=tiles)) for tiles in (64, 0))
    assert 0 < in_place < merged, "packing, and where kernels do not add in place the merge of each pass"
    assert GroupCast(0.25).memory(shape).work < GroupCast().memory(shape).work < GroupCast(2).memory(shape).work


@pytest.mark.slow
def test_auto_takes_it_where_documents_are_few_of_many_ranks():
    """64 GPUs of several hosts, of whose heads Ulysses has too few, and documents of which some are long: a ring's keys go
    round, whoever needs them. Not where all are so short that a ring has few hops in contiguous order, nor on one host, where
    a GPU's host would wait for the number of passes longer than for what is sent."""
    far = chosen(f"{RECIPE}1048576 mesh.sp=64", documents="long_tail", sp=64)
    seconds = far.of_schemes()
    assert far.scheme == "group_cast" and seconds["group_cast"] < 0.7 * seconds["ring"]
    assert far.order.order.name == "balanced" and "is group_cast in balanced order" in far.describe()
    short = chosen(f"{RECIPE}1048576 mesh.sp=64", sp=64)
    assert (short.scheme, short.order.order.name) == ("ring", "contiguous")
    # Latents of 128 heads, on one host: passes that do not add in place merge outputs 28 times as wide as what is sent.
    deep = RECIPE.replace("model=8b model.num_layers=1", "model=deepseek_v3 model.num_layers=4")
    latents = chosen(f"{deep}65536 mesh.sp=8", sp=8).of_schemes()
    assert latents["group_cast"] > 1.1 * latents["ring"]
    # Blocks of sparse layers travel by name alone, as what packing them takes is not known.
    sparse = chosen(f"{RECIPE}1048576 mesh.sp=16".replace("model=8b", "model=sparse_8b"), sp=16).of_schemes()
    assert sparse and "group_cast" not in sparse
    near = chosen(f"{RECIPE}32768 mesh.sp=4")
    assert near.scheme != "group_cast" and near.of_schemes()["group_cast"] > near.of_schemes()["ring"]


def test_a_step_logs_its_passes():
    order, ids = Order("striped", 4, 4), np.stack([np.repeat(np.arange(4), 16), np.zeros(T, int)])
    program = SimpleNamespace(
        order=order, groups=1, mesh=SimpleNamespace(shape={"sp": 4}),
        model=SimpleNamespace(flops=[Flops(1, pair=1)]),
    )  # fmt: skip
    made = {}
    for scheme, buffer in (("ring", 0.5), ("group_cast", 0.25)):
        section = SequenceSection(scheme=scheme, buffer=buffer)
        s = SimpleNamespace(data=SimpleNamespace(global_batch=2), accumulation=2, sequence=section)
        made[scheme] = Attended.of(program, ids).evenness(program, s)
    assert {*made["group_cast"]} - {*made["ring"]} == {"passes_sp", "keys_sp"}
    rows = [GroupCast(0.25).brought(4, (int(most), 4)) for most in Attended.of(program, ids).chunks]
    assert made["group_cast"]["passes_sp"] == np.mean([passes for passes, _ in rows])
    assert made["group_cast"]["keys_sp"] == np.mean([keys for _, keys in rows])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GroupCast(0), "sequence.buffer = 0 must be a number above 0"),
        (lambda: GroupCast(True), "sequence.buffer = True must be a number above 0"),
        (
            lambda: SequenceSection(scheme="group_cast", buffer=-1.0).validate(),
            "sequence.buffer = -1.0 must be a number",
        ),
        (
            lambda: SequenceSection(buffer=2.0).validate(),
            "sequence.buffer = 2.0 is no option of the scheme 'ring': use sequence.scheme=group_cast",
        ),
        (
            lambda: Cast.of(
                SimpleNamespace(own={"block_mask": 0}, static=SimpleNamespace(op=flash_attention.ops[0])), 1
            ),
            "flash_attention: a group-cast .* has a mask of blocks; use scheme 'all_gather'",
        ),
    ],
)
def test_refusals(make, message):
    with pytest.raises((ValueError, Unsupported), match=message):
        make()


def test_a_recipe_says_the_buffer():
    words = (
        "recipe=long_context sequence.scheme=group_cast sequence.buffer=0.25 sequence.window_scheme=group_cast".split()
    )
    made = compose(words).sequence.made()
    assert made.full == made.window == GroupCast(0.25) and made.reads_batch and made.hides
