"""A call with what its backend keeps for its backward, for a caller that writes the gradient over several operations itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax.ad_checkpoint import checkpoint_name

from kernels.framework import execute
from kernels.framework.contract import Op


def keeping(op: Op, *args: Any, platform: str | None = None, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
    """Returns (outputs, name -> array): what `op.backward` takes in `saved` beside the cotangents, because a backend keeps it.

    Args:
      op: of which the contract has no residuals. args, kwargs, platform: of the call.
    """
    call = op.bind(*args, **kwargs)

    def make() -> Callable:
        gradient = op.plan(call, platform, None, differentiated=True)
        forward = op.plan(call, platform, None, differentiated=False).forward_of(gradient)
        run = execute.compiled_forward(op, call, forward)

        def tagged(traced: dict[str, Any]) -> Any:
            outputs, kept = run(traced)
            # As of a differentiated call, so that a remat policy can save it.
            return outputs, {name: checkpoint_name(value, f"{op.name}.{name}") for name, value in kept.items()}

        return tagged

    return op.program("keeping", call, platform, None, make)(call.traced())
