"""Sizes of tiles of the kernels in `triton_delta.py`, and into how many parts rows are split."""

from __future__ import annotations

from dataclasses import replace

from kernels.engines.scan.chunks import ChunkConfig
from kernels.engines.scan.triton_calls import columns, longest_chunk
from kernels.framework.binding import Call
from kernels.framework.target import MULTIPROCESSORS

# Programs for each multiprocessor that a row is split for, the fewest parts worth while, and the fewest chunks of one.
PROGRAMS_EACH, LEAST_SPLITS, LEAST_CHUNKS = 2, 3, 8
# Columns of a program: narrow ones fill a GPU; half as many wide ones, where there are enough, take 1.3 times as long (a rank's
# pass over qwen3_next 362 us on an H200 for 500, many_heads_8k 465 for 606), and so do the maps of parts (316 for 370).
NARROW, WIDE = 32, 64


def tiles(call: Call, chunk: int, block_v: int, num_warps: int, num_stages: int) -> ChunkConfig:
    """Returns the tiles of a call: these sizes, if it has as many tokens and columns, and what follows from them."""
    d, chunk = call.dims, min(chunk, longest_chunk(call))
    # A part costs more than half as much again for its map, so a row is split only where that fills a GPU.
    programs = d["B"] * d["N"] * -(-d["Hv"] // columns(block_v, d["Hv"]))
    splits = min(PROGRAMS_EACH * MULTIPROCESSORS // programs, -(-d["T"] // chunk) // LEAST_CHUNKS)
    splits = splits if splits >= LEAST_SPLITS else 1
    backward = 8 if d["H"] > 64 or call.dtype == "float32" else 4
    return ChunkConfig(chunk, None, columns(block_v, d["Hv"]), num_warps, num_stages, splits, 2, backward)


def heuristic(call: Call, platform: str) -> ChunkConfig:
    """Returns the default tiles of a call."""
    if call.dtype == "float32":  # small tiles fit the registers
        return tiles(call, 16, 16, 8, 1)
    many = call.dims["B"] * call.dims["N"] * -(-call.dims["Hv"] // NARROW) > MULTIPROCESSORS
    return tiles(call, 64, WIDE if many else NARROW, 4, 3)


def candidates(call: Call) -> list[ChunkConfig]:
    """Returns the configurations to tune over."""
    if call.dtype == "float32":
        return [heuristic(call, "cuda")]
    found = [
        tiles(call, chunk, block_v, num_warps, num_stages)
        for chunk in (32, 64)
        for block_v in (16, 32, 64)
        for num_warps in (4, 8)
        for num_stages in (1, 2, 3)
        if block_v < 64 or num_stages < 3
    ]
    found += [replace(heuristic(call, "cuda"), splits=splits) for splits in (1, 2, 4, 8)]
    return list(dict.fromkeys(found))
