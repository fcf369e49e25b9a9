"""Faults of what all recurrences share, on one device and on many."""

from faults import Fault

FAULTS = (
    Fault(
        "chunks: a packed sequence begins from the state of the one before",
        "kernels/_core/chunks.py",
        "state = _where(own.begins, initial[rows, jnp.minimum(own.of, chunks.num_states - 1)], state)",
        "",
        "tests/test_recurrence.py -k loop_and_the_chunks",
    ),
    Fault(
        "chunks: gradients of one packed sequence reach the next",
        "kernels/_core/chunks.py",
        "d_state = _where(own.ends, d_final[rows, jnp.minimum(own.of, G - 1)], d_state)",
        "pass",
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
