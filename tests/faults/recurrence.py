"""Faults of what all recurrences share, on one device and on many."""

from faults import Fault

FAULTS = (
    Fault(
        "chunks: a packed sequence begins from the state of the one before",
        "_group.body",
        "$state = $state if $own is None else _where($own.begins, $begun, $state)",
        "",
        "tests/test_recurrence.py -k loop_and_the_chunks",
    ),
    Fault(
        "chunks: every chunk of a packed sequence has the gradient of its end",
        "backward.body",
        "_where($at[1].ends, _owned($chunks, $d_final, $at[1]), jnp.zeros_like($after))",
        "_owned($chunks, $d_final, $at[1])",
        "tests/test_recurrence.py -k loop_and_the_chunks",
    ),
    Fault(
        "state passing: a document that begins on a rank hears of the one before",
        "entering",
        "_select($whole & $goes_on, $$after)",
        "_select($whole | $goes_on, $$after)",
        "tests/test_recurrence.py -k states_pass",
    ),
    Fault(
        "state passing: one hop less",
        "exclusive_scan",
        "$n - 1",
        "$n // 2",
        "tests/test_recurrence.py -k states_pass",
    ),
)
