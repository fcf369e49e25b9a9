"""Faults of layers of one part, of MLPs without a gate, and of the files of Nemotron-H and Mamba-2."""

from faults import Fault

TESTS, MODELS = "tests/test_weights.py", "tests/test_moe_model.py"
NUMBERS = f"{TESTS} -k 'is_written_as_it_was_read and (nemotron or mamba)'"
REFUSED = f"{TESTS} -k refused_by_name"
RECIPE = f"{TESTS} -k 'published_configs and nemotron'"
STEP, WRONG = f"{MODELS} -k 'numpy and nemotron'", f"{MODELS} -k 'wrong_configuration and nemotron'"
COSTS = "tests/test_declared_costs.py -k without_a_gate"


def numbers(name: str, anchor: str, old: str, new: str) -> Fault:
    return Fault(name, anchor, old, new, NUMBERS)


FAULTS = (
    numbers(
        "Mamba-2's gates stand after its inputs",
        "names:MAMBA2",
        "(('(N P) D', 'mamba2_gate: D N P'), ('(N P) D', 'mamba2_in: D N P'), $$after)",
        "(('(N P) D', 'mamba2_in: D N P'), ('(N P) D', 'mamba2_gate: D N P'), $$after)",
    ),
    numbers(
        "Mamba-2's steps stand before its gates",
        "names:MAMBA2",
        "($$before, ('N D', 'mamba2_dt: D N'))",
        "(('N D', 'mamba2_dt: D N'), $$before)",
    ),
    numbers(
        "taps of Mamba-2 lie channel by channel of all groups",
        "names:MAMBA2",
        "'(K RP) 1 W', 'mamba2_taps: K +RP W'",
        "'(RP K) 1 W', 'mamba2_taps: K +RP W'",
    ),
    numbers(
        "biases of Mamba-2's taps lie channel by channel of all groups",
        "names:MAMBA2",
        "'(K RP)', 'mamba2_taps_bias: K +RP'",
        "'(RP K)', 'mamba2_taps_bias: K +RP'",
    ),
    numbers("the skip of Mamba-2 is its steps' bias", "names:MAMBA2", "'mamba2_skip: N'", "'mamba2_dt_bias: N'"),
    numbers(
        "the norm of Mamba-2's result lies channel by channel of all heads",
        "names:MAMBA2",
        "rule('mixer.norm.weight', '(N P)', 'mamba2_out_norm: N P')",
        "rule('mixer.norm.weight', '(P N)', 'mamba2_out_norm: N P')",
    ),
    numbers(
        "the activation of Nemotron-H is not read",
        "read_nemotron_h",
        "read_activation($keys, 'mlp_hidden_act', RELU2, UNGATED)",
        "RELU2 if read_activation($keys, 'mlp_hidden_act', RELU2, UNGATED) else ''",
    ),
    numbers("RoPE turns queries and keys of Nemotron-H's files", "read_nemotron_h", "{'attention_rope': False}", "{}"),
    numbers(
        "layers by name are read as attention",
        "state_spaces:TYPES",
        "{'linear_attention': MAMBA, 'full_attention': ATTENDS, 'mlp': MLP, 'mamba': MAMBA, 'attention': ATTENDS}",
        "{'linear_attention': MAMBA, 'full_attention': MLP, 'mlp': MLP, 'mamba': MAMBA, 'attention': ATTENDS}",
    ),
    Fault(
        "attention without RoPE has it",
        "Attention.apply",
        "if $c.attention_rope:\n    $$body",
        "if True:\n    $$body",
        STEP,
    ),
    Fault(
        "an MLP without a gate is not squared",
        "UngatedMLP.apply",
        "jnp.square(jax.nn.relu($wide))",
        "jax.nn.relu($wide)",
        STEP,
    ),
    Fault(
        "an MLP without a gate replaces what it is added to",
        "UngatedMLP.apply",
        "$x + $ops.project($$args)",
        "$ops.project($$args)",
        STEP,
    ),
    Fault(
        "an MLP without a gate counts three products",
        "UngatedMLP.flops",
        "2 * 2 * $c.model_dim * $c.ffn_dim",
        "2 * 3 * $c.model_dim * $c.ffn_dim",
        COSTS,
    ),
    Fault(
        "both products run again",
        "UngatedMLP.recomputed",
        "1 / 2 * (not $remat.products)",
        "1.0 * (not $remat.products)",
        COSTS,
    ),
    Fault(
        "every device has all features of an MLP without a gate",
        "UngatedMLP.memory",
        "$share.tokens * $c.ffn_dim // $share.features",
        "$share.tokens * $c.ffn_dim",
        COSTS,
    ),
    Fault("squares are taken by gated parts", "feedforward:_check_gated", "$activation == RELU2", "False", WRONG),
    Fault(
        "experts need no activation of their own",
        "Experts.check",
        "$c.experts.activation or $c.activation",
        "$c.experts.activation or ''",
        WRONG,
    ),
    Fault(
        "a part of a head is to turn where nothing does",
        "DecoderShape._validate_rope",
        "$plain and (not self.attention_rope) and (self.rotary_dim is not None)",
        "False",
        WRONG,
    ),
    Fault(
        "parts are counted as two of every layer",
        "part:residual_std",
        "sum(map(len, $c.layers()))",
        "(2 * $c.num_layers)",
        "tests/test_layers.py -k starts_smaller",
    ),
    Fault(
        "last layers are lost",
        "config:of_kinds",
        "$kinds[len($kinds) - $tail:]",
        "()",
        RECIPE,
    ),
    Fault(
        "experts without a gate are taken for what they are not",
        "state_spaces:_letters",
        "if $strange:\n    $$body",
        "",
        REFUSED,
    ),
    Fault(
        "a pattern of another number of layers is taken",
        "state_spaces:_letters",
        "not $letters or $layers != len($letters)",
        "not $letters",
        REFUSED,
    ),
    Fault(
        "limits of steps are dropped",
        "state_spaces:_check_layer",
        "$plain is None or len($plain) != 2 or $$more",
        "$plain is None",
        REFUSED,
    ),
    Fault(
        "a convolution without a bias is taken",
        "state_spaces:_check_layer",
        "$keys.only('use_conv_bias', True)",
        "$keys.get('use_conv_bias')",
        REFUSED,
    ),
    Fault("heads that do not make up the layer are taken", "read_mamba2", "$wide != $inner", "False", REFUSED),
    Fault(
        "Nemotron-H is tied",
        "read_nemotron_h",
        "$keys.only('tie_word_embeddings', False)",
        "",
        REFUSED,
    ),
    Fault(
        "the embedding of files is one name",
        "reader:_check_tied",
        "next($t.name for $t in $tensors if $$which)",
        "'model.embed_tokens.weight'",
        f"{TESTS} -k tied_projection",
    ),
    Fault("steps are raised where they start", "LEAST_STEP", "1e-20", "1e-3", f"{TESTS} -k no_step_of"),
    Fault(
        "an adapter that PEFT refuses is written",
        "save_adapter",
        "$module.rpartition('.')[2] in $family.unadapted",
        "False",
        "tests/test_lora.py -k 'takes_not and nemotron'",
    ),
    Fault(
        "keys of RoPE decide where nothing turns",
        "match:deciding",
        "if not $c.turns():\n    $$body",
        "",
        f"{TESTS} -k without_attention",
    ),
    Fault(
        "heads of attention decide where there is none",
        "match:deciding",
        "if not $plain and 'latent_attention' not in $parts:\n    $$body",
        "",
        f"{TESTS} -k without_attention",
    ),
)
