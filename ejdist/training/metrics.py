"""Metrics of a run: a row a step, TensorBoard events, the progress line and the summary.

A separate thread fetches the numbers from the devices and writes them, so that the training loop never waits for them.
"""

from __future__ import annotations

import json
import math
import os
import queue
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np

from ejdist.training.step_rows import RowsFile, StepRows, Thinned, cut_after, is_number
from ejdist.training.summary import SUMMED
from ejdist.training.trackers import open_trackers

EVALUATIONS = "evaluation.jsonl"
_TABLES_SHOWN = 5  # moments of a run whose tables are drawn


# Two-dimensional metrics, such as the tokens of each expert in each layer: {"step": step, name: [[...], ...]}.
TABLES = "tables.jsonl"


def rows_in(path: str | Path) -> StepRows:
    """Returns the rows of a metrics.jsonl, to be read as they come."""
    return StepRows(Path(path), _is_row)


def read_rows(path: str | Path) -> list[dict[str, Any]]:
    """Returns the rows of a metrics.jsonl, without invalid lines: the last may be truncated, and others damaged."""
    return list(rows_in(path))


def tables_in(directory: Path) -> StepRows:
    """Returns the rows of a run's tables.jsonl, to be read as they come."""
    return StepRows(directory / TABLES, lambda row: is_number(row.get("step"), int))


class RowsOfRun:
    """The rows of a run's metrics.jsonl, to be read once, as they come; some of them stay for pictures."""

    def __init__(self, directory: Path) -> None:
        self._tables = {row["step"]: row for row in tables_in(directory).spread(_TABLES_SHOWN)}
        self._rows, self._some = rows_in(directory / "metrics.jsonl"), Thinned(self._tables)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self._some.passing(self._rows)

    def for_pictures(self) -> list[dict[str, Any]]:
        """Returns rows that have been read, all of them or some of many; a few have the tables of their step."""
        return [row | self._tables.get(row["step"], {}) for row in self._some.rows()]


_EVALUATED = {"loss", "tokens", "seconds", "document", "row"}


def read_evaluations(directory: Path) -> list[dict[str, Any]]:
    """Returns the rows of a run's evaluation.jsonl, without invalid lines."""
    return list(_evaluations_in(directory))


def _evaluations_in(directory: Path) -> StepRows:
    return StepRows(directory / EVALUATIONS, lambda row: is_number(row.get("step"), int) and _EVALUATED <= set(row))


def describe_evaluation(row: dict[str, Any]) -> str:
    """Returns the line of the log about a row of evaluation.jsonl."""
    prefix = f"evaluation at step {row['step']}"
    if row["loss"] is None:
        return f"{prefix}: the first batches of evaluation.data have no token that is followed by another"
    octaves = [r for r in row["row"] if r["tokens"]]
    ends = " and ".join(f"{r['loss']:.3f} from token {r['from']:,}" for r in (octaves[0], octaves[-1]))
    return f"{prefix}: loss {row['loss']:.4f} over {row['tokens']:,} held-out tokens, {ends} on, {row['seconds']:.1f} s"


def in_markdown(sample: dict[str, str]) -> str:
    """Returns a prompt with its answer as a block of Markdown, whatever they contain."""
    return "\n".join(f"    {line}" for line in f"{sample['prompt']}[→]{sample['text']}".split("\n"))


def _is_row(row: dict[str, Any]) -> bool:
    # A step can exceed 2^63 FLOPs: 8B parameters on 6 rows of 2^20 tokens do.
    summed = all(is_number(row[name], most=2.0**200) for name in SUMMED if name in row)
    summed = summed and row.get("step_time", 1) > 0
    return is_number(row.get("step"), int) and summed and (row.get("loss") is None or is_number(row["loss"]))


def write_atomic(path: Path, text: str) -> None:
    """Writes a file atomically."""
    temporary = path.with_name(f"{path.name}.tmp{os.getpid()}")
    try:
        temporary.write_text(text)
        os.replace(temporary, path)
    except OSError as error:  # the error of a full disk names no file
        error.filename = error.filename or str(path)
        raise
    finally:
        temporary.unlink(missing_ok=True)


def write_error(directory: Path, error: OSError, key: str = "run.dir") -> OSError:
    """Returns the error with a message for users: where, why, and the remedy."""
    where = f" ({error.filename})" if error.filename else ""
    return OSError(
        error.errno,
        f"{key} = {str(directory)!r} cannot be written: {error.strerror or error}{where}; free space or fix the path, and "
        "start again: the run resumes from its last complete checkpoint",
    )


