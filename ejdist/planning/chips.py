"""What a kind of device can do: memory, speed and links. From data sheets; other sources are noted."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ejdist.device_rates import MEMORY, PEAKS
from ejdist.experts.choice import links_of
from ejdist.sequence.in_place import tile_of

GIB = 2**30


@dataclass(frozen=True)
class Chip:
    """A kind of device.

    kind: as in `jax.Device.device_kind`. memory: bytes of HBM. bandwidth: of HBM, bytes/s. link: bytes/s that a device
    sends along one mesh axis in a collective, within the slice or the host. network: the same between hosts; None where the
    links reach all devices. between_slices: the same between TPU slices, over the data-centre network; None for GPUs.
    host: devices of a host. source: where link, network and between_slices are from. dims: of a TPU slice's shape, which counts
    chips; per_chip: devices of one, as JAX shows them. to_host: bytes/s between a device and its host's memory, each way.
    host_memory: bytes of that memory, of all devices of the host; host_source: where both are from.
    """

    name: str
    kind: str
    platform: str
    memory: int
    bandwidth: float
    link: float
    host: int
    network: float | None = None
    source: str = ""
    between_slices: float | None = None
    dims: int = 0
    per_chip: int = 1
    to_host: float = 0.0
    host_memory: int = 0
    host_source: str = ""

    @property
    def tile(self) -> int | None:
        """Tokens of a tile of the kernels that add a hop of a ring in place, which are Hopper's; None for other chips."""
        return tile_of(self.kind)

    @property
    def flops(self) -> float:
        """Dense bf16 FLOP/s of a device, of the data sheet."""
        return PEAKS[max((n for n in PEAKS if self.kind.startswith(n)), key=len)] / self.per_chip


def _tpu(
    name: str,
    kind: str,
    memory: int,
    link: float,
    between: float,
    source: str,
    dims: int,
    devices: int = 1,
) -> Chip:
    """Takes the facts of a chip, and returns those of one of its devices, which share them."""
    each = (memory * GIB // devices, MEMORY[kind] / devices, link / devices, 4 * devices)
    return Chip(name, kind, "tpu", *each, None, source, between / devices, dims, devices)


def _gpu(name: str, kind: str, memory: float, link: float, network: float, source: str, host: int = 8) -> Chip:
    return Chip(name, kind, "gpu", int(memory * GIB), MEMORY[kind], link, host, network, source)


def _with_host(chip: Chip) -> Chip:
    rate, memory, source = _HOSTS[chip.name]
    return replace(chip, to_host=rate / chip.per_chip, host_memory=memory * GIB, host_source=source)


# Of the link to the host, each way, and of its memory in GiB. PCIe 5.0 with 16 lanes; assumptions are marked.
_PCIE_5 = (64e9, 1800, "PCIe 5.0 with 16 lanes; 2 TB of memory as a DGX H100 has")
_ASSUMED = (
    "16 GB/s each way as a TPU v4 (How to Scale Your Model, part 2), assumed; memory of the GKE machine with 4 chips"
)
_PCIE_4 = "PCIe 4.0 with 16 lanes; memory of a DGX A100"
_HOSTS = {
    "v4": (16e9, 379, "16 GB/s each way (How to Scale Your Model, part 2); memory of the GKE machine with 4 chips"),
    "v5e": (16e9, 178, _ASSUMED),
    "v5p": (16e9, 417, _ASSUMED),
    "v6e": (16e9, 670, _ASSUMED),
    "tpu7x": (16e9, 894, _ASSUMED),
    "a100": (32e9, 1800, _PCIE_4),
    "a100-40gb": (32e9, 900, _PCIE_4),
    "h100": _PCIE_5,
    "h200": _PCIE_5,
    "b200": (64e9, 1800, "PCIe 5.0 with 16 lanes and 2 TB of memory, assumed equal to a DGX H100"),
    # 36 Grace CPUs in a rack of 72 GPUs.
    "gb200": (
        225e9,
        36 * 447,
        "NVLink-C2C, 900 GB/s both ways for the two GPUs of a Grace CPU with 480 GB (GB200 NVL72)",
    ),
}

# A TPU's axis is a ring of links in both directions: twice the rate of one link in one direction.
# A GPU's memory is 94% of what its driver shows, which JAX takes with XLA_PYTHON_CLIENT_MEM_FRACTION=0.94. What it shows, and
# the bandwidth of the memory of an A100 and GB200: https://github.com/openxla/xla, xla/backends/gpu/target_config/specs.
# NVLink, both ways: 600 GB/s of an A100, 900 of an H100 and H200, 1800 of a B200 and GB200, by NVIDIA's data sheets
# (https://www.nvidia.com/en-us/data-center/a100, /h200, /hgx, /gb200-nvl72). What an H200 was measured to send is scaled by
# them. The network: https://docs.nvidia.com/dgx/dgxa100-user-guide (200 Gbit/s for each GPU), and 400 for the others.
CHIPS = {
    chip.name: _with_host(chip)
    for chip in (
        _tpu("v4", "TPU v4", 32, 100e9, 6.25e9, "2400 Gbit/s a chip over 6 links; between slices as v5p, assumed", 3),
        _tpu("v5e", "TPU v5 lite", 16, 100e9, 3.125e9, "1600 Gbit/s a chip over 4 links; between slices 25 Gbit/s", 2),
        _tpu("v5p", "TPU v5", 95, 200e9, 6.25e9, "4800 Gbit/s a chip over 6 links; between slices 50 Gbit/s", 3),
        _tpu("v6e", "TPU v6 lite", 32, 224e9, 12.5e9, "3584 Gbit/s a chip over 4 links; between slices 100 Gbit/s", 2),
        _tpu("tpu7x", "TPU7x", 192, 400e9, 12.5e9, "9600 Gbit/s a chip over 6 links; between slices 100 Gbit/s", 3, 2),
        _gpu("a100", "NVIDIA A100-SXM4-80GB", 74.5, 189e9, 25e9, "two thirds of an H200; 200 Gbit/s per GPU"),
        _gpu("a100-40gb", "NVIDIA A100-SXM4-40GB", 37, 189e9, 25e9, "two thirds of an H200; 200 Gbit/s per GPU"),
        _gpu("h100", "NVIDIA H100", 74.5, 283e9, 50e9, "assumed equal to an H200; 400 Gbit/s per GPU"),
        _gpu("h200", "NVIDIA H200", 131, links_of("NVIDIA H200").all_gather, 50e9, "measured elsewhere; 400 Gbit/s"),
        _gpu("b200", "NVIDIA B200", 167, 566e9, 50e9, "twice that of an H200; 400 Gbit/s per GPU"),
        # NVLink joins the 72 GPUs of a rack: they are one host in a plan.
        _gpu("gb200", "NVIDIA GB200", 173, 566e9, 50e9, "twice that of an H200; 400 Gbit/s per GPU", 72),
    )
}  # fmt: skip


def chip_of_kind(kind: str) -> Chip | None:
    """Returns the chip of a `jax.Device.device_kind`, None for an unknown one (a CPU)."""
    matches = [chip for chip in CHIPS.values() if kind.startswith(chip.kind)]
    return max(matches, key=lambda chip: len(chip.kind), default=None)
