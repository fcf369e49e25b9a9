"""Faults of combine_rows, of the order of rows by group, and of rows that a product gathers."""

from faults import Fault

COMBINE = "tests/kernels/test_combine_rows.py"
HOPPER = "tests/kernels/test_grouped_matmul_hopper.py -k gathered"

FAULTS = (
    Fault(
        "combine, XLA: a slot of none adds its weight times the first row",
        "combine_rows/xla:_row",
        "jnp.where(($slot >= 0)[:, None], $rows[jnp.maximum($slot, 0)].astype(jnp.float32), 0)",
        "$rows[jnp.maximum($slot, 0)].astype(jnp.float32)",
        f"{COMBINE} -k numpys",
    ),
    Fault(
        "combine, XLA: a row of no token has the gradient of the first choice",
        "combine_rows/xla:backward",
        "jnp.where(($pairs >= 0)[:, None], $d_rows, 0)",
        "$d_rows",
        f"{COMBINE} -k numpys",
    ),
    Fault(
        "combine, Triton: rows of no token are not written",
        "combine_rows/triton_gpu:combine_rows_bwd_kernel",
        "($columns < $D) & $unused",
        "($columns < 0) & $unused",
        f"{COMBINE} -k numpys",
    ),
    Fault(
        "combine, Triton: the weight of a slot of none is read",
        "combine_rows/triton_gpu:combine_rows_fwd_kernel",
        "tl.load($weights_ptr + $token * $TOP_K + $j, mask=$slot >= 0, other=0.0)",
        "tl.load($weights_ptr + $token * $TOP_K + $j)",
        f"{COMBINE} -k numpys",
    ),
    Fault(
        "combine, Triton: the gradient of a row has no weight",
        "combine_rows/triton_gpu:combine_rows_bwd_kernel",
        "($d * $weight).to($d_rows_ptr.dtype.element_ty)",
        "$d.to($d_rows_ptr.dtype.element_ty)",
        f"{COMBINE} -k numpys",
    ),
    Fault(
        "order by group, Triton: the first entry of a group in a block is not taken away",
        "matmul/ordering_triton:group_order_kernel",
        "$first - (tl.cumsum($counts, axis=0) - $counts)",
        "$first",
        f"{COMBINE} -k order",
    ),
    Fault(
        "order by group, Triton: earlier programs are not counted",
        "matmul/ordering_triton:group_order_kernel",
        "tl.cumsum($total, axis=0) - $total + $earlier",
        "tl.cumsum($total, axis=0) - $total",
        f"{COMBINE} -k order",
    ),
    Fault(
        "order by group, Triton: what follows a block starts where it did",
        "matmul/ordering_triton:group_order_kernel",
        "$first += $counts",
        "",
        f"{COMBINE} -k order",
    ),
    Fault(
        "order by group, XLA: a choice of no group has a slot",
        "matmul/ordering:sorted_by_xla",
        "jnp.where($inside, $place, -1)",
        "$place",
        f"{COMBINE} -k order",
    ),
    Fault(
        "gathered rows, Gluon: a stage is multiplied before its rows are fenced",
        "grouped_matmul/gluon_parts:multiply",
        "if $GATHERED:\n    fence_async_shared()",
        "",
        HOPPER,
    ),
    Fault(
        "gathered rows, Gluon: a stage is full before its rows have arrived",
        "grouped_matmul/gluon_kernels:warp_specialized_matmul_kernel",
        "32 * GATHERING if $GATHERED else 0",
        "0",
        HOPPER,
    ),
    Fault(
        "gathered rows, Gluon: the second half of a tile has the rows of the first",
        "grouped_matmul/gluon_kernels:_load_products",
        "indices($rows_ptr, $row + $ROWS, $end, $tiles.index(0))",
        "indices($rows_ptr, $row, $end, $tiles.index(0))",
        HOPPER,
    ),
    Fault(
        "gathered rows, Gluon: a negative index is that of the first row",
        "grouped_matmul/gluon_parts:gather",
        "($index >= 0)[:, None] & ($columns < $WIDTH)[None, :]",
        "($index >= -1)[:, None] & ($columns < $WIDTH)[None, :]",
        HOPPER,
    ),
    Fault(
        "gathered rows: the gradient of the matrices is of rows in order",
        "grouped_matmul/groups:register.gathered_backward",
        "contraction($x, $d, $rhs.shape[0], $rhs.dtype, $cfg.d_rhs, $where, *$more)",
        "contraction($x[jnp.arange($d.shape[0]) % len($x)], $d, $rhs.shape[0], $rhs.dtype, $cfg.d_rhs, $where)",
        HOPPER,
    ),
    Fault(
        "gathered rows, Gluon: a step of the gradient of the matrices has the rows of the one before",
        "grouped_matmul/gluon_contractions:_load_contractions",
        "$index = $following",
        "",
        HOPPER,
    ),
    Fault(
        "kept products, Gluon: the up projection is kept as it is multiplied",
        "grouped_matmul/gluon_parts:hand_over_activated",
        "if $KEEP:\n    $handed = hand_part(($y,), $hands, $handed, $WHICH)\n$y *= activated($z, $ACTIVATION)",
        "$y *= activated($z, $ACTIVATION)\nif $KEEP:\n    $handed = hand_part(($y,), $hands, $handed, $WHICH)",
        "tests/kernels/test_grouped_matmul_hopper.py -k kept",
    ),
    Fault(
        "kept products: the cotangent of the up projection is that of the gate",
        "grouped_matmul/triton_kernels:products_bwd_kernel",
        "($d * activated($z, $ACTIVATION)).to($out_ptr.dtype.element_ty)",
        "($d * slope($z, $ACTIVATION)).to($out_ptr.dtype.element_ty)",
        "tests/kernels/test_grouped_matmul_kernels.py -k kept",
    ),
    Fault(
        "calls: a slot just past the last row is taken",
        "framework/requests:check_slots",
        "$values.max() >= $rows",
        "$values.max() > $rows",
        f"{COMBINE} -k wrong_is",
    ),
    Fault(
        "calls: slots of other rows than those that are gathered are taken",
        "ops/grouped_matmul:_check_inverse",
        "($wrong := $inverse != $token.astype(np.int64).clip(-1)).any()",
        "($wrong := ($inverse < 0) != ($token < 0)).any()",
        "tests/kernels/test_grouped_matmul.py -k wrong_call",
    ),
    Fault(
        "calls: rows of groups past the last row are taken",
        "framework/requests:check_groups",
        "($total := $values.sum(dtype=np.int64)) > $rows",
        "($total := $values.max()) > $rows",
        "tests/kernels/test_grouped_matmul.py -k wrong_call",
    ),
)
