"""Who holds what, as numbers to draw: needs no torch and no matplotlib."""

from __future__ import annotations

import csv
from io import TextIOWrapper
from pathlib import Path

import numpy as np

from fl_lightning.files import open_file

MOST_BUBBLES = 200
"""Up to how many clients have a bubble a class."""


def binned(counts: np.ndarray) -> np.ndarray:
    """`(C, 200)` means over neighbours among clients sorted by the class they hold most of, and how much of it."""
    order = np.lexsort((-counts.max(axis=1), counts.argmax(axis=1)))
    return np.stack([part.mean(axis=0) for part in np.array_split(counts[order], MOST_BUBBLES)], axis=1)


def read_counts(path: Path, split: str = "train") -> np.ndarray:
    """What `partition.csv` holds of a split: `(clients, C)` samples.

    Raises:
        ValueError: It is no such file.
    """
    try:
        with open_file(path) as binary, TextIOWrapper(binary, encoding="utf-8", newline="") as file:
            header, *lines = [*csv.reader(file)] or [[]]
    except csv.Error as error:
        raise ValueError(str(error)) from error
    if header[-1:] == ["id"]:  # what the client is called in the data
        header, lines = header[:-1], [cells[:-1] for cells in lines]
    if header[:2] != ["client", "split"] or len(header) < 3:
        raise ValueError("it does not begin with client, split and a column a class")
    counts = [[int(cell) for cell in cells[2:]] for cells in lines if cells[1:2] == [split]]
    if not counts or any(len(row) != len(header) - 2 or min(row) < 0 for row in counts):
        raise ValueError(f"it does not hold a whole line for each client's {split} split")
    return np.array(counts)
