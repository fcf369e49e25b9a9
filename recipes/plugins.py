"""The plugins of a command line, which are imported before its recipe is composed: their sections are part of the schema."""

from __future__ import annotations

from collections.abc import Sequence

from ejdist.registered import PluginError, check_recorded, load
from recipes.arguments import Arguments, key_of, value_of

KEY = "plugins"


def load_plugins(a: Arguments) -> tuple[str, ...]:
    """Imports the modules of `plugins=[...]`, or, without it, those that the user's own recipe names, and returns them.

    Raises:
      PluginError: one cannot be imported, or registers nothing.
    """
    names = _of_words(a.overrides)
    names = _of_recipe(a) if names is None else names
    load(names)
    return tuple(names)


def load_named(words: Sequence[str]) -> None:
    """Imports the modules of `plugins=[...]` among the words of a command that composes no recipe. Raises as `load_plugins`."""
    load(_of_words(words) or [])


def _of_words(words: Sequence[str]) -> list[str] | None:
    matches = [word for word in words if key_of(word) == KEY]
    if not matches:
        return None
    value = value_of(matches[-1])
    if not isinstance(value, list):
        raise PluginError(f"{matches[-1]}: plugins is a list of modules; write plugins=[my.module]")
    return value


def _of_recipe(a: Arguments) -> list[str]:
    """Returns the plugins of the file of a recipe in the user's folder; a file that cannot be read is reported where it is
    composed."""
    from omegaconf import OmegaConf

    name = next((value_of(word) for word in reversed(a.overrides) if key_of(word) == "recipe"), None)
    file = None if a.config_dir is None else a.config_dir / "recipe" / f"{name}.yaml"
    if file is None or not file.is_file():
        return []
    try:
        content = OmegaConf.to_container(OmegaConf.load(file))
    except Exception:
        return []
    value = content.get(KEY) if isinstance(content, dict) else None
    return value if isinstance(value, list) else []


def check_words(words: Sequence[str], error: Exception) -> None:
    """Raises PluginError, from the error of composing, if the run in the `run.dir` of a command line has plugins that it does
    not name."""
    from ejdist.training.recorded import recorded  # it needs packages that launch.tokenize can do without

    folder = next((value_of(word) for word in words if key_of(word) == "run.dir"), None)
    if isinstance(folder, str):
        try:
            check_recorded(recorded(folder).get(KEY) or (), _of_words(words) or (), folder)
        except PluginError as missing:
            raise missing from error


def check_loaded(composed: Sequence[str], loaded: Sequence[str]) -> None:
    """Raises PluginError if the composed recipe has other plugins than were imported: a file that it is made of names them."""
    if tuple(composed) != tuple(loaded):
        raise PluginError(
            f"plugins=[{','.join(composed)}] is set in a file that another one includes, which is read after plugins are "
            f"imported; give it on the command line, or in the file of the recipe that you name"
        )
