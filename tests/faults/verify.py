"""Faults of plans of the sequence that `sequence.verify` sees, and of how it compares.

The first are in the slow tier: other tests see them too, and these only show that a run would end before its first step.
"""

from faults import Fault

TESTS = "tests/test_verify.py"
PLANS = "tests/test_verify.py -m slow -k"
HALO, ULYSSES, LATENTS = f"{PLANS} halo", f"{PLANS} ulysses", f"{PLANS} latents"

FAULTS = (
    Fault(
        "a plan: a zigzag sees the wrong half of earlier keys",
        "ejdist/order.py",
        "slice(0, half))",
        "slice(half, own))",
        HALO,
    ),
    Fault(
        "a plan: a rank takes its tokens for the next part's",
        "Order.positions",
        "(2 * $n - 1 - $first) * ($per_rank // 2) + $part",
        "(2 * $n - 2 - $first) * ($per_rank // 2) + $part",
        HALO,
    ),
    Fault(
        "a plan: a halo is a token short",
        "HaloCall.mask",
        "self.first - self.reach",
        "self.first - self.reach + 1",
        HALO,
    ),
    Fault(
        "a plan: a halo goes to no rank",
        "HaloCall.keys",
        "_added($before[$n], $piece.run, $piece.count, $start, self._turned($x, $piece, 1))",
        "$before[$n]",
        HALO,
    ),
    Fault(
        "a plan: segment ids stop at a rank",
        "Local.mask_of",
        "$mask = map_data(self.mask, $of_field)",
        "$mask = map_data(self.mask, $of_field).replace(q_segment_ids=None, kv_segment_ids=None)",
        HALO,
    ),
    Fault(
        "a plan: sinks join at every rank's hops twice",
        "attention:_forward",
        "jax.nn.logsumexp($sinks.astype(jnp.float32), axis=-1)",
        "jax.nn.logsumexp($sinks.astype(jnp.float32), axis=-1) + 0.7",
        HALO,
    ),
    Fault(
        "a plan: a merge forgets the weight of the keys before",
        "softmax:merge",
        "$out * $a[..., None]",
        "$out",
        HALO,
    ),
    Fault(
        "a plan: gradients of keys do not come home",
        "hops:_home",
        "$lap.local.ranks - $lap.hops[-1]",
        "0",
        HALO,
    ),
    Fault(
        "a plan: targets stay in the order of the text",
        "placing:permuted",
        "$index if $name == 'order' else $program.order.permute($batch[$name], index=$index)",
        "$index if $name == 'order' else $batch[$name] if $name == 'targets' else "
        "$program.order.permute($batch[$name], index=$index)",
        HALO,
    ),
    Fault(
        "a plan: rotary embedding turns by places",
        "placing:permuted",
        "$index if $name == 'order' else $program.order.permute($batch[$name], index=$index)",
        "$index if $name == 'order' else $batch[$name] if $name == 'positions' else "
        "$program.order.permute($batch[$name], index=$index)",
        ULYSSES,
    ),
    Fault(
        "a plan: heads come back in the order of another rank",
        "Reshard._there",
        "exchange.all_to_all($x, self.axis, split=$head, join=$token)",
        "exchange.all_to_all(jnp.flip($x, $head), self.axis, split=$head, join=$token)",
        ULYSSES,
    ),
    Fault(
        "a plan: the scale of latents is that of the part without positions",
        "multi_latent_attention/contract:scale_of",
        "0 if $query_rope is None else $query_rope.shape[-1]",
        "0",
        LATENTS,
    ),
    Fault(
        "a plan: stripes follow each other",
        "Order.positions",
        "$place // self.stripe * ($n * self.stripe)",
        "$place // self.stripe * self.stripe",
        LATENTS,
    ),
    # -- how it compares
    Fault(
        "what is no number is no difference",
        "verify:described",
        "~($lie <= $tolerance)",
        "$lie > $tolerance",
        f"{TESTS} -k named",
    ),
    Fault(
        "tokens are named by their places",
        "verify:described",
        "order.permute(np.broadcast_to(np.arange($length), $errors.shape), index=$index)",
        "np.broadcast_to(np.arange($length), $errors.shape)",
        f"{TESTS} -k named",
    ),
    Fault(
        "errors are those of the ranks' order",
        "_Case.errors",
        "self.order.inverse($errors, index=self.index) / $size",
        "$errors / $size",
        f"{TESTS} -k order_of_the_text",
    ),
    Fault(
        "padding is compared",
        "_Case.errors",
        "np.where($counted, self.order.inverse($errors, index=self.index) / $size, 0)",
        "self.order.inverse($errors, index=self.index) / $size",
        f"{TESTS} -k order_of_the_text",
    ),
    Fault(
        "a difference is only logged",
        "check_plan",
        "$wrong is not None",
        "False",
        f"{TESTS} -k ends_before",
    ),
    Fault(
        "a twin sends keys where the model sends latents",
        "Twin.of",
        "replace($s.sequence, latents=_latents($s, $mesh))",
        "$s.sequence",
        f"{TESTS} -k every_mixer",
    ),
    Fault(
        "the plan is not compared",
        "steps:compile_stage",
        "check_plan($$args)",
        "",
        f"{TESTS} -k when_it_is_compiled",
    ),
)
