"""Faults of the hops of a ring, of what is gathered once, and of the halo (ejdist/sequence)."""

from faults import Fault

SEQUENCE = "tests/test_sequence.py"
PACKED = f"{SEQUENCE} -k packed-sp4-zigzag-ring"
CAUSAL = f"{SEQUENCE} -k causal-sp4-zigzag-ring"
CONTIGUOUS = f"{SEQUENCE} -k causal-sp4-contiguous-ring"
HALO = "tests/test_halo.py"
WIDE = f"{HALO} -k 4-zigzag-packed_more"
TRANSFERS = "tests/test_transfers.py"
COSTS = "tests/test_declared_costs.py -k 'sends_what_it_declares and halo'"

FAULTS = (
    Fault(
        "stripes of other ranks are attended to without their positions",
        "Local.needs_positions",
        "$own or $self.static.order.in_parts",
        "True",
        "tests/test_sequence.py -k striped",
    ),
    Fault(
        "a window without positions",
        "Local.needs_positions",
        "{'causal', 'q_segment_ids', 'kv_segment_ids'}",
        "{'causal', 'q_segment_ids', 'kv_segment_ids', 'window'}",
        "tests/test_sequence.py -k window",
    ),
    Fault(
        "a hop that has work is left out",
        "work_of",
        "$tiles.reshape($$args).any((0, 2))",
        "$tiles.reshape($$args).all((0, 2))",
        PACKED,
    ),
    Fault(
        "a rank takes the work of the next for its own",
        "work_of",
        "jnp.asarray($table)[$rank]",
        "jnp.asarray($table)[($rank + 1) % static.order.shards]",
        CONTIGUOUS,
    ),
    Fault("work is of the hop, not of the holder", "Local.at_hop", "self.holder($hop)", "$hop", PACKED),
    Fault(
        "a hop without work is one that is attended to",
        "Local.at_hop",
        "jnp.where(self.work[self.holder($hop)], $index, len($ways))",
        "$index",
        CONTIGUOUS,
    ),
    Fault(
        "segment ids of the wrong holder",
        "Local._mask_of.of_keys",
        "$holders * $own + $part.start",
        "($holders + 1) % self.ranks * $own + $part.start",
        PACKED,
    ),
    Fault(
        "what is counted over the whole is cut for the first rank",
        "of_all_ranks",
        "exchange.rank($axis) * $length",
        "0 * exchange.rank($axis)",
        f"{SEQUENCE} -k callers_own_shard_map",
    ),
    Fault(
        "a hop is merged twice",
        "hops:attended.work",
        "merge($out[:, $q], $lse[:, $q], $a, $b)",
        "merge(*merge($out[:, $q], $lse[:, $q], $a, $b), $a, $b)",
        CAUSAL,
    ),
    Fault(
        "the state of a hop is that of its keys alone",
        "hops:attended.work",
        "if first: $$body",
        "if True: $$body",
        CAUSAL,
    ),
    Fault(
        "what the second half sees is merged into the first",
        "_with",
        "jax.lax.dynamic_update_slice_in_dim($x, $new($x[:, $part]), $part.start, 1)",
        "jax.lax.dynamic_update_slice_in_dim($x, $new($x[:, $part]), 0, 1)",
        CAUSAL,
    ),
    Fault(
        "gradients of a part of the keys are those of its start",
        "_padded",
        "($part.start, $length - $part.stop)",
        "($length - $part.stop, $part.start)",
        CAUSAL,
    ),
    Fault(
        "gradients that arrive are left out",
        "pulled.add",
        "lambda $y, $n=$n: $y + $grads[$n][:, $part]",
        "lambda $y, $n=$n: 0 * $y + $grads[$n][:, $part]",
        CAUSAL,
    ),
    Fault(
        "the first conditional waits for the gradients that arrive",
        "pulled.work",
        "local.pull_at($hop, $saved, $$args)",
        "local.pull_at($hop, $saved if sums is None else jax.lax.optimization_barrier(($saved, sums))[0], $$args)",
        TRANSFERS,
    ),
    Fault(
        "keys and values are two transfers on a GPU",
        "exchange:_COMPILER_OPTIONS",
        "2**40",
        "0",
        f"{TRANSFERS} -k h200",
    ),
    Fault(
        "a step is compiled without the options",
        "SequenceSection.compiler_options",
        "exchange.compiler_options($mesh) if $order.shards > 1 else None",
        "None",
        f"{TRANSFERS} -k step",
    ),
    Fault(
        "at the turn of a zigzag the halo counts twice",
        "HaloCall.mask",
        "$self.first[:-1] + self.run",
        "0 * $self.first[:-1]",
        WIDE,
    ),
    Fault(
        "at the turn of a zigzag a rank is sent what it has",
        "pieces",
        "$wanted > $held",
        "$wanted >= 0",
        f"{HALO} -k 'comes_once'",
    ),
    Fault(
        "the first rank sees what is before the sequence",
        "HaloCall.mask",
        "jnp.zeros_like($self.first[:1])",
        "jnp.full_like($self.first[:1], -1000)",
        WIDE,
    ),
    Fault(
        "padding before a run is seen",
        "HaloCall.mask",
        "jnp.maximum($held, $self.first - self.reach)",
        "$held",
        f"{HALO} -k tile",
    ),
    Fault(
        "segment ids of a halo are those of the ranks' order",
        "HaloCall.mask",
        "$order.inverse($x)",
        "$x",
        WIDE,
    ),
    Fault(
        "a halo is a token short",
        "reach_of",
        "np.max($q - ends_at($ends.low, $q))",
        "np.max($q - ends_at($ends.low, $q)) - 1",
        WIDE,
    ),
    Fault(
        "a halo has no later tokens",
        "reach_of",
        "np.any(ends_at($ends.high, $q) > $q)",
        "False",
        f"{HALO} -k 'far or is_sent'",
    ),
    Fault(
        "groups of striped ranks are taken to have runs",
        "HaloCall.of",
        "$local.mask.q_positions is None",
        "True",
        f"{HALO} -k groups",
    ),
    Fault(
        "gradients of a halo do not come home",
        "HaloCall.home",
        "_added($total[$n], $$args)",
        "$total[$n]",
        WIDE,
    ),
    Fault(
        "gradients of a halo go on instead of home",
        "HaloCall.home",
        "tuple(($to, $sender) for $sender, $to in $piece.pairs)",
        "$piece.pairs",
        WIDE,
    ),
    Fault(
        "gradients of a halo are declared for nothing",
        "Halo.cost",
        "$shape.forwards + 2",
        "$shape.forwards + 1",
        COSTS,
    ),
    Fault(
        "layers that see all keys have the scheme of windows",
        "ByWindow._of",
        "$shape.halo is None",
        "False",
        f"{HALO} -k kinds_of_layers",
    ),
    Fault(
        "a halo is taken where it sends more",
        "ByWindow._of",
        "$few < $full",
        "True",
        f"{HALO} -k kinds_of_layers",
    ),
)
