"""Faults of paged_attention."""

from faults import Fault

PAGED = "kernels/ops/paged_attention/xla.py"
PAGED_TESTS = "tests/kernels/test_paged_attention.py"

FAULTS = (
    Fault(
        "two requests write one slot",
        "kernels/ops/paged_attention/ragged.py",
        "    _check_once(f, requests[2].name, ",
        "    (lambda *_: None)(f, requests[2].name, ",
        "tests/kernels/test_paged_attention_functions.py -k wrong_call",
    ),
    Fault(
        "a page of another position",
        PAGED,
        "page = jnp.clip(j // C, 0",
        "page = jnp.clip(j // C - 1, 0",
        f"{PAGED_TESTS} -k loop",
    ),
    Fault(
        "unwritten slots reach the output",
        PAGED,
        "jnp.where(there[..., None, None], dequantised(x, scale, dtype), 0)",
        "dequantised(x, scale, dtype)",
        f"{PAGED_TESTS} -k no_output",
    ),
    Fault(
        "parts of a split request not rescaled",
        PAGED,
        "jnp.exp(m - _finite(largest)[local])",
        "jnp.ones_like(m)",
        f"{PAGED_TESTS} -k loop",
    ),
    Fault(
        "every block of the table is computed",
        PAGED,
        "end = jnp.minimum(end, ends_at(last_sees.high, high) + 1)\n",
        "end = jnp.full_like(end, 64)\n",
        f"{PAGED_TESTS} -k in_the_list",
    ),
    Fault(
        "a token without a slot is written to the last one",
        "kernels/ops/paged_attention/cache.py",
        "slots = jnp.where(slots < 0, pages * C, slots)",
        "slots = slots",
        f"{PAGED_TESTS} -k bit_for_bit",
    ),
    Fault(
        "queries at the beginning of the keys",
        PAGED,
        "i = (kv_len - count)[:, None] + row",
        "i = row",
        f"{PAGED_TESTS} -k loop",
    ),
    Fault(
        "a page that is not there is not noticed",
        "kernels/framework/requests.py",
        "(table >= pages)",
        "(table > pages)",
        "tests/kernels/test_paged_attention_functions.py -k wrong_call",
    ),
)
