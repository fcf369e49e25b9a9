"""Every operation on every backend, for every case and dtype: the numbers of the contract, or a refusal by name."""

import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grid import (
    BUILT_ON_ANOTHER,
    as_tuple,
    check,
    covering,
    differentiable,
    fewest,
    on_this_machine,
    richest,
    value_and_gradients,
)

import kernels
from kernels import Unsupported
from kernels.framework.binding import is_float_array

OPS = kernels.operations()
DTYPES = ("float32", "bfloat16", "float16")
OF_EACH_ENGINE = (
    *("blocksparse_attention", "cross_entropy", "delta_rule", "flash_attention", "gated_mlp", "grouped_matmul"),
    *("linear_attention", "mean_pooling", "paged_attention", "quantized_matmul", "rms_norm", "rotary_embedding"),
    *("recurrent", "state_space_v1", "causal_conv1d", "flash_mla"),
)
# Whose kernels several tiles are computed of, with gradients and as many options, in the quick tests of their files.
IN_THEIR_FILES = {("delta_rule", "pallas_tpu"), ("grouped_matmul", "pallas_tpu")}
RECURRENCES = ("causal_conv1d", "delta_rule", "linear_attention", "state_space_v2")
OF_ONE_CASE = {*BUILT_ON_ANOTHER, *RECURRENCES}  # of whose cases the files of the operations have more


def small(op):
    """Returns the cases whose numbers can be had on a CPU."""
    return [case for case in op.cases if "bench" not in case.tags]


def covered(op, backend):
    """Returns the names of the cases of a backend's quick rows: a few that have all that it takes, and what it refuses. Of
    kernels, which are slow to interpret, and of what is built on another operation, the one that has most: the others are in
    the files of those operations."""
    cases = [case for case in small(op) if "slow" not in case.tags]
    chosen = [case for case in cases if "kernels" in case.tags] if backend.toolchain == "pallas" else []
    taken = [c for c in chosen or cases if {*c.options, *c.arrays, *c.make} <= backend.names()]
    few = fewest(taken)
    if taken and (backend.toolchain in ("triton", "pallas") or op.name in OF_ONE_CASE):
        also = op.name in RECURRENCES and backend.toolchain == "triton"
        few = {richest(taken)} | ({taken[0].name} if also else set())
    return few | {case.name for case in cases if case not in taken}


def dtypes_of(op):
    """Returns the dtypes of an operation's rows, with those of 8 bits that only its backends have."""
    return DTYPES + tuple(sorted({d for b in op.backends.values() for d in b.dtypes if d.startswith("float8")}))


def _rows():
    for op in OPS.values():
        quick_cases = {backend.name: covered(op, backend) for backend in op.backends.values()}
        chosen = any("kernels" in case.tags for case in op.cases)
        for case in small(op):
            for dtype in dtypes_of(op):
                quick = "slow" not in case.tags
                # The backends side by side: the truth that they are compared with is the same.
                for backend in op.backends.values():
                    # Pallas is slow to interpret: one case is narrow, and an operation of many may say which are for it.
                    pallas = backend.toolchain == "pallas"
                    left_out = pallas and chosen and "kernels" not in case.tags
                    # Documents and packed sequences of recurrences are in the files of their kernels.
                    elsewhere = backend.toolchain == "triton" or op.name == "causal_conv1d"
                    elsewhere &= backend.toolchain != "xla" and case.name in ("documents", "packed")
                    left_out |= elsewhere and op.name in RECURRENCES
                    left_out |= (op.name, backend.name) in IN_THEIR_FILES
                    # float32 is the sharpest; in bfloat16, the narrowest, Triton kernels of each engine have a case, as in
                    # training. The full grid has every case in every dtype.
                    narrow = dtype == "bfloat16" and case is op.cases[0] and backend.toolchain == "triton"
                    narrow &= op.name in OF_EACH_ENGINE
                    left_out |= case.name not in quick_cases[backend.name] and not narrow
                    narrow |= dtype == "float8_e4m3fn"  # of few and small operations
                    left_out |= dtype != "float32" and not narrow
                    marks = () if quick and not left_out else (pytest.mark.slow,)
                    name = f"{op.name}-{case.name}-{dtype}-{backend.name}"
                    yield pytest.param(op, backend, case, dtype, marks=marks, id=name)


@pytest.mark.parametrize(("op", "backend", "case", "dtype"), list(_rows()))
def test_numbers_or_a_refusal(op, backend, case, dtype):
    call = op.bind(**op.case_inputs(case, dtype=dtype))
    # Of an operation that is forward only, the numbers of the forward.
    with on_this_machine(backend):
        reason = backend.refuses(op, call, differentiable(op))
    if reason is None:
        check(op, backend, case, dtype)
        return
    # Not a skip: what is asserted is that the call is refused, for this reason, in these words.
    with on_this_machine(backend), pytest.raises(Unsupported, match=re.escape(reason)):
        if backend.refuses(op, call, False):
            op(**call.arguments, platform=backend.name)
        else:  # a forward that it can run, without the backward
            value_and_gradients(lambda **a: op(**a, platform=backend.name), call.arguments, no_gradient=op.no_gradient)


