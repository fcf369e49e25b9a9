"""Keys that change on resume, recipes that are refused before anything compiles, and the cache of compiled programs."""

import shlex

import jax
import ml_dtypes
import numpy as np
import pytest
from jax._src import compiler
from shared import once
from small_run import SMALL, losses, run

from ejdist.cluster.hosts import Hosts
from ejdist.planning.curriculum import overrides_text
from ejdist.sections import flat, validate
from ejdist.training.checkpoint_format import CheckpointError
from ejdist.training.curriculum import StageSection
from ejdist.training.metrics import read_rows
from ejdist.training.optimizer import cast_moments
from ejdist.training.program import Program
from ejdist.training.recorded import recorded, recorded_changes, settings_at, told_changes
from ejdist.training.restore import resume
from ejdist.training.setup import open_run
from launch.compiled import use_cache
from launch.evaluation_recipe import with_settings_of_run
from launch.reporting import contents
from launch.reporting.folder import open_folder
from recipes.schema import Recipe, compose

# -- changes on resume --------------------------------------------------------------------------------------------------

CHANGED = ["optimizer.learning_rate=0.01", "data.global_batch=4"]
ALLOW = "run.allow_change=[optimizer.learning_rate,data.source,data.global_batch]"


@pytest.fixture(scope="module")
def changed(corpus, other, tmp_path_factory):
    """A run of four steps whose rate, data and batch change after the second."""

    def make(folder):
        run(folder, *corpus, "run.stop_after=2")
        keys = [*corpus, *CHANGED, f"data.source={other}", "run.stop_after=4"]
        with pytest.raises(ValueError, match=r"was 0.003, is 0.01; restore it, set run.allow_change=\[optimizer.learn"):
            run(folder, *keys)
        with pytest.raises(
            ValueError, match=r"set run.allow_change=\[data.source\] to resume with what it is now from step 3"
        ):
            run(folder, *keys, ALLOW.replace("data.source,", ""))
        _, said = run(folder, *keys, ALLOW)
        (folder / "said.txt").write_text(said)

    return once(tmp_path_factory, "changed", make)


@pytest.mark.slow  # a run with a stage beside the one of the tests below
def test_a_change_holds_from_its_step_on_with_the_moments_kept(corpus, other, changed, tmp_path):
    """It is the run with a stage from there on: losses are the same bits."""
    stage = f"curriculum=[{{until: 2}}, {{source: '{other}', global_batch: 4, learning_rate: 0.01}}]"
    run(tmp_path / "staged", *corpus, stage, "run.stop_after=4")
    assert losses(changed) == losses(tmp_path / "staged") and len(losses(changed)) == 4
    rates = [row["learning_rate"] for row in read_rows(changed / "metrics.jsonl")]
    assert rates == pytest.approx([0.003, 0.003, 0.01, 0.01])
    said = (changed / "said.txt").read_text()
    assert "from step 3 on optimizer.learning_rate is 0.01; it was 0.003" in said
    assert f"from step 3 on data.source is {other}; it was " in said and "from step 3 on data.global_batch is 4" in said


def test_a_change_is_recorded_and_then_the_recipe(corpus, other, changed):
    """A later resume needs no key, and the recipe of before is refused."""
    keys = [*SMALL, *corpus, f"run.dir={changed}"]
    again = compose([*keys, *CHANGED, f"data.source={other}"])
    opened, found, kept, _ = restored(again)
    assert found == 4 and opened.past.since == 2 and [part[0] for part in opened.past.settings] == [2]
    assert kept.opt_state and opened.data.begin.batch == 2
    with pytest.raises(
        ValueError, match=r"optimizer.learning_rate: was 0.01, is 0.003|ran step 4 with data.global_batch = 4"
    ):
        open_run(compose(keys), Hosts(60))
    changes = recorded_changes(changed)
    assert [one["after"] for one in changes] == [2] and set(changes[0]["keys"]) == {
        "optimizer.learning_rate",
        "data.source",
        "data.global_batch",
    }
    assert told_changes(changes)[0].startswith("from step 3 on ")
    recipe, before = recorded(changed), compose(keys)
    for step, source, batch in ((2, before.data.source, 2), (4, other, 4)):
        settings = settings_at(recipe, step, changes)
        assert (settings["data.source"], settings["data.global_batch"]) == (source, batch)
    words = with_settings_of_run(str(changed), 2, [], [].append)
    assert f"data.source='{before.data.source}'" in words
    assert "from step 3 on data.global_batch is 4; it was 2" in page(changed)


