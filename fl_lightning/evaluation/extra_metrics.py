"""Additional metrics of torchmetrics, given by name in `evaluation.metrics`; the number of classes is filled in."""

from __future__ import annotations

import inspect
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torchmetrics.classification
import torchmetrics.regression
from torch import Tensor
from torchmetrics import Metric

from fl_lightning.core.errors import ConfigError, FLError, one_line
from fl_lightning.core.objectives import Objective
from fl_lightning.core.spelling import match_case, nearest
from fl_lightning.core.trusted_imports import find_object
from fl_lightning.evaluation.summary import is_lower_better

KEY = "evaluation.metrics"

TASKS = ("Multiclass", "Multilabel", "Binary")
"""Prefixes of torchmetrics' class names, one for each type of labels."""

ALIASES = {"sensitivity": "Recall"}
"""Common names of metrics, and their names in torchmetrics."""

RESERVED_NAMES = {"acc", "loss", "mae", "perplexity"}
"""Names of the built-in metrics. A metric in `evaluation.metrics` cannot have one of these names."""

COMMON_OPTIONS = {"sync_on_compute", "compute_on_cpu", "compute_with_cache"}
"""Options that every metric accepts through `**kwargs`."""

AUROC = (
    torchmetrics.classification.BinaryAUROC,
    torchmetrics.classification.MulticlassAUROC,
    torchmetrics.classification.MultilabelAUROC,
)
AVERAGE_PRECISION = (
    torchmetrics.classification.BinaryAveragePrecision,
    torchmetrics.classification.MulticlassAveragePrecision,
    torchmetrics.classification.MultilabelAveragePrecision,
)
SHARES = (
    torchmetrics.classification.BinaryStatScores,
    torchmetrics.classification.MulticlassStatScores,
    torchmetrics.classification.MultilabelStatScores,
    *(*AUROC, *AVERAGE_PRECISION),
)
"""Metrics whose values are in [0, 1], such as accuracy, recall and F1, which are subclasses of these."""
MATTHEWS = (
    torchmetrics.classification.BinaryMatthewsCorrCoef,
    torchmetrics.classification.MulticlassMatthewsCorrCoef,
    torchmetrics.classification.MultilabelMatthewsCorrCoef,
)


@dataclass(frozen=True)
class Measure:
    """An entry of `evaluation.metrics`: a metric's name in the logs, and a function that creates the metric.

    Args:
        name: Its name in the logs: `f1_score`, as in `global/f1_score`.
        make: Builds a new metric.
        positive: The positive class of a binary metric; None for a metric over all classes.
    """

    name: str
    make: Callable[[], Metric]
    positive: int | None = None

    @property
    def bounds(self) -> tuple[float, float]:
        """The lowest and highest value that the metric can have. They are infinite if they are not known."""
        metric = self.make()
        is_share = isinstance(metric, SHARES) and type(metric).__module__.startswith("torchmetrics.")
        return (0.0, 1.0) if is_share else (-math.inf, math.inf)

    def start(self) -> MetricAccumulator:
        """Return a new accumulator of the metric, to which no batch has been added yet."""
        metric = self.make()
        if isinstance(metric, MATTHEWS):
            return MatthewsAccumulator(self.name, metric, self.positive)
        of_curve = isinstance(metric, AUROC + AVERAGE_PRECISION)
        by_class = of_curve and (self.positive is not None or metric.average in ("macro", "weighted"))
        return (CurveAccumulator if by_class else MetricAccumulator)(self.name, metric, self.positive)


class MetricAccumulator:
    """An accumulator of one torchmetrics metric, which is updated batch by batch.

    Args:
        name: Its name in the logs.
        metric: The metric.
        positive: The positive class of a binary metric, which gets the probabilities of this class only.
    """

    def __init__(self, name: str, metric: Metric, positive: int | None = None) -> None:
        self.name, self._metric, self._positive = name, metric, positive

    def update(self, predictions: Tensor, targets: Tensor) -> None:
        """Update the metric with a batch of predictions and labels, on the device of the batch."""
        if self._positive is not None:
            predictions, targets = predictions[:, self._positive], (targets == self._positive).long()
        self._update(predictions, targets)

    def _update(self, predictions: Tensor, targets: Tensor) -> None:
        with report_metric_errors(self.name):
            self._metric.to(predictions.device).update(predictions, targets)

    def value(self) -> float:
        """Return the metric over all batches added so far; NaN if it is undefined for these samples.

        Raises:
            ConfigError: The value is not a single number.
        """
        try:
            return self.compute()
        except ConfigError as error:
            if isinstance(error.__cause__, ValueError):  # such as R² of a single sample
                return math.nan
            raise

    def compute(self) -> float:
        """Compute the metric over all batches added so far. Values for several model outputs are averaged.

        Raises:
            ConfigError: The metric raises an error, or its value is not a single number.
        """
        with report_metric_errors(self.name):
            value = self._metric.compute()
        of_outputs = (getattr(self._metric, "num_outputs", 1),)
        if not isinstance(value, Tensor) or (value.numel() != 1 and value.shape != of_outputs):
            kind = type(self._metric).__name__
            raise ConfigError(f"{KEY}: {kind} does not return a single number. {_fix_for(kind)}")
        return float(value.double().mean())


