"""What devices are called: the names of clouds, data sheets and drivers, and which chips and how many of them they mean.

The name of a TPU slice, "v5p-128", counts TensorCores: two for each chip of v4, v5p and TPU7x, one for v5e and v6e. JAX shows
one device for each chip, and two for each of TPU7x. Sizes and shapes: https://cloud.google.com/tpu/docs/v4, /v5e, /v5p,
/v6e and /tpu7x; the names of TPU7x slices: https://github.com/AI-Hypercomputer/xpk.
"""

from __future__ import annotations

import difflib
import itertools
import math
import re
from dataclasses import dataclass

from ejdist.planning.chips import CHIPS, Chip

# Names beside those of `CHIPS`, in lower case with hyphens: of products, of JAX, of Cloud TPU's accelerator types, of GKE's
# labels and machine types.
_NAMES = {
    "v4": "v4-podslice ct4p-hightpu",
    "v5e": "v5-lite v5lite v5litepod v5-lite-podslice v5-lite-device ct5l-hightpu ct5lp-hightpu",
    "v5p": "v5 v5p-slice ct5p-hightpu",
    "v6e": "v6 v6-lite v6lite trillium v6e-slice ct6e-standard",
    "tpu7x": "v7 v7x 7x tpu7 ironwood tpu7x-standard",
    "a100": "a100-80gb a100-80g a100-80 a100-sxm a100-sxm4 a100-sxm4-80gb a100-sxm-80gb",
    "a100-40gb": "a100-40g a100-40 a100-sxm4-40gb a100-sxm-40gb",
    "h100": "h100-sxm h100-sxm5 h100-80gb h100-80g h100-80 h100-80gb-hbm3 h100-sxm5-80gb h100-sxm-80gb hopper",
    "h200": "h200-sxm h200-sxm5 h200-141gb h200-141",
    "b200": "b200-sxm b200-sxm6 b200-180gb b200-192gb hgx-b200 dgx-b200 blackwell",
    "gb200": "gb200-nvl72 gb200nvl72 nvl72 grace-blackwell",
}
NAMES = {other: name for name, others in _NAMES.items() for other in (name, *others.split())}
# TensorCores of a chip, which the name of a slice counts.
_CORES = {"v4": 2, "v5p": 2, "tpu7x": 2}
# Chips of a slice -> its shape, as the cloud offers it. Larger slices of three dims consist of cubes of 4 x 4 x 4.
_FLAT = {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}
_SOLID = {4: "2x2x1", 8: "2x2x2", 16: "2x2x4", 32: "2x4x4", 64: "4x4x4"}
_CUBE = 64
_MOST_CHIPS = {"v4": 4096, "v5p": 6144, "tpu7x": 9216}


@dataclass(frozen=True)
class Named:
    """What a name means. count: devices as JAX shows them, None where the name has none; shape: of a TPU slice, "" without."""

    chip: Chip
    count: int | None = None
    shape: str = ""


def read(key: str, given: str) -> Named:
    """Returns what a name means, however it is written: `H200`, `8xh100`, `h100:8`, `v5p-128`, `v5litepod-16`, `v5p:4x4x4`,
    `Trillium`.

    Raises:
      ValueError: no device has that name, or there is no slice of that size or shape; names `key`, and what is nearest.
    """
    name = re.sub(r"[\s_-]+", "-", given.strip().lower())
    name = re.sub(r"^((nvidia|cloud|google|gpu|tpu)[-:])+|-\d+t$", "", name)
    if name in NAMES:
        return Named(CHIPS[NAMES[name]])
    for pattern in (
        r"(?P<name>.+)(?P<by>[-:])(?P<size>\d{1,7})",
        r"(?P<name>.+)x(?P<size>\d{1,7})",
        r"(?P<size>\d{1,7})x(?P<name>.+)",
    ):
        match = re.fullmatch(pattern, name)
        if match and match["name"] in NAMES:
            chip, size, by = CHIPS[NAMES[match["name"]]], int(match["size"]), match.groupdict().get("by")
            return (
                _slice(key, given, chip, size)
                if chip.platform == "tpu" and by == "-"
                else _counted(key, given, chip, size)
            )
    generation, _, shape = name.partition(":")
    if CHIPS.get(NAMES.get(generation, "")) and re.fullmatch(r"[1-9]\d*(x[1-9]\d*){1,2}", shape):
        return _of_shape(key, given, CHIPS[NAMES[generation]], shape)
    if shape and generation in NAMES:
        raise ValueError(
            f"{key} = {given!r} must be GENERATION:SHAPE, for example v5p:4x4x4, or the name of a slice, v5p-128"
        )
    gpus, tpus = (", ".join(n for n, chip in CHIPS.items() if chip.platform == kind) for kind in ("gpu", "tpu"))
    near = difflib.get_close_matches(name, NAMES, n=1, cutoff=0.75)
    raise ValueError(
        f"{key} = {given!r} is unknown; use one of {gpus}, or a TPU slice of {tpus}, for example v5p-128 or v5p:4x4x4"
        + (f"; did you mean {NAMES[near[0]]!r}?" if near else "")
    )


