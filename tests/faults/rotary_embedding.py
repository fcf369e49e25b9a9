"""Faults of rotary_embedding."""

from faults import Fault

EXACT = "tests/kernels/test_rotary_embedding.py -k"

FAULTS = (
    Fault(
        "rotary_embedding: the backward divides where XPos multiplies",
        "rotary_embedding/xla:_back",
        "turning($$args, $xpos, $exact_from, $accumulate)",
        "turning($$args, $xpos and $xpos.other(), $exact_from, $accumulate)",
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
    Fault(
        "rotary_embedding: the gradient of XLA turns on",
        "rotary_embedding/xla:_back",
        "-$sin * $scale",
        "$sin * $scale",
        "tests/test_ops.py -k 'rotary_embedding-far-float32-xla'",
    ),
    Fault(
        "rotary_embedding: a fixed-point frequency leaves nothing",
        "angles:turns",
        "float($u - $n) * _UNIT",
        "0 * float($u - $n)",
        f"{EXACT} exact_from_a_position",
    ),
    Fault(
        "rotary_embedding: frequencies of more than a turn are cut off",
        "angles:turns",
        "$n % 2**32",
        "min($n, 2**32 - 1)",
        f"{EXACT} 'exact_from_a_position and linear'",
    ),
    Fault(
        "rotary_embedding: angles are exact only past a position, not at it",
        "angles:is_far",
        "$index >= $exact_from",
        "$index > $exact_from",
        f"{EXACT} 'exact_from_a_position and xla-base'",
    ),
    Fault(
        "rotary_embedding: positions before zero are not far",
        "angles:is_far",
        "($index >= $exact_from) | ($index <= -$exact_from)",
        "$index >= $exact_from",
        f"{EXACT} 'exact_from_a_position and xla-base'",
    ),
    Fault(
        "rotary_embedding in Triton: the product of positions is one of floats",
        "triton_gpu:rotary_embedding_kernel",
        "($index[:, None] * $fixed[None, :]).to(tl.float32)",
        "($index.to(tl.float32)[:, None] * $fixed.to(tl.float32)[None, :])",
        f"{EXACT} 'exact_from_a_position and triton_gpu'",
    ),
    Fault(
        "rotary_embedding in Pallas: the second entries of pairs have no exact angle",
        "pallas_tpu:_columns",
        "$fixed[0, $entries], $columns[4, $entries] = turns($angles)",
        "$fixed[0, one], $columns[4, one] = turns($angles)",
        f"{EXACT} 'exact_from_a_position and pallas_tpu'",
    ),
    Fault(
        "rotary_embedding: a model does not say from where angles are exact",
        "models/attention:_turning",
        "$c.rope_exact_from",
        "131072",
        "tests/test_model.py -k text_begins",
    ),
)
