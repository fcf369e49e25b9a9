"""Hydra's composition of a recipe. What no key and no file of the user's can change is composed once in a process."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from recipes.arguments import key_of, quoted, value_of
from recipes.published import follows, leaves


@functools.lru_cache(maxsize=1)
def _store(schema: type) -> None:
    """Tells Hydra the schema of recipes; it walks all dataclasses, a fifth of the time of a composition."""
    from hydra.core.config_store import ConfigStore

    ConfigStore.instance().store(name="schema", node=schema)


def composed(schema: type, groups: Collection[str], overrides: Sequence[str], config_dir: Path | None) -> Any:
    """Returns the composed config of a command line.

    Args:
      schema: the type of a recipe.
      groups: the names that choose a variant; other names are keys.
      config_dir: the user's folder of variants.

    Raises:
      Exception: Hydra has many, and OmegaConf too; all of them mean that the recipe cannot be composed.
    """
    import hydra

    _store(schema)
    config = _with_values(schema, groups, overrides) if config_dir is None else None
    if config is not None:
        return config
    beside = [] if config_dir is None else [f"hydra.searchpath=[{quoted(f'file://{config_dir}')}]"]
    with hydra.initialize_config_module("recipes", version_base="1.3"):
        return hydra.compose("train", overrides=[*overrides, *beside])


@functools.lru_cache(maxsize=64)
def _of_variants(schema: type, words: tuple[str, ...]) -> Callable[[], Any]:
    """Returns what makes a copy of what Hydra composes of the schema that is stored and the project's variants, before keys
    have values. It reads a dozen files and copies what it has after each: most of the time of a composition."""
    import hydra

    with hydra.initialize_config_module("recipes", version_base="1.3"):
        config = hydra.compose("train", overrides=list(words))
    try:  # a pickle is read in a tenth of the time of a deep copy
        return functools.partial(pickle.loads, pickle.dumps(config))
    except (pickle.PicklingError, AttributeError, TypeError):  # sections of plugins may be of types that no module has
        return functools.partial(copy.deepcopy, config)


def _with_values(schema: type, groups: Collection[str], overrides: Sequence[str]) -> Any:
    """Returns the composed config as Hydra makes it: variants, then the value of each key, in order. None where Hydra itself
    has to be asked: for an override that is not KEY=VALUE, or a value that does not fit, which its words explain."""
    from omegaconf import OmegaConf

    if any(override.startswith(("+", "~")) for override in overrides):
        return None
    try:
        config = _of_variants(schema, tuple(word for word in overrides if key_of(word) in groups))()
        for override in overrides:
            if key_of(override) not in groups:
                OmegaConf.update(config, key_of(override), value_of(override), merge=True)
    except Exception:  # whatever it is, the whole composition has it too
        return None
    return config


def meant(schema: type, group: str, variant: str, folder: Path | None) -> tuple[tuple[str, Any], ...]:
    """Returns the keys that a variant gives itself, with their values as a recipe has them, but for those that follow the
    published folder, which a recipe may set. `folder`: the user's that the variant is in, which may change between two calls;
    None for one of the project's."""
    return (_meant if folder is None else _meant.__wrapped__)(schema, group, variant, folder)


@functools.lru_cache(maxsize=64)
def _meant(schema: type, group: str, variant: str, folder: Path | None) -> tuple[tuple[str, Any], ...]:
    import hydra
    from omegaconf import OmegaConf

    if folder is None:
        where = hydra.initialize_config_module("recipes", version_base="1.3")
    else:
        where = hydra.initialize_config_dir(str(folder), version_base="1.3")
    with where:
        alone = hydra.compose(f"{group}/{variant}", overrides=["hydra.searchpath=['pkg://recipes']"])
    values = dict(leaves(OmegaConf.to_container(OmegaConf.merge(OmegaConf.structured(schema), alone))))
    return tuple((key, values[key]) for key, value in leaves(OmegaConf.to_container(alone)) if not follows(value))
