"""`python benchmarks/comparisons/conversations.py [--transformers PYTHON] [--json FILE] [--length T] [WORDS]`: fine-tuning on
conversations beside transformers, on a CPU.

For each family transformers writes a small model with random weights, and a tokenizer with a chat template that, as the published
ones, marks nothing. Conversations of 100 tokens to 11/12 of T are packed into rows of T tokens, split over four virtual devices.

- masks: each conversation in the rows of the run has the tokens and targets of apply_chat_template, whose template marks the
  assistant's text; so has each that is encoded with the marked template.
- losses: the run's are those of transformers' model, torch's AdamW and one conversation at a time, on one device.
- resumption: a run that is stopped and resumed has the losses and the checkpoint of one that is not, bit for bit.
- export: transformers loads the folder and has the loss of its own model after these steps; after a few more steps on four short
  conversations, generate() says a reply and ends at the folder's eos.

WORDS choose rows. PYTHON is that of an environment with torch and transformers, which need not have JAX; default: this one.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DATE = "2026-01-31"  # that a template writes
LENGTH = 65_536
LONGEST = 11 / 12  # of a row, before the template's own tokens: 60,000 of 65,536
SHARES = (LONGEST, 1 / 2, 1 / 4, 1 / 6, 1 / 6, 1 / 12, 1 / 24, 1 / 48)  # of a row, and beside these
SIZES = (100, 100, 200, 300, 500, 1000)  # tokens
STEPS, STOP = 3, 2  # of a run, and the step after which another one is stopped
RATE, DECAY, CLIP, B1, B2, EPS = 1e-3, 0.1, 1.0, 0.9, 0.95, 1e-8
VOCABULARY = 320
REPLIES = {
    "Where sat the cat?": "On the mat.",
    "What sails far away?": "A ship does.",
    "When did it rain?": "All night long.",
    "Which number is next?": "It is four.",
}
WORDS = "a the cat ship rain night one two three sat fell far é naïve 日本語 👩‍🚀 - . , ? \n \n\n \t <|im_end|> <|end|>".split(" ")
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


# -- with transformers ----------------------------------------------------------------------------------------------------


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
        {"params": [p for n, p in model.named_parameters() if any(s in n for s in still) == kept], "weight_decay": decay}
        for kept, decay in ((True, 0.0), (False, DECAY))
    ]
    optimizer = torch.optim.AdamW([g for g in groups if g["params"]], lr=RATE, betas=(B1, B2), eps=EPS)
    losses, norms = [], []
    for conversations in steps:
        optimizer.zero_grad()
        count, loss = sum(int(theirs[f"mask{i}"][1:].sum()) for i in conversations), 0.0
        for i in conversations:
            part = _loss(model, theirs, i) / count
            part.backward()
            loss += float(part.detach())
        norm = float(torch.sqrt(sum((p.grad.double() ** 2).sum() for p in model.parameters() if p.grad is not None)))
        for p in model.parameters():
            if p.grad is not None and norm > CLIP:
                p.grad *= CLIP / norm
        optimizer.step()
        losses.append(loss)
        norms.append(norm)
    with torch.no_grad():
        after = float(_loss(model, theirs, shortest) / int(theirs[f"mask{shortest}"][1:].sum()))
    print(json.dumps({"torch": torch.__version__, "losses": losses, "norms": norms, "after": after}))


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
        loss = float(_loss(model, theirs, shortest) / int(theirs[f"mask{shortest}"][1:].sum()))
    source = tf.AutoTokenizer.from_pretrained(folder / "source")
    model, tokenizer = (kind.from_pretrained(folder / "taught") for kind in (tf.AutoModelForCausalLM, tf.AutoTokenizer))
    settings = {"max_new_tokens": 60, "do_sample": False}
    replies, wrong = [], []
    for question, reply in REPLIES.items():
        message = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_tensors="pt", return_dict=True)
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
    """Returns the sum over the trained tokens of a conversation."""
    import torch

    ids, mask = torch.tensor(theirs[f"ids{i}"]), torch.tensor(theirs[f"mask{i}"])
    logits = model(input_ids=ids[None]).logits[0, :-1].float()
    return torch.nn.functional.cross_entropy(logits[mask[1:]], ids[1:][mask[1:]], reduction="sum")


# -- with JAX -------------------------------------------------------------------------------------------------------------


def write_tokenizer(folder: Path, name: str) -> None:
    """Writes the tokenizer of a family, with the template as a published folder has it."""
    from ejdist.training.data.tokenizer import train_bpe

    family, text = FAMILIES[name], " ".join([*WORDS, *REPLIES, *REPLIES.values()])
    content = json.loads(train_bpe(iter([text] * 4), 300))
    first = content["added_tokens"][0]
    for token in family["special"]:
        content["added_tokens"].append(first | {"id": len(content["model"]["vocab"]) + len(content["added_tokens"]) - 1,
                                                "content": token})  # fmt: skip
    folder.mkdir(parents=True)
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (folder / "chat_template.jinja").write_text(template_of(name, marks=False), "utf-8")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": False, **family["tokens"]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def conversation(size: int, reasoning: str, rng: random.Random, count: Any) -> list[dict[str, str]]:
    """Returns messages of that many tokens by `count`, without those of the template."""
    messages = [{"role": "system", "content": "Be kind."}] if rng.random() < 0.3 else []
    left = size - sum(count(message["content"]) for message in messages)
    while left > 0 or messages[-1]["role"] != "assistant":
        role = "assistant" if messages and messages[-1]["role"] == "user" else "user"
        content = "x" + " ".join(rng.choice(WORDS) for _ in range(rng.choice([1, 5, 20, 200, 2000])))
        while (tokens := count(content)) > max(left, 2):
            content = content[: max(1, len(content) * max(left, 2) // (tokens + 1))]
        message = {"role": role, "content": content}
        if role == "assistant" and rng.random() < 0.3 and left > 2 * tokens:
            message[reasoning] = content[::-1]
            tokens *= 2
        messages.append(message)
        left -= tokens
    return messages


def write_chats(folder: Path, name: str, length: int) -> None:
    """Writes conversations for rows of `length` tokens, and those that are learned by heart."""
    from ejdist.training.data.tokenizer import FileTokenizer

    tokenizer, rng = FileTokenizer(folder / "source"), random.Random(0)
    sizes = [round(share * length) for share in SHARES] + [size for size in SIZES if size < length // 4]
    chats = [conversation(size, FAMILIES[name]["reasoning"], rng, lambda x: len(tokenizer.encode(x))) for size in sizes]
    few = [[{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in REPLIES.items()]
    for file, rows in (("chats", chats), ("few", few * 8)):
        lines = [json.dumps({"messages": messages}, ensure_ascii=False) for messages in rows]
        (folder / f"{file}.jsonl").write_text("\n".join(lines) + "\n", "utf-8")


def compare_masks(folder: Path, name: str, keys: list[str]) -> dict[str, Any]:
    """Returns what was compared, and writes which conversations each step trains. Raises AssertionError where they differ."""
    import numpy as np

    from ejdist.training.chats.encoding import Chats, Encoder, Skipped
    from ejdist.training.data.tokenizer import FileTokenizer
    from ejdist.training.stage_data import data_of
    from recipes.schema import compose

    recipe, theirs = compose(keys), np.load(folder / "theirs.npz")
    lines = (folder / "chats.jsonl").read_text("utf-8").splitlines()
    known = {theirs[f"ids{i}"].tobytes(): i for i in range(len(lines))}
    data, steps = data_of(recipe), []
    for step in range(max(STEPS, data.rows_before_again)):
        batch, steps = data.batch(step), [*steps, []]
        segments, tokens, targets = (batch[key][0] for key in ("segment_ids", "tokens", "targets"))
        for segment in range(segments.max() + 1):
            ids = tokens[segments == segment].astype(np.int64)
            i = known[ids.tobytes()]
            expected = np.append(np.where(theirs[f"mask{i}"][1:], ids[1:], -1), -1)
            assert (targets[segments == segment] == expected).all(), f"conversation {i} of {name}"
            steps[-1].append(i)
    epoch = sorted(i for step in steps[: data.rows_before_again] for i in step)
    assert epoch == list(range(len(lines))), "each conversation is in one row"
    (folder / "steps.json").write_text(json.dumps(steps[:STEPS]))
    tokenizer = FileTokenizer(folder / "source")
    chats = Chats("messages", "messages", "assistant", "stop", {"default": template_of(name, True)}, today=DATE)
    rows = ((f"row {i}", (0, i), json.loads(line)) for i, line in enumerate(lines))
    for i, one in enumerate(Encoder(chats, tokenizer).encode_all(rows, Skipped(), lambda n: None)):
        assert (one.ids == theirs[f"ids{i}"]).all() and (one.mask == theirs[f"mask{i}"]).all(), f"{i} of {name}, marked"
    lengths = [len(theirs[f"ids{i}"]) for i in range(len(lines))]
    return {
        "conversations": len(lines), "shortest": min(lengths), "longest": max(lengths), "tokens": sum(lengths),
        "trained": int(sum(theirs[f"mask{i}"].sum() for i in range(len(lines)))),
        "rows": data.rows_before_again, "sequence_length": recipe.data.sequence_length,
    }  # fmt: skip


def compare_resumed(one: Path, other: Path) -> int:
    """Returns how many arrays of the last checkpoint two runs have alike. Raises AssertionError if a bit differs."""
    from ejdist.training.checkpoint import Checkpoints, CheckpointSection
    from ejdist.training.metrics import read_rows

    digests, losses = [], []
    for run in (one, other):
        checkpoints = Checkpoints(str(run), CheckpointSection())
        digests.append(checkpoints.digests_of(STEPS))
        checkpoints.close()
        losses.append([(row["step"], row["loss"], row["grad_norm"]) for row in read_rows(run / "metrics.jsonl")])
    assert losses[0] == losses[1] and len(losses[0]) == STEPS, losses
    assert digests[0] == digests[1], "the checkpoints differ"
    return len(digests[0])


def compared(name: str, python: str, length: int, folder: Path) -> dict[str, Any]:
    """Returns the row of a model."""
    from ejdist.training.metrics import read_rows

    def theirs(*arguments: Any) -> dict[str, Any]:
        # Where the project is on the path, transformers would take `kernels` for the package of that name.
        alone = {k: v for k, v in os.environ.items() if python == sys.executable or k != "PYTHONPATH"}
        return json.loads(run([python, str(Path(__file__).resolve()), *map(str, arguments)], alone).splitlines()[-1])

    def launch(command: str, *keys: str) -> None:
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}
        run([sys.executable, "-m", f"launch.{command}", *keys], environment)

    def run(command: list[str], environment: dict[str, str]) -> str:
        began = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder, check=False)
        if done.returncode:
            raise SystemExit(f"{name}: {' '.join(command)}\n{done.stderr[-4000:]}")
        print(f"  {time.perf_counter() - began:4.0f} s  {' '.join(command[1:4])[-100:]}", file=sys.stderr, flush=True)
        return done.stdout

    write_tokenizer(folder / "source", name)
    theirs("make", folder / "source", name)
    write_chats(folder, name, length)
    versions = theirs("tokenize", folder, name)
    every = ["recipe=long_context_sft", "data=files", f"data.chat_date={DATE}", f"data.cache_dir={folder}/cache", "model=hf"]
    keys = [*every, f"data.source={folder}/chats.jsonl", f"model.init_from={folder}/source", f"run.steps={STEPS}"]
    keys += [f"data.sequence_length={length}", "optimizer.schedule=constant", "optimizer.warmup_steps=0"]
    keys += [f"optimizer.learning_rate={RATE}", f"optimizer.weight_decay={DECAY}", f"optimizer.clip_norm={CLIP}"]
    keys += [f"optimizer.b1={B1}", f"optimizer.b2={B2}", f"optimizer.eps={EPS}", f"checkpoint.every={STOP}"]
    row = {"model": name} | compare_masks(folder, name, keys)
    launch("train", *keys, f"run.dir={folder}/run")
    launch("train", *keys, f"run.dir={folder}/stopped", f"run.stop_after={STOP}")
    launch("train", *keys, f"run.dir={folder}/stopped")
    row["arrays_alike"] = compare_resumed(folder / "run", folder / "stopped")
    losses = [r["loss"] for r in read_rows(folder / "run" / "metrics.jsonl")]
    of_loop = theirs("loop", folder)
    launch("export", f"run.dir={folder}/run", f"to={folder}/exported")
    taught = [*every, f"data.source={folder}/few.jsonl", f"model.init_from={folder}/exported", f"run.dir={folder}/few"]
    taught += ["data.sequence_length=512", "run.steps=150", "optimizer.learning_rate=1e-2", "checkpoint.every=150"]
    launch("train", *taught)
    launch("export", f"run.dir={folder}/few", f"to={folder}/taught")
    checked = theirs("check", folder)
    assert not checked["wrong"], checked["wrong"]
    apart = max(abs(a / b - 1) for a, b in zip(losses, of_loop["losses"], strict=True))
    return row | versions | {
        "torch": of_loop["torch"], "steps": STEPS, "losses": losses, "loop_losses": of_loop["losses"],
        "losses_apart": apart, "exported_loss": checked["exported"], "loop_loss": of_loop["after"],
        "exported_apart": abs(checked["exported"] / of_loop["after"] - 1), "reply": checked["reply"],
    }  # fmt: skip


def main() -> None:
    """Prints the table in the README of the weights."""
    import jax

    parser = argparse.ArgumentParser()
    parser.add_argument("--transformers", default=sys.executable)
    parser.add_argument("--json")
    parser.add_argument("--length", type=int, default=LENGTH)
    parser.add_argument("--keep", type=Path, help="a folder for what is written, instead of a temporary one")
    parser.add_argument("words", nargs="*")
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    rows = []
    for name in FAMILIES:
        if options.words and not any(word.lower() in name.lower() for word in options.words):
            continue
        with tempfile.TemporaryDirectory() as temporary:
            row = compared(name, options.transformers, options.length, Path(temporary))
        rows.append(row)
        print(row)
    if options.json:
        Path(options.json).write_text(json.dumps({"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    commands = {"make": make, "tokenize": tokenize, "loop": loop, "check": check}
    if sys.argv[1:2] and sys.argv[1] in commands:
        commands[sys.argv[1]](Path(sys.argv[2]), *sys.argv[3:])
    else:
        main()
