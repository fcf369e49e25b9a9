"""Options: arguments that are Python values, checked against the types that a signature declares.

Unchecked, a string instead of a number, a float as a count, or a NaN would surface as an error deep inside some
library, or not at all. The checks are derived from the annotations, so a new option needs only its type.
"""

from __future__ import annotations

import functools
import inspect
import math
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np
from jax.export import is_symbolic_dim

# An option has one meaning in every operation, as a dim does: name -> (description of valid values, predicate for
# numbers). Whether None or tuples are allowed is up to the operation.
# Options are used in float32 arithmetic, where 1e-50 underflows to 0 (division by zero) and 1e39 overflows to infinity.
_LEAST, _MOST = (float(x) for x in (np.finfo(np.float32).tiny, np.finfo(np.float32).max))
_POSITIVE = ("positive and representable in float32", lambda x: _LEAST <= x <= _MOST)
_COUNT = ("at least 1", lambda x: x >= 1)
_NOT_NEGATIVE = ("at least 0", lambda x: 0 <= x < math.inf)
_FINITE = ("finite in float32", lambda x: abs(x) <= _MOST)
DOMAINS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "eps": _NOT_NEGATIVE,
    "norm_eps": _NOT_NEGATIVE,
    "norm_groups": _COUNT,
    "max_query_len": _COUNT,
    "softmax_scale": _FINITE,
    "scale": _FINITE,
    "temperature": _POSITIVE,
    "logits_soft_cap": _POSITIVE,
    "teacher_logits_soft_cap": _POSITIVE,
    "base": _POSITIVE,
    "dropout_prob": ("in [0, 1)", lambda x: 0 <= x < 1),
    "sliding_window": _COUNT,
    "block_size": _COUNT,
    "num_blocks": _COUNT,
    "num_segments": _COUNT,
    "num_states": _COUNT,
    "bits": _COUNT,
    "group_size": _COUNT,
    "top_k": _COUNT,
    "exact_from": ("a position, an int32 of at least 0", lambda x: 0 <= x < 2**31),
    "ignore_index": ("an int32", lambda x: -(2**31) <= x < 2**31),
}

# Options that give the size of a dim of optional arrays: if such an array is passed, the two must agree.
SIZES = {"num_states": "G"}


def members(annotation: Any) -> tuple[Any, ...]:
    """Returns the alternatives of a union annotation, or the annotation itself."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return typing.get_args(annotation)
    return (annotation,)


def fits(value: Any, annotation: Any) -> bool:
    """Returns whether a value has the declared type. An int is accepted as a float, a bool as neither; NaN is rejected;
    a NumPy scalar counts as the Python value it holds. Annotations that are not about Python values, such as Any,
    accept all."""
    if isinstance(value, np.generic) or (isinstance(value, np.ndarray) and value.ndim == 0):
        value = value.item()
    if annotation is None or annotation is type(None):
        return value is None
    if len(alternatives := members(annotation)) > 1:
        return any(fits(value, a) for a in alternatives)
    if annotation is bool:
        return isinstance(value, bool)
    if annotation is int:  # symbolic sizes in exported programs count as ints too
        return (isinstance(value, int) and not isinstance(value, bool)) or is_symbolic_dim(value)
    if annotation is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and value == value
    if typing.get_origin(annotation) is tuple:
        parts = typing.get_args(annotation)
        if not isinstance(value, tuple):
            return False
        if parts[-1:] == (...,):
            return all(fits(v, parts[0]) for v in value)
        return len(value) == len(parts) and all(map(fits, value, parts))
    return isinstance(value, annotation) if isinstance(annotation, type) and annotation is not Any else True


def declared(annotation: Any) -> str:
    """Returns an annotation as text for an error message."""

    def word(a: Any) -> str:
        if a in (None, type(None)):
            return "None"
        return a.__name__ if isinstance(a, type) and typing.get_origin(a) is None else str(a)

    return " or ".join(map(word, members(annotation)))


def of_kind(name: str, value: Any, annotation: Any) -> str:
    """Returns an error message if an option's value does not have the declared type, else an empty string."""
    if fits(value, annotation):
        return ""
    if is_array(value):
        return f"argument {name!r} is compiled into the program and must be a Python value, not an array"
    return f"argument {name!r} must be {declared(annotation)}, got {_shown(value)}"


def of_domain(name: str, value: Any) -> str:
    """Returns an error message if a number is outside the valid range of the option, else an empty string."""
    words, holds = DOMAINS.get(name, ("", None))
    if holds is None or not isinstance(value, (int, float)) or holds(value):
        return ""
    return f"argument {name!r} must be {words}, got {value!r}"


def of_sizes(arguments: Mapping[str, Any], dims: Mapping[str, Any]) -> str:
    """Returns an error message if an option disagrees with the dim whose size it gives, else an empty string."""
    for name, dim in SIZES.items():
        if name in arguments and dims.get(dim, arguments[name]) != arguments[name]:
            return f"argument {name!r} = {arguments[name]} must equal the size {dim} = {dims[dim]} of the arrays"
    return ""


def _shown(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) < 80 else f"a {type(value).__name__}"


ARRAYS = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct, jax.core.Tracer)


