"""Peers: what others offer for the same operations. A file a peer; nothing elsewhere lists them.

A peer's module has
  FRAMEWORK: "jax" or "torch";
  OPERATIONS: the names of the operations that it may express;
  available(): None, or why it cannot run here;
  express(op_name, arguments): given every argument of a call by name, defaults included, returns a function of the call's
    arrays by name (a mask or another tree of arrays is read from `arguments`), or a sentence saying why the call cannot
    be expressed. The function gives the operation's first output; where it gives something else that follows from the
    outputs, express returns an `Expression`.
Importing a peer imports no package of others.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax


def first(*outputs: Any) -> Any:
    return outputs[0]


def every(*outputs: Any) -> Any:
    return outputs


@dataclass(frozen=True)
class Expression:
    """A peer's function, and `of`: what of the contract's outputs it gives; and whether it has a backward."""

    function: Callable[..., Any]
    of: Callable[..., Any] = first
    backward: bool = True


@dataclass(frozen=True)
class PlainAttention:
    """Attention without anything but causality and a window. `window` is (left, right), None for an open side."""

    causal: bool
    window: tuple[int | None, int | None] | None
    scale: float | None

    def sides(self, length: int) -> tuple[int, int] | None:
        """Returns the window with numbers on both sides, for a row of that length."""
        if self.window is None:
            return None
        left, right = self.window
        return (length if left is None else left, length if right is None else right)


def all_peers() -> dict[str, Any]:
    """Returns every peer's module by name."""
    names = sorted(info.name for info in pkgutil.iter_modules(__path__))
    return {name: importlib.import_module(f"{__name__}.{name}") for name in names}


def missing(*packages: str) -> str | None:
    """Returns what is not installed, or None."""
    absent = [name for name in packages if importlib.util.find_spec(name) is None]
    return f"{', '.join(absent)} is not installed" if absent else None


def needs_gpu() -> str | None:
    return None if jax.default_backend() == "gpu" else "it needs a GPU"


def needs_torch(gpu: bool = False) -> str | None:
    """Returns why PyTorch cannot run here on the device that JAX runs on, or None."""
    reason = missing("torch") or (needs_gpu() if gpu else None)
    if reason or jax.default_backend() == "cpu":
        return reason
    import torch

    return None if torch.cuda.is_available() else "torch sees no GPU"


def plain_attention(
    arguments: dict[str, Any], *, causal_cross: bool = False, besides: tuple[str, ...] = ()
) -> PlainAttention | str:
    """Returns the call as plain attention, or why it is more than that.

    Args:
      causal_cross: the peer puts the last query at the last key, as the contract does; most start both at 0.
      besides: arguments and fields of the mask that the peer reads itself.
    """
    plain = ("bias", "softmax_aux", "alibi_slopes", "dropout_seed", "logits_soft_cap", "dropout_prob")
    given = {name: arguments.get(name) for name in plain}
    used = [
        name for name, value in given.items() if value is not None and not (isinstance(value, float) and value == 0)
    ]
    mask = arguments.get("mask")
    if mask is not None:
        used += [name for name in mask.used if name not in ("causal", "window")]
    if unsaid := [name for name in used if name not in besides]:
        return f"it cannot say {', '.join(unsaid)}"
    causal, window = (False, None) if mask is None else (mask.causal, mask.window)
    if (causal or window) and not causal_cross and arguments["query"].shape[1] != arguments["key"].shape[1]:
        return "it aligns the first query with the first key"
    return PlainAttention(causal, window, arguments.get("softmax_scale"))
