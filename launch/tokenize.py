"""`python -m launch.tokenize source=GLOB to=DIR [tokenizer=...]`: turns files into a dataset that training reads."""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
import re
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launch.errors import DONE, PREEMPTED, run_command
from recipes.words import meaning, of_flag

USAGE = """usage: python -m launch.tokenize source=GLOB to=DIR [KEY=VALUE ...]
       python -m launch.tokenize source=GLOB show=N [KEY=VALUE ...]

  python -m launch.tokenize source='corpus/**/*.jsonl' to=corpus.tokens tokenizer=tokenizer.json
  python -m launch.train data=dataset data.source=corpus.tokens
  python -m launch.tokenize source='chats/*.jsonl' format=auto tokenizer=models/Qwen3-8B show=3

Run it again to resume, or with more files to add them: finished shards are kept.

keys:
  source=GLOB       files (text, jsonl, jsonl.gz, parquet), also of a bucket, gs://BUCKET/GLOB; stdlib, or hf:NAME[:SPLIT]; give
                    it several times for several globs
  to=DIR            the folder of the dataset
  tokenizer=bytes   bytes, a tokenizer.json or a folder with one, or bpe:SIZE, which is trained on a sample
  bos=auto          the token before every document: a token, or null; auto: what the tokenizer's folder says
  eos=auto          the token behind every document of text, in the same way
  plugins=[MODULE]  modules that register a source, source=NAME:REST
  text_key=text     the key or column of jsonl and parquet rows
  format=text       what rows are: text, messages, completion, ids, or auto: what the first has
  loss_on=          of conversations, what is trained: assistant, last, all, spans; default: assistant, or what rows of ids say
  chat_template=    a file, or chatml; default: that of the tokenizer's folder
  chat_template_kwargs=   more variables of the template, as '{"name": value}'
  chat_date=        the date of templates that write one, as 2026-01-31; default: that of the first start
  on_error=stop     stop at a row of conversations that is wrong, or skip it
  show=N            instead of to=DIR: prints the first N conversations of the files, or of a dataset, source=DIR, by file and
                    line, with what is trained in double brackets; writes nothing
  processes=        default: one for each core
  threads=          of the tokenizer, in each process; default: cores over processes
  shard_mb=256      MiB of the sources in a shard; larger files of text and jsonl are split
  sample_mb=64      MiB of text that bpe:SIZE is trained on, the same from the start of every shard's sources
  part=I/N          make only every N-th shard, from the I-th (0 to N-1): hosts that share a folder share the work; part=auto
                    asks Slurm, Open MPI or an indexed job of Kubernetes
"""
_DEFAULTS = {
    "source": None, "to": None, "tokenizer": "bytes", "bos": "auto", "eos": "auto", "text_key": "text", "processes": None,
    "threads": None, "shard_mb": "256", "sample_mb": "64",
    "part": "0/1", "format": "text", "loss_on": None, "chat_template": None, "chat_template_kwargs": None,
    "chat_date": None, "on_error": "stop", "plugins": None, "show": None,
}  # fmt: skip
# What says which of how many processes this is: the number, and how many there are.
_CLUSTERS = (
    ("SLURM_PROCID", "SLURM_NTASKS"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("JOB_COMPLETION_INDEX", "JOB_COMPLETIONS"),
)
_SAID_EVERY = 10.0  # seconds, where there is no terminal


def _options(arguments: Sequence[str]) -> dict[str, Any]:
    """Returns the keys and their values. Raises ValueError: one is unknown or missing, or given twice."""
    from ejdist.buckets import source_path
    from ejdist.paths import check_folder
    from ejdist.training.data.hub import is_stream
    from recipes.plugins import load_named

    options: dict[str, Any] = {}
    load_named(arguments)
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if argument.startswith("-"):
            meant = of_flag(argument, value or None, _DEFAULTS)
            raise ValueError(f"unknown flag {argument!r}: {meant or 'keys are written KEY=VALUE, to=corpus.tokens'}")
        if not equals or not value:
            raise ValueError(f"cannot read {argument!r}: write KEY=VALUE, for example to=corpus.tokens")
        if key not in _DEFAULTS and (meant := meaning(key, _DEFAULTS)):
            raise ValueError(f"unknown key {key!r}; {meant}")
        if key not in _DEFAULTS:
            near = difflib.get_close_matches(key, _DEFAULTS, n=1, cutoff=0.5)
            raise ValueError(
                f"unknown key {key!r}; "
                + (f"did you mean {near[0]!r}?" if near else f"there are {', '.join(_DEFAULTS)}")
            )
        if key == "source":
            options.setdefault(key, []).append(value)
        elif key in options:
            raise ValueError(f"{key} is given twice: {options[key]} and {value}")
        else:
            options[key] = value
    if "show" in options and "to" in options:
        raise ValueError("show=N prints conversations and writes nothing: leave to out, or show")
    needed = {"source": "source='corpus/**/*.jsonl'"} | ({} if "show" in options else {"to": "to=corpus.tokens"})
    for key, example in needed.items():
        if key not in options:
            raise ValueError(f"{key} is missing, for example {example}")
    check_folder("to", options.get("to"))
    for key, values in (("tokenizer", [options.get("tokenizer", "bytes")]), ("source", options["source"])):
        for value in values:
            source_path(key, value)
    if len(options["source"]) == 1:
        (options["source"],) = options["source"]
    elif any(s in ("stdlib", "example_chats") or is_stream(s) for s in options["source"]):
        raise ValueError(
            "stdlib, hf:NAME and those of plugins are sources of a folder of their own; data.mixture joins folders"
        )
    return _DEFAULTS | options


def _number(options: dict[str, Any], key: str, default: int | None = None) -> int:
    value = options[key]
    if value is None and default is not None:
        return default
    if not re.fullmatch(r"[0-9]+", value) or int(value) < 1:
        raise ValueError(f"{key} must be a whole number of at least 1, got {value}")
    return int(value)


def _asked(options: dict[str, Any]) -> Any:
    """Returns what the options say of conversations. Raises ValueError: one is wrong."""
    from ejdist.training.data.conversation_keys import Asked

    settings = {f.name: options[f.name] for f in dataclasses.fields(Asked)}
    if (text := settings["chat_template_kwargs"]) is not None:
        try:
            settings["chat_template_kwargs"] = json.loads(text)
        except ValueError:
            raise ValueError(
                f"chat_template_kwargs = {text!r} is not JSON; write '{{\"enable_thinking\": false}}'"
            ) from None
    asked = Asked(**settings)
    asked.check()
    return asked


def _part(value: str) -> tuple[int, int]:
    """Returns (which part, of how many). Raises ValueError: it is not I/N with I below N, or no cluster says."""
    if value == "auto":
        for index, count in _CLUSTERS:
            if os.environ.get(index, "").isdigit() and os.environ.get(count, "").isdigit():
                return int(os.environ[index]), int(os.environ[count])
        names = ", ".join(f"{index} and {count}" for index, count in _CLUSTERS)
        raise ValueError(f"part=auto finds none of {names} in the environment; give part=I/N")
    match = re.fullmatch(r"(\d+)/(\d+)", value)
    if not match or int(match[1]) >= int(match[2]):
        raise ValueError(f"part = {value!r}: write I/N with I from 0 to N-1, for example part=0/8")
    return int(match[1]), int(match[2])


def _shards(count: int) -> str:
    return f"{count} shard{'s' * (count != 1)}"


def _line(progress: Any) -> str:
    left = _time((progress.total - progress.done) / progress.rate) if progress.done else "some time"
    return (
        f"{progress.shards} of {progress.of} shards, {progress.done / 1e6:,.0f} of {progress.total / 1e6:,.0f} MB, "
        f"{progress.rate / 1e6:.1f} MB/s, {left} left"
    )


def _time(seconds: float) -> str:
    minutes = int(seconds) // 60
    return (
        f"{minutes // 60} h {minutes % 60} min"
        if minutes >= 60
        else f"{minutes} min"
        if minutes
        else f"{seconds:.0f} s"
    )


class _Shown:
    """The progress: a bar on a terminal, elsewhere a line every ten seconds."""

    def __init__(self) -> None:
        self._said = time.monotonic()
        self._bar: Any = None

    def __enter__(self) -> _Shown:
        if sys.stdout.isatty():
            from rich.progress import BarColumn, Progress, TextColumn

            self._bar = Progress(BarColumn(), TextColumn("{task.percentage:3.0f}% {task.description}"))
            self._bar.start()
            self._task = self._bar.add_task("", total=None)
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, progress: Any) -> None:
        if self._bar is not None:
            self._bar.update(
                self._task, completed=progress.done, total=max(progress.total, 1), description=_line(progress)
            )
        elif time.monotonic() - self._said >= _SAID_EVERY:
            self._said = time.monotonic()
            print(_line(progress), flush=True)


