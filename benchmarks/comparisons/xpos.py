"""`python -m benchmarks.comparisons.xpos FILE`: rotary_embedding with XPos beside torchscale's `XPOS`, whose module FILE is
(torchscale/component/xpos_relative_position.py). Needs `pip install torch`.

torchscale turns by positions from 0, and counts those of the factors from the middle of the sequence: `center`. Prints the
relative error in the 2-norm of queries and of keys, float32.
"""

from __future__ import annotations

import importlib.util
import sys

import jax.numpy as jnp
import numpy as np

from ejdist import XPos
from kernels import rotary_embedding


def main(path: str) -> None:
    """Prints the two errors."""
    import torch

    spec = importlib.util.spec_from_file_location("theirs", path)
    assert spec is not None and spec.loader is not None
    theirs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(theirs)
    x = np.random.default_rng(0).standard_normal((3, 600, 64)).astype(np.float32)  # [rows, T, H]
    positions = jnp.arange(600)[None]
    for name, downscale in (("queries", False), ("keys", True)):
        want = theirs.XPOS(64)(torch.tensor(x), offset=0, downscale=downscale).numpy()
        ours = XPos(inverse=downscale, center=300.0)
        got = rotary_embedding(x[:, :, None], positions, interleaved=True, xpos=ours)[:, :, 0]
        print(f"{name}: {np.linalg.norm(got - want) / np.linalg.norm(want):.1e}")


if __name__ == "__main__":
    main(sys.argv[1])
