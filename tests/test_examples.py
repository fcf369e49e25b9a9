"""What a user meets first: the example trainer runs, profiles have names, and a type checker reads the packages."""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from plugged import plugins_of_a_test
from shared import once
from small_run import TINY, losses

from ejdist import make_mesh
from ejdist.models.decoder import DecoderConfig, declare, loss
from ejdist.models.parameters import initialise
from ejdist.operations import bind_ops
from ejdist.training.metrics import read_rows
from ejdist.training.runs import Run
from ejdist.weights.tensors import declared_leaves
from launch.plan import parse, plan

ROOT = Path(__file__).resolve().parent.parent
DEVICES = "xla_force_host_platform_device_count"


@pytest.mark.slow  # the trainer of README.md is quick, in test_readmes.py
@pytest.mark.parametrize("quick", [True, False])
def test_the_example_trainer_learns(quick):
    """Also as a user compiles it, with none of the flags that make these tests quick; `.ci/run` compiles its main job so."""
    flags = re.sub(r"(device_count)=\d+", r"\1=4", os.environ["XLA_FLAGS"]) if quick else f"--{DEVICES}=4"
    run = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "custom_trainer.py")],
        capture_output=True,
        text=True,
        env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
    )
    assert run.returncode == 0, run.stderr
    losses = [float(x) for x in re.findall(r"loss ([\d.]+)", run.stdout)]
    assert len(losses) == 20 and losses[-1] < 0.6 * losses[0], run.stdout
    assert (
        "'fsdp': 2" in run.stdout and "'sp': 2" in run.stdout and "P(None, ('fsdp', 'sp'), None, None)" in run.stdout
    ), run.stdout


ONE = [*TINY, "mesh.sp=1", "model.num_layers=1"]


def launched(command, *words, code=0):
    """Runs `python -m launch.COMMAND` and returns its output."""
    run = subprocess.run(
        [sys.executable, "-m", f"launch.{command}", *map(str, words)],
        capture_output=True,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )
    assert run.returncode == code, run.stdout + run.stderr
    return run.stdout + run.stderr


@pytest.mark.slow
def test_a_layer_of_ones_own_trains_and_is_named_where_it_is_not_known(tmp_path):
    words = [*ONE, "sequence.order=contiguous", "run.steps=2", f"run.dir={tmp_path / 'run'}", "model.qk_norm=false"]
    words += ["model.layer_pattern=[short_conv+mlp]", "model.short_conv.taps=3"]
    launched("train", "plugins=[examples.own_layer]", *words)
    recipe = json.loads((tmp_path / "run" / "recipe.json").read_text())
    assert len(losses(tmp_path / "run")) == 2 and recipe["model.short_conv.taps"] == 3
    assert recipe["plugins"] == ["examples.own_layer"]
    # A model that names it, in a process where nobody has registered it.
    with pytest.raises(
        ValueError, match=r"'short_conv\+mlp' is not MIXER.*plugins=\[MODULE\]: see examples/own_layer.py"
    ):
        DecoderConfig(layer_pattern=("short_conv+mlp",), num_layers=1).validate()


@pytest.mark.slow
def test_a_layer_of_ones_own_resumes_is_evaluated_and_is_swept(tmp_path):
    keys = ["sequence.order=contiguous", "model.layer_pattern=[short_conv+mlp]", "model.qk_norm=false", "run.steps=6"]
    words = ["plugins=[examples.own_layer]", *ONE, *keys, "model.short_conv.taps=3", f"run.dir={tmp_path / 'run'}"]
    launched("train", *words, "run.stop_after=3")
    launched("train", *words)
    launched("train", *words[:-1], f"run.dir={tmp_path / 'whole'}")
    assert losses(tmp_path / "run") == losses(tmp_path / "whole") and len(losses(tmp_path / "run")) == 6
    said = launched("train", *words[1:], code=2)
    assert "here examples.own_layer is missing; give plugins=[examples.own_layer]" in said
    said = launched("train", *words[:-2], words[-1], code=3)  # other taps, by default
    assert "short_conv_taps is float32[1, 32, 3] there" in said
    # Its plugins are those of the run.
    assert "loss at 64 tokens" in launched("evaluate", f"run.dir={tmp_path / 'run'}", "tasks=loss", "batches=1")
    said = launched("export", f"run.dir={tmp_path / 'run'}", f"to={tmp_path / 'hf'}", code=2)
    assert "it has layers of plugins, 'short_conv' of examples.own_layer, which no family" in said
    assert not (tmp_path / "hf").exists()
    swept = [word for word in words if not word.startswith("run.steps")]
    launched("train", "-m", *swept[:-1], f"run.dir={tmp_path / 'sweep'}", "run.steps=1", "model.short_conv.expand=1,2")
    assert {p.name for p in (tmp_path / "sweep").iterdir()} == {
        "model.short_conv.expand=1",
        "model.short_conv.expand=2",
    }


