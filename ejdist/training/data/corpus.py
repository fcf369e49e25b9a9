"""A corpus as tokens on disk: made once, memory-mapped, and either whole or not there.

The cache is a folder named by what it was made from (files with their sizes and times, tokenizer, text key). It is written
beside its place and renamed into it, so an interrupted or failed write, or two writers at once, leave nothing half-done.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ejdist.training.data.sources import STDLIB, NotText, documents, files_of, unreadable
from ejdist.training.data.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer, bpe_size, train_bpe

_FORMAT = 2


@dataclass(frozen=True)
class Corpus:
    """Tokens of all documents, one after another, each ending in the tokenizer's eos.

    Attributes:
      tokens: uint16 or uint32 [tokens], memory-mapped.
      offsets: int64 [documents + 1]; document d is tokens[offsets[d] : offsets[d + 1]].
      fingerprint: identifies the tokens themselves, wherever they were made.
    """

    tokens: np.ndarray
    offsets: np.ndarray
    fingerprint: str
    tokenizer: Tokenizer

    @property
    def num_documents(self) -> int:
        return len(self.offsets) - 1


def _states(paths: Sequence[Path]) -> tuple[tuple, ...]:
    states = []
    for path in paths:
        try:
            stat = path.stat()
        except OSError as error:
            raise unreadable(path, error) from error
        states.append((os.path.abspath(path), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns))
    return tuple(states)


def _key(paths: Sequence[Path], *parts: object) -> str:
    return hashlib.sha256(json.dumps([_FORMAT, _states(paths), *parts]).encode()).hexdigest()[:24]


def _texts(paths: Sequence[Path], text_key: str, *, skip_unreadable: bool) -> Iterator[str]:
    states = _states(paths)
    for path in paths:
        try:
            for text in documents(path, text_key):
                if text and not text.isspace():
                    yield text
        except NotText:
            # The standard library has a few files in other encodings, made to test them; a user's corpus should not.
            if not skip_unreadable:
                raise
    for path, before, now in zip(paths, states, _states(paths), strict=True):
        if before != now:
            raise ValueError(f"data.source: {path} changed while it was read; start again once nothing writes to it")


def make_tokenizer(
    name: str, paths: Sequence[Path], text_key: str, cache_dir: Path, *, skip_unreadable: bool
) -> Tokenizer:
    """Returns the tokenizer "bytes", "bpe:SIZE" (trained on the files, and kept), or that of a `tokenizer.json`."""
    if name == "bytes":
        return ByteTokenizer()
    if not name.startswith("bpe:"):
        return FileTokenizer(os.path.expanduser(name))
    path = cache_dir / f"tokenizer-{_key(paths, name, text_key)}.json"
    if not path.exists():
        train_bpe(_texts(paths, text_key, skip_unreadable=skip_unreadable), bpe_size(name), path)
    return FileTokenizer(path)


def build_corpus(source: str | Sequence[str], tokenizer: str, text_key: str, cache_dir: str | os.PathLike) -> Corpus:
    """Returns the corpus, from the cache or made now.

    Raises:
      ValueError: no files, unreadable files, no text. OSError: the cache cannot be written; nothing is left of it.
    """
    cache_dir = Path(cache_dir)
    paths = files_of(source)
    skip = source == STDLIB
    made = make_tokenizer(tokenizer, paths, text_key, cache_dir, skip_unreadable=skip)
    folder = cache_dir / f"corpus-{_key(paths, made.fingerprint, text_key)}"
    found = _open(folder, made)
    if found is not None:
        return found
    _write(folder, _texts(paths, text_key, skip_unreadable=skip), made, source)
    found = _open(folder, made)
    if found is None:
        raise OSError(f"the corpus cache {folder} was written but cannot be read back; remove it and start again")
    return found


def _open(folder: Path, tokenizer: Tokenizer) -> Corpus | None:
    """Returns the cached corpus; None if there is none or it is damaged, in which case it is removed to be made again."""
    try:
        meta = json.loads((folder / "meta.json").read_text())
        tokens = np.load(folder / "tokens.npy", mmap_mode="r")
        offsets = np.load(folder / "offsets.npy")
        if meta["num_tokens"] == len(tokens) == int(offsets[-1]) and meta["num_documents"] == len(offsets) - 1:
            return Corpus(tokens, offsets, meta["fingerprint"], tokenizer)
    except FileNotFoundError:
        if not folder.exists():
            return None
    except (ValueError, KeyError, OSError, EOFError):
        pass
    shutil.rmtree(folder, ignore_errors=True)
    return None


def _write(folder: Path, texts: Iterator[str], tokenizer: Tokenizer, source: object) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", suffix=".tmp", dir=folder.parent))
    try:
        dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32)
        digest, lengths = hashlib.sha256(), []
        with open(temporary / "tokens.bin", "wb") as out:
            for text in texts:
                ids = np.append(tokenizer.encode(text), tokenizer.eos_id).astype(dtype)
                out.write(ids.tobytes())
                digest.update(ids.tobytes())
                lengths.append(len(ids))
        if not lengths:
            raise ValueError(f"data.source = {source!r}: the files hold no text")
        if max(lengths) < 2:
            raise ValueError(f"data.source = {source!r}: data.tokenizer has no tokens for any of its text")
        offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        digest.update(offsets.tobytes())
        raw = np.memmap(temporary / "tokens.bin", dtype, mode="r")
        np.save(temporary / "tokens.npy", raw)
        del raw
        (temporary / "tokens.bin").unlink()
        np.save(temporary / "offsets.npy", offsets)
        meta = {"num_tokens": int(offsets[-1]), "num_documents": len(lengths), "fingerprint": digest.hexdigest()[:24]}
        (temporary / "meta.json").write_text(json.dumps(meta))
        try:
            os.rename(temporary, folder)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
            # Another process made the same corpus in the meantime; theirs is as good.
    except OSError as error:
        raise OSError(
            error.errno, f"cannot write the corpus cache {folder}: {error.strerror}; nothing was left"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
