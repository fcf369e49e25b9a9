"""Calls of the kernels in `triton_dplr*.py`. The order of launches is that of a delta rule."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import triton

from kernels.engines.scan import triton_channel_calls as channels
from kernels.engines.scan import triton_delta_calls as delta
from kernels.engines.scan import triton_delta_tiles as delta_tiles
from kernels.engines.scan.chunks import ChunkConfig
from kernels.engines.scan.delta_tokens import DplrTokens
from kernels.engines.scan.layout import FORGETS
from kernels.engines.scan.triton_calls import LEAST, gradient_tiles, precisions
from kernels.engines.scan.triton_dplr import dplr_chunks_kernel
from kernels.engines.scan.triton_dplr_steps import dplr_gradients_kernel
from kernels.engines.scan.triton_dplr_walk import dplr_walk_kernel, dplr_written_kernel
from kernels.framework.binding import Call
from kernels.framework.measured import power_of_two
from kernels.framework.work import Work
from kernels.toolchains.triton import compute_capability, triton_launch

# Channels of a program of one chunk at a time, and its warps: of 16-bit floats one, whose barriers cost nothing.
CHUNKS = {True: (16, 1), False: (32, 8)}
GRADIENTS = {True: (16, 2), False: (32, 8)}  # the same of gradients through decays


class Launches(delta.Launches):
    """The launches of one call.

    Args:
      d_out: cotangents of the outputs [B, T, N, Hv] for `delta.backward`; None for `delta.forward`.
    """

    def __init__(
        self, x: DplrTokens, num_states: int, scale: float, cfg: ChunkConfig, work: Work | None, d_out: jax.Array | None
    ):
        beta: Any = None
        walked = delta.Tokens(x.q, x.k, x.v, beta, x.w, x.segment_ids, x.entries)
        super().__init__(walked, num_states, scale, cfg, work)
        self.at_once = self.in_one = self.hopper_walks = False  # it has walks of its own
        self.tokens, self.d_out = x, d_out
        self.decays_of = channels.chunks_of(walked, None, None, self, scale, cfg)
        width, self.warps = CHUNKS[x.k.dtype.itemsize == 2]
        block = min(width, self.common["BLOCK_H"])
        self.decays_of.decays.update({"BLOCK_H": block, "BLOCKS": self.common["BLOCK_H"] // block})
        self.forgets = FORGETS if self.decays_of.decays["EXACT"] else channels.FORGETS_CHANNEL

    def log_decay(self) -> None:
        return None

    def pairs(self) -> tuple[Any, Any]:
        """Sets what walks read and write, `ahead` and `back`; products with weights of pairs and with inverses are taken."""
        x, of = self.tokens, self.decays_of
        tokens, square, values = of.tokens(), of.squares(), jax.ShapeDtypeStruct(x.v.shape, x.k.dtype)
        states = self.of_chunks(*self.states[3:])
        shapes = {
            "first": jax.ShapeDtypeStruct((*of.shape, of.decays["BLOCKS"]), jnp.int32),
            "whole": of.per_channel(),
            "keeps": tokens,
            "writes": tokens,
            "local": values,
            "added": states,
        }
        of_outputs = {"reads": tokens, "beside": values}
        of_backward = {"leaves": tokens} | dict.fromkeys(("qb", "qk", "solve", "product"), square)
        of_backward |= {"d_local": values, "d_added": states}
        wanted, others = (of_outputs, of_backward) if self.d_out is None else (of_backward, of_outputs)
        shapes |= wanted | {"scratch": jax.ShapeDtypeStruct((*square.shape[:-1], 16), jnp.float32)}
        unused: dict[str, Any] = {f"{name}_ptr": None for name in others}
        outputs = of.launch(
            dplr_chunks_kernel,
            x.q,
            x.k,
            x.v,
            x.w,
            x.a,
            x.b,
            self.layout.runs,
            self.layout.table,
            self.d_out,
            out_shape=tuple(shapes.values()),
            num_warps=self.warps,
            num_stages=1,
            Hv=x.v.shape[3],
            FORGETS=self.forgets,
            PRECISION=precisions(x.k.dtype)[0],
            BLOCK_V=min(64, max(LEAST, power_of_two(x.v.shape[3]))),
            **of.decays,
            **unused,
        )
        self.found: dict[str, Any] = dict(zip(shapes, outputs, strict=True))
        return None, None

    def walk(self, weights: Any, solve: Any, wanted: tuple[str, ...], starts: Any = None) -> dict[str, jax.Array]:
        found, width = self.found, self.tiles * self.columns["BLOCK_V"] + self.states[3]
        arrays = tuple(found[name] for name in ("keeps", "writes", "local", "added", "whole"))
        outputs = (found["reads"], found["beside"]) if "out" in wanted else (None, None)
        return self._walk((*arrays, *outputs), self.x.entries, wanted, "maps", width, starts, False)

    def reverse(self, weights: Any, solve: Any, d_out: Any, d_exits: Any, wanted: tuple[str, ...], starts: Any) -> Any:
        arrays = tuple(self.found[name] for name in ("writes", "keeps", "d_local", "d_added", "whole"))
        names = {"du": "written", "d_states": "states", "d_entries": "exits"}
        asked = tuple(names.get(name, name) for name in wanted)
        given = self._walk((*arrays, None, None), d_exits, asked, "added", self.states[4], starts, True)
        return {name: given[names.get(name, name)] for name in wanted}

    def _walk(
        self, arrays: Any, entries: Any, wanted: tuple[str, ...], parts: str, width: int, starts: Any, reverse: bool
    ) -> dict[str, jax.Array]:
        """Returns what is `wanted` of a walk: "out", "written", "states", "exits", or, of its parts, what `parts` names."""
        x, (B, _, N, H, Hv) = self.x, self.states
        shapes = {
            "out": jax.ShapeDtypeStruct(x.v.shape, x.v.dtype),
            "written": jax.ShapeDtypeStruct(x.v.shape, x.k.dtype),
            "states": self.of_chunks(H, Hv),
            "exits": jax.ShapeDtypeStruct(self.states, jnp.float32),
            parts: jax.ShapeDtypeStruct((B, N, self.splits, H, width), jnp.float32),
        }
        unused: dict[str, Any] = {
            f"{'parts' if name == parts else name}_ptr": None for name in shapes if name not in wanted
        }
        units = triton.cdiv(H, self.columns["BLOCK_V"]) if "maps" in wanted else 0
        outputs = triton_launch(
            dplr_walk_kernel,
            *arrays,
            self.layout.table,
            entries,
            starts,
            out_shape=tuple(shape for name, shape in shapes.items() if name in wanted),
            grid=(self.walks[0], self.tiles + units),
            work=self.work if ("exits" if reverse else "out") in wanted else None,
            G=self.states[1],
            SPLITS=self.splits,
            COLUMNS=self.tiles,
            PART=width,
            REVERSE=reverse,
            **{name: y for name, y in self.common.items() if name not in ("K", "SCALE")},
            **self.columns,
            **self.stages,
            **unused,
        )
        return dict(zip([name for name in shapes if name in wanted], outputs, strict=True))

    def gradients(self, d_out: Any, walked: dict[str, Any], of_end: dict[str, Any]) -> dict[str, Any]:
        """Returns the gradients of q, w, k, v, a and b. See `delta.Launches.gradients`."""
        x, of, valid = self.tokens, self.decays_of, self.layout.valid
        v, states, written, of_chunk = x.v, walked["states"], walked["written"], self.found
        tokens, square, precision = of.tokens(), of.squares(), precisions(x.k.dtype)[1]
        stages = gradient_tiles(self.cfg, x.k.dtype, v.shape[3], 8)
        if self.common["BLOCK_H"] > 64:  # three of both states exceed shared memory
            stages["num_stages"] = min(2, stages["num_stages"])
        of_states = of.states(written, d_out, states, of_end["d_states"])
        *of_written, dv = of.launch(
            dplr_written_kernel,
            v,
            of_chunk["leaves"],
            self.layout.runs,
            self.layout.table,
            of_chunk["solve"],
            of_chunk["product"],
            of_chunk["qk"],
            d_out,
            written,
            of_end["du"],
            states,
            of_end["d_states"],
            out_shape=(square, square, square, tokens, tokens, jax.ShapeDtypeStruct(v.shape, v.dtype)),
            Hv=v.shape[3],
            PRECISION=precision,
            **stages,
        )
        most = GRADIENTS[x.k.dtype.itemsize == 2][0]
        width = min(most if compute_capability() >= 90 else most // 2, of.decays["BLOCK_H"])
        names = ("q", "k", "a", "b", "w")
        shapes = [jax.ShapeDtypeStruct(getattr(x, name).shape, getattr(x, name).dtype) for name in names]
        results = of.launch(
            dplr_gradients_kernel,
            x.q,
            x.k,
            x.a,
            x.b,
            x.w,
            of_chunk["whole"],
            of_chunk["first"],
            self.layout.runs,
            self.layout.table,
            *of_states,
            *of_written,
            out_shape=tuple(shapes),
            num_warps=self.cfg.backward_num_warps,
            num_stages=1,
            blocks=-(-x.q.shape[3] // width),
            FORGETS=self.forgets,
            PRECISION=precision,
            WIDTH=of.decays["BLOCK_H"],
            **of.decays | {"BLOCK_H": width},
        )
        d: dict[str, Any] = dict(zip(names, results, strict=True))
        if valid is not None:
            d["w"] = jnp.where(valid[..., None, None], d["w"], 0)
        return d | {"v": dv}


def heuristic(call: Call, platform: str) -> ChunkConfig:
    """Returns the default tiles of a call: chunks of 32 tokens, and warps of its own for gradients through decays."""
    if call.dtype == "float32":
        return replace(delta_tiles.heuristic(call, platform), backward_num_warps=GRADIENTS[False][1])
    return replace(delta_tiles.tiles(call, 32, 32, 4, 3), backward_num_warps=GRADIENTS[True][1])


def candidates(call: Call) -> list[ChunkConfig]:
    """Returns the configurations to tune over."""
    best = heuristic(call, "cuda")
    if call.dtype == "float32":
        return [best]
    found = [
        replace(delta_tiles.tiles(call, chunk, block_v, num_warps, stages), backward_num_warps=warps)
        for chunk, warps in ((32, 2), (16, 2), (32, 1), (64, 4))
        for block_v, num_warps in ((32, 4), (16, 4), (64, 4))
        for stages in (2, 3)
    ]
    return list(dict.fromkeys([best, *found, *(replace(best, splits=splits) for splits in (1, 2, 4))]))
