"""The parts of an operation besides its contract: cases, backends, and the plan of a call."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from kernels.framework.binding import Call, is_float_array
from kernels.framework.declaration import Parameter
from kernels.framework.dims import Dim
from kernels.framework.platforms import PLATFORMS
from kernels.framework.target import may_compile_for


@dataclass(frozen=True)
class Case:
    """One set of shapes and options: a row of tests, benchmarks, tuning and documentation.

    Attributes:
      dims: dim name -> size (a tuple for `*name`).
      options: values of the static parameters.
      arrays: names of optional float arrays to include.
      make: argument name -> function (rng, dims) -> array or pytree, for arguments that random normals do not suit. One of a
        large array has an attribute `shaped`, dims -> `jax.ShapeDtypeStruct`, which is called where only shapes are needed.
      shapes: argument name -> shape, where it differs from the declared dims (a broadcast dim of size 1), or a function
        of dims that returns it (a width that is the sum of two).
      tags: "smoke" (runs in bfloat16 too), "slow" (runs in the full grid only), "code" (compiled for GPUs and TPUs, the
        last of them in the quick tests), "bench" (timed on accelerators, too large for tests on a CPU), "kernels" (the
        quick tests of backends that need an interpreter choose among these; without any, among all cases).
      wide: names of float arrays that are float32 whatever the dtype of the case, as states are.
    """

    name: str
    dims: Mapping[str, Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    arrays: tuple[str, ...] = ()
    make: Mapping[str, Callable] = field(default_factory=dict)
    shapes: Mapping[str, tuple[int, ...] | Callable[[Mapping[str, Any]], tuple[int, ...]]] = field(default_factory=dict)
    tags: frozenset[str] = frozenset()
    wide: tuple[str, ...] = ()

    def draws(self, p: Parameter) -> bool:
        """Returns whether an argument is filled with random normals."""
        return p.kind in ("float", "any") and p.name not in self.make and (p.required or p.name in self.arrays)

    def dtype(self, name: str, dtype: Any) -> Any:
        """Returns the dtype of a float argument, given that of the case."""
        return "float32" if name in self.wide else dtype

    def shape(self, p: Parameter) -> tuple[int, ...]:
        """Returns the shape of an argument."""
        shape = self.shapes.get(p.name)
        return shape(self.dims) if callable(shape) else shape or p.shape(self.dims)


class Operation(Protocol):
    """What the rest of the framework needs to know about an operation."""

    name: str
    function: Callable
    parameters: dict[str, Parameter]
    outputs: tuple[str, ...]
    output_dims: tuple[tuple[Dim, ...], ...]
    residuals: tuple[str, ...]
    extra_residuals: Callable | None
    padding: Any
    no_gradient: tuple[str, ...]
    local_dims: frozenset[str]
    sum_dims: frozenset[str]
    tied_dims: tuple[tuple[str, str], ...]
    together: bool
    see_also: dict[str, str]
    offset_of: dict[str, str]
    ordered: bool | Callable[[Call], bool] | None
    weights: tuple[str, ...]
    same_dtype: tuple[str, ...]
    autotune_key: Callable[[Call], str | None] | None
    backward_inputs: Callable[[dict, dict], dict] | None

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def bind(self, *args: Any, **kwargs: Any) -> Call: ...

    def plan(self, call: Call, toolchain: str | None, cfg: Any, *, differentiated: bool) -> Plan: ...

    def unavailable(self) -> dict[str, str]: ...

    def used_options(self, call: Call) -> list[str]: ...

    def used_features(self, call: Call) -> list[str]: ...


def _cast(x: Any, dtype: Any) -> Any:
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape, dtype)
    # Converted by NumPy: JAX would compile a program for each shape.
    return x if x.dtype == jnp.dtype(dtype) else jax.device_put(np.asarray(x).astype(jnp.dtype(dtype)))


# An array with more normal numbers than this repeats them: drawing a billion takes a minute. It is a prime, so that rows do not
# repeat with it.
DRAWN = 4_194_301


def _normal(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    return np.resize(rng.standard_normal(min(math.prod(shape), DRAWN)).astype(dtype), shape)


def case_inputs(
    op: Operation, case: Case, *, dtype: Any = "float32", seed: int = 0, shapes_only: bool = False
) -> dict[str, Any]:
    """Returns the keyword arguments of a case, see `Op.case_inputs`."""
    rng = np.random.default_rng([seed, *case.name.encode()])
    arguments: dict[str, Any] = dict(case.options)
    for p in op.parameters.values():
        array_dtype = case.dtype(p.name, dtype)
        if p.name in case.make:
            make = case.make[p.name]
            shaped = getattr(make, "shaped", None) if shapes_only else None
            value = make(rng, case.dims) if shaped is None else shaped(case.dims)
            cast = functools.partial(_cast, dtype=array_dtype)
            arguments[p.name] = jax.tree.map(lambda x: cast(x) if is_float_array(x) else x, value)  # noqa: B023
        elif case.draws(p):
            shape = case.shape(p)
            arguments[p.name] = (
                jax.ShapeDtypeStruct(shape, jnp.dtype(array_dtype))
                if shapes_only
                else jax.device_put(_normal(rng, shape, jnp.dtype(array_dtype)))
            )
        elif p.kind is not None and (p.required or p.name in case.arrays):
            raise TypeError(f"{op.name}, case {case.name}: add {p.name!r} to `make`")
    return arguments


@dataclass(frozen=True, eq=False)
class Backend:
    """One implementation of an operation and its capabilities. Built by `Op.register`.

    A backend supports the parameters that its `forward` and `backward` name; a call that uses any other is refused.
    """

    name: str
    platforms: frozenset[str]
    dtypes: frozenset[str]
    features: frozenset[str]
    forward: Callable
    backward: Callable | None
    forward_with_residuals: Callable | None
    rejects: Callable[[Call], str | None] | None
    heuristic: Callable[[Call, str], Any] | None
    candidates: Callable[[Call], Iterable[Any]] | None
    symbolic: frozenset[str]
    version: int
    keeps: Callable[[Call, Any], Mapping[str, jax.ShapeDtypeStruct]] | None = None

    @property
    def toolchain(self) -> str:
        """The toolchain that `platform=` can name to select this backend: xla, triton, pallas, cudnn."""
        return self.name.split("_")[0]

    def names(self, backward: bool = False) -> frozenset[str]:
        """Returns the names of the parameters that the forward or backward takes."""
        return _names_of(self.backward if backward else self.forward)

    def missing(self, op: Operation, call: Call, differentiated: bool) -> list[str]:
        """Returns the options and features that the call uses and this backend does not support."""
        missing = [name for name in op.used_options(call) if name not in self.names()]
        if differentiated and self.backward is not None:
            missing += [n for n in op.used_options(call) if n not in {*self.names(backward=True), *missing}]
        return missing + [name for name in op.used_features(call) if name not in self.features]

    def refuses(self, op: Operation, call: Call, differentiated: bool) -> str | None:
        """Returns why this backend cannot run the call, or None if it can."""
        if call.dtype not in self.dtypes:
            return f"dtype {call.dtype} is not among {', '.join(sorted(self.dtypes))}"
        missing = self.missing(op, call, differentiated)
        if missing:
            return f"it does not support {', '.join(missing)}"
        if differentiated and self.backward is None:
            return "it has no backward"
        symbols = [dim for dim in call.symbolic_dims() if dim not in self.symbolic]
        if symbols:
            return f"it needs the size of {', '.join(symbols)} at compile time, but here it is symbolic"
        return self.rejects(call) if self.rejects else None

    def kept(self, call: Call, cfg: Any) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns what its differentiated forward keeps for its backward beside the contract's residuals, by name."""
        return dict(self.keeps(call, cfg)) if self.keeps else {}

    def run(self, direction: str, arguments: Mapping[str, Any], cfg: Any, *first: Any) -> Any:
        """Calls `forward`, `forward_with_residuals` or `backward` with those of the contract's arguments that it takes."""
        function, names = getattr(self, direction), self.names(direction == "backward")
        named = {name: value for name, value in arguments.items() if name in names}
        return function(*first, **named, **({"cfg": cfg} if "cfg" in names else {}))


