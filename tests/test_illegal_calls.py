"""Calls with one thing wrong, drawn at random: each is refused, in words that name the argument.

They are made from the legal calls that there are (the cases of operations, the examples in docstrings of public functions),
and nothing is compiled: a call is refused before it runs, whether its arrays are values or traced.
"""

import doctest
import inspect
import math
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejdist
import kernels
from kernels import Unsupported
from kernels.framework import options
from kernels.framework.binding import is_array, is_float_array, is_traced_argument

OPS = kernels.operations()
EACH, CASES = 100, 4

# Numbers whose sign means something, or that count from either end.
MAY_BE_NEGATIVE = {"softmax_scale", "scale", "ignore_index"}

# Names that the documents give to an argument, and the one under which it is refused; and of two arguments that must be
# alike, the one that is said not to be.
ALSO = {"cu_seqlens": "cum_seqlens", "state": "initial_state"}
ALSO |= {"key_cache": "value_cache", "key": "value", "key_pages": "value_cache", "value_pages": "value_cache"}
ALSO |= {"kv_pages": "query"}


class NoConfiguration:
    """A configuration of no operation."""


@dataclass(frozen=True)
class Wrong:
    """What is done to a call: `apply` changes its arguments, and the refusal has one of `names` in it."""

    what: str
    apply: Callable[[dict[str, Any]], dict[str, Any]]
    names: tuple[str, ...]

    @classmethod
    def of(cls, name: str, what: str, change: Callable[[Any], Any], *also: str) -> "Wrong":
        names = (f"'{name}'", f"'{ALSO.get(name, name)}'", *also)
        return cls(f"{name}: {what}", lambda a: {**a, name: change(a.get(name))}, names)


def of_any_call() -> Iterator[Wrong]:
    """Yields what is wrong for every function."""
    yield Wrong("an unknown argument", lambda a: {**a, "no_such_argument": 1}, ("'no_such_argument'",))
    yield Wrong.of("platform", "unknown", lambda _: "abacus")
    yield Wrong.of("platform", "a number", lambda _: 3)
    yield Wrong.of("platform", "a list", lambda _: ["xla"])
    yield Wrong.of("cfg", "of no operation", lambda _: NoConfiguration())
    yield Wrong.of("cfg", "a string", lambda _: "fast")
    yield Wrong.of("cfg", "a dict", lambda _: {"block_rows": 8})


def no_array(name: str) -> Iterator[Wrong]:
    """Yields what is no array, and stands for none."""
    yield Wrong.of(name, "a string", lambda _: "an array")
    yield Wrong.of(name, "an object", lambda _: object())
    yield Wrong.of(name, "a set", lambda _: {1, 2})
    yield Wrong.of(name, "a ragged list", lambda _: [[1], [2, 3]])
    yield Wrong.of(name, "a list of strings", lambda _: ["a", "b"])
    yield Wrong.of(name, "an array of strings", lambda _: np.array(["a"]))


def of_array(name: str, value: Any) -> Iterator[Wrong]:
    """Yields what is wrong for every array: that it is none, or of another kind of dtype."""
    yield from no_array(name)
    yield Wrong.of(name, "complex", lambda x: x.astype(jnp.complex64))
    kind = "float" if is_float_array(value) else "bool" if value.dtype == bool else "int"
    for other, dtype in (("float", jnp.float32), ("int", jnp.int32), ("bool", jnp.bool_)):
        if other != kind and not (name.endswith("mask") and other != "float"):  # a mask is of bools, or of 0 and 1
            yield Wrong.of(name, f"{other}s in place of {kind}s", lambda x, dtype=dtype: x.astype(dtype))


def of_option(name: str, annotation: Any, value: Any, nullable: bool) -> Iterator[Wrong]:
    """Yields what is wrong for an option, from the types that are declared for it."""
    kinds = options.members(annotation)
    values: dict[str, Any] = {"an object": object(), "a list": [1, 2], "an array": np.ones(2)}
    values["a string that is none of its values"] = "no such value"
    if not nullable:
        values["None"] = None
    if str in kinds or bool in kinds:
        values["a number"] = 1.5
    if float in kinds or int in kinds:
        values |= {"NaN": float("nan"), "a bool": True}
        words = options.DOMAINS.get(name, ("", None))[0]
        if "finite" in words or "positive" in words:
            values |= {"infinite": float("inf"), "infinite in float32": 1e39}
        if "positive" in words:
            values["0 in float32"] = 1e-50
        if name not in MAY_BE_NEGATIVE:
            values["negative"] = -2 if int in kinds else -1.5
    if int in kinds and float not in kinds:
        values["a fraction"] = 2.5
    for what, wrong in values.items():
        yield Wrong.of(name, what, lambda _, wrong=wrong: wrong, f" {name} = ")


# -- operations --------------------------------------------------------------------------------------------------------


def resized(x: Any, at: int) -> Any:
    """Returns an array with one entry more along a dim."""
    return np.concatenate([x, np.take(x, [0], axis=at)], axis=at)


