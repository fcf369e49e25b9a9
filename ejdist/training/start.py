"""Where the parameters of a new run come from: files of Hugging Face, or another run (`model.init_from`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax

from ejdist.buckets import source_path
from ejdist.models.decoder import DecoderConfig
from ejdist.paths import is_url
from ejdist.sections import validate
from ejdist.training.data.own_batches import OWN_BATCHES
from ejdist.training.data.tokenizer import fingerprint_of
from ejdist.training.runs import Run, has_steps, nested
from ejdist.weights.files import WeightsError, digest_of, read_folder
from ejdist.weights.match import told_difference
from ejdist.weights.published import not_of_positions, read_published, told_positions
from ejdist.weights.reader import check, check_ahead, load, tensors_in
from ejdist.weights.tensors import declared_leaves

__all__ = ["Source", "nested", "open_source"]


@dataclass(frozen=True)
class Source:
    """Weights that fit a model; nothing of them has been read.

    leaves: names of what there is. load: leaf -> `jax.ShapeDtypeStruct` with a sharding, to leaf -> array. notes: where the run
    differs from the weights' own config.json or run, and which of them it leaves out, and why. digest: identifies the weights,
    for hosts that each have a copy. tokenizer: the fingerprint of the one that they were trained with; None: not known.
    """

    what: str
    leaves: frozenset[str]
    notes: list[str]
    load: Callable[[dict[str, jax.ShapeDtypeStruct]], dict[str, jax.Array]]
    digest: Callable[[], str]
    tokenizer: str | None = None

    def told_of_tokenizer(self, fingerprint: str) -> list[str]:
        """Returns a line if the data of a run have another tokenizer."""
        if self.tokenizer in (None, OWN_BATCHES, fingerprint):
            return []
        return [
            f"data.tokenizer is not that of {self.what}: a token whose id was another's starts with the embedding of that one"
        ]


def open_source(where: str, c: DecoderConfig, stages: Sequence[DecoderConfig] = ()) -> Source:
    """Returns the weights of a folder, for the model of a recipe. Everything but the numbers is checked.

    Args:
      stages: the model in each stage of the run, where rotary embedding may be another; default: the recipe's.

    Raises:
      WeightsError: there are none, or they are not of this model; names the first key or tensor that differs, and what to do.
      CheckpointError: it is a run whose checkpoint cannot be read.
    """
    validate(c)
    stages = stages or [c]
    leaves = frozenset(declared_leaves(c))
    folder = source_path("model.init_from", where)
    if (folder / "config.json").exists():
        published = read_published(folder)
        hint = f"model=hf takes all keys of its model, and python -m launch.export from={where} prints them"
        _check_model(c, published.model, f"{published.path}", hint)
        differences = _told(stages, published.model, "the folder says", published.dtype)
        stored = read_folder(folder)
        check_ahead(published.family, c, stored, folder)
        tensors = tensors_in(published.family, c, stored)
        notes = differences + check(tensors, stored, c, folder)
        return Source(
            str(folder),
            leaves,
            notes,
            lambda like: load(stored, tensors, like),
            lambda: digest_of(stored),
            fingerprint_of(folder / "tokenizer.json"),
        )
    if is_url(where):
        return _of_run(Run(where, key="model.init_from"), c, stages, leaves)
    if (folder / "checkpoints").is_dir() or has_steps(folder):
        return _of_run(Run(folder), c, stages, leaves)
    what = "has neither config.json nor checkpoints" if folder.is_dir() else "is no folder"
    raise WeightsError(
        f"model.init_from = {where!r} {what}; give a folder with config.json and safetensors, or the run.dir of another run"
    )


def _of_run(run: Run, c: DecoderConfig, stages: Sequence[DecoderConfig], leaves: frozenset[str]) -> Source:
    _check_model(c, run.model, f"the run in {run.folder}", "its parameters are of that model")
    if c.mtp.modules > run.model.mtp.modules:
        raise WeightsError(
            f"model.mtp.modules = {c.mtp.modules} in this recipe, and the run in {run.folder} has no such module: give "
            "model.mtp.modules=0"
        )
    notes = _told(stages, run.model, "that run has", run.model.compute_dtype)
    return Source(
        f"step {run.step} of the run in {run.folder}",
        leaves,
        notes,
        run.load_and_close,
        run.digest,
        run.data.get("tokenizer"),
    )


def _check_model(ours: DecoderConfig, theirs: DecoderConfig, where: str, hint: str) -> None:
    differing = not_of_positions(ours, theirs)
    if differing:
        others = len(differing) - 1
        more = f" ({others} more key{'s differ' if others > 1 else ' differs'})" if others else ""
        raise WeightsError(f"{told_difference(ours, theirs, where, differing[0])}{more}; {hint}")


def _told(stages: Sequence[DecoderConfig], theirs: DecoderConfig, who: str, dtype: str | None) -> list[str]:
    """Returns a line about where a run differs from the files or the run that its weights come from; empty if it does not."""
    phrases = [told_positions(stage, theirs, who) for stage in stages]
    computed = stages[0].compute_dtype
    if dtype is not None and dtype != computed:
        phrases = [[*one, f"compute_dtype {computed} ({who} {dtype})"] for one in phrases]
    if all(one == phrases[0] for one in phrases):
        return [", ".join(phrases[0])] if phrases[0] else []
    return ["; ".join(f"stage {i}: {', '.join(one)}" for i, one in enumerate(phrases, 1) if one)]
