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
        "flash_attention/triton_gpu:backward",
        "$deterministic and $cfg.bwd_params.num_warps == SPECIALISED",
        "False",
        "tests/kernels/test_flash_attention_deterministic.py -k specialised",
    ),
    Fault(
        "deterministic: a configuration that adds in any order is chosen",
        "triton_gpu:_heuristic",
        "$call.deterministic",
        "False",
        "tests/kernels/test_flash_attention_deterministic.py -k 'no_configuration or passed_over'",
    ),
    Fault(
        "deterministic: dropped by the public function",
        "functions:flash_attention",
        "if $deterministic:\n    $$body",
        "if False:\n    $$body",
        "tests/kernels/test_flash_attention_deterministic.py -k cudnn",
    ),
    Fault(
        "deterministic: cuDNN takes it",
        "cudnn_gpu:forward",
        "def forward(query, key, value, mask, softmax_scale):\n    $$body",
        "def forward(query, key, value, mask, softmax_scale, deterministic):\n    $$body",
        "tests/kernels/test_flash_attention_deterministic.py -k cudnn",
    ),
    Fault(
        "cuDNN takes the true output where lse has a cotangent too",
        "contract:backward_inputs",
        "$saved if 'd_lse' in $cotangents else $saved | {'out': $residuals['out']}",
        "$saved | {'out': $residuals['out']}",
        "tests/test_cotangents.py -k cudnn",
    ),
    Fault(
        "a cotangent of lse is dropped",
        "softmax:backward_inputs",
        "$delta - $cotangents.get('d_lse', 0)",
        "$delta",
        "tests/test_cotangents.py -k cudnn",
    ),
    Fault(
        "Hopper: one direction has another tanh than the other",
        "_exact",
        "{$cfg.fwd_params.num_warps, $cfg.bwd_params.num_warps} != {SPECIALISED}",
        "{$cfg.fwd_params.num_warps, $cfg.bwd_params.num_warps} == {SPECIALISED}",
        f"{HOPPER} -k tanh",
    ),
    Fault(
        "Hopper: more tiles of queries than shared memory has room for",
        "flash_attention/triton_gpu:forward",
        "bytes_of(2, $$after)",
        "bytes_of(1, $$after)",
        f"{HOPPER} -k programs",
    ),
    Fault("mask off by one", RANGES, "Interval(high=Edge(0))", "Interval(high=Edge(-1))", FLASH),
    Fault("window one key wider", RANGES, "Interval(Edge(-left), high)", "Interval(Edge(-left - 1), high)", FLASH),
    Fault("integer window is W + 1", "window_of", "int($sliding_window) - 1", "int($sliding_window)", FLASH),
    Fault("padding attends", RANGES, "seen &= (a == b) & (a >= 0)", "seen &= a == b", FLASH),
    Fault("a tile too many skipped", TILES, "some & (first <= greatest)", "some & (first < greatest)", FLASH),
    Fault("combining drops a window", "MaskInfo.combine", "_both(self.window, $other.window)", "self.window", FLASH),
    Fault("output not rescaled", "forward.query_block.key_block", "$out * $rescale[..., None]", "$out", FLASH),
    Fault(
        "denominator not rescaled",
        "forward.query_block.key_block",
        "$total * $rescale + jnp.sum($p, axis=-1)",
        "$total + jnp.sum($p, axis=-1)",
        FLASH,
    ),
    Fault("sink counted twice", "flash_attention/xla:forward", "$l0 = 1.0", "$l0 = 2.0", FLASH),
    Fault(
        "delta with the wrong sign",
        "backward.query_block.key_block",
        "($dp if $keep is None else $dp * $keep) - $delta",
        "($dp if $keep is None else $dp * $keep) + $delta",
        FLASH,
    ),
    Fault(
        "slope of the soft cap dropped",
        "backward.query_block.key_block",
        "$ds if $s.cap_slope is None else $ds * $s.cap_slope",
        "$ds",
        "tests/test_ops.py -k soft_cap",
    ),
    Fault(
        "dropout missing in the backward",
        "backward.query_block.key_block",
        "($dp if $keep is None else $dp * $keep) - $delta",
        "$dp - $delta",
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
    Fault("Triton: output not rescaled", "_forward_blocks", "$acc * $rescale[:, None]", "$acc", _triton("long")),
    Fault(
        "Triton: sink in units of e",
        "forward_kernel",
        "tl.load($sink_ptr + $n) * LOG2E",
        "tl.load($sink_ptr + $n)",
        _triton("several_sinks"),
    ),
    Fault(
        "Triton: a window one key narrower",
        PARTS,
        "seen & (k_at >= _end(O.LOW,",
        "seen & (k_at > _end(O.LOW,",
        _triton("window"),
    ),
    Fault("Triton: keys past the last", "triton_parts:visible", "$kj < $O.S", "$kj >= 0", _triton("full")),
    Fault(
        "Triton: padding attends",
        "triton_parts:visible",
        "$seen & ($q_segment == $k_segment) & ($q_segment >= 0)",
        "$seen & ($q_segment == $k_segment)",
        _triton("padding"),
    ),
    Fault("Triton: one head of a group", "key_gradient_kernel", "range($G)", "range(1)", _triton("causal")),
    Fault(
        "Triton: slope of the soft cap dropped for keys",
        "_key_blocks",
        "$p * ($dp - $delta[None, :]) * $bend",
        "$p * ($dp - $delta[None, :])",
        _triton("soft_cap"),
    ),
    Fault(
        "Triton: dropout missing in the gradient of the values", "_key_blocks", "$p * $keep", "$p", _triton("dropout")
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
        "bias_gradient_kernel",
        "$O.B",
        "1",
        _triton("bias_per_head"),
    ),
    Fault(
        "Triton: a row without keys divides",
        "statistics",
        "tl.where($some, $lse * LOG2E, float('inf'))",
        "$lse * LOG2E",
        _triton("dense_mask"),
    ),
    Fault(
        "Hopper: the kernel of narrow heads for wide ones",
        "_specialised_gradients",
        "$wide <= 128",
        "$wide <= 256",
        f"{HOPPER} -k launched",
    ),
    Fault(
        "Hopper: blocks of as many keys for wide heads",
        "specialised_tiles",
        "128 if $wide <= 128 else 64",
        "128",
        f"{HOPPER} -k 'launched or other_backward'",
    ),
    Fault(
        "Hopper: wide heads side by side, whose sums are more than the cache",
        "SIDE_BY_SIDE",
        "1",
        "8",
        f"{HOPPER} -k launched",
    ),
    Fault(
        "Hopper: three warpgroups with the registers of two",
        "flash_attention/triton_gpu:forward",
        "160 if $blocks[0] == THREE_WARPGROUPS else 240",
        "240",
        f"{HOPPER} -k programs",
    ),
    Fault(
        "Hopper: three warpgroups of wider heads, which spill",
        "flash_attention/triton_gpu:_params",
        "padded_width($H) <= 64",
        "padded_width($H) <= 128",
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
        "panel_of",
        "128 < $H <= 192 and padded_width($HV) <= 128",
        "128 < $H <= 192",
        f"{HOPPER} -k tiles_of_the_forward",
    ),
    Fault(
        "Hopper: heads of 192 in tiles of 256 columns",
        "panel_of",
        "64 if 128 < $H <= 192 and padded_width($HV) <= 128 else padded_width($H)",
        "padded_width($H)",
        f"{HOPPER} -k tiles_of_the_forward",
    ),
    Fault(
        "Hopper: one tile of columns of three is multiplied",
        "gluon_kernels:_logits",
        "$s = warpgroup_mma($q[$i], $k, $s, use_acc=$i > 0, is_async=True)",
        "if $i == 0:\n    $s = warpgroup_mma($q[$i], $k, $s, use_acc=$i > 0, is_async=True)",
        f"{HOPPER} -k products_of_padded",
    ),
    Fault(
        "Hopper: the backward multiplies all columns of padded heads",
        "gluon_wide:_columns",
        "128 if $O.H <= 192 else 256",
        "256",
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
        "flash_attention/triton_gpu:_params",
        "$asks or not $blocks or $made.num_warps != SPECIALISED",
        "$asks or not $blocks",
        f"{HOPPER} -k configuration",
    ),
    Fault(
        "Hopper: the backward goes over the spans of queries",
        "_specialised_gradients",
        "$call.spans(*$blocks)[1]",
        "$call.spans(*$blocks)[0]",
        f"{HOPPER} -k launched",
    ),
    Fault(
        "Hopper: values wider than keys are taken",
        "specialised_tiles",
        "64 <= $tall <= $wide",
        "64 <= $tall",
        f"{HOPPER} -k chosen",
    ),
    Fault(
        "Hopper: wide heads have the backward of two passes",
        "specialised_tiles",
        "config_of((128, $forward, SPECIALISED, 2), ($backward[0], $keys, SPECIALISED, $backward[1]))",
        "KernelConfig(FwdParams(128, $keys, SPECIALISED, 2), plain.bwd_params)",
        f"{HOPPER} -k chosen",
    ),
    Fault(
        "Hopper: the last columns of a padded head are not added to the gradient of the queries",
        "gluon_wide:_add",
        "$O.H + $COLUMNS - 1",
        "$O.H",
        f"{HOPPER} -m 'slow or not slow' -k 'the_code and 136'",
    ),
    Fault(
        "cuDNN: a window of a key more",
        "_backend_config",
        "$left + 1",
        "$left + 2",
        "tests/test_ops.py -m 'slow or not slow' -k flash_attention-window-bfloat16-cudnn",
    ),
    Fault(
        "cuDNN: the gradient of lse dropped",
        "_out_of",
        "$delta[..., None] / jnp.where($squares > 0, $largest * $squares, 1)",
        "0 * $delta[..., None] / jnp.where($squares > 0, $largest * $squares, 1)",
        "tests/test_ops.py -k flash_attention-causal-bfloat16-cudnn",
    ),
    Fault(
        "cuDNN: a row whose cotangent is zero loses that of its lse",
        "_out_of",
        "jnp.where(($largest < SMALLEST) & ($delta[..., None] != 0), SMALLEST * $first, $wide)",
        "$wide",
        "tests/kernels/test_flash_attention_cudnn.py",
    ),
    Fault(
        "Pallas: a block too many skipped",
        "visits_of",
        "$other < of($last)",
        "$other < of($last) - 1",
        on_pallas("long"),
    ),
    Fault(
        "Pallas: a pair left out at the end",
        "visits_of",
        "$there = $step < $total",
        "$there = $step < $total - 1",
        f"{PALLAS_BLOCKS} -k visits",
    ),
    Fault(
        "Pallas: pairs that are masked in part taken as full",
        "visits_of",
        "$active & ($other >= of($span[..., FULL_FIRST])) & ($other < of($span[..., FULL_LAST]))",
        "$active",
        f"{PALLAS_BLOCKS} -k documents",
    ),
    Fault(
        "Pallas: output not rescaled",
        "flash_attention_fwd_kernel.tile",
        "$turned[...] * $rescale + _dot($value, $p.astype($value.dtype), 1 - $plan.value_width, 0)",
        "$turned[...] + _dot($value, $p.astype($value.dtype), 1 - $plan.value_width, 0)",
        f"{PALLAS_BLOCKS} -k documents",
    ),
    Fault(
        "Pallas: denominator not rescaled",
        "flash_attention_fwd_kernel.tile",
        "$total[...] * $rescale + jnp.sum($p, axis=0, keepdims=True)",
        "$total[...] + jnp.sum($p, axis=0, keepdims=True)",
        f"{PALLAS_BLOCKS} -k documents",
    ),
    Fault(
        "Pallas: sinks counted twice",
        "flash_attention_fwd_kernel._",
        "1.0 if $plan.sinks else 0.0",
        "2.0 if $plan.sinks else 0.0",
        f"{PALLAS_BLOCKS} -k window",
    ),
    Fault(
        "Pallas: gradients of keys are those of the last head of a group",
        "flash_attention_bwd_dkv_kernel._",
        "$at.has(BEGINS) & ($group == 0)",
        "$at.has(BEGINS)",
        on_pallas("long"),
    ),
    Fault(
        "Pallas: a query head reads the keys of another group",
        "pallas_tpu:_of_keys",
        "($b, lax.div($n, $G), 0, $j)",
        "($b, lax.rem($n, $G), 0, $j)",
        on_pallas("long"),
    ),
    Fault(
        "Pallas: delta, and with it the cotangent of lse, dropped",
        "pallas_tpu:_gradients",
        "$dp - $refs['delta'][...]",
        "$dp",
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
        "flash_attention/pallas_tpu:backward",
        "jnp.where($some, $saved.lse, jnp.inf)",
        "$saved.lse",
        f"{PALLAS_BLOCKS} -k documents",
    ),
    Fault(
        "Pallas: a shared bias takes the pairs of some rows",
        "united",
        "$xp.where($some, $span[..., FIRST], 2 ** 30).min",
        "$xp.where($some, $span[..., FIRST], 2 ** 30).max",
        f"{PALLAS_BLOCKS} -k shared",
    ),
    Fault(
        "Pallas: all rows drop the same weights",
        "flash_attention/pallas_tpu:_tile",
        "$refs['seeds'][$head]",
        "$refs['seeds'][at.n]",
        on_pallas("together"),
    ),
    Fault(
        "Pallas: dropout missing in the backward",
        "pallas_tpu:_gradients",
        "$dp = $dp if $keep is None else $dp * $keep",
        "$dp = $dp",
        on_pallas("together"),
    ),
    Fault(
        "Pallas: slope of the soft cap dropped",
        "pallas_tpu:_gradients",
        "($p if $keep is None else $p * $keep, $ds, $ds if $bend is None else $ds * $bend, $distance)",
        "($p if $keep is None else $p * $keep, $ds, $ds, $distance)",
        on_pallas("together"),
    ),
    Fault(
        "Pallas: heads of 64 are padded to 128",
        "pallas_tpu:_width",
        "1 if $H % LANES == 0 else 0",
        "1",
        f"{PALLAS_BLOCKS} -k room_of_64",
    ),
    Fault(
        "Pallas: wide heads of keys read as those of queries",
        "pallas_tpu:_of_keys",
        "($b, lax.div($n, $G), $j, 0)",
        "($b, $n, $j, 0)",
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
        "flash_attention/pallas_tpu:_dot",
        "lax.Precision.HIGHEST",
        "None",
        f"{PALLAS_BLOCKS} -k float32",
    ),
)
