"""Faults of kl_divergence."""

from faults import Fault

FAULTS = (
    Fault(
        "kl_divergence: the reverse gap forgets its own probabilities",
        "kernels/ops/kl_divergence/xla.py",
        "own * (1 + (student - teacher) - gap)",
        "own * (student - teacher)",
        "tests/kernels/test_kl_divergence.py -k float64",
    ),
    Fault(
        "kl_divergence: the temperature is not in the gradient",
        "kernels/ops/kl_divergence/xla.py",
        "return logits / temperature, 1 / temperature",
        "return logits / temperature, 1.0",
        "tests/kernels/test_kl_divergence.py -k float64",
    ),
    Fault(
        "kl_divergence: a masked entry is not a number",
        "kernels/ops/kl_divergence/xla.py",
        "jnp.sum(jnp.where(share > 0, share * (p - q), 0), axis=-1)",
        "jnp.sum(share * (p - q), axis=-1)",
        "tests/kernels/test_kl_divergence.py -k masked",
    ),
    Fault(
        "kl_divergence: ignored tokens count",
        "kernels/ops/kl_divergence/functions.py",
        "counts = ((marks != ignore_index)",
        "counts = ((marks != ignore_index + 7)",
        "tests/kernels/test_kl_divergence.py -k ignored",
    ),
    Fault(
        "kl_divergence: parts of the vocabulary weigh alike",
        "ejdist/vocabulary_parallel.py",
        "jnp.exp(parts[p] - whole[p]) * gap",
        "gap / 2",
        "tests/kernels/test_kl_divergence.py -k devices",
    ),
)
