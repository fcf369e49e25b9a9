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
    Fault(
        "rotary_embedding in Triton: the backward turns on",
        "kernels/ops/rotary_embedding/triton_gpu.py",
        "        sin = -sin\n",
        "        sin = sin\n",
        "tests/test_ops.py -k 'rotary_embedding-plain-float32-triton_gpu'",
    ),
    Fault(
        "rotary_embedding in Triton: a quarter turn is that of float32",
        "kernels/ops/rotary_embedding/triton_gpu.py",
        " + quarter * 4.371138828673793e-08",
        "",
        "tests/kernels/test_rotary_embedding.py -k million",
    ),
    Fault(
        "rotary_embedding in Triton: keys fall as queries do",
        "kernels/ops/rotary_embedding/triton_gpu.py",
        "scale = tl.exp(-power)",
        "scale = tl.exp(power)",
        "tests/test_ops.py -k 'rotary_embedding_pair-all-float32-triton_gpu'",
    ),
    Fault(
        "rotary_embedding in Triton: positions of the first row for all",
        "kernels/ops/rotary_embedding/triton_gpu.py",
        "SHARED=positions.shape[0] < B",
        "SHARED=True",
        "tests/test_ops.py -k 'rotary_embedding-plain-float32-triton_gpu'",
    ),
    Fault(
        "rotary_embedding in Pallas: what does not turn is scaled",
        "kernels/ops/rotary_embedding/pallas_tpu.py",
        "np.where(entry < width, factor, 1.0)",
        "factor",
        "tests/test_ops.py -k 'rotary_embedding-yarn_all-float32-pallas_tpu'",
    ),
    Fault(
        "rotary_embedding in Pallas: the backward turns on",
        "kernels/ops/rotary_embedding/pallas_tpu.py",
        "(-sign if back else sign)",
        "sign",
        "tests/test_ops.py -k 'rotary_embedding_pair-plain-float32-pallas_tpu'",
    ),
    Fault(
        "rotary_embedding: keys fall as queries do",
        "kernels/ops/rotary_embedding/contract.py",
        "of_key = None if xpos is None else xpos.other()",
        "of_key = xpos",
        "tests/kernels/test_rotary_embedding.py -k at_once",
    ),
)
