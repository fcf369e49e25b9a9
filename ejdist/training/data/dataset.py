"""A dataset: a folder of shards that `python -m launch.tokenize` has made, read where a row needs it.

At the start only `dataset.json` is read. A shard is a folder `shard-*` of `tokens.bin`, `offsets.bin` (int64: where each
document begins, and the end) and `meta.json`, which has a checksum of every 64 KiB. A block is verified when something of it
is read for the first time (`blocks`); offsets stay in memory from then on, up to a limit. What it was made from does not
count: a copy of the folder on another host is the same corpus.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ejdist.buckets import Unreachable, at_once
from ejdist.paths import is_url
from ejdist.training.chats.encoding import Chats
from ejdist.training.chats.special_tokens import AUTO, BY_FILES, SpecialTokens, ends_of
from ejdist.training.data import blocks
from ejdist.training.data.blocks import CheckedFile, Kept, OpenFile, OpenObject, Span
from ejdist.training.data.cache import Damaged, checksum_of, sealed
from ejdist.training.data.conversation_keys import Asked
from ejdist.training.data.conversations import described, row_name
from ejdist.training.data.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer

FORMAT = 1
CHATS_FORMAT = 2  # of a dataset of conversations, whose mask a reader of format 1 would not read
MANIFEST, SETTINGS, TOKENIZER = "dataset.json", "settings.json", "tokenizer.json"
_OPEN_FILES = 256  # kept open at most, of a dataset: a process may often have no more than 1024
# Bytes of a dataset that stay in memory: of tokens as much as a small one has; of offsets, 8 bytes a document, those of 268
# million documents.
_KEPT_TOKENS, _KEPT_OFFSETS = 1 << 28, 1 << 31
OWN = "dataset"  # data.tokenizer: the one that the dataset was made with


class Shard:
    """One shard of a dataset, which is read on demand.

    Attributes:
      num_documents, num_tokens: what the manifest says it has.
      chats: how conversations became its tokens; None for text.
    """

    def __init__(
        self,
        folder: Path,
        facts: dict[str, Any],
        dtype: np.dtype,
        files: Callable[..., CheckedFile],
        chats: Chats | None = None,
    ) -> None:
        """Args:
        files: (path, size, checksums) -> the file.
        """
        self.folder, self._facts, self._dtype, self._file, self.chats = folder, facts, dtype, files, chats
        self.num_documents, self.num_tokens = int(facts["documents"]), int(facts["tokens"])
        self.fingerprint = facts["fingerprint"]

    def tokens(self, begin: int, end: int) -> np.ndarray:
        """Returns tokens [begin, end) of the shard."""
        return self.tokens_of([(begin, end)])[0]

    def tokens_of(self, spans: Sequence[Span]) -> list[np.ndarray]:
        """Returns the tokens of each span [begin, end), read together."""
        return self._read("tokens.bin", self._dtype, spans)

    def mask(self, begin: int, end: int) -> np.ndarray:
        """Returns which of the tokens [begin, end) are trained, bool; a shard of text has no mask."""
        return self.mask_of([(begin, end)])[0]

    def mask_of(self, spans: Sequence[Span]) -> list[np.ndarray]:
        """Returns the mask of each span [begin, end), read together."""
        return [mask.astype(bool) for mask in self._read("mask.bin", np.dtype(np.uint8), spans)]

    def place(self, document: int) -> str:
        """Returns what an error calls a conversation: the file and the row that it was made from."""
        source, number = self._read("places.bin", np.dtype(np.int64), [(2 * document, 2 * document + 2)])[0].tolist()
        span = sealed(self.folder / "meta.json")["facts"]["sources"][source]
        whole = not span["path"].startswith("hf:") and span["begin"] == 0 and span["end"] == span["size"]
        return row_name((span["path"], span["begin"], None if whole else span["end"]), number)

    def offsets(self, begin: int, end: int) -> np.ndarray:
        """Returns where the documents [begin, end) begin, int64; document `num_documents` begins at the end."""
        return self._read("offsets.bin", np.dtype(np.int64), [(begin, end)])[0]

    def first_from(self, token: int) -> int:
        """Returns the first document that begins at this token or later.

        Interpolates between documents whose beginnings are known, as the lengths of many documents add up to about what their
        mean does: one block of offsets or two have the place, of any number. A step that missed is followed by a bisection.
        """
        low, high = 0, self.num_documents  # documents before `low` begin earlier; those from `high` on do not
        begins, ends, per_block = 0, self.num_tokens, blocks.BLOCK // 8
        bisect = False
        while low < high:
            share = (token - begins) / max(1, ends - begins)
            guess = (low + high) // 2 if bisect else low + int(share * (high - low))
            block = min(max(guess, low), high - 1) // per_block
            first, last = max(low, block * per_block), min(high, (block + 1) * per_block)
            offsets = self.offsets(first, last)
            found = int(np.searchsorted(offsets, token))
            if 0 < found < len(offsets):
                return first + found
            if found:
                low, begins = last, int(offsets[-1])
            else:
                high, ends = first, int(offsets[0])
            bisect = not bisect
        return low

    @functools.cached_property
    def _files(self) -> dict[str, CheckedFile]:
        content = sealed(self.folder / "meta.json")
        if checksum_of(content) != self._facts["checksum"]:
            raise Damaged("meta.json is of another shard than dataset.json says")
        files = {}
        found = at_once(lambda path: path.stat().st_size, [self.folder / name for name in content["files"]])
        for (name, file), size in zip(content["files"].items(), found, strict=True):
            if size != file["size"]:
                raise Damaged(f"{name} has {size} bytes, not {file['size']}")
            files[name] = self._file(self.folder / name, file["size"], file["checksums"])
        return files

    def _read(self, name: str, dtype: np.dtype, spans: Sequence[Span]) -> list[np.ndarray]:
        size = dtype.itemsize
        try:
            contents = self._files[name].read([(begin * size, end * size) for begin, end in spans])
        except FileNotFoundError as error:
            raise self.unreadable(f"{Path(error.filename).name} is missing") from None
        except Damaged as damage:
            raise self.unreadable(str(damage)) from None
        except Unreachable:
            raise
        except OSError as error:
            raise self.unreadable(f"{name} cannot be read: {error.strerror or error}") from error
        return [np.frombuffer(content, dtype) for content in contents]

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
    open_file = functools.lru_cache(maxsize=_OPEN_FILES)(OpenFile if isinstance(folder, Path) else OpenObject)
    tokens, offsets = Kept(_KEPT_TOKENS), Kept(_KEPT_OFFSETS)

    def checked_file(path: Path, size: int, checksums: list[int]) -> CheckedFile:
        of_offsets = path.name == "offsets.bin"
        return CheckedFile(path, size, checksums, open_file, offsets if of_offsets else tokens, whole=of_offsets)

    dtype = np.dtype(manifest["dtype"])
    shards = tuple(Shard(folder / s["name"], s, dtype, checked_file, chats) for s in manifest["shards"])
    names = {
        entry.name for entry in (folder.iterdir() if is_url(str(folder)) else os.scandir(folder))
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
    return FileTokenizer(name, asked)


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
