"""Bytes on a device at the height of a training step, by class, from shapes and shardings alone: nothing is compiled.

State and batch are exact. What comes and goes is counted at several moments, of which the largest is the height: the
forward of a round of the layers' pattern; the loss, whose logits are there a block at a time; the backward of a layer; the
gradient of the embedding; and, with moments on the host, the update. Each holds what is kept for the backward, copies of the
weights in the compute dtype, and gradients that wait for the update.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp

from ejdist.layout import axes_in
from ejdist.mesh import TP
from ejdist.models.lora import BASE
from ejdist.models.model import Model
from ejdist.models.parameters import Param
from ejdist.models.remat import PartBytes
from ejdist.models.share import Share
from ejdist.models.stack import counted_parts, layers_of, narrow_matrices, why_stay
from ejdist.narrow_loss import bytes_at_work
from ejdist.planning import orthogonal
from ejdist.planning.activations import bytes_of
from ejdist.planning.share import share_of
from ejdist.precision import BF16, gathers_blocks
from ejdist.training.offload import is_offloaded, is_stack
from ejdist.training.optimizer import matrices_in, state_bytes
from ejdist.training.program import check_sizes, param_shardings
from kernels.engines.rows.vocabulary import rows_of_block
from kernels.ops.cross_entropy import BLOCK_ELEMENTS

_BASE = f"{BASE}."
MOMENTS, ACTIVATIONS = "optimizer moments", "activations kept"  # in the memory of a host
# A heap has gaps: what it takes over what is alive at its height. 0 to 12% in programs for TPUs, none in those for GPUs.
GAPS = {"tpu": 1.04, "gpu": 1.0}
WORK_FIRST = 2.5


@dataclass(frozen=True)
class Memory:
    """Bytes of a device at the height of a step. classes: of what. moment: when the height is. arguments: state and batch,
    which are there all the time. on_host: bytes in the memory of the host, of what."""

    classes: dict[str, int]
    moment: str
    arguments: int
    on_host: dict[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return sum(self.classes.values())

    @property
    def host(self) -> int:
        return sum(self.on_host.values())

    @property
    def temporaries(self) -> int:
        return self.total - self.arguments


@dataclass(frozen=True)
class Stored:
    """A parameter: its numbers in all, on a device, and on one where it is used, after what splits its D is gathered.
    over: the axes that it is gathered over."""

    path: str
    param: Param
    whole: int
    local: int
    used: int
    over: tuple[str, ...]

    @property
    def itemsize(self) -> int:
        """Bytes of a number as it is stored."""
        return jnp.dtype(self.param.dtype).itemsize


def stored(sections: Any, declared: Any, mesh: Any, kind: str = "parameter") -> list[Stored]:
    """Returns every parameter as a mesh holds it. Raises ValueError where a dim does not divide."""
    places = jax.tree.leaves(param_shardings(sections, declared, mesh, kind))
    parameters = jax.tree_util.tree_leaves_with_path(declared, is_leaf=lambda x: isinstance(x, Param))
    leaves = []
    for (path, param), place in zip(parameters, places, strict=True):
        axes = [a for a in axes_in(place.spec) if mesh.shape[a] > 1]
        stays = (TP, *sections.experts.axes) if "E" in param.dims.split() else (TP,)
        local = param.size // math.prod(mesh.shape[a] for a in axes)
        over = tuple(a for a in axes if a not in stays)
        used = local * math.prod(mesh.shape[a] for a in over)
        leaves.append(Stored(".".join(str(k.key) for k in path), param, param.size, local, used, over))
    return leaves


@dataclass(frozen=True)
class Held:
    """What a mesh holds of a recipe's model, whatever the batch and remat: the parameters that are trained, buffers, and apart
    from these the frozen parameters, by their names in the model; of one in int8 also its `.values` and `.scale`."""

    parameters: list[Stored]
    buffers: list[Stored]
    frozen: list[Stored] = field(default_factory=list)

    @property
    def model(self) -> list[Stored]:
        """The parameters that are the model's own, and no adapters."""
        return self.frozen or self.parameters


def held(sections: Any, model: Model, mesh: Any) -> Held:
    """Returns what a mesh, which may be abstract, holds of `model`, which is `trained_model(sections)`.

    Raises:
      ValueError: a size of the recipe or the model does not fit the mesh.
    """
    check_sizes(sections, model, mesh)
    trained, buffers = stored(sections, model.declared, mesh), stored(sections, model.buffers, mesh, "buffer")
    frozen = [b for b in buffers if model.base is not None and b.path.startswith(_BASE)]
    of_model = [replace(b, path=b.path.removeprefix(_BASE)) for b in frozen]
    return Held(trained, [b for b in buffers if b not in frozen], of_model)