def page(folder):
    """Returns the recipe's part of the report about a run."""
    return str(contents.recipe([open_folder(folder, str(folder))], flat(Recipe()))[1])


def restored(recipe):
    opened = open_run(recipe, Hosts(60))
    said = []
    run, step, state, kept = resume(opened, opened.checkpoints_found, said.append)
    return run, step, state, said


def test_moments_are_cast_where_that_is_allowed(corpus, changed, other):
    keys = [*SMALL, *corpus, f"run.dir={changed}", *CHANGED, f"data.source={other}"]
    _, _, plain, _ = restored(compose(keys))
    with pytest.raises(
        ValueError, match=r"optimizer.moments: was float32, is bfloat16; restore it, set run.allow_change="
    ):
        open_run(compose([*keys, "optimizer.moments=bfloat16"]), Hosts(60))
    _, _, state, said = restored(compose([*keys, "optimizer.moments=bfloat16", "run.allow_change=[optimizer.moments]"]))
    assert "from step 5 on optimizer.moments is bfloat16; it was float32" in said
    wide, narrow = ([x for x in jax.tree.leaves(s.opt_state) if x.ndim > 1] for s in (plain, state))
    assert narrow and {str(x.dtype) for x in narrow} == {"bfloat16"}
    assert all(np.array_equal(np.asarray(x, ml_dtypes.bfloat16), y) for x, y in zip(wide, narrow, strict=True))
    back = cast_moments(state.opt_state, plain.opt_state)
    assert jax.tree.map(lambda x: x.dtype, back) == jax.tree.map(lambda x: x.dtype, plain.opt_state)


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("optimizer.learning_rat", r"there is no such key; did you mean 'optimizer.learning_rate'\?"),
        ("run.steps", "set run.extend=true for that"),
        ("data.tokenizer", "its ids would be other text for the model"),
        ("model.num_layers", "of the model only its rope keys can change"),
        ("lora.rank", "a run keeps the adapters that it started with"),
        ("optimizer.name", "the moments of one optimizer are nothing to another"),
        ("checkpoint.every", "it does not affect the losses, and may change without"),
        ("curriculum", "steps that are yet to come may change without"),
    ],
)
def test_a_key_that_cannot_change_is_named(key, words):
    with pytest.raises(ValueError, match=f"run.allow_change names '{key}': {words}"):
        validate(compose([*SMALL, f"run.allow_change=[{key}]"]))


# -- before anything is compiled ----------------------------------------------------------------------------------------

TWO = "curriculum=[{until: 2}, STAGE]"
OF_CHANGED = ["run.dir=CHANGED", *CHANGED, "data.source=OTHER"]
REFUSED = [
    (["mesh.sp=3"], "sequence"),
    (["accumulation=3"], "multiple of accumulation"),
    (["run.trackers=[mlflow]"], "run.trackers: 'mlflow' is unknown"),
    (["evaluation.every=2", "evaluation.data=/none/*.txt"], "evaluation.data: .* matches no file"),
    (["evaluation.every=2", "evaluation.data=CORPUS"], "is a corpus that the run trains on"),
    (["evaluation.every=2", "evaluation.data=OTHER", TWO, "{source: OTHER}"], "is a corpus that the run trains on"),
    (["data.source=/none/*.txt"], "matches no file"),
    (["model.vocab_size=10"], "model.vocab_size = 10 is smaller"),
    (["platform=abacus"], "platform = 'abacus' is unknown"),
    (["checkpoint.local=FILE/disk", "checkpoint.local_every=1"], "checkpoint.local = .* is a file"),
    (["checkpoint.dir=FILE/kept"], "checkpoint.dir = .* is a file"),
    ([TWO, "{mesh: {sp: 3}}"], r"curriculum\[1\]: .*sequence"),
    ([TWO, "{accumulation: 3}"], r"curriculum\[1\]: data.global_batch"),
    ([*OF_CHANGED, "optimizer.b1=0.5"], "optimizer.b1: was 0.9, is 0.5"),
    ([*OF_CHANGED, "model.num_layers=2"], "model.num_layers: was 1, is 2"),
    ([*OF_CHANGED, "data.packing=whole"], "data.packing"),
]


