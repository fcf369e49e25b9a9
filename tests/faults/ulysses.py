"""Faults of heads that are exchanged for tokens (ejdist/sequence/ulysses.py, ejdist/sequence/reshard.py)."""

from faults import Fault

ULYSSES = "tests/test_ulysses.py"
SEQUENCE = "tests/test_sequence.py"
COSTS = "tests/test_declared_costs.py"

FAULTS = (
    Fault(
        "gathered tokens stay in the order of the ranks",
        "Reshard._there",
        "$x if $token is None else self.order.inverse($x, $token)",
        "$x",
        f"{ULYSSES} -k full-",
    ),
    Fault(
        "results are in the order of the sequence",
        "Reshard.back",
        "$x = self.order.permute($x, $token)",
        "pass",
        f"{ULYSSES} -k full-",
    ),
    Fault(
        "every rank has the slopes, and the dropout, of the first heads",
        "Reshard._there",
        "exchange.rank(self.axis) * $own",
        "0 * $own",
        f"{ULYSSES} -k alibi-",
    ),
    Fault(
        "dropout is that of the first group of heads",
        "Exchange.groups",
        "self.way.there($n, $x, $known[$n])",
        "self.way.there($n, $x, 0 if $n == 'dropout_seed' else $known[$n])",
        f"{ULYSSES} -k dropout-",
    ),
    Fault(
        "slopes are those of the first group of heads",
        "Exchange.groups",
        "self.way.there($n, $x, $known[$n])",
        "self.way.there($n, $x, 0 if $n == 'alibi_slopes' else $known[$n])",
        f"{ULYSSES} -k alibi-",
    ),
    Fault(
        "gradients of the heads' own arguments are with the first heads",
        "Reshard.back",
        "exchange.rank(self.axis) * $x.shape[$head]",
        "0 * $x.shape[$head]",
        f"{ULYSSES} -k alibi-",
    ),
    Fault(
        "repeated heads of keys have the gradient of one copy",
        "Reshard.joined",
        "jnp.sum($x, $head + 1, dtype=jnp.float32)",
        "jnp.take($x, 0, $head + 1)",
        f"{SEQUENCE} -k heads_of_keys_are_repeated",
    ),
    Fault(
        "heads of keys are repeated as a whole, not one by one",
        "Reshard._there",
        "jnp.repeat($x, $cut.copies, axis=$head)",
        "jnp.tile($x, [$cut.copies if i == $head else 1 for i in range($x.ndim)])",
        f"{SEQUENCE} -k heads_of_keys_are_repeated",
    ),
    Fault(
        "groups that have the same keys give the gradient of the last one",
        "Exchange.back",
        "$sums[$number].astype(jnp.float32) + $part",
        "$part",
        f"{ULYSSES} -k 'causal- or alibi-'",
    ),
    Fault(
        "a group has neighbouring heads, and not a part of every rank's",
        "Cut.group",
        "$x.reshape(*$x.shape[:$axis], *self.sizes, *$x.shape[$axis + 1:])",
        "$x.reshape(*$x.shape[:$axis], *self.sizes[1:], self.sizes[0], *$x.shape[$axis + 1:]).swapaxes($axis, "
        "$axis + len(self.sizes) - 1)",
        f"{ULYSSES} -k 'causal- or alibi-'",
    ),
    Fault(
        "joined groups are one after another",
        "Cut.joined",
        "$x = jnp.moveaxis($x, $$places)",
        "pass",
        f"{ULYSSES} -k 'causal- or alibi-'",
    ),
    Fault(
        "queries of a group do not follow its keys",
        "cuts_of",
        "tuple(i for i in (1, 3) if $grid[i] > 1)",
        "tuple(i for i in (1, 4) if $grid[i] > 1)",
        f"{ULYSSES} -k 'causal- or alibi-'",
    ),
    Fault(
        "the keys of a group before are left",
        "Exchange.groups",
        "($n, $known[$n]) not in $moved",
        "$n not in {key[0] for key in $moved}",
        f"{ULYSSES} -k 'causal- or alibi-'",
    ),
    Fault(
        "groups of striped ranks are taken to be contiguous",
        "Exchange.of",
        "$mask.replace(q_positions=$at, kv_positions=$at)",
        "$mask",
        f"{ULYSSES} -k sinks_packed-",
    ),
    Fault(
        "groups of ranks are counted along the inner axis",
        "Exchange.of",
        "axis=$outer[0] if len($outer) == 1 else $outer",
        "axis=$inner if len($outer) == 1 else $outer",
        f"{ULYSSES} -k 'packed_sink_window- or soft_cap-'",
    ),
    Fault(
        "the ranks of a group are taken to be far apart",
        "Exchange.of",
        "exchange.rank($outer) * $ranks + jnp.arange($ranks)",
        "exchange.rank($outer) + $ranks * jnp.arange($ranks)",
        f"{ULYSSES} -k sinks_packed-",
    ),
    Fault(
        "the backward has no delta of its heads",
        "backward",
        "{$n: $x for $n, $x in $saved.items() if $n != 'out'}",
        "{$n: ($x * 0 if $n == 'delta' else $x) for $n, $x in $saved.items() if $n != 'out'}",
        f"{ULYSSES} -k full-",
    ),
    Fault(
        "the backward sends the output",
        "backward",
        "$n != 'out'",
        "True",
        f"{COSTS} -k sends_what_it_declares",
    ),
    Fault(
        "heads that do not divide are not refused before a step",
        "undivided",
        "$heads % $ranks",
        "False",
        f"{ULYSSES} -k refused",
    ),
    Fault(
        "the nearest number of groups is not one that divides",
        "undivided",
        "math.gcd($heads // $ranks, $groups)",
        "$groups",
        f"{ULYSSES} -k refused",
    ),
    Fault(
        "keys that groups share are counted for each",
        "traffic",
        "3 * $groups + 2 * $own",
        "5 * $groups",
        f"{COSTS} -k by_hand",
    ),
    Fault(
        "all groups are held at once",
        "held",
        "min($groups, 2)",
        "$groups",
        f"{ULYSSES} -k held",
    ),
    Fault(
        "a scheme takes options that it does not have",
        "scheme_of",
        "$name not in options_of(SCHEMES[$scheme])",
        "False",
        f"{ULYSSES} -k refused",
    ),
)
