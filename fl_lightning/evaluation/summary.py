"""Read a run's metrics by round, and summarise them: best and last values, rounds to an accuracy (R_acc), bytes."""

from __future__ import annotations

import csv
import io
import math
import re
from array import array
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import BinaryIO, Literal

from fl_lightning.core.files import open_file

Row = dict[str, float]
"""One round's metrics by name."""

MODEL_COLUMNS = (
    "global/{}",
    "client/{}_mean",
    "client/{}_weighted",
    "new_client/{}_mean",
    "new_client/{}_weighted",
    "personal_on_global/{}_mean",
)
"""Patterns of a metric's column names: for the global model, and for the clients' models."""

# Columns that hold a metric of models, not a loss or a time.
MODELS = re.compile(
    r"(?:new_)?client/(.+)_(?:weighted|worst_decile)|(?:new_)?client/(acc)_mean|global/(.+)|personal_on_global/(.+)_mean"
)

CLIENT_NAME = "name"
"""Column of `clients.csv` with the client's name. All other columns are numbers."""

LOSSES = ("global/loss", "client/loss_mean", "new_client/loss_mean", "client/train_loss")

# Endings of the names of metrics for which lower is better. Names that contradict torchmetrics' `higher_is_better` are
# refused when a run begins, so reading a run folder needs no torch.
LOWER_BETTER = r"(.*_)?(loss|loss_step|loss_epoch|error|mae|mse|rmse|eer|distance|divergence|ranked_probability_score)"

# A column of `metrics.csv`: its metric, and what was computed of it over clients.
COLUMN = re.compile(r".*/(.+?)(_mean|_weighted|_worst_decile|_std)?")

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
    """Return the columns of a `clients.csv` as arrays, NaN for blank cells, in a tenth of the memory of `read_rows`.

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


def best_and_last(rows: Sequence[Row], name: str, lower: bool = False) -> dict[str, float]:
    """Return `best`, `best_round`, `last` and `last10` of a metric over a run's rounds; empty if no round has it.

    `last10` is the mean over the last ten rounds that have the metric, since with partial participation the value of a
    single round is noisy.

    Args:
        rows: The rounds.
        name: The metric.
        lower: Whether lower is better.
    """
    series = [(row["round"], row[name]) for row in rows if name in row]
    if not series:
        return {}
    sign = -1 if lower else 1
    best_round, best = max(series, key=lambda point: (not math.isnan(point[1]), sign * point[1], -point[0]))
    last_ten = fmean(value for _, value in series[-10:])
    return {"last": series[-1][1], "last10": last_ten, "best": best, "best_round": int(best_round)}


def sum_of(rows: Iterable[Row], name: str) -> float:
    """Return the sum of a metric over the rounds that have it."""
    return sum(row.get(name, 0.0) for row in rows)


def lowest_losses(rows: Sequence[Row]) -> dict[str, float]:
    """Return the lowest value of each recorded loss over a run's rounds, as `<loss>_best`."""
    found = {name: best_and_last(rows, name, lower=True) for name in LOSSES}
    return {f"{name}_best": figures["best"] for name, figures in found.items() if figures}


def is_lower_better(name: str) -> bool:
    """Return whether lower values of a metric, or of a column of `metrics.csv`, are better.

    Example:
        >>> is_lower_better("client/mae_worst_decile"), is_lower_better("r2_score")
        (True, False)
    """
    column = COLUMN.fullmatch(name)
    metric, figure = column.groups() if column else (name, None)
    return figure == "_std" or name.startswith("client/train_") or re.fullmatch(LOWER_BETTER, metric) is not None


def better_goal(name: str) -> Literal["minimize", "maximize"] | None:
    """Return the goal, `minimize` or `maximize`, for a metric of `metrics.csv` or `summary.json`; None if unknown."""
    column = re.sub(r"_(best|last|last10)$", "", name)
    if is_lower_better(column) or re.match("R_[0-9]", name):
        return "minimize"
    return "maximize" if MODELS.fullmatch(column) else None


def model_metrics(rows: Sequence[Row]) -> list[str]:
    """Return the names of the evaluation metrics in a run's rows, without losses; accuracy (`acc`) comes first."""
    names = dict.fromkeys(name for row in rows for name in row)
    found = [MODELS.fullmatch(name) for name in names]
    metrics = dict.fromkeys(next(filter(None, match.groups())) for match in found if match)
    return sorted(metrics.keys() - {"loss", "acc_interval"}, key=lambda name: (name != "acc", name))


def main_metrics(rows: Sequence[Row]) -> list[str]:
    """Return the columns of a run's main metric, such as accuracy: of the global model, and the mean over clients."""
    recorded = {name for row in rows for name in row}
    columns = [form.format(metric) for metric in model_metrics(rows)[:1] for form in MODEL_COLUMNS[:2]]
    return [name for name in columns if name in recorded]


def rounds_to(rows: Sequence[Row], target: float, name: str = "global/acc", lower: bool = False) -> int | None:
    """Return the first round in which a metric reached a target (R_acc); None without such a round.

    A value reaches the target if it is at least the target or, with `lower`, at most the target.
    """
    values = ((row["round"], row.get(name, math.nan)) for row in rows)
    return next((int(round) for round, value in values if (value <= target if lower else value >= target)), None)


def summarize(rows: Sequence[Row], targets: Sequence[float]) -> dict[str, float | int | None]:
    """Return the summary of a run: best, last and mean of the last ten values of each metric, R_acc, and total bytes.

    R_acc is the first round that reaches a target accuracy: of the global model or, without one, of the clients' mean.
    """
    summary: dict[str, float | int | None] = {"rounds": int(rows[-1]["round"]) if rows else 0}
    for metric in model_metrics(rows):
        for name in (column.format(metric) for column in MODEL_COLUMNS):
            figures = best_and_last(rows, name, lower=is_lower_better(metric))
            summary |= {f"{name}_{what}": value for what, value in figures.items()}
    judged = "global/acc" if any("global/acc" in row for row in rows) else "client/acc_mean"
    for target in targets if "acc" in model_metrics(rows) or not model_metrics(rows) else ():
        summary[f"R_{target:g}"] = rounds_to(rows, target, judged)
    for way in ("up", "down"):
        summary[f"comm/total_{way}_bytes"] = int(sum(row.get(f"comm/{way}_bytes", 0) for row in rows))
    return summary


def label_of(name: str) -> str:
    """Return the label of a metric in tables and figures: `client acc, weighted` for `client/acc_weighted`."""
    whose, _, metric = name.partition("/")
    metric = metric.removesuffix("_mean")
    if weighted := metric.endswith("_weighted"):
        metric = metric.removesuffix("_weighted")
    return f"{whose.replace('_', ' ')} {metric}{', weighted' if weighted else ''}"


def human_bytes(count: float) -> str:
    """Format a number of bytes with a decimal unit, such as `1.5 MB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.3g} {unit}" if unit != "B" else f"{count:.0f} B"
        count /= 1000
    return f"{count:.3g} TB"


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
