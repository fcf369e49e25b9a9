"""Tokenizers: bytes, a `tokenizer.json` or a folder with one, or a byte-level BPE trained on the corpus."""

from __future__ import annotations

import copy
import hashlib
import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ejdist.buckets import source_path
from ejdist.training.chats.special_tokens import AUTO, BY_FILES, SpecialTokens, ids_of


class Tokenizer(Protocol):
    """What the pipeline needs of a tokenizer. `bos_id` begins a document and `eos_id` ends it, None for no such token;
    `stop_ids` end generation; `fingerprint` identifies the vocabulary."""

    vocab_size: int
    bos_id: int | None
    eos_id: int | None
    stop_ids: tuple[int, ...]
    fingerprint: str

    def encode(self, text: str) -> np.ndarray: ...

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]: ...

    def encode_places(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]: ...

    def decode(self, ids: Iterable[int]) -> str: ...

    def text(self, ids: Iterable[int]) -> str: ...

    def token_of(self, id: int | None) -> str | None: ...

    def with_ids(self, bos: int | None, eos: int | None) -> Tokenizer: ...


class ByteTokenizer:
    """Bytes of UTF-8, ids 0 to 255, and 256 for the end of a document.

    Raises:
      ValueError: `asked` names a BOS, or an EOS: bytes have no token with a text.
    """

    vocab_size = 257
    bos_id: int | None = None
    eos_id: int | None = 256
    stop_ids: tuple[int, ...] = (256,)
    fingerprint = "bytes-1"

    def __init__(self, asked: SpecialTokens = BY_FILES) -> None:
        for key, token in (("bos", asked.bos), ("eos", asked.eos)):
            if token not in (AUTO, None):
                raise ValueError(
                    f"data.{key} = {token!r}: data.tokenizer = 'bytes' has no token of a name; give auto, or null"
                )
        if asked.eos is None:
            self.eos_id, self.stop_ids = None, ()

    def encode(self, text: str) -> np.ndarray:
        """Returns int32 ids, without the end of document."""
        return np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int32)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Returns uint8 ids of each text."""
        return [np.frombuffer(text.encode("utf-8"), np.uint8) for text in texts]

    def encode_places(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Returns (ids, int64 [tokens, 2]: the characters [begin, end) of each token) of each text."""
        encoded = []
        for ids in self.encode_batch(texts):
            begins = np.cumsum((ids & 0xC0) != 0x80) - 1  # a byte 10xxxxxx goes on with a character
            encoded.append((ids, np.stack([begins, begins + 1], axis=1)))
        return encoded

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text; ids past 255 are left out, broken UTF-8 is replaced."""
        return bytes(int(i) for i in ids if 0 <= int(i) < 256).decode("utf-8", errors="replace")

    def text(self, ids: Iterable[int]) -> str:
        """Returns the text, with ids past 255 written as <256>."""
        groups = itertools.groupby(ids, key=lambda id: id < 256)
        return "".join(self.decode(part) if is_byte else "".join(f"<{id}>" for id in part) for is_byte, part in groups)

    def token_of(self, id: int | None) -> str | None:
        """Returns what names an id, None for none."""
        return None if id is None else str(id)

    def with_ids(self, bos: int | None, eos: int | None) -> ByteTokenizer:
        """Returns the tokenizer with that end of a document, or none."""
        return ByteTokenizer(SpecialTokens(eos=None if eos is None else AUTO))


class FileTokenizer:
    """A `tokenizer.json` of the tokenizers library, or that of a folder. Truncation and padding that the file asks for are left
    out. What begins and ends a document follows from the files beside it, see `ejdist.training.chats.special_tokens`.

    Raises:
      ValueError: the file cannot be read, has no token that ends a document or not those asked for, or makes random tokens.
    """

    def __init__(self, path: str | os.PathLike, asked: SpecialTokens = BY_FILES) -> None:
        argument = f"data.tokenizer = {str(path)!r}"
        file = tokenizer_file(path)
        try:
            content = file.read_bytes()
        except FileNotFoundError:
            raise ValueError(f"{argument}: no such file; give 'bytes', 'bpe:4096' or a path") from None
        except OSError as error:
            raise ValueError(f"{argument} cannot be read: {error.strerror}; give a tokenizer.json that can") from error
        self._load(content, argument, asked, file.parent)

    @classmethod
    def of(cls, content: bytes, argument: str, asked: SpecialTokens = BY_FILES) -> FileTokenizer:
        """Returns the tokenizer of the content of a file; errors call it by the argument."""
        instance = cls.__new__(cls)
        instance._load(content, argument, asked, None)
        return instance

    def _load(self, content: bytes, argument: str, asked: SpecialTokens, beside: Path | None) -> None:
        from tokenizers import Tokenizer as Library

        try:
            self._tokenizer = Library.from_str(content.decode())
        except Exception as error:  # the library raises plain Exception for a malformed file
            raise ValueError(f"{argument} is not a tokenizer.json: {error}") from None
        if getattr(self._tokenizer.model, "dropout", None):
            raise ValueError(
                f"{argument} has model.dropout = {self._tokenizer.model.dropout:g}, with which the tokens of a text are "
                "random; set it to null in the file"
            )
        # Files are often saved as they were used to make batches; here both would drop or add tokens of a document.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        ids = ids_of(asked, self._tokenizer, beside, argument)
        self.bos_id, self.eos_id, self.stop_ids = ids.bos, ids.eos, ids.stops
        # Not the number of tokens: ids may have gaps, and the model needs a row for the largest.
        self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        self.fingerprint = hashlib.sha256(content).hexdigest()[:16]

    def token_of(self, id: int | None) -> str | None:
        """Returns the token of an id, None for none."""
        return None if id is None else self._tokenizer.id_to_token(id)

    def with_ids(self, bos: int | None, eos: int | None) -> FileTokenizer:
        """Returns the tokenizer with these tokens at both ends of a document."""
        copied = copy.copy(self)
        copied.bos_id, copied.eos_id = bos, eos
        copied.stop_ids = tuple(dict.fromkeys([*([] if eos is None else [eos]), *self.stop_ids]))
        return copied

    def encode(self, text: str) -> np.ndarray:
        return np.asarray(self._tokenizer.encode(text, add_special_tokens=False).ids, np.int32)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Returns the ids of each text, as `encode` does, made by all threads of the library."""
        encoded = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)  # without places in the text
        return [np.asarray(e.ids, np.int32) for e in encoded]

    def encode_places(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Returns (ids, int64 [tokens, 2]: the characters [begin, end) of each token) of each text."""
        encoded = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [(np.asarray(e.ids, np.int32), np.asarray(e.offsets, np.int64).reshape(-1, 2)) for e in encoded]

    def decode(self, ids: Iterable[int]) -> str:
        return self._tokenizer.decode([int(i) for i in ids])

    def text(self, ids: Iterable[int]) -> str:
        """Returns the text, special tokens too."""
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=False)


def fingerprint_of(path: Any) -> str | None:
    """Returns what `FileTokenizer.fingerprint` is of a file, a `Path` or a `BucketPath`; None if it cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    except OSError:
        return None


def tokenizer_file(path: str | os.PathLike) -> Any:
    """Returns the file of a tokenizer, a `Path` or a `BucketPath`: of a folder, the tokenizer.json in it.

    Raises:
      ValueError: the folder has none; names what it has instead, and the remedy.
    """
    expanded = source_path("data.tokenizer", str(path))
    if not expanded.is_dir() or (expanded / "tokenizer.json").is_file():
        return expanded / "tokenizer.json" if expanded.is_dir() else expanded
    other = next(
        (name for name in ("tokenizer.model", "vocab.json", "spiece.model") if (expanded / name).exists()), None
    )
    how = (
        f"{other} there is of another format: save the tokenizer again with transformers"
        if other
        else "give one that has"
    )
    raise ValueError(
        f"data.tokenizer = {str(path)!r} is a folder without tokenizer.json; {how}, or data.tokenizer=FILE, or "
        "data.tokenizer=bytes for a model of bytes"
    )


def train_bpe(texts: Iterator[str], vocab_size: int) -> str:
    """Returns the content of a byte-level BPE `tokenizer.json` trained on the texts."""
    from tokenizers import Tokenizer as Library
    from tokenizers import decoders, models, pre_tokenizers, trainers

    tokenizer = Library(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer.to_str()


def bpe_size(name: str) -> int:
    """Returns the vocabulary size of "bpe:4096".

    Raises:
      ValueError: not a number, or smaller than the bytes.
    """
    size = name.removeprefix("bpe:")
    if not size.isdigit() or int(size) < 300:
        raise ValueError(f"data.tokenizer = {name!r}: write 'bpe:SIZE' with a size of at least 300")
    return int(size)
