"""What `conversations.py` runs in an environment with torch and transformers: PYTHON FILE COMMAND FOLDER [FAMILY]."""

from __future__ import annotations

import datetime
import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DATE = "2026-01-31"  # that a template writes
RATE, DECAY, CLIP, B1, B2, EPS, Z = 1e-3, 0.1, 1.0, 0.9, 0.95, 1e-8, 1e-4
VOCABULARY = 320
REPLIES = {
    "Where sat the cat?": "On the mat.",
    "What sails far away?": "A ship does.",
    "When did it rain?": "All night long.",
    "Which number is next?": "It is four.",
}
MODEL = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
         "num_hidden_layers": 2, "intermediate_size": 32}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3": {
        "class": "Qwen3",
        "config": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "max_position_embeddings": 40_960},
        "template": "thinking",
        "reasoning": "reasoning_content",
        "special": ["<|im_start|>", "<|im_end|>"],
        "tokens": {"bos_token": None, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
        "ends": ["<|im_end|>", "<|endoftext|>"],
    },
    "GPT-OSS": {
        "class": "GptOss",
        "config": {
            "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 128, "max_position_embeddings": 131_072,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096,
                                "truncate": False, "rope_theta": 150000.0},
        },
        "template": "channels",
        "reasoning": "thinking",
        "special": ["<|startoftext|>", "<|return|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>"],
        "tokens": {"bos_token": "<|startoftext|>", "eos_token": "<|return|>", "pad_token": "<|endoftext|>"},
        "ends": ["<|return|>", "<|endoftext|>", "<|call|>"],
    },
}  # fmt: skip


def template_of(name: str, marks: bool) -> str:
    """Returns the chat template of a family, with or without the marks of what the assistant says."""
    source = (ROOT / "tests" / "chats" / f"{FAMILIES[name]['template']}.jinja").read_text("utf-8")
    if marks:
        return source
    source = re.sub(r"(\{%-? )generation( -?%\})", r"\1if true\2", source)
    return re.sub(r"(\{%-? )endgeneration( -?%\})", r"\1endif\2", source)


def make(folder: Path, name: str) -> None:
    """Writes a model beside a tokenizer."""
    import torch
    import transformers as tf

    torch.manual_seed(0)
    family, tokenizer = FAMILIES[name], tf.AutoTokenizer.from_pretrained(folder)
    ends = tokenizer.convert_tokens_to_ids(family["ends"])
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": ends[0], "pad_token_id": tokenizer.pad_token_id}
    config = getattr(tf, f"{family['class']}Config")(**MODEL | family["config"] | ids)
    model = getattr(tf, f"{family['class']}ForCausalLM")(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.ndim == 1 else 0.0, 0.1)
    model.generation_config = tf.GenerationConfig(**ids | {"eos_token_id": ends})
    model.save_pretrained(folder)
    print("{}")


def tokenize(folder: Path, name: str) -> None:
    """Writes the tokens of each conversation of chats.jsonl, and which of them the assistant says."""
    import numpy as np
    import transformers as tf

    _on_the_date()
    tokenizer = tf.AutoTokenizer.from_pretrained(folder / "source")
    arrays = {}
    for i, line in enumerate((folder / "chats.jsonl").read_text("utf-8").splitlines()):
        arguments = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
        got = tokenizer.apply_chat_template(
            json.loads(line)["messages"], chat_template=template_of(name, marks=True), **arguments
        )
        arrays[f"ids{i}"], arrays[f"mask{i}"] = np.asarray(got["input_ids"]), np.asarray(got["assistant_masks"], bool)
    np.savez(folder / "theirs.npz", **arrays)
    print(json.dumps({"transformers": tf.__version__}))


def loop(folder: Path) -> None:
    """Trains the source on the conversations of each step, one after another, and prints the losses as JSON, with that of the
    shortest conversation after the last step."""
    import numpy as np
    import torch

    theirs, steps = np.load(folder / "theirs.npz"), json.loads((folder / "steps.json").read_text())
    shortest = min((k for k in theirs if k.startswith("ids")), key=lambda k: len(theirs[k]))[len("ids") :]
    model = _model(folder / "source", theirs[f"ids{shortest}"])
    still = ("norm", "bias", "sinks")  # do not decay
    groups = [
        {
            "params": [p for n, p in model.named_parameters() if any(s in n for s in still) == kept],
            "weight_decay": decay,
        }
        for kept, decay in ((True, 0.0), (False, DECAY))
    ]
    optimizer = torch.optim.AdamW([g for g in groups if g["params"]], lr=RATE, betas=(B1, B2), eps=EPS)
    losses = []
    for conversations in steps:
        optimizer.zero_grad()
        count, loss = sum(int(theirs[f"mask{i}"][1:].sum()) for i in conversations), 0.0
        for i in conversations:
            part, normalizers = _loss(model, theirs, i)
            ((part + Z * normalizers.square().sum()) / count).backward()
            loss += float(part.detach()) / count
        norm = float(torch.sqrt(sum((p.grad.double() ** 2).sum() for p in model.parameters() if p.grad is not None)))
        for p in model.parameters():
            if p.grad is not None and norm > CLIP:
                p.grad *= CLIP / norm
        optimizer.step()
        losses.append(loss)
    with torch.no_grad():
        after = float(_loss(model, theirs, shortest)[0] / int(theirs[f"mask{shortest}"][1:].sum()))
    print(json.dumps({"torch": torch.__version__, "losses": losses, "after": after}))


