"""`python -m benchmarks.sequence [documents=4096] [tokens=8192,32768] [heads=32] [kv_heads=8] [width=128] [window=0] [sinks=0]
[dtype=bfloat16] [schemes=ring,...] [cp=1] [outer=ring] [head_groups=0] [orders=zigzag,...] [backends=auto]
[directions=forward,backward] [ring_directions=auto] [buffer=0.5] [rank= ranks=]
[check=512] [stripe=0] [seed=0] [rounds=5] [plan=]
[part=] [budget=0] [out=FILE] [commit=]`: causal attention whose sequence is split over ranks, as a training step calls it.

documents: the mean length of documents (lognormal), `one` document, `long_tail` (a file in documents/), or a file of lengths,
one a line; a row is cut from them by the data pipeline, and segment ids go with it. `none`: no segment ids, which no training
step does. window: keys that a query sees, 0 for all. sinks=1: learned sinks. Tokens and `check` are of a device. Schemes and
orders: by default all that there are. cp: groups of ranks, over which Ulysses has the scheme `outer`; inside of one, heads are
split. head_groups: exchanged one after another; 0: as the scheme has it. ring_directions: in which keys go round, 1, 2 or auto.
buffer: of a group-cast, tokens of others that a device has room for, over its own.

Over several devices, beside every way stand three times:
one device: its kernel on so much of the same row that it has as many visible pairs as a device has of the split one, by the
backend that dispatch chooses and by the one that was asked for; its time over that of a way is the efficiency.
work: the same program in which nothing travels but segment ids, once: keys that would arrive are the device's own.
exchange: the same transfers with the attention left out. What the whole takes longer than the work is exposed.

rank=NUMBER ranks=N: what a ring, an all-gather, a halo and a group-cast compute on that rank of N, on one device, beside one
call of as much work, and of packed rows beside the whole row; and each hop of the ring alone. What would arrive is the rank's
own; of a group-cast as many passes as this rank needs are made, where a run makes as many as any does. `worst` is the rank with
the most pairs; `all` lists the pairs of all ranks in every order and times nothing.
stripe: tokens of the stripes or chunks of an order that has them; 0 for those that a recipe has by default.

plan: a set of cases, see plans.py; options that it changes are not taken from the command line. part=1/4: every fourth of them,
from the second on, for commands that run side by side. budget: seconds after which no
other case is begun.

Numbers first: a way whose result and gradients are not those of one device in float32, on `check` tokens, is not timed.
A process for each device: start as many with coordinator=HOST:PORT processes=COUNT process=NUMBER.
"""

from __future__ import annotations

import json
import time
from typing import Any

import jax

import ejdist
from benchmarks.measure import provenance
from benchmarks.options import read, recorded
from benchmarks.sequence import devices, rank
from benchmarks.sequence.calls import NO_IDS, PRODUCTS, Attention
from benchmarks.sequence.pairs import order_named
from benchmarks.sequence.plans import PLANS
from benchmarks.sequence.rows import Rows, table
from ejdist.order import CARRIED, NAMES
from ejdist.sequence import SCHEMES
from ejdist.sequence.group_cast import BUFFER

__all__ = ["main", "table"]

FIXED = [name for name in NAMES if name not in CARRIED]  # the orders that are measured where none is named

OPTIONS = {
    "documents": "4096", "tokens": "8192,32768", "heads": 32, "kv_heads": 8, "width": 128, "window": 0, "sinks": 0,
    "dtype": "bfloat16", "schemes": ",".join(SCHEMES), "cp": 1, "outer": "ring",
    "head_groups": 0, "orders": ",".join(FIXED), "backends": "auto",
    "directions": "forward,backward", "rank": "", "ranks": 0, "check": 512, "stripe": 0, "seed": 0, "rounds": 5,
    "plan": "", "part": "", "budget": 0, "ring_directions": "auto", "buffer": BUFFER,
    "out": "", "coordinator": "", "processes": 1, "process": 0, "commit": "",
}  # fmt: skip
CHOICES = {"schemes": SCHEMES, "orders": NAMES, "directions": PRODUCTS}


