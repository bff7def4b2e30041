"""Public text datasets, as token ids of fixed length with a vocabulary of the training texts' words."""

from __future__ import annotations

import csv
import re
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from io import StringIO
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor
from torchvision.datasets.utils import download_and_extract_archive, download_url

from fl_lightning.core.errors import ConfigError, blame, check_number
from fl_lightning.data.files import files_in, naming_file, read_text
from fl_lightning.data.loaded_data import LoadedData
from fl_lightning.data.published_files import FileDataset
from fl_lightning.data.transforms import Normalize

PADDING, UNKNOWN = 0, 1
"""Token ids of padding, and of words that are not in the vocabulary."""

MOODS = ("negative", "positive")
"""Labels in IMDB's CSV file, in the order of the classes."""

WORD = re.compile(r"[a-z0-9]+(?:'[a-z]+)?")


def split_words(text: str) -> list[str]:
    """Return the words of a text in lower case, without markup and punctuation.

    Example:
        >>> split_words("It's <br />1 of 2 GREAT films.")
        ["it's", '1', 'of', '2', 'great', 'films']
    """
    return WORD.findall(text.lower().replace("<br />", " "))


class Vocabulary:
    """Vocabulary of the most frequent words, with token ids in descending order of frequency.

    Args:
        texts: Texts to count words in.
        size: Number of ids, including padding (0), unknown (1) and others below `first`.
        split: Returns the words of a text.
        first: Id of the most frequent word.
    """

    def __init__(
        self, texts: Iterable[Any], size: int, split: Callable[[Any], Iterable[str]] = split_words, first: int = 2
    ) -> None:
        counts = Counter(word for text in texts for word in split(text))
        ranked = sorted(counts, key=lambda word: (-counts[word], word))
        self.ids = {word: rank for rank, word in enumerate(ranked[: size - first], start=first)}

    def encode(self, texts: Iterable[str], length: int) -> Tensor:
        """Return the token ids of the first `length` words of each text, padded with 0: `(n, length)`, `int64`."""
        rows = [[self.ids.get(word, UNKNOWN) for word in split_words(text)[:length]] for text in texts]
        ids = np.full((len(rows), length), PADDING, dtype=np.int64)
        for i, row in enumerate(rows):
            ids[i, : len(row)] = row
        return torch.from_numpy(ids)


def check_lengths(length: int, vocab_size: int) -> None:
    """Check that `length` is at least 1, and `vocab_size` at least 3: padding, unknown words and one word."""
    check_number("scenario.dataset.length", length, "[1, inf)")
    check_number("scenario.dataset.vocab_size", vocab_size, "[3, inf)")


def encode_texts(texts: Sequence[str], fitted: np.ndarray, length: int, vocab_size: int) -> Tensor:
    """Return the token ids of texts, `(n, length)`. The vocabulary is built from the texts at the indices `fitted`."""
    vocabulary = Vocabulary([texts[i] for i in fitted], vocab_size)
    with blame("scenario.dataset.length"):
        return vocabulary.encode(texts, length)


class TextDataset(FileDataset):
    """Base class of public text datasets that are read from files.

    Args:
        data_dir: Folder that contains the dataset's file or folder.
        download: Download missing files.
        length: Tokens per text; longer texts are truncated, shorter ones padded.
        vocab_size: Number of token ids, including padding and unknown.

    Raises:
        ConfigError: `length` is below 1 or `vocab_size` below 3.
    """

    num_classes: int
    has_statistics = True

    def __init__(
        self, data_dir: str = "data", download: bool = False, length: int = 200, vocab_size: int = 10_000
    ) -> None:
        super().__init__(data_dir, download)
        check_lengths(length, vocab_size)
        self.length, self.vocab_size = length, vocab_size

    @abstractmethod
    def _read(self, train: bool) -> tuple[list[str], list[int]]:
        """Read the texts and labels of the training or the test set."""

    def load(self) -> LoadedData:
        """Read the training and test texts, and convert them to token ids."""
        (train, y_train), (test, y_test) = self._read_both()
        return self._encoded(train, test, torch.tensor(y_train), torch.tensor(y_test))

    def _encoded(self, train: list[str], test: list[str], y_train: Tensor, y_test: Tensor) -> LoadedData:
        n = len(train)
        x = encode_texts([*train, *test], self.fitted_rows(n), self.length, self.vocab_size)
        names = self.class_names
        return LoadedData(x[:n], y_train, x[n:], y_test, self.num_classes, prepare=Normalize(), class_names=names)