def _of_shape(key: str, value: str, chip: Chip, shape: str) -> Named:
    sizes = [int(n) for n in shape.split("x")]
    if chip.platform != "tpu":
        raise ValueError(f"{key} = {value!r}: a GPU has no shape; give device={chip.name} devices={math.prod(sizes)}")
    if len(sizes) != chip.dims:
        example = {2: "4x4", 3: "4x4x4"}[chip.dims]
        raise ValueError(
            f"{key} = {value!r}: a slice of {chip.name} has {chip.dims} dims, for example {chip.name}:{example}"
        )
    return Named(chip, chip.per_chip * math.prod(sizes), shape)


def shaped(key: str, given: str, chip: Chip, chips: int) -> Named:
    """Returns the slice with `chips` chips. Raises ValueError if the cloud offers none of that size; names the nearest."""
    table = {2: _FLAT, 3: _SOLID}[chip.dims]
    shape = table.get(chips)
    if shape is None and chip.dims == 3 and chips % _CUBE == 0 and 0 < chips <= _MOST_CHIPS[chip.name]:
        shape = "x".join(str(4 * n) for n in _roundest(chips // _CUBE))
    if shape is None:
        offered = sorted({*table, *(_CUBE << n for n in range(8) if chip.dims == 3)})
        cores = _CORES.get(chip.name, 1)
        near = [
            n
            for n in (
                max((k for k in offered if k < chips), default=0),
                min((k for k in offered if k > chips), default=0),
            )
            if n
        ]
        named = " and ".join(f"{chip.name}-{n * cores} ({_chips(n)})" for n in near)
        raise ValueError(
            f"{key} = {given!r}: there is no {chip.name} slice of {_chips(chips)}; nearest: {named}; "
            f"topology={chip.name}:{'x'.join('ABC'[: chip.dims])} takes another shape"
        )
    return Named(chip, chips * chip.per_chip, shape)


def _chips(n: int) -> str:
    return f"{n:,} chip{'s' * (n != 1)}"


def _roundest(n: int) -> tuple[int, ...]:
    """Returns the three factors of n, in rising order, that are most alike."""
    divisors = [d for d in range(1, n + 1) if n % d == 0]
    return min(
        (c for c in itertools.combinations_with_replacement(divisors, 3) if math.prod(c) == n),
        key=lambda c: (sum(c), c),
    )


def _slice(key: str, value: str, chip: Chip, size: int) -> Named:
    cores = _CORES.get(chip.name, 1)
    if size % cores:
        raise ValueError(
            f"{key} = {value!r}: the name of a {chip.name} slice counts TensorCores, {cores} on a chip, and {size} is odd; use "
            f"for example {chip.name}-8, which has 4 chips"
        )
    return shaped(key, value, chip, size // cores)


def _counted(key: str, value: str, chip: Chip, count: int) -> Named:
    if count < 1:
        raise ValueError(f"{key} = {value!r} must name one device at least")
    return shaped(key, value, chip, count) if chip.platform == "tpu" else Named(chip, count)
