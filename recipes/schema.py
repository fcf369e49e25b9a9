"""The schema of a recipe: the sections that the modules which read them declare, and composition with clear errors.

What is composed later wins: train.yaml, then the variants of groups, then the recipe, then the keys of the command line.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from ejdist.cluster.section import ClusterSection
from ejdist.models.decoder import DecoderConfig, decoder_type
from ejdist.registered import LOSS, OPTIMIZER, PluginError, grown, sections_of
from ejdist.training.curriculum import StageSection, is_of, named, unused
from ejdist.training.optimizer import OptimizerSection
from ejdist.training.program import TrainSections
from ejdist.weights.files import WeightsError
from recipes.arguments import Arguments, RecipeError, check_values, key_of, read, value_of
from recipes.composition import composed, meant
from recipes.hostile import secret_in, too_many_values
from recipes.plugins import check_loaded, load_plugins
from recipes.published import check as check_published
from recipes.published import fill, leaves
from recipes.unread import unread
from recipes.variant_words import variant, within
from recipes.words import MEANT, TOLD, last_part, meaning

__all__ = [
    "GROUPS",
    "ClusterSection",
    "Recipe",
    "RecipeError",
    "compose",
    "keys_of",
    "variants_of",
    "text_of",
    "unread",
]


@dataclass
class Recipe(TrainSections):
    """The complete recipe of a run."""

    model: DecoderConfig = field(default_factory=DecoderConfig)
    cluster: ClusterSection = field(default_factory=ClusterSection)


def recipe_type() -> type[Recipe]:
    """Returns the type of a recipe: `Recipe`, with the sections that plugins have registered."""
    types = {"model": decoder_type(), "optimizer": grown(OptimizerSection, sections_of(OPTIMIZER))}
    extended = {name: kind for name, kind in types.items() if kind not in (DecoderConfig, OptimizerSection)}
    return grown(Recipe, extended | sections_of(LOSS))


GROUPS = ("recipe", "model", "mesh", "data", "optimizer", "cluster")


def _variants(folder: Any) -> list[str]:
    """Returns the names of the yaml files of a folder, which need not be there."""
    return (
        [p.name.removesuffix(".yaml") for p in folder.iterdir() if p.name.endswith(".yaml")] if folder.is_dir() else []
    )


def variants_of(group: str, config_dir: Path | None = None) -> list[str]:
    """Returns the names of a group's variants: its yaml files, and those of the user's folder."""
    user_variants = [] if config_dir is None else _variants(config_dir / group)
    return sorted({*_variants(resources.files("recipes") / group), *user_variants})


def _kinds(section: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields every key of a section, with dots, and the type that it declares."""
    declared = typing.get_type_hints(type(section))
    for f in dataclasses.fields(section):
        value = getattr(section, f.name)
        name = f"{prefix}{f.name}"
        if dataclasses.is_dataclass(value):
            yield from _kinds(value, f"{name}.")
        else:
            yield name, declared[f.name]


def _kinds_of_recipe() -> tuple[tuple[str, Any], ...]:
    return _kinds_of(recipe_type())


@functools.lru_cache(maxsize=8)
def _kinds_of(schema: type[Recipe]) -> tuple[tuple[str, Any], ...]:
    return tuple(_kinds(schema()))


def keys_of() -> list[str]:
    """Returns every key that a recipe has, with dots."""
    return [key for key, _ in _kinds_of_recipe()]


def texts_of() -> list[str]:
    """Returns the keys that take a text; a source may be a list too."""
    return [key for key, kind in _kinds_of_recipe() if kind in (str, str | None, Any)]


def _nearest(name: str, known: Sequence[str], cutoff: float = 0.5) -> str:
    matches = difflib.get_close_matches(name, known, n=1, cutoff=cutoff)
    tail = [k for k in known if k.rpartition(".")[2] == name.rpartition(".")[2]]
    best = tail or matches
    return f"; did you mean {best[0]!r}?" if best else ""


def _check_folder(folder: Path) -> None:
    """Raises RecipeError for a user's folder that has no variant, or one that the project has too: only one can be meant."""
    variants = {group: _variants(folder / group) for group in GROUPS}
    if not any(variants.values()):
        raise RecipeError(
            f"--config-dir {folder} has no variant: name a folder with files such as recipe/mine.yaml or model/mine.yaml, in "
            f"folders with the names of groups: {', '.join(GROUPS)}"
        )
    for group in GROUPS:
        for file in sorted((folder / group).glob("*.yaml")):
            if count := too_many_values(file):
                raise RecipeError(
                    f"--config-dir {folder}: aliases (*NAME) make {count:,} values of {group}/{file.name}; write them out"
                )
    both = [f"{group}/{name}.yaml" for group in GROUPS for name in variants[group] if name in variants_of(group)]
    if both:
        raise RecipeError(f"--config-dir {folder} has {both[0]}, and so does the project; give it another name")


