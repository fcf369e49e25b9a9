"""Faults of the benchmark of attention over a split sequence (benchmarks/sequence), and of times by scope."""

from faults import Fault

TESTS = "tests/test_sequence_benchmark.py"
RANK = f"{TESTS} -k rank_of_a_ring"
IN_PLACE = "tests/test_ring_in_place.py -k rank_by_itself"
GATHERED = f"{TESTS} -k rank_of_gathered"
SPLIT = f"{TESTS} -k split_sequence"
ALONE = f"{TESTS} -k transfers_alone"
PAIRS = f"{TESTS} -k 'pairs or does_as_much or balance'"

FAULTS = (
    Fault(
        "a way of splitting a sequence is timed though its numbers are wrong",
        "sequence/devices:ways.prepare",
        "not $error <= calls.limit_of(call.dtype)",
        "False",
        SPLIT,
    ),
    Fault(
        "a rank is timed though its numbers are wrong",
        "Rank.whole",
        "not self.error <= calls.limit_of(self.call.dtype)",
        "False",
        RANK,
    ),
    Fault(
        "a rank's queries lie where another's do",
        "rank:_data",
        "np.int32($rank)",
        "np.int32(($rank + 1) % order.shards)",
        GATHERED,
    ),
    Fault(
        "keys that would arrive are fewer",
        "Work._staying.gather.copies",
        "[$x] * exchange.size($axis)",
        "[$x] + [0 * $x] * (exchange.size($axis) - 1)",
        GATHERED,
    ),
    Fault(
        "gradients that go to other ranks are lost",
        "Work._staying.scatter_sum.part",
        "self.sums",
        "False",
        GATHERED,
    ),
    Fault(
        "a rank's hops are those of the rank before",
        "rank_programs:hop_programs.keys_at",
        "$here.holder($hop)",
        "$here.holder($hop + 1)",
        RANK,
    ),
    Fault(
        "the gradient of keys is left out of a hop",
        "rank_programs:hop_programs.backward",
        "ring_hops.pulled($$args, *$begun)",
        "state",
        RANK,
    ),
    Fault(
        "the whole of a rank is not compared",
        "rank:checked",
        "$worst = calls.worst_error($$args)",
        "$worst = 0.0",
        IN_PLACE,
    ),
    Fault(
        "the call beside a rank does more work than is counted",
        "Rank.share",
        "self.pairs / int(self.call.keys_seen(self.same[1]).sum())",
        "1.0",
        RANK,
    ),
    Fault(
        "pairs of a window are those of the whole document",
        "Attention.keys_seen",
        "self.rules",
        "MaskInfo(causal=True)",
        PAIRS,
    ),
    Fault(
        "pairs of a document are counted from the start of the row",
        "Attention.keys_seen",
        "places($ids)",
        "np.arange(len($ids))",
        PAIRS,
    ),
    Fault(
        "a hop's pairs ignore documents",
        "pairs:of_hop",
        "call.rules.combine($segments).combine($at)",
        "call.rules.combine($at)",
        PAIRS,
    ),
    Fault("a hop is counted with the keys of the rank after", "pairs:of_hop", "$rank - $hop", "$rank + $hop", PAIRS),
    Fault("a rank is the busiest by its least pairs", "pairs:busiest", "$pairs.argmax()", "$pairs.argmin()", PAIRS),
    Fault("the call beside it does less", "calls:same_work", "-(-$enough // 256)", "($enough // 256)", PAIRS),
    Fault("rows have padding at their end", "calls:segment_ids", "np.minimum($$args)", "np.concatenate($$args)", TESTS),
    Fault(
        "equal transfers are sent as one",
        "_WithoutWork.pull",
        "_touched($$args, $weight)",
        "_touched($$args)",
        ALONE,
    ),
    Fault(
        "transfers whose result nobody reads are left out",
        "alone:_attended",
        "($sofar[0], _touched($sofar[1], $keys))",
        "($sofar[0], $sofar[1])",
        ALONE,
    ),
    Fault(
        "keys travel in what should be work alone",
        "Work._staying",
        "$kept(scatter_sum=$s, all_to_all=$a)",
        "$kept(scatter_sum=$s)",
        ALONE,
    ),
    Fault(
        "a case is begun after the budget",
        "sequence:main",
        "$o['budget'] and time.perf_counter() - $start > $o['budget']",
        "False",
        f"{TESTS} -k budget",
    ),
    Fault(
        "calls in a trace run into one another",
        "seconds_between",
        "$is_mark and (not $marked)",
        "$is_mark",
        f"{TESTS} -k told_apart",
    ),
    Fault(
        "time that two collectives cover counts twice",
        "exposed_by_scope",
        "$covered[$device] += $spans",
        "pass",
        f"{TESTS} -k exposed",
    ),
    Fault(
        "collectives of a gradient count as those of the forward",
        "step:scope_of",
        "$backward |= $wrapped[1] == 'transpose'",
        "pass",
        f"{TESTS} -k exposed",
    ),
    Fault(
        "a collective beside a kernel is exposed",
        "exposed_by_scope",
        "{$d: list($s) for $d, $s in $working.items()}",
        "{$d: [] for $d, $s in $working.items()}",
        f"{TESTS} -k exposed",
    ),
)
