"""Faults of the kernels for Hopper, which their interpreter shows, and of it."""

from faults import Fault

FORWARD = "kernels/engines/attention/gluon_kernels.py"
BACKWARD = "kernels/engines/attention/gluon_gradients.py"
WIDE = "kernels/engines/attention/gluon_wide.py"
PRODUCTS = "kernels/ops/grouped_matmul/gluon_kernels.py"
PRODUCT_PARTS = "kernels/ops/grouped_matmul/gluon_parts.py"
NUMBERS = "tests/kernels/test_flash_attention_hopper_numbers.py"
GROUPED = "tests/kernels/test_grouped_matmul_hopper.py"
INTERPRETER = "tests/test_gluon_interpreter.py"

FAULTS = (
    Fault(
        "Hopper, attention: the loader skips a block of keys",
        FORWARD,
        "        row = nth(list_ptr, end - 1 - i) * BLOCK_K\n",
        "        row = nth(list_ptr, end - 1 - i - (i == 2)) * BLOCK_K\n",
        NUMBERS,
    ),
    Fault(
        "Hopper, attention: a stage is loaded that is still read",
        "_load_tile",
        "mbarrier.wait($free.index($stage), $phase ^ 1)",
        "",
        NUMBERS,
    ),
    Fault(
        "Hopper, attention: values are multiplied before they are there",
        "_attend_tile",
        "$s = _logits($q, $k_tiles, $k_stage, $zeros)\nmbarrier.wait($v_full.index($stage), $phase)",
        "$s = _logits($q, $k_tiles, $k_stage, $zeros)",
        NUMBERS,
    ),
    Fault(
        "Hopper, attention: queries are loaded over an output that TMA does not know of",
        "gluon_kernels:_attend",
        "fence_async_shared()",
        "",
        NUMBERS,
    ),
    Fault(
        "Hopper, attention: sums are not rescaled",
        "_attend_tile",
        "$acc = $acc * gl.convert_layout($rescale, $ROW_OF_SUMS)[:, None]",
        "",
        NUMBERS,
    ),
    Fault(
        "Hopper, attention: a block that is seen in part counts as whole",
        "_attend_tile",
        "($j >= $full_end) | ($j < $full)",
        "($j > $full_end) | ($j < $full)",
        NUMBERS,
    ),
    Fault(
        "Hopper, attention: a warpgroup gives the next turn to itself",
        "_attend_tile",
        "($WHICH + 1) % $WARPGROUPS",
        "$WHICH",
        NUMBERS,
    ),
    Fault("Hopper, attention: a sink of the wrong scale", "_attend_tile", "LOG2E / $UNIT", "LOG2E", NUMBERS),
    Fault(
        "Hopper, attention: a NaN among the logits leaves lse at -inf",
        "_attend_tile",
        "$total != 0",
        "$total > 0",
        f"{NUMBERS} -k nan",
    ),
    Fault(
        "Hopper, attention: the gradient of queries is overwritten while TMA adds it",
        "gluon_gradients:_gradients",
        "tma.store_wait(0)\n$dq_tile.store($dq)",
        "$dq_tile.store($dq)",
        NUMBERS,
    ),
    Fault(
        "Hopper, attention: one head of a group makes the gradients",
        "gluon_gradients:_gradients",
        "gl.where($ended, $n + 1, $n)",
        "$n",
        NUMBERS,
    ),
    Fault(
        "Hopper, attention: the slope of the soft cap is left out",
        "gluon_gradients:_weigh",
        "1.0 - $capped * $capped",
        "1.0",
        NUMBERS,
    ),
    Fault(
        "Hopper, attention: gradients of logits are multiplied before they are written",
        "gluon_gradients:_gradients",
        "$ds_tile.store(($p * $dp).to($dtype))\nfence_async_shared()",
        "$ds_tile.store(($p * $dp).to($dtype))",
        NUMBERS,
    ),
    Fault(
        "Hopper, attention: weights pass on before they are made",
        "_differentiate",
        "mbarrier.wait(weighed.index(stage), phase)",
        "",
        NUMBERS,
    ),
    Fault(
        "Hopper, attention: cotangents are overwritten while they are multiplied",
        "gluon_wide:_weigh",
        "$dv = warpgroup_mma_wait(1, ($dv,))\nmbarrier.wait($differentiated.index($stage), $phase)",
        "$dv = warpgroup_mma_wait(1, ($dv,))",
        NUMBERS,
    ),
    Fault(
        "Hopper, attention: the keys' gradient leaves through a tile that is read",
        "_differentiate",
        "mbarrier.wait(done.index(0), 0)",
        "",
        NUMBERS,
    ),
    Fault(
        "Hopper, products: a stage is loaded that is still read",
        "_load_products",
        "for $k in range(0, $K, $BLOCK_K):\n    mbarrier.wait($free.index($stage), $phase ^ 1)\n    $$after",
        "for $k in range(0, $K, $BLOCK_K):\n    $$after",
        GROUPED,
    ),
    Fault(
        "Hopper, products: rows that were made zero are multiplied before they are",
        "_multiply_rows",
        "fence_async_shared()",
        "",
        GROUPED,
    ),
    Fault(
        "Hopper, products: a row of the next group is in the last step",
        "_keep_rows",
        "gl.arange(0, $ROWS, gl.SliceLayout(1, $layout)) < $count",
        "gl.arange(0, $ROWS, gl.SliceLayout(1, $layout)) <= $count",
        GROUPED,
    ),
    Fault(
        "Hopper, products: the gate's block of a matrix for its up projection",
        "_load_products",
        "($SIDES * $expert + $i) * $N",
        "$SIDES * $expert * $N",
        GROUPED,
    ),
    Fault(
        "Hopper, products: sums are handed over into a buffer that is not written yet",
        "_hand_part",
        "mbarrier.wait($drained.index($at), $handed // $BUFFERS & 1 ^ 1)",
        "",
        GROUPED,
    ),
    Fault(
        "Hopper, products: sums are written before they are there",
        "gluon_parts:write",
        "mbarrier.wait($filled.index($at), $handed // $BUFFERS & 1)",
        "",
        GROUPED,
    ),
    Fault(
        "Hopper, products: a stage is given back while it is multiplied",
        "multiply",
        "$acc = warpgroup_mma_wait(1, ($acc,))\nmbarrier.arrive($free.index(_before($stage, $STAGES)), pred=$k > 0)",
        "mbarrier.arrive($free.index($stage))\n$acc = warpgroup_mma_wait(1, ($acc,))",
        GROUPED,
    ),
    Fault(
        "interpreting Gluon: copies are there when they are begun",
        "_async_load",
        "here.program.copies.append(done)",
        "done()",
        INTERPRETER,
    ),
    Fault(
        "interpreting Gluon: a fence is not asked for",
        "Shared._check_fence",
        "self._unfenced[self._at].any()",
        "False",
        INTERPRETER,
    ),
    Fault(
        "interpreting Gluon: products are made when they are begun",
        "_warpgroup_mma",
        "not $is_async",
        "True",
        INTERPRETER,
    ),
    Fault(
        "interpreting Gluon: panels of columns lie one row behind the other",
        "_offsets",
        "$panels.swapaxes(1, 2)",
        "$panels",
        GROUPED,
    ),
)
