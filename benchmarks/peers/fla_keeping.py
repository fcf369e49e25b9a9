"""flash-linear-attention's Kimi Delta Attention, whose forward keeps what its backward would compute again."""

from __future__ import annotations

import functools
from typing import Any

from benchmarks.peers import fla

FRAMEWORK = fla.FRAMEWORK
OPERATIONS = ("delta_rule",)
available = fla.available


def express(op_name: str, arguments: dict[str, Any]) -> Any:
    g = arguments.get("g")
    if g is None or g.shape[-1] == 1 or arguments["query"].shape[1] == 1:
        return "only Kimi Delta Attention over many tokens has the choice"
    return fla.express(op_name, arguments, functools.partial(fla.delta_rule, keeps=True))
