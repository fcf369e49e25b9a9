"""Sets of cases that one command measures: what changes from one to the next, and nothing else."""

from __future__ import annotations

from typing import Any

from ejdist.sequence import SCHEMES

LONG_TAIL = "benchmarks/documents/long_tail.txt"
# Heads of GPT-OSS: narrow, a short window in every other layer, learned sinks in all.
NARROW = {"heads": 64, "width": 64, "sinks": 1, "window": 128}
DOCUMENTS = ("one", "4096", LONG_TAIL)

_RANK: dict[str, Any] = {"rank": "worst", "rounds": 3}
_SHORT = [{**_RANK, "ranks": n, "tokens": "8192", "documents": d} for n in (8, 32) for d in DOCUMENTS]
_LONG = [{**_RANK, "ranks": 8, "tokens": "32768", "documents": d} for d in DOCUMENTS]

PLANS: dict[str, list[dict[str, Any]]] = {
    "one_gpu": [
        *_SHORT,
        *_LONG,
        *({**_RANK, **NARROW, "ranks": n, "tokens": "8192", "documents": "4096"} for n in (8, 32)),
        {**_RANK, **NARROW, "ranks": 8, "tokens": "32768", "documents": "4096"},
        {**_RANK, "heads": 64, "width": 64, "ranks": 8, "tokens": "8192", "documents": "4096"},
        {**_RANK, "ranks": 32, "tokens": "32768", "documents": "4096"},
        {**_RANK, "ranks": 32, "tokens": "32768", "documents": LONG_TAIL},
        {**_RANK, "ranks": 32, "tokens": "32768", "documents": "one", "rounds": 1},
    ],
    "several_gpus": [
        *(
            {"tokens": tokens, "documents": documents, "orders": "zigzag", "schemes": ",".join(SCHEMES), "rounds": 3}
            for tokens in ("8192", "32768")
            for documents in ("4096", "one")
        ),
        {"tokens": "8192", "documents": LONG_TAIL, "orders": "zigzag,contiguous", "schemes": "ring", "rounds": 3},
        {**NARROW, "tokens": "32768", "documents": "4096", "orders": "zigzag", "schemes": "ring", "rounds": 3},
        {"tokens": "8192", "documents": "none", "orders": "zigzag", "schemes": "ring", "rounds": 3},
    ],
}
