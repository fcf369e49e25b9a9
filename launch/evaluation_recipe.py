"""The recipe of an evaluation: the model and the data of its weights, and which keys a command line may change."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from recipes.arguments import key_of

FOLDER = "model=hf"  # model, dtype, tokenizer, BOS and EOS of the weights' folder


def with_settings_of_run(where: str, step: int | None, words: Sequence[str], log: Callable[[str], Any]) -> list[str]:
    """Returns the keys of a command line, before them what the run in a folder recorded of its data and mesh. Where the command
    line names a variant (mesh=fsdp), nothing of that section comes from the run, and where it names a recipe, nothing at all.

    Args:
      log: takes a line about what is taken.
    """
    from ejdist.training.recorded import last_step, recorded, recorded_changes, settings_at
    from ejdist.weights.match import written

    named = {key_of(argument) for argument in words}
    recipe = {} if "recipe" in named else recorded(where)
    settings = settings_at(recipe, last_step(where) if step is None else step, recorded_changes(where))
    if (held_out := recipe.get("evaluation.data")) is not None:
        settings["data.source"] = held_out
    if held_out is not None or "data.source" in named:
        settings.pop("data.mixture", None)
    if "plugins" not in named and (plugins := recorded(where).get("plugins")):
        settings["plugins"] = plugins
    inherited = {
        key: value for key, value in settings.items() if key not in named and key.partition(".")[0] not in named
    }
    if inherited:
        mesh = {k.partition(".")[2]: v for k, v in inherited.items() if k.startswith("mesh.") and v not in (1, False)}
        source = inherited.get("data.source")
        data = [f"data.source={source}" if source is not None else "its mixture"] if "data.source" in inherited else []
        named_mesh = any(key.partition(".")[0] == "mesh" for key in named)
        of_mesh = [] if named_mesh and not mesh else [f"mesh {mesh or 'of one'}"]
        tokenizer = [f"data.tokenizer={inherited['data.tokenizer']}"] if "data.tokenizer" in inherited else []
        if told := [*data, *of_mesh, *tokenizer]:
            log(f"from the run: {', '.join(told)}")
    return [*(f"{key}={_override(value, written)}" for key, value in inherited.items()), *words]


def _override(value: Any, written: Callable[[Any], str]) -> str:
    """Returns a value of recipe.json as an override has it."""
    from recipes.arguments import quoted

    if isinstance(value, str):
        return quoted(value)
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_override(one, written)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(_override(one, written) for one in value) + "]"
    return written(value)


def trained_tokenizer(where: str, recipe: Any) -> Any:
    """Returns the tokenizer that the run trained on its own corpus; None if it trained none, or the recipe names another.
    Trained again on other data, it would differ."""
    from ejdist.training.data import DataSection, build
    from ejdist.training.recorded import recorded, settings_at

    first = settings_at(recorded(where), 1)  # it is trained on the data of the first stage
    settings = {key.removeprefix("data."): value for key, value in first.items() if key.startswith("data.")}
    name = str(settings.get("tokenizer"))
    if not name.startswith("bpe:") or name != recipe.data.tokenizer or settings.get("source") == recipe.data.source:
        return None
    names = {f.name for f in dataclasses.fields(DataSection)}
    section = DataSection(**{key: value for key, value in settings.items() if key in names})
    return build(dataclasses.replace(section, cache_dir=recipe.data.cache_dir), seed=0).corpus.tokenizer


def recipe_of(weights: Any, words: Sequence[str]) -> Any:
    """Returns the recipe that weights are evaluated under: their model, and what the command line says.

    Raises:
      ValueError: a key is wrong, or changes the shape of a parameter.
    """
    from ejdist.sections import flat
    from ejdist.weights.match import written
    from recipes.schema import compose

    model = [f"model.{k}={written(v)}" for k, v in flat(weights.model).items() if k != "init_from"]
    model = [] if FOLDER in words else model
    capacity = weights.recipe.get("experts.capacity")
    inherited = [] if capacity is None else [f"experts.capacity={capacity}"]
    recipe = compose([*model, *inherited, *words])
    _check_tokenizer(weights, recipe, words)
    recipe.model.experts.jitter = 0.0  # noise of training
    weights.check(recipe.model)
    if recipe.experts.capacity != capacity:
        raise ValueError(
            f"experts.capacity = {recipe.experts.capacity} in this recipe, and {weights.what} has {capacity}: give "
            f"experts.capacity={written(capacity)}, or leave it out: another one drops other tokens"
        )
    return recipe


def _check_tokenizer(weights: Any, recipe: Any, words: Sequence[str]) -> None:
    """Raises ValueError where nothing names a tokenizer, and the folder of the weights has its own: the default is another."""
    tokenizer, named = weights.tokenizer, "data.tokenizer" in map(key_of, words)
    if tokenizer is None or named or recipe.data.tokenizer != "bytes":
        return
    raise ValueError(
        f"data.tokenizer = 'bytes' is not the tokenizer of {weights.what}: give {FOLDER}, which takes dtype, tokenizer, BOS "
        f"and EOS from there, or data.tokenizer={tokenizer}"
    )


def told_held_out(weights: Any, data: Any) -> str:
    """Returns whether the model was trained on the data, as far as that is known.

    Raises:
      ValueError: they are of another tokenizer, or have another BOS or EOS.
    """
    from ejdist.training.chats.special_tokens import ends_of
    from ejdist.training.data.tokenizer import ByteTokenizer

    trained = weights.data
    if not trained:
        return "whether the model was trained on this data is not known"
    if trained["tokenizer"] != data.corpus.tokenizer.fingerprint:
        raise ValueError(
            "data.tokenizer is not the one that the run was trained with: the losses would be meaningless; give that file"
        )
    now = ends_of(data.corpus.tokenizer)
    for key in (key for key in now if "eos" in trained and now[key] != trained[key]):
        was = "auto" if trained["tokenizer"] == ByteTokenizer.fingerprint and trained[key] else trained[key] or "null"
        raise ValueError(
            f"data.{key}: documents here have {now[key] or 'none'}, and those of the run {trained[key] or 'none'}, so the "
            f"losses would be of other texts; give data.{key}={was}"
        )
    if trained["corpus"] == data.corpus.fingerprint:
        return "NOT held out: this is the corpus that the run was trained on; name other data with data.source"
    return "not the run's corpus; whether some documents are in both is not checked"
