"""What all commands share: flags, recipes of the user's own, sweeps, and how they begin and end."""

import importlib
import os
import re
import runpy
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf
from small_run import TINY, losses

from launch import __main__ as listing
from launch import local, rehearse, slurm, sweep, train
from launch.errors import DONE, INTERRUPTED, NOT_COMPILED, PIPE_CLOSED, PREEMPTED, WRONG, NotCompiled, run_command
from launch.processes import Job
from recipes.arguments import jobs_of, quoted, read, unreadable
from recipes.published import follows, leaves
from recipes.schema import GROUPS, RecipeError, compose, text_of, texts_of, unread, variants_of

ROOT = Path(__file__).resolve().parent.parent
COMMANDS = {
    path.stem: importlib.import_module(f"launch.{path.stem}")
    for path in sorted((ROOT / "launch").glob("*.py"))
    if "def main(" in path.read_text()
    and path.stem
    not in ("disturbed", "__main__")  # which a rehearsal starts in the place of launch.train; the list of all
}
OF_A_RECIPE = {"slurm": [], "plan": ["topology=v5p:2x2x1"], "rehearse": [], "local": ["processes=2"]}
GLOBAL = "# @package _global_\n"


@pytest.fixture
def mine(tmp_path):
    """Returns a function that writes variants, and gives the flag for their folder: one with a name that needs quotes."""
    folder = tmp_path / "my, 'own' [recipes]"

    def write(**files):
        for name, text in files.items():
            path = folder / f"{name.replace('__', '/')}.yaml"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return f"--config-dir={folder}"

    return write


# -- recipes of the user's own --------------------------------------------------------------------------------------------


def test_a_variant_of_every_group_may_be_a_file_of_the_user(mine):
    flag = mine(
        recipe__mine=f"{GLOBAL}defaults:\n  - override /model: big\n  - _self_\nrun:\n  steps: 7\n",
        model__big="defaults:\n  - nano\n  - _self_\nnum_layers: 3\n",
        mesh__two="sp: 2\n",
        data__notes="source: notes.txt\n",
        optimizer__slow="learning_rate: 1.0e-5\n",
        cluster__here="kind: manual\ncoordinator: localhost:1\nnum_processes: 2\nprocess_id: 0\n",
    )
    chosen = ["recipe=mine", "mesh=two", "data=notes", "optimizer=slow", "cluster=here"]
    recipe = compose([*chosen, "run.seed=3", *flag.split("=")])
    assert (recipe.model.num_layers, recipe.model.model_dim, recipe.run.steps, recipe.run.seed) == (3, 128, 7, 3)
    assert (recipe.mesh.sp, recipe.data.source, recipe.optimizer.learning_rate) == (2, "notes.txt", 1e-5)
    assert recipe.cluster.coordinator == "localhost:1"
    assert compose([flag, "recipe=mine", "run.steps=8"]).run.steps == 8, "the command line overrides the recipe"
    folder = read([flag]).config_dir
    assert "big" in variants_of("model", folder) and "big" not in variants_of("model")
    with pytest.raises(RecipeError, match="model=big is unknown"):
        compose(["model=big"])  # what one call was given, no other one has