def check(o: dict[str, Any]) -> None:
    """Raises ValueError naming the option that is wrong, and the remedy."""
    for name, known in CHOICES.items():
        wrong = [word for word in o[name].split(",") if word not in known]
        if wrong:
            raise ValueError(f"{name} = {o[name]!r}: {wrong[0]!r} is unknown; use {', '.join(known)}, joined by commas")
    if any(not word.isdigit() or int(word) < 1 for word in o["tokens"].split(",")):
        raise ValueError(f"tokens = {o['tokens']!r} must be tokens of a device, such as 8192,32768")
    for name, least in (
        ("heads", 1),
        ("kv_heads", 1),
        ("width", 1),
        ("window", 0),
        ("check", 1),
        ("cp", 1),
        ("head_groups", 0),
        ("stripe", 0),
        ("rounds", 1),
        ("seed", 0),
    ):
        if o[name] < least:
            raise ValueError(f"{name} = {o[name]} must be at least {least}")
    if o["ring_directions"] not in ("1", "2", "auto"):
        raise ValueError(f"ring_directions = {o['ring_directions']!r} is unknown; use 1, 2, or auto")
    if not o["buffer"] > 0:
        raise ValueError(
            f"buffer = {o['buffer']} must be above 0: the tokens of others that a device has room for, over its own"
        )
    if o["outer"] not in SCHEMES:
        raise ValueError(f"outer = {o['outer']!r} is unknown; use {', '.join(SCHEMES)}")
    if o["heads"] % o["kv_heads"]:
        raise ValueError(f"heads = {o['heads']} must be a multiple of kv_heads = {o['kv_heads']}")
    if o["sinks"] not in (0, 1):
        raise ValueError(f"sinks = {o['sinks']} must be 1, learned sinks, or 0, none")
    if bool(o["rank"]) != bool(o["ranks"]):
        raise ValueError("rank and ranks belong together: rank=3 ranks=8, rank=worst ranks=8 or rank=all ranks=8")
    if o["rank"] and o["ranks"] < 2:
        raise ValueError(f"ranks = {o['ranks']} must be at least 2, the ranks of the ring that rank is one of")
    if o["rank"]:
        rank.schemes_of(o)
    for tokens in o["tokens"].split(","):
        for name in o["orders"].split(",") if o["ranks"] else ():
            order_named(name, o["ranks"], int(tokens) * o["ranks"], o["stripe"]).check(int(tokens) * o["ranks"])


def cases(o: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the options of each case.

    Raises:
      ValueError: there is no plan of that name.
    """
    if not o["plan"]:
        if o["part"]:
            raise ValueError(f"part = {o['part']!r} is of the cases of a plan: name one, plan={', '.join(PLANS)}")
        return [o]
    if o["plan"] not in PLANS:
        raise ValueError(f"plan = {o['plan']!r} is unknown; use {', '.join(PLANS)}")
    first, _, count = o["part"].partition("/")
    if o["part"] and not (first.isdigit() and count.isdigit() and int(first) < int(count)):
        raise ValueError(f"part = {o['part']!r} must be NUMBER/COUNT, counted from 0, such as 1/4")
    chosen = PLANS[o["plan"]][int(first or 0) :: int(count or 1)]
    return [{**o, "orders": "zigzag", **changes} for changes in chosen]


def main(argv: list[str]) -> None:
    o = read(OPTIONS, argv)
    todo = cases(o)
    for case in todo:
        check(case)
    if o["coordinator"]:
        jax.distributed.initialize(o["coordinator"], o["processes"], o["process"])
    first = jax.process_index() == 0
    rows, start = Rows(lambda text: print(text, flush=True) if first else None), time.perf_counter()
    alone = all(case["rank"] for case in todo)
    mesh = None if alone else ejdist.make_mesh(cp=o["cp"], sp=-1)
    kind = jax.devices()[0].device_kind
    facts = {
        "device": kind,
        "ranks": 1 if mesh is None else mesh.size,
        "processes": jax.process_count(),
        "options": recorded(o),
        **provenance(o["commit"]),
    }
    for number, case in enumerate(todo):
        if o["budget"] and time.perf_counter() - start > o["budget"]:
            left = len(todo) - number
            rows.say(f"{left} of {len(todo)} cases are not measured: {o['budget']} s are over, see budget")
            facts["left_out"] = todo[number:]
            break
        call = Attention(
            case["heads"], case["kv_heads"], case["width"], case["dtype"], case["window"], bool(case["sinks"]),
            packed=case["documents"] != NO_IDS,
        )  # fmt: skip
        for tokens in map(int, case["tokens"].split(",")):
            if case["rank"]:
                rank.measure(case, call, tokens, rows)
            else:
                devices.measure(mesh, case, call, tokens, rows)
            keep(o["out"] if first else "", facts, rows)
    keep(o["out"] if first else "", facts, rows)
    where = "one device" if mesh is None else f"{mesh.size} x {kind}, {jax.process_count()} processes"
    rows.say(f"\n{where}, {time.perf_counter() - start:.0f} s\n\n{table(rows.rows)}")


def keep(path: str, facts: dict[str, Any], rows: Rows) -> None:
    """Writes what was measured so far, so that it is not lost with what comes after."""
    if path:
        with open(path, "w") as file:
            json.dump({**facts, "rows": rows.rows}, file, indent=1)
