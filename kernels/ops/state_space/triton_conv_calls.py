"""The causal convolution for NVIDIA GPUs in Triton: launches of `triton_conv.py`, and their tiles."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import triton

from kernels.framework.binding import Call
from kernels.framework.measured import power_of_two
from kernels.framework.target import MULTIPROCESSORS
from kernels.ops.state_space.contract import ConvConfig, conv_op, work_conv
from kernels.ops.state_space.conv_rows import Rows, by_channels, by_rows, final_state, rows_of
from kernels.ops.state_space.triton_conv import conv_bwd_kernel, conv_fwd_kernel
from kernels.toolchains.triton import triton_launch

# -- tiles -------------------------------------------------------------------------------------------------------------

# Bytes that a thread loads of a row, rows that it loads at once and warps, for the forward and for the backward: the best first
# on an H100 and on an H200. Which of the backward's first two is better depends on the sizes, without documents.
SHAPES = {
    False: ((8, 16, 1), (16, 8, 1), (8, 8, 1), (4, 16, 1), (16, 8, 2), (16, 16, 1), (16, 4, 1), (4, 8, 1), (2, 8, 1)),
    True: (
        (4, 8, 1),
        (4, 16, 1),
        (8, 8, 1),
        (8, 8, 2),
        (8, 4, 1),
        (4, 8, 2),
        (16, 4, 1),
        (4, 4, 1),
        (2, 8, 1),
        (2, 2, 1),
    ),
}
# Rows of a program. The forward reads only W - 1 rows again, and short ones keep programs even: in six cases on an
# H200 32 rows were within 1% of the best, and took 4 to 60% less time than 256.
SPANS = {False: (32, 64, 128, 256), True: (64, 128, 256)}
# What a program of the backward has to do besides its rows, as rows: by the times of 4 spans in 5 cases on an H200.
BESIDE = 20
# Of a multiprocessor: programs that it has at once at most, and its registers.
MOST_PROGRAMS, REGISTERS = 32, 65536
# Of a thread, by the estimate below, for the forward and for the backward: more spill.
MOST_REGISTERS = {False: 160, True: 200}
CANDIDATES = 16


class Tile(NamedTuple):
    """What one program has: channels, rows that it loads at once, warps, rows in all."""

    block_f: int
    tokens: int
    num_warps: int
    span: int


def tile_of(cfg: ConvConfig, backward: bool) -> Tile:
    """Returns the tile of a direction; no field of the configuration is None."""
    fields: Any = (cfg.block_f, cfg.tokens, cfg.num_warps, cfg.span)
    if backward:
        fields = (cfg.backward_block_f, cfg.backward_tokens, cfg.backward_num_warps, cfg.backward_span)
    return Tile(*fields)


def _registers(tile: Tile, taps: int, itemsize: int, backward: bool) -> float:
    """Returns about how many registers a thread needs: taps, their gradients, windows, and what is being loaded."""
    channels = tile.block_f / (32 * tile.num_warps)
    held = 4 * taps + 3 if backward else 2 * taps + 3
    return channels * (held + tile.tokens * itemsize / 4 * (2 if backward else 1)) + 10


def _waste(tile: Tile, call: Call) -> float:
    """Returns about how many times as long a backward takes as one whose multiprocessors are full from first to last and have
    only rows to do."""
    d = call.dims
    # As ptxas says for windows of 4, of 4 to 16 rows at once; it hands them out by eights.
    each = 4 * d["W"] + 9.5 + 3 * (call.bias is not None) + 0.35 * tile.tokens * call.x.dtype.itemsize
    registers = 8 * math.ceil(each * tile.block_f / (32 * tile.num_warps) / 8)
    together = MULTIPROCESSORS * min(MOST_PROGRAMS, REGISTERS // (registers * 32 * tile.num_warps))
    waves = d["B"] * triton.cdiv(d["T"], tile.span) * triton.cdiv(d["F"], tile.block_f) / together
    return math.ceil(waves) / waves * (1 + BESIDE / tile.span)


def _tiles(call: Call, backward: bool) -> list[Tile]:
    """Returns the tiles of a direction, what is likely fastest first."""
    T, F, itemsize = call.dims["T"], call.dims["F"], call.x.dtype.itemsize
    widest, longest = max(16, power_of_two(F)), power_of_two(T)
    spans = sorted({min(span, longest) for span in SPANS[backward]})
    ranked = []
    for loaded, tokens, num_warps in SHAPES[backward]:
        channels = max(1, loaded // itemsize)
        block = channels * 32 * num_warps
        if block > widest and (channels, num_warps) != (1, 1):  # one warp has all of few channels
            continue
        shape = Tile(min(block, widest), min(tokens, longest), num_warps, longest)
        if _registers(shape, call.dims["W"], itemsize, backward) <= MOST_REGISTERS[backward]:
            tiles = [shape._replace(span=span) for span in spans]
            ranked.append(sorted(tiles, key=lambda tile: _waste(tile, call)) if backward else tiles)
    if backward and call.segment_ids is None and call.num_states == 1:  # over a list 8 rows at once were faster
        ranked[:2] = sorted(ranked[:2], key=lambda tiles: _waste(tiles[0], call))
    return list(dict.fromkeys(tile for tiles in zip(*ranked, strict=True) for tile in tiles))


def candidates(call: Call) -> list[ConvConfig]:
    """Returns the configurations to tune over, what is likely fastest first."""
    both = zip(_tiles(call, False)[:CANDIDATES], _tiles(call, True)[:CANDIDATES])
    return [ConvConfig(*forward, *backward) for forward, backward in both]


def heuristic(call: Call, platform: str) -> ConvConfig:
    """Returns the default tiles of a call."""
    return candidates(call)[0]


# -- launches ----------------------------------------------------------------------------------------------------------


def _sizes(x: Any, weight: Any, found: Rows | None, num_states: int, activation: Any, tile: Tile) -> dict[str, Any]:
    """Returns the constants of a launch and its grid.

    Raises:
      ValueError: a program has fewer rows than it loads at once.
    """
    (B, T, F), W = x.shape, weight.shape[1]
    if tile.tokens > tile.span:
        raise ValueError(
            f"argument 'cfg': tokens = {tile.tokens}, which a program loads at once, must not exceed its span = {tile.span}"
        )
    R = T if found is None else found.source.shape[1]
    programs = B * triton.cdiv(R, tile.span) * triton.cdiv(F, tile.block_f)
    return {
        "grid": (programs,),
        "num_warps": tile.num_warps,
        "num_stages": 1,
        "T": T,
        "F": F,
        "W": W,
        "R": R,
        "ENTRIES": num_states * (W - 1),
        "SPAN": tile.span,
        "SILU": activation == "silu",
        "TABLE": found is not None,
        "MIXED": found is not None and R > T,
        "TOKENS": tile.tokens,
        "BLOCK_F": tile.block_f,
    }


def forward(x, weight, bias, segment_ids, initial_state, activation, num_states, cfg):
    """Returns (out, final state) of the contract."""
    W = weight.shape[1]
    found, state = rows_of(x, segment_ids, initial_state, num_states, W - 1), by_rows(initial_state)
    tile = tile_of(cfg, False)
    (out,) = triton_launch(
        conv_fwd_kernel,
        x,
        weight,
        bias,
        state,
        None if found is None else found.source,
        None if found is None else found.seen,
        out_shape=(jax.ShapeDtypeStruct(x.shape, x.dtype),),
        work=work_conv(conv_op.bind(x, weight, bias, num_states=num_states, activation=activation))[0],
        **_sizes(x, weight, found, num_states, activation, tile),
    )
    return out, by_channels(final_state(x, state, found, num_states, W - 1), num_states)


def backward(saved, x, weight, bias, segment_ids, initial_state, activation, num_states, cfg):
    """Returns the gradients of the contract's arrays by name."""
    (B, _, F), W = x.shape, weight.shape[1]
    found, state = rows_of(x, segment_ids, initial_state, num_states, W - 1), by_rows(initial_state)
    tile = tile_of(cfg, True)
    sizes = _sizes(x, weight, found, num_states, activation, tile)
    parts = B * triton.cdiv(sizes["R"], tile.span)
    shapes = {
        "dx_ptr": jax.ShapeDtypeStruct(x.shape, x.dtype),
        "d_weight_ptr": jax.ShapeDtypeStruct((parts, W, F), jnp.float32),
    }
    if bias is not None:
        shapes["d_bias_ptr"] = jax.ShapeDtypeStruct((parts, F), jnp.float32)
    if state is not None:
        shapes["d_state_ptr"] = jax.ShapeDtypeStruct(state.shape, jnp.float32)
    unused: dict[str, Any] = {name: None for name in ("d_bias_ptr", "d_state_ptr") if name not in shapes}
    outputs = triton_launch(
        conv_bwd_kernel,
        x,
        weight,
        bias,
        state,
        *((None,) * 3 if found is None else found[:3]),
        saved.d_out,
        by_rows(saved.d_final_state),
        out_shape=tuple(shapes.values()),
        work=work_conv(conv_op.bind(x, weight, bias, num_states=num_states, activation=activation))[1],
        **sizes,
        **unused,
    )
    d = dict(zip(shapes, outputs, strict=True))
    # Summed in a fixed order, not by atomics, for bitwise reproducible results.
    gradients = {"x": d["dx_ptr"], "weight": jnp.sum(d["d_weight_ptr"], axis=0).T}
    if bias is not None:
        gradients["bias"] = jnp.sum(d["d_bias_ptr"], axis=0)
    if state is not None:
        gradients["initial_state"] = by_channels(d["d_state_ptr"], num_states)
    return gradients
