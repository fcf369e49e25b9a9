"""LoRA: a model whose parameters are frozen, and whose layers' matrices have adapters of low rank, which alone are trained.

`adapted` turns any model into one. A parameter becomes a buffer, under "base", in a dtype of its own: it has no gradient,
moments or float32 copy, and checkpoints hold it. The parameters are a [L, .., rank], drawn, and b [L, rank, ..], zeros, of each
target, so that the first loss is that of the base. Source: Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, 2021,
section 4.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ejdist.dtypes import dtype_name
from ejdist.frozen import Frozen, adapter_dims, quantised
from ejdist.models.model import BatchContext, Flops, Metrics, Model, StepContext
from ejdist.models.parameters import Param, map_declared
from ejdist.precision import BF16

BASE = "base"  # name of the frozen parameters among the buffers
# Of a part's buffers, the one that published models have too: it is of the base, and does not move.
_BIAS = "bias"
_DTYPES = ("bfloat16", "float32", "int8")


@dataclass
class LoRASection:
    """The `lora` section of a recipe: adapters that are trained in the place of the parameters."""

    rank: int = 0  # rank of each adapter; 0: none, all parameters are trained
    alpha: float = 16.0  # an adapter's product is multiplied by alpha / rank
    # Matrices with an adapter, by our names, for example [query,value]; []: all projections of attention and of the MLP.
    targets: tuple[str, ...] = ()
    # dtype of the frozen matrices: bfloat16, float32, or int8 with a scale per output channel; null for model.compute_dtype.
    base: str | None = None

    def __post_init__(self) -> None:
        self.targets = tuple(self.targets)
        self.base = None if self.base is None else dtype_name(self.base)

    def validate(self) -> None:
        """Raises ValueError naming the key and the remedy. What the model has is checked by `adapted`."""
        if self.rank < 0:
            raise ValueError(f"lora.rank must be positive, or 0 for no adapters, got {self.rank}")
        if not 0 < self.alpha < math.inf:
            raise ValueError(f"lora.alpha must be positive, got {self.alpha}")
        if self.base is not None and self.base not in _DTYPES:
            raise ValueError(f"lora.base = {self.base!r} is unknown; use null, {', '.join(_DTYPES)}")
        twice = [name for name in dict.fromkeys(self.targets) if self.targets.count(name) > 1]
        if twice:
            raise ValueError(f"lora.targets names {twice[0]!r} twice; name it once")

    @property
    def strength(self) -> float:
        """What an adapter's product is multiplied by."""
        return self.alpha / self.rank


def build(model: Any, section: LoRASection) -> Model:
    """Returns the model of a recipe's sections, adapted where `lora.rank` says so. Raises ValueError, naming the key."""
    built = model.build()
    if section.rank and (precision := getattr(model, "precision", BF16)) != BF16:
        raise ValueError(
            f"model.precision = {precision} and lora.rank = {section.rank}: products with frozen matrices and adapters have no "
            f"form in 8 bits; give model.precision={BF16}, and lora.base=int8 for a base of 8 bits"
        )
    return adapted(built, section, model.compute_dtype) if section.rank else built


def targets_of(layers: Mapping[str, Param], section: LoRASection) -> list[str]:
    """Returns the names of the matrices with an adapter, in the order of the model.

    Raises:
      ValueError: a name is not a matrix of the model, or one without an adapter; or the rank exceeds a side of one.
    """
    can = [name for name, p in layers.items() if p.adapts]
    for name in section.targets:
        if name in can:
            continue
        others = f"there are {', '.join(can)}"
        if name in layers:
            kind = "of experts or beside them" if layers[name].inputs else "of no projection"
            raise ValueError(f"lora.targets has {name!r}, a parameter {kind}, which has no adapter; {others}")
        near = difflib.get_close_matches(name, can, n=1)
        meant = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(f"lora.targets has {name!r}, which no layer of the model has; {meant}{others}")
    if not can:
        raise ValueError(
            f"lora.rank = {section.rank}: no layer of the model has a matrix that may have an adapter; give lora.rank=0, or "
            "declare one with Param(..., inputs=, adapts=True)"
        )
    targets = [name for name in can if name in section.targets or not section.targets]
    wide = [name for name in targets if section.rank <= min(sides(layers[name]))]
    for name in targets:
        if name not in wide:
            raise ValueError(
                f"lora.rank = {section.rank} is more than {min(sides(layers[name]))}, the smaller side of {name!r}: give at "
                f"most that{f', or lora.targets=[{",".join(wide)}], which are wider' if wide else ''}"
            )
    return targets


