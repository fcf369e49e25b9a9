"""The hops that the documents of a batch need: which they are, that no other is sent, forward and backward, and the numbers of
one device."""

import functools
import itertools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejdist import Order, make_mesh, ring_attention
from ejdist.documents import Documents, documents_of, places
from ejdist.experts.schemes import AllToAll
from ejdist.mesh import mesh_shape
from ejdist.models.model import CAUSAL
from ejdist.models.remat import REMAT
from ejdist.models.share import Share
from ejdist.planning.candidates import candidate_of
from ejdist.planning.search import Predictor
from ejdist.planning.targets import target_of
from ejdist.sequence import AllGather, Ring, Ulysses, exchange
from ejdist.sequence.cost import AttentionShape, hops_of_documents
from ejdist.sequence.schedule import needed_of_rows
from ejdist.sequence.section import SequenceSection
from ejdist.sequence.way import LONG, Way, by_batch, few_hops
from kernels import flash_attention
from kernels.engines.attention.pairs import keys_at
from recipes.schema import compose

T, HEADS, KEY_HEADS, WIDTH = 64, 4, 2, 16
# Lengths of documents, of the rows of a batch in turn: in one rank of four, some over two ranks, one over three, one of all.
BATCHES = {
    "own": ([4, 6, 6] * 4, [16, 4, 4, 8, 16, 16]),
    "two": ([10, 10, 12, 12, 20], [16, 20, 8, 10, 10]),
    "long": ([6, 40, 18], [32, 16, 16]),
    "one": ([64], [16, 48]),
}


def ids_of(*rows):
    """Returns int32 [rows, T]: documents of those lengths; the last three tokens are padding."""
    ids = np.stack([np.repeat(np.arange(len(lengths)), lengths) for lengths in rows]).astype(np.int32)
    ids[:, -3:] = -1
    return ids


def first_seen(ids):
    return np.where(ids >= 0, np.arange(T) - places(ids), np.arange(T))


# -- which hops ---------------------------------------------------------------------------------------------------------


def test_a_way_has_every_hop_that_is_needed_and_no_shorter_one_has():
    for n in (2, 3, 4, 6):
        for others in itertools.product((False, True), repeat=n - 1):
            needed = np.array([True, *others])
            wanted = set(np.flatnonzero(needed).tolist())
            for jumps in {False, n > 2}:
                made = Way.of(needed, jumps)
                up, start = int(made.up), int(made.start)
                on_the_way = {*range(up + 1), *range(start, n)}
                assert wanted <= on_the_way and int(made.last) == max(on_the_way)
                # One hop on, and where hops are left out one transfer more.
                ways = [(a, n, a) for a in range(n)]
                ways += [(a, b, a + 1 + n - b) for a in range(n) for b in range(a + 1, n) if jumps]
                fewest = min(sent for a, b, sent in ways if wanted <= {*range(a + 1), *range(b, n)})
                assert int(made.sent) == fewest
                traced = jax.jit(lambda x, jumps=jumps: (lambda w: (w.up, w.start, w.sent))(Way.of(x, jumps)))
                if n == 6 and sum(others) == 2:
                    assert tuple(map(int, traced(needed))) == (up, start, int(made.sent))