def check_overrides(overrides: Sequence[str], config_dir: Path | None = None) -> None:
    """Raises RecipeError for an override that is not KEY=VALUE of a known key, or names no variant of its group."""
    keys = keys_of()
    for override in overrides:
        name, equals, value = override.partition("=")
        if not equals:
            if re.search(r"\.(ya?ml|toml|json|py)$", override):
                raise RecipeError(f"cannot read {override!r}: {TOLD['config']}")
            raise RecipeError(f"cannot read {override!r}: write KEY=VALUE, for example run.steps=500")
        name = name.lstrip("+~")
        if name in GROUPS:
            known = variants_of(name, config_dir)
            if value not in known:
                meant = variant(name, value, known)
                near = (
                    _nearest(value, known, 0.5 if meant is None else 0.7) if "did you mean" not in (meant or "") else ""
                )
                raise RecipeError(
                    f"{name}={value} is unknown; use one of {', '.join(known)}{near}{f'; {meant}' if meant else ''}"
                )
        elif name not in keys:
            inside = [k for k in keys if k.startswith(f"{name}.")]
            if inside:
                raise RecipeError(f"{name!r} is a section; set one of its keys: {', '.join(inside)}")
            meant = within(name, keys) or meaning(name, [*keys, *GROUPS])
            raise RecipeError(
                f"unknown key {name!r}"
                + (f"; {meant}" if meant else _nearest(name, [*keys, *GROUPS]) or "; --help lists the keys")
            )


def compose(arguments: Sequence[str]) -> Recipe:
    """Returns the recipe of a command line: train.yaml, the variants named, and the keys given. With `--config-dir DIR` a
    variant may be a file of that folder, such as DIR/recipe/mine.yaml.

    Raises:
      RecipeError: an unknown flag, key or variant (the nearest valid one is named), or a value of the wrong type.
    """
    return _composed(read(arguments))[1]


# How processes find each other depends on where a run runs, and may differ between equal runs.
_HEAD = """# @package _global_
# Composed by python -m launch.train --cfg job; saved as DIR/recipe/NAME.yaml it is recipe=NAME with --config-dir DIR.
# The section cluster is left out: it describes where a run runs.
"""


def text_of(a: Arguments) -> str:
    """Returns the composed recipe as YAML, which may itself be a recipe, or one section of it a variant.

    Raises:
      RecipeError: as `compose`; or `--package` names no section.
    """
    from omegaconf import OmegaConf

    composed, _ = _composed(a)
    if a.package in (None, "_global_"):
        del composed["cluster"]
        return _HEAD + OmegaConf.to_yaml(composed, resolve=a.resolve)
    sections = [f.name for f in dataclasses.fields(recipe_type()) if OmegaConf.is_dict(composed[f.name])]
    if a.package not in sections:
        raise RecipeError(f"--package {a.package} is not a section; use one of {', '.join(sections)}")
    return f"# @package {a.package}\n" + OmegaConf.to_yaml(composed[a.package], resolve=a.resolve)


def _composed(a: Arguments) -> tuple[Any, Recipe]:
    """Returns Hydra's composed config, and the recipe built from it."""
    from omegaconf import OmegaConf

    if a.config_dir is not None:
        _check_folder(a.config_dir)
    plugins = load_plugins(a)
    check_overrides(a.overrides, a.config_dir)
    switches = [key for key, kind in _kinds_of_recipe() if kind is bool]
    overrides = check_values(a.overrides, texts_of(), switches)
    try:
        config = composed(recipe_type(), GROUPS, overrides, a.config_dir)
        OmegaConf.set_struct(config, True)
        values: Any = OmegaConf.to_container(config)
        _check_integers(values)
        if found := secret_in(values):
            raise RecipeError(
                f"{found[0]} takes {found[1]} from the environment, which is named as secrets are: a recipe is printed, "
                "compared between hosts and kept in recipe.json. Let the program that needs it read the variable itself"
            )
        _check_order(a, values)
        published = fill(config, values)
        recipe: Any = OmegaConf.to_object(config)
        if published is not None:
            check_published(published, recipe.model)
        _check_stages(a, recipe)
        check_loaded(recipe.plugins, plugins)
    except (RecipeError, PluginError, WeightsError):
        raise
    except Exception as error:  # Hydra and OmegaConf have many; all of them mean that the recipe cannot be composed
        raise RecipeError(_explain(error)) from error
    OmegaConf.set_struct(config, False)
    return config, recipe


def _check_integers(node: Any, key: str = "") -> None:
    """Raises RecipeError, naming the key, for an integer of more than 64 bits: its first use would fail, wherever that is."""
    if isinstance(node, Mapping):
        for name, value in node.items():
            _check_integers(value, f"{key}.{name}" if key else str(name))
    elif isinstance(node, list):
        for i, value in enumerate(node):
            _check_integers(value, f"{key}[{i}]")
    elif isinstance(node, int) and not -(2**63) <= node < 2**63:
        raise RecipeError(f"{key} = {node} does not fit in 64 bits; give a smaller number")