@functools.lru_cache(maxsize=1024)
def _names_of(function: Callable | None) -> frozenset[str]:
    return frozenset() if function is None else frozenset(inspect.signature(function).parameters)


def make_backend(
    op: Operation,
    forward: Callable,
    backward: Callable | None,
    forward_with_residuals: Callable | None,
    name: str | None,
    metadata: Mapping[str, Any],
) -> Backend:
    """Returns the backend, after checking its functions and metadata.

    Raises:
      TypeError: an unknown platform or feature, or a function that does not take the contract's parameters by name.
    """
    unknown = set(metadata["platforms"]) - set(PLATFORMS)
    if unknown:
        raise TypeError(f"{op.name}: unknown platforms {sorted(unknown)}; there are {', '.join(PLATFORMS)}")
    stem = name or forward.__module__.rpartition(".")[2]
    required = [p.name for p in op.parameters.values() if p.required]
    for function, first in ((forward, 0), (backward, 1)):
        if function is None:
            continue
        parameters = list(inspect.signature(function).parameters.values())
        if any(p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) for p in parameters):
            raise TypeError(
                f"{op.name} on {stem}: {function.__name__} must name the parameters that it supports; "
                "*args and **kwargs are not allowed"
            )
        names = [p.name for p in parameters]
        strange = [n for n in names[first:] if n not in op.parameters and n != "cfg"]
        lost = [n for n in required if n not in names] if function is forward else []
        if strange or lost or (first and names[:1] != ["saved"]):
            raise TypeError(
                f"{op.name} on {stem}: {function.__name__}({', '.join(names)}) must take "
                f"{'saved, and then ' if first else ''}by name the parameters that it supports of "
                f"{', '.join(op.parameters)}, cfg"
                + (f"; it lacks {', '.join(lost)}" if lost else "")
                + (f"; the contract has no {', '.join(strange)}" if strange else "")
            )
    keeps = metadata["keeps"]
    if keeps is not None and op.extra_residuals is not None:
        raise TypeError(
            f"{op.name} on {stem}: `keeps` is for contracts without `extra_residuals`, which fix what is kept"
        )
    if (forward_with_residuals is None) != ((op.extra_residuals is None and keeps is None) or backward is None):
        raise TypeError(
            f"{op.name} on {stem}: `forward_with_residuals` requires a backward, and `extra_residuals` in the contract or "
            f"`keeps`; here {'it is missing' if forward_with_residuals is None else 'it is given without them'}"
        )
    if forward_with_residuals is not None and {*inspect.signature(forward_with_residuals).parameters} != {
        *inspect.signature(forward).parameters
    }:
        raise TypeError(
            f"{op.name} on {stem}: {forward_with_residuals.__name__} must have the same parameters as {forward.__name__}"
        )
    sets: dict[str, Any] = {n: frozenset(metadata[n]) for n in ("platforms", "dtypes", "features", "symbolic")}
    rest: dict[str, Any] = {n: metadata[n] for n in ("rejects", "heuristic", "candidates", "version", "keeps")}
    return Backend(
        name=stem, forward=forward, backward=backward, forward_with_residuals=forward_with_residuals, **sets, **rest
    )


