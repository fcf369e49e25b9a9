"""torch._weight_int4pack_mm: codes of 4 bits in a layout of its own, with scales and zeros of groups, in CUDA."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from benchmarks.peers import Expression, needs_torch

FRAMEWORK = "torch"
OPERATIONS = ("quantized_matmul",)
# The layout is made once, and calls go round copies of it, as the others go round copies of their inputs: two of 8192 x 8192
# do not fit in the cache.
COPIES = 4
TILES = 8  # of the contracted dim that lie beside each other


def available() -> str | None:
    return needs_torch(gpu=True)


def express(op_name: str, arguments: dict[str, Any]) -> Expression | str:
    if (arguments["mode"], arguments["bits"]) != ("affine", 4):
        return "it has affine codes of 4 bits only"
    if arguments["group_size"] not in (32, 64, 128, 256):
        return "it has groups of 32, 64, 128 and 256"
    if any(str(arguments[name].dtype) != "bfloat16" for name in ("x", "scales", "biases")):
        return "it has bfloat16 only"
    if arguments["w"].shape[1] % 8 or arguments["x"].shape[-1] % (16 * TILES):
        return "its tiles are whole"
    return Expression(_product(arguments), backward=False)


def _product(arguments: dict[str, Any]) -> Callable:
    import jax.numpy as jnp
    import numpy as np
    import torch

    from benchmarks.torch_programs import to_torch
    from kernels.engines.matmul.formats import unpack

    codes = np.asarray(unpack(arguments["w"], 4)).astype(np.uint8).T
    packed = torch.from_numpy(np.ascontiguousarray(codes[:, ::2] << 4 | codes[:, 1::2])).to("cuda")
    # A weight is (code - 8) * scale + zero.
    scales, biases = (arguments[name].astype(jnp.float32) for name in ("scales", "biases"))
    both = to_torch(jnp.stack([scales, biases + 8 * scales], axis=-1).astype(jnp.bfloat16))
    weights = [(torch._convert_weight_to_int4pack(packed, TILES), both.clone()) for _ in range(COPIES)]
    turn, size = itertools.cycle(weights), arguments["group_size"]

    def product(x: Any, **_: Any) -> Any:
        words, factors = next(turn)
        return torch._weight_int4pack_mm(x.reshape(-1, x.shape[-1]), words, size, factors).reshape(*x.shape[:-1], -1)

    return product
