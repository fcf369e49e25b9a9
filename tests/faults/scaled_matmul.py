"""Faults of scaled_matmul, of its quantisation, and of its kernel for Hopper, which the interpreter shows."""

from faults import Fault

SCALED = "tests/kernels/test_scaled_matmul.py"
HOPPER = "tests/kernels/test_scaled_matmul_hopper.py"
GRID = "tests/test_ops.py -k scaled_matmul"

FAULTS = (
    Fault(
        "scaled matmul: the scale of zeros is zero",
        "scaled_matmul/formats:quantized",
        "jnp.where($largest > 0, jnp.maximum($largest * jnp.float32(1 / $most), LEAST), 1.0)",
        "$largest * jnp.float32(1 / $most)",
        f"{SCALED} -k numpy",
    ),
    Fault(
        "scaled matmul: values past the end of a dtype are not clipped",
        "scaled_matmul/formats:quantized",
        "jnp.clip($parts * (1 / powers($scale))[:, None, :, None], -$most, $most)",
        "$parts * (1 / powers($scale))[:, None, :, None]",
        f"{SCALED} -k numpy",
    ),
    Fault(
        "scaled matmul: an infinity is hidden by its scale",
        "scaled_matmul/formats:quantized",
        "$scale = jnp.where($whole, $scale, jnp.nan)",
        "$scale = jnp.where($whole, $scale, 1.0)",
        f"{SCALED} -k hidden",
    ),
    Fault(
        "scaled matmul: a scale that devices flush to zero",
        "scaled_matmul/formats:quantized",
        "jnp.maximum($largest * jnp.float32(1 / $most), LEAST)",
        "$largest * jnp.float32(1 / $most)",
        f"{SCALED} -k least",
    ),
    Fault(
        "scaled matmul: a power of two above the largest magnitude",
        "scaled_matmul/formats:quantized",
        "jnp.frexp($largest)[1] - 1",
        "jnp.frexp($largest)[1]",
        f"{SCALED} -k numpy",
    ),
    Fault(
        "scaled matmul: a step has the scales of the next one",
        "scaled_matmul/formats:column",
        "$step // ($steps // $scale.shape[1])",
        "($step + 1) // ($steps // $scale.shape[1])",
        GRID,
    ),
    Fault(
        "scaled matmul, Triton: the scales of b are those of the first step",
        "scaled_matmul/triton_kernels:_scales_of",
        "$scale_ptr + $row * $BLOCKS + $step // ($STEPS // $BLOCKS)",
        "$scale_ptr + $row * $BLOCKS",
        GRID,
    ),
    Fault(
        "scaled matmul, Hopper: the lower rows of a tall tile have the scales of the upper ones",
        "scaled_matmul/gluon_kernels:_read_scales",
        "$rows.slice(64, 64, 0)",
        "$rows.slice(0, 64, 0)",
        HOPPER,
    ),
    Fault(
        "scaled matmul, Hopper: the scales of a step are those of the first",
        "scaled_matmul/gluon_kernels:_load_scales",
        "gl.load($b_ptr + ($matrix * $BLOCKS_N + $column // 128) * $STEPS + $k)",
        "gl.load($b_ptr + ($matrix * $BLOCKS_N + $column // 128) * $STEPS)",
        HOPPER,
    ),
    Fault(
        "scaled matmul, Hopper: a block of rows of b has the scale of the first",
        "scaled_matmul/gluon_kernels:_load_scales",
        "$matrix * $BLOCKS_N + $column // 128",
        "$matrix * $BLOCKS_N",
        HOPPER,
    ),
    Fault(
        "scaled matmul, Hopper: scales are replaced while their stage is multiplied",
        "scaled_matmul/gluon_kernels:_load_scales",
        "mbarrier.wait($free.index($stage), $phase ^ 1)",
        "",
        HOPPER,
    ),
    Fault(
        "scaled matmul, Hopper: a stage is multiplied before its scales are there",
        "scaled_matmul/gluon_kernels:_make_ring",
        "mbarrier.init($full.index($i), count=$LOADERS)",
        "mbarrier.init($full.index($i), count=1)",
        HOPPER,
    ),
    Fault(
        "scaled matmul, Hopper: the products of a step are added to those of the last one",
        "scaled_matmul/gluon_kernels:_multiply_by_steps",
        "gl.num_programs(1) > 1",
        "gl.num_programs(1) > 0",
        HOPPER,
    ),
    Fault(
        "scaled matmul, Hopper: a stage is given back while its lower rows are multiplied",
        "scaled_matmul/gluon_kernels:_multiply_by_steps",
        "$p = warpgroup_mma($a.slice(64, 64, 0), $b, $p, use_acc=$never, is_async=True)\n"
        "$p = warpgroup_mma_wait(0, ($p,))\nmbarrier.arrive($free.index($stage))",
        "mbarrier.arrive($free.index($stage))\n"
        "$p = warpgroup_mma($a.slice(64, 64, 0), $b, $p, use_acc=$never, is_async=True)\n$p = warpgroup_mma_wait(0, ($p,))",
        HOPPER,
    ),
    Fault(
        "scaled matmul, Hopper: a stage is loaded that is still multiplied",
        "scaled_matmul/gluon_kernels:_load",
        "mbarrier.wait($free.index($stage), $phase ^ 1)",
        "",
        HOPPER,
    ),
    Fault(
        "scaled matmul, Hopper: every row of a has the scale of the first",
        "scaled_matmul/gluon_kernels:_of_rows",
        "$of_rows = gl.load($a_ptr + ($rows if $A_ROWS else gl.zeros_like($rows)), mask=$rows < $M, other=0.0)\n"
        "$of_columns = gl.load($b_ptr + ($matrix * $N + $columns if $B_ROWS else gl.zeros_like($columns)), "
        "mask=$columns < $N, other=0.0)",
        "$of_rows = gl.load($a_ptr + gl.zeros_like($rows), mask=$rows < $M, other=0.0)\n"
        "$of_columns = gl.load($b_ptr + ($matrix * $N + $columns if $B_ROWS else gl.zeros_like($columns)), "
        "mask=$columns < $N, other=0.0)",
        HOPPER,
    ),
    Fault(
        "scaled matmul, Hopper: the last band is as high as the others",
        "scaled_matmul/gluon_kernels:_place",
        "gl.minimum(_rows_of_tiles($tiles, $M, $BLOCK_M, $BOUND) - $band * $BAND, $BAND)",
        "$BAND",
        HOPPER,
    ),
    Fault(
        "quantised both ways: rows and columns have each other's largest magnitudes",
        "quantize_kernels:quantise_tile",
        "_largest($x, 1), _largest($x, 0)",
        "_largest($x, 0), _largest($x, 1)",
        f"{SCALED} -k bit_by_bit",
    ),
    Fault(
        "quantised both ways: a block of a matrix has the scale of its rows",
        "quantize_kernels:quantise_tile",
        "tl.max($of_rows, axis=0)",
        "tl.min($of_rows, axis=0)",
        f"{SCALED} -k bit_by_bit",
    ),
    Fault(
        "quantised both ways: the transpose is not one",
        "quantize_kernels:_write_tile",
        "tl.trans(_bytes($x * $reciprocal[None, :], $E5M2))",
        "_bytes($x * $reciprocal[None, :], $E5M2)",
        f"{SCALED} -k bit_by_bit",
    ),
    Fault(
        "quantised both ways: NaN is no largest magnitude",
        "quantize_kernels:_scales",
        "tl.where($bits < 0x7F800000, $scale, float('nan'))",
        "$scale",
        f"{SCALED} -k bit_by_bit",
    ),
    Fault(
        "quantised both ways: the gate's cotangent is that of the activation itself",
        "quantize_kernels:activation_cotangents_kernel",
        "($d * tl.load($up + $offsets).to(tl.float32) * $slope).to($dtype), ($d * $act).to($dtype)",
        "($d * tl.load($up + $offsets).to(tl.float32) * $act).to($dtype), ($d * $act).to($dtype)",
        f"{SCALED} -k activation",
    ),
    Fault(
        "quantised both ways: an activation's product is not rounded before",
        "quantizing:activate_both_ways",
        "gated_activation($gate, $up, activation=$activation)",
        "gated_activation($up, $gate, activation=$activation)",
        f"{SCALED} -k activation",
    ),
    Fault(
        "interpreted Triton: 8-bit floats round ties up",
        "triton_interpreter:_interpreted_language.convert",
        "dtype.scalar in _EIGHT_BITS and rounding != ir.ROUNDING_MODE.RTZ",
        "False",
        f"{SCALED} -k bit_by_bit",
    ),
    Fault(
        "scaled grouped matmul: every group has the matrix of the first",
        "scaled_matmul/gluon_kernels:_load",
        "$matrix * $N + $column",
        "$column",
        f"{HOPPER} -k groups",
    ),
    Fault(
        "scaled grouped matmul: a matrix has the scales of the first",
        "scaled_matmul/gluon_kernels:_load_scales",
        "$matrix * $BLOCKS_N + $column // 128",
        "$column // 128",
        f"{HOPPER} -k groups",
    ),
    Fault(
        "scaled grouped matmul: rows of a matrix have the scales of the first",
        "scaled_matmul/gluon_kernels:_of_rows",
        "$matrix * $N + $columns if $B_ROWS else gl.zeros_like($columns)",
        "$columns if $B_ROWS else gl.zeros_like($columns)",
        f"{HOPPER} -k groups",
    ),
    Fault(
        "scaled grouped matmul: a group's last tile overwrites the next group",
        "scaled_matmul/gluon_kernels:_store",
        "write($hands, $handed, $out, $row + $WHICH * $ROWS, $end, $$rest)",
        "write($hands, $handed, $out, $row + $WHICH * $ROWS, $end + 3, $$rest)",
        f"{HOPPER} -k groups",
    ),
    Fault(
        "scaled grouped matmul: rows are zeroed before the end of the last group",
        "scaled_matmul/gluon_kernels:_store",
        "gl.load($tiles + 3 * $BOUND + 1)",
        "gl.load($tiles + 3 * $BOUND)",
        f"{HOPPER} -k groups",
    ),
    Fault(
        "scaled grouped matmul: every tile of a group is its first",
        "grouped:tiles_of",
        "$begins[$matrix] + ($index - ($after - $tiles)[$matrix]) * $block_m",
        "$begins[$matrix]",
        f"{HOPPER} -k groups",
    ),
    Fault(
        "quantised both ways: a whole row's scale is of its last tile",
        "scaled_matmul/triton_gpu:_largest_both_ways",
        "jnp.max($of_rows, 0)",
        "$of_rows[-1]",
        f"{SCALED} -k bit_by_bit",
    ),
    Fault(
        "quantised both ways: all matrices have the columns' scales of the first",
        "quantize_kernels:quantize_rows_both_ways_kernel",
        "tl.load($of_columns + $matrix * $D + $columns)",
        "tl.load($of_columns + $columns)",
        f"{SCALED} -k bit_by_bit",
    ),
    Fault(
        "quantised both ways: several matrices are turned as one",
        "quantize_kernels:_write_tile",
        "($matrix * $D + $columns).to(tl.int64)[:, None] * $M",
        "$columns.to(tl.int64)[:, None] * $M",
        f"{SCALED} -k bit_by_bit",
    ),
)
