"""A watchdog that exits a hanging command: every host dumps the stack of every thread and says which host is behind.

A collective that one host never reaches blocks forever, and Python with it. A thread checks how long ago the last step ended,
and posts its host's position, so that the others can tell which host is behind.
"""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from ejdist.cluster.ending import codes, finding_out, leave
from ejdist.cluster.hosts import Hosts, notify_failure, post, posted

_EVERY = 5.0  # seconds between checks
_WHERE = "where a host is"


class Activity(Protocol):
    """The position of the training loop: `ejdist.training.step_timer.Pace`."""

    step: int
    doing: str
    ended: float
    made: int


@contextlib.contextmanager
def ending_hangs(where: Activity, hosts: Hosts, seconds: float, saves: str) -> Iterator[None]:
    """During training: exits the process, with the exit code of a lost host, if no step ends for `seconds`. Works only in a
    command that has called `ejdist.cluster.ending.listen`.

    Args:
      seconds: 0: never. The first step, in which libraries connect, and a save get `hosts.limit` more.
      saves: the value of `where.doing` during a save.
    """
    of_command, ended = codes(), threading.Event()
    if of_command is not None and seconds > 0:
        every = min(_EVERY, seconds / 4)
        arguments = (where, hosts, seconds, saves, every, of_command.lost, ended)
        threading.Thread(target=_watch, args=arguments, name="watchdog", daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def _watch(
    where: Activity, hosts: Hosts, seconds: float, saves: str, every: float, code: int, ended: threading.Event
) -> None:
    signs = itertools.count()

    def post_position() -> None:
        if hosts.count > 1:
            with contextlib.suppress(Exception):  # the coordinator may be what hangs
                post(_WHERE, [where.step, where.doing, next(signs)])

    def overdue() -> bool:
        more = hosts.limit if where.doing == saves or where.made == 0 else 0.0
        return time.monotonic() - where.ended > seconds + more

    while not ended.wait(every):
        post_position()
        if overdue():
            break
    else:
        return
    with finding_out():
        _end(where, hosts, seconds, every, code, ended, post_position)


def _end(
    where: Activity,
    hosts: Hosts,
    seconds: float,
    every: float,
    code: int,
    ended: threading.Event,
    post_position: Callable[[], None],
) -> None:
    """Exits this process and says what holds it up, unless a step ends in the meantime."""
    faulthandler.dump_traceback(all_threads=True)
    reason = f"no step has ended for {time.monotonic() - where.ended:.0f} s (guards.hang_seconds = {seconds:g})"
    notify_failure(reason)  # first: this host may be the only one that notices
    looks = []
    for _ in range(3):  # the others check too, so this host keeps posting
        with contextlib.suppress(Exception):
            looks.append(posted(_WHERE) if hosts.count > 1 else {})
        ended.wait(every)
        post_position()
    if hosts.count > 1 and len(looks) > 1:
        who = behind(looks[0], looks[-1])
    else:
        who = f"step {where.step} was the last, and this host is {where.doing}"
    if hosts.index == 0:
        ended.wait(2 * every)  # the coordinator, which the others read, ends with it
    if not ended.is_set():
        leave(
            f"error: {reason}: {who}. The stack of every thread of this host is above; the same command, started on all hosts, "
            "resumes from the last checkpoint",
            code,
        )


def behind(first: dict[int, Any], later: dict[int, Any]) -> str:
    """Returns which hosts hold up the others, from two readings of their posts: host -> [name, [step, doing,
    signs]]."""
    if not later:
        return "no host has posted its position"
    steps = {host: post[0] for host, (_, post) in later.items()}
    most, least = max(steps.values()), min(steps.values())

    def held_up(hosts: list[int], what: str) -> str:
        named = ", ".join(f"host {h} ({later[h][0]})" for h in hosts[:8])
        return f"held up by {named}" + (f" and {len(hosts) - 8} more" if len(hosts) > 8 else "") + f", {what}"

    silent = [h for h, (_, post) in later.items() if h in first and post[2] == first[h][1][2]]
    late = [h for h, step in steps.items() if step < most]
    reasons = [held_up(silent, "with no sign of life")] if silent else []
    if late:
        doing = "; ".join(sorted({later[h][1][1] for h in late}))
        reasons.append(held_up(late, f"behind: at step {least} while others are at {most}, {doing}"))
    if not reasons:
        doing = {h: post[1] for h, (_, post) in later.items()}
        kinds = sorted(set(doing.values()))
        odd = min(kinds, key=lambda kind: sum(d == kind for d in doing.values()))
        if len(kinds) > 1:
            reasons.append(held_up([h for h, d in doing.items() if d == odd], f"{odd}, while others are not"))
        else:
            reasons.append(f"all hosts have dispatched step {most} and are {kinds[0]}: a device or the network hangs")
    return "; ".join(reasons)
