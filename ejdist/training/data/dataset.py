"""A dataset: a folder of shards that `python -m launch.tokenize` has made, read where a row needs it.

At the start only `dataset.json` is read. A shard is a folder `shard-*` of `tokens.bin`, `offsets.bin` (int64: where each
document begins, and the end) and `meta.json`, which has a checksum of every 64 KiB. A block is verified when something of it
is read for the first time, and never mapped: a disk that fails is an error, and not a signal that ends the process. What it
was made from does not count: a copy of the folder on another host is the same corpus.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import json
import os
import zlib
from bisect import bisect_left
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ejdist.training.chats.encoding import Chats
from ejdist.training.chats.special_tokens import AUTO, BY_FILES, SpecialTokens, ends_of
from ejdist.training.data.cache import Damaged, checksum_of, sealed
from ejdist.training.data.conversation_keys import Asked
from ejdist.training.data.conversations import described, row_name
from ejdist.training.data.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer

FORMAT = 1
CHATS_FORMAT = 2  # of a dataset of conversations, whose mask a reader of format 1 would not read
MANIFEST, SETTINGS, TOKENIZER = "dataset.json", "settings.json", "tokenizer.json"
BLOCK = 1 << 16  # bytes under one checksum: what one row reads for the first time
_OPEN_FILES = 256  # kept open at most, of a dataset: a process may often have no more than 1024
OWN = "dataset"  # data.tokenizer: the one that the dataset was made with


class _Handle:
    """A file opened for reading, closed when nobody reads from it any more."""

    def __init__(self, path: Path) -> None:
        self.number = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))

    def __del__(self) -> None:
        if hasattr(self, "number"):
            os.close(self.number)


class CheckedFile:
    """A file whose blocks are verified when they are first read."""

    def __init__(self, path: Path, size: int, checksums: list[int], open_file: Any) -> None:
        self.path, self.size = path, size
        self._checksums = np.asarray(checksums, np.uint32)
        self._seen = np.zeros(len(checksums), bool)
        self._open = open_file

    def read(self, begin: int, end: int) -> bytes:
        """Returns the bytes of [begin, end). Raises Damaged: they are not those that were written."""
        handle = self._open(self.path)
        for block in range(begin // BLOCK, -(-end // BLOCK)):
            if not self._seen[block]:
                content = os.pread(handle.number, BLOCK, block * BLOCK)
                if zlib.crc32(content) != self._checksums[block]:
                    last = min((block + 1) * BLOCK, self.size)
                    raise Damaged(
                        f"{self.path.name} does not hold the bytes that were written, from {block * BLOCK} to {last}"
                    )
                self._seen[block] = True
        parts = []
        while begin < end:
            parts.append(os.pread(handle.number, min(end - begin, 1 << 30), begin))  # a call gives 2 GiB at most
            if not parts[-1]:
                raise Damaged(f"{self.path.name} is shorter than {self.size} bytes")
            begin += len(parts[-1])
        return b"".join(parts)


class Shard:
    """One shard of a dataset, which is read on demand.

    Attributes:
      num_documents, num_tokens: what the manifest says it has.
      chats: how conversations became its tokens; None for text.
    """

    def __init__(
        self, folder: Path, facts: dict[str, Any], dtype: np.dtype, open_file: Any, chats: Chats | None = None
    ) -> None:
        self.folder, self._facts, self._dtype, self._open, self.chats = folder, facts, dtype, open_file, chats
        self.num_documents, self.num_tokens = int(facts["documents"]), int(facts["tokens"])
        self.fingerprint = facts["fingerprint"]

    def tokens(self, begin: int, end: int) -> np.ndarray:
        """Returns tokens [begin, end) of the shard."""
        return self._read("tokens.bin", self._dtype, begin, end)

    def mask(self, begin: int, end: int) -> np.ndarray:
        """Returns which of the tokens [begin, end) are trained, bool; a shard of text has no mask."""
        return self._read("mask.bin", np.dtype(np.uint8), begin, end).astype(bool)

    def place(self, document: int) -> str:
        """Returns what an error calls a conversation: the file and the row that it was made from."""
        source, number = self._read("places.bin", np.dtype(np.int64), 2 * document, 2 * document + 2).tolist()
        span = sealed(self.folder / "meta.json")["facts"]["sources"][source]
        whole = not span["path"].startswith("hf:") and span["begin"] == 0 and span["end"] == span["size"]
        return row_name((span["path"], span["begin"], None if whole else span["end"]), number)

    def offsets(self, begin: int, end: int) -> np.ndarray:
        """Returns where the documents [begin, end) begin, int64; document `num_documents` begins at the end."""
        return self._read("offsets.bin", np.dtype(np.int64), begin, end)

    def first_from(self, token: int) -> int:
        """Returns the first document that begins at this token or later."""
        return bisect_left(_Offsets(self), token)

    @functools.cached_property
    def _files(self) -> dict[str, CheckedFile]:
        content = sealed(self.folder / "meta.json")
        if checksum_of(content) != self._facts["checksum"]:
            raise Damaged("meta.json is of another shard than dataset.json says")
        files = {}
        for name, file in content["files"].items():
            size = (self.folder / name).stat().st_size
            if size != file["size"]:
                raise Damaged(f"{name} has {size} bytes, not {file['size']}")
            files[name] = CheckedFile(self.folder / name, file["size"], file["checksums"], self._open)
        return files

    def _read(self, name: str, dtype: np.dtype, begin: int, end: int) -> np.ndarray:
        try:
            content = self._files[name].read(begin * dtype.itemsize, end * dtype.itemsize)
        except FileNotFoundError as error:
            raise self.unreadable(f"{Path(error.filename).name} is missing") from None
        except Damaged as damage:
            raise self.unreadable(str(damage)) from None
        except OSError as error:
            raise self.unreadable(f"{name} cannot be read: {error.strerror or error}") from error
        return np.frombuffer(content, dtype)

    def unreadable(self, reason: str) -> OSError:
        """Returns the error that names the shard, what is wrong with it, and the remedy."""
        files = ", ".join(f"{s['path']} from {s['begin']} to {s['end']}" for s in self._facts["sources"])
        more = self._facts["num_sources"] - len(self._facts["sources"])
        made_from = f"{files} and {more} more" if more > 0 else files
        return OSError(
            errno.EIO,
            f"data.source: the shard {self.folder} is damaged: {reason}; copy it again from an intact source, or remove the "
            f"folder and run python -m launch.tokenize to={self.folder.parent} again (it was made from {made_from})",
        )


class _Offsets:
    """A shard's offsets as a sequence that is read an item at a time, for bisection."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard

    def __len__(self) -> int:
        return self._shard.num_documents

    def __getitem__(self, i: int) -> int:
        return int(self._shard.offsets(i, i + 1)[0])


