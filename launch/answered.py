"""What `python -m launch.evaluate` generates: values that must be spelled out, and answers to the user's own prompts."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from launch.prompts import CONVERSATIONS, Prompt, encoder, read_prompts, template_of

TASKS = ("spelled", "answers")
USAGE = """  tasks=spelled        the prompts of recall, whose values the model writes token by token, as launch.generate does
  tasks=answers        your own prompts, answered by the most likely tokens
  prompts=FILE.jsonl, max_tokens=64, chat=auto
                       of tasks=answers, as in launch.generate; each row of the file has an "answer" too
"""
DEFAULTS = {"prompts": None, "max_tokens": "64", "chat": "auto"}
PAGE = 16  # tokens of a page of the cache
CHUNK = 512  # most tokens of a prompt that a step takes


@dataclass(frozen=True)
class AnswersArgs:
    """The command's keys of tasks=answers: the file, the most tokens of an answer, and whether there is a chat template."""

    prompts: str
    max_tokens: int
    chat: str


def parse_answers(tasks: Sequence[str], values: Mapping[str, Any]) -> AnswersArgs | None:
    """Returns the keys of tasks=answers, None where it is not asked for. Raises ValueError: a value is wrong."""
    for key, default in DEFAULTS.items():
        if "answers" not in tasks and values[key] != default:
            raise ValueError(f"{key} is for tasks=answers; add that, or leave it out")
    if "answers" not in tasks:
        return None
    if not (values["prompts"] or "").endswith(".jsonl"):
        got = "" if values["prompts"] is None else f", got {values['prompts']!r}"
        raise ValueError(f"tasks=answers needs prompts=FILE.jsonl{got}")
    if not (values["max_tokens"].isdecimal() and 1 <= int(values["max_tokens"]) < 2**31):
        raise ValueError(f"max_tokens = {values['max_tokens']!r} must be a positive number")
    if values["chat"] not in ("auto", "true", "false"):
        raise ValueError(f"chat = {values['chat']!r} must be auto, true or false")
    return AnswersArgs(values["prompts"], int(values["max_tokens"]), values["chat"])


@dataclass(frozen=True)
class Asked:
    """The prompts of tasks=answers, and their tokens. digest: of all of them."""

    args: AnswersArgs
    prompts: list[Prompt]
    ids: list[np.ndarray]
    digest: str

    @property
    def length(self) -> int:
        """Tokens of the longest prompt with its answer."""
        return max(map(len, self.ids)) + self.args.max_tokens


def prepare(args: AnswersArgs, tokenizer: Any, recipe: Any, is_run: bool) -> Asked:
    """Returns the prompts of a file.

    Raises:
      ValueError: the file cannot be read, or a row is no prompt, has no tokens or no answer.
    """
    template = template_of(args.chat, CONVERSATIONS, recipe, is_run)
    prompts, encode = read_prompts(None, args.prompts), encoder(tokenizer, template)
    ids = [encode(one) for one in prompts]
    for i, (one, tokens) in enumerate(zip(prompts, ids, strict=True)):
        if not one.answers or not len(tokens):
            what = "no tokens" if one.answers else 'no "answer", so that nobody knows what is right'
            raise ValueError(f'{args.prompts}: prompt {i} has {what}; write {{"prompt": "...", "answer": "..."}}')
    digest = hashlib.sha256(repr([(x.tolist(), one.answers) for x, one in zip(ids, prompts)]).encode()).hexdigest()
    return Asked(args, prompts, ids, digest[:12])


def engine_of(program: Any, params: Any, buffers: Any, recipe: Any, length: int, tokenizer: Any = None) -> Any:
    """Returns an `Engine` for requests of at most `length` tokens, as many at once as a batch has rows.

    Args:
      tokenizer: whose ends end a text; None: nothing does.
    """
    from ejdist.generation import Engine

    rows = program.batch["tokens"].shape[0]
    ends = {} if tokenizer is None else {"ends": tokenizer.stop_ids, "decode": tokenizer.decode}
    return Engine(
        program.model,
        params,
        buffers=buffers,
        mesh=program.mesh,
        slots=rows,
        length=length,
        page=PAGE,
        pages=rows * -(-length // PAGE),
        chunk=min(CHUNK, length),
        platform=recipe.platform,
        experts=vars(recipe.experts),
        **ends,
    )


def measure(asked: Asked, engine: Any, log: Callable[[str], Any]) -> dict[str, Any]:
    """Returns what a model answers, as JSON has it, and logs how many answers are right. Call it on all hosts."""
    from ejdist.evaluation.generated import written
    from ejdist.evaluation.recall import wilson

    began, rows = time.perf_counter(), []
    for i, result in enumerate(written(engine, asked.ids, asked.args.max_tokens)):
        one, text = asked.prompts[i], result.text or ""
        rows.append(
            {
                "index": i,
                "prompt": one.shown,
                "text": text,
                "exact": one.is_exact(text),
                "right": one.is_right(text),
                "reason": result.reason,
                "log_probability": sum(result.log_probabilities),
            }
        )
    count, exact, right = len(rows), *(sum(row[name] for row in rows) for name in ("exact", "right"))
    low, high = wilson(exact / count, count)
    log(
        f"answers to {asked.args.prompts}: {exact} of {count} exact ({exact / count:.1%}, 95% in {low:.0%} to {high:.0%}), "
        f"{right} with a right one in them ({right / count:.1%}), {time.perf_counter() - began:.1f} s"
    )
    summary = {"count": count, "exact": exact, "right": right, "low": low, "high": high}
    return {"prompts": asked.args.prompts, "max_tokens": asked.args.max_tokens} | summary | {"rows": rows}
