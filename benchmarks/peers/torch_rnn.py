"""torch.nn.LSTM, GRU and RNN, on NVIDIA GPUs those of cuDNN. Weights are theirs from the start, and have no gradient here."""

from __future__ import annotations

from typing import Any

from benchmarks.peers import needs_torch

FRAMEWORK = "torch"
OPERATIONS = ("recurrent",)


def available() -> str | None:
    return needs_torch()


def express(op_name: str, arguments: dict[str, Any]) -> Any:
    """float32 is computed as it is here, without TF32."""
    if any(arguments.get(name) is not None for name in ("segment_ids", "initial_state")):
        return "documents and states are compared without"
    weights, cell, ways = arguments["weights"], arguments["cell_type"], arguments["bidirectional"]
    if arguments["activation"] not in (("tanh", "relu") if cell == "rnn" else ("tanh",)):
        return f"its {cell} has no {arguments['activation']}"
    biases = [name for name in weights if name.startswith("bias")]
    if len(biases) not in (0, len(weights) // 2):
        return "it has all biases, or none"

    import torch

    from benchmarks.torch_programs import device, to_torch

    inputs, F = arguments["inputs"], weights["weight_hh"].shape[1]
    torch.backends.cudnn.allow_tf32 = str(inputs.dtype) != "float32"
    options: dict[str, Any] = {"batch_first": True, "bias": bool(biases), "bidirectional": ways}
    options |= {"nonlinearity": arguments["activation"]} if cell == "rnn" else {}
    layer = getattr(torch.nn, cell.upper())(inputs.shape[-1], F, **options)
    layer.load_state_dict({_theirs(name): to_torch(x) for name, x in weights.items()})
    layer = layer.to(device(), getattr(torch, str(inputs.dtype))).requires_grad_(False)
    layer.flatten_parameters()

    def recurrent(inputs: Any) -> Any:
        return layer(inputs)[0]

    return recurrent


def _theirs(name: str) -> str:
    """Returns their name of a weight: a layer's number stands before the direction."""
    return f"{name.removesuffix('_reverse')}_l0{'_reverse' * name.endswith('_reverse')}"
