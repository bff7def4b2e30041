"""LEAF's datasets as its scripts leave them: JSON files by user, whose samples are a client's (Caldas et al. 2018).

S. Caldas et al., "LEAF: A Benchmark for Federated Settings", arXiv:1812.01097; github.com/TalwalkarLab/leaf.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fl_lightning.data.datasets import FileDataset, LoadedData
from fl_lightning.data.reading import BadFile, files_in, read_json, told_of
from fl_lightning.data.text import UNKNOWN, TextDataset
from fl_lightning.data.transforms import Normalize

MOST_BYTES = 2**32
"""A larger file is not read; LEAF's have up to half a gigabyte."""

KEYS = ("users", "num_samples", "user_data")

LETTERS = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
"""LEAF's characters of Shakespeare; a character's class is its place."""


class _LeafDataset(FileDataset):
    """Files that LEAF's `preprocess.sh` has made: below `data_dir`, which is LEAF's own `data` folder.

    Attributes:
        name: LEAF's name of the dataset.
        num_classes: Number of classes, `C`.
    """

    fetchable = False
    name: str
    num_classes: int

    @property
    def files(self) -> str:  # type: ignore[override]
        """LEAF's layout."""
        return f"{self.name}/data/{{train,test}}/*.json (what LEAF's preprocess.sh makes)"

    def _paths(self) -> list[str]:
        return [f"{self.name}/data/{split}/" for split in ("train", "test")]

    @abstractmethod
    def _inputs(self, x: list[Any]) -> Any:
        """One user's inputs, in a form of which many are put together by `_together`."""

    @abstractmethod
    def _labels(self, y: list[Any]) -> np.ndarray:
        """One user's labels."""

    def _read(self, train: bool) -> tuple[tuple[list[Any], Tensor], np.ndarray]:
        """Inputs by user and all labels of one split; and whose they are."""
        folder = self._path(f"{self.name}/data/{'train' if train else 'test'}")
        x: dict[str, Any] = {}
        y: list[np.ndarray] = []
        for path in json_files(folder):
            with told_of(path, "LEAF file"):
                for user, own in users_in(read_json(path, MOST_BYTES)):
                    with told_of(path, f"LEAF file: user {user!r}"):
                        if user in x:
                            raise ValueError("is in two files, or twice in one")
                        x[user] = self._inputs(own["x"])
                        y.append(self._labels(own["y"]))
        if not sum(map(len, y)):
            raise BadFile(folder, "holds no samples")
        owners = np.repeat(np.array(list(x)), [len(own) for own in y])
        return (list(x.values()), torch.from_numpy(np.concatenate(y))), owners

    def _classes(self, y: list[Any]) -> np.ndarray:
        if any(type(label) is not int or not 0 <= label < self.num_classes for label in y):
            raise ValueError(f"y holds something else than whole numbers from 0 to {self.num_classes - 1}")
        return np.array(y, dtype=np.int64)


class _LeafArrays(_LeafDataset):
    """A dataset whose inputs are numbers from the start."""

    def __init__(self, data_dir: str = "data") -> None:
        super().__init__(data_dir)

    def load(self) -> LoadedData:
        """Read both splits."""
        ((x_train, y_train), own_train), ((x_test, y_test), own_test) = self._read_both()
        x = [torch.from_numpy(np.concatenate(parts)) for parts in (x_train, x_test)]
        return LoadedData(
            x[0],
            y_train,
            x[1],
            y_test,
            self.num_classes,
            prepare=Normalize(),
            client_train=own_train,
            client_test=own_test,
        )


class FEMNIST(_LeafArrays):
    """LEAF's FEMNIST: 28x28 grey digits and letters by about 3,500 writers, 62 classes.

    Args:
        data_dir: LEAF's `data` folder, which holds `femnist/data/{train,test}/*.json`.
    """

    name = "femnist"
    num_classes = 62

    def _inputs(self, x: list[Any]) -> np.ndarray:
        pixels = np.array(x)
        if len(x) and (pixels.shape != (len(x), 784) or pixels.dtype.kind not in "iuf"):
            raise ValueError("x holds something else than rows of 784 numbers")
        if len(x) and not (pixels.min() >= 0 and pixels.max() <= 1):
            raise ValueError("x holds pixels that are not from 0 to 1")
        return pixels.reshape(-1, 1, 28, 28).astype(np.float32)

    def _labels(self, y: list[Any]) -> np.ndarray:
        return self._classes(y)


