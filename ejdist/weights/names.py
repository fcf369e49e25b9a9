"""The names of published tensors, the dims of each, and which of our parameters they hold: see `tensors.Rule`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ejdist.models.config import DecoderShape
from ejdist.weights.tensors import Blocks, Rule, Rules, rule

TOP = (
    rule("model.embed_tokens.weight", "V D", "embedding: V D"),
    rule("model.norm.weight", "D", "final_norm: D"),
    rule("lm_head.weight", "V D", "lm_head: D V"),
)
ATTENTION = (
    rule("input_layernorm.weight", "D", "attention_norm: D"),
    rule("self_attn.q_proj.weight", "(N H) D", "query: D N H"),
    rule("self_attn.k_proj.weight", "(K H) D", "key: D K H"),
    rule("self_attn.v_proj.weight", "(K H) D", "value: D K H"),
    rule("self_attn.o_proj.weight", "D (N H)", "output: N H D"),
    rule("self_attn.q_proj.bias", "(N H)", "query_bias: N H"),
    rule("self_attn.k_proj.bias", "(K H)", "key_bias: K H"),
    rule("self_attn.v_proj.bias", "(K H)", "value_bias: K H"),
    rule("self_attn.o_proj.bias", "D", "output_bias: D"),
    rule("self_attn.q_norm.weight", "H", "query_norm: H"),
    rule("self_attn.k_norm.weight", "H", "key_norm: H"),
    rule("self_attn.sinks", "N", "sinks: N 0"),
)
# Attention with a gate: of each head its query, then its gate.
GATED_ATTENTION = (
    rule("self_attn.q_proj.weight", "(N H) D", "query: D N H", "query_gate: D N H", joined="H"),
    *(r for r in ATTENTION if r.name != "self_attn.q_proj.weight"),
)


def _of_gated_delta(c: DecoderShape) -> dict[str, int]:
    """Returns sizes: K key heads of R value heads each, widths Q of a query or key and V of a value, and H, all that a key head
    has before the convolution."""
    m = c.gated_delta
    R = m.num_value_heads // m.num_key_heads
    sizes = {"K": m.num_key_heads, "R": R, "Q": m.key_dim, "V": m.value_dim, "H": 2 * m.key_dim + R * m.value_dim}
    return sizes | {"RV": R * m.value_dim, "W": m.conv_width, "D": c.model_dim}


GATED_DELTA = (
    rule("input_layernorm.weight", "D", "gated_delta_norm: D"),
    # Of each key head its query, its key, the values of its value heads, and their gates.
    Blocks(
        "linear_attn.in_proj_qkvz.weight",
        (("H D", "gated_delta_in: D K H"), ("(R V) D", "gated_delta_gate: D (K R) V")),
        _of_gated_delta,
        each="K",
    ),
    # Of each key head the strengths of its value heads, then their rates.
    Blocks(
        "linear_attn.in_proj_ba.weight",
        (("R D", "gated_delta_rates: D (K R) 0"), ("R D", "gated_delta_rates: D (K R) 1")),
        _of_gated_delta,
        each="K",
    ),
    # The queries of all key heads, their keys, and the values.
    Blocks(
        "linear_attn.conv1d.weight",
        (
            ("(K Q) 1 W", "gated_delta_taps: K +Q W"),
            ("(K Q) 1 W", "gated_delta_taps: K +Q W"),
            ("(K RV) 1 W", "gated_delta_taps: K +RV W"),
        ),
        _of_gated_delta,
    ),
    rule("linear_attn.A_log", "N", "gated_delta_a_log: N"),
    rule("linear_attn.dt_bias", "N", "gated_delta_dt_bias: N"),
    rule("linear_attn.norm.weight", "H", "gated_delta_out_norm: H"),
    rule("linear_attn.out_proj.weight", "D (N H)", "gated_delta_output: N H D"),
)


def _of_kda(c: DecoderShape) -> dict[str, int]:
    """Returns sizes: N heads, widths Q of a query or key and V of a value, R of what decays come from and of what gates do."""
    m = c.kda
    return {"N": m.num_heads, "Q": m.key_dim, "V": m.value_dim, "R": m.rank, "W": m.conv_width, "D": c.model_dim}


def _kda(name: str, theirs: str, ours: str, *before: str) -> Blocks:
    """Returns one of several tensors that hold a part each of one of ours, after the parts of those before."""
    return Blocks(f"self_attn.{name}", ((theirs, ours),), _of_kda, before=before)


KDA = (
    rule("input_layernorm.weight", "D", "kda_norm: D"),
    _kda("q_proj.weight", "(N Q) D", "kda_in: D N +Q"),
    _kda("k_proj.weight", "(N Q) D", "kda_in: D N +Q", "Q"),
    _kda("v_proj.weight", "(N V) D", "kda_in: D N +V", "Q", "Q"),
    _kda("q_conv1d.weight", "(N Q) 1 W", "kda_taps: N +Q W"),
    _kda("k_conv1d.weight", "(N Q) 1 W", "kda_taps: N +Q W", "Q"),
    _kda("v_conv1d.weight", "(N V) 1 W", "kda_taps: N +V W", "Q", "Q"),
    _kda("A_log", "1 1 N 1", "kda_a_log: N"),
    rule("self_attn.dt_bias", "(N H)", "kda_dt_bias: N H"),
    rule("self_attn.b_proj.weight", "N D", "kda_beta: D N"),
    _kda("f_a_proj.weight", "R D", "kda_down: D +R"),
    _kda("g_a_proj.weight", "R D", "kda_down: D +R", "R"),
    rule("self_attn.f_b_proj.weight", "(N H) R", "kda_decay: R N H"),
    rule("self_attn.g_b_proj.weight", "(N H) R", "kda_gate: R N H"),
    rule("self_attn.o_norm.weight", "H", "kda_out_norm: H"),
    rule("self_attn.o_proj.weight", "D (N H)", "kda_output: N H D"),
)


def _of_mamba2(c: DecoderShape) -> dict[str, int]:
    """Returns sizes: N heads of width P, in K groups, whose RP channels of x stand before S of B and S of C."""
    m = c.mamba2
    sizes = {"N": m.num_heads, "P": m.head_dim, "K": m.num_groups, "S": m.state_dim, "W": m.conv_width}
    return sizes | {"RP": m.num_heads // m.num_groups * m.head_dim, "D": c.model_dim}


# The layers of Mamba-2 and Nemotron-H, each of one part, which is called their mixer.
MAMBA2 = (
    rule("norm.weight", "D", "mamba2_norm: D"),
    # The gates of all heads, their x, B of all groups, C, and the steps.
    Blocks(
        "mixer.in_proj.weight",
        (
            ("(N P) D", "mamba2_gate: D N P"),
            ("(N P) D", "mamba2_in: D N P"),
            ("(K S) D", "mamba2_bc: D K +S"),
            ("(K S) D", "mamba2_bc: D K +S"),
            ("N D", "mamba2_dt: D N"),
        ),
        _of_mamba2,
    ),
    Blocks(
        "mixer.conv1d.weight",
        (
            ("(K RP) 1 W", "mamba2_taps: K +RP W"),
            ("(K S) 1 W", "mamba2_taps: K +S W"),
            ("(K S) 1 W", "mamba2_taps: K +S W"),
        ),
        _of_mamba2,
    ),
    Blocks(
        "mixer.conv1d.bias",
        (
            ("(K RP)", "mamba2_taps_bias: K +RP"),
            ("(K S)", "mamba2_taps_bias: K +S"),
            ("(K S)", "mamba2_taps_bias: K +S"),
        ),
        _of_mamba2,
    ),
    rule("mixer.A_log", "N", "mamba2_a_log: N"),
    rule("mixer.dt_bias", "N", "mamba2_dt_bias: N"),
    rule("mixer.D", "N", "mamba2_skip: N"),
    rule("mixer.norm.weight", "(N P)", "mamba2_out_norm: N P"),
    rule("mixer.out_proj.weight", "D (N P)", "mamba2_output: N P D"),
)
UNGATED_MLP = (
    rule("norm.weight", "D", "ungated_mlp_norm: D"),
    rule("mixer.up_proj.weight", "F D", "ungated_up: D F"),
    rule("mixer.down_proj.weight", "D F", "ungated_down: F D"),
)
LATENT_ATTENTION = (
    rule("input_layernorm.weight", "D", "latent_attention_norm: D"),
    rule("self_attn.q_proj.weight", "(N H) D", "latent_query: D N H", without="query_down"),
    rule("self_attn.q_a_proj.weight", "R D", "query_down: D R"),
    rule("self_attn.q_a_layernorm.weight", "R", "query_latent_norm: R"),
    rule("self_attn.q_b_proj.weight", "(N H) R", "latent_query: R N H", given="query_down"),
    rule("self_attn.kv_a_proj_with_mqa.weight", "R D", "latent_down: D R"),
    rule("self_attn.kv_a_layernorm.weight", "R", "latent_norm: R"),
    rule("self_attn.kv_b_proj.weight", "(N H) R", "key_up: R N H", "value_up: R N H", joined="H"),
    rule("self_attn.o_proj.weight", "D (N H)", "latent_output: N H D"),
)
NORM_OF_MLP = "post_attention_layernorm.weight"
MLP = (
    rule(NORM_OF_MLP, "D", "mlp_norm: D"),
    rule("mlp.gate_proj.weight", "F D", "gate: D F"),
    rule("mlp.up_proj.weight", "F D", "up: D F"),
    rule("mlp.down_proj.weight", "D F", "down: F D"),
)
ROUTER = (
    rule(NORM_OF_MLP, "D", "experts_norm: D"),
    rule("mlp.gate.weight", "E D", "router: D E"),
    rule("mlp.gate.e_score_correction_bias", "E", "bias: E"),
    rule("mlp.shared_experts.gate_proj.weight", "F D", "shared_gate: D F"),
    rule("mlp.shared_experts.up_proj.weight", "F D", "shared_up: D F"),
    rule("mlp.shared_experts.down_proj.weight", "D F", "shared_down: F D"),
)
# With one shared expert, and a gate of it.
NEXT_ROUTER = (
    rule(NORM_OF_MLP, "D", "experts_norm: D"),
    rule("mlp.gate.weight", "E D", "router: D E"),
    rule("mlp.shared_expert.gate_proj.weight", "F D", "shared_gate: D F"),
    rule("mlp.shared_expert.up_proj.weight", "F D", "shared_up: D F"),
    rule("mlp.shared_expert.down_proj.weight", "D F", "shared_down: F D"),
    rule("mlp.shared_expert_gate.weight", "S D", "shared_expert_gate: D S"),
)
EACH = (
    rule("mlp.experts.{E}.gate_proj.weight", "F D", "experts_gate_up: E D 0 F"),
    rule("mlp.experts.{E}.up_proj.weight", "F D", "experts_gate_up: E D 1 F"),
    rule("mlp.experts.{E}.down_proj.weight", "D F", "experts_down: E F D"),
)
# As transformers 5 has them in memory, and on request in files.
FUSED = (
    rule("mlp.experts.gate_up_proj", "E (C F) D", "experts_gate_up: E D C F"),
    rule("mlp.experts.down_proj", "E D F", "experts_down: E F D"),
)
EXPERTS, FUSED_EXPERTS = (*ROUTER, *EACH), (*ROUTER, *FUSED)
NEXT_EXPERTS, FUSED_NEXT_EXPERTS = (*NEXT_ROUTER, *EACH), (*NEXT_ROUTER, *FUSED)
MIXTRAL_EXPERTS = (
    rule(NORM_OF_MLP, "D", "experts_norm: D"),
    rule("block_sparse_moe.gate.weight", "E D", "router: D E"),
    rule("block_sparse_moe.experts.{E}.w1.weight", "F D", "experts_gate_up: E D 0 F"),
    rule("block_sparse_moe.experts.{E}.w3.weight", "F D", "experts_gate_up: E D 1 F"),
    rule("block_sparse_moe.experts.{E}.w2.weight", "D F", "experts_down: E F D"),
)
KIMI_EXPERTS = (
    *MIXTRAL_EXPERTS,
    rule("block_sparse_moe.gate.e_score_correction_bias", "E", "bias: E"),
    rule("block_sparse_moe.shared_experts.gate_proj.weight", "F D", "shared_gate: D F"),
    rule("block_sparse_moe.shared_experts.up_proj.weight", "F D", "shared_up: D F"),
    rule("block_sparse_moe.shared_experts.down_proj.weight", "D F", "shared_down: F D"),
)
GPT_OSS_EXPERTS = (
    rule(NORM_OF_MLP, "D", "experts_norm: D"),
    rule("mlp.router.weight", "E D", "router: D E"),
    rule("mlp.router.bias", "E", "router_bias: E"),
    rule("mlp.experts.gate_up_proj", "E D (F C)", "experts_gate_up: E D C F"),
    rule("mlp.experts.gate_up_proj_bias", "E (F C)", "experts_gate_up_bias: E C F"),
    rule("mlp.experts.down_proj", "E F D", "experts_down: E F D"),
    rule("mlp.experts.down_proj_bias", "E D", "experts_down_bias: E D"),
)


# Of DeepSeek-V3's multi-token prediction, behind the last layer: what joins the next token's embedding, which comes first, with
# the model's own result; and its output projection and embedding, which are the model's.
AHEAD = (
    rule("enorm.weight", "D", "embedding_norm: D"),
    rule("hnorm.weight", "D", "hidden_norm: D"),
    rule("eh_proj.weight", "R D", "of_embedding: D R", "of_hidden: D R", joined="D"),
    rule("shared_head.norm.weight", "D", "final_norm: D"),
)
COPIES = (
    rule("embed_tokens.weight", "V D", "embedding: V D"),
    rule("shared_head.head.weight", "V D", "lm_head: D V"),
    rule("shared_head.head.weight", "V D", "embedding: V D", without="lm_head"),
)


def with_ahead(experts: Sequence[Rule]) -> Rules:
    """Returns the rules of DeepSeek-V3 with these of its experts."""
    return replace(rules(experts=experts), ahead=AHEAD, copies=COPIES)


def rules(**parts: Sequence[Rule | Blocks]) -> Rules:
    """Returns the rules of a family, by the part of a layer; "" are those of no layer."""
    return Rules({"": TOP, "attention": ATTENTION, "latent_attention": LATENT_ATTENTION, "mlp": MLP} | parts)


def of_mixers(root: str) -> Rules:
    """Returns the rules of Mamba-2 and Nemotron-H. root: how names of tensors begin, "backbone" in files."""
    top = (
        rule(f"{root}.embeddings.weight", "V D", "embedding: V D"),
        rule(f"{root}.norm_f.weight", "D", "final_norm: D"),
        TOP[-1],
    )
    names = {"self_attn.": "mixer.", "input_layernorm.": "norm."}
    attention = [
        replace(r, name=r.name.replace(old, new)) for r in ATTENTION for old, new in names.items() if old in r.name
    ]
    parts = {"": top, "mamba2": MAMBA2, "attention": attention, "ungated_mlp": UNGATED_MLP}
    return Rules(parts, f"{root}.layers.{{layer}}.")


def hybrid(experts: Sequence[Rule]) -> Rules:
    """Returns the rules of Qwen3-Next with these of its experts."""
    return rules(attention=GATED_ATTENTION, gated_delta=GATED_DELTA, experts=experts)


KIMI = rules(kda=KDA, experts=KIMI_EXPERTS)
