"""The contract of an operation, its backends, and the call that joins them: custom VJP, dispatch and caching, once.

A room states its operation as a plain `jnp` function (signature, meaning and oracle in one) and wraps it in `Op`. Files
beside it add backends with `@op.backend(...)`. All that a backend must write is `forward` and `backward` on arrays.
See README.md in this folder for how rooms of every shape fit.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernels._core import config as _config
from kernels._core import execute
from kernels._core.call import Call, bind, is_array, is_float_array, parameters_of, resolve_dims
from kernels._core.dispatch import DEVICE_OF_PLATFORM, PLATFORMS, Unsupported
from kernels._core.execute import Plan, Saved
from kernels._core.interpret import interpreting
from kernels._core.work import Work

__all__ = ["Backend", "Call", "Case", "Op", "Saved", "Unsupported"]

# Packages whose absence makes a backend unavailable, with what to install. Any other import error is raised.
_OPTIONAL_PACKAGES = {"triton": "ejdist[cuda]", "jax_triton": "ejdist[cuda]"}


@dataclass(frozen=True)
class Case:
    """One set of shapes and options: a row of tests, benchmarks, tuning and documentation.

    Attributes:
      dims: dim name -> size (a tuple for `*name`).
      options: values of the static parameters.
      arrays: names of optional float arrays to include.
      make: argument name -> function (rng, dims) -> array or pytree, for what random normals do not fit.
      shapes: argument name -> shape, where it differs from the declared dims (a broadcast dim of size 1).
      tags: "bench" (timed on accelerators, too large for tests on a CPU), "tune", ...
    """

    name: str
    dims: Mapping[str, Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    arrays: tuple[str, ...] = ()
    make: Mapping[str, Callable] = field(default_factory=dict)
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    tags: frozenset[str] = frozenset()


@dataclass(frozen=True, eq=False)
class Backend:
    """One implementation of an operation, and what it can do. Built by `Op.backend`."""

    name: str
    platforms: frozenset[str]
    dtypes: frozenset[str]
    features: frozenset[str]
    forward: Callable
    backward: Callable | None
    rejects: Callable[[Call], str | None] | None
    heuristic: Callable[[Call, str], Any] | None
    candidates: Callable[[Call], Iterable[Any]] | None
    version: int

    @property
    def toolchain(self) -> str:
        """The part of the name that `platform=` may say: xla, triton, pallas, cudnn."""
        return self.name.split("_")[0]

    def refuses(self, op: Op, call: Call, differentiated: bool) -> str | None:
        """Returns why this backend cannot run the call, or None if it can."""
        if call.dtype not in self.dtypes:
            return f"dtype {call.dtype} is not among {', '.join(sorted(self.dtypes))}"
        missing = [name for name in op.used_features(call) if name not in self.features]
        if missing:
            return f"it does not support {', '.join(missing)}"
        if differentiated and self.backward is None:
            return "it has no backward"
        return self.rejects(call) if self.rejects else None


class Op:
    """An operation: its contract, and the one way to call it on any backend.

    Args:
      function: the contract, plain `jnp` with jaxtyping dims; returns all outputs. It is the oracle.
      outputs: a name for each output.
      residuals: the outputs that a backward needs. They are part of the contract, so the forward of one backend may be
        followed by the backward of another. The inputs are always available to a backward.
      features: extra feature name -> predicate(call). Every optional parameter is a feature of its own name already, in
        use when its value is not the default. Backends name the features they allow.
      local_dims: dims that may be split over devices without communication.
      same_dtype: float arguments that must agree in dtype.
      order: backend names, fastest first (or a function of the call that returns them, with `names` listing all).
      backward_inputs: (residuals, cotangents) -> what a backward receives, both dicts; default: all of both.
      config: the class of this operation's configurations.
      cases: shapes for tests, benchmarks and tuning.
      work: call -> (Work of the forward, Work of the backward), see work.py; None where nobody has counted it.

    Raises:
      TypeError: the contract cannot be read, or a backend's signature differs from it.
    """

    def __init__(
        self,
        function: Callable,
        *,
        outputs: tuple[str, ...] = ("out",),
        residuals: tuple[str, ...] = (),
        features: Mapping[str, Callable[[Call], bool]] | None = None,
        local_dims: Iterable[str] = (),
        same_dtype: tuple[str, ...] = (),
        order: tuple[str, ...] = ("xla",),
        prefer: Callable[[Call], tuple[str, ...]] | None = None,
        backward_inputs: Callable[[dict, dict], dict] | None = None,
        config: type | None = None,
        cases: tuple[Case, ...] = (),
        work: Callable[[Call], tuple[Work, Work]] | None = None,
    ):
        self.function, self.name, self.outputs, self.residuals = function, function.__name__, outputs, residuals
        self.parameters = parameters_of(function)
        self.extra_features = dict(features or {})
        self.local_dims, self.same_dtype, self.order, self.prefer = frozenset(local_dims), same_dtype, order, prefer
        self.backward_inputs, self.config, self.cases, self.work = backward_inputs, config, cases, work
        self.package = function.__module__.rpartition(".")[0]
        self.__doc__ = function.__doc__
        self._backends: dict[str, Backend] = {}
        self._unavailable: dict[str, str] = {}
        self._loaded = False
        unknown = [r for r in residuals if r not in outputs]
        if unknown:
            raise TypeError(f"{self.name}: residuals {unknown} are not among its outputs {outputs}")

    # -- what there is ----------------------------------------------------------------------------------------------

    def backend(
        self,
        *,
        platforms: Iterable[str],
        dtypes: Iterable[str],
        features: Iterable[str] = (),
        rejects: Callable[[Call], str | None] | None = None,
        heuristic: Callable[[Call, str], Any] | None = None,
        candidates: Callable[[Call], Iterable[Any]] | None = None,
        version: int = 1,
        name: str | None = None,
        backward: Callable | None = None,
    ) -> Callable[[Callable], Callable]:
        """Returns a decorator that registers `forward`; the function `backward` of the same file belongs to it.

        `features` is an allow-list. `heuristic` is given the call and the platform that is lowered for. `version` is raised
        when tuned configurations of older code no longer apply.
        """
        unknown = set(platforms) - set(PLATFORMS)
        if unknown:
            raise TypeError(f"{self.name}: unknown platforms {sorted(unknown)}; there are {', '.join(PLATFORMS)}")
        strange = set(features) - set(self.feature_names)
        if strange:
            raise TypeError(
                f"{self.name}: unknown features {sorted(strange)}; there are {', '.join(self.feature_names)}"
            )

        def register(forward: Callable) -> Callable:
            stem = name or forward.__module__.rpartition(".")[2]
            self._check_signature(stem, forward, first=())
            if backward is not None:
                self._check_signature(stem, backward, first=("saved",))
            self._backends[stem] = Backend(
                name=stem,
                platforms=frozenset(platforms),
                dtypes=frozenset(dtypes),
                features=frozenset(features),
                forward=forward,
                backward=backward,
                rejects=rejects,
                heuristic=heuristic,
                candidates=candidates,
                version=version,
            )
            return forward

        return register

    def _check_signature(self, stem: str, function: Callable, first: tuple[str, ...]) -> None:
        wanted = (*first, *self.parameters, "cfg")
        actual = tuple(inspect.signature(function).parameters)
        if actual != wanted:
            raise TypeError(f"{self.name} on {stem}: {function.__name__}{actual} must take {wanted}, in this order")

    @property
    def backends(self) -> dict[str, Backend]:
        """The available backends by name, fastest first. Backend files are imported at the first use."""
        if not self._loaded:
            self._loaded = True
            for stem in self.order:
                self._load(stem)
            ordered = [s for s in self.order if s in self._backends] + [
                s for s in self._backends if s not in self.order
            ]
            self._backends = {stem: self._backends[stem] for stem in ordered}
        return self._backends

    def unavailable(self) -> dict[str, str]:
        """Returns the backends whose toolchain is not installed, with what to install."""
        return dict(self._unavailable) if self.backends else {}

    def _load(self, stem: str) -> None:
        module_name = f"{self.package}.{stem}"
        if not self.package or importlib.util.find_spec(module_name) is None:
            return
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            package = (error.name or "").split(".")[0]
            if package not in _OPTIONAL_PACKAGES:
                raise
            sys.modules.pop(module_name, None)
            self._unavailable[stem] = f"{package} is not installed: pip install '{_OPTIONAL_PACKAGES[package]}'"
            return
        if stem not in self._backends:
            raise TypeError(f"{module_name} registers no backend of {self.name}")
        # Here and not where `forward` registers: `backward` stands below it, and the file may have been imported before.
        backward = getattr(module, "backward", None)
        if backward is not None and self._backends[stem].backward is None:
            self._check_signature(stem, backward, first=("saved",))
            self._backends[stem] = replace(self._backends[stem], backward=backward)

    @property
    def feature_names(self) -> tuple[str, ...]:
        return (*(p.name for p in self.parameters.values() if not p.required), *self.extra_features)

    def used_features(self, call: Call) -> list[str]:
        """Returns the names of the features that a call asks for."""
        used = []
        for p in self.parameters.values():
            if p.required:
                continue
            value = call.arguments[p.name]
            same = value is p.default or (not is_array(value) and type(value) is type(p.default) and value == p.default)
            if not same:
                used.append(p.name)
        return used + [name for name, predicate in self.extra_features.items() if predicate(call)]

    def support(self) -> list[dict[str, Any]]:
        """Returns a row for each backend: name, platforms, dtypes, features, whether it has a native backward."""
        rows = [
            {
                "op": self.name,
                "backend": b.name,
                "platforms": sorted(b.platforms),
                "dtypes": sorted(b.dtypes),
                "features": [f for f in self.feature_names if f in b.features],
                "refused": [f for f in self.feature_names if f not in b.features],
                "backward": b.backward is not None,
            }
            for b in self.backends.values()
        ]
        return rows

    # -- one call ---------------------------------------------------------------------------------------------------

    def bind(self, *args: Any, **kwargs: Any) -> Call:
        """Returns the call, checked. Raises ValueError naming the argument, the dim and the remedy."""
        arguments = bind(self.name, self.parameters, args, kwargs)
        dims = resolve_dims(self.name, self.parameters, arguments)
        floats = {k: v for k, v in arguments.items() if is_float_array(v)}
        dtype = str(next(iter(floats.values())).dtype) if floats else ""
        first = next((n for n in self.same_dtype if n in floats), "")
        for name in self.same_dtype:
            if name in floats and floats[name].dtype != floats[first].dtype:
                raise ValueError(
                    f"{self.name}: argument {name!r} is {floats[name].dtype} but {first!r} is {floats[first].dtype}; "
                    f"cast one of them, for example {name}.astype({first}.dtype)"
                )
        return Call(self.name, arguments, dims, dtype)

    def choose(
        self, call: Call, platform: str | None, *, device: str = "any", differentiated: bool = False
    ) -> dict[str, Backend | str]:
        """Returns, for each platform that may be lowered for, the backend that runs or the reason why none does.

        `device` ("cpu", "gpu", "tpu") keeps only backends for that kind of device.

        Raises:
          ValueError: `platform` or `device` names nothing known.
          Unsupported: no backend can run the call; the message has every backend's reason.
        """
        order = self.prefer(call) if self.prefer else tuple(self.backends)
        pool = [self.backends[name] for name in order if name in self.backends]
        if platform is not None:
            pool = [b for b in pool if platform in (b.name, b.toolchain)]
            if not pool:
                self._no_such_backend(platform)
        if device not in ("any", *DEVICE_OF_PLATFORM.values()):
            raise ValueError(f"{self.name}: cfg.backend = {device!r} is unknown; use any, cpu, gpu or tpu")
        reasons = {b.name: b.refuses(self, call, differentiated) for b in pool}
        if device != "any":
            for b in pool:
                if device not in {DEVICE_OF_PLATFORM[p] for p in b.platforms}:
                    reasons[b.name] = f"it is not for cfg.backend = {device!r}"
        able = [b for b in pool if reasons[b.name] is None]
        said = "; ".join(
            f"{name}: {reason}" for name, reason in [*reasons.items(), *self._unavailable.items()] if reason
        )
        if not able:
            others = [
                b.name for b in self.backends.values() if b not in pool and not b.refuses(self, call, differentiated)
            ]
            hint = f"; platform={others[0]!r} can" if others else ""
            raise Unsupported(f"{self.name} has no backend for this call: {said}{hint}")
        if platform is not None and interpreting():
            return dict.fromkeys(PLATFORMS, able[0])
        chosen: dict[str, Backend | str] = {}
        for p in PLATFORMS:
            backend = next((b for b in able if p in b.platforms), None)
            where = ", ".join(f"{b.name} ({', '.join(sorted(b.platforms))})" for b in able)
            chosen[p] = backend or (
                f"{self.name} cannot be compiled for {p}"
                + (f" with platform={platform!r}" if platform else "")
                + f": the backends that support this call are {where}"
                + (f"; {said}" if said else "")
            )
        return chosen

    def _no_such_backend(self, platform: str) -> None:
        known = dict.fromkeys([*self.backends, *(b.toolchain for b in self.backends.values())])
        stems = {stem for stem in self._unavailable if platform in (stem, stem.split("_")[0])}
        if stems:
            raise Unsupported(f"{self.name} on {platform}: " + "; ".join(self._unavailable[s] for s in sorted(stems)))
        if platform in ("xla", "triton", "pallas", "cudnn", "cuda") or platform in self.order:
            raise Unsupported(f"{self.name} has no {platform} backend; it has {', '.join(self.backends)}")
        raise ValueError(
            f"{self.name}: argument 'platform' = {platform!r} is unknown; use None or one of {', '.join(known)}"
        )

    def plan(self, call: Call, platform: str | None, cfg: Any, *, differentiated: bool) -> Plan:
        if cfg is not None and self.config is not None and not isinstance(cfg, self.config):
            raise ValueError(f"{self.name}: argument 'cfg' must be a {self.config.__name__}, got {type(cfg).__name__}")
        asked = getattr(cfg, "platform", "auto")
        if platform is None and asked != "auto":
            platform = asked
        if platform == "auto":
            platform = None
        chosen = self.choose(call, platform, device=getattr(cfg, "backend", "any"), differentiated=differentiated)
        configs: dict[str, Any] = {}
        rows: list[Any] = []
        for p, b in chosen.items():
            if isinstance(b, str):
                rows.append((p, None, None, b))
                continue
            key = f"{b.name}/{p}"
            if key not in configs:
                configs[key] = _config.select(_config.Request(self, b, call, p, override=cfg))
            rows.append((p, b, configs[key], ""))
        return tuple(rows)

    def __call__(self, *args: Any, platform: str | None = None, cfg: Any = None, **kwargs: Any) -> Any:
        """Returns all outputs of the contract: a tuple, or the bare array when there is one.

        Args:
          platform: None for the fastest backend of whatever this is lowered for; or a toolchain ("xla", "triton",
            "pallas") or backend ("triton_gpu"), which never falls back.
          cfg: a configuration for this call; fields left None are chosen.

        Raises:
          ValueError: the call is wrong. Unsupported: no backend, or not the one asked for, can run it.
        """
        call = self.bind(*args, **kwargs)
        primal = self.plan(call, platform, cfg, differentiated=False)
        try:
            gradient, refusal = self.plan(call, platform, cfg, differentiated=True), ""
        except Unsupported as error:  # only a differentiated call needs a backward, so it is raised there
            gradient, refusal = None, str(error)
        traced = call.traced()
        inputs = {k: v for k, v in traced.items() if is_float_array(v)}
        others = {k: v for k, v in traced.items() if k not in inputs}
        run = execute.compiled(self, primal, gradient, refusal, _static(self, call), interpreting())
        return run(inputs, others)

    def backward(
        self, saved: Mapping[str, Any], *args: Any, platform: str | None = None, cfg: Any = None, **kwargs: Any
    ):
        """Returns name -> gradient for every float array among the arguments, from what is given in `saved`.

        `saved` holds what `backward_inputs` returns, for example a `d_out`, and an `lse` and `delta` that came from a
        ring over more keys than this call sees.
        """
        call = self.bind(*args, **kwargs)
        plan = self.plan(call, platform, cfg, differentiated=True)
        run = execute.compiled_backward(self, plan, _static(self, call), interpreting())
        return run(dict(saved), call.traced())

    def reference(self, *args: Any, dtype: Any = jnp.float32, **kwargs: Any) -> Any:
        """Returns the contract evaluated with every float array cast to `dtype`, in true float32: the oracle."""
        call = self.bind(*args, **kwargs)
        cast = {k: v.astype(dtype) if is_float_array(v) else v for k, v in call.arguments.items()}
        with jax.default_matmul_precision("highest"):
            return self.function(**cast)

    def case_inputs(self, case: Case, *, dtype: Any = "float32", seed: int = 0) -> dict[str, Any]:
        """Returns the keyword arguments of a case: random arrays of its dims, its made arguments and its options."""
        rng = np.random.default_rng([seed, *case.name.encode()])
        arguments: dict[str, Any] = dict(case.options)
        for p in self.parameters.values():
            if p.name in case.make:
                value = case.make[p.name](rng, case.dims)
                arguments[p.name] = jnp.asarray(value, dtype) if is_float_array(value) else value
            elif p.kind == "float" and (p.required or p.name in case.arrays):
                shape = case.shapes.get(p.name) or _case_shape(p, case.dims)
                arguments[p.name] = jnp.asarray(rng.standard_normal(shape), dtype)
            elif p.kind is not None and (p.required or p.name in case.arrays):
                raise TypeError(f"{self.name}, case {case.name}: say how to make {p.name!r}")
        return arguments

    def __repr__(self) -> str:
        return f"Op({self.name}: {', '.join(self.backends)})"


def _case_shape(p: Any, dims: Mapping[str, Any]) -> tuple[int, ...]:
    shape: list[int] = []
    for d in p.dims:
        if d.variadic:
            shape.extend(dims.get(d.name, ()))
        else:
            shape.append(d.size if d.size is not None else dims[d.name] + d.offset)
    return tuple(shape)


def _static(op: Op, call: Call) -> tuple[tuple[str, Any], ...]:
    static = call.static()
    for name, value in static:
        try:
            hash(value)
        except TypeError:
            raise ValueError(f"{op.name}: argument {name!r} must be hashable (use a tuple), got {value!r}") from None
    return static
