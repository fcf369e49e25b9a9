"""How the moments and the sum of gradients are kept: rounded stochastically to bfloat16, and on the host."""

import dataclasses
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from small_run import TINY, losses

from ejdist.mesh import make_mesh
from ejdist.models.model import Metric
from ejdist.sections import validate
from ejdist.training.integrity import digests_of
from ejdist.training.optimizer import OptimizerSection, make_optimizer
from ejdist.training.placing import permuted, place_batch
from ejdist.training.program import make_program
from ejdist.training.rounding import random_bits, rounded, seed_of
from ejdist.training.step import init_state, make_train_step
from launch.train import main as train
from recipes.schema import compose

# -- rounding ---------------------------------------------------------------------------------------------------------


def test_a_number_goes_to_either_neighbour_and_is_right_on_average():
    x = jnp.full(40_000, 1 + 0.3 * 2**-7, jnp.float32)
    found = np.asarray(rounded(x, random_bits(seed_of("a", 3), x.shape)), np.float32)
    assert set(found) == {1.0, 1 + 2**-7}
    share = (found > 1).mean()
    assert abs(share - 0.3) < 5 * np.sqrt(0.3 * 0.7 / x.size)
    negative = np.asarray(rounded(-x, random_bits(seed_of("a", 3), x.shape)), np.float32)
    np.testing.assert_array_equal(negative, -found)


def test_what_bfloat16_can_say_is_kept():
    every_bit = np.uint32(0x7FFFFFFF).view(np.float32)  # a NaN, to which an addition would be -0
    kept = jnp.array([0.0, -0.0, 1.5, -3.0, 2.0**-126, jnp.inf, -jnp.inf, jnp.nan, every_bit], jnp.float32)
    found = rounded(kept, jnp.full(kept.shape, 0xFFFF, jnp.uint32))
    np.testing.assert_array_equal(found.astype(jnp.float32), kept)


def test_bits_depend_on_the_name_the_step_and_the_index_and_not_on_the_mesh():
    shape = (6, 8, 16)

    def make(seed):
        return random_bits(seed, shape)

    bits = np.asarray(make(seed_of("a", 1)))
    assert len(np.unique(bits)) > 0.99 * bits.size
    for other in (seed_of("a", 2), seed_of("b", 1), seed_of("a", 1, 0)):
        assert (np.asarray(make(other)) == bits).mean() < 0.01
    mesh = make_mesh(fsdp=2, sp=2, devices=jax.devices()[:4])
    at = NamedSharding(mesh, PartitionSpec(None, ("sp",), ("fsdp",)))
    np.testing.assert_array_equal(jax.jit(make, out_shardings=at)(seed_of("a", 1)), bits)
    for row in range(shape[0]):
        np.testing.assert_array_equal(random_bits(seed_of("a", 1), shape[1:], jnp.int32(row)), bits[row])


# -- moments in bfloat16 ----------------------------------------------------------------------------------------------


def test_moments_in_bfloat16_follow_those_in_float32():
    """A second moment of b2 = 0.999 falls when the gradient does; rounded to the nearest, it would stay for ever."""
    section = OptimizerSection(b2=0.999, clip_norm=0, warmup_steps=1)
    found = {}
    for dtype in ("float32", "bfloat16"):
        optimizer, _ = make_optimizer(dataclasses.replace(section, moments=dtype), 1000, {"w": True})
        params = {"w": jnp.ones((64, 64))}

        def run(params, scale, steps, state, optimizer=optimizer):
            def one(carry, _):
                updates, new = optimizer.update({"w": jnp.full((64, 64), scale)}, carry[1], carry[0])
                return (optax.apply_updates(carry[0], updates), new), None

            return jax.lax.scan(one, (params, state), length=steps)[0]

        once = optimizer.update({"w": jnp.full((64, 64), 1.0)}, optimizer.init(params), params)[0]
        params, state = jax.jit(run, static_argnums=2)(params, 1.0, 100, optimizer.init(params))
        params, state = jax.jit(run, static_argnums=2)(params, 0.0, 200, state)
        found[dtype] = once["w"], params["w"], state[1][0]
    (first, end, adam), (first_16, end_16, adam_16) = found.values()
    assert adam_16.mu["w"].dtype == adam_16.nu["w"].dtype == jnp.bfloat16 and adam.nu["w"].dtype == jnp.float32
    np.testing.assert_array_equal(first, first_16)  # of the moments of this step, before they are rounded
    assert float(adam_16.nu["w"].astype(jnp.float32).mean()) == pytest.approx(float(adam.nu["w"].mean()), rel=2e-3)
    assert float(end_16.mean()) == pytest.approx(float(end.mean()), rel=2e-3)
    assert float(jnp.std(adam_16.nu["w"].astype(jnp.float32))) > 0, "each element has bits of its own"


