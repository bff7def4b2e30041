"""Read `metrics.csv` and `clients.csv` as numbers, even if a killed run has left a line incomplete."""

from __future__ import annotations

import csv
import io
import math
import re
from array import array
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from fl_lightning.core.files import open_file
from fl_lightning.evaluation.summary import Row

CLIENT_NAME = "name"
"""Column of `clients.csv` with the client's name. All other columns are numbers."""

_WHOLE = re.compile(r"-?[0-9]{1,300}").fullmatch  # longer numbers are read as floats


def read_rows(path: Path) -> Iterator[Row]:
    """Yield the rows of a `metrics.csv` or `clients.csv` as numbers by column. An incomplete line is an empty row.

    The clients' names in a `clients.csv` are left out, here and in `parse_rows` and `read_columns`.

    Raises:
        ValueError: The file is not a CSV file, or has two columns of one name.
    """
    with open_file(path) as file, _text(file) as lines:
        yield from _rows(lines)


def parse_rows(content: bytes) -> list[Row]:
    """Return the rows of a `metrics.csv` or `clients.csv`, given the bytes of its header and of some or all lines.

    Raises:
        ValueError: The content is not CSV, or has two columns of one name.
    """
    return list(_rows(io.StringIO(content.decode(errors="replace"), newline="\n")))


def read_columns(path: Path) -> dict[str, array[float]]:
    """Return the columns of a `clients.csv` as arrays, with NaN for blank cells.

    This takes a tenth of the memory of `read_rows`.

    Raises:
        ValueError: The file is not a CSV file of numbers, has two columns of one name, or a line of another length.
    """
    with open_file(path) as file, _text(file) as text:
        lines = _lines(text)
        header = next(lines, [])
        columns = {name: array("d") for name in header if name != CLIENT_NAME}
        for number, cells in enumerate(lines, 2):
            if len(cells) != len(header):
                raise ValueError(f"line {number} has {len(cells)} cells, its header {len(header)}")
            if len(columns) < len(header):
                del cells[header.index(CLIENT_NAME)]
            for column, cell in zip(columns.values(), cells, strict=True):
                column.append(float(cell) if cell else math.nan)
    return columns


def _text(file: BinaryIO) -> io.TextIOWrapper:
    return io.TextIOWrapper(file, encoding="utf-8", errors="replace", newline="\n")


def _rows(file: Iterable[str]) -> Iterator[Row]:
    lines = _lines(file)
    names = next(lines, [])
    for cells in lines:
        yield _parse(names, cells)


def _lines(file: Iterable[str]) -> Iterator[list[str]]:
    """Yield the cells of each line of a CSV file, header first. An incomplete last line is left out."""
    lines = csv.reader(line for line in file if line.endswith("\n"))
    try:
        names = next(lines, [])
        if len(set(names)) < len(names):
            raise ValueError("two columns have the same name")
        yield names
        yield from lines
    except csv.Error as error:
        raise ValueError(f"line {lines.line_num}: {error}") from error


def _parse(names: Sequence[str], cells: Sequence[str]) -> Row:
    """Convert the cells of a CSV line to numbers by column. A line with missing or invalid cells is an empty row."""
    try:
        return {name: _number(text) for name, text in zip(names, cells, strict=True) if text and name != CLIENT_NAME}
    except ValueError:
        return {}


def _number(text: str) -> float:
    return int(text) if _WHOLE(text) else float(text)
