"""Faults of the Pallas kernels of the causal convolution."""

from faults import Fault

CONV = "tests/kernels/test_conv_pallas.py"
BLOCKS, DOCUMENTS, PACKED = (f"{CONV} -k '{words}'" for words in ("many_blocks", "padding_holds", "packed"))

FAULTS = (
    Fault(
        "pallas conv: a token sees other documents",
        "pallas_conv:Visit.shifted",
        "jnp.where($seen >= abs($by), $x, 0.0)",
        "$x",
        DOCUMENTS,
    ),
    Fault(
        "pallas conv: a token sees one input less of its document",
        "pallas_conv:Visit.shifted",
        "jnp.where($seen >= abs($by), $x, 0.0)",
        "jnp.where($seen > abs($by), $x, 0.0)",
        DOCUMENTS,
    ),
    Fault(
        "pallas conv: a gradient is masked by what its own token sees",
        "pallas_conv:Visit.shifted",
        "$first + max($by, 0)",
        "$first",
        DOCUMENTS,
    ),
    Fault(
        "pallas conv: padding stays between the tokens of a document",
        "pallas_conv_calls:of_rows",
        "jnp.any($follows & ~$before_it, axis=2)",
        "jnp.any($follows & $before_it & ~$before_it, axis=2)",
        DOCUMENTS,
    ),
    Fault(
        "pallas conv: tokens that were moved together stay there",
        "pallas_conv:Visit.store",
        "product($move.astype($ref.dtype), 0, $x, 0)",
        "product($move.astype($ref.dtype), 1, $x, 0)",
        DOCUMENTS,
    ),
    Fault(
        "pallas conv: a visit clears the tokens of another",
        "pallas_conv:Visit.store",
        "jnp.where(self.fresh, 0.0, $others)",
        "jnp.where(self.fresh, 0.0, $others * 0)",
        PACKED,
    ),
    Fault(
        "pallas conv: what leaves in a final state has no gradient",
        "pallas_conv:conv_bwd_kernel",
        "$leaves >= 0",
        "$leaves > 10**6",
        BLOCKS,
    ),
    Fault(
        "pallas conv: gradients of taps are those of the last visit",
        "pallas_conv:conv_bwd_kernel",
        "(pl.program_id(1) == 0) & (pl.program_id(2) == 0)",
        "pl.program_id(1) >= 0",
        BLOCKS,
    ),
    Fault(
        "pallas conv: what later blocks owe is left out",
        "pallas_conv_calls:backward",
        "jnp.where($visits.after < 0, NOTHING, $visits.after)",
        "jnp.full_like($visits.after, NOTHING)",
        BLOCKS,
    ),
    Fault(
        "pallas conv: an entry of a state has the gradient of an output",
        "pallas_conv_calls:backward",
        "jnp.where($visits.after < 0, NOTHING, $visits.after)",
        "jnp.abs($visits.after) % 7",
        PACKED,
    ),
    Fault(
        "pallas conv: rows past the end count",
        "pallas_conv:Visit.own",
        "$p.marked or $p.tail",
        "$p.marked",
        BLOCKS,
    ),
    Fault(
        "pallas conv: a short sequence does not pass its state on",
        "pallas_conv_calls:backward",
        "$entries + $left",
        "$entries",
        "tests/kernels/test_conv_pallas.py -k 'many_blocks or packed'",
    ),
    Fault(
        "pallas conv: the state of a sequence without tokens has the gradient of another",
        "pallas_conv_calls:backward",
        'jnp.where($visits.begun[..., None, None], $d["d_entries"][..., :$F], 0)',
        '$d["d_entries"][..., :$F]',
        PACKED,
    ),
    Fault(
        "pallas conv: a block begins behind the state again",
        "pallas_conv_calls:tokens_alone",
        "jnp.where($before < 0, $of_state, $before)",
        "jnp.where($before < 99, $of_state, $before)",
        BLOCKS,
    ),
)
