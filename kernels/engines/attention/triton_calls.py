"""Launches the Triton kernels of attention on NVIDIA GPUs: their arguments and tile sizes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import triton

from kernels.engines.attention.gluon_kernels import warp_specialized_fwd_kernel
from kernels.engines.attention.gluon_parts import BLOCK
from kernels.engines.attention.masks import MaskInfo
from kernels.engines.attention.ranges import Edge, Interval, KeyRange
from kernels.engines.attention.tiles import FIRST, LAST, spans
from kernels.engines.attention.triton_parts import OFFSET, POSITION, ROW, Options
from kernels.engines.attention.triton_shares import check_shares, shares_of_group
from kernels.framework.config import BwdParams, FwdParams, KernelConfig
from kernels.framework.execute import Saved
from kernels.framework.target import MULTIPROCESSORS
from kernels.toolchains.triton import tensor_descriptor, triton_launch

WIDEST = 256
# Warps of a program of the Hopper kernels: three specialised warpgroups. Plain programs have a power of two.
WARP_SPECIALIZED = 12
# Queries of a block with three warpgroups, possible in the forward of heads up to 64; others have two.
THREE_WARPGROUPS = 192
ROWS_OF_WARPGROUP = 64
# Columns of 16 bits that lie side by side in a tile in shared memory, by its swizzling.
PANEL = 64
# Shared memory that such a program may use for tiles.
SHARED_MEMORY = 220 * 1024
# Heads whose programs may run side by side, so that what they read stays in the cache; most of these divide the heads.
SIDE_BY_SIDE = (8, 4, 2, 1)
# Bytes of queries, cotangents and gradients of queries that programs of the Hopper backward may have in use at once, of the
# cache's 50 MB. Causal attention of 64k tokens with 8 heads of 128 side by side takes 1.9 times as long on an H100 as with one,
# while documents of 4k take .86 as long.
IN_USE = 40 * 2**20


class Call(NamedTuple):
    """A call in the form that kernels take: the arrays by the names of the kernels' parameters, and the compile-time
    options."""

    arrays: dict[str, Any]
    options: dict[str, Any]
    mask: MaskInfo
    of_tiles: MaskInfo | None = None  # which tiles meet, where tiles decide more than is compared pair by pair

    def spans(self, q_block: int, k_block: int) -> tuple[jax.Array, jax.Array]:
        by_query, by_key = self.known_spans(q_block, k_block)
        return jnp.asarray(by_query), jnp.asarray(by_key)

    def known_spans(self, q_block: int, k_block: int) -> tuple[Any, Any]:
        """The same, as NumPy arrays where they do not depend on the arrays of the mask."""
        mask = self.mask if self.of_tiles is None else self.of_tiles
        return spans(mask, self.options["T"], self.options["S"], q_block, k_block)

    def shared(self, spans: Any, queries: int, shares: int | None) -> Call:
        """Returns the call for the Hopper backward: where several programs for a block of keys are faster, or asked for, each
        counts as a key head. `spans` are those of the blocks of keys; `queries` are the blocks of queries."""
        o = self.options
        group = (o["PART"] or o["N"]) // o["K"]
        check_shares(shares, group)
        side = 1 if o["BLOCK_H"] > 128 else SIDE_BY_SIDE[0]
        shares = shares or shares_of_group(spans, o["B"], o["K"], group, queries, side)
        return self._replace(options={**o, "K": o["K"] * shares, "SHARES": shares})

    def launch(
        self, kernel: Any, first: tuple, spans: jax.Array, blocks: tuple[int, int], params: FwdParams, **rest: Any
    ):
        """Launches a kernel whose parameters are `first`, the spans and the arrays that it names; returns its outputs.

        `blocks` are the numbers of queries and of keys per block.
        """
        warps, stages = params.num_warps or 4, params.num_stages or 2
        return self.launch_with(kernel, first, spans, blocks, num_warps=warps, num_stages=stages, **rest)

    def side_by_side(self, spans: jax.Array, q_block: int, itemsize: int) -> jax.Array:
        """Returns int32 [1]: how many key heads run side by side in the Hopper backward, as many as fit in `IN_USE`.

        A program goes through the queries that see its block of keys, and adds to their gradients. How many these are may be
        known only at run time, from the segments of a batch: the mean over the blocks of keys that are seen at all. Heads wider
        than 128 go one by one: four side by side take 1.7 times as long at 8k.
        """
        if self.options["BLOCK_H"] > 128:
            return jnp.ones(1, jnp.int32)
        met = (spans[..., LAST] - spans[..., FIRST]).astype(jnp.float32)
        rows = q_block * met.sum() / jnp.maximum((met > 0).sum(), 1)
        of_row = itemsize * (self.options["H"] + self.options["HV"]) + 4 * self.options["H"]
        sides = np.array([n for n in SIDE_BY_SIDE if self.options["K"] % n == 0], np.int32)
        return jnp.max(jnp.where(rows * of_row * sides <= IN_USE, sides, 1)).reshape(1)

    def with_lists(self, index: jax.Array, order: jax.Array) -> Call:
        """Returns the call with lists of tiles; kernels then read the ends of the lists in place of spans."""
        batch, heads = index.shape[:2]
        lists = {"LIST_BATCH": 0 if batch == 1 else heads, "LIST_HEAD": 0 if heads == 1 else 1}
        return self._replace(
            arrays={**self.arrays, "index_ptr": index, "order_ptr": order}, options={**self.options, **lists}
        )

    def of_heads(self, first: int, count: int, first_of_keys: int = 0) -> Call:
        """Returns the call of so many query heads alone, whose heads of keys are as many as those of its keys, from one on."""
        arrays = {**self.arrays, "first_ptr": jnp.array([first, first_of_keys], jnp.int32)}
        return self._replace(arrays=arrays, options={**self.options, "PART": count})

    def with_tiles(self, table: jax.Array) -> Call:
        """Returns the call whose blocks of keys lie where an int32 [B|1, blocks] says; its masks are in their order."""
        options = {**self.options, "TILES_BATCH": _stride(table, 0)}
        return self._replace(arrays={**self.arrays, "tiles_ptr": table}, options=options)

    def launch_with(
        self,
        kernel: Any,
        first: tuple,
        spans: jax.Array,
        blocks: tuple[int, int],
        *,
        aliases: Mapping[str, int] | None = None,
        **rest: Any,
    ):
        """The same, with the launch options in `rest`; `aliases` has inputs, by name, and the outputs in their memory."""
        q_block, k_block = blocks
        options = Options(**self.options, SPAN_BATCH=_stride(spans, 0), BLOCK_Q=q_block, BLOCK_K=k_block)
        names = [p.name for p in kernel.params if not p.is_constexpr]
        arrays = {name: value for name, value in self.arrays.items() if name in names} | rest
        if aliases:
            inputs = names[: len(first) + 1] + [n for n in names[len(first) + 1 :] if arrays.get(n) is not None]
            arrays["input_output_aliases"] = {inputs.index(name): output for name, output in aliases.items()}
        return triton_launch(kernel, *first, spans, O=options, **arrays)


def _stride(x: Any, dim: int) -> int:
    """Returns the stride of a dim in entries; 0 if its size is 1 or there is no array."""
    return 0 if x is None or x.shape[dim] == 1 else math.prod(x.shape[dim + 1 :])


def prepare(
    query, key, value, mask, bias, alibi_slopes, dropout_seed, softmax_scale, logits_soft_cap, dropout_prob, cfg
) -> Call:
    """Converts the arguments of an operation to a `Call`."""
    (B, T, N, H), (S, K), HV = query.shape, key.shape[1:3], value.shape[3]
    mask = MaskInfo() if mask is None else mask.resolved()
    keys = mask.key_range(T, S)
    seed = dropout_seed if dropout_prob > 0 else None
    dense = None if mask.attention_mask is None else mask.attention_mask.astype(jnp.int8)
    ends, coded = _ends(keys)
    arrays = {
        "q_at_ptr": mask.q_positions,
        "k_at_ptr": mask.kv_positions,
        "q_segment_ptr": mask.q_segment_ids,
        "k_segment_ptr": mask.kv_segment_ids,
        "ends_ptr": ends,
    }
    arrays = {name: None if x is None else jnp.asarray(x, jnp.int32) for name, x in arrays.items()}
    batch = {name.removesuffix("_ptr").upper() + "_BATCH": _stride(x, 0) for name, x in arrays.items()}
    arrays |= {"dense_ptr": dense, "bias_ptr": bias, "slope_ptr": alibi_slopes, "seed_ptr": seed}
    arrays |= {"index_ptr": None, "order_ptr": None}  # lists of tiles, used instead of spans
    arrays |= {"q_rope_desc": None, "k_rope_desc": None}  # columns of heads in arrays of their own
    arrays |= {"table_ptr": None, "lens_ptr": None}  # keys in pages
    arrays |= {"rows_ptr": None}  # batch rows of different lengths, one after the other
    arrays |= {"first_ptr": None, "tiles_ptr": None}  # of some heads alone; blocks of keys in another order
    arrays |= {"sofar_out_ptr": None, "sofar_lse_ptr": None}  # attention over other keys
    strides = {
        f"{name}_{part}": _stride(x, dim)
        for name, x in (("DENSE", dense), ("BIAS", bias))
        for dim, part in enumerate(("BATCH", "HEAD", "ROW", "COLUMN"))
    }
    options = dict(
        B=B,
        T=T,
        S=S,
        N=N,
        K=K,
        H=H,
        HV=HV,
        SCALE=scale_of(softmax_scale, H),
        CAP=logits_soft_cap,
        EXACT=logits_soft_cap is not None and _exact(query, cfg),
        **coded,
        SEGMENTS=mask.q_segment_ids is not None,
        THRESHOLD=min(round(dropout_prob * 2**32), 2**32 - 1),
        FACTOR=1 / (1 - dropout_prob),
        SLOPE_BATCH=_stride(alibi_slopes, 0),
        SEED_BATCH=_stride(seed, 0),
        SEED_HEAD=_stride(seed, 1),
        BLOCK_H=padded_width(H),
        BLOCK_V=padded_width(HV),
        PART=0,
        **batch,
        **strides,
    )
    return Call(arrays, options, mask)


def _ends(keys: KeyRange) -> tuple[Any, dict[str, tuple[int, int] | None]]:
    """Returns the ends of a range that are arrays, as int32 [B|1, ends, T] or None, and `Options` for all ends."""
    coded: dict[str, tuple[int, int] | None] = {}
    arrays: list[Any] = []
    for name in Interval._fields:
        end = getattr(keys, name)
        if isinstance(end, Edge):
            coded[name.upper()] = (OFFSET if end.moves else POSITION).value, end.offset
        elif end is not None:
            coded[name.upper()] = ROW.value, len(arrays)
            arrays.append(end)
        else:
            coded[name.upper()] = None
    return jnp.stack(jnp.broadcast_arrays(*arrays), 1) if arrays else None, coded


def _exact(query: Any, cfg: KernelConfig) -> bool:
    """Returns whether a soft cap needs more than the tanh instruction: if 16-bit weights are more accurate than its
    error, or if the plain kernels, which lack the instruction, run the other direction."""
    return query.dtype == jnp.float16 or {cfg.fwd_params.num_warps, cfg.bwd_params.num_warps} != {WARP_SPECIALIZED}


def warp_specialized_forward(
    call: Call,
    params: FwdParams,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array | None,
    rope: tuple[jax.Array, jax.Array] | None = None,
    sofar: tuple[jax.Array, jax.Array] | None = None,
    into: tuple[jax.Array, jax.Array] | None = None,
    dtype: Any = None,
    pages: tuple[jax.Array, jax.Array] | None = None,
    rows: tuple[jax.Array, jax.Array] | None = None,
    side: int | None = None,
    **rest: Any,
) -> tuple[jax.Array, jax.Array]:
    """Returns (out, lse) of the Hopper forward with the tiles `params`.

    Args:
      value: None where values are beside keys, as the options of the call say.
      rows: (`rows_ptr` of the kernel, array [1, rows, N, HV]): batch rows are parts of `query` [1, rows, N, H], one tile each,
        and the output is the array with the rows of these in it, in its memory.
      pages: (int32 [B, pages of a row], int32 [B] slots of a row that hold a token): keys and values are pages [pages, slots,
        K, width], of a number of slots that `takes_pages` allows.
      sofar: (out, lse) over other keys, with which those of these keys are merged; in the same memory if out has that dtype.
      into: (out, lse) of which the result has the heads that are not of this call, in the same memory; it reads none of it.
      dtype: of the output, that of the queries or float32. side: heads side by side; None: as many as `SIDE_BY_SIDE` allows.
      rope: (query [B, T, N, Hr], key [B, S, 1, Hr]), the last columns of each head, where `query` and `key` lack them.
        `splits` says when the kernel takes them.
      rest: the inputs and launch options that follow from the operation.
    """
    (B, T, N, _), options = query.shape, call.options
    assert params.q_blocksize and params.kv_blocksize
    q_block, k_block = blocks = params.q_blocksize, params.kv_blocksize
    width = head_tile_width(options["H"], options["HV"])
    wide = triton.cdiv(options["H"], width) * width
    v_width = width if options["HV"] > 2 * width else options["BLOCK_V"]
    tall = triton.cdiv(options["HV"], v_width) * v_width
    names = "q_rope_desc", "k_rope_desc"
    arrays = zip(names, rope or (None, None), (ROWS_OF_WARPGROUP, k_block), strict=True)
    rest |= {name: None if x is None else block_of(x, count, width) for name, x, count in arrays}
    aliases = {"turn_ptr": 2}
    heads = options["PART"] or N
    tiles = triton.cdiv(options["T"], q_block) * heads * options["B"]
    dtype = query.dtype if dtype is None else dtype
    slots, columns = k_block, (width, v_width)
    if pages is not None:
        count, page = key.shape[:2]
        call = call._replace(options={**options, "PAGE": page, "PAGES": count, "TABLE": pages[0].shape[1]})
        rest |= {"table_ptr": pages[0], "lens_ptr": pages[1]}
        slots, columns = min(k_block, page), (PANEL, PANEL)
    if sofar is not None:
        call = call._replace(options={**options, "MERGE": True})
        if sofar[0].dtype == dtype:
            rest |= {"out_ptr": sofar[0], "lse_ptr": sofar[1]}
            aliases |= {"out_ptr": 0, "lse_ptr": 1}
        else:
            rest |= {"sofar_out_ptr": sofar[0], "sofar_lse_ptr": sofar[1]}
    if into is not None:
        rest |= {"out_ptr": into[0], "lse_ptr": into[1]}
        aliases |= {"out_ptr": 0, "lse_ptr": 1}
    shapes = [
        jax.ShapeDtypeStruct((B, T, N, options["HV"]), dtype),
        jax.ShapeDtypeStruct((B, T, N), jnp.float32),
        jax.ShapeDtypeStruct((1,), jnp.int32),
    ]
    if rows is not None:
        shapes[:2] = shapes[1::-1]  # what is aliased comes last
        rest |= {"rows_ptr": rows[0], "out_ptr": rows[1]}
        aliases |= {"out_ptr": 1}
    results = call.launch_with(
        warp_specialized_fwd_kernel,
        (
            jnp.zeros(1, jnp.int32),
            block_of(query, ROWS_OF_WARPGROUP, width),
            block_of(key, slots, columns[0]),
            block_of(key if value is None else value, slots, columns[1]),
        ),
        call.spans(*blocks)[0],
        blocks,
        out_shape=tuple(shapes),
        aliases=aliases,
        grid=(min(tiles, MULTIPROCESSORS),),
        HEADS=side or next(n for n in SIDE_BY_SIDE if heads % n == 0),
        STAGES=params.num_stages,
        QUEUED=2 if bytes_of(2, params, wide, tall) <= SHARED_MEMORY else 1,
        CONSUMER_REGISTERS=160 if q_block == THREE_WARPGROUPS else 240 if pages is None else 232,
        PRODUCER_REGISTERS=24 if pages is None else 40,  # it holds the numbers of a block's pages
        **rest,
    )
    return (results[0], results[1]) if rows is None else (results[1], results[0])


def takes_pages(slots: int, k_block: int) -> bool:
    """Returns whether the Hopper forward can load blocks of keys from pages of this size."""
    return slots >= 8 and slots & (slots - 1) == 0 and (k_block % slots == 0 or slots % k_block == 0)


def splits(H: int, Hr: int, HV: int) -> bool:
    """Returns whether the Hopper forward takes heads of H + Hr columns as two arrays: H fills all tiles but the last, which
    holds Hr, and values fill two at most. TMA needs rows that are multiples of 16 bytes."""
    return Hr > 0 and Hr % 8 == 0 and HV <= 2 * PANEL and H % head_tile_width(H + Hr, HV) == 0


def bytes_of(queued: int, params: FwdParams, width: int, v_width: int) -> int:
    """Returns the bytes of the Hopper forward's tiles: `queued` blocks of queries, and the stages of keys and
    values."""
    assert params.q_blocksize and params.kv_blocksize and params.num_stages
    return 2 * (queued * params.q_blocksize * width + params.num_stages * params.kv_blocksize * (width + v_width))


def block_of(x: jax.Array, rows: int, width: int, layout: Any = BLOCK) -> Any:
    return tensor_descriptor(x, x.shape, (1, rows, 1, width), layout.value)


def statistics_by_head(call: Call, saved: Saved, length: int) -> tuple[jax.Array, jax.Array]:
    """Returns -lse and -delta [B * N, length] in the form that the Hopper kernels add. For rows without keys, and past
    the last row, the values make all weights zero, whatever the cotangents are."""
    B, T, N = saved.lse.shape

    def by_head(x: jax.Array, fill: float) -> jax.Array:
        x = jnp.pad(x.swapaxes(1, 2), ((0, 0), (0, 0), (0, length - T)), constant_values=fill)
        return x.reshape(B * N, length)

    # Flattened, so that they have no other layout, and behind a barrier. Otherwise XLA would fuse the sum that is delta
    # with this transpose, and take seven times as long.
    flat = jax.lax.optimization_barrier((saved.lse.reshape(-1), saved.delta.reshape(-1)))
    lse, delta = (x.reshape(B, T, N) for x in flat)
    some = lse != -jnp.inf
    unit = call.options["SCALE"] if call.options["CAP"] is None else math.log(2)
    lse = by_head(jnp.where(some, lse * (-1 / unit), -jnp.inf), -jnp.inf)
    return lse, by_head(jnp.where(some, -delta, 0), 0)


# -- tiles ---------------------------------------------------------------------------------------------------------------


def config_of(forward: tuple[int, int, int, int], backward: tuple[int, int, int, int]) -> KernelConfig:
    return KernelConfig(FwdParams(*forward), BwdParams(*backward))


def plain_tiles(width: int, itemsize: int) -> KernelConfig:
    """Returns the tiles of the plain kernels for heads padded to `width` entries."""
    if itemsize == 4:  # multiplied in true float32, without tensor cores
        forward = (32, 32, 8, 2) if width <= 64 else (32, 16, 4, 2)
        return config_of(forward, (32, 32, 8, 2) if width <= 128 else (16, 16, 4, 2))
    if width <= 128:
        return config_of((64, 64, 4, 3), (64, 64, 4, 2))
    return config_of((128, 64, 8, 2), (64, 64, 8, 2))


def warp_specialized_tiles(H: int, HV: int, itemsize: int, scale: float, cap: float | None) -> KernelConfig:
    """Returns the tiles of the Hopper kernels for heads of these widths, or those of the plain ones if Hopper has no
    kernel."""
    width, v_width = padded_width(H), padded_width(HV)
    plain = plain_tiles(max(width, v_width), itemsize)
    # TMA needs heads to be aligned to 16 bytes.
    if itemsize != 2 or H % 8 or HV % 8 or not 64 <= v_width <= width or scale <= 0:
        return plain
    keys = 128 if width <= 128 else 64
    # With a soft cap, twice the queries do not fit in registers.
    backward = (128, 2) if width <= 64 and cap is None else (64, 3 if width <= 128 else 2)
    forward = 64 if max(head_tile_width(H, HV), v_width) == 256 else 128
    return config_of((128, forward, WARP_SPECIALIZED, 2), (backward[0], keys, WARP_SPECIALIZED, backward[1]))


def head_tile_width(H: int, HV: int) -> int:
    """Returns the columns of a tile of queries or keys in the Hopper forward.

    Heads of 129 to 192 are stored in three tiles, so that they are multiplied as 192, not 256. So are values of more than two
    tiles. The output is stored through the query tiles.
    """
    return 64 if 128 < H <= 192 and HV <= 192 else padded_width(H)


def padded_width(entries: int) -> int:
    return max(16, triton.next_power_of_2(entries))


def scale_of(softmax_scale: float | None, entries: int) -> float:
    return 1 / math.sqrt(entries) if softmax_scale is None else float(softmax_scale)
