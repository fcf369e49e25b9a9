"""Muon: against Newton–Schulz in NumPy, on meshes, in plans, and what it refuses."""

import dataclasses
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from small_run import TINY, losses, run
from test_memory_of_optimizer import stepped

from ejdist.layout import PARAMETERS, sharding
from ejdist.mesh import make_mesh
from ejdist.models.parameters import Param, map_declared
from ejdist.planning import orthogonal as planned
from ejdist.planning.chips import CHIPS
from ejdist.planning.links import Links
from ejdist.planning.memory import moment_bytes, stored
from ejdist.planning.share import share_of
from ejdist.planning.step_time import traffic
from ejdist.sections import validate
from ejdist.training.changeable import check_allowed
from ejdist.training.muon import MuonSection, alike, all_matrices, newton_schulz, orthogonal
from ejdist.training.optimizer import OptimizerSection, make_optimizer
from ejdist.training.program import make_program
from ejdist.training.resume import check_same_run, fingerprint
from recipes.schema import compose, unread

MUON = [*TINY, "optimizer=muon", "mesh.sp=1", "sequence.order=contiguous"]
# Of each kind that a layer has: inputs first, last and several; experts, with two matrices side by side; and what is none.
DECLARED = {
    "embedding": Param((10, 8), "V D"),
    "layers": {
        "query": Param((3, 8, 2, 4), "L D N H", inputs="D"),
        "output": Param((3, 2, 4, 8), "L N H D", inputs="N H"),
        "up": Param((3, 8, 12), "L D F", inputs="D"),
        "down": Param((3, 12, 8), "L F D", inputs="F"),
        "experts_gate_up": Param((3, 2, 8, 2, 6), "L E D _ F", inputs="D"),
        "norm": Param((3, 8), "L D", "ones", decay=False),
        "router": Param((3, 8, 2), "L D _"),
    },
}
# Rows and columns of one matrix, as an einsum takes a parameter to [matrices, rows, columns].
AS_MATRICES = {
    "query": lambda x: x.reshape(-1, 8, 8),
    "output": lambda x: x.reshape(-1, 8, 8),
    "up": lambda x: x,
    "down": lambda x: x,
    "experts_gate_up": lambda x: x.transpose(0, 1, 3, 2, 4).reshape(-1, 8, 6),
}
BACK = {"experts_gate_up": lambda x: x.reshape(3, 2, 2, 8, 6).transpose(0, 1, 3, 2, 4)}


def numpy_newton_schulz(x, steps=5):
    """Jordan's iteration of one matrix, in float64."""
    x = x.astype(np.float64)
    wide = x if x.shape[0] <= x.shape[1] else x.T
    wide = wide / np.linalg.norm(wide)
    for _ in range(steps):
        gram = wide @ wide.T
        wide = 3.4445 * wide - 4.7750 * gram @ wide + 2.0315 * gram @ gram @ wide
    return wide if x.shape[0] <= x.shape[1] else wide.T


def drawn(seed=0, scale=1.0):
    rng = np.random.default_rng(seed)
    return map_declared(lambda _, p: jnp.asarray(scale * rng.standard_normal(p.shape), jnp.float32), DECLARED)


def test_newton_schulz_is_that_of_numpy():
    rng = np.random.default_rng(0)
    for shape in ((5, 7), (7, 5), (1, 6), (4, 4)):
        x = rng.standard_normal((3, *shape)).astype(np.float32) * 1e-12  # no gradient is too small
        right = np.stack([*map(numpy_newton_schulz, x)])
        np.testing.assert_allclose(newton_schulz(jnp.asarray(x), 5), right, atol=2e-5)
        rough = newton_schulz(jnp.asarray(x, jnp.bfloat16), 5)  # each of five steps triples an error of 2^-9
        assert rough.dtype == jnp.bfloat16
        assert np.linalg.norm(np.asarray(rough, np.float32) - right) < 0.1 * np.linalg.norm(right)
    np.testing.assert_array_equal(newton_schulz(jnp.zeros((2, 3, 4)), 5), 0)
    values = np.linalg.svd(newton_schulz(jnp.asarray(rng.standard_normal((16, 40)), jnp.float32), 5))[1]
    assert 0.6 < values.min() < values.max() < 1.25


