"""What the tests of sparse attentions share: gradients and their slopes, meshes, and calls drawn at random.

Drawn calls have their shapes and options from a short table and everything else from a seed: one program serves many of them.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grid import error

from ejdist import make_mesh

MESHES = {
    "sp1": {"sp": 1},
    "sp2": {"sp": 2},
    "sp4": {"sp": 4},
    "sp8": {"sp": 8},
    "dp2_sp2_tp2": {"dp": 2, "sp": 2, "tp": 2},
}


def loss_of(outputs, xp):
    """Returns a number of everything finite in the outputs, by NumPy or by JAX: linear, so that cotangents have no error."""
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    found = 0.0
    for y in outputs:
        weight = xp.cos(xp.arange(y.size)).reshape(y.shape)
        found += xp.sum(xp.where(xp.isfinite(y), y, 0) * weight)
    return found


def with_gradients(function, compiled=True):
    """Returns (arrays, data) -> (outputs, gradients of arrays) of a function of both by name."""

    def run(arrays, data):
        def loss(arrays):
            outputs = function(**arrays, **data)
            return loss_of(outputs, jnp), outputs

        (_, outputs), gradients = jax.value_and_grad(loss, has_aux=True)(arrays)
        return outputs, gradients

    return jax.jit(run) if compiled else run


def check_slopes(loop, arrays, gradients):
    """Asserts that each gradient is the slope of a loop in float64 in a random direction, by central differences."""
    rng = np.random.default_rng(1)
    for argument, gradient in gradients.items():
        way = rng.standard_normal(gradient.shape)
        ends = [
            loss_of(loop(**{**arrays, argument: arrays[argument].astype(np.float64) + e * way}), np)
            for e in (1e-5, -1e-5)
        ]
        slope = (ends[0] - ends[1]) / 2e-5
        allowed = 2e-5 * max(1, np.linalg.norm(gradient) * np.sqrt(way.size))
        assert abs(np.vdot(gradient, way) - slope) < allowed, argument


def mesh_grid(names, quick):
    """Returns the parameters of a test of each name on each mesh; pairs that are not `quick` are slow."""
    pairs = [(name, mesh) for name in names for mesh in MESHES]
    return [pytest.param(*pair, marks=() if pair in quick else pytest.mark.slow) for pair in pairs]


def check_on_a_mesh(sharded, mesh, arrays, data, wanted):
    """Asserts that a function of `ejdist` gives the outputs and gradients of one device on a mesh."""
    got = with_gradients(functools.partial(sharded, mesh=make_mesh(**MESHES[mesh])))(arrays, data)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert error(g, w) < 3e-6


def contract_of(function, op, outputs=slice(None)):
    """Returns the contract of an operation as a function of the arguments of a public function."""

    def contract(**call):
        found = op.function(**function.prepare(**call).call.arguments)
        return found[outputs] if isinstance(found, tuple) else found

    return contract


def check_draws(table, name, seeds, tolerances=(3e-6, 1e-5)):
    """Asserts for each seed that a drawn call has the value of the loop and the gradients of the contract.

    `table[name]` is (function, contract, draw, loop, compiled): `draw(rng)` gives (arrays, data), a loop of None stands for the
    contract, and a function that needs some of the data when its program is made is not `compiled` from outside.
    """
    function, contract, draw, loop, compiled = table[name]
    run, wanted_of = with_gradients(function, compiled), with_gradients(contract, compiled)
    for seed in seeds:
        arrays, data = draw(np.random.default_rng(seed))
        out, gradients = run(arrays, data)
        wanted, d_wanted = wanted_of(arrays, data)
        narrow = next(iter(arrays.values())).dtype != np.float32
        value, slope = (2e-2, 4e-2) if narrow else tolerances
        pairs = list(
            zip(jax.tree.leaves(out), jax.tree.leaves(wanted if loop is None else loop(**arrays, **data)), strict=True)
        )
        for got, want in pairs:
            off = error(got, want)
            assert off < value, f"{name}, seed {seed}: {off:.1e}"
        for argument, got in gradients.items():
            off = error(got, d_wanted[argument])
            assert off < slope, f"{name}, seed {seed}: {off:.1e} in the gradient of {argument}"
