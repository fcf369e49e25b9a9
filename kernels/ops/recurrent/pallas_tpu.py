"""Recurrent cells on TPUs in Pallas: the weights stay in VMEM while a program walks over the tokens.

The loop of XLA reads `weight_hh` from memory for each token, 8 MB for an LSTM of 1,024 in bfloat16; here it is read once. So is
`weight_ih`: the gates of the inputs of a few tokens are one product, and only the product with the hidden state is taken token
by token. Inputs are read and outputs written once. The backward needs the states before each token, which the forward's kernel
stores when it is run again for it; gradients of the gates leave for two products over all tokens, by XLA.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels.framework.binding import Call
from kernels.framework.work import Work
from kernels.ops.recurrent.contract import CELLS, check_weights, gates_of, op, work_recurrent
from kernels.ops.recurrent.directions import Direction, directions, gradients_of_weights, merged
from kernels.toolchains.pallas import pallas_launch

LANES = 128
VMEM_BYTES = 48 * 2**20
TOGETHER = (16, 8, 4, 2, 1)  # tokens whose gates of the input are one product


class Plan(NamedTuple):
    """Sizes of a launch: T tokens by so many at a time, B rows, D and F padded to whole lanes, gates and arrays of a state."""

    T: int
    together: int
    B: int
    D: int
    F: int
    gates: int
    n: int
    cell: Callable[..., tuple[Any, ...]]

    @property
    def steps(self) -> int:
        return -(-self.T // self.together)


def _product(a: jax.Array, weights: jax.Array, of_rows: int) -> jax.Array:
    """Returns a [.., x] times weights [gates F, x], or with of_rows = 0 a [.., gates F] times weights, in float32."""
    precision = lax.Precision.HIGHEST if weights.dtype == jnp.float32 else None
    dims = (((a.ndim - 1,), (of_rows,)), ((), ()))
    return lax.dot_general(a.astype(weights.dtype), weights, dims, precision, jnp.float32)


def _gates(x: jax.Array, weights: Any, bias: Any, plan: Plan) -> jax.Array:
    """Returns the gates [together, B, gates F] of what lies in rows of tokens."""
    rows = _product(x.reshape(plan.together * plan.B, x.shape[-1]), weights[...], 1) + bias[...]
    return rows.reshape(plan.together, plan.B, rows.shape[-1])


def _fwd_kernel(refs: dict[str, Any], plan: Plan) -> None:
    """Outputs and the last state; or, if asked for, the states before each token."""
    step, state = pl.program_id(0), refs["state"]

    @pl.when(step == 0)
    def _() -> None:
        state[...] = refs["initial"][...]

    refs["of_inputs"][...] = _gates(refs["inputs"][...], refs["weight_ih"], refs["bias_ih"], plan)

    def token(i: Any, _: None) -> None:
        before = [state[j] for j in range(plan.n)]
        if "begins" in refs:
            before = [jnp.where(refs["begins"][i] > 0, 0.0, x) for x in before]
        if "states" in refs:
            for j, x in enumerate(before):
                refs["states"][i, j] = x
        of_hidden = _product(before[0], refs["weight_hh"][...], 1) + refs["bias_hh"][...]
        after = plan.cell(refs["of_inputs"][i], of_hidden, *before)
        out = after[0]
        if "valid" in refs:
            valid = refs["valid"][i] > 0
            out, after = jnp.where(valid, out, 0.0), [jnp.where(valid, x, y) for x, y in zip(after, before)]
        if "out" in refs:
            refs["out"][i] = out.astype(refs["out"].dtype)
        for j, x in enumerate(after):
            state[j] = x

    lax.fori_loop(0, jnp.minimum(plan.together, plan.T - step * plan.together), token, None)
    if "final" in refs:

        @pl.when(step == plan.steps - 1)
        def _() -> None:
            refs["final"][...] = state[...]


def _bwd_kernel(refs: dict[str, Any], plan: Plan) -> None:
    """Gradients of the gates, from the last token to the first, and of the initial state."""
    step, d_state = pl.program_id(0), refs["state"]
    count = jnp.minimum(plan.together, plan.T - (plan.steps - 1 - step) * plan.together)

    @pl.when(step == 0)
    def _() -> None:
        d_state[...] = refs["d_final"][...]

    refs["of_inputs"][...] = _gates(refs["inputs"][...], refs["weight_ih"], refs["bias_ih"], plan)
    refs["of_hidden"][...] = _gates(refs["states"][:, 0], refs["weight_hh"], refs["bias_hh"], plan)

    def token(k: Any, _: None) -> None:
        i = count - 1 - k
        before = [refs["states"][i, j] for j in range(plan.n)]
        after = [d_state[j] for j in range(plan.n)]
        d = [after[0] + refs["d_out"][i].astype(jnp.float32), *after[1:]]
        valid = refs["valid"][i] > 0 if "valid" in refs else True
        if "valid" in refs:
            d = [jnp.where(valid, x, 0.0) for x in d]
        gates = refs["of_inputs"][i], refs["of_hidden"][i]
        d_x, d_hidden, *d = jax.vjp(plan.cell, *gates, *before)[1](tuple(d))
        d[0] += _product(d_hidden, refs["weight_hh"][...], 0)
        if "valid" in refs:
            begins = refs["begins"][i] > 0
            d = [jnp.where(begins, 0.0, jnp.where(valid, x, y)) for x, y in zip(d, after)]
        refs["d_x"][i] = d_x.astype(refs["d_x"].dtype)
        if "d_hidden" in refs:
            refs["d_hidden"][i] = d_hidden.astype(refs["d_hidden"].dtype)
        for j, x in enumerate(d):
            d_state[j] = x

    lax.fori_loop(0, count, token, None)

    @pl.when(step == plan.steps - 1)
    def _() -> None:
        refs["d_initial"][...] = d_state[...]


# -- launches ----------------------------------------------------------------------------------------------------------


def _up(size: int, to: int) -> int:
    return -(-size // to) * to


def _vmem(plan: Plan, itemsize: int, of_weights: int, several: bool) -> int:
    """Returns the bytes of VMEM of a backward: weights once, blocks twice, gates of both kinds, states."""
    gates, rows = plan.gates * plan.F, plan.together * plan.B
    weights = gates * (plan.D + plan.F) * of_weights
    blocks = rows * ((plan.D + plan.F + gates * (1 + several)) * itemsize + plan.n * plan.F * 4)
    return weights + 2 * blocks + rows * gates * 8 + 4 * plan.n * plan.B * plan.F * 4


def _plan(inputs: Any, weights: Any, cell_type: str, activation: str) -> Plan | None:
    """Returns the sizes of a launch; None if the weights do not fit VMEM."""
    (B, T, D), itemsize = inputs.shape, inputs.dtype.itemsize
    (gates, n), hidden = CELLS[cell_type], weights["weight_hh"]
    for together in TOGETHER:
        plan = Plan(
            T,
            min(together, T),
            _up(B, 32 // itemsize),
            _up(D, LANES),
            _up(hidden.shape[1], LANES),
            gates,
            n,
            gates_of(cell_type, activation),
        )
        if _vmem(plan, itemsize, hidden.dtype.itemsize, cell_type == "gru") <= VMEM_BYTES:
            return plan
    return None


def _padded(x: jax.Array, *shape: int) -> jax.Array:
    """Returns an array that is padded with zeros at the end of its dims."""
    return jnp.pad(x, [(0, to - size) for size, to in zip(x.shape, shape, strict=True)])


class _Launch:
    """The launches of one direction of a call."""

    def __init__(self, of: Direction, plan: Plan, work: Work):
        self.plan, self.work, self.width = plan, work, of.initial.shape[-1]
        rows, w, T = (plan.steps * plan.together, plan.B), of.weights, plan.T
        self.inputs = {"inputs": _padded(jnp.moveaxis(of.inputs, 0, 1), *rows, plan.D)}
        if of.tokens.valid is not None:
            for name in ("valid", "begins"):
                self.inputs[name] = _padded(getattr(of.tokens, name).astype(jnp.int32)[..., None], *rows, 1)
        for name, width in (("weight_ih", plan.D), ("weight_hh", plan.F)):
            by_gate = w[name].reshape(plan.gates, self.width, -1)
            self.inputs[name] = _padded(by_gate, plan.gates, plan.F, width).reshape(plan.gates * plan.F, width)
        for name in ("bias_ih", "bias_hh"):
            by_gate = w.get(name, jnp.zeros(plan.gates * self.width)).astype(jnp.float32).reshape(plan.gates, -1)
            self.inputs[name] = _padded(by_gate, plan.gates, plan.F).reshape(1, plan.gates * plan.F)
        assert self.inputs["inputs"].shape[0] >= T

    def state(self, x: jax.Array) -> jax.Array:
        """Returns arrays of states [B, 1, n, F] as the kernels have them, [n, B, F]."""
        return _padded(jnp.moveaxis(x[:, 0], 0, 1), self.plan.n, self.plan.B, self.plan.F)

    def states(self, x: jax.Array, rows: int) -> jax.Array:
        """Returns [B, 1, n, F] of a kernel's [n, B, F]."""
        return jnp.moveaxis(x, 0, 1)[:rows, None, :, : self.width]

    def gates(self, x: jax.Array, rows: int) -> jax.Array:
        """Returns gradients of gates [T, B, gates F] without what was padded."""
        by_gate = x.reshape(*x.shape[:2], self.plan.gates, self.plan.F)[: self.plan.T, :rows, :, : self.width]
        return by_gate.reshape(*by_gate.shape[:2], -1)

    def run(self, kernel: Any, more: dict[str, jax.Array], outputs: dict[str, Any], reverse: bool = False) -> Any:
        """Returns the outputs of a kernel by name: what has a dim of tokens comes and goes by `together`, the rest stays."""
        plan, inputs = self.plan, self.inputs | more
        length = plan.steps * plan.together

        def spec(name: str, shape: tuple[int, ...]) -> pl.BlockSpec:
            rest = (0,) * (len(shape) - 1)
            if len(shape) > 2 and shape[0] == length and name not in ("initial", "final", "d_final", "d_initial"):
                block = (plan.together, *shape[1:])
                return pl.BlockSpec(block, lambda t: (plan.steps - 1 - t if reverse else t, *rest))
            once = pl.Buffered(1) if name.startswith("weight") else None
            return pl.BlockSpec(shape, lambda t: (0, *rest), pipeline_mode=once)

        gates = pltpu.VMEM((plan.together, plan.B, plan.gates * plan.F), jnp.float32)
        scratch = {"state": pltpu.VMEM((plan.n, plan.B, plan.F), jnp.float32), "of_inputs": gates}
        scratch |= {"of_hidden": gates} if reverse else {}
        names = [*inputs, *outputs, *scratch]
        results = pallas_launch(
            lambda *refs: kernel(dict(zip(names, refs, strict=True)), plan),
            *inputs.values(),
            out_shape=tuple(outputs.values()),
            grid=(plan.steps,),
            in_specs=[spec(name, x.shape) for name, x in inputs.items()],
            out_specs=tuple(spec(name, x.shape) for name, x in outputs.items()),
            scratch_shapes=tuple(scratch.values()),
            dimension_semantics=("arbitrary",),
            vmem_limit_bytes=VMEM_BYTES,
            work=self.work,
            name=kernel.__name__.strip("_"),
        )
        return dict(zip(outputs, results, strict=True))


