"""Rotary embedding in plain XLA, any device."""

from __future__ import annotations

from kernels.ops.rotary_embedding.contract import op, rotary_embedding


def backward(saved, positions, base, scaling, interleaved, rotary_dim):
    # The transpose of a rotation is the rotation back; a YaRN factor is a plain factor in both.
    return {
        "x": rotary_embedding(
            saved.d_out, -positions, base=base, scaling=scaling, interleaved=interleaved, rotary_dim=rotary_dim
        )
    }


op.register(
    rotary_embedding,
    backward,
    name="xla",
    platforms={"cpu", "cuda", "rocm", "tpu"},
    dtypes={"float32", "bfloat16", "float16"},
    symbolic={"B", "T", "N"},
)