def memory(sections: Any, of: Held, mesh: Any, platform: str, tile: int | None = None) -> Memory:
    """Returns the bytes of a recipe's step on a mesh, which may be abstract.

    Args:
      of: `held(sections, model, mesh)`, also of another batch and remat. With `experts.dispatch=auto` the first scheme that
        fits is counted.
      platform: tpu or gpu. tile: of the chip, see `Share`.
    """
    s, c, parameters = sections, sections.model, of.parameters
    share = share_of(s, mesh, tile=tile)
    b, x = share.itemsize, share.tokens * c.model_dim * share.itemsize
    vocabulary = c.vocab_size // share.features
    head = c.model_dim * vocabulary  # numbers of the output projection where it is used
    table = next(p for p in of.model if p.path == ("embedding" if c.tie_embeddings else "lm_head"))
    split, trains = bool(table.over), not of.frozen

    host = on_host(s, of, share)

    always = {
        "parameters": 4 * sum(p.local for p in parameters),
        "optimizer moments": moment_bytes(s, parameters) - host.get(MOMENTS, 0),
        **({"frozen parameters": sum(p.itemsize * p.local for p in of.frozen)} if of.frozen else {}),
        "buffers": sum(p.itemsize * p.local for p in of.buffers),
        "batch": 4 * 4 * share.tokens * s.accumulation,
    }
    arguments = sum(always.values())
    parts, each = counted_parts(c), bytes_of(c, share)
    inputs = 0 if share.remat.host else c.num_layers * x
    kept = inputs + sum(n * share.remat.kept(each[part]) for part, n in parts.items())
    if share.remat.rest:
        kept += sum(n * (each[p].tpu_rest if platform == "tpu" else each[p].gpu_rest) for p, n in parts.items())
    pattern = layers_of(c)[len(c.first_layers) :][: len(c.layer_pattern)]
    of_round = sum(inputs // c.num_layers + sum(share.remat.kept(each[part]) for part in layer) for layer in pattern)
    work = _at_work([[each[part] for part in layer] for layer in layers_of(c)], platform)
    stacks = [p for p in parameters if p.path.startswith("layers.") and p.param.cast]
    copies = b * sum(p.local for p in stacks) if b < 4 else 0
    gradients = b * sum(p.local for p in stacks)
    summed = 2 if s.optimizer.accumulate == "bfloat16" else 4
    sums = summed * sum(p.local for p in parameters) if s.accumulation > 1 else 0
    # The weights of the part that needs most, whole, and their gradients before they are scattered.
    whole = 2 * max(_gathered(c, stacks, b).values())
    if of.frozen:  # which have no gradients, but a copy where they are stored in another dtype
        whole = max(_gathered(c, [p for p in of.frozen if p.path.startswith("layers.")], None, b).values())
    gathered_head = b * head if split or b != table.itemsize else 0
    of_head = 4 * head if trains else 0  # the gradient of the output projection
    narrow = _in_8_bits(c, stacks, share)
    in_8_bits = sum(p.used if share.remat.rest else p.local for p in narrow)
    # Of others than these, which the backward does not read.
    copies_after = max(0, copies - b * sum(p.local for p in narrow))
    logits = (4 + b) * vocabulary * rows_of_block(share.tokens, vocabulary, BLOCK_ELEMENTS)
    if c.precision_head and trains:
        logits = bytes_at_work(share.tokens, c.model_dim, vocabulary, c.precision, b)
    # XLA for GPUs makes the zeros that a gradient of a gathered table is added to in one go with those of the head.
    early = of_head if platform == "gpu" and split and not c.tie_embeddings else 0
    # Where a layer's work is much larger than what waits of the head, XLA for GPUs reduces that first and gives its place to
    # the layers, as compiled programs of 2^20 tokens and more show; so it does where layers follow the rounds of the
    # pattern, outside of the loop. Else both are there at once.
    beside = 0
    if share.halved:
        # Each half has gradients of the matrices, of which one waits for the other; and where one half is at its experts, what
        # mixers made again waits in both for their backward.
        whole += max(_gathered(c, stacks, b, every=True).values())
        beside = max(sum(share.remat.made_again(each[part]) for part in layer[:-1]) for layer in layers_of(c))
    reduced = platform == "gpu" and split and (bool(c.last_layers) or work > WORK_FIRST * (of_head + early))
    waiting = 0 if reduced else of_head + early

    moments = {
        "the loss": {
            "activations kept": kept,
            "weights in the compute dtype": copies_after,
            "weights in 8 bits": in_8_bits,
            "gathered weights": gathered_head,
            "gradients": of_head + sums + early,
            "logits": logits,
            "activations at work": 3 * x,
        },
        "the backward of a layer": {
            "activations kept": kept,
            "weights in the compute dtype": copies_after,
            "weights in 8 bits": in_8_bits,
            "gathered weights": whole,
            "gradients": waiting + gradients + sums,
            "activations at work": work + beside,
        },
        "the gradient of the embedding": {
            "gathered weights": 0,
            "gradients": of_head + gradients + sums + (of_head if split else 0),
            "activations at work": 2 * x,
        },
    }
    if len(pattern) > 1:  # what its layers keep goes to the stacks when all of them are done
        moments["the forward of a round"] = {
            "activations kept": kept,
            "weights in the compute dtype": copies,
            "weights in 8 bits": in_8_bits,
            "gathered weights": whole // 2,
            "gradients": sums,
            "activations of a round": of_round,
            "activations at work": max(min(p.products + p.rest, p.work) for p in each.values()),
        }
    all_gradients = sums or gradients + sum(4 * p.local for p in parameters if p not in stacks)
    if update := orthogonal.memory(s, parameters, mesh):
        moments["the update"] = {"gradients": all_gradients, "matrices made orthogonal": update}
    if MOMENTS in host:
        away = [p for p in parameters if is_offloaded(p.param)]
        # A layer's moments come while the last ones go; those of a matrix of the whole model are there at once.
        streamed = sum(moment_bytes(s, [p]) // p.param.shape[0] for p in away if is_stack(p.param))
        streamed += max((moment_bytes(s, [p]) for p in away if not is_stack(p.param)), default=0)
        moments["the update"] = {
            "gradients": all_gradients,
            "moments of two layers": 2 * streamed,
        }
    moment = max(moments, key=lambda name: sum(moments[name].values()))
    classes = moments[moment]
    if (gaps := GAPS[platform] - 1) > 0:
        classes["gaps of the heap"] = int(gaps * sum(classes.values()))
    return Memory({**always, **{name: n for name, n in classes.items() if n}}, moment, arguments, host)


def moment_bytes(sections: Any, parameters: list[Stored]) -> int:
    """Returns the bytes of the moments of parameters on a device, or of what the optimizer of a plugin keeps of them."""
    each, s = state_bytes(sections.optimizer), sections.optimizer
    taken = sum(p.local for p in parameters if matrices_in(s, p.path, p.param) is not None)
    return each * sum(p.local for p in parameters) - each // 2 * taken


def on_host(sections: Any, of: Held, share: Share) -> dict[str, int]:
    """Returns the bytes that a device keeps in the memory of its host: moments, and what layers save for the backward of a
    microbatch."""
    s, c = sections, sections.model
    held: dict[str, int] = {}
    if s.optimizer.offload == "host":
        held[MOMENTS] = moment_bytes(s, [p for p in of.parameters if is_offloaded(p.param)])
    if share.remat.host:
        saved = sum(n * share.remat.kept_on_host(bytes_of(c, share)[part]) for part, n in counted_parts(c).items())
        held[ACTIVATIONS] = saved + c.num_layers * share.tokens * c.model_dim * share.itemsize
    return held


def _at_work(layers: list[list[PartBytes]], platform: str) -> int:
    """Returns the bytes at the height of the backward of the layer that needs most; one is done before the next begins."""
    each = [p for parts in layers for p in parts]
    if platform != "gpu":
        return max(p.work + p.tpu_rest + p.tpu_work for p in each)
    # Of a layer with a recurrence before another part: that one's backward, while what the recurrence's will read is computed
    # again already; and the recurrence's.
    beside = []
    for p, q in ((parts[0], parts[-1]) for parts in layers if parts[0].gpu_beside and len(parts) > 1):
        beside.append(q.work + q.gpu_work + p.gpu_beside + p.products + p.rest)
        beside.append(p.work + p.gpu_work + p.gpu_beside + q.gpu_waits)
    return max([p.work + p.gpu_work for p in each] + beside) + max(p.gpu_zeros for p in each)


def _in_8_bits(c: Any, stacks: list[Stored], share: Share) -> list[Stored]:
    """Returns the matrices that are kept in 8 bits for the backward: those that are not gathered, and the stored parts of those
    in blocks; all as they are used, where everything of the forward is kept. Experts quantise theirs in both directions."""
    if c.precision == BF16 or not share.remat.products:
        return []
    names = {*narrow_matrices(c)[0]} - {*why_stay(c)}
    mine = [p for p in stacks if p.path.split(".")[1] in names]
    return [p for p in mine if share.remat.rest or not p.over or gathers_blocks(c.precision)]


def _gathered(c: Any, stacks: list[Stored], itemsize: int | None, cast: int = 0, every: bool = False) -> dict[str, int]:
    """Returns part -> bytes of its weights in one layer where they are used, of those that are gathered, or of every one.

    Args:
      itemsize: bytes of a number there; None: as it is stored, and where that is not `cast`, those of a copy too.
    """
    by_part = {"": 0}
    for part in counted_parts(c):
        names = part.declare(c)
        mine = [p for p in stacks if p.path.split(".")[1] in names]
        for p in mine:
            numbers = p.used // p.param.shape[0]
            as_stored = p.itemsize if itemsize is None else itemsize
            copy = cast if itemsize is None and p.param.inputs and p.itemsize != cast else 0
            by_part[part.name] = by_part.get(part.name, 0) + numbers * ((as_stored if p.over or every else 0) + copy)
    return by_part
