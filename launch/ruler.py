"""RULER's tasks in `python -m launch.evaluate`: keys, what is checked before anything is compiled, and what is printed."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from recipes.arguments import key_of

USAGE = """  tasks=ruler          RULER's 13 tasks, or some by name: tasks=niah_single_1,vt. examples=N: prompts of each
  essays=FILE.txt      the text of the haystacks of niah_single_2 and others; default: generated sentences
  squad=FILE.json, hotpotqa=FILE.json
                       dev-v2.0.json for qa_1 and hotpot_dev_distractor_v1.json for qa_2, which do not run without
  generate=true        false: only the right answers are scored, by teacher forcing, in one forward pass or a few
"""
DEFAULTS = {"essays": None, "squad": None, "hotpotqa": None, "generate": "true"}
ROWS = "ruler.jsonl"  # in the run's folder; a row for each task and length of each evaluation


@dataclass(frozen=True)
class RulerArgs:
    """The command's keys of RULER: names of tasks, files, and whether answers are generated."""

    tasks: tuple[str, ...]
    essays: str | None
    squad: str | None
    hotpotqa: str | None
    generate: bool


def parse_ruler(tasks: Sequence[str], others: Sequence[str], values: Mapping[str, Any]) -> RulerArgs | None:
    """Returns the keys of RULER, None where none of its tasks is asked for.

    Args:
      tasks: those of the command line. others: those of them that are not RULER's.
      values: key -> value, of all keys.

    Raises:
      ValueError: a task is unknown, or a value is wrong.
    """
    from ejdist.evaluation.ruler import check_names
    from ejdist.paths import check_folder

    check_names(tasks, others)
    ours = tuple(t for t in tasks if t not in others)
    for key, default in DEFAULTS.items():
        if not ours and values[key] != default:
            raise ValueError(f"{key} is for RULER's tasks; add tasks=ruler, or leave it out")
        if key != "generate":
            check_folder(key, values[key])
    if values["generate"] not in ("true", "false"):
        raise ValueError(f"generate must be true or false, got {values['generate']!r}")
    if not ours:
        return None
    return RulerArgs(ours, values["essays"], values["squad"], values["hotpotqa"], values["generate"] == "true")


@dataclass
class Ruler:
    """RULER's tasks of a command, whose prompts at every length can be made.

    Attributes:
      generators: length -> that of each task.
      not_run: name -> why, of tasks that are left out.
      rows, answers: what has been measured, as JSON has it.
    """

    args: RulerArgs
    count: int
    essays: str
    digest: str
    generators: dict[int, list[Any]]
    not_run: dict[str, str]
    rows: list[dict[str, Any]] = field(default_factory=list)
    answers: list[dict[str, Any]] = field(default_factory=list)

    def measure(self, evaluator: Any, log: Callable[[str], Any]) -> None:
        """Measures a length; a line is logged as each task ends. Call it on all hosts."""
        from ejdist.evaluation.ruler import measure_ruler, summary

        n, began = evaluator.length, time.perf_counter()
        for answers in measure_ruler(evaluator, self.generators[n], self.count, self.args.generate):
            row = summary(answers, n)
            self.rows.append(row)
            self.answers += [one.row(n) for one in answers]
            log(_sentence(row, time.perf_counter() - began))

    def results(self) -> dict[str, Any]:
        """Returns what has been measured, for the file of results."""
        # They ended in any order.
        order = {
            (g.task.name, n): i for i, (g, n) in enumerate((g, n) for n, of in self.generators.items() for g in of)
        }
        rows, answers = (
            sorted(x, key=lambda one: order[one["task"], one["length"]]) for x in (self.rows, self.answers)
        )
        return {
            "essays": self.essays,
            "generate": self.args.generate,
            "not_run": self.not_run,
            "rows": rows,
            "answers": answers,
        }


def prepare(args: RulerArgs, count: int, lengths: Sequence[int], tokenizer: Any, seed: int) -> Ruler:
    """Returns RULER's tasks, after a prompt of each at each length has been made.

    Args:
      count: prompts of each task at each length.

    Raises:
      ValueError: a file cannot be read, a task lacks its file, or a length is too short.
    """
    from ejdist.evaluation.ruler import Essays, Generator, Questions, Sources, chosen

    files = {key: getattr(args, key) for key in ("squad", "hotpotqa")}
    questions = {key: Questions.read(key, path) for key, path in files.items() if path is not None}
    sources = Sources(Essays.generated() if args.essays is None else Essays.read(args.essays), **questions)
    tasks, not_run = chosen(args.tasks, sources)
    generators = {n: [Generator(task, n, tokenizer, sources, seed) for task in tasks] for n in lengths}
    for generator in (g for of_length in generators.values() for g in of_length):
        generator.make(0)
    return Ruler(args, count, sources.essays.name, sources.digest(), generators, not_run)


