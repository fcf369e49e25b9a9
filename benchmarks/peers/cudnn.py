"""cuDNN's fused attention, through jax.nn.dot_product_attention."""

from __future__ import annotations

from typing import Any

from benchmarks.peers import jax_nn, needs_gpu

FRAMEWORK = "jax"
OPERATIONS = ("flash_attention",)


def available() -> str | None:
    return needs_gpu()


def express(op_name: str, arguments: dict[str, Any]) -> Any:
    found = jax_nn.express(op_name, arguments, "cudnn")
    if isinstance(found, str):
        return found
    if str(arguments["query"].dtype) not in ("bfloat16", "float16"):
        return "it has 16-bit floats only"
    mask = arguments.get("mask")
    if mask is not None and mask.window is not None and not (mask.causal and mask.window[1] in (0, None)):
        return "its window looks back only, and only under a causal mask"
    return found
