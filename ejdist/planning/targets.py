"""Devices for which a program can be compiled although none is present: slices of TPUs, and hosts of GPUs."""

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
from types import SimpleNamespace
from typing import Any

import jax

from ejdist.planning.chips import CHIPS, Chip
from ejdist.planning.names import Named, read, shaped
from kernels.toolchains.simulate.ahead_of_time import tpu_topology
from kernels.toolchains.simulate.compile_for import compile_for

MOST_DEVICES = 2**17  # beyond which a search takes minutes, for a machine that does not exist


class NoCompiler(RuntimeError):
    """No compiler for the target is available here; the message says why."""


@dataclass(frozen=True)
class Target:
    """A number of devices of a kind. shape: of a TPU slice ("4x4x4"), "" for GPUs. per_host: devices of a host. slices: of
    that shape."""

    chip: Chip
    count: int
    shape: str = ""
    per_host: int = 8
    slices: int = 1

    @property
    def name(self) -> str:
        one = f"{self.chip.name}:{self.shape}" if self.shape else f"{self.count} x {self.chip.name}"
        return f"{self.slices} slices of {one}" if self.slices > 1 else one

    @property
    def device(self) -> Any:
        """What `jax.Device` says of one of the devices: its platform, its kind, and a GPU's compute capability."""
        capability = "" if self.shape else ".".join(map(str, divmod(GPUS[self.chip.name].capability, 10)))
        return SimpleNamespace(platform=self.chip.platform, device_kind=self.chip.kind, compute_capability=capability)

    @property
    def side(self) -> int | None:
        """Chips along the longest side of a slice; None for GPUs."""
        return max(map(int, self.shape.split("x"))) if self.shape else None

    def host_bytes(self, of_a_device: int) -> int:
        """Returns the bytes in the memory of a host, of all its devices."""
        return of_a_device * min(self.per_host, self.count)

    @property
    def room_of_host(self) -> int:
        """Bytes of a host's memory that a plan may fill: three quarters, as data, checkpoints and the system need some."""
        return self.chip.host_memory * 3 // 4

    def check(self) -> None:
        """Raises ValueError where the TPU compiler, if available, knows no such slice."""
        if self.shape:
            with contextlib.suppress(NoCompiler):
                self.devices()

    def devices(self) -> list[Any]:
        """Returns the devices, to compile for.

        Raises:
          ValueError: there is no such slice. NoCompiler: none is installed, or it knows the slice but not this many of it.
        """
        if self.shape:
            all_devices = self._tpus()
        else:
            all_devices = list(_gpus(self.chip.name, self.count, self.per_host).devices)
        if len(all_devices) != self.count:
            raise ValueError(f"topology = {self.name!r} has {len(all_devices)} devices, not {self.count}")
        return all_devices

    def _tpus(self) -> list[Any]:
        one = f"{self.chip.name}:{self.shape}"
        try:
            return list(tpu_topology(one, slices=self.slices).devices)
        except RuntimeError as error:
            raise NoCompiler(str(error)) from None
        except ValueError as error:
            if self.slices > 1 and tpu_topology(one):  # which raises where there is no such slice either
                raise NoCompiler(f"the compiler supports {one}, but not {self.slices} slices of it ({error})") from None
            raise

    @contextlib.contextmanager
    def lowering(self) -> Iterator[None]:
        """A context in which a program is lowered for these devices."""
        if self.shape:
            yield
        else:
            with compile_for(GPUS[self.chip.name].capability):
                yield


def target_of(
    topology: str | None, devices: int | None, device: str | None, per_host: int | None, slices: int | None = None
) -> Target:
    """Returns what a command line asks for: `slices` times a `topology`, or `devices` of a `device`, whose name may be that of
    a slice or have the number in it.

    Raises:
      ValueError: both or neither, a kind that is not known, or numbers that do not fit.
    """
    if topology and (devices or device or per_host):
        raise ValueError("give either topology=GENERATION:SHAPE, for TPUs, or devices=N device=NAME for GPUs, not both")
    if not topology and not device:
        what = "device=v5p-128, device=h200 devices=64, or topology=v5p:4x4x4"
        raise ValueError(f"which devices is the plan for? Give {what}")
    key, value = ("topology", topology) if topology else ("device", str(device))
    named = read(key, value)
    if named.chip.platform == "gpu" and topology:
        raise ValueError(f"topology = {value!r} is a GPU: give device={named.chip.name} devices=64")
    if named.chip.platform == "gpu":
        return _gpus_of(value, named, devices, per_host, slices)
    return _slices_of(key, value, named, devices, per_host, slices or 1)