class Progress:
    """One live line on a terminal; on anything else, a line now and then."""

    def __init__(self, total: int, every: float = 10.0) -> None:
        self.total, self.every, self._last = total, every, 0.0
        self._live: Any = None
        if sys.stdout.isatty():
            from rich.live import Live

            self._live = Live(refresh_per_second=4, transient=False)
            self._live.start()

    def show(self, row: dict[str, Any]) -> None:
        left = (self.total - row["step"]) * row["step_time"]
        minutes, seconds = divmod(round(left), 60)
        line = (
            f"step {row['step']}/{self.total}  loss {row['loss']:.4f}  {row['tokens_per_second']:,.0f} tokens/s  "
            f"{row['step_time']:.2f} s/step  ETA {minutes}:{seconds:02d}"
        )
        if more := sum(row.get("experts/extra_passes", ())):  # of all layers and microbatches
            line += f"  {more:g} extra pass{'es' * (more != 1)} to experts"
        if self._live is not None:
            from rich.text import Text

            self._live.update(Text(line))
        elif time.monotonic() - self._last >= self.every or row["step"] in (1, self.total):
            self._last = time.monotonic()
            print(line, flush=True)

    def note(self, line: str) -> None:
        """Prints a line that stays."""
        if self._live is not None:
            self._live.console.print(line, highlight=False)
        else:
            print(line, flush=True)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()


class Events:
    """A TensorBoard events file, written synchronously: a full disk raises at once, where tensorboardX's threaded writer would
    die silently and block the run forever once its queue is full.
    """

    def __init__(self, directory: Path, purge_step: int, flush_every: float = 10.0) -> None:
        """`purge_step`: events of earlier starts from that step on are hidden."""
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto import event_pb2, summary_pb2
        from tensorboardX.summary import make_histogram, text

        events: Any = event_pb2  # generated at import, so invisible to a type checker
        self._event, self._summary = events.Event, cast(Any, summary_pb2).Summary
        self._histogram, self._text = make_histogram, text
        self._every, self._flushed = flush_every, time.monotonic()
        directory.mkdir(parents=True, exist_ok=True)
        # Names with a resolution of seconds collide after a rewind, and the later file would overwrite the earlier one.
        self._writer = EventsWriter(str(directory / "events"), f".{time.time_ns()}")
        started = events.SessionLog(status=events.SessionLog.START)
        self._writer.write_event(self._event(step=purge_step, session_log=started))

    def add(
        self,
        step: int,
        values: dict[str, float],
        tables: dict[str, list[list[float]]] | None = None,
        texts: dict[str, str] | None = None,
    ) -> None:
        """Adds scalars, a histogram for each row of each table, and texts, in Markdown."""
        summaries = [self._summary.Value(tag=n, simple_value=v) for n, v in values.items()]
        histograms = {
            f"{n}/{i}": np.asarray(row, float) for n, rows in (tables or {}).items() for i, row in enumerate(rows)
        }
        finite = {name: row[np.isfinite(row)] for name, row in histograms.items()}
        summaries += [
            self._summary.Value(tag=n, histo=self._histogram(row, 30)) for n, row in finite.items() if row.size
        ]
        summaries += [self._text(n, text).value[0] for n, text in (texts or {}).items()]
        event = self._event(wall_time=time.time(), step=step, summary=self._summary(value=summaries))
        self._writer.write_event(event)
        if time.monotonic() - self._flushed >= self._every:
            self._flushed = time.monotonic()
            self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def _for_json(value: Any) -> Any:
    """Returns a string, a number, or a list of them, for JSON: NaN and infinity become None."""
    if isinstance(value, list):
        return [_for_json(x) for x in value]
    return value if isinstance(value, str) or math.isfinite(value) else None


def _scalars(name: str, value: Any) -> list[tuple[str, float]]:
    """Returns the numbers of a metric with their names: name/0, name/1, ... for a list."""
    return [(f"{name}/{i}", x) for i, x in enumerate(value)] if isinstance(value, list) else [(name, value)]


def _is_table(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], list)


CHANGES = "changes.json"  # in run.dir, of a run whose recipe has changed: [{"after": step, "keys": {key: [was, is]}}]


