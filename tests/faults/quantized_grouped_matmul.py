"""Faults of quantized_grouped_matmul."""

from faults import Fault

TESTS = "tests/kernels/test_quantized_grouped_matmul.py"
XLA = "grouped_matmul/xla:_unpacked.matrix"
MATRIX = "dequantized($w[$e], $scales[$e], None if $biases is None else $biases[$e], **$$how)"
COMPOSED = "tests/test_ops.py -k 'quantized_grouped and composed'"

FAULTS = (
    Fault(
        "packed groups: every expert has the scales of the first",
        XLA,
        MATRIX,
        MATRIX.replace("$scales[$e]", "$scales[0]"),
        TESTS,
    ),
    Fault(
        "packed groups: an expert has the scales of the next",
        XLA,
        MATRIX,
        MATRIX.replace("$scales[$e]", "$scales[($e + 1) % len($scales)]"),
        TESTS,
    ),
    Fault(
        "packed groups: every expert has the words of the first", XLA, MATRIX, MATRIX.replace("$w[$e]", "$w[0]"), TESTS
    ),
    Fault(
        "packed groups: an expert has the biases of the one before",
        XLA,
        MATRIX,
        MATRIX.replace("$biases[$e]", "$biases[$e - 1]"),
        TESTS,
    ),
    Fault(
        "packed groups: all matrices are unpacked before the loop",
        XLA,
        MATRIX,
        "jax.lax.optimization_barrier(dequantized($w, $scales, $biases, **$$how))[$e]",
        f"{TESTS} -k at_a_time",
    ),
    Fault(
        "packed groups: the gradient is of matrices as they are",
        "grouped_matmul/composed:dense.backward",
        "product($saved.d_out.astype($x.dtype), $w, $scales, $biases, $sizes, True, **$$how)",
        "product($saved.d_out.astype($x.dtype), $w, $scales, $biases, $sizes, False, **$$how)",
        COMPOSED,
    ),
    Fault(
        "packed groups: matrices of any size are unpacked at once on GPUs",
        "MOST_BYTES",
        "4 << 30",
        "4 << 40",
        f"{TESTS} -k gpus_take",
    ),
    Fault(
        "packed groups: GPUs loop over groups",
        "grouped_matmul/packed:packed_op",
        "('composed', 'xla', 'triton_packed')",
        "('xla', 'composed', 'triton_packed')",
        f"{TESTS} -k gpus_take",
    ),
    Fault(
        "packed groups: sizes of fewer groups are taken",
        "quantized_grouped_matmul",
        "$sizes.shape != $w.shape[:1]",
        "$sizes.ndim != 1",
        TESTS,
    ),
)
