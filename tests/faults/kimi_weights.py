"""Faults of the weights of Kimi Linear."""

from faults import Fault

TESTS = "tests/test_weights.py"
NUMBERS = f"{TESTS} -k 'is_written_as_it_was_read and kimi'"
PUBLISHED = f"{TESTS} -k 'published_configs and kimi'"
REFUSED = f"{TESTS} -k refused_by_name"

FAULTS = (
    Fault(
        "keys of Kimi Delta Attention stand where queries do",
        "names:KDA",
        "_kda('k_proj.weight', '(N Q) D', 'kda_in: D N +Q', 'Q')",
        "_kda('k_proj.weight', '(N Q) D', 'kda_in: D N +Q')",
        NUMBERS,
    ),
    Fault(
        "taps of values stand where those of keys do",
        "names:KDA",
        "_kda('v_conv1d.weight', '(N V) 1 W', 'kda_taps: N +V W', 'Q', 'Q')",
        "_kda('v_conv1d.weight', '(N V) 1 W', 'kda_taps: N +V W', 'Q')",
        NUMBERS,
    ),
    Fault(
        "what decays come from stands where that of gates does",
        "names:KDA",
        "_kda('f_a_proj.weight', 'R D', 'kda_down: D +R')",
        "_kda('f_a_proj.weight', 'R D', 'kda_down: D +R', 'R')",
        NUMBERS,
    ),
    Fault(
        "biases of step sizes lie channel by channel",
        "names:KDA",
        "rule('self_attn.dt_bias', '(N H)', 'kda_dt_bias: N H')",
        "rule('self_attn.dt_bias', '(H N)', 'kda_dt_bias: N H')",
        NUMBERS,
    ),
    Fault(
        "a tensor's part stands where that of another does",
        "Blocks.tensors",
        "$taken[$name, $dim] + sum($sizes[$d] for $d in self.before)",
        "$taken[$name, $dim]",
        NUMBERS,
    ),
    Fault(
        "layers of Kimi Linear count from 0",
        "_kimi_recurrences",
        "$i + 1 in $linear",
        "$i in $linear",
        NUMBERS,
    ),
    Fault(
        "a layer of Kimi Linear may be in no list",
        "_kimi_recurrences",
        "sorted([*$linear, *$full]) != [*range(1, $layers + 1)]",
        "False",
        REFUSED,
    ),
    Fault(
        "what recurrences of Kimi Linear have more is not seen",
        "_kimi_recurrences",
        "$inner.finish()",
        "pass",
        REFUSED,
    ),
    Fault(
        "latents of Kimi Linear have the norm of the rest",
        "read_kimi_linear",
        "$shape(**$latent, rope=False, norm_eps=LATENT_EPS)",
        "$shape(**$latent, rope=False)",
        PUBLISHED,
    ),
    Fault(
        "positions turn in Kimi Linear",
        "read_kimi_linear",
        "$shape(**$latent, rope=False, norm_eps=LATENT_EPS)",
        "$shape(**$latent, norm_eps=LATENT_EPS)",
        NUMBERS,
    ),
    Fault(
        "shared experts of Kimi Linear are one",
        "read_kimi_linear",
        "$shared * $mixture['ffn_dim']",
        "$mixture['ffn_dim']",
        NUMBERS,
    ),
    Fault(
        "weights of Kimi Linear's experts always sum to one",
        "read_kimi_linear",
        "$keys.get('moe_renormalize', True)",
        "bool($keys.get('moe_renormalize', True)) or True",
        NUMBERS,
    ),
    Fault(
        "the first layers of Kimi Linear have experts too",
        "read_kimi_linear",
        "$i >= $first",
        "$i >= 0",
        NUMBERS,
    ),
    Fault(
        "the last layers of Kimi Linear make its pattern long",
        "read_kimi_linear",
        "dict(of_kinds($kinds, ends=True))",
        "dict(of_kinds($kinds))",
        PUBLISHED,
    ),
    Fault(
        "narrow vectors are normed as the rest",
        "LatentAttention.apply",
        "$c.norm_eps if $m.norm_eps is None else $m.norm_eps",
        "$c.norm_eps",
        "tests/test_moe_model.py -k kimi",
    ),
    Fault(
        "a model with another norm of latents is the same",
        "match:deciding",
        "$c.norm_eps if $c.latent.norm_eps is None else $c.latent.norm_eps",
        "$c.norm_eps",
        f"{TESTS} -k 'of_no_family and kimi'",
    ),
)
