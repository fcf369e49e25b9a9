"""The names of published tensors, the dims of each, and which of our parameters they hold: see `tensors.Rule`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ejdist.weights.tensors import Rule, rule

Rules = Mapping[str, Sequence[Rule]]

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
EXPERTS = (
    *ROUTER,
    rule("mlp.experts.{E}.gate_proj.weight", "F D", "experts_gate_up: E D 0 F"),
    rule("mlp.experts.{E}.up_proj.weight", "F D", "experts_gate_up: E D 1 F"),
    rule("mlp.experts.{E}.down_proj.weight", "D F", "experts_down: E F D"),
)
# As transformers 5 has them in memory, and on request in files.
FUSED_EXPERTS = (
    *ROUTER,
    rule("mlp.experts.gate_up_proj", "E (C F) D", "experts_gate_up: E D C F"),
    rule("mlp.experts.down_proj", "E D F", "experts_down: E F D"),
)
MIXTRAL_EXPERTS = (
    rule(NORM_OF_MLP, "D", "experts_norm: D"),
    rule("block_sparse_moe.gate.weight", "E D", "router: D E"),
    rule("block_sparse_moe.experts.{E}.w1.weight", "F D", "experts_gate_up: E D 0 F"),
    rule("block_sparse_moe.experts.{E}.w3.weight", "F D", "experts_gate_up: E D 1 F"),
    rule("block_sparse_moe.experts.{E}.w2.weight", "D F", "experts_down: E F D"),
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


def rules(**experts: Sequence[Rule]) -> Rules:
    """Returns the rules of a family, by the part of a layer; "" are those of no layer."""
    return {"": TOP, "attention": ATTENTION, "latent_attention": LATENT_ATTENTION, "mlp": MLP} | experts
