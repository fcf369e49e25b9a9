"""Code for the sections of a recipe: their keys, which keys affect the losses of a run, and validation.

A section is a dataclass; it may hold other sections, and lists of them. A key counts as affecting the losses unless its field
declares otherwise, so a key that nobody classified prevents a run from resuming with another value, never the reverse.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from typing import Any

_DECIDES, _RECORDED, _CANONICAL, _COMPARED = "decides", "recorded", "canonical", "compared"


def operational(default: Any = MISSING, *, recorded: bool = False) -> Any:
    """Returns the field of a key that affects where, how fast or how carefully a run works, but not its losses beyond rounding:
    it may change when the run resumes.

    Args:
      recorded: checkpoints store it anyway, for information.
    """
    return field(default=default, metadata={_DECIDES: False, _RECORDED: recorded})


def compared(default: Any = MISSING, *, default_factory: Any = MISSING, recorded: bool = False) -> Any:
    """Returns the field of a key that affects the losses, but is compared elsewhere when a run resumes: by the data cursor, the
    curriculum's history, or a rule of its own. The docstring of its section says which.

    Args:
      recorded: checkpoints store it, for that rule.
    """
    metadata = {_DECIDES: False, _RECORDED: recorded, _COMPARED: True}
    if default_factory is not MISSING:
        return field(default_factory=default_factory, metadata=metadata)
    return field(default=default, metadata=metadata)


def spelled(default: Any, canonical: Callable[[Any], Any]) -> Any:
    """Returns the field of a key whose values have several spellings; `canonical` maps equivalent ones to the same value."""
    return field(default=default, metadata={_CANONICAL: canonical})


@dataclass(frozen=True)
class Key:
    """A key of a recipe, with dots, and its value."""

    name: str
    value: Any
    declared: Field

    @property
    def decides(self) -> bool:
        """Whether a run must resume with the same value."""
        return self.declared.metadata.get(_DECIDES, True)

    @property
    def affects_losses(self) -> bool:
        """Whether it is compared when a run resumes, here or by a rule of its own."""
        return self.decides or self.declared.metadata.get(_COMPARED, False)

    @property
    def recorded(self) -> bool:
        """Whether checkpoints store it."""
        return self.decides or self.declared.metadata[_RECORDED]

    @property
    def default(self) -> Any:
        """The default value; None if it has no default."""
        f = self.declared
        if f.default_factory is not MISSING:
            return f.default_factory()
        return None if f.default is MISSING else f.default

    def canonical(self, value: Any) -> Any:
        """Returns the canonical spelling of a value."""
        return self.declared.metadata.get(_CANONICAL, lambda same: same)(value)


def keys_of(section: Any, prefix: str = "") -> Iterator[Key]:
    """Yields every key of a section and of those in it; a key of a list of sections has its index."""
    for f in fields(section):
        value, name = getattr(section, f.name), f"{prefix}{f.name}"
        if is_dataclass(value):
            yield from keys_of(value, f"{name}.")
        elif isinstance(value, list) and value and all(map(is_dataclass, value)):
            for i, one in enumerate(value):
                yield from keys_of(one, f"{name}[{i}].")
        else:
            yield Key(name, value, f)


def flat(section: Any, prefix: str = "") -> dict[str, Any]:
    """Returns key -> value of a section, see `keys_of`."""
    return {key.name: key.value for key in keys_of(section, prefix)}


def validate(section: Any) -> None:
    """Checks a section by its `validate()`, where it has one, and then those in it.

    What needs two sections is checked by the section that holds both.

    Raises:
      ValueError: a value is wrong wherever the recipe is used, on whatever mesh; names the key and the remedy.
    """
    if hasattr(section, "validate"):
        section.validate()
    for f in fields(section):
        value = getattr(section, f.name)
        for one in value if isinstance(value, list) else [value]:
            if is_dataclass(one):
                validate(one)
