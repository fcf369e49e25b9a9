"""Hopper's kernels of the walks of a delta rule: interpreted, against the reference and the kernels in Triton."""

import functools
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from grid import error, value_and_gradients
from hopper import interpreted
from test_delta_hopper import PADDED, TILES, decays_of_channels, drawn
from test_delta_triton import spoiled

from kernels.engines.scan import gluon_delta_calls, gluon_walk_calls
from kernels.engines.scan.delta_tokens import Tokens
from kernels.framework.interpret import interpret
from kernels.ops.delta_rule import op
from kernels.toolchains.simulate.ahead_of_time import call_of, export_cuda
from kernels.toolchains.triton import SHARED_MEMORY

OUTPUTS = ("out", "final_state")


def documents_of(T):
    return np.repeat([[-1, 0, 1, -1, 2, -1]], [5, 30, 40, 4, T - 88, 9], axis=1).astype(np.int32)


def values_and_gradients(arguments, d, cfg):
    outputs, gradients, d = value_and_gradients(functools.partial(op, platform="triton", cfg=cfg), arguments, d)
    return dict(zip(OUTPUTS, outputs, strict=True)) | gradients, d


def reference_of(arguments):
    wide = {n: x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x for n, x in arguments.items()}
    outputs, gradients, d = value_and_gradients(functools.partial(op, platform="xla"), wide)
    return dict(zip(OUTPUTS, outputs, strict=True)) | gradients, d


@pytest.mark.parametrize(
    ("dtype", "documents", "gate", "heads", "states", "splits"),
    [
        ("bfloat16", True, "channel", (1, 2), True, 1),
        ("bfloat16", True, "head", (1, 2), False, 2),
        pytest.param("bfloat16", True, "head", (1, 2), False, 1, marks=pytest.mark.slow),
        pytest.param("float16", False, None, (1, 2), True, 1, marks=pytest.mark.slow),
        pytest.param("bfloat16", False, "head", (2, 4), True, 1, marks=pytest.mark.slow),
        pytest.param("float16", False, "channel", (2, 2), False, 1, marks=pytest.mark.slow),
        pytest.param("float16", False, None, (1, 2), True, 3, marks=pytest.mark.slow),
        pytest.param("bfloat16", True, "channel", (1, 2), False, 2, marks=pytest.mark.slow),
    ],
)
def test_walks(monkeypatch, dtype, documents, gate, heads, states, splits):
    """Rows that are whole, or of parts, the last of them shorter: more chunks than a ring has tiles, decays of -inf or mild
    ones, keys that heads share, states in and out, and NaN in padding at both ends and inside; of states that the forward kept
    or walks twice. Operands are rounded as in Triton."""
    T = 192
    ids = documents_of(T) if documents else None
    clean = drawn(1, T, *heads, dtype, ids, -np.inf if documents else None)
    if gate is None:
        del clean["g"]
    elif gate == "channel":
        clean = decays_of_channels(clean)
    wanted, d = reference_of(clean)
    arguments = clean if ids is None else spoiled(clean, ids, *PADDED)
    if documents:
        d = (jnp.where(jnp.asarray(ids < 0)[..., None, None], jnp.nan, d[0]), *d[1:])
    with interpreted(monkeypatch, op, gluon_delta_calls):
        tiles = replace(TILES, in_one=False, keeps=True, splits=splits)
        one = values_and_gradients(arguments, d, replace(tiles, hopper_walks=True, keeps_states=states))[0]
        other = values_and_gradients(arguments, d, tiles)[0]
    for name in wanted:
        assert error(one[name], wanted[name]) <= min(1.2e-2, 1.05 * error(other[name], wanted[name])), name
        assert error(one[name], other[name]) <= 2e-4, name


@pytest.mark.parametrize(
    ("changed", "there"),
    [({}, True), ({"T": 96}, False), ({"states": 2}, False), ({"capability": 80}, False)],
    ids=str,
)
def test_which_walks_it_has(changed, there):
    how = {"T": 128, "states": 1, "capability": 90} | changed
    q, a = (jnp.zeros((1, how["T"], 1, *width), dtype) for width, dtype in (((128,), "bfloat16"), ((), "float32")))
    with interpret(how["capability"]):
        tokens = Tokens(q, q, q, None, a, None, None)
        assert gluon_walk_calls.fits(tokens, 64, how["states"]) == there


def report_of(name, **changed):
    case = next(c for c in op.cases if c.name == name)
    tiles = replace(TILES, block_v=32, num_stages=2, in_one=True, keeps=True, hopper_walks=True, **changed)
    return export_cuda(*call_of(op, case, platform="triton", cfg=tiles)).kernels


@pytest.mark.slow
@pytest.mark.parametrize(("case", "splits"), [("kimi_linear", 1), ("qwen3_next", 1), ("few_heads_32k", 8)])
def test_walks_fit_a_multiprocessor(case, splits):
    """No spills but of one register, no product that waits for the one before; operands reach registers transposed, none by
    shuffles."""
    report = report_of(case, splits=splits)
    in_triton = {"delta_walk_kernel", "delta_reverse_kernel", "delta_both_kernel"} & {k.name for k in report}
    assert in_triton == ({"delta_walk_kernel"} if splits > 1 else set())  # of maps of parts
    for name in ("delta_walk_hopper_kernel", "delta_reverse_hopper_kernel"):
        kernel = next(k for k in report if k.name == name)
        spilled = [kernel.resources[n] for n in ("spill_stores", "spill_loads")]
        assert max(spilled) <= (4 if splits > 1 else 0) and not kernel.resources["serialized"], kernel.resources
        assert kernel.shared_memory_bytes <= SHARED_MEMORY[90]
