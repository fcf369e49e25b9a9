"""torch._grouped_mm: rows of a group times that group's matrix, on Hopper and later."""

from __future__ import annotations

from typing import Any

from benchmarks.peers import needs_torch

FRAMEWORK = "torch"
OPERATIONS = ("grouped_matmul",)


def available() -> str | None:
    reason = needs_torch(gpu=True)
    if reason:
        return reason
    import torch

    return None if hasattr(torch, "_grouped_mm") else f"torch {torch.__version__} has no _grouped_mm"


def express(op_name: str, arguments: dict[str, Any]) -> Any:
    if str(arguments["lhs"].dtype) != "bfloat16":
        return "it has bfloat16 only"
    if any(arguments[name] is not None for name in ("group_offset", "rhs_bias", "activation")):
        return "it has the plain product only"
    weights = arguments["rhs"] if arguments["rhs_transposed"] is None else arguments["rhs_transposed"]
    if any(size % 8 for size in weights.shape[1:]):
        return "rows must be multiples of 16 bytes"
    if int(arguments["group_sizes"].sum()) != arguments["lhs"].shape[0]:
        return "it leaves rows past the last group unwritten"

    def grouped_matmul(lhs: Any, group_sizes: Any, rhs: Any = None, rhs_transposed: Any = None) -> Any:
        import torch

        ends = torch.cumsum(group_sizes, 0, dtype=torch.int32)
        return torch._grouped_mm(lhs, rhs_transposed.transpose(1, 2) if rhs is None else rhs, offs=ends)

    return grouped_matmul
