"""mamba_ssm: Mamba-2 in Triton, with its groups of B and C, and Mamba-1's selective scan in CUDA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.peers import missing, needs_torch
from benchmarks.tuners import compile_side_by_side

FRAMEWORK = "torch"
OPERATIONS = ("state_space_v1", "state_space_v2")
CHUNK = 256  # its models' own


def available() -> str | None:
    return missing("mamba_ssm") or needs_torch(gpu=True)


def express(op_name: str, arguments: dict[str, Any]) -> Callable | str:
    if any(arguments.get(name) is not None for name in ("segment_ids", "initial_state")):
        return "documents and states are compared without"
    if arguments["x"].shape[1] == 1:
        return "one token is not a chunk"
    if op_name == "state_space_v1":
        return _mamba1
    compile_side_by_side()
    return _mamba2


def _mamba2(x: Any, dt: Any, A: Any, B: Any, C: Any, D: Any = None) -> Any:
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    return mamba_chunk_scan_combined(x, dt, A, B, C, CHUNK, D=D)


def _mamba1(x: Any, dt: Any, A: Any, B: Any, C: Any, D: Any = None) -> Any:
    from mamba_ssm.ops.selective_scan_interface import selective_scan_fn

    x, dt, B, C = (y.transpose(1, 2) for y in (x, dt, B, C))  # channels before tokens, as it has them
    return selective_scan_fn(x, dt, A.float(), B, C, None if D is None else D.float()).transpose(1, 2)
