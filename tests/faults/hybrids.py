"""Faults of weights of models that are recurrences and attention in turn: Qwen3-Next."""

from faults import Fault

TESTS = "tests/test_weights.py"
NUMBERS = f"{TESTS} -k 'is_written_as_it_was_read and next'"
KINDS = f"{TESTS} -k which_layers"
REFUSED = f"{TESTS} -k refused_by_name"


def numbers(name: str, anchor: str, old: str, new: str) -> Fault:
    return Fault(name, anchor, old, new, NUMBERS)


FAULTS = (
    numbers(
        "gates of a key head stand before what the convolution takes",
        "names:GATED_DELTA",
        "(('H D', 'gated_delta_in: D K H'), ('(R V) D', 'gated_delta_gate: D (K R) V'))",
        "(('(R V) D', 'gated_delta_gate: D (K R) V'), ('H D', 'gated_delta_in: D K H'))",
    ),
    numbers(
        "strengths and rates of value heads are swapped",
        "names:GATED_DELTA",
        "(('R D', 'gated_delta_rates: D (K R) 0'), ('R D', 'gated_delta_rates: D (K R) 1'))",
        "(('R D', 'gated_delta_rates: D (K R) 1'), ('R D', 'gated_delta_rates: D (K R) 0'))",
    ),
    numbers(
        "taps lie head by head",
        "names:GATED_DELTA",
        "'(K RV) 1 W', 'gated_delta_taps: K +RV W'",
        "'(RV K) 1 W', 'gated_delta_taps: K +RV W'",
    ),
    numbers(
        "blocks of a dim all begin it",
        "Blocks.tensors",
        "$taken[$name, $dim] += $size",
        "pass",
    ),
    numbers(
        "all value heads are those of the first key head",
        "Blocks.tensors",
        "$start = $i * $size",
        "$start = 0",
    ),
    numbers(
        "blocks are read one row late",
        "tensors:view",
        "$array[$start:$stop]",
        "np.roll($array, -1, 0)[$start:$stop]",
    ),
    numbers(
        "a head's gate stands before its query",
        "GATED_ATTENTION",
        "rule($$before, 'query: D N H', 'query_gate: D N H', joined='H')",
        "rule($$before, 'query_gate: D N H', 'query: D N H', joined='H')",
    ),
    numbers(
        "gate and up of the one shared expert are swapped",
        "NEXT_ROUTER",
        "($$before, rule('mlp.shared_expert.gate_proj.weight', 'F D', 'shared_gate: D F'), "
        "rule('mlp.shared_expert.up_proj.weight', 'F D', 'shared_up: D F'), $$after)",
        "($$before, rule('mlp.shared_expert.up_proj.weight', 'F D', 'shared_gate: D F'), "
        "rule('mlp.shared_expert.gate_proj.weight', 'F D', 'shared_up: D F'), $$after)",
    ),
    numbers("Qwen3-Next's norms are those of others", "read_qwen3_next", "{'zero_centered_norms': True}", "{}"),
    numbers(
        "which part of a head turns is not read", "read_rotary", "int($width * $share)", "int($width * $share / 2)"
    ),
    numbers(
        "whether weights of experts are normalized is not read",
        "read_qwen3_next",
        "$keys.get('norm_topk_prob', True)",
        "$keys.get('norm_topk_prob', True) or True",
    ),
    Fault("attention comes a layer early", "hybrids:_types", "($i + 1) % $interval", "($i + 2) % $interval", KINDS),
    Fault("every layer has experts", "mixed_layers", "($i + 1) % $every == 0", "$every > 0", KINDS),
    Fault(
        "a file without recurrences must have their sizes",
        "read_qwen3_next",
        "if $linear in $types:\n    $keys.only($$values)\n    $$body",
        "if True:\n    $keys.only($$values)\n    $$body",
        KINDS,
    ),
    Fault(
        "a bias of the gate is dropped",
        "read_qwen3_next",
        "$keys.only('attention_bias', False)",
        "$keys.get('attention_bias')",
        REFUSED,
    ),
    Fault(
        "a convolution with another activation is taken",
        "read_qwen3_next",
        "$keys.only('hidden_act', 'silu', 'swish')",
        "$keys.get('hidden_act')",
        REFUSED,
    ),
    Fault(
        "the share of a head is cut off by readers",
        "hybrids:_share",
        "$share if int($whole * $share) == $part else math.nextafter($share, 1.0)",
        "$share",
        f"{TESTS} -k share_of_a_head",
    ),
    Fault(
        "a module that predicts a second token is no part of a file",
        "reader:_is_ahead",
        "$m[1] is None or int($m[1]) >= $c.num_layers",
        "int($m[1] or 0) >= $c.num_layers",
        f"{TESTS} -k left_out_is_said",
    ),
    Fault(
        "a run of entries is cut as if it began its dim",
        "reader:_cut",
        "slice($low - $first, $high - $first)",
        "slice($low, $high)",
        f"{TESTS} -k run_of_entries",
    ),
    Fault(
        "adapters of a tensor in blocks are in its first rows",
        "peft:_pair",
        "$rows[:, $start:$stop] += $block.reshape($$size)",
        "$rows[:, :$stop - $start] += $block.reshape($$size)",
        "tests/test_lora.py -k 'merged_model and next'",
    ),
    Fault(
        "zero-centered norms multiply by their weight",
        "part:added",
        "$weight + $declared.added if $declared.added else $weight",
        "$weight",
        "tests/test_recurrent_layers.py -k 'published_as and delta'",
    ),
    Fault(
        "the last norm is never zero-centered",
        "final_hidden",
        "added($params['final_norm'], $$declared)",
        "$params['final_norm']",
        "tests/test_moe_model.py -k mixed",
    ),
    Fault(
        "the norm of a recurrence's result is zero-centered too",
        "GatedDelta.declare",
        "Param(($width,), '_', 'ones', decay=False, cast=False)",
        "norm_weight(c, $width)",
        "tests/test_recurrent_layers.py -k 'published_as and delta'",
    ),
)
