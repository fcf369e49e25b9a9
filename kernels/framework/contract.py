"""The contract of an operation, its backends, and the call that joins them.

An operation is stated as a plain `jnp` function (signature, meaning and oracle in one) and wrapped in `Op`. Files beside it
add backends with `op.register(forward, backward, ...)`. All that a backend must write is the two directions on arrays.
See README.md in this folder for how operations of every shape fit.
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
from kernels.framework.facts import check_facts
from kernels.framework.interpret import interpreting
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
      residuals: the outputs that a backward needs. They are part of the contract, so the forward of one backend may be
        followed by the backward of another. The inputs are always available to a backward.
      kept: function of the contract's parameters -> name -> array: additional residuals, computed only under
        differentiation. It is the meaning and the oracle of what backends
        register as `keeping`.
      features: feature name -> predicate(call), for what the options alone do not tell. A backend names those it supports;
        an optional parameter needs no feature, since a backend supports what its functions name.
      no_gradient: float arguments without a gradient, as scales and quantised weights. All other floats have one, those
        inside a pytree too, each leaf by itself.
      local_dims: dims that may be split over devices without communication.
      sum_dims: dims that every output is a sum over: split, each device has a part of the sum.
      tied_dims: pairs of dims that are split alike or not at all, (query heads, key heads): the second may also be 1.
      elsewhere: dim -> the function of `ejdist` that can have it split, because it communicates.
      offset_of: integer argument -> dim: the argument counts from the first entry of that dim that a device has.
      ordered: whether tokens depend on the order in which they lie along T or S, as in a recurrence; or a function of the call
        that tells. Stated by every operation with a T or S that is neither local nor summed over (ordered.py).
      weights: arguments that are parameters of a model. They may be stored split over any dim, and are gathered.
      same_dtype: float arguments that must agree in dtype.
      order: names of backend files that may exist, fastest first, where nothing was measured.
      classes: call -> the class of calls that it belongs to, among which one backend is fastest on a kind of device: what was
        measured for it goes before `order` (measured.py); None for a call of no class.
      backward_inputs: (residuals, cotangents) -> what a backward receives, both dicts; default: all of both, zero for outputs
        that nothing depends on. Of these it is given no cotangent itself.
      padding: where segment ids are negative, and which arguments backends are given with zeros there, because 0 times NaN
        would reach others (padding.py). None: nothing is promised here.
      config: the class of this operation's configurations.
      cases: shapes for tests, benchmarks and tuning.
      work: call -> (Work of the forward, Work of the backward), see work.py: what each direction must at least compute and
        move; None where nobody has counted it.

    Raises:
      TypeError: the contract cannot be read, or what is said of it does not fit it.
    """

    def __init__(
        self,
        function: Callable,
        *,
        outputs: tuple[str, ...] = ("out",),
        residuals: tuple[str, ...] = (),
        kept: Callable | None = None,
        features: Mapping[str, Callable[[Call], bool]] | None = None,
        no_gradient: Iterable[str] = (),
        local_dims: Iterable[str] = (),
        sum_dims: Iterable[str] = (),
        tied_dims: tuple[tuple[str, str], ...] = (),
        elsewhere: Mapping[str, str] | None = None,
        offset_of: Mapping[str, str] | None = None,
        ordered: bool | Callable[[Call], bool] | None = None,
        weights: tuple[str, ...] = (),
        same_dtype: tuple[str, ...] = (),
        order: tuple[str, ...] = ("triton_gpu", "pallas_tpu", "xla"),
        classes: Callable[[Call], str | None] | None = None,
        backward_inputs: Callable[[dict, dict], dict] | None = None,
        padding: Padding | None = None,
        config: type | None = None,
        cases: tuple[Case, ...] = (),
        work: Callable[[Call], tuple[Work, Work]] | None = None,
    ):
        self.name, self.outputs, self.residuals = function.__name__, outputs, residuals
        self.parameters, self.output_dims = parameters_of(function), output_dims(function, len(outputs))
        self.kept, self.padding, self.saved_dims = kept, padding, saved_dims(outputs, self.output_dims)
        self.function = of_contract(self, function)
        self.features, self.no_gradient = dict(features or {}), tuple(no_gradient)
        self.local_dims, self.sum_dims, self.tied_dims = frozenset(local_dims), frozenset(sum_dims), tied_dims
        self.elsewhere, self.offset_of, self.weights = dict(elsewhere or {}), dict(offset_of or {}), weights
        self.same_dtype, self.order, self.classes, self.ordered = same_dtype, order, classes, ordered
        self.backward_inputs, self.config, self.cases, self.work = backward_inputs, config, cases, work
        self.package = function.__module__.rpartition(".")[0]
        self.__doc__ = function.__doc__
        self._backends: dict[str, Backend] = {}
        self._unavailable: dict[str, str] = {}
        self._loaded = False
        self._loading = threading.RLock()
        self._programs: dict[Any, Callable] = {}
        check_facts(self)

    # -- what there is ----------------------------------------------------------------------------------------------

    def register(
        self,
        forward: Callable,
        backward: Callable | None = None,
        *,
        keeping: Callable | None = None,
        platforms: Iterable[str],
        dtypes: Iterable[str],
        features: Iterable[str] = (),
        rejects: Callable[[Call], str | None] | None = None,
        heuristic: Callable[[Call, str], Any] | None = None,
        candidates: Callable[[Call], Iterable[Any]] | None = None,
        symbolic: Iterable[str] = (),
        version: int = 1,
        name: str | None = None,
    ) -> None:
        """Adds a backend; its name is that of the file it stands in.

        Args:
          forward, backward: functions of the contract's parameters, by name: those that they name are supported, and a call
            that uses another is refused. `backward` takes `saved` before them and returns name -> gradient. Either may
            name `cfg`.
          keeping: the forward of a differentiated call, where the contract has `kept`: takes what `forward` takes and returns
            (outputs, name -> array of what is kept), which `backward` finds in `saved`.
          platforms: that it can be lowered for: cpu, cuda, rocm, tpu.
          features: of the contract's `features`, those that it supports.
          rejects: call -> why it cannot run that call, or None.
          heuristic: (call, platform that is lowered for) -> configuration. candidates: call -> configurations to tune over.
          symbolic: dims whose size need not be known when it is compiled.
          version: raised when configurations tuned for older code no longer apply.

        Raises:
          TypeError: a function or fact does not fit the contract.
        """
        strange = set(features) - set(self.features)
        if strange:
            raise TypeError(f"{self.name}: unknown features {sorted(strange)}; there are {', '.join(self.features)}")
        facts = {"platforms": platforms, "dtypes": dtypes, "features": features, "symbolic": symbolic}
        facts |= {"rejects": rejects, "heuristic": heuristic, "candidates": candidates, "version": version}
        backend = make_backend(self, forward, backward, keeping, name, facts)
        self._backends[backend.name] = backend
        self._programs.clear()

    @property
    def backends(self) -> dict[str, Backend]:
        """The available backends by name, fastest first. Backend files are imported at the first use.

        Raises:
          ImportError: a backend's file cannot be imported, whenever it is needed; a toolchain that is not installed only
            makes its backends unavailable.
        """
        if not self._loaded:
            with self._loading:
                for stem in self.order:
                    self._load(stem)
                self._loaded = True
        return {n: self._backends[n] for n in (*self.order, *self._backends) if n in self._backends}

    def unavailable(self) -> dict[str, str]:
        """Returns the backends whose toolchain is missing or in a version that lacks what they need, with what to install."""
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
                f"{self.name}: the backend {stem} cannot be imported ({type(error).__name__}: {error}); mend the installation "
                "of its toolchain, or uninstall it"
            ) from error

    @property
    def options(self) -> tuple[str, ...]:
        """Names of the optional parameters."""
        return tuple(p.name for p in self.parameters.values() if not p.required)

    def used_options(self, call: Call) -> list[str]:
        """Returns the optional parameters that a call gives another value than the default."""
        used = []
        for name in self.options:
            value, default = call.arguments[name], self.parameters[name].default
            same = value is default or (not is_array(value) and type(value) is type(default) and value == default)
            if not same:
                used.append(name)
        return used

    def used_features(self, call: Call) -> list[str]:
        """Returns the names of the features that a call asks for."""
        return [name for name, predicate in self.features.items() if predicate(call)]

    # -- one call ---------------------------------------------------------------------------------------------------

    def bind(self, *args: Any, **kwargs: Any) -> Call:
        """Returns the call, checked. Raises ValueError naming the argument, the dim and the remedy."""
        arguments = bind(self.name, self.parameters, args, kwargs)
        dims = resolve_dims(self.name, self.parameters, arguments)
        if wrong := of_sizes(arguments, dims):
            raise ValueError(f"{self.name}: {wrong}")
        floats = {k: v for k, v in arguments.items() if isinstance(v, ARRAYS) and is_a(v.dtype, np.floating)}
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
        self, call: Call, toolchain: str | None, *, device: str = "any", differentiated: bool = False
    ) -> dict[str, Backend | str]:
        """Returns, for each platform that may be lowered for, the backend that runs or the reason why none does.

        Args:
          toolchain: a toolchain or backend name, which is then the only candidate; None for any.
          device: "cpu", "gpu" or "tpu" keeps only backends for that kind of device.

        Raises:
          ValueError: `toolchain` or `device` names nothing known.
          Unsupported: no backend can run the call; the message has every backend's reason.
        """
        choices = self._choices(call, toolchain, device, differentiated)
        return {c.platform: c.reason if c.backend is None else c.backend for c in choices}

    def _choices(self, call: Call, toolchain: str | None, device: str, differentiated: bool) -> list[Choice]:
        """Returns what `choose` does, with the measurements that decided; configurations are not chosen yet."""
        backends = self.backends
        pool = [b for b in backends.values() if toolchain in (None, b.name, b.toolchain)]
        if not pool and toolchain is not None:
            self._no_such_backend(toolchain)
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
            others = [b.name for b in backends.values() if b not in pool and not b.refuses(self, call, differentiated)]
            hint = f"; platform={others[0]!r} can" if others else ""
            raise Unsupported(f"{self.name} has no backend for this call: {said}{hint}")
        if toolchain is not None and interpreting():
            return [Choice(p, able[0], None, "") for p in PLATFORMS]
        where = ", ".join(f"{b.name} ({', '.join(sorted(b.platforms))})" for b in able)
        asked = f" with platform={toolchain!r}" if toolchain else ""
        cannot = f"the backends that support this call are {where}" + (f"; {said}" if said else "")
        choices = []
        for p in PLATFORMS:
            fit, why = [b for b in able if p in b.platforms], ""
            if toolchain is None:  # what is asked for by name is not ranked
                fit, why = measured.ranked(self, call, p, fit, differentiated)
            none = f"{self.name} cannot be compiled for {p}{asked}: {cannot}"
            lacks = missing(self, fit[0], p) if fit and toolchain is None else ""
            choices.append(Choice(p, fit[0], None, why, lacks) if fit else Choice(p, None, None, none))
        return choices

    def _no_such_backend(self, toolchain: str) -> None:
        known = dict.fromkeys([*self.backends, *(b.toolchain for b in self.backends.values())])
        stems = {stem for stem in self._unavailable if toolchain in (stem, stem.split("_")[0])}
        if stems:
            raise Unsupported(f"{self.name} on {toolchain}: " + "; ".join(self._unavailable[s] for s in sorted(stems)))
        if toolchain in Platform or toolchain in self.order:
            raise Unsupported(f"{self.name} has no {toolchain} backend; it has {', '.join(self.backends)}")
        raise ValueError(
            f"{self.name}: argument 'platform' = {toolchain!r} is unknown; use None or one of {', '.join(known)}"
        )

    def plan(self, call: Call, toolchain: str | None, cfg: Any, *, differentiated: bool) -> Plan:
        """Returns which backend runs on each platform, and with which configuration."""
        self.check_asked(toolchain, cfg)
        asked = getattr(cfg, "platform", "auto") if toolchain is None else toolchain
        toolchain = None if asked == "auto" else asked
        choices = []
        for choice in self._choices(call, toolchain, getattr(cfg, "backend", "any"), differentiated):
            if choice.backend is not None:
                request = select.Request(self, choice.backend, call, choice.platform, cfg, tuning.tune)
                choice = dataclasses.replace(choice, cfg=select.select(request))
            choices.append(choice)
        return Plan(tuple(choices), toolchain, cfg)

    def check_asked(self, toolchain: Any, cfg: Any) -> None:
        """Raises ValueError where what is asked for beside the call is of a type that says nothing."""
        if toolchain is not None and not isinstance(toolchain, str):
            raise ValueError(f"{self.name}: argument 'platform' must be None or a name, got {toolchain!r}")
        if cfg is not None and self.config is None:
            raise ValueError(
                f"{self.name}: argument 'cfg' = {cfg!r}: this operation has no configurations; leave it out"
            )
        if cfg is not None and self.config is not None and not isinstance(cfg, self.config):
            raise ValueError(f"{self.name}: argument 'cfg' must be a {self.config.__name__}, got {type(cfg).__name__}")

    def __call__(self, *args: Any, platform: str | None = None, cfg: Any = None, **kwargs: Any) -> Any:
        """Returns all outputs of the contract: a tuple, or the bare array when there is one.

        Args:
          platform: None for the fastest backend of whatever this is lowered for; or a toolchain ("xla", "triton",
            "pallas") or backend ("triton_gpu"), which never falls back.
          cfg: a configuration for this call; fields left None are chosen.

        Raises:
          ValueError: the call is wrong. Unsupported: no backend, or not the one asked for, can run it.
        """
        return self.run(self.bind(*args, **kwargs), platform=platform, cfg=cfg)

    def run(self, call: Call, *, platform: str | None = None, cfg: Any = None) -> Any:
        """Returns the outputs of a call that is bound already, as `__call__`."""

        def make() -> Callable:
            primal = self.plan(call, platform, cfg, differentiated=False)
            try:
                gradient, refusal = self.plan(call, platform, cfg, differentiated=True), ""
            except Unsupported as error:  # only a differentiated call needs a backward, so it is raised there
                gradient, refusal = None, str(error)
            return execute.compiled(self, call, primal, gradient, refusal)

        return self._program("forward", call, platform, cfg, make)(call.traced())

    def backward(
        self, saved: Mapping[str, Any], *args: Any, platform: str | None = None, cfg: Any = None, **kwargs: Any
    ) -> dict[str, Any]:
        """Returns name -> gradient for every argument that has one, from what is given in `saved`.

        `saved` holds what `backward_inputs` returns, for example a `d_out`, and an `lse` and `delta` that came from a
        ring over more keys than this call sees.
        """
        call = self.bind(*args, **kwargs)

        def make() -> Callable:
            return execute.compiled_backward(self, call, self.plan(call, platform, cfg, differentiated=True))

        return self._program("backward", call, platform, cfg, make)(dict(saved), call.traced())

    def _program(self, direction: str, call: Call, platform: Any, cfg: Any, make: Callable[[], Callable]) -> Callable:
        """Returns the jitted function of calls of one kind: the backends and configurations that were chosen for the first
        one hold for the next while nothing that decides the choice has changed."""
        self.check_asked(platform, cfg)
        asked = (direction, call.program_key(), platform, cfg, interpreting())
        found = self._programs.get((*asked, select.state(call)))
        if found is None:
            found = make()
            if len(self._programs) >= _MOST_PROGRAMS:
                self._programs.clear()
            # Choosing may itself have tuned, and so changed the state.
            self._programs[(*asked, select.state(call))] = found
        return found

    def reference(self, *args: Any, dtype: Any = jnp.float32, **kwargs: Any) -> Any:
        """Returns the contract evaluated with every float array cast to `dtype`, in true float32: the oracle."""
        call = self.bind(*args, **kwargs)
        cast = {k: v.astype(dtype) if is_float_array(v) else v for k, v in call.arguments.items()}
        with jax.default_matmul_precision("highest"):
            return self.function(**cast)

    def case_inputs(
        self, case: Case, *, dtype: Any = "float32", seed: int = 0, shapes_only: bool = False
    ) -> dict[str, Any]:
        """Returns the keyword arguments of a case: random arrays of its dims (with `shapes_only` their shapes and dtypes), its
        made arguments and its options."""
        return case_inputs(self, case, dtype=dtype, seed=seed, shapes_only=shapes_only)

    def __repr__(self) -> str:
        return f"Op({self.name}: {', '.join(self.backends)})"