class AGNews(TextDataset):
    """AG News: 120,000 + 7,600 news titles and descriptions, 4 classes (world, sports, business, science)."""

    files = "ag_news_csv/{train,test}.csv"
    num_classes = 4
    class_names = ("world", "sports", "business", "science")
    url = "https://raw.githubusercontent.com/mhjabreel/CharCnn_Keras/master/data/ag_news_csv/{}.csv"
    md5: ClassVar = {"train": "b1a00f826fdfbd249f79597b59e1dc12", "test": "d52ea96a97a2d943681189a97654912d"}

    def _paths(self) -> list[str]:
        return [f"ag_news_csv/{split}.csv" for split in ("train", "test")]

    def _fetch(self) -> None:
        for split, md5 in self.md5.items():
            if not (path := self._path(f"ag_news_csv/{split}.csv")).is_file():
                download_url(self.url.format(split), path.parent, path.name, md5)

    def _read(self, train: bool) -> tuple[list[str], list[int]]:
        return read_rows(self._path(f"ag_news_csv/{'train' if train else 'test'}.csv"), self._news)

    @staticmethod
    def _news(row: list[str]) -> tuple[str, int]:
        label, title, text = row
        if label not in ("1", "2", "3", "4"):
            raise ValueError(f"column 1 (the label) holds {label[:40]!r}, not a class from 1 to 4")
        return f"{title} {text}", int(label) - 1


class IMDB(TextDataset):
    """IMDB: 25,000 + 25,000 film reviews, 2 classes (negative, positive).

    Args:
        data_dir: Folder that contains the dataset's file or folder.
        download: Download the `folder` layout if it is missing.
        length: Tokens per text; longer texts are truncated, shorter ones padded.
        vocab_size: Number of token ids, including padding and unknown.
        layout: `folder` for the authors' aclImdb, `csv` for the single file `IMDB Dataset.csv` (review, sentiment).
            That file has no split; its first half is the training set.

    Raises:
        ConfigError: `length` or `vocab_size` is too small, or `download` is set with `csv`.
    """

    num_classes = 2
    class_names = MOODS
    url = "http://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz"
    md5 = "7c2ac02c03563afcf9b574c7e56c153a"

    def __init__(
        self,
        data_dir: str = "data",
        download: bool = False,
        length: int = 200,
        vocab_size: int = 10_000,
        layout: Literal["folder", "csv"] = "folder",
    ) -> None:
        super().__init__(data_dir, download, length, vocab_size)
        if download and layout == "csv":
            raise ConfigError(
                "scenario.dataset.download: IMDB is downloaded as a folder. Set scenario.dataset.layout folder"
            )
        self.layout, self.fetchable = layout, layout == "folder"
        self.files = "IMDB Dataset.csv" if layout == "csv" else "aclImdb/{train,test}/{neg,pos}/*.txt"

    def _paths(self) -> list[str]:
        if self.layout == "csv":
            return [self.files]
        return [f"aclImdb/{split}/{mood}/" for split in ("train", "test") for mood in ("neg", "pos")]

    def _fetch(self) -> None:
        download_and_extract_archive(self.url, self.data_dir, md5=self.md5)

    def _read(self, train: bool) -> tuple[list[str], list[int]]:
        return self._read_csv(train) if self.layout == "csv" else self._read_folder(train)

    def _read_csv(self, train: bool) -> tuple[list[str], list[int]]:
        texts, labels = read_rows(self._path(self.files), self._review, skip=1)
        half = slice(len(texts) // 2) if train else slice(len(texts) // 2, None)
        return texts[half], labels[half]

    @staticmethod
    def _review(row: list[str]) -> tuple[str, int]:
        text, mood = row
        if mood not in MOODS:
            raise ValueError(f"column 2 (the label) holds {mood[:40]!r}, not positive or negative")
        return text, MOODS.index(mood)

    def _read_folder(self, train: bool) -> tuple[list[str], list[int]]:
        folders = [self._path(f"aclImdb/{'train' if train else 'test'}/{mood}") for mood in ("neg", "pos")]
        texts = [[read_text(path) for path in files_in(folder)] for folder in folders]
        return texts[0] + texts[1], [0] * len(texts[0]) + [1] * len(texts[1])


def read_rows(path: Path, parse: Callable[[list[str]], tuple[str, int]], skip: int = 0) -> tuple[list[str], list[int]]:
    """Read the texts and labels of a CSV file. `parse` is called with each row after `skip` header rows."""
    texts, labels = [], []
    with naming_file(path, "csv file"):
        for number, row in enumerate(csv.reader(StringIO(read_text(path), newline=""), strict=True), start=1):
            if number > skip:
                with naming_file(path, f"csv file: row {number}"):
                    text, label = parse(row)
                    texts.append(text)
                    labels.append(label)
    return texts, labels
