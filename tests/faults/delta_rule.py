"""Faults of delta_rule."""

from faults import Fault

DELTA, DELTA_SHARDED = "tests/kernels/test_delta_rule.py", "tests/kernels/test_delta_rule_sharded.py"

FAULTS = (
    Fault(
        "the pass of a delta rule on a rank forgets the options",
        "_through_once",
        "{**$arguments, **$options, 'segment_ids': $ids}",
        "{**$arguments, 'segment_ids': $ids}",
        f"{DELTA_SHARDED} -k sequence_split",
    ),
    Fault(
        "ranks of a delta rule hand on their own state alone",
        "Transitions.once",
        "jnp.eye($H, dtype=$initial.dtype)",
        "0 * jnp.eye($H, dtype=$initial.dtype)",
        f"{DELTA_SHARDED} -k sequence_split",
    ),
    Fault(
        "the state that enters a rank is in no output of a delta rule",
        "_through_once",
        "$out + $passing.reached($reach, $state)",
        "$out",
        f"{DELTA_SHARDED} -k sequence_split",
    ),
    Fault(
        "the state that enters a rank is in no final state of a delta rule",
        "_through_once",
        "$final + $passing.times($reach, $state[:, None])",
        "$final",
        f"{DELTA_SHARDED} -k sequence_split",
    ),
    Fault(
        "a rank of a delta rule counts its packed sequence's initial state twice",
        "Transitions.once",
        "jnp.where($entered, 0, $initial)",
        "$initial",
        f"{DELTA_SHARDED} -k sequence_split",
    ),
    Fault(
        "a token of a delta rule reads itself",
        "chunk:prepare",
        "$t[:, None] >= $t",
        "$t[:, None] > $t",
        f"{DELTA} -k against_numpy",
    ),
    Fault(
        "a delta rule does not decay what other sub-chunks wrote",
        "Decay.pairs",
        "jnp.exp($to_end[..., None, :, :, :] + $over[..., :, :, None, :])",
        "jnp.exp(0 * $to_end[..., None, :, :, :] + $over[..., :, :, None, :])",
        f"{DELTA} -k decays_of_zero_and_one",
    ),
    Fault(
        "RWKV-7 reads after the decay",
        "chunk:prepare",
        "$decay.since_start($before)",
        "$decay.since_start()",
        f"{DELTA} -k against_numpy",
    ),
    Fault(
        "a state enters a segment that begins inside a chunk",
        "chunk:prepare",
        "$same = ($run[:, :, None] == $run[:, None, :])[:, None]",
        "$run, $same = ($run * 0, ($run[:, :, None] == $run[:, None, :])[:, None])",
        f"{DELTA} -k against_numpy",
    ),
    Fault(
        "a request without tokens writes its slot",
        "ragged_gated_delta_rule.written",
        "$used & (jnp.diff($cuts) > 0)",
        "$used",
        f"{DELTA} -k pool_of_states",
    ),
)
