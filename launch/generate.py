"""`python -m launch.generate run.dir=outputs/run prompt="..." [KEY=VALUE ...]`: texts of a trained model."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from launch import packed
from launch.answers import Answers, digest_of
from launch.errors import DONE, WRONG, run_command
from launch.evaluation_recipe import FOLDER
from launch.loaded import check_cache, load, recipe_for, tokenizer_of
from launch.options import check_spelling, file_of
from launch.prompts import CONVERSATIONS, Prompt, encoder, read_prompts, template_of
from launch.ruler import context_of
from launch.train import command, start_jax
from recipes.arguments import assigned, key_of

USAGE = f"""usage: python -m launch.generate run.dir=DIR|from=HF_FOLDER prompt=TEXT|prompts=FILE [KEY=VALUE ...]

  python -m launch.generate run.dir=outputs/long_context prompt="def main():" temperature=0
  python -m launch.generate from=models/Qwen3-8B prompt="Why is the sky blue?" mesh.tp=2
  python -m launch.generate run.dir=outputs/run prompts=prompts.jsonl to=answers.jsonl max_tokens=512
  echo "Once upon a time" | python -m launch.generate run.dir=outputs/run

The model is that of the run's last checkpoint, or of the folder's config.json, on one device unless mesh keys say otherwise. A
single text is printed as it comes, of several each when it is finished; all else goes to stderr. With to=FILE.jsonl each
finished answer is a row that is appended at once; the same command again goes on with the prompts that have none yet.

