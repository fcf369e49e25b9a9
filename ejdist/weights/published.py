"""The settings that a published folder implies for a run on its weights: the model section, and the compute dtype."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ejdist.dtypes import dtype_name
from ejdist.models.config import ROPE_SCALING, DecoderShape
from ejdist.models.decoder import DecoderConfig
from ejdist.sections import flat
from ejdist.weights.families import Family, read_config
from ejdist.weights.files import WeightsError, read_json
from ejdist.weights.match import differences, same, written

CONFIG = "config.json"
COMPUTED = ("float32", "bfloat16")  # what a model here computes in
_WITH_LENGTH = ("yarn", "llama3")  # the scalings that depend on the context before them


@dataclass(frozen=True)
class Published:
    """The config.json of a folder, read.

    Attributes:
      path: of the file. family: of its architecture.
      model: its section, with the default compute dtype.
      dtype: of its weights, by NumPy's name; None where the file has none.
      context: tokens that the model was trained with, max_position_embeddings; None where the file has none.
    """

    path: Path
    family: Family
    model: DecoderConfig
    dtype: str | None
    context: int | None

    def computed_in(self) -> str:
        """Returns the compute dtype of a run on the folder. Raises WeightsError: a model here cannot compute in it."""
        if self.dtype is None:
            return "float32"  # as transformers reads a file without the key
        if self.dtype not in COMPUTED:
            raise WeightsError(
                f"{self.path} has dtype = {self.dtype}, and a model here computes in bfloat16 or float32: give "
                "model.compute_dtype=bfloat16, or float32"
            )
        return self.dtype

    def values(self, scaling: str | None) -> dict[str, Any]:
        """Returns key -> value of the model section, without compute_dtype.

        Args:
          scaling: `rope_scaling` of the run. With another one than the folder's, the parameters of the folder's scaling mean
            nothing, and take their defaults; the context before scaling is the folder's.
        """
        section = {key: value for key, value in flat(self.model).items() if key != "compute_dtype"}
        if scaling == self.model.rope_scaling:
            return section
        section |= {key: getattr(DecoderShape, key) for key in ROPE_SCALING} | {"rope_scaling": scaling}
        if scaling in _WITH_LENGTH:
            length = self.model.rope_original_length if self.model.rope_scaling in _WITH_LENGTH else self.context
            section["rope_original_length"] = length or DecoderShape.rope_original_length
        return section


def read_published(folder: Path) -> Published:
    """Returns the settings of a folder. Raises WeightsError: its config.json cannot be read, or is of a model unknown here."""
    (family, section), content = read_config(folder), read_json(folder / CONFIG)
    dtype = next((content[key] for key in ("dtype", "torch_dtype") if content.get(key) is not None), None)
    context = content.get("max_position_embeddings")
    return Published(
        folder / CONFIG,
        family,
        section,
        None if dtype is None else dtype_name(str(dtype)),
        context if type(context) is int and context > 0 else None,
    )


def not_of_positions(ours: DecoderShape, theirs: DecoderShape) -> list[str]:
    """Returns the keys in which two models differ so that weights do not fit: all but those of rotary embedding, which hold no
    parameter, and which a run with a longer context changes."""
    return [key for key in differences(ours, theirs) if not key.startswith("rope_")]


def told_positions(ours: DecoderShape, theirs: DecoderShape, who: str) -> list[str]:
    """Returns a phrase for each key of rotary embedding in which a model differs from that of its weights.

    Args:
      who: the source of the other value with its verb, as in "the folder says".
    """
    if not any(key.startswith("rope_") for key in differences(ours, theirs)):
        return []
    mine, other = flat(ours), flat(theirs)
    # The parameters of two kinds of scaling cannot be compared, and a folder does not say how precise angles are.
    scaling_keys = ROPE_SCALING if ours.rope_scaling != theirs.rope_scaling else ()
    skipped = (*scaling_keys, "rope_exact_from")
    keys = [key for key in mine if key.startswith("rope_") and key not in skipped and not same(mine[key], other[key])]
    if ours.rope_scaling is not None:
        unread = () if ours.rope_scaling in _WITH_LENGTH else ("rope_original_length",)
        always = ("rope_factor", "rope_original_length")
        scaling_keys = [
            k for k in scaling_keys if k not in unread and (k in always or mine[k] != getattr(DecoderShape, k))
        ]
    else:
        scaling_keys = []
    return [
        *(f"{key} {_short(mine[key])} ({who} {_short(other[key])})" for key in keys),
        *(f"{key} {_short(mine[key])}" for key in scaling_keys),
    ]


def _short(value: Any) -> str:
    return str(int(value)) if isinstance(value, float) and value.is_integer() else written(value)
