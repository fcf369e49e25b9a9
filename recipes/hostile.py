"""What a recipe must not hold: values of secrets, and aliases that stand for more values than anybody can write."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

# What the names of secrets end with, in the tools that people use: HF_TOKEN, WANDB_API_KEY, AWS_SECRET_ACCESS_KEY.
_SECRET = re.compile(r"(^|_)(TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|ACCESS_KEY|PRIVATE_KEY)$", re.IGNORECASE)
_VARIABLE = re.compile(r"\$\{\s*oc\.env\s*:\s*['\"]?([A-Za-z_]\w*)")
_MOST = 100_000  # values of a file of a recipe


def is_secret(name: str) -> bool:
    """Returns whether an environment variable is named as secrets are."""
    return _SECRET.search(name) is not None


def secret_in(node: Any, key: str = "") -> tuple[str, str] | None:
    """Returns (the key, the variable) of the first value of a recipe that takes a secret from the environment; None without
    one."""
    if isinstance(node, dict):
        pairs = [(f"{key}.{name}" if key else str(name), value) for name, value in node.items()]
    elif isinstance(node, (list, tuple)):
        pairs = [(f"{key}[{i}]", value) for i, value in enumerate(node)]
    else:
        named = _VARIABLE.findall(node) if isinstance(node, str) else []
        return next(((key, name) for name in named if is_secret(name)), None)
    return next((found for name, value in pairs if (found := secret_in(value, name))), None)


def too_many_values(file: Path) -> int:
    """Returns how many values a YAML file has, with what its aliases stand for, if that is too many; else 0, as of a file that
    cannot be read."""
    import yaml

    sizes: dict[str | None, int] = {}  # of anchors
    open_ones: list[tuple[str | None, int]] = [(None, 0)]  # anchor and size of the collections around

    def add(size: int, anchor: str | None = None) -> None:
        if anchor is not None:
            sizes[anchor] = size
        around, before = open_ones[-1]
        open_ones[-1] = around, before + size

    try:
        for event in yaml.parse(file.read_text()):
            if isinstance(event, yaml.AliasEvent):
                add(sizes.get(event.anchor, 1))
            elif isinstance(event, yaml.ScalarEvent):
                add(1, event.anchor)
            elif isinstance(event, yaml.CollectionStartEvent):
                open_ones.append((event.anchor, 1))
            elif isinstance(event, yaml.CollectionEndEvent):
                anchor, size = open_ones.pop()
                add(size, anchor)
    except (OSError, UnicodeDecodeError, yaml.YAMLError):  # reported where it is composed
        return 0
    total = open_ones[0][1]
    return total if total > _MOST else 0
