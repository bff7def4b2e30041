"""A run's figures by round: how they are read back, and what is told of them all: best, last, R_acc, bytes."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Sequence
from pathlib import Path

Row = dict[str, float]
"""One round's metrics by name."""


def read_rows(path: Path) -> list[Row]:
    """The rounds of a `metrics.csv`, or the lines of a `clients.csv`; a line that a kill cut short comes back empty."""
    return parse_rows(path.read_bytes())


def parse_rows(content: bytes) -> list[Row]:
    """The rows of such a file, or of part of one with the header before it; half a line at the end is left out.

    Raises:
        ValueError: It is no CSV.
    """
    whole = content[: content.rfind(b"\n") + 1].decode(errors="replace")
    try:
        return [_parse(row) for row in csv.DictReader(io.StringIO(whole))]
    except csv.Error as error:
        raise ValueError(str(error)) from error


def best_and_last(rows: Sequence[Row], name: str) -> dict[str, float]:
    """`best`, `best_round` and `last` of one metric over the rounds that have it; empty if none has."""
    series = [(row["round"], row[name]) for row in rows if name in row]
    if not series:
        return {}
    best_round, best = max(series, key=lambda point: (point[1], -point[0]))
    return {"last": series[-1][1], "best": best, "best_round": int(best_round)}


def rounds_to(rows: Sequence[Row], target: float, name: str = "global/acc") -> int | None:
    """R_acc: the first round in which a metric reached a target, or None."""
    return next((int(row["round"]) for row in rows if row.get(name, -math.inf) >= target), None)


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


def _parse(row: dict[str, str]) -> Row:
    """A row of numbers; one that a kill cut short comes back empty."""
    try:
        return {name: _number(text) for name, text in row.items() if text}
    except (TypeError, ValueError):
        return {}


def _number(text: str) -> float:
    return int(text) if re.fullmatch(r"-?\d+", text) else float(text)
