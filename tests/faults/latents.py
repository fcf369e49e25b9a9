"""Faults of latents that travel over the ranks of a sequence."""

from faults import Fault

TESTS = "tests/test_latents.py"
NUMBERS, SENT = f"{TESTS} -k numbers", f"{TESTS} -k declared"
CHEAPER, PLANS, ADAPTED = f"{TESTS} -k cheaper", f"{TESTS} -k fiftieth", f"{TESTS} -k adapter"

FAULTS = (
    Fault(
        "the rotary part of a query is that of all queries",
        "Local._over",
        "$x[:, $queries] if self.has_rows($n) else $x",
        "$x[:, $queries] if $n == 'query' else $x",
        NUMBERS,
    ),
    Fault(
        "the gradient of a rotary part is added to the first queries",
        "ejdist/sequence/hops.py",
        "for n in own if local.has_rows(n)}",
        "for n in own if n == 'query'}",
        NUMBERS,
    ),
    Fault(
        "rotary keys stay on their rank",
        "local:apart",
        "$n in $arrays and any($$seen)",
        "$n in $arrays and $n != 'key_rope' and any($$seen)",
        SENT,
    ),
    Fault(
        "the gradients of gathered latents are summed in their dtype",
        "Reshard.back",
        "exchange.scatter_sum($x.astype(jnp.float32), self.axis)",
        "exchange.scatter_sum($x, self.axis)",
        SENT,
    ),
    Fault(
        "the gradients of gathered latents go back in the order of the text",
        "Reshard.back",
        "$token, $head = self._places($dims)\nif $token is not None: $x = self.order.permute($x, $token)",
        "$token, $head = self._places($dims)\nif $head is not None: $x = self.order.permute($x, $token)",
        f"{TESTS} -k gathered_latents",
    ),
    Fault(
        "Ulysses counts no gradients of latents",
        "ulysses:traffic",
        "sent.add($axis, REDUCE_SCATTER, $$rest)",
        "",
        SENT,
    ),
    Fault(
        "a ring is costed by keys where latents travel",
        "AttentionShape.travelling",
        "self.latents or self.key + self.value",
        "self.key + self.value",
        SENT,
    ),
    Fault(
        "latents go around the ring whatever the scheme",
        "latent_attention:over_ranks",
        "_OnRanks($scheme)",
        "_OnRanks(Ring())",
        SENT,
    ),
    Fault(
        "latents travel whatever it costs to make keys of them",
        "latents:sends_latents",
        "$saved > 0 and $again <= FLOPS_A_BYTE * $saved",
        "$saved > 0",
        CHEAPER,
    ),
    Fault(
        "never is auto",
        "latents:sends_latents",
        "$shape.ranks == 1 or $scheme.latents != AUTO",
        "$shape.ranks == 1 or $scheme.latents == ALWAYS",
        CHEAPER,
    ),
    Fault(
        "the heads of a layer are those of a device",
        "latents:travels",
        "max(1, $dims[$n] // $features)",
        "$dims[$n]",
        CHEAPER,
    ),
    Fault(
        "by auto a backend by name is asked for latents",
        "latents:travels",
        "$scheme.latents == AUTO and $platform not in (None, 'xla')",
        "False",
        CHEAPER,
    ),
    Fault(
        "a scheme that reads keys by name gets latents",
        "by_window",
        "NEVER if $full.latents == NEVER else $latents",
        "$latents",
        CHEAPER,
    ),
    Fault(
        "always is auto where a matrix has an adapter",
        "latents:travels",
        "$adapted and $scheme.latents == ALWAYS",
        "False",
        ADAPTED,
    ),
    Fault(
        "a plan has latents on their way where matrices have adapters",
        "planning/share:_scheme",
        "replace($made, latents=NEVER) if $adapted else $made",
        "$made",
        ADAPTED,
    ),
    Fault(
        "a model's latent attention is not asked to be deterministic",
        "bind_ops",
        "{'order': $order, 'deterministic': $asked}",
        "{'order': $order}",
        ADAPTED,
    ),
    Fault(
        "latent attention does not read the order that rows bring",
        "Ops.of_batch",
        "self.replace(attention=$attention, flash_mla=functools.partial(self.flash_mla, mask_info=$places))",
        "self.replace(attention=$attention)",
        ADAPTED,
    ),
    Fault(
        "a plan makes keys of latents once",
        "LatentAttention.repeated",
        "$share.scheme.expansions($shape)",
        "1",
        PLANS,
    ),
    Fault(
        "a plan keeps keys that are made inside of attention",
        "LatentAttention.memory",
        "$shape.key + $shape.value if $shape.latents else 0",
        "0",
        PLANS,
    ),
)
