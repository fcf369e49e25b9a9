"""The schema of a recipe: the sections that the modules which read them declare, and composition with clear errors."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from ejdist.models.decoder import DecoderConfig
from ejdist.training.program import TrainSections


class RecipeError(ValueError):
    """A recipe cannot be composed; the message names the key and the nearest valid one."""


@dataclass
class ClusterSection:
    """The `cluster` section: how processes find each other. "local" is one process; "auto" lets JAX ask the cluster
    (Cloud TPU, Slurm, Kubernetes, Open MPI); "manual" takes the three values below."""

    kind: str = "local"
    coordinator: str | None = None  # host:port of process 0
    num_processes: int | None = None
    process_id: int | None = None
    timeout: int = 300  # seconds that the processes have to come together
    heartbeat: int = 100  # seconds without a sign after which a process is taken for lost, and all end


@dataclass
class Recipe(TrainSections):
    """Everything that a run is made from."""

    model: DecoderConfig = field(default_factory=DecoderConfig)
    cluster: ClusterSection = field(default_factory=ClusterSection)


GROUPS = ("recipe", "model", "mesh", "data", "optimizer", "cluster")


def options_of(group: str) -> list[str]:
    """Returns the names of a group's variants: its yaml files."""
    folder = resources.files("recipes") / group
    return sorted(p.name.removesuffix(".yaml") for p in folder.iterdir() if p.name.endswith(".yaml"))


def keys_of(section: Any = None, prefix: str = "") -> list[str]:
    """Returns every key that a recipe has, with dots."""
    section = Recipe() if section is None else section
    keys = []
    for f in dataclasses.fields(section):
        value = getattr(section, f.name)
        name = f"{prefix}{f.name}"
        keys += keys_of(value, f"{name}.") if dataclasses.is_dataclass(value) else [name]
    return keys


def _nearest(name: str, known: Sequence[str]) -> str:
    found = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    tail = [k for k in known if k.rpartition(".")[2] == name.rpartition(".")[2]]
    best = tail or found
    return f"; did you mean {best[0]!r}?" if best else ""


def _check_values(overrides: Sequence[str]) -> None:
    """Raises RecipeError for a value that the grammar of Hydra cannot read, or reads as several values to sweep over."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    parser = OverridesParser.create()
    for override in overrides:
        try:
            swept = parser.parse_override(override).is_sweep_override()
        except HydraException:
            swept = True
        if swept:
            name, _, value = override.partition("=")
            raise RecipeError(
                f"cannot read the value of {override!r}: a list is written {name}=[a,b], and anything with special characters "
                f"in quotes inside those of the shell: '{name}=\"{value}\"'"
            )


def check_overrides(overrides: Sequence[str]) -> None:
    """Raises RecipeError for an override that is not KEY=VALUE of a known key, or names no variant of its group."""
    keys = keys_of()
    for override in overrides:
        name, equals, value = override.partition("=")
        if not equals:
            raise RecipeError(f"cannot read {override!r}: write KEY=VALUE, for example run.steps=500")
        name = name.lstrip("+~")
        if name in GROUPS:
            if value not in options_of(name):
                known = options_of(name)
                raise RecipeError(f"{name}={value} is unknown; there are {', '.join(known)}{_nearest(value, known)}")
        elif name not in keys:
            inside = [k for k in keys if k.startswith(f"{name}.")]
            if inside:
                raise RecipeError(f"{name!r} is a section; set one of its keys: {', '.join(inside)}")
            raise RecipeError(f"unknown key {name!r}{_nearest(name, [*keys, *GROUPS])}")


def compose(overrides: Sequence[str]) -> Recipe:
    """Returns the recipe of a command line: train.yaml, the variants named, and the keys given.

    Raises:
      RecipeError: an unknown key or variant (the nearest valid one is named), or a value of the wrong type.
    """
    import hydra
    from hydra.core.config_store import ConfigStore
    from omegaconf import OmegaConf

    check_overrides(overrides)
    _check_values(overrides)
    ConfigStore.instance().store(name="schema", node=Recipe)
    try:
        with hydra.initialize_config_module("recipes", version_base="1.3"):
            composed = hydra.compose("train", overrides=list(overrides))
        OmegaConf.set_struct(composed, True)
        recipe: Any = OmegaConf.to_object(composed)
        return recipe
    except Exception as error:  # Hydra and OmegaConf have many; all of them mean that the recipe cannot be composed
        raise RecipeError(_explain(error)) from error


def _explain(error: BaseException) -> str:
    text = str(error.__cause__ or error)
    key = re.search(r"full_key: (\S+)", text)
    first = text.splitlines()[0] if text else type(error).__name__
    if key and "not in" in first:
        return f"unknown key {key.group(1)!r}{_nearest(key.group(1), keys_of())}"
    return f"{key.group(1)}: {first}" if key else first
