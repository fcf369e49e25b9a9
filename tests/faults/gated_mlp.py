"""Faults of gated_mlp."""

from faults import Fault

FAULTS = (
    Fault(
        "gated_mlp in Triton: the slope of silu is its sigmoid",
        "_activation",
        "$s * (1.0 + $x * (1.0 - $s))",
        "$s",
        "tests/test_ops.py -k gated_activation-small-float32-triton",
    ),
    Fault(
        "gated_mlp in Triton: the slope of gelu_tanh forgets the cube's",
        "_activation",
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
)
