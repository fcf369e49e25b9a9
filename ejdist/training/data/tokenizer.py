"""Tokenizers: bytes, a `tokenizer.json`, or a byte-level BPE trained on the corpus."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np


class Tokenizer(Protocol):
    """What the pipeline needs of a tokenizer. `eos_id` ends every document; `fingerprint` identifies the vocabulary."""

    vocab_size: int
    eos_id: int
    fingerprint: str

    def encode(self, text: str) -> np.ndarray: ...

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]: ...

    def encode_places(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]: ...

    def decode(self, ids: Iterable[int]) -> str: ...


class ByteTokenizer:
    """Bytes of UTF-8, ids 0 to 255, and 256 for the end of a document."""

    vocab_size = 257
    eos_id = 256
    fingerprint = "bytes-1"

    def encode(self, text: str) -> np.ndarray:
        """Returns int32 ids, without the end of document."""
        return np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int32)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Returns uint8 ids of each text."""
        return [np.frombuffer(text.encode("utf-8"), np.uint8) for text in texts]

    def encode_places(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Returns (ids, int64 [tokens, 2]: the characters [begin, end) of each token) of each text."""
        found = []
        for ids in self.encode_batch(texts):
            begins = np.cumsum((ids & 0xC0) != 0x80) - 1  # a byte 10xxxxxx goes on with a character
            found.append((ids, np.stack([begins, begins + 1], axis=1)))
        return found

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text; ids past 255 are left out, broken UTF-8 is replaced."""
        return bytes(int(i) for i in ids if 0 <= int(i) < 256).decode("utf-8", errors="replace")


class FileTokenizer:
    """A `tokenizer.json` of the tokenizers library. Truncation and padding that the file asks for are left out.

    Raises:
      ValueError: the file cannot be read, has no token that ends a document, or makes random tokens.
    """

    _ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "<|eot_id|>")

    def __init__(self, path: str | os.PathLike) -> None:
        argument = f"data.tokenizer = {str(path)!r}"
        try:
            content = Path(path).read_bytes()
        except FileNotFoundError:
            raise ValueError(f"{argument}: no such file; give 'bytes', 'bpe:4096' or a path") from None
        except OSError as error:
            raise ValueError(f"{argument} cannot be read: {error.strerror}; give a tokenizer.json that can") from error
        self._load(content, argument)

    @classmethod
    def of(cls, content: bytes, argument: str) -> FileTokenizer:
        """Returns the tokenizer of the content of a file; errors call it by the argument."""
        made = cls.__new__(cls)
        made._load(content, argument)
        return made

    def _load(self, content: bytes, argument: str) -> None:
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
        ends = [self._tokenizer.token_to_id(t) for t in self._ENDS]
        self.eos_id = next((i for i in ends if i is not None), -1)
        if self.eos_id < 0:
            raise ValueError(f"{argument} has none of {', '.join(self._ENDS)} to end a document")
        # Not the number of tokens: ids may have gaps, and the model needs a row for the largest.
        self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        self.fingerprint = hashlib.sha256(content).hexdigest()[:16]

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