def _float32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def _launches(arguments: tuple[Any, ...], which: int) -> list[tuple[Direction, _Launch]]:
    inputs, weights, _, _, cell_type, activation, bidirectional, _ = arguments
    plan = _plan(inputs, weights, cell_type, activation)
    assert plan is not None, "see `rejects`"
    call = op.bind(inputs, weights, cell_type=cell_type, activation=activation, bidirectional=bidirectional)
    return [(of, _Launch(of, plan, work_recurrent(call)[which])) for of in directions(*arguments)]


def forward(inputs, weights, segment_ids, initial_state, cell_type, activation, bidirectional, num_states):
    arguments = (inputs, weights, segment_ids, initial_state, cell_type, activation, bidirectional, num_states)
    (B, T, _), outs, finals = inputs.shape, [], []
    for of, launch in _launches(arguments, 0):
        plan = launch.plan
        shapes = {
            "out": jax.ShapeDtypeStruct((plan.steps * plan.together, plan.B, plan.F), inputs.dtype),
            "final": _float32(plan.n, plan.B, plan.F),
        }
        results = launch.run(_fwd_kernel, {"initial": launch.state(of.initial)}, shapes)
        outs.append(jnp.moveaxis(results["out"][:T, :B, : launch.width], 0, 1)[:, :: of.way])
        finals.append(launch.states(results["final"], B))
    return jnp.concatenate(outs, axis=-1), jnp.concatenate(finals, axis=2)


