"""A corpus as tokens on disk: made once, memory-mapped, and either whole or not there.

The cache is a folder named by what it was made from: the files with their sizes and times, the tokenizer, the text key. The
time of a file's last change of any kind (ctime) is part of that, for the time of its content can be set back, as copying
tools do. So a copy of the same files on another host, or a change of their owner, makes a corpus of its own.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ejdist.buckets import at_once, path_of
from ejdist.paths import is_url
from ejdist.training.chats.encoding import Chats
from ejdist.training.chats.special_tokens import BY_FILES, SpecialTokens, begun, ended
from ejdist.training.data.cache import new_folder, open_folder
from ejdist.training.data.conversations import Range, described, none_left, row_name, rows_of, write_conversations
from ejdist.training.data.sources import STDLIB, NotText, documents, files_of, unreadable
from ejdist.training.data.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer, bpe_size, train_bpe

_FORMAT = 2
_ATTEMPTS = 4  # another process may remove what this one has made, having found it damaged before


@dataclass(frozen=True)
class Corpus:
    """Tokens of all documents, one after another, each between the tokenizer's BOS and EOS, where it has them.

    Attributes:
      tokens: uint16 or uint32 [tokens], memory-mapped.
      offsets: int64 [documents + 1]; document d is tokens[offsets[d] : offsets[d + 1]].
      fingerprint: identifies the tokens themselves, wherever they were made; of conversations also which are trained.
      chats: how conversations became these tokens; None for text. Then mask is uint8 [tokens], 1 for those that are trained,
        places int64 [documents, 2]: the file and the row of each, and facts the metadata of them all.
    """

    tokens: np.ndarray
    offsets: np.ndarray
    fingerprint: str
    tokenizer: Tokenizer
    chats: Chats | None = None
    mask: np.ndarray | None = None
    places: np.ndarray | None = None
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def num_documents(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_tokens(self) -> int:
        return int(self.offsets[-1])

    def place(self, document: int) -> str:
        """Returns what an error calls a conversation."""
        assert self.places is not None
        source, number = self.places[document].tolist()
        origin: Range = (self.facts["files"][source], 0, None)
        return row_name(origin, number)

    def describe(self) -> list[str]:
        """Returns lines that say how the rows were read; none for text."""
        return [] if self.chats is None else described(self.chats, self.facts)


@dataclass(frozen=True)
class Files:
    """The files of a corpus, as they were when they were listed."""

    source: object
    text_key: str
    paths: tuple[Path, ...]
    states: tuple[tuple, ...]

    @classmethod
    def of(cls, source: str | Sequence[str], text_key: str) -> Files:
        """Returns the files of a source. Raises ValueError: there are none, or one cannot be inspected."""
        paths = files_of(source)
        return cls(source, text_key, tuple(paths), _states(paths))

    def key(self, *parts: object) -> str:
        content = [_FORMAT, self.states, self.text_key, *parts]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:24]

    def texts(self) -> Iterator[str]:
        """Yields the documents in order. One of nothing but white space has no text, and is left out.

        Raises:
          ValueError: a file or a row is wrong, or a file has changed since the files were listed.
        """
        for path in self.paths:
            try:
                yield from (text for text in documents(path, self.text_key) if text and not text.isspace())
            except NotText:
                # The standard library has a few files in other encodings, made to test them; a user's corpus should not.
                if self.source != STDLIB:
                    raise
        self.check_unchanged()

    def check_unchanged(self) -> None:
        """Raises ValueError if a file has changed since the files were listed."""
        for path, before, now in zip(self.paths, self.states, _states(self.paths), strict=True):
            if before != now:
                raise ValueError(
                    f"data.source: {path} changed while it was read; start again once nothing writes to it"
                )


def _states(paths: Sequence[Path]) -> tuple[tuple, ...]:
    try:
        stats = at_once(lambda path: path.stat(), paths)
    except OSError as error:
        raise unreadable(path_of(str(error.filename)), error) from error
    return tuple(
        (str(path) if is_url(str(path)) else os.path.abspath(path), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
        for path, stat in zip(paths, stats, strict=True)
    )


def make_tokenizer(name: str, files: Files, cache_dir: Path, asked: SpecialTokens = BY_FILES) -> Tokenizer:
    """Returns the tokenizer "bytes", "bpe:SIZE" (trained on the files, and kept), or that of a `tokenizer.json` or a folder.

    Raises:
      ValueError: the name, the file or a document is wrong. OSError: the cache cannot be written or read.
    """
    if name == "bytes":
        return ByteTokenizer(asked)
    if not name.startswith("bpe:"):
        return FileTokenizer(name, asked)
    size = bpe_size(name)
    folder = cache_dir / f"tokenizer-{files.key(name)}"
    for _ in range(_ATTEMPTS):
        if open_folder(folder) is not None:
            try:
                return FileTokenizer(folder / "tokenizer.json", asked)
            except ValueError:
                if (folder / "tokenizer.json").exists():
                    raise
                continue
        with new_folder(folder) as new, new.file("tokenizer.json") as out:
            out.write(train_bpe(files.texts(), size).encode())
    raise _not_kept(folder)


def build_corpus(
    source: str | Sequence[str],
    tokenizer: str | Tokenizer,
    text_key: str,
    cache_dir: str | os.PathLike,
    *,
    chats: Chats | None = None,
    asked: SpecialTokens = BY_FILES,
) -> Corpus:
    """Returns the corpus, from the cache or made now.

    One from the cache is read once, to verify it (see `open_folder` for the cost), and made again if it is damaged.

    Raises:
      ValueError: no files, unreadable or damaged files, no text. OSError: the cache cannot be written or read.
    """
    cache_dir = Path(cache_dir).expanduser()
    files = Files.of(source, text_key)
    resolved = make_tokenizer(tokenizer, files, cache_dir, asked) if isinstance(tokenizer, str) else tokenizer
    of_chats = [] if chats is None else [chats.key_of_cache]
    folder = cache_dir / f"corpus-{files.key(resolved.fingerprint, resolved.bos_id, resolved.eos_id, *of_chats)}"
    for _ in range(_ATTEMPTS):
        facts = open_folder(folder)
        if facts is not None:
            try:
                tokens = np.memmap(folder / "tokens.bin", np.dtype(facts["dtype"]), mode="r")
                read = tokens, np.fromfile(folder / "offsets.bin", np.int64), facts["fingerprint"], resolved
                return Corpus(*read) if chats is None else Corpus(*read, **_of_chats(folder, facts))
            except FileNotFoundError:
                continue
        if chats is None:
            _write(folder, files, resolved)
        else:
            _write_chats(folder, files, resolved, chats)
    raise _not_kept(folder)


def _of_chats(folder: Path, facts: dict[str, Any]) -> dict[str, Any]:
    """Returns what a corpus of conversations has beside tokens."""
    return {
        "chats": Chats(**facts["chats"]),
        "mask": np.memmap(folder / "mask.bin", np.uint8, mode="r"),
        "places": np.fromfile(folder / "places.bin", np.int64).reshape(-1, 2),
        "facts": facts,
    }


def _not_kept(folder: Path) -> OSError:
    return OSError(f"the corpus cache {folder} is damaged whenever it is written; set data.cache_dir to another disk")


def _dtype(tokenizer: Tokenizer) -> np.dtype:
    return np.dtype(np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32)


def _write_chats(folder: Path, files: Files, tokenizer: Tokenizer, chats: Chats) -> None:
    dtype, paths = _dtype(tokenizer), [str(path) for path in files.paths]
    with new_folder(folder) as new:
        rows = rows_of([(path, 0, None) for path in paths], chats.key)
        facts = write_conversations(new, rows, chats, tokenizer, dtype)
        files.check_unchanged()
        if not facts["documents"]:
            raise ValueError(f"data.source = {files.source!r}: {none_left(facts['skipped'])}")
        new.facts = {"dtype": dtype.name, **facts, "chats": chats.as_json(), "files": paths}


def _write(folder: Path, files: Files, tokenizer: Tokenizer) -> None:
    dtype = _dtype(tokenizer)
    digest, lengths, longest = hashlib.sha256(), [], 0
    with new_folder(folder) as new:
        with new.file("tokens.bin") as out:
            for text in files.texts():
                encoded = tokenizer.encode(text)
                longest = max(longest, len(encoded))
                ids = ended(tokenizer, begun(tokenizer, encoded)).astype(dtype).tobytes()
                if not ids:  # of a text without tokens, where nothing begins and ends it
                    continue
                out.write(ids)
                digest.update(ids)
                lengths.append(len(ids) // dtype.itemsize)
        if not lengths and not any(files.texts()):
            raise ValueError(f"data.source = {files.source!r}: the files hold no text")
        if not longest:
            raise ValueError(f"data.source = {files.source!r}: data.tokenizer has no tokens for any of its text")
        offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        digest.update(offsets.tobytes())
        with new.file("offsets.bin") as out:
            out.write(offsets.tobytes())
        new.facts = {"dtype": dtype.name, "fingerprint": digest.hexdigest()[:24]}
