"""Datasets of texts: token ids of fixed length, from a vocabulary of the training texts alone."""

from __future__ import annotations

import csv
import re
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from io import StringIO
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor
from torchvision.datasets.utils import download_and_extract_archive, download_url

from fl_lightning.core.errors import ConfigError, blame
from fl_lightning.data.datasets import FileDataset, LoadedData
from fl_lightning.data.reading import files_in, read_text, told_of
from fl_lightning.data.transforms import Normalize

PADDING, UNKNOWN = 0, 1
"""Ids of no word, and of a word that the vocabulary does not have."""

WORD = re.compile(r"[a-z0-9]+(?:'[a-z]+)?")


def words(text: str) -> list[str]:
    """A text's words, lower case, without markup and punctuation.

    Example:
        >>> words("It's <br />1 of 2 GREAT films.")
        ["it's", '1', 'of', '2', 'great', 'films']
    """
    return WORD.findall(text.lower().replace("<br />", " "))


class Vocabulary:
    """Numbers for the most frequent words; the more frequent, the smaller, from 2.

    Args:
        texts: What the words are counted in.
        size: How many ids there are, padding (0) and unknown (1) among them.
    """

    def __init__(self, texts: Iterable[str], size: int) -> None:
        counts = Counter(word for text in texts for word in words(text))
        ranked = sorted(counts, key=lambda word: (-counts[word], word))
        self.ids = {word: rank for rank, word in enumerate(ranked[: size - 2], start=2)}

    def encode(self, texts: Iterable[str], length: int) -> Tensor:
        """The first `length` words of each text as ids, filled up with padding: `(n, length)`, `int64`."""
        rows = [[self.ids.get(word, UNKNOWN) for word in words(text)[:length]] for text in texts]
        ids = np.full((len(rows), length), PADDING, dtype=np.int64)
        for i, row in enumerate(rows):
            ids[i, : len(row)] = row
        return torch.from_numpy(ids)


def check_lengths(length: int, vocab_size: int) -> None:
    """Refuse texts of no words and a vocabulary of none.

    Raises:
        ConfigError: `length` is below 1 or `vocab_size` below 3.
    """
    if length < 1:
        raise ConfigError(f"scenario.dataset.length: {length} is below 1")
    if vocab_size < 3:
        raise ConfigError(f"scenario.dataset.vocab_size: {vocab_size} is below 3: padding, unknown and one word")


def ids_of(texts: Sequence[str], train: int, length: int, vocab_size: int) -> Tensor:
    """Texts as ids of the words that are most frequent in the first of them: `(n, length)`, `int64`.

    Args:
        texts: All texts, those to train on first.
        train: How many of them are.
        length: Words a text.
        vocab_size: Number of ids, padding and unknown among them.

    Raises:
        ConfigError: There is no memory for so many.
    """
    vocabulary = Vocabulary(texts[:train], vocab_size)
    with blame("scenario.dataset.length"):
        return vocabulary.encode(texts, length)


class TextDataset(FileDataset):
    """Texts in files.

    Args:
        data_dir: Folder that holds the dataset's own file or folder.
        download: Fetch the files when they are missing.
        length: Words a text; longer ones are cut, shorter ones padded.
        vocab_size: Number of ids, padding and unknown among them; the most frequent training words have one.

    Raises:
        ConfigError: `length` is below 1 or `vocab_size` below 3.
    """

    num_classes: int

    def __init__(
        self, data_dir: str = "data", download: bool = False, length: int = 200, vocab_size: int = 10_000
    ) -> None:
        super().__init__(data_dir, download)
        check_lengths(length, vocab_size)
        self.length, self.vocab_size = length, vocab_size

    @abstractmethod
    def _read(self, train: bool) -> tuple[list[str], list[int]]:
        """Texts and labels of one split."""

    def load(self) -> LoadedData:
        """Read both splits, and number the words of the training texts."""
        (train, y_train), (test, y_test) = self._read_both()
        return self._numbered(train, test, torch.tensor(y_train), torch.tensor(y_test))

    def _numbered(self, train: list[str], test: list[str], y_train: Tensor, y_test: Tensor) -> LoadedData:
        n, x = len(train), ids_of([*train, *test], len(train), self.length, self.vocab_size)
        return LoadedData(x[:n], y_train, x[n:], y_test, self.num_classes, prepare=Normalize())


