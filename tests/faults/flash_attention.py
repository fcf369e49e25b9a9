"""Faults of flash_attention."""

from faults import Fault

MASKS = "kernels/engines/attention/masks.py"
RANGES = "kernels/engines/attention/ranges.py"
FLASH = "tests/test_masks.py tests/kernels/test_flash_attention.py"
XLA = "kernels/ops/flash_attention/xla.py"
TILES = "kernels/engines/attention/tiles.py"
KERNELS = "kernels/engines/attention/triton_kernels.py"
GRADIENTS = "kernels/engines/attention/triton_gradients.py"
PARTS = "kernels/engines/attention/triton_parts.py"
CUDNN = "kernels/ops/flash_attention/cudnn_gpu.py"
TRITON = "kernels/ops/flash_attention/triton_gpu.py"
HOPPER = "tests/kernels/test_flash_attention_hopper.py"


def _triton(case):
    return f"tests/test_ops.py -m 'slow or not slow' -k flash_attention-{case}-float32-triton"


PALLAS = "kernels/ops/flash_attention/pallas_tpu.py"
VISITS = "kernels/engines/attention/pallas_visits.py"
PALLAS_BLOCKS = "tests/kernels/test_flash_attention_pallas.py"


def on_pallas(case: str) -> str:
    """Returns the test of a case on the Pallas kernels."""
    return f"tests/test_ops.py -k 'flash_attention-{case}-float32-pallas_tpu'"


