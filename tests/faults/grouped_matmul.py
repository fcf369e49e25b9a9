"""Faults of grouped_matmul."""

from faults import Fault

GROUPED = "tests/kernels/test_grouped_matmul.py"
KERNELS = "tests/kernels/test_grouped_matmul_kernels.py"

FAULTS = (
    Fault(
        "Hopper: the last part of a depth is left out",
        "_multiply_products",
        "($K + $BLOCK_K - 1) // $BLOCK_K",
        "$K // $BLOCK_K",
        "tests/kernels/test_grouped_matmul_hopper.py -k depth",
    ),
    Fault(
        "grouped matmul: rows of the next group in the gradient of a matrix",
        "_backward.group.tile",
        "(_rows($padded, $first, $size, $end), _rows($d_padded, $first, $size, $end))",
        "(_rows($padded, $first, $size), _rows($d_padded, $first, $size))",
        GROUPED,
    ),
    Fault(
        "grouped matmul: rows past the last group are not zero",
        "xla:_forward",
        "_inside($groups, $out, $rows)",
        "$out[:$rows]",
        GROUPED,
    ),
    Fault(
        "grouped matmul: the last rows of a group left out",
        "xla:_each_tile",
        "$size - 1 if $size == TILES[-1] else 0",
        "0",
        GROUPED,
    ),
    Fault(
        "grouped matmul: rows of a device take the sizes of all",
        "_own_sizes",
        "jnp.pad(jnp.cumsum($group_sizes), (1, 0)) - $first",
        "jnp.pad(jnp.cumsum($group_sizes), (1, 0)) - 0 * $first",
        f"{GROUPED} -k mesh",
    ),
    Fault(
        "grouped matmul: every device adds the bias",
        "_on_shard",
        "jnp.where(jax.lax.axis_index($features) == 0, $bias, 0)",
        "$bias",
        f"{GROUPED} -k mesh",
    ),
    Fault(
        "grouped matmul in Triton: rows of the next group in the gradient of a matrix",
        "triton_kernels:ragged_contraction_kernel",
        "($rows.to(tl.int64), $rows < $end)",
        "($rows.to(tl.int64), $rows < $end + 1)",
        f"{KERNELS} -k 'several and triton'",
    ),
    Fault(
        "grouped matmul in Triton: the end of a group's last tile is the next group's",
        "triton_kernels:_finish",
        "($rows < $end)[:, None]",
        "($rows < $end + 1)[:, None]",
        f"{KERNELS} -k 'several and triton'",
    ),
    Fault(
        "grouped matmul in Triton: the last rows of a group are not in the gradient of its matrix",
        "triton_kernels:ragged_contraction_kernel",
        "tl.range($rest, $end, $BLOCK_K, num_stages=$STAGES)",
        "tl.range($rest, $end - 1, $BLOCK_K, num_stages=$STAGES)",
        f"{KERNELS} -k 'several and triton'",
    ),
    Fault(
        "grouped matmul in Triton: scales of columns where the gradient of the rows needs those of rows",
        "triton_gpu:_backward",
        "scales('rows', $$after)",
        "scales('columns', $$after)",
        f"{KERNELS} -k 'eight and triton or every_code'",
    ),
    Fault(
        "grouped matmul in Triton: a float8 has the exponent of a float16",
        "_upcast",
        "$half.to(tl.float32) * 256.0",
        "$half.to(tl.float32) * 128.0",
        f"{KERNELS} -k 'eight and triton or every_code'",
    ),
    Fault(
        "grouped matmul in Triton: of two sums, one is made zero among the products",
        "triton_gpu:_tile",
        "$ragged_rows and $halves == 1",
        "$ragged_rows",
        f"{KERNELS} -k plain_products",
    ),
    Fault(
        "grouped matmul in Gluon: inputs that are not given are counted before the counter of the queue",
        "triton_gpu:_launch",
        "sum(($x is not None for $x in $inputs))",
        "len($inputs)",
        f"{KERNELS} -k specialised_warps_are_compiled",
    ),
    Fault(
        "grouped matmul in Gluon: a stage holds a gate's block and no up projection's",
        "warp_specialized_matmul_kernel",
        "2 * $BLOCK_N if $GATED else $BLOCK_N",
        "$BLOCK_N",
        f"{KERNELS} -k specialised_warps_are_compiled",
    ),
    Fault(
        "grouped matmul in Gluon: the backward of a gate is left to the plain kernel",
        "grouped_matmul/triton_gpu:_product",
        "$scale is None and _specialises($tile, $a, $b, ($K, $N)) and ($K % "
        "WARP_SPECIALIZED[$tile.specialised].block_k == 0)",
        "$scale is None and d_out is None and _specialises($tile, $a, $b, ($K, $N)) and ($K % "
        "WARP_SPECIALIZED[$tile.specialised].block_k == 0)",
        f"{KERNELS} -k which_products",
    ),
    Fault(
        "grouped matmul in Gluon: steps that a contracted dim has no entries for",
        "grouped_matmul/triton_gpu:_product",
        "WARP_SPECIALIZED[$tile.specialised].block_k",
        "8",
        f"{KERNELS} -k which_products",
    ),
    Fault(
        "grouped matmul in Gluon: instructions of Hopper on what is not one",
        "_specialises",
        "compute_capability() == 90",
        "compute_capability() >= 90",
        f"{KERNELS} -k which_products",
    ),
    Fault(
        "grouped matmul in Pallas: scales of the columns left out",
        "grouped_matmul_kernel._",
        "$x * $scale[0].astype(jnp.float32)",
        "$x",
        f"{KERNELS} -k 'eight and pallas'",
    ),
    Fault(
        "grouped matmul in Triton: the right half of a tile in two parts is written over the left",
        "triton_kernels:grouped_matmul_kernel",
        "_finish($$before, $n + $PART, $$after)",
        "_finish($$before, $n, $$after)",
        f"{KERNELS} -k 'several and triton'",
    ),
    Fault(
        "grouped matmul in Triton: rows of no group are not written",
        "triton_kernels:grouped_matmul_kernel",
        "$bounds_ptr + 2 * $E + 1",
        "$bounds_ptr + 2 * $E",
        f"{KERNELS} -k 'several and triton'",
    ),
    Fault(
        "grouped matmul in Triton: sizes are not counted from the offset",
        "tile_map_kernel",
        "tl.load($sizes_ptr + $first + $e, **$$args)",
        "tl.load($sizes_ptr + $e, **$$args)",
        f"{KERNELS} -k map",
    ),
    Fault(
        "grouped matmul in Pallas: a block of rows is not kept for its next group",
        "grouped_matmul_kernel._",
        "($v == 0) | ($block[$v] != $block[jnp.maximum($v, 1) - 1])",
        "$v >= 0",
        f"{KERNELS} -k 'several and pallas'",
    ),
    Fault(
        "grouped matmul in Pallas: rows of other groups in the gradient of a matrix",
        "ragged_contraction_kernel._",
        "_masked($$before, $begin[$v], $$after)",
        "_masked($$before, 0, $$after)",
        f"{KERNELS} -k 'several and pallas'",
    ),
    Fault(
        "grouped matmul: the gradient of matrices that are transposed is that of others",
        "register.run_backward",
        "('rhs_transposed', $rhs_transposed, $d, $lhs)",
        "('rhs_transposed', $rhs_transposed, $lhs, $d)",
        "tests/test_ops.py -k 'numbers and grouped_matmul-transposed'",
    ),
)
