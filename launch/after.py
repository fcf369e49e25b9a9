"""What may come after a run: the commands, as they are typed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from recipes.arguments import in_shell, key_of


def next_commands(arguments: Sequence[str], recipe: Any, step: int) -> list[str]:
    """Returns a line for each command that makes sense after that number of steps, with what it does.

    Args:
      arguments: the run's own.
    """
    where = f"run.dir={recipe.run.dir}"
    stop = ("run.stop_after",)
    if step < recipe.run.steps:
        more = _command("train", [word for word in arguments if key_of(word) not in stop])
        return _table(
            [(more, f"the other {recipe.run.steps - step} steps"), (_command("report", [where]), "a page about it")]
        )
    rest = [word for word in arguments if key_of(word) not in (*stop, "run.steps", "run.extend")]
    longer = _command("train", [*rest, f"run.steps={2 * recipe.run.steps}", "run.extend=true"])
    export = (_command("export", [where, f"to={str(recipe.run.dir).rstrip('/')}_hf"]), "for transformers")
    return _table(
        [
            (_command("evaluate", [where]), "loss by position, and recall"),
            (_command("generate", [where, "prompt=TEXT"]), "what it writes"),
            *([export] if _is_published(recipe.model) else []),
            (_command("report", [where]), "a page about the run"),
            (longer, "as many steps again"),
        ]
    )


def _is_published(model: Any) -> bool:
    """Returns whether a published family can say the model, so that an export is not refused."""
    from ejdist.weights.families import family_of
    from ejdist.weights.files import WeightsError

    try:
        family_of(model)
    except WeightsError:
        return False
    return True


def _command(name: str, words: Sequence[str]) -> str:
    return in_shell(["python", "-m", f"launch.{name}", *words])


def _table(rows: Sequence[tuple[str, str]]) -> list[str]:
    return ["next:", *(f"  {command}  # {what}" for command, what in rows)]