@dataclass(frozen=True)
class Dataset:
    """The shards of a folder, in their order.

    Attributes:
      fingerprint: identifies the tokens, wherever they are stored and whatever they were read from.
    """

    folder: Path
    shards: tuple[Shard, ...]
    fingerprint: str
    tokenizer: Tokenizer
    chats: Chats | None = None
    facts: dict[str, Any] = field(default_factory=dict)  # about conversations

    def describe(self) -> list[str]:
        """Returns lines that say how the rows were read; none for text."""
        return [] if self.chats is None else described(self.chats, self.facts)

    @property
    def num_documents(self) -> int:
        return sum(s.num_documents for s in self.shards)

    @property
    def num_tokens(self) -> int:
        return sum(s.num_tokens for s in self.shards)


def is_dataset(path: Path) -> bool:
    """Returns whether a folder is a dataset, or one that is being made."""
    return (path / SETTINGS).is_file() or (path / MANIFEST).is_file()


def fingerprint_of(tokenizer: str, dtype: str, shards: list[dict[str, Any]]) -> str:
    """Returns what identifies the tokens of a dataset, from the fingerprints of its shards."""
    content = json.dumps([FORMAT, tokenizer, dtype, [s["fingerprint"] for s in shards]])
    return hashlib.sha256(content.encode()).hexdigest()[:24]


