"""Public functions: each declared once, in its operation's folder.

From a declaration follow the function of `kernels`, the sharded one of `ejdist`, the module class of both, the rows of the
registry, and the lists of names.
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
    And, as every operation:
      platform: None for the fastest backend of what this is compiled for; or "xla", "triton", "pallas", or the name of a
        backend, which never falls back.
      cfg: tunables for this call; what is left out is chosen.
"""


@dataclass(frozen=True)
class Prepared:
    """What a public function makes of its arguments.

    Attributes:
      call: of the operation, bound: arguments are checked and in the contract's form.
      returns: names of the outputs that are handed back as they are; a single name: not as a tuple.
      finish: all outputs of the contract -> the result, where that is more than handing back.
      dims: of the result of `finish`, or of each result where it returns several: where they lie on a mesh follows from them.
      op: the operation, where it is not the first that the function was declared for.
      cuts: the argument, if one was given, that cuts a whole sequence in its own order, such as [0, n1, n1 + n2, ...].
      sums: arrays that `finish` takes after the outputs: like these they are sums over the dims that the operation sums over.
    """

    call: Call
    returns: str | tuple[str, ...] = "out"
    finish: Callable[..., Any] | None = None
    dims: tuple[str, ...] | tuple[tuple[str, ...], ...] = ()
    op: Op | None = None
    cuts: str = ""
    sums: tuple[jax.Array, ...] = ()

    def result(self, op: Op, outputs: Any) -> Any:
        """Returns what the caller gets, from all outputs of the contract."""
        every = outputs if len(op.outputs) > 1 else (outputs,)
        if self.finish is not None:
            return self.finish(*every, *self.sums)
        by_name = dict(zip(op.outputs, every, strict=True))
        return by_name[self.returns] if isinstance(self.returns, str) else tuple(by_name[n] for n in self.returns)


class PublicFunction:
    """A public function: calling it prepares the arguments, calls the operation, and hands back the result."""

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
    """Returns every public function that has been declared, by name."""
    return dict(_declared)


def _class_name(name: str) -> str:
    return "".join(part.upper() if part in ("rms", "mlp", "gla", "mla") else part.title() for part in name.split("_"))


def public(*ops: Op, module: str = "") -> Callable[[Callable[..., Prepared]], PublicFunction]:
    """Returns a decorator that declares a public function of an operation.

    What it decorates has the public signature and documentation, and returns a `Prepared`: the call of the operation that
    its arguments mean. Arguments that a family of functions has in common may be a TypedDict, `**more: Unpack[Common]`: they
    are written out in the signature, None by default, and the TypedDict's docstring in the documentation.

    Args:
      ops: the operation, and any other that it may call instead.
      module: name of the module class; default: the function's in camel case.
    """

    def declare(prepare: Callable[..., Prepared]) -> PublicFunction:
        name = prepare.__name__
        prepare, signature = _written_out(prepare)
        function = PublicFunction(ops, prepare, signature, module or _class_name(name))
        _declared[name] = function
        return function

    return declare


def _written_out(prepare: Callable[..., Prepared]) -> tuple[Callable[..., Prepared], inspect.Signature]:
    """Returns the function and its signature, with the arguments and documentation that `**more: Unpack[Common]` stands for."""
    signature = inspect.signature(prepare)
    *own, last = signature.parameters.values() or (None,)
    if last is None or last.kind is not last.VAR_KEYWORD:
        return prepare, signature
    (common,) = typing.get_args(typing.get_type_hints(prepare)[last.name])
    own += [inspect.Parameter(n, last.KEYWORD_ONLY, default=None, annotation=Any) for n in common.__annotations__]
    signature = signature.replace(parameters=own)

    @functools.wraps(prepare)
    def checked(*args: Any, **kwargs: Any) -> Prepared:
        if strange := kwargs.keys() - signature.parameters.keys():
            raise TypeError(f"{prepare.__name__}() got an unexpected keyword argument {min(strange)!r}")
        return prepare(*args, **kwargs)

    head, mark, examples = (prepare.__doc__ or "").partition(">>>")
    _, _, said = inspect.cleandoc(common.__doc__).partition("\n\n")  # its first line is of the TypedDict itself
    checked.__doc__ = f"{head.rstrip()}\n\n{textwrap.indent(said, '    ')}\n\n    {mark}{examples}"
    return checked, signature


def public_as_declared(op: Op, doc: str, *, returns: str | Iterable[str] = "out", module: str = "") -> PublicFunction:
    """Declares a public function that has the contract's own name and parameters, and returns it.

    Args:
      doc: its documentation.
      returns: the outputs that it hands back.
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
