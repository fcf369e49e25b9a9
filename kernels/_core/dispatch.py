"""Dispatch at lowering: one traced program that holds the backend of each platform it may be compiled for.

`jax.lax.platform_dependent` keeps only the branch of the platform that the program is lowered for. A platform for which
no backend qualifies gets a branch that refuses, in our words, when (and only when) it is lowered.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import mlir

PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
DEVICE_OF_PLATFORM = {"cpu": "cpu", "cuda": "gpu", "rocm": "gpu", "tpu": "tpu"}


class Unsupported(NotImplementedError):
    """This backend cannot do what was asked; the message gives the reason and what could."""


_refuse_p = Primitive("ejdist_refuse")
_refuse_p.multiple_results = True
_refuse_p.def_abstract_eval(lambda *args, avals, reason: [jax.core.ShapedArray(shape, dtype) for shape, dtype in avals])


def _refuse_lowering(ctx: Any, *args: Any, avals: Any, reason: str) -> Any:
    raise Unsupported(reason)


mlir.register_lowering(_refuse_p, _refuse_lowering)


def _refusal(reason: str, result: Any) -> Callable:
    leaves, tree = jax.tree.flatten(result)
    avals = tuple((tuple(leaf.shape), leaf.dtype) for leaf in leaves)

    def branch(*operands: Any) -> Any:
        return jax.tree.unflatten(tree, _refuse_p.bind(*jax.tree.leaves(operands), avals=avals, reason=reason))

    return branch


def by_platform(branches: Mapping[str, Callable | str], result: Any, *operands: Any) -> Any:
    """Returns the result of the branch of the platform that this is lowered for.

    Args:
      branches: for each of PLATFORMS, the function to run, or the reason why there is none. Equal functions are traced
        once.
      result: pytree of `jax.ShapeDtypeStruct`, what every branch returns.
      operands: pytrees of arrays, given to the branch.
    """
    kinds = list(dict.fromkeys(branches[p] for p in PLATFORMS))
    if len(kinds) == 1 and callable(kinds[0]):
        return kinds[0](*operands)
    functions = {kind: kind if callable(kind) else _refusal(kind, result) for kind in kinds}
    default = branches["cpu"]
    named = {p: functions[branches[p]] for p in PLATFORMS if branches[p] != default}
    return jax.lax.platform_dependent(*operands, default=functions[default], **named)
