"""A recipe composed of what is kept of its variants is what Hydra composes of the whole command line."""

import shlex

import hydra
import pytest
from omegaconf import OmegaConf

from recipes.composition import _store, _with_values
from recipes.schema import GROUPS, recipe_type

LINES = [
    "",
    "recipe=long_context data.sequence_length=4096",
    "recipe=moe model=moe_nano mesh.ep=2 mesh.dp=-1",
    "model=8b model.num_layers=2 model.layer_pattern=[window,full]",
    "recipe=length_curriculum 'curriculum=[{until: 3, sequence_length: 64}, {until: 5, sequence_length: 32}]'",
    "data=files 'data.source=\"a, b = c.jsonl\"' data.cache_dir=null",
    "'data.mixture=[{source: a, weight: 0.5}, {source: \"b:c\", weight: 1e-3}]'",
    "run.steps=3 run.steps=7 optimizer.learning_rate=1e-3 run.profile=[3,4]",
    "run.dir=outputs/${run.seed} run.seed=5",
    "data.chat_template_kwargs={a:1,b:[true,null]}",
]


@pytest.mark.parametrize("line", LINES)
def test_values_over_kept_variants_are_hydras_composition(line):
    words = shlex.split(line)
    _store(recipe_type())
    with hydra.initialize_config_module("recipes", version_base="1.3"):
        whole = hydra.compose("train", overrides=words)
    found = _with_values(recipe_type(), GROUPS, words)
    assert OmegaConf.to_yaml(found) == OmegaConf.to_yaml(whole)
    again = _with_values(recipe_type(), GROUPS, [word for word in words if word.partition("=")[0] in GROUPS])
    assert again != found or len(words) == sum(word.partition("=")[0] in GROUPS for word in words), (
        "what is kept changed"
    )


@pytest.mark.parametrize(
    "line", ["+run.steps=3", "+model.new=3", "~model.num_layers", "model.num_layers=many", "no.such=3", "model=none"]
)
def test_what_does_not_fit_is_left_to_hydra_and_its_words(line):
    assert _with_values(recipe_type(), GROUPS, [line]) is None
