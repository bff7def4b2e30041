"""Tokenizers: texts to token ids, by words, by bytes, or with a Hugging Face tokenizer in a local folder."""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from fl_lightning.core.errors import ConfigError, one_line, require_extra
from fl_lightning.core.inputs import MASK, Inputs
from fl_lightning.data.text import PADDING, UNKNOWN, Vocabulary

KEY = "scenario.dataset"
END = 2
"""Token id before and after each text, of words and bytes."""
FEWEST_IDS = 4
"""Padding, unknown words, the end of a text, and one word."""
MOST_WORDS = 10_000
"""Default of the largest number of token ids of words."""

WORDS_AND_SIGNS = re.compile(r"\w+|[^\w\s]")

Token = str | int
"""A word whose id is not known yet, or a token id."""


class Tokenizer(ABC):
    """Converts texts to token ids, `size` of them. A text is preceded by the tokens `start` and followed by `end`.

    `split` a text first. A tokenizer with a vocabulary is then fitted to some of the results, before `ids` is called.

    Attributes:
        size: Number of token ids.
        padding: Token id of padding.
        start: Token ids before each text.
        end: Token ids after each text.
    """

    size: int
    padding: int = PADDING
    start: Sequence[int] = (END,)
    end: Sequence[int] = (END,)

    @abstractmethod
    def split(self, text: str) -> list[Token]:
        """Return the tokens of a text, without `start` and `end`."""

    def fit(self, texts: Iterable[Sequence[Token]], size: int | None) -> None:
        """Learn the vocabulary from texts that were split, with at most `size` ids. By default, nothing is learned.

        Raises:
            ConfigError: `size` is smaller than the number of token ids.
        """
        if size is not None and size < self.size:
            raise ConfigError(f"{KEY}.vocab_size: {size} is too small. The tokenizer has {self.size:,} token ids")

    def ids(self, tokens: Sequence[Token]) -> list[int]:
        """Return the ids of tokens. Numbers are ids already."""
        return [int(token) for token in tokens]


class WordTokenizer(Tokenizer):
    """Words and signs, in the case in which they are written; the most frequent ones get ids, all others one id.

    The ids are 0 for padding, 1 for other words, 2 for the start and end of a text, and then words by frequency.

    Example:
        >>> tokenizer = WordTokenizer()
        >>> texts = [tokenizer.split("Cats purr."), tokenizer.split("Cats!")]
        >>> tokenizer.fit(texts, None)
        >>> texts[0], tokenizer.ids(texts[0]), tokenizer.ids(["Dogs"])
        (['Cats', 'purr', '.'], [3, 6, 5], [1])
    """

    def split(self, text: str) -> list[Token]:
        """Return the words of a text, and its signs such as commas; white space is left out."""
        return [*WORDS_AND_SIGNS.findall(text)]

    def fit(self, texts: Iterable[Sequence[Token]], size: int | None) -> None:
        """Give ids to the most frequent words, with at most `size` ids in total, 10,000 by default.

        Raises:
            ConfigError: `size` is below 4.
        """
        if size is not None and size < FEWEST_IDS:
            raise ConfigError(f"{KEY}.vocab_size: {size} is too small. Padding, unknown, end and one word are 4 ids")
        words = [[token for token in text if isinstance(token, str)] for text in texts]
        self.vocabulary = Vocabulary(words, size or MOST_WORDS, split=list, first=END + 1)
        self.size = len(self.vocabulary.ids) + END + 1

    def ids(self, tokens: Sequence[Token]) -> list[int]:
        """Return the ids of words. Numbers are ids already."""
        known = self.vocabulary.ids
        return [known.get(token, UNKNOWN) if isinstance(token, str) else token for token in tokens]


class ByteTokenizer(Tokenizer):
    """The bytes of the text in UTF-8. The id of a byte is its value plus 3; 2 is the start and end of a text.

    Example:
        >>> ByteTokenizer().split("aé")
        [100, 198, 172]
    """

    size = 256 + END + 1

    def split(self, text: str) -> list[Token]:
        """Return the token ids of the bytes of a text."""
        return [byte + END + 1 for byte in text.encode("utf-8", errors="replace")]


