"""`python -m launch.evaluate run.dir=outputs/run [KEY=VALUE ...]`: loss by position, recall, RULER and answers of a model."""

from __future__ import annotations

import dataclasses
import math
import os
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from launch import answered, packed, ruler
from launch.errors import DONE, run_command
from launch.evaluated import tell_cells, tell_loss, write
from launch.evaluation_recipe import FOLDER, recipe_of, told_held_out, trained_tokenizer, with_settings_of_run
from launch.options import check_spelling, file_of
from launch.train import command, start_jax
from recipes.arguments import assigned, expanded, key_of

NO_STAGES = "curriculum=[]"  # of the recipe: one mesh for all lengths

USAGE = f"""usage: python -m launch.evaluate run.dir=DIR [KEY=VALUE ...]
       python -m launch.evaluate model=hf model.init_from=DIR [KEY=VALUE ...]

  python -m launch.evaluate run.dir=outputs/long_context data.source='held_out/*.txt'
  python -m launch.evaluate run.dir=outputs/run lengths=2048,8192,32768 examples=32 to=outputs/run/evaluation.json
  python -m launch.evaluate model=hf:models/Qwen3-8B data=files data.source='held_out/*.txt' lengths=2048,8192

The model is that of the run's checkpoint, or of the folder's config.json. Data, tokenizer, mesh and order of the sequence are
those of the run (its evaluation.data where it has one), unless keys say otherwise; all keys are those of launch.train. Of a
published folder model=hf takes dtype, tokenizer, BOS and EOS too. A model.rope_ key given here is tried out on the weights.

keys:
  step=N               of the checkpoint; default: the last
  tasks=loss,needle,recall
                       loss: by octave of the place in the document and in the row. needle: a key and its value in text; recall:
                       one of many keys and values
  lengths=2048,8192    tokens of a row; default: data.sequence_length where it is given here, else the run's
  batches=8            of data.global_batch rows at each length, for the loss; of shorter data each row once
  examples=16          prompts at each length and depth
  depths=0,0.25,0.5,0.75,1
                       where the pair that is asked for stands: 0 at the start, 1 just before the question
  key_tokens=4, value_tokens=4
                       token ids of a key and of a value
{packed.USAGE}{answered.USAGE}{ruler.USAGE}  to=FILE.json         what was found; a picture lies beside it, FILE.png
"""
_TASKS = ("loss", "needle", "recall", *answered.TASKS)
_DEFAULTS = {
    "step": None,
    "tasks": "loss,needle,recall",
    "lengths": None,
    "batches": "8",
    "examples": "16",
    "depths": "0,0.25,0.5,0.75,1",
    "key_tokens": "4",
    "value_tokens": "4",
    "to": None,
    **packed.DEFAULTS,
    **answered.DEFAULTS,
    **ruler.DEFAULTS,
}


@dataclasses.dataclass(frozen=True)
class Args:
    """The command's own keys."""

    step: int | None
    tasks: list[str]
    lengths: list[int] | None
    batches: int
    examples: int
    depths: list[float]
    key_tokens: int
    value_tokens: int
    to: Path | None
    packed: str | None
    answers: answered.AnswersArgs | None
    ruler: ruler.RulerArgs | None


def _numbers(name: str, text: str, kind: Callable[[str], Any], least: float) -> list[Any]:
    """Returns the numbers of a list, "1,2" or "[1,2]". Raises ValueError, naming the key."""
    try:
        # Python also reads 1_6, as 16, and the digits of other scripts.
        numbers = [kind(part) for part in text.strip("[]").split(",") if re.fullmatch(" *[-+.0-9e]{1,18} *", part)]
        numbers = numbers if len(numbers) == text.count(",") + 1 else []
    except ValueError:
        numbers = []
    if not numbers or not all(least <= x < math.inf for x in numbers) or len(set(numbers)) < len(numbers):
        raise ValueError(
            f"{name} = {text!r} must be different numbers from {least:g} on, with commas: {name}={least:g},{least + 1:g}"
        )
    return numbers


def _number(name: str, text: str) -> int:
    if not re.fullmatch("[0-9]{1,18}", text) or int(text) < 1:
        raise ValueError(f"{name} = {text!r} must be a positive number")
    return int(text)