FAULTS = (
    Fault(
        "deterministic: specialised warps take it",
        TRITON,
        "if deterministic and cfg.bwd_params.num_warps == SPECIALISED:",
        "if False:",
        "tests/kernels/test_flash_attention_deterministic.py -k specialised",
    ),
    Fault(
        "deterministic: a configuration that adds in any order is chosen",
        TRITON,
        "plain.bwd_params) if call.deterministic else found",
        "plain.bwd_params) if False else found",
        "tests/kernels/test_flash_attention_deterministic.py -k 'no_configuration or passed_over'",
    ),
    Fault(
        "deterministic: dropped by the public function",
        "kernels/ops/flash_attention/functions.py",
        "    if deterministic:",
        "    if False:",
        "tests/kernels/test_flash_attention_deterministic.py -k cudnn",
    ),
    Fault(
        "deterministic: cuDNN takes it",
        "kernels/ops/flash_attention/cudnn_gpu.py",
        "def forward(query, key, value, mask, softmax_scale):",
        "def forward(query, key, value, mask, softmax_scale, deterministic):",
        "tests/kernels/test_flash_attention_deterministic.py -k cudnn",
    ),
    Fault(
        "cuDNN takes the true output where lse has a cotangent too",
        "kernels/ops/flash_attention/contract.py",
        'return saved if "d_lse" in cotangents else saved | ',
        "return saved | ",
        "tests/test_cotangents.py -k cudnn",
    ),
    Fault(
        "a cotangent of lse is dropped",
        "kernels/engines/attention/softmax.py",
        'delta - cotangents.get("d_lse", 0)',
        "delta",
        "tests/test_cotangents.py -k cudnn",
    ),
    Fault(
        "Hopper: one direction has another tanh than the other",
        TRITON,
        "!= {SPECIALISED}",
        "== {SPECIALISED}",
        f"{HOPPER} -k tanh",
    ),
    Fault(
        "Hopper: more tiles of queries than shared memory has room for",
        TRITON,
        "_bytes_of(2, params, wide, tall) <=",
        "_bytes_of(1, params, wide, tall) <=",
        f"{HOPPER} -k programs",
    ),
    Fault("mask off by one", RANGES, "Interval(high=Edge(0))", "Interval(high=Edge(-1))", FLASH),
    Fault("window one key wider", RANGES, "Interval(Edge(-left), high)", "Interval(Edge(-left - 1), high)", FLASH),
    Fault("integer window is W + 1", MASKS, "(int(sliding_window) - 1, 0)", "(int(sliding_window), 0)", FLASH),
    Fault("padding attends", RANGES, "seen &= (a == b) & (a >= 0)", "seen &= a == b", FLASH),
    Fault("a tile too many skipped", TILES, "some & (first <= greatest)", "some & (first < greatest)", FLASH),
    Fault("combining drops a window", MASKS, "window=_both(self.window, other.window)", "window=self.window", FLASH),
    Fault("output not rescaled", XLA, "out * rescale[..., None] + pv", "out + pv", FLASH),
    Fault("denominator not rescaled", XLA, "total = total * rescale + ", "total = total + ", FLASH),
    Fault("sink counted twice", XLA, "        l0 = 1.0", "        l0 = 2.0", FLASH),
    Fault("delta with the wrong sign", XLA, "- delta)", "+ delta)", FLASH),
    Fault(
        "slope of the soft cap dropped",
        XLA,
        "raw = ds if s.cap_slope is None else ds * s.cap_slope",
        "raw = ds",
        "tests/test_ops.py -k soft_cap",
    ),
    Fault(
        "dropout missing in the backward",
        XLA,
        "(dp if keep is None else dp * keep)",
        "dp",
        "tests/test_ops.py -k dropout",
    ),
    Fault(
        "tiles: the last one that attends left out",
        TILES,
        "last = xp.where(some, at + 1, 0).max(-1)",
        "last = xp.where(some, at, 0).max(-1)",
        "tests/kernels/test_blocks.py",
    ),
    Fault(
        "tiles: those at the edge of a window are full",
        TILES,
        "every & (first >= greatest)",
        "every & (first >= least)",
        "tests/kernels/test_blocks.py",
    ),
    Fault(
        "tiles: padding in a full one",
        TILES,
        "every = some & q.whole[:, :, None] & k.whole[:, None]",
        "every = some & q.whole[:, :, None]",
        "tests/kernels/test_blocks.py",
    ),
    Fault("Triton: output not rescaled", KERNELS, "acc * rescale[:, None], input", "acc, input", _triton("long")),
    Fault("Triton: sink in units of e", KERNELS, "sink_ptr + n) * LOG2E", "sink_ptr + n)", _triton("several_sinks")),
    Fault(
        "Triton: a window one key narrower",
        PARTS,
        "seen & (k_at >= _end(O.LOW,",
        "seen & (k_at > _end(O.LOW,",
        _triton("window"),
    ),
    Fault("Triton: keys past the last", PARTS, "seen = kj < O.S", "seen = kj >= 0", _triton("full")),
    Fault(
        "Triton: padding attends",
        PARTS,
        "(q_segment == k_segment) & (q_segment >= 0)",
        "(q_segment == k_segment)",
        _triton("padding"),
    ),
    Fault("Triton: one head of a group", GRADIENTS, "for g in range(G):", "for g in range(1):", _triton("causal")),
    Fault(
        "Triton: slope of the soft cap dropped for keys",
        GRADIENTS,
        "raw = p * (dp - delta[None, :]) * bend * O.SCALE",
        "raw = p * (dp - delta[None, :]) * O.SCALE",
        _triton("soft_cap"),
    ),
    Fault(
        "Triton: dropout missing in the gradient of the values",
        GRADIENTS,
        "dropped = p * keep\n",
        "dropped = p\n",
        _triton("dropout"),
    ),
    Fault(
        "Triton: a prefix does not soften the causal mask",
        PARTS,
        "end = tl.load(ends + END[1] * O.T)",
        "end = q_at",
        _triton("prefix"),
    ),
    Fault(
        "Triton: the gradient of a broadcast bias of one row of the batch",
        GRADIENTS,
        "b_begin, b_end = 0, O.B",
        "b_begin, b_end = 0, 1",
        _triton("bias_per_head"),
    ),
    Fault(
        "Triton: a row without keys divides",
        PARTS,
        'tl.where(some, lse * LOG2E, float("inf"))',
        "lse * LOG2E",
        _triton("dense_mask"),
    ),
    Fault(
        "Hopper: the kernel of narrow heads for wide ones",
        TRITON,
        "    if wide <= 128:\n        kernel",
        "    if wide <= 256:\n        kernel",
        f"{HOPPER} -k launched",
    ),
    Fault(
        "Hopper: blocks of as many keys for wide heads",
        TRITON,
        "keys = 128 if wide <= 128 else 64",
        "keys = 128",
        f"{HOPPER} -k 'launched or other_backward'",
    ),
    Fault(
        "Hopper: wide heads side by side, whose sums are more than the cache",
        TRITON,
        "specialised_wide_gradient_kernel.fn.__name__: 1,",
        "specialised_wide_gradient_kernel.fn.__name__: 8,",
        f"{HOPPER} -k launched",
    ),
    Fault(
        "Hopper: three warpgroups with the registers of two",
        TRITON,
        "ATTENDING=160 if blocks[0] == THREE_WARPGROUPS else 240,",
        "ATTENDING=240,",
        f"{HOPPER} -k programs",
    ),
    Fault(
        "Hopper: three warpgroups of wider heads, which spill",
        TRITON,
        "        elif _width(H) <= 64:\n            queries",
        "        elif _width(H) <= 128:\n            queries",
        f"{HOPPER} -k configuration",
    ),
    Fault(
        "Hopper: three warpgroups of short rows",
        TRITON,
        'return min(call.dims["T"], call.dims["S"]) >= LONG and bare',
        'return min(call.dims["T"], call.dims["S"]) >= 0 and bare',
        f"{HOPPER} -k has_three",
    ),
    Fault(
        "Hopper: three warpgroups under a soft cap, which spill",
        TRITON,
        " and call.logits_soft_cap is None\n",
        "\n",
        f"{HOPPER} -k has_three",
    ),
    Fault(
        "Hopper: tiles of 64 columns whose output does not fit in two",
        TRITON,
        "return 64 if 128 < H <= 192 and _width(HV) <= 128 else _width(H)",
        "return 64 if 128 < H <= 192 else _width(H)",
        f"{HOPPER} -k tiles_of_the_forward",
    ),
    Fault(
        "Hopper: heads of 192 in tiles of 256 columns",
        TRITON,
        "return 64 if 128 < H <= 192 and _width(HV) <= 128 else _width(H)",
        "return _width(H)",
        f"{HOPPER} -k tiles_of_the_forward",
    ),
    Fault(
        "Hopper: one tile of columns of three is multiplied",
        "kernels/engines/attention/gluon_kernels.py",
        "        s = warpgroup_mma(q[i], k, s, use_acc=i > 0, is_async=True)\n",
        "        if i == 0:\n            s = warpgroup_mma(q[i], k, s, use_acc=i > 0, is_async=True)\n",
        f"{HOPPER} -k products_of_padded",
    ),
    Fault(
        "Hopper: the backward multiplies all columns of padded heads",
        "kernels/engines/attention/gluon_wide.py",
        "return 128 if O.H <= 192 else 256",
        "return 256",
        f"{HOPPER} -k products_of_padded",
    ),
    Fault(
        "Hopper: no turns in windows",
        "kernels/engines/attention/gluon_kernels.py",
        "return _attending(O) > 2 or (_attending(O) == 2 and O.LOW is not None and O.BLOCK_H == 128)",
        "return _attending(O) > 2",
        f"{HOPPER} -k turns_in_windows",
    ),
    Fault(
        "Hopper: a configuration of its kernels where plain ones have the same blocks",
        TRITON,
        "if asks or not blocks or made.num_warps != SPECIALISED:",
        "if asks or not blocks:",
        f"{HOPPER} -k configuration",
    ),
    Fault(
        "Hopper: the backward goes over the spans of queries",
        TRITON,
        "call.spans(*blocks)[1],\n        blocks,\n        K,",
        "call.spans(*blocks)[0],\n        blocks,\n        K,",
        f"{HOPPER} -k launched",
    ),
    Fault(
        "Hopper: values wider than keys are taken",
        TRITON,
        "not 64 <= tall <= wide",
        "not 64 <= tall",
        f"{HOPPER} -k chosen",
    ),
    Fault(
        "Hopper: wide heads have the backward of two passes",
        TRITON,
        "return _config((128, forward, SPECIALISED, 2), (backward[0], keys, SPECIALISED, backward[1]))",
        "return FlashAttentionConfig(FwdParams(128, keys, SPECIALISED, 2), plain.bwd_params)",
        f"{HOPPER} -k chosen",
    ),
    Fault(
        "Hopper: the last columns of a padded head are not added to the gradient of the queries",
        "kernels/engines/attention/gluon_wide.py",
        "PARTS: gl.constexpr = (O.H + COLUMNS - 1) // COLUMNS",
        "PARTS: gl.constexpr = O.H // COLUMNS",
        f"{HOPPER} -m 'slow or not slow' -k 'the_code and 136'",
    ),
    Fault(
        "cuDNN: a window of a key more",
        CUDNN,
        "0 if left is None else left + 1",
        "0 if left is None else left + 2",
        "tests/test_ops.py -m 'slow or not slow' -k flash_attention-window-bfloat16-cudnn",
    ),
    Fault(
        "cuDNN: the gradient of lse dropped",
        CUDNN,
        "out = unit * (delta[..., None]",
        "out = unit * (0 * delta[..., None]",
        "tests/test_ops.py -k flash_attention-causal-bfloat16-cudnn",
    ),
    Fault(
        "cuDNN: a row whose cotangent is zero loses that of its lse",
        CUDNN,
        "jnp.where((largest < SMALLEST) & (delta[..., None] != 0), SMALLEST * first, wide)",
        "wide",
        "tests/kernels/test_flash_attention_cudnn.py",
    ),
    Fault(
        "Pallas: a block too many skipped",
        VISITS,
        "there & (other < of(last))",
        "there & (other < of(last) - 1)",
        on_pallas("long"),
    ),
    Fault(
        "Pallas: a pair left out at the end",
        VISITS,
        "there = step < total",
        "there = step < total - 1",
        f"{PALLAS_BLOCKS} -k visits",
    ),
    Fault(
        "Pallas: pairs that are masked in part taken as full",
        VISITS,
        "full = active & (other >= of(span[..., FULL_FIRST])) & (other < of(span[..., FULL_LAST]))",
        "full = active",
        f"{PALLAS_BLOCKS} -k documents",
    ),
    Fault(
        "Pallas: output not rescaled",
        PALLAS,
        "turned[...] * rescale + _dot",
        "turned[...] + _dot",
        f"{PALLAS_BLOCKS} -k documents",
    ),
    Fault(
        "Pallas: denominator not rescaled",
        PALLAS,
        "total[...] * rescale + ",
        "total[...] + ",
        f"{PALLAS_BLOCKS} -k documents",
    ),
    Fault(
        "Pallas: sinks counted twice",
        PALLAS,
        "1.0 if plan.sinks else 0.0",
        "2.0 if plan.sinks else 0.0",
        f"{PALLAS_BLOCKS} -k window",
    ),
    Fault(
        "Pallas: gradients of keys are those of the last head of a group",
        PALLAS,
        "@pl.when(at.has(BEGINS) & (group == 0))",
        "@pl.when(at.has(BEGINS))",
        on_pallas("long"),
    ),
    Fault(
        "Pallas: a query head reads the keys of another group",
        PALLAS,
        "(b, lax.div(n, G), 0, j)",
        "(b, lax.rem(n, G), 0, j)",
        on_pallas("long"),
    ),
    Fault(
        "Pallas: delta, and with it the cotangent of lse, dropped",
        PALLAS,
        'dp - refs["delta"][...]',
        "dp",
        on_pallas("long"),
    ),
    Fault("Pallas: tail of keys unmasked", PALLAS, " or self.S % self.block_k > 0", "", on_pallas("bias_per_head")),
    Fault(
        "Pallas: window one key narrower",
        PALLAS,
        "seen.append(j >= ends_at(low, i))",
        "seen.append(j > ends_at(low, i))",
        f"{PALLAS_BLOCKS} -k window",
    ),
    Fault(
        "Pallas: prefix hidden",
        PALLAS,
        "jnp.minimum(ends_at(high, i), limit)",
        "jnp.minimum(i, limit)",
        on_pallas("prefix"),
    ),
    Fault(
        "Pallas: rows without a key get gradients",
        PALLAS,
        "jnp.where(some, saved.lse, jnp.inf)",
        "saved.lse",
        f"{PALLAS_BLOCKS} -k documents",
    ),
    Fault(
        "Pallas: a shared bias takes the pairs of some rows",
        VISITS,
        "span[..., FIRST], 2**30).min(0)",
        "span[..., FIRST], 2**30).max(0)",
        f"{PALLAS_BLOCKS} -k shared",
    ),
    Fault(
        "Pallas: all rows drop the same weights",
        PALLAS,
        'refs["seeds"][head]',
        'refs["seeds"][at.n]',
        on_pallas("together"),
    ),
    Fault(
        "Pallas: dropout missing in the backward",
        PALLAS,
        "dp if keep is None else dp * keep",
        "dp",
        on_pallas("together"),
    ),
    Fault(
        "Pallas: slope of the soft cap dropped",
        PALLAS,
        "ds if bend is None else ds * bend",
        "ds",
        on_pallas("together"),
    ),
    Fault(
        "Pallas: heads of 64 are padded to 128",
        PALLAS,
        "return 1 if H % LANES == 0 else 0",
        "return 1",
        f"{PALLAS_BLOCKS} -k room_of_64",
    ),
    Fault(
        "Pallas: wide heads of keys read as those of queries",
        PALLAS,
        "(b, lax.div(n, G), j, 0)",
        "(b, n, j, 0)",
        f"{PALLAS_BLOCKS} -k 'several_blocks and window'",
    ),
    Fault(
        "Pallas: large blocks for windows too",
        PALLAS,
        'wide = not set(mask.used) - {"causal"}',
        'wide = not set(mask.used) - {"causal", "window"}',
        f"{PALLAS_BLOCKS} -k blocks_are_large",
    ),
    Fault(
        "Pallas: products of float32 in bfloat16",
        PALLAS,
        "lax.Precision.HIGHEST if a.dtype",
        "None if a.dtype",
        f"{PALLAS_BLOCKS} -k float32",
    ),
)