@pytest.mark.parametrize(
    ("files", "arguments", "message"),
    [
        ({"recipe__mine": f"{GLOBAL}run:\n  stpes: 7\n"}, [],
         "unknown key 'run.stpes' in recipe/mine.yaml; did you mean 'run.steps'"),
        ({"recipe__mine": f"{GLOBAL}run:\n  steps: x7\n"}, [], "recipe/mine.yaml: run.steps = 'x7' must be a whole number"),
        ({"recipe__mine": "run:\n  steps: 7\n"}, [], "recipe/mine.yaml must begin with the line '# @package _global_'"),
        ({"recipe__mine": f"{GLOBAL}run:\n  steps: [7\nfoo: 3\n"}, [], "recipe/mine.yaml, line 4: expected ',' or ']'"),
        ({"recipe__mine": f"{GLOBAL}defaults:\n  - override /model: 9b\n"}, [], "asks for model/9b.yaml, which is not there"),
        ({"recipe__mine": f"{GLOBAL}defaults:\n  - model: 8b\n"}, [], "from inside a group write '/model: 8b'"),
        ({"recipe__mine": f"{GLOBAL}defaults:\n  - override /modle: 8b\n"}, [], "Could not override 'modle'"),
        ({"recipe__mine": f"{GLOBAL}{{}}\n"}, ["recipe=mien"], "short_context; did you mean 'mine'?"),
        ({"recipe__moe": f"{GLOBAL}{{}}\n"}, [], "has recipe/moe.yaml, and so does the project; give it another name"),
        ({"modle__mine": "{}\n"}, [], "has no variant: name a folder with files such as recipe/mine.yaml"),
        ({"recipe__mine": f"{GLOBAL}optimizer:\n  schedule: constant\n"}, ["optimizer=wsd"],
         "optimizer=wsd has optimizer.schedule=wsd, and recipe=mine, which comes after it, optimizer.schedule=constant"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_file_of_the_user_is_named(mine, files, arguments, message):
    with pytest.raises(RecipeError) as told:
        compose([mine(**files), "recipe=mine", *arguments])
    assert message in str(told.value) and "\n" not in str(told.value)


def test_a_key_that_is_given_beside_its_variant_is_taken_however_it_is_written(mine):
    flag = mine(recipe__mine=f"{GLOBAL}optimizer: {{schedule: constant}}\n")
    given = compose([flag, "recipe=mine", "optimizer=wsd", "++optimizer.schedule=warmup_cosine"])
    assert given.optimizer.schedule == "warmup_cosine"
    # A source is a text or a list; what has keys is refused where it is opened.
    assert compose(["data=files", "data.source={a: b}"]).data.source == {"a": "b"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config-dir", "nowhere"], "--config-dir nowhere: there is no such folder; name one with"),
        (["--config-dir", __file__], "is a file; name one with files"),
        (["--config-dir"], "--config-dir/-cd: expected one argument"),
        (["--config_dir=x"], "unknown flag '--config_dir=x'; did you mean '--config-dir'?"),
        (["--cfg", "hydra"], "argument --cfg/-c: invalid choice"),
        (["--package", "run"], "--package selects what --cfg job prints, but --cfg job is missing"),
        (["--resolve"], "--resolve selects what --cfg job prints"),
        (["--cfg", "job", "-m"], "--cfg job prints one recipe, but --multirun makes several"),
        (["--cfg", "job", "--package", "optimiser"], "--package optimiser is not a section; use one of run, model, lora, mesh"),
        (["run.seed=1,2"], "for a run with each of several values give --multirun (-m)"),
        (["-m", "run.seed=1"], "--multirun: no key has several values"),
        (["-m", "run.dir=a,b"], "run.dir is one folder, in which each run of a sweep gets its own"),
        (["-m", "optimizer.learning_rate=interval(0,1)"], "give the values of a sweep as optimizer.learning_rate=A,B"),
        (["-m", "model=glob(*)"], "give the values of a sweep as"),
        ([f"run.steps={10**20}"], f"run.steps = {10**20} does not fit in 64 bits; give a smaller number"),
        ([f"curriculum=[{{until: {10**20}}}]"], f"curriculum[0].until = {10**20} does not fit in 64 bits"),
        (["curriculum=[{until: 1, seq_len: 32}, {}]"],
         "a stage of curriculum: unknown key 'seq_len'; did you mean 'sequence_length'?"),
        (["curriculum=[{until: x}, {}]"], "a stage of curriculum: until = 'x' must be a whole number"),
        (["curriculum=[3]"], "curriculum[0]: 3 is no stage, which is {until: 100}"),
        (["sequence.scheme=[ring,halo]"], "sequence.scheme: ['ring', 'halo'] must be one word, without brackets"),
        (["-m", "run.seed=1,2", "run.stpes=3"], "run run.seed=1: unknown key 'run.stpes'; did you mean 'run.steps'?"),
    ],
)  # fmt: skip
def test_flags_that_are_wrong(arguments, message, capsys):
    assert train.main(arguments) == WRONG
    said = capsys.readouterr()
    assert message in said.err and said.err.count("\n") == 1 and not said.out


@pytest.mark.parametrize("name", OF_A_RECIPE)
def test_every_command_of_a_recipe_takes_the_folder_and_no_flag_of_another(name, mine, capsys):
    flag = mine(model__mine="num_layers: nine\n")
    own = OF_A_RECIPE[name]
    for wrong in (["--cfg", "job"], ["-m"], ["--resolve"]):
        assert COMMANDS[name].main([*own, "recipe=long_context", *wrong]) == WRONG
        assert "is not valid here: it is a flag of python -m launch.train" in capsys.readouterr().err
    if name != "local":  # the runs that it starts say so
        assert COMMANDS[name].main([*own, "model=mine", flag]) == WRONG
        assert "model/mine.yaml: model.num_layers = 'nine' must be a whole number" in capsys.readouterr().err


def test_who_starts_a_run_elsewhere_names_the_folder_absolutely(mine, tmp_path, monkeypatch):
    folder = Path(mine(recipe__mine=f"{GLOBAL}run:\n  steps: 40\ncheckpoint:\n  every: 4\n").partition("=")[2])
    monkeypatch.chdir(folder.parent)
    given = ["--config-dir", folder.name, "recipe=mine"]
    assert shlex.quote(f"--config-dir={folder}") in slurm.script(*slurm.parse(["nodes=2", *given]))
    assert f"--config-dir={folder}" in rehearse.parse([*given, f"run.dir={tmp_path / 'r'}"]).arguments
    assert f"--config-dir={folder}" in local.parse(["processes=2", *given])[1]


# -- the composed recipe --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", [pytest.param("long_context", marks=pytest.mark.slow), "moe"])
def test_a_printed_recipe_is_the_same_recipe(recipe, mine, capsys):
    keys = [f"recipe={recipe}", "model.num_layers=2", "data.mixture=[{source: a, weight: 0.5}]", "data.source='a: #b'",
            "model.attention_scale=null", "run.dir='x y'"]  # fmt: skip
    assert train.main([*keys, "--cfg", "job"]) == DONE
    said = capsys.readouterr()
    flag = mine(recipe__saved=said.out)
    assert not said.err and compose(["recipe=saved", flag]) == compose(keys)
    assert compose(["recipe=saved", flag, "run.steps=3"]).run.steps == 3
    assert compose(["recipe=saved", flag, "cluster=auto"]).cluster.kind == "auto", (
        "the cluster is not part of the recipe"
    )
    with pytest.raises(RecipeError, match=r"model=8b has model\.\w+=\w+, and recipe=saved, which comes after it"):
        compose(["recipe=saved", flag, "model=8b"])


def test_a_printed_section_is_a_variant(mine, capsys):
    changed = ["recipe=moe", "model.experts.num=4", "model.experts.top_k=1"]
    assert train.main([*changed, "--cfg", "job", "--package", "model"]) == DONE
    text = capsys.readouterr().out
    assert text.startswith("# @package model\n") and "optimizer" not in text
    assert compose(["recipe=moe", "model=mine", mine(model__mine=text)]) == compose(changed)


def test_what_is_printed_may_be_resolved(mine):
    flag = mine(recipe__mine=f"{GLOBAL}run:\n  seed: 4\n  steps: ${{run.seed}}\n")
    plain, resolved = (
        text_of(read(["recipe=mine", flag, "--cfg=job", *more], every=True)) for more in ([], ["--resolve"])
    )
    assert "steps: ${run.seed}\n" in plain and "steps: 4\n" in resolved
    assert compose(["recipe=mine", flag]).run.steps == 4


def test_no_recipe_of_the_project_takes_back_what_a_variant_says():
    """So that any two may be named together; a user's own two are looked at when they are."""

    def keys(path):
        said = OmegaConf.to_container(OmegaConf.load(path))
        said.pop("defaults", None)
        inside = said if "@package _global_" in path.read_text() else {path.parent.name: said}
        return {key for key, value in leaves(inside) if not follows(value)}

    said = {path: keys(path) for group in GROUPS for path in (ROOT / "recipes" / group).glob("*.yaml")}
    of_recipes = set().union(*(found for path, found in said.items() if path.parent.name == "recipe"))
    assert {"run.steps", "data.sequence_length"} <= of_recipes and len(said) > 25
    assert not {
        path: found & of_recipes for path, found in said.items() if path.parent.name != "recipe" and found & of_recipes
    }


@pytest.mark.parametrize(
    "text", ["plain", "a'b", "a\\", "a\\'b", "x=[1,2]{}", "two  words", "tab\t$", "ends'", "\\\\'"]
)
def test_a_quoted_value_is_read_as_it_was(text):
    value = OverridesParser.create().parse_override(f"k={quoted(text)}").value()
    assert getattr(value, "text", value) == text


# -- sweeps ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["a=b", "~/runs", "é b", "it's", 'say "x"', 'it\'s "both"', "a\\b=", "a\\", "$HOME=`x`", "a,b"]
)
def test_what_is_said_of_a_value_that_cannot_be_read_may_be_typed(text):
    said = unreadable(f"run.dir={text}")
    advice = re.search(r"inside those of the shell: (.*); for a run", said, re.DOTALL)[1]
    (word,) = shlex.split(advice)
    assert compose([word]).run.dir == text


@pytest.mark.parametrize("text", ["2024_11_23", "1e3", "007", "true", "-1"])
def test_a_key_that_takes_a_text_has_the_letters_that_are_typed(text):
    recipe = compose([f"run.dir={text}", f"data.source={text}", f"model.init_from={text}"])
    assert (recipe.run.dir, recipe.data.source, recipe.model.init_from) == (text,) * 3
    assert compose(["run.seed=1_0", "data.source=null"]).run.seed == 10


LATENT = ["model.layer_pattern=[latent]", "model.qk_norm=false"]
LATENT += ["model.latent.kv_rank=16", "model.latent.rope_dim=8"]


@pytest.mark.parametrize(
    ("words", "idle"),
    [
        (["experts.chunks=2", "optimizer.decay_fraction=0.2"], [0, 1]),
        (["optimizer.schedule=wsd", "optimizer.decay_fraction=0.2", "optimizer.final_ratio=0.5"], []),
        (["optimizer.schedule=constant", "optimizer.final_ratio=0.5"], [1]),
        (["model=moe_nano", "model.ffn_dim=64", "experts.chunks=2", "model.head_dim=16"], [1, 2]),
        (["recipe=moe", "experts.exchange=fp8", "sequence.head_groups=2"], [2]),
        (["recipe=moe", "mesh.ep=1", "experts.exchange=fp8", "experts.load_every=5", "sequence.verify=null"], [2]),
        (["mesh=single", "sequence.order=zigzag", "sequence.verify=first_batch"], [1]),
        (["mesh.sp=-1", "sequence.order=zigzag"], []),
        (["recipe=moe", "mesh.ep=1", "experts.overlap=halves"], [2]),
        (["recipe=moe", "mesh.ep=2", "experts.overlap=halves"], []),
        (["model=sparse_nano", "sequence.scheme=ulysses", "sequence.hops=batch", "sequence.order=zigzag"], [1, 2]),
        (["model=sparse_nano", "sequence.scheme=group_cast", "sequence.buffer=1", "sequence.hops=mask"], [3]),
        (["model=sparse_nano", "model.layer_pattern=[sparse,full]", "sequence.scheme=ulysses"], []),
        ([*LATENT, "model.ffn_dim=64", "model.head_dim=16", "model.num_kv_heads=1"], [5, 6]),
        (["mesh.sp=2", "sequence.latents=always", "sequence.window_scheme=halo"], [1, 2]),
        (["mesh.sp=2", "model.layer_pattern=[window]", "model.sliding_window=8", "sequence.window_scheme=halo"], []),
        (["model.rope_scaling=linear"], [0]),
        (["model.rope_scaling=linear", "model.rope_factor=2"], []),
        (["data.too_long=skip", "data.packing=even"], [0]),
        (["data.too_long=skip", "data.packing=whole"], []),
        (
            ["evaluation.data=a.txt", "evaluation.every=0", "evaluation.batches=2", "evaluation.sample_tokens=8"],
            [0, 2, 3],
        ),
        (["evaluation.data=a.txt", "evaluation.every=2", "evaluation.batches=2"], []),
        (["optimizer.accumulate=bfloat16"], [0]),
        (["optimizer.accumulate=bfloat16", "accumulation=2"], []),
        # What a run refuses anyway: it says that alone.
        (["model.layer_pattern=[nothing]", "model.ffn_dim=64"], []),
        (["model.layer_pattern=[gated_delta+mlp]", "model.ffn_dim=64"], []),
    ],
)
def test_a_key_that_nothing_reads_is_told(words, idle):
    given = words if words[0].startswith("recipe=") else ["recipe=long_context", *words]
    told = unread(given, compose(given))
    assert [line.partition(" changes nothing: ")[0] for line in told] == [words[i] for i in idle]


def test_the_runs_of_a_sweep():
    jobs = jobs_of(["recipe=moe", "run.seed=1,2", "data.source='a b','c/d'", "model=nano"])
    assert [job.overrides[1] for job in jobs] == ["run.seed=1", "run.seed=1", "run.seed=2", "run.seed=2"]
    assert [job.overrides[2] for job in jobs[:2]] == ["data.source='a b'", "data.source='c/d'"]
    assert jobs[0].overrides[::3] == ("recipe=moe", "model=nano")
    assert len({job.name for job in jobs}) == 4 and not any("/" in job.name or " " in job.name for job in jobs)
    assert [job.name for job in jobs_of(["run.seed=range(1,4)", "run.steps=7"])] == [
        "run.seed=1",
        "run.seed=2",
        "run.seed=3",
    ]
    assert len(jobs_of(["run.seed=1,1,2"])) == 2, "the same run once"
    long = [job.name for job in jobs_of([f"data.source={'a' * 300}x,{'a' * 300}y"])]
    assert long[0] != long[1] and max(map(len, long)) < 200


@pytest.mark.parametrize("again", ["run.seed=3", "++run.seed=3", "run.seed=3,4"])
def test_a_key_of_a_sweep_that_is_given_again_is_refused(again):
    """All runs would have the later value, under the names of the others."""
    with pytest.raises(RecipeError, match=r"run.seed=1,2 has several values, and .*run.seed=3.* give run.seed once"):
        jobs_of(["run.seed=1,2", again])
    jobs = jobs_of(["run.seed=3", "run.seed=1,2"])
    assert [(job.name, job.overrides[-1]) for job in jobs] == [
        ("run.seed=1", "run.seed=1"),
        ("run.seed=2", "run.seed=2"),
    ]


def test_a_text_of_a_sweep_is_the_letters_that_are_written():
    """As it is without a sweep: a folder of a month is no number."""
    found = [compose(job.overrides) for job in jobs_of(["checkpoint.dir=2024_11, 1e3,a b", "run.seed=1_0"], texts_of())]
    assert [(r.checkpoint.dir, r.run.seed) for r in found] == [("2024_11", 10), ("1e3", 10), ("a b", 10)]
    assert [job.overrides for job in jobs_of(["run.seed=1_0,10"], texts_of())] == [("run.seed=10",)], "a number"


STUB = """import os, signal, sys, time
words = dict(a.split("=", 1) for a in sys.argv[1:])
folder = words["run.dir"].strip("'")
print("made", folder, flush=True)
seed = words["run.seed"]
if seed == "9":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
    open(os.environ["STUB_WAITS"], "w").close()
    time.sleep(20)
os.makedirs(folder)
open(folder + "/summary.json", "w").write('{"loss_last": %s.5}' % seed)
if seed == "6":
    os.kill(os.getpid(), signal.SIGKILL)
sys.exit({"4": 4, "5": 75, "7": 69}.get(seed, 0))
"""


@pytest.fixture
def stubbed(tmp_path, monkeypatch):
    """Sweeps whose runs are a stub: the exit code of each follows from its seed."""
    (tmp_path / "stub.py").write_text(STUB)
    monkeypatch.setenv("STUB_WAITS", str(tmp_path / "waits"))
    real = sweep._command

    def command(job, a):
        folder, line = real(job, a)
        assert line[:3] == [sys.executable, "-m", "launch.train"]
        return folder, [sys.executable, str(tmp_path / "stub.py"), *line[3:]]

    monkeypatch.setattr(sweep, "_command", command)
    return ["-m", f"run.dir={tmp_path / 'runs'}"]


@pytest.mark.parametrize(
    ("seeds", "code", "made"),
    [
        ([1, 2], DONE, 2),
        ([1, 4, 6, 2], 4, 4),  # one that fails keeps no other from being made
        ([6, 4], 137, 2),
        ([1, 5, 2], PREEMPTED, 2),  # told to stop by somebody else, as by its cluster
        ([1, 7, 2], 69, 2),  # the next one would wait for the same host
    ],
)
def test_how_a_sweep_ends(stubbed, seeds, code, made, tmp_path, capfd):
    assert train.main([*stubbed, f"run.seed={','.join(map(str, seeds))}"]) == code
    said = capfd.readouterr()
    folders = [str(tmp_path / "runs" / f"run.seed={seed}") for seed in seeds[:made]]
    assert [line.removeprefix("made ") for line in said.out.splitlines() if line.startswith("made")] == folders
    table = said.out.splitlines()[-made:]
    assert [line.split()[-1] for line in table] == [f"run.seed={seed}" for seed in seeds[:made]]
    assert table[0].split()[:3] == [{6: "137"}.get(seeds[0], "0"), "loss", f"{seeds[0]}.5000"]
    assert (f"{len(seeds) - made} of {len(seeds)} runs were not started" in said.err) is (made < len(seeds))
    assert said.err.count("ended with exit code") == sum(seed in (4, 5, 6, 7) for seed in seeds)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_sweep_that_is_told_to_stop_tells_its_run_and_starts_no_other(stubbed, number, tmp_path, capfd):
    def interrupt():
        end = time.monotonic() + 30
        while not (tmp_path / "waits").exists() and time.monotonic() < end:
            time.sleep(0.05)
        os.kill(os.getpid(), number)

    if number == signal.SIGINT:
        (tmp_path / "stub.py").write_text(STUB.replace("signal.SIGTERM,", "signal.SIGINT,"))
    before = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)]
    thread = threading.Thread(target=interrupt)
    thread.start()
    assert train.main([*stubbed, "run.seed=1,9,2"]) == PREEMPTED
    thread.join()
    said = capfd.readouterr()
    assert said.out.count("made") == 2 and "1 of 3 runs were not started; the same command resumes" in said.err
    assert "run 2 of 3 ended with exit code 75" in said.err, "it was notified, and did not finish"
    assert before == [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)]


