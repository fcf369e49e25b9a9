"""What a user meets first: the example trainer runs, profiles have names, and a type checker reads the packages."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from small_run import TINY, losses

from ejdist import make_mesh
from ejdist.evaluation.weights import open_weights
from ejdist.models.decoder import DecoderConfig, declare, loss
from ejdist.models.parameters import initialise
from ejdist.operations import bind_ops

ROOT = Path(__file__).resolve().parent.parent


def test_the_example_trainer_learns():
    flags = "--xla_force_host_platform_device_count=4"
    run = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "custom_trainer.py")],
        capture_output=True,
        text=True,
        env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
    )
    assert run.returncode == 0, run.stderr
    losses = [float(x) for x in re.findall(r"loss ([\d.]+)", run.stdout)]
    assert len(losses) == 20 and losses[-1] < 0.6 * losses[0], run.stdout
    assert "'fsdp': 2" in run.stdout and "'sp': 2" in run.stdout and "P(None, ('fsdp', 'sp'))" in run.stdout, run.stdout


def test_a_layer_of_ones_own_trains_and_is_named_where_it_is_not_known(tmp_path):
    words = [*TINY, "mesh.sp=1", "sequence.order=contiguous", "run.steps=2", f"run.dir={tmp_path / 'run'}"]
    words += ["model.num_layers=1", "model.layer_pattern=[short_conv+mlp]", "model.qk_norm=false"]
    command = [sys.executable, str(ROOT / "examples" / "own_layer.py"), "launch.train", *words]
    run = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"JAX_PLATFORMS": "cpu"})
    assert run.returncode == 0, run.stderr
    assert len(losses(tmp_path / "run")) == 2 and "short_conv" in (tmp_path / "run" / "recipe.json").read_text()
    # A command that reads the run, in a process where nobody has registered it.
    with pytest.raises(ValueError, match=r"'short_conv\+mlp' is not MIXER.*examples/own_layer.py"):
        open_weights(str(tmp_path / "run")).check(DecoderConfig(layer_pattern=("short_conv+mlp",), num_layers=1))


@pytest.fixture(scope="module")
def names():
    """The names of all operations in a training step of a small model with the sequence over two devices."""
    config = DecoderConfig(
        vocab_size=61, num_layers=2, model_dim=16, num_heads=4, num_kv_heads=2, head_dim=8, ffn_dim=24
    )
    ops = bind_ops(make_mesh(sp=2, devices=jax.devices()[:2]))
    params = jax.eval_shape(lambda: initialise(declare(config), jax.random.key(0)))
    batch = dict.fromkeys(
        ("tokens", "targets", "positions", "segment_ids"), jax.ShapeDtypeStruct((2, 32), jnp.dtype("int32"))
    )
    step = jax.jit(jax.value_and_grad(lambda p, b: loss(p, b, config, ops), has_aux=True))
    compiled = step.lower(params, batch).compile()
    return set(re.findall(r'op_name="([^"]*)"', compiled.as_text()))


@pytest.mark.parametrize(
    "path",
    [
        "layer/attention/rms_norm.xla",
        "layer/attention/rotary_embedding_pair.xla",
        "layer/attention/attention/hop/flash_attention.xla",
        "layer/attention/attention/exchange",
        "layer/mlp/gated_mlp.xla",
        "cross_entropy_sums.xla",
        "layer/attention/attention/hop/flash_attention.xla.backward",
        "layer/mlp/gated_mlp.xla.backward",
    ],
)
def test_profiles_name_layer_attention_hop_and_exchange(path, names):
    parts = path.split("/")

    def has_all(name):
        rest = iter(re.sub(r"\w+\((\w+)\)", r"\1", name).split("/"))  # transpose(layer) and jvp(layer) are layer
        return all(any(part in segment for segment in rest) for part in parts)

    assert any(map(has_all, names)), "\n".join(sorted(names))


def test_type_checkers_may_read_the_packages(tmp_path):
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    for package in ("kernels", "ejdist"):
        assert "py.typed" in data[package] and (ROOT / package / "py.typed").exists()
    (tmp_path / "pyrefly.toml").write_text(f'search-path = ["{ROOT.as_posix()}"]\npreset = "default"\n')
    (tmp_path / "snippet.py").write_text(
        "import jax\n"
        "import ejdist\n"
        "from ejdist import RMSNorm, rms_norm as sharded_rms_norm\n"
        "from kernels import rms_norm\n\n\n"
        "def norm(x: jax.Array) -> jax.Array:\n"
        "    return RMSNorm(eps=1e-5)(sharded_rms_norm(rms_norm(x), mesh=ejdist.make_mesh()))\n"
    )
    (tmp_path / "wrong.py").write_text("from kernels import no_such_operation\n")

    def errors_of(name):
        command = [sys.executable, "-m", "pyrefly", "check", name]
        run = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
        return run.returncode, run.stdout + run.stderr

    assert errors_of("snippet.py")[0] == 0, errors_of("snippet.py")[1]
    assert "no_such_operation" in errors_of("wrong.py")[1], "it reads the packages, so it must report missing names"
