"""Sets of cases that one command measures: what changes from one to the next, and nothing else."""

from __future__ import annotations

from typing import Any

from ejdist.sequence import SCHEMES, Halo

LONG_TAIL = "long_tail"
# Heads of GPT-OSS: narrow, a short window in every other layer, learned sinks in all.
NARROW = {"heads": 64, "width": 64, "sinks": 1, "window": 128}
GATHERED = {"orders": "striped", "schemes": "all_gather"}
# Where there is no window a halo is a ring.
OF_ALL_KEYS = [name for name, scheme in SCHEMES.items() if scheme is not Halo]
DOCUMENTS = ("one", "4096", LONG_TAIL)


def _of_rank(ranks: int, tokens: int, documents: str, **more: Any) -> dict[str, Any]:
    return {"rank": "worst", "ranks": ranks, "tokens": f"{tokens}", "documents": documents, **{"rounds": 3, **more}}


def _split(tokens: int, documents: str, schemes: str, **more: Any) -> dict[str, Any]:
    return {"tokens": f"{tokens}", "documents": documents, "schemes": schemes, "orders": "zigzag", "rounds": 3, **more}


def _balance(ranks: int, documents: str) -> dict[str, Any]:
    return {"rank": "all", "ranks": ranks, "tokens": f"{2**17 // ranks}", "documents": documents}


# The most wanted first: a command may have time for some.
PLANS: dict[str, list[dict[str, Any]]] = {
    "one_gpu": [
        *(_of_rank(8, tokens, documents) for tokens in (8192, 32768) for documents in DOCUMENTS),
        *(_of_rank(8, tokens, "4096", **NARROW) for tokens in (8192, 32768)),
        *(_of_rank(32, 8192, documents) for documents in DOCUMENTS),
        _of_rank(8, 8192, "4096", **{**NARROW, "window": 0, "sinks": 0}),
        _of_rank(32, 32768, "4096"),
        _of_rank(32, 32768, LONG_TAIL),
        _of_rank(32, 8192, "4096", **NARROW),
        _of_rank(32, 32768, "one", rounds=1),
    ],
    # Gathered keys beside the ring, in the order that packed rows take.
    "gathered": [
        *(_of_rank(8, tokens, "4096", **GATHERED) for tokens in (8192, 32768)),
        _of_rank(8, 8192, "one", schemes="all_gather"),
        *(_of_rank(8, tokens, LONG_TAIL, **GATHERED) for tokens in (8192, 32768)),
        _of_rank(8, 2048, "4096", **GATHERED),
        _of_rank(32, 8192, "4096", **GATHERED),
        _of_rank(8, 8192, "4096", **{**GATHERED, "schemes": "ring"}),
        _of_rank(8, 8192, "4096", **GATHERED, head_groups=1),
        _of_rank(8, 32768, "4096", **{**GATHERED, "schemes": "ring"}),
        _of_rank(8, 32768, "one", schemes="all_gather", rounds=1),
        _of_rank(8, 8192, "4096", **GATHERED, width=64, heads=64),
    ],
    # Those of ranks_h200.json; part=NUMBER/COUNT of them in one command, so that several can compile side by side.
    "ranks": [
        *(_of_rank(8, tokens, "4096", **GATHERED) for tokens in (8192, 32768, 2048)),
        _of_rank(8, 8192, "4096", **{**GATHERED, "schemes": "ring"}),
        _of_rank(8, 8192, "one", schemes="ring"),
        _of_rank(8, 8192, "one", schemes="all_gather"),
        _of_rank(8, 8192, "4096", **GATHERED, width=64, heads=64),
        *(_of_rank(8, tokens, "4096", **NARROW, schemes="halo", orders="striped") for tokens in (8192, 32768)),
        *(_of_rank(32, 8192, documents, **GATHERED) for documents in ("4096", LONG_TAIL)),
        _of_rank(8, 8192, LONG_TAIL, **GATHERED),
        _of_rank(32, 8192, "one", schemes="ring"),
        _of_rank(8, 32768, "one", schemes="ring", rounds=1),
    ],
    "several_gpus": [
        *(_split(tokens, documents, "ring") for tokens in (8192, 32768) for documents in DOCUMENTS),
        *(_split(tokens, "4096", ",".join(OF_ALL_KEYS[1:])) for tokens in (32768, 8192)),  # all but the ring
        _split(32768, "4096", "ring,halo", **NARROW),
        _split(8192, "none", "ring"),
        _split(8192, LONG_TAIL, "ring", orders="contiguous"),
    ],
    "balance": [_balance(ranks, documents) for ranks in (8, 32, 64) for documents in (*DOCUMENTS, "mixture")],
}
