"""Faults of key ranges, of the tiles that follow from them, and of what counts by them."""

from faults import Fault

MASKS = "kernels/engines/attention/masks.py"
RANGES = "kernels/engines/attention/ranges.py"
TILES = "kernels/engines/attention/tiles.py"
PAIRS = "kernels/engines/attention/pairs.py"
SCHEDULE = "ejdist/sequence/schedule.py"
TESTS = "tests/test_ranges.py"

FAULTS = (
    Fault(
        "two rules: the looser end holds",
        RANGES,
        "else min(a.offset, b.offset)",
        "else max(a.offset, b.offset)",
        TESTS,
    ),
    Fault(
        "two rules of which one is an array: the looser end holds",
        RANGES,
        "xp.minimum(a, b)",
        "xp.maximum(a, b)",
        TESTS,
    ),
    Fault("a prefix hides what is behind it", RANGES, ".maximum(q, prefix - 1)", ".minimum(q, prefix - 1)", TESTS),
    Fault("a prefix is one key longer", RANGES, "q, prefix - 1)", "q, prefix)", "tests/test_masks.py -k visible"),
    Fault(
        "a chunk begins where the query is",
        RANGES,
        "start = q // mask.chunk_size * mask.chunk_size",
        "start = q",
        TESTS,
    ),
    Fault(
        "an array of ends is one edge",
        RANGES,
        "if (offset == offset[0]).all()",
        "if (offset == offset[0]).any()",
        TESTS,
    ),
    Fault(
        "an edge that stands still moves",
        RANGES,
        "q + end.offset if end.moves else",
        "q + end.offset if True else",
        f"{TESTS} -k gap",
    ),
    Fault(
        "a gap is one key shorter in a pair",
        RANGES,
        "(j > at(keys.gap_high))",
        "(j >= at(keys.gap_high))",
        f"{TESTS} -k gap",
    ),
    Fault(
        "a tile in a gap is full",
        TILES,
        "every &= (last < low) | (first > high) | (high < low)",
        "every &= True",
        f"{TESTS} -k gap",
    ),
    Fault("a tile beside a gap is skipped", TILES, "(first < low_most)", "(first < low)", f"{TESTS} -k gap"),
    Fault(
        "tiles of one segment and the next are full", TILES, "every & (a == d) & (c == b)", "every & (a == c)", TESTS
    ),
    Fault(
        "a tile at the end of a chunk is full", TILES, "every & (last <= least)", "every & (last <= greatest)", TESTS
    ),
    Fault("lists: what is set is not first", TILES, "xp.argsort(~some", "xp.argsort(some", TESTS),
    Fault(
        "a tile under a dense mask is full",
        TILES,
        "every if keys.dense is None else xp.zeros_like(every)",
        "every",
        f"{TESTS} -k dense",
    ),
    Fault(
        "the last tile of keys is full where it is cut",
        TILES,
        "if kv_length % kv_tile:",
        "if False:",
        "tests/kernels/test_blocks.py",
    ),
    Fault(
        "unknown positions leave the rules that compare them", MASKS, 'if "q_positions" in unknown or ', "if ", TESTS
    ),
    Fault("unknown arrays leave the rules that read them", MASKS, " or unknown & set(rule.fields):", ":", TESTS),
    Fault(
        "unknown segments leave what is counted in them",
        MASKS,
        'counted = "q_segment_ids" in unknown',
        "counted = False",
        TESTS,
    ),
    Fault("a document has keys before its first", PAIRS, "low = np.maximum(low, 0)", "low = low", TESTS),
    Fault(
        "a ring's hops are those of causal attention alone",
        SCHEDULE,
        "rules = mask.replace(",
        "rules = MaskInfo(causal=True).replace(",
        TESTS,
    ),
    Fault(
        "a sink token fewer",
        RANGES,
        "Edge(mask.sink_tokens, moves=False)",
        "Edge(mask.sink_tokens - 1, moves=False)",
        "tests/test_masks.py -k first_tokens",
    ),
    Fault(
        "a gap beside sink tokens that reaches into the window",
        RANGES,
        "gap_high=Edge(-left - 1)",
        "gap_high=Edge(-left)",
        "tests/test_masks.py -k first_tokens",
    ),
    Fault(
        "sink tokens are the first of the axis, not of each segment",
        RANGES,
        "mask.sink_tokens is not None and mask.q_sink_ends is None",
        "False",
        "tests/test_masks.py -k first_tokens",
    ),
    Fault(
        "sink tokens of a short segment end in the next one",
        RANGES,
        "own & (index < k.shape[1])",
        "index < k.shape[1]",
        "tests/test_masks.py -k first_tokens",
    ),
    Fault(
        "sink tokens are dropped where masks are combined",
        MASKS,
        'merged["sink_tokens"] = b if a is None else a',
        'merged["sink_tokens"] = a',
        "tests/test_masks.py -k first_tokens",
    ),
    Fault(
        "sink tokens without a window are not refused",
        "kernels/ops/flash_attention/functions.py",
        "if mask.sink_tokens is not None and mask.window is None:",
        "if False:",
        "tests/test_masks.py -k first_tokens",
    ),
    Fault(
        "pairs of a gap are counted",
        PAIRS,
        " - between(np.maximum(low, gap_low), np.minimum(high, gap_high))",
        "",
        TESTS,
    ),
    Fault("pairs of a gap are counted in training", PAIRS, " - np.maximum(hidden, 0)", "", TESTS),
    Fault(
        "Triton: a gap is one key shorter",
        "kernels/engines/attention/triton_parts.py",
        "(k_at > _end(O.GAP_HIGH",
        "(k_at >= _end(O.GAP_HIGH",
        "tests/test_ops.py -k flash_attention-sink_window-float32-triton",
    ),
    Fault(
        "Pallas: a gap is one key shorter",
        "kernels/ops/flash_attention/pallas_tpu.py",
        "(j > ends_at(gap_high, i))",
        "(j >= ends_at(gap_high, i))",
        "tests/test_ops.py -k flash_attention-sink_window-float32-pallas",
    ),
    Fault(
        "XLA: the gap's ends are those of the first queries",
        "kernels/ops/flash_attention/xla.py",
        "if n in KeyRange._fields}",
        'if n in KeyRange._fields and n != "gap_low"}',
        "tests/test_sequence.py -k 'numbers_of_one_device and packed_sink'",
    ),
    Fault(
        "what a rank counted over all is not cut to its own",
        "ejdist/sequence/attention.py",
        "names = {*names, *whole.data_fields}",
        "names = {*names}",
        "tests/test_sequence.py -k callers_own_shard_map",
    ),
)
