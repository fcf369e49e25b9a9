"""The thirteen tasks of RULER, by its names, with the arguments of its synthetic.yaml."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from ejdist.evaluation.ruler.counting import common_words, frequent_words
from ejdist.evaluation.ruler.needles import Needles, variable_tracking
from ejdist.evaluation.ruler.reading import Reading
from ejdist.evaluation.ruler.samples import Sources, Task

_NEEDLES = {
    "niah_single_1": Needles("noise"),
    "niah_single_2": Needles("essay"),
    "niah_single_3": Needles("essay", values="uuids"),
    "niah_multikey_1": Needles("essay", num_keys=4),
    "niah_multikey_2": Needles("needle"),
    "niah_multikey_3": Needles("needle", keys="uuids", values="uuids"),
    "niah_multivalue": Needles("essay", num_values=4),
    "niah_multiquery": Needles("essay", num_keys=4, num_asked=4),
}
TASKS: dict[str, Task] = {
    **{name: Task(name, 128, draw) for name, draw in _NEEDLES.items()},
    "vt": Task("vt", 30, variable_tracking),
    "cwe": Task("cwe", 120, common_words),
    "fwe": Task("fwe", 50, frequent_words),
    "qa_1": Task("qa_1", 32, Reading("squad"), match="part", needs="squad"),
    "qa_2": Task("qa_2", 32, Reading("hotpotqa"), match="part", needs="hotpotqa"),
}


ALL = "ruler"  # the name of all of them


def check_names(names: Sequence[str], others: Sequence[str] = ()) -> None:
    """Raises ValueError for a name that is neither a task's, nor "ruler", nor one of the others; or for a task twice."""
    known = [*others, ALL, *TASKS]
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"use some of {', '.join(known)}"
            raise ValueError(f"tasks: {name!r} is unknown; {hint}")
        if names.count(name) > 1 or (ALL in names and name in TASKS):
            raise ValueError(
                f"tasks = {','.join(names)!r} has {name} twice; name it once, or {ALL} for all of {ALL.upper()}'s"
            )


def chosen(names: Sequence[str], sources: Sources) -> tuple[list[Task], dict[str, str]]:
    """Returns (the tasks that run, name -> why of those that do not).

    Args:
      names: of tasks, or "ruler" for all. One that is named must run.

    Raises:
      ValueError: a name is unknown, or a task that is named lacks its file.
    """
    check_names(names)
    run, left_out = [], {}
    for name, task in TASKS.items():
        if name not in names and ALL not in names:
            continue
        if task.needs is None or getattr(sources, task.needs) is not None:
            run.append(task)
            continue
        why = f"{name} needs {task.needs}=FILE.json"
        if name in names:
            raise ValueError(f"tasks: {why}; give that, or leave {name} out")
        left_out[name] = why
    return run, left_out
