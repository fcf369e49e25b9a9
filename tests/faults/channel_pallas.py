"""Faults of the Pallas kernels of recurrences whose channels have their own decays."""

from faults import Fault

CHANNELS = "tests/kernels/test_channel_pallas.py"
DELTA, BONUS = f"{CHANNELS} -k 'delta_rule and inf'", f"{CHANNELS} -k 'bonus_reads and inf'"
DOCUMENTS, PACKED = f"{CHANNELS} -k 'padding_holds'", f"{CHANNELS} -k 'packed_sequences'"
ROUNDED = f"{CHANNELS} -k 'either_way'"

FAULTS = (
    Fault(
        "pallas channels: a level leaves out the decays of the first half",
        "pallas_steps:decays",
        "jnp.where($late, $until, $after)",
        "jnp.where($late, $until, 0.0)",
        DELTA,
    ),
    Fault(
        "pallas channels: pairs of other levels count",
        "pallas_steps:pairs",
        "$apart == (0 if $z.middle else 1)",
        "$apart >= (0 if $z.middle else 1)",
        DELTA,
    ),
    Fault(
        "pallas channels: blocks change places wrongly",
        "pallas_steps:swapped",
        "pltpu.roll($x, $x.shape[0] - $size, 0)",
        "pltpu.roll($x, $size, 0)",
        DELTA,
    ),
    Fault(
        "pallas channels: a read with a bonus has its own decay",
        "pallas_steps:pairs",
        "$z.before if $r.before else $z.reads",
        "$z.reads",
        BONUS,
    ),
    Fault(
        "pallas channels: with a bonus a document reads the one before it",
        "pallas_steps:decays",
        "jnp.where($a < FORGETS, FORGETS, 0.0)",
        "jnp.zeros_like($a)",
        DOCUMENTS,
    ),
    Fault(
        "pallas channels: decays of padding have gradients",
        "pallas_channel:channel_reverse_kernel",
        "jnp.where($valid, $d.a, 0.0)",
        "$d.a",
        DOCUMENTS,
    ),
    Fault(
        "pallas channels: a document goes on from the one before it",
        "pallas_channel_calls:with_begins",
        "$valid if $begins is None else jnp.where($begins, kernels.RESET * $valid, $valid)",
        "$valid",
        DOCUMENTS,
    ),
    Fault(
        "pallas channels: the gradient of a solution forgets the matrix",
        "pallas_channel:_solved_bwd",
        "-product($d_right.astype($dtype), $x, NT)",
        "product($d_right.astype($dtype), $x, NT)",
        DELTA,
    ),
    Fault(
        "pallas channels: the inverse is transposed in no gradient",
        "pallas_channel:_solved_bwd",
        "product($inverse, $d.astype($dtype), TN)",
        "product($inverse, $d.astype($dtype))",
        DELTA,
    ),
    Fault(
        "pallas channels: sums are taken from their middle however wide they are",
        "pallas_channel:each_head",
        "jnp.min($sums) >= -REACH",
        "jnp.min($sums) >= -10000 * REACH",
        ROUNDED,
    ),
    Fault(
        "pallas channels: reads are not referred to the middle",
        "pallas_steps:decays",
        "jnp.exp($until - $middle), jnp.exp($before - $middle)",
        "jnp.exp($until), jnp.exp($before - $middle)",
        ROUNDED,
    ),
    Fault(
        "pallas channels: heads that share a key have one gradient",
        "pallas_channel_calls:ChannelLaunches.gradients",
        "jnp.sum($x.reshape(*$x.shape[:2], $heads, -1, $width), axis=3, dtype=jnp.float32)",
        "$x.reshape(*$x.shape[:2], $heads, -1, $width)[:, :, :, 0]",
        DELTA,
    ),
    Fault(
        "pallas channels: the gradient of a bonus is that of the last chunk",
        "pallas_channel:channel_reverse_kernel",
        "pl.program_id(2) == 0",
        "pl.program_id(2) >= 0",
        BONUS,
    ),
    Fault(
        "pallas channels: rows of a level are put back in another place",
        "pallas_steps:_between",
        "jnp.concatenate([$x[$i : $i + $size] for $i in range(0, $late.shape[0], $size) for $x in ($early, $late)])",
        "jnp.concatenate([$x[$i : $i + $size] for $i in range(0, $late.shape[0], $size) for $x in ($late, $early)])",
        DELTA,
    ),
    Fault(
        "pallas channels: a level has a gradient where it has no pairs",
        "pallas_steps:_laid_bwd",
        "jnp.where($here, $d if $size is None else _blocks($d, $size, 1), 0.0)",
        "$d if $size is None else _blocks($d, $size, 1)",
        DELTA,
    ),
)
