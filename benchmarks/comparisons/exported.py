"""`python benchmarks/comparisons/exported.py [--transformers PYTHON] [--json FILE] [WORDS]`: what launch.export writes, loaded.

For each family transformers writes a small model with random weights; a run starts from it, learns a few sentences, and is
exported as float32 and as bfloat16. transformers loads both: the logits are compared with those of the run, generate() must end
where the run's sentences do and write what `ejdist.generation` writes of the run's checkpoint, and the tokenizer, its template
and the configurations are compared with the source's. WORDS choose rows. PYTHON is that of an environment with torch and
transformers, which need not have JAX; default: this one.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

SENTENCES = ["one two three four", "the cat sat on the mat", "a ship sails far away", "rain fell all night long"]
PROMPT = "the cat"
# What both generate from, to the last token of TOKENS: of different lengths, one longer than a chunk, one that begins another.
PROMPTS = [PROMPT, "rain", "a ship sails", "the cat sat on the mat the cat", "four three two one " * 4, "night"]
TOKENS = 40
END, TURN = "<|endoftext|>", "<|im_end|>"  # of a document, and of a turn
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}" + TURN + "{% endfor %}"
LENGTH = 64  # of a row of the run
CONTEXT = 256  # of the sources
VOCABULARY = 320
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
         "num_hidden_layers": 3, "intermediate_size": 64, "max_position_embeddings": CONTEXT}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama, llama3 scaling, tied": ("Llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "Mistral": ("Mistral", {"sliding_window": None}),
    "Qwen3": ("Qwen3", {"head_dim": 12}),
    "Qwen3-MoE": ("Qwen3Moe", {"head_dim": 12, "num_experts": 8, "moe_intermediate_size": 24, "num_experts_per_tok": 3,
                               "norm_topk_prob": True}),
    "DeepSeek-V3, YaRN": ("DeepseekV3", {
        "num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
        "v_head_dim": 6, "first_k_dense_replace": 1, "moe_intermediate_size": 24, "n_shared_experts": 1, "n_routed_experts": 8,
        "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2,
        "rope_parameters": YARN | {"rope_theta": 1e4, "mscale": 1.0, "mscale_all_dim": 1.0},
    }),
    "Qwen3-Next": ("Qwen3Next", {
        "head_dim": 16, "num_experts": 8, "moe_intermediate_size": 24, "num_experts_per_tok": 3,
        "shared_expert_intermediate_size": 16, "full_attention_interval": 3, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    }),
    "Nemotron-H": ("NemotronH", {
        "head_dim": 12, "hybrid_override_pattern": "M-*M-", "mamba_num_heads": 4, "mamba_head_dim": 24, "ssm_state_size": 16,
        "n_groups": 2,
    }),
    "GPT-OSS, YaRN": ("GptOss", {"head_dim": 12, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 9,
                                 "rope_parameters": YARN | {"rope_theta": 150000.0, "truncate": False}}),
}  # fmt: skip


# -- with transformers ----------------------------------------------------------------------------------------------------


def make(folder: Path, name: str) -> None:
    """Writes a model beside a tokenizer."""
    import torch
    import transformers as tf

    torch.manual_seed(0)
    family, options = MODELS[name]
    vocabulary = {t["content"]: t["id"] for t in json.loads((folder / "tokenizer.json").read_text())["added_tokens"]}
    ids = {"eos_token_id": vocabulary[TURN], "bos_token_id": None, "pad_token_id": vocabulary[END]}
    model = getattr(tf, f"{family}ForCausalLM")(getattr(tf, f"{family}Config")(**SIZES | options | ids))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.ndim == 1 else 0.0, 0.1)
    model.generation_config = tf.GenerationConfig(**ids | {"eos_token_id": [vocabulary[TURN], vocabulary[END]]})
    model.generation_config.repetition_penalty = 1.0
    model.save_pretrained(folder)


def check(source: Path, wide: Path, narrow: Path, logits: Path, texts: Path) -> None:
    """Loads what was exported and prints, as JSON, how it compares."""
    import numpy as np
    import torch
    import transformers as tf

    known = np.load(logits)
    model = tf.AutoModelForCausalLM.from_pretrained(wide)
    model.config._attn_implementation = model.config._experts_implementation = "eager"
    tokenizer, before = tf.AutoTokenizer.from_pretrained(wide), tf.AutoTokenizer.from_pretrained(source)
    with torch.no_grad():
        got = model(input_ids=torch.tensor(known["tokens"])).logits.float().numpy()
    # What is generated from the prompt, and again where nothing ends it.
    prompt = tokenizer(PROMPT, return_tensors="pt")
    settings = {"max_new_tokens": TOKENS, "do_sample": False}
    ended = model.generate(**prompt, **settings)[0].tolist()
    never = model.generate(**prompt, **settings, eos_token_id=VOCABULARY - 1)[0].tolist()
    tokens, scores = compared_texts(model, json.loads(texts.read_text()))
    generation, config = tf.GenerationConfig.from_pretrained(wide), tf.AutoConfig.from_pretrained(wide)
    theirs = tf.GenerationConfig.from_pretrained(source)
    messages = [{"role": "user", "content": PROMPT}]
    small = tf.AutoModelForCausalLM.from_pretrained(narrow, dtype="auto")
    kept_wide = {k for k, v in small.state_dict().items() if v.dtype != torch.bfloat16}
    text = " ".join(SENTENCES) + END
    differ = [
        word
        for word, same in {
            "the class": type(model).__name__ == tf.AutoConfig.from_pretrained(source).architectures[0],
            "what was learned": tokenizer.decode(ended)
            == SENTENCES[1] + TURN,  # the tokenizer's end, and so a document's
            "the prompt": prompt["input_ids"][0].tolist() == before(PROMPT)["input_ids"],
            "tokens": tokenizer(text)["input_ids"] == before(text)["input_ids"],
            "text": tokenizer.decode(tokenizer(text)["input_ids"]) == text,
            "the template": tokenizer.apply_chat_template(messages, tokenize=False) == f"user: {PROMPT}{TURN}",
            "special tokens": (tokenizer.eos_token, tokenizer.pad_token) == (before.eos_token, before.pad_token),
            "generation": generation.to_dict() == theirs.to_dict() and len(generation.eos_token_id) == 2,
            "ids": (config.eos_token_id, config.pad_token_id) == (before.eos_token_id, before.pad_token_id),
            "our own texts": tokens == 1,
            "the context": config.max_position_embeddings == CONTEXT,
            "the dtypes": (model.dtype, small.dtype) == (torch.float32, torch.bfloat16)
            and all(".mlp.gate." in name for name in kept_wide),  # DeepSeek-V3's routers,
        }.items()
        if not same
    ]
    print(json.dumps({
        "class": type(model).__name__, "logits": float(np.abs(got - known["logits"]).max()),
        "largest_logit": float(np.abs(known["logits"]).max()), "generated": tokenizer.decode(ended),
        "same_tokens": tokens, "log_probabilities": scores,
        "ended": ended[-1] in generation.eos_token_id and len(ended) < len(never), "differ": differ,
    }))  # fmt: skip


def compared_texts(model: Any, ours: list[dict[str, Any]]) -> tuple[float, float]:
    """Returns (the share of tokens that are those of generate() where nothing ends a text, one prompt after the other; the
    largest difference of their log-probabilities from those of a forward)."""
    import torch

    same, largest = [], 0.0
    for one in ours:
        ids = torch.tensor([one["prompt"]])
        with torch.no_grad():
            whole = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=TOKENS,
                do_sample=False,
                eos_token_id=VOCABULARY - 1,
            )
            scores = model(input_ids=whole).logits.float().log_softmax(-1)[0, ids.shape[1] - 1 : -1]
        theirs = whole[0, ids.shape[1] :]
        same += [a == b for a, b in zip(theirs.tolist(), one["tokens"], strict=True)]
        scores = scores.gather(1, theirs[:, None])[:, 0]
        largest = max(largest, float((scores - torch.tensor(one["log_probabilities"])).abs().max()))
    return sum(same) / len(same), largest


# -- with JAX -------------------------------------------------------------------------------------------------------------


def write_tokenizer(folder: Path) -> None:
    from ejdist.training.data.tokenizer import train_bpe

    content = json.loads(train_bpe(iter(SENTENCES), 300))
    first = content["added_tokens"][0]
    content["added_tokens"].append(first | {"id": len(content["model"]["vocab"]), "content": TURN})
    folder.mkdir(parents=True)
    (folder / "tokenizer.json").write_text(json.dumps(content))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": TURN,
        "pad_token": END,
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"model_max_length": CONTEXT}))


def trained(folder: Path) -> Path:
    """Returns the folder of a run that started from `folder`/source."""
    from ejdist.training.loop import train
    from ejdist.weights.families import read_config
    from ejdist.weights.match import overrides
    from recipes.schema import compose

    source, text = folder / "source", folder / "text.jsonl"
    rows = [json.dumps({"text": sentence}) for i in range(200) for sentence in SENTENCES[i % 4 :] + SENTENCES[: i % 4]]
    text.write_text("\n".join(rows))
    keys = [
        "recipe=long_context",
        "mesh.sp=1",
        "sequence.order=contiguous",
        f"data.sequence_length={LENGTH}",
        "data=files",
    ]
    keys += ["run.steps=150", "optimizer.warmup_steps=5", "optimizer.learning_rate=3e-3", "data.global_batch=4"]
    keys += [f"run.dir={folder}/run", f"data.source={text}", f"data.tokenizer={source}/tokenizer.json"]
    section = read_config(source)[1]
    model = overrides(section, compose(["model=nano"]).model)
    train(compose([*keys, "model=nano", *model, f"model.init_from={source}"]), log=lambda line: None)
    return folder / "run"


def write_logits(run: Path, to: Path) -> None:
    """Writes tokens and what the run's checkpoint makes of them."""
    import jax
    import numpy as np
    import weights

    from ejdist.training.data.tokenizer import FileTokenizer
    from ejdist.training.runs import Run
    from ejdist.weights.tensors import declared_leaves

    there = Run(run)
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    like = {n: jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=here) for n, p in declared_leaves(there.model).items()}
    leaves = there.load_and_close(like)
    ids = FileTokenizer(run.parent / "source" / "tokenizer.json").encode(" ".join(SENTENCES * 4))
    tokens = np.stack([ids[: weights.T], ids[5 : 5 + weights.T]])
    np.savez(to, tokens=tokens, logits=weights.ours(leaves, there.model, tokens))


