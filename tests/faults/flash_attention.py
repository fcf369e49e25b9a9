"""Faults of flash_attention."""

from faults import Fault

MASKS = "kernels/_core/masks.py"
FLASH = "tests/test_masks.py tests/kernels/test_flash_attention.py"
XLA = "kernels/ops/flash_attention/xla.py"

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
)
