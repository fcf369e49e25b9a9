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
    Fault("wrong hop", LOCAL, "- hop) %", "+ hop) %", SEQUENCE),
    Fault(
        "a rank takes the keys of the one before it for later ones",
        LOCAL,
        "(self.axis) >= hop,",
        "(self.axis) > hop,",
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
    Fault(
        "rows that see nothing at a hop have weight there",
        LOCAL,
        "self._whole(lse, queries, -jnp.inf)",
        "self._whole(lse, queries)",
        SEQUENCE,
    ),
    Fault("a window is dropped between ranks", LOCAL, '{"causal"}', '{"causal", "window"}', f"{SEQUENCE} -k window"),
    Fault(
        "the positions of a dropout are dropped between ranks",
        LOCAL,
        'self.own.keys() == {"query"}',
        '"alibi_slopes" not in self.own',
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
        RING,
        "options = {n: x for n, x in arguments.items() if n not in arrays}",
        'options = {n: x for n, x in arguments.items() if n not in arrays and n != "deterministic"}',
        f"{DETERMINISTIC} -k hands_it_on",
    ),
    Fault(
        "deterministic: a rank's backward is not asked for it",
        LOCAL,
        "return self._over(functools.partial(self.static.op.backward, saved), keys, holders)",
        "return self._over(lambda deterministic, **a: self.static.op.backward(saved, **a), keys, holders)",
        f"{DETERMINISTIC} -k ring_is_asked",
    ),
    Fault(
        "deterministic: a plain hop's backward is not asked for it",
        LOCAL,
        "functools.partial(self.static.op.backward, mine), keys, queries",
        "lambda deterministic, **a: self.static.op.backward(mine, **a), keys, queries",
        f"{DETERMINISTIC} -k ring_is_asked",
    ),
    Fault(
        "deterministic: latent attention in a ring is not asked for it",
        "ejdist/latent_attention.py",
        '"logits_soft_cap", "deterministic", ',
        '"logits_soft_cap", ',
        f"{DETERMINISTIC} -k latent",
    ),
    Fault(
        "deterministic: a model's attention is not asked for it",
        "ejdist/operations.py",
        '"deterministic": deterministic_attention}',
        "}",
        f"{DETERMINISTIC} -k 'model or recipe'",
    ),
    Fault(
        "deterministic: a recipe's key says nothing",
        "ejdist/training/program.py",
        "deterministic_attention=s.deterministic_attention",
        "deterministic_attention=False",
        f"{DETERMINISTIC} -k recipe",
    ),
    Fault(
        "of gathered keys a rank takes those of the next",
        SCHEMES,
        "dynamic_slice_in_dim(x, at, own, 1)",
        "dynamic_slice_in_dim(x, (at + own) % x.shape[1], own, 1)",
        f"{SEQUENCE} -k all_gather",
    ),
    Fault(
        "the gradients of gathered keys go to the first rank",
        SCHEMES,
        "grads[n].astype(jnp.float32), at, 1)",
        "grads[n].astype(jnp.float32), 0 * at, 1)",
        f"{SEQUENCE} -k all_gather",
    ),
    Fault(
        "gathered keys that were put in order are taken to lie as the ranks have them",
        LOCAL,
        "at = every if holders is None else order.positions(holders, length)",
        "at = order.positions(jnp.arange(self.ranks) if holders is None else holders, length)",
        f"{SEQUENCE} -k all_gather",
    ),
    Fault(
        "the gradients of keys in order go back as they are",
        LOCAL,
        'return x if "block_mask" in self.own else self.static.order.permute(x)',
        "return x",
        f"{SEQUENCE} -k all_gather",
    ),
    Fault("merge without rescale", LOCAL, "return out * a[..., None] + ", "return out + ", SEQUENCE),
    Fault(
        "ring counts the sink twice",
        RING,
        "jnp.zeros_like(out), joint)",
        "jnp.zeros_like(out), joint + 0.6931)",
        f"{SEQUENCE} -k sinks",
    ),
    Fault("stale lse", RING, '{"out": out, "lse": lse}', '{"out": out, "lse": lse - 0.1}', SEQUENCE),
    Fault(
        "segments do not travel",
        LOCAL,
        'if "S" in dims and "T" not in dims',
        'if name == "kv_positions"',
        f"{SEQUENCE} -k packed",
    ),
    Fault("gradients of keys do not come home", SCHEMES, "local.ranks - hops[-1])", "0)", SEQUENCE),
    Fault("gradients of keys come home a rank late", SCHEMES, "local.ranks - hops[-1])", "1 - hops[-1])", SEQUENCE),
    Fault("gradients of keys do not travel", SCHEMES, "exchange.shift(travel, axis, before)", "travel", SEQUENCE),
    Fault(
        "positions not permuted",
        LOCAL,
        "order.positions(exchange.rank(self.axis), length)[None]",
        "(jnp.arange(self.query.shape[1]) + exchange.rank(self.axis) * self.query.shape[1])[None]",
        SEQUENCE,
    ),
    Fault("keys sent the other way", EXCHANGE, "(i + by) % n", "(i - by) % n", SEQUENCE),
    Fault(
        "gathered keys have the gradient of one rank",
        EXCHANGE,
        "jax.lax.psum_scatter(x, axis, scatter_dimension=1, tiled=True)",
        "jax.lax.dynamic_slice_in_dim(x, rank(axis) * (k := x.shape[1] // jax.lax.axis_size(axis)), k, 1)",
        f"{SEQUENCE} -k all_gather",
    ),
    Fault(
        "ranks of two axes counted from the minor one",
        EXCHANGE,
        "return jax.lax.axis_index(axis)",
        "return jax.lax.axis_index(axis if isinstance(axis, str) else axis[::-1])",
        f"{SEQUENCE} -k two_axes",
    ),
    Fault(
        "a ring takes the axes as the mesh lists them",
        EXCHANGE,
        "there.transpose([listed.index(a) for a in axis]).ravel()",
        "there.ravel()",
        f"{SEQUENCE} -k two_axes",
    ),
    Fault(
        "constants are not typed as varying",
        DISPATCH,
        'to="varying") if missing else x',
        'to="varying") if missing and False else x',
        f"{SEQUENCE} -k constant",
    ),
    Fault(
        "a second derivative goes through",
        RING,
        "once = jax.custom_jvp(function, nondiff_argnums=(0,))",
        "return function\n    once: Any = None",
        f"{SEQUENCE} -k second_derivative",
    ),
    Fault(
        "a needed hop left out", SCHEDULE, "return tuple(found) or (0,)", "return tuple(found[:-1]) or (0,)", SEQUENCE
    ),
)