def parse(arguments: Sequence[str]) -> tuple[Args, str, list[str]]:
    """Returns (the command's own keys, the folder of the weights, the keys of the recipe).

    Raises:
      ValueError: a value is wrong, a key is given twice, or no weights are named.
    """
    from ejdist.paths import check_place

    options: dict[str, str] = {}
    where: dict[str, str] = {}
    recipe = []
    for argument in expanded(arguments):
        name, equals, value = argument.partition("=")
        of = options if name in _DEFAULTS else where if name in ("run.dir", "model.init_from") else None
        if of is None:
            if name == "model" and argument != FOLDER:
                raise ValueError(f"{argument}: the model comes from the weights; leave it out")
            if key_of(argument) == "curriculum" and argument != NO_STAGES:
                raise ValueError(
                    f"{argument}: an evaluation has no stages; leave it out, and give lengths=, mesh= and data="
                )
            if equals or name.startswith("--"):  # else a folder of --config-dir
                check_spelling(name, [*_DEFAULTS, "run.dir", "model.init_from"])
            recipe.append(argument)
            continue
        if not equals or not value:
            raise ValueError(f"cannot read {argument!r}: write {name}=VALUE")
        if name in of:
            raise ValueError(f"{name} is given twice; give it once")
        of[name] = value
    if len(where) != 1:
        raise ValueError("give run.dir=DIR, or model.init_from=DIR: one of the two; --help has examples")
    ((key, folder),) = where.items()
    check_place(key, folder)
    if FOLDER in recipe:
        if key == "run.dir":
            raise ValueError(f"{FOLDER}: the model and the tokenizer come from the run; leave it out")
        recipe.append(assigned(key, folder))
    v: dict[str, Any] = _DEFAULTS | options
    tasks = v["tasks"].strip("[]").split(",")
    of_ruler = ruler.parse_ruler(tasks, _TASKS, v)
    depths = _numbers("depths", v["depths"], float, 0)
    if max(depths) > 1:
        raise ValueError(f"depths = {v['depths']!r} must be from 0, the start of the prompt, to 1, its end")
    to = file_of("to", v["to"], ".json") if v["to"] else None
    args = Args(
        _number("step", v["step"]) if v["step"] else None,
        [task for task in tasks if task in _TASKS],
        _numbers("lengths", v["lengths"], int, 2) if v["lengths"] else None,
        _number("batches", v["batches"]),
        _number("examples", v["examples"]),
        depths,
        _number("key_tokens", v["key_tokens"]),
        _number("value_tokens", v["value_tokens"]),
        to,
        packed.format_of(v),
        answered.parse_answers(tasks, v),
        of_ruler,
    )
    return args, folder, [*recipe, NO_STAGES]


def _lengths(args: Args, weights: Any, recipe: Any, words: Sequence[str]) -> list[int]:
    """Returns the tokens of a row: those asked for, else what the command line trains with, else what the run did."""
    if args.lengths:
        return args.lengths
    named = any(key_of(word) == "data.sequence_length" for word in words)
    length = recipe.data.sequence_length
    return [length if named else weights.data.get("sequence_length", length)]


