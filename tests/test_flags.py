"""Compiler flags: what the launchers print is known to the installed compilers, and what they do not know is said."""

import os
import subprocess
import sys

import pytest

from launch import gke, slurm, tpu_vm
from launch.errors import WRONG
from launch.flags import FLAGS, GPU, TPU, check_known, variable_of
from launch.tpu_vm import variables

RUN = ["recipe=long_context", "mesh.sp=1", "data.global_batch=64"]
POD = ["image=i", "volume=runs", "run.dir=/mnt/runs/a", *RUN]


# The compiler of TPUs starts anew for each: quick are one with SparseCores and one without.
@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=[pytest.mark.slow] * (k in ("v4", "v5p", "v6e"))) for k in FLAGS]
)
@pytest.mark.parametrize("slices", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_the_installed_compiler_knows_what_is_printed(kind, slices):
    given = variable_of(kind, slices)
    check_known(given)
    for variable, text in given.items():
        for flag in text.split():
            assert flag.startswith("--xla_") and "=" in flag
            with pytest.raises(ValueError, match=f"{variable} has {flag.partition('=')[0]}x, which the installed"):
                check_known({variable: f"--{flag[2:].replace('=', 'x=')}"})


PROGRAM = """
import sys
import jax, numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
devices = np.array(topologies.get_topology_desc(sys.argv[1], "tpu").devices).reshape(-1)
rows, weights = (NamedSharding(Mesh(devices, "x"), P(*spec)) for spec in (("x",), (None, "x")))
step = lambda x, ws: jax.lax.scan(lambda x, w: (jax.numpy.tanh(x @ w), None), x, ws)[0].sum()
gradients = jax.jit(jax.grad(step, 1), in_shardings=(rows, weights), out_shardings=weights)
shapes = (jax.ShapeDtypeStruct(s, "bfloat16") for s in ((1024, 1024), (4, 1024, 1024)))
assert "all-gather" in gradients.lower(*shapes).compile().as_text()
"""


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2"])
def test_libtpu_compiles_with_them(topology):
    """A scan over sharded layers. libtpu ends the process for a flag that it does not know, and refuses to compile with one
    that is of another generation."""
    kind = topology.partition(":")[0]
    made = os.environ | {"TPU_SKIP_MDS_QUERY": "1", "JAX_PLATFORMS": "cpu"}
    for flags, well in (
        (variable_of(kind)[TPU], True),
        (variable_of(kind, 2)[TPU], True),
        (f"{variable_of(kind)[TPU]} --xla_no_such_flag=true", False),
        (variable_of("v5e")[TPU], kind not in ("v5p", "v6e")),
    ):
        line = [sys.executable, "-c", PROGRAM, topology]
        ran = subprocess.run(line, env=made | {TPU: flags}, capture_output=True, text=True, check=False)
        assert (ran.returncode == 0) is well, flags + ran.stderr[-2000:]


def test_a_flag_that_is_not_known_is_a_sentence():
    """And no abort of XLA, after which a launcher would start the run again."""
    with pytest.raises(ValueError, match="XLA_FLAGS has --xla_gpu_no_such, which the installed jaxlib does not know"):
        check_known({GPU: "--xla_force_host_platform_device_count=2 --xla_gpu_no_such=true"})
    check_known({GPU: "--xla_force_host_platform_device_count=2 --noxla_gpu_enable_latency_hiding_scheduler", TPU: ""})


def test_what_launchers_print(monkeypatch, capsys):
    for name in (GPU, TPU, "JAX_COMPILATION_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    pod = gke.text(*gke.parse([*POD, "topology=v5p:2x2x1", "mesh.fsdp=4"]))
    assert f"value: {variable_of('v5p')[TPU]}" in pod and "run.compile_cache=/mnt/runs/compiled" in pod
    several = ["topology=v6e:2x2", "slices=2", "mesh.fsdp=4", "mesh.dp=2"]
    assert variable_of("v6e", 2)[TPU] in gke.text(*gke.parse([*POD, *several]))
    gpus = ["nodes=1", "gpus_per_node=8", "mesh.fsdp=8"]
    assert variable_of("h200")[GPU] in gke.text(*gke.parse([*POD, *gpus, "gpu=nvidia-h200-141gb"]))
    for more in (["flags=false"], ["env.XLA_FLAGS=--mine"], ["gpu=nvidia-a100-80gb"]):
        kind = [] if "gpu=nvidia-a100-80gb" in more else ["gpu=nvidia-h200-141gb"]
        assert variable_of("h200")[GPU] not in gke.text(*gke.parse([*POD, *gpus, *kind, *more]))
    job = ["nodes=1", "gpus_per_node=8", *RUN, "mesh.fsdp=8", "run.dir='my runs/a'"]
    script = slurm.script(*slurm.parse([*job, "gpu=h100"]))
    assert f'export XLA_FLAGS="${{XLA_FLAGS:-{variable_of("h100")[GPU]}}}"' in script
    assert (
        "'run.compile_cache='\"'\"'my runs/compiled'\"'\"''" in script or "run.compile_cache=my runs/compiled" in script
    )
    assert "XLA_FLAGS" not in slurm.script(*slurm.parse([*job, "gpu=h100", "flags=false"]))
    options, rest = tpu_vm.parse(["tpu=a,b", "zone=z", "generation=v5e", *RUN, "run.dir=/nfs/a"])
    assert (
        f"{TPU}={variable_of('v5e', 2)[TPU]}" in variables(options, "x") and "run.compile_cache=/nfs/compiled" in rest
    )
    options = tpu_vm.parse(["tpu=a", "zone=z", "generation=v5e", *RUN, f"env.{TPU}=--mine"])[0]
    assert [v for v in variables(options, "x") if TPU in v] == [f"{TPU}={variable_of('v5e')[TPU]}", f"{TPU}=--mine"][1:]
    assert slurm.main(["gpu=h100", *RUN]) == WRONG
    assert "gpu = 'h100' says the kind of gpus_per_node=" in capsys.readouterr().err


def test_compiled_programs_are_kept_where_the_run_says(monkeypatch):
    """Neither beside run.dir where a key or a variable names a folder, nor on CPUs, where none are kept."""
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    pod = ["topology=v5e:2x2", "mesh.fsdp=4"]
    for more in (["run.compile_cache=/mnt/runs/mine"], ["env.JAX_COMPILATION_CACHE_DIR=/x"], ["command=doctor"]):
        assert "runs/compiled" not in gke.text(*gke.parse([*POD, *pod, *more]))
    assert "compile_cache" not in slurm.script(*slurm.parse(["nodes=2", *RUN]))
    assert "compile_cache" not in str(tpu_vm.parse(["hosts=a,b", *RUN])[1])
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "/x")
    assert "compile_cache" not in slurm.script(*slurm.parse(["nodes=1", "gpus_per_node=8", *RUN, "mesh.fsdp=8"]))
