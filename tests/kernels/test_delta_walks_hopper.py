"""Hopper's kernels of the walks of a delta rule, and of decays of channels with pairs: interpreted, against the reference and
the kernels in Triton."""

import functools
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from grid import error, value_and_gradients
from hopper import interpreted
from test_delta_hopper import PADDED, TILES, decays_of_channels, decays_of_every_step, drawn
from test_delta_triton import spoiled

from kernels.engines.scan import gluon_delta_calls, gluon_walk_calls
from kernels.engines.scan import triton_channel_calls as channels
from kernels.engines.scan.chunks import ChunkConfig
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
    ("dtype", "documents", "gate", "heads", "states"),
    [
        ("bfloat16", True, "channel", (1, 2), True),
        ("bfloat16", True, "head", (1, 2), False),
        pytest.param("float16", False, None, (1, 2), True, marks=pytest.mark.slow),
        pytest.param("bfloat16", False, "head", (2, 4), True, marks=pytest.mark.slow),
        pytest.param("float16", False, "channel", (2, 2), False, marks=pytest.mark.slow),
    ],
)
def test_walks(monkeypatch, dtype, documents, gate, heads, states):
    """More chunks than a ring has tiles, decays of -inf or mild ones, keys that heads share, states in and out, and NaN in
    padding at both ends and inside; of states that the forward kept or walks twice. Operands are rounded as in Triton."""
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
        tiles = replace(TILES, in_one=False, keeps=True)
        one = values_and_gradients(arguments, d, replace(tiles, hopper_walks=True, keeps_states=states))[0]
        other = values_and_gradients(arguments, d, tiles)[0]
    for name in wanted:
        assert error(one[name], wanted[name]) <= min(1.2e-2, 1.05 * error(other[name], wanted[name])), name
        assert error(one[name], other[name]) <= 2e-4, name


@pytest.mark.parametrize(
    ("changed", "there"),
    [({}, True), ({"T": 96}, False), ({"states": 2}, False), ({"splits": 2}, False), ({"capability": 80}, False)],
    ids=str,
)
def test_which_walks_it_has(changed, there):
    how = {"T": 128, "states": 1, "splits": 1, "capability": 90} | changed
    q, a = (jnp.zeros((1, how["T"], 1, *width), dtype) for width, dtype in (((128,), "bfloat16"), ((), "float32")))
    with interpret(how["capability"]):
        tokens = Tokens(q, q, q, None, a, None, None)
        assert gluon_walk_calls.fits(tokens, 64, how["states"], how["splits"]) == there


@pytest.mark.parametrize(
    ("dtype", "decays", "documents", "heads"),
    [
        ("bfloat16", "float32", True, (1, 2)),
        pytest.param("bfloat16", "bfloat16", False, (2, 2), marks=pytest.mark.slow),
        pytest.param("float16", "float16", True, (2, 2), marks=pytest.mark.slow),
    ],
)
def test_decays_with_pairs(monkeypatch, dtype, decays, documents, heads):
    """Every exponent is a sum over its interval; in Triton those of pairs are differences, off by up to 2e-4 of a factor."""
    T = 256
    ids = documents_of(T) if documents else None
    x = decays_of_every_step(drawn(1, T, *heads, dtype, ids, None))
    x["g"] = x["g"].astype(decays)
    if documents:
        x = spoiled(x, ids, *PADDED, "g")
    monkeypatch.setattr(gluon_delta_calls, "MULTIPROCESSORS", 1)  # so that programs have several items
    with interpret(90):
        segments = None if ids is None else jnp.asarray(ids)
        tokens = Tokens(x["query"], x["key"], x["value"], x["beta"], x["g"], segments, None)
        found, wanted = {}, {}
        for into, cfg in ((found, replace(TILES, in_one=True, decays_with_pairs=True)), (wanted, TILES)):
            run = channels.DeltaLaunches(tokens, 1, 0.1, cfg, None)
            into |= dict(zip(("pairs", "solve"), run.pairs(), strict=True))
            into |= dict(zip(("sums", "whole", "first"), run.decays, strict=True))
            into |= {"reads": run.reads, "keeps": run.keeps, "writes": run.writes}
            run.of_gradients = False
            run.pairs()
            assert (run.decays[0] is None) == (into is found)
        again = channels.DeltaLaunches(tokens, 1, 0.1, replace(TILES, in_one=True, decays_with_pairs=True), None)
        again.pairs_of({"pairs": found["pairs"], "solve": found["solve"]})
    first = np.asarray(wanted["first"])
    assert set(np.unique(first)) >= ({0, 5, 6} if dtype == "bfloat16" else {0})
    np.testing.assert_array_equal(np.asarray(found["first"]), first)
    for name, allowed in {"sums": 1e-6, "whole": 1e-5, "reads": 1e-3, "keeps": 1e-3, "writes": 1e-3}.items():
        assert error(found[name], wanted[name]) <= allowed, name
    for name in ("pairs", "solve"):
        assert error(found[name], wanted[name]) <= 3e-3, name
    for name in ("reads", "keeps", "writes"):  # as in the forward, to the bit
        np.testing.assert_array_equal(np.asarray(getattr(again, name)), np.asarray(found[name]), err_msg=name)


