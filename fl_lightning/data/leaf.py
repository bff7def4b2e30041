"""LEAF datasets (Caldas et al. 2018): JSON files written by LEAF's scripts, with one client per user.

S. Caldas et al., "LEAF: A Benchmark for Federated Settings", arXiv:1812.01097; github.com/TalwalkarLab/leaf.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from string import ascii_lowercase, ascii_uppercase, digits
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fl_lightning.data.files import BadFile, files_in, naming_file, read_json
from fl_lightning.data.loaded_data import LoadedData
from fl_lightning.data.published_files import FileDataset
from fl_lightning.data.text import MOODS, UNKNOWN, TextDataset
from fl_lightning.data.transforms import Normalize

KEYS = ("users", "num_samples", "user_data")

LETTERS = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
"""LEAF's characters of Shakespeare. The class of a character is its index."""


class _LeafDataset(FileDataset):
    """Base class of datasets in the layout of LEAF's `preprocess.sh`. `data_dir` is LEAF's `data` folder.

    Attributes:
        name: LEAF's name of the dataset.
        num_classes: Number of classes, `C`.
    """

    fetchable = False
    name: str
    num_classes: int

    @property
    def files(self) -> str:  # type: ignore[override]
        """Return the paths at which LEAF's files are expected, for error messages."""
        return f"{self.name}/data/{{train,test}}/*.json (written by LEAF's preprocess.sh)"

    def _paths(self) -> list[str]:
        return [f"{self.name}/data/{split}/" for split in ("train", "test")]

    @abstractmethod
    def _inputs(self, x: list[Any]) -> Any:
        """Convert one user's list `x` in LEAF's JSON to inputs: an array, or a list of texts."""

    def _labels(self, y: list[Any]) -> np.ndarray:
        """Convert one user's list `y` in LEAF's JSON to an array of class indices."""
        if any(type(label) is not int or not 0 <= label < self.num_classes for label in y):
            raise ValueError(f"y must hold integers from 0 to {self.num_classes - 1}")
        return np.array(y, dtype=np.int64)

    def _read(self, train: bool) -> tuple[tuple[list[Any], Tensor], np.ndarray]:
        """Read the training or test set: the inputs by user, and the label and user of every sample."""
        folder = self._path(f"{self.name}/data/{'train' if train else 'test'}")
        x: dict[str, Any] = {}
        y: list[np.ndarray] = []
        paths = [path for path in files_in(folder) if path.suffix == ".json"]
        if not paths:
            raise BadFile(folder, "contains no .json files")
        for path in paths:
            with naming_file(path, "LEAF file"):
                for user, samples in users_in(read_json(path)):
                    with naming_file(path, f"LEAF file: user {user!r}"):
                        if user in x:
                            raise ValueError("appears twice")
                        if "\0" in user:  # NumPy drops it at the end: two users become one
                            raise ValueError("has a NUL character in its name. Remove the character")
                        x[user] = self._inputs(samples["x"])
                        y.append(self._labels(samples["y"]))
        if not sum(map(len, y)):
            raise BadFile(folder, "contains no samples")
        owners = np.repeat(np.array(list(x)), [len(labels) for labels in y])
        return (list(x.values()), torch.from_numpy(np.concatenate(y))), owners


class _LeafArrays(_LeafDataset):
    """Base class of LEAF datasets whose inputs are arrays: pixels of images, or ids of characters."""

    def __init__(self, data_dir: str = "data") -> None:
        super().__init__(data_dir)

    def load(self) -> LoadedData:
        """Read the training and the test set. Each LEAF user becomes one client."""
        ((x_train, y_train), own_train), ((x_test, y_test), own_test) = self._read_both()
        x = [torch.from_numpy(np.concatenate(parts)) for parts in (x_train, x_test)]
        fields = {"client_train": own_train, "client_test": own_test, "class_names": self.class_names}
        return LoadedData(x[0], y_train, x[1], y_test, self.num_classes, Normalize(), **fields)


