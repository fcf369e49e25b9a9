"""Faults of kl_divergence."""

from faults import Fault

FAULTS = (
    Fault(
        "kl_divergence in Triton: what there is of a token is read in the order of the names",
        "kl_divergence/triton_gpu:_pull",
        "[$row[$name] for $name in PER_TOKEN]",
        "[$row[$name] for $name in sorted(PER_TOKEN)]",
        "tests/test_ops.py -k kl_divergence-small-float32-triton",
    ),
    Fault(
        "kl_divergence: the reverse gap forgets its own probabilities",
        "kl_divergence/adapters:gradient",
        "1 + ($x - $other) - $row['gap']",
        "$x - $other",
        "tests/kernels/test_kl_divergence.py -k float64",
    ),
    Fault(
        "kl_divergence: the temperature is not in the gradient",
        "vocabulary:bent",
        "($logits / $temperature, 1 / $temperature)",
        "($logits / $temperature, 1.0)",
        "tests/kernels/test_kl_divergence.py -k float64",
    ),
    Fault(
        "kl_divergence: a masked entry is not a number",
        "kl_divergence/xla:_outputs",
        "jnp.where($share > 0, $share * ($p - $q), 0)",
        "$share * ($p - $q)",
        "tests/kernels/test_kl_divergence.py -k masked",
    ),
    Fault(
        "kl_divergence: ignored tokens count",
        "is_counted",
        "($targets != $ignore_index) & ($targets != ALSO_IGNORED)",
        "($targets != $ignore_index + 7) & ($targets != ALSO_IGNORED)",
        "tests/kernels/test_kl_divergence.py -k ignored",
    ),
    Fault(
        "kl_divergence: parts of the vocabulary weigh alike",
        "_joined_gap",
        "$share * $gap",
        "$gap / 2",
        "tests/kernels/test_kl_divergence.py -k devices",
    ),
    Fault(
        "kl_divergence in Triton: a lane's gap is not rescaled",
        "kl_divergence/triton_gpu:_more",
        "tl.where($rescaled_p > 0, $gap * $rescaled_p, 0.0)",
        "$gap",
        "tests/kernels/test_kl_divergence.py -k kernel_in_small_blocks",
    ),
    Fault(
        "kl_divergence in Triton: the student is always q",
        "triton_gpu:kl_divergence_fwd_kernel",
        "if not $REVERSE:\n    $p_ptr, $q_ptr = ($q_ptr, $p_ptr)",
        "$p_ptr, $q_ptr = ($q_ptr, $p_ptr)",
        "tests/test_ops.py -k kl_divergence-all-float32-triton",
    ),
    Fault(
        "kl_divergence in Triton: the temperature is not in the gradient",
        "vocabulary_triton:bent",
        "(1.0 - $bent * $bent) / $TEMPERATURE",
        "1.0 - $bent * $bent",
        "tests/test_ops.py -k kl_divergence-all-float32-triton",
    ),
    Fault(
        "kl_divergence in Triton: what is masked out counts",
        "kl_divergence/triton_gpu:_more",
        "tl.where($share > 0, $share * ($p - $q), 0.0)",
        "$share * ($p - $q)",
        "tests/kernels/test_kl_divergence.py -k kernel_in_small_blocks",
    ),
    Fault(
        "kl_divergence in Pallas: a gap of no share is scaled all the same",
        "kl_divergence_fwd_kernel.add",
        "jnp.where($shrunk_p > 0, $gap[...] * $shrunk_p, 0.0)",
        "$gap[...]",
        "tests/kernels/test_kl_divergence.py -k kernel_in_small_blocks",
    ),
    Fault(
        "kl_divergence in Pallas: what is masked out counts",
        "kl_divergence_fwd_kernel.add",
        "jnp.where($share > 0, $share * ($p - $q), 0.0)",
        "$share * ($p - $q)",
        "tests/kernels/test_kl_divergence.py -k kernel_in_small_blocks",
    ),
    Fault(
        "kl_divergence in Pallas: the gap is not a mean",
        "kl_divergence_fwd_kernel._",
        "$gap[...] / $total_p[...]",
        "$gap[...]",
        "tests/kernels/test_kl_divergence.py -k kernel_in_small_blocks",
    ),
    Fault(
        "kl_divergence in Pallas: the student is always q",
        "pallas_tpu:kl_divergence_fwd_kernel",
        "not $how.reverse",
        "True",
        "tests/kernels/test_kl_divergence.py -k kernel_in_small_blocks",
    ),
)
