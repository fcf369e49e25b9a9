"""Orders by the documents: how even each is, which one a recipe takes, chunks dealt out row by row, and what a step logs."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_run import TINY

import ejdist
from ejdist import Order, Unsupported, bind_ops, make_mesh, ring_attention, set_layout
from ejdist.balance import assigned, text_indices
from ejdist.documents import Documents, busiest, documents_of, places
from ejdist.models.attention import Attention
from ejdist.models.model import CAUSAL, Flops
from ejdist.order import AUTO, NAMES, TILES, order_for, platform_of, stripe_of
from ejdist.planning.candidates import orders_searched
from ejdist.sequence.schedule import imbalance, pairs_of_row
from ejdist.sequence.schemes import SCHEMES
from ejdist.sequence.section import SequenceSection
from ejdist.training.attended import Attended, keys_seen
from ejdist.training.choices import resolve
from ejdist.training.curriculum import stages_of
from ejdist.training.data import Begin
from ejdist.training.orders import choose
from ejdist.training.placing import permuted, place_batch
from ejdist.training.program import make_program
from kernels import flash_attention
from kernels.engines.attention.masks import MaskInfo
from kernels.engines.attention.tiles import meetings
from kernels.ops.flash_attention import op as flash
from recipes.schema import compose

RNG = np.random.default_rng(0)
PACKED = documents_of("4096")
# Half of all tokens are in a few documents; and nearly all documents are short, with some that are not.
TAIL = Documents(
    tuple(np.rint(400 * (1 + np.random.default_rng(0).pareto(1.05, 2048))).clip(1, 2**18).astype(int)), "tail"
)
MIXED = Documents((*[500] * 970, *[40_000] * 30), "mixed")


def ids_of(*lengths, length, padding=0):
    """Returns int32 [length]: documents of those lengths one after another, as often as they fit, and padding."""
    ids = np.repeat(np.arange(length), np.resize(lengths, length))[:length].astype(np.int32)
    ids[length - padding :] = -1
    return ids


# -- how even ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("documents", [PACKED, TAIL, MIXED], ids=lambda d: d.words)
@pytest.mark.parametrize("ranks", [8, 32, 64])
def test_orders_are_as_even_as_they_say(documents, ranks):
    """Balanced within 2%, for any documents. Stripes within 12% where a rank has enough of them: they have 128 tokens at least,
    which tiles of kernels need, so that of 128k tokens each of 8 ranks has 64 stripes, and each of 64 ranks 16."""
    length = 2**17
    balanced, striped, zigzag = (order_for(name, ranks, length) for name in ("balanced", "striped", "zigzag"))
    assert imbalance(balanced, length, CAUSAL, documents) <= 1.02
    uneven = imbalance(striped, length, CAUSAL, documents)
    assert uneven <= (1.12 if ranks == 8 else 1.45) and uneven < imbalance(zigzag, length, CAUSAL, documents) / 1.4


def test_stripes_of_many_ranks_are_uneven_in_proportion_and_shorter_ones_meet_more_tiles():
    """Over 64 ranks with 2,048 tokens each: what the busiest rank has over the mean is in proportion to the stripe, but of
    stripes that are shorter than a tile it visits more than twice as many tiles of 128."""
    ranks, length, tile = 64, 2**17, 128
    over, visited = {}, {}
    for stripe in (32, 64, 128):
        order = Order("striped", ranks, stripe)
        over[stripe] = imbalance(order, length, CAUSAL, PACKED) - 1
        assert imbalance(order, length, CAUSAL) == pytest.approx(1 + (ranks - 1) * stripe / length, rel=1e-3)
        lie = order.positions(np.arange(ranks), length).reshape(ranks, -1, tile)
        first, last = lie.min(-1), lie.max(-1)
        row = PACKED.rows(length)[0]
        document = np.cumsum(row == 0)
        low, high, keys_first, keys_last = (
            document[first],
            document[last],
            document[first.ravel()],
            document[last.ravel()],
        )
        meet = (last[..., None] >= first.ravel()) & (high[..., None] >= keys_first) & (low[..., None] <= keys_last)
        visited[stripe] = meet.sum((1, 2)).max()
    assert 3 < over[128] / over[32] < 5  # four rows
    assert over[64] > 0.1 and visited[64] > 2 * visited[128]


def test_rows_are_cut_of_documents():
    """Every row begins a document, and the lengths that are not cut are those of the sample."""
    documents = Documents((5, 9, 30), "three")
    rows = documents.rows(64)
    assert len(rows) == 4 and all(row[0] == 0 and len(row) == 64 for row in rows)
    for row in rows:
        begins = np.flatnonzero(row == 0)
        np.testing.assert_array_equal(row, np.arange(64) - np.repeat(begins, np.diff([*begins, 64])))
        assert {*np.diff(begins)[1:].tolist()} <= {5, 9, 30}
    np.testing.assert_array_equal(documents.rows(64, step=4)[2], rows[2][2::4])
    assert pairs_of_row(64, CAUSAL, documents) == np.mean([(row + 1).sum() for row in rows])
    (one,) = Documents().rows(64)
    np.testing.assert_array_equal(one, np.arange(64))


def test_long_rows_are_counted_by_some_of_their_tokens():
    for name in ("zigzag", "striped", "contiguous"):
        order, length = order_for(name, 8, 2**22), 2**22
        whole = busiest(order.of_ranks(np.arange(length) + 1))
        assert imbalance(order, length, CAUSAL) == pytest.approx(whole, rel=1e-3)


@pytest.mark.parametrize(
    ("words", "message"),
    [("nowhere.txt", "'nowhere.txt' cannot be read"), ("0", "'0' cannot be read"), ("-4", "'-4' cannot be read")],
)
def test_documents_that_are_none(words, message):
    with pytest.raises(ValueError, match=f"documents = {message}.*use a mean length, 'one', or a file"):
        documents_of(words)


def test_lengths_from_a_file(tmp_path):
    (tmp_path / "lengths.txt").write_text("# three\n5\n9\n\n30\n")
    assert documents_of(str(tmp_path / "lengths.txt")).lengths == (5, 9, 30)
    (tmp_path / "lengths.txt").write_text("5\nnine\n")
    with pytest.raises(ValueError, match="has the line 'nine'"):
        documents_of(str(tmp_path / "lengths.txt"))


# -- chunks ------------------------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_chunks_are_dealt_out_whole(data):
    """To each rank as many, in the order of the text; and no rank has more than the others by more than a chunk's attention."""
    ranks, each, chunk = (data.draw(st.integers(1, most)) for most in (6, 6, 4))
    length = ranks * each * chunk
    cuts = data.draw(st.lists(st.integers(0, length), max_size=6))
    ids = np.searchsorted(np.sort(cuts), np.arange(length), side="right")
    seen = places(ids) + 1
    at = text_indices(seen, ranks, chunk).reshape(ranks, each, chunk)
    assert sorted(at.ravel().tolist()) == list(range(length))
    assert (np.diff(at.reshape(ranks, -1), axis=1) > 0).all()
    assert (at[..., 0] % chunk == 0).all() and (np.diff(at, axis=-1) == 1).all()