@pytest.mark.slow  # two starts of JAX: what is between them and the command is above
def test_a_sweep_trains(corpus, tmp_path, mine):
    flag = mine(model__thin="defaults:\n  - nano\n  - _self_\nmodel_dim: 32\n")
    own = [a for a in TINY if not a.startswith("model.")]
    line = ["-m", *own, *corpus, flag, "run.steps=2", "optimizer.warmup_steps=1", f"run.dir={tmp_path / 'runs'}"]
    assert train.main([*line, "model=thin,nano"]) == DONE
    assert sorted(p.name for p in (tmp_path / "runs").iterdir()) == ["model=nano", "model=thin"]
    assert losses(tmp_path / "runs" / "model=thin") != losses(tmp_path / "runs" / "model=nano")
    assert len(losses(tmp_path / "runs" / "model=thin")) == 2


def test_a_run_hears_a_signal_from_its_launcher_alone(tmp_path):
    """From a terminal a Ctrl-C goes to a whole group of processes: with that of the launcher a run would hear two."""
    job = Job(1, tmp_path / "logs", command=(sys.executable, "-c", "import time; time.sleep(60)")).start([])
    try:
        assert os.getpgid(job.processes[0].pid) != os.getpgid(0)
        job.signal(signal.SIGUSR1)
        assert job.wait(20) == [-signal.SIGUSR1]
    finally:
        job.kill()