def sides(p: Param) -> tuple[int, int]:
    """Returns how many inputs and outputs a matrix of a layer has; p is a stack of them."""
    inputs = p.inputs.split()
    sizes = list(zip(p.dims.split(), p.shape, strict=True))
    fan_in = math.prod(n for d, n in sizes if d in inputs)
    return fan_in, math.prod(n for d, n in sizes if d not in (*inputs, "L"))


def declare_adapter(p: Param, rank: int) -> dict[str, Param]:
    """Returns the adapter of a stack of matrices, a and b, as they are stored beside it."""
    dims, inputs = p.dims.split()[1:], p.inputs.split()
    dims_a, dims_b = adapter_dims(dims, inputs)
    sizes = dict(zip(dims, p.shape[1:], strict=True))
    layers, input_sizes = p.shape[0], [sizes[d] for d in dims if d in inputs]
    # The variance of what peft draws, kaiming_uniform with a = sqrt(5): x a is then a third of x, whatever its width.
    std = (3 * math.prod(input_sizes)) ** -0.5
    a = Param((layers, *input_sizes, rank), " ".join(["L", *dims_a]), std=std)
    return {
        "a": a,
        "b": Param((layers, rank, *(sizes[d] for d in dims if d not in inputs)), " ".join(["L", *dims_b]), "zeros"),
    }


def summed_axes(p: Param) -> tuple[int, ...]:
    """Returns the axes of a parameter that a product with it sums over."""
    inputs = p.inputs.split()
    return tuple(i for i, d in enumerate(p.dims.split()) if d in inputs)


@dataclass(frozen=True)
class Base:
    """The frozen parameters of a model: how they are stored.

    declared: the parameters as the model declares them. dtype: of its layers' matrices. rest: of its tables, the embedding and
    the output projection; norms, biases and routers are as they are declared.
    """

    declared: Any = field(repr=False)
    dtype: str
    rest: str

    def stored(self) -> dict[str, Any]:
        """Returns the tree of `Param` that is stored; an int8 matrix is its `values` and their `scale`."""
        return map_declared(self._stored, self.declared)

    def _dtype(self, path: str, p: Param) -> str:
        if path.startswith("layers."):
            return self.dtype if p.inputs else p.dtype
        return self.rest if p.cast else p.dtype

    def _stored(self, path: str, p: Param) -> Any:
        stored = replace(p, dtype=self._dtype(path, p))
        if stored.dtype != "int8":
            return stored
        axes = summed_axes(p)
        shape = tuple(1 if i in axes else n for i, n in enumerate(p.shape))
        dims = " ".join("_" if i in axes else d for i, d in enumerate(p.dims.split()))
        # Not drawn: a base is always read from a checkpoint, and an untrained one is refused.
        return {"values": replace(stored, init="zeros"), "scale": Param(shape, dims, "ones")}

    def frozen(self, path: str, x: jax.Array) -> Any:
        """Returns a parameter as it is stored."""
        p = self._param(path)
        dtype = self._dtype(path, p)
        if dtype != "int8":
            return x.astype(dtype)
        values, scale = quantised(x, summed_axes(p))
        return {"values": values, "scale": scale}

    def _param(self, path: str) -> Param:
        node = self.declared
        for name in path.split("."):
            node = node[name]
        return node


