"""The contract of an operation, its backends, and the call that dispatches between them.

An operation is written as a plain `jnp` function, which is its signature, specification and oracle, and wrapped in
`Op`. Other files in its folder add backends with `op.register(forward, backward, ...)`; a backend only has to implement
these two functions on arrays. README.md in this folder shows how different kinds of operations fit.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernels.framework import execute, measured, select, tuning
from kernels.framework.backend import Backend, Case, Choice, Plan, case_inputs, make_backend, missing, not_installed
from kernels.framework.binding import ARRAYS, Call, bind, is_a, is_array, is_float_array, resolve_dims
from kernels.framework.declaration import output_dims, parameters_of, saved_dims
from kernels.framework.execute import Saved
from kernels.framework.interpret import interpreting
from kernels.framework.metadata import check_metadata
from kernels.framework.options import of_sizes
from kernels.framework.padding import Padding, of_contract
from kernels.framework.platforms import DEVICE_OF_PLATFORM, PLATFORMS, Unsupported
from kernels.framework.registry import Platform
from kernels.framework.work import Work

__all__ = ["Backend", "Call", "Case", "Op", "Saved", "Unsupported"]

_MOST_PROGRAMS = 4096


class Op:
    """An operation: its contract, and the one way to call it on any backend.

    Args:
      function: the contract, plain `jnp` with jaxtyping dims; returns all outputs. It is the oracle.
      outputs: a name for each output.
      title: what refusals call it, where users know it as a part of another operation. Default: the function's name.
      residuals: the outputs that a backward needs. They are part of the contract, so the forward of one backend can be
        followed by the backward of another. The inputs are always available to a backward.
      extra_residuals: function of the contract's parameters -> name -> array: additional residuals, computed only under
        differentiation. It specifies what backends register as `forward_with_residuals`, and is its oracle.
      features: feature name -> predicate(call), for requirements that the options alone do not express. A backend lists
        the features it supports. Optional parameters need no feature: a backend supports those that its functions name.
      no_gradient: float arguments without a gradient, such as scales and quantised weights. All other floats have one,
        including each leaf of a pytree.
      local_dims: dims that can be split over devices without communication.
      sum_dims: dims that every output is a sum over: if split, each device computes a partial sum.
      tied_dims: pairs of dims that must be split alike, such as (query heads, key heads); the second may be 1.
      together: whether those of the first that one of the second serves decide together: no split where the second is 1.
      see_also: dim -> the function of `ejdist` that supports splitting it, because it communicates.
      offset_of: integer argument -> dim: the argument is relative to a device's first entry of that dim.
      ordered: whether the order of tokens along T or S matters, as in a recurrence; or a function of the call. Required
        for every operation with a T or S that is neither local nor summed over (ordered.py).
      weights: arguments that are model parameters. They may be stored split over any dim, and are gathered before use.
      same_dtype: float arguments that must have the same dtype.
      priority: names of the possible backend files, fastest first; applies where there are no measurements.
      autotune_key: call -> a key for calls of similar size, for which one backend is fastest on a kind of device.
        Measurements under that key take precedence over `priority` (measured.py). None: the call has no key.
      backward_inputs: (residuals, cotangents) -> what a backward receives, both dicts; by default all of both, with
        zeros for the cotangents of unused outputs. The function itself gets no entry for an unused output.
      padding: where segment ids are negative, and which arguments must be zeroed there before a backend sees them,
        because 0 times NaN would spread to other tokens (padding.py). None: no guarantee.
      config: the class of this operation's configurations.
      cases: shapes for tests, benchmarks and tuning.
      work: call -> (forward Work, backward Work), the minimum to compute and move (work.py). None: not counted.

    Raises:
      TypeError: the contract cannot be parsed, or an argument does not fit it.
    """

    def __init__(
        self,
        function: Callable,
        *,
        outputs: tuple[str, ...] = ("out",),
        title: str | None = None,
        residuals: tuple[str, ...] = (),
        extra_residuals: Callable | None = None,
        features: Mapping[str, Callable[[Call], bool]] | None = None,
        no_gradient: Iterable[str] = (),
        local_dims: Iterable[str] = (),
        sum_dims: Iterable[str] = (),
        tied_dims: tuple[tuple[str, str], ...] = (),
        together: bool = False,
        see_also: Mapping[str, str] | None = None,
        offset_of: Mapping[str, str] | None = None,
        ordered: bool | Callable[[Call], bool] | None = None,
        weights: tuple[str, ...] = (),
        same_dtype: tuple[str, ...] = (),
        priority: tuple[str, ...] = ("triton_gpu", "pallas_tpu", "xla"),
        autotune_key: Callable[[Call], str | None] | None = None,
        backward_inputs: Callable[[dict, dict], dict] | None = None,
        padding: Padding | None = None,
        config: type | None = None,
        cases: tuple[Case, ...] = (),
        work: Callable[[Call], tuple[Work, Work]] | None = None,
    ):
        self.name, self.outputs, self.residuals = function.__name__, outputs, residuals
        self.parameters, self.output_dims = parameters_of(function), output_dims(function, len(outputs))
        self.title, self.extra_residuals, self.padding = title or self.name, extra_residuals, padding
        self.saved_dims = saved_dims(outputs, self.output_dims)
        self.function = of_contract(self, function)
        self.features, self.no_gradient = dict(features or {}), tuple(no_gradient)
        self.local_dims, self.sum_dims = frozenset(local_dims), frozenset(sum_dims)
        self.tied_dims, self.together = tied_dims, together
        self.see_also, self.offset_of, self.weights = dict(see_also or {}), dict(offset_of or {}), weights
        self.same_dtype, self.priority, self.autotune_key, self.ordered = same_dtype, priority, autotune_key, ordered
        self.backward_inputs, self.config, self.cases, self.work = backward_inputs, config, cases, work
        self.package = function.__module__.rpartition(".")[0]
        self.__doc__ = function.__doc__
        self._backends: dict[str, Backend] = {}
        self._unavailable: dict[str, str] = {}
        self._loaded, self._loading = False, threading.RLock()
        self._programs: dict[Any, Callable] = {}
        check_metadata(self)

    # -- backends -----------------------------------------------------------------------------------------------------

    def register(
        self,
        forward: Callable,
        backward: Callable | None = None,
        *,
        forward_with_residuals: Callable | None = None,
        platforms: Iterable[str],
        dtypes: Iterable[str],
        features: Iterable[str] = (),
        rejects: Callable[[Call], str | None] | None = None,
        heuristic: Callable[[Call, str], Any] | None = None,
        candidates: Callable[[Call], Iterable[Any]] | None = None,
        symbolic: Iterable[str] = (),
        version: int = 1,
        name: str | None = None,
        keeps: Callable[[Call, Any], Mapping[str, jax.ShapeDtypeStruct]] | None = None,
    ) -> None:
        """Adds a backend, named after the file that defines `forward`.

        Args:
          forward, backward: functions that name the contract's parameters that they support; a call that uses another
            is refused. `backward` takes `saved` first and returns name -> gradient. Either may also name `cfg`.
          forward_with_residuals: the forward under differentiation, if the contract has `extra_residuals` or this backend
            `keeps` arrays: takes what `forward` takes and returns (outputs, name -> array); `backward` finds these in `saved`.
          keeps: (call, configuration) -> name -> shape and dtype of arrays, batch first, that its forward keeps for its own
            backward alone. `backward` must do without them too: after another forward they are not in `saved`.
          platforms: platforms that it can be lowered for: cpu, cuda, rocm, tpu.
          features: those of the contract's `features` that it supports.
          rejects: call -> why it cannot run that call, or None.
          heuristic: (call, platform being lowered for) -> configuration. candidates: call -> those to tune over.
          symbolic: dims whose size may be unknown at compile time.
          version: increment it to invalidate tuned configurations after a change of the code.

        Raises:
          TypeError: a function or another argument does not fit the contract.
        """
        strange = set(features) - set(self.features)
        if strange:
            raise TypeError(f"{self.name}: unknown features {sorted(strange)}; there are {', '.join(self.features)}")
        metadata = {"platforms": platforms, "dtypes": dtypes, "features": features, "symbolic": symbolic}
        metadata |= {"rejects": rejects, "heuristic": heuristic, "candidates": candidates}
        metadata |= {"version": version, "keeps": keeps}
        backend = make_backend(self, forward, backward, forward_with_residuals, name, metadata)
        self._backends[backend.name] = backend
        self._programs.clear()

    @property
    def backends(self) -> dict[str, Backend]:
        """The available backends by name, fastest first. Backend files are imported on first use.

        Raises:
          ImportError: a backend's file cannot be imported; raised on every use. A toolchain that is not installed only
            makes its backends unavailable.
        """
        if not self._loaded:
            with self._loading:
                for stem in self.priority:
                    self._load(stem)
                self._loaded = True
        return {n: self._backends[n] for n in (*self.priority, *self._backends) if n in self._backends}

    def unavailable(self) -> dict[str, str]:
        """Returns backend -> what to install, for backends whose toolchain is missing or too old."""
        return dict(self._unavailable) if self.backends else {}

    def _load(self, stem: str) -> None:
        module_name = f"{self.package}.{stem}"
        if not self.package or importlib.util.find_spec(module_name) is None:
            return
        try:
            importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            reason = not_installed(error)
            if reason is None:
                raise
            sys.modules.pop(module_name, None)
            self._unavailable[stem] = reason
        except Exception as error:
            raise ImportError(
                f"{self.name}: the backend {stem} cannot be imported ({type(error).__name__}: {error}); "
                "repair the installation of its toolchain, or uninstall it"
            ) from error

    @property
    def options(self) -> tuple[str, ...]:
        """Names of the optional parameters."""
        return tuple(p.name for p in self.parameters.values() if not p.required)

    def used_options(self, call: Call) -> list[str]:
        """Returns the optional parameters for which a call passes a value other than the default."""
        used = []
        for name in self.options:
            value, default = call.arguments[name], self.parameters[name].default
            if not (value is default or (not is_array(value) and type(value) is type(default) and value == default)):
                used.append(name)
        return used

    def used_features(self, call: Call) -> list[str]:
        """Returns the names of the features that a call needs."""
        return [name for name, predicate in self.features.items() if predicate(call)]

    # -- one call ---------------------------------------------------------------------------------------------------

    def bind(self, *args: Any, **kwargs: Any) -> Call:
        """Returns the checked call. Raises ValueError naming the argument, the dim and the remedy."""
        arguments = bind(self.name, self.parameters, args, kwargs)
        dims = resolve_dims(self.name, self.parameters, arguments)
        if wrong := of_sizes(arguments, dims):
            raise ValueError(f"{self.name}: {wrong}")
        floats = {k: v for k, v in arguments.items() if isinstance(v, ARRAYS) and is_a(v.dtype, np.floating)}
        dtype = str(next(iter(floats.values())).dtype) if floats else ""
        alike = [n for n in self.same_dtype if n in floats]
        first = alike[0] if alike else ""
        for name in alike[1:]:
            if floats[name].dtype != floats[first].dtype:
                raise ValueError(
                    f"{self.name}: argument {name!r} is {floats[name].dtype} but {first!r} is {floats[first].dtype}; "
                    f"cast one of them, for example {name}.astype({first}.dtype)"
                )
        return Call(self.name, arguments, dims, dtype)

    def choose(
        self, call: Call, toolchain: str | None, *, device: str = "any", differentiated: bool = False
    ) -> dict[str, Backend | str]:
        """Returns, for each platform, the backend that runs, or the reason why none does.

        Args:
          toolchain: a toolchain or backend name, to consider nothing else; None for any.
          device: "cpu", "gpu" or "tpu" to consider only backends for that kind of device.

        Raises:
          ValueError: `toolchain` or `device` is unknown.
          Unsupported: no backend can run the call; the message lists every backend's reason.
        """
        choices = self._choices(call, toolchain, device, differentiated)
        return {c.platform: c.reason if c.backend is None else c.backend for c in choices}

    def _choices(self, call: Call, toolchain: str | None, device: str, differentiated: bool) -> list[Choice]:
        """Returns the same as `choose`, with the measurement behind each choice, and without configurations."""
        backends = self.backends
        pool = [b for b in backends.values() if toolchain in (None, b.name, b.toolchain)]
        if not pool and toolchain is not None:
            self._no_such_backend(toolchain)
        if device not in ("any", *DEVICE_OF_PLATFORM.values()):
            raise ValueError(f"{self.title}: cfg.backend = {device!r} is unknown; use any, cpu, gpu or tpu")
        reasons = {b.name: b.refuses(self, call, differentiated) for b in pool}
        for b in pool:
            if device != "any" and device not in {DEVICE_OF_PLATFORM[p] for p in b.platforms}:
                reasons[b.name] = f"it is not for cfg.backend = {device!r}"
        capable = [b for b in pool if reasons[b.name] is None]
        refused = [*reasons.items(), *self._unavailable.items()]
        refusals = "; ".join(f"{name}: {reason}" for name, reason in refused if reason)
        if not capable:
            others = [b.name for b in backends.values() if b not in pool and not b.refuses(self, call, differentiated)]
            hint = f"; platform={others[0]!r} can" if others else ""
            raise Unsupported(f"{self.title} has no backend for this call: {refusals}{hint}")
        if toolchain is not None and interpreting():
            return [Choice(p, capable[0], None, "") for p in PLATFORMS]
        supported = ", ".join(f"{b.name} ({', '.join(sorted(b.platforms))})" for b in capable)
        with_platform = f" with platform={toolchain!r}" if toolchain else ""
        reason = f"the backends that support this call are {supported}" + (f"; {refusals}" if refusals else "")
        choices = []
        for p in PLATFORMS:
            fitting, why = [b for b in capable if p in b.platforms], ""
            if toolchain is None:  # a backend requested by name is not ranked
                fitting, why = measured.ranked(self, call, p, fitting, differentiated)
            refusal = f"{self.title} cannot be compiled for {p}{with_platform}: {reason}"
            missing_toolchain = missing(self, fitting[0], p) if fitting and toolchain is None else ""
            choice = Choice(p, fitting[0], None, why, missing_toolchain) if fitting else Choice(p, None, None, refusal)
            choices.append(choice)
        return choices

    def _no_such_backend(self, toolchain: str) -> None:
        names = dict.fromkeys([*self.backends, *(b.toolchain for b in self.backends.values())])
        stems = {stem for stem in self._unavailable if toolchain in (stem, stem.split("_")[0])}
        if stems:
            raise Unsupported(f"{self.title} on {toolchain}: " + "; ".join(self._unavailable[s] for s in sorted(stems)))
        if toolchain in Platform or toolchain in self.priority:
            raise Unsupported(f"{self.title} has no {toolchain} backend; it has {', '.join(self.backends)}")
        raise ValueError(
            f"{self.title}: argument 'platform' = {toolchain!r} is unknown; use None or one of {', '.join(names)}"
        )

    def plan(self, call: Call, toolchain: str | None, cfg: Any, *, differentiated: bool) -> Plan:
        """Returns the backend and the configuration for each platform."""
        self.check_asked(toolchain, cfg)
        requested = getattr(cfg, "platform", "auto") if toolchain is None else toolchain
        toolchain = None if requested == "auto" else requested
        choices = []
        for choice in self._choices(call, toolchain, getattr(cfg, "backend", "any"), differentiated):
            if choice.backend is not None:
                request = select.Request(self, choice.backend, call, choice.platform, cfg, tuning.tune)
                choice = dataclasses.replace(choice, cfg=select.select(request))
            choices.append(choice)
        plan = Plan(tuple(choices), toolchain, cfg)
        return plan.keeping(call) if differentiated else plan

    def check_asked(self, toolchain: Any, cfg: Any) -> None:
        """Raises ValueError if `platform` or `cfg` has the wrong type."""
        if toolchain is not None and not isinstance(toolchain, str):
            raise ValueError(f"{self.title}: argument 'platform' must be None or a name, got {toolchain!r}")
        if cfg is not None and self.config is None:
            raise ValueError(f"{self.title}: argument 'cfg' = {cfg!r}: this operation has no configurations; omit it")
        if cfg is not None and self.config is not None and not isinstance(cfg, self.config):
            raise ValueError(f"{self.title}: argument 'cfg' must be a {self.config.__name__}, got {type(cfg).__name__}")

    def __call__(self, *args: Any, platform: str | None = None, cfg: Any = None, **kwargs: Any) -> Any:
        """Returns all outputs of the contract: a tuple, or the bare array if there is only one.

        Args:
          platform: None for the fastest backend for each platform; or a toolchain ("xla", "triton", "pallas") or
            backend ("triton_gpu") to use, with no fallback.
          cfg: a configuration for this call; fields left None are chosen.

        Raises:
          ValueError: the call is invalid. Unsupported: no backend, or not the requested one, can run it.
        """
        return self.run(self.bind(*args, **kwargs), platform=platform, cfg=cfg)

    def run(self, call: Call, *, platform: str | None = None, cfg: Any = None) -> Any:
        """Returns the outputs of a bound call, as `__call__`."""

        def make() -> Callable:
            primal = self.plan(call, platform, cfg, differentiated=False)
            try:
                gradient, refusal = self.plan(call, platform, cfg, differentiated=True), ""
            except Unsupported as error:  # raised only if the call is differentiated
                gradient, refusal = None, str(error)
            return execute.compiled(self, call, primal, gradient, refusal)

        return self.program("forward", call, platform, cfg, make)(call.traced())

    def backward(
        self, saved: Mapping[str, Any], *args: Any, platform: str | None = None, cfg: Any = None, **kwargs: Any
    ) -> dict[str, Any]:
        """Returns name -> gradient for every argument that has one, given what `backward_inputs` returns in `saved`:
        for example a `d_out`, and an `lse` and `delta` from a ring over more keys than this call sees."""
        call = self.bind(*args, **kwargs)

        def make() -> Callable:
            return execute.compiled_backward(self, call, self.plan(call, platform, cfg, differentiated=True))

        return self.program("backward", call, platform, cfg, make)(dict(saved), call.traced())

    def program(self, direction: str, call: Call, platform: Any, cfg: Any, make: Callable[[], Callable]) -> Callable:
        """Returns the jitted function for calls of one kind. The backends and configurations chosen for the first such
        call are reused until something that the choice depends on changes."""
        self.check_asked(platform, cfg)
        key = (direction, call.program_key(), platform, cfg, interpreting())
        program = self._programs.get((*key, select.state(call)))
        if program is None:
            program = make()
            if len(self._programs) >= _MOST_PROGRAMS:
                self._programs.clear()
            # Tuning during the choice may have changed the state.
            self._programs[(*key, select.state(call))] = program
        return program

    def reference(self, *args: Any, dtype: Any = jnp.float32, **kwargs: Any) -> Any:
        """Returns the contract evaluated with every float array cast to `dtype`, in true float32: the oracle."""
        call = self.bind(*args, **kwargs)
        cast = {k: v.astype(dtype) if is_float_array(v) else v for k, v in call.arguments.items()}
        with jax.default_matmul_precision("highest"):
            return self.function(**cast)

    def case_inputs(
        self, case: Case, *, dtype: Any = "float32", seed: int = 0, shapes_only: bool = False
    ) -> dict[str, Any]:
        """Returns the keyword arguments of a case: random arrays (or only their shapes), those in `make`, its options."""
        return case_inputs(self, case, dtype=dtype, seed=seed, shapes_only=shapes_only)

    def __repr__(self) -> str:
        return f"Op({self.name}: {', '.join(self.backends)})"