@pytest.mark.parametrize("name", ["contiguous", "zigzag", "striped", "balanced"])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_hops_of_documents_are_those_of_pairs(name, ranks):
    """Against all pairs of tokens of rows whose documents are drawn."""
    rng = np.random.default_rng(0)
    order = Order(name, ranks, 4 if name in ("striped", "balanced") else 1)
    ids = np.sort(rng.integers(0, 6, (8, T)), 1)
    ids[::2, -9:] = -1
    first = first_seen(ids)
    index = order.text_indices(np.arange(T) + 1.0 - first)
    made = needed_of_rows(order, first, index if order.carried else None)
    at = np.arange(T)
    for row in range(len(ids)):
        q, k = index[row][:, None], index[row][None]
        seen = (k <= q) & (k >= first[row][index[row]][:, None])
        pairs = seen.reshape(ranks, -1, ranks, T // ranks).any((1, 3))
        wanted = {(r - s) % ranks for r, s in zip(*np.nonzero(pairs), strict=True)}
        assert set(np.flatnonzero(made[row]).tolist()) == wanted
    assert len(at) == T


# -- what is sent -------------------------------------------------------------------------------------------------------


@pytest.fixture
def sent(monkeypatch):
    """Counts what devices send, when a program runs: bytes in all, and along each axis by its name."""
    count, shift, gather, scatter = {"bytes": 0}, exchange.shift, exchange.gather, exchange.scatter_sum
    lock = threading.Lock()  # each device calls from a thread of its own

    def counting(tree, times, axis):
        def add(bytes_):
            with lock:
                count["bytes"] += int(bytes_)
                count[axis] = count.get(axis, 0) + int(bytes_)

        leaves = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)]
        if times and leaves:
            jax.debug.callback(add, np.int64(times * sum(x.size * x.dtype.itemsize for x in leaves)))

    def shifted(tree, axis, by):
        counting(tree, by % exchange.size(axis) != 0, axis)
        return shift(tree, axis, by)

    def gathered(tree, axis, dim=1):
        counting(tree, exchange.size(axis) - 1, axis)
        return gather(tree, axis, dim)

    def scattered(tree, axis):
        counting(tree, (exchange.size(axis) - 1) / exchange.size(axis), axis)
        return scatter(tree, axis)

    def exchanged(tree, axis, split, join):
        counting(tree, (exchange.size(axis) - 1) / exchange.size(axis), axis)
        return to_all(tree, axis, split, join)

    to_all = exchange.all_to_all
    patched = {"shift": shifted, "gather": gathered, "scatter_sum": scattered, "all_to_all": exchanged}
    for name, counted in patched.items():
        monkeypatch.setattr(exchange, name, counted)
    return count


@functools.cache
def arrays(rows, dtype):
    rng = np.random.default_rng(1)
    shapes = [(rows, T, heads, WIDTH) for heads in (HEADS, KEY_HEADS, KEY_HEADS, HEADS)]
    return [jnp.asarray(rng.standard_normal(shape).astype(dtype)) for shape in shapes]


def everything(attend, q, k, v, d_out, ids, positions=None):
    """Returns out and the gradients."""
    at = {} if positions is None else {"q_positions": positions, "kv_positions": positions}
    out, pull = jax.vjp(lambda *a: attend(*a, causal=True, q_segment_ids=ids, kv_segment_ids=ids, **at), q, k, v)
    return out, *pull(d_out)


CALLS = [
    (Ring(hops="batch"), "contiguous", {"dp": 2, "sp": 4}, jnp.float32),
    (Ring(hops="batch"), "zigzag", {"sp": 8}, jnp.bfloat16),
    (Ring("bfloat16", "batch"), "zigzag", {"sp": 8}, jnp.bfloat16),
    (AllGather(hops="batch"), "contiguous", {"sp": 4}, jnp.float32),
    (AllGather("batch"), "zigzag", {"sp": 8}, jnp.float32),
    (Ring(hops="batch"), "striped", {"sp": 4}, jnp.float32),
    (Ring(hops="batch"), "balanced", {"sp": 4}, jnp.float32),
    (AllGather("batch"), "balanced", {"sp": 4}, jnp.float32),
    (Ring(hops="mask"), "contiguous", {"sp": 4}, jnp.float32),
    (Ring(hops="batch"), "contiguous", {"sp": 2}, jnp.float32),
]


