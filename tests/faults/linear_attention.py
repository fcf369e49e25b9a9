"""Faults of linear_attention."""

from faults import Fault

FAULTS = (
    Fault(
        "linear attention: a padded token fades the state",
        "linear_attention/xla:_decays",
        "$constant = jnp.where($tokens.valid[:, None, :, None], $constant, 0)",
        "pass",
        "tests/test_ops.py -k linear_attention-every_decay-float32",
    ),
    Fault(
        "linear attention: a query does not see that a document began",
        "linear_attention/xla:_decays",
        "$passing + $new if $reads_after else jnp.broadcast_to($new, $passing.shape)",
        "$passing if $reads_after else jnp.zeros_like($passing)",
        "tests/test_ops.py -k linear_attention-rwkv6-float32",
    ),
    Fault(
        "linear attention: rwkv6 reads after its decay",
        "_step_of.prepare",
        "_decays($$args, reads_after=$bonus is None)",
        "_decays($$args, reads_after=True)",
        "tests/test_ops.py -k linear_attention-rwkv6-float32",
    ),
    Fault(
        "linear attention: differences of sums",
        "_Decay.after",
        "_sums('sj,...jh->...sh', jnp.triu(jnp.ones(($C, $C), jnp.float32), 1), self.passing)",
        "self.whole()[..., None, :] - jnp.cumsum(self.passing, axis=-2)",
        "tests/kernels/test_linear_attention.py -k decays_of_every_size",
    ),
    Fault(
        "a state of zeros is a constant of the program",
        "_scan",
        "jax.lax.optimization_barrier($carry)",
        "$carry",
        "tests/kernels/test_linear_attention.py -k one_chunk",
    ),
)
