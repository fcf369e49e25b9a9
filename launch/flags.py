"""Compiler flags of accelerators, by generation: the documented sets that launchers print, and whether the installed compiler
knows those that a process has.

They change when collectives run and what is fused with them, not what is computed, but for the order of sums. Sources: TPUs,
MaxText at e591f30 (benchmarks/xla_flags_library.py, which explains them, and src/maxtext/configs/tpu/GENERATION) and axlearn at
34aed43 (axlearn/common/compiler_options.py); GPUs, https://docs.jax.dev/en/latest/gpu_performance_tips.html.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

TPU, GPU = "LIBTPU_INIT_ARGS", "XLA_FLAGS"
# Gathers begin early and end late, beside what is computed.
_ASYNC = ("xla_enable_async_all_gather=true", "xla_enable_async_collective_permute=true")
# Between slices: sums of gradients begin while the layers before are computed (MaxText's DATA_PARALLEL_OVERLAP).
_SLICES = ("xla_tpu_enable_data_parallel_all_reduce_opt=true", "xla_tpu_data_parallel_opt_different_sized_ops=true")
_HOPPER = ("xla_gpu_enable_latency_hiding_scheduler=true",)
# Of a generation, the flags. Of tpu7x none: its compiler's defaults give collectives to the SparseCores.
FLAGS: Mapping[str, Sequence[str]] = {
    "v4": _ASYNC,
    # Gathers run in parts too: MaxText's CF_FOR_ALL_GATHER. Its configurations of v5p and v6e have these as well, with which
    # libtpu 0.0.51 refuses to compile there: "not supported/recommended on platforms other than TPU v5e".
    "v5e": (
        "xla_tpu_enable_async_collective_fusion=true",
        "xla_tpu_enable_async_collective_fusion_fuse_all_gather=true",
        "xla_tpu_enable_async_collective_fusion_multiple_steps=true",
        "xla_tpu_overlap_compute_collective_tc=true",
        "xla_enable_async_all_gather=true",
    ),
    "v5p": _ASYNC,
    "v6e": ("xla_enable_async_all_gather=true", "xla_tpu_overlap_compute_collective_tc=true"),
    "tpu7x": (),
    "h100": _HOPPER,
    "h200": _HOPPER,
    "b200": _HOPPER,
}
_BLOCK = 1 << 24  # bytes of a library that are looked through at once
_OF_PROCESS = re.compile(r"--([A-Za-z]\w*)")


def variable_of(kind: str, slices: int = 1) -> dict[str, str]:
    """Returns variable -> value of the flags of a kind of device; empty where there are none.

    Args:
      kind: of `FLAGS`. slices: TPU slices of the run.
    """
    if kind not in FLAGS:
        return {}
    is_gpu = FLAGS[kind] is _HOPPER
    flags = [*FLAGS[kind], *(_SLICES if slices > 1 and not is_gpu else ())]
    return {GPU if is_gpu else TPU: " ".join(f"--{flag}" for flag in flags)} if flags else {}


def check_known(environment: Mapping[str, str] | None = None) -> None:
    """Checks the compiler flags of this process, before the compiler ends it without a Python error.

    Raises:
      ValueError: a flag is not known to the installed libtpu, or jaxlib; names it.
    """
    environment = os.environ if environment is None else environment
    for variable, package, file in ((TPU, "libtpu", "libtpu.so"), (GPU, "jaxlib", "libjax_common.so")):
        names = _OF_PROCESS.findall(" ".join(shlex.split(environment.get(variable, ""))))
        names = [name for name in names if name != "xla_force_host_platform_device_count"]
        if names and (library := _library(package, file)) is not None:
            if unknown := [name for name in names if not _has(library, name)]:
                raise ValueError(
                    f"{variable} has --{unknown[0]}, which the installed {package} does not know: leave it out, or install the "
                    "version that it is for; of a launcher, flags=false prints none"
                )


def _library(package: str, file: str) -> Path | None:
    spec = importlib.util.find_spec(package)
    folders = spec.submodule_search_locations if spec is not None else None
    path = Path(folders[0]) / file if folders else None
    return path if path is not None and path.is_file() else None


def _has(library: Path, flag: str) -> bool:
    """Returns whether a library has a flag: its name is a string in it."""
    names = [name.encode() + b"\0" for name in (flag, flag.removeprefix("no"))]  # --noNAME is --NAME=false
    longest, rest = max(map(len, names)), b""
    with library.open("rb") as file:
        while block := file.read(_BLOCK):  # half a gigabyte in all
            text = rest + block
            if any(name in text for name in names):
                return True
            rest = text[1 - longest :]
    return False
