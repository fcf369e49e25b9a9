"""What Gluon kernels have in common, whatever they compute: tiles in shared memory, and stages that go round."""

# Gluon declares tensors where its compiler takes constants and integers too.
# pyrefly: ignore-errors[bad-argument-type, unsupported-operation]

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# Of a block of 16-bit entries in shared memory, as TMA and the matrix units read it. Rows are of 64 entries or more.
SWIZZLED = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))


@gluon.jit
def after(stage, phase, STAGES: gl.constexpr):
    """Returns the stage after this one, and its phase: how often the ring has been gone round, modulo 2."""
    last = stage == STAGES - 1
    return gl.where(last, 0, stage + 1), gl.where(last, phase ^ 1, phase)