def test_chunks_are_dealt_out_in_rounds():
    """One of each round to each rank: the largest to the rank that has least, the rounds that differ most first."""
    dealt = assigned(np.array([1.0, 2, 9, 1, 6, 4]), 2)
    assert dealt.tolist() == [[1, 2, 5], [0, 3, 4]] or dealt.tolist() == [[0, 2, 5], [1, 3, 4]]
    assert (dealt // 2 == np.arange(3)).all()
    assert assigned(np.ones(8), 4).tolist() == [[0, 4], [1, 5], [2, 6], [3, 7]]
    rng = np.random.default_rng(0)
    for ranks in (2, 8, 64):
        weights = rng.pareto(1.5, 32 * ranks).clip(0, 30)
        load = weights[assigned(weights, ranks)].sum(1)
        assert load.max() <= 1.02 * load.mean() and load.max() < weights.reshape(-1, ranks).sum(0).max()


def test_ranks_are_even_at_every_hop():
    """In the sum of all hops any greedy choice is; a ring may wait for the busiest rank at each."""
    length, n = 2**16, 8
    (row, *_) = PACKED.rows(length)
    waits = {}
    for name in ("zigzag", "striped", "balanced"):
        order = order_for(name, n, length)
        at = np.broadcast_to(order.text_indices(row + 1), length).reshape(n, -1)
        begins = np.arange(length) - row
        pairs = [[np.searchsorted(k, q, "right") - np.searchsorted(k, begins[q]) for k in at] for q in at]
        pairs, ranks = np.array([[x.sum() for x in of_rank] for of_rank in pairs]), np.arange(n)
        np.testing.assert_array_equal(pairs.sum(1), order.of_ranks(row + 1))
        waits[name] = sum(pairs[ranks, ranks - hop].max() for hop in range(n)) / pairs.sum() * n
    assert waits["balanced"] < 1.12 and waits["striped"] < 1.12 and waits["zigzag"] > 1.5


def test_a_row_is_dealt_out_by_itself():
    """So any number of hosts makes the same batches, each from its own rows."""
    program = _program("balanced")
    ids = np.stack([ids_of(9, 20, 3, length=64), ids_of(30, 5, length=64, padding=7)])
    both = Attended.of(program, ids)
    assert (both.index[0] != both.index[1]).any() and both.index.dtype == np.int32
    for row in range(2):
        alone = Attended.of(program, ids[row : row + 1])
        np.testing.assert_array_equal(alone.index[0], both.index[row])
    assert both.padding == 7 / 128


# -- attention and models in a balanced order ---------------------------------------------------------------------------

B, T, N, K, H = 2, 64, 4, 2, 8
QUERY, KEY, VALUE, D_OUT = (jnp.asarray(RNG.standard_normal((B, T, n, H)).astype(np.float32)) for n in (N, K, K, N))
IDS = np.stack([ids_of(9, 20, 3, length=T), ids_of(30, 5, length=T, padding=7)])
BALANCED = Order("balanced", 4, 4)
INDEX = BALANCED.text_indices(np.where(IDS >= 0, places(IDS) + 1, 0))


def both_ways(attention, index, **rules):
    """Returns out and every gradient, in the order of the text."""

    def move(x):
        return x if index is None else BALANCED.permute(x, index=index)

    def run(q, k, v):
        ids = jnp.asarray(move(IDS))
        out = attention(q, k, v, causal=True, q_segment_ids=ids, kv_segment_ids=ids, **rules)
        return out

    out, pull = jax.vjp(jax.jit(run), *map(move, (QUERY, KEY, VALUE)))
    found = [out, *pull(move(D_OUT))]
    return found if index is None else [BALANCED.inverse(x, index=index) for x in found]


@pytest.mark.parametrize(
    ("scheme", "sizes"),
    [
        pytest.param("ring", {"sp": 4}, marks=pytest.mark.slow),  # a run in this order is quick in test_train.py
        pytest.param("all_gather", {"sp": 4}, marks=pytest.mark.slow),
        *(pytest.param("ulysses", sizes, marks=pytest.mark.slow) for sizes in ({"sp": 4}, {"cp": 2, "sp": 2})),
    ],
)
def test_a_balanced_order_has_the_numbers_of_one_device(scheme, sizes):
    at, rules = jnp.asarray(INDEX), {"sliding_window": 7}

    def ring(q, k, v, **how):
        how |= {"q_positions": at, "kv_positions": at, "mesh": make_mesh(**sizes), "axis_name": tuple(sizes)}
        return ring_attention(q, k, v, order=BALANCED, scheme=scheme, **how)

    for got, want in zip(both_ways(ring, INDEX, **rules), both_ways(flash_attention, None, **rules), strict=True):
        np.testing.assert_allclose(got, want, atol=2e-5)


def test_a_balanced_order_needs_its_index():
    mesh, ids = make_mesh(sp=4), jnp.asarray(IDS)
    how = {"causal": True, "mesh": mesh, "order": BALANCED}
    with pytest.raises(
        ValueError, match=r"'balanced' is another one for each row: give 'q_positions'.*order='striped'"
    ):
        ring_attention(QUERY, KEY, VALUE, **how)
    with pytest.raises(Unsupported, match=r"chunks and sink tokens count from the start of each document.*striped"):
        at = {"q_positions": jnp.asarray(INDEX), "kv_positions": jnp.asarray(INDEX)}
        ring_attention(QUERY, KEY, VALUE, **how, **at, chunk_size=8, q_segment_ids=ids, kv_segment_ids=ids)
    with set_layout(order=BALANCED), pytest.raises(Unsupported, match=r"gla_attention: .*'balanced'.*contiguous"):
        ejdist.gla_attention(QUERY, KEY, VALUE, mesh=mesh)
    for call in (lambda: BALANCED.indices(T), lambda: BALANCED.permute(IDS), lambda: BALANCED.inverse(IDS)):
        with pytest.raises(ValueError, match="another one for each row of a batch: give 'index'"):
            call()
    with pytest.raises(
        ValueError, match=r"chunks|stripes of 4 tokens over 4 ranks, each of which has 18: use stripes of 3"
    ):
        BALANCED.text_indices(np.ones((1, 72)))
    np.testing.assert_array_equal(Order("balanced", 1, 4).permute(IDS), IDS)  # over one rank it is none


def test_a_batch_is_in_the_order_of_the_operations():
    batch = {"tokens": jnp.zeros((1, T), jnp.int32)}
    with pytest.raises(ValueError, match=r"a batch for order 'balanced' has 'order'.*this one has none"):
        bind_ops(make_mesh(sp=4), order=BALANCED).of_batch(batch)
    with pytest.raises(ValueError, match="these operations take another order"):
        bind_ops(make_mesh(sp=4), order="zigzag").of_batch(batch | {"order": jnp.asarray(INDEX)})


def _program(order, *words):
    recipe = compose([*TINY, "mesh.sp=4", f"sequence.order={order}", *words])
    if order == "balanced":
        recipe.sequence.stripe = 4
    return make_program(recipe, make_mesh(**vars(recipe.mesh)))


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=pytest.mark.slow if i else ()) for i, name in enumerate(SCHEMES)],
)
def losses(request):
    """(batch, index) -> losses of all tokens of a model: in chunks over four ranks, or without an index on one device."""
    programs = {
        True: _program("balanced", f"sequence.scheme={request.param}"),
        False: _program("contiguous", "mesh.sp=1"),
    }
    state = {which: program.init() for which, program in programs.items()}
    ops = {which: bind_ops(p.mesh, order=p.order, platform="xla") for which, p in programs.items()}
    run = {
        which: jax.jit(
            lambda params, batch, which=which: programs[which].model.token_losses(params, batch, ops=ops[which])
        )
        for which in programs
    }

    def of(batch, index=None):
        split = index is not None
        program = programs[split]
        placed = place_batch(
            permuted(batch, program, Attended(np.zeros(0), np.zeros(0), index, 0.0, np.zeros(0), np.zeros(0))),
            program,
            np.arange(2),
        )
        found = np.asarray(run[split](state[split].params, placed))
        return program.order.inverse(found, index=index) if split else found

    return of