def _check_order(a: Arguments, composed: Any) -> None:
    """Raises RecipeError where a recipe has another value than a variant that the command line names: the recipe would win,
    and nothing would say that the variant was not taken."""
    overrides = {key_of(override): override.partition("=")[2] for override in a.overrides}
    values = dict(leaves(composed))
    for group in (g for g in GROUPS if g in overrides and g != "recipe"):
        folder = None if overrides[group] in variants_of(group) else a.config_dir
        for key, wanted in meant(recipe_type(), group, overrides[group], folder):
            if key in overrides:
                continue
            composed_value = values.get(key)
            if wanted != composed_value:
                who = f"recipe={overrides['recipe']}" if "recipe" in overrides else "the recipe"
                raise RecipeError(
                    f"{group}={overrides[group]} has {key}={wanted}, and {who}, which comes after it, {key}={composed_value}; "
                    f"give {key} on the command line, or remove it from the recipe"
                )


def _check_stages(a: Arguments, recipe: Recipe) -> None:
    """Raises RecipeError where the command line gives what every stage of the curriculum has of its own: no stage would be
    made with it, and nothing would say so."""
    over = unused([named(stage) for stage in recipe.curriculum])
    for override in a.overrides:
        name = key_of(override)
        if name == "curriculum":
            _check_nulls(override)
        if is_of(name, over):
            inside = name.partition(".")[0] if name.partition(".")[0] in over else name.rpartition(".")[2]
            raise RecipeError(
                f"{override} is not used: every stage of the curriculum has its own {inside}; give it in curriculum=[...], or "
                "give curriculum=[] for no stages"
            )


def _check_nulls(override: str) -> None:
    """Raises RecipeError where a stage of the command line has null: to a recipe that is printed it means what is left out, and
    who writes rope_scaling: null may mean none."""
    stages = value_of(override)
    for i, stage in enumerate(stages if isinstance(stages, list) else ()):
        for name in (name for name, value in stage.items() if value is None) if isinstance(stage, dict) else ():
            raise RecipeError(
                f"curriculum[{i}].{name} = null: a stage that does not name a key has the recipe's; leave it out, and where "
                f"only some stages are to have {name}, give it in these and not in the recipe"
            )


def _explain(error: BaseException) -> str:
    """Returns one sentence about what Hydra, OmegaConf or the YAML parser say, with the file that is wrong."""
    if mark := getattr(error, "problem_mark", None):
        return f"{mark.name}, line {mark.line + 1}: {getattr(error, 'problem', None) or 'this is no YAML'}"
    text = str(error.__cause__ or error)
    match = re.match(r"In '([^']+)': ", text)
    file = f"{match[1]}.yaml" if match and match[1] != "train" else ""
    if missing := re.search(r"Could not find '([^']+)'", text):
        return f"{file or 'a recipe or variant'} asks for {missing[1]}.yaml, which is not there{_remedy(missing[1])}"
    key = re.search(r"full_key: (\S+)", text)
    lines = text.splitlines() or [type(error).__name__]
    first = lines[1] if file and "raised while composing" in lines[0] and len(lines) > 1 else lines[0]
    if not key:
        return first
    first = re.sub(r"Invalid value assigned: (\w+) is not a ListConfig.*", r"\1 is not a list; write [a,b]", first)
    first = re.sub(r"Cannot merge DictConfig with ListConfig", "keys are not a list; write [a,b]", first)
    first = re.sub(
        r"Invalid type assigned: .* StageSection. value: (.*)", r"\1 is no stage, which is {until: 100}", first
    )
    first = re.sub(r"Cannot convert '\w+' to string: '(.*)'", r"\1 must be one word, without brackets", first)
    stage = "a stage of curriculum: " if "object_type=StageSection" in text else ""
    where = f"{f'{file}: ' if file else ''}{stage}{key[1]}"
    if kind := re.fullmatch(r"Value (.*) of type '\w+' could not be converted to (Integer|Float)", first):
        return f"{where} = {kind[1]} must be {'a whole' if kind[2] == 'Integer' else 'a'} number"
    if "not in" not in first:
        return f"{where}: {first}"
    if key[1] in GROUPS and key[1] not in keys_of() and file.startswith(f"{key[1]}/"):
        return f"{file} must begin with the line '# @package _global_', with keys of any section below it"
    known = [f.name for f in dataclasses.fields(StageSection)] if stage else keys_of()
    ours = [last_part(word) for word in MEANT.get(key[1], ())] if stage else []
    near = next((f"; did you mean {name!r}?" for name in ours if name in known), None) or _nearest(key[1], known)
    return f"{stage}unknown key {key[1]!r}{f' in {file}' if file else ''}{near}"


def _remedy(missing: str) -> str:
    inner = missing.partition("/")[2]
    if inner.partition("/")[0] in GROUPS:
        return f"; from inside a group write '/{inner.replace('/', ': ', 1)}', with override in front where it has a default"
    group, _, name = missing.partition("/")
    known = variants_of(group) if group in GROUPS else []
    return f"; the project has {', '.join(known)}{_nearest(name, known)}" if known else ""