def adapted(model: Model, section: LoRASection, compute_dtype: str = "float32") -> Model:
    """Returns the model with its parameters frozen, and adapters in their place.

    Args:
      section: checked; its rank is not 0.

    Raises:
      ValueError: a target or the rank does not fit the model; names the key.
    """
    targets = targets_of(model.declared["layers"], section)
    if BASE in model.buffers:
        raise ValueError(f"a part of the model is named {BASE!r}, and so are the frozen parameters; rename the part")
    base = base_of(model.declared, section, compute_dtype)
    adapters = {name: declare_adapter(model.declared["layers"][name], section.rank) for name in targets}
    strength = section.strength

    def whole(params: Any, buffers: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the parameters as the model takes them."""
        base_params = buffers[BASE]
        return {**base_params, "layers": layers_of(params["layers"], base_params["layers"])}

    def layers_of(trained: Mapping[str, Any], base_layers: Mapping[str, Any]) -> dict[str, Any]:
        return {name: leaf(name, x, trained.get(name, {})) for name, x in base_layers.items()}

    def leaf(name: str, x: Any, adapter: Mapping[str, Any]) -> Any:
        if isinstance(x, Mapping):
            return Frozen(x["values"], x["scale"], **adapter, strength=strength)
        # Without an adapter, one in the compute dtype is a plain array.
        plain = not adapter and (not model.declared["layers"][name].inputs or x.dtype == compute_dtype)
        return x if plain else Frozen(x, **adapter, strength=strength)

    def embed(params: Any, ctx: BatchContext) -> jax.Array:
        return model.embed(whole(params, ctx.buffers), ctx)

    def layers(params: Any, x: jax.Array, ctx: BatchContext, which: range) -> tuple[jax.Array, Metrics]:
        return model.layers(layers_of(params, ctx.buffers[BASE]["layers"]), x, ctx, which)

    def head(params: Any, x: jax.Array, ctx: BatchContext, *, z_loss: float = 0.0) -> tuple[jax.Array, Metrics]:
        return model.head(whole(params, ctx.buffers), x, ctx, z_loss=z_loss)

    def measured(function: Any, params: Any, *args: Any, context: StepContext | None = None, **more: Any) -> Any:
        context = context or StepContext()
        _check_base("context", "StepContext(buffers=...)", context.buffers)
        return function(whole(params, context.buffers), *args, context=context, **more)

    def apart(function: Any, params: Any, buffers: Mapping[str, Any] | None, *args: Any, **more: Any) -> Any:
        _check_base("buffers", "those of the model", buffers)
        return function(whole(params, buffers or {}), buffers, *args, **more)

    cached = model.cached
    if cached is not None:
        cached = cached._replace(apart=partial(apart, cached.apart), packing=partial(apart, cached.packing))

    def update(buffers: Mapping[str, Any], seen: dict[str, jax.Array]) -> dict[str, Any]:
        of_model = {part: old for part, old in buffers.items() if part != BASE}
        moved = model.update(of_model, seen)
        biases = {part: {k: x for k, x in old.items() if k == _BIAS} for part, old in of_model.items()}
        return {BASE: buffers[BASE]} | {part: {**moved[part], **biases[part]} for part in of_model}

    frozen = tuple(replace(f, frozen=f.token) for f in model.flops)
    return replace(
        model,
        declared={"layers": adapters},
        embed=embed,
        layers=layers,
        head=head,
        token_losses=None if model.token_losses is None else partial(measured, model.token_losses),
        logits_at=None if model.logits_at is None else partial(measured, model.logits_at),
        hidden=None if model.hidden is None else partial(measured, model.hidden),
        projection=None if model.projection is None else partial(measured, model.projection),
        flops=(*frozen, Flops(adapter_flops(adapters.values()))),
        buffers={BASE: base.stored(), **model.buffers},
        update=update,
        base=base,
        cached=cached,
    )


def _check_base(argument: str, remedy: str, buffers: Mapping[str, Any] | None) -> None:
    if BASE not in (buffers or {}):
        raise ValueError(f"argument {argument!r} has no buffers of the frozen base; give {remedy}")


def base_of(declared: Any, section: LoRASection, compute_dtype: str) -> Base:
    """Returns how the parameters of a model are stored as a base."""
    dtype = section.base or compute_dtype
    return Base(declared, dtype, compute_dtype if dtype == "int8" else dtype)


def adapter_flops(adapters: Iterable[Mapping[str, Param]]) -> int:
    """Returns the forward FLOPs of adapters per position: two for each of their numbers."""
    return 2 * sum(p.size for adapter in adapters for p in adapter.values())


def delta(p: Param) -> str:
    """Returns the einsum subscripts of the product of a layer's a and b, which is added to its matrix: "dz,znh->dnh"."""
    dims, inputs = [d.lower() if d != "_" else "y" for d in p.dims.split()[1:]], p.inputs.lower().split()
    input_dims, others = ("".join(d for d in dims if (d in inputs) == inside) for inside in (True, False))
    return f"{input_dims}z,z{others}->{''.join(dims)}"


def merged(p: Param | None, x: Any, a: jax.Array | None, b: jax.Array | None, strength: float) -> jax.Array:
    """Returns a stack of matrices with what its adapters add, float32: x + strength a b; without them x alone.

    Args:
      p: the stack. x: as it is stored, an array, or the values and their scale.
    """
    whole = (Frozen(**x) if isinstance(x, Mapping) else Frozen(x)).whole(jnp.float32)
    if p is None or a is None or b is None:
        return whole
    operands, out = delta(p).split("->")
    first, second = operands.split(",")
    added = jnp.einsum(f"l{first},l{second}->l{out}", a, b, precision=jax.lax.Precision.HIGHEST)
    return whole + strength * added
