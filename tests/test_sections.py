"""What every section of a recipe shares: each key is classified by its own section, and each section is checked by walking."""

import dataclasses
import functools
from dataclasses import dataclass, field

import jax.numpy as jnp
import pytest
from small_run import TINY

from ejdist.mesh import MeshSection
from ejdist.models.decoder import DecoderConfig
from ejdist.models.model import Model
from ejdist.models.parameters import Param
from ejdist.operations import bind_ops
from ejdist.sections import flat, keys_of, operational, validate
from ejdist.training.curriculum import StageSection
from ejdist.training.program import TrainSections
from ejdist.training.resume import check_same_run, fingerprint
from launch.options import check_run
from launch.train import main as train
from recipes.schema import Recipe, compose
from recipes.schema import keys_of as names_of

# What stopped a run from going on when keys that decide were listed, and what has been recorded beside them.
DECIDED = {key for key in names_of() if key.startswith(("model.", "optimizer."))} - {
    "model.remat", "model.scan_layers", "model.init_from", "model.rope_exact_from", "optimizer.offload"
}  # fmt: skip
DECIDED |= {"accumulation", "z_loss", "experts.capacity", "lora.rank", "lora.alpha", "lora.targets", "lora.base"}
RECORDED = {"run.steps", "model.init_from", "model.rope_exact_from", "plugins"} | {
    f"data.{name}"
    for name in (
        "source", "mixture", "weights_by", "format", "loss_on", "packing", "too_long", "text_key", "tokenizer", "bos", "eos",
        "chat_template",
    )
}  # fmt: skip


def with_value(section, name, value):
    """Returns the section with another value of a key."""
    first, _, rest = name.partition(".")
    value = with_value(getattr(section, first), rest, value) if rest else value
    return dataclasses.replace(section, **{first: value})


