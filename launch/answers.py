"""The answers of `launch.generate` in a file: a row of JSON each, appended whole, so that a stop at any moment loses none."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def digest_of(settings: Mapping[str, Any]) -> str:
    """Returns what an answer depends on beside its prompt, in 12 hexadecimal digits."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()[:12]


class Answers:
    """A file of answers, which goes on where a command with the same prompts and settings was stopped.

    Attributes:
      finished: index of a prompt that it answers -> the text.
    """

    def __init__(self, path: Path, settings: str, prompts: list[Any]) -> None:
        """Args:
          settings: see `digest_of`; every row has it.
          prompts: what rows have of them, by index.

        Raises:
          ValueError: the file has other answers.
        """
        self.path, self._settings = path, settings
        self.finished: dict[int, str] = {}
        content = path.read_bytes() if path.exists() else b""
        whole = content.rfind(b"\n") + 1
        for number, line in enumerate(content[:whole].splitlines(), 1):
            row = self._row(line, prompts)
            if row is None:
                raise ValueError(
                    f"to = {str(path)!r} has answers to other prompts, or of other weights or settings (line {number}): name "
                    "another file, or remove it"
                )
            self.finished[row["index"]] = row["text"]
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        os.ftruncate(self._file, whole)  # of a row that was being written

    def _row(self, line: bytes, prompts: list[Any]) -> dict[str, Any] | None:
        """Returns a row that answers one of the prompts; None where it is of something else."""
        try:
            row = json.loads(line)
            same = row["settings"] == self._settings and prompts[row["index"]] == row["prompt"]
            return row if same and isinstance(row["text"], str) else None
        except (ValueError, LookupError, TypeError):
            return None

    def add(self, index: int, prompt: Any, row: Mapping[str, Any]) -> None:
        """Appends an answer, in one write."""
        line = (
            json.dumps({"index": index, "prompt": prompt, **row, "settings": self._settings}, ensure_ascii=False) + "\n"
        )
        data = line.encode("utf-8", "replace")
        while data:  # a disk may take a part
            data = data[os.write(self._file, data) :]
        self.finished[index] = row["text"]
