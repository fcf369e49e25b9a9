"""Caches whose pages are spread over devices: attention to them, and texts of prompts that no device could hold."""

import itertools

import jax
import numpy as np
import pytest
from test_generation import KINDS, LENGTH, SIZES, Known, check_that_steps_copy_nothing, finish, placed, prompts

import ejdist
import kernels
from ejdist.generation import Engine
from ejdist.generation.pages import Pages, check_count
from ejdist.layout import set_layout
from ejdist.mesh import make_mesh
from ejdist.models.decoder import DecoderConfig

PAGE = 4
# Of a request: before and past the end of a rank's run, at it, and none.
LENGTHS = [32, 9, 1, 16, 0, 27]
OPTIONS = {
    "plain": {},
    "every": {
        "sliding_window": 7,
        "softmax_aux": np.linspace(-1, 2, 8, dtype=np.float32).reshape(4, 2),
        "logits_soft_cap": 2.0,
        "softmax_scale": 0.7,
        "alibi_slopes": np.array([0.0, 0.1, 0.3, 0.5], np.float32),
    },
}


def call(ranks, queries, seed=0):
    """Returns arrays of a call whose requests have runs of as many pages on each rank, in random pages of it."""
    rng = np.random.default_rng(seed)
    B, columns = len(LENGTHS), 32 // PAGE // ranks
    pages = B * columns
    tables = np.concatenate(
        [r * pages + rng.permutation(pages).reshape(B, columns) for r in range(ranks)], axis=1, dtype=np.int32
    )

    def draw(*shape):
        return rng.normal(size=shape).astype(np.float32)

    caches = draw(ranks * pages, PAGE, 2, 8), draw(ranks * pages, PAGE, 2, 6)
    return draw(B, queries, 4, 8), *caches, np.array(LENGTHS, np.int32), tables


def merged():
    """Yields each pair of options and sizes of a mesh; quick is the one with all options over all axes."""
    quick = [("every", {"cp": 2, "sp": 2, "tp": 2})]
    for pair in itertools.product(OPTIONS, ({"sp": 2}, {"sp": 4}, {"cp": 2, "sp": 2, "tp": 2})):
        yield pytest.param(*pair, marks=[pytest.mark.slow] * (pair not in quick))


@pytest.mark.parametrize("queries", [pytest.param(1, marks=pytest.mark.slow), 5])
@pytest.mark.parametrize(("options", "sizes"), list(merged()), ids=str)
def test_attention_over_spread_pages_is_that_of_one_device(options, sizes, queries):
    """Of single tokens and of chunks, whose first rows are past a request's beginning or before it."""
    mesh = make_mesh(**sizes)
    axes = tuple(a for a in sizes if a != "tp")
    ranks = int(np.prod([sizes[a] for a in axes]))
    arrays = call(ranks, queries)
    expected = kernels.page_attention(*arrays, **OPTIONS[options], return_lse=True)
    with set_layout(B=axes, N="tp", K="tp", pages=axes):
        out = jax.jit(lambda *x: ejdist.page_attention(*x, **OPTIONS[options], mesh=mesh, return_lse=True))(*arrays)
        alone = ejdist.page_attention(*arrays, **OPTIONS[options], mesh=mesh)
    for got, wanted in zip((*out, alone), (*expected, expected[0]), strict=True):
        np.testing.assert_allclose(got, wanted, atol=2e-6)


@pytest.fixture(scope="module", params=["attention", "hybrid"])
def known(request):
    return Known(**KINDS[request.param])


def spread(known, ranks, **options):
    mesh = make_mesh(sp=ranks)
    params, buffers = placed(known.params, known.model.declared, mesh), placed(known.buffers, known.model.buffers, mesh)
    sizes = {"slots": 2, "length": LENGTH, "page": 4, "chunk": 8, "cache": "spread"}
    return Engine(known.model, params, buffers=buffers, mesh=mesh, **sizes | options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("known", "ranks"),
    [
        ("attention", 2),
        ("hybrid", 4),
        ("attention", 4),
        ("hybrid", 2),
    ],
    indirect=["known"],
)
def test_texts_of_prompts_that_no_device_could_hold(known, ranks):
    """A device has fewer pages than the longest prompt; chunks, which cross the ends of runs and of pages, and beginnings that
    are shared."""
    engine = spread(known, ranks, pages=20)
    (long,) = prompts([41])
    assert engine._pages.count // ranks * 4 < long.size
    asked = [long, *prompts([1, 13], seed=1), long, np.append(long[:30], 7)]
    numbers = [engine.submit(ids, max_tokens=3 + i % 3, temperature=0) for i, ids in enumerate(asked)]
    results = finish(engine)
    for number in numbers:
        known.check(results[number])
    assert engine.programs == 2