def _slices_of(key: str, value: str, named: Named, devices: int | None, per_host: int | None, slices: int) -> Target:
    chip = named.chip
    if per_host:
        raise ValueError(f"devices_per_host = {per_host} is for GPUs, and {key}={value} is a TPU; leave it out")
    if named.count is None and devices is None:
        raise ValueError(
            f"{key} = {value!r} has no size: name the slice, for example device={_EXAMPLES[chip.name]}, give devices=64 beside "
            f"it, or topology={chip.name}:{'4x4' if chip.dims == 2 else '4x4x4'}"
        )
    if named.count is None:
        chips, rest = divmod(int(devices or 0), chip.per_chip)
        if rest:
            raise ValueError(
                f"devices = {devices}: a {chip.name} chip has {chip.per_chip} devices; give a multiple of that"
            )
        named = shaped("devices", str(devices), chip, chips)
    elif devices not in (None, named.count):
        raise ValueError(
            f"devices = {devices}, but {key}={value} is {named.count} devices as JAX shows them, {chip.name}:{named.shape}; "
            "give one of the two"
        )
    count = int(named.count or 0)
    if count * slices > MOST_DEVICES:
        raise ValueError(f"{key} = {value!r}: that is {count * slices:,} devices; at most {MOST_DEVICES:,}")
    return Target(chip, slices * count, named.shape, min(chip.host, count), slices)


# A slice of each generation, by the name that the cloud gives it.
_EXAMPLES = {"v4": "v4-128", "v5e": "v5e-256", "v5p": "v5p-128", "v6e": "v6e-256", "tpu7x": "tpu7x-128"}


def _gpus_of(device: str, named: Named, devices: int | None, per_host: int | None, slices: int | None) -> Target:
    chip = named.chip
    if slices:
        raise ValueError("slices= is for TPUs, but this plan is for GPUs; leave it out")
    if devices and named.count and devices != named.count:
        raise ValueError(f"devices = {devices}, but device={device} is {named.count} of them; give one of the two")
    count = devices or named.count
    if count is None:
        raise ValueError(f"device={device}: how many? Give devices=64 beside it")
    if count > MOST_DEVICES:
        raise ValueError(f"devices = {count:,} is too large; at most {MOST_DEVICES:,}")
    host = per_host or chip.host
    if count > host and count % host:
        fits = max(n for n in range(1, host + 1) if count % n == 0)
        raise ValueError(
            f"devices = {count} must be a multiple of devices_per_host = {host}; to use only {fits} of each, give "
            f"devices_per_host={fits}"
        )
    return Target(chip, count, "", host)


# -- GPUs -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gpu:
    """What XLA's compiler asks of a GPU: compute capability, multiprocessors, bytes of cache, GHz, KiB of shared memory of a
    multiprocessor and of a block, and float32 units of a multiprocessor. By https://github.com/openxla/xla,
    xla/backends/gpu/target_config/specs."""

    capability: int
    cores: int
    cache: int
    clock: float
    shared: int = 228
    shared_of_block: int = 227
    units: int = 128


GPUS = {
    "a100": Gpu(80, 108, 40 << 20, 1.41, 164, 163, 64),
    "a100-40gb": Gpu(80, 108, 40 << 20, 1.41, 164, 163, 64),
    "h100": Gpu(90, 132, 50 << 20, 1.98),
    "h200": Gpu(90, 132, 50 << 20, 1.98),
    "b200": Gpu(100, 148, 126 << 20, 1.965),
    "gb200": Gpu(100, 152, 135528448, 2.062),
}


def _described(name: str) -> str:
    """Returns a GPU in the text form of XLA's `GpuTargetConfigProto`."""
    gpu, chip = GPUS[name], CHIPS[name]
    facts = {
        "threads_per_block_limit": 1024, "threads_per_warp": 32, "shared_memory_per_block": 48 << 10,
        "shared_memory_per_core": gpu.shared << 10, "threads_per_core_limit": 2048, "core_count": gpu.cores,
        "fpus_per_core": gpu.units, "block_dim_limit_x": 2**31 - 1, "block_dim_limit_y": 65535, "block_dim_limit_z": 65535,
        "memory_bandwidth": int(chip.bandwidth), "l2_cache_size": gpu.cache, "clock_rate_ghz": gpu.clock,
        "device_memory_size": chip.memory, "shared_memory_per_block_optin": gpu.shared_of_block << 10,
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
            CHIPS[name].kind, "cuda", target_config=_described(name), topology=f"1x{hosts}x{count // hosts}"
        )
    except (NotImplementedError, jax.errors.JaxRuntimeError) as error:  # there is no plugin; it refuses
        raise NoCompiler(f"JAX's CUDA plugin is not available ({str(error).splitlines()[0][:200]})") from None


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
    tools = Path(triton.__file__).parent / "backends" / "nvidia"
    newest = max((p for p in (tools / "bin").glob("ptxas*")), key=_version, default=None)
    if newest is None:
        return
    folder = Path(tempfile.mkdtemp(prefix="ejdist-cuda-"))
    (folder / "bin").mkdir()
    (folder / "nvvm" / "libdevice").mkdir(parents=True)
    (folder / "bin" / "ptxas").symlink_to(newest)
    for library in (tools / "lib").glob("libdevice*.bc"):
        (folder / "nvvm" / "libdevice" / library.name).symlink_to(library)
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}={folder}".strip()
    os.environ["PATH"] = (
        f"{folder / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"  # where Triton kernels are assembled
    )
    atexit.register(shutil.rmtree, folder, ignore_errors=True)


def _version(ptxas: Path) -> tuple[int, ...]:
    output = subprocess.run([str(ptxas), "--version"], capture_output=True, text=True, check=False).stdout
    match = re.search(r"release (\d+)\.(\d+)", output)
    return tuple(map(int, match.groups())) if match else (0, 0)
