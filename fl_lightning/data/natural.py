"""Natural splits: who holds what is known beforehand, from the data or from a file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fl_lightning.core.errors import ConfigError, one_line
from fl_lightning.data.partitions import Partition, Shares, by_class
from fl_lightning.data.reading import BadFile, read_json, read_npz, told_of

if TYPE_CHECKING:
    from fl_lightning.data.datasets import LoadedData

MOST_BYTES = 2**30
"""A larger JSON file of indices is not read: those of a hundred million samples take less."""

KINDS = (".npz", ".json")
PARTS = ("train", "test")


class ByClient(Partition):
    """Each client is somebody in the data: the samples of one writer, patient or site make one client.

    The dataset must say whose its samples are (`LoadedData.client_train`, and `client_test` for a client's own test
    samples). Client k is the k-th id in ascending order, of text as text: `"10"` comes before `"9"`.

    Args:
        min_samples: Fewest training samples; whoever has fewer is left out.

    Raises:
        ConfigError: `min_samples` is below 1.
    """

    def __init__(self, min_samples: int = 1) -> None:
        if min_samples < 1:
            raise ConfigError(f"scenario.partition.min_samples: {min_samples} is below 1; a client needs data")
        self.min_samples = min_samples

    def share_out(self, data: LoadedData, labels: np.ndarray, clients: int | None, rng: np.random.Generator) -> Shares:
        """Deal by whose the samples are; `clients` of those there are, drawn at random, or all."""
        if data.client_train is None:
            raise ConfigError(
                f"{self.blamed}: the dataset does not say whose its samples are (client_train); take another partition"
            )
        known, owner = np.unique(data.client_train, return_inverse=True)
        sizes = np.bincount(owner)
        there = int((sizes >= self.min_samples).sum())
        if not there:
            raise ConfigError(
                f"scenario.partition.min_samples: {self.min_samples}, and no client in the data has more than "
                f"{sizes.max()} training samples"
            )
        parts = self.split(owner, there if clients is None else clients, rng)
        ids = known[[owner[part[0]] for part in parts]]
        tests = None if data.client_test is None else samples_of(ids, data.client_test)
        return Shares(parts, tests if tests and any(map(len, tests)) else None, ids.tolist())

    def split(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        """Deal the samples out by what other partitions take for the class: here, whose each is."""
        enough = [own for own in by_class(labels) if len(own) >= self.min_samples]
        return [enough[k] for k in drawn(clients, len(enough), "the data", rng)]


class PredefinedSplit(Partition):
    """Index lists from a file, `.npz` or `.json`: a published split, or one of your own.

    Client k is the k-th in the file. Indices count the dataset's training samples from 0, each in one list at most;
    what is in none stays unused. A client's test list, where it has one, counts the test samples from 0.

    Args:
        path: An `.npz` with an array a client, named as you like, or `NAME/train` and `NAME/test` for each; or a
            `.json` with a list a client, or `{"train": [...], "test": [...]}`, in a list or in a mapping by name.

    Raises:
        ConfigError: `path` ends in neither.
    """

    by_place = True

    def __init__(self, path: str) -> None:
        if Path(path).suffix not in KINDS:
            raise ConfigError(f"scenario.partition.path: {one_line(path)} is neither .npz nor .json")
        self.path = path

    @property
    def blamed(self) -> str:
        """The key and the file."""
        return f"scenario.partition.path: {one_line(self.path)}"

    def share_out(self, data: LoadedData, labels: np.ndarray, clients: int | None, rng: np.random.Generator) -> Shares:
        """Take the file's lists; `clients` of them, drawn at random, or all."""
        return self._drawn(clients, rng)

    def split(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        """The training lists of so many of the file's clients; labels have no say."""
        return self._drawn(clients, rng).train

    def _drawn(self, clients: int | None, rng: np.random.Generator) -> Shares:
        try:
            lists = read_lists(Path(self.path))
        except BadFile as error:
            raise ConfigError(f"scenario.partition.path: {error}") from error
        names = list(lists)
        ids = [names[k] for k in drawn(len(names) if clients is None else clients, len(names), self.path, rng)]
        train, test = ([lists[name][part] for name in ids] for part in PARTS)
        return Shares(train, test if any(map(len, test)) else None, ids)


def drawn(clients: int, there: int, where: str, rng: np.random.Generator) -> np.ndarray:
    """Which of the clients that are there take part: so many, ascending.

    Raises:
        ConfigError: There are fewer.
    """
    if clients > there:
        raise ConfigError(
            f"scenario.clients: {clients}, and {one_line(where)} holds {there}; leave it out (null) to have them all"
        )
    return np.sort(rng.choice(there, clients, replace=False))


def samples_of(ids: np.ndarray, owners: np.ndarray) -> list[np.ndarray]:
    """Each client's samples, ascending indices; none where it has none.

    Args:
        ids: The clients.
        owners: Whose each sample is, `(n,)`.
    """
    order = np.argsort(owners, kind="stable")
    first, last = (np.searchsorted(owners, ids, side, sorter=order) for side in ("left", "right"))
    return [order[i:j] for i, j in zip(first, last, strict=True)]


# --- A file of indices -----------------------------------------------------------------------------------------------


def read_lists(path: Path) -> dict[int | str, dict[str, np.ndarray]]:
    """Each client's `train` and `test` indices by the client's name, in the file's order; `test` may be empty.

    Raises:
        BadFile: It is not there, or not what `PredefinedSplit` says.
    """
    with told_of(path, "file of indices"):
        content = _read_arrays(path) if path.suffix == ".npz" else _read_mapping(path)
        lists = {name: _indices(name, own) for name, own in content.items()}
    if not lists:
        raise BadFile(path, "holds no client")
    return lists


def _read_mapping(path: Path) -> dict[int | str, Any]:
    content = read_json(path, MOST_BYTES)
    if isinstance(content, list):
        return dict(enumerate(content))
    if not isinstance(content, dict):
        raise ValueError(f"it holds {type(content).__name__}; it needs a list a client, in a list or by name")
    return content


def _read_arrays(path: Path) -> dict[int | str, Any]:
    lists: dict[int | str, Any] = {}
    for name, values in read_npz(path).items():
        owner, _, part = name.rpartition("/")
        if owner and part in PARTS:
            lists.setdefault(owner, {})[part] = values
        else:
            lists[name] = values
    return lists


def _indices(name: int | str, own: Any) -> dict[str, np.ndarray]:
    parts = own if isinstance(own, dict) else {"train": own}
    if not {"train"} <= parts.keys() <= {*PARTS}:
        raise ValueError(f"client {name!r} has {', '.join(map(repr, parts))}; it needs 'train', and may have 'test'")
    found = {part: _whole_numbers(f"client {name!r}", parts.get(part, [])) for part in PARTS}
    if not len(found["train"]):
        raise ValueError(f"client {name!r} has no training samples; take it out")
    return found


def _whole_numbers(who: str, values: Sequence[int] | np.ndarray) -> np.ndarray:
    if not isinstance(values, np.ndarray):
        if not isinstance(values, list) or any(type(value) is not int for value in values):
            raise ValueError(f"{who} has something else than whole numbers in a list")
        values = np.array(values, dtype=np.int64)
    if values.ndim != 1 or values.dtype.kind not in "iu":
        raise ValueError(f"{who} has {values.dtype} of shape {values.shape}; it needs a row of whole numbers")
    return np.sort(values.astype(np.int64))
