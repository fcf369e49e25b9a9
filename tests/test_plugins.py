"""Plugins: what a module registers is known to recipes, checked, recorded and compared; what is wrong is one sentence."""

import dataclasses
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from plugged import plugins_of_a_test
from small_run import TINY

from ejdist import registered
from ejdist.cluster import Hosts
from ejdist.mesh import make_mesh
from ejdist.planning.candidates import MOMENTS, OFFLOAD, savings_searched
from ejdist.sections import keys_of, validate
from ejdist.training.optimizer import make_optimizer, state_bytes
from ejdist.training.program import make_program
from ejdist.training.resume import check_same_run, fingerprint
from ejdist.training.runs import section_of
from ejdist.training.setup import open_run
from ejdist.weights.families import family_of
from ejdist.weights.files import WeightsError
from launch import train
from recipes.descriptions import describe
from recipes.schema import RecipeError, compose, unread

ROOT = Path(__file__).resolve().parent.parent
LAYER = [
    *TINY,
    "plugins=[examples.own_layer]",
    "model.layer_pattern=[short_conv+mlp,full]",
    "sequence.order=contiguous",
]
HEAD = "from dataclasses import dataclass, field\nfrom ejdist.plugins import *\nimport optax\n"


@pytest.fixture(autouse=True)
def forgotten(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT))
    with plugins_of_a_test():
        yield


def write(name, text):
    Path(f"{name}.py").write_text(HEAD + text)


# -- modules -----------------------------------------------------------------------------------------------------------

SECTION = "@dataclass(unsafe_hash=True)\nclass S:\n    width: int = 4\n"
OPTIMIZER = "register_optimizer('sign', lambda: optax.scale_by_sign())\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "x = 1 / 0",
            r"importing mine fails \(.*mine.py, line 4: ZeroDivisionError: division by zero\); fix the module",
        ),
        ("x = = 1", r"importing mine fails \(.*mine.py, line 4: invalid syntax\)"),
        ("import no_such_thing", "importing mine fails .*No module named 'no_such_thing'"),
        ("", "mine registers nothing; call register_layer"),
        (2 * OPTIMIZER, "mine registers the optimizer 'sign' twice; give one of them another name"),
        ("register_optimizer('adamw', None)", "mine registers the optimizer 'adamw', which the project has already"),
        ("register_optimizer('My Lion', None)", "by the name 'My Lion'; use letters, digits and _"),
        ("register_optimizer('eps', None, field)", "section of the optimizer 'eps' .* must be a dataclass"),
        (f"{SECTION}register_optimizer('b1', None, S)", "would be the key 'b1', which the recipe has already"),
        ("@dataclass\nclass S:\n    x: int\nregister_loss('a', None, S)", "needs a default for every field"),
        (
            "@dataclass(frozen=True)\nclass S:\n    x: int = 1\nregister_loss('a', None, S)",
            "declare it without frozen=True",
        ),
        (
            "@dataclass\nclass S:\n    x: int = 1\nregister_layer('a', type('P', (), {'role': 'mixer'}), S)",
            "unsafe_hash=True",
        ),
        ("register_layer('a', object())", "the layer 'a' of mine needs role = 'mixer'"),
        ("register_layer('experts', object())", "the layer 'experts', which the project has already"),
        ("register_loss('cross_entropy', None)", "the loss 'cross_entropy', which the project has already"),
        ("register_source('hf', str, identity=str)", "the source 'hf', which the project has already"),
        ("register_source('a', identity=str)", "the source 'a' of mine needs one of read= and rows="),
    ],
)
def test_a_module_that_cannot_be_used_is_one_sentence(text, said):
    write("mine", text)
    with pytest.raises(registered.PluginError, match=said):
        compose(["plugins=[mine]"])
    assert not registered.loaded() and not registered.names_of("optimizer")  # and leaves nothing behind


def test_modules_that_are_not_there_or_not_modules():
    for words, said in (
        (
            "plugins=[no.such]",
            "there is no module no.such, neither in the current folder .* nor installed; check the name",
        ),
        ("plugins=['mine.py']", "plugins=.my.module. for my/module.py|there is no module mine.py"),
        ("plugins=['a/b']", "'a/b', which is not the name of a module; write plugins=.my.module."),
        ("plugins=mine", r"plugins is a list of modules; write plugins=\[my.module\]"),
    ):
        with pytest.raises(registered.PluginError, match=said):
            compose([words])


def test_two_modules_with_one_name():
    write("mine", OPTIMIZER)
    write("other", OPTIMIZER)
    with pytest.raises(registered.PluginError, match="other registers the optimizer 'sign' too, and mine did before"):
        compose(["plugins=[mine,other]"])


