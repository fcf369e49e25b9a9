"""Faults of rows dealt to groups of devices and microbatches."""

from faults import Fault

TESTS = "tests/test_dealing.py"

FAULTS = (
    Fault(
        "the lightest rows come first",
        "dealing:dealt",
        "np.argsort(-$weights, kind='stable')",
        "np.argsort($weights, kind='stable')",
        f"{TESTS} -k heaviest",
    ),
    Fault(
        "a row goes to the group that has most so far",
        "dealing:dealt",
        "np.where($count < $each, $load, np.inf).argmin()",
        "np.where($count < $each, -$load, np.inf).argmin()",
        f"{TESTS} -k heaviest",
    ),
    Fault(
        "a full group gets another row",
        "dealing:dealt",
        "np.where($count < $each, $load, np.inf).argmin()",
        "np.where($count < $each + 1, $load, np.inf).argmin()",
        f"{TESTS} -k has_a_place",
    ),
    Fault(
        "a microbatch has neighbours in a group",
        "dealing:dealt",
        "$place.reshape($rows)",
        "$place.swapaxes(1, 2).reshape($rows)",
        f"{TESTS} -k heaviest",
    ),
    Fault(
        "no rows are exchanged",
        "dealing:dealt",
        "_exchange($place[:, :, $microbatch], $weights, $load)",
        "",
        f"{TESTS} -k heaviest",
    ),
    Fault(
        "an exchange counts for one group alone",
        "dealing:_exchange",
        "$load[$other] += $less[$row, $other, $theirs]",
        "",
        f"{TESTS} -k 'heaviest or many_lengths'",
    ),
    Fault(
        "a group is taken to have its heaviest rows alone",
        "dealing:least_waited_for",
        "$rows[$k * $groups - $k : $k * $groups + 1].sum()",
        "$rows[: $k + 1].sum()",
        f"{TESTS} -k at_least",
    ),
    Fault(
        "rows are dealt where that is worse",
        "dealing:dealt",
        "waited_for($weights[$found], *$sizes) < waited_for($weights, *$sizes)",
        "True",
        f"{TESTS} -k one_weight",
    ),
    Fault(
        "the groups of devices are forgotten",
        "dealing:dealer",
        "dealt($data.squares($number), $program.groups, $s.accumulation)",
        "dealt($data.squares($number), 1, $s.accumulation * $program.groups)",
        f"{TESTS} -k more_evenly",
    ),
    Fault(
        "a host reads the rows that it would have had",
        "Data.iterator",
        "$rows if $deal is None else $deal($wanted)[$rows]",
        "$rows",
        f"{TESTS} -k another_order",
    ),
    Fault(
        "rows are dealt by the step, and not by the batch after skipped ones",
        "Data.iterator",
        "$rows if $deal is None else $deal($wanted)[$rows]",
        "$rows if $deal is None else $deal($wanted // 2)[$rows]",
        f"{TESTS} -k another_order",
    ),
    Fault(
        "a document that a row ends in does not count",
        "packing:squares_of",
        "np.concatenate([[$begin], $inside, [$end]])",
        "np.concatenate([[$begin], $inside])",
        f"{TESTS} -k squares",
    ),
    Fault(
        "a row ends with its window",
        "Cut.squares",
        "min($end, int($starts[-1]))",
        "$end",
        f"{TESTS} -k squares",
    ),
    Fault(
        "squares of the first epoch serve all",
        "KeptSquares.squares",
        "self._rows($epoch)[$number]",
        "self._rows(0)[$number]",
        f"{TESTS} -k squares",
    ),
    Fault(
        "a source's rows are counted from those of the mixture",
        "MixedRows.squares",
        "$places[$of, 1].tolist()",
        "np.flatnonzero($of).tolist()",
        f"{TESTS} -k squares",
    ),
    Fault(
        "rows that say nothing of their documents are dealt in silence",
        "dealing:dealer",
        "$s.data.balance == ROWS and (not $data.has_squares)",
        "False",
        f"{TESTS} -k refused",
    ),
    Fault(
        "every host reads the lengths of a billion documents",
        "dealing:dealer",
        "$data.bytes_of_lengths > READ_WHOLE",
        "False",
        f"{TESTS} -k nothing_is_dealt",
    ),
)
