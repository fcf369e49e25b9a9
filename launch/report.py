"""`python -m launch.report run.dir=outputs/run`: one page about a run, or about several side by side."""

from __future__ import annotations

import glob
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from launch.errors import DONE, run_command
from launch.options import file_of

USAGE = """usage: python -m launch.report run.dir=DIR [to=FILE]

  python -m launch.report run.dir=outputs/long_context
  python -m launch.report run.dir=outputs/one,outputs/two to=both.html
  python -m launch.report run.dir='outputs/rates/*'

Writes one HTML file that needs nothing else: loss, throughput, goodput, balance of experts, recipe, plan and checkpoints, and
what is missing of them or damaged. A run that is still going is shown as it is.

keys:
  run.dir=DIR    a run; several with commas between them, or a pattern, which are then compared
  to=FILE        default: report.html in run.dir, of several runs report.html in this folder
"""


def _keys(arguments: Sequence[str]) -> dict[str, str]:
    """Parses the command line. Raises ValueError for unknown keys."""
    options: dict[str, str] = {}
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if name not in ("run.dir", "to") or not equals or not value:
            raise ValueError(f"cannot read {argument!r}: write run.dir=DIR or to=FILE")
        if name in options:
            raise ValueError(f"{name} is given twice; give it once" + (", with commas" if name == "run.dir" else ""))
        options[name] = value
    if "run.dir" not in options:
        raise ValueError("run.dir=DIR is missing: the folder of a run")
    return options


def folders_of(words: str) -> list[str]:
    """Returns the folders that run.dir names: one, several with commas between them, or those that a pattern fits.

    Raises:
      ValueError: one is a URL or in the home of an unknown user, a pattern matches none, or there are too many to distinguish.
    """
    from ejdist.paths import check_folder
    from launch.reporting.sections import MOST_RUNS

    check_folder("run.dir", words)
    if Path(words).expanduser().is_dir():  # also one with a comma in its name, as runs of a sweep have
        return [words]
    folders = []
    for part in words.split(","):
        check_folder("run.dir", part)
        if any(c in part for c in "*?["):
            fits = sorted(p for p in glob.glob(os.path.expanduser(part)) if (Path(p) / "metrics.jsonl").exists())
            if not fits:
                raise ValueError(f"run.dir = {part!r} fits no folder with a metrics.jsonl")
            folders += fits
        else:
            folders.append(part)
    folders = list(dict.fromkeys(folders))
    if len(folders) > MOST_RUNS:
        raise ValueError(f"run.dir names {len(folders)} runs, and a page compares at most {MOST_RUNS}")
    return folders


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    return run_command(argv, _main, lambda _: USAGE, recipe=False)


def _main(arguments: list[str]) -> int:
    from ejdist.sections import flat
    from ejdist.training.metrics import write_atomic
    from launch.reporting.folder import open_folder
    from launch.reporting.sections import report
    from recipes.schema import Recipe

    keys = _keys(arguments)
    runs = [open_folder(Path(name).expanduser(), name) for name in folders_of(keys["run.dir"])]
    default = runs[0].path / "report.html" if len(runs) == 1 else Path("report.html")
    to = file_of("to", keys.get("to", str(default)))
    text = report(runs, flat(Recipe()))
    write_atomic(to, text)
    for run in runs:
        print(f"{run.name}: {run.status()}; {len(run.missing)} things missing or damaged")
    print(f"{to}: {len(text.encode()):,} bytes")
    return DONE


if __name__ == "__main__":
    sys.exit(main())
