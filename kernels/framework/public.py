"""Public functions. Each is declared once, in its operation's folder.

The declaration produces the function in `kernels`, its sharded counterpart in `ejdist`, the module classes of both, the
registry entries, and the lists of names.
"""

from __future__ import annotations

import functools
import inspect
import textwrap
import typing
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import jax

from kernels.framework.binding import Call
from kernels.framework.contract import Op
from kernels.framework.executor import Module, module_class
from kernels.framework.options import checked

_CALL_DOC = """
    Every operation also takes:
      platform: None for the fastest backend on the device this is compiled for; "xla", "triton", "pallas", or the
        name of a backend, to use that one with no fallback.
      cfg: tunables for this call; fields left None are chosen automatically.
"""


@dataclass(frozen=True)
class Prepared:
    """A public function's arguments, converted to a call of its operation.

    Attributes:
      call: the bound call: arguments are checked and in the form that the contract takes.
      returns: names of the outputs to return unchanged, as a tuple; a single string returns that output alone.
      finish: function of all outputs of the contract that computes the result; None returns the outputs unchanged.
      dims: dims of what `finish` returns, or of each result if it returns several; their sharding is derived from
        these.
      op: the operation to call, if it is not the first one the function was declared for.
      cuts: name of the argument that holds cumulative sequence lengths, [0, n1, n1 + n2, ...], if one was given.
      sums: extra arrays passed to `finish` after the outputs. Like the outputs they are partial sums over the
        operation's `sum_dims`.
    """

    call: Call
    returns: str | tuple[str, ...] = "out"
    finish: Callable[..., Any] | None = None
    dims: tuple[str, ...] | tuple[tuple[str, ...], ...] = ()
    op: Op | None = None
    cuts: str = ""
    sums: tuple[jax.Array, ...] = ()

    def result(self, op: Op, outputs: Any) -> Any:
        """Returns the caller's result, given all outputs of the contract."""
        every = outputs if len(op.outputs) > 1 else (outputs,)
        if self.finish is not None:
            return self.finish(*every, *self.sums)
        by_name = dict(zip(op.outputs, every, strict=True))
        return by_name[self.returns] if isinstance(self.returns, str) else tuple(by_name[n] for n in self.returns)


class PublicFunction:
    """A public function: converts the arguments, calls the operation, and returns the result."""

    def __init__(
        self, ops: tuple[Op, ...], prepare: Callable[..., Prepared], signature: inspect.Signature, module: str
    ) -> None:
        functools.update_wrapper(self, prepare)
        self.__name__: str = prepare.__name__
        self.op, self.ops, self.prepare = ops[0], ops, checked(prepare)
        self.Module: type[Module] = module_class(module, self)
        extra = [inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=None) for n in ("platform", "cfg")]
        self.__signature__ = signature.replace(parameters=[*signature.parameters.values(), *extra])
        head, mark, examples = (prepare.__doc__ or "").partition(">>>")
        self.__doc__ = head.rstrip() + "\n" + _CALL_DOC + ("\n    " + mark + examples if mark else "")
        self.Module.__doc__ = self.__doc__

    def __call__(self, *args: Any, platform: str | None = None, cfg: Any = None, **kwargs: Any) -> Any:
        prepared = self.prepare(*args, **kwargs)
        op = prepared.op or self.op
        return prepared.result(op, op.run(prepared.call, platform=platform, cfg=cfg))

    def __repr__(self) -> str:
        return f"<public function {self.__name__} of {self.op.name}>"


_declared: dict[str, PublicFunction] = {}


def public_functions() -> dict[str, PublicFunction]:
    """Returns all declared public functions, by name."""
    return dict(_declared)


def _class_name(name: str) -> str:
    return "".join(part.upper() if part in ("rms", "mlp", "gla", "mla") else part.title() for part in name.split("_"))


def public(*ops: Op, module: str = "") -> Callable[[Callable[..., Prepared]], PublicFunction]:
    """Returns a decorator that declares a public function of an operation.

    The decorated function has the public signature and docstring, and returns a `Prepared`: the call of the operation
    that its arguments mean. Arguments that several functions share can be declared as a TypedDict, `**more:
    Unpack[Common]`. They are expanded in the signature, with default None, and the TypedDict's docstring is appended to
    the documentation.

    Args:
      ops: the operation, and any others that the function may call instead.
      module: name of the module class; by default the function's name in camel case.
    """

    def declare(prepare: Callable[..., Prepared]) -> PublicFunction:
        name = prepare.__name__
        prepare, signature = _written_out(prepare)
        function = PublicFunction(ops, prepare, signature, module or _class_name(name))
        _declared[name] = function
        return function

    return declare


def _written_out(prepare: Callable[..., Prepared]) -> tuple[Callable[..., Prepared], inspect.Signature]:
    """Returns the function and its signature, with `**more: Unpack[Common]` expanded in both signature and
    docstring."""
    signature = inspect.signature(prepare)
    *plain, last = signature.parameters.values() or (None,)
    if last is None or last.kind is not last.VAR_KEYWORD:
        return prepare, signature
    (common,) = typing.get_args(typing.get_type_hints(prepare)[last.name])
    plain += [inspect.Parameter(n, last.KEYWORD_ONLY, default=None, annotation=Any) for n in common.__annotations__]
    signature = signature.replace(parameters=plain)

    @functools.wraps(prepare)
    def checked(*args: Any, **kwargs: Any) -> Prepared:
        if strange := kwargs.keys() - signature.parameters.keys():
            raise TypeError(f"{prepare.__name__}() got an unexpected keyword argument {min(strange)!r}")
        return prepare(*args, **kwargs)

    head, mark, examples = (prepare.__doc__ or "").partition(">>>")
    _, _, text = inspect.cleandoc(common.__doc__).partition("\n\n")  # the first line describes the TypedDict itself
    checked.__doc__ = f"{head.rstrip()}\n\n{textwrap.indent(text, '    ')}\n\n    {mark}{examples}"
    return checked, signature


def public_as_declared(op: Op, doc: str, *, returns: str | Iterable[str] = "out", module: str = "") -> PublicFunction:
    """Declares and returns a public function with the contract's own name and parameters.

    Args:
      doc: its docstring.
      returns: the outputs that it returns.
    """
    handed = returns if isinstance(returns, str) else tuple(returns)
    signature = inspect.signature(op.function)

    def prepare(*args: Any, **kwargs: Any) -> Prepared:
        return Prepared(op.bind(*args, **kwargs), handed)

    for name in ("__name__", "__qualname__", "__module__"):
        setattr(prepare, name, getattr(op.function, name))
    prepare.__doc__ = doc
    function = PublicFunction((op,), prepare, signature, module or _class_name(op.name))
    _declared[op.name] = function
    return function
