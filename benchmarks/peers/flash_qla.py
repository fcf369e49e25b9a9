"""FlashQLA: gated delta rules with decays of heads, in TileLang."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.peers import missing, needs_torch

FRAMEWORK = "torch"
OPERATIONS = ("delta_rule",)


def available() -> str | None:
    return missing("flash_qla") or needs_torch(gpu=True)


def express(op_name: str, arguments: dict[str, Any]) -> Callable | str:
    g, scale = arguments.get("g"), arguments.get("softmax_scale")
    if g is None or g.shape[-1] > 1:
        return "it has one decay per head"
    if arguments["query"].shape[1] == 1:
        return "one token is not a chunk"
    if any(arguments.get(n) is not None for n in ("segment_ids", "initial_state")) or arguments.get("use_qk_l2norm"):
        return "documents, states and norms are compared without"
    if str(arguments["value"].dtype) == "float32":
        return "it has 16-bit floats only"
    scale = arguments["query"].shape[-1] ** -0.5 if scale is None else scale

    def gated(query: Any, key: Any, value: Any, beta: Any, g: Any) -> Any:
        from flash_qla import chunk_gated_delta_rule

        return chunk_gated_delta_rule(q=query, k=key, v=value, g=g[..., 0], beta=beta, scale=scale)[0]

    return gated
