"""Faults of weights in and out. What an import and an export do alike is noticed by numbers, not by going there and back."""

from faults import Fault

FAMILIES, NAMES, READER, TENSORS, FILES, WRITER, CONFIG, MATCH = (
    f"ejdist/weights/{name}.py"
    for name in ("families", "names", "reader", "tensors", "files", "writer", "config", "match")
)
TESTS, RUNS = "tests/test_weights.py", "tests/test_weights_run.py"
NUMBERS = f"{TESTS} -k is_written_as_it_was_read"


def numbers(name: str, file: str, old: str, new: str) -> Fault:
    return Fault(name, file, old, new, NUMBERS)


FAULTS = (
    Fault(
        "a folder's name is no value of a recipe",
        "arguments:assigned",
        "quoted($text)",
        "$text",
        "tests/test_weights_run.py -k as_overrides",
    ),
    numbers(
        "q and k are swapped",
        "names:ATTENTION",
        "($$before, rule('self_attn.q_norm.weight', 'H', 'query_norm: H'), rule('self_attn.k_norm.weight', "
        "'H', 'key_norm: H'), $$after)",
        "($$before, rule('self_attn.k_norm.weight', 'H', 'query_norm: H'), rule('self_attn.q_norm.weight', "
        "'H', 'key_norm: H'), $$after)",
    ),
    numbers(
        "k and v are swapped",
        "names:ATTENTION",
        "($$before, rule('self_attn.k_proj.weight', '(K H) D', 'key: D K H'), "
        "rule('self_attn.v_proj.weight', '(K H) D', 'value: D K H'), $$after)",
        "($$before, rule('self_attn.v_proj.weight', '(K H) D', 'key: D K H'), "
        "rule('self_attn.k_proj.weight', '(K H) D', 'value: D K H'), $$after)",
    ),
    Fault(
        "a matrix of equal sizes is transposed",
        "names:ATTENTION",
        "rule($$before, '(N H) D', $$after)",
        "rule($$before, 'D (N H)', $$after)",
        f"{TESTS} -k 'is_written_as_it_was_read and tied'",
    ),
    numbers(
        "pairs of a head lie beside each other",
        "names:ATTENTION",
        "rule($$before, '(N H) D', $$after)",
        "rule($$before, '(H N) D', $$after)",
    ),
    numbers(
        "heads of the output are the inner dim",
        "names:ATTENTION",
        "rule($$before, 'D (N H)', $$after)",
        "rule($$before, 'D (H N)', $$after)",
    ),
    numbers(
        "gate and up of an MLP are swapped",
        "names:MLP",
        "($$before, rule('mlp.gate_proj.weight', 'F D', 'gate: D F'), rule('mlp.up_proj.weight', 'F D', 'up: "
        "D F'), $$after)",
        "($$before, rule('mlp.up_proj.weight', 'F D', 'gate: D F'), rule('mlp.gate_proj.weight', 'F D', 'up: "
        "D F'), $$after)",
    ),
    numbers(
        "gate and up of Mixtral's experts are swapped",
        "MIXTRAL_EXPERTS",
        "($$before, rule('block_sparse_moe.experts.{E}.w1.weight', 'F D', 'experts_gate_up: E D 0 F'), "
        "rule('block_sparse_moe.experts.{E}.w3.weight', 'F D', 'experts_gate_up: E D 1 F'), $$after)",
        "($$before, rule('block_sparse_moe.experts.{E}.w3.weight', 'F D', 'experts_gate_up: E D 0 F'), "
        "rule('block_sparse_moe.experts.{E}.w1.weight', 'F D', 'experts_gate_up: E D 1 F'), $$after)",
    ),
    numbers(
        "gate and up of shared experts are swapped",
        "ROUTER",
        "($$before, rule('mlp.shared_experts.gate_proj.weight', 'F D', 'shared_gate: D F'), "
        "rule('mlp.shared_experts.up_proj.weight', 'F D', 'shared_up: D F'), $$after)",
        "($$before, rule('mlp.shared_experts.up_proj.weight', 'F D', 'shared_gate: D F'), "
        "rule('mlp.shared_experts.gate_proj.weight', 'F D', 'shared_up: D F'), $$after)",
    ),
    numbers(
        "gate and up of GPT-OSS are halves",
        "GPT_OSS_EXPERTS",
        "rule($$before, 'E D (F C)', $$after)",
        "rule($$before, 'E D (C F)', $$after)",
    ),
    numbers(
        "biases of gate and up of GPT-OSS are halves",
        "GPT_OSS_EXPERTS",
        "rule($$before, 'E (F C)', $$after)",
        "rule($$before, 'E (C F)', $$after)",
    ),
    numbers(
        "keys and values of a latent are swapped",
        "LATENT_ATTENTION",
        "rule($$args, 'key_up: R N H', 'value_up: R N H', **$$args2)",
        "rule($$args, 'value_up: R N H', 'key_up: R N H', **$$args2)",
    ),
    numbers(
        "experts are off by one",
        "_of_rule",
        "$number.get($d)",
        "($number[$d] + 1) % sizes[$d][0] if $d in $number else None",
    ),
    numbers(
        "layers are off by one",
        "expand",
        "rules.layer.format(layer=$layer)",
        "rules.layer.format(layer=($layer + 1) % c.num_layers)",
    ),
    numbers(
        "a shared expert's width is that of one",
        "_deepseek_v3",
        "ExpertsShape(**$$before, shared_dim=$ffn * $shared, **$$after)",
        "ExpertsShape(**$$before, shared_dim=$ffn, **$$after)",
    ),
    numbers(
        "the bias that chooses experts is left out",
        "_deepseek_v3",
        "ExpertsShape(**$$before, bias_rate=0.001, **$$after)",
        "ExpertsShape(**$$before, bias_rate=0.0, **$$after)",
    ),
    numbers(
        "the factor of the weights of experts is lost",
        "_deepseek_v3",
        "$keys.get('routed_scaling_factor', 1.0)",
        "$keys.get('routed_scaling_factor', 1.0) > 0",
    ),
    numbers(
        "groups of experts are lost", "_deepseek_v3", "$keys.get('n_group', 1)", "1 if $keys.get('n_group', 1) else 1"
    ),
    numbers(
        "weights of experts are never normalized",
        "_qwen3_moe",
        "$keys.get('norm_topk_prob', False)",
        "not $keys.get('norm_topk_prob', False)",
    ),
    numbers(
        "dense layers among experts are forgotten",
        "mixed_layers",
        "$i not in $dense and ($i + 1) % $every == 0",
        "($i not in $dense or $i > 0) and ($i + 1) % $every == 0",
    ),
    numbers("a window starts a layer late", "_qwen_layers", "$i >= $first", "$i > $first"),
    numbers(
        "the base of the positions is that of the family",
        "read_rope",
        "float($inner.get('rope_theta', $theta))",
        "float($inner.get('rope_theta', base))",
    ),
    numbers("the scale of YaRN's logits is lost", "_deepseek_v3", "$up ** 2", "1"),
    numbers(
        "YaRN's factor of cos and sin is lost",
        "read_rope",
        "$found['rope_attention_factor'] = $factor",
        "$found['rope_attention_factor'] = None if one else $factor",
    ),
    numbers("YaRN's ramp is between whole pairs", "read_rope", "bool($inner.get('truncate', True))", "True"),
    numbers(
        "a norm's epsilon is the default",
        "Family.section",
        "$keys.get($theirs, self.norm_eps)",
        "self.norm_eps / 2",
    ),
    numbers(
        "a file's tensors begin where its header does",
        "read_header",
        "Stored($$args, 8 + $length + $start)",
        "Stored($$args, $length + $start)",
    ),
    numbers(
        "every tensor of a file is where the first one is",
        "Files._begin",
        "[$at, $stop]",
        "[0, $stop - $at]",
    ),
    Fault(
        "a shard is put at its place in the whole",
        "_cut",
        "$shape.append($high - $low)\n$places.append($low - $start)",
        "$shape.append($high - $low)\n$places.append($low)",
        f"{TESTS} -k every_device",
    ),
    Fault(
        "every device is given the first shard",
        "_cut",
        "slice($low, $high)",
        "slice($high - $low)",
        f"{TESTS} -k every_device",
    ),
    Fault(
        "the host holds a whole stack",
        "_load_leaf",
        "jax.block_until_ready(list($shards.values()))",
        "kept = [*locals().get('kept', []), np.array(array, np.float32)]\njax.block_until_ready(list($shards.values()))",
        f"{TESTS} -k memory_of_an_import",
    ),
    Fault(
        "files stay mapped",
        "Stored.open",
        "def open(self) -> Any:\n    $$body",
        "@__import__('functools').cache\ndef open(self) -> Any:\n    $$body",
        f"{TESTS} -k memory_of_an_import",
    ),
    Fault(
        "bfloat16 is cut off and not rounded",
        "_made",
        "$held[$piece.leaf, $row][$at]",
        "($held[$piece.leaf, $row][$at].view(np.uint32) & np.uint32(4278190080)).view(np.float32)",
        f"{TESTS} -k rounded_goes",
    ),
    Fault(
        "a router's bias is rounded",
        "writer:_dtype_of",
        "'F32' if $t.pieces[0].leaf.startswith('buffers.') else WRITTEN[$dtype]",
        "WRITTEN[$dtype]",
        f"{TESTS} -k narrow_files",
    ),
    Fault(
        "what is not complete stays",
        "save",
        "shutil.rmtree($new, ignore_errors=True)",
        "pass",
        f"{TESTS} -k never_mixes",
    ),
    Fault(
        "unknown tensors are dropped in silence",
        "reader:check",
        "if unknown:\n    $$body",
        "if False:\n    $$body",
        f"{TESTS} -k files_that_are_not",
    ),
    Fault(
        "missing tensors are not missed",
        "reader:check",
        "if absent:\n    $$body",
        "if False:\n    $$body",
        f"{TESTS} -k files_that_are_not",
    ),
    Fault(
        "a tensor of another shape is taken",
        "reader:check",
        "$entry.shape != $tensor.shape",
        "len($entry.shape) != len($tensor.shape)",
        f"{TESTS} -k files_that_are_not",
    ),
    Fault(
        "a file that is cut off is taken",
        "read_header",
        "8 + $length + $stop > $size",
        "False",
        f"{TESTS} -k files_that_are_not",
    ),
    Fault(
        "a projection that is not tied is dropped",
        "reader:check",
        "_check_tied($tensors, $stored, $where)",
        "",
        f"{TESTS} -k tied_projection",
    ),
    Fault(
        "what is left out is not said",
        "reader:check",
        "if ahead:\n    $$body",
        "if False:\n    $$body",
        f"{TESTS} -k left_out_is_said",
    ),
    Fault(
        "unknown keys of a config are ignored",
        "Keys.finish",
        "if $unknown:\n    $$body",
        "if False:\n    $$body",
        f"{TESTS} -k refused_by_name",
    ),
    Fault(
        "a scaling that is not had is ignored",
        "read_rope",
        "$kind not in ('default', 'linear', 'llama3')",
        "False",
        f"{TESTS} -k refused_by_name",
    ),
    Fault(
        "a window where there is no key is none",
        "_mistral",
        "None if 'sliding_window' in $keys else 4096",
        "None",
        f"{TESTS} -k mistral_without",
    ),
    Fault(
        "a model that no family has is written all the same",
        "family_of",
        "if not $left:\n    $$body\n$tried.append($$args)",
        "if True:\n    $$body\n$tried.append($$args)",
        f"{TESTS} -k no_family",
    ),
    Fault(
        "weights of another model are taken",
        "_check_model",
        "if $found:\n    $$body",
        "if False:\n    $$body",
        f"{TESTS} -k told_the_first",
    ),
    Fault(
        "what changes no function is refused",
        "deciding",
        "{'ffn_dim', 'activation'}",
        "{'activation'}",
        f"{TESTS} -k changes_no_function",
    ),
    Fault(
        "a first state keeps the random parameters",
        "make_program.take_state",
        "$own = {$part: $new | $given['buffers'].get($part, {}) for $part, $new in "
        "initialise($model.buffers, $key).items()}\n"
        "$drawn = initialise($model.declared, $key)\n"
        "$params = $given['params'] or $drawn",
        "$own = {$part: $new | $given['buffers'].get($part, {}) for $part, $new in "
        "initialise($model.buffers, $key).items()}\n"
        "$drawn = initialise($model.declared, $key)\n"
        "$params = $drawn",
        f"{RUNS} -k first_state",
    ),
    Fault(
        "a router's bias is not taken over",
        "make_program.take_state",
        "$new | $given['buffers'].get($part, {})",
        "$new",
        f"{RUNS} -k first_state",
    ),
    Fault(
        "a run with init_from begins again where it should go on",
        "start_state",
        "if $found:\n    $$body\nelse:\n    $$body2\n$hosts = $run.hosts",
        "if $found and $run.sections.model.init_from is None:\n    $$body\nelse:\n    $$body2\n$hosts = $run.hosts",
        f"{RUNS} -k alike",
    ),
    Fault(
        "numbers of files are not in their digest",
        "files:digest_of",
        "$digest.update($part)",
        "pass",
        f"{RUNS} -k digest",
    ),
    Fault(
        "a folder that moved stops a run",
        "DecoderConfig.init_from",
        "operational(None, recorded=True)",
        "None",
        f"{RUNS} -k where_parameters",
    ),
    Fault(
        "parameters of a checkpoint are not checked",
        "Checkpoints.restore_part",
        "check_digests($arrays, $digests)",
        "",
        f"{RUNS} -k not_taken",
    ),
    Fault(
        "the last step is written whatever was asked for",
        "Run.__init__",
        "$last if $step is None else $step",
        "$last",
        f"{RUNS} -k command_writes",
    ),
    Fault(
        "a digest looks into twice as many tensors",
        "files:digest_of",
        "-(-len($names) // _PLACES)",
        "max(1, len($names) // _PLACES)",
        "tests/test_weights.py -k thousand_tensors",
    ),
)