class Shakespeare(_LeafArrays):
    """LEAF's Shakespeare: 80 characters of a role's lines, the next one is to be told, 80 classes.

    Characters are token ids from 2 on, in LEAF's order; 1 is any other. A model for them needs `vocab_size: 82`.

    Args:
        data_dir: LEAF's `data` folder, which holds `shakespeare/data/{train,test}/*.json`.
    """

    name = "shakespeare"
    num_classes = len(LETTERS)
    length = 80

    def _inputs(self, x: list[Any]) -> np.ndarray:
        if any(not isinstance(text, str) or len(text) != self.length for text in x):
            raise ValueError(f"x holds something else than texts of {self.length} characters")
        return characters("".join(x), 2, UNKNOWN).reshape(-1, self.length)

    def _labels(self, y: list[Any]) -> np.ndarray:
        if any(not isinstance(letter, str) or len(letter) != 1 or letter not in LETTERS for letter in y):
            raise ValueError(f"y holds something else than one of LEAF's {len(LETTERS)} characters each")
        return characters("".join(y), 0, -1)


class Sent140(_LeafDataset, TextDataset):  # type: ignore[misc]  # whose the texts are stands beside them
    """LEAF's Sent140: tweets by the users who wrote them, 2 classes (negative, positive).

    Args:
        data_dir: LEAF's `data` folder, which holds `sent140/data/{train,test}/*.json`.
        length: Words a tweet; longer ones are cut, shorter ones padded. LEAF reads 25.
        vocab_size: Number of ids, padding and unknown among them; the most frequent training words have one.

    Raises:
        ConfigError: `length` is below 1 or `vocab_size` below 3.
    """

    name = "sent140"
    num_classes = 2

    def __init__(self, data_dir: str = "data", length: int = 25, vocab_size: int = 10_000) -> None:
        TextDataset.__init__(self, data_dir, length=length, vocab_size=vocab_size)

    def load(self) -> LoadedData:
        """Read both splits, and number the words of the training texts."""
        ((train, y_train), own_train), ((test, y_test), own_test) = self._read_both()
        loaded = self._numbered(list(chain(*train)), list(chain(*test)), y_train, y_test)
        return replace(loaded, client_train=own_train, client_test=own_test)

    def _inputs(self, x: list[Any]) -> list[str]:
        if any(not isinstance(row, list) or not row or not isinstance(row[-1], str) for row in x):
            raise ValueError("x holds something else than rows whose last column is the tweet")
        return [row[-1] for row in x]

    def _labels(self, y: list[Any]) -> np.ndarray:
        return self._classes(y)


def json_files(folder: Path) -> list[Path]:
    """The JSON files of a folder, by name.

    Raises:
        BadFile: There is none.
    """
    found = [path for path in files_in(folder) if path.suffix == ".json"]
    if not found:
        raise BadFile(folder, "holds no .json files")
    return found


def users_in(content: Any) -> Iterator[tuple[str, dict[str, list[Any]]]]:
    """The users of one of LEAF's files, in its order, each with as many `x` and `y` as `num_samples` says.

    Others may stand in `user_data`: LEAF's scripts leave those there whom they have taken out. `hierarchies`, the play
    of each role, are not looked at.

    Raises:
        ValueError: Something is missing, or does not fit.
    """
    if not isinstance(content, dict) or (missing := [key for key in KEYS if key not in content]):
        held = f"no {', '.join(missing)}" if isinstance(content, dict) else type(content).__name__
        raise ValueError(f"it holds {held}; it needs {', '.join(KEYS)}")
    users, sizes, data = (content[key] for key in KEYS)
    if len(users) != len(sizes):
        raise ValueError(f"it has {len(users)} users, and num_samples of {len(sizes)}")
    for user, size in zip(users, sizes, strict=True):
        if not isinstance(user, str) or user not in data:
            raise ValueError(f"user {user!r} is not in user_data")
        own = data[user]
        if len(own["x"]) != size or len(own["y"]) != size:
            raise ValueError(f"user {user!r} has {len(own['x'])} x and {len(own['y'])} y, by num_samples {size}")
        yield user, own


def characters(text: str, first: int, other: int) -> np.ndarray:
    """Each character's place among LEAF's, counted from `first`, and `other` for those that are not there: `int64`."""
    places = np.full(128, other, dtype=np.int64)
    places[[ord(letter) for letter in LETTERS]] = np.arange(first, first + len(LETTERS))
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")
    return places[np.minimum(codes, 127)]  # which is no letter
