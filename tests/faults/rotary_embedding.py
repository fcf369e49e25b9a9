"""Faults of rotary_embedding."""

from faults import Fault

FAULTS = (
    Fault(
        "rotary_embedding: the backward divides where XPos multiplies",
        "kernels/ops/rotary_embedding/xla.py",
        "else xpos.reversed()",
        "else xpos",
        "tests/test_ops.py -k rotary_embedding-xpos-float32",
    ),
    Fault(
        "rotary_embedding: zeta of XPos is over the whole head",
        "kernels/ops/rotary_embedding/contract.py",
        "np.arange(0, width, 2, dtype=np.float64) / width + self.gamma",
        "np.arange(0, width, 2, dtype=np.float64) / (width + 2) + self.gamma",
        "tests/kernels/test_rotary_embedding.py -k xpos",
    ),
)
