"""Faults that `python tests/mutations.py` seeds, a file for each operation or area; every file here that has FAULTS counts.

A fault is stated by the function that it is in and by the code that changes, so that moving the function, or renaming what it
calls its variables, costs nothing:

    Fault("window one key wider", "visible_block", "$seen &= $j >= $i - $left", "$seen &= $j >= $i - $left - 1", TESTS)

**The anchor** is the qualified name of a function, a class or a constant: `visible_block`, `Ring.forward`, `outer.inner`,
`PEAKS`, `Section.field`. Where several files define that name, the end of the path comes first: `norms:heuristic`,
`rms_norm/xla:forward`; a package is its folder, `training/data:open`. If no path ends so, its first folders are ignored, so
a renamed folder does not matter while the rest is unique. `rms_norm/xla:`, with nothing after the colon, is the whole module.
Code in `tests/` needs its whole path: `tests/memory:drop_programs`.

**The pattern** is Python: an expression, or a run of statements. It is compared as a syntax tree, and must match in exactly one
place of what the anchor names.

- `$name` is any identifier, the same one wherever it is repeated; different names are different identifiers. Write variables
  so. What other code refers to (functions, attributes, constants, keyword arguments) stands for itself.
- `$$name` is any number of statements, arguments or elements, including none: `if $causal: $$body`. Among keyword arguments it
  is `**$$name`.

**The replacement** is Python with the same names; an empty one removes the statements. If it is no expression, an expression as
the pattern is the whole statement: `f(x)` and `pass`.

A fault whose anchor or pattern is missing or ambiguous is STALE: an error that says what was looked for, and where. A fault may
instead have a file's path, ending in `.py`, as its anchor: then the pattern is text, and its first occurrence is replaced.
"""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """A fault: `old` becomes `new` in what `where` names; `tests` are arguments of pytest for the tests that must notice.

    The fewer tests these are, the sooner it is known: the file, and with -k those that the fault is for.
    """

    name: str
    where: str
    old: str
    new: str
    tests: str

    @property
    def is_text(self) -> bool:
        """Whether `where` is a file and `old` a text in it."""
        return self.where.endswith(".py")


def collected() -> dict[str, tuple[Fault, ...]]:
    """Returns area -> its faults."""
    areas = sorted(found.name for found in pkgutil.iter_modules(__path__))
    return {area: tuple(importlib.import_module(f"{__name__}.{area}").FAULTS) for area in areas}