@pytest.mark.slow
def test_linear_attention_is_planned_and_sends_no_more_for_a_longer_sequence():
    def sent(kind, length):
        words = [
            f"model.layer_pattern=[{kind}+mlp]",
            f"data.sequence_length={length}",
            "data.global_batch=1",
            "mesh.sp=8",
        ]
        words += ["plugins=[examples.gla_layer]", "recipe=long_context", "model=8b", "sequence.order=contiguous"]
        with plugins_of_a_test():
            planned = plan(parse(["device=h100", "devices=8", "search=false", "finalists=0", *words]))["plan"][
                "predicted"
            ]
        assert planned["bytes"] > 0 and planned["step_seconds"] > 0
        return planned["bytes_sent_along"]["sp"]

    assert sent("simple_gla", 65536) == sent("simple_gla", 131072) and sent("full", 65536) < sent("full", 131072)


@pytest.mark.slow
def test_a_hybrid_with_linear_attention_is_the_same_on_ranks_of_the_sequence(tmp_path):
    words = [
        "plugins=[examples.gla_layer]",
        *TINY,
        "model.layer_pattern=[simple_gla+mlp,full+mlp]",
    ]
    words += ["run.steps=4", "optimizer.learning_rate=1e-2", "model.simple_gla.slowness=4"]
    for name, ranks in (("contiguous", 1), ("contiguous", 2), ("zigzag", 2), ("striped", 2)):
        where = f"run.dir={tmp_path / f'{name}{ranks}'}"
        launched("train", *words, f"sequence.order={name}", f"mesh.sp={ranks}", where)
    one, *others = (losses(tmp_path / name) for name in ("contiguous1", "contiguous2", "zigzag2", "striped2"))
    assert all(one == pytest.approx(other, abs=1e-4) for other in others) and one[-1] < one[0]
    said = launched("train", *words, f"run.dir={tmp_path / 'balanced'}", "sequence.order=balanced", code=2)
    assert "gla_attention: its result depends on the order" in said
    assert "model.simple_gla.slowness must be positive, got 0" in launched(
        "train", *words, "model.simple_gla.slowness=0", code=2
    )


@pytest.mark.slow
def test_several_processes_import_a_layer_of_ones_own(tmp_path):
    keys = ["sequence.order=contiguous", "model.layer_pattern=[short_conv+mlp]", "model.qk_norm=false", "run.steps=2"]
    words = ["plugins=[examples.own_layer]", *ONE, *keys, "mesh.fsdp=-1", f"run.dir={tmp_path / 'run'}"]
    launched("local", "processes=2", "devices=1", *words)
    assert len(losses(tmp_path / "run")) == 2


@pytest.mark.slow
def test_an_optimizer_of_ones_own_learns_and_its_moments_may_be_on_the_host(tmp_path):
    words = [
        "plugins=[examples.own_optimizer]",
        *ONE,
        "optimizer.name=lion",
        "optimizer.learning_rate=1e-3",
        "run.steps=30",
    ]
    launched("train", *words, f"run.dir={tmp_path / 'device'}", "run.stop_after=15")
    launched("train", *words, f"run.dir={tmp_path / 'device'}")
    launched("train", *words, f"run.dir={tmp_path / 'host'}", "optimizer.offload=host")
    found = losses(tmp_path / "device")
    assert len(found) == 30 and found[-1] < 0.9 * found[0]
    assert losses(tmp_path / "host") == pytest.approx(found, rel=1e-4)
    said = launched(
        "plan", "devices=2", "device=h100", "finalists=0", *words[:1], "optimizer.name=lion", "recipe=long_context"
    )
    assert "optimizer moments" in said


@pytest.mark.slow
def test_a_source_of_ones_own_is_trained_on_and_tokenized(tmp_path):
    (tmp_path / "text.md").write_text("# A\n" + "".join(f"## {i}\n{'abcdefgh ' * i}\n" for i in range(30)))
    source = f"chapters:{tmp_path / 'text.md'}"
    words = ["plugins=[examples.own_source]", *ONE, "data=files", f"data.source={source}", "run.steps=20"]
    words += [f"data.cache_dir={tmp_path / 'cache'}", "optimizer.learning_rate=1e-2"]
    launched("train", *words, f"run.dir={tmp_path / 'run'}")
    found = losses(tmp_path / "run")
    assert found[-1] < 0.7 * found[0]
    said = launched("tokenize", words[0], f"source={source}", f"to={tmp_path / 'tokens'}")
    assert "of 31 documents" in said
    plain = [word for word in words if not word.startswith(("plugins", "data"))]
    plain += ["data=dataset", f"data.source={tmp_path / 'tokens'}", "data.sequence_length=64", "data.global_batch=2"]
    launched("train", *plain, f"run.dir={tmp_path / 'dataset'}")  # needs no plugin any more
    assert losses(tmp_path / "dataset") == found
    (tmp_path / "text.md").write_text("another text")
    assert "cannot resume with other data" in launched("train", *words, f"run.dir={tmp_path / 'run'}", code=2)


