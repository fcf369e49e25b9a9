"""Faults of multi-token prediction: what follows a token, the module, its loss, and DeepSeek-V3's files."""

from faults import Fault

TESTS = "tests/test_ahead.py -m 'not slow'"
NUMBERS, TEXT, FILES, REFUSED = (f"{TESTS} -k '{k}'" for k in ("those_of_numpy", "what_follows", "read_and", "refused"))

FAULTS = (
    Fault(
        "the next token is read from another document",
        "ahead:following",
        "$ids == _next($ids, -1)",
        "$ids == $ids",
        TEXT,
    ),
    Fault("padding goes on", "ahead:following", "$ids >= 0", "$ids >= -1", TEXT),
    Fault(
        "a target is of the token itself",
        "ahead:following",
        "jnp.where($on, _next($targets, -1), -1)",
        "jnp.where($on, $targets, -1)",
        TEXT,
    ),
    Fault("the next token is the token itself", "ahead:following", "_next($tokens, 0)", "$tokens", TEXT),
    Fault(
        "what follows is read in the order of the batch",
        "following.text",
        "$order.inverse($x, index=$index)",
        "$x",
        TEXT,
    ),
    Fault(
        "what follows stays in the order of the text",
        "following.back",
        "$order.permute($x, index=$index)",
        "$x",
        TEXT,
    ),
    Fault(
        "the last token of a row is followed by the first",
        "ahead:_next",
        "jnp.full_like($x[:, :1], $last)",
        "$x[:, :1]",
        TEXT,
    ),
    Fault(
        "the embedding is projected as the hidden state",
        "ahead:loss",
        "joined($e, EMBEDDING, OF_EMBEDDING)",
        "joined($e, EMBEDDING, OF_HIDDEN)",
        NUMBERS,
    ),
    Fault(
        "the hidden state has no norm of its own",
        "ahead:loss",
        "joined($h, HIDDEN, OF_HIDDEN)",
        "joined($h, EMBEDDING, OF_HIDDEN)",
        NUMBERS,
    ),
    Fault("the module has no last norm", "ahead:loss", "normed($x, FINAL)", "$x", NUMBERS),
    Fault(
        "the module's loss has another weight", "ahead:loss", "$c.mtp.weight * $sums.loss", "0.3 * $sums.loss", NUMBERS
    ),
    Fault(
        "the module's router has no bias",
        "ahead:loss",
        "$ctx.buffers[f'{AHEAD}_{$name}']",
        "jax.tree.map(jnp.zeros_like, $ctx.buffers[f'{AHEAD}_{$name}'])",
        NUMBERS,
    ),
    Fault("plans leave its layer out", "stack:counted_parts", "layers_of($one) if $one else ()", "()", REFUSED),
    Fault("its FLOPs leave the projections out", "ahead:flops", "Flops(4 * $D * $D)", "Flops(0)", REFUSED),
    Fault(
        "the halves of eh_proj change places",
        "names:AHEAD",
        "rule('eh_proj.weight', 'R D', 'of_embedding: D R', 'of_hidden: D R', joined='D')",
        "rule('eh_proj.weight', 'R D', 'of_hidden: D R', 'of_embedding: D R', joined='D')",
        FILES,
    ),
    Fault(
        "its norms change places",
        "names:AHEAD",
        "rule('enorm.weight', 'D', 'embedding_norm: D')",
        "rule('enorm.weight', 'D', 'hidden_norm: D')",
        FILES,
    ),
    Fault(
        "copies are not written",
        "writer:save",
        "expand($f.rules[0], $c, copies=True)",
        "expand($f.rules[0], $c)",
        FILES,
    ),
    Fault(
        "a family without it exports a model with it",
        "family_of",
        "['mtp.modules'] if $c.mtp.modules and not $f.rules[0].ahead else []",
        "[]",
        REFUSED,
    ),
    Fault(
        "files without it are read",
        "reader:check_ahead",
        "$c.mtp.modules and not ($f.rules[0].ahead and any($$of))",
        "False",
        FILES,
    ),
)