# Optional packages, with what to install. A backend is unavailable if one is missing; any other import error is raised.
OPTIONAL_PACKAGES = {"triton": "ejdist[cuda]", "jax_triton": "ejdist[cuda]"}


def not_installed(error: ModuleNotFoundError) -> str | None:
    """Returns why a backend whose import failed is unavailable, with the remedy; None unless the missing module belongs
    to an optional package."""
    name = error.name or ""
    package = name.split(".")[0]
    if package not in OPTIONAL_PACKAGES:
        return None
    # Parents are imported first, so a missing submodule means that the package is installed in another version.
    what = f"{package} is not installed" if name == package else f"the installed version of {package} has no {name}"
    return f"{what}: pip install '{OPTIONAL_PACKAGES[package]}'"


def missing(op: Operation, chosen: Backend, platform: str) -> str:
    """Returns why XLA runs on a GPU instead of a kernel, if the kernel's toolchain is missing; else an empty string."""
    if platform != "cuda" or chosen.toolchain != "xla":
        return ""
    return "; ".join(dict.fromkeys(op.unavailable().values()))


@dataclass(frozen=True)
class Choice:
    """What runs on one platform: a backend, its configuration, and in `reason` the measurement that chose it, if any;
    or no backend, and why. `missing`: why kernels of higher priority cannot run, if their toolchain is missing. `keeps`:
    whether the backend's differentiated forward makes what `Plan.kept` names, and its backward gets it."""

    platform: str
    backend: Backend | None
    cfg: Any
    reason: str
    missing: str = ""
    keeps: bool = False


@dataclass(frozen=True)
class Plan:
    """What runs on each platform that a program may be lowered for, and what the caller requested.

    Attributes:
      kept: name -> shape of what a differentiated forward keeps for its backward, beside the contract's residuals. A traced
        program has the same arrays on every platform, so one platform decides; a backend elsewhere makes zeros, which no
        backward reads, and XLA drops them.
    """

    choices: tuple[Choice, ...]
    toolchain: str | None
    cfg: Any
    kept: Mapping[str, jax.ShapeDtypeStruct] = field(default_factory=dict)

    def keeping(self, call: Call) -> Plan:
        """Returns the plan of a differentiated call, with what is kept: by the last backend that keeps anything on a platform
        that this process compiles for. A process without an accelerator says by `compile_for` that it compiles for GPUs, and by
        nothing that it does for TPUs."""
        kept = {
            c.platform: c.backend.kept(call, c.cfg)
            for c in reversed(self.choices)
            if c.backend is not None and may_compile_for(c.platform)
        }
        first = next(filter(None, kept.values()), {})
        choices = tuple(replace(c, keeps=bool(first) and kept.get(c.platform) == first) for c in self.choices)
        return replace(self, choices=choices, kept=first)

    def forward_of(self, gradient: Plan) -> Plan:
        """Returns what runs forward in a differentiated call: this plan, but where a backend keeps arrays for its backward."""
        both = zip(self.choices, gradient.choices, strict=True)
        return replace(self, choices=tuple(g if g.keeps else p for p, g in both), kept=gradient.kept)
