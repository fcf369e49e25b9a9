"""Devices that a program can be compiled for without any of them being there: slices of TPUs, and hosts of GPUs."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ejdist.planning.chips import CHIPS, Chip, chip_of
from kernels._core.ahead_of_time import tpu_topology
from kernels._core.target import compile_for


@dataclass(frozen=True)
class Target:
    """So many devices of a kind. shape: of a TPU slice ("4x4x4"), "" for GPUs. per_host: devices of a host."""

    chip: Chip
    count: int
    shape: str = ""
    per_host: int = 8

    @property
    def name(self) -> str:
        return f"{self.chip.name}:{self.shape}" if self.shape else f"{self.count} x {self.chip.name}"

    def devices(self) -> list[Any]:
        """Returns the devices, to compile for.

        Raises:
          ValueError: there is no such slice. RuntimeError: the compiler is not installed.
        """
        if self.shape:
            found = list(tpu_topology(self.name).devices)
        else:
            found = list(_gpus(self.chip.name, self.count, self.per_host).devices)
        if len(found) != self.count:
            raise ValueError(f"topology = {self.name!r} has {len(found)} devices, and not {self.count}")
        return found

    @contextlib.contextmanager
    def lowering(self) -> Iterator[None]:
        """A context in which a program is lowered for these devices."""
        if self.shape:
            yield
        else:
            with compile_for(GPUS[self.chip.name].capability):
                yield


def target_of(topology: str | None, devices: int | None, device: str | None, per_host: int | None) -> Target:
    """Returns what a command line asks for: `topology`, or `devices` of a `device`.

    Raises:
      ValueError: both or neither, a kind that is not known, or numbers that do not fit.
    """
    if topology and (devices or device or per_host):
        raise ValueError(
            "give either topology=GENERATION:SHAPE, of TPUs, or devices=N device=NAME, of GPUs, and not both"
        )
    if topology:
        name, _, shape = topology.partition(":")
        if name not in CHIPS or CHIPS[name].platform != "tpu":
            known = ", ".join(n for n, chip in CHIPS.items() if chip.platform == "tpu")
            raise ValueError(
                f"topology = {topology!r}: there is no TPU {name!r}; use one of {known}, for example v5p:4x4x4"
            )
        if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*){1,2}", shape):
            raise ValueError(f"topology = {topology!r} must be GENERATION:SHAPE, for example topology=v5p:4x4x4")
        count = functools.reduce(lambda a, b: a * b, map(int, shape.split("x")))
        return Target(chip_of(name), count, shape, chip_of(name).host)
    if not devices or not device:
        raise ValueError("give topology=GENERATION:SHAPE, for example topology=v5p:4x4x4, or devices=64 device=h200")
    chip = chip_of(device)
    if chip.platform != "gpu":
        raise ValueError(f"device = {device!r} is a TPU: give topology={device}:SHAPE, for example topology=v5p:4x4x4")
    per_host = per_host or chip.host
    if devices > per_host and devices % per_host:
        raise ValueError(f"devices = {devices} must be a multiple of devices_per_host = {per_host}")
    return Target(chip, devices, "", min(per_host, devices))


# -- GPUs -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gpu:
    """What XLA's compiler asks of a GPU: compute capability, multiprocessors, bytes of cache, GHz."""

    capability: int
    cores: int
    cache: int
    clock: float


GPUS = {
    "h100": Gpu(90, 132, 50 << 20, 1.98),
    "h200": Gpu(90, 132, 50 << 20, 1.98),
    "b200": Gpu(100, 148, 126 << 20, 1.965),
}


def _described(name: str) -> str:
    """Returns a GPU in the text form of XLA's `GpuTargetConfigProto`."""
    gpu, chip = GPUS[name], chip_of(name)
    facts = {
        "threads_per_block_limit": 1024, "threads_per_warp": 32, "shared_memory_per_block": 48 << 10,
        "shared_memory_per_core": 228 << 10, "threads_per_core_limit": 2048, "core_count": gpu.cores, "fpus_per_core": 128,
        "block_dim_limit_x": 2**31 - 1, "block_dim_limit_y": 65535, "block_dim_limit_z": 65535,
        "memory_bandwidth": int(chip.bandwidth), "l2_cache_size": gpu.cache, "clock_rate_ghz": gpu.clock,
        "device_memory_size": chip.memory, "shared_memory_per_block_optin": 227 << 10,
        "registers_per_core_limit": 65536, "registers_per_block_limit": 65536,
    }  # fmt: skip
    lines = "\n".join(f"  {name}: {value}" for name, value in facts.items())
    major, minor = divmod(gpu.capability, 10)
    return (
        f"gpu_device_info {{\n{lines}\n  cuda_compute_capability {{ major: {major} minor: {minor} }}\n}}\n"
        f'platform_name: "CUDA"\ndnn_version_info {{ major: 9 minor: 10 }}\ndevice_description_str: "{chip.kind}"\n'
    )


@functools.cache
def _gpus(name: str, count: int, per_host: int) -> Any:
    from jax.experimental import topologies

    hosts = max(1, count // per_host)
    _prefer_own_tools()
    try:
        return topologies.get_topology_desc(
            chip_of(name).kind, "cuda", target_config=_described(name), topology=f"1x{hosts}x{count // hosts}"
        )
    except Exception as error:
        raise RuntimeError(f"the CUDA plugin of JAX cannot be asked ({str(error).splitlines()[0][:200]})") from None


def _prefer_own_tools() -> None:
    """Gives XLA the ptxas that Triton brings, where the user has given none: that of the machine's CUDA may be older than the
    code that XLA writes."""
    flag = "--xla_gpu_cuda_data_dir"
    if flag in os.environ.get("XLA_FLAGS", ""):
        return
    try:
        import triton
    except ModuleNotFoundError:
        return
    own = Path(triton.__file__).parent / "backends" / "nvidia"
    newest = max((p for p in (own / "bin").glob("ptxas*")), key=_version, default=None)
    if newest is None:
        return
    folder = Path(tempfile.mkdtemp(prefix="ejdist-cuda-"))
    (folder / "bin").mkdir()
    (folder / "nvvm" / "libdevice").mkdir(parents=True)
    (folder / "bin" / "ptxas").symlink_to(newest)
    for library in (own / "lib").glob("libdevice*.bc"):
        (folder / "nvvm" / "libdevice" / library.name).symlink_to(library)
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}={folder}".strip()
    os.environ["PATH"] = (
        f"{folder / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"  # where Triton kernels are assembled
    )
    atexit.register(shutil.rmtree, folder, ignore_errors=True)


def _version(ptxas: Path) -> tuple[int, ...]:
    said = subprocess.run([str(ptxas), "--version"], capture_output=True, text=True, check=False).stdout
    found = re.search(r"release (\d+)\.(\d+)", said)
    return tuple(map(int, found.groups())) if found else (0, 0)