class CurveAccumulator(MetricAccumulator):
    """AUROC or average precision, averaged over the classes (or labels) for which it is defined.

    Torchmetrics counts 0 for all other classes, but a client's few samples often lack a class.
    """

    def __init__(self, name: str, metric: Metric, positive: int | None = None) -> None:
        super().__init__(name, metric, positive)
        self._needs_negatives, self._weighted = isinstance(metric, AUROC), False
        if positive is None:
            self._weighted, metric.average = metric.average == "weighted", "none"
        self._held: Tensor | int = 0
        self._n = 0

    def _update(self, predictions: Tensor, targets: Tensor) -> None:
        super()._update(predictions, targets)
        classes = predictions.shape[1] if predictions.ndim == 2 else 2
        held = targets.sum(dim=0) if targets.ndim == 2 else torch.bincount(targets, minlength=classes)
        held = held[1:] if self._positive is not None else held
        self._held, self._n = self._held + held, self._n + len(targets)

    def compute(self) -> float:
        """Return the mean of the metric over the classes for which it is defined; NaN if there is no such class.

        A class needs positive samples, and for AUROC negative samples, too.
        """
        assert isinstance(self._held, Tensor)
        with report_metric_errors(self.name):
            by_class = self._metric.compute().double()
        defined = (self._held > 0) & ((self._held < self._n) | (not self._needs_negatives))
        weights = (self._held if self._weighted else 1) * defined.double()
        return float((by_class.nan_to_num() * weights).sum() / weights.sum())


class MatthewsAccumulator(MetricAccumulator):
    """Matthews correlation coefficient; 0 if only one class is present or predicted, as in scikit-learn.

    Torchmetrics returns other values there, which depend on the number of samples.
    """

    def compute(self) -> float:
        """Return the Matthews correlation coefficient from the confusion matrix (Gorodkin 2004, Eq. 8).

        For multi-label targets, the confusion matrices of all labels are added first.
        """
        assert isinstance(self._metric.confmat, Tensor)
        counts = self._metric.confmat.double()
        counts = counts.sum(dim=0) if counts.ndim == 3 else counts
        n, targets, predicted = counts.sum(), counts.sum(dim=1), counts.sum(dim=0)
        covariance = counts.trace() * n - targets @ predicted
        variances = (n**2 - targets @ targets) * (n**2 - predicted @ predicted)
        return float(covariance / variances.sqrt()) if variances > 0 else 0.0


def _fix_for(kind: str) -> str:
    if kind.endswith("ConfusionMatrix"):
        return "Use the callback ConfusionMatrix."
    return "Set its average, for example macro, or use another metric."


