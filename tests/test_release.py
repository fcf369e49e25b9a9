"""A release: what an installation brings, the files of containers, and the version."""

import json
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

from launch.errors import WRONG, run_command

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
# Packages of `train` whose module has another name.
MODULES = {"orbax-checkpoint": "orbax", "hydra-core": "hydra", "pyyaml": "yaml"}


def names(requirements):
    return [re.match(r"[\w-]+", requirement)[0] for requirement in requirements]


@pytest.mark.slow
def test_operations_need_no_package_of_the_commands():
    """Without the packages of `train`, whatever else is installed, operations are imported and called, sharded too."""
    blocked = [MODULES.get(name, name) for name in names(EXTRAS["train"])]
    code = f"""
import sys
sys.modules.update(dict.fromkeys({blocked}))  # an import of one fails
import jax, jax.numpy as jnp
import kernels, ejdist
from ejdist import flash_attention, make_mesh, moe, ring_attention
assert len(kernels.operations()) > 40
x = jnp.ones((1, 32, 2, 16))
mesh = make_mesh(sp=2, devices=jax.devices()[:2])
assert jnp.allclose(ring_attention(x, x, x, causal=True, mesh=mesh), flash_attention(x, x, x, causal=True))
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


def packages_of_an_installation():
    """Returns the packages that `pip install ejdist` brings, without an extra."""
    found, left = {PROJECT["name"]}, names(PROJECT["dependencies"])
    while left:
        name = re.sub(r"[-_.]+", "-", left.pop()).lower()
        if name not in found:
            found.add(name)
            left += names(r for r in metadata.requires(name) or [] if "extra ==" not in r and "_version <" not in r)
    return found


COMMANDS = {
    "train recipe=nano": "the package optax is not installed; the commands need pip install 'ejdist[train]'",
    "export run.dir=run to=there": "the package optax is not installed; the commands need pip install 'ejdist[train]'",
    "export from=there": "the package optax is not installed; the commands need pip install 'ejdist[train]'",
    "export to=there": "give run.dir=DIR and to=DIR, or from=DIR; --help has examples",
    "tokenize to=there": "source is missing, for example source='corpus/**/*.jsonl'",
    "tokenize source=none.txt to=there": "source = 'none.txt'",
    "tokenize source=a.txt to=there tokenizer=bpe:300": "the package tokenizers is not installed; the commands need",
    "evaluate run.dir=run": "the package optax is not installed; the commands need pip install 'ejdist[train]'",
}


@pytest.mark.slow
def test_without_the_extra_a_command_ends_in_a_sentence(tmp_path):
    """In a process that imports nothing but what an installation without it brings."""
    (tmp_path / "a.txt").write_text("a text")
    own = packages_of_an_installation()
    others = [
        module
        for module, brought in metadata.packages_distributions().items()
        if not own & {re.sub(r"[-_.]+", "-", name).lower() for name in (*brought, module)}
    ]
    assert {"orbax", "etils", "tokenizers"} <= {*others} and not {"jax", "numpy", "jaxtyping", "ejdist"} & {*others}
    code = f"""
import contextlib, importlib, io, json, sys
sys.modules.update(dict.fromkeys({others}))  # an import of one fails
ended = {{}}
for line in {[*COMMANDS]}:
    name, *words = line.split()
    with contextlib.redirect_stderr(io.StringIO()) as told:
        ended[line] = importlib.import_module(f"launch.{{name}}").main(words), told.getvalue()
print(json.dumps(ended))
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    for line, (exit_code, told) in json.loads(ran.stdout.splitlines()[-1]).items():
        assert exit_code == WRONG and told.startswith(f"error: {COMMANDS[line]}") and told.count("\n") == 1, (
            line,
            told,
        )


def test_a_command_without_its_packages_says_what_to_install(capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    def body(arguments):
        raise ModuleNotFoundError("No module named 'orbax'", name="orbax.checkpoint")

    assert run_command(["recipe=nano"], body, lambda arguments: "") == WRONG
    assert capsys.readouterr().err == (
        "error: the package orbax is not installed; the commands need pip install 'ejdist[train]'\n"
    )


def test_an_import_that_is_our_own_fault_is_a_bug():
    def body(arguments):
        raise ModuleNotFoundError("No module named 'ejdist.nowhere'", name="ejdist.nowhere")

    with pytest.raises(ModuleNotFoundError):
        run_command(["recipe=nano"], body, lambda arguments: "")


@pytest.mark.parametrize("path", sorted(ROOT.glob("docker/*.Dockerfile")), ids=lambda path: path.name)
def test_containers_copy_and_install_what_there_is(path):
    text, ignored = path.read_text(), (ROOT / ".dockerignore").read_text().split()
    copied = [word for line in re.findall(r"^COPY (.*)$", text, re.M) for word in line.split()[:-1]]
    assert ignored[0] == "*" and {f"!{name}" for name in copied} == {word for word in ignored if word[0] == "!"}
    assert all((ROOT / name).exists() for name in copied)
    (extras,) = re.findall(r"'\.\[(.*)\]'", text)
    assert set(extras.split(",")) <= EXTRAS.keys() and "train" in extras
    packaged = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]
    assert {f"{name}*" for name in copied if (ROOT / name).is_dir()} == set(packaged["include"])


def test_the_version_has_its_changes():
    heading = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert heading[1].rstrip(",") == PROJECT["version"]


@pytest.mark.slow
def test_a_wheel_trains_outside_of_the_checkout(tmp_path):
    """Its files alone, beside the packages installed here."""
    wheel = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(tmp_path), "."]
    source = tmp_path / "source"
    tracked = subprocess.check_output(["git", "-C", str(ROOT), "ls-files", "-z"], text=True).split("\0")
    for name in filter(None, tracked):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes((ROOT / name).read_bytes())
    temporary = os.environ | {"TMPDIR": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    subprocess.run(wheel, cwd=source, env=temporary, check=True)
    (made,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(made) as files:
        assert not [name for name in files.namelist() if name.startswith(("tests/", "benchmarks/", "docs/"))]
        files.extractall(tmp_path / "site")
    for recipe in ("long_context", "moe"):
        command = [
            sys.executable,
            "-m",
            "launch.train",
            f"recipe={recipe}",
            "run.steps=2",
            f"run.dir={tmp_path}/{recipe}",
        ]
        environment = os.environ | {"PYTHONPATH": f"{tmp_path / 'site'}:{os.environ.get('PYTHONPATH', '')}"}
        subprocess.run(command, cwd=tmp_path, env=environment, check=True)
        assert (tmp_path / recipe / "summary.json").exists()
