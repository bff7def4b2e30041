"""Natural and predefined partitions: client ids in the data, or a file of index lists, assign samples to clients."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fl_lightning.core.arguments import number
from fl_lightning.core.errors import ConfigError, one_line
from fl_lightning.data.assignment import indices_by_class
from fl_lightning.data.files import BadFile, naming_file, read_json, read_npz
from fl_lightning.data.partitions import ClientSplits, Partition

if TYPE_CHECKING:
    from fl_lightning.data.loaded_data import LoadedData

KINDS = (".npz", ".json")
PARTS = ("train", "test")


class ByClient(Partition):
    """Split by the client ids in the data: one client per writer, patient or site.

    The dataset must have client ids (`LoadedData.client_train`, and `client_test` for own test samples). Client k is
    the k-th id in ascending order; text is sorted as text, so `"10"` comes before `"9"`.

    Args:
        min_samples: Minimum number of training samples; clients with fewer are left out.

    Raises:
        ConfigError: `min_samples` is below 1.
    """

    min_samples: int = number(1, "[1, inf)")

    def split_dataset(
        self, data: LoadedData, labels: np.ndarray, clients: int | None, rng: np.random.Generator
    ) -> ClientSplits:
        """Split the dataset by the client ids of its samples.

        `clients` is the number of clients to select at random; None selects all clients in the data. Clients with fewer
        than `min_samples` training samples are left out.
        """
        if data.client_train is None:
            raise ConfigError(f"{self.error_prefix}: the dataset has no client ids (client_train). Use another one")
        known, owner = np.unique(data.client_train, return_inverse=True)
        sizes = np.bincount(owner)
        available = int((sizes >= self.min_samples).sum())
        if not available:
            raise ConfigError(
                f"scenario.partition.min_samples: {self.min_samples}, but no client in the data has more than "
                f"{sizes.max()} training samples. Lower it"
            )
        parts = self.split(owner, available if clients is None else clients, rng)
        ids = known[[owner[part[0]] for part in parts]]
        tests = None if data.client_test is None else indices_by_owner(ids, data.client_test)
        return ClientSplits(parts, tests if tests and any(map(len, tests)) else None, ids.tolist())

    def split(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        """Select clients at random, and return the sample indices of each selected client.

        `clients` is the number of clients to select. `labels` is the client of each sample, not its class.
        """
        parts = [part for part in indices_by_class(labels) if len(part) >= self.min_samples]
        return [parts[k] for k in draw_clients(clients, len(parts), "the data", rng)]


class PredefinedSplit(Partition):
    """Split by the index lists in an `.npz` or `.json` file: a published split, or your own.

    Client k is the k-th list. Indices count the dataset's training samples from 0. Each may be in one list at most, and
    samples in no list are unused. A client's optional test list counts the test samples from 0.

    Args:
        path: An `.npz` file with one array per client, with any names, or with `NAME/train` and `NAME/test`; or a
            `.json` file with one list per client, or `{"train": [...], "test": [...]}`, in a list or a mapping by name.

    Raises:
        ConfigError: `path` ends in neither `.npz` nor `.json`.
    """

    path: str

    needs_whole_dataset = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if Path(self.path).suffix not in KINDS:
            raise ConfigError(f"scenario.partition.path: {one_line(self.path)} is neither .npz nor .json")

    @property
    def error_prefix(self) -> str:
        """Return the beginning of error messages about the partition: the config key and the file."""
        return f"scenario.partition.path: {one_line(self.path)}"

    def split_dataset(
        self, data: LoadedData, labels: np.ndarray, clients: int | None, rng: np.random.Generator
    ) -> ClientSplits:
        """Split the dataset by the index lists in the file.

        `clients` is the number of clients to select at random; None selects all clients in the file.
        """
        return self._draw(clients, rng)

    def split(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        """Select clients in the file at random, and return the training indices of each selected client.

        `clients` is the number of clients to select. `labels` is not used.
        """
        return self._draw(clients, rng).train

    def _draw(self, clients: int | None, rng: np.random.Generator) -> ClientSplits:
        try:
            lists = read_index_lists(Path(self.path))
        except BadFile as error:
            raise ConfigError(f"scenario.partition.path: {error}") from error
        names = list(lists)
        ids = [names[k] for k in draw_clients(len(names) if clients is None else clients, len(names), self.path, rng)]
        train, test = ([lists[name][part] for name in ids] for part in PARTS)
        return ClientSplits(train, test if any(map(len, test)) else None, ids)


def draw_clients(clients: int, available: int, source: str, rng: np.random.Generator) -> np.ndarray:
    """Draw different client indices at random, and return them in ascending order.

    Args:
        clients: Number of clients to draw.
        available: Number of clients to draw from.
        source: Where the clients come from, for error messages.
        rng: The random generator.
    """
    if clients > available:
        what = f"{clients}, but {one_line(source)} has {available} clients"
        raise ConfigError(f"scenario.clients: {what}. Leave it out (null) to use all")
    return np.sort(rng.choice(available, clients, replace=False))


def indices_by_owner(ids: np.ndarray, owners: np.ndarray) -> list[np.ndarray]:
    """Return the ascending sample indices of each client in `ids`, given the client of each sample (`owners`)."""
    order = np.argsort(owners, kind="stable")
    first, last = (np.searchsorted(owners, ids, side, sorter=order) for side in ("left", "right"))
    return [order[i:j] for i, j in zip(first, last, strict=True)]


# --- Files of index lists --------------------------------------------------------------------------------------------


def read_index_lists(path: Path) -> dict[int | str, dict[str, np.ndarray]]:
    """Read the lists of `train` and `test` sample indices of each client from a file.

    The keys are the clients' names in the order of the file, or positions in a JSON list. `test` may be empty.
    """
    with naming_file(path, "file of indices"):
        content = _read_arrays(path) if path.suffix == ".npz" else _read_mapping(path)
        lists = {name: _indices(name, value) for name, value in content.items()}
    if not lists:
        raise BadFile(path, "has no clients")
    return lists


def _read_mapping(path: Path) -> dict[int | str, Any]:
    content = read_json(path)
    if isinstance(content, list):
        return dict(enumerate(content))
    if not isinstance(content, dict):
        fix = "It needs one list per client, in a list or in a mapping by name"
        raise ValueError(f"it holds {type(content).__name__}. {fix}")
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


def _indices(name: int | str, value: Any) -> dict[str, np.ndarray]:
    parts = value if isinstance(value, dict) else {"train": value}
    if not {"train"} <= parts.keys() <= {*PARTS}:
        raise ValueError(f"client {name!r} has {', '.join(map(repr, parts))}. It needs 'train', and may have 'test'")
    indices = {part: _integers(f"client {name!r}", parts.get(part, [])) for part in PARTS}
    if not len(indices["train"]):
        raise ValueError(f"client {name!r} has no training samples. Remove it")
    return indices


def _integers(who: str, values: Sequence[int] | np.ndarray) -> np.ndarray:
    if not isinstance(values, np.ndarray):
        if not isinstance(values, list) or any(type(value) is not int for value in values):
            raise ValueError(f"{who} is not a list of integers")
        values = np.array(values, dtype=np.int64)
    if values.ndim != 1 or values.dtype.kind not in "iu":
        what = f"{values.dtype} of shape {values.shape}"
        raise ValueError(f"{who} has {what}. It needs a one-dimensional array of integers")
    return np.sort(values.astype(np.int64))
