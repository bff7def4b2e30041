"""Curves of runs: a metric by round, bytes or seconds, as mean and standard deviation over seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Literal, NamedTuple

import numpy as np

from fl_lightning.core.errors import ConfigError
from fl_lightning.evaluation.summary import Row

XAxis = Literal["round", "bytes", "seconds", "simulated"]
"""The x axis of a curve: rounds, or a total at the end of each round: bytes sent (up and down), seconds, or seconds on
the simulated `clock`."""

COLUMNS: dict[str, str] = {"bytes": "comm/total_bytes", "seconds": "time/round_s", "simulated": "time/simulated_s"}
"""The column of `metrics.csv` that an x axis needs."""


class Curve(NamedTuple):
    """Mean curve of a metric over several runs. The x axis is rounds, communicated bytes or seconds.

    Attributes:
        x: The x value of each point, the mean over the runs.
        mean: The mean of the metric over the runs.
        std: The sample standard deviation (n - 1) of the metric; None for a single run.
        rounds: Number of rounds of the shortest and of the longest run.
    """

    x: np.ndarray
    mean: np.ndarray
    std: np.ndarray | None
    rounds: tuple[int, int]


def x_values(rows: Sequence[Row], x: XAxis) -> list[float]:
    """Return the round number, the total bytes or the total seconds at the end of each round; NaN if not recorded."""
    if x in ("seconds", "simulated"):
        return list(accumulate(row.get(COLUMNS[x], math.nan) for row in rows))
    return [row.get(COLUMNS.get(x, x), math.nan) for row in rows]


def scale(values: np.ndarray, metric: str, percent: bool) -> np.ndarray:
    """Return a metric's values, in percent if asked, with NaN in place of infinity.

    Raises:
        ConfigError: The values are to be percentages, but not fractions.
    """
    values = np.where(np.isfinite(values), values, math.nan)
    if percent and (above := values[np.abs(values) > 1]).size:
        raise ConfigError(f"percent: {metric} is no fraction: one value is {above[0]:g}. Leave it out.")
    return 100 * values if percent else values


def mean_curve(runs: Sequence[Sequence[Row]], metric: str, x: XAxis = "round", percent: bool = False) -> Curve | None:
    """Return the mean and standard deviation of a metric over several runs, as a curve.

    The curve has only the rounds in which all runs have a value. Without such rounds, the result is None.

    Args:
        runs: The rounds of each run. Runs without the metric are ignored.
        metric: The metric.
        x: The x axis.
        percent: Multiply the metric by 100.

    Raises:
        ConfigError: A run has no values for the x axis, or the metric is no fraction.
    """
    runs = [rows for rows in runs if any(metric in row for row in rows)]
    lengths = [len(rows) for rows in runs]
    rounds = [i for i in range(min(lengths, default=0)) if all(metric in rows[i] for rows in runs)]
    if not rounds:
        return None
    places = np.array([x_values(rows, x) for rows in (rows[: rounds[-1] + 1] for rows in runs)])[:, rounds]
    if not np.isfinite(places).all():
        raise ConfigError(f"x: {x} were not recorded, {COLUMNS.get(x, x)} is missing in metrics.csv. Use x round.")
    values = scale(np.array([[rows[i][metric] for i in rounds] for rows in runs], dtype=float), metric, percent)
    std = values.std(axis=0, ddof=1) if len(runs) > 1 else None
    return Curve(places.mean(axis=0), values.mean(axis=0), std, (min(lengths), max(lengths)))