# -- how commands begin and end -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name, capsys):
    for flag in ("-h", "--help"):
        assert COMMANDS[name].main([flag]) == DONE
        said = capsys.readouterr()
        assert f"launch.{name}" in said.out and not said.err
    assert "run_command(" in (ROOT / "launch" / f"{name}.py").read_text()


def test_the_commands_are_listed_with_a_sentence_each(capsys):
    assert listing.main([]) == DONE
    said = capsys.readouterr().out
    assert list(listing.COMMANDS) == [*dict.fromkeys(listing.COMMANDS)] and set(listing.COMMANDS) == set(COMMANDS)
    assert all(f"launch.{name}" in said and len(what.split()) > 3 for name, what in listing.COMMANDS.items())
    table = (ROOT / "launch" / "README.md").read_text()
    assert all(f"| `launch.{name}` |" in table for name in COMMANDS)
    assert listing.main(["tpu-vm"]) == WRONG and "write python -m launch.tpu_vm" in capsys.readouterr().err
    assert listing.main(["serve"]) == WRONG and "python -m launch lists the commands" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["rehearse", "local", "slurm", "report"])
def test_a_command_that_needs_arguments_says_how_it_is_used(name, capsys):
    assert COMMANDS[name].main([]) == WRONG
    assert f"launch.{name}" in capsys.readouterr().out


