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
        "_lines_between",
        "$begin - 1",
        "$begin",
        f"{MADE} -k jsonl",
    ),
    Fault(
        "a line that begins where a range ends is read twice",
        "_lines_between",
        "$f.tell() < $end",
        "$f.tell() <= $end",
        f"{MADE} -k jsonl",
    ),
    Fault("a text is cut inside a character", "cut_before", "$near[$at] & 192 == 128", "False", f"{MADE} -k cut"),
    Fault(
        "parts of a text begin where the one before should have ended",
        "units:_parts",
        "[cut_before($f, $place, $span.size) for $place in $places]",
        "$places",
        f"{MADE} -k parts_of_a_text",
    ),
    Fault(
        "what does not fill a batch is lost",
        "text_writing:_batches",
        "if $batch:\n    $$body",
        "if False:\n    $$body",
        MADE,
    ),
    Fault(
        "a part of a document ends it",
        "write_texts",
        "$last and $tokens > $before",
        "$tokens > $before",
        f"{MADE} -k corpus",
    ),
    Fault(
        "a document ends before its end",
        "write_texts",
        "$ends.append($tokens)",
        "$ends.append($tokens - 1)",
        f"{MADE} -k corpus",
    ),
    Fault(
        "a shard that is there twice is read twice",
        "_check_complete",
        "not $whole",
        "False",
        f"{MADE} -k twice",
    ),
    Fault(
        "a file that changed keeps its old shard",
        "_check_unchanged",
        "$file.size != $was.size or digest_of($was) != $was.digest",
        "$file.size != $was.size",
        f"{MADE} -k copy",
    ),
    Fault(
        "a copy counts as a change",
        "_check_unchanged",
        "digest_of($was) != $was.digest",
        "True",
        f"{MADE} -k copy",
    ),
    Fault(
        "a file that changes while it is read is not noticed",
        "make_shard",
        "$now and ($now.size, $now.mtime_ns) != ($span.size, $span.mtime_ns)",
        "not $now and ($now.size, $now.mtime_ns) != ($span.size, $span.mtime_ns)",
        f"{MADE} -k while_it_is_read",
    ),
    Fault(
        "shards of two tokenizers in a folder",
        "data/settings:settings_of",
        "if $wrong:\n    $$body",
        "if False:\n    $$body",
        f"{MADE} -k one_way",
    ),
    Fault(
        "the fingerprint of a corpus has its paths",
        "fingerprint_of",
        "$s['fingerprint']",
        "($s['name'], $s['fingerprint'])",
        f"{MADE} -k copy",
    ),
    Fault(
        "a host makes shards of another's part",
        "launch/tokenize:run",
        "$plan.units[$part::$parts]",
        "$plan.units[::$part + 1]",
        f"{MADE} -k parts_of_the_command",
    ),
    Fault(
        "a process that is stopped leaves what it was making",
        "workers:_work",
        "signal.signal($$args, _end)",
        "signal.signal($$args, signal.SIG_DFL)",
        f"{MADE} -k told_to_stop",
    ),
    Fault(
        "the death of a process is not told",
        "_received",
        "(EOFError, ConnectionError)",
        "KeyError",
        f"{MADE} -k is_killed",
    ),
    Fault(
        "damage is read as it is",
        "CheckedFile.read",
        "zlib.crc32($content) != self._checksums[$block]",
        "False",
        f"{READ} -k damage",
    ),
    Fault(
        "only the first block of what is read is verified",
        "CheckedFile.read",
        "range($begin // BLOCK, -(-$end // BLOCK))",
        "range($begin // BLOCK, $begin // BLOCK + 1)",
        f"{READ} -k damage",
    ),
    Fault(
        "a shard of another dataset is read",
        "Shard._files",
        "checksum_of($content) != self._facts['checksum']",
        "False",
        f"{READ} -k another_dataset",
    ),
    Fault(
        "tokens of another tokenizer",
        "open_dataset",
        "$used.fingerprint != $own['fingerprint']",
        "False",
        f"{READ} -k told_at",
    ),
    Fault(
        "a shard that is not there", "open_dataset", "$shard.folder.name not in $there", "False", f"{READ} -k told_at"
    ),
    Fault(
        "every file stays open",
        "open_dataset",
        "functools.lru_cache(maxsize=_OPEN_FILES)",
        "functools.lru_cache(maxsize=None)",
        f"{READ} -k few_files",
    ),
    Fault(
        "targets cross documents of a shard",
        "_Shards._segment",
        "0 if $end == $document_end else 1",
        "1",
        f"{READ} -k once",
    ),
    Fault(
        "the end of a document that is longer than a row is lost",
        "best_fit",
        "$begin < $count",
        "$begin == 0",
        f"{READ} -k once",
    ),
    Fault(
        "a row of a shard is read twice",
        "Cut.row",
        "$number - int(self._ends[$shard])",
        "max(1, $number) - int(self._ends[$shard])",
        f"{READ} -k once",
    ),
    Fault(
        "every epoch has its rows in one order",
        "_Shards.__init__",
        "Shuffle($$args, $epoch)",
        "Shuffle($$args, 0)",
        f"{READ} -k pure_function",
    ),
    Fault(
        "documents keep their neighbours",
        "_Shards._order",
        "$rng.permutation(len($window.offsets) - 1)",
        "np.arange(len($window.offsets) - 1)",
        f"{READ} -k pure_function",
    ),
    Fault("best fit that leaves more room", "best_fit", "($count, -1)", "($count + 1, -1)", f"{READ} -k best_fit"),
    Fault(
        "a number comes twice in a shuffle",
        "Shuffle.__getitem__",
        "$x < self.n",
        "$x <= self.n",
        f"{READ} -k every_number",
    ),
    Fault(
        "a source of a mixture skips rows",
        "MixedRows.place",
        "$block * self.counts[$part]",
        "$block * BLOCK",
        f"{READ} -k shares",
    ),
    Fault(
        "a mixture is the same for every seed",
        "MixedRows._make_block",
        "Shuffle(BLOCK, self.seed, 'mixture', $block)",
        "Shuffle(BLOCK, 'mixture', $block)",
        f"{READ} -k shares",
    ),
    Fault(
        "rows of another order after a stop",
        "Data.changes",
        "$cursor.get($n) != $now.get($n)",
        "$n != 'order' and $cursor.get($n) != $now.get($n)",
        f"{READ} -k order_of_rows",
    ),
)
