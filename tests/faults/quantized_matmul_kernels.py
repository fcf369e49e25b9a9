"""Faults of the kernels of quantized_matmul."""

from faults import Fault

GRID = "tests/test_ops.py -k 'quantized_matmul and triton'"
PALLAS = "tests/test_ops.py -k 'quantized_matmul and pallas'"
HOPPER = "tests/kernels/test_quantized_matmul_hopper.py"

FAULTS = (
    Fault("quantized matmul: x is not in the order of the codes", "arranged", "$BITS == 8", "$BITS >= 4", GRID),
    Fault(
        "quantized matmul: 128 is not taken off the codes",
        "offset_of",
        "$MODE != 'affine' or ($BITS == 8 and $dtype == tl.bfloat16)",
        "True",
        GRID,
    ),
    Fault(
        "quantized matmul: the end of a code in the next word is not read",
        "triton_codes:gathered",
        "32 % $BITS != 0",
        "False",
        GRID,
    ),
    Fault(
        "quantized matmul: the second half of a step has the scales of the first",
        "_two_chunks",
        "_chunk($acc, $xs[1], $ws[1], $scales[1].reshape($F), $$rest)",
        "_chunk($acc, $xs[1], $ws[1], $scales[0].reshape($F), $$rest)",
        GRID,
    ),
    Fault(
        "quantized matmul: the last part of D is left out",
        "quantized_matmul_kernel",
        "tl.minimum($part * $EACH + $EACH, $STEPS)",
        "tl.minimum($part * $EACH + $EACH, $STEPS - 1)",
        GRID,
    ),
    Fault("quantized matmul: numbers of e2m1 are in other units", "unit_of", "16384.0", "8192.0", GRID),
    Fault(
        "quantized matmul: a scale of several chunks is that of the next group",
        "quantized_matmul/triton_gpu:_few",
        "$cfg.chunks if $chunk == $group_size else 1",
        "$cfg.chunks",
        GRID,
    ),
    Fault(
        "quantized matmul: codes that are unpacked one by one are not dequantised",
        "quantized_matmul/triton_gpu:heuristic",
        "not $few or $M > MOST_ROWS",
        "$M > MOST_ROWS",
        GRID,
    ),
    Fault(
        "quantized matmul on Hopper: x is in the order of words",
        "quantized_matmul/gluon_weights:in_order",
        "$x.reshape((M, D // 32, 4, 2, 2, 2)).permute(0, 1, 4, 5, 2, 3)",
        "$x.reshape((M, D // 32, 4, 2, 2, 2))",
        f"{HOPPER} -k numbers",
    ),
    Fault(
        "quantized matmul on Hopper: both halves are the first",
        "quantized_matmul/gluon_kernels:_multiply",
        "unpacked($ring, $stage, $zero, 2 * $TEAM + 1, $$rest)",
        "unpacked($ring, $stage, $zero, 2 * $TEAM, $$rest)",
        f"{HOPPER} -k numbers",
    ),
    Fault(
        "quantized matmul on Hopper: the second code of a word that is no number is one",
        "quantized_matmul/gluon_weights:_pair",
        "$without + 0x00010001",
        "$without + 0x00000001",
        f"{HOPPER} -k no_number",
    ),
    Fault(
        "quantized matmul on Hopper: a scale that is no number is infinite",
        "quantized_matmul/gluon_weights:_numbers",
        "gl.where($scale == 255, 0x7FC0, $scale << 7)",
        "$scale << 7",
        f"{HOPPER} -k no_number",
    ),
    Fault(
        "quantized matmul on Hopper: x is multiplied before a fence",
        "quantized_matmul/gluon_kernels:_order",
        "fence_async_shared()",
        "pass",
        f"{HOPPER} -k numbers",
    ),
    Fault(
        "quantized matmul on Hopper: a stage is free while it is multiplied",
        "quantized_matmul/gluon_kernels:_multiply",
        """
$left = warpgroup_mma($weights, $x, $left, is_async=True)
$right = warpgroup_mma_wait(1, ($right,))
mbarrier.arrive($free.index($last), pred=$step > 0)
$weights = unpacked($ring, $stage, $$rest)
""",
        """
$left = warpgroup_mma($weights, $x, $left, is_async=True)
$right = warpgroup_mma_wait(1, ($right,))
mbarrier.arrive($free.index($stage))
$weights = unpacked($ring, $stage, $$rest)
""",
        f"{HOPPER} -k numbers",
    ),
    Fault(
        "quantized matmul on Hopper: numbers of nf4 from 8 on are those below",
        "_nf4",
        "0xFBEA if PART >= 2 else 0xD9C8",
        "0x7362 if PART >= 2 else 0x5140",
        f"{HOPPER} -k numbers",
    ),
    Fault(
        "quantized matmul on Hopper: a program with one stage waits for itself",
        "quantized_matmul/triton_gpu:_turned",
        "$cfg.num_stages > 1",
        "$cfg.num_stages > 0",
        f"{HOPPER} -k does_not_fit",
    ),
    Fault(
        "quantized matmul on Hopper: codes in the upper half of a byte have the scale of those in the lower",
        "quantized_matmul/gluon_weights:_pair",
        "$of_odd if ODD else $scale",
        "$scale",
        f"{HOPPER} -k numbers",
    ),
    Fault(
        "quantized matmul on Hopper: biases are not as small as scales",
        "quantized_matmul/gluon_weights:unpacked",
        "_twice_times($bias, 0x2180, $zero)",
        "_twice($bias)",
        f"{HOPPER} -k numbers",
    ),
    Fault(
        "quantized matmul on Hopper: the second team stores where the first does",
        "quantized_matmul/gluon_kernels:_multiply",
        "$tile * $P.BLOCK_F + 2 * $TEAM * $P.COLUMNS",
        "$tile * $P.BLOCK_F",
        f"{HOPPER} -k numbers",
    ),
    Fault(
        "quantized matmul on Hopper: a stage is free after one of several teams",
        "quantized_matmul/gluon_kernels:_make_ring",
        "mbarrier.init($free.index($i), count=$P.TEAMS)",
        "mbarrier.init($free.index($i), count=1)",
        f"{HOPPER} -k numbers",
    ),
    Fault(
        "quantized matmul on Hopper: a part of D begins where a longer one before it would not have ended",
        "quantized_matmul/gluon_kernels:_place",
        "$part * EACH + gl.minimum($part, REST)",
        "$part * EACH",
        f"{HOPPER} -k numbers",
    ),
    Fault(
        "quantized matmul on TPUs: the end of a code in the next word is not read",
        "matmul/pallas_codes:unpacked_weights",
        "$shift + $bits > 32",
        "False",
        PALLAS,
    ),
    Fault(
        "quantized matmul on TPUs: a sum goes on from the tile before",
        "quantized_matmul_fwd_kernel",
        "$step == 0",
        "$step < 0",
        PALLAS,
    ),
    Fault(
        "quantized matmul on TPUs: all codes have the scale of a period's first",
        "matmul/pallas_codes:_spread",
        "lax.broadcasted_iota(jnp.int32, ($rows, $F), 0) * $period + $first",
        "lax.broadcasted_iota(jnp.int32, ($rows, $F), 0) * $period",
        PALLAS,
    ),
    Fault(
        "quantized matmul on TPUs: the subnormal numbers of e4m3 and e2m1 are twice as large",
        "matmul/pallas_codes:_values",
        "2.0 ** (1 - $bias - $mantissa_bits)",
        "2.0 ** (2 - $bias - $mantissa_bits)",
        PALLAS,
    ),
    Fault(
        "quantized matmul on TPUs: codes of nf4 are chosen by their highest bit first",
        "matmul/pallas_codes:_values",
        "$codes & 1 << $bit != 0",
        "$codes & 8 >> $bit != 0",
        PALLAS,
    ),
)
