"""A run's figures by round: how they are read back, and what is told of them all: best, last, R_acc, bytes."""

from __future__ import annotations

import csv
import math
import re
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path

Row = dict[str, float]
"""One round's metrics by name."""

_WHOLE = re.compile(r"-?[0-9]{1,300}").fullmatch  # what is longer is no float either


def read_rows(path: Path) -> Iterator[Row]:
    """The rounds of a `metrics.csv`, or the lines of a `clients.csv`; a line that a kill cut short comes back empty.

    Raises:
        ValueError: It is no CSV file, or names a column twice.
    """
    lines = _lines(path)
    names = next(lines, [])
    for cells in lines:
        yield _parse(names, cells)


def read_columns(path: Path) -> dict[str, array[float]]:
    """The columns of a `clients.csv`, NaN where they are blank; less than a tenth of the memory that its rows take.

    Raises:
        ValueError: It is no CSV file of numbers, names a column twice, or has a line that lacks a cell.
    """
    lines = _lines(path)
    columns = {name: array("d") for name in next(lines, [])}
    for number, cells in enumerate(lines, 2):
        if len(cells) != len(columns):
            raise ValueError(f"line {number} has {len(cells)} cells, its header {len(columns)}")
        for column, text in zip(columns.values(), cells, strict=True):
            column.append(float(text) if text else math.nan)
    return columns


def best_and_last(rows: Sequence[Row], name: str, lower: bool = False) -> dict[str, float]:
    """`best`, `best_round` and `last` of one metric over the rounds that have it; empty if none has.

    Args:
        rows: The rounds.
        name: The metric.
        lower: Whether the lowest is the best, as of a loss.
    """
    series = [(row["round"], row[name]) for row in rows if name in row]
    if not series:
        return {}
    sign = -1 if lower else 1
    best_round, best = max(series, key=lambda point: (not math.isnan(point[1]), sign * point[1], -point[0]))
    return {"last": series[-1][1], "best": best, "best_round": int(best_round)}


def rounds_to(rows: Sequence[Row], target: float, name: str = "global/acc", lower: bool = False) -> int | None:
    """R_acc: the first round in which a metric reached a target, or None; with `lower` from above."""
    values = ((row["round"], row.get(name, math.nan)) for row in rows)
    return next((int(round) for round, value in values if (value <= target if lower else value >= target)), None)


def summarize(rows: Sequence[Row], targets: Sequence[float]) -> dict[str, float | int | None]:
    """A run's figures: best and last accuracies, R_acc for each target, bytes in all.

    R_acc is the global model's or, for methods without one, that of the clients' mean.
    """
    summary: dict[str, float | int | None] = {"rounds": int(rows[-1]["round"]) if rows else 0}
    for name in ("global/acc", "client/acc_mean", "client/acc_weighted", "personal_on_global/acc_mean"):
        summary |= {f"{name}_{what}": value for what, value in best_and_last(rows, name).items()}
    judged = "global/acc" if any("global/acc" in row for row in rows) else "client/acc_mean"
    for target in targets:
        summary[f"R_{target:g}"] = rounds_to(rows, target, judged)
    for way in ("up", "down"):
        summary[f"comm/total_{way}_bytes"] = int(sum(row.get(f"comm/{way}_bytes", 0) for row in rows))
    return summary


def human_bytes(count: float) -> str:
    """A byte count with a decimal unit."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.3g} {unit}" if unit != "B" else f"{count:.0f} B"
        count /= 1000
    return f"{count:.3g} TB"


def _lines(path: Path) -> Iterator[list[str]]:
    """A CSV file's lines, its header first; without one that a kill cut short."""
    with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
        lines = csv.reader(line for line in file if line.endswith("\n"))
        try:
            names = next(lines, [])
            if len(set(names)) < len(names):
                raise ValueError("it names a column twice")
            yield names
            yield from lines
        except csv.Error as error:
            raise ValueError(f"line {lines.line_num}: {error}") from error


def _parse(names: Sequence[str], cells: Sequence[str]) -> Row:
    """A row of numbers; one that a kill cut short comes back empty."""
    try:
        return {name: _number(text) for name, text in zip(names, cells, strict=True) if text}
    except ValueError:
        return {}


def _number(text: str) -> float:
    return int(text) if _WHOLE(text) else float(text)
