"""`python -m benchmarks.comparisons.lora [python=PYTHON] [out=FILE]`: adapters beside PEFT, on a CPU.

A small random model with random adapters is run here; its base and its adapter are written, read by transformers and PEFT, and
run there; and so is the model that is written with its adapters merged. PYTHON is an interpreter with torch, transformers and
peft, which need not be the project's own; without it this one must have them. Each number is the largest difference of a logit.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.options import read
from ejdist import bind_ops
from ejdist.models.config import LatentShape
from ejdist.models.decoder import DecoderConfig
from ejdist.models.lora import BASE, LoRASection, adapted
from ejdist.models.model import StepContext
from ejdist.models.parameters import Param, initialise
from ejdist.models.recurrent_shapes import GatedDeltaShape, Mamba2Shape
from ejdist.weights.lora import Merged
from ejdist.weights.peft import save_adapter
from ejdist.weights.writer import save
from recipes.schema import compose

B, T, V = 2, 40, 61
LLAMA = DecoderConfig(
    vocab_size=V, num_layers=3, model_dim=32, num_heads=4, num_kv_heads=2, head_dim=8, ffn_dim=24, init_std=0.15,
    tie_embeddings=False,
)  # fmt: skip
MAMBA2 = ("mamba2_in", "mamba2_gate", "mamba2_bc", "mamba2_dt")  # not its output: PEFT refuses an adapter of it
MODELS: dict[str, tuple[DecoderConfig, LoRASection]] = {
    "Llama": (LLAMA, LoRASection(rank=4, alpha=8.0)),
    "Llama, query and down": (LLAMA, LoRASection(rank=3, alpha=5.0, targets=("query", "down"))),
    "Llama, int8": (LLAMA, LoRASection(rank=4, alpha=8.0, base="int8")),
    "Qwen3": (replace(LLAMA, qk_norm=True, tie_embeddings=True), LoRASection(rank=4, alpha=8.0)),
    "Qwen3-MoE": (
        replace(
            LLAMA, qk_norm=True, layer_pattern=("full", "experts"),
            experts=replace(LLAMA.experts, num=8, top_k=3, ffn_dim=12),
        ),
        LoRASection(rank=4, alpha=8.0, targets=("query", "key", "value", "output")),
    ),
    "DeepSeek-V3": (
        replace(
            compose(["model=deepseek_v3"]).model, vocab_size=V, num_layers=3, model_dim=32, num_heads=4, num_kv_heads=4,
            ffn_dim=24, init_std=0.15, compute_dtype="float32", first_layers=("latent",),
            layer_pattern=("latent_experts",), latent=LatentShape(12, 10, 6, 4, 5), rope_scaling=None, rope_factor=1.0,
            rope_original_length=8192, rope_attention_factor=None, attention_scale=None,
            experts=replace(
                compose(["model=deepseek_v3"]).model.experts, num=8, top_k=3, ffn_dim=12, num_groups=2, topk_groups=1,
                shared_dim=12,
            ),
        ),
        LoRASection(rank=4, alpha=8.0, targets=("latent_query", "latent_down", "key_up", "value_up", "latent_output")),
    ),
    "Qwen3-Next": (
        replace(
            LLAMA, qk_norm=True, attention_gate=True, rotary_dim=4, zero_centered_norms=True,
            layer_pattern=("gated_delta+experts", "gated_delta+experts", "full+experts"),
            gated_delta=GatedDeltaShape(num_key_heads=2, num_value_heads=6, key_dim=16, value_dim=12),
            experts=replace(LLAMA.experts, num=8, top_k=3, ffn_dim=12, shared_dim=10, shared_gate=True),
        ),
        LoRASection(rank=4, alpha=8.0),
    ),
    "Nemotron-H": (
        replace(
            LLAMA, num_layers=5, activation="relu2", attention_rope=False, norm_eps=1e-5,
            layer_pattern=("mamba2+none", "none+ungated_mlp", "mamba2+none", "full+none", "none+ungated_mlp"),
            mamba2=Mamba2Shape(num_heads=4, head_dim=6, state_dim=5, num_groups=2),
        ),
        LoRASection(rank=4, alpha=8.0, targets=("query", "key", "value", "output", "ungated_up", "ungated_down", *MAMBA2)),
    ),
    "Mamba-2": (
        replace(
            LLAMA, norm_eps=1e-5, tie_embeddings=True, layer_pattern=("mamba2+none",),
            mamba2=Mamba2Shape(num_heads=8, head_dim=8, state_dim=5, num_groups=2),
        ),
        LoRASection(rank=4, alpha=8.0, targets=MAMBA2),
    ),
}  # fmt: skip

THEIRS = """
import json, sys
from pathlib import Path
import numpy as np, torch, transformers, peft
folder = Path(sys.argv[1])
tokens = torch.tensor(np.load(folder / "tokens.npy"))
with torch.no_grad():
    for name in ("base", "merged"):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder / name, attn_implementation="eager")
        np.save(folder / f"{name}.npy", model.eval()(input_ids=tokens).logits.float().numpy())
        if name == "base":
            model = peft.PeftModel.from_pretrained(model, folder / "adapter").eval()
            np.save(folder / "adapter.npy", model(input_ids=tokens).logits.float().numpy())
            held = {n for n, _ in model.named_parameters() if "lora_" in n}
            keys = peft.utils.load_peft_weights(str(folder / "adapter"), device="cpu")
            assert len(held) == len(keys), (len(held), len(keys), "PEFT made other adapters than there are")
