"""Adapters into files that PEFT reads, by the names of the published model: adapter_config.json, adapter_model.safetensors."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ejdist.models.decoder import DecoderConfig, declare
from ejdist.models.lora import LoRASection, summed_axes, targets_of
from ejdist.models.parameters import Param
from ejdist.weights.families import family_of
from ejdist.weights.files import DTYPES, WeightsError
from ejdist.weights.tensors import Piece, Tensor, expand
from ejdist.weights.writer import WRITTEN, check_target

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
_STACK, _WEIGHT = "params.layers.", ".weight"


def save_adapter(
    to: Path,
    c: DecoderConfig,
    section: LoRASection,
    leaf: Callable[[str], Any],
    *,
    dtype: str = "float32",
    base: str | None = None,
) -> int:
    """Writes a folder, which appears when it is complete. Returns how many numbers the adapters have.

    Args:
      leaf: name -> the numbers of a stack, "params.layers.query.a", of which row i is that of layer i of its kind.
      dtype: of the tensors. base: for `base_model_name_or_path`, the folder or name of the model that they belong to.

    Raises:
      WeightsError: the model is of no family, PEFT cannot name its adapters, or the folder or dtype is wrong; nothing has been
        written.
    """
    if dtype not in WRITTEN:
        raise WeightsError(f"dtype = {dtype!r} is unknown; use one of {', '.join(WRITTEN)}")
    check_target(to)
    layers = declare(c)["layers"]
    targets = targets_of(layers, section)
    family = family_of(c)[1]
    tensors = expand(family.rules[0], c)
    stacks = {name: [np.asarray(leaf(f"{_STACK}{name}.{part}")) for part in "ab"] for name in targets}
    arrays: dict[str, np.ndarray] = {}
    modules: dict[str, int] = {}  # name -> rank
    for tensor in tensors:
        pieces = [p for p in tensor.pieces if p.leaf.removeprefix(_STACK) in stacks and p.leaf.startswith(_STACK)]
        if not pieces:
            continue
        module = tensor.name.removesuffix(_WEIGHT)
        if module.rpartition(".")[2] in family.unadapted:
            raise WeightsError(
                f"adapter = 'peft' cannot write that of {module}, which PEFT refuses in models of {family.model_type}: leave "
                "adapter out, to write the model with its adapters merged, or train without "
                f"{pieces[0].leaf.removeprefix(_STACK)} in lora.targets"
            )
        a, b = _pair(tensor, pieces, layers, stacks)
        modules[module] = len(a)
        for name, x in (("lora_A", a), ("lora_B", b)):
            arrays[f"base_model.model.{module}.{name}{_WEIGHT}"] = x.astype(DTYPES[WRITTEN[dtype]])
    names = _names(modules, tensors)
    new = to.with_name(f"{to.name}.partial")
    new.mkdir()
    try:
        config = _config(section, names, base)
        (new / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        _write(new / TENSORS, arrays)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise
    if to.is_dir():
        to.rmdir()
    new.rename(to)
    return sum(x.size for x in arrays.values())


def _pair(
    tensor: Tensor,
    pieces: Sequence[Piece],
    layers: Mapping[str, Param],
    stacks: Mapping[str, Sequence[np.ndarray]],
) -> tuple[np.ndarray, np.ndarray]:
    """Returns (A [rank, in], B [out, rank]) of a tensor [out, in] of a published model. Where it joins several of ours,
    each has a part of the rank, and in B its own rows, which may be several blocks."""
    narrow: dict[str, np.ndarray] = {}  # by our names
    wide: dict[str, np.ndarray] = {}
    for piece in pieces:
        name, row = piece.leaf.removeprefix(_STACK), piece.at[0]
        start, stop, (out, inner) = piece.rows or (0, tensor.shape[0], tensor.split)
        a, b = (x[row].astype(np.float32) for x in stacks[name])
        summed = [i - 1 for i in summed_axes(layers[name])]
        held = dict(zip((i for i, at in enumerate(piece.at[1:]) if not isinstance(at, int)), piece.order, strict=True))
        inputs = [held.get(i, -1) for i in summed]
        outputs = [axis for i, axis in held.items() if i not in summed]
        if sorted(inputs) != list(range(len(out), len(out) + len(inner))):
            raise WeightsError(
                f"{tensor.name} is no matrix [out, in] of {name}, which PEFT could adapt; leave adapter out"
            )
        a = np.moveaxis(a, -1, 0).transpose([0, *(1 + i for i in np.argsort(inputs))])
        narrow[name] = a.reshape(len(a), math.prod(inner))
        rows = wide.setdefault(name, np.zeros((len(b), tensor.shape[0]), np.float32))
        where = [slice(None)] * (1 + len(out))
        if piece.part is not None:
            where[1 + piece.part[0]] = slice(*piece.part[1:])
        b = b[:, *(index for i, index in enumerate(piece.index[1:]) if i not in summed)]
        block = np.zeros((len(b), *out), np.float32)
        block[tuple(where)] = b.transpose([0, *(1 + i for i in np.argsort(outputs))])
        rows[:, start:stop] += block.reshape(len(b), -1)
    return np.concatenate([*narrow.values()], 0), np.concatenate([*wide.values()], 0).T


def _names(modules: Mapping[str, int], tensors: Sequence[Tensor]) -> dict[str, int]:
    """Returns the last parts of the modules' names, by which PEFT finds them, and their ranks.

    Raises:
      WeightsError: another module has the same last part, such as an expert's gate_proj beside that of an MLP: PEFT would adapt
        it too, under another name where transformers has all experts in one array.
    """
    last = {module.rpartition(".")[2]: rank for module, rank in modules.items()}
    for tensor in tensors:
        module = tensor.name.removesuffix(_WEIGHT)
        if module not in modules and (name := module.rpartition(".")[2]) in last:
            ours = next(m for m in modules if m.endswith(f".{name}"))
            raise WeightsError(
                f"adapter = 'peft' cannot name {ours} without {module}, which has no adapter: leave adapter out, to write the "
                "model with its adapters merged"
            )
    return last


def _config(section: LoRASection, names: Mapping[str, int], base: str | None) -> dict[str, Any]:
    """Returns what adapter_config.json holds."""
    ranks = {name: rank for name, rank in names.items() if rank != section.rank}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": section.rank,
        "lora_alpha": section.alpha,
        "rank_pattern": ranks,
        "alpha_pattern": {name: section.strength * rank for name, rank in ranks.items()},
        "target_modules": list(names),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "init_lora_weights": True,
        "inference_mode": True,
        "modules_to_save": None,
    }


def _write(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes a safetensors file. All of its tensors are in memory, as adapters can be."""
    kinds, header, offset = {dtype: name for name, dtype in DTYPES.items()}, {}, 0
    for name, x in arrays.items():
        header[name] = {"dtype": kinds[x.dtype], "shape": list(x.shape), "data_offsets": [offset, offset + x.nbytes]}
        offset += x.nbytes
    text = json.dumps({"__metadata__": {"format": "pt"}} | header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for x in arrays.values():
            file.write(np.ascontiguousarray(x).reshape(-1).view(np.uint8).data)
