"""Faults that `python tests/mutations.py` seeds, a file for each operation or area; every file here that has FAULTS counts."""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """A fault: in `file`, the first `old` becomes `new`; `tests` are arguments of pytest for the tests that must notice.

    The fewer tests these are, the sooner it is known: the file, and with -k those that the fault is for.
    """

    name: str
    file: str
    old: str
    new: str
    tests: str


def collected() -> dict[str, tuple[Fault, ...]]:
    """Returns area -> its faults."""
    areas = sorted(found.name for found in pkgutil.iter_modules(__path__))
    return {area: tuple(importlib.import_module(f"{__name__}.{area}").FAULTS) for area in areas}