@pytest.mark.parametrize(
    ("scheme", "name", "sizes", "dtype"),
    [pytest.param(*call, marks=() if i == 0 else pytest.mark.slow) for i, call in enumerate(CALLS)],
)
def test_hops_that_no_rank_needs_are_not_sent(sent, scheme, name, sizes, dtype):
    """One program over batches of several documents: the numbers of one device, and the bytes that the scheme declares for the
    hops that these need. Groups of devices with other rows make the same hops."""
    ranks, rows = sizes["sp"], sizes.get("dp", 1)
    mesh, order = make_mesh(**sizes), Order(name, ranks, 4 if name in ("striped", "balanced") else 1)
    attend = functools.partial(ring_attention, mesh=mesh, order=order, scheme=scheme, platform="xla")
    run = jax.jit(functools.partial(everything, attend))
    alone = jax.jit(functools.partial(everything, functools.partial(flash_attention, platform="xla")))
    made = set()
    for lengths in BATCHES.values():
        ids = ids_of(*itertools.islice(itertools.cycle(lengths), rows))
        first, inputs = first_seen(ids), [np.asarray(x) for x in arrays(rows, dtype)]
        index = order.text_indices(np.arange(T) + 1.0 - first)
        placed = [order.permute(x, index=index) for x in (*inputs, ids)]
        sent["bytes"] = 0
        found = jax.block_until_ready(run(*placed, *([jnp.asarray(index)] if order.carried else [])))
        jax.effects_barrier()
        wanted = alone(*(jnp.asarray(x, jnp.float32) for x in inputs), ids)
        for x, y in zip(found, wanted, strict=True):
            x = np.asarray(order.inverse(np.asarray(x), index=index), np.float32)
            np.testing.assert_allclose(x, y, atol=2e-5 if dtype == jnp.float32 else 6e-2, rtol=2e-2)
        needed = needed_of_rows(order, first, index if order.carried else None).any(0)
        way = Way.of(needed, ranks > 2 and not order.goes_on)
        size = jnp.dtype(dtype).itemsize
        query, key, lse = (T // ranks * n for n in (HEADS * WIDTH * size, KEY_HEADS * WIDTH * size, 4 * HEADS))
        shape = AttentionShape(
            (("sp", ranks),), ranks - 1, query, key, key, query, lse, HEADS, KEY_HEADS, size,
            by_batch=int(way.sent), few_hops=order.few_hops,
        )  # fmt: skip
        assert sent["bytes"] == rows * ranks * sum(scheme.cost(shape).bytes.values())
        made.add(int(way.sent))
    assert max(made) == ranks - 1 and (len(made) > 1 or name == "balanced") and (0 in made) == (name == "contiguous")


@pytest.mark.slow
def test_between_groups_of_ranks_too(sent):
    """A product of two by four: each group of four ranks has half of the text, and documents that end there need no other."""
    order, attend = Order("contiguous", 8), functools.partial(ring_attention, axis_name=("cp", "sp"), platform="xla")
    attend = functools.partial(
        attend, mesh=make_mesh(cp=2, sp=4), order="contiguous", scheme=Ulysses(Ring(hops="batch"))
    )
    run = jax.jit(functools.partial(everything, attend))
    alone = jax.jit(functools.partial(everything, flash_attention))
    bytes_of = {}
    for name, lengths in (("apart", [20, 12, 32]), ("over", [20, 44])):
        ids, inputs = ids_of(lengths), arrays(1, jnp.float32)
        sent["cp"] = 0
        found = run(*inputs, ids)
        jax.effects_barrier()
        bytes_of[name] = sent["cp"]
        for x, y in zip(found, alone(*inputs, ids), strict=True):
            np.testing.assert_allclose(order.inverse(x), y, atol=2e-5)
    assert bytes_of["over"] > bytes_of["apart"] == 0


# -- what is planned, chosen and refused ----------------------------------------------------------------------------------


def test_a_plan_counts_the_hops_of_documents():
    """Of 131,072 tokens over eight devices a mean of 4,096 needs one hop or two in contiguous order, where a device has one run
    of the text; by choice in a zigzag too. One document needs all."""
    documents, length = documents_of("4096"), 2**17
    made = {name: hops_of_documents(Order(name, 8), length, CAUSAL, documents) for name in ("contiguous", "zigzag")}
    assert 1 <= made["contiguous"] <= 2 and made["zigzag"] <= 6
    assert hops_of_documents(Order("contiguous", 8), length, CAUSAL, Documents()) is None
    row = Documents((length - 1, 1)).rows(length)[0]
    assert keys_at(CAUSAL, row).max() == length - 1
    assert hops_of_documents(Order("contiguous", 8), length, CAUSAL, Documents((length,), "whole")) == 7

    words = "recipe=long_context mesh.fsdp=1 mesh.sp=8 data.sequence_length=131072 data.global_batch=1".split()

    def along(*more, documents):
        sections, target = compose([*words, *more]), target_of(None, 8, "h100", None)
        sizes = mesh_shape(sections.mesh.sizes, target.count)
        return Predictor(sections, target, None, documents).checked(candidate_of(sections, sizes, documents)).time

    contiguous = "sequence.order=contiguous"
    few, every = (along(contiguous, *more, documents=documents) for more in ((), ("sequence.hops=mask",)))
    assert few.sent["sp"] < every.sent["sp"] / 2 and few.total <= every.total
    assert (
        along(contiguous, documents=Documents()).sent
        == along(contiguous, "sequence.hops=mask", documents=Documents()).sent
    )
    in_zigzag = [
        along("sequence.order=zigzag", f"sequence.hops={n}", documents=documents).sent["sp"] for n in ("auto", "batch")
    ]
    assert in_zigzag[0] == every.sent["sp"] > in_zigzag[1]


def test_a_share_counts_them_in_contiguous_order():
    share = Share(
        1, 2, 2**17, REMAT["none"], Ring(), Order("contiguous", 8), AllToAll(), documents=documents_of("4096")
    )
    shape = share.attention(2, 2, 2, 8, 8)
    sent = share.scheme_traffic(shape, CAUSAL).bytes
    assert sent == Ring().cost(
        AttentionShape(
            shape.over, 7, shape.query, shape.key, shape.value, shape.out, shape.lse, 8, 8, 2,
            by_batch=hops_of_documents(share.order, 2**17, CAUSAL, share.documents), few_hops=True,
        )
    ).bytes  # fmt: skip
    assert max(sent.values()) < max(Ring(hops="mask").cost(shape).bytes.values())


def test_documents_of_rows():
    ids = np.array([[0, 0, 0, 1, 1, -1], [4, 4, 5, 5, 5, 5]])
    assert Documents.of(ids).lengths == (3, 2, 1, 2, 4)
    assert Documents.of(np.zeros((2, 6), int)) == Documents()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Ring(hops="all"), "Ring: argument 'hops' = 'all' is unknown; use one of auto, mask, batch"),
        (lambda: AllGather(hops=3), "AllGather: argument 'hops' = 3 is unknown"),
        (
            lambda: SequenceSection(hops="few").validate(),
            "sequence.hops = 'few' is unknown; use one of auto, mask, batch",
        ),
        (
            lambda: SequenceSection(scheme="ulysses", hops="batch").validate(),
            "sequence.hops = 'batch' is no option of the scheme 'ulysses': use sequence.scheme=ring",
        ),
    ],
)
def test_refusals(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_recipe_says_which_hops():
    assert SequenceSection(hops="batch").made().full == Ring(hops="batch")
    both = SequenceSection(hops="mask", scheme="all_gather", window_scheme="ring").made()
    assert both.full == AllGather("mask") and both.window == Ring(hops="mask")


def test_by_default_documents_say_the_hops_of_long_rows_in_contiguous_order():
    """A loop whose number of turns the host reads costs more than the hops of short rows."""
    assert few_hops(Order("contiguous", 4), LONG) and not few_hops(Order("contiguous", 4), LONG - 1)
    assert not few_hops(Order("zigzag", 4), LONG) and by_batch("batch", False) and not by_batch("mask", True)


@pytest.mark.slow
def test_rows_of_a_vmap_take_one_way():
    """Each row of the caller's needs other hops: they make those that any of them needs."""
    attend = functools.partial(
        ring_attention, mesh=make_mesh(sp=4), scheme=Ring(hops="batch"), causal=True, platform="xla"
    )
    q, k, v, *_ = (jnp.stack([jnp.asarray(x)] * 2) for x in arrays(1, jnp.float32))
    ids = jnp.stack([jnp.arange(T)[None] // (T // 4), jnp.zeros((1, T), int)]).astype(jnp.int32)
    found = jax.jit(jax.vmap(lambda *a: attend(*a[:3], q_segment_ids=a[3], kv_segment_ids=a[3])))(q, k, v, ids)
    for row, x in enumerate(found):
        of = {"q_segment_ids": ids[row], "kv_segment_ids": ids[row]}
        np.testing.assert_allclose(
            x, flash_attention(q[row], k[row], v[row], causal=True, platform="xla", **of), atol=2e-5
        )