keys:
  step=N               of the checkpoint; default: the last
  prompt=TEXT          one prompt
  prompts=FILE         a prompt a line; of FILE.jsonl a row each, {{"prompt": "..."}} or {{"messages": [...]}}; - for stdin.
                       For rows with "answer", a text or a list, the log says how many answers contain one. A line that is
                       not a prompt is named, the others are answered, and the exit code is 2
  chat=auto            whether prompts go through the chat template: auto, where a published folder has one, and for runs on
                       conversations; true, false
  max_tokens=256       of an answer
  temperature=1        0 for the most likely token at each place
  top_k=0, top_p=1, min_p=0
                       limits of what is drawn from: tokens (0: all), their probability, and the share of the most likely one's
  stop=TEXT            a text at which an answer ends, or a list of them as JSON: stop='["\\n", "Q:"]'
                       (and a text that begins with [ is such a list)
  seed=0               of the draws; prompt number i has seed + i
  slots=16             most answers in progress at once
  length=N             most tokens of a prompt and its answer; default: what the longest prompt needs
  chunk=128            tokens of a prompt that a step takes
  cache=whole          keys and values on each device. whole: those of all tokens; spread: those of its share of each request,
                       split over mesh.sp and mesh.cp, so that n devices hold requests n times as long
{packed.USAGE}  to=FILE.jsonl        the answers
"""
_DEFAULTS: dict[str, Any] = {
    "step": None,
    "prompt": None,
    "prompts": None,
    "chat": "auto",
    "max_tokens": "256",
    "temperature": "1",
    "top_k": "0",
    "top_p": "1",
    "min_p": "0",
    "stop": None,
    "seed": "0",
    "slots": "16",
    "length": None,
    "chunk": "128",
    "cache": "whole",
    **packed.DEFAULTS,
    "to": None,
}


@dataclasses.dataclass(frozen=True)
class Args:
    """The command's own keys."""

    step: int | None
    prompt: str | None
    prompts: str | None
    chat: str
    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    stop: tuple[str, ...]
    seed: int
    slots: int
    length: int | None
    chunk: int
    cache: str
    packed: str | None
    to: Path | None

    @property
    def sampling(self) -> dict[str, Any]:
        """The arguments of `Sampling`."""
        return {name: getattr(self, name) for name in ("temperature", "top_k", "top_p", "min_p", "seed")}


def _number(name: str, text: str, kind: type, least: float) -> Any:
    try:
        # Python also reads 1_6, as 16, and the digits of other scripts.
        value = kind(text) if re.fullmatch("[-+.0-9e]{1,24}", text) else None
    except ValueError:
        value = None
    if value is None or not least <= value < 2**53:
        what = "a whole number" if kind is int else "a number"
        raise ValueError(f"{name} = {text!r} must be {what} of at least {least}")
    return value


def _stops(text: str | None) -> tuple[str, ...]:
    if text is None:
        return ()
    try:
        stops = json.loads(text) if text.startswith("[") else [text]
    except json.JSONDecodeError as error:
        raise ValueError(
            f"stop = {text!r} begins with [ and is no JSON list ({error}): correct it, or if it is a text write a list "
            f"of it, stop='{json.dumps([text], ensure_ascii=False)}'"
        ) from None
    if not isinstance(stops, list) or not all(isinstance(one, str) and one for one in stops):
        raise ValueError(f"stop = {text!r} must be a text, or a JSON list of texts that are not empty")
    return tuple(stops)


def parse(arguments: Sequence[str]) -> tuple[Args, str, list[str]]:
    """Returns (the command's own keys, the folder of the weights, the keys of the recipe).

    Raises:
      ValueError: a value is wrong, a key is given twice, or no weights are named.
    """
    from ejdist.generation import Sampling
    from ejdist.paths import check_place
    from ejdist.training.recorded import last_step

    options: dict[str, str] = {}
    where: dict[str, str] = {}
    recipe = []
    for argument in arguments:
        name, equals, value = argument.partition("=")
        of = options if name in _DEFAULTS else where if name in ("run.dir", "from") else None
        if of is None:
            if key_of(argument) in ("model", "curriculum"):
                raise ValueError(
                    f"{argument}: the model comes from the weights, run.dir=DIR or from=HF_FOLDER; leave it out"
                )
            check_spelling(name, [*_DEFAULTS, "run.dir", "from"])
            recipe.append(argument)
            continue
        if not equals or (not value and name not in ("prompt",)):
            raise ValueError(f"cannot read {argument!r}: write {name}=VALUE")
        if name in of:
            raise ValueError(f"{name} is given twice; give it once")
        of[name] = value
    if len(where) != 1:
        raise ValueError("give run.dir=DIR, or from=HF_FOLDER: one of the two; --help has examples")
    ((key, folder),) = where.items()
    check_place(key, folder)
    if key == "from":
        if last_step(folder) is not None:
            raise ValueError(f"from = {folder!r} is the folder of a run: give run.dir={folder}")
        recipe = [FOLDER, assigned("model.init_from", folder), *recipe]
    v = _DEFAULTS | options
    if v["prompt"] is not None and v["prompts"] is not None:
        raise ValueError("give prompt=TEXT, or prompts=FILE: one of the two")
    if v["chat"] not in ("auto", "true", "false"):
        raise ValueError(f"chat = {v['chat']!r} must be auto, true or false")
    if v["cache"] not in ("whole", "spread"):
        raise ValueError(f"cache = {v['cache']!r} must be whole or spread")
    args = Args(
        packed=packed.format_of(v),
        step=None if v["step"] is None else _number("step", v["step"], int, 0),
        prompt=v["prompt"],
        prompts=v["prompts"],
        chat=v["chat"],
        cache=v["cache"],
        stop=_stops(v["stop"]),
        to=file_of("to", v["to"], ".jsonl") if v["to"] else None,
        length=None if v["length"] is None else _number("length", v["length"], int, 2),
        **{name: _number(name, v[name], int, 1) for name in ("max_tokens", "slots", "chunk")},
        **{name: _number(name, v[name], int, 0) for name in ("top_k", "seed")},
        **{name: _number(name, v[name], float, 0) for name in ("temperature", "top_p", "min_p")},
    )
    Sampling(**args.sampling)
    mesh = [] if any(key_of(word) == "mesh" for word in recipe) else ["mesh=single"]
    return args, folder, [*mesh, *recipe, "curriculum=[]"]


def generate(
    args: Args, where: str, words: Sequence[str], log: Callable[[str], Any], write: Callable[[str], Any]
) -> int:
    """Generates the answers, and returns how many prompts are wrong.

    Args:
      log: takes a line about what happens. write: takes text of answers.

    Raises:
      ValueError: keys, weights, the tokenizer or the only prompt are wrong. CheckpointError: a checkpoint cannot be read.
    """
    from ejdist.evaluation.weights import open_weights
    from ejdist.generation import Engine
    from ejdist.generation.streamed import Streamed
    from ejdist.sections import flat

    weights = open_weights(where, args.step)
    recipe = recipe_for(where, args.step, words, weights)
    check_cache(recipe, args.cache)
    packed.check_adapters(recipe, args.packed)
    tokenizer = tokenizer_of(where, recipe, weights)
    template = template_of(args.chat, CONVERSATIONS, recipe, is_run=FOLDER not in words)
    asked, encode = read_prompts(args.prompt, args.prompts), encoder(tokenizer, template)
    settings = digest_of(
        {name: getattr(args, name) for name in ("max_tokens", "stop", "chat")}
        | {
            "weights": weights.digest(),
            "model": flat(recipe.model),
            "tokenizer": tokenizer.fingerprint,
            **args.sampling,
            **({} if args.packed is None else {"packed": args.packed}),
        }
    )
    file = None if args.to is None else Answers(args.to, settings, [one.shown for one in asked])
    todo = [i for i in range(len(asked)) if file is None or i not in file.finished]
    if len(todo) < len(asked):
        log(f"{args.to} has {len(asked) - len(todo)} of {len(asked)} answers; going on with the others")
    texts = {} if file is None else file.finished
    if not todo:
        _tell_right(asked, texts, log)
        return 0
    ids: dict[int, Any] = {}

    def tell_wrong(i: int, error: ValueError) -> None:
        if len(asked) == 1:
            raise error
        log(f"error: prompt {i}: {error}")

    for i in todo:
        try:
            ids[i] = encode(asked[i])
        except ValueError as error:
            tell_wrong(i, error)
    if not ids:
        return len(todo)
    model, mesh, params, buffers = load(recipe, weights)
    params, _ = packed.pack(model, params, buffers, args.packed, log)
    longest = max(len(x) for x in ids.values()) + args.max_tokens
    engine = Engine(
        model,
        params,
        buffers=buffers,
        mesh=mesh,
        slots=min(args.slots, len(ids)),
        length=args.length or longest,
        chunk=min(args.chunk, max(1, *(len(x) for x in ids.values()))),
        ends=tokenizer.stop_ids,
        decode=tokenizer.decode,
        donate=True,
        cache=args.cache,
        platform=recipe.platform,
        experts=vars(recipe.experts),
    )
    chat = ", through the chat template" if template is not None else ""
    log(f"{weights.what}: {len(ids)} prompt{'s' * (len(ids) > 1)}{chat}")
    log(f"the cache (cache={args.cache}) takes {engine.cache_bytes / 2**20:,.1f} MiB on each device")
    context = context_of(weights, where, recipe.model)
    if context is not None and engine.length > context:
        log(
            f"warning: up to {engine.length:,} tokens of a prompt with its answer are more than the model's context of "
            f"{context:,}: what comes after that is of positions it has not learned"
        )
    numbers: dict[int, int] = {}
    for i, tokens in ids.items():
        try:
            sampling = args.sampling | {"seed": (args.seed + i) % 2**32}
            numbers[engine.submit(tokens, max_tokens=args.max_tokens, stop=args.stop, **sampling)] = i
        except ValueError as error:
            tell_wrong(i, error)
    streamed = Streamed(tokenizer.decode, args.stop) if len(asked) == 1 else None
    began, count, first = time.perf_counter(), 0, 0.0
    while not engine.idle:
        for token in engine.step():
            first = first or time.perf_counter() - began
            count += 1
            if streamed is not None and token.reason is None:
                write(streamed.add(token.token))
        for number, result in engine.results().items():
            i = numbers[number]
            row = {
                "text": result.text or "",
                "tokens": len(result.tokens),
                "reason": result.reason,
                "log_probability": sum(result.log_probabilities),
            }
            if asked[i].answers:
                row["right"] = asked[i].is_right(row["text"])
            texts[i] = row["text"]
            if file is not None:
                file.add(i, asked[i].shown, row)
                log(f"{len(file.finished)} of {len(asked)}")
            if streamed is not None:
                write(streamed.rest(row["text"]) + "\n")
            elif file is None:
                write(f"[{i}] {row['text']}\n")
    seconds = time.perf_counter() - began - first
    rate = f", then {count / seconds:,.1f} tokens/s" if count > 1 and seconds > 0 else ""
    log(f"{count:,} tokens: the first after {first:.1f} s{rate}")
    _tell_right(asked, texts, log)
    return len(todo) - len(numbers)


def _tell_right(asked: Sequence[Prompt], texts: dict[int, str], log: Callable[[str], Any]) -> None:
    """Logs how many texts are right, of those for whose prompts that is known."""
    known = [one.is_right(texts[i]) for i, one in enumerate(asked) if one.answers and i in texts]
    if known:
        log(f"{sum(known)} of {len(known)} answers have a right one in them ({sum(known) / len(known):.1%})")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    message = "stopped by SIGINT; with to=FILE.jsonl the same command goes on with the prompts that have no answer", 130
    return run_command(argv, _main, lambda arguments: USAGE, stopped=message)


def _main(arguments: list[str]) -> int:
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    from recipes.schema import compose

    args, where, words = parse(arguments)
    start_jax(compose([word for word in words if word != FOLDER]), "launch.generate")

    def log(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    wrong = generate(args, where, words, log, lambda text: print(text, end="", flush=True))
    return WRONG if wrong else DONE


if __name__ == "__main__":
    command(body=main)
