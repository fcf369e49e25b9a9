"""`bytes_sp` of a step: what a device sends along the sequence, by the documents of its batch."""

from dataclasses import replace

import numpy as np
import pytest

from ejdist.costs import Undeclared
from ejdist.mesh import make_mesh
from ejdist.sequence import Ring
from ejdist.training import attended
from ejdist.training.attended import Attended
from ejdist.training.attending import exchanged, share_of
from ejdist.training.program import make_program
from recipes.schema import compose

LENGTH = 64
TINY = [
    "recipe=long_context", "model.num_layers=2", "model.model_dim=16", "model.num_heads=4", "model.num_kv_heads=2",
    "model.head_dim=8", "model.ffn_dim=16", "model.vocab_size=64", f"data.sequence_length={LENGTH}", "data.global_batch=4",
    "accumulation=2", "mesh.fsdp=1", "mesh.sp=4", "sequence.order=contiguous",
]  # fmt: skip
ONE = np.zeros((4, LENGTH), int)
OWN = np.repeat(np.arange(4), 16)[None].repeat(4, 0)  # each rank has a document of its own


def sent(ids, *words):
    recipe = compose([*TINY, *words])
    program = make_program(recipe, make_mesh(**vars(recipe.mesh)))
    return Attended.of(program, ids).sent(program, recipe).get("bytes_sp"), recipe, program


def test_one_document_sends_what_plans_expect():
    bytes_, recipe, program = sent(ONE)
    share = share_of(recipe, program.mesh, program.order)
    # Two microbatches; keys and values of 2 heads of 8 numbers in float32 go on three times, in each of two layers.
    forward = 2 * 2 * 3 * (2 * LENGTH // 4) * 2 * 2 * 8 * 4
    assert bytes_ == 2 * sum(exchanged(recipe.model, share).bytes.values()) > 2 * forward


def test_documents_that_end_with_a_rank_send_nothing():
    assert sent(OWN, "sequence.hops=batch")[0] == 0
    assert sent(OWN, "sequence.hops=mask")[0] == sent(ONE, "sequence.hops=mask")[0]


def test_each_microbatch_counts_by_itself():
    """Rows 0 and 2 are of the first, 1 and 3 of the second."""
    both = ONE.copy()
    both[1::2] = OWN[1::2]
    assert sent(both, "sequence.hops=batch")[0] == sent(ONE, "sequence.hops=batch")[0] / 2


@pytest.mark.parametrize(("scheme", "less"), [("group_cast", True), ("ulysses", False)])
def test_other_schemes_say_theirs(scheme, less):
    """A group-cast makes one pass at least, and Ulysses exchanges whatever the documents are."""
    one, own = (sent(ids, f"sequence.scheme={scheme}")[0] for ids in (ONE, OWN))
    assert 0 < own <= one and (own < one) == less


def test_one_device_sends_nothing_and_a_cost_that_is_not_declared_is_not_logged(monkeypatch):
    assert sent(ONE, "mesh.sp=1")[0] == 0

    def undeclared(*_):
        raise Undeclared("no cost")

    monkeypatch.setattr(attended, "exchanged", undeclared)
    assert sent(ONE)[0] is None


def test_what_is_met_is_no_more_than_the_rules_need():
    recipe = compose(TINY)
    program = make_program(recipe, make_mesh(**vars(recipe.mesh)))
    share = share_of(recipe, program.mesh, program.order)
    each = [replace(share, scheme=Ring(hops="batch"), met=(hops, (16, 16))) for hops in (1, 3, 9)]
    one, three, more = (sum(exchanged(recipe.model, s).bytes.values()) for s in each)
    assert one < three == more
