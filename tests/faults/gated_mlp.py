"""Faults of gated_mlp."""

from faults import Fault

FAULTS = (
    Fault(
        "gated_mlp in Triton: the slope of silu is its sigmoid",
        "kernels/ops/gated_mlp/triton_gpu.py",
        "act, slope = x * s, s * (1.0 + x * (1.0 - s))",
        "act, slope = x * s, s",
        "tests/test_ops.py -k gated_activation-small-float32-triton",
    ),
    Fault(
        "gated_mlp in Triton: the slope of gelu_tanh forgets the cube's",
        "kernels/ops/gated_mlp/triton_gpu.py",
        "0.134145 * x * x",
        "0.044715 * x * x",
        "tests/test_ops.py -k gated_activation-gelu_tanh-float32-triton",
    ),
    Fault(
        "gated_mlp in Triton: the product that the last matmul learns from is the activation",
        "kernels/ops/gated_mlp/triton_gpu.py",
        "        tl.store(out_ptr + at, (act * up).to(out_ptr.dtype.element_ty), mask=mask)\n\n\ndef",
        "        tl.store(out_ptr + at, act.to(out_ptr.dtype.element_ty), mask=mask)\n\n\ndef",
        "tests/test_ops.py -k gated_mlp-small-float32-triton",
    ),
    Fault(
        "gated_mlp in Pallas: up learns from the gate",
        "kernels/ops/gated_mlp/pallas_tpu.py",
        "d_up_ref[...] = (d * act)",
        "d_up_ref[...] = (d * gate_ref[...])",
        "tests/test_ops.py -k gated_activation-small-float32-pallas",
    ),
    Fault(
        "gated_mlp: up's matrix learns from the gate",
        "kernels/ops/gated_mlp/matmuls.py",
        'dot("...d,...f->df", x, du)',
        'dot("...d,...f->df", x, dg)',
        "tests/kernels/test_gated_mlp.py -k against_float64",
    ),
)