def run(options: dict[str, Any]) -> None:
    """Builds the dataset, or the missing parts of it.

    Raises:
      ValueError: an option or a source is wrong. OSError: something cannot be written, or a process was killed.
    """
    from ejdist.training.data.dataset import open_dataset
    from ejdist.training.data.tokenizing import make_plan, missing, write_manifest
    from ejdist.training.data.workers import make_shards

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    processes = _number(options, "processes", cores)
    threads = _number(options, "threads", max(1, cores // processes))
    part, parts = _part(options["part"])
    sizes = {"shard_bytes": _number(options, "shard_mb") << 20, "sample_bytes": _number(options, "sample_mb") << 20}
    folder = Path(options["to"]).expanduser()
    existing = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    if not existing.is_dir():
        raise ValueError(f"to = {options['to']!r}: {existing} is a file; name a folder")
    chosen = {"tokenizer": options["tokenizer"], "text_key": options["text_key"], "asked": _asked(options)}
    chosen["special_tokens"] = _special_tokens(options)
    plan = make_plan(folder, options["source"], **chosen, **sizes)
    if plan.settings.chats is None:
        chosen["asked"].check_used()
    todo, share = {unit.name for unit in plan.todo}, plan.units[part::parts]
    mine = [unit for unit in share if unit.name in todo]
    before = len(share) - len(mine)
    size = sum(u.size for u in share) / 1e6
    print(
        f"{len(share)} shard{'s' * (len(share) != 1)} from {size:,.{0 if size >= 1 else 3}f} MB"
        + (f" (part {part} of {parts})" if parts > 1 else "")
        + (f", {before} of them done already" if before else ""),
        flush=True,
    )
    if mine:
        with _Shown() as shown:
            progress = make_shards(plan, mine, processes=processes, threads=threads, on_progress=shown)
        print(f"{_line(progress).rpartition(', ')[0]} in {progress.seconds:.1f} s", flush=True)
    if left := missing(plan):
        print(f"part {part} of {parts} is done; {left} shards of other parts are missing", flush=True)
        return
    dataset = write_manifest(plan)
    for line in open_dataset(folder, "dataset").describe():
        print(line, flush=True)
    print(
        f"{folder}: {dataset['tokens']:,} tokens of {dataset['documents']:,} documents in {_shards(len(dataset['shards']))}, "
        f"tokenizer {dataset['tokenizer']['name']} with a vocabulary of {dataset['tokenizer']['vocab_size']:,}, fingerprint "
        f"{dataset['fingerprint']}",
        flush=True,
    )


def show(options: dict[str, Any]) -> None:
    """Prints conversations. Raises ValueError: an option, a source or a row is wrong."""
    from ejdist.training.data.shown import shown

    settings = {"text_key": options["text_key"], "special_tokens": _special_tokens(options)}
    for text in shown(options["source"], options["tokenizer"], _asked(options), _number(options, "show"), **settings):
        print(text.rstrip("\n"), flush=True)
        print(flush=True)


def _special_tokens(options: dict[str, Any]) -> Any:
    from ejdist.training.chats.special_tokens import SpecialTokens

    return SpecialTokens(*(None if options[key] == "null" else options[key] for key in ("bos", "eos")))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    message = "stopped by a signal; the same command resumes with what is missing"
    return run_command(argv, _main, lambda _: USAGE, needs_arguments=False, recipe=False, stopped=(message, PREEMPTED))


def _main(arguments: list[str]) -> int:
    try:
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    except ValueError:  # not the main thread: whoever runs this handles signals
        before = None
    try:
        options = _options(arguments)
        show(options) if options["show"] is not None else run(options)
    except ValueError as error:
        # Of what data=files reads too errors name the keys of a recipe, which here are those of the command.
        raise ValueError(re.sub(rf"\bdata\.({'|'.join(_DEFAULTS)})\b", r"\1", str(error))) from error
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)
    return DONE


if __name__ == "__main__":
    sys.exit(main())
