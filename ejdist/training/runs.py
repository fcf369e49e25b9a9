"""Another run of this project as a source of weights: its last checkpoint, or that of a step."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejdist.models.decoder import DecoderConfig, decoder_type
from ejdist.models.lora import LoRASection
from ejdist.models.parameters import Param
from ejdist.paths import is_step, is_url, place
from ejdist.registered import PluginError, load
from ejdist.sections import flat
from ejdist.training.checkpoint import Checkpoints, CheckpointSection
from ejdist.training.checkpoint_rows import StoredArray
from ejdist.weights.files import WeightsError
from ejdist.weights.lora import Merged


class Run:
    """The checkpoint of a run: its model, what else decided its losses, what its data were, and its parameters one by one."""

    def __init__(self, folder: str | Path, step: int | None = None, key: str = "run.dir") -> None:
        """Opens the last checkpoint, or that of a step.

        Args:
          folder: a run.dir, or the checkpoint.dir of a run, which may be gs://BUCKET/FOLDER.
          key: that names it.

        Raises:
          WeightsError: there is no such run or step. CheckpointError: its checkpoint cannot be read. ValueError: it is a URL
            that cannot be read here.
        """
        self.folder = place(key, str(folder))
        checkpoint_dir = (
            None if not is_url(str(folder)) and (self.folder / "checkpoints").is_dir() else str(self.folder)
        )
        if checkpoint_dir is not None and not is_url(checkpoint_dir) and not has_steps(Path(checkpoint_dir)):
            raise WeightsError(
                f"{checkpoint_dir} holds no checkpoint; give the run.dir of a run that has one, or its checkpoint.dir"
            )
        self._checkpoints = Checkpoints(str(self.folder), CheckpointSection(dir=checkpoint_dir))
        last = self._checkpoints.latest()
        if last is None:
            raise WeightsError(f"{self.folder} holds no checkpoint; give the run.dir of a run that has one")
        steps = self._checkpoints.steps()[::-1]
        if step is not None and step not in steps:
            there = f"those of steps {', '.join(map(str, steps))}" if len(steps) > 1 else f"that of step {steps[0]}"
            raise WeightsError(f"{self.folder} has no checkpoint of step {step}, but {there}")
        self.step = last if step is None else step
        beside = self._checkpoints.run_of(self.step)
        self.recipe, self.data = beside["recipe"], beside["data"]
        stages = [values.get("data.sequence_length", 0) for _, values in beside.get("stages") or []]
        self.longest = max(self.data["sequence_length"], *stages, 0)  # tokens of a row, in any stage so far
        if (saved_step := self.data.get("step", self.step)) != self.step:
            raise WeightsError(
                f"checkpoint {self._checkpoints.directory / str(self.step)} holds the state of step {saved_step}: remove it, "
                "or give another step"
            )
        self.model, self.lora = section_of(self.recipe, self.folder), lora_of(self.recipe)
        self.merged = Merged(self.model, self.lora) if self.lora.rank else None

    @property
    def kept_in(self) -> str:
        """The folder of its checkpoints."""
        return str(self._checkpoints.directory)

    def load(self, like: dict[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
        """Returns leaf -> array for the leaves of `like`, with the run's adapters merged in. Their dtype may differ from the
        run's. Raises CheckpointError."""
        arrays = {}
        if self.merged is not None:
            for name, one in like.items():
                if parts := self.merged.placed(name, one):
                    arrays[name] = self.merged.made(name, self._read(parts), one)
        rest = {name: one for name, one in like.items() if name not in arrays}
        narrow = [name for name, one in rest.items() if one.dtype == jnp.bfloat16]
        arrays |= self._read({name: one for name, one in rest.items() if name not in narrow})
        for name in narrow:  # one by one: each is first read in float32
            wide = jax.ShapeDtypeStruct(rest[name].shape, jnp.float32, sharding=rest[name].sharding)
            arrays[name] = self._read({name: wide})[name].astype(jnp.bfloat16)
        return {name: arrays[name] for name in like}

    def stored(self, params: Mapping[str, Param]) -> dict[str, np.ndarray]:
        """Returns arrays of the checkpoint, unchanged, by their names in it, on this machine. Raises CheckpointError."""
        here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        like = {name: jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=here) for name, p in params.items()}
        return {name: np.asarray(x) for name, x in self._read(like).items()}

    def _read(self, like: dict[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
        """Returns arrays of the checkpoint, by the names they have there."""
        return unnested(self._checkpoints.restore_part(self.step, nested(like))) if like else {}

    def open(self, like: Mapping[str, Any]) -> dict[str, StoredArray]:
        """Returns name -> array for each array that the leaves of `like` are computed from, to be read whole or by layers.
        Raises CheckpointError."""
        parts = {name: self.merged.likes(name) if self.merged is not None else {} for name in like}
        return self._checkpoints.open_part(
            self.step, {n: x for name in like for n, x in (parts[name] or {name: like[name]}).items()}
        )

    def rows(self, leaf: str, arrays: Mapping[str, StoredArray]) -> Any:
        """Returns the array of a leaf, from the result of `open`: as it is stored, or with adapters merged row by row as it is
        read."""
        parts = self.merged.likes(leaf) if self.merged is not None else {}
        if self.merged is None or not parts:
            return arrays[leaf]
        return self.merged.rows(leaf, {name: arrays[name] for name in parts})

    def load_and_close(self, like: dict[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
        """Does what `load` does, and closes the run."""
        try:
            return self.load(like)
        finally:
            self.close()

    def digest(self) -> str:
        """Returns a digest of all its arrays, as they were when they were saved."""
        digests = self._checkpoints.digests_of(self.step)
        return hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()[:16]

    def close(self) -> None:
        self._checkpoints.close()


def has_steps(folder: Path) -> bool:
    """Returns whether a folder is the checkpoint.dir of a run."""
    return folder.is_dir() and any(is_step(p.name) and p.is_dir() for p in folder.iterdir())


def section_of(recipe: dict[str, Any], where: Any) -> DecoderConfig:
    """Returns the model section of a run, from what its checkpoint keeps. A key that it lacks had its default."""
    settings = {k.removeprefix("model."): v for k, v in recipe.items() if k.startswith("model.")}
    try:
        load(recipe.get("plugins") or ())
    except PluginError as error:
        raise WeightsError(f"{where} was trained with a plugin: {error}") from error
    strange = sorted(set(settings) - set(flat(decoder_type()())))
    if strange:
        raise WeightsError(f"{where} has another model: it has model.{strange[0]}, which the decoder does not have")
    tree = nested(settings)
    kinds = {f.name: f.default_factory for f in fields(decoder_type()) if is_dataclass(f.default_factory)}
    held = {name: kind(**tree.pop(name, {})) for name, kind in kinds.items()}
    return decoder_type()(**tree, **held)


def lora_of(recipe: dict[str, Any]) -> LoRASection:
    """Returns the lora section of a run, from what its checkpoint keeps."""
    return LoRASection(**{k.removeprefix("lora."): v for k, v in recipe.items() if k.startswith("lora.")})


def nested(flat_tree: dict[str, Any]) -> dict[str, Any]:
    """Returns "a.b" -> x as {"a": {"b": x}}."""
    tree: dict[str, Any] = {}
    for name, value in flat_tree.items():
        *path, last = name.split(".")
        here = tree
        for part in path:
            here = here.setdefault(part, {})
        here[last] = value
    return tree


def unnested(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns {"a": {"b": x}} as "a.b" -> x."""
    flat_tree = {}
    for name, value in tree.items():
        flat_tree |= unnested(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat_tree