@contextmanager
def report_metric_errors(name: str) -> Iterator[None]:
    """Context that converts a metric's exceptions to a `ConfigError` that names the metric, and hides its warnings."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except FLError:
        raise
    except Exception as error:
        raise ConfigError(f"{KEY}: {name}: {one_line(error)}") from error


def measures_of(
    specs: Sequence[str | Mapping[str, Any]], objective: Objective, outputs: int, positive_class: int = 1
) -> list[Measure]:
    """Return a `Measure` for each additional metric that a config lists in `evaluation.metrics`.

    Args:
        specs: Names, mappings of `class_path` and `init_args`, or mappings of a chosen name to either.
        objective: The objective of the task.
        outputs: Number of outputs, that is, of classes or labels.
        positive_class: The positive class of binary metrics.

    Raises:
        ConfigError: A metric does not exist, does not accept these arguments, or has an invalid name; or a positive
            class is given for a task that does not have two classes.
    """
    if positive_class != 1 and not _is_binary_task(objective, outputs):
        raise ConfigError(f"evaluation.positive_class: only two-class tasks have one ({positive_class}). Leave it out.")
    measures = [_measure(spec, objective, outputs, positive_class) for spec in specs]
    names = [measure.name for measure in measures]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"{KEY}: two metrics have the name {twice[0]!r}. Give one of them another name.")
    return measures


def _is_binary_task(objective: Objective, outputs: int) -> bool:
    return objective.kind == "Multiclass" and outputs == 2


def _measure(spec: str | Mapping[str, Any], objective: Objective, outputs: int, positive_class: int) -> Measure:
    name = None
    if isinstance(spec, Mapping) and "class_path" not in spec and len(spec) == 1:
        ((name, spec),) = spec.items()
    given = spec if isinstance(spec, Mapping) else {"class_path": spec}
    path, options = given.get("class_path"), given.get("init_args") or {}
    if odd := set(given) - {"class_path", "init_args"}:
        raise ConfigError(f"{KEY}: unknown key {sorted(map(str, odd))[0]!r}. A metric has class_path and init_args.")
    if not isinstance(path, str) or not isinstance(options, Mapping):
        raise ConfigError(f"{KEY}: not a metric. Give its name, or a class_path with its init_args.")
    kind = _metric_class(path, objective, outputs)
    arguments = inspect.signature(kind).parameters
    if unknown := [option for option in options if option not in {*arguments, *COMMON_OPTIONS}]:
        near = nearest(str(unknown[0]), arguments)
        fix = f"Did you mean {near}?" if near else f"It has {', '.join(n for n in arguments if n != 'kwargs')}."
        raise ConfigError(f"{KEY}: {kind.__name__} has no option {unknown[0]!r}. {fix}")
    counted = {objective.count: outputs} if objective.count in arguments else {}
    make = partial(kind, **counted | dict(options))
    with report_metric_errors(kind.__name__):
        higher = make().higher_is_better
    binary = next((one.__name__ for one in kind.__mro__ if _is_torchmetrics_binary(one)), None)
    if binary and not _is_binary_task(objective, outputs):
        fitting = f"{objective.kind}{binary.removeprefix('Binary')}"
        raise ConfigError(f"{KEY}: {kind.__name__} is for two classes, this dataset has {outputs}. Use {fitting}.")
    return Measure(_name(kind, name, higher), make, positive_class if binary else None)


def _is_torchmetrics_binary(kind: type) -> bool:
    return kind.__module__.startswith("torchmetrics.") and kind.__name__.startswith("Binary")


def _metric_class(path: str, objective: Objective, outputs: int) -> type[Metric]:
    if "." in path:
        return _imported(path)
    home = torchmetrics.classification if objective.kind else torchmetrics.regression
    tasks = ("Binary", objective.kind) if _is_binary_task(objective, outputs) else (objective.kind,)
    fitting = {name: vars(home)[name] for task in tasks for name in home.__all__ if name.startswith(task)}
    if path in torchmetrics.classification.__all__ and path.startswith("Binary"):
        return vars(torchmetrics.classification)[path]
    for name in (path, *(f"{task}{ALIASES.get(path.lower(), path)}" for task in tasks)):
        if (found := match_case(name, fitting)) in fitting:
            return fitting[found]
    near = nearest(f"{tasks[0]}{path.removeprefix(_task(path))}", fitting)
    fix = f"Did you mean {near}?" if near else f"It has {', '.join(fitting)}."
    raise ConfigError(f"{KEY}: torchmetrics has no {path!r} for {type(objective).__name__}. {fix}")


def _task(name: str) -> str:
    """Return the task prefix of a torchmetrics class name, such as `Binary` or `Multiclass`; empty if there is none."""
    return next((task for task in TASKS if name.startswith(task)), "")


def _imported(path: str) -> type[Metric]:
    try:
        kind = find_object(path)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{KEY}: class {path!r} not found: {one_line(error)}") from error
    if not (inspect.isclass(kind) and issubclass(kind, Metric)):
        raise ConfigError(f"{KEY}: {path} is not a torchmetrics.Metric")
    return kind


def _name(kind: type[Metric], name: Any, higher_is_better: bool | None) -> str:
    """Return the name under which a metric is logged; its ending shows whether lower values are better."""
    called = snake_case(kind.__name__.removeprefix(_task(kind.__name__))) if name is None else name
    if not isinstance(called, str) or not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", called) or called in RESERVED_NAMES:
        raise ConfigError(f"{KEY}: name: {called!r} is taken or has other characters than letters, digits and _")
    if higher_is_better is not None and is_lower_better(called) == higher_is_better:
        better, end = ("higher", "_score") if higher_is_better else ("lower", "_error")
        if name is None:
            return f"{called}{end}"
        raise ConfigError(f"{KEY}: the name {called!r} does not say that {better} is better. Use {called}{end}.")
    return called


def snake_case(name: str) -> str:
    """Return a class name in snake case: `f1_score` for `F1Score`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


def check_measures(measures: Sequence[Measure], objective: Objective, outputs: Tensor, targets: Tensor) -> None:
    """Compute the additional metrics on one batch, to find errors before the run begins.

    Raises:
        ConfigError: A metric fails, or does not return a single number.
    """
    for measure in measures:
        running = measure.start()
        running.update(*objective.predictions(outputs.detach().float(), targets))
        running.compute()
