"""native_sparse_attention in Pallas, interpreted: shapes that the cases of the contract do not have, ties, rings and lists."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grid import error
from test_native_sparse_attention_triton import RNG, arrays, check, largest_at, starts_of

from kernels.framework.interpret import interpret
from kernels.ops.native_sparse_attention import (
    NativeSparseConfig,
    native_sparse_attention,
    op,
    pallas_lists,
    selected_op,
)
from kernels.toolchains.simulate import ahead_of_time as checks

# A ring that is used many times, and products of several tiles.
PLAIN = NativeSparseConfig(block_rows=128, block_keys=32, backward_rows=384, num_stages=2, backward_num_stages=2)
ALONE = dataclasses.replace(PLAIN, block_keys=16, backward_rows=128, num_stages=3, backward_num_stages=1)


def indices_of(t, heads, most, count):
    return RNG.integers(-1, most, (1, t, heads, count)).astype(np.int32)


@pytest.mark.slow  # in Triton it is quick
def test_a_padded_group_and_blocks_across_tiles_in_lists_of_many_parts(monkeypatch):
    monkeypatch.setattr(pallas_lists, "PART", 2)
    t = 150
    arguments = arrays(t, (40, 1), (8, 4)) | {"block_indices": indices_of(t, 1, 7, 3), "starts": starts_of(t, 9, 61)}
    check(arguments | {"block_size": 23}, PLAIN, platform="pallas")


@pytest.mark.slow
def test_queries_without_blocks_between_others():
    """The ring goes on to the next list but one, after a list of nothing."""
    t = 24
    indices = indices_of(t, 1, 2, 2)
    indices[:, 4:16] = -1
    check(arrays(t, (64, 1)) | {"block_indices": indices, "block_size": 16}, ALONE, platform="pallas")


@pytest.mark.slow  # in Triton it is quick
def test_equal_weights_choose_the_first_blocks_in_their_order():
    arguments = arrays(44, (4, 2), gates=("g_cmp",))
    arguments["query"][:, :, 2:] = 0
    counts = RNG.integers(0, 6, (1, 44, 2)).astype(np.int32)
    options = {"block_counts": counts, "block_size": 3, "num_blocks": 6}
    check(arguments | options, PLAIN, platform="pallas")


@pytest.mark.slow  # cases of the operation have means of one tile
def test_means_of_several_tiles_and_documents():
    """The best of one tile of means are found beside those of another."""
    arguments = arrays(300, (2, 1)) | {"starts": starts_of(300, 130)}
    check(arguments | {"block_size": 1, "num_blocks": 7}, PLAIN, platform="pallas")


def test_tokens_that_no_query_of_a_tile_reads_are_not_touched():
    """Not even times 0, which would be NaN: past its end a list repeats what it has."""
    arguments = arrays(64, (64, 1)) | {"block_indices": np.full((1, 64, 1, 1), 1, np.int32), "block_size": 16}
    wanted = op(**arguments, platform="xla")
    spoiled = {name: arguments[name].copy() for name in ("key", "value")}
    for x in spoiled.values():
        x[:, :16] = x[:, 32:] = np.nan
    with interpret():
        got = op(**arguments | spoiled, platform="pallas", cfg=PLAIN)
    assert error(got, wanted) < 3e-6


@pytest.mark.slow
def test_queries_after_all_keys_read_what_there_is_of_a_block():
    """Keys end in the middle of a block, and what fills their last tile is none of it."""
    arguments = {n: x[:, :12] if n != "query" else x for n, x in arrays(16, (4, 2)).items()}
    arguments |= {"block_indices": indices_of(16, 2, 3, 2), "q_start": np.int32(12), "block_size": 8}
    wanted = selected_op.function(**arguments)
    with interpret():
        got = selected_op(**arguments, platform="pallas", cfg=PLAIN)
    assert all(error(np.maximum(a, -1e3), np.maximum(b, -1e3)) < 3e-6 for a, b in zip(got, wanted, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("heads", [(1, 1), (16, 1), (6, 2)])
@pytest.mark.parametrize("size", [16, 33, 256])
def test_groups_and_sizes_of_blocks(heads, size):
    arguments = arrays(300, heads, gates=("g_slc", "g_swa"))
    check(arguments | {"block_size": size, "num_blocks": 3, "window": 20}, ALONE, platform="pallas")


@pytest.mark.slow
def test_other_tiles_give_the_same():
    arguments = arrays(40, (32, 2)) | {"block_indices": indices_of(40, 2, 10, 24), "block_size": 4}
    for rows, keys in ((64, 16), (256, 48), (512, 128)):
        check(arguments, dataclasses.replace(PLAIN, block_rows=rows, block_keys=keys), platform="pallas")


@pytest.mark.slow  # in Triton it is quick
def test_no_array_grows_faster_than_the_tokens():
    assert largest_at(65536, "pallas") <= 4 * largest_at(16384, "pallas") < 16384**2 // 16


def test_the_choice_is_compiled_for_tpus():
    """In the quick tests too: those of cases have blocks that are given, or that are always chosen."""
    q, k = (jax.ShapeDtypeStruct((1, 300, heads, 32), jnp.bfloat16) for heads in (4, 2))

    def call(q, k):
        return native_sparse_attention(q, k, k, block_size=2, block_counts=5, platform="pallas")

    assert checks.mosaic_calls(checks.compile_tpu(call, q, k)) == 2


def test_what_does_not_fit_on_a_chip_is_refused_by_name():
    def refusal(t, n, **options):
        q, k = (jax.ShapeDtypeStruct((1, t, heads, 128), jnp.bfloat16) for heads in (n, 1))
        return op.backends["pallas_tpu"].refuses(op, op.bind(q, k, k, **options), True)

    assert refusal(2**16, 16, block_size=64) is None
    assert "of scalar memory" in refusal(2**22, 16, block_size=64)
    assert "the choice of blocks" in refusal(2**18, 2, block_size=1)
    assert "the sliding branch" in refusal(2**22, 1, block_size=1024, num_blocks=1, window=2**21)