@pytest.mark.parametrize("nesterov", [True, False])
def test_steps_are_those_of_numpy(nesterov):
    """Momentum, Newton–Schulz of every matrix alone, the size of the update, decay and rate; AdamW for the rest."""
    muon = MuonSection(momentum=0.9, nesterov=nesterov, rms=0.3, products="float32", also=("embedding",))
    section = OptimizerSection("muon", 0.05, "constant", 0, weight_decay=0.2, clip_norm=0, eps=1e-6, muon=muon)
    decayed = map_declared(lambda _, p: p.decay, DECLARED)
    optimizer, _ = make_optimizer(section, 10, decayed, matrices=all_matrices(DECLARED, muon))
    params = drawn()
    whole = {n: np.asarray(x, np.float64) for n, x in [*params["layers"].items(), ("embedding", params["embedding"])]}
    state, momenta = optimizer.init(params), {name: np.zeros_like(x) for name, x in whole.items()}
    second = {name: np.zeros_like(x) for name, x in whole.items()}
    step = jax.jit(optimizer.update)
    for k in range(1, 4):
        grads = drawn(k, 1e-3)
        updates, state = step(grads, state, params)
        params = optax.apply_updates(params, updates)
        for name, w in whole.items():
            g = np.asarray(grads["layers"].get(name, grads["embedding"]), np.float64)
            if name in ("norm", "router"):
                momenta[name] = 0.9 * momenta[name] + 0.1 * g
                second[name] = 0.95 * second[name] + 0.05 * g * g
                update = momenta[name] / (1 - 0.9**k) / (np.sqrt(second[name] / (1 - 0.95**k)) + 1e-6)
            else:
                momenta[name] = 0.9 * momenta[name] + g
                ahead = 0.9 * momenta[name] + g if nesterov else momenta[name]
                x = AS_MATRICES.get(name, lambda x: x[None])(ahead)
                update = np.stack([0.3 * math.sqrt(max(one.shape)) * numpy_newton_schulz(one) for one in x])
                update = BACK.get(name, lambda x, like=w: x.reshape(like.shape))(update)
            whole[name] = w - 0.05 * (update + (0.2 if name != "norm" else 0) * w)
            result = params["layers"].get(name, params["embedding"])
            np.testing.assert_allclose(result, whole[name], atol=2e-4, err_msg=f"{name}, step {k}")
    adam = state[1][0]
    assert adam.nu["layers"]["query"].shape == () and adam.nu["layers"]["norm"].shape == (3, 8)


# -- on a mesh --------------------------------------------------------------------------------------------------------

MESHES = [{"fsdp": 2}, {"fsdp": 4}, {"ep": 2, "fsdp": 2}, {"tp": 2, "dp": 2, "sp": 2}]


def placed(mesh):
    return map_declared(lambda _, p: sharding(mesh, p.dims.split(), PARAMETERS, shape=p.shape), DECLARED)


def layers_of(tree):
    """Returns the parameters that Muon takes."""
    return [tree["layers"][name] for name in AS_MATRICES]