print(json.dumps({m.__name__: m.__version__ for m in (torch, transformers, peft)}))
"""


def written(c: DecoderConfig, section: LoRASection, folder: Path) -> np.ndarray:
    """Writes the base, the adapter and the merged model, and returns the logits of the adapted model here."""
    rng, model = np.random.default_rng(0), adapted(c.build(), section, c.compute_dtype)
    drawn = initialise(c.build().declared, jax.random.key(0))
    base = jax.tree_util.tree_map_with_path(lambda path, x: model.base.frozen(".".join(k.key for k in path), x), drawn)
    trained = jax.tree.map(
        lambda p: jnp.asarray(0.2 * rng.standard_normal(p.shape), jnp.float32),
        model.declared,
        is_leaf=lambda x: isinstance(x, Param),
    )
    bias = {
        part: {n: jnp.asarray(0.1 * rng.standard_normal(p.shape), jnp.float32) for n, p in own.items()}
        for part, own in c.build().buffers.items()
    }
    arrays = _flat({"params": trained, "buffers": {BASE: base, **bias}})
    merged = Merged(c, section)

    def leaf(name: str, parts: dict[str, Any] = arrays) -> np.ndarray:
        own = merged.likes(name)
        return merged.rows(name, {n: parts[n] for n in own})[...] if own else np.asarray(parts[name])

    # A base alone is one whose adapters add nothing.
    none = {n: np.zeros_like(x) if n.startswith("params.") else x for n, x in arrays.items()}
    save(folder / "merged", c, leaf)
    save(folder / "base", c, lambda name: leaf(name, none))
    save_adapter(folder / "adapter", c, section, arrays.__getitem__, base=str(folder / "base"))
    tokens = rng.integers(0, V, (B, T))
    np.save(folder / "tokens.npy", tokens)
    batch = {"tokens": tokens, "positions": np.tile(np.arange(T), (B, 1)), "segment_ids": np.zeros_like(tokens)}
    marks = np.tile(np.arange(T, dtype=np.int32), (B, 1))
    context = StepContext(buffers={BASE: base, **bias})
    assert model.logits_at is not None
    batch = {k: jnp.asarray(v, jnp.int32) for k, v in batch.items()}
    found = jax.jit(
        lambda p, x: model.logits_at(p, batch, marks, ops=bind_ops(None), count=T, context=StepContext(buffers=x))
    )(trained, context.buffers)
    return np.asarray(found)


def _flat(tree: Any, prefix: str = "") -> dict[str, np.ndarray]:
    if not isinstance(tree, dict):
        return {prefix: np.asarray(tree)}
    return {k: v for name, x in tree.items() for k, v in _flat(x, f"{prefix}.{name}" if prefix else name).items()}


def main(argv: list[str]) -> None:
    """Prints the table in the README of the weights."""
    jax.config.update("jax_platforms", "cpu")
    o, rows, about = read({"python": sys.executable, "out": ""}, argv), [], {}
    print("| model | here | merged, in transformers | largest logit | moved by the adapter |\n|---|---|---|---|---|")
    for name, (c, section) in MODELS.items():
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            here = written(c, section, folder)
            ran = subprocess.run(
                [o["python"], "-c", THEIRS, temporary],
                capture_output=True,
                text=True,
                check=False,
                cwd=temporary,
                env={},
            )
            if ran.returncode:
                raise SystemExit(f"{name}: {ran.stderr[-2000:]}")
            about = json.loads(ran.stdout.splitlines()[-1])
            peft, merged, base = (np.load(folder / f"{n}.npy") for n in ("adapter", "merged", "base"))
        row = {
            "model": name,
            "here": float(np.abs(here - peft).max()),
            "merged": float(np.abs(merged - peft).max()),
            "largest": float(np.abs(peft).max()),
            "moved": float(np.abs(peft - base).max()),
        }
        rows.append(row)
        print(
            f"| {name} | {row['here']:.1e} | {row['merged']:.1e} | {row['largest']:.1f} | {row['moved']:.1f} |",
            flush=True,
        )
    if o["out"]:
        Path(o["out"]).write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
