"""`partition.csv`: the number of samples of each client and class."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fl_lightning.core.errors import one_line
from fl_lightning.core.files import open_file, write_atomically
from fl_lightning.core.names import Names, labels, shown_names

if TYPE_CHECKING:
    from fl_lightning.data import FederatedData


ARCHITECTURE = "architecture"
"""Column with the name of a client's architecture, for runs whose clients have different networks."""

MAX_COLUMNS = 200
"""Maximum number of clients that a figure of the partition shows individually."""


def group_clients(counts: np.ndarray) -> np.ndarray:
    """Put similar clients into 200 groups, and return each group's mean number of samples per class, `(classes, 200)`.

    Figures show the groups if there are too many clients to show each of them. Clients are sorted by their largest
    class and its size, and cut into groups.
    """
    order = np.lexsort((-counts.max(axis=1), counts.argmax(axis=1)))
    return np.stack([part.mean(axis=0) for part in np.array_split(counts[order], MAX_COLUMNS)], axis=1)


class PartitionCounts(NamedTuple):
    """The content of `partition.csv`: sample counts, and the names of clients and classes.

    Attributes:
        counts: Number of samples of each client and class in one split, `(clients, C)`.
        names: The names of the clients and classes.
    """

    counts: np.ndarray
    names: Names


def write_counts(path: Path, data: FederatedData, architectures: Sequence[str] = ()) -> None:
    """Write `partition.csv`, which has a row for each split and client, with the number of samples of each class.

    Without classes, and for data on the clients' machines, a row has only the total number of samples.

    The column of a class is `class_<name>`, or `class_<index>` without names. The last column, `name`, contains the
    clients' names, if they have any. Names are not shortened. The splits of clients that are held out of the training
    are `held_out_train` and `held_out_test`.

    Args:
        path: The file.
        data: The data.
        architectures: The name of each client's architecture, for a column `architecture` before `name`.
    """
    classes = labels(data.data.class_names or (), range(data.data.num_classes))
    has_classes = data.objective.classes and not data.is_remote  # remote clients report only their number of samples
    columns = [f"class_{one_line(name)}" for name in classes] if has_classes else ["samples"]
    ids = data.client_ids if data.names.clients else None
    clients = len(data.shards) + len(data.held_out)
    names = [[]] * clients if ids is None else [[one_line(str(name))] for name in ids]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    further = [ARCHITECTURE] * bool(architectures) + ["name"] * (ids is not None)
    names = [[*architectures[client : client + 1], *name] for client, name in enumerate(names)]
    writer.writerow(["client", "split", *columns, *further])
    for held_out in [False, *[True] * bool(data.held_out)]:
        for split in ("train", "test"):
            first, label = (len(data.shards), f"held_out_{split}") if held_out else (0, split)
            for client, row in enumerate(data.class_counts(split, held_out).tolist(), first):
                writer.writerow([client, label, *row, *names[client]])
    write_atomically(path, text.getvalue())


def read_counts(path: Path, split: str = "train") -> PartitionCounts:
    """Read the sample counts of one split, and the names of clients and classes, from `partition.csv`.

    Raises:
        ValueError: The file has another format.
    """
    header, rows = _read_split(path, split)
    last = len(header) - (header[-1] == "name")
    end = last - (header[last - 1] == ARCHITECTURE)
    counts = [[int(cell) for cell in cells[2:end]] for cells in rows]
    if end < 3 or min(map(min, counts)) < 0:
        raise ValueError("it has no column per class, or a negative number")
    clients = [cells[last] for cells in rows] if last < len(header) else ()
    classes = [column.removeprefix("class_") for column in header[2:end] if column.startswith("class_")]
    return PartitionCounts(np.array(counts), Names(shown_names(clients), shown_names(classes)))


def _read_split(path: Path, split: str) -> tuple[list[str], list[list[str]]]:
    """Return the header of a `partition.csv` and the rows of a split, one per client."""
    try:
        with open_file(path) as binary, io.TextIOWrapper(binary, encoding="utf-8", newline="") as file:
            header, *lines = [*csv.reader(file)] or [[]]
    except csv.Error as error:
        raise ValueError(str(error)) from error
    if header[:2] != ["client", "split"] or len(header) < 3:
        raise ValueError("it does not begin with client, split and a column per class")
    rows = [cells for cells in lines if cells[1:2] == [split]]
    if not rows or any(len(cells) != len(header) for cells in rows):
        raise ValueError(f"it has no complete line for the {split} split of each client")
    return header, rows


def read_names(run_dir: Path) -> Names:
    """Return the names of the clients and classes of a run; no names if its `partition.csv` cannot be read."""
    with suppress(OSError, ValueError):
        return read_counts(run_dir / "partition.csv").names
    return Names()


def read_architectures(run_dir: Path) -> Sequence[str]:
    """Return the name of each client's architecture, for a run whose clients have different networks; otherwise `()`.

    It is also empty if the run's `partition.csv` cannot be read.
    """
    with suppress(OSError, ValueError):
        header, rows = _read_split(run_dir / "partition.csv", "train")
        return [cells[header.index(ARCHITECTURE)] for cells in rows] if ARCHITECTURE in header else ()
    return ()
