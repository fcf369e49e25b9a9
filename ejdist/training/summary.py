"""The summary of a run, from its rows: read as they come, as a run may have millions."""

from __future__ import annotations

import collections
import statistics
from array import array
from collections.abc import Iterable
from typing import Any

# The columns that the summary uses, apart from the loss.
SUMMED = ("step_time", "tokens", "flops_causal", "flops_full")
# Of attention, on the first host: the busiest over the mean, of the ranks of a sequence and of the groups that share a batch.
EVENNESS = ("imbalance_sp", "imbalance_dp", "padding_share", "hops_sp", "bytes_sp", "passes_sp", "keys_sp")
# The first steps include compilation and warmup; speeds come from the others.
_WARMUP_STEPS = 2
_LAST = 10


def summarise(
    rows: Iterable[dict[str, Any]], *, devices: int, peak: float | None, since: int = 0, **facts: Any
) -> dict[str, Any]:
    """Returns the summary of a run from its rows, which are read once.

    loss_first is the loss of the first step, loss_last the mean over the last 10 steps that have one. Either may be None: a
    skipped step may have no loss, and its row may be gone. Speeds are those of the median step after the first two, on
    `devices` devices and on the mesh of the last row, because a run may have changed either. tflops_per_device and mfu_causal
    count attention by the mask in use; mfu_full counts it as T x T.

    Args:
      peak: FLOP/s of one device by its data sheet, for MFU. None if there is no data sheet, as for a CPU; then there is no MFU,
        because a timed matmul is not a ceiling: any other load on the machine lowers it.
      since: use the steps after this one for speeds: each stage of a run has its own.
    """
    first = last = None
    losses: collections.deque[float] = collections.deque(maxlen=_LAST)
    best, mesh, of_mesh = -1, None, {}
    for last in rows:
        first = first or last
        if last.get("loss") is not None:
            losses.append(last["loss"])
        # Where no row is of these steps on these devices, those of other devices count, and then those of other steps.
        rank = 2 * (last["step"] > since) + (last.get("devices", devices) == devices)
        if rank > best:
            best, of_mesh = rank, {}
        if rank == best:
            mesh = last.get("mesh")
            columns = of_mesh.setdefault(mesh, {name: array("d") for name in (*SUMMED, *EVENNESS)})
            if all(name in last for name in SUMMED):
                for name in (*SUMMED, *(n for n in EVENNESS if isinstance(last.get(n), (int, float)))):
                    columns[name].append(last[name])
    assert first is not None and last is not None, "a run that made a step has a row"
    columns = of_mesh[mesh]
    if len(columns["step_time"]) > _WARMUP_STEPS:
        columns = {name: column[_WARMUP_STEPS:] for name, column in columns.items()}
    seconds = statistics.median(columns["step_time"])
    causal, full = (statistics.fmean(columns[name]) for name in ("flops_causal", "flops_full"))
    return {
        "loss_first": first.get("loss") if first["step"] == 1 else None,
        "loss_last": statistics.fmean(losses) if losses else None,
        "steps": last["step"],
        "tokens_per_second": statistics.fmean(columns["tokens"]) / seconds,
        "step_time": seconds,
        "tflops_per_device": causal / seconds / devices / 1e12,
        "mfu_causal": None if peak is None else causal / seconds / devices / peak,
        "mfu_full": None if peak is None else full / seconds / devices / peak,
        **{name: statistics.fmean(columns[name]) if columns[name] else None for name in EVENNESS},
        "devices": devices,
        "peak_tflops_per_device": None if peak is None else peak / 1e12,
        **facts,
    }