@pytest.fixture
def made(monkeypatch):
    """The names of the programs that are compiled."""
    names, compile_one = [], compiler.compile_or_get_cached

    def counted(backend, computation, *rest, **named):
        names.append(str(computation.operation.attributes["sym_name"]))
        return compile_one(backend, computation, *rest, **named)

    monkeypatch.setattr(compiler, "compile_or_get_cached", counted)
    return lambda: [name for name in names if "step" in name or "state" in name]


@pytest.mark.parametrize(("keys", "words"), REFUSED, ids=lambda value: str(value)[:40])
def test_a_wrong_recipe_is_refused_before_anything_compiles(corpus, other, changed, tmp_path, made, keys, words):
    (tmp_path / "file").write_text("")
    there = {
        "CORPUS": corpus[0].partition("=")[2],
        "OTHER": other,
        "FILE": str(tmp_path / "file"),
        "CHANGED": str(changed),
    }
    given = []
    for key in keys:
        if key.startswith("{"):
            key = given.pop().replace("STAGE", key)
        for name, value in there.items():
            key = key.replace(name, value)
        given.append(key)
    with pytest.raises((ValueError, CheckpointError), match=words):
        run(tmp_path / "run", *corpus, *given)
    assert not made() and not (tmp_path / "run").exists()


def test_what_only_the_program_of_a_later_stage_finds_is_told_at_the_start(corpus, tmp_path, made, monkeypatch):
    lower = Program.lower

    def lowered(program):
        if program.batch["tokens"].shape == (2, 64):
            raise ValueError("this layer takes rows of 32 tokens")
        return lower(program)

    monkeypatch.setattr(Program, "lower", lowered)
    with pytest.raises(ValueError, match=r"^curriculum\[1\]: this layer takes rows of 32 tokens"):
        run(tmp_path / "run", *corpus, "curriculum=[{until: 2}, {sequence_length: 64}]")
    assert not made() and not (tmp_path / "run").exists()


# -- the cache of compiled programs -------------------------------------------------------------------------------------


@pytest.fixture
def cache(monkeypatch):
    """JAX's settings as if nobody had set any, on an accelerator."""
    names = (
        "jax_compilation_cache_dir",
        "jax_enable_compilation_cache",
        "jax_persistent_cache_enable_xla_caches",
    )
    before = {name: getattr(jax.config, name) for name in names}
    jax.config.update("jax_compilation_cache_dir", None)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    yield lambda: [getattr(jax.config, name) for name in names[:2]]
    for name, value in before.items():
        jax.config.update(name, value)


def test_programs_are_kept_on_accelerators(cache, tmp_path, monkeypatch):
    monkeypatch.setenv("EJDIST_CACHE_DIR", str(tmp_path / "own"))
    line = use_cache("auto")
    assert cache() == [str(tmp_path / "own" / "compiled"), True] and line == (
        f"compiled programs are kept in {tmp_path / 'own' / 'compiled'} (run.compile_cache)"
    )
    assert jax.config.jax_persistent_cache_enable_xla_caches == "none"
    assert use_cache(str(tmp_path / "named")) and cache() == [str(tmp_path / "named"), True]
    assert "JAX_COMPILATION_CACHE_DIR" in use_cache("auto") and cache() == [str(tmp_path / "named"), True]
    assert use_cache(None) == "" and cache()[1] is False


def test_no_program_is_kept_on_cpus_or_where_nothing_can_be_written(cache, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    line = use_cache(str(tmp_path / "file" / "cache"))
    assert cache()[1] is False and "cannot be written (Not a directory); run.compile_cache=FOLDER" in line
    jax.config.update("jax_enable_compilation_cache", True)
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    assert use_cache("auto") == "" and cache() == [None, True]
    with pytest.raises(ValueError, match=r"run.compile_cache = 's3://a/b'"):
        validate(compose([*SMALL, "run.compile_cache='s3://a/b'"]))


# -- plans --------------------------------------------------------------------------------------------------------------


def test_the_stages_of_a_plan_are_pasted_with_their_data():
    source = 'a folder/it\'s "it" [1]'
    stages = [
        {"until": 2, "source": source, "learning_rate": 0.1},
        {"mixture": [{"source": "null", "weight": 2}, {"source": "b.txt", "weight": 0.5}], "weights_by": "tokens"},
    ]
    recipe = compose(SMALL)
    recipe.curriculum = [StageSection(**stage) for stage in stages]
    text, _ = overrides_text(recipe, [None, None])
    again = compose([*SMALL, *shlex.split(text)])
    assert again.curriculum == recipe.curriculum
