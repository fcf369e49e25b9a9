"""Faults of paged_attention."""

from faults import Fault

PAGED_TESTS = "tests/kernels/test_paged_attention.py"

FAULTS = (
    Fault(
        "two requests write one slot",
        "ragged:_ragged",
        "_check_once($f, $requests[2].name, known($slots))",
        "(lambda *_: None)($f, $requests[2].name, known($slots))",
        "tests/kernels/test_paged_attention_functions.py -k wrong_call",
    ),
    Fault(
        "a page of another position",
        "_attend.pairs_of_step",
        "$j // $C",
        "$j // $C - 1",
        f"{PAGED_TESTS} -k loop",
    ),
    Fault(
        "unwritten slots reach the output",
        "_gathered.meant",
        "jnp.where($there[..., None, None], dequantised($x, $scale, $dtype), 0)",
        "dequantised($x, $scale, $dtype)",
        f"{PAGED_TESTS} -k no_output",
    ),
    Fault(
        "parts of a split request not rescaled",
        "_attend.step",
        "jnp.exp($m - _finite($largest)[$local])",
        "jnp.ones_like($m)",
        f"{PAGED_TESTS} -k loop",
    ),
    Fault(
        "every block of the table is computed",
        "paged_attention/xla:_tiles",
        "jnp.minimum($end, ends_at($last_sees.high, $high) + 1)",
        "jnp.full_like($end, 64)",
        f"{PAGED_TESTS} -k in_the_list",
    ),
    Fault(
        "a token without a slot is written to the last one",
        "cache:written",
        "jnp.where($slots < 0, $pages * $C, $slots)",
        "$slots",
        f"{PAGED_TESTS} -k bit_for_bit",
    ),
    Fault(
        "queries at the beginning of the keys",
        "_attend.pairs_of_step",
        "($kv_len - $count)[:, None] + $row",
        "$row",
        f"{PAGED_TESTS} -k loop",
    ),
    Fault(
        "a page that is not there is not noticed",
        "check_tables",
        "($table < 0) | ($table >= $pages)",
        "($table < 0) | ($table > $pages)",
        "tests/kernels/test_paged_attention_functions.py -k wrong_call",
    ),
)