def test_help_lists_the_variants_of_the_user(mine, capsys):
    assert train.main(["--help", mine(model__huge="num_layers: 99\n")]) == DONE
    assert "huge" in capsys.readouterr().out
    assert train.main(["--help", "--config-dir", "nowhere"]) == WRONG


def test_who_reads_no_further_gets_no_traceback():
    reads, writes = os.pipe()
    os.close(reads)
    command = [sys.executable, "-m", "launch.export", "--help"]
    made = subprocess.run(command, stdout=writes, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writes)
    assert (made.returncode, made.stderr) == (PIPE_CLOSED, "")


def test_who_reads_no_further_stops_the_processes_of_a_run(monkeypatch):
    waits = ("sh", "-c", "trap 'exit 75' TERM; echo up; for i in $(seq 600); do sleep 0.1; done")
    monkeypatch.setattr(local, "Job", lambda count, logs, devices, command: Job(count, logs, devices, waits))
    reads, writes = os.pipe()
    os.close(reads)
    start = time.monotonic()
    with os.fdopen(writes, "w") as nobody:
        monkeypatch.setattr(sys, "stdout", nobody)
        assert local.main(["processes=2", "recipe=long_context"]) == PIPE_CLOSED
    assert time.monotonic() - start < 30


@pytest.mark.parametrize(
    ("body", "code"),
    [
        pytest.param("lambda: 4", 4, marks=pytest.mark.slow),
        pytest.param(
            "lambda: t.run_command(['x'], lambda words: signal.raise_signal(2), str, stopped=('', 75))",
            75,
            marks=pytest.mark.slow,
        ),
        # Ctrl-C while what a command needs is imported.
        (
            "lambda: t.run_command(['x'], lambda words: 0, str, stopped=('', 75)), before=lambda: signal.raise_signal(2)",
            75,
        ),
    ],
)
def test_a_command_that_fails_ends_at_once(body, code):
    """With its own exit code, whatever threads still do: steps may be under way, or a save that a second Ctrl-C has cut off."""
    text = (
        "import signal, threading, time, launch.train as t; threading.Thread(target=time.sleep, args=(60,)).start(); "
    )
    made = subprocess.run([sys.executable, "-c", f"{text}t.command(body={body})"], timeout=30, check=False)
    assert made.returncode == code