@pytest.mark.parametrize("axes", [pytest.param(m, marks=[pytest.mark.slow] * (len(m) == 1)) for m in MESHES], ids=str)
def test_matrices_are_dealt_round_a_mesh(axes):
    """The same updates, sharded as the parameters are; and no device multiplies what another does: by the dots of the program
    that was compiled, which is what plans count."""
    section = MuonSection(products="float32", steps=2)
    mesh = make_mesh(**axes, devices=jax.devices()[: math.prod(axes.values())])
    where = placed(mesh)
    of = layers_of(all_matrices(DECLARED, section, where))
    assert len(alike(of)) == 3, "a matrix and its transpose are dealt together"
    momenta = layers_of(drawn())
    alone = orthogonal(momenta, layers_of(all_matrices(DECLARED, section)), section)
    there = [jax.device_put(x, place) for x, place in zip(momenta, layers_of(where), strict=True)]
    compiled = jax.jit(lambda x: orthogonal(x, of, section)).lower(there).compile()
    for update, one, place in zip(compiled(there), alone, layers_of(where), strict=True):
        assert update.sharding.is_equivalent_to(place, update.ndim)
        np.testing.assert_allclose(update, one, atol=1e-5)
    recipe = compose([*MUON, "optimizer.muon.steps=2"])
    parameters = stored(recipe, DECLARED, mesh)
    expected = planned.flops(recipe, parameters, mesh)
    assert _dots(compiled.as_text()) == expected
    whole = sum(2 * m.sizes[0] * m.flops for m in of)
    assert whole <= expected * mesh.size < 2 * whole + mesh.size * 2 * max(m.flops for m in of) * len(of)
    text = compiled.as_text()
    assert ("all-gather" in text) == bool({"dp", "ep"} & {*axes}), "only what several devices have alike is gathered"
    assert "all-to-all" in text


def _dots(text):
    """Returns the FLOPs of the matrix products in a compiled program, each of [b, m, k] and [b, k, n] or [b, n, k]."""
    total = 0
    for line in text.splitlines():
        if " dot(" in line or "__onednn$matmul" in line:
            result, sides = line.partition("= ")[2], line.partition("dot(")[2]
            sizes = [int(n) for n in result.partition("[")[2].partition("]")[0].split(",")]
            left = _shape_of(text, sides.partition(",")[0].strip())
            contracted = int(line.partition("lhs_contracting_dims={")[2].partition("}")[0])
            total += 2 * math.prod(sizes) * left[contracted]
    return total


def _shape_of(text, name):
    (line,) = {
        line.strip() for line in text.splitlines() if line.strip().removeprefix("ROOT ").startswith(f"{name} = ")
    }
    return [int(n) for n in line.partition("[")[2].partition("]")[0].split(",")]


@pytest.mark.slow  # five programs over meshes, a minute and a half
@pytest.mark.parametrize("dtype", ["float32"])
def test_losses_are_the_same_on_every_mesh(dtype):
    keys = [*MUON, "data.global_batch=8", "data.sequence_length=32", "optimizer.learning_rate=0.03"]
    keys += [f"optimizer.muon.products={dtype}", "optimizer.warmup_steps=0"]
    experts = ["model=moe_nano", "model.num_layers=2", "model.model_dim=32", "model.experts.ffn_dim=48"]
    for of_model, meshes in (([], ("fsdp=1", "fsdp=2", "fsdp=4")), (experts, ("ep=1", "ep=2"))):
        ends = [stepped([*keys, *of_model, f"mesh.{mesh}"], 3)[2].params for mesh in meshes]
        for other in ends[1:]:
            for a, b in zip(jax.tree.leaves(ends[0]), jax.tree.leaves(other), strict=True):
                np.testing.assert_allclose(a, b, atol=2e-4)


def test_the_state_lies_as_the_parameters_do():
    recipe = compose([*MUON, "mesh.fsdp=2", "optimizer.moments=bfloat16"])
    program = make_program(recipe, make_mesh(fsdp=2, devices=jax.devices()[:2]))
    adam = program.state.opt_state[1][0]
    gate, moment = program.state.params["layers"]["gate"], adam.mu["layers"]["gate"]
    assert moment.sharding == gate.sharding and moment.shape == gate.shape and moment.dtype == jnp.bfloat16
    assert adam.nu["layers"]["gate"].shape == () and adam.nu["embedding"].shape == (320, 32)
    assert isinstance(gate.sharding, NamedSharding)


# -- plans, runs and refusals -----------------------------------------------------------------------------------------


