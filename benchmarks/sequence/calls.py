"""A call of attention as a training step makes it: heads, mask, documents, and the programs of its directions."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

import kernels
from ejdist.documents import ONE, drawn, places, read_lengths
from ejdist.layout import ACTIVATIONS, spec
from ejdist.order import Order
from ejdist.training.data.corpus import Corpus
from ejdist.training.data.packing import Packing
from ejdist.training.data.tokenizer import ByteTokenizer
from kernels.engines.attention.masks import MaskInfo, window_of
from kernels.engines.attention.pairs import keys_at

# FLOPs of a visible pair of one head, over its width: two products forward, five backward.
PRODUCTS = {"forward": 2 * 2, "backward": 2 * 5, "both": 2 * 2 + 2 * 5}
DIMS = {"query": "BTNH", "key": "BSKH", "value": "BSKH", "d_out": "BTNH"}
IDS = ("q_segment_ids", "kv_segment_ids")
PLACES = ("q_positions", "kv_positions")
NO_IDS = "none"  # as documents=: one document, and no segment ids
RECORDED = Path(__file__).resolve().parent.parent / "documents"
ROWS = 4  # of which a corpus of drawn lengths has enough tokens
Arrays = dict[str, jax.Array]


@dataclass(frozen=True)
class Attention:
    """Causal attention of one row. window: keys that a query sees, 0 for all. sinks: whether heads have learned sinks. packed:
    whether there are segment ids, which every training step has."""

    heads: int
    kv_heads: int
    width: int
    dtype: str
    window: int = 0
    sinks: bool = False
    packed: bool = True
    platform: str | None = None

    @property
    def rules(self) -> MaskInfo:
        """The mask without its segments."""
        return MaskInfo(causal=True, window=window_of(self.window or None))

    @property
    def options(self) -> dict[str, Any]:
        """What the public functions are called with."""
        return {"causal": True, "sliding_window": self.window or None, "platform": self.platform}

    def shapes(self, length: int) -> dict[str, tuple[int, ...]]:
        heads = {"N": self.heads, "K": self.kv_heads}
        found: dict[str, tuple[int, ...]] = {n: (1, length, heads[d[2]], self.width) for n, d in DIMS.items()}
        return found | ({"softmax_aux": (self.heads,)} if self.sinks else {})

    def checked(self, check: int) -> Attention:
        """Returns the attention that is compared with one device's, on `check` tokens of a rank."""
        return replace(self, window=min(self.window, max(check // 4, 1)))

    def keys_seen(self, ids: np.ndarray) -> np.ndarray:
        """Returns int64 [T]: how many keys each token of a row sees, from its segment ids."""
        return keys_at(self.rules, places(ids))

    def flops(self, direction: str, pairs: float) -> float:
        return PRODUCTS[direction] * self.width * self.heads * pairs


def segment_ids(documents: str, length: int, seed: int = 0) -> np.ndarray:
    """Returns int32 [length], without padding: a row that the data pipeline cuts from documents.

    Args:
      documents: a mean length (lognormal), "one" document, "none", which is one without ids, the name of a file
        in benchmarks/documents, or the path of a file of lengths, one a line.

    Raises:
      ValueError: none of these, or a file without lengths; names the remedy.
    """
    if documents in (ONE, NO_IDS):
        return np.zeros(length, np.int32)
    rng, need = np.random.default_rng([seed, 1]), ROWS * length
    sizes: list[int] = []
    if documents.isdigit() and int(documents) > 0:
        mean = int(documents)
        while (missing := need - sum(sizes)) > 0:
            sizes += drawn(mean, missing // mean + 16, rng).tolist()
    else:
        named = RECORDED / f"{documents}.txt"
        others = ", ".join(["a mean length", repr(ONE), repr(NO_IDS), *sorted(f.stem for f in RECORDED.glob("*.txt"))])
        recorded = read_lengths(named if named.is_file() else documents, others)
        while sum(sizes) < need:
            sizes += rng.permutation(recorded).tolist()
    offsets = np.minimum(np.concatenate([[0], np.cumsum(sizes)]), need)
    offsets = offsets[: int(np.argmax(offsets == need)) + 1]  # the last document is cut: no row has padding
    corpus = Corpus(np.broadcast_to(np.uint16(0), (need,)), offsets, "", ByteTokenizer())
    return Packing(corpus, length, seed).row(0)["segment_ids"]


def thinned(ids: np.ndarray, length: int) -> np.ndarray:
    """Returns the segment ids of `length` of the row's tokens, at even distances: the same documents, shorter."""
    return ids[np.arange(length) * len(ids) // length]


def same_work(seen: np.ndarray, pairs: float) -> int:
    """Returns the length, a multiple of 256, of the shortest start of a row that has this number of pairs; the row's length if
    it has fewer."""
    enough = int(np.searchsorted(np.cumsum(seen), pairs)) + 1
    return min(-(-enough // 256) * 256, len(seen))


def draw(call: Attention, length: int, mesh: Any = None) -> Arrays:
    """Returns the floats of a call, where they are needed; the same numbers on one device, the default, as on many."""
    shapes = call.shapes(length)
    if mesh is None:
        where: Any = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    else:
        where = {n: NamedSharding(mesh, spec([*DIMS.get(n, "_")], ACTIVATIONS)) for n in shapes}

    @functools.partial(jax.jit, out_shardings=where)
    def make() -> Arrays:
        keys = jax.random.split(jax.random.key(0), len(shapes))
        kinds = {n: "float32" if n == "softmax_aux" else call.dtype for n in shapes}
        return {n: jax.random.normal(k, s).astype(kinds[n]) for k, (n, s) in zip(keys, shapes.items(), strict=True)}

    return make()


def placed(ids: np.ndarray, mesh: Any = None) -> jax.Array:
    """Returns segment ids [1, T] on one device, or split over the sequence's axes of a mesh."""
    ids = np.ascontiguousarray(ids[None], np.int32)
    if mesh is None:
        return jax.device_put(ids, jax.local_devices()[0])
    return jax.make_array_from_callback(
        ids.shape, NamedSharding(mesh, spec(["B", "T"], ACTIVATIONS)), lambda at: ids[at]
    )


def data_of(call: Attention, ids: np.ndarray, mesh: Any = None, index: np.ndarray | None = None) -> Arrays:
    """Returns what a call takes of a batch, by argument: segment ids, but none for a call without documents; and positions
    where each row has an order of its own, the `index` [1, T] of its tokens in the text."""
    data = dict.fromkeys(IDS, placed(ids, mesh)) if call.packed else {}
    return data if index is None else data | dict.fromkeys(PLACES, placed(index[0], mesh))


def index_of(call: Attention, ids: np.ndarray, order: Order) -> np.ndarray | None:
    """Returns int32 [1, T], which token lies at each place of a row, where each row has an order of its own."""
    return order.text_indices(call.keys_seen(ids)[None]) if order.carried else None


class Programs:
    """The jitted programs of an attention(floats, data, lse) -> out, with `lse` (out, lse). Each direction is a program, as in
    training, and the forward has the lse that a backward needs.

    Args:
      around: data -> a context in which the programs are traced. options: what they are compiled with.
    """

    def __init__(
        self,
        attention: Callable[[Arrays, Any, bool], Any],
        around: Callable[[Any], Any] | None = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        def forward(floats: Arrays, data: Any) -> tuple[jax.Array, jax.Array]:
            with _context(around, data):
                return attention(floats, data, True)

        def save(floats: Arrays, data: Any) -> Any:
            with _context(around, data):
                return jax.vjp(lambda f: attention(f, data, False), floats)

        def backward(pull: Any, d_out: jax.Array, data: Any) -> Arrays:
            with _context(around, data):
                return pull(d_out)[0]

        def both(floats: Arrays, d_out: jax.Array, data: Any) -> tuple[jax.Array, Arrays]:
            with _context(around, data):
                out, pull = jax.vjp(lambda f: attention(f, data, False), floats)
                return out, pull(d_out)[0]

        jit = functools.partial(jax.jit, compiler_options=options)
        self.forward, self.save, self.backward, self.both = map(jit, (forward, save, backward, both))

    def timed(self, direction: str, arrays: Arrays, data: Any) -> tuple[Callable, tuple]:
        """Returns (the jitted program of a direction, its arguments)."""
        floats, d_out = _apart(arrays)
        if direction == "forward":
            return self.forward, (floats, data)
        if direction == "both":
            return self.both, (floats, d_out, data)
        return self.backward, (self.save(floats, data)[1], d_out, data)

    def results(self, direction: str, arrays: Arrays, data: Any) -> dict[str, jax.Array]:
        """Returns what the programs of a direction compute, by name: "out", and the gradients by argument."""
        floats, d_out = _apart(arrays)
        if direction == "forward":
            return {"out": self.forward(floats, data)[0]}
        if direction == "both":
            out, grads = self.both(floats, d_out, data)
        else:
            out, pull = self.save(floats, data)
            grads = self.backward(pull, d_out, data)
        return {"out": out, **grads}


def _context(around: Callable[[Any], Any] | None, data: Any) -> Any:
    return contextlib.nullcontext() if around is None else around(data)


def _apart(arrays: Arrays) -> tuple[Arrays, jax.Array]:
    return {n: x for n, x in arrays.items() if n != "d_out"}, arrays["d_out"]


def worst_error(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> float:
    """Returns the largest error of all arrays, each relative to its largest entry; shards of this process only."""
    worst = 0.0
    for name, want in wanted.items():
        got, want = found[name], np.asarray(want, np.float32)
        largest = max(float(np.abs(want).max()), 1e-30)
        shards = got.addressable_shards if isinstance(got, jax.Array) else [None]
        for shard in shards:
            data, at = (got, ...) if shard is None else (shard.data, shard.index)
            difference = np.abs(np.asarray(data, np.float32) - want[at]).max()
            worst = max(worst, float(difference) / largest if np.isfinite(difference) else math.inf)
    return worst


def limit_of(dtype: str) -> float:
    """Returns how far numbers of a dtype may be off one device's in float32 before they are wrong."""
    return 0.03 if dtype == "bfloat16" else 1e-4


@functools.cache
def reference(call: Attention) -> Callable:
    """Returns the jitted (queries' floats with d_out, keys, the mask's arrays) -> {"out", gradients by argument}, of some
    queries over all keys on one device. For numbers and not for speed: XLA does not try out products on a GPU."""
    options = call.options | {"platform": "xla"}

    def run(floats: Arrays, keys: Arrays, mask: Arrays) -> Arrays:
        def attention(f: Arrays) -> jax.Array:
            return kernels.flash_attention(**f, **mask, **options)

        out, pull = jax.vjp(attention, {n: x for n, x in floats.items() if n != "d_out"} | keys)
        return {"out": out, **pull(floats["d_out"])[0]}

    return jax.jit(run, compiler_options={"xla_gpu_autotune_level": 0} if jax.default_backend() == "gpu" else None)