def a_batch(rng):
    tokens = rng.integers(1, 90, (2, T)).astype(np.int32)
    ids = np.stack([ids_of(*rng.integers(3, 30, 4), length=T, padding=5 * row) for row in range(2)])
    ends = np.diff(ids, axis=1, append=-1) != 0
    return {
        "tokens": tokens,
        "targets": np.where(ends | (ids < 0), -1, np.roll(tokens, -1, axis=1)),
        "positions": places(ids).astype(np.int32),
        "segment_ids": ids,
    }


@pytest.mark.slow
def test_losses_are_those_of_one_device_under_any_assignment(losses):
    """Token by token, with another assignment of the chunks for each row."""
    batch = a_batch(np.random.default_rng(1))
    want = losses(batch)
    assert np.abs(want).max() > 1

    @settings(max_examples=20, deadline=None, derandomize=True)
    @given(st.permutations(range(16)), st.permutations(range(16)))
    def check(first, second):
        chunks = np.sort(np.reshape([first, second], (2, 4, 4)), axis=-1).reshape(2, 16, 1)
        index = (chunks * 4 + np.arange(4)).reshape(2, T).astype(np.int32)
        np.testing.assert_allclose(losses(batch, index), want, atol=2e-5)

    check()


@pytest.mark.slow
def test_a_token_changes_what_comes_after_it_in_its_document(losses):
    batch = a_batch(np.random.default_rng(2))
    index = Attended.of(_program("balanced"), batch["segment_ids"]).index
    before = losses(batch, index)
    np.testing.assert_allclose(before, losses(batch), atol=2e-5)
    for row, token in ((0, 7), (1, 40), (1, 58)):
        other = {name: x.copy() for name, x in batch.items()}
        other["tokens"][row, token] = 1 + batch["tokens"][row, token] % 89
        changed = np.abs(losses(other, index) - before) > 1e-6
        ids = batch["segment_ids"]
        may = np.zeros_like(changed)
        may[row] = (ids[row] == ids[row, token]) & (np.arange(T) >= token) & (batch["targets"][row] >= 0)
        assert changed[may].all() and not changed[~may].any()


