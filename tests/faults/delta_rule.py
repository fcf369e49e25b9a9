"""Faults of delta_rule."""

from faults import Fault

DELTA, DELTA_SHARDED = "tests/kernels/test_delta_rule.py", "tests/kernels/test_delta_rule_sharded.py"

FAULTS = (
    Fault(
        "the map of a rank of a delta rule forgets the options",
        "StatePassing.__call__",
        "entering($$before, {**$arguments, **$said}, $$after)",
        "entering($$before, $arguments, $$after)",
        f"{DELTA_SHARDED} -k sequence_split",
    ),
    Fault(
        "ranks of a delta rule hand on their own state alone",
        "Transitions.summary",
        "jnp.eye($H, dtype=jnp.float32)",
        "0 * jnp.eye($H, dtype=jnp.float32)",
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
