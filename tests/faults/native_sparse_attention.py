"""Faults of native_sparse_attention."""

from faults import Fault

OF_SELECTED = "tests/kernels/test_native_sparse_attention.py"
OF_KERNELS = "tests/kernels/test_native_sparse_attention_triton.py"
OF_GRID = "tests/test_ops.py -k native_sparse_attention-best_blocks-float32-triton"

FAULTS = (
    Fault(
        "the mean of a block before its end",
        "native_sparse_attention/xla:_sees_means",
        "$keys.ends[:, None] <= $at[:, None]",
        "$keys.ends[:, None] <= $at[:, None] + 1",
        OF_SELECTED + " -k against_a_loop",
    ),
    Fault(
        "the means of another document",
        "native_sparse_attention/xla:_sees_means",
        "$keys.of_slot[:, None] == $start[..., None]",
        "$keys.of_slot[:, None] >= 0",
        OF_SELECTED + " -k packed",
    ),
    Fault(
        "the query's own block is not always selected",
        "contract:ranked",
        "jnp.where($block == $own, $$after)",
        "jnp.where($block == $own + 1, $$after)",
        OF_SELECTED + " -k against_a_loop",
    ),
    Fault(
        "a block that is named twice counts twice",
        "_blocks_of",
        "$found[..., 1:] == $found[..., :-1]",
        "$found[..., 1:] < $found[..., :-1]",
        OF_SELECTED + " -k documented",
    ),
    Fault(
        "the sliding branch sees a token more",
        "native_sparse_attention/xla:_read",
        "$j > $at[:, None] - $static.window",
        "$j >= $at[:, None] - $static.window",
        OF_SELECTED + " -k against_a_loop",
    ),
    Fault(
        "the gradient of a mean is not shared out",
        "native_sparse_attention/xla:backward",
        "spread($of_means, $$rest, $block_size)",
        "spread($of_means, $$rest, $block_size) * $block_size",
        OF_SELECTED + " -k against_a_loop",
    ),
    Fault(
        "a rank's queries are the first's",
        "native_sparse:_over_all",
        "jax.lax.axis_index($ranks_of) * $own",
        "jax.lax.axis_index($ranks_of) * 0",
        OF_SELECTED + " -k on_a_mesh",
    ),
    Fault(
        "the first block is chosen twice",
        "triton_choice:choice_kernel",
        "$block >= 1",
        "$block >= 0",
        OF_KERNELS + " -k equal_weights",
    ),
    Fault(
        "weights of heads are averaged before they are divided by their sums",
        "triton_choice:choice_kernel",
        "1.0 / ($G * tl.where($row_sum > 0, $row_sum, 1.0))",
        "1.0 / $G",
        OF_KERNELS + " -k equal_weights",
    ),
    Fault(
        "of equal weights the last block is chosen",
        "triton_choice:choice_kernel",
        "$bits - $slots[None, :].to(tl.int64)",
        "$bits + $slots[None, :].to(tl.int64)",
        OF_KERNELS + " -k equal_weights",
    ),
    Fault(
        "a block that is named twice is read twice by its keys",
        "triton_lists:block_list_kernel",
        "$repeated = $repeated | $twice",
        "",
        OF_KERNELS + " -k many_parts",
    ),
    Fault(
        "all queries of a tile read a block of its first",
        "triton_lists:block_list_kernel",
        "$named << $q",
        "$named << 0",
        OF_KERNELS + " -k many_parts",
    ),
    Fault(
        "a block that begins in another tile of keys is not in the list of its second",
        "triton_lists:overlapped",
        "-(-($sizes.SIZE - 1) // $sizes.BLOCK_K) + 1",
        "-(-($sizes.SIZE - 1) // $sizes.BLOCK_K)",
        OF_KERNELS + " -k many_parts",
    ),
    Fault(
        "a query of the selected branch sees the token after it",
        "triton_selected:_entry",
        "$keys[None, :] <= $position[:, None]",
        "$keys[None, :] <= $position[:, None] + 1",
        OF_GRID,
    ),
    Fault(
        "a part of a list goes on to its end",
        "triton_selected:selected_dkdv_kernel",
        "tl.minimum($begin + $PART, $$end)",
        "tl.minimum($begin + 1000 * $PART, $$end)",
        OF_KERNELS + " -k many_parts",
    ),
    Fault(
        "the gradient of keys forgets causality",
        "triton_selected:selected_dkdv_kernel",
        "$keys[:, None] <= ($q_start + $t)[None, :]",
        "$keys[:, None] <= ($q_start + $t)[None, :] + 1000",
        OF_GRID,
    ),
    Fault(
        "the gate is left out of the gradient of the logits",
        "native_sparse_attention/triton_gpu:_Run.gradients",
        "$d, $delta = $$product, $delta * $gate.astype(jnp.float32)",
        "$d, $delta = $$product, $delta",
        OF_GRID,
    ),
)
