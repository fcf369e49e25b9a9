"""The programs of a PyTorch function: forward without autograd, backward by autograd, timed by CUDA events."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch._dynamo
import torch._functorch.config

from benchmarks.cases import as_tuple

# The same backward runs many times over one forward, so compiled backwards must leave what was saved alone.
torch._functorch.config.donated_buffer = False
# One process compiles a function for every case; past the usual limit torch would quietly run it uncompiled.
torch._dynamo.config.recompile_limit = 256

_HEAD_START_CYCLES = 20_000_000  # about 10 ms


def device() -> str:
    return "cuda" if torch.cuda.is_available() and jax.default_backend() == "gpu" else "cpu"


def to_torch(x: Any) -> torch.Tensor:
    """Returns a copy of a JAX or NumPy array, on the device that JAX runs on, in the same dtype."""
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return torch.from_numpy(np.array(x)).to(device())
    # Through float32, which holds every narrower float exactly: NumPy has no bfloat16 that torch can read.
    return torch.from_numpy(np.array(x, np.float32)).to(device()).to(getattr(torch, str(x.dtype)))


def to_jax(x: torch.Tensor) -> jax.Array:
    return jnp.asarray(x.detach().float().cpu().numpy())


class TorchPrograms:
    """The same programs as `benchmarks.programs.JaxPrograms`, of a function of tensors by name."""

    def __init__(self, function: Callable[..., Any]):
        self.function = function

    def load(self, floats: dict[str, Any], data: dict[str, Any]) -> Any:
        tensors = {k: to_torch(v).requires_grad_() for k, v in floats.items()}
        # A mask, or other tree, was read by the peer when it said that it can express the case.
        return tensors, {k: to_torch(v) for k, v in data.items() if isinstance(v, (jax.Array, np.ndarray))}

    def load_cotangents(self, cotangents: tuple) -> Any:
        return tuple(to_torch(c) for c in cotangents)

    def forward(self, inputs: Any) -> Any:
        with torch.no_grad():
            return as_tuple(self.function(**inputs[0], **inputs[1]))

    def save(self, inputs: Any) -> Any:
        return as_tuple(self.function(**inputs[0], **inputs[1])), tuple(inputs[0].values())

    def backward(self, saved: Any, cotangents: Any) -> Any:
        outputs, tensors = saved
        return torch.autograd.grad(outputs, tensors, cotangents, retain_graph=True)

    def both(self, inputs: Any, cotangents: Any) -> Any:
        outputs, tensors = self.save(inputs)
        return outputs, torch.autograd.grad(outputs, tensors, cotangents)

    def outputs_and_gradients(self, inputs: Any, cotangents: Any) -> tuple[tuple, dict[str, jax.Array]]:
        gradients = self.backward(self.save(inputs), cotangents)
        named = {name: to_jax(g) for name, g in zip(inputs[0], gradients, strict=True)}
        return self.outputs(inputs), named

    def outputs(self, inputs: Any) -> tuple:
        return tuple(to_jax(y) for y in self.forward(inputs))

    def block(self, value: Any) -> None:
        if device() == "cuda":
            torch.cuda.synchronize()

    def kernel_seconds(self, run: Callable[[int], Any], calls: int) -> float | None:
        """Returns the seconds of one call between two CUDA events, the gaps between its kernels included."""
        if device() != "cuda":
            return None
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        # While the device sleeps the host gets ahead, so that what is timed is not how fast the host can launch.
        torch.cuda._sleep(_HEAD_START_CYCLES)
        start.record()
        for n in range(calls):
            run(n)
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) * 1e-3 / calls
