"""Faults of steps of one token of native sparse attention over pages."""

from faults import Fault

STEP = "tests/test_sparse_step.py -k "

FAULTS = (
    Fault(
        "sparse step: a chunk renews the sums of its last page alone",
        "sparse_step:summed",
        "min(($T + $page - 2) // $page + 1, $tables.shape[1])",
        "1",
        f"{STEP} 'part and 4-4-1'",
    ),
    Fault(
        "sparse step: pages of other layers get the sums",
        "served:_sparse_attention",
        "summed($x, $stack, $tables, $rows)",
        "summed($x, $stack, $rows.tables, $rows)",
        f"{STEP} 'part and 4-4-1'",
    ),
    Fault(
        "sparse step: a page has one sum",
        "sparse_step:units_of",
        "$page // math.gcd($page, $block)",
        "1",
        f"{STEP} 'part and 4-16'",
    ),
    Fault(
        "sparse step: a block that has not ended has a mean",
        "sparse_step:attended",
        "$block < $length // $block_size",
        "$block <= $length // $block_size",
        f"{STEP} 'part and 4-4-1'",
    ),
    Fault(
        "sparse step: what a page was before is in the result",
        "sparse_step:attended",
        "jnp.where($ended.reshape(*$ended.shape[::3], 1, 1), $value_means, 0)",
        "$value_means",
        f"{STEP} before",
    ),
    Fault(
        "sparse step: tokens after the last are seen",
        "sparse_step:attended",
        "($best >= 0)[..., None] & ($place < $length[:, None, None])",
        "($best >= 0)[..., None] & ($place >= 0)",
        f"{STEP} 'part and 4-4-1'",
    ),
    Fault(
        "sparse step: a head chooses by its own weights",
        "sparse_step:attended",
        "jnp.mean($p, axis=2)",
        "$p[:, :, 0]",
        f"{STEP} 'part and 4-4-1'",
    ),
    Fault(
        "sparse step: blocks of several pages are one page",
        "sparse_step:_means",
        "$size // math.gcd($page, $size)",
        "1",
        f"{STEP} 'part and 8-2'",
    ),
)
