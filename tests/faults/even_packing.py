"""Faults of full rows of even work."""

from faults import Fault

TESTS = "tests/test_even_packing.py"

FAULTS = (
    Fault(
        "the shortest documents are placed first",
        "even_rows",
        "$rest.sort(key=lambda $entry: -$entry[0])",
        "$rest.sort(key=lambda $entry: $entry[0])",
        f"{TESTS} -k 'least or more_even'",
    ),
    Fault(
        "a document goes where there is the most room",
        "even_rows",
        "$squares[$row] += $need * $need",
        "$squares[$row] += $need",
        f"{TESTS} -k least",
    ),
    Fault(
        "a row that had no room for one document is left out for all",
        "even_rows",
        "while $narrow and -$narrow[0][0] >= $need: $$body",
        "",
        f"{TESTS} -k more_even",
    ),
    Fault(
        "the last row is taken for a full one",
        "even_rows",
        "$room[-1] -= $count * $length - int($lengths.sum())",
        "",
        f"{TESTS} -k every_token",
    ),
    Fault(
        "the rest of a document begins where the document does",
        "even_rows",
        "$rest.append(($end - $begin, $rank, Piece($document, $begin, $end - $begin)))",
        "$rest.append(($end - $begin, $rank, Piece($document, 0, $end - $begin)))",
        f"{TESTS} -k every_token",
    ),
    Fault(
        "documents of a row are longest first",
        "even_rows",
        "[[$piece for $_, $piece in sorted($row)] for $row in $rows]",
        "[[$piece for $_, $piece in $row] for $row in $rows]",
        f"{TESTS} -k every_token",
    ),
    Fault(
        "a window has all of the documents at its ends",
        "Even._pack",
        "$window.offsets.clip($place.begin, $place.end)",
        "$window.offsets",
        f"{TESTS} -k range_of_rows",
    ),
    Fault(
        "a document ends with its window",
        "Even.segments",
        "self._segment($shard, int($window.offsets[$p.document + 1]), int($inside[$p.document]) + $p.begin, $p.count)",
        "self._segment($shard, int($inside[$p.document + 1]), int($inside[$p.document]) + $p.begin, $p.count)",
        f"{TESTS} -k range_of_rows",
    ),
    Fault(
        "squares are found at each start",
        "Even._kept",
        "$facts is None",
        "True",
        f"{TESTS} -k kept",
    ),
    Fault(
        "conversations are divided where rows are even",
        "_rows_of",
        "$packing in ('cut', 'even') and $corpus.chats is not None",
        "$packing == 'cut' and $corpus.chats is not None",
        "tests/test_chats_wrong.py -k wrong_key",
    ),
)
