"""Parameters into files that transformers and others read: safetensors, config.json, and the tokenizer's files."""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ejdist.models.decoder import DecoderConfig
from ejdist.weights.families import family_of
from ejdist.weights.files import DTYPES, Files, WeightsError
from ejdist.weights.tensors import Tensor, expand, view

WRITTEN = {"float32": "F32", "bfloat16": "BF16"}  # dtype -> the format's name
MOST = 5_000_000_000  # bytes of tensors in a file, as transformers has it


def check_target(to: Path) -> None:
    """Raises WeightsError unless there is nothing there that writing could mix with."""
    if to.exists() and not (to.is_dir() and not any(to.iterdir())):
        raise WeightsError(f"to = {str(to)!r} already exists; name another folder, or remove it")
    if not to.parent.is_dir():
        raise WeightsError(f"to = {str(to)!r}: there is no folder {to.parent}; create it first")
    if _partial(to).exists():
        raise WeightsError(f"to = {str(to)!r}: {_partial(to)} is left from an interrupted export; remove it")


def _partial(to: Path) -> Path:
    return to.with_name(f"{to.name}.partial")


def save(
    to: Path,
    c: DecoderConfig,
    leaf: Callable[[str], np.ndarray],
    *,
    dtype: str = "float32",
    more: dict[str, Any] | None = None,
    beside: dict[str, Path] | None = None,
    most: int = MOST,
) -> str:
    """Writes a folder, which appears when it is complete. Returns the name of its architecture.

    Args:
      leaf: name -> the numbers of a leaf of the state, "params.layers.query". Each is asked for once, and let go.
      dtype: of the tensors; a bias of a router stays float32, for the choice of experts depends on its last bits.
      more: further keys of config.json.
      beside: name -> file to copy.
      most: bytes of tensors in a file.

    Raises:
      WeightsError: the model is of no family, or the folder or dtype is wrong; nothing has been written.
    """
    if dtype not in WRITTEN:
        raise WeightsError(f"dtype = {dtype!r} is unknown; use one of {', '.join(WRITTEN)}")
    if most < 1:
        raise WeightsError(f"most must be a positive number of bytes, got {most}")
    check_target(to)
    name, family = family_of(c)
    tensors = expand(family.rules[0], c)
    new = _partial(to)
    new.mkdir()
    try:
        config = {"architectures": [name], "torch_dtype": dtype} | family.config(c) | (more or {})
        (new / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        for target, path in (beside or {}).items():
            shutil.copyfile(path, new / target)
        _write_tensors(new, tensors, leaf, DTYPES[WRITTEN[dtype]], most)
    except BaseException as error:
        if isinstance(error, OSError):  # that of a full disk names no file
            error.filename = error.filename or str(new)
        shutil.rmtree(new, ignore_errors=True)
        raise
    if to.is_dir():
        to.rmdir()
    new.rename(to)
    return name


def _write_tensors(
    folder: Path, tensors: list[Tensor], leaf: Callable[[str], np.ndarray], dtype: np.dtype, most: int
) -> None:
    dtypes = {t.name: DTYPES["F32"] if t.pieces[0].leaf.startswith("buffers.") else dtype for t in tensors}
    files = Files(folder, {t.name: (dtypes[t.name], t.shape) for t in tensors}, most)
    try:
        # In the files tensors lie layer by layer; they are written leaf by leaf.
        of_leaves: dict[tuple[str, ...], list[Tensor]] = defaultdict(list)
        for tensor in tensors:
            of_leaves[tuple(piece.leaf for piece in tensor.pieces)].append(tensor)
        for names, those in of_leaves.items():
            arrays = {name: leaf(name) for name in names}
            for tensor in those:
                files.write(tensor.name, _made(tensor, arrays, dtypes[tensor.name]))
            del arrays  # before the next are read
    finally:
        files.close()


def _made(tensor: Tensor, arrays: dict[str, np.ndarray], dtype: np.dtype) -> np.ndarray:
    """Returns a tensor as it is written."""
    whole = np.empty(tensor.shape, dtype)
    for piece in tensor.pieces:
        at = tuple(slice(None) if i is None else i for i in piece.at)
        view(whole, tensor, piece)[...] = arrays[piece.leaf][at]
    return whole
