"""Faults of quantized_matmul."""

from faults import Fault

QUANTIZED = "tests/kernels/test_quantized_matmul.py"

FAULTS = (
    Fault(
        "quantized matmul: affine codes of unknown width are of 4 bits",
        "dequantize",
        "len($form.bits) == 1",
        "group_size is None",
        f"{QUANTIZED} -k not_guessed",
    ),
    Fault(
        "quantized matmul: the end of a code in the next word is lost",
        "unpack",
        "$codes = jnp.where($crosses, $codes | $rest, $codes)",
        "pass",
        QUANTIZED,
    ),
    Fault(
        "quantized matmul: ties are rounded up",
        "matmul/formats:quantized",
        "tuple(($code % 2 == 1 for $code in range(7)))",
        "(True,) * 7",
        f"{QUANTIZED} -k ties",
    ),
    Fault(
        "quantized matmul: the codes are chosen for another scale than is kept",
        "matmul/formats:quantized",
        "jnp.frexp($largest)[1] - 1",
        "jnp.frexp($largest)[1]",
        QUANTIZED,
    ),
    Fault("quantized matmul: all of the weights in one tile", "TILE", "1 << 20", "1 << 30", QUANTIZED),
)
