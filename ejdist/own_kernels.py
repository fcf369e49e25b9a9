"""Whether `import kernels` finds the package that comes with this one. Hugging Face has one of that name too."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import warnings
from pathlib import Path

_OURS = Path(__file__).resolve().parent.parent / "kernels"


def check_kernels() -> None:
    """Warns where another package `kernels` is installed, which cannot be imported beside ours.

    Raises:
      ImportError: Python finds that one first, or it was installed over ours; says what to do.
    """
    spec = importlib.util.find_spec("kernels")
    where = Path(spec.origin).resolve().parent if spec is not None and spec.origin is not None else None
    if where != _OURS:
        instead = "finds none" if where is None else f"finds another package of that name first, in {where}"
        raise ImportError(
            f"ejdist needs its own package 'kernels', in {_OURS}, and Python {instead}: put {_OURS.parent} first in "
            "PYTHONPATH, or remove the other (pip uninstall kernels)",
            name="kernels",
        )
    try:
        other = importlib.metadata.version("kernels")
    except importlib.metadata.PackageNotFoundError:
        return
    if "kernel_registry" not in (_OURS / "__init__.py").read_text():
        raise ImportError(
            f"the package kernels {other} was installed over ejdist's own 'kernels' in {_OURS}: pip uninstall kernels, then "
            "install ejdist again",
            name="kernels",
        )
    warnings.warn(
        f"the package kernels {other} is installed too, and 'import kernels' finds ejdist's own: whatever needs the other, "
        "such as transformers' kernels from the hub, needs an environment without ejdist",
        stacklevel=3,
    )
