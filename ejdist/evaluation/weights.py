"""The parameters that are evaluated: of a run's checkpoint, or of a folder of Hugging Face; and the model that they are of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax

from ejdist.buckets import source_path
from ejdist.models.decoder import DecoderConfig
from ejdist.models.parameters import initialise
from ejdist.paths import is_url
from ejdist.training.program import Program
from ejdist.training.pytree_io import name_of
from ejdist.training.runs import Run, has_steps, nested
from ejdist.training.start import open_source
from ejdist.weights.match import differences, told_difference
from ejdist.weights.published import read_published
from ejdist.weights.tensors import declared_leaves


@dataclass(frozen=True)
class Weights:
    """Parameters that can be loaded; nothing of them has been read.

    Attributes:
      what: what they are, in words.
      model: the section that they were trained with, or that of their config.json.
      data: what their run's data were, as a checkpoint keeps it; empty where that is not known.
      digest: tells these from others, for hosts that each have a copy.
      recipe: what else decided that run's losses.
      dtype: of the files of a published folder, by NumPy's name; None where they do not say.
      tokenizer: the folder of weights that has a tokenizer.json; None of a run.
    """

    what: str
    model: DecoderConfig
    read: Callable[[dict[str, jax.ShapeDtypeStruct]], dict[str, jax.Array]]
    digest: Callable[[], str]
    data: dict[str, Any] = field(default_factory=dict)
    recipe: dict[str, Any] = field(default_factory=dict)
    dtype: str | None = None
    tokenizer: str | None = None

    def notes(self, model: DecoderConfig) -> list[str]:
        """Returns a line where a model computes in another dtype than that of a published folder."""
        if self.dtype in (None, model.compute_dtype):
            return []
        return [f"compute_dtype {model.compute_dtype} (the folder says {self.dtype})"]

    def check(self, model: DecoderConfig) -> None:
        """Raises ValueError, naming a key, where a model that they are to be used in has other parameters, or is another
        function of them but for its positions (`rope_`)."""
        ours, theirs = ({n: p.shape for n, p in declared_leaves(c).items()} for c in (model, self.model))
        if ours != theirs:
            odd = sorted(n for n in {*ours, *theirs} if ours.get(n) != theirs.get(n))[0]
            keys = ", ".join(f"model.{k}" for k in differences(model, self.model)[:3])
            raise ValueError(f"{keys}: {self.what} has other parameters ({odd}); leave out what changes their shape")
        if changed := [k for k in differences(model, self.model) if not k.startswith("rope_")]:
            key = told_difference(model, self.model, self.what, changed[0])
            raise ValueError(f"{key}, or leave it out: only model.rope_ keys can be tried out on weights")

    def load(self, program: Program) -> tuple[Any, Any]:
        """Returns (params, buffers), where the program has them. Raises CheckpointError or WeightsError."""
        likes = {
            f"{kind}.{name_of(path)}": like
            for kind, tree in (("params", program.state.params), ("buffers", program.state.buffers))
            for path, like in jax.tree_util.tree_leaves_with_path(tree)
        }
        has = declared_leaves(self.model)
        tree = nested(self.read({name: like for name, like in likes.items() if name in has}))
        key, places = jax.random.key(0), jax.tree.map(lambda like: like.sharding, program.state.buffers)

        def whole(loaded: Any) -> Any:
            drawn = initialise(program.model.buffers, key)
            return {part: new | loaded.get(part, {}) for part, new in drawn.items()}

        return tree["params"], jax.jit(whole, out_shardings=places)(tree.get("buffers", {}))


def open_weights(where: str, step: int | None = None) -> Weights:
    """Returns the weights of a folder: a run's, of a step (default: the last), or those of Hugging Face.

    Raises:
      ValueError: there are none, or a step is asked for that is not there. CheckpointError: a checkpoint cannot be read.
    """
    folder = source_path("run.dir", where)
    if (folder / "config.json").exists():
        if step is not None:
            raise ValueError(
                f"step = {step} is of a run's checkpoints, and {where!r} is a folder of weights: leave it out"
            )
        published = read_published(folder)
        source = open_source(where, published.model)
        tokenizer = where if (folder / "tokenizer.json").is_file() else None
        return Weights(
            str(folder), published.model, source.load, source.digest, dtype=published.dtype, tokenizer=tokenizer
        )
    if is_url(where):
        return _of_run(Run(where, step))
    if not (folder / "checkpoints").is_dir() and not has_steps(folder):
        what = "has neither checkpoints nor config.json" if folder.is_dir() else "is no folder"
        raise ValueError(
            f"{where!r} {what}; give run.dir=DIR of a run, or a folder with config.json and safetensors (model.init_from=DIR, "
            "and from=DIR of launch.generate)"
        )
    return _of_run(Run(folder, step))


def _of_run(run: Run) -> Weights:
    what = f"step {run.step} of the run in {run.folder}"
    return Weights(what, run.model, run.load_and_close, run.digest, run.data, run.recipe)
