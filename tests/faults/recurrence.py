"""Faults of what all recurrences share, on one device and on many."""

from faults import Fault

FAULTS = (
    Fault(
        "chunks: a packed sequence begins from the state of the one before",
        "kernels/engines/scan/chunks.py",
        "state = state if own is None else _where(own.begins, begun, state)",
        "",
        "tests/test_recurrence.py -k loop_and_the_chunks",
    ),
    Fault(
        "chunks: every chunk of a packed sequence has the gradient of its end",
        "kernels/engines/scan/chunks.py",
        "_where(at[1].ends, _owned(chunks, d_final, at[1]), jnp.zeros_like(after))",
        "_owned(chunks, d_final, at[1])",
        "tests/test_recurrence.py -k loop_and_the_chunks",
    ),
    Fault(
        "state passing: a document that begins on a rank hears of the one before",
        "ejdist/sequence/state_passing.py",
        "over = _select(whole & goes_on, over,",
        "over = _select(whole | goes_on, over,",
        "tests/test_recurrence.py -k states_pass",
    ),
    Fault(
        "state passing: one hop less",
        "ejdist/sequence/state_passing.py",
        "while by < n - 1:",
        "while by < n // 2:",
        "tests/test_recurrence.py -k states_pass",
    ),
)