def test_ctrl_c_that_a_callback_of_the_collector_has_swallowed_comes_again():
    swallowed = SimpleNamespace(exc_value=KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        train.unraisable(swallowed)
        time.sleep(10)


def test_a_damaged_checkpoint_is_told_without_the_tracebacks_of_its_reader(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["launch.export"])
    monkeypatch.setattr(sys, "unraisablehook", None)
    monkeypatch.delitem(sys.modules, "launch.export")  # else Python warns of a second one
    with pytest.raises(SystemExit):
        runpy.run_module("launch.export", run_name="__main__")
    assert sys.unraisablehook is train.unraisable


def test_a_closed_output_is_one_that_nobody_reads(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    assert run_command(["x"], lambda arguments: int(sys.stdout.isatty()) or DONE, str) == DONE


def test_the_frame_of_a_command(capsys):
    def raises(error):
        def body(arguments):
            raise error

        return body

    assert run_command(["a"], lambda arguments: 7 if arguments == ["a"] else 8, str) == 7
    assert run_command(["x"], raises(NotCompiled("the compiler refuses: memory")), str) == NOT_COMPILED
    assert capsys.readouterr().err == "error: the compiler refuses: memory\n"
    assert run_command(["x"], raises(KeyboardInterrupt()), str) == INTERRUPTED
    assert capsys.readouterr().err == "stopped by SIGINT\n"
    assert run_command(["x"], raises(KeyboardInterrupt()), str, stopped=("it goes on", PREEMPTED)) == PREEMPTED
    assert capsys.readouterr().err == "it goes on\n"
    for error, what in ((MemoryError(), ""), (MemoryError("Unable to allocate 7 TiB"), " (Unable to allocate 7 TiB)")):
        assert run_command(["x"], raises(error), str) == WRONG
        wanted = f"error: this host is out of memory{what}: use a smaller batch, or shorter rows\n"
        assert capsys.readouterr().err == wanted
    with pytest.raises(TypeError, match="a fault of ours"):
        run_command(["x"], raises(TypeError("a fault of ours")), str)