def open_dataset(
    folder: Path,
    tokenizer: str,
    text_key: str = "text",
    *,
    asked: Asked | None = None,
    special_tokens: SpecialTokens = BY_FILES,
) -> Dataset:
    """Returns the dataset of a folder. Reads its manifest and the names in the folder.

    Args:
      tokenizer: data.tokenizer; "dataset" for the one that it was made with.
      text_key: data.text_key; a dataset has been made with one, so only that or the default can be meant.
      asked: what data says of conversations: as with text_key.
      special_tokens: data.bos and data.eos.

    Raises:
      ValueError: it is not complete, was made with another tokenizer, BOS or EOS, or a shard is missing. OSError: it cannot be
        read.
    """
    try:
        manifest = sealed(folder / MANIFEST)
    except Damaged as damage:
        remedy = f"python -m launch.tokenize to={folder} with the same source"
        if (folder / MANIFEST).exists():
            raise ValueError(f"data.source = {str(folder)!r} is damaged: {damage}; {remedy} writes it again") from None
        raise ValueError(f"data.source = {str(folder)!r} is not finished; {remedy} resumes it") from None
    except OSError as error:
        raise OSError(error.errno, f"cannot read {folder / MANIFEST}: {error.strerror or error}") from error
    if manifest["format"] != (CHATS_FORMAT if "chats" in manifest else FORMAT):
        raise ValueError(
            f"data.source = {str(folder)!r} has format {manifest['format']}, but this version reads {FORMAT}; tokenize it again"
        )
    chats = Chats(**manifest["chats"]) if "chats" in manifest else None
    if asked is not None:
        asked.check_made(chats, folder)
    if text_key not in ("text", manifest["text_key"]):
        raise ValueError(
            f"data.text_key = {text_key!r}, and {folder} was made with {manifest['text_key']!r}; leave the key out, or "
            "tokenize the files into another folder"
        )
    recorded = manifest["tokenizer"]
    trained = tokenizer == recorded["name"] and tokenizer.startswith("bpe:")
    its_own = trained or tokenizer == OWN
    used = tokenizer_of(folder, recorded) if its_own else _other(tokenizer, folder, special_tokens)
    if used.fingerprint != recorded["fingerprint"]:
        raise ValueError(
            f"data.tokenizer = {tokenizer!r} is not the one that {folder} was made with ({recorded['name']}, fingerprint "
            f"{recorded['fingerprint']}); set data.tokenizer={OWN} to use that, or tokenize the files into another folder"
        )
    ends = (
        ends_of(used, recorded) if "eos" in recorded else ends_of(used if its_own else tokenizer_of(folder, recorded))
    )
    expected = special_tokens.over(ends) if its_own else ends_of(used)
    for key in (key for key, token in ends.items() if token != expected[key]):
        who = (
            f"data.{key} = {expected[key]}"
            if its_own
            else f"{expected[key] or 'none'} is that of data.tokenizer = {tokenizer!r}"
        )
        raise ValueError(
            f"data.{key}: {folder} was made with {ends[key] or 'none'}, and {who}; give data.{key}={ends[key] or 'null'}, or "
            "tokenize the files into another folder"
        )
    open_file = functools.lru_cache(maxsize=_OPEN_FILES)(_Handle)
    dtype = np.dtype(manifest["dtype"])
    shards = tuple(Shard(folder / s["name"], s, dtype, open_file, chats) for s in manifest["shards"])
    names = {
        entry.name for entry in os.scandir(folder)
    }  # one listing: a request for each shard would be slow on a network
    for shard in shards:
        if shard.folder.name not in names:
            raise ValueError(str(shard.unreadable("it is missing").strerror))
    return Dataset(folder, shards, manifest["fingerprint"], used, chats, manifest.get("conversations", {}))


def _other(name: str, folder: Path, asked: SpecialTokens) -> Tokenizer:
    if name == "bytes":
        return ByteTokenizer(asked)
    if name.startswith("bpe:"):
        raise ValueError(
            f"data.tokenizer = {name!r} is trained on files, and {folder} is tokenized already; set data.tokenizer={OWN}"
        )
    return FileTokenizer(os.path.expanduser(name), asked)


def tokenizer_of(folder: Path, own: dict[str, Any]) -> Tokenizer:
    """Returns the tokenizer that a dataset was made with, with its BOS and EOS.

    Args:
      own: what dataset.json has of it.

    Raises:
      ValueError: its file is not there, or is another.
    """
    recorded = "eos" in own  # before, shards had no BOS, and the EOS of the vocabulary alone
    asked = SpecialTokens(bos=None, eos=None if recorded else AUTO)
    loaded = ByteTokenizer() if own["name"] == "bytes" else FileTokenizer(folder / TOKENIZER, asked)
    if loaded.fingerprint != own["fingerprint"]:
        raise ValueError(
            f"data.source: {folder / TOKENIZER} is not the tokenizer that {folder} was made with; restore it"
        )
    return loaded.with_ids(own["bos"], own["eos"]) if recorded else loaded
