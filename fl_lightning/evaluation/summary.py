"""Summarise the metrics of a run: best and last values, rounds to a target accuracy (R_acc), and total bytes."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Literal

Row = dict[str, float]
"""One round's metrics by name."""

MODEL_COLUMNS = (
    "global/{}",
    "client/{}_mean",
    "client/{}_weighted",
    "trained_client/{}_mean",
    "trained_client/{}_weighted",
    "new_client/{}_mean",
    "new_client/{}_weighted",
    "personal_on_global/{}_mean",
)
"""Patterns of a metric's column names: for the global model, and for the clients' models."""

ARCHITECTURE_COLUMN = "architecture/{}/{}_mean"
"""Pattern of the column with the mean of a metric over the clients with an architecture."""

# Columns that hold a metric of models, not a loss or a time.
MODELS = re.compile(
    r"(?:new_|trained_)?client/(.+)_(?:weighted|worst_decile)|(?:new_|trained_)?client/(acc)_mean"
    r"|global/(.+)|personal_on_global/(.+)_mean|architecture/[^/]+/(.+)_mean"
)

EPSILON = re.compile(r"privacy/(record_)?epsilon(_prv)?")
"""Matches columns with the privacy that the rounds so far have cost, of clients and of records."""

LOSSES = ("global/loss", "client/loss_mean", "trained_client/loss_mean", "new_client/loss_mean", "client/train_loss")

# Endings of the names of metrics for which lower is better. Names that contradict torchmetrics' `higher_is_better` are
# refused when a run begins, so reading a run folder needs no torch. The success rate is that of an attack.
LOWER_BETTER = (
    r"(.*_)?(loss|loss_step|loss_epoch|error|mae|mse|rmse|eer|perplexity|distance|divergence"
    r"|deviance_score|ranked_probability_score|success_rate)"
)

# A column of `metrics.csv`: its metric, and what was computed of it over clients.
COLUMN = re.compile(r".*/(.+?)(_mean|_weighted|_worst_decile|_std)?")


def best_and_last(rows: Sequence[Row], name: str, lower: bool = False) -> dict[str, float]:
    """Return the best value of a metric and the best round, the last value, and the mean of the last ten values.

    The keys are `best`, `best_round`, `last` and `last10`. The result is empty if no round has the metric.

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
    """Return the lowest value of each recorded loss over all rounds of a run. The keys are `<loss>_best`."""
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
    """Return the names of the columns with a run's main metric, such as `global/acc` and `client/acc_mean`."""
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
    """Return the summary of a run: best and latest values of each metric, rounds to target accuracies, and total bytes.

    R_acc is the first round that reaches a target accuracy: of the global model or, without one, of the clients' mean.
    The summary also has the privacy that the rounds have cost (`privacy/epsilon`), if the last one has it.
    """
    summary: dict[str, float | int | None] = {"rounds": int(rows[-1]["round"]) if rows else 0}
    architectures = architectures_of(rows)
    for metric in model_metrics(rows):
        columns = [*MODEL_COLUMNS, *(ARCHITECTURE_COLUMN.format(name, "{}") for name in architectures)]
        for name in (column.format(metric) for column in columns):
            figures = best_and_last(rows, name, lower=is_lower_better(metric))
            summary |= {f"{name}_{what}": value for what, value in figures.items()}
    judged = "global/acc" if any("global/acc" in row for row in rows) else "client/acc_mean"
    for target in targets if "acc" in model_metrics(rows) or not model_metrics(rows) else ():
        summary[f"R_{target:g}"] = rounds_to(rows, target, judged)
    summary |= {name: value for name, value in (rows[-1] if rows else {}).items() if EPSILON.fullmatch(name)}
    for way in ("up", "down"):
        summary[f"comm/total_{way}_bytes"] = int(sum(row.get(f"comm/{way}_bytes", 0) for row in rows))
    return summary


def architectures_of(rows: Iterable[Row]) -> list[str]:
    """Return the names of the architectures for which a run with different networks has columns, sorted."""
    pattern = re.compile(ARCHITECTURE_COLUMN.format("([^/]+)", ".+"))
    found = (pattern.fullmatch(name) for name in {name for row in rows for name in row})
    return sorted({match[1] for match in found if match})


def label_of(name: str) -> str:
    """Return the label of a metric in tables and figures: `client acc, weighted` for `client/acc_weighted`.

    That of `architecture/CNN/acc_mean` is `client acc, CNN`.
    """
    whose, _, metric = name.partition("/")
    ending = ""
    if column := re.fullmatch(ARCHITECTURE_COLUMN.format("([^/]+)", "(.+)"), name):
        return f"client {column[2]}, {column[1]}"
    if column := re.fullmatch("(client|trained_client|new_client|personal_on_global)/(.+)_(mean|weighted)", name):
        metric, ending = column[2], ", weighted" if column[3] == "weighted" else ""
    return f"{whose.replace('_', ' ')} {metric}{ending}"


def human_bytes(count: float) -> str:
    """Format a number of bytes with a decimal unit, such as `1.5 MB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.3g} {unit}" if unit != "B" else f"{count:.0f} B"
        count /= 1000
    return f"{count:.3g} TB"
