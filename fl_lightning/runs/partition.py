"""`partition.csv`: the number of samples of each client and class."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fl_lightning.core.errors import one_line
from fl_lightning.core.files import open_file, write_atomically

if TYPE_CHECKING:
    from fl_lightning.data import FederatedData


MAX_COLUMNS = 200
"""Maximum number of clients that a figure of the partition shows individually."""


def group_clients(counts: np.ndarray) -> np.ndarray:
    """Return the mean number of samples of each class in 200 groups of similar clients, `(C, 200)`.

    Clients are sorted by their largest class and its size, and cut into groups.
    """
    order = np.lexsort((-counts.max(axis=1), counts.argmax(axis=1)))
    return np.stack([part.mean(axis=0) for part in np.array_split(counts[order], MAX_COLUMNS)], axis=1)


def write_counts(path: Path, data: FederatedData) -> None:
    """Write `partition.csv`: for each split and client a row with the number of samples per class, or in total."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    names = [f"class_{j}" for j in range(data.data.num_classes)] if data.objective.classes else ["samples"]
    ids = [[]] * len(data.shards) if data.client_ids is None else [[one_line(str(name))] for name in data.client_ids]
    writer.writerow(["client", "split", *names, *["id"] * (data.client_ids is not None)])
    for split in ("train", "test"):
        for client, (row, name) in enumerate(zip(data.class_counts(split).tolist(), ids, strict=True)):
            writer.writerow([client, split, *row, *name])
    write_atomically(path, text.getvalue())


def read_counts(path: Path, split: str = "train") -> np.ndarray:
    """Read `partition.csv`, and return the number of samples of each client and class in one split, `(clients, C)`.

    Raises:
        ValueError: The file has another format.
    """
    try:
        with open_file(path) as binary, io.TextIOWrapper(binary, encoding="utf-8", newline="") as file:
            header, *lines = [*csv.reader(file)] or [[]]
    except csv.Error as error:
        raise ValueError(str(error)) from error
    if header[-1:] == ["id"]:  # the client's name in the data
        header, lines = header[:-1], [cells[:-1] for cells in lines]
    if header[:2] != ["client", "split"] or len(header) < 3:
        raise ValueError("it does not begin with client, split and a column per class")
    counts = [[int(cell) for cell in cells[2:]] for cells in lines if cells[1:2] == [split]]
    if not counts or any(len(row) != len(header) - 2 or min(row) < 0 for row in counts):
        raise ValueError(f"it has no complete line for the {split} split of each client")
    return np.array(counts)