def wrong_shapes(parameters: dict[str, Any], arguments: dict[str, Any]) -> Iterator[Wrong]:
    """Yields what is wrong of the shapes of arrays: from the declared dims, so only where another array has the dim too."""
    there = {n: p for n, p in parameters.items() if p.kind and is_array(arguments.get(n))}

    def others(dim: Any, name: str) -> bool:
        """Whether another array fixes a dim, which has it, and not as one that may be 1; or an option does."""
        said = {d for n, d in options.SIZES.items() if n in parameters}
        return dim.name in said or any(
            d.name == dim.name and not d.broadcast for n, p in there.items() for d in p.dims if n != name
        )

    for name, p in there.items():
        shape = arguments[name].shape
        spread = [i for i, d in enumerate(p.dims) if d.variadic]
        free = [p.dims[i] for i in spread if not p.dims[i].name or not others(p.dims[i], name)]
        if not free:  # any number of dims is legal where nothing else has them
            yield Wrong.of(name, "a dim more", lambda x: x[None])
        if len(p.dims) > len(spread):
            yield Wrong.of(name, "no dims", lambda x: np.zeros((), x.dtype))
        if not spread and shape and shape[0]:
            yield Wrong.of(name, "a dim less", lambda x: x[0])
        if spread and spread[0] > 0:
            continue  # which axis is which is known from the left up to the dims of any number
        for i, d in enumerate(reversed(p.dims[1:] if spread else p.dims), 1):
            at = len(shape) - i
            if shape[at] > d.broadcast and (d.size is not None or (d.name and others(d, name))):
                names = (f" {d} = ", f"{d.name} = ")
                yield Wrong.of(name, f"one {d} more", lambda x, at=at: resized(x, at), *names)


def wrongs_of_operation(op: Any, arguments: dict[str, Any]) -> Iterator[Wrong]:
    """Yields all that may be wrong of a legal call of an operation."""
    yield from of_any_call()
    yield from wrong_shapes(op.parameters, arguments)
    floats = [n for n, v in arguments.items() if is_float_array(v)]
    if floats:
        wide = jnp.float8_e4m3fn
        yield Wrong("all in float8", lambda a: {**a, **{n: a[n].astype(wide) for n in floats}}, (jnp.dtype(wide).name,))
    same = [n for n in op.same_dtype if n in floats]
    for name in same if len(same) > 1 else ():
        alike = tuple(f"'{n}'" for n in same)
        yield Wrong.of(name, "another float dtype", lambda x: x.astype(jnp.bfloat16), *alike)
    for name, p in op.parameters.items():
        if p.required:
            yield Wrong(
                f"{name}: missing", lambda a, name=name: {n: v for n, v in a.items() if n != name}, (f"'{name}'",)
            )
        value = arguments.get(name)
        nullable = (p.default is None and not p.required) or type(None) in options.members(p.annotation)
        if p.kind and not nullable:
            yield Wrong.of(name, "None", lambda _: None)
        if p.kind and is_array(value):
            yield from (w for w in of_array(name, value) if p.kind != "any" or " in place of " not in w.what)
        elif not p.kind:
            yield from of_option(name, p.annotation, value, nullable)


def on_host(arguments: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments in NumPy, where nothing compiles that changes them."""
    return {n: np.asarray(v) if is_array(v) else v for n, v in arguments.items()}


@pytest.fixture(autouse=True)
def errors_as_they_are(monkeypatch):
    """Looking for JAX's own frames in each error takes longer than all the rest; before it looks at its setting, JAX walks the
    whole stack."""
    from jax._src import traceback_util

    monkeypatch.setattr(traceback_util, "_is_under_reraiser", lambda error: True)


def refusal(function: Callable, arguments: dict[str, Any], traced: bool) -> Exception | None:
    """Returns the error of a call, which is traced and not run; None where it has none."""
    data = {n: v for n, v in arguments.items() if traced and is_traced_argument(v)}
    data = {n: v for n, v in data.items() if getattr(v, "dtype", np.dtype(int)).kind not in "US"}
    rest = {n: v for n, v in arguments.items() if n not in data}
    try:
        jax.eval_shape(lambda data: function(**data, **rest), data)
    except Exception as error:
        return error
    return None


def judged(owners: tuple[str, ...], wrong: Wrong, error: Exception | None) -> str:
    """Returns what is to be said against a refusal; nothing where it is a good one."""
    if error is None:
        return f"{wrong.what}: goes through"
    text = str(error)
    of_signature = isinstance(error, TypeError) and ("missing" in wrong.what or "unknown" in wrong.what)  # Python's own
    if not isinstance(error, (ValueError, Unsupported)) and not of_signature:
        return f"{wrong.what}: {type(error).__name__}: {text[:160]}"
    if not text.startswith(owners) or not any(name in text for name in wrong.names):
        return f"{wrong.what}: does not name it: {text[:200]}"
    return ""


def drawn(wrongs: list, seed: str) -> list:
    rng = np.random.default_rng(zlib.crc32(seed.encode()))
    return [wrongs[i] for i in rng.permutation(len(wrongs))[:EACH]]


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_a_wrong_call_of_an_operation_is_refused_by_name(op):
    cases = sorted((c for c in op.cases if "bench" not in c.tags), key=lambda c: "smoke" not in c.tags)[:CASES]
    legal = [on_host(op.case_inputs(case)) for case in cases]
    owners = tuple(o.name for o in OPS.values() if o.package == op.package)  # what they share speaks for any of them
    found = []
    for i, (a, wrong) in enumerate(
        drawn([(call, w) for call in legal for w in wrongs_of_operation(op, call)], op.name)
    ):
        found.append(judged(owners, wrong, refusal(op, wrong.apply(a), traced=bool(i % 2))))
    bad = sorted({f for f in found if f})
    assert not bad, "\n".join(bad)


def test_a_number_that_is_none_is_no_option():
    """Drawn calls need not have it."""
    assert not options.fits(math.nan, float) and not options.fits(np.float32(math.nan), float | None)
    assert options.fits(math.inf, float)
    with pytest.raises(ValueError, match=r"rms_norm: argument 'eps' .*nan"):
        kernels.rms_norm(np.ones((2, 8), np.float32), eps=math.nan)


# -- public functions --------------------------------------------------------------------------------------------------

PUBLIC = kernels.public_functions()


def signature_of(function: Any) -> inspect.Signature:
    """Returns the signature without `platform` and `cfg`."""
    signature = inspect.signature(function)
    parameters = [p for n, p in signature.parameters.items() if n not in ("platform", "cfg")]
    return signature.replace(parameters=parameters)


def documented(function: Any) -> list[dict[str, Any]]:
    """Returns the arguments of the calls in a function's docstring."""
    calls = []
    signature = signature_of(function)

    def record(*args: Any, **kwargs: Any) -> Any:
        calls.append(on_host(dict(signature.bind(*args, **kwargs).arguments)))
        result = jax.eval_shape(lambda: function(*args, **kwargs))
        return jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), result)

    names = {function.__name__: record}
    for example in doctest.DocTestParser().get_examples(function.__doc__):
        exec(example.source, names)
    return calls


