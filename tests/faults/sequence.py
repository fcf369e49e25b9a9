"""Faults of attention over a split sequence (ejdist/sequence)."""

from faults import Fault

SCHEMES = "ejdist/sequence/schemes.py"
SEQUENCE = "tests/test_sequence.py"
ORDER = "ejdist/order.py"
LOCAL = "ejdist/sequence/local.py"
RING = "ejdist/sequence/attention.py"
EXCHANGE = "ejdist/sequence/exchange.py"
DISPATCH = "kernels/framework/dispatch.py"
SCHEDULE = "ejdist/sequence/schedule.py"

DETERMINISTIC = "tests/kernels/test_flash_attention_deterministic.py"

FAULTS = (
    Fault(
        "wrong hop",
        "Local.holder",
        "exchange.rank(self.axis) - $hop",
        "exchange.rank(self.axis) + $hop",
        SEQUENCE,
    ),
    Fault(
        "a rank takes the keys of the one before it for later ones",
        "Local.at_hop",
        "exchange.rank(self.axis) >= $hop",
        "exchange.rank(self.axis) > $hop",
        SEQUENCE,
    ),
    Fault("a zigzag sees the wrong half of earlier keys", ORDER, "slice(0, half))", "slice(half, own))", SEQUENCE),
    Fault(
        "a zigzag sees later keys from the wrong half",
        ORDER,
        "else (slice(half, own),",
        "else (slice(0, half),",
        SEQUENCE,
    ),
    Fault("a window is dropped between ranks", LOCAL, '{"causal"}', '{"causal", "window"}', f"{SEQUENCE} -k window"),
    Fault(
        "the positions of a dropout are dropped between ranks",
        "Local.plain",
        "self.own.keys() <= _BARE",
        "'alibi_slopes' not in self.own",
        f"{SEQUENCE} -k dropout",
    ),
    Fault(
        "a rank computes with keys that it does not see",
        ORDER,
        "if earlier else None",
        "if earlier else (slice(0, own), slice(0, own))",
        f"{SEQUENCE} -k contiguous",
    ),
    Fault(
        "deterministic: a rank's attention is not asked for it",
        "shard_call",
        "{$n: $x for $n, $x in $arguments.items() if $n not in $arrays}",
        "{$n: $x for $n, $x in $arguments.items() if $n not in $arrays and $n != 'deterministic'}",
        f"{DETERMINISTIC} -k hands_it_on",
    ),
    Fault(
        "deterministic: a rank's backward is not asked for it",
        "Local.pull",
        "functools.partial(self.static.op.backward, $saved)",
        "lambda deterministic, **a: self.static.op.backward($saved, **a)",
        f"{DETERMINISTIC} -k ring_is_asked",
    ),
    Fault(
        "deterministic: a plain hop's backward is not asked for it",
        "Local.pull_at",
        "functools.partial(self.static.op.backward, $mine)",
        "lambda deterministic, **a: self.static.op.backward($mine, **a)",
        f"{DETERMINISTIC} -k ring_is_asked",
    ),
    Fault(
        "deterministic: latent attention is not asked for it",
        "multi_latent_attention/composed:_attention",
        "{'deterministic': True} if $deterministic else {}",
        "{}",
        f"{DETERMINISTIC} -k latent",
    ),
    Fault(
        "deterministic: a model's attention is not asked for it",
        "bind_ops",
        "{'order': $order, 'scheme': $scheme, 'deterministic': $deterministic_attention}",
        "{'order': $order, 'scheme': $scheme}",
        f"{DETERMINISTIC} -k 'model or recipe'",
    ),
    Fault(
        "deterministic: a recipe's key says nothing",
        "program:bind",
        "$s.deterministic_attention",
        "False",
        f"{DETERMINISTIC} -k recipe",
    ),
    Fault(
        "of gathered keys a rank takes those of the next",
        "over_gathered.visit",
        "jax.lax.dynamic_slice_in_dim($x, $at, $own, 1)",
        "jax.lax.dynamic_slice_in_dim($x, ($at + $own) % $x.shape[1], $own, 1)",
        f"{SEQUENCE} -k all_gather",
    ),
    Fault(
        "the gradients of gathered keys go to the first rank",
        "gathered:pulled_by_hops.pull",
        "$placed($x, $sums[$n].astype($x.dtype), $at, 1)",
        "$placed($x, $sums[$n], 0 * $at, 1)",
        f"{SEQUENCE} -k all_gather",
    ),
    Fault(
        "gathered keys that were put in order are taken to lie as the ranks have them",
        "Local.mask_of",
        "$every if $holders is None else $order.positions($holders, $length)[..., $part]",
        "$order.positions(jnp.arange(self.ranks) if $holders is None else $holders, $length)",
        f"{SEQUENCE} -k all_gather",
    ),
    Fault(
        "the gradients of keys in order go back as they are",
        "Local.of_ranks",
        "self.static.order.permute($x, index=self.mask.kv_positions)",
        "$x",
        f"{SEQUENCE} -k all_gather",
    ),
    Fault("merge without rescale", "softmax:merge", "$out * $a[..., None]", "$out", SEQUENCE),
    Fault(
        "ring counts the sink twice",
        "attention:_forward",
        "merge($$args, $joint)",
        "merge($$args, $joint + 0.6931)",
        f"{SEQUENCE} -k sinks",
    ),
    Fault("stale lse", "_ring_bwd", "{'out': $out, 'lse': $lse}", "{'out': $out, 'lse': $lse - 0.1}", SEQUENCE),
    Fault(
        "segments do not travel",
        LOCAL,
        'if "S" in dims and "T" not in dims',
        'if name == "kv_positions"',
        f"{SEQUENCE} -k packed",
    ),
    Fault("gradients of keys do not come home", "hops:_home", "$lap.local.ranks - $lap.hops[-1]", "0", SEQUENCE),
    Fault(
        "gradients of keys come home a rank late",
        "hops:_home",
        "$lap.local.ranks - $lap.hops[-1]",
        "1 - $lap.hops[-1]",
        SEQUENCE,
    ),
    Fault(
        "gradients of keys do not travel",
        "over_laps.visit",
        "($lap.passed_on($keys, $after), $lap.passed_on($travel, $before))",
        "($lap.passed_on($keys, $after), $travel)",
        SEQUENCE,
    ),
    Fault(
        "positions not permuted",
        "Local.mask_of",
        "$order.positions(exchange.rank(self.axis), $length)",
        "jnp.arange(self.query.shape[1]) + exchange.rank(self.axis) * self.query.shape[1]",
        SEQUENCE,
    ),
    Fault("keys sent the other way", "shift", "$i + $by", "$i - $by", SEQUENCE),
    Fault(
        "gathered keys have the gradient of one rank",
        "scatter_sum",
        "jax.lax.psum_scatter($x, $axis, scatter_dimension=1, tiled=True)",
        "jax.lax.dynamic_slice_in_dim($x, rank($axis) * (k := ($x.shape[1] // jax.lax.axis_size($axis))), k, 1)",
        f"{SEQUENCE} -k all_gather",
    ),
    Fault(
        "ranks of two axes counted from the minor one",
        "exchange:rank",
        "jax.lax.axis_index($axis)",
        "jax.lax.axis_index($axis if isinstance($axis, str) else $axis[::-1])",
        f"{SEQUENCE} -k two_axes",
    ),
    Fault(
        "a ring takes the axes as the mesh lists them",
        "_in_mesh_order",
        "$there.transpose([$listed.index($a) for $a in $axis])",
        "$there",
        f"{SEQUENCE} -k two_axes",
    ),
    Fault(
        "constants are not typed as varying",
        "vary_alike.cast",
        "jax.lax.pcast($x, tuple(sorted($missing, key=str)), to='varying') if $missing else $x",
        "jax.lax.pcast($x, tuple(sorted($missing, key=str)), to='varying') if $missing and False else $x",
        f"{SEQUENCE} -k constant",
    ),
    Fault(
        "a second derivative goes through",
        "differentiated_once",
        "$once = jax.custom_jvp($function, nondiff_argnums=(0,))",
        "return $function\n$once: Any = None",
        f"{SEQUENCE} -k second_derivative",
    ),
    Fault(
        "delta is declared as wide as the output",
        "declaration:saved_dims",
        "$dims[0][:-1]",
        "$dims[0]",
        "tests/test_ops.py -k 'outputs_have_the_dims and flash'",
    ),
    Fault("a needed hop left out", "hops", "tuple($found)", "tuple($found[:-1])", SEQUENCE),
    Fault(
        "gradients in bfloat16 travel in float32",
        "over_laps.travels",
        "$x.astype($dtype or $keys[$n].dtype)",
        "$x.astype(jnp.float32)",
        "tests/test_declared_costs.py -k bfloat16_are_half",
    ),
    Fault(
        "a ring in place does not hear of the dtype of its gradients",
        "Ring.backward",
        "self._around($local, $saved, in_place.pulling, jnp.float32 if self.gradients == 'float32' else None)",
        "self._around($local, $saved, in_place.pulling)",
        "tests/test_ring_in_place.py -k bfloat16_travel_so",
    ),
    Fault(
        "a ring whose gradients are in bfloat16 declares float32",
        "Ring._wide",
        "$shape.float32 if self.gradients == 'float32' else 1",
        "$shape.float32",
        "tests/test_declared_costs.py -k bfloat16_are_half",
    ),
    Fault(
        "the recipe's dtype of gradients is dropped",
        "SequenceSection._options",
        "None if self.gradients == FLOAT32 else self.gradients",
        "None",
        "tests/test_scheme_choice.py -k options_are_of",
    ),
)
