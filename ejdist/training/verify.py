"""`sequence.verify=first_batch`: a row of the first batch by the plan of the sequence and on one device, before the first step.

A narrow twin of the model is compared, which fits on one device with whole sequences: every kind of mixer that the model has,
with its masks, widths of heads, rotary embedding and options, and fewer heads and features of random numbers. Mesh, scheme,
order, backend and dtype are the run's own, and each group of devices has the same row. Of each layer its result and the
gradients of its input and parameters are compared, and the losses of the tokens.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejdist.cluster.hosts import Hosts
from ejdist.layout import ACTIVATIONS, replicated, set_layout, sharding
from ejdist.mesh import BATCH_AXES, CP, FSDP, SP, TP
from ejdist.models.attention import EXPANDING, LatentAttention
from ejdist.models.config import ALIASES, MIXERS, NONE, DecoderShape, ExpertsShape
from ejdist.models.decoder import DecoderConfig
from ejdist.models.lora import LoRASection, sides
from ejdist.models.model import BatchContext, Model, StepContext
from ejdist.models.parameters import Param, initialise, map_declared
from ejdist.models.stack import parts_of, rows_of
from ejdist.order import Order
from ejdist.registered import LAYER, sections_of
from ejdist.sequence.cost import ALWAYS, NEVER
from ejdist.sequence.latents import travels
from ejdist.training.placing import permuted
from ejdist.training.program import Program, TrainSections, bind, check_sizes

# By how much a token may differ from one device's, over its own size. Kernels of bfloat16 round weights and parts of results.
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.06}
_FEATURES = 32  # of the twin's residual stream, at least
_VOCABULARY = 64


@dataclass(frozen=True)
class Twin:
    """A narrow model of the same mixers.

    Attributes:
      layers: of the model, the numbers of those that each of its layers stands for.
    """

    sections: TrainSections
    model: Model
    layers: list[tuple[str, list[int]]]

    @classmethod
    def of(cls, s: TrainSections, mesh: Any) -> Twin:
        """Returns that of a recipe.

        Raises:
          ValueError: the model is no decoder of this project, or no number of heads fits the mesh.
        """
        c = s.model
        if not isinstance(c, DecoderShape):
            raise ValueError(
                f"sequence.verify compares layers of a decoder, and model is a {type(c).__name__}: use sequence.verify=null"
            )
        kinds: dict[str, list[int]] = {}
        for number, kind in enumerate(c.kinds()):
            mixer = ALIASES.get(kind, kind).partition("+")[0]
            kinds.setdefault(mixer, []).append(number)
        kinds.pop(NONE, None)
        if not kinds:
            raise ValueError("sequence.verify compares layers that mix tokens, and the model has none: use null")
        step = math.prod(mesh.shape.get(a, 1) for a in (FSDP, CP, SP, TP))
        rows = math.prod(mesh.shape.get(a, 1) for a in BATCH_AXES)
        wide = step * -(-_FEATURES // step)
        latent = c.latent
        if latent.query_rank:
            latent = replace(latent, query_rank=wide)
        narrow: dict[str, Any] = {
            "model_dim": wide, "ffn_dim": wide, "vocab_size": step * -(-_VOCABULARY // step), "num_layers": len(kinds),
            "first_layers": (), "layer_pattern": tuple(f"{mixer}+{NONE}" for mixer in kinds), "last_layers": (),
            "latent": latent, "remat": "none",
        }  # fmt: skip
        if isinstance(c, DecoderConfig):
            narrow["init_from"] = None
        mixers = {MIXERS.get(mixer, mixer) for mixer in kinds}
        narrow |= {name: kind() for name, kind in sections_of(LAYER).items() if hasattr(c, name) and name not in mixers}
        data = replace(s.data, global_batch=rows)
        sequence = replace(s.sequence, latents=_latents(s, mesh))
        plain = replace(s, data=data, sequence=sequence, accumulation=1, lora=LoRASection(), curriculum=[])
        reason = None
        # Keys are split over tp as in the model, and of several heads there are two at least.
        K, part = c.num_kv_heads, math.gcd(c.num_kv_heads, mesh.shape.get(TP, 1))
        for kv_heads in (n for n in range(min(2, K), K + 1) if K % n == 0 and n % part == 0):
            heads = {"num_heads": c.num_heads // c.num_kv_heads * kv_heads, "num_kv_heads": kv_heads}
            sections = replace(plain, model=replace(c, experts=ExpertsShape(), **narrow, **heads))
            try:
                model = sections.model.build()
                check_sizes(sections, model, mesh)
            except ValueError as error:
                reason = error
                continue
            return cls(sections, model, [*kinds.items()])
        raise ValueError(
            f"sequence.verify: no narrow copy of the model fits the mesh: {reason}; use sequence.verify=null"
        )

    def parameters(self) -> Any:
        """Returns random parameters, NumPy float32: products are of the size of what goes in, so that softmax is neither even
        nor of one key, and what starts at zero is not zero."""
        rng = np.random.default_rng(0)

        def drawn(path: str, p: Param) -> np.ndarray:
            x = rng.standard_normal(p.shape, np.float32)
            if p.inputs:
                return x * np.float32(sides(p)[0] ** -0.5)
            return 1 + x / 10 if p.init == "ones" else x / 2

        return map_declared(drawn, self.model.declared)


def check_plan(
    s: TrainSections, program: Program, hosts: Hosts, batch: Callable[[], Mapping[str, np.ndarray]], log: Any
) -> None:
    """Compares the plan of a recipe with one device, where `sequence.verify` asks for it, and logs what was compared.

    Args:
      batch: () -> a row of the first batch, [1, T] each, the same on every host.

    Raises:
      ValueError: they differ; names the layer, the ranks, the rows and the tokens.
    """
    if s.sequence.verify is None:
        return
    key = f"sequence.verify = {s.sequence.verify!r}"
    if program.mesh.size == 1:
        log(f"{key}: on one device there is no plan to compare")
        return
    wrong = hosts.first_error("sequence.verify", difference(s, program, batch()))
    plan = f"sequence.scheme={s.sequence.scheme}, order {program.order.name}"
    if wrong is not None:
        raise ValueError(
            f"{key}: with {plan}, {wrong}. Nothing was trained: try sequence.scheme=all_gather, sequence.order=contiguous or "
            "platform=xla to see which of them it is, and report it"
        )
    log(f"{key}: losses, results and gradients of a row of the first batch are those of one device, with {plan}")


def difference(s: TrainSections, program: Program, row: Mapping[str, np.ndarray]) -> str | None:
    """Returns where the plan of a recipe differs from one device, or None. On several hosts each looks at the tokens that its
    devices have."""
    twin = Twin.of(s, program.mesh)
    tolerance = TOLERANCE[s.model.compute_dtype]
    case = _Case.of(twin, program, row)
    (layers, losses), (wanted, losses_wanted) = case.numbers(split=True), case.numbers(split=False)
    for number, (mixer, numbers) in enumerate(twin.layers):
        where = f"layer {numbers[0]}" + (f" and {len(numbers) - 1} more" if len(numbers) > 1 else "") + f" ({mixer})"
        (out, of_x, of_params), (out_wanted, x_wanted, params_wanted) = layers[number], wanted[number]
        for what, got, want in ((f"the result of {where}", out, out_wanted), (_OF_INPUT + where, of_x, x_wanted)):
            errors = case.errors(got, want)
            if not np.all(errors <= tolerance):
                return described(what, errors, program.order, case.index, tolerance)
        for name, want in params_wanted.items():
            got = np.asarray(jax.device_get(of_params[name]), np.float32) / case.groups
            error = np.linalg.norm(got - want) / max(float(np.linalg.norm(want)), 1e-30)
            if not error <= tolerance:
                what = f"the gradient of {name} of {where}"
                return f"{what} differs from one device's by {error:.2g} of its size, over {tolerance:g}"
    errors = case.errors(losses, losses_wanted)
    return None if np.all(errors <= tolerance) else described("the loss", errors, program.order, case.index, tolerance)


_OF_INPUT = "the gradient of the input of "


def described(what: str, errors: np.ndarray, order: Order, index: np.ndarray | None, tolerance: float) -> str:
    """Returns on which ranks and rows a plan differs from one device, and at which tokens on the rank that has most of them.

    Args:
      errors: float [rows, T], of each token, over its size, in the order of the text; a row of each group of devices.
      index: of an order that each row brings.
    """
    rows, length = errors.shape
    lie = order.permute(errors, index=index).reshape(rows, order.shards, -1)
    text = order.permute(np.broadcast_to(np.arange(length), errors.shape), index=index).reshape(lie.shape)
    wrong = ~(lie <= tolerance)  # what is no number, too
    row, rank = np.unravel_index(wrong.sum(-1).argmax(), wrong.shape[:2])
    ranks, of_rows = (", ".join(map(str, np.flatnonzero(wrong.any(axes)))) for axes in ((0, 2), (1, 2)))
    tokens = text[row, rank][wrong[row, rank]]
    worst = float(np.nan_to_num(lie[row, rank], nan=np.inf).max())
    return (
        f"{what} differs from one device's by {worst:.2g} of a token's size, over {tolerance:g}, on ranks {ranks} of "
        f"{order.shards}, in rows {of_rows}: on rank {rank} at {len(tokens)} tokens between {tokens.min()} and {tokens.max()} "
        "of the text"
    )


@dataclass(frozen=True)
class _Case:
    """A twin with a row of a batch. batch: on the mesh, the row in every group. row: of the text, on the host."""

    twin: Twin
    mesh: jax.sharding.Mesh
    order: Order
    row: dict[str, np.ndarray]
    batch: dict[str, jax.Array]
    index: np.ndarray | None

    @classmethod
    def of(cls, twin: Twin, program: Program, row: Mapping[str, np.ndarray]) -> _Case:
        """Returns that of a row [1, T] of the text, whose tokens are taken for those of a smaller vocabulary."""
        own = {n: np.asarray(row[n]) for n in ("positions", "segment_ids")}
        for name in ("tokens", "targets"):
            own[name] = np.where(row[name] < 0, row[name], row[name] % twin.sections.model.vocab_size).astype(np.int32)
        groups = twin.sections.data.global_batch
        placed = {n: np.repeat(x, groups, 0) for n, x in permuted(own, program).items()}
        where = _tokens(program.mesh, placed["tokens"].shape)
        batch: dict[str, jax.Array] = {
            n: jax.make_array_from_callback(x.shape, where, lambda at, x=x: x[at]) for n, x in placed.items()
        }
        return cls(twin, program.mesh, program.order, own, batch, placed.get("order"))

    @property
    def groups(self) -> int:
        return self.twin.sections.data.global_batch

    def numbers(self, split: bool) -> Any:
        """Returns ((result, gradient of the input, of the parameters) of each layer, the losses of the tokens [rows, T, 1]), on
        the mesh or on one device."""
        sections, model, c = self.twin.sections, self.twin.model, self.twin.sections.model
        rng = np.random.default_rng(1)
        shape = (len(self.twin.layers), 2, 1, self.row["tokens"].shape[1], c.model_dim)
        xs = rng.standard_normal(shape, np.float32)
        xs[:, 0] *= 0.01  # norms take it as it is, and it is small beside what a layer adds to it
        ranges = [range(i, i + 1) for i in range(len(self.twin.layers))]
        parts = parts_of(c)

        def of_rows(tree: Mapping[str, Any], name: str, which: range) -> dict[str, Any]:
            return {k: w[rows_of(c, which)[name]] for k, w in tree.items()}

        def run(ops: Any, params: Any, buffers: Any, xs: Any, batch: Any) -> Any:
            layers = []
            for which, (x, d) in zip(ranges, xs, strict=True):
                used = [name for name, rows in rows_of(c, which).items() if rows.stop > rows.start]
                weights = {n: {k: params["layers"][k] for k in parts[n].declare(c)} for n in used}
                mine = {k: w for n in used for k, w in of_rows(weights[n], n, which).items()}
                held = {n: of_rows(buffers[n], n, which) for n in used if n in buffers}
                ctx = BatchContext.of(batch, ops, StepContext(buffers=buffers), model.buffers)._replace(buffers=held)

                def result(mine: Any, x: Any, ctx: Any = ctx, which: range = which) -> jax.Array:
                    return model.layers(mine, x.astype(c.compute_dtype), ctx, which)[0].astype(jnp.float32)

                out, pull = jax.vjp(result, mine, x)
                of_params, of_x = pull(jnp.where((batch["segment_ids"] >= 0)[..., None], d, 0))
                layers.append((out, of_x, of_params))
            assert model.token_losses is not None
            return layers, model.token_losses(params, batch, ops=ops, context=StepContext(buffers=buffers))[..., None]

        params, buffers = self.twin.parameters(), jax.device_get(initialise(model.buffers, jax.random.key(0)))
        if not split:
            ops = bind(sections, None, None, lambda line: None)
            own = next(d for d in self.mesh.devices.flat if d.process_index == jax.process_index())
            with jax.default_device(own):
                return jax.device_get(jax.jit(functools.partial(run, ops))(params, buffers, xs, self.row))
        placed = [[self._on_mesh(x) for x in both] for both in xs]
        tokens = _tokens(self.mesh, placed[0][0].shape)
        out = [(tokens, tokens, replicated(self.mesh))] * len(ranges), tokens
        ops = bind(sections, self.mesh, self.order, lambda line: None)
        with set_layout(order=self.order):
            return jax.jit(functools.partial(run, ops), out_shardings=out)(params, buffers, placed, self.batch)

    def _on_mesh(self, x: np.ndarray) -> jax.Array:
        """Returns a row [1, T, D] of the text on every group of the mesh."""
        lie = self.order.permute(np.repeat(x, self.groups, 0), index=self.index)
        return jax.make_array_from_callback(lie.shape, _tokens(self.mesh, lie.shape), lambda at: lie[at])

    def errors(self, got: jax.Array, want: np.ndarray) -> np.ndarray:
        """Returns how far each token is from one device's, over its size or a tenth of the mean size, float [rows, T] in the
        order of the text; 0 for padding and for tokens of other hosts."""
        counted, size = self.row["segment_ids"] >= 0, np.linalg.norm(want, axis=-1)
        size = np.maximum(size, 0.1 * size[counted].mean() if counted.any() else 1.0)
        lie = self.order.permute(np.repeat(want, self.groups, 0), index=self.index)
        errors = np.zeros(lie.shape[:2], np.float32)
        for shard in got.addressable_shards:
            errors[shard.index[:2]] = np.linalg.norm(np.asarray(shard.data) - lie[shard.index], axis=-1)
        return np.where(counted, self.order.inverse(errors, index=self.index) / size, 0)


def _latents(s: TrainSections, mesh: Any) -> str:
    """Returns whether latents travel in the recipe's own layers, whose heads are more."""
    c = s.model
    if LatentAttention.name not in c.part_names():
        return s.sequence.latents
    adapted = s.lora.rank > 0 and bool({*EXPANDING} & {*(s.lora.targets or EXPANDING)})
    sizes = LatentAttention.sizes(c)
    return (
        ALWAYS
        if travels(mesh, s.sequence.made(), s.platform, jnp.dtype(c.compute_dtype).itemsize, adapted, **sizes)
        else NEVER
    )


def _tokens(mesh: jax.sharding.Mesh, shape: tuple[int, ...]) -> jax.sharding.NamedSharding:
    """Returns where an array [rows, T] or [rows, T, D] lies."""
    return sharding(mesh, ("B", "T", "D")[: len(shape)], ACTIVATIONS, shape=shape, what="sequence.verify")
