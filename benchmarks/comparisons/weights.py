"""`python benchmarks/comparisons/weights.py [--json FILE] [WORDS]`: weights in and out beside transformers, on a CPU.

A small model of each family with random weights is written by transformers, read here, and run by both; then it is written
here, read by transformers, and run again. Its config.json is read too. WORDS choose rows. Last, the memory of an import whose
total is many times its largest tensor. Needs torch and transformers, which the project does not install.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import moe_models
import numpy as np

from ejdist import bind_ops
from ejdist.models.decoder import DecoderConfig, declare, hidden_states, output_projection
from ejdist.models.model import StepContext
from ejdist.training.runs import nested
from ejdist.training.start import open_source
from ejdist.weights.families import FAMILIES, read_config
from ejdist.weights.tensors import declared_leaves
from ejdist.weights.writer import save

B, T, V, H = moe_models.B, moe_models.T, moe_models.V, moe_models.H
SIZES = moe_models.THEIRS | {"intermediate_size": 24}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 16}  # fmt: skip
YARN = moe_models.YARN | {"rope_theta": 1e6}
WINDOWS = ["full_attention", "full_attention", "sliding_attention"]
EXPERTS = {"num_experts": 8, "moe_intermediate_size": 12, "num_experts_per_tok": 3}
HYBRID = EXPERTS | {
    "shared_expert_intermediate_size": 10, "head_dim": 16, "full_attention_interval": 3, "linear_num_key_heads": 2,
    "linear_num_value_heads": 6, "linear_key_head_dim": 16, "linear_value_head_dim": 12, "linear_conv_kernel_dim": 3,
}  # fmt: skip


ALONE = {"vocab_size": V, "hidden_size": 32, "num_hidden_layers": 3}  # of a model without attention
MAMBA = {"mamba_num_heads": 4, "mamba_head_dim": 6, "ssm_state_size": 5, "n_groups": 2, "conv_kernel": 3}


def _of(name: str, sizes: dict[str, Any] = SIZES, **options: Any) -> Callable[[], Any]:
    def make() -> Any:
        import transformers as tf

        config = getattr(tf, name.replace("ForCausalLM", "Config"))
        return getattr(tf, name)(config(**sizes | options))

    return make


def _published_style(make: Callable[[], Any]) -> Callable[[], Any]:
    return lambda: make()[0]


MODELS: dict[str, Callable[[], Any]] = {
    "Llama": _of("LlamaForCausalLM"),
    "Llama, llama3 scaling, biases, tied": _of(
        "LlamaForCausalLM", rope_parameters=LLAMA3, attention_bias=True, tie_word_embeddings=True
    ),
    "Llama, linear scaling": _of(
        "LlamaForCausalLM", rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
    ),
    "Mistral": _of("MistralForCausalLM", sliding_window=None),
    "Mistral, window": _of("MistralForCausalLM", sliding_window=9, hidden_act="gelu_pytorch_tanh"),
    "Qwen2, tied": _of("Qwen2ForCausalLM", tie_word_embeddings=True),
    "Qwen2, window in one layer": _of(
        "Qwen2ForCausalLM", use_sliding_window=True, sliding_window=9, layer_types=WINDOWS
    ),
    "Qwen3": _of("Qwen3ForCausalLM", head_dim=12),
    "Qwen3, YaRN": _of("Qwen3ForCausalLM", head_dim=H, rope_parameters=YARN, max_position_embeddings=512),
    "Qwen3-MoE": _of("Qwen3MoeForCausalLM", **EXPERTS, head_dim=H, norm_topk_prob=True),
    "Qwen3-MoE, a dense layer, window": _of(
        "Qwen3MoeForCausalLM", **EXPERTS, head_dim=H, mlp_only_layers=[1], use_sliding_window=True, sliding_window=9
    ),
    "Mixtral": _published_style(moe_models.mixtral),
    "Mixtral, window": _of("MixtralForCausalLM", num_local_experts=4, sliding_window=9),
    "DeepSeek-V3, YaRN": _published_style(moe_models.deepseek),
    "DeepSeek-V3, no query rank, no groups": _of(
        "DeepseekV3ForCausalLM", num_key_value_heads=4, q_lora_rank=None, kv_lora_rank=16, qk_nope_head_dim=8,
        qk_rope_head_dim=4, v_head_dim=6, first_k_dense_replace=1, moe_intermediate_size=12, n_shared_experts=1,
        n_routed_experts=8, num_experts_per_tok=3, n_group=1, topk_group=1,
    ),
    "GPT-OSS": _published_style(moe_models.gpt_oss),
    "Qwen3-Next": _of("Qwen3NextForCausalLM", **HYBRID),
    "Qwen3-Next, a dense layer, YaRN, tied": _of(
        "Qwen3NextForCausalLM", **HYBRID | {"linear_num_value_heads": 2, "linear_conv_kernel_dim": 4},
        mlp_only_layers=[1], rope_parameters=YARN | {"partial_rotary_factor": 0.5}, max_position_embeddings=512,
        layer_types=["full_attention", "linear_attention", "full_attention"], tie_word_embeddings=True,
    ),
    "Nemotron-H": _of("NemotronHForCausalLM", **MAMBA, head_dim=H, hybrid_override_pattern="M-M*-"),
    "Nemotron-H, one group, gelu": _of(
        "NemotronHForCausalLM", **MAMBA | {"n_groups": 1}, head_dim=12, hybrid_override_pattern="*MM-", mlp_hidden_act="gelu"
    ),
    "Mamba-2": _of("Mamba2ForCausalLM", ALONE, num_heads=8, head_dim=8, state_size=5, n_groups=2, conv_kernel=3, chunk_size=16),
    "Mamba-2, one group, tied": _of(
        "Mamba2ForCausalLM", ALONE, num_heads=4, head_dim=8, expand=1, state_size=16, n_groups=1, tie_word_embeddings=True
    ),
}  # fmt: skip


def theirs(model: Any, tokens: np.ndarray) -> np.ndarray:
    import torch

    model.config._attn_implementation = model.config._experts_implementation = "eager"
    with torch.no_grad():
        return model(input_ids=torch.tensor(tokens)).logits.float().numpy()


def loaded(folder: Path, c: DecoderConfig) -> dict[str, jax.Array]:
    """Returns leaf -> array on one device."""
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    like = {n: jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=here) for n, p in declared_leaves(c).items()}
    return open_source(str(folder), c).load(like)


def ours(leaves: dict[str, jax.Array], c: DecoderConfig, tokens: np.ndarray) -> np.ndarray:
    batch = {"tokens": tokens, "positions": np.tile(np.arange(T), (B, 1)), "segment_ids": np.zeros_like(tokens)}
    batch = {k: jnp.asarray(v, jnp.int32) for k, v in batch.items()}
    tree, ops = nested(dict(leaves)), bind_ops(None)

    @jax.jit
    def run(params: Any, buffers: Any) -> jax.Array:
        hidden = hidden_states(params, batch, c, ops, context=StepContext(0, 0, buffers))
        return jnp.einsum("btd,dv->btv", hidden, output_projection(params, c), precision="highest")

    buffers = tree.get("buffers", {})
    assert set(tree["params"]) == set(declare(c))
    return np.asarray(run(tree["params"], with_loads(buffers, c)))


def with_loads(buffers: dict[str, Any], c: DecoderConfig) -> dict[str, Any]:
    """Returns the buffers with those that no file has."""
    declared = c.build().buffers
    return {
        part: {n: buffers.get(part, {}).get(n, jnp.ones(p.shape)) for n, p in own.items()}
        for part, own in declared.items()
    }


def compared(name: str, make: Callable[[], Any]) -> dict[str, Any]:
    """Returns the row of a model."""
    import transformers as tf

    model, rng = make(), np.random.default_rng(0)
    moe_models.randomise(model, rng)
    tokens = rng.integers(0, V, (B, T))
    with tempfile.TemporaryDirectory() as folder:
        there, back, narrow = (Path(folder) / n for n in ("theirs", "ours", "narrow"))
        model.save_pretrained(there, max_shard_size="20KB")
        wanted = theirs(model, tokens)
        family, c = read_config(there)
        assert family is FAMILIES[type(model).__name__]
        leaves = loaded(there, c)
        got = ours(leaves, c, tokens)
        architecture = save(back, c, lambda leaf: np.asarray(leaves[leaf]), most=20_000)
        again, told = tf.AutoModelForCausalLM.from_pretrained(back, output_loading_info=True)
        assert not any(told.values()), told  # no tensor is missing, unexpected or of another shape
        state, before = again.state_dict(), model.state_dict()
        assert set(state) == set(before) and all((state[k] == before[k]).all() for k in before), "a tensor has changed"
        # Rounded to bfloat16 by them, read, and written by us, every number is the same.
        model.bfloat16().save_pretrained(narrow)
        read = loaded(narrow, c)
        save(Path(folder) / "bf16", c, lambda leaf: np.asarray(read[leaf]), dtype="bfloat16")
        rounded = tf.AutoModelForCausalLM.from_pretrained(Path(folder) / "bf16").state_dict()
        same = all((rounded[k].float() == v.float()).all() for k, v in model.state_dict().items() if "e_score" not in k)
        assert same, "a bfloat16 tensor has changed"
        return {
            "model": name,
            "read": type(model).__name__,
            "written": architecture,
            "files": len(list(there.glob("*.safetensors"))),
            "logits_read": float(np.abs(got - wanted).max()),
            "logits_written": float(np.abs(theirs(again, tokens) - wanted).max()),
            "largest_logit": float(np.abs(wanted).max()),
            "tensors_same_bits": True,
        }


def memory() -> list[dict[str, Any]]:
    """Returns what imports of two sizes took beyond what they keep, in MiB; see tests/import_memory.py."""
    program = Path(__file__).resolve().parents[2] / "tests" / "import_memory.py"
    rows = []
    for layers in (4, 32):
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, str(program), folder, str(layers)]
            rows.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
    return rows


def main() -> None:
    """Prints the tables in the README of the weights."""
    jax.config.update("jax_platforms", "cpu")
    jax.devices()  # before torch loads CUDA libraries of its own
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    words = sys.argv[1:]
    out = words.pop(words.index("--json") + 1) if "--json" in words else None
    words = [w for w in words if w != "--json"]
    about = {"transformers": transformers.__version__, "torch": torch.__version__, "tokens": [B, T], "layers": 3}
    print(f"transformers {about['transformers']}, torch {about['torch']}, float32, {B} x {T} tokens, 3 layers\n")
    print("| model | logits, read here | logits, written here | largest logit | tensors back |\n|---|---|---|---|---|")
    rows = []
    for name, make in MODELS.items():
        if not words or any(word.lower() in name.lower() for word in words):
            row = compared(name, make)
            rows.append(row)
            cells = [
                f"{row['logits_read']:.1e}",
                f"{row['logits_written']:.1e}",
                f"{row['largest_logit']:.1f}",
                "same bits",
            ]
            print(f"| {name} | {' | '.join(cells)} |", flush=True)
    measured = [] if words else memory()
    for row in measured:
        print(json.dumps(row))
    if out:
        Path(out).write_text(json.dumps(about | {"rows": rows, "memory": measured}, indent=1) + "\n")


if __name__ == "__main__":
    main()