# -- sums in bfloat16 -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_sum_of_many_microbatches_is_right_on_average(dtype):
    """Of 512 gradients of 1; rounded to the nearest, a sum in bfloat16 stays at 256."""

    def loss(params, batch, *, context):
        return jnp.sum(params["w"]) * batch["x"].sum(), {
            "loss": Metric(jnp.float32(1)),
            "tokens": Metric(jnp.float32(1), "sum"),
        }

    step = make_train_step(loss, optax.sgd(1.0), accumulation=512, accumulate=dtype)
    params = {"w": jnp.zeros((32, 32))}
    state, _ = jax.jit(step)(init_state(params, optax.sgd(1.0)), {"x": jnp.ones((512, 1))})
    mean = -np.asarray(state.params["w"])
    assert abs(mean.mean() - 1) < 1e-2 and (dtype == "float32") == (mean.std() == 0)


# -- moments on the host ----------------------------------------------------------------------------------------------

KEYS = [*TINY, "mesh.fsdp=2", "mesh.sp=2", "model.compute_dtype=bfloat16", "guards.nonfinite=skip"]
KEYS += ["optimizer.clip_norm=0.01"]  # of all gradients, whichever part is updated


def stepped(words, steps=2):
    """Returns (the program, its state before and after some steps on random tokens)."""
    s = compose(words)
    program = make_program(s, make_mesh(**vars(s.mesh), devices=jax.devices()[:4]))
    start = state = program.init()
    rng, shape = np.random.default_rng(0), (s.data.global_batch, s.data.sequence_length)
    for _ in range(steps):
        tokens = rng.integers(0, s.model.vocab_size, shape, dtype=np.int32)
        batch = {"tokens": tokens, "targets": np.roll(tokens, -1, 1), "segment_ids": np.zeros_like(tokens)}
        batch["positions"] = np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape)
        state, _ = program.step(state, place_batch(permuted(batch, program), program, np.arange(shape[0])))
    return program, start, state


@pytest.fixture(scope="module")
def kept():
    """Place of the moments -> (program, state before, state after) of the same steps."""
    return {place: stepped([*KEYS, f"optimizer.offload={place}"]) for place in ("none", "host")}


@pytest.mark.slow  # two programs over a mesh, 15 s
def test_moments_on_the_host_give_the_same_bits(kept):
    (_, _, state), (_, _, away) = kept["none"], kept["host"]
    for (path, a), (_, b) in zip(*map(jax.tree_util.tree_leaves_with_path, (state, away)), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), jax.tree_util.keystr(path)
    assert digests_of(state) == digests_of(away), "a checkpoint of one is a checkpoint of the other"


@pytest.mark.slow  # with the programs of the test above
def test_the_moments_of_matrices_stay_on_the_host(kept):
    program, start, state = kept["host"]
    adam = state.opt_state[1][0]
    for moments in (adam.mu, adam.nu):
        kinds = {name: x.sharding.memory_kind for name, x in moments["layers"].items()}
        assert kinds["gate"] == kinds["query"] == moments["embedding"].sharding.memory_kind == "pinned_host"
        assert kinds["attention_norm"] == moments["final_norm"].sharding.memory_kind == "device"
    assert {x.sharding.memory_kind for x in jax.tree.leaves(state.params)} == {"device"}
    assert all(x.is_deleted() for x in jax.tree.leaves(start)), "the state is donated"
    assert all(a.sharding == b.sharding for a, b in zip(*map(jax.tree.leaves, (state, program.state)), strict=True))


@pytest.mark.slow  # four runs, 60 s
def test_a_run_goes_on_bit_for_bit_wherever_its_moments_are(corpus, tmp_path):
    words = [
        *TINY,
        *corpus,
        "mesh.fsdp=2",
        "optimizer.moments=bfloat16",
        "checkpoint.every=4",
        "guards.replicas_every=1",
    ]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert train([*words, f"run.dir={whole}"]) == 0
    assert train([*words, f"run.dir={parts}", "run.stop_after=4", "optimizer.offload=host"]) == 0
    copy = shutil.copytree(parts, tmp_path / "copy")
    assert train([*words, f"run.dir={parts}", "optimizer.offload=host"]) == 0
    assert train([*words, f"run.dir={copy}"]) == 0
    assert losses(whole) == losses(parts) == losses(copy)


# -- keys -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value"),
    [("moments", "bf16"), ("offload", "device"), ("offload", "pinned_host"), ("accumulate", "float16")],
)
def test_a_wrong_value_is_named(key, value):
    with pytest.raises(ValueError, match=rf"optimizer.{key} = '{value}' is unknown; use \w+ or \w+"):
        validate(dataclasses.replace(OptimizerSection(), **{key: value}))