def write_texts(run: Path, to: Path) -> None:
    """Writes what the run's checkpoint generates, as `launch.generate` loads it: all prompts at once, in chunks."""
    from ejdist.evaluation.weights import open_weights
    from ejdist.generation import Engine
    from launch.generate import parse
    from launch.loaded import load, recipe_for, tokenizer_of

    args, where, words = parse([f"run.dir={run}"])
    weights = open_weights(where, None)
    recipe = recipe_for(where, args.step, words, weights)
    tokenizer = tokenizer_of(where, recipe, weights)
    model, mesh, params, buffers = load(recipe, weights)
    sizes = {"slots": 4, "length": CONTEXT, "page": 8, "chunk": 8}
    engine = Engine(model, params, buffers=buffers, mesh=mesh, experts=vars(recipe.experts), **sizes)
    for prompt in PROMPTS:
        engine.submit(tokenizer.encode(prompt), max_tokens=TOKENS, temperature=0)
    while not engine.idle:
        engine.step()
    rows = [
        {"prompt": one.prompt.tolist(), "tokens": one.tokens, "log_probabilities": one.log_probabilities}
        for _, one in sorted(engine.results().items())
    ]
    to.write_text(json.dumps(rows))


def compared(name: str, python: str) -> dict[str, Any]:
    """Returns the row of a model."""
    from launch.export import main as export

    def theirs(*arguments: Any) -> str:
        command = [python, str(Path(__file__).resolve()), *map(str, arguments)]
        # Where the project is on the path, transformers would take `kernels` for the package of that name.
        alone = {k: v for k, v in os.environ.items() if python == sys.executable or k != "PYTHONPATH"}
        done = subprocess.run(command, capture_output=True, text=True, env=alone)
        if done.returncode:
            raise RuntimeError(done.stderr)
        return done.stdout

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_tokenizer(folder / "source")
        theirs("make", folder / "source", name)
        run = trained(folder)
        for dtype in ("float32", "bfloat16"):
            assert export([f"run.dir={run}", f"to={folder}/{dtype}", f"dtype={dtype}"]) == 0
        write_logits(run, folder / "logits.npz")
        write_texts(run, folder / "texts.json")
        of_run = folder / "logits.npz", folder / "texts.json"
        printed = theirs("check", folder / "source", folder / "float32", folder / "bfloat16", *of_run)
        return {"model": name} | json.loads(printed.splitlines()[-1])


def main() -> None:
    """Prints the table in the README of the weights."""
    import jax

    parser = argparse.ArgumentParser()
    parser.add_argument("--transformers", default=sys.executable)
    parser.add_argument("--json")
    parser.add_argument("words", nargs="*")
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    rows = []
    for name in MODELS:
        if options.words and not any(word.lower() in name.lower() for word in options.words):
            continue
        row = compared(name, options.transformers)
        rows.append(row)
        texts = f"{row['same_tokens']:.0%}, {row['log_probabilities']:.1e}"
        cells = [f"{row['logits']:.1e}", f"{row['largest_logit']:.1f}", f"`{row['generated']}`", texts]
        print(f"| {name} | {' | '.join(cells)} | {', '.join(row['differ']) or 'nothing'} |", flush=True)
        assert row["ended"] and not row["differ"], row
    if options.json:
        Path(options.json).write_text(json.dumps({"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["make"]:
        make(Path(sys.argv[2]), sys.argv[3])
    elif sys.argv[1:2] == ["check"]:
        check(*map(Path, sys.argv[2:]))
    else:
        main()
