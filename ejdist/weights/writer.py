"""Parameters into files that transformers and others read: safetensors, config.json, and what stands beside them."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import EllipsisType
from typing import Any, Protocol

import numpy as np

from ejdist.models.decoder import DecoderConfig
from ejdist.weights.families import family_of
from ejdist.weights.files import DTYPES, Files, WeightsError
from ejdist.weights.tensors import Piece, Tensor, expand, view

WRITTEN = {"float32": "F32", "bfloat16": "BF16"}  # dtype -> the format's name
MOST = 5_000_000_000  # bytes of tensors in a file, as transformers has it
_FULL = (errno.ENOSPC, errno.EDQUOT)


class Rows(Protocol):
    """The numbers of a leaf: `leaf[3]` of a stack is what layer 3 of its kind has, and `leaf[...]` all of it. A NumPy array is
    one."""

    def __getitem__(self, index: Any, /) -> np.ndarray: ...


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
    leaf: Callable[[str], Rows],
    *,
    dtype: str = "float32",
    more: dict[str, Any] | None = None,
    beside: Mapping[str, Path | str] | None = None,
    architecture: str | None = None,
    by_layer: bool = True,
    check: Callable[[], None] = lambda: None,
    most: int = MOST,
) -> str:
    """Writes a folder, which appears when it is complete. Returns the name of its architecture.

    Of each leaf no more than a row is in memory at a time, and of those of a layer only what the tensor that is being written
    needs, or a later one of that layer.

    Args:
      leaf: name -> the numbers of a leaf of the state, "params.layers.query". Each is asked for once.
      dtype: of the tensors; a bias of a router stays float32, for the choice of experts depends on its last bits.
      more: further keys of config.json.
      beside: name -> file to copy, or the text of one.
      architecture: the one to write, of those that the model fits.
      by_layer: the tensors of a layer follow each other; otherwise those of a leaf do, all of its layers.
      check: is called before the folder gets its name; what it raises leaves nothing behind.
      most: bytes of tensors in a file.

    Raises:
      WeightsError: the model is of no family, the folder or dtype is wrong, or the disk is full; nothing has been written.
    """
    if dtype not in WRITTEN:
        raise WeightsError(f"dtype = {dtype!r} is unknown; use one of {', '.join(WRITTEN)}")
    if most < 1:
        raise WeightsError(f"most must be a positive number of bytes, got {most}")
    check_target(to)
    name, family = family_of(c, architecture)
    tensors = expand(family.rules[0], c, copies=True)
    if not by_layer:
        leaves = list(dict.fromkeys(t.pieces[0].leaf for t in tensors))
        tensors.sort(key=lambda t: leaves.index(t.pieces[0].leaf))  # which keeps the order of layers
    dtypes = {t.name: _dtype_of(t, dtype) for t in tensors}
    new = _partial(to)
    files = Files(new, {t.name: (dtypes[t.name], t.shape) for t in tensors}, most)
    _check_space(to, files.total_size)
    new.mkdir()
    try:
        _write_tensors(files, tensors, leaf, dtypes)
        check()
        for target, content in (beside or {}).items():
            _put(new / target, content)
        # Last: without it the folder does not count as a model.
        config = {"architectures": [name], "dtype": dtype, "torch_dtype": dtype} | family.config(c) | (more or {})
        _put(new / "config.json", json.dumps(config, indent=2) + "\n")
    except BaseException as error:
        files.close()
        shutil.rmtree(new, ignore_errors=True)
        if isinstance(error, OSError) and error.errno in _FULL:
            raise _full(to, files.total_size, "is full") from error
        if isinstance(error, OSError):
            error.filename = error.filename or str(new)
        raise
    if to.is_dir():
        to.rmdir()
    new.rename(to)
    return name


def _dtype_of(tensor: Tensor, dtype: str) -> np.dtype:
    return DTYPES["F32" if tensor.pieces[0].leaf.startswith("buffers.") else WRITTEN[dtype]]


def _check_space(to: Path, size: int) -> None:
    """Raises WeightsError if the disk has less room than the tensors take."""
    disk = shutil.disk_usage(to.parent)
    if disk.total and disk.free < size:
        raise _full(to, size, f"has {disk.free:,} left")


def _full(to: Path, size: int, what: str) -> WeightsError:
    return WeightsError(
        f"to = {str(to)!r} takes {size:,} bytes, and its disk {what}: free some, or name a folder on another disk; nothing "
        "has been written"
    )


def _put(path: Path, content: Path | str) -> None:
    path.parent.mkdir(exist_ok=True)
    with path.open("wb") as file:
        file.write(content.encode() if isinstance(content, str) else content.read_bytes())
        file.flush()
        os.fsync(file.fileno())


def _row(piece: Piece) -> int | EllipsisType:
    """Returns the row of its leaf that holds a piece; `...`, all of it, for a leaf that is not a stack."""
    first = piece.at[0]
    return first if isinstance(first, int) else ...


def _write_tensors(
    files: Files, tensors: Sequence[Tensor], leaf: Callable[[str], Rows], dtypes: Mapping[str, np.dtype]
) -> None:
    rows = [[(piece.leaf, _row(piece)) for piece in tensor.pieces] for tensor in tensors]
    last = {row: i for i, tensor_rows in enumerate(rows) for row in tensor_rows}
    leaves: dict[str, Rows] = {}
    held: dict[tuple[str, int | EllipsisType], np.ndarray] = {}
    for i, (tensor, tensor_rows) in enumerate(zip(tensors, rows, strict=True)):
        for name, row in tensor_rows:
            if (name, row) not in held:
                leaves[name] = leaves[name] if name in leaves else leaf(name)
                held[name, row] = leaves[name][row]
        files.write(tensor.name, _made(tensor, held, dtypes[tensor.name]))
        for row in tensor_rows:
            if last[row] == i:
                held.pop(row, None)


def _made(tensor: Tensor, held: Mapping[Any, np.ndarray], dtype: np.dtype) -> np.ndarray:
    """Returns a tensor as it is written."""
    whole = np.empty(tensor.shape, dtype)
    for piece in tensor.pieces:
        row = _row(piece)
        at = piece.index if isinstance(row, EllipsisType) else piece.index[1:]
        view(whole, tensor, piece)[...] = held[piece.leaf, row][at]
    return whole