class FEMNIST(_LeafArrays):
    """LEAF's FEMNIST: 28x28 grey digits and letters by about 3,500 writers, 62 classes.

    Args:
        data_dir: LEAF's `data` folder, with `femnist/data/{train,test}/*.json`.
    """

    name = "femnist"
    num_classes = 62
    class_names = tuple(digits + ascii_uppercase + ascii_lowercase)

    def _inputs(self, x: list[Any]) -> np.ndarray:
        pixels = np.array(x)
        if len(x) and (pixels.shape != (len(x), 784) or pixels.dtype.kind not in "iuf"):
            raise ValueError("x must hold rows of 784 numbers")
        if len(x) and not (pixels.min() >= 0 and pixels.max() <= 1):
            raise ValueError("x must hold pixels from 0 to 1")
        return pixels.reshape(-1, 1, 28, 28).astype(np.float32)


class Shakespeare(_LeafArrays):
    """LEAF's Shakespeare: predict a role's next character from its previous 80 characters, 80 classes.

    Characters are token ids from 2, in LEAF's order; 1 is any other character. Models need `vocab_size: 82`.

    Args:
        data_dir: LEAF's `data` folder, with `shakespeare/data/{train,test}/*.json`.
    """

    name = "shakespeare"
    num_classes = len(LETTERS)
    length = 80

    def _inputs(self, x: list[Any]) -> np.ndarray:
        if any(not isinstance(text, str) or len(text) != self.length for text in x):
            raise ValueError(f"x must hold texts of {self.length} characters")
        return encode_characters("".join(x), 2, UNKNOWN).reshape(-1, self.length)

    def _labels(self, y: list[Any]) -> np.ndarray:
        if any(not isinstance(letter, str) or len(letter) != 1 or letter not in LETTERS for letter in y):
            raise ValueError(f"y must hold one of LEAF's {len(LETTERS)} characters per sample")
        return encode_characters("".join(y), 0, -1)


class Sent140(_LeafDataset, TextDataset):  # type: ignore[misc]  # the two `_read` return different types
    """LEAF's Sent140: tweets with one client per author, 2 classes (negative, positive).

    Args:
        data_dir: LEAF's `data` folder, with `sent140/data/{train,test}/*.json`.
        length: Tokens per tweet; longer ones are truncated, shorter ones padded. LEAF uses 25.
        vocab_size: Number of token ids, including padding and unknown.

    Raises:
        ConfigError: `length` is below 1 or `vocab_size` below 3.
    """

    name = "sent140"
    num_classes = 2
    class_names = MOODS

    def __init__(self, data_dir: str = "data", length: int = 25, vocab_size: int = 10_000) -> None:
        TextDataset.__init__(self, data_dir, length=length, vocab_size=vocab_size)

    def load(self) -> LoadedData:
        """Read the training and test tweets, and convert them to token ids."""
        ((train, y_train), own_train), ((test, y_test), own_test) = self._read_both()
        loaded = self._encoded(list(chain(*train)), list(chain(*test)), y_train, y_test)
        return replace(loaded, client_train=own_train, client_test=own_test)

    def _inputs(self, x: list[Any]) -> list[str]:
        if any(not isinstance(row, list) or not row or not isinstance(row[-1], str) for row in x):
            raise ValueError("x must hold rows whose last column is the tweet")
        return [row[-1] for row in x]


def users_in(content: Any) -> Iterator[tuple[str, dict[str, list[Any]]]]:
    """Yield the name and the samples of each user in the content of a LEAF JSON file, in the order of the file.

    Ignores users that are only in `user_data`: LEAF's scripts leave removed users there. Ignores `hierarchies`, the
    play of each role.
    """
    if not isinstance(content, dict) or not {*KEYS} <= content.keys():
        raise ValueError(f"it needs {', '.join(KEYS)}")
    users, sizes, data = (content[key] for key in KEYS)
    if len(users) != len(sizes):
        raise ValueError(f"it has {len(users)} users, but num_samples of {len(sizes)}")
    for user, size in zip(users, sizes, strict=True):
        if not isinstance(user, str) or user not in data:
            raise ValueError(f"user {user!r} is not in user_data")
        x, y = data[user]["x"], data[user]["y"]
        if len(x) != size or len(y) != size:
            raise ValueError(f"user {user!r} has {len(x)} x and {len(y)} y, but num_samples is {size}")
        yield user, data[user]


def encode_characters(text: str, first: int, other: int) -> np.ndarray:
    """Return an id for each character: its index in `LETTERS` plus `first`, or `other` if it is not in `LETTERS`."""
    ids = np.full(128, other, dtype=np.int64)
    ids[[ord(letter) for letter in LETTERS]] = np.arange(first, first + len(LETTERS))
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")
    return ids[np.minimum(codes, 127)]  # character 127 is not in LETTERS
