"""`python -m benchmarks.dealing [documents=4096,long_tail,mixture] [tokens=8192,32768,131072] [batches=N] [out=FILE]`: how even
the rows of a step are over groups of devices and microbatches, as they are drawn and as `data.balance` deals them.

Documents are a mean length (lognormal) or a file of `documents/`; rows of so many tokens are cut of them in the order of a run.
In each microbatch all groups wait for the busiest: its work, summed over microbatches and batches, over the mean. Attention
alone, beside what no dealing of whole rows comes below, and the whole step of an 8B model, by its FLOPs. Milliseconds are those
of a host for a batch: squares of all its rows, and dealing.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.options import read

OPTIONS = {
    "documents": "4096,long_tail,mixture",
    "tokens": "8192,32768,131072",
    "batches": 16,
    "model": "8b",
    "out": "",
}
HERE = Path(__file__).resolve().parent
# (groups of devices, microbatches, rows of a group in each)
SIZES = ((8, 1, 4), (8, 4, 1), (8, 8, 1), (8, 4, 4), (64, 8, 1), (64, 4, 4))


def rows_of(words: str, tokens: int, count: int) -> Any:
    """Returns rows of `count` times `tokens` tokens, or some more, of documents of those lengths."""
    from ejdist.documents import documents_of
    from ejdist.training.data.corpus import Corpus
    from ejdist.training.data.packing import Packing
    from ejdist.training.data.tokenizer import ByteTokenizer

    file = HERE / "documents" / f"{words}.txt"
    sizes = np.asarray(documents_of(words if words.isdigit() else str(file)).lengths)
    lengths = np.random.default_rng(0).choice(sizes, -(-count * tokens // int(sizes.mean())))
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    while offsets[-1] < count * tokens:
        offsets = np.concatenate([offsets, offsets[-1] + offsets[1:]])
    # Lengths are all that is read: the tokens take no memory.
    return Packing(
        Corpus(np.broadcast_to(np.uint32(0), int(offsets[-1])), offsets, "drawn", ByteTokenizer()), tokens, 0
    )


def measured(words: str, tokens: int, sizes: tuple[int, int, int], batches: int, linear: float) -> dict[str, Any]:
    """Returns a row of the table. `linear`: work of a token without attention, in (query, key) pairs."""
    from ejdist.training.dealing import dealt, least_waited_for, waited_for

    groups, microbatches, each = sizes
    count = groups * microbatches * each
    rows = rows_of(words, tokens, count * batches)
    sums, seconds = np.zeros(6), 0.0
    for batch in range(batches):
        began = time.perf_counter()
        weights = rows.squares(range(batch * count, (batch + 1) * count))
        place = dealt(weights, groups, microbatches)
        seconds += time.perf_counter() - began
        for i, w in enumerate((weights, weights[place])):
            sums[2 * i] += waited_for(w, groups, microbatches)
            sums[2 * i + 1] += waited_for(w / 2 + linear * tokens, groups, microbatches)
        sums[4] += weights.sum() / groups
        sums[5] += least_waited_for(weights, groups, microbatches)
    mean = sums[4] / 2 + linear * tokens * count / groups * batches
    return {
        "documents": words, "tokens": tokens, "groups": groups, "microbatches": microbatches, "rows": each,
        "attention_drawn": sums[0] / sums[4], "attention_dealt": sums[2] / sums[4], "attention_least": sums[5] / sums[4],
        "step_drawn": sums[1] / mean, "step_dealt": sums[3] / mean, "ms": seconds / batches * 1e3,
    }  # fmt: skip


def table(results: dict[str, Any]) -> str:
    """Returns the Markdown of a result."""
    lines = [
        "| documents | tokens of a row | groups x microbatches x rows | attention, drawn | dealt | at least | step, drawn "
        "| dealt | ms |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for r in results["rows"]:
        names = ("attention_drawn", "attention_dealt", "attention_least", "step_drawn", "step_dealt")
        lines.append(
            f"| {r['documents']} | {r['tokens']:,} | {r['groups']} x {r['microbatches']} x {r['rows']} | "
            f"{' | '.join(f'{r[name]:.2f}' for name in names)} | {r['ms']:.1f} |"
        )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code of the command."""
    from benchmarks.measure import provenance_on_cpu
    from ejdist.training.losses import trained_model
    from recipes.schema import compose

    o = read(OPTIONS, list(sys.argv[1:] if argv is None else argv))
    flops = trained_model(compose([f"model={o['model']}"])).flops
    linear = sum(part.token for part in flops) / sum(part.pair for part in flops)
    rows = [
        measured(words, int(tokens), sizes, o["batches"], linear)
        for words in o["documents"].split(",")
        for tokens in o["tokens"].split(",")
        for sizes in SIZES
    ]
    results = {**provenance_on_cpu(), "model": o["model"], "batches": o["batches"], "rows": rows}
    print(table(results))
    if o["out"]:
        Path(o["out"]).write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
