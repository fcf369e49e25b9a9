"""Checks that the metadata of an operation fits its contract. Runs once, when the `Op` is constructed."""

from __future__ import annotations

import inspect

from kernels.framework.backend import Operation
from kernels.framework.binding import Call
from kernels.framework.dims import check_vocabulary
from kernels.framework.ordered import whole_dims


def check_metadata(op: Operation) -> None:
    """Raises TypeError if metadata passed to `Op` does not fit the contract."""
    dims = {d.name for p in op.parameters.values() for d in p.dims} | {
        d.name for output in op.output_dims for d in output
    }
    check_vocabulary(op.name, dims)
    dims_by_fact = {"local_dims": op.local_dims, "sum_dims": op.sum_dims, "see_also": set(op.see_also)}
    dims_by_fact |= {"tied_dims": {d for pair in op.tied_dims for d in pair}, "offset_of": set(op.offset_of.values())}
    parts = {"residuals": (set(op.residuals), set(op.outputs))}
    parts |= {name: (set(used), dims) for name, used in dims_by_fact.items()}
    names = {"no_gradient": op.no_gradient, "weights": op.weights, "same_dtype": op.same_dtype}
    names |= {"offset_of": tuple(op.offset_of), "padding": op.padding.forward if op.padding else ()}
    parts |= {f"{name} (arguments)": (set(used), set(op.parameters)) for name, used in names.items()}
    for what, (used, allowed) in parts.items():
        if used - allowed:
            raise TypeError(
                f"{op.name}: {what} names {', '.join(sorted(used - allowed))}; there are {', '.join(sorted(allowed))}"
            )
    whole = ", ".join(whole_dims(op))
    if whole and op.ordered is None:
        raise TypeError(
            f"{op.name}: state `ordered`: whether the order of tokens along {whole} matters. True for a recurrence or "
            "a causal mask, False if tokens are independent, or a function of the call"
        )
    if not whole and op.ordered is not None:
        raise TypeError(
            f"{op.name}: `ordered` has no meaning without a dim T or S that is neither local nor summed over"
        )
    served = {second for _, second in op.tied_dims}
    for output, dims_of in zip(op.outputs, op.output_dims, strict=True):
        has = {d.name for d in dims_of}
        # Heads of keys are split like those of queries, so an output with either kind lacks nothing.
        lost = op.local_dims - served - has - {first for first, second in op.tied_dims if second in has}
        if lost:
            raise TypeError(
                f"{op.name}: output {output!r} lacks the local dims {', '.join(sorted(lost))}: if they were split, "
                "every device would hold its own copy"
            )
    if op.extra_residuals is not None and [*inspect.signature(op.extra_residuals).parameters] != [*op.parameters]:
        raise TypeError(
            f"{op.name}: {op.extra_residuals.__name__}, given as `extra_residuals`, must have the parameters of the contract"
        )
    reserved = sorted(set(op.parameters) & set(vars(Call)))
    if reserved:  # arguments become attributes of a Call
        raise TypeError(f"{op.name}: a parameter cannot be called {', '.join(reserved)}")
    if op.local_dims & op.sum_dims:
        raise TypeError(f"{op.name}: {sorted(op.local_dims & op.sum_dims)} cannot be local and summed over")
