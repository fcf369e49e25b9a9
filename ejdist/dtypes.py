"""Names of dtypes as the field writes them, and the one by which keys and files store them."""

from __future__ import annotations

# By NumPy's name, which is JAX's.
SPELLINGS = {
    "bfloat16": "bf16 bfloat",
    "float16": "fp16 f16 half",
    "float32": "fp32 f32 float single full",
}
_NAMES = {other: name for name, others in SPELLINGS.items() for other in (name, *others.split())}


def dtype_name(given: str) -> str:
    """Returns NumPy's name of a dtype: "bfloat16" for bf16, BF16, jnp.bfloat16 and torch.bfloat16. An unknown name is
    returned unchanged, for its reader to refuse."""
    return _NAMES.get(given.strip().lower().rpartition(".")[2], given)
