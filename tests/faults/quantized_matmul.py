"""Faults of quantized_matmul."""

from faults import Fault

QUANTIZED = "tests/kernels/test_quantized_matmul.py"

FAULTS = (
    Fault(
        "quantized matmul: affine codes of unknown width are of 4 bits",
        "kernels/ops/quantized_matmul/__init__.py",
        "if bits is None and len(form.bits) == 1:",
        "if bits is None and group_size is None:",
        f"{QUANTIZED} -k not_guessed",
    ),
    Fault(
        "quantized matmul: the end of a code in the next word is lost",
        "kernels/ops/quantized_matmul/formats.py",
        "codes = jnp.where(crosses, codes | rest, codes)",
        "pass",
        QUANTIZED,
    ),
    Fault(
        "quantized matmul: ties are rounded up",
        "kernels/ops/quantized_matmul/formats.py",
        "tuple(code % 2 == 1 for code in range(7))",
        "(True,) * 7",
        f"{QUANTIZED} -k ties",
    ),
    Fault(
        "quantized matmul: the codes are chosen for another scale than is kept",
        "kernels/ops/quantized_matmul/formats.py",
        "power = jnp.frexp(largest)[1] - 1 -",
        "power = jnp.frexp(largest)[1] -",
        QUANTIZED,
    ),
    Fault(
        "quantized matmul: all of the weights in one tile",
        "kernels/ops/quantized_matmul/xla.py",
        "TILE = 1 << 20",
        "TILE = 1 << 30",
        QUANTIZED,
    ),
)
