"""Faults of state_space."""

from faults import Fault

STATE_SPACE = "kernels/ops/state_space/xla.py"
STATE_SPACES = "tests/kernels/test_state_space.py"

FAULTS = (
    Fault(
        "an old segment is seen in its chunk",
        STATE_SPACE,
        "sees = sees & (run[:, :, None] == run[:, None])",
        "sees = sees & (run[:, :, None] >= run[:, None])",
        f"{STATE_SPACES} -k numpy[v2-documents]",
    ),
    Fault(
        "decays by a difference of running sums",
        STATE_SPACE,
        'between = jnp.einsum("tu,bkrus->bkrts", until, after, precision=jax.lax.Precision.HIGHEST)',
        "between = (total := jnp.cumsum(a, axis=-1))[..., :, None] - total[..., None, :]",
        f"{STATE_SPACES} -k near_1",
    ),
    Fault(
        "a decay too few from a token to the state",
        STATE_SPACE,
        "wide * leaving[..., None]",
        "wide",
        f"{STATE_SPACES} -k numpy[v2-documents]",
    ),
    Fault(
        "doubling forgets the decay",
        STATE_SPACE,
        "states += decay * jnp.pad(",
        "states += jnp.pad(",
        f"{STATE_SPACES} -k numpy[v1-documents]",
    ),
    Fault(
        "a window holds another segment",
        STATE_SPACE,
        "before = jnp.where(same[..., None], before, 0)",
        "pass",
        f"{STATE_SPACES} -k numpy[conv-documents]",
    ),
    Fault(
        "a window's map keeps the old inputs",
        "ejdist/sequence/state_space.py",
        "return jnp.full_like(like[0], state.shape[2]), state",
        "return like[0], state",
        f"{STATE_SPACES} -k mesh[conv-documents-sp8]",
    ),
    Fault(
        "a call shorter than the window loses its farthest tap",
        "kernels/ops/state_space/xla.py",
        "range(1, min(taps, length))",
        "range(1, min(taps, length - 1))",
        "tests/kernels/test_state_space.py -k in_parts",
    ),
)
