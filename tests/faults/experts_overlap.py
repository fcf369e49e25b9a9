"""Faults of two halves of a batch side by side (ejdist/experts/halves.py), and of the number of chunks."""

from faults import Fault

TESTS = "tests/test_experts_overlap.py"
STATISTICS = f"{TESTS} -k statistics"
HALVES = f"{TESTS} -k 'halves_are_the_batch and mixtral'"
CHUNKS = "tests/test_experts_choice.py -k chunks"

FAULTS = (
    Fault(
        "halves: a plan has the rows of both at once",
        "Experts.memory",
        "replace($shape, tokens=$share.half) if $share.halved else $shape",
        "$shape",
        f"{TESTS} -k memory_of_halves",
    ),
    Fault(
        "halves: a plan has one gradient of a layer's matrices",
        "memory:memory",
        "max(_gathered($$args, every=True).values())",
        "0",
        f"{TESTS} -k memory_of_halves",
    ),
    Fault(
        "halves: a plan hides nothing of the exchange",
        "step_time",
        "min(EXPOSED, waits_alone($$alone))",
        "EXPOSED",
        f"{TESTS} -k halves_hide",
    ),
    Fault(
        "halves: a search takes them of one row",
        "Predictor.__call__",
        "$halved and $rows < 2",
        "False",
        f"{TESTS} -k search_takes_halves",
    ),
    Fault(
        "halves: a plan sends twice as much",
        "Experts.traffic",
        "$share.tokens // $parts",
        "$share.tokens",
        f"{TESTS} -k halves_hide",
    ),
    Fault(
        "halves: matrices are read once in a plan",
        "step_time",
        "AGAIN * $share.itemsize",
        "0 * $share.itemsize",
        f"{TESTS} -k halves_hide",
    ),
    Fault(
        "halves: where nothing is exchanged too",
        "bind_ops",
        "any(($mesh.shape.get($a, 1) > 1 for $a in $axes))",
        "True",
        f"{TESTS} -k nothing_is_exchanged",
    ),
    Fault(
        "halves: a row on one device is refused",
        "ExpertsSection.overlaps",
        "any(($sizes.get($axis, 1) > 1 for $axis in self.axes))",
        "True",
        f"{TESTS} -k nothing_is_exchanged",
    ),
    Fault(
        "halves: of a model without experts too",
        "decoder:layers",
        "$ctx.halves() if has_experts($c) else [$ctx]",
        "$ctx.halves()",
        f"{TESTS} -k without_experts",
    ),
    Fault(
        "halves: a plan has them without experts",
        "ExpertsSection.overlaps",
        "self.overlap != NONE and $mixed and any(($sizes.get($axis, 1) > 1 for $axis in self.axes))",
        "self.overlap != NONE and any(($sizes.get($axis, 1) > 1 for $axis in self.axes))",
        f"{TESTS} -k without_experts",
    ),
    Fault("halves: the balance loss is the sum of both", "of_all", "$balance != 'sequence'", "False", STATISTICS),
    Fault(
        "halves: the global load is that of the batch",
        "of_all",
        "$whole.counts if $load is None else $load",
        "$whole.counts",
        STATISTICS,
    ),
    Fault(
        "halves: the largest violation is that of a half",
        "of_all",
        "max_violation($whole.counts)",
        "$whole.max_violation",
        STATISTICS,
    ),
    Fault("halves: a row of both", "halved.cut", "$x[$half:]", "$x[$half - 1:]", f"{TESTS} -k join"),
    Fault(
        "halves: those of all rows, not of a device's",
        "halved",
        "_on_each_device($cut, [$x], 2, $mesh)",
        "$cut($x)",
        f"{TESTS} -k join",
    ),
    Fault(
        "halves: losses are weighed by the tokens of the first",
        "Experts._metrics",
        "sum($ctx.tokens for $ctx in $ctxs)",
        "$ctxs[0].tokens",
        HALVES,
    ),
    Fault(
        "halves: the second has the ids of the first",
        "BatchContext.halves",
        "{$name: $part[$i] for $name, $part in $parts.items()}",
        "{$name: $part[0 * $i] for $name, $part in $parts.items()}",
        HALVES,
    ),
    Fault(
        "halves: a device of one row is not refused",
        "check_sizes",
        "$rows // $s.accumulation // $groups",
        "$rows // $groups",
        f"{TESTS} -k refused",
    ),
    Fault("chunks: what is not hidden does not shrink", "choose_chunks", "min($a, $b) / $c", "min($a, $b)", CHUNKS),
    Fault(
        "chunks: another costs no pass over the matrices",
        "choose_chunks",
        "$weights * (2 * $itemsize + 4 * 4) / memory_rate($kind)",
        "0",
        CHUNKS,
    ),
)