class HuggingFaceTokenizer(Tokenizer):
    """A tokenizer of Hugging Face's `transformers`, from a local folder. Nothing is fetched, and no code of it is run.

    Texts begin and end with the tokenizer's own special tokens, such as `[CLS]` and `[SEP]` of BERT. If it adds none,
    as that of GPT-2, they begin with its `bos_token` and end with its `eos_token`, if it has these.

    Args:
        path: Folder that `save_pretrained` wrote.

    Raises:
        ConfigError: The folder has no tokenizer, or the package transformers is missing.
    """

    def __init__(self, path: str) -> None:
        with require_extra("transformers", f"{KEY}.tokenizer: a folder needs the package transformers"):
            from transformers import AutoTokenizer
        try:
            self.library: Any = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # of transformers, tokenizers, JSON, the file system, ...
            what = f"{one_line(path)} has no tokenizer that can be read ({one_line(error)})"
            raise ConfigError(f"{KEY}.tokenizer: {what}. Write one with save_pretrained") from error
        self.library.model_max_length = 1 << 30  # texts are truncated here, without a warning
        self.size = len(self.library)
        self.padding = self.library.pad_token_id or 0  # masked, so any id will do
        whole, inner = self.library("a")["input_ids"], self._plain("a")
        start = next(i for i in range(len(whole)) if whole[i : i + len(inner)] == inner)
        self.start, self.end = whole[:start], whole[start + len(inner) :]
        if not self.start and self.library.bos_token_id is not None:
            self.start = [self.library.bos_token_id]
        if not self.end and self.library.eos_token_id is not None:
            self.end = [self.library.eos_token_id]

    def _plain(self, text: str) -> list[int]:
        return self.library(text, add_special_tokens=False)["input_ids"]

    def split(self, text: str) -> list[Token]:
        """Return the token ids of a text, without special tokens at its ends."""
        return [*self._plain(text)]


def load_tokenizer(name: str) -> Tokenizer:
    """Return the tokenizer that the option `scenario.dataset.tokenizer` names: `words`, `bytes` or a folder.

    Raises:
        ConfigError: There is no such folder, or it has no tokenizer.
    """
    if name in (kinds := {"words": WordTokenizer, "bytes": ByteTokenizer}):
        return kinds[name]()
    if not os.path.isdir(name):
        what = f"{one_line(name)}: no such folder"
        raise ConfigError(f"{KEY}.tokenizer: {what}. Give words, bytes, or a folder that save_pretrained wrote")
    return HuggingFaceTokenizer(name)


def pad_texts(texts: Sequence[Sequence[int]], length: int, padding: int) -> Inputs:
    """Return token ids as `input_ids` and `attention_mask`, each `(n, length)`. Longer texts are truncated.

    Args:
        texts: The ids of each text.
        length: Number of tokens.
        padding: Token id after the end of a text.

    Example:
        >>> padded = pad_texts([[7, 8, 9], [7]], 2, 0).tensors
        >>> padded["input_ids"].tolist(), padded["attention_mask"].tolist()
        ([[7, 8], [7, 0]], [[1, 1], [1, 0]])
    """
    ids = torch.full((len(texts), length), padding)
    mask = torch.zeros_like(ids)
    for row, text in enumerate(texts):
        kept = torch.tensor(text[:length], dtype=torch.int64)
        ids[row, : len(kept)], mask[row, : len(kept)] = kept, 1
    return Inputs({"input_ids": ids, MASK: mask})


def encode_whole(texts: Sequence[str], fitted: Iterable[int], length: int, vocab_size: int, name: str) -> Inputs:
    """Return texts as the inputs of a classifier: start, tokens and end of each, at most `length` tokens together.

    Args:
        texts: The texts.
        fitted: Indices of the texts from which a vocabulary is built.
        length: Tokens per text; longer texts lose their last tokens, but not `Tokenizer.end`.
        vocab_size: Largest number of token ids of words.
        name: The tokenizer, as for `load_tokenizer`.

    Raises:
        ConfigError: `length` leaves no room for a token, or there is no such tokenizer.
    """
    tokenizer = load_tokenizer(name)
    room = length - len(tokenizer.start) - len(tokenizer.end)
    if room < 1:
        raise ConfigError(f"{KEY}.length: {length} leaves no room for a token. Set at least {length - room + 1}")
    split = [tokenizer.split(text)[:room] for text in texts]
    tokenizer.fit((split[i] for i in fitted), vocab_size if name == "words" else None)
    whole = [[*tokenizer.start, *tokenizer.ids(one), *tokenizer.end] or [tokenizer.padding] for one in split]
    return pad_texts(whole, length, tokenizer.padding)