def evaluate(args: Args, where: str, given: Sequence[str], log: Callable[[str], Any] = print) -> dict[str, Any]:
    """Returns the results as JSON values, described in `launch/README.md`. Call it on all hosts.

    Raises:
      ValueError: keys, weights or data are wrong, or differ between hosts. CheckpointError: a checkpoint cannot be read.
    """
    from ejdist.cluster.agreement import environment
    from ejdist.cluster.hosts import Hosts
    from ejdist.evaluation import TASKS, Evaluator, Prompts, batches_once, loss_by_octave, measure_recall
    from ejdist.evaluation.generated import measure_spelled
    from ejdist.evaluation.weights import open_weights
    from ejdist.mesh import make_mesh
    from ejdist.registered import digests
    from ejdist.sections import flat, validate
    from ejdist.training.program import make_program
    from ejdist.training.setup import check_hosts
    from ejdist.training.stage_data import data_of
    from recipes.schema import compose

    hosts = Hosts(compose(given).run.host_timeout)
    with hosts.together():
        weights = open_weights(where, args.step)
        recipe = recipe_of(weights, given)
        validate(recipe)
        packed.check_adapters(recipe, args.packed)
        lengths = _lengths(args, weights, recipe, given)
        settings = {k: str(v) for k, v in vars(args).items()} | {"weights": weights.what}
        facts = {k: v for k, v in flat(recipe).items() if not k.startswith("cluster.")}
        digest = {} if hosts.count == 1 else {"weights (digest)": weights.digest()}
        hosts.compare("the start", facts | settings | digest | digests() | environment())
        mesh = make_mesh(**vars(recipe.mesh))
        check_hosts(mesh)
        sections = {
            n: dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, sequence_length=n)) for n in lengths
        }
        programs = {n: make_program(s, mesh) for n, s in sections.items()}
        data = data_of(sections[max(lengths)], trained_tokenizer(where, recipe))
        held_out = told_held_out(weights, data)
        tokenizer, prepared, asked = data.corpus.tokenizer, None, None
        if args.ruler is not None:
            ruler.check_context(lengths, weights, where, recipe.model, given)
            prepared = ruler.prepare(args.ruler, args.examples, lengths, tokenizer, recipe.run.seed)
        files = {} if prepared is None else {"essays, squad and hotpotqa": prepared.digest}
        if args.answers is not None:
            asked = answered.prepare(args.answers, tokenizer, recipe, is_run=FOLDER not in given)
            files["prompts"] = asked.digest
        hosts.compare("the data", {name: data.cursor(0)[name] for name in ("tokenizer", "corpus")} | files)
        text = _text(data)
        shapes = {"key_tokens": args.key_tokens, "value_tokens": args.value_tokens, "seed": recipe.run.seed}
        prompts = [Prompts(task, n, text, **shapes) for task in args.tasks if task in TASKS for n in lengths]
        spelled = [Prompts("recall", n, text, **shapes) for n in lengths] if "spelled" in args.tasks else []
        log(f"{weights.what}, on {_data_name(recipe)} ({data.num_tokens:,} tokens): {held_out}")
        for line in (*weights.notes(recipe.model), *filter(None, [data.ends()]), *data.notes()):
            log(line)
        params, buffers = weights.load(programs[lengths[0]])
        params, stays = packed.pack(programs[lengths[0]].model, params, buffers, args.packed, log)
        results: dict[str, Any] = {
            "weights": weights.what,
            "packed": args.packed,
            "not_packed": stays,
            "mesh": dict(mesh.shape),
            "sequence": vars(recipe.sequence),
            "data": {"source": _data_name(recipe), "tokens": data.num_tokens, "held_out": held_out},
            "seed": recipe.run.seed,
            "loss": {},
            "recall": [],
        }
        for n in lengths:
            evaluator = Evaluator(sections[n], mesh, params, buffers, programs[n])
            if "loss" in args.tasks:
                began, sized = time.perf_counter(), data.resized(n, evaluator.rows)
                octaves = loss_by_octave(evaluator, batches_once(sized, args.batches))
                results["loss"][str(n)] = {
                    "loss": octaves["row"].mean if octaves["row"].counts.any() else None,
                    "tokens": int(octaves["row"].counts.sum()),
                    **{place: of.rows() for place, of in octaves.items()},
                }
                tell_loss(log, n, results["loss"][str(n)], time.perf_counter() - began)
                if (rows := sized.rows_before_again) < args.batches * sized.global_batch:
                    log(
                        f"  that is all of the data, {rows:,} rows, each counted once: batches={args.batches} asked for more"
                    )
            for asking in (p for p in prompts if p.length == n):
                cells = measure_recall(evaluator, asking, args.depths, args.examples)
                results["recall"] += [cell.row() for cell in cells]
                tell_cells(log, cells)
            if prepared is not None:
                prepared.measure(evaluator, log)
        program = programs[lengths[0]]
        if spelled:
            engine = answered.engine_of(program, params, buffers, recipe, max(lengths) + 1)
            for one in spelled:
                cells = measure_spelled(engine, one, args.depths, args.examples)
                results["recall"] += [cell.row() for cell in cells]
                tell_cells(log, cells)
            engine.release()
        if asked is not None:
            engine = answered.engine_of(program, params, buffers, recipe, asked.length, tokenizer)
            results["answers"] = answered.measure(asked, engine, log)
        if prepared is not None:
            results["ruler"] = prepared.results()
            log(ruler.table(results["ruler"]))
        return results


def _data_name(recipe: Any) -> str:
    return f"data.source={recipe.data.source}" if recipe.data.mixture is None else "data.mixture"


def _text(data: Any) -> Any:
    """Returns the tokens of the first batch, without padding: what haystacks, keys and values are made of."""
    batch = data.batch(0)
    return batch["tokens"][batch["segment_ids"] >= 0]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    return run_command(argv, _main, lambda arguments: USAGE)


def _main(arguments: list[str]) -> int:
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    from recipes.schema import compose

    args, where, words = parse(arguments)
    notes: list[str] = []
    words = with_settings_of_run(where, args.step, words, notes.append)
    start_jax(compose(words), "launch.evaluate")
    import jax

    from ejdist.training.recorded import last_step

    first = jax.process_index() == 0
    log = (lambda line: print(line, flush=True)) if first else lambda line: None
    for line in notes:
        log(line)
    rows = ruler.place_of_rows(where, log) if args.ruler is not None and first else None
    results = evaluate(args, where, words, log)
    if rows is not None:
        ruler.add_rows(rows, results, last_step(where) if args.step is None else args.step)
        print(f"added to {rows}")
    if args.to is not None and first:
        write(args.to, results)
        print(f"written to {args.to} and {args.to.with_suffix('.png').name} next to it")
    return DONE


if __name__ == "__main__":
    command(body=main)