def context_of(weights: Any, where: str, model: Any) -> int | None:
    """Returns the most tokens that a model is for: those of a row of its run, or max_position_embeddings of its config.json, or
    those that its scaling of the positions reaches; None where nothing says."""
    scaled = int(model.rope_factor * model.rope_original_length) if model.rope_scaling in ("yarn", "llama3") else 0
    trained = weights.data.get("sequence_length")
    if trained is None:
        trained = json.loads((Path(where).expanduser() / "config.json").read_text()).get("max_position_embeddings")
    return None if trained is None else max(scaled, trained)


def check_context(lengths: Sequence[int], weights: Any, where: str, model: Any, words: Sequence[str]) -> None:
    """Raises ValueError where a length is more than the model is for. A model.rope_ key on the command line tries other
    positions out, and nothing is refused."""
    if any(key_of(word).startswith("model.rope_") for word in words):
        return
    context = context_of(weights, where, model)
    if context is not None and max(lengths) > context:
        raise ValueError(
            f"lengths: {max(lengths)} tokens are more than the context of {context} tokens of {weights.what}; use "
            f"shorter ones, or try positions out with a model.rope_ key (model.rope_base={model.rope_base:g} changes nothing)"
        )


def _sentence(row: Mapping[str, Any], seconds: float) -> str:
    forced = row["teacher_forced"]
    score = f"{row['score']:.1f} (95% in {row['low']:.1f} to {row['high']:.1f}), " if "score" in row else ""
    return (
        f"{row['task']} at {row['length']:,} tokens: {score}{row['count']} prompts; teacher-forced "
        f"{forced['tokens_correct']:.0%} of tokens and {forced['accuracy']:.0%} of answers, log-probability "
        f"{forced['log_probability']:.2f}; after {seconds:.0f} s"
    )


def table(results: Mapping[str, Any]) -> str:
    """Returns the table of tasks and lengths: RULER's scores or, where nothing was generated, tokens that teacher forcing finds
    right; with the mean over the tasks that ran, and what did not run."""
    rows = results["rows"]
    lengths, tasks = (list(dict.fromkeys(row[key] for row in rows)) for key in ("length", "task"))
    values = {
        (r["task"], r["length"]): r["score"] if results["generate"] else 100 * r["teacher_forced"]["tokens_correct"]
        for r in rows
    }
    means = [sum(values[t, n] for t in tasks) / len(tasks) for n in lengths]
    what = "string match" if results["generate"] else "tokens right, teacher-forced"
    lines = [("RULER", *(f"{n:,}" for n in lengths))]
    lines += [(t, *(f"{values[t, n]:.1f}" for n in lengths)) for t in tasks]
    lines += [(f"mean of {len(tasks)}", *(f"{m:.1f}" for m in means))]
    widths = [max(len(line[i]) for line in lines) + 2 for i in range(len(lengths) + 1)]
    shown = [
        "".join([line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True))])
        for line in lines
    ]
    left_out = [f"not run: {'; '.join(results['not_run'].values())}"] if results["not_run"] else []
    return "\n".join([*shown, f"{what}, 0 to 100; essays: {results['essays']}", *left_out])


def place_of_rows(where: str, log: Callable[[str], Any]) -> Path | None:
    """Returns the file in the run's folder that rows are added to. None for a folder of weights, which stays as it is, and,
    after a line that says so, for a run at a URL or in a folder that cannot be written."""
    from ejdist.paths import is_url

    folder = Path(where).expanduser()
    if (folder / "config.json").exists():
        return None
    if is_url(where) or not os.access(folder, os.W_OK | os.X_OK):
        log(f"{where} cannot be written, so there will be no {ROWS} in it; to=FILE.json keeps the results")
        return None
    return folder / ROWS


def add_rows(path: Path, results: Mapping[str, Any], step: int | None) -> None:
    """Adds a row to the run's file for each task and length, with the settings that distinguish this evaluation from others."""
    of_all = {key: results[key] for key in ("seed", "mesh", "packed", "not_packed")}
    facts = {"step": step, "essays": results["ruler"]["essays"], **of_all}
    rows = [json.dumps(facts | row, allow_nan=False) + "\n" for row in results["ruler"]["rows"]]
    with path.open("a", encoding="utf-8") as file:
        file.write("".join(rows))
