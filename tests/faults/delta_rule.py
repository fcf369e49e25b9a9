"""Faults of delta_rule."""

from faults import Fault

DELTA, DELTA_SHARDED = "tests/kernels/test_delta_rule.py", "tests/kernels/test_delta_rule_sharded.py"

FAULTS = (
    Fault(
        "the map of a rank of a delta rule forgets the options",
        "ejdist/sequence/state_passing.py",
        "{**arguments, **said}",
        "arguments",
        f"{DELTA_SHARDED} -k sequence_split",
    ),
    Fault(
        "ranks of a delta rule hand on their own state alone",
        "ejdist/sequence/delta_rule.py",
        "jnp.pad(jnp.eye(H, dtype=jnp.float32),",
        "jnp.pad(0 * jnp.eye(H, dtype=jnp.float32),",
        f"{DELTA_SHARDED} -k sequence_split",
    ),
    Fault(
        "a token of a delta rule reads itself",
        "kernels/ops/delta_rule/chunk.py",
        "strictly, until, enters, leaves, passes = t[:, None] > t, t[:, None] >= t, True, True, True",
        "strictly, until, enters, leaves, passes = t[:, None] > t, t[:, None] > t, True, True, True",
        f"{DELTA} -k against_numpy",
    ),
    Fault(
        "a delta rule does not decay what other sub-chunks wrote",
        "kernels/ops/delta_rule/chunk.py",
        "jnp.exp(to_end[..., None, :, :, :] + over[..., :, :, None, :])",
        "jnp.exp(0 * to_end[..., None, :, :, :] + over[..., :, :, None, :])",
        f"{DELTA} -k decays_of_zero_and_one",
    ),
    Fault(
        "RWKV-7 reads after the decay",
        "kernels/ops/delta_rule/chunk.py",
        "a * decay.since_start(before)",
        "a * decay.since_start()",
        f"{DELTA} -k against_numpy",
    ),
    Fault(
        "a state enters a segment that begins inside a chunk",
        "kernels/ops/delta_rule/chunk.py",
        "        same = (run[:, :, None] == run[:, None, :])[:, None]",
        "        run, same = run * 0, (run[:, :, None] == run[:, None, :])[:, None]",
        f"{DELTA} -k against_numpy",
    ),
    Fault(
        "a request without tokens writes its slot",
        "kernels/ops/delta_rule/ragged.py",
        "used & (jnp.diff(cuts) > 0)",
        "used",
        f"{DELTA} -k pool_of_states",
    ),
)
