"""grouped_matmul's specialised warps on a CUDA device. Run with the command in CONTRIBUTING.md.

On a CPU they are interpreted, in tests/kernels/test_grouped_matmul_hopper.py: here it is the code that the compiler made of
them.
"""

import pytest
from hopper import on_a_gpu
from hopper_products import ACTIVATED, SIZES, check

pytestmark = on_a_gpu()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("D", "F"), [(128, 320), (64, 64), (320, 1408)])
@pytest.mark.parametrize("specialised", ["tall", "wide"])
def test_numbers_of_specialised_warps(specialised, D, F, transposed, dtype):
    for sizes in SIZES.values():
        for offset in (None, 1) if len(sizes) > 3 else (None,):
            check(specialised, D, F, dtype, transposed, offset, sizes, again=2)


@pytest.mark.parametrize(("D", "F", "sizes"), [(128, 320, "ragged"), (320, 1408, "empty"), (64, 72, "one")])
@pytest.mark.parametrize(("activation", "gated", "bias", "transposed", "dtype"), ACTIVATED)
@pytest.mark.parametrize("specialised", ["tall", "wide"])
def test_numbers_of_activations(specialised, activation, gated, bias, transposed, dtype, D, F, sizes):
    offset = 1 if sizes == "ragged" and gated else None
    check(specialised, D, F, dtype, transposed, offset, SIZES[sizes], activation, gated=gated, bias=bias, again=2)
