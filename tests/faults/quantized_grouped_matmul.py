"""Faults of quantized_grouped_matmul."""

from faults import Fault

TESTS = "tests/kernels/test_quantized_grouped_matmul.py"
XLA = "grouped_matmul/xla:_unpacked.matrix"
MATRIX = "dequantized($w[$e], $scales[$e], None if $biases is None else $biases[$e], **$$how)"
KERNEL = "packed_matmul_kernel"
TRITON = f"{TESTS} -k where_they_lie"
PALLAS = f"{TESTS} -k on_tpus"
LAUNCH = "grouped_matmul/pallas_packed:_launch"
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
        "('triton_packed', 'composed', 'pallas_packed', 'xla')",
        "('xla', 'triton_packed', 'composed', 'pallas_packed')",
        f"{TESTS} -k gpus_take",
    ),
    Fault(
        "packed groups: many rows read their matrix once for each tile",
        "grouped_matmul/triton_packed:heuristic",
        "$rows > MOST_ROWS and too_many($call) is None",
        "False",
        f"{TESTS} -k gpus_take",
    ),
    Fault(
        "packed groups: only the first of many matrices is unpacked",
        "triton_unpacked:unpacked",
        "math.prod($lead) * $words * 32 // $bits",
        "$words * 32 // $bits",
        "tests/test_ops.py -k 'quantized_grouped and many_rows and triton'",
    ),
    Fault(
        "packed groups: a tile has the words of the next expert",
        KERNEL,
        "$w += $matrix * $PACKED * $F",
        "$w += ($matrix + 1) * $PACKED * $F",
        TRITON,
    ),
    Fault(
        "packed groups: a tile has the scales of the first expert",
        KERNEL,
        "$s += $matrix * ($D // $GROUP) * $F\nif $MODE == 'affine': $$body",
        "if $MODE == 'affine': $$body",
        TRITON,
    ),
    Fault(
        "packed groups: a step has the scale of the group after",
        KERNEL,
        "$step * $BLOCK_D // $GROUP * $F + $cols",
        "(($step + 1) * $BLOCK_D // $GROUP) * $F + $cols",
        TRITON,
    ),
    Fault(
        "packed groups: a tile reads and writes rows of the next group",
        KERNEL,
        "$inside, $here = ($rows < $end, $cols < $F)",
        "$inside, $here = ($rows < $end + 1, $cols < $F)",
        TRITON,
    ),
    Fault(
        "packed groups: rows of no group have the first matrix",
        KERNEL,
        "tl.where($expert < 0, 0, $STEPS)",
        "$STEPS",
        TRITON,
    ),
    Fault(
        "packed groups: the bias is of the entry of x that begins a step",
        "grouped_matmul/triton_packed:_few",
        "$x.astype(jnp.float32).reshape($M, $D // $step, $step).sum(-1)",
        "$x.astype(jnp.float32).reshape($M, $D // $step, $step)[..., 0]",
        TRITON,
    ),
    Fault(
        "packed groups: sizes of fewer groups are taken",
        "quantized_grouped_matmul",
        "$sizes.shape != $w.shape[:1]",
        "$sizes.ndim != 1",
        TESTS,
    ),
    Fault(
        "packed groups on TPUs: a block loses the rows that an earlier group wrote to it",
        "matmul/pallas_visits:put_rows",
        "jnp.where($keep, $out[...].astype(jnp.float32), 0.0)",
        "jnp.where($keep, 0.0, 0.0)",
        PALLAS,
    ),
    Fault(
        "packed groups on TPUs: a group writes the last row of the group before",
        "matmul/pallas_visits:put_rows",
        "$rows >= $begin[$v]",
        "$rows >= $begin[$v] - 1",
        PALLAS,
    ),
    Fault(
        "packed groups on TPUs: every step reads the words of the first",
        LAUNCH,
        "(jnp.maximum($expert[$v], 0), *($at if $turned else $at[::-1]))",
        "(jnp.maximum($expert[$v], 0), *($at if $turned else (0, $at[0])))",
        PALLAS,
    ),
    Fault(
        "packed groups on TPUs: the sum of a visit goes on from the visit before",
        "quantized_grouped_matmul_fwd_kernel",
        "$active & ($step == 0)",
        "$active & ($step < 0)",
        PALLAS,
    ),
    Fault(
        "packed groups on TPUs: columns past the last are in the gradient of x",
        "quantized_grouped_matmul_bwd_kernel",
        "$F % $width == 0",
        "True",
        PALLAS,
    ),
    Fault(
        "packed groups on TPUs: codes of a word are multiplied by the entries of x of the code before",
        "matmul/pallas_codes:product",
        "[$x[$i] for $i in range(len($pieces))]",
        "[$x[$i - 1] for $i in range(len($pieces))]",
        PALLAS,
    ),
    Fault(
        "packed groups on TPUs: XLA makes the words anew before the kernel",
        "matmul/pallas_codes:packed_arrays",
        "[$w, $scales, $$rest]",
        "[lax.bitcast_convert_type($w, jnp.int32), $scales, $$rest]",
        f"{TESTS} -k as_they_are_stored",
    ),
    Fault(
        "packed groups on TPUs: blocks have as many rows as fit",
        "grouped_matmul/pallas_packed:_blocks",
        "min(MOST_M, $rows)",
        "MOST_M",
        f"{TESTS} -k by_the_rows",
    ),
)
