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
        FORWARD,
        "    mbarrier.wait(free.index(stage), phase ^ 1)\n    mbarrier.expect(full",
        "    mbarrier.expect(full",
        NUMBERS,
    ),
    Fault(
        "Hopper, attention: values are multiplied before they are there",
        FORWARD,
        "            mbarrier.wait(v_full.index(stage), phase)\n            acc",
        "            acc",
        NUMBERS,
    ),
    Fault(
        "Hopper, attention: queries are loaded over an output that TMA does not know of",
        FORWARD,
        "        fence_async_shared()\n        mbarrier.arrive(q_free.index(at))",
        "        mbarrier.arrive(q_free.index(at))",
        NUMBERS,
    ),
    Fault(
        "Hopper, attention: sums are not rescaled",
        FORWARD,
        "            acc = acc * gl.convert_layout(rescale, ROW_OF_SUMS)[:, None]\n",
        "",
        NUMBERS,
    ),
    Fault(
        "Hopper, attention: a block that is seen in part counts as whole",
        FORWARD,
        "            masked = (j >= full_end) | (j < full)\n",
        "            masked = (j > full_end) | (j < full)\n",
        NUMBERS,
    ),
    Fault(
        "Hopper, attention: a warpgroup gives the next turn to itself",
        FORWARD,
        "(WHICH + 1) % WARPGROUPS",
        "WHICH",
        NUMBERS,
    ),
    Fault(
        "Hopper, attention: a sink of the wrong scale",
        FORWARD,
        "sink = gl.load(sink_ptr + n) * (LOG2E / UNIT)",
        "sink = gl.load(sink_ptr + n) * LOG2E",
        NUMBERS,
    ),
    Fault(
        "Hopper, attention: a NaN among the logits leaves lse at -inf",
        FORWARD,
        "some = total != 0",
        "some = total > 0",
        f"{NUMBERS} -k nan",
    ),
    Fault(
        "Hopper, attention: the gradient of queries is overwritten while TMA adds it",
        BACKWARD,
        "            tma.store_wait(0)\n            dq_tile",
        "            dq_tile",
        NUMBERS,
    ),
    Fault(
        "Hopper, attention: one head of a group makes the gradients",
        BACKWARD,
        "n = gl.where(ended, n + 1, n)",
        "n = n",
        NUMBERS,
    ),
    Fault(
        "Hopper, attention: the slope of the soft cap is left out",
        BACKWARD,
        "        p *= 1.0 - capped * capped\n",
        "        p *= 1.0\n",
        NUMBERS,
    ),
    Fault(
        "Hopper, attention: gradients of logits are multiplied before they are written",
        BACKWARD,
        "            fence_async_shared()\n            dq = warpgroup",
        "            dq = warpgroup",
        NUMBERS,
    ),
    Fault(
        "Hopper, attention: weights pass on before they are made",
        WIDE,
        "            mbarrier.wait(weighed.index(stage), phase)\n",
        "",
        NUMBERS,
    ),
    Fault(
        "Hopper, attention: cotangents are overwritten while they are multiplied",
        WIDE,
        "            mbarrier.wait(differentiated.index(stage), phase)\n            _load(d_out",
        "            _load(d_out",
        NUMBERS,
    ),
    Fault(
        "Hopper, attention: the keys' gradient leaves through a tile that is read",
        WIDE,
        "    mbarrier.wait(done.index(0), 0)\n",
        "",
        NUMBERS,
    ),
    Fault(
        "Hopper, products: a stage is loaded that is still read",
        PRODUCTS,
        "            mbarrier.wait(free.index(stage), phase ^ 1)\n            arrived",
        "            arrived",
        GROUPED,
    ),
    Fault(
        "Hopper, products: rows that were made zero are multiplied before they are",
        PRODUCTS,
        "                fence_async_shared()\n            acc = warpgroup_mma",
        "            acc = warpgroup_mma",
        GROUPED,
    ),
    Fault(
        "Hopper, products: a row of the next group is in the last step",
        PRODUCTS,
        "< count\n    for at",
        "<= count\n    for at",
        GROUPED,
    ),
    Fault(
        "Hopper, products: the gate's block of a matrix for its up projection",
        PRODUCTS,
        "(SIDES * expert + i) * N + column",
        "(SIDES * expert) * N + column",
        GROUPED,
    ),
    Fault(
        "Hopper, products: sums are handed over into a buffer that is not written yet",
        PRODUCT_PARTS,
        "    mbarrier.wait(drained.index(at), (handed // BUFFERS & 1) ^ 1)\n",
        "",
        GROUPED,
    ),
    Fault(
        "Hopper, products: sums are written before they are there",
        PRODUCT_PARTS,
        "        mbarrier.wait(filled.index(at), handed // BUFFERS & 1)\n",
        "",
        GROUPED,
    ),
    Fault(
        "Hopper, products: a stage is given back while it is multiplied",
        PRODUCT_PARTS,
        "        acc = warpgroup_mma_wait(1, (acc,))\n        mbarrier.arrive(free.index(_before(stage, STAGES)), pred=k > 0)",
        "        mbarrier.arrive(free.index(stage))\n        acc = warpgroup_mma_wait(1, (acc,))",
        GROUPED,
    ),
    Fault(
        "interpreting Gluon: copies are there when they are begun",
        "kernels/toolchains/simulate/gluon_interpreter.py",
        "    here.program.copies.append(done)\n",
        "    done()\n",
        INTERPRETER,
    ),
    Fault(
        "interpreting Gluon: a fence is not asked for",
        "kernels/toolchains/simulate/simulated_hopper.py",
        "        if self._unfenced[self._at].any():",
        "        if False:",
        INTERPRETER,
    ),
    Fault(
        "interpreting Gluon: products are made when they are begun",
        "kernels/toolchains/simulate/gluon_interpreter.py",
        "    if not is_async:\n",
        "    if True:\n",
        INTERPRETER,
    ),
    Fault(
        "interpreting Gluon: panels of columns lie one row behind the other",
        "kernels/toolchains/simulate/simulated_hopper.py",
        "return panels.swapaxes(1, 2).reshape(shape)",
        "return panels.reshape(shape)",
        GROUPED,
    ),
)
