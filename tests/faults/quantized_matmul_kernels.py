"""Faults of the kernels of quantized_matmul."""

from faults import Fault

GRID = "tests/test_ops.py -k 'quantized_matmul and triton'"
PALLAS = "tests/test_ops.py -k 'quantized_matmul and pallas'"

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
        "quantized matmul on TPUs: the end of a code in the next word is not read",
        "quantized_matmul/pallas_tpu:_weights",
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
        "quantized_matmul/pallas_tpu:_spread",
        "lax.broadcasted_iota(jnp.int32, ($rows, $F), 0) * $period + $first",
        "lax.broadcasted_iota(jnp.int32, ($rows, $F), 0) * $period",
        PALLAS,
    ),
    Fault(
        "quantized matmul on TPUs: e4m3 has a subnormal that is twice as large",
        "quantized_matmul/pallas_tpu:_values",
        "2.0**-9",
        "2.0**-8",
        PALLAS,
    ),
)