def has_dims(shape, dims, sizes):
    """Returns whether a shape is that of the dims; a dim that no argument has takes its size from the first output with it."""
    wanted = []
    for d in dims:
        if d.variadic:
            wanted.extend(sizes[d.name])
            continue
        size = shape[len(wanted)] if len(wanted) < len(shape) else 0
        known = (
            d.size if d.size is not None else sizes.setdefault(d.name, size - d.offset) + d.offset if d.name else size
        )
        wanted.append(1 if d.broadcast and size == 1 else known)
    return tuple(wanted) == tuple(shape)


LONG = 2**20  # tokens; an array of all pairs of them would be larger than the memory of any host


def _long_cases(op):
    """Returns cases of an operation over tokens, each made `LONG` tokens long: two without data, and every static mask."""
    found = [case for case in small(op) if {"T", "S"} & set(case.dims)]
    without_data = [case for case in found if not case.make][:2]
    masks = [case for case in found if set(case.make) == {"mask"}]
    static = [c for c in masks if not jax.tree.leaves(c.make["mask"](np.random.default_rng(0), c.dims))]
    return [
        replace(case, dims={**case.dims, **{d: LONG for d in ("T", "S") if d in case.dims}})
        for case in without_data + static
    ]


@pytest.mark.parametrize("op", [op for op in OPS.values() if _long_cases(op)], ids=lambda op: op.name)
def test_a_program_of_many_tokens_is_traced_without_an_array_of_all_pairs(op):
    """Backends work by blocks, but the shapes of outputs come from the contract, whose arrays must stay symbolic."""
    for case in _long_cases(op):
        static = {name: make(np.random.default_rng(0), case.dims) for name, make in case.make.items()} | dict(
            case.options
        )
        arrays = {
            p.name: jax.ShapeDtypeStruct(case.shape(p), jnp.float32) for p in op.parameters.values() if case.draws(p)
        }
        outputs = jax.tree.leaves(jax.eval_shape(partial(op, **static), **arrays))
        assert outputs, case.name


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["few", "every"])
def test_outputs_have_the_dims_that_the_contract_declares(op, every):
    """What a backward is given too: by these dims arrays are placed on a mesh, and moved between ranks. Every case, or a few
    that have all."""
    cases = small(op)
    few = covering([case for case in cases if "slow" not in case.tags])
    for case in cases if every else [case for case in cases if case.name in few]:
        call = op.bind(**op.case_inputs(case))
        outputs = as_tuple(jax.eval_shape(lambda traced: op.function(**call.static(), **traced), call.traced()))  # noqa: B023
        by_name, sizes = dict(zip(op.outputs, outputs, strict=True)), dict(call.dims)
        saved = {}
        if op.backward_inputs is not None:
            cotangents = {f"d_{n}": x for n, x in by_name.items()}
            saved = jax.eval_shape(op.backward_inputs, {n: by_name[n] for n in op.residuals}, cotangents)
        assert saved.keys() <= op.saved_dims.keys(), f"{op.name}: {sorted(saved.keys() - op.saved_dims.keys())}"
        for name, x in (by_name | saved).items():
            assert has_dims(x.shape, op.saved_dims[name], sizes), f"{op.name}, {case.name}: {name} is {x.shape}"


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_every_option_and_every_feature_of_the_contract_is_in_a_case(op):
    calls = [op.bind(**op.case_inputs(case)) for case in small(op)]
    options = set(op.options) - {name for call in calls for name in op.used_options(call)}
    assert not options, f"no case gives {sorted(options)} another value than the default"
    features = set(op.features) - {name for call in calls for name in op.used_features(call)}
    assert not features, f"no case uses {sorted(features)}"


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_every_backend_refuses_what_it_does_not_support_by_name(op):
    for backend in op.backends.values():
        lacks = {*op.options} - backend.names() | {*op.features} - backend.features
        refused = set()
        dtype = "float32" if "float32" in backend.dtypes else min(backend.dtypes)
        for case in small(op):
            arguments = op.case_inputs(case, dtype=dtype)
            missing = backend.missing(op, op.bind(**arguments), False)
            if missing:
                refused |= set(missing)
                words = re.escape(f"it does not support {', '.join(missing)}")
                with on_this_machine(backend), pytest.raises(Unsupported, match=words):
                    op(**arguments, platform=backend.name)
        assert refused == lacks, f"{backend.name} lacks {sorted(lacks)}, and {sorted(refused)} was refused"


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_a_dtype_that_no_backend_has_is_refused(op):
    arguments = op.case_inputs(op.cases[0])
    narrow = "float8_e4m3fn" if "float8_e4m3fn" not in dtypes_of(op) else "float8_e4m3b11fnuz"
    cast = {
        k: jnp.asarray(np.asarray(v).astype(jnp.dtype(narrow))) if is_float_array(v) else v
        for k, v in arguments.items()
    }
    with pytest.raises(Unsupported, match=narrow):
        op(**cast)


@pytest.mark.parametrize(
    "op",
    [pytest.param(op, marks=[pytest.mark.slow] * (name not in OF_EACH_ENGINE), id=name) for name, op in OPS.items()],
)
def test_the_same_call_gives_the_same_bits(op):
    arguments = op.case_inputs(op.cases[0])
    first, second = (op(**arguments) for _ in range(2))
    for a, b in zip(*(x if isinstance(x, tuple) else (x,) for x in (first, second)), strict=True):
        assert a.tobytes() == b.tobytes()
