"""Faults of a ring both ways round (ejdist/sequence/both_ways.py)."""

from faults import Fault

TESTS = "tests/test_both_ways.py"
NUMBERS = f"{TESTS} -k 'numbers and sinks_packed_window-zigzag-sp4'"
CONTIGUOUS = f"{TESTS} -k 'numbers and causal-contiguous-sp4'"
BYTES = f"{TESTS} -k half_of_the_bytes"
AUTO = f"{TESTS} -k test_auto"
PLANS = f"{TESTS} -k plans_count_it"

FAULTS = (
    Fault(
        "a plan has hops that are left out go both ways at once",
        "both_ways:goes",
        "$all_hops and 2 <= $shape.hops == $shape.ranks - 1",
        "$all_hops",
        f"{TESTS} -k costs_least",
    ),
    Fault(
        "the second half goes round as the first does",
        "both_ways:around",
        "($one, *reversed($others))",
        "local.hops",
        BYTES,
    ),
    Fault(
        "the second half of the heads is the first again",
        "both_ways:_half",
        "jnp.split($x, 2, $at)[$half]",
        "jnp.split($x, 2, $at)[0]",
        NUMBERS,
    ),
    Fault(
        "halves of the heads come back in the other's place",
        "both_ways:_joined",
        "jnp.concatenate($halves, $at)",
        "jnp.concatenate($halves[::-1], $at)",
        NUMBERS,
    ),
    Fault(
        "what is saved of all heads is of the first half",
        "both_ways:around",
        "_half($local, $n, $x, $half)",
        "_half($local, $n, $x, 0)",
        NUMBERS,
    ),
    Fault(
        "keys go round by the gaps of the first lap",
        "Lap.gaps",
        "($b - $a) % self.local.ranks",
        "abs($b - $a)",
        CONTIGUOUS,
    ),
    Fault(
        "gradients of the second half go home as those of the first",
        "hops:_home",
        "$lap.local.ranks - $lap.hops[-1]",
        "1",
        NUMBERS,
    ),
    Fault("two ranks go both ways", "both_ways:asked", "$local.ranks > 2", "True", AUTO),
    Fault(
        "auto halves a head",
        "both_ways:asked",
        "$all_hops and $every and $local.ranks > 2 and $odd is None and exchange.on_torus()",
        "$all_hops and $every and $local.ranks > 2 and exchange.on_torus()",
        AUTO,
    ),
    Fault(
        "auto goes the long way round a window",
        "both_ways:asked",
        "$local.hops == tuple(range($local.ranks))",
        "True",
        AUTO,
    ),
    Fault(
        "a ring by documents goes both ways",
        "Ring._around",
        "self.levels == 1 and not self.counts_hops($local)",
        "True",
        AUTO,
    ),
    Fault(
        "every device has links to its neighbours",
        "exchange:on_torus",
        "$device is not None and $device.platform == 'tpu'",
        "True",
        f"{TESTS} -k links_form",
    ),
    Fault(
        "one head is halved where it is asked for",
        "both_ways:asked",
        "$x.shape[$at] % 2",
        "False",
        f"{TESTS} -k refusals",
    ),
    Fault(
        "both ways are costed as one",
        "Ring.cost",
        "(PERMUTE_BOTH, 4) if $both else (PERMUTE, 2)",
        "(PERMUTE, 2)",
        PLANS,
    ),
    Fault("a plan has a torus nowhere", "both_ways:goes", "$shape.torus", "False", PLANS),
    Fault(
        "links of GPUs gain by both ways",
        "experts/choice:Links.rate",
        "ALL_GATHER if self.torus else PERMUTE",
        "ALL_GATHER",
        PLANS,
    ),
    Fault(
        "halves of the heads are merged in passes over memory",
        "in_place:attending",
        "hops.attends($local) if $kernels is None else attends($local, $kernels)",
        "hops.attends($local)",
        f"{TESTS} -k half_of_the_heads",
    ),
    Fault(
        "padding is said to be zero and is not",
        "without_padding",
        "({}, padding.of_forward($op, $arguments))",
        "({}, $arguments)",
        "tests/test_masks.py tests/test_padding.py tests/test_sequence.py -k 'padding and not slow'",
    ),
    Fault(
        "a loop holds an output that no kernel reads",
        "Local.reads_out",
        "self.plain and not exchange.on_torus()",
        "True",
        f"{TESTS} -k holds_an_output",
    ),
    Fault(
        "halves of heads are made twice",
        "both_ways:_half_of",
        "jax.lax.optimization_barrier(($own, $keys))",
        "($own, $keys)",
        "tests/test_transfers.py -m slow -k 'temporaries and Ring-1'",
    ),
)