def test_plans_know_what_it_costs():
    mesh = make_mesh(fsdp=2, devices=jax.devices()[:2])
    links = Links(CHIPS["h100"], 8)
    counts, sent, needed = {}, {}, {}
    for name in ("adamw", "muon"):
        recipe = compose([*MUON, f"optimizer={name}", "mesh.fsdp=2"])
        parameters = stored(recipe, DECLARED, mesh)
        counts[name] = moment_bytes(recipe, parameters)
        held = dataclasses.make_dataclass("Held", ["parameters", "frozen"])(parameters, [])
        sent[name] = traffic(recipe, held, share_of(recipe, mesh, links), mesh, links)
        taken = sum(p.local for p in parameters if p.param.inputs)
        needed[name] = planned.memory(recipe, parameters, mesh)
    assert counts["adamw"] - counts["muon"] == 4 * taken
    # Of the group of up and down: pieces of a half of each matrix, thrice, and four times what is multiplied at once.
    assert needed == {"adamw": 0, "muon": 2 * (3 * 6 * 96 // 2 + 4 * 3 * 96)}
    more = sent["muon"].without(sent["adamw"]).bytes
    # Pieces there and back: of 6 matrices of 8 by 8, 6 of 8 by 12 and 12 of 8 by 6, half on each device, half of that away.
    assert more == {("fsdp", "all_to_all"): 2 * 2 * (6 * 64 + 6 * 96 + 12 * 48) // 2 // 2}


@pytest.mark.slow  # four short runs
def test_a_run_goes_on_with_its_momentum_and_no_other_optimizer(tmp_path):
    run(tmp_path / "whole", "optimizer=muon")
    run(tmp_path / "cut", "optimizer=muon", "run.stop_after=3")
    with pytest.raises(ValueError, match=r"optimizer.name: was muon, is adamw"):
        run(tmp_path / "cut")
    run(tmp_path / "cut", "optimizer=muon")
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")


def test_what_it_cannot_do_is_refused_in_a_sentence():
    def refused(match, *words, kind=ValueError):
        recipe = compose([*MUON, *words])
        with pytest.raises(kind, match=match):
            validate(recipe)
            make_program(recipe, make_mesh(devices=jax.devices()[:1]))

    refused(
        r"optimizer.muon takes matrices, and layers.attention_norm \[2, 32\] is a vector of each layer; leave it out of",
        "optimizer.muon.also=[attention_norm]",
    )
    refused(
        r"also names 'routr', which the model does not have; its parameters are .*embedding",
        "optimizer.muon.also=[routr]",
    )
    refused(r"optimizer.name = muon has no matrix of a layer to take: adapters", "lora.rank=4")
    refused(
        r"optimizer.offload = 'host' does not go with .* 'muon', which needs whole stacks", "optimizer.offload=host"
    )
    refused(r"optimizer.muon.products = 'float8' is unknown; use bfloat16 or float32", "optimizer.muon.products=float8")
    refused(r"optimizer.muon.momentum must be in \[0, 1\), got 1", "optimizer.muon.momentum=1")
    refused(r"optimizer.muon.steps must be from 1 to 20, got 0", "optimizer.muon.steps=0")
    refused(r"optimizer.muon.rms must be positive, got 0", "optimizer.muon.rms=0")
    with pytest.raises(ValueError, match=r"optimizer.name = muon needs argument 'matrices'"):
        make_optimizer(OptimizerSection("muon"), 10, {"w": True})
    before = fingerprint(compose(TINY))
    with pytest.raises(ValueError, match=r"another recipe: optimizer.name: was adamw, is muon"):
        check_same_run(before, compose([*TINY, "optimizer=muon"]), 3, Path("run"))
    with pytest.raises(ValueError, match=r"the moments of one optimizer are nothing to another"):
        check_allowed(compose([*MUON, "run.allow_change=[optimizer.name]"]))
    assert unread(["optimizer.muon.steps=3"], compose(TINY)) == [
        "optimizer.muon.steps=3 changes nothing: optimizer.name = adamw"
    ]
