"""Faults of rotary_embedding."""

from faults import Fault

FAULTS = (
    Fault(
        "rotary_embedding: the backward divides where XPos multiplies",
        "_back",
        "$xpos.reversed()",
        "$xpos",
        "tests/test_ops.py -k rotary_embedding-xpos-float32",
    ),
    Fault(
        "rotary_embedding: zeta of XPos is over the whole head",
        "XPos.exponent",
        "np.arange(0, $width, 2, dtype=np.float64) / $width",
        "np.arange(0, $width, 2, dtype=np.float64) / ($width + 2)",
        "tests/kernels/test_rotary_embedding.py -k xpos",
    ),
    Fault(
        "rotary_embedding in Triton: the backward turns on",
        "triton_gpu:rotary_embedding_kernel",
        "$sin = -$sin",
        "$sin = $sin",
        "tests/test_ops.py -k 'rotary_embedding-plain-float32-triton_gpu'",
    ),
    Fault(
        "rotary_embedding in Triton: a quarter turn is that of float32",
        "_cos_sin",
        "($wide - $quarter * 1.5707963705062866 + $quarter * 4.371138828673793e-08).to",
        "($wide - $quarter * 1.5707963705062866).to",
        "tests/kernels/test_rotary_embedding.py -k million",
    ),
    Fault(
        "rotary_embedding in Triton: keys fall as queries do",
        "triton_gpu:rotary_embedding_kernel",
        "tl.exp(-$power)",
        "tl.exp($power)",
        "tests/test_ops.py -k 'rotary_embedding_pair-all-float32-triton_gpu'",
    ),
    Fault(
        "rotary_embedding in Triton: positions of the first row for all",
        "triton_gpu:_turned",
        "$positions.shape[0] < $B",
        "True",
        "tests/test_ops.py -k 'rotary_embedding-plain-float32-triton_gpu'",
    ),
    Fault(
        "rotary_embedding in Pallas: what does not turn is scaled",
        "pallas_tpu:_columns",
        "np.where($entry < $width, $factor, 1.0)",
        "$factor",
        "tests/test_ops.py -k 'rotary_embedding-yarn_all-float32-pallas_tpu'",
    ),
    Fault(
        "rotary_embedding in Pallas: the backward turns on",
        "pallas_tpu:rotary_embedding_kernel",
        "-$sign if $back else $sign",
        "$sign",
        "tests/test_ops.py -k 'rotary_embedding_pair-plain-float32-pallas_tpu'",
    ),
    Fault(
        "rotary_embedding: keys fall as queries do",
        "rotary_embedding_pair",
        "None if $xpos is None else $xpos.other()",
        "$xpos",
        "tests/kernels/test_rotary_embedding.py -k at_once",
    ),
)
