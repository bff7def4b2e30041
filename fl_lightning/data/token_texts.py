"""Texts for causal language models: the base class of their datasets, and text files."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fl_lightning.core.errors import ConfigError, check_number, one_line
from fl_lightning.core.inputs import Inputs
from fl_lightning.core.objectives import IGNORED_TOKEN, CausalLM
from fl_lightning.data.custom_data import CustomDataset, Samples, existing_path
from fl_lightning.data.datasets import KEY
from fl_lightning.data.files import BadFile, files_in, read_text
from fl_lightning.data.labels import Labels
from fl_lightning.data.tokenizers import Token, Tokenizer, load_tokenizer, pad_texts
from fl_lightning.data.transforms import Normalize


class TokenText(NamedTuple):
    """A sample of a causal language model.

    Attributes:
        tokens: The tokens.
        learned: Whether each of them has a loss.
        client: The client that the sample belongs to, if the data have clients.
    """

    tokens: Sequence[Token]
    learned: Sequence[bool]
    client: str | int | None = None


class TokenTexts(CustomDataset):
    """Base class of datasets for causal language models. A sample is a text of at most `length` tokens.

    The inputs are `input_ids` and `attention_mask`, each `(n, length)`; batches are trimmed to their longest text. The
    labels are the token ids, -100 where a token has no loss (`CausalLM`).

    Args:
        path: The file or folder.
        tokenizer: `words`, `bytes`, or the folder of a Hugging Face tokenizer.
        length: Largest number of tokens of a sample, at least 2.
        vocab_size: Number of token ids, which is the number of the network's outputs. By default that of the tokenizer;
            for words, at most 10,000.
        test_path: The file or folder of the test samples.
        test_share: Share of the samples, or of each client's samples, to test on if there is none.

    Raises:
        ConfigError: A number is out of range.
    """

    objective = CausalLM()

    def __init__(
        self, path: str, tokenizer: str, length: int, vocab_size: int | None, test_path: str | None, test_share: float
    ) -> None:
        super().__init__(test_share)
        check_number(f"{KEY}.length", length, "[2, inf)")
        check_number(f"{KEY}.vocab_size", vocab_size, "[4, inf)")
        self.path, self.test_path, self.tokenizer = path, test_path, tokenizer
        self.length, self.vocab_size = length, vocab_size

    @abstractmethod
    def _read(self, key: str, path: str, tokenizer: Tokenizer) -> Iterator[TokenText]:
        """Read the samples of the file or folder that the option `key` names."""

    def _samples(self) -> Samples:
        tokenizer, parts = load_tokenizer(self.tokenizer), []
        for key, path in (("path", self.path), ("test_path", self.test_path)):
            if path is not None:
                parts.append(list(self._read(key, path, tokenizer)))
                if not parts[-1]:
                    raise ConfigError(f"{KEY}.{key}: {one_line(path)} has no text. Name another file")
        texts = [text for part in parts for text in part]
        test = np.arange(len(texts)) >= len(parts[0]) if len(parts) > 1 else None
        known = [text.client is not None for text in texts]
        if any(known) != all(known):
            raise ConfigError(f"{KEY}.test_path: only one of path and test_path has clients. Give both in one form")
        client = np.array([text.client for text in texts]) if all(known) else None
        return Samples((tokenizer, texts), Labels(torch.zeros(len(texts), dtype=torch.int64), 0, None), client, test)

    def _inputs(self, source: Any, order: np.ndarray, fitted: np.ndarray) -> tuple[Inputs, dict[str, Any]]:
        tokenizer, texts = source[0], [source[1][i] for i in order]
        tokenizer.fit((texts[i].tokens for i in fitted), self.vocab_size)
        ids = [tokenizer.ids(text.tokens) for text in texts]
        labels = label_texts(ids, [text.learned for text in texts], self.length)
        outputs = self.vocab_size or tokenizer.size
        return pad_texts(ids, self.length, tokenizer.padding), {
            "prepare": Normalize(),
            "labels": labels,
            "outputs": outputs,
        }


class TextFile(TokenTexts):
    """Custom text for a causal language model: a text file, or a folder with one text file per client.

    Each line is a text, and empty lines are left out. A text with more than `length` tokens becomes several samples.
    Each of them begins with the last token of the one before, so that each token is predicted once.

    Args:
        path: The file, in UTF-8, or a folder of such files, which are the clients for the partition `ByClient`.
        tokenizer: `words`, `bytes`, or the folder of a Hugging Face tokenizer.
        length: Largest number of tokens of a sample, at least 2.
        vocab_size: Number of token ids, which is the number of the network's outputs. By default that of the tokenizer;
            for words, at most 10,000.
        test_path: The file or folder of the test texts.
        test_share: Share of the samples, or of each client's samples, to test on if there is none.
        separator: What is between two texts: a line break by default, two of them for paragraphs.

    Raises:
        ConfigError: A number is out of range, or `separator` is empty.
    """

    client_key = "path"

    def __init__(
        self,
        path: str,
        tokenizer: str = "words",
        length: int = 128,
        vocab_size: int | None = None,
        test_path: str | None = None,
        test_share: float = 0.2,
        separator: str = "\n",
    ) -> None:
        super().__init__(path, tokenizer, length, vocab_size, test_path, test_share)
        if not separator:
            raise ConfigError(f"{KEY}.separator: it is empty. Leave it out for one text per line")
        self.separator = translate_lines(separator)

    def _read(self, key: str, path: str, tokenizer: Tokenizer) -> Iterator[TokenText]:
        is_folder, clients = os.path.isdir(path), set()
        try:
            for file in files_in(Path(path)) if is_folder else [existing_path(path, key=key)]:
                if file.stem in clients:
                    raise BadFile(file, f"a second file of the client {one_line(file.stem)}")
                clients.add(file.stem)
                texts = [text for text in translate_lines(read_text(file)).split(self.separator) if text.strip()]
                if is_folder and not texts:
                    raise BadFile(file, "has no text")
                for text in texts:
                    tokens = [*tokenizer.start, *tokenizer.split(text), *tokenizer.end]
                    for piece in cut_tokens(tokens, self.length):
                        yield TokenText(piece, [True] * len(piece), file.stem if is_folder else None)
        except BadFile as error:
            raise ConfigError(f"{KEY}.{key}: {error}. Replace or remove it") from error


def translate_lines(text: str) -> str:
    """Return a text whose line ends, of Windows or of another system, are replaced by line feeds."""
    return StringIO(text, newline=None).read()


def cut_tokens(tokens: Sequence[Token], length: int) -> Iterator[Sequence[Token]]:
    """Yield consecutive pieces of at most `length` tokens. Each begins with the last token of the piece before.

    A text of one token has no piece, because there is nothing to predict.

    Example:
        >>> list(cut_tokens([1, 2, 3, 4, 5], 3))
        [[1, 2, 3], [3, 4, 5]]
    """
    for start in range(0, len(tokens) - 1, length - 1):
        yield tokens[start : start + length]


def label_texts(ids: Sequence[Sequence[int]], learned: Sequence[Sequence[bool]], length: int) -> Tensor:
    """Return the label of each token, `(n, length)`: its id, or -100 if it is not learned or is padding.

    Args:
        ids: The token ids of each text. Those after `length` are left out.
        learned: Whether each of these tokens is learned.
        length: Number of labels per text.

    Example:
        >>> label_texts([[7, 8, 9], [7]], [[False, True, True], [True]], 2).tolist()
        [[-100, 8], [7, -100]]
    """
    labels = torch.full((len(ids), length), IGNORED_TOKEN)
    for row, (text, keep) in enumerate(zip(ids, learned, strict=True)):
        own = torch.tensor(text[:length], dtype=torch.int64)
        kept = torch.tensor(keep[:length], dtype=torch.bool)
        labels[row, : len(own)] = own.where(kept, IGNORED_TOKEN)
    return labels
