"""`python -m benchmarks.dealing [documents=4096,long_tail,mixture] [tokens=8192,32768,131072] [batches=N] [out=FILE]`: how even
the rows of a step are over groups of devices and microbatches, as they are drawn and as `data.balance` deals them.

Documents are a mean length (lognormal) or a file of `documents/`. `data.packing=cut` and `even` put them into rows of `tokens`
tokens, in the order of a run. In each microbatch all groups wait for the busiest: its work, summed over
microbatches and batches, over the mean. Attention alone, beside what no dealing of whole rows comes below, and the whole step
of an 8B model, by its FLOPs. `attention of cut`: that of all rows over that of the same documents cut, which grows as fewer are
cut. Milliseconds are those of a host for a batch: squares of all its rows, and dealing.

The second table has the documents of a window of rows that are cut, and the milliseconds in which a host packs one: `even`, and
`whole` (best fit) beside it.
"""

from __future__ import annotations

import functools
import json
import sys
import tempfile
import time
import timeit
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
PACKINGS = ("cut", "even")
SIZES = ((8, 1, 4), (8, 4, 1), (8, 8, 1), (8, 4, 4), (64, 8, 1), (64, 4, 4))


@functools.lru_cache(maxsize=1)
def corpus_of(words: str, tokens: int) -> Any:
    """Returns a corpus of `tokens` tokens, or some more, in documents of those lengths."""
    from ejdist.documents import documents_of
    from ejdist.training.data.corpus import Corpus
    from ejdist.training.data.tokenizer import ByteTokenizer

    file = HERE / "documents" / f"{words}.txt"
    sizes = np.asarray(documents_of(words if words.isdigit() else str(file)).lengths)
    lengths = np.random.default_rng(0).choice(sizes, -(-tokens // int(sizes.mean())))
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    while offsets[-1] < tokens:
        offsets = np.concatenate([offsets, offsets[-1] + offsets[1:]])
    # Lengths are all that is read: the tokens take no memory.
    return Corpus(np.broadcast_to(np.uint32(0), int(offsets[-1])), offsets, "drawn", ByteTokenizer())


def rows_of(packing: str, words: str, tokens: int, count: int) -> Any:
    """Returns rows of `count` times `tokens` tokens, or some more, of documents of those lengths."""
    from ejdist.training.data.even_packing import Even
    from ejdist.training.data.packing import Packing
    from ejdist.training.data.shard_packing import CorpusShard

    corpus = corpus_of(words, count * tokens)
    if packing == "cut":
        return Packing(corpus, tokens, 0)
    with tempfile.TemporaryDirectory() as folder:
        rows = Even([CorpusShard(corpus)], tokens, 0, corpus.fingerprint, Path(folder))
        rows.squares([0])  # read before the folder goes
    return rows


def measured(words: str, tokens: int, sizes: tuple[int, int, int], batches: int, linear: float) -> list[dict[str, Any]]:
    """Returns the rows of the table for both packings. `linear`: work of a token without attention, in (query, key) pairs."""
    from ejdist.training.dealing import dealt, least_waited_for, waited_for

    groups, microbatches, each = sizes
    count = groups * microbatches * each
    found = []
    for packing in PACKINGS:
        rows = rows_of(packing, words, tokens, count * batches)
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
        found.append({
            "documents": words, "tokens": tokens, "groups": groups, "microbatches": microbatches, "rows": each,
            "packing": packing, "attention_drawn": sums[0] / sums[4], "attention_dealt": sums[2] / sums[4],
            "attention_least": sums[5] / sums[4], "step_drawn": sums[1] / mean, "step_dealt": sums[3] / mean,
            "attention_of_cut": sums[4], "ms": seconds / batches * 1e3,
        })  # fmt: skip
    for row in reversed(found):
        row["attention_of_cut"] /= found[0]["attention_of_cut"]
    return found


def windows(words: str, tokens: int) -> dict[str, Any]:
    """Returns a row of the second table: of five windows the median time, the least of five calls each and of this process
    alone, and the share of documents that are cut."""
    from ejdist.training.data.even_packing import even_rows
    from ejdist.training.data.whole_packing import best_fit

    rows = rows_of("even", words, tokens, 5 * 64)
    shard = rows.shards[0]
    parts = [
        np.diff(offsets) for offsets in np.array_split(shard.offsets(0, shard.num_documents + 1), rows.windows[0])[:5]
    ]
    times, divided = np.zeros((2, len(parts))), np.zeros((2, len(parts)))
    for i, lengths in enumerate(parts):
        total, order = int(lengths.sum()), np.random.default_rng(0).permutation(len(lengths))
        sizes = (lengths, order, tokens)
        calls = [functools.partial(even_rows, *sizes, -(-total // tokens)), functools.partial(best_fit, *sizes)]
        times[:, i] = [min(timeit.repeat(call, timer=time.process_time, number=1)) for call in calls]
        ends, cuts = np.cumsum(lengths), np.arange(tokens, total, tokens)
        of_cut = np.unique(np.searchsorted(ends, cuts)[~np.isin(cuts, ends)])
        pieces = np.bincount([piece.document for row in calls[0]() for piece in row])
        divided[:, i] = (pieces > 1).mean(), len(of_cut) / len(lengths)
    (even_ms, whole_ms), (even, cut) = np.median(times, 1) * 1e3, divided.mean(1)
    return {
        "documents": words, "tokens": tokens, "of_window": int(np.mean([len(x) for x in parts])), "divided_cut": cut,
        "divided_even": even, "even_ms": even_ms, "whole_ms": whole_ms,
    }  # fmt: skip


def table(results: dict[str, Any]) -> str:
    """Returns the Markdown of a result."""
    lines = [
        "| documents | tokens of a row | groups x microbatches x rows | packing | attention, drawn | dealt | at least "
        "| step, drawn | dealt | attention of cut | ms |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in results["rows"]:
        names = (
            "attention_drawn",
            "attention_dealt",
            "attention_least",
            "step_drawn",
            "step_dealt",
            "attention_of_cut",
        )
        lines.append(
            f"| {r['documents']} | {r['tokens']:,} | {r['groups']} x {r['microbatches']} x {r['rows']} | {r['packing']} | "
            f"{' | '.join(f'{r[name]:.2f}' for name in names)} | {r['ms']:.1f} |"
        )
    lines += [
        "",
        "| documents | tokens of a row | documents of a window | cut | by even | ms, even | whole |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {w['documents']} | {w['tokens']:,} | {w['of_window']:,} | {w['divided_cut']:.1%} | {w['divided_even']:.1%} | "
        f"{w['even_ms']:.1f} | {w['whole_ms']:.1f} |"
        for w in results["windows"]
    ]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code of the command."""
    from benchmarks.measure import provenance_on_cpu
    from ejdist.training.losses import trained_model
    from recipes.schema import compose

    o = read(OPTIONS, list(sys.argv[1:] if argv is None else argv))
    flops = trained_model(compose([f"model={o['model']}"])).flops
    linear = sum(part.token for part in flops) / sum(part.pair for part in flops)
    of = [(words, int(tokens)) for words in o["documents"].split(",") for tokens in o["tokens"].split(",")]
    rows = [row for one in of for sizes in SIZES for row in measured(*one, sizes, o["batches"], linear)]
    facts = {**provenance_on_cpu(), "model": o["model"], "batches": o["batches"]}
    results = {**facts, "rows": rows, "windows": [windows(*one) for one in of]}
    print(table(results))
    if o["out"]:
        Path(o["out"]).write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
