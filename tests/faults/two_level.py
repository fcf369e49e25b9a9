"""Faults of a ring of two levels (ejdist/sequence/two_level.py)."""

from faults import Fault

TESTS = "tests/test_sequence.py -k 'two_levels and sinks_packed_window'"
COSTS = "tests/test_declared_costs.py -k two_levels"

FAULTS = (
    Fault(
        "keys of the group before are taken for one's own",
        "over_levels.inside.visit",
        "($group - $number) % $groups * $size",
        "$group * $size",
        TESTS,
    ),
    Fault(
        "keys go round the wrong way",
        "over_levels.inside.visit",
        "($group - $number) % $groups * $size + ($place - $hop) % $size",
        "($group - $number) % $groups * $size + ($place + $hop + 1) % $size",
        TESTS,
    ),
    Fault(
        "what was attended to in one group is forgotten in the next",
        "over_levels.inside.visit",
        "$stay if $sofar is None else $sofar",
        "$sofar",
        TESTS,
    ),
    Fault(
        "keys stay in their group",
        "over_levels.visit",
        "$keys if $last else exchange.shift($keys, $between, 1)",
        "$keys",
        TESTS,
    ),
    Fault(
        "gradients of other groups do not come home",
        "over_levels",
        "$x.astype(jnp.float32) + $arrived[$n]",
        "$x.astype(jnp.float32)",
        TESTS,
    ),
    Fault(
        "a ring of two levels is costed as a flat one",
        "sequence/schemes:Ring.cost",
        "self.levels == 2 and $shape.hops",
        "False",
        COSTS,
    ),
    Fault(
        "gradients between groups go home in float32 in a plan",
        "two_level:traffic",
        "($wide * ($groups - 2) + 1) * $keys",
        "$wide * ($groups - 1) * $keys",
        COSTS,
    ),
    Fault(
        "one axis has two levels",
        "two_level:refused",
        "len([$n for _, $n in $over if $n > 1]) > 1",
        "True",
        "tests/test_sequence.py -k two_levels_need",
    ),
)