def wrongs_of_function(function: Any, arguments: dict[str, Any]) -> Iterator[Wrong]:
    """Yields all that may be wrong of a legal call of a public function."""
    signature = signature_of(function)
    if signature == inspect.signature(function.op.function):  # a public function as its contract declares it
        yield from wrongs_of_operation(function.op, arguments)
        return
    yield from of_any_call()
    hints = options.kinds_of(function.prepare)
    for name, p in signature.parameters.items():
        annotation, value = hints.get(name, Any), arguments.get(name)
        kinds = options.members(annotation)
        nullable = p.default is None or type(None) in kinds or Any in kinds
        if p.default is p.empty and name in arguments:
            yield Wrong(
                f"{name}: missing", lambda a, name=name: {n: v for n, v in a.items() if n != name}, (f"'{name}'",)
            )
        if jax.Array in kinds or Any in kinds:
            if not nullable:
                yield Wrong.of(name, "None", lambda _: None)
            yield from (of_array(name, value) if is_array(value) else no_array(name))
        else:
            yield from of_option(name, annotation, value, nullable)


@pytest.mark.parametrize("function", PUBLIC.values(), ids=PUBLIC)
def test_a_wrong_call_of_a_public_function_is_refused_by_name(function):
    ops = {op.package for op in function.ops}
    owners = (function.__name__, *(op.name for op in OPS.values() if op.package in ops))
    legal = documented(function)
    found = []
    wrongs = [(call, w) for call in legal for w in wrongs_of_function(function, call)]
    for i, (a, wrong) in enumerate(drawn(wrongs, function.__name__)):
        found.append(judged(owners, wrong, refusal(function, wrong.apply(a), traced=bool(i % 2))))
    bad = sorted({f for f in found if f})
    assert legal and not bad, "\n".join(bad)


ROWS = jnp.ones((1, 8, 2, 4))


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda cuts: kernels.flash_attention(ROWS, ROWS, ROWS, cum_seqlens_q=cuts), "cum_seqlens_q"),
        (lambda cuts: kernels.mean_pooling(ROWS[..., 0], cu_seqlens=cuts), "cu_seqlens"),
        (lambda sizes: kernels.grouped_matmul(jnp.ones((4, 4)), jnp.ones((2, 4, 4)), sizes), "group_sizes"),
    ],
)
def test_a_list_of_integers_past_an_int32_is_named(call, argument):
    with pytest.raises(ValueError, match=f"argument '{argument}' contains {2**40}, which does not fit in int32"):
        call([0, 2**40])


def test_an_unknown_option_is_one_of_what_was_called():
    x, many = jnp.ones((1, 4, 8)), jnp.ones((2, 8, 8))
    with pytest.raises(TypeError, match=r"^ring_attention\(\) got an unexpected keyword argument 'casual'"):
        ejdist.ring_attention(ROWS, ROWS, ROWS, casual=True)
    with pytest.raises(TypeError, match=r"^moe\(\) got an unexpected keyword argument 'scores'"):
        ejdist.moe(x, jnp.ones((8, 2)), many, many, many, top_k=1, scores="sigmoid")
