"""Faults of state_space."""

from faults import Fault

STATE_SPACES = "tests/kernels/test_state_space.py"

FAULTS = (
    Fault(
        "an old segment is seen in its chunk",
        "state_space/xla:_decays",
        "$run[:, :, None] == $run[:, None]",
        "$run[:, :, None] >= $run[:, None]",
        f"{STATE_SPACES} -k numpy[v2-documents]",
    ),
    Fault(
        "decays by a difference of running sums",
        "state_space/xla:_decays",
        "jnp.einsum('tu,bkrus->bkrts', $until, $after, precision=jax.lax.Precision.HIGHEST)",
        "(total := jnp.cumsum(a, axis=-1))[..., :, None] - total[..., None, :]",
        f"{STATE_SPACES} -k near_1",
    ),
    Fault(
        "a decay too few from a token to the state",
        "_prepare_v2",
        "$wide * $leaving[..., None]",
        "$wide",
        f"{STATE_SPACES} -k numpy[v2-documents]",
    ),
    Fault(
        "doubling forgets the decay",
        "_prepare_v1",
        "$decay * jnp.pad($states[:, :-$by], $shift)",
        "jnp.pad($states[:, :-$by], $shift)",
        f"{STATE_SPACES} -k numpy[v1-documents]",
    ),
    Fault(
        "a window holds another segment",
        "xla:_conv",
        "$before = jnp.where($same[..., None], $before, 0)",
        "pass",
        f"{STATE_SPACES} -k numpy[conv-documents]",
    ),
    Fault(
        "a window's map keeps the old inputs",
        "Window.constant",
        "jnp.full_like($like[0], $state.shape[2])",
        "$like[0]",
        f"{STATE_SPACES} -k mesh[conv-documents-sp8]",
    ),
    Fault(
        "a call shorter than the window loses its farthest tap",
        "xla:_conv",
        "min($$args, $length)",
        "min($$args, $length - 1)",
        "tests/kernels/test_state_space.py -k in_parts",
    ),
)
