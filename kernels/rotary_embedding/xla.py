"""Rotary embedding in plain XLA, any device."""

from __future__ import annotations

from kernels.rotary_embedding.contract import op, rotary_embedding


@op.backend(
    platforms={"cpu", "cuda", "rocm", "tpu"},
    dtypes={"float32", "bfloat16", "float16"},
    features={"base", "scaling", "interleaved", "rotary_dim"},
)
def forward(x, positions, base, scaling, interleaved, rotary_dim, cfg):
    return rotary_embedding(x, positions, base=base, scaling=scaling, interleaved=interleaved, rotary_dim=rotary_dim)


def backward(saved, x, positions, base, scaling, interleaved, rotary_dim, cfg):
    # The transpose of a rotation is the rotation back; a YaRN factor is a plain factor in both.
    dx = rotary_embedding(
        saved.d_out, -positions, base=base, scaling=scaling, interleaved=interleaved, rotary_dim=rotary_dim
    )
    return {"x": dx}