def check(folder: Path) -> None:
    """Loads what was exported, and prints as JSON the loss of the shortest conversation and what is generated."""
    import numpy as np
    import torch
    import transformers as tf

    _on_the_date()
    theirs = np.load(folder / "theirs.npz")
    shortest = min((k for k in theirs if k.startswith("ids")), key=lambda k: len(theirs[k]))[len("ids") :]
    with torch.no_grad():
        model = _model(folder / "exported", theirs[f"ids{shortest}"])
        loss = float(_loss(model, theirs, shortest)[0] / int(theirs[f"mask{shortest}"][1:].sum()))
    source = tf.AutoTokenizer.from_pretrained(folder / "source")
    model, tokenizer = (kind.from_pretrained(folder / "taught") for kind in (tf.AutoModelForCausalLM, tf.AutoTokenizer))
    settings = {"max_new_tokens": 60, "do_sample": False}
    replies, wrong = [], []
    for question, reply in REPLIES.items():
        message = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(
            message, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        said = model.generate(**prompt, **settings)[0].tolist()[prompt["input_ids"].shape[1] :]
        never = model.generate(**prompt, **settings, eos_token_id=VOCABULARY - 1)[0].tolist()
        whole = source.apply_chat_template([*message, {"role": "assistant", "content": reply}], tokenize=False)
        expected = whole[len(tokenizer.decode(prompt["input_ids"][0])) :].rstrip("\n")  # nothing follows eos
        replies.append(tokenizer.decode(said))
        if replies[-1] != expected or said[-1] != source.eos_token_id or len(never) - len(prompt["input_ids"][0]) != 60:
            wrong.append(f"{replies[-1]!r} instead of {expected!r}")
    ids = tf.GenerationConfig.from_pretrained(folder / "source").eos_token_id
    if model.generation_config.eos_token_id != ids or tokenizer.chat_template != source.chat_template:
        wrong.append("eos or the template")
    print(json.dumps({"exported": loss, "reply": replies[0], "wrong": wrong}))


def _on_the_date() -> None:
    from transformers.utils import chat_template_utils

    class Fixed(datetime.datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime.datetime:
            return cls.fromisoformat(DATE)

    chat_template_utils.datetime = Fixed  # pyrefly: ignore[bad-assignment]


def _model(folder: Path, ids: Any) -> Any:
    """Returns a folder's model with attention that fits long conversations; `ids`, a short one, show that it is the same."""
    import torch
    import transformers as tf

    tf.AttentionInterface.register("in_blocks", _in_blocks)
    model = tf.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    model.config._experts_implementation = "eager"
    tokens = torch.tensor(ids)[None]
    with torch.no_grad():
        expected = model(input_ids=tokens).logits
        model.set_attn_implementation("in_blocks")
        torch.testing.assert_close(model(input_ids=tokens).logits, expected, rtol=1e-5, atol=1e-5)
    return model


def _in_blocks(
    module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float, sliding_window: Any = None,
    s_aux: Any = None, **_: Any,
) -> Any:  # fmt: skip
    """Attention as transformers computes it eagerly, for a block of queries at a time, which the backward computes again."""
    import torch
    from torch.utils.checkpoint import checkpoint

    assert mask is None and query.shape[0] == 1
    heads, length = query.shape[1], query.shape[2]
    key, value = (x[0].repeat_interleave(heads // x.shape[1], 0) for x in (key, value))

    def block(q: Any, k: Any, v: Any, first: int, begin: int) -> Any:
        """first: the place of the first query; begin: of the first key."""
        rows = torch.arange(first, first + q.shape[1])[:, None] - torch.arange(begin, begin + k.shape[1])[None]
        hidden = (rows < 0) | (rows >= (sliding_window or length))
        scores = (q @ k.transpose(1, 2) * scaling).masked_fill(hidden, -torch.inf)
        if s_aux is not None:
            scores = torch.cat([scores, s_aux.reshape(-1, 1, 1).expand(-1, q.shape[1], 1)], -1)
        return torch.softmax(scores, -1)[..., : k.shape[1]] @ v

    parts, size = [], 128
    for first in range(0, length, size):
        end, begin = min(first + size, length), max(0, first - sliding_window + 1) if sliding_window else 0
        arguments = (query[0, :, first:end], key[:, begin:end], value[:, begin:end], first, begin)
        parts.append(checkpoint(block, *arguments, use_reentrant=False))
    return torch.cat(parts, 1).transpose(0, 1)[None], None


def _loss(model: Any, theirs: Any, i: Any) -> Any:
    """Returns (the sum of the cross entropies of a conversation's trained tokens, their logarithms of normalizers)."""
    import torch

    ids, mask = torch.tensor(theirs[f"ids{i}"]), torch.tensor(theirs[f"mask{i}"])
    logits = model(input_ids=ids[None]).logits[0, :-1].float()[mask[1:]]
    total = torch.nn.functional.cross_entropy(logits, ids[1:][mask[1:]], reduction="sum")
    return total, torch.logsumexp(logits, -1)


if __name__ == "__main__":
    commands = {"make": make, "tokenize": tokenize, "loop": loop, "check": check}
    commands[sys.argv[1]](Path(sys.argv[2]), *sys.argv[3:])
