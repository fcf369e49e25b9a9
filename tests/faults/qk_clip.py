"""Faults of QK-clip."""

from faults import Fault

TESTS = "tests/test_qk_clip.py"

FAULTS = (
    Fault(
        "qk_clip: padding has logits",
        "attention:_told",
        "jnp.where($real, jax.lax.stop_gradient($lse), -jnp.inf)",
        "jax.lax.stop_gradient($lse) + 0 * $real",
        f"{TESTS} -k padding",
    ),
    Fault(
        "qk_clip: heads that did not pass grow to the limit",
        "qk_clip:clipped",
        "jnp.isfinite($of_groups) & ($of_groups > $tau)",
        "jnp.isfinite($of_groups)",
        f"{TESTS} -k logits_of_heads",
    ),
    Fault(
        "qk_clip: a head without a largest logit is scaled",
        "qk_clip:clipped",
        "jnp.isfinite($of_groups) & ($of_groups > $tau)",
        "$of_groups > $tau",
        f"{TESTS} -k not_finite",
    ),
    Fault(
        "qk_clip: the keys of a group have the factor of its first head",
        "qk_clip:clipped",
        "jnp.max($told.reshape($told.shape[0], $fewest, -1), -1)",
        "$told.reshape($told.shape[0], $fewest, -1)[..., 0]",
        f"{TESTS} -k logits_of_heads",
    ),
    Fault(
        "qk_clip: parts of queries with positions have the root of a factor",
        "LatentAttention.logit_scales",
        "np.repeat([0.5, 1.0], [$c.latent.nope_dim, $c.latent.rope_dim])",
        "np.repeat([0.5, 0.5], [$c.latent.nope_dim, $c.latent.rope_dim])",
        f"{TESTS} -k logits_of_heads",
    ),
    Fault(
        "qk_clip: biases stay",
        "Attention.logit_scales",
        "$c.attention_bias",
        "False",
        f"{TESTS} -k biases",
    ),
    Fault(
        "qk_clip: the key is dropped",
        "make_train_step.train_step",
        "clip is not None",
        "False",
        f"{TESTS} -k after_each_step",
    ),
    Fault(
        "qk_clip: heads of a normalised model are clipped in vain",
        "qk_clip:check_clip",
        "bounded.items()",
        "()",
        f"{TESTS} -k refused",
    ),
    Fault(
        "qk_clip: a limit that small heads vanish under is taken",
        "qk_clip:check_clip",
        "2 * math.log($keys)",
        "0.0",
        f"{TESTS} -k refused",
    ),
)
