"""What kinds of devices do and read in a second, of data sheets."""

from __future__ import annotations

import math

# Dense bf16 peaks by device kind, in FLOP/s, from the vendors' data sheets.
PEAKS = {
    "NVIDIA A100": 312e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200": 989e12,
    "NVIDIA B200": 2250e12,
    "NVIDIA GB200": 2500e12,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5p": 459e12,
    "TPU v5": 459e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
    "TPU7x": 2307e12,
}


def peak_flops(device_kind: str) -> float | None:
    """Returns the bf16 peak of one device in FLOP/s, None if it is unknown (a CPU)."""
    matches = [name for name in PEAKS if device_kind.startswith(name)]
    return PEAKS[max(matches, key=len)] if matches else None


# Bytes/s of a device's memory, by device kind, from the vendors' data sheets. Of an A100 and GB200 as XLA lists them, see
# `ejdist/planning/chips.py`.
MEMORY = {
    "NVIDIA A100-SXM4-80GB": 2039e9,
    "NVIDIA A100-SXM4-40GB": 1555e9,
    "NVIDIA H100": 3350e9,
    "NVIDIA H200": 4800e9,
    "NVIDIA B200": 8000e9,
    "NVIDIA GB200": 7928e9,
    "TPU v4": 1228e9,
    "TPU v5 lite": 819e9,
    "TPU v5": 2765e9,
    "TPU v6 lite": 1638e9,
    "TPU7x": 7380e9,
}


def memory_rate(device_kind: str) -> float:
    """Returns the bytes/s of the memory of one device; infinite where they are unknown, so that passes over it cost nothing."""
    matches = [name for name in MEMORY if device_kind.startswith(name)]
    return MEMORY[max(matches, key=len)] if matches else math.inf