@pytest.fixture(scope="module")
def preferred(tmp_path_factory):
    """A run that was trained on pairs, stopped, and resumed."""

    def make(folder):
        pairs = [{"prompt": f"{i}? ", "chosen": "yes " * 3, "rejected": "no " * 4} for i in range(6)]
        (folder / "pairs.jsonl").write_text("".join(f"{json.dumps(pair)}\n" for pair in pairs))
        words = [
            "plugins=[examples.dpo_loss]",
            *ONE,
            "loss=dpo",
            "data=files",
            f"data.source=pairs:{folder / 'pairs.jsonl'}",
        ]
        words += ["run.steps=12", "optimizer.learning_rate=1e-2", f"run.dir={folder / 'run'}"]
        launched("train", *words, "run.stop_after=6", "accumulation=2")
        launched("train", *words, "accumulation=2")
        launched("train", *words[:-1], f"run.dir={folder / 'whole'}", "accumulation=2")

    return once(tmp_path_factory, "preferred", make)


@pytest.mark.slow
def test_preferences_are_learned_and_the_reference_stays(preferred):
    found, rows = losses(preferred / "run"), read_rows(preferred / "run" / "metrics.jsonl")
    assert found == losses(preferred / "whole") and len(found) == 12
    assert found[0] == pytest.approx(np.log(2), abs=1e-6) and found[-1] < 0.3
    assert rows[-1]["reward_accuracy"] == 1 and rows[-1]["reward_margin"] > 1
    run = Run(preferred / "run")
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])

    def leaves(prefix, names):
        return run.load(
            {f"{prefix}.{n}": jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=here) for n, p in names.items()}
        )

    declared = {n.removeprefix("params."): p for n, p in declared_leaves(run.model).items() if n.startswith("params.")}
    start = initialise(declare(run.model), jax.random.key(0))
    kept = leaves("buffers.reference.params", declared)
    policy = leaves("params", declared)
    for name in declared:
        at = start
        for part in name.split("."):
            at = at[part]
        assert np.array_equal(kept[f"buffers.reference.params.{name}"], at)
        assert not np.array_equal(policy[f"params.{name}"], at)


@pytest.mark.slow
def test_a_student_follows_its_teacher(preferred, tmp_path):
    keys = ["loss=distill", "distill.share=1", "distill.temperature=1", "optimizer.learning_rate=1e-2", "run.steps=20"]
    words = ["plugins=[examples.distillation]", *ONE, "model.model_dim=48", *keys, f"run.dir={tmp_path / 'run'}"]
    assert "distill.teacher is missing" in launched("train", *words, code=2)
    words += [f"distill.teacher={preferred / 'run'}"]
    launched("train", *words, "run.stop_after=10")
    launched("train", *words)
    launched("train", *words[:-2], words[-1], f"run.dir={tmp_path / 'whole'}")
    found = losses(tmp_path / "run")
    assert found == losses(tmp_path / "whole") and found[-1] < 0.6 * found[0]


@pytest.mark.slow
def test_training_from_python_learns_and_resumes(tmp_path):
    def run(*words):
        command = [sys.executable, str(ROOT / "examples" / "train_from_python.py"), *words]
        made = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"JAX_PLATFORMS": "cpu"})
        assert made.returncode == 0, made.stderr
        return made.stdout

    assert "step 25, finished False" in run(f"run.dir={tmp_path / 'run'}", "run.stop_after=25")
    assert "step 60, finished True" in run(f"run.dir={tmp_path / 'run'}")
    run(f"run.dir={tmp_path / 'whole'}")
    found = losses(tmp_path / "run")
    assert found == losses(tmp_path / "whole") and found[-1] < 0.5 * found[0]
    # What a command that trains the cross entropy is refused by.
    recipe = json.loads((tmp_path / "run" / "recipe.json").read_text())
    assert recipe["loss"] == "__main__.smoothed"


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


@pytest.mark.slow
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


@pytest.mark.slow
def test_rollouts_are_rewarded():
    from examples.rollouts import main

    means = main(steps=8)
    assert means[-1] > means[0] + 0.05