@pytest.mark.slow
def test_a_step_copies_nothing_of_spread_pages(known):
    engine = spread(known, 2, pages=40_000)
    check_that_steps_copy_nothing(engine)
    assert engine.cache_bytes < 0.6 * sum(x.nbytes for x in jax.tree.leaves(engine._kept[0]))


def test_a_cache_that_cannot_be_spread_is_refused():
    model = DecoderConfig(**SIZES).build()
    for sizes, cache, message in (
        ({"tp": 2}, "spread", "'cache' = 'spread' needs a mesh.*sp or cp"),
        ({"sp": 2}, "split", "'cache' = 'split' must be 'whole' or 'spread'"),
    ):
        with pytest.raises(ValueError, match=message):
            Engine(model, None, mesh=make_mesh(**sizes), cache=cache)
    states = DecoderConfig(**SIZES | KINDS["mamba2"]).build()
    with pytest.raises(ValueError, match="no layer of this model keeps them: use 'whole'"):
        Engine(states, None, mesh=make_mesh(sp=2), cache="spread")
    kept = {"attention": (64, model.cached.declared["attention"][1])}
    check_count(kept, 2**20, 16)
    with pytest.raises(ValueError, match="64 layers with 2,097,152 pages of 16 tokens are 2,147,483,648 entries, more"):
        check_count(kept, 2**21, 16)
    query, *caches, lens, tables = call(2, 1)
    with set_layout(pages="sp"), pytest.raises(ValueError, match=r"'block_tables' has 7 columns.*multiple of 2"):
        ejdist.page_attention(query, *caches, lens % 28, tables[:, 1:], mesh=make_mesh(sp=2))
    with (
        set_layout(pages="sp"),
        pytest.raises(ValueError, match=r"'block_tables' has page \d+ in column \d of request \d, but"),
    ):
        ejdist.page_attention(query, *caches, lens, tables[:, ::-1], mesh=make_mesh(sp=2))


def test_pages_of_ranks_are_taken_in_order_and_come_back():
    pages = Pages(8, 4, shares=True, ranks=2, run=3)
    assert pages.room == 6  # a run of each rank
    prompt = np.arange(17)
    digests = pages.digests(prompt)
    first = pages.take(5)
    assert [page // 4 for page in first] == [0, 0, 0, 1, 1]
    assert pages.room == 1  # of four pages the first rank has one, and its run is not full
    for page, digest in zip(first, digests, strict=False):
        pages.publish(page, digest)
    pages.release(first)
    assert pages.room == 6 and pages.shared(digests) == first[:4]
    pages.release(first[:4])
    assert [page // 4 for page in pages.take(6)] == [0, 0, 0, 1, 1, 1] and pages.room == 1


@pytest.mark.slow
def test_texts_of_sparse_attention_over_spread_pages():
    """A layer's keys of a request come together in a step; between steps they stay where they are."""
    known = Known(**KINDS["sparse"])
    engine = spread(known, 2, pages=20)
    asked = prompts([41, 3])
    assert engine._pages.count // 2 * 4 < asked[0].size
    numbers = [engine.submit(ids, max_tokens=4, temperature=0) for ids in asked]
    results = finish(engine)
    for number in numbers:
        known.check(results[number])
    alone = Known(**KINDS["sparse"]).engine(slots=2, pages=20)
    sums = 2 * 4 * alone._pages.count * SIZES["num_kv_heads"] * SIZES["head_dim"]  # which spread pages have not
    assert 2 * engine.cache_bytes + sums == alone.cache_bytes


@pytest.mark.slow
def test_a_step_of_sparse_attention_gathers_no_pages_of_others():
    """What a layer takes out of spread pages grows with the requests of a step, and not with the pages."""
    check_that_steps_copy_nothing(spread(Known(**KINDS["sparse"]), 2, pages=40_000))
