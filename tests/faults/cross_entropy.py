"""Faults of cross_entropy."""

from faults import Fault

TRITON = "kernels/ops/cross_entropy/triton_gpu.py"
FAULTS = (
    Fault(
        "cross_entropy in Triton: a lane's sum is not rescaled",
        TRITON,
        "total = total * tl.exp(largest - _finite(new)) + ",
        "total = total + ",
        "tests/kernels/test_cross_entropy.py -k masked",
    ),
    Fault(
        "cross_entropy in Triton: what is masked out is not a number",
        TRITON,
        "tl.sum(tl.exp(x - _finite(new)[:, None]), axis=1)",
        "tl.sum(tl.exp(x - new[:, None]), axis=1)",
        "tests/kernels/test_cross_entropy.py -k masked",
    ),
    Fault(
        "cross_entropy in Triton: the mean is a sum",
        TRITON,
        "tl.sum(plain, axis=0) / V",
        "tl.sum(plain, axis=0)",
        "tests/test_ops.py -k cross_entropy-small-float32-triton",
    ),
    Fault(
        "cross_entropy in Triton: entries past the vocabulary are capped into the mean",
        TRITON,
        'x = tl.where(inside, CAP * _tanh(x / CAP), float("-inf"))',
        "x = CAP * _tanh(x / CAP)",
        "tests/test_ops.py -k cross_entropy-soft_cap-float32-triton",
    ),
    Fault(
        "cross_entropy in Triton: the cap has no slope",
        TRITON,
        "x, slope = CAP * bent, 1.0 - bent * bent",
        "x, slope = CAP * bent, 1.0",
        "tests/test_ops.py -k cross_entropy-soft_cap-float32-triton",
    ),
    Fault(
        "cross_entropy: targets of the backward are the next token's",
        "kernels/ops/cross_entropy/blocks.py",
        "_blocks(targets, rows, -1), *(",
        "_blocks(targets + 1, rows, -1), *(",
        "tests/test_ops.py -k cross_entropy-odd-float32",
    ),
)