def is_array(value: Any) -> bool:
    return isinstance(value, ARRAYS)


def no_array(value: Any) -> str:
    """Returns why a value cannot be converted to an array or pytree of arrays (nested lists of numbers can), else an
    empty string."""
    if isinstance(value, (jax.Array, jax.core.Tracer)):
        return ""
    if isinstance(value, (list, tuple)) and not any(map(is_array, jax.tree.leaves(value))):
        try:
            value = np.asarray(value)
        except ValueError:
            return "a list whose rows differ in length"
    for leaf in jax.tree.leaves(value):
        if not is_array(leaf) and not isinstance(leaf, (bool, int, float)):
            return _shown(leaf)
        if isinstance(leaf, (np.ndarray, np.generic)) and leaf.dtype.kind in "USOMm":
            return f"an array of {leaf.dtype}"
    return ""


def checked(function: Callable) -> Callable:
    """Wraps a public function's `prepare` so that its arguments are checked against its annotations.

    Options must have the declared types; arguments declared as arrays, or as Any, must be arrays, pytrees of arrays, or
    nested lists of numbers. The function's own errors take precedence, because they are more specific. Errors raised by
    what it calls are re-raised with its own name, since that is what the user called.
    """
    names = tuple(inspect.signature(function).parameters)
    kinds: dict[str, Any] = {}
    take_arrays: set[str] = set()
    take_none: set[str] = set()

    def check_all(options: dict[str, Any], reported: str = "") -> None:
        """Raises ValueError for an argument of the wrong type, unless the message `reported` already names that
        argument."""
        if not kinds:  # deferred until the modules that annotations refer to are imported
            kinds.update(kinds_of(function))
            take_arrays.update(n for n, a in kinds.items() if {Any, jax.Array} & {*members(a)})
            take_none.update(n for n, a in kinds.items() if {Any, None, type(None)} & {*members(a)})
        # Fast path: most arguments are arrays where arrays are declared, or omitted.
        doubtful = {
            name: value
            for name, value in options.items()
            if not (name in take_none if value is None else isinstance(value, jax.Array) and name in take_arrays)
        }
        complaints = {name: _complaint(name, value, kinds.get(name)) for name, value in doubtful.items()}
        wrong = {name: what for name, what in complaints.items() if what}
        if wrong and not any(f"'{name}'" in reported for name in wrong):
            raise ValueError(f"{function.__name__}: {next(iter(wrong.values()))}")

    @functools.wraps(function)
    def prepare(*args: Any, **kwargs: Any) -> Any:
        options = {**dict(zip(names, args, strict=False)), **kwargs}
        try:
            prepared = function(*args, **kwargs)
        except Exception as error:
            check_all(options, reported=str(error) if isinstance(error, ValueError) else "")
            if isinstance(error, OverflowError):  # JAX's overflow error does not name the argument
                for name, value in options.items():
                    if (number := _past_int32(value)) is not None:
                        raise ValueError(
                            f"{function.__name__}: argument {name!r} contains {number}, which does not fit in int32"
                        ) from error
            if not isinstance(error, ValueError):
                raise
            owner, mark, reported = str(error).partition(": ")
            reported = reported if mark and owner.isidentifier() else str(error)
            raise ValueError(f"{function.__name__}: {reported}") from error
        check_all(options)
        return prepared

    return prepare


def _past_int32(value: Any) -> int | None:
    """Returns an integer in a (nested) list of Python numbers that does not fit in int32, or None."""
    if isinstance(value, (list, tuple)):
        return next((x for x in map(_past_int32, value) if x is not None), None)
    return value if isinstance(value, int) and not -(2**31) <= value < 2**31 else None


def check_names(owner: str, names: Mapping[str, Any], accepted: Iterable[str]) -> None:
    """Raises TypeError for unknown keyword arguments, with Python's own message, for a function that forwards them."""
    if strange := names.keys() - set(accepted):
        raise TypeError(f"{owner}() got an unexpected keyword argument {min(strange)!r}")


def kinds_of(function: Callable) -> dict[str, Any]:
    """Returns the annotations of all parameters, with the keys of an unpacked TypedDict included."""
    signature = inspect.signature(function)
    annotations = {n: p.annotation for n, p in signature.parameters.items() if not isinstance(p.annotation, str)}
    for name, hint in typing.get_type_hints(function).items():
        if typing.get_origin(hint) is typing.Unpack:
            annotations |= typing.get_type_hints(typing.get_args(hint)[0])
        else:
            annotations[name] = hint
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    several = {n for n, p in signature.parameters.items() if p.kind in variadic}
    return {n: a for n, a in annotations.items() if a is not inspect.Parameter.empty and n not in several}


def _complaint(name: str, value: Any, annotation: Any) -> str:
    """Returns an error message for an argument of a public function, else an empty string."""
    kinds = members(annotation)
    if Any in kinds or jax.Array in kinds:
        others = [a for a in kinds if a not in (Any, jax.Array)]
        if any(fits(value, a) for a in others) or (value is None and Any in kinds):
            return ""
        why = "None" if value is None else no_array(value)
        return f"argument {name!r} must be an array, got {why}" if why else ""
    return ("" if annotation is None else of_kind(name, value, annotation)) or of_domain(name, value)