def test_a_recipe_of_ones_own_names_its_plugins():
    write("mine", OPTIMIZER)
    for folder in ("own/recipe", "own/optimizer"):
        Path(folder).mkdir(parents=True)
    Path("own/recipe/signs.yaml").write_text("# @package _global_\nplugins: [mine]\noptimizer:\n  name: sign\n")
    recipe = compose(["--config-dir=own", "recipe=signs"])
    assert recipe.plugins == ("mine",) and recipe.optimizer.name == "sign"
    Path("own/recipe/outer.yaml").write_text("# @package _global_\ndefaults: [signs, _self_]\n")
    with pytest.raises(registered.PluginError, match=r"plugins=\[mine\] is set in a file that another one includes"):
        compose(["--config-dir=own", "recipe=outer"])


# -- layers ------------------------------------------------------------------------------------------------------------


def test_a_layer_has_a_section_of_its_own():
    recipe = compose([*LAYER, "model.short_conv.taps=3"])
    validate(recipe)
    assert recipe.model.short_conv.taps == 3
    declared = recipe.model.build().declared["layers"]
    assert declared["short_conv_taps"].shape == (1, 32, 3)
    assert describe("model.short_conv.taps", LAYER) == (
        "model.short_conv.taps=a whole number\n  Tokens that the convolution sees, this one and those before it.\n  default: 4"
    )
    for words, said in (
        ("model.short_conv.taps=many", "model.short_conv.taps = 'many' must be a whole number"),
        ("model.short_conv.tapes=3", "unknown key 'model.short_conv.tapes'; did you mean 'model.short_conv.taps'"),
    ):
        with pytest.raises(RecipeError, match=said):
            compose([*LAYER, words])
    for words, said in (
        ("model.short_conv.taps=0", "model.short_conv.taps must be at least 1, got 0"),
        ("model.layer_pattern=[full]", "model.short_conv is given, but no layer has short_conv"),
    ):
        with pytest.raises(ValueError, match=said):
            validate(compose([*LAYER, "model.short_conv.taps=3", words]))


def test_a_layer_of_a_plugin_is_not_exported():
    with pytest.raises(WeightsError, match=r"layers of plugins, 'short_conv' of examples.own_layer, which no family"):
        family_of(compose(LAYER).model)
    assert family_of(compose([*LAYER, "model.layer_pattern=[full]"]).model)[0] == "Qwen3ForCausalLM"


def test_a_section_is_recorded_and_compared(tmp_path):
    recipe = compose([*LAYER, "model.short_conv.taps=3"])
    kept = fingerprint(recipe)
    assert kept["model.short_conv.taps"] == 3 and kept["plugins"] == ["examples.own_layer"]
    with pytest.raises(ValueError, match=r"model.short_conv.taps: was 3, is 4"):
        check_same_run(kept, compose(LAYER), 2, tmp_path)
    assert section_of(kept, tmp_path) == recipe.model
    # In another process, which takes the plugin from what the checkpoint keeps.
    registered.forget()
    del sys.modules["examples.own_layer"]
    assert "model.short_conv.taps" not in {key.name for key in keys_of(compose([]))}
    assert section_of(kept, tmp_path).short_conv.taps == 3
    with pytest.raises(ValueError, match=r"run was trained with a plugin: .*no module mine.gone"):
        section_of(kept | {"plugins": ["mine.gone"]}, "run")


def test_a_run_says_which_plugin_is_missing(capsys):
    Path("run").mkdir()
    Path("run/recipe.json").write_text('{"plugins": ["examples.own_layer", "mine"]}')
    missing = (
        r"the run in run was started with plugins=\[examples.own_layer,mine\], and here mine is missing; give plugins="
    )
    with pytest.raises(registered.PluginError, match=missing):
        open_run(compose([*LAYER, "run.dir=run"]), Hosts(1))
    assert train.main([*TINY, "run.dir=run", "model.short_conv.taps=3"]) == 2
    assert re.search("here examples.own_layer and mine are missing", capsys.readouterr().err)


class Told(Exception):
    pass


class OneOfTwo:
    """Hosts that keep what is compared first."""

    index, count, limit = 1, 2, 1.0

    def compare(self, moment, facts):
        raise Told(facts)


def test_hosts_compare_plugins_and_their_sources():
    write("mine", OPTIMIZER)
    recipe = compose([*TINY, "plugins=[mine]", "run.dir=run"])

    def facts():
        with pytest.raises(Told) as told:
            open_run(recipe, OneOfTwo())
        return told.value.args[0]

    before = facts()
    name = "plugin mine (digest of its sources)"
    assert before["plugins"] == ("mine",) and re.fullmatch("[0-9a-f]{16}", before[name])
    write("mine", f"{OPTIMIZER}\n# another file")
    assert facts()[name] != before[name]


# -- optimizers --------------------------------------------------------------------------------------------------------

