"""Sums of pages and steps of one token of native sparse attention: texts of every pair of sizes, pages that requests share, and
what a step reads."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_generation import LENGTH, Known, finish, prompts

from ejdist.generation.sparse_step import units_of
from ejdist.models.attention_shapes import SparseShape

SPARSE = {"num_layers": 2, "layer_pattern": ["sparse+mlp", "sparse+mlp"], "qk_norm": True}


def texts_are_known(known, engine, asked, **options):
    numbers = [engine.submit(ids, max_tokens=6, temperature=0, **options) for ids in asked]
    results = finish(engine)
    for number in numbers:
        known.check(results[number])


# A page that is a block, of several, of a part of one, and one whose tokens have no part in common with a block's. Other parts
# are slow.
SUMS = [
    pytest.param(4, 4, 1, marks=pytest.mark.slow),
    pytest.param(4, 16, 4, marks=pytest.mark.slow),
    pytest.param(8, 2, 1, marks=pytest.mark.slow),
    (3, 5, 5),
    pytest.param(4, 6, 3, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("block", "page", "units"), SUMS)
def test_pages_have_a_sum_of_each_part_that_blocks_share(block, page, units):
    """Blocks of several pages, pages of several blocks, and neither."""
    assert units_of(page, block) == units
    known = Known(**SPARSE, sparse=SparseShape(block, 4, 5))
    texts_are_known(known, known.engine(page=page), prompts([1, 30, 17, 9]))


@pytest.mark.slow
def test_requests_that_share_pages_share_their_sums():
    """The second text begins with pages that the first one wrote, and then goes on otherwise."""
    known = Known(**SPARSE, sparse=SparseShape(4, 4, 5))
    engine = known.engine(chunk=16)
    (first,) = prompts([33])
    texts_are_known(known, engine, [first])
    again = np.append(first[:21], [5, 6, 7])
    assert len(engine._pages.shared(engine._pages.digests(again))) == 5
    texts_are_known(known, engine, [again, first])


@pytest.mark.slow
def test_what_was_in_a_page_before_is_in_no_text():
    """NaN of a request that is gone: of its keys and values, and of the sums of its blocks."""
    known = Known(**SPARSE, sparse=SparseShape(4, 4, 5))
    engine = known.engine()
    texts_are_known(known, engine, prompts([9]))
    kept, last = engine._kept
    engine._kept = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), kept), last
    engine._pages.forget()
    texts_are_known(known, engine, prompts([22, 3], seed=1))


@pytest.mark.slow
def test_a_step_of_one_token_takes_no_request_out_of_its_pages():
    """Means, chosen blocks and a window: no array is as large as a request's keys."""
    length = 4096
    known = Known(**SPARSE, sparse=SparseShape(64, 4, 64))
    engine = known.engine(slots=2, length=length, page=64, chunk=LENGTH)
    lowered, step = [], engine._step

    def kept(*data):
        lowered.append((data[-1].shape[1] - 3, step.lower(*data).as_text()))
        return step(*data)

    engine._step = kept
    engine.submit([1, 2, 3], max_tokens=2)
    finish(engine)
    taken = re.compile(rf"tensor<\dx{length}x2x8xf32>")
    assert {width: bool(taken.search(text)) for width, text in lowered} == {LENGTH: True, 1: False}