class AGNews(TextDataset):
    """AG News: 120,000 + 7,600 titles and first sentences of news, 4 classes (world, sports, business, science)."""

    files = "ag_news_csv/{train,test}.csv"
    num_classes = 4
    url = "https://raw.githubusercontent.com/mhjabreel/CharCnn_Keras/master/data/ag_news_csv/{}.csv"
    md5: ClassVar = {"train": "b1a00f826fdfbd249f79597b59e1dc12", "test": "d52ea96a97a2d943681189a97654912d"}

    def _paths(self) -> list[str]:
        return [f"ag_news_csv/{split}.csv" for split in ("train", "test")]

    def _fetch(self) -> None:
        for split, md5 in self.md5.items():
            if not (path := self._path(f"ag_news_csv/{split}.csv")).is_file():
                download_url(self.url.format(split), path.parent, path.name, md5)

    def _read(self, train: bool) -> tuple[list[str], list[int]]:
        path = self._path(f"ag_news_csv/{'train' if train else 'test'}.csv")
        rows = read_rows(path, self._news)
        return [text for text, _ in rows], [label for _, label in rows]

    @staticmethod
    def _news(row: list[str]) -> tuple[str, int]:
        label, title, text = row
        if label not in ("1", "2", "3", "4"):
            raise ValueError(f"column 1, the label, holds {label[:40]!r}, not a class from 1 to 4")
        return f"{title} {text}", int(label) - 1


class IMDB(TextDataset):
    """IMDB: 25,000 + 25,000 film reviews, 2 classes (negative, positive).

    Args:
        data_dir: Folder that holds the dataset's own file or folder.
        download: Fetch the `folder` layout when it is missing.
        length: Words a text; longer ones are cut, shorter ones padded.
        vocab_size: Number of ids, padding and unknown among them; the most frequent training words have one.
        layout: `folder` for the authors' aclImdb, `csv` for the one file `IMDB Dataset.csv` (review, sentiment), which
            has no split of its own: its first half is the training set.

    Raises:
        ConfigError: `length` or `vocab_size` is too small, or `download` is asked for with `csv`.
    """

    num_classes = 2
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
                "scenario.dataset.download: IMDB is fetched as a folder; set scenario.dataset.layout folder"
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
        rows = read_rows(self._path(self.files), self._review, skip=1)
        half = rows[: len(rows) // 2] if train else rows[len(rows) // 2 :]
        return [text for text, _ in half], [label for _, label in half]

    @staticmethod
    def _review(row: list[str]) -> tuple[str, int]:
        text, mood = row
        return text, {"negative": 0, "positive": 1}[mood]

    def _read_folder(self, train: bool) -> tuple[list[str], list[int]]:
        folders = [self._path(f"aclImdb/{'train' if train else 'test'}/{mood}") for mood in ("neg", "pos")]
        texts = [[read_text(path) for path in files_in(folder)] for folder in folders]
        return texts[0] + texts[1], [0] * len(texts[0]) + [1] * len(texts[1])


def read_rows(path: Path, understand: Callable[[list[str]], tuple[str, int]], skip: int = 0) -> list[tuple[str, int]]:
    """The texts and labels of a csv file's rows.

    Args:
        path: The file.
        understand: Makes a text and a label of a row, or raises what it likes.
        skip: Rows at the top that are none.

    Raises:
        BadFile: It is no csv file, or one of its rows cannot be understood.
    """
    texts = []
    with told_of(path, "csv file"):
        for number, row in enumerate(csv.reader(StringIO(read_text(path), newline=""), strict=True), start=1):
            if number > skip:
                with told_of(path, f"csv file: row {number}"):
                    texts.append(understand(row))
    return texts