class MetricsWriter:
    """Takes (step, device metrics, host numbers) and writes them from its own thread.

    Args:
      directory: of the run; metrics.jsonl, tables.jsonl, evaluation.jsonl and tensorboard/ are written there.
      start: the step that the run resumes from; later rows are cut off.
      total: steps of the run.
      recipe: key -> value, for recipe.json, which records the latest start.
      changes: of the recipe, for changes.json: see `ejdist.training.resume.Past`.
      tables_every: steps between rows of tables.jsonl, of two-dimensional metrics, such as tokens per layer and expert; 0:
        never. TensorBoard gets each row of a table as a histogram.
      trackers: names of `ejdist.training.trackers`.
    """

    def __init__(
        self,
        directory: Path,
        start: int,
        total: int,
        tables_every: int = 1,
        recipe: dict[str, Any] | None = None,
        trackers: Sequence[str] = (),
        changes: Sequence[dict[str, Any]] = (),
    ) -> None:
        self.directory, self.path, self._start = directory, directory / "metrics.jsonl", start
        try:
            directory.mkdir(parents=True, exist_ok=True)
            cut_after(directory / EVALUATIONS, start)
            cut_after(directory / TABLES, start)
            self._last_evaluated = next((row["step"] for row in _evaluations_in(directory).backwards()), None)
            if recipe is not None:
                write_atomic(directory / "recipe.json", json.dumps(recipe, indent=1) + "\n")
            if changes:
                write_atomic(directory / CHANGES, json.dumps(list(changes), indent=1) + "\n")
            else:
                (directory / CHANGES).unlink(missing_ok=True)
            self._file = RowsFile(self.path, start)
            self._beside: dict[str, RowsFile] = {}  # files of which a run may have none, opened at their first row
            # At step 0 too: an earlier start may have written steps without reaching its first checkpoint.
            self._events = Events(directory / "tensorboard", start + 1)
        except OSError as error:
            raise write_error(directory, error) from error
        self._trackers = open_trackers(trackers, directory, recipe or {})
        self._progress, self._total, self._tables_every = Progress(total), total, tables_every
        # Bounded, so that the host runs only a few steps ahead of the devices.
        self._queue: queue.Queue = queue.Queue(maxsize=8)
        self._failure: BaseException | None = None
        self._finished_at = time.perf_counter()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def put(self, step: int, metrics: dict[str, jax.Array], host: dict[str, float | str]) -> None:
        """Queues a step. Raises the thread's error, if any."""
        if self._failure is not None:
            raise self._failure
        self._queue.put((step, metrics, host))

    def put_evaluation(self, step: int, row: dict[str, Any]) -> None:
        """Queues the evaluation of the state after a step. Raises the thread's error, if any."""
        if self._failure is not None:
            raise self._failure
        self._queue.put((step, row))

    def pause(self) -> None:
        """Queues the end of something that is no part of the next step's time."""
        self._queue.put(())

    def evaluated(self, step: int) -> bool:
        """Returns whether the state after the step that the run resumes from has been evaluated by an earlier start."""
        return self._last_evaluated == step

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            if self._failure is None:
                try:
                    self._take(item)
                except OSError as error:
                    self._failure = write_error(self.directory, error)
                except BaseException as error:
                    self._failure = error
            self._queue.task_done()

    def _take(self, item: tuple) -> None:
        if len(item) == 3:
            return self._write(*item)
        if item:
            self._write_evaluation(*item)
        self._finished_at = time.perf_counter()

    def _write(self, step: int, metrics: dict[str, jax.Array], host: dict[str, float | str]) -> None:
        values = {name: x.tolist() for name, x in jax.device_get(metrics).items()}
        tables = {name: value for name, value in values.items() if _is_table(value)}
        if not self._tables_every or (step % self._tables_every and step not in (1, self._total)):
            values, tables = {name: value for name, value in values.items() if name not in tables}, {}
        now = time.perf_counter()
        step_time, self._finished_at = now - self._finished_at, now
        row = {"step": step, **values, **host, "step_time": step_time}
        row["tokens_per_second"] = values["tokens"] / step_time
        self._file.put({name: _for_json(value) for name, value in row.items() if name not in tables})
        if tables:
            self._put_beside(TABLES, {"step": step} | {name: _for_json(value) for name, value in tables.items()})
        words = {name for name, value in row.items() if isinstance(value, str)}
        plain = {name: value for name, value in row.items() if name not in {"step", *tables, *words}}
        self._add(step, dict(pair for name, value in plain.items() for pair in _scalars(name, value)), tables)
        self._progress.show(row)

    def _add(self, step: int, values: dict[str, float], tables: Any = None) -> None:
        """Adds numbers to TensorBoard and to the trackers, and leaves out a tracker that fails."""
        self._events.add(step, values, tables)
        for name, tracker in list(self._trackers.items()):
            try:
                tracker.add(step, values, tables)
            except Exception as error:
                del self._trackers[name]
                self._progress.note(
                    f"run.trackers: {name} failed and gets no more rows from step {step} on ({error}); the run goes on, and "
                    f"{self.path.name} has every row"
                )

    def _write_evaluation(self, step: int, row: dict[str, Any]) -> None:
        row = {"step": step, **row}
        self._put_beside(EVALUATIONS, row)
        values = {"evaluation/loss": row["loss"], "evaluation/seconds": row["seconds"]}
        for place in ("document", "row"):
            values |= {f"evaluation/{place}/from_{r['from']}": r["loss"] for r in row[place]}
        self._add(step, {name: value for name, value in values.items() if value is not None})
        self._progress.note(describe_evaluation(row))
        samples = row.get("samples", ())
        self._events.add(step, {}, texts={f"samples/{i}": in_markdown(one) for i, one in enumerate(samples)})
        for one in samples:
            self._progress.note(f"  {one['prompt']!r} goes on with {one['text']!r}")

    def _put_beside(self, name: str, row: dict[str, Any]) -> None:
        if name not in self._beside:
            self._beside[name] = RowsFile(self.directory / name, self._start)
        self._beside[name].put(row)

    def close(self) -> None:
        """Waits until every row is written. Raises the thread's error, if any."""
        self._queue.put(None)
        self._thread.join()
        self._progress.close()
        for name, tracker in self._trackers.items():
            try:
                tracker.close()
            except Exception as error:
                print(f"run.trackers: {name} did not end properly: {error}", flush=True)
        for file in (self._events, self._file, *self._beside.values()):
            try:
                file.close()
            except OSError as error:
                self._failure = self._failure or write_error(self.directory, error)
        if self._failure is not None:
            raise self._failure