def backward(saved, inputs, weights, segment_ids, initial_state, cell_type, activation, bidirectional, num_states):
    arguments = (inputs, weights, segment_ids, initial_state, cell_type, activation, bidirectional, num_states)
    ways, parts, B = _launches(arguments, 1), [], inputs.shape[0]
    d_outs = jnp.split(saved.d_out, len(ways), axis=-1)
    d_finals = jnp.split(saved.d_final_state.astype(jnp.float32), len(ways), axis=2)
    for (of, launch), d_out, d_final in zip(ways, d_outs, d_finals, strict=True):
        plan = launch.plan
        length = plan.steps * plan.together
        states = _float32(length, plan.n, plan.B, plan.F)
        more = launch.run(_fwd_kernel, {"initial": launch.state(of.initial)}, {"states": states})
        more["d_out"] = _padded(jnp.moveaxis(d_out[:, :: of.way], 0, 1), length, plan.B, plan.F)
        more["d_final"] = launch.state(d_final)
        dtype = jnp.promote_types(inputs.dtype, of.weights["weight_hh"].dtype)
        gates = jax.ShapeDtypeStruct((length, plan.B, plan.gates * plan.F), dtype)
        shapes = {"d_x": gates} | ({"d_hidden": gates} if cell_type == "gru" else {})
        d = launch.run(_bwd_kernel, more, shapes | {"d_initial": _float32(plan.n, plan.B, plan.F)}, reverse=True)
        d_x = launch.gates(d["d_x"], B)
        d_hidden = launch.gates(d["d_hidden"], B) if "d_hidden" in d else d_x
        hidden = more["states"][: plan.T, 0, :B, : launch.width]
        gradients = gradients_of_weights(d_x, d_hidden, of.inputs, hidden, of.weights)
        parts.append((of, *gradients, launch.states(d["d_initial"], B)))
    return merged(parts, segment_ids, initial_state)


def rejects(call: Call) -> str | None:
    """Returns why the kernels cannot run a call."""
    if 0 in call.dims.values():
        return "an array has no elements"
    if call.num_states > 1:
        return "it has several states a row"
    weights = call.weights
    check_weights(weights, call.dims["D"], call.cell_type, call.activation, call.bidirectional)
    if any(w.dtype not in (jnp.float32, jnp.bfloat16) for w in weights.values()):
        return "its weights are neither float32 nor bfloat16"
    if _plan(call.inputs, weights, call.cell_type, call.activation) is None:
        size = sum(weights[n].size * weights[n].dtype.itemsize for n in ("weight_ih", "weight_hh"))
        return f"weights of {size / 2**20:.0f} MiB and the gates of a token do not fit {VMEM_BYTES >> 20} MiB of VMEM"
    return None


op.register(forward, backward, platforms={"tpu"}, dtypes={"float32", "bfloat16"}, rejects=rejects)
