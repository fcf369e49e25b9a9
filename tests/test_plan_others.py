"""The plans that are told beside the best."""

import re
from dataclasses import replace

from ejdist.planning.ranking import ALIKE, why_later
from ejdist.planning.search import search
from ejdist.planning.targets import target_of
from recipes.schema import compose


def test_the_plans_beside_the_best_differ_and_say_why_they_come_later():
    """Of the same mesh and remat policy only the best is told; each of the others is worse in what it says."""
    recipe = compose(["recipe=long_context", "model=8b", "data.sequence_length=32768"])
    found = search(recipe, target_of(None, None, "v5p-16", None), set(), None)
    told = [found.best, *found.others]
    assert len(found.others) == 3 and len({(p.candidate.mesh, p.candidate.remat) for p in told}) == 4
    for other in found.others:
        why = why_later(found.best, other)
        if "slower" in why:
            assert other.rate < found.best.rate * (1 - ALIKE)
            assert why.startswith(f"{1 - other.rate / found.best.rate:.1%} slower: ")
        else:
            assert other.rate >= found.best.rate * (1 - ALIKE) and why.startswith("as fast within 2%, ")
    slow = replace(
        found.others[0], time=replace(found.best.time, seconds=found.best.time.seconds | {"attention": 99.0})
    )
    assert re.fullmatch(
        r"9\d\.\d% slower: attention takes 9\d\.?\d* s more for as many tokens", why_later(found.best, slow)
    )
    rows = replace(found.best, candidate=replace(found.best.candidate, global_batch=16))
    assert why_later(found.best, rows) == "as fast within 2%, with a batch of 16 rows in place of 4"
