"""Labels of axes in a paper's words, such as `Test accuracy (%)` for `global/acc`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from fl_lightning.evaluation.summary import label_of

METRICS = {"acc": "accuracy", "mae": "mean absolute error", "mse": "mean squared error", "f1_score": "F1 score"}
"""The words for metrics. Others are written as their names, with spaces instead of underscores."""

COLUMNS = {
    "client/train_loss": "Training loss",
    "client/train_ce": "Training cross-entropy",
    "comm/up_bytes": "Bytes sent to the server per round",
    "comm/down_bytes": "Bytes sent to the clients per round",
    "comm/total_bytes": "Total communication (bytes)",
    "time/round_s": "Wall-clock time per round (s)",
    "time/fit_s": "Training time per round (s)",
    "time/processor_s": "Processor time per round (s)",
    "time/simulated_s": "Simulated time per round (s)",
}
"""The labels of columns that are not metrics of evaluated models."""

FIGURES = {"_mean": "{} (client mean)", "_weighted": "{} (weighted client mean)", "_std": "{} (std over clients)"}
FIGURES |= {"_worst_decile": "{} (worst 10% of clients)", "": "Client {}"}
"""The labels of what was computed of a metric over clients, by the ending of the column."""

MODELS = {"client": "", "trained_client": ", trained models", "new_client": ", new clients"}
MODELS |= {"personal_on_global": ", personal models on the global test set"}
"""The words after the label of a metric of clients, by the first part of the column."""

CLIENT_COLUMN = re.compile(rf"({'|'.join(MODELS)})/(.+?)(_mean|_weighted|_std|_worst_decile|)")


def axis_label(metric: str, percent: bool = False, split: str = "test") -> str:
    """Return the label of an axis that shows a metric.

    Args:
        metric: The column of `metrics.csv`; `client/<metric>` for a column of `clients.csv`.
        percent: Whether the values are in percent.
        split: The samples on which models are evaluated: `test` or `validation`.

    Example:
        >>> axis_label("global/acc", percent=True), axis_label("client/acc_worst_decile")
        ('Test accuracy (%)', 'Test accuracy (worst 10% of clients)')
    """
    return f"{_words(metric, split)} (%)" if percent else _words(metric, split)


def _words(metric: str, split: str) -> str:
    whose, _, name = metric.partition("/")
    if metric in COLUMNS:
        return COLUMNS[metric]
    if whose == "global":
        return _capital(f"{split} {_metric_words(name)}")
    if found := CLIENT_COLUMN.fullmatch(metric):
        words = f"{split} {_metric_words(found[2])}"
        form = FIGURES[found[3]]
        return form.format(words if form.startswith("Client") else _capital(words)) + MODELS[found[1]]
    return _capital(label_of(metric).replace("_", " "))


def _metric_words(name: str) -> str:
    return METRICS.get(name, name.replace("_", " "))


def _capital(words: str) -> str:
    return words[:1].upper() + words[1:]


def common_label(metrics: Sequence[str], percent: bool, split: str = "test") -> str:
    """Return the label of an axis that shows several metrics: `Test accuracy` for those of the server and the clients.

    Empty if the metrics have nothing in common.
    """
    if len(metrics) == 1:
        return axis_label(metrics[0], percent, split)
    names = {re.sub(r"(_mean|_weighted)$", "", name.partition("/")[2]) for name in metrics}
    if len(names) == 1 and {name.partition("/")[0] for name in metrics} <= {"global", *MODELS}:
        return axis_label(f"global/{names.pop()}", percent, split)
    return "Percent" if percent else ""


def evaluated_split(settings: Mapping[str, Any]) -> str:
    """Return the samples on which the models of a run are evaluated, given its settings: `test` or `validation`."""
    return "validation" if settings.get("scenario.validation_share") else "test"