# -- tiles of kernels --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["striped", "balanced"])
def test_tiles_are_visited_where_a_pair_attends(name):
    """Stripes and chunks are whole tiles, so of each rank's tiles at each hop none is visited in vain, and those that are make
    one run: bounds of positions and of ids are as tight as the pairs themselves."""
    length, n, tile = 8192, 4, 128
    order = order_for(name, n, length)
    ids = ids_of(900, 300, 2500, 70, length=length)
    at = order.text_indices(places(ids) + 1).reshape(n, -1)
    assert order.stripe == tile
    for rank in range(n):
        for holder in range(n):
            q, k = at[rank][None], at[holder][None]
            how = {"q_positions": q, "kv_positions": k, "q_segment_ids": ids[q], "kv_segment_ids": ids[k]}
            some, _ = meetings(MaskInfo(causal=True, **how).key_range(length // n, length // n), tile, tile)
            sees = (q[0][:, None] >= k[0]) & (ids[q[0]][:, None] == ids[k[0]])
            wanted = sees.reshape(some.shape[1], tile, some.shape[2], tile).any((1, 3))
            np.testing.assert_array_equal(np.asarray(some)[0], wanted)
            first, last = wanted.argmax(-1), wanted.shape[1] - wanted[:, ::-1].argmax(-1)
            assert (np.where(wanted.any(-1), last - first, 0) == wanted.sum(-1)).all()


def test_the_tokens_of_a_stripe():
    """A tile of the platform's kernels where a rank has two, up to two where it has many; else a few stripes for each rank."""
    wanted = {
        (2**17, 8): 256,
        (2**17, 32): 128,
        (2**20, 64): 256,
        (2048, 4): 128,
        (512, 4): 16,
        (64, 4): 2,
        (28, 4): 1,
        (65, 4): 1,
    }
    assert {key: stripe_of(*key) for key in wanted} == wanted
    wanted = {(2**17, 8): 1024, (2**22, 8): 2048, (2**17, 64): 1024, (2**16, 64): 128}
    assert {key: stripe_of(*key, "tpu") for key in wanted} == wanted
    assert platform_of(make_mesh(sp=2)) == "cpu" and platform_of(jax.sharding.AbstractMesh((2,), ("sp",))) is None


def test_a_stripe_on_tpus_is_the_longest_tile_of_attention_there():
    arrays = [jax.ShapeDtypeStruct((1, 2**14, heads, 128), jnp.bfloat16) for heads in (32, 8, 8)]
    ids = jax.ShapeDtypeStruct((1, 2**14), jnp.int32)
    call = flash.bind(
        query=arrays[0],
        key=arrays[1],
        value=arrays[2],
        mask=MaskInfo(causal=True, q_segment_ids=ids, kv_segment_ids=ids),
    )
    tiles = flash.backends["pallas_tpu"].heuristic(call, "tpu")
    assert max(tiles.fwd_params.q_blocksize, tiles.fwd_params.kv_blocksize) == TILES["tpu"]


# -- what a recipe takes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lengths", "words", "wanted"),
    [
        ((4096,), [], "zigzag"),
        ((300, 40, 900), [], "balanced"),
        ((64,), [], "contiguous"),
        ((300, 40, 900), ["sequence.scheme=ulysses"], "contiguous"),
        ((300, 40, 900), ["sequence.scheme=ulysses", "mesh.cp=2", "mesh.sp=2"], "zigzag"),
    ],
)
def test_the_order_that_the_data_asks_for(lengths, words, wanted):
    recipe = compose([*TINY, "mesh.sp=4", "data.sequence_length=4096", "sequence.order=auto", *words])
    ids = np.stack([np.roll(ids_of(*lengths, length=4096), 37 * row) for row in range(3)])
    ids = np.cumsum(np.diff(ids, axis=1, prepend=0) != 0, axis=1)
    choice = choose(recipe, make_mesh(**vars(recipe.mesh)), [Flops(1, pair=2)], ids)
    assert choice.order.name == wanted and [*choice.uneven] == [*NAMES]
    assert choice.uneven[wanted] <= 1.05 * min(choice.uneven.values())
    said = choice.describe()
    assert f"sequence.order = auto is {wanted}" in said and f"sequence.order={wanted} keeps it" in said
    assert all(f"{name} {value:.2f}" in said for name, value in choice.uneven.items())


def test_what_attends_for_a_run_of_the_text_asks_for_no_order():
    """Its tokens would change places for nothing; beside other attention that one decides."""
    recipe = compose([*TINY, "mesh.sp=4", "data.sequence_length=4096", "sequence.order=auto"])
    ids, mesh = ids_of(4096, length=4096)[None], make_mesh(**vars(recipe.mesh))
    text, other = Flops(1, pair=5, of_text=True), Flops(1, pair=2)
    for parts, name in (([text], "contiguous"), ([text, other], "zigzag")):
        choice = choose(recipe, mesh, parts, ids)
        assert ("no layer's attention follows the order" in choice.describe()) == (name == "contiguous")
        assert choice.order.name == name and choice.flops == sum(part.pair for part in parts) * 4096 * 4097 / 2


def test_a_model_with_a_recurrence_is_given_an_order_that_it_has(monkeypatch):
    """Its rows ask for a balanced one, by the data and in a plan."""
    recipe = compose([*TINY, "mesh.sp=4", "data.sequence_length=4096", "sequence.order=auto"])
    ids, parts = ids_of(300, 40, 900, length=4096)[None], [Flops(1, pair=2)]
    mesh, searched = make_mesh(**vars(recipe.mesh)), (recipe, (("sp", 4),), Documents((300, 40, 900), "a few"))
    assert choose(recipe, mesh, parts, ids).order.carried and "balanced" in orders_searched(*searched)
    monkeypatch.setattr(Attention, "fixed_order", True)
    assert choose(recipe, mesh, parts, ids).order.name == "striped"
    assert "balanced" not in orders_searched(*searched)


class Rows:
    """Stands for `Data`: packed rows, of one size."""

    def __init__(self, global_batch):
        self.global_batch, self.begin, self.read = global_batch, Begin(), []

    def resized(self, sequence_length, global_batch):
        assert (sequence_length, global_batch) == (4096, self.global_batch)
        return self

    def batch(self, step, rows):
        self.read.append(step)
        return {"segment_ids": np.stack([ids_of(300, 40, 900, length=4096)] * self.global_batch)[rows]}


def test_a_run_takes_the_order_of_its_first_rows():
    """With the program of that order; a stage whose order is given keeps it, and reads nothing."""
    recipe = compose([*TINY, "mesh.sp=4", "data.sequence_length=4096", "sequence.order=auto"])
    (stage,) = stages_of(recipe)
    program, data, said, made = _program("contiguous"), Rows(2), [], []
    program = dataclasses.replace(program, order=Order("zigzag", 4))
    (new,), (of_new,) = resolve([stage], [program], [data], lambda one: made.append(one) or "made", said.append)
    assert (new.sections.sequence.order, of_new, made) == ("balanced", "made", [new]) and recipe.sequence.order == AUTO
    assert data.read == [0, 1, 2, 3] and "in 8 rows with 12.0 documents each" in said[0]
    same = dataclasses.replace(program, order=order_for("balanced", 4, 4096))
    assert resolve([stage], [same], [data], made.append, said.append)[1] == [same] and len(made) == 1
    pinned = dataclasses.replace(stage, sections=new.sections)
    assert resolve([pinned], [program], [None], made.append, said.append) == ([pinned], [program]) and len(said) == 2


def test_layers_weigh_as_much_as_their_products():
    ids = ids_of(20, 12, length=32)[None]
    window = MaskInfo(causal=True, window=(3, 0))
    seen = keys_seen([Flops(9), Flops(1, pair=2), Flops(1, pair=5, mask=window), Flops(1, pair=2)], ids)
    place = places(ids)
    np.testing.assert_array_equal(seen, 4 * (place + 1) + 5 * np.minimum(place + 1, 4))
    assert keys_seen([Flops(1, pair=2)], np.full((1, 8), -1)).sum() == 0


def test_auto_without_data_is_even_for_one_document():
    assert order_for(AUTO, 4, 64) == Order("zigzag", 4) and order_for(AUTO, 4, 68) == Order("contiguous", 4)
    assert _program("auto").order == Order("zigzag", 4)
    with pytest.raises(
        ValueError, match=re.escape("sequence.stripe = 4 is for sequence.order striped, balanced or auto")
    ):
        SequenceSection(order="zigzag", stripe=4).validate()
    with pytest.raises(ValueError, match=re.escape("sequence.stripe must be at least 1")):
        SequenceSection(order="striped", stripe=0).validate()
    with pytest.raises(ValueError, match=r"stripes of 6 tokens over 4 ranks.*use stripes of 4 \(sequence.stripe\)"):
        _program("striped", "sequence.stripe=6")


# -- what a step logs --------------------------------------------------------------------------------------------------


def test_a_step_says_how_even_it_is():
    """Against sums over the rows of each group and microbatch, and the tokens of each rank."""
    words = ["mesh.dp=2", "mesh.sp=2", "data.global_batch=8", "accumulation=2", "model.layer_pattern=[attention+mlp]"]
    recipe = compose([*TINY, *words, "sequence.order=contiguous"])
    program = make_program(recipe, make_mesh(**vars(recipe.mesh)))
    ids = np.stack([ids_of(3 + 5 * row, 9, length=64, padding=row) for row in range(8)])
    found = Attended.of(program, ids).evenness(program, recipe)
    keys = np.where(ids >= 0, places(ids) + 1, 0).reshape(8, 2, 32).sum(-1)
    # Rows 0 to 3 are of the first group, and its microbatches have every other of them.
    pairs = np.array([[keys[g + m : g + 4 : 2].sum(0) for m in range(2)] for g in (0, 4)])
    assert found["imbalance_sp"] == pytest.approx(pairs.max(-1).sum() / pairs.mean(-1).sum())
    groups = pairs.sum(-1)
    assert found["imbalance_dp"] == pytest.approx(groups.max(0).sum() / groups.mean(0).sum())
    assert found["padding_share"] == sum(range(8)) / 512
    assert busiest(np.zeros((2, 4))) == 1
