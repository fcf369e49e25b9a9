"""Faults of flash_attention."""

from faults import Fault

MASKS = "kernels/_core/masks.py"
FLASH = "tests/test_masks.py tests/kernels/test_flash_attention.py"
XLA = "kernels/ops/flash_attention/xla.py"
BLOCKS = "kernels/_core/blocks.py"
KERNELS = "kernels/ops/flash_attention/triton_kernels.py"
CUDNN = "kernels/ops/flash_attention/cudnn_gpu.py"


def _triton(case):
    return f"tests/test_ops.py -k flash_attention-{case}-float32-triton"


FAULTS = (
    Fault("mask off by one", MASKS, "        below = j <= i\n", "        below = j < i\n", FLASH),
    Fault("window one key wider", MASKS, "seen &= j >= i - left", "seen &= j >= i - left - 1", FLASH),
    Fault("integer window is W + 1", MASKS, "(int(sliding_window) - 1, 0)", "(int(sliding_window), 0)", FLASH),
    Fault("padding attends", MASKS, "seen &= (a == b) & (a >= 0)", "seen &= a == b", FLASH),
    Fault("a block too many skipped", MASKS, "below = k_low <= q_high", "below = k_low < q_high", FLASH),
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
        "blocks: the last one that attends left out",
        BLOCKS,
        "last = xp.where(some, at + 1, 0).max(-1)",
        "last = xp.where(some, at, 0).max(-1)",
        "tests/kernels/test_blocks.py",
    ),
    Fault(
        "blocks: those at the edge of a window are full",
        BLOCKS,
        "every & (k.low >= q.high - left)",
        "every & (k.low >= q.low - left)",
        "tests/kernels/test_blocks.py",
    ),
    Fault(
        "blocks: padding in a full block",
        BLOCKS,
        "every = some & q.whole & k.whole",
        "every = some & q.whole",
        "tests/kernels/test_blocks.py",
    ),
    Fault("Triton: output not rescaled", KERNELS, "acc * rescale[:, None], input", "acc, input", _triton("long")),
    Fault("Triton: sink in units of e", KERNELS, "sink_ptr + n) * LOG2E", "sink_ptr + n)", _triton("several_sinks")),
    Fault(
        "Triton: a window one key narrower",
        KERNELS,
        "seen & (k_at >= q_at - O.LEFT)",
        "seen & (k_at > q_at - O.LEFT)",
        _triton("window"),
    ),
    Fault("Triton: keys past the last", KERNELS, "seen = kj < O.S", "seen = kj >= 0", _triton("full")),
    Fault(
        "Triton: padding attends",
        KERNELS,
        "(q_segment == k_segment) & (q_segment >= 0)",
        "(q_segment == k_segment)",
        _triton("padding"),
    ),
    Fault("Triton: one head of a group", KERNELS, "for g in range(G):", "for g in range(1):", _triton("causal")),
    Fault(
        "Triton: slope of the soft cap dropped for keys",
        KERNELS,
        "raw = p * (dp - delta[None, :]) * bend * O.SCALE",
        "raw = p * (dp - delta[None, :]) * O.SCALE",
        _triton("soft_cap"),
    ),
    Fault(
        "Triton: dropout missing in the gradient of the values",
        KERNELS,
        "dropped = p * keep\n",
        "dropped = p\n",
        _triton("dropout"),
    ),
    Fault(
        "Triton: a prefix does not soften the causal mask",
        KERNELS,
        "below = below | (k_at < prefix)",
        "below = below | (k_at < 0)",
        _triton("prefix"),
    ),
    Fault(
        "Triton: the gradient of a broadcast bias of one row of the batch",
        KERNELS,
        "b_begin, b_end = 0, O.B",
        "b_begin, b_end = 0, 1",
        _triton("bias_per_head"),
    ),
    Fault(
        "Triton: a row without keys divides",
        KERNELS,
        'tl.where(some, lse * LOG2E, float("inf"))',
        "lse * LOG2E",
        _triton("dense_mask"),
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
)
