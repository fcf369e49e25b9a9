"""The safetensors format, read and written a tensor at a time: 8 bytes of length, a JSON header, then the numbers.

A file is read through the memory map of one tensor, of which only the pages of a slice are ever loaded. One is written from its
beginning to its end: the offset of each tensor is known before the first is written. The library of the format checks both in
the tests; its own writer takes all tensors of a file at once.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np

from ejdist.buckets import BucketPath, at_once, read_part
from ejdist.weights.remote import RemoteTensor

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
# Those that a float32 parameter holds without rounding.
DTYPES = {"F32": np.dtype(np.float32), "BF16": np.dtype(ml_dtypes.bfloat16), "F16": np.dtype(np.float16)}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_LONGEST_HEADER = 100_000_000  # bytes; the format's own limit


class WeightsError(ValueError):
    """Weights cannot be read, written or used; the message names the file and what to do."""


@dataclass(frozen=True)
class Stored:
    """A tensor in a file."""

    path: Any  # a `Path`, or a `BucketPath` of a bucket
    dtype: str  # as the format writes it, "BF16"
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file

    def open(self) -> Any:
        """Returns the tensor as an array over the file; pages are read on access, and freed with it. Of an object it is a
        `RemoteTensor`, which reads what is taken from it."""
        if isinstance(self.path, BucketPath):
            return RemoteTensor.of(self.path, self.offset, DTYPES[self.dtype], self.shape)
        return np.memmap(self.path, DTYPES[self.dtype], "r", self.offset, self.shape)


def read_json(path: Path) -> dict[str, Any]:
    """Returns what a JSON file holds. Raises WeightsError if it cannot be read, or is not an object."""
    _check_regular(path)
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise WeightsError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"{path} is not JSON ({error}); copy it again") from error
    if not isinstance(content, dict):
        raise WeightsError(f"{path} holds a {type(content).__name__}, not an object; copy it again")
    return content


def _check_regular(path: Path) -> None:
    """Raises WeightsError for what is there and is no file, such as a pipe, which would be waited for."""
    if isinstance(path, Path) and path.exists() and not path.is_file():
        raise WeightsError(f"{path} is not a file: copy the folder again, from a place that you trust")


def read_header(path: Any) -> dict[str, Stored]:
    """Returns the tensors of a file, or of an object of a bucket, by name.

    Raises:
      WeightsError: it is not a complete safetensors file.
    """
    _check_regular(path)
    try:
        facts = path.stat()
        size = facts.st_size
        if isinstance(path, BucketPath):
            path = path.at(facts.st_mtime_ns)
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(size - 8, _LONGEST_HEADER):
                raise WeightsError(
                    f"{path} is not a complete safetensors file: its {size:,} bytes do not hold the header that they "
                    "begin with; copy it again"
                )
            header = json.loads(file.read(length))
        tensors = {}
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            start, stop = entry["data_offsets"]
            if any(type(n) is not int or n < 0 for n in (start, stop, *entry["shape"])):
                raise ValueError(f"tensor {name} has offsets or a shape of other than whole numbers")
            if not 0 <= start <= stop:
                raise ValueError(f"tensor {name} is from byte {start} to {stop}")
            if 8 + length + stop > size:
                raise WeightsError(
                    f"{path} is truncated: tensor {name} ends at byte {8 + length + stop:,} of {size:,}; copy the file again"
                )
            tensor = Stored(path, entry["dtype"], tuple(entry["shape"]), 8 + length + start)
            if tensor.dtype in DTYPES and math.prod(tensor.shape) * DTYPES[tensor.dtype].itemsize != stop - start:
                raise WeightsError(
                    f"{path}: tensor {name} has {stop - start:,} bytes, not those of its shape; copy it again"
                )
            tensors[name] = tensor
    except OSError as error:
        raise WeightsError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, WeightsError):
            raise
        raise WeightsError(f"{path} has an unreadable header ({error}); copy the file again") from error
    return tensors


def read_folder(folder: Path) -> dict[str, Stored]:
    """Returns the tensors of all files of a folder, as its index names them.

    Raises:
      WeightsError: there are none, or not all of those that the index names.
    """
    if (folder / INDEX).exists():
        names = read_json(folder / INDEX).get("weight_map")
        if not isinstance(names, dict):
            raise WeightsError(f"{folder / INDEX} has no weight_map; copy it again")
        for file in map(str, names.values()):
            if file.startswith(("/", "~")) or ".." in Path(file).parts:
                raise WeightsError(
                    f"{folder / INDEX} names the file {file!r}, which is not in its folder; copy it again"
                )
        files = sorted({str(f) for f in names.values()})
        headers = dict(zip(files, at_once(read_header, [folder / file for file in files]), strict=True))
        absent = [name for name, file in names.items() if name not in headers[str(file)]]
        if absent:
            raise WeightsError(
                f"{folder / INDEX} says that {names[absent[0]]} holds {absent[0]}, which it does not; copy both again"
            )
        return {name: headers[str(file)][name] for name, file in names.items()}
    if (folder / SINGLE).exists():
        return read_header(folder / SINGLE)
    old = next((p.name for p in sorted(folder.glob("*.bin")) if p.is_file()), "")
    hint = f"; {old} is in another format: save the model again as safetensors" if old else ""
    raise WeightsError(f"{folder} holds no weights: neither {INDEX} nor {SINGLE} is there{hint}")


# Of the numbers, what is looked at: on a network file system each place costs a request.
_PLACES, _BYTES = 1000, 4096


def digest_of(tensors: Mapping[str, Stored]) -> str:
    """Returns a digest of all names, dtypes and shapes, and of some of the numbers: of the middle of at most 1,000 tensors.

    It tells two sets of weights apart that were trained differently, and not two that differ in a single number.
    """
    digest, names = hashlib.sha256(), sorted(tensors)
    for name in names:
        digest.update(f"{name} {tensors[name].dtype} {tensors[name].shape}\0".encode())
    places = []
    for name in names[:: -(-len(names) // _PLACES)] if names else ():
        tensor = tensors[name]
        size = math.prod(tensor.shape) * DTYPES[tensor.dtype].itemsize if tensor.dtype in DTYPES else 0
        begin = tensor.offset + max(0, size // 2 - _BYTES // 2)
        places.append((tensor.path, begin, begin + min(size, _BYTES)))
    for part in at_once(read_part, *zip(*places)) if places else ():
        digest.update(part)
    return digest.hexdigest()[:16]


class Files:
    """The files of a folder while they are written: each a header and then its tensors, one after the other, so that an
    interrupted file is shorter than its header says. The index comes after the last of them."""

    def __init__(self, folder: Path, tensors: Mapping[str, tuple[np.dtype, tuple[int, ...]]], most: int) -> None:
        """Args:
        tensors: name -> (dtype, shape), in the order in which they will be written.
        most: bytes of tensors in a file; a larger tensor has one of its own.
        """
        self._folder, self._kinds, self._left = folder, dict(tensors), list(tensors)[::-1]
        self._file: BinaryIO | None = None
        self._sizes = {name: math.prod(shape) * dtype.itemsize for name, (dtype, shape) in tensors.items()}
        self.total_size = sum(self._sizes.values())
        groups: list[list[str]] = [[]]
        filled = 0
        for name, size in self._sizes.items():
            if groups[-1] and filled + size > most:
                groups.append([])
                filled = 0
            groups[-1].append(name)
            filled += size
        self.names: dict[str, str] = {}
        self._groups: dict[str, list[str]] = {}
        for i, group in enumerate(groups):
            file = SINGLE if len(groups) == 1 else f"model-{i + 1:05}-of-{len(groups):05}.safetensors"
            self.names |= dict.fromkeys(group, file)
            self._groups[file] = group

    def _begin(self, file: str) -> BinaryIO:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # which transformers asks for
        start = 0
        for name in self._groups[file]:
            dtype, shape = self._kinds[name]
            stop = start + self._sizes[name]
            header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [start, stop]}
            start = stop
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        opened: BinaryIO = (self._folder / file).open("wb")
        opened.write(len(text).to_bytes(8, "little") + text)
        return opened

    def write(self, name: str, tensor: np.ndarray) -> None:
        """Writes the next tensor. Raises ValueError unless it is that, of the dtype and shape that were declared."""
        if not self._left or name != self._left[-1]:
            raise ValueError(
                f"tensor {name} is not the next to write, {self._left[-1] if self._left else 'the last was'}"
            )
        if (tensor.dtype, tensor.shape) != self._kinds[name]:
            raise ValueError(f"tensor {name} should be {self._kinds[name]}, and is {(tensor.dtype, tensor.shape)}")
        group = self._groups[self.names[name]]
        if name == group[0]:
            self._file = self._begin(self.names[name])
        assert self._file is not None
        self._file.write(np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data)
        self._left.pop()
        if name == group[-1]:
            self._file.flush()
            os.fsync(self._file.fileno())
            self.close()
        if not self._left and len(self._groups) > 1:
            index = {"metadata": {"total_size": self.total_size}, "weight_map": self.names}
            (self._folder / INDEX).write_text(json.dumps(index, indent=1) + "\n")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def names_in(names: Iterable[str], most: int = 3) -> str:
    """Returns the first of the names, in words, and how many more there are."""
    listed = sorted(names)
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return ", ".join(listed[:most]) + more
