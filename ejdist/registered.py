"""What plugins have registered, for the code that reads it. `ejdist.plugins` is where they register it."""

from __future__ import annotations

import functools
import hashlib
import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, make_dataclass
from pathlib import Path
from typing import Any

LAYER, SOURCE, OPTIMIZER, LOSS = "layer", "source", "optimizer", "loss"


class PluginError(ValueError):
    """A plugin cannot be used; the message names the module and the remedy."""


@dataclass(frozen=True)
class Entry:
    """One registration.

    Attributes:
      kind, name: of what, and its name in recipes. value: the object itself.
      section: the dataclass of its sizes; None if it has none.
      module: that registered it.
      table: another dict that holds `value` by its name too.
    """

    kind: str
    name: str
    value: Any
    section: type | None
    module: str
    table: dict[str, Any] | None = None


_ENTRIES: dict[tuple[str, str], Entry] = {}
_LOADED: dict[str, None] = {}


def add(entry: Entry) -> None:
    """Registers an entry. Raises PluginError if another has its kind and name."""
    if before := _ENTRIES.get((entry.kind, entry.name)):
        who = "twice" if before.module == entry.module else f"too, and {before.module} did before"
        raise PluginError(
            f"plugins: {entry.module} registers the {entry.kind} {entry.name!r} {who}; give one of them another name, or "
            "leave one out"
        )
    _ENTRIES[entry.kind, entry.name] = entry
    if entry.table is not None:
        entry.table[entry.name] = entry.value


def forget(entries: Sequence[Entry] | None = None) -> None:
    """Takes entries out again; None: all of them, and the modules that were loaded."""
    for entry in list(_ENTRIES.values()) if entries is None else entries:
        del _ENTRIES[entry.kind, entry.name]
        if entry.table is not None:
            del entry.table[entry.name]
    if entries is None:
        _LOADED.clear()


def entry_of(kind: str, name: str) -> Entry | None:
    """Returns what is registered under a name, None if nothing is."""
    return _ENTRIES.get((kind, name))


def names_of(kind: str) -> list[str]:
    """Returns the registered names of a kind, in order."""
    return [entry.name for entry in _ENTRIES.values() if entry.kind == kind]


def sections_of(kind: str) -> dict[str, type]:
    """Returns name -> section of the registrations of a kind that have one."""
    return {e.name: e.section for e in _ENTRIES.values() if e.kind == kind and e.section is not None}


def sizes_of(holder: Any, entry: Entry) -> Any:
    """Returns the values of an entry's section, None if it has none.

    Raises:
      PluginError: the holder, a section of a recipe, lacks it.
    """
    if entry.section is None:
        return None
    if not hasattr(holder, entry.name):
        raise PluginError(
            f"{type(holder).__name__} has no section {entry.name!r}, which the {entry.kind} of {entry.module} reads: it was "
            "made before that was registered; compose the recipe after it"
        )
    return getattr(holder, entry.name)


def grown(base: type, sections: dict[str, type]) -> type:
    """Returns the dataclass with a field for each of these sections, at its defaults; itself without any."""
    return _grown(base, tuple(sections.items()))


@functools.lru_cache(maxsize=64)
def _grown(base: Any, sections: tuple[tuple[str, type], ...]) -> type:
    if not sections:
        return base
    more = [(name, kind, field(default_factory=kind)) for name, kind in sections]
    hashed = base.__dataclass_params__.unsafe_hash
    return make_dataclass(base.__name__, more, bases=(base,), unsafe_hash=hashed, module=base.__module__)


def check_section(module: str, kind: str, name: str, section: Any, holder: type, *, hashed: bool) -> None:
    """Raises PluginError unless a dataclass can be a section of a holder under this name."""
    of = f"plugins: the section of the {kind} {name!r} that {module} registers"
    if not isinstance(section, type) or not hasattr(section, "__dataclass_fields__"):
        raise PluginError(f"{of} must be a dataclass, got {section!r}")
    if name in {f.name for f in fields(holder)}:
        raise PluginError(f"{of} would be the key {name!r}, which the recipe has already; give it another name")
    if section.__dataclass_params__.frozen:  # pyrefly: ignore[missing-attribute]
        raise PluginError(
            f"{of} is frozen, and a recipe is composed by setting its keys; declare it without frozen=True"
        )
    if hashed and section.__hash__ is None:
        raise PluginError(
            f"{of} cannot be hashed, as the model's sections are; declare it @dataclass(unsafe_hash=True)"
        )
    try:
        section()
    except TypeError as error:
        raise PluginError(f"{of} needs a default for every field ({error})") from error


def load(modules: Sequence[str]) -> None:
    """Imports plugins, which register what they have. A module that was loaded before stays as it is.

    Raises:
      PluginError: there is no such module, it fails, or it registers nothing.
    """
    for name in modules:
        if not isinstance(name, str) or not all(part.isidentifier() for part in name.split(".")):
            raise PluginError(
                f"plugins has {name!r}, which is not the name of a module; write plugins=[my.module] for my/module.py"
            )
        if name not in _LOADED:
            _load(name)


def _load(name: str) -> None:
    before = list(_ENTRIES)
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
    importlib.invalidate_caches()
    try:
        importlib.import_module(name)
    except Exception as error:
        forget([entry for key, entry in list(_ENTRIES.items()) if key not in before])
        if isinstance(error, PluginError):
            raise
        if isinstance(error, ModuleNotFoundError) and error.name and f"{name}.".startswith(f"{error.name}."):
            raise PluginError(
                f"plugins: there is no module {name}, neither in the current folder {here} nor installed; check the name, "
                "start the command in the folder that has it, or install it"
            ) from None
        raise PluginError(f"plugins: importing {name} fails{_where(error)}; fix the module, or leave it out") from error
    if not any(key not in before or _is_in(entry.module, name) for key, entry in _ENTRIES.items()):
        raise PluginError(
            f"plugins: {name} registers nothing; call register_layer, register_source, register_optimizer or register_loss of "
            "ejdist.plugins in it, or leave it out"
        )
    _LOADED[name] = None


def _where(error: Exception) -> str:
    """Returns the place and the words of an error in a module."""
    if isinstance(error, SyntaxError):
        return f" ({error.filename}, line {error.lineno}: {error.msg})"
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f" ({last.filename}, line {last.lineno}: {type(error).__name__}: {error})"


def _is_in(module: str, package: str) -> bool:
    return f"{module}.".startswith(f"{package}.")


def loaded() -> list[str]:
    """Returns the modules that were loaded, in order."""
    return list(_LOADED)


def digests() -> dict[str, str]:
    """Returns a fact about each loaded plugin, which hosts compare: the digest of the imported files of its package."""
    facts = {}
    for name in _LOADED:
        digest, package = hashlib.sha256(), name.partition(".")[0]
        for module in sorted(one for one in sys.modules if _is_in(one, package)):
            file = getattr(sys.modules[module], "__file__", None)
            if file is not None and Path(file).is_file():
                digest.update(f"{module}\0".encode() + Path(file).read_bytes() + b"\0")
        facts[f"plugin {name} (digest of its sources)"] = digest.hexdigest()[:16]
    return facts


def check_recorded(recorded: Sequence[str], given: Sequence[str], where: Any) -> None:
    """Raises PluginError, naming the modules, if a run recorded plugins that are not given now."""
    missing = [name for name in recorded if name not in given]
    if missing:
        raise PluginError(
            f"the run in {where} was started with plugins=[{','.join(recorded)}], and here {' and '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} missing; give plugins=[{','.join(dict.fromkeys([*given, *recorded]))}]"
        )
