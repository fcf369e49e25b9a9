"""Faults of how text becomes shards and shards become batches."""

from faults import Fault

HERE = "ejdist/training/data"
SOURCES, UNITS, TOKENIZING, WORKERS = (f"{HERE}/{name}.py" for name in ("sources", "units", "tokenizing", "workers"))
DATASET, PACKING, MIXTURE, SHUFFLE = (
    f"{HERE}/{name}.py" for name in ("dataset", "shard_packing", "mixture", "shuffle")
)
MADE, READ = "tests/test_tokenize.py", "tests/test_dataset.py"

FAULTS = (
    Fault(
        "a line that begins where a range does is lost",
        SOURCES,
        "f.seek(begin - 1)",
        "f.seek(begin)",
        f"{MADE} -k jsonl",
    ),
    Fault(
        "a line that begins where a range ends is read twice",
        SOURCES,
        "f.tell() < end",
        "f.tell() <= end",
        f"{MADE} -k jsonl",
    ),
    Fault("a text is cut inside a character", UNITS, "near[at] & 0xC0 == 0x80", "False", f"{MADE} -k cut"),
    Fault(
        "parts of a text begin where the one before should have ended",
        UNITS,
        "cuts = [cut_before(f, place, span.size) for place in places]",
        "cuts = places",
        f"{MADE} -k parts_of_a_text",
    ),
    Fault(
        "what does not fill a batch is lost",
        TOKENIZING,
        "    if batch:\n        yield",
        "    if False:\n        yield",
        MADE,
    ),
    Fault(
        "a part of a document ends it",
        TOKENIZING,
        "                    if last:",
        "                    if True:",
        f"{MADE} -k corpus",
    ),
    Fault(
        "a document ends before its end",
        TOKENIZING,
        "ends.append(tokens)",
        "ends.append(tokens - 1)",
        f"{MADE} -k corpus",
    ),
    Fault(
        "a shard that is there twice is read twice",
        TOKENIZING,
        "        if not whole:",
        "        if False:",
        f"{MADE} -k twice",
    ),
    Fault(
        "a file that changed keeps its old shard",
        TOKENIZING,
        "if file.size != was.size or digest_of(was) != was.digest:",
        "if file.size != was.size:",
        f"{MADE} -k copy",
    ),
    Fault("a copy counts as a change", TOKENIZING, "digest_of(was) != was.digest", "True", f"{MADE} -k copy"),
    Fault(
        "a file that changes while it is read is not noticed",
        TOKENIZING,
        "if now and (now.size, now.mtime_ns)",
        "if not now and (now.size, now.mtime_ns)",
        f"{MADE} -k while_it_is_read",
    ),
    Fault("shards of two tokenizers in a folder", TOKENIZING, "    if wrong:", "    if False:", f"{MADE} -k one_way"),
    Fault(
        "the fingerprint of a corpus has its paths",
        DATASET,
        '[s["fingerprint"] for s in shards]',
        '[(s["name"], s["fingerprint"]) for s in shards]',
        f"{MADE} -k copy",
    ),
    Fault(
        "a host makes shards of another's part",
        "launch/tokenize.py",
        "plan.units[part::parts]",
        "plan.units[:: part + 1]",
        f"{MADE} -k parts_of_the_command",
    ),
    Fault(
        "a process that is stopped leaves what it was making",
        WORKERS,
        "signal.signal(signal.SIGTERM, _end)",
        "signal.signal(signal.SIGTERM, signal.SIG_DFL)",
        f"{MADE} -k told_to_stop",
    ),
    Fault(
        "the death of a process is not told",
        WORKERS,
        "except (EOFError, ConnectionError):\n        worker.join()",
        "except KeyError:\n        worker.join()",
        f"{MADE} -k is_killed",
    ),
    Fault(
        "damage is read as it is",
        DATASET,
        "if zlib.crc32(content) != self._checksums[block]:",
        "if False:",
        f"{READ} -k damage",
    ),
    Fault(
        "only the first block of what is read is verified",
        DATASET,
        "range(begin // BLOCK, -(-end // BLOCK))",
        "range(begin // BLOCK, begin // BLOCK + 1)",
        f"{READ} -k damage",
    ),
    Fault(
        "a shard of another dataset is read",
        DATASET,
        'checksum_of(content) != self._facts["checksum"]',
        "False",
        f"{READ} -k another_dataset",
    ),
    Fault(
        "tokens of another tokenizer", DATASET, 'used.fingerprint != own["fingerprint"]', "False", f"{READ} -k told_at"
    ),
    Fault(
        "a shard that is not there", DATASET, "if shard.folder.name not in there:", "if False:", f"{READ} -k told_at"
    ),
    Fault("every file stays open", DATASET, "maxsize=_OPEN_FILES", "maxsize=None", f"{READ} -k few_files"),
    Fault(
        "targets cross documents of a shard",
        PACKING,
        "more = 0 if begin + count == document_end else 1",
        "more = 1",
        f"{READ} -k once",
    ),
    Fault(
        "the end of a document that is longer than a row is lost",
        PACKING,
        "if begin < count:",
        "if begin == 0:",
        f"{READ} -k once",
    ),
    Fault(
        "a row of a shard is read twice",
        PACKING,
        "place = (number - int(self._ends[shard])",
        "place = (max(1, number) - int(self._ends[shard])",
        f"{READ} -k once",
    ),
    Fault(
        "every epoch has its rows in one order",
        PACKING,
        "Shuffle(self.rows_per_epoch, seed, epoch)",
        "Shuffle(self.rows_per_epoch, seed, 0)",
        f"{READ} -k pure_function",
    ),
    Fault(
        "documents keep their neighbours",
        PACKING,
        "return rng.permutation(len(window.offsets) - 1)",
        "return np.arange(len(window.offsets) - 1)",
        f"{READ} -k pure_function",
    ),
    Fault("best fit that leaves more room", PACKING, "(count, -1)", "(count + 1, -1)", f"{READ} -k best_fit"),
    Fault("a number comes twice in a shuffle", SHUFFLE, "if x < self.n:", "if x <= self.n:", f"{READ} -k every_number"),
    Fault(
        "a source of a mixture skips rows",
        MIXTURE,
        "block * self.counts[part] + within",
        "block * BLOCK + within",
        f"{READ} -k shares",
    ),
    Fault(
        "a mixture is the same for every seed",
        MIXTURE,
        'Shuffle(BLOCK, seed, "mixture", block)',
        'Shuffle(BLOCK, "mixture", block)',
        f"{READ} -k shares",
    ),
    Fault(
        "rows of another order after a stop",
        f"{HERE}/__init__.py",
        '            "order": "data.packing (how rows follow from the documents)",\n',
        "",
        f"{READ} -k order_of_rows",
    ),
)
