"""Rotary embedding in plain XLA, any device."""

from __future__ import annotations

from kernels.ops.rotary_embedding.contract import op, rotary_embedding


def backward(saved, positions, base, scaling, interleaved, rotary_dim, xpos):
    # The transpose of a rotation is the rotation back; the factors of YaRN and XPos are plain factors in both.
    xpos = None if xpos is None else xpos.reversed()
    options = {"base": base, "scaling": scaling, "interleaved": interleaved, "rotary_dim": rotary_dim, "xpos": xpos}
    return {"x": rotary_embedding(saved.d_out, -positions, **options)}


op.register(
    rotary_embedding,
    backward,
    name="xla",
    platforms={"cpu", "cuda", "rocm", "tpu"},
    dtypes={"float32", "bfloat16", "float16"},
    symbolic={"B", "T", "N"},
)
