"""Ends a command whose steps do not end: every host writes the stack of every thread, says who is behind, and leaves.

A collective that one host does not come to waits for ever, and Python with it. A thread looks how long ago the last step was
made, and puts up where its host is, so that the others can say who is not where they are.
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
from ejdist.cluster.hosts import Hosts, post, posted, tell_others

_EVERY = 5.0  # seconds between two looks
_WHERE = "where a host is"


class Where(Protocol):
    """What the loop says of itself: `ejdist.training.pace.Pace`."""

    step: int
    doing: str
    ended: float
    made: int


@contextlib.contextmanager
def ending_hangs(where: Where, hosts: Hosts, seconds: float, saves: str) -> Iterator[None]:
    """While steps are made: ends the process, with the exit code of a lost host, if none has ended for so long. Only in a
    command, which has called `ejdist.cluster.ending.listen`.

    Args:
      seconds: 0: never. The first step, in which libraries connect, and a save have `hosts.limit` more.
      saves: what `where.doing` says in a save.
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
    where: Where, hosts: Hosts, seconds: float, saves: str, every: float, code: int, ended: threading.Event
) -> None:
    signs = itertools.count()

    def say_where() -> None:
        if hosts.count > 1:
            with contextlib.suppress(Exception):  # the coordinator may be what hangs
                post(_WHERE, [where.step, where.doing, next(signs)])

    def overdue() -> bool:
        more = hosts.limit if where.doing == saves or where.made == 0 else 0.0
        return time.monotonic() - where.ended > seconds + more

    while not ended.wait(every):
        say_where()
        if overdue():
            break
    else:
        return
    with finding_out():
        _end(where, hosts, seconds, every, code, ended, say_where)


def _end(
    where: Where,
    hosts: Hosts,
    seconds: float,
    every: float,
    code: int,
    ended: threading.Event,
    say_where: Callable[[], None],
) -> None:
    """Ends this process, with what holds it up, unless a step ends all the same."""
    faulthandler.dump_traceback(all_threads=True)
    told = f"no step has ended for {time.monotonic() - where.ended:.0f} s (guards.hang_seconds = {seconds:g})"
    tell_others(told)  # first of all: this host may be the only one that notices
    looks = []
    for _ in range(3):  # the others look too, and this host still lives
        with contextlib.suppress(Exception):
            looks.append(posted(_WHERE) if hosts.count > 1 else {})
        ended.wait(every)
        say_where()
    if hosts.count > 1 and len(looks) > 1:
        who = behind(looks[0], looks[-1])
    else:
        who = f"step {where.step} was the last, and this host is {where.doing}"
    if hosts.index == 0:
        ended.wait(2 * every)  # with it the coordinator goes, through which the others look
    if not ended.is_set():
        leave(
            f"error: {told}: {who}. The stack of every thread of this host is above; the same command, started on all hosts, "
            "goes on from the last checkpoint",
            code,
        )


def behind(first: dict[int, Any], later: dict[int, Any]) -> str:
    """Returns who holds up the others, from two looks at what they put up: host -> [name, [step, doing, signs]]."""
    if not later:
        return "no host says where it is"
    steps = {host: said[0] for host, (_, said) in later.items()}
    most, least = max(steps.values()), min(steps.values())

    def told(hosts: list[int], what: str) -> str:
        named = ", ".join(f"host {h} ({later[h][0]})" for h in hosts[:8])
        return f"held up by {named}" + (f" and {len(hosts) - 8} more" if len(hosts) > 8 else "") + f", {what}"

    silent = [h for h, (_, said) in later.items() if h in first and said[2] == first[h][1][2]]
    late = [h for h, step in steps.items() if step < most]
    found = [told(silent, "with no sign of life")] if silent else []
    if late:
        doing = "; ".join(sorted({later[h][1][1] for h in late}))
        found.append(told(late, f"behind: at step {least} where others are at {most}, {doing}"))
    if not found:
        doing = {h: said[1] for h, (_, said) in later.items()}
        kinds = sorted(set(doing.values()))
        odd = min(kinds, key=lambda kind: sum(d == kind for d in doing.values()))
        if len(kinds) > 1:
            found.append(told([h for h, d in doing.items() if d == odd], f"{odd}, and others are not"))
        else:
            found.append(f"all hosts have handed over step {most} and are {kinds[0]}: a device or the network hangs")
    return "; ".join(found)