LION = [*TINY, "plugins=[examples.own_optimizer]", "optimizer.name=lion", "mesh.sp=1"]


def test_an_optimizer_is_between_the_clipping_and_the_rate_of_the_recipe():
    """Against Lion as its paper has it, in NumPy."""
    keys = (
        "optimizer.lion.beta2=0.9",
        "optimizer.clip_norm=0.5",
        "optimizer.weight_decay=0.2",
        "optimizer.schedule=constant",
    )
    section = compose([*LION, *keys, "optimizer.learning_rate=0.01", "optimizer.warmup_steps=0"]).optimizer
    optimizer, _ = make_optimizer(section, 10, {"w": True})
    rng = np.random.default_rng(0)
    w, m = rng.standard_normal(5), np.zeros(5)
    params, state = {"w": jnp.asarray(w, jnp.float32)}, None
    state = optimizer.init(params)
    for _ in range(3):
        g = rng.standard_normal(5)
        updates, state = optimizer.update({"w": jnp.asarray(g, jnp.float32)}, state, params)
        params = optax.apply_updates(params, updates)
        g = g * min(1, 0.5 / np.linalg.norm(g))
        w = w - 0.01 * (np.sign(0.9 * m + 0.1 * g) + 0.2 * w)
        m = 0.9 * m + 0.1 * g
    np.testing.assert_allclose(params["w"], w, rtol=1e-5)


def test_what_an_optimizer_cannot_do_is_refused_by_name():
    section = compose(LION).optimizer
    assert state_bytes(section) == 4 and state_bytes(compose(TINY).optimizer) == 8  # of a number, for plans
    dataclasses.replace(section, offload="host").validate()  # it says that it is element by element
    with pytest.raises(ValueError, match=r"optimizer.moments = 'bfloat16' does not go with optimizer.name = 'lion'"):
        dataclasses.replace(section, moments="bfloat16").validate()
    with pytest.raises(ValueError, match=r"optimizer.lion.beta1 must be in \[0, 1\), got 2"):
        validate(compose([*LION, "optimizer.lion.beta1=2"]))
    write("mine", f"{OPTIMIZER}register_optimizer('bad', lambda: 3)")
    signs = compose([*TINY, "plugins=[mine]", "optimizer.name=sign"])
    with pytest.raises(
        ValueError, match=r"optimizer.offload = 'host' .* set it to none; its module may register it with elem"
    ):
        dataclasses.replace(signs.optimizer, offload="host").validate()
    assert not {MOMENTS, OFFLOAD} & {key for savings in savings_searched(signs, ()) for key, _ in savings}
    with pytest.raises(
        ValueError,
        match=r"optimizer.name = 'adam' is unknown; use one of adamw, muon, lion, sign, bad, or give plugins",
    ):
        compose([*TINY, "optimizer.name=adam"]).optimizer.validate()
    with pytest.raises(
        ValueError, match=r"the optimizer 'bad' of mine must return an optax.GradientTransformation, got 3"
    ):
        make_optimizer(compose([*TINY, "optimizer.name=bad", "plugins=[mine]"]).optimizer, 3, {})
    assert unread(["optimizer.b1=0.8"], compose(["optimizer.b1=0.8", *LION])) == [
        "optimizer.b1=0.8 changes nothing: optimizer.name = lion is not AdamW"
    ]
    assert unread(["optimizer.lion.beta1=0.8", "plugins=[examples.own_optimizer]"], compose(TINY)) == [
        "optimizer.lion.beta1=0.8 changes nothing: optimizer.name = adamw"
    ]


def test_a_state_that_is_not_as_large_as_its_parameter_is_on_every_device():
    write(
        "mine",
        "import jax\nimport jax.numpy as jnp\n"
        "def init(p):\n    rows = jax.tree.map(lambda x: jnp.zeros(x.shape[:1]), p)\n"
        "    return {'rows': rows, 'all': jax.tree.map(jnp.zeros_like, p)}\n"
        "register_optimizer('rows', lambda: optax.GradientTransformation(init, lambda g, s, p=None: (g, s)))\n",
    )
    recipe = compose([*TINY, "plugins=[mine]", "optimizer.name=rows", "mesh.sp=1", "mesh.fsdp=2"])
    program = make_program(recipe, make_mesh(fsdp=2, devices=jax.devices()[:2]))
    (state,) = [
        s
        for s in jax.tree.leaves(program.state.opt_state, is_leaf=lambda s: isinstance(s, dict))
        if isinstance(s, dict)
    ]
    whole, rows = (state[name]["layers"]["gate"].sharding for name in ("all", "rows"))
    assert whole == program.state.params["layers"]["gate"].sharding and not whole.is_fully_replicated
    assert rows.is_fully_replicated
