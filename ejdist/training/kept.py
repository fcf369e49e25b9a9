"""What a run keeps of the published folder that it starts from: all but its weights, in run.dir/published.

A run whose folder has gone resumes with these files, and one whose folder has changed names the file.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ejdist.buckets import source_path
from ejdist.weights.published import CONFIG

KEPT = "published"
_FILES = (
    CONFIG, "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "chat_template.jinja", "chat_template.json",
)  # fmt: skip
_TEMPLATES = "additional_chat_templates/*.jinja"


def published_in(init_from: str | None) -> Any:
    """Returns the folder of model.init_from, a `Path` or a `BucketPath`, where it is a published one; None for a run, or where
    nothing is there. Raises ValueError: it is in the home of an unknown user, or a URL that nothing here reads."""
    if init_from is None:
        return None
    folder = source_path("model.init_from", init_from)
    return folder if (folder / CONFIG).is_file() else None


def keep(folder: Any, run_dir: Path) -> None:
    """Copies a folder's files, without its weights, to where the run keeps them. Removes what it kept from an earlier start;
    None, for a run that starts from no folder, does only that.

    Raises:
      ValueError: a file cannot be read. OSError: what is kept cannot be written.
    """
    kept, new = run_dir / KEPT, run_dir / f"{KEPT}.partial"
    if folder is not None and folder.resolve() == kept.resolve():
        return
    shutil.rmtree(new, ignore_errors=True)
    if folder is None:
        shutil.rmtree(kept, ignore_errors=True)
        return
    for name, content in _contents(folder).items():
        (new / name).parent.mkdir(parents=True, exist_ok=True)
        (new / name).write_bytes(content)
    shutil.rmtree(kept, ignore_errors=True)
    new.rename(kept)


def _contents(folder: Any) -> dict[str, bytes]:
    try:
        return {name: (folder / name).read_bytes() for name in _names(folder)}
    except OSError as error:
        raise ValueError(
            f"model.init_from: cannot read {error.filename or folder}: {error.strerror or error}"
        ) from error


def told_of_folder(init_from: str | None, run_dir: Path) -> list[str]:
    """Returns a line if the folder of model.init_from is gone since the run began, or its files differ from those that the run
    keeps; empty if nothing changed, or the run keeps nothing."""
    kept, changed = files_kept(init_from, run_dir)
    if kept is None:
        return []
    if not changed:
        return [f"model.init_from = {init_from!r} has gone: its config.json and tokenizer are those in {kept}"]
    what = f"{', '.join(changed)} in {published_in(init_from)} changed since the run in {run_dir} began"
    return [f"{what}; what it began with is in {kept}, and model.init_from={kept} resumes with that"]


def files_kept(init_from: str | None, run_dir: Path) -> tuple[Path | None, list[str]]:
    """Returns (the run's copy of the folder of model.init_from, the names of the files that have changed in that folder since).
    The copy is None if nothing changed, or the run keeps nothing; there are no names if the folder is gone."""
    kept = run_dir / KEPT
    if init_from is None or not kept.is_dir():
        return None, []
    folder = published_in(init_from)
    if folder is None:
        return kept, []
    names = dict.fromkeys((*_names(kept), *_names(folder)))
    changed = [name for name in names if _content(folder / name) != _content(kept / name)]
    return (kept if changed else None), changed


def _names(folder: Any) -> Iterator[str]:
    yield from (name for name in _FILES if (folder / name).is_file())
    yield from sorted(str(path.relative_to(folder)) for path in folder.glob(_TEMPLATES))


def _content(path: Any) -> bytes | None:
    return path.read_bytes() if path.is_file() else None
