"""Every operation on every backend, for every case and dtype: the numbers of the contract, or a refusal by name."""

import re

import jax.numpy as jnp
import pytest
from grid import check, on_this_machine

import kernels
from kernels import Unsupported
from kernels._core.binding import is_float_array

OPS = kernels.operations()
DTYPES = ("float32", "bfloat16", "float16")


def _rows():
    for op in OPS.values():
        for backend in op.backends.values():
            for case in op.cases:
                if "bench" in case.tags:
                    continue
                for dtype in DTYPES:
                    # float32 is the sharpest; the narrower types run on all cases in the full grid.
                    quick = dtype == "float32" or "smoke" in case.tags or case is op.cases[0]
                    marks = () if quick else (pytest.mark.slow,)
                    yield pytest.param(
                        op, backend, case, dtype, marks=marks, id=f"{op.name}-{backend.name}-{case.name}-{dtype}"
                    )


@pytest.mark.parametrize(("op", "backend", "case", "dtype"), list(_rows()))
def test_numbers_or_a_refusal(op, backend, case, dtype):
    arguments = op.case_inputs(case, dtype=dtype)
    reason = backend.refuses(op, op.bind(**arguments), True)
    if reason is None:
        check(op, backend, case, dtype)
        return
    # Not a skip: what is asserted is that the call is refused, for this reason, in these words.
    with on_this_machine(backend), pytest.raises(Unsupported, match=re.escape(reason)):
        op(**arguments, platform=backend.name)


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_every_feature_of_the_contract_is_in_a_case(op):
    used = set()
    for case in op.cases:
        if "bench" not in case.tags:
            used |= set(op.used_features(op.bind(**op.case_inputs(case))))
    assert set(op.feature_names) <= used, f"no case uses {sorted(set(op.feature_names) - used)}"


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_every_backend_refuses_what_it_does_not_allow(op):
    for case in op.cases:
        if "bench" in case.tags:
            continue
        arguments = op.case_inputs(case)
        call = op.bind(**arguments)
        for backend in op.backends.values():
            foreign = [f for f in op.used_features(call) if f not in backend.features]
            if foreign:
                with pytest.raises(Unsupported, match=foreign[0]):
                    op(**arguments, platform=backend.name)


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_a_dtype_that_no_backend_has_is_refused(op):
    arguments = op.case_inputs(op.cases[0])
    wide = {k: v.astype(jnp.float8_e4m3fn) if is_float_array(v) else v for k, v in arguments.items()}
    with pytest.raises(Unsupported, match="float8_e4m3fn"):
        op(**wide)


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_the_same_call_gives_the_same_bits(op):
    arguments = op.case_inputs(op.cases[0])
    first, second = (op(**arguments) for _ in range(2))
    for a, b in zip(*(x if isinstance(x, tuple) else (x,) for x in (first, second)), strict=True):
        assert a.tobytes() == b.tobytes()
