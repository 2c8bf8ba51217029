"""Byte-level BPE: any text has tokens, and its tokens give the text back.

Shape legend: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from amalthea.core.errors import DataError

BOS = "<|bos|>"
EOS = "<|eos|>"

# A word with the character before it, numbers by three digits, punctuation, line breaks, spaces.
_PIECES = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


class Tokenizer:
    """A byte-level BPE whose documents begin with `<|bos|>` and end with `<|eos|>`.

    Special tokens that are spelled out in a text are text.
    """

    def __init__(self, backend: Backend, *, name: str = "tokenizer") -> None:
        """Raises DataError, naming `name`, unless `backend` is byte-level and has the special tokens."""
        backend.encode_special_tokens = True
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.vocab_size = 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
        self.bos_id = self._special_id(BOS, name)
        self.eos_id = self._special_id(EOS, name)
        if not isinstance(backend.decoder, decoders.ByteLevel):
            raise DataError(f"{name} is not a byte-level tokenizer, which is what is expected")

    @classmethod
    def train(cls, texts: Iterable[str], *, vocab_size: int) -> Tokenizer:
        """A tokenizer of exactly `vocab_size` tokens, special ones included; the same for the same texts.

        Raises DataError when the texts are too few for so many.
        """
        backend = Backend(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        backend.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[BOS, EOS],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        backend.train_from_iterator(texts, trainer=trainer)
        actual = backend.get_vocab_size()
        if actual != vocab_size:
            raise DataError(
                f"the corpus gives a vocabulary of {actual} tokens, asked for {vocab_size}; "
                f"set data.tokenizer.vocab_size={actual} (and the model's) or bring more text"
            )
        return cls(backend)

    @classmethod
    def load(cls, path: Path) -> Tokenizer:
        """Reads a `tokenizer.json`. Raises DataError naming it when it is missing or not usable."""
        try:
            backend = Backend.from_str(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise DataError(f"tokenizer {path} cannot be read: {error.strerror}") from None
        except Exception as error:  # the backend raises plain Exception
            raise DataError(f"tokenizer {path} is not a tokenizer.json: {error}") from None
        return cls(backend, name=f"tokenizer {path}")

    def save(self, path: Path) -> None:
        path.write_text(self._backend.to_str(pretty=False) + "\n", encoding="utf-8")

    def encode(self, text: str) -> list[int]:
        """Tokens of a text, without `<|bos|>` and `<|eos|>`."""
        return self._backend.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Tokens of several texts, on all cores that the process may use."""
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def decode(self, tokens: Sequence[int], *, keep_special: bool = False) -> str:
        """The text of tokens; bytes that are not UTF-8 become U+FFFD."""
        return self._backend.decode(list(tokens), skip_special_tokens=not keep_special)

    @cached_property
    def token_bytes(self) -> np.ndarray:
        """Bytes of UTF-8 that each token stands for, 0 for special ones; int64 [V]."""
        lengths = np.zeros(self.vocab_size, dtype=np.int64)
        added = self._backend.get_added_tokens_decoder()
        for token, index in self._backend.get_vocab(with_added_tokens=True).items():
            if index not in added:
                lengths[index] = len(token)  # in a byte-level vocabulary one character is one byte
            elif not added[index].special:
                lengths[index] = len(token.encode("utf-8"))
        return lengths

    def _special_id(self, token: str, name: str) -> int:
        index = self._backend.token_to_id(token)
        if index is None:
            raise DataError(f"{name} has no token {token}; add {BOS} and {EOS} as special tokens")
        return index