@pytest.mark.slow  # what the forward leaves is tested above, and gradients from there are as for other pairs
@pytest.mark.parametrize("kept", [{"keeps": True}, {}], ids=["kept", "pairs again"])
def test_gradients_through_decays_with_pairs(monkeypatch, kept):
    """Beside Triton's the errors by 128 channels of beta and of decays differ by up to a tenth either way, in twelve draws 0.94
    and 0.99 of it."""
    T = 256
    ids = documents_of(T)
    clean = decays_of_every_step(drawn(1, T, 1, 2, "bfloat16", ids, None))
    wanted, d = reference_of(clean)
    arguments = spoiled(clean, ids, *PADDED, "g")
    d = (jnp.where(jnp.asarray(ids < 0)[..., None, None], jnp.nan, d[0]), *d[1:])
    with interpreted(monkeypatch, op, gluon_delta_calls):
        tiles = replace(TILES, in_one=True, channel_num_warps=8)
        one = values_and_gradients(arguments, d, replace(tiles, decays_with_pairs=True, hopper_walks=True, **kept))[0]
        other = values_and_gradients(arguments, d, tiles)[0]
    for name in wanted:
        assert error(one[name], wanted[name]) <= min(1.2e-2, 1.15 * error(other[name], wanted[name])), name


def test_only_four_or_eight_warps_take_channels():
    with pytest.raises(ValueError, match="channel_num_warps = 2; use 4, 8 or None"):
        ChunkConfig(channel_num_warps=2)


def report_of(name, **changed):
    case = next(c for c in op.cases if c.name == name)
    tiles = replace(TILES, block_v=32, num_stages=2, in_one=True, keeps=True, hopper_walks=True, **changed)
    return export_cuda(*call_of(op, case, platform="triton", cfg=tiles)).kernels


@pytest.mark.slow
@pytest.mark.parametrize("case", ["kimi_linear", "qwen3_next"])
def test_walks_fit_a_multiprocessor(case):
    """No spills, no product that waits for the one before; operands reach registers transposed, none by shuffles."""
    report = report_of(case)
    assert not {"delta_walk_kernel", "delta_reverse_kernel", "delta_both_kernel"} & {k.name for k in report}
    for name in ("delta_walk_hopper_kernel", "delta_reverse_hopper_kernel"):
        kernel = next(k for k in report if k.name == name)
        assert not any(kernel.resources[n] for n in ("spill_stores", "spill_loads", "serialized")), kernel.resources
        assert kernel.shared_memory_bytes <= SHARED_MEMORY[90]


@pytest.mark.slow
@pytest.mark.parametrize("num_warps", [4, 8])
def test_two_programs_of_decays_with_pairs_fit_a_multiprocessor(num_warps):
    """What is spilled are rows and addresses, around steps: of 8 warps' 1,000 instructions of a step 25."""
    report = report_of("kimi_linear", decays_with_pairs=True, channel_num_warps=num_warps)
    assert not {"channel_decays_kernel", "channel_pairs_hopper_kernel"} & {k.name for k in report}
    for kernel in report:
        if kernel.name == "channel_chunks_hopper_kernel":
            assert not kernel.resources["serialized"]
            assert kernel.resources["spill_stores"] <= 428, kernel.resources
            assert 2 * (kernel.shared_memory_bytes + 1024) <= SHARED_MEMORY[90] + 1024
        if kernel.name == "channel_gradients_hopper_kernel":
            assert kernel.num_warps == num_warps
