"""Which local checkpoints a run may resume from, by what all hosts have on their disks. Host 0 decides for all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ejdist.training.local_pieces import Save

_NAMED = 8  # hosts that a sentence names


def plan_of(reports: dict[int, Any], starts: Sequence[int] = ()) -> tuple[list[list[Any]], str]:
    """Returns (the saves of which every needed share is on some disk; why the newest save is not among them, "" if it is).

    A save is [step, start, state, source], newest first and one a step: `source` is the host that describes it to those that
    have nothing of it, None if there are none.

    Args:
      reports: host -> [its name, {"needs": digests of shares, "holds": [[step, start, state, digests of shares], ...]}].
      starts: the step from which each start of the run went on.
    """
    needs = {host: set(report["needs"]) for host, (_, report) in reports.items()}
    held: dict[Save, dict[int, set[str]]] = {}
    for host, (_, report) in reports.items():
        for step, start, state, shares in report["holds"]:
            held.setdefault(Save(step, start, state), {})[host] = set(shares)
    current = [save for save in held if _is_current(save, starts)]
    needed, saves, why = set[str]().union(*needs.values()), [], ""
    for save in sorted(current, reverse=True):
        shares = set[str]().union(*held[save].values())
        if needed <= shares:
            if not saves or saves[-1][0] != save.step:
                source = min(held[save]) if set(reports) - set(held[save]) else None
                saves.append([*save, source])
        elif not saves and not why:
            lacking = [host for host in sorted(needs) if not needs[host] <= shares]
            whose = f"of step {save.step} the pieces for {named(lacking)} are on no disk"
            why = whose if needed & shares else "what is there is cut for another mesh, or is of another model"
    if not held:
        why = "no host has a checkpoint there"
    elif not current:
        back = min(min(starts[save.start + 1 :]) for save in held)
        why = f"the run has gone back to step {back} since, and what is there is of later steps"
    return saves, why


def short_of(reports: dict[int, Any]) -> tuple[str | None, str]:
    """Returns (the first reason why a host cannot read, the pieces that hosts lack in words, "" if none).

    Args:
      reports: host -> [its name, [pieces that it lacks, a reason or None]].
    """
    reasons = [f"{reason} (on host {host}, {name})" for host, (name, (_, reason)) in sorted(reports.items()) if reason]
    lacking = {host: count for host, (_, (count, _)) in sorted(reports.items()) if count}
    text = f"{sum(lacking.values()):,} pieces for {named(lacking)}" if lacking else ""
    return reasons[0] if reasons else None, text


def named(hosts: Iterable[int]) -> str:
    """Returns hosts in words; a message names only some."""
    each = list(hosts)
    more = f" and {len(each) - _NAMED} more" if len(each) > _NAMED else ""
    return f"host{'s' * (len(each) > 1)} {', '.join(map(str, each[:_NAMED]))}{more}"


def _is_current(save: Save, starts: Sequence[int]) -> bool:
    """Returns whether the run has not gone back over this step since: then a machine that was away may still have it, of a past
    that the run has not."""
    return all(save.step <= start for start in starts[save.start + 1 :])
