"""Faults of linear_attention."""

from faults import Fault

FAULTS = (
    Fault(
        "linear attention: a padded token fades the state",
        "kernels/ops/linear_attention/xla.py",
        "constant = jnp.where(tokens.valid[:, None, :, None], constant, 0)",
        "pass",
        "tests/test_ops.py -k linear_attention-every_decay-float32",
    ),
    Fault(
        "linear attention: a query does not see that a document began",
        "kernels/ops/linear_attention/xla.py",
        "reading = passing + new if reads_after else jnp.broadcast_to(new, passing.shape)",
        "reading = passing if reads_after else jnp.zeros_like(passing)",
        "tests/test_ops.py -k linear_attention-rwkv6-float32",
    ),
    Fault(
        "linear attention: rwkv6 reads after its decay",
        "kernels/ops/linear_attention/xla.py",
        "reads_after=bonus is None",
        "reads_after=True",
        "tests/test_ops.py -k linear_attention-rwkv6-float32",
    ),
    Fault(
        "linear attention: differences of sums",
        "kernels/ops/linear_attention/xla.py",
        'return _sums("sj,...jh->...sh", jnp.triu(jnp.ones((C, C), jnp.float32), 1), self.passing)',
        "return self.whole()[..., None, :] - jnp.cumsum(self.passing, axis=-2)",
        "tests/kernels/test_linear_attention.py -k decays_of_every_size",
    ),
    Fault(
        "a state of zeros is a constant of the program",
        "kernels/engines/scan/chunks.py",
        "jax.lax.optimization_barrier(carry)",
        "carry",
        "tests/kernels/test_linear_attention.py -k one_chunk",
    ),
)