def other(value):
    """Returns another value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, tuple | list):
        return (*value, "full")
    return "other" if value is None else f"{value}x"


@functools.cache
def tiny():
    """Returns the small recipe, which nobody may change."""
    return compose(TINY)


@pytest.mark.parametrize("key", list(keys_of(Recipe())), ids=lambda key: key.name)
def test_a_run_goes_on_with_another_value_unless_the_key_decides(key, tmp_path):
    recipe = tiny()
    changed = with_value(recipe, key.name, other(flat(recipe)[key.name]))
    if key.name == "run.steps":
        return  # tests/test_resume.py: it has a rule of its own
    if key.decides:
        with pytest.raises(ValueError, match=rf"another recipe: {key.name}: was .*, is .*; restore it"):
            check_same_run(fingerprint(recipe), changed, 3, tmp_path)
    else:
        check_same_run(fingerprint(recipe), changed, 3, tmp_path)


def test_what_launch_readme_lets_a_run_change_may_change(tmp_path):
    """Mesh, guards, where files are, how often is saved: whatever the classification of a single key says."""
    recipe = tiny()
    overrides = [
        *("mesh.sp=1", "mesh.fsdp=2", "sequence.scheme=all_gather", "sequence.order=contiguous"),
        *("experts.dispatch=all_gather", "experts.load_every=0", "guards.spike=rewind", "guards.most_rewinds=5"),
        *("checkpoint.every=7", "checkpoint.keep=1", "checkpoint.dir=elsewhere", "run.dir=moved", "run.stop_after=4"),
        *(
            "run.host_timeout=5",
            "data.prefetch=1",
            "data.cache_dir=cache",
            "model.remat=full",
            "model.scan_layers=false",
            "model.init_from=first",
        ),
        *("platform=xla", "deterministic_attention=true", "cluster=auto"),
    ]
    changed = compose([*TINY, *overrides])
    check_same_run(fingerprint(recipe), changed, 3, tmp_path)


def test_what_decided_when_it_was_listed_decides_still():
    deciding = {key.name for key in keys_of(Recipe()) if key.decides}
    assert DECIDED <= deciding and len(deciding) >= 68
    assert set(fingerprint(tiny())) == deciding | RECORDED


@dataclass
class Rounding:
    """A section that nobody has classified, but for one key of it."""

    format: str = "none"
    log_every: int = operational(10)

    def validate(self):
        if self.format not in ("none", "e4m3"):
            raise ValueError(f"rounding.format = {self.format!r} is unknown; use none or e4m3")


@dataclass
class Larger(Recipe):
    rounding: Rounding = field(default_factory=Rounding)


def larger(**changes):
    return Larger(**vars(tiny()), rounding=Rounding(**changes))


def test_a_key_of_a_new_section_decides_by_itself(tmp_path):
    stored = fingerprint(larger())
    assert stored["rounding.format"] == "none" and "rounding.log_every" not in stored
    check_same_run(stored, larger(log_every=3), 3, tmp_path)
    with pytest.raises(ValueError, match=r"rounding.format: was none, is e4m3; restore it"):
        check_same_run(stored, larger(format="e4m3"), 3, tmp_path)


def test_a_checkpoint_from_before_a_key_had_its_default(tmp_path):
    before = fingerprint(tiny())
    check_same_run(before, larger(), 3, tmp_path)
    with pytest.raises(
        ValueError, match=r"rounding.format: was none \(the default: that run has no such key\), is e4m3"
    ):
        check_same_run(before, larger(format="e4m3"), 3, tmp_path)
    with pytest.raises(ValueError, match=r"rounding\.format: was none, and there is no such key now"):
        check_same_run(fingerprint(larger()), tiny(), 3, tmp_path)
    # What was recorded when it decided, and does not any more, is of no account.
    check_same_run(before | {"model.remat": "full"}, tiny(), 3, tmp_path)


def test_a_new_section_is_checked_by_itself():
    validate(larger())
    with pytest.raises(ValueError, match=r"rounding.format = 'e5m2' is unknown"):
        validate(larger(format="e5m2"))


WRONG = [
    ("run.steps=0", "run.steps must be at least 1"),
    ("sequence.scheme=rings", "sequence.scheme"),
    ("experts.chunks=0", "experts.chunks"),
    ("guards.spike=maybe", "guards.spike"),
    ("lora.rank=-1", "lora.rank must be positive, or 0"),
    ("data.prefetch=0", "data.prefetch"),
    ("data.global_batch=0", "data.global_batch must be at least 1"),
    ("checkpoint.keep=0", "checkpoint.keep"),
    ("optimizer.b1=2", "optimizer.b1"),
    ("mesh.tp=0", "mesh.tp must be a positive number of devices"),
    ("cluster.heartbeat=1", "cluster.heartbeat"),
    ("model.num_heads=3", "model.num_heads"),
    ("evaluation.every=-1", "evaluation.every must be a number of steps"),
    ("evaluation.batches=0", "evaluation.batches must be at least 1"),
    ("run.profile=[3]", r"run.profile = \[3\] must be \[FIRST,LAST\]"),
    ("platform=abacus", "platform = 'abacus'"),
    ("accumulation=3", "multiple of accumulation = 3"),
    ("curriculum=[{until:3,rope_base:-1.0},{}]", r"curriculum\[0\]: model.rope_base"),
]


@pytest.mark.parametrize(("override", "words"), WRONG, ids=[override for override, _ in WRONG])
def test_every_section_is_checked(override, words):
    with pytest.raises(ValueError, match=words):
        validate(compose([*TINY, override]))


def test_no_section_is_left_out_of_the_wrong_values():
    sections = {f.name for f in dataclasses.fields(Recipe) if dataclasses.is_dataclass(getattr(Recipe(), f.name))}
    assert sections == {override.partition(".")[0] for override, _ in WRONG if "." in override.partition("=")[0]}


def test_commands_check_every_section(capsys, tmp_path):
    """Before devices are there, and so before a job is queued; each names the key."""
    for override in ("optimizer.b1=2", "guards.spike=maybe"):
        key = override.partition("=")[0]
        with pytest.raises(ValueError, match=key):
            check_run([*TINY, override], "here")
        assert train(["--multirun", *TINY, f"run.dir={tmp_path}", override, "run.seed=1,2"]) != 0
        assert key in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_section_of_ones_own_needs_no_validate():
    @dataclass
    class Plain:
        rate: float = 1.0

    @dataclass
    class Mine(TrainSections):
        plain: Plain = field(default_factory=Plain)

    validate(Mine(model=DecoderConfig()))
    assert flat(Mine(curriculum=[StageSection(until=2)]))["curriculum[0].until"] == 2
    assert [key.name for key in keys_of(MeshSection()) if key.decides] == []


def test_a_dim_of_a_parameter_that_no_layout_knows_is_refused():
    """It would be stored whole on every device."""
    with pytest.raises(
        ValueError, match=r"parameter layers\.gate has the dims 'Dd F', but 'Dd' is not in the vocabulary"
    ):
        Model({"layers": {"gate": Param((4, 8), "Dd F")}}, embed=None, layers=None, head=None, num_layers=1, flops=())
    with pytest.raises(ValueError, match=r"must name each dim of the shape \(4, 8\)"):
        Param((4, 8), "D")
    for move in (bind_ops(None).gather, bind_ops(None).constrain):
        with pytest.raises(ValueError, match="'Ff' is not in the vocabulary"):
            move(jnp.ones((4, 8)), "D Ff")


def test_another_spelling_of_a_kind_of_layer_is_the_same_run(tmp_path):
    before = fingerprint(compose([*TINY, "model.layer_pattern=[full]"]))
    check_same_run(before, compose([*TINY, "model.layer_pattern=[full+mlp]"]), 3, tmp_path)
    check_same_run(before, compose([*TINY, "model.layer_pattern=[attention+mlp]"]), 3, tmp_path)
    with pytest.raises(ValueError, match=r"model\.layer_pattern: was"):
        check_same_run(before, compose([*TINY, "model.layer_pattern=[full+none]"]), 3, tmp_path)
