"""`python benchmarks/comparisons/conversations.py [--transformers PYTHON] [--json FILE] [--length T] [WORDS]`: fine-tuning on
conversations beside transformers, on a CPU.

For each family transformers writes a small model with random weights, beside a tokenizer with a chat template that marks
nothing, as the published ones. Conversations of 100 tokens to 11/12 of T are packed into rows of T tokens, split over four
virtual devices.

- masks: each conversation in the rows of the run has the tokens and targets of apply_chat_template, whose template marks the
  assistant's text; so has each that is encoded with the marked template.
- losses: the run's are those of transformers' model, torch's AdamW and one conversation at a time, on one device.
- resumption: a run that is stopped and resumed has the losses and the checkpoint of one that is not, bit for bit.
- export: transformers loads the folder and has the loss of its own model after these steps; after more steps on four short
  conversations, generate() says their replies and ends at the folder's eos.

WORDS choose rows. PYTHON is that of an environment with torch and transformers, which need not have JAX; default: this one.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import conversations_torch
from conversations_torch import B1, B2, CLIP, DATE, DECAY, EPS, FAMILIES, RATE, REPLIES, ROOT, Z, template_of

LENGTH = 65_536
LONGEST = 11 / 12  # of a row, before the template's own tokens: 60,000 of 65,536
SHARES = (LONGEST, 1 / 2, 1 / 4, 1 / 6, 1 / 6, 1 / 12, 1 / 24, 1 / 48)  # of a row, and beside these
SIZES = (60, 100, 200, 300, 500, 1000)  # tokens
APART = 2e-5  # losses, relative: in float32, sums of up to 65,536 tokens in another order
STEPS, STOP = 3, 2  # of a run, and the step after which another one is stopped
WORDS = "a the cat ship rain night one two three sat fell far é naïve 日本語 👩‍🚀 - . , ? \n \n\n \t <|im_end|> <|end|>".split(
    " "
)


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


def conversation(size: int, reasoning: str | None, rng: random.Random, count: Any) -> list[dict[str, str]]:
    """Returns messages of that many tokens by `count`, without those of the template. `reasoning`: the key of some thoughts, of
    which a template leaves out those before the last turn."""
    messages = [{"role": "system", "content": "Be kind."}] if rng.random() < 0.3 else []
    left = size - sum(count(message["content"]) for message in messages)
    while left > 0 or messages[-1]["role"] != "assistant":
        role = "assistant" if messages and messages[-1]["role"] == "user" else "user"
        content = "x" + " ".join(rng.choice(WORDS) for _ in range(rng.choice([1, 5, 20, 200, 2000])))
        while (tokens := count(content)) > max(left, 2):
            content = content[: max(1, len(content) * max(left, 2) // (tokens + 1))]
        message = {"role": role, "content": content}
        if reasoning is not None and role == "assistant" and rng.random() < 0.3 and left > 2 * tokens:
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
    # The longest has no thoughts, so that it is as long as it says.
    keys = [None, *[FAMILIES[name]["reasoning"]] * (len(sizes) - 1)]
    chats = [
        conversation(size, key, rng, lambda x: len(tokenizer.encode(x))) for size, key in zip(sizes, keys, strict=True)
    ]
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
        command = [python, str(Path(conversations_torch.__file__).resolve()), *map(str, arguments)]
        return json.loads(run(command, alone).splitlines()[-1])

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
    every = ["recipe=long_context_sft", "data=files", "model=hf", f"data.chat_date={DATE}"]
    every += [f"data.cache_dir={folder}/cache"]
    keys = [*every, f"data.source={folder}/chats.jsonl", f"model.init_from={folder}/source", f"run.steps={STEPS}"]
    keys += [f"data.sequence_length={length}", f"z_loss={Z}", f"checkpoint.every={STOP}"]
    adamw = {"learning_rate": RATE, "weight_decay": DECAY, "clip_norm": CLIP, "b1": B1, "b2": B2, "eps": EPS}
    adamw |= {"schedule": "constant", "warmup_steps": 0}
    keys += [f"optimizer.{key}={value}" for key, value in adamw.items()]
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
        "largest_process_gib": round(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20, 1),
    }  # fmt: skip


def main() -> None:
    """Prints the table in the README of the data."""
    import jax

    parser = argparse.ArgumentParser()
    parser.add_argument("--transformers", default=sys.executable)
    parser.add_argument("--json")
    parser.add_argument("--length", type=int, default=LENGTH)
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
        cells = [f"{row['conversations']} of {row['shortest']:,} to {row['longest']:,} tokens"]
        cells += [f"{row['trained']:,} of {row['tokens']:,} trained, as theirs", f"{row['losses_apart']:.1e}"]
        cells += [f"{row['arrays_alike']} arrays", f"{row['exported_apart']:.1e}", f"`{row['reply']!r}`"]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
        assert max(row["losses_apart"], row["exported_apart"]) < APART, row
    if options.json:
        Path(options.json).write_text(json.dumps({"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
