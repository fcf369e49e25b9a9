"""Training: step, loop, optimizer, checkpoints, data, metrics. `train` is the whole of it for a trainer of one's own."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ejdist.training.loop import Outcome, train

__all__ = ["Outcome", "train"]


def __getattr__(name: str) -> Any:
    """Imports the loop on first use: the sections of recipes, in this package too, do not need it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ejdist.training import loop

    return getattr(loop, name)
