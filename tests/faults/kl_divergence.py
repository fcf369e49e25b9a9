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
        "jax.lax.psum(share * gap, vocabulary)",
        "jax.lax.psum(gap / 2, vocabulary)",
        "tests/kernels/test_kl_divergence.py -k devices",
    ),
    Fault(
        "kl_divergence in Triton: a lane's gap is not rescaled",
        "kernels/ops/kl_divergence/triton_gpu.py",
        "tl.where(rescaled_p > 0, gap * rescaled_p, 0.0)",
        "gap",
        "tests/kernels/test_kl_divergence.py -k kernel_in_small_blocks",
    ),
    Fault(
        "kl_divergence in Triton: the student is always q",
        "kernels/ops/kl_divergence/triton_gpu.py",
        "    if not REVERSE:\n        p_ptr, q_ptr = q_ptr, p_ptr\n",
        "    p_ptr, q_ptr = q_ptr, p_ptr\n",
        "tests/test_ops.py -k kl_divergence-all-float32-triton",
    ),
    Fault(
        "kl_divergence in Triton: the temperature is not in the gradient",
        "kernels/ops/kl_divergence/triton_gpu.py",
        "(1.0 - bent * bent) / TEMPERATURE",
        "1.0 - bent * bent",
        "tests/test_ops.py -k kl_divergence-all-float32-triton",
    ),
    Fault(
        "kl_divergence in Triton: what is masked out counts",
        "kernels/ops/kl_divergence/triton_gpu.py",
        "apart = tl.where(share > 0, share * (p - q), 0.0)",
        "apart = share * (p - q)",
        "tests/kernels/test_kl_divergence.py -k kernel_in_small_blocks",
    ),
    Fault(
        "kl_divergence in Pallas: a gap of no share is scaled all the same",
        "kernels/ops/kl_divergence/pallas_tpu.py",
        "jnp.where(shrunk_p > 0, gap[...] * shrunk_p, 0.0)",
        "gap[...]",
        "tests/kernels/test_kl_divergence.py -k kernel_in_small_blocks",
    ),
    Fault(
        "kl_divergence in Pallas: what is masked out counts",
        "kernels/ops/kl_divergence/pallas_tpu.py",
        "jnp.where(share > 0, share * (p - q), 0.0)",
        "share * (p - q)",
        "tests/kernels/test_kl_divergence.py -k kernel_in_small_blocks",
    ),
    Fault(
        "kl_divergence in Pallas: the gap is not a mean",
        "kernels/ops/kl_divergence/pallas_tpu.py",
        "gap[...] / total_p[...])",
        "gap[...])",
        "tests/kernels/test_kl_divergence.py -k kernel_in_small_blocks",
    ),
    Fault(
        "kl_divergence in Pallas: the student is always q",
        "kernels/ops/kl_divergence/pallas_tpu.py",
        "    if not reverse:\n        models",
        "    if True:\n        models",
        "tests/kernels/test_kl_divergence.py -k kernel_in_small_blocks",
    ),
)
