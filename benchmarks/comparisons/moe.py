"""`python benchmarks/comparisons/moe.py [WORDS]`: `ejdist.moe` beside the blocks of experts of transformers, on a CPU.

Mixtral, Qwen2-MoE, Qwen3-MoE, DeepSeek-V3 and GPT-OSS with small random weights: results and all gradients, for the same
float32 inputs. WORDS choose rows. Needs torch and transformers, which the project does not install.
"""

from __future__ import annotations

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejdist import moe

B, T, D, E, F, Fs = 2, 33, 16, 8, 12, 20
SMALL = {"hidden_size": D, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 8}


def blocks() -> dict[str, tuple]:
    """Returns name -> (block of transformers, options of ours)."""
    import transformers as tf
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek
    from transformers.models.gpt_oss import modeling_gpt_oss as gpt_oss
    from transformers.models.mixtral import modeling_mixtral as mixtral
    from transformers.models.qwen2_moe import modeling_qwen2_moe as qwen2
    from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen3

    def ready(block: Any, config: Any) -> Any:
        config._experts_implementation = "eager"
        return block(config)

    qwen = {"num_experts": E, "moe_intermediate_size": F, "num_experts_per_tok": 3}
    routed = {"n_routed_experts": E, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}
    routed |= {"moe_intermediate_size": F, "num_experts_per_tok": 3, "n_shared_experts": 2}
    return {
        "Mixtral": (
            ready(
                mixtral.MixtralSparseMoeBlock,
                tf.MixtralConfig(**SMALL, intermediate_size=F, num_local_experts=E, num_experts_per_tok=2),
            ),
            {"top_k": 2},
        ),
        "Qwen2-MoE": (
            ready(
                qwen2.Qwen2MoeSparseMoeBlock,
                tf.Qwen2MoeConfig(**SMALL, **qwen, shared_expert_intermediate_size=Fs, norm_topk_prob=False),
            ),
            {"top_k": 3, "normalize": False},
        ),
        "Qwen3-MoE": (
            ready(qwen3.Qwen3MoeSparseMoeBlock, tf.Qwen3MoeConfig(**SMALL, **qwen, norm_topk_prob=True)),
            {"top_k": 3},
        ),
        "DeepSeek-V3": (
            ready(deepseek.DeepseekV3MoE, tf.DeepseekV3Config(**SMALL, **routed)),
            {"top_k": 3, "score": "sigmoid", "num_groups": 4, "topk_groups": 2, "routed_scaling_factor": 2.5},
        ),
        "GPT-OSS": (
            ready(
                gpt_oss.GptOssMLP,
                tf.GptOssConfig(**SMALL, intermediate_size=F, num_local_experts=E, num_experts_per_tok=2),
            ),
            {"top_k": 2, "activation": "clamped_swiglu"},
        ),
    }


def converted(name: str, state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns our arrays from a block's own, or from their gradients."""
    router = "router" if name == "GPT-OSS" else "gate"
    ours = {"router": state[f"{router}.weight"].T}
    gate_up, down = state["experts.gate_up_proj"], state["experts.down_proj"]
    if name == "GPT-OSS":  # columns of gate and up alternate
        ours |= {"gate": gate_up.reshape(E, D, F, 2).swapaxes(2, 3), "down": down, "router_bias": state["router.bias"]}
        ours["gate_bias"] = state["experts.gate_up_proj_bias"].reshape(E, F, 2).swapaxes(1, 2)
        ours["down_bias"] = state["experts.down_proj_bias"]
        return ours
    ours |= {"gate": np.moveaxis(gate_up.reshape(E, 2, F, D), 3, 1), "down": down.swapaxes(1, 2)}
    shared = {"DeepSeek-V3": "shared_experts", "Qwen2-MoE": "shared_expert"}.get(name)
    if shared:
        ours |= {f"shared_{part}": state[f"{shared}.{part}_proj.weight"].T for part in ("gate", "up", "down")}
    if name == "Qwen2-MoE":
        ours["shared_expert_gate"] = state["shared_expert_gate.weight"].T
    return ours


def compared(name: str, block: Any, options: dict, rng: np.random.Generator) -> list[float]:
    """Returns how far the result and each gradient are apart, relative to their norms."""
    import torch

    with torch.no_grad():
        for p in block.parameters():
            p.copy_(torch.tensor(rng.standard_normal(p.shape) * 0.5))
        for key, buffer in block.named_buffers():
            if key.endswith("e_score_correction_bias"):
                buffer.copy_(torch.tensor(rng.random(buffer.shape) * 0.2))
                options = {**options, "bias": jnp.asarray(buffer.numpy())}
    x, d = (rng.standard_normal((B, T, D)).astype(np.float32) for _ in range(2))
    theirs_x = torch.tensor(x, requires_grad=True)
    found = block(theirs_x)
    theirs = found[0] if isinstance(found, tuple) else found
    theirs.backward(torch.tensor(d).reshape(theirs.shape))
    gradients = {n: p.grad.numpy() for n, p in block.named_parameters()}
    arrays = converted(name, {n: p.detach().numpy() for n, p in block.named_parameters()})
    wanted = {"x": theirs_x.grad.numpy(), **converted(name, gradients)}

    @jax.jit
    def run(arrays: dict) -> tuple:
        out, pull = jax.vjp(lambda a: moe(**a, **options)[0], arrays)
        return out, pull(jnp.asarray(d))[0]

    out, ours = run({"x": x, **arrays})
    pairs = [(out, theirs.detach().numpy().reshape(out.shape)), *((ours[n], wanted[n]) for n in wanted)]
    return [float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in pairs]


def main() -> None:
    """Prints the table in the README of `ejdist.experts`."""
    import torch
    import transformers

    print(
        f"transformers {transformers.__version__}, torch {torch.__version__}, float32, {B} x {T} tokens, {E} experts\n"
    )
    print("| block | result | largest of the gradients | gradients |\n|---|---|---|---|")
    for name, (block, options) in blocks().items():
        if not sys.argv[1:] or any(word.lower() in name.lower() for word in sys.argv[1:]):
            out, *gradients = compared(name, block, options, np.random.default_rng(0))
            print(f"| {name} | {out:.1e} | {max(gradients):.1e} | {len(gradients)} |", flush=True)


if __name__ == "__main__":
    main()
