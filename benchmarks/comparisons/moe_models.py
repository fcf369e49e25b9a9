"""`python benchmarks/comparisons/moe_models.py [WORDS]`: the decoder beside whole models of transformers, on a CPU.

Mixtral, Qwen3-MoE, DeepSeek-V3, GPT-OSS, Qwen3-Next, Nemotron-H and Mamba-2 with few and random weights: logits, the loss, and
the gradient of every parameter, in float32. WORDS choose rows. Needs torch and transformers, which the project does not
install.

A head's rotary pairs are neighbours in DeepSeek-V3, and theirs come out of the rotation one half after the other: a logit
does not see it, since queries and keys are alike.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejdist import bind_ops
from ejdist.models.config import ExpertsShape, LatentShape
from ejdist.models.decoder import DecoderConfig, hidden_states, loss, output_projection
from ejdist.models.model import StepContext
from ejdist.models.recurrent_shapes import GatedDeltaShape, Mamba2Shape
from ejdist.training.runs import nested
from ejdist.weights.families import FAMILIES
from ejdist.weights.reader import tensors_in
from ejdist.weights.tensors import as_ours, declared_leaves

Weights = dict[str, np.ndarray]

B, T, V, D, N, K, H, E, F = 2, 40, 61, 32, 4, 2, 8, 8, 12
FACTOR, LENGTH, WINDOW = 32.0, 16, 9  # of YaRN, and keys of a windowed layer
THEIRS = {"vocab_size": V, "hidden_size": D, "num_attention_heads": N, "num_key_value_heads": K, "num_hidden_layers": 3}
OURS = {"vocab_size": V, "model_dim": D, "num_heads": N, "num_kv_heads": K, "head_dim": H, "num_layers": 3}
YARN = {"rope_type": "yarn", "factor": FACTOR, "original_max_position_embeddings": LENGTH}
LATENT = LatentShape(kv_rank=16, query_rank=12, nope_dim=8, rope_dim=4, value_dim=6)


def decoder(**options: Any) -> DecoderConfig:
    return DecoderConfig(**OURS, ffn_dim=24, tie_embeddings=False, layer_pattern=("experts",), **options)


def mixtral() -> tuple[Any, DecoderConfig]:
    import transformers as tf

    config = tf.MixtralConfig(**THEIRS, intermediate_size=F, num_local_experts=E, num_experts_per_tok=2)
    experts = ExpertsShape(num=E, top_k=2, ffn_dim=F)
    return tf.MixtralForCausalLM(config), decoder(rope_base=1e6, norm_eps=1e-5, experts=experts)


def qwen3() -> tuple[Any, DecoderConfig]:
    import transformers as tf

    experts = {"num_experts": E, "moe_intermediate_size": F, "num_experts_per_tok": 3, "norm_topk_prob": True}
    config = tf.Qwen3MoeConfig(**THEIRS, **experts, head_dim=H)
    return tf.Qwen3MoeForCausalLM(config), decoder(qk_norm=True, experts=ExpertsShape(num=E, top_k=3, ffn_dim=F))


def deepseek() -> tuple[Any, DecoderConfig]:
    import transformers as tf

    sizes = THEIRS | {"num_key_value_heads": N, "q_lora_rank": LATENT.query_rank, "kv_lora_rank": LATENT.kv_rank}
    sizes |= {"qk_nope_head_dim": LATENT.nope_dim, "qk_rope_head_dim": LATENT.rope_dim, "v_head_dim": LATENT.value_dim}
    sizes |= {"intermediate_size": 24, "first_k_dense_replace": 1, "moe_intermediate_size": F, "n_shared_experts": 2}
    sizes |= {
        "n_routed_experts": E,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
    }
    rope = YARN | {"rope_theta": 10000.0, "mscale": 1.0, "mscale_all_dim": 1.0}
    config = tf.DeepseekV3Config(**sizes, rope_parameters=rope, max_position_embeddings=int(FACTOR) * LENGTH)
    experts = ExpertsShape(num=E, top_k=3, ffn_dim=F, shared_dim=2 * F, score="sigmoid", scaling_factor=2.5,
                           num_groups=4, topk_groups=2, bias_rate=0.001)  # fmt: skip
    ours = decoder(
        first_layers=("latent",), rope_scaling="yarn", rope_factor=FACTOR, rope_original_length=LENGTH,
        rope_attention_factor=1.0, latent=LATENT, experts=experts,
        attention_scale=(0.1 * math.log(FACTOR) + 1) ** 2 / math.sqrt(LATENT.nope_dim + LATENT.rope_dim),
    )  # fmt: skip
    ours.layer_pattern = ("latent_experts",)
    return tf.DeepseekV3ForCausalLM(config), ours


def gpt_oss() -> tuple[Any, DecoderConfig]:
    import transformers as tf

    rope = YARN | {"rope_theta": 150000.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
    sizes = {"intermediate_size": F, "num_local_experts": E, "num_experts_per_tok": 2, "sliding_window": WINDOW}
    sizes |= {"head_dim": H, "max_position_embeddings": int(FACTOR) * LENGTH}
    experts = ExpertsShape(num=E, top_k=2, ffn_dim=F, activation="clamped_swiglu", bias=True, router_bias=True)
    ours = decoder(
        norm_eps=1e-5, rope_base=150000.0, rope_scaling="yarn", rope_factor=FACTOR, rope_original_length=LENGTH,
        rope_truncate=False, attention_bias=True, attention_output_bias=True, attention_sinks=True, sliding_window=WINDOW,
        experts=experts,
    )  # fmt: skip
    ours.layer_pattern = ("window_experts", "experts")
    return tf.GptOssForCausalLM(tf.GptOssConfig(**THEIRS, **sizes, rope_parameters=rope)), ours


def qwen3_next() -> tuple[Any, DecoderConfig]:
    import transformers as tf

    sizes = {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 6,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 12,
    }
    sizes |= {"linear_conv_kernel_dim": 3, "head_dim": 16, "full_attention_interval": 3, "partial_rotary_factor": 0.25}
    sizes |= {
        "num_experts": E,
        "moe_intermediate_size": F,
        "num_experts_per_tok": 3,
        "shared_expert_intermediate_size": 10,
    }
    ours = decoder(
        qk_norm=True, attention_gate=True, rotary_dim=4, zero_centered_norms=True,
        gated_delta=GatedDeltaShape(num_key_heads=2, num_value_heads=6, key_dim=16, value_dim=12, conv_width=3),
        experts=ExpertsShape(num=E, top_k=3, ffn_dim=F, shared_dim=10, shared_gate=True),
    )  # fmt: skip
    ours.head_dim, ours.layer_pattern = 16, ("gated_delta+experts", "gated_delta+experts", "full+experts")
    return tf.Qwen3NextForCausalLM(tf.Qwen3NextConfig(**THEIRS, **sizes)), ours


def nemotron_h() -> tuple[Any, DecoderConfig]:
    import transformers as tf

    sizes = {"mamba_num_heads": 4, "mamba_head_dim": 6, "ssm_state_size": 5, "n_groups": 2, "conv_kernel": 3}
    config = tf.NemotronHConfig(
        **THEIRS, **sizes, head_dim=H, intermediate_size=24, hybrid_override_pattern="M-M*-", chunk_size=16
    )
    kinds = ("mamba2+none", "none+ungated_mlp", "mamba2+none", "full+none", "none+ungated_mlp")
    return tf.NemotronHForCausalLM(config), DecoderConfig(
        **OURS | {"num_layers": 5}, ffn_dim=24, tie_embeddings=False, layer_pattern=kinds, activation="relu2",
        attention_rope=False, norm_eps=1e-5, mamba2=Mamba2Shape(4, 6, 5, 2, 3),
    )  # fmt: skip


def mamba2() -> tuple[Any, DecoderConfig]:
    import transformers as tf

    sizes = {"num_heads": 8, "head_dim": 8, "state_size": 5, "n_groups": 2, "conv_kernel": 3, "chunk_size": 16}
    config = tf.Mamba2Config(vocab_size=V, hidden_size=D, num_hidden_layers=3, **sizes)
    return tf.Mamba2ForCausalLM(config), DecoderConfig(
        **OURS, tie_embeddings=False, layer_pattern=("mamba2+none",), norm_eps=1e-5, mamba2=Mamba2Shape(8, 8, 5, 2, 3)
    )


MODELS: dict[str, Callable[[], tuple[Any, DecoderConfig]]] = {
    "Mixtral": mixtral,
    "Qwen3-MoE": qwen3,
    "DeepSeek-V3": deepseek,
    "GPT-OSS": gpt_oss,
    "Qwen3-Next": qwen3_next,
    "Nemotron-H": nemotron_h,
    "Mamba-2": mamba2,
}


def converted(state: Weights, c: DecoderConfig, name: str) -> dict[str, Any]:
    """Returns our parameters from theirs, or from their gradients; `name` is that of their class."""
    tensors = [t for t in tensors_in(FAMILIES[name], c, state) if t.name in state]  # what has no gradient is not there
    leaves = {leaf: p for leaf, p in declared_leaves(c).items() if leaf.startswith("params.")}
    return nested(as_ours(state, tensors, leaves))["params"]


def randomise(model: Any, rng: np.random.Generator) -> Weights:
    """Gives a model weights, and what else it has, that let every part of it show. Returns the biases of its choices."""
    import torch

    biases = {}
    with torch.no_grad():
        for name, p in model.named_parameters():
            fan_in = p.shape[-1] if p.ndim > 1 else 4
            start = p.mean().item() if name.endswith("norm.weight") else 0  # 1, or 0 of those that are zero-centered
            p.copy_(torch.tensor(start + rng.standard_normal(p.shape) * fan_in**-0.5))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.tensor(rng.standard_normal(buffer.shape) * 0.2))
                biases[name] = buffer.numpy()
    return biases


def theirs(model: Any, tokens: np.ndarray) -> tuple[np.ndarray, float, Weights]:
    """Returns (logits, loss, gradients)."""
    import torch

    ids = torch.tensor(tokens)
    found = model(input_ids=ids, labels=ids)
    found.loss.backward()
    return (
        found.logits.detach().numpy(),
        float(found.loss.detach()),
        {n: p.grad.numpy() for n, p in model.named_parameters()},
    )


def balance_of_theirs(model: Any, tokens: np.ndarray) -> list[float]:
    """Returns the balance loss of each layer, without their factor top_k."""
    import torch
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    with torch.no_grad():
        logits = model(input_ids=torch.tensor(tokens), output_router_logits=True).router_logits
    top_k = model.config.num_experts_per_tok
    return [float(load_balancing_loss_func((one,), E, top_k)) / top_k for one in logits]


def off(got: Any, want: Any) -> float:
    """Returns how far they are apart, relative to the norm of what is wanted."""
    want = np.asarray(want, np.float64)
    return float(np.linalg.norm(np.asarray(got, np.float64) - want) / np.linalg.norm(want))


def compared(make: Callable[[], tuple[Any, DecoderConfig]]) -> tuple[float, float, dict[str, float], float | None]:
    """Returns the relative differences (of the logits, the loss, each gradient, the balance losses)."""
    model, c = make()
    c.validate()
    model.config._attn_implementation = model.config._experts_implementation = "eager"
    rng = np.random.default_rng(0)
    biases = randomise(model, rng)
    tokens = rng.integers(0, V, (B, T))
    logits, value, gradients = theirs(model, tokens)
    params = converted({n: p.detach().numpy() for n, p in model.named_parameters()}, c, type(model).__name__)
    targets = np.concatenate([tokens[:, 1:], np.full((B, 1), -1)], 1)
    batch = {"tokens": tokens, "targets": targets, "positions": np.tile(np.arange(T), (B, 1))}
    batch = {k: jnp.asarray(v, jnp.int32) for k, v in (batch | {"segment_ids": np.zeros_like(tokens)}).items()}
    context = StepContext(0, 0, {"experts": {"bias": np.stack([*biases.values()])}} if biases else {})
    ops = bind_ops(None)

    @jax.jit
    def run(params: Any) -> tuple:
        found = jax.value_and_grad(partial(loss, batch=batch, c=c, ops=ops, context=context), has_aux=True)(params)
        hidden = hidden_states(params, batch, c, ops, context=context)
        return jnp.einsum("btd,dv->btv", hidden, output_projection(params, c), precision="highest"), found

    ours, ((total, metrics), grads) = run(params)
    count = B * (T - 1)
    errors = jax.tree_util.tree_leaves_with_path(
        jax.tree.map(lambda a, b: off(a / count, b), grads, converted(gradients, c, type(model).__name__))
    )
    named = {jax.tree_util.keystr(path, simple=True, separator="."): error for path, error in errors}
    balance = None
    if (
        "experts" in c.part_names() and c.experts.score == "softmax"
    ):  # theirs is of a softmax, whatever the model's scores are
        balance = off(metrics["experts/balance_loss"].value / count, balance_of_theirs(model, tokens))
    return off(ours, logits), off(total / count, value), named, balance


def main() -> None:
    """Prints the table in the README of the models."""
    jax.config.update("jax_platforms", "cpu")
    jax.devices()  # before torch loads CUDA libraries of its own
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    print(f"transformers {transformers.__version__}, torch {torch.__version__}, float32, {B} x {T} tokens, 3 layers\n")
    print("| model | logits | loss | largest of the gradients | gradients | balance loss |\n|---|---|---|---|---|---|")
    for name, make in MODELS.items():
        if not sys.argv[1:] or any(word.lower() in name.lower() for word in sys.argv[1:]):
            logits, value, gradients, balance = compared(make)
            worst = max(gradients, key=gradients.__getitem__)
            cells = [f"{logits:.1e}", f"{value:.1e}", f"{gradients[worst]:.1e} ({worst.rpartition('.')[2]})"]
            cells += [str(len(gradients)), "none" if balance is None else f"{balance:.1e}"]
            print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
