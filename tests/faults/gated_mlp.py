"""Faults of gated_mlp."""

from faults import Fault

FAULTS = (
    Fault(
        "gated_mlp in Triton: the slope of silu is its sigmoid",
        "triton_activations:activation",
        "$s * (1.0 + $x * (1.0 - $s))",
        "$s",
        "tests/test_ops.py -k gated_activation-small-float32-triton",
    ),
    Fault(
        "gated_mlp in Triton: the slope of gelu_tanh forgets the cube's",
        "triton_activations:activation",
        "0.134145 * $x * $x",
        "0.044715 * $x * $x",
        "tests/test_ops.py -k gated_activation-gelu_tanh-float32-triton",
    ),
    Fault(
        "gated_mlp in Triton: the product that the last matmul learns from is the activation",
        "triton_gpu:gated_activation_bwd_kernel",
        "(act * up).to",
        "act.to",
        "tests/test_ops.py -k gated_mlp-small-float32-triton",
    ),
    Fault(
        "gated_mlp in Pallas: up learns from the gate",
        "pallas_tpu:gated_activation_bwd_kernel",
        "($d * $act).astype",
        "($d * gate_ref[...]).astype",
        "tests/test_ops.py -k gated_activation-small-float32-pallas",
    ),
    Fault(
        "gated_mlp: up's matrix learns from the gate",
        "gated_mlp/matmuls:_gradients",
        "dot($$args, du)",
        "dot($$args, dg)",
        "tests/kernels/test_gated_mlp.py -k against_float64",
    ),
    Fault(
        "gated_mlp: gradients of matrices are those of the last block",
        "gradients_through.block",
        "$sums[$name] + $found[$name]",
        "$found[$name]",
        "tests/kernels/test_gated_mlp.py -k blocks_have_the_numbers",
    ),
    Fault(
        "gated_mlp: sums over blocks are rounded at each",
        "gradients_through",
        "jnp.zeros_like($w, jnp.float32)",
        "jnp.zeros_like($w)",
        "tests/kernels/test_gated_mlp.py -k blocks_have_the_numbers",
    ),
    Fault(
        "gated_mlp: a block is of the whole sequence",
        "block_tokens",
        "$tokens * $width <= BLOCKED",
        "True",
        "tests/kernels/test_gated_mlp.py -k 'a_block_is_of_a_size'",
    ),
    Fault(
        "gated_mlp: the last block's padding is joined",
        "gated_mlp/matmuls:_blocks",
        "jnp.pad($x, [(0, $n * $rows - $x.shape[0]), (0, 0)])",
        "jnp.pad($x, [($n * $rows - $x.shape[0], 0), (0, 0)])",
        "tests/kernels/test_gated_mlp.py -k blocks_have_the_numbers",
    ),
)
