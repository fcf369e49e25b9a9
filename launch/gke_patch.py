"""A user's change to the JobSet that `launch.gke` prints: a YAML file that is merged into it."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def read_patch(key: str, file: str) -> dict[str, Any]:
    """Returns what a patch file holds. Raises ValueError, naming the key, if it cannot be read or is no mapping."""
    import yaml

    try:
        events = list(yaml.parse(Path(file).expanduser().read_text()))
        if any(isinstance(event, yaml.AliasEvent) for event in events):
            raise ValueError(f"{key} = {file!r} has an alias (*NAME): write out what it stands for")
        patch = yaml.safe_load(Path(file).expanduser().read_text())
    except OSError as error:
        raise ValueError(f"{key} = {file!r} cannot be read: {error.strerror or error}") from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{key} = {file!r} is not YAML: {' '.join(str(error).split())[:200]}") from error
    if not isinstance(patch, dict) or not patch:
        raise ValueError(f"{key} = {file!r} must hold what to change of the JobSet, such as spec: {{...}}")
    return patch


def merged(ours: Any, patch: Any, where: str = "") -> Any:
    """Returns a value with a patch merged into it, as kubectl's strategic merge does: mappings by key, and lists of named
    things by the name; null removes a key, and anything else replaces what is there.

    Raises:
      ValueError: a list of named things is patched with one that has no name; says where.
    """
    if isinstance(ours, dict) and isinstance(patch, dict):
        result = dict(ours)
        for key, value in patch.items():
            if value is None:
                result.pop(key, None)
            else:
                result[key] = merged(result.get(key), value, f"{where}.{key}" if where else str(key))
        return result
    if isinstance(ours, list) and isinstance(patch, list) and (by := _key_of(ours)):
        result = list(ours)
        for value in patch:
            if not isinstance(value, dict) or by not in value:
                raise ValueError(f"patch: each item of {where} must have {by}:, by which it is found")
            index = next((i for i, one in enumerate(result) if one[by] == value[by]), None)
            if index is None:
                result.append(value)
            else:
                result[index] = merged(result[index], value, f"{where}[{value[by]}]")
        return result
    return patch


def _key_of(items: list[Any]) -> str:
    """Returns the field by which the items of a list differ, as Kubernetes has it; empty where there is none."""
    for key in ("mountPath", "name"):
        if items and all(isinstance(one, dict) and key in one for one in items):
            return key
    return ""
