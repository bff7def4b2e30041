"""Evaluation of models: loss and metrics on a set of samples, and summaries of these over clients."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from fl_lightning.core.errors import ConfigError, check_positive
from fl_lightning.core.objectives import Classification, Objective
from fl_lightning.core.seeding import Stream, generator
from fl_lightning.core.task import Result, Score
from fl_lightning.evaluation.extra_metrics import Measure
from fl_lightning.evaluation.round_metrics import RoundMetrics
from fl_lightning.evaluation.summary import Row, is_lower_better


@dataclass(frozen=True)
class Evaluation:
    """Options of evaluation: which models are evaluated, how often, and with which metrics.

    The global model is always evaluated on the global test set.

    Args:
        client_model: The model that is evaluated on a client's own test split: the one that a participant has just
            `trained`, or the one that each client has `received` after the aggregation. `both`: the received ones as
            `client/*`, and the trained ones as `trained_client/*`.
        personal_on_global: Also evaluate the participants' trained models on the global test set.
        max_clients: Largest number of clients to evaluate with `received`, and of held-out clients, sampled once; all
            by default. With `trained`, all participants are evaluated.
        target_accuracies: Accuracies for which R_acc, the first round that reaches it, is reported. The accuracy is
            that of the global model or, for methods without one, the clients' mean.
        metrics: Metrics of torchmetrics in addition to loss and accuracy: names (`MulticlassAUROC`, or `AUROC` for the
            one of the objective), mappings of `class_path` and `init_args`, or mappings of a chosen name to either. The
            number of classes, labels or outputs is filled in.
        positive_class: Index of the positive class in metrics of a two-class task.
        every: Rounds between evaluations. The last round is always evaluated.
        new_client_model: The model that is evaluated for `scenario.held_out_clients`: the one that a client has
            `received` from the method, or has `trained` from there for one round. By default as the method says.
            Without held-out clients, it has no effect.

    Raises:
        ConfigError: A target is outside (0, 1], `max_clients` or `every` is below 1, or `positive_class` is not 0
            or 1.
    """

    client_model: Literal["trained", "received", "both"] = "trained"
    personal_on_global: bool = False
    max_clients: int | None = None
    target_accuracies: list[float] = field(default_factory=lambda: [0.5, 0.8, 0.9])
    metrics: list[str | dict[str, Any]] = field(default_factory=list)
    positive_class: int = 1
    every: int = 1
    new_client_model: Literal["received", "trained"] | None = None

    def __post_init__(self) -> None:
        if self.positive_class not in (0, 1):
            raise ConfigError(f"evaluation.positive_class: must be 0 or 1 ({self.positive_class}). Give a class index.")
        if self.max_clients is not None and self.max_clients < 1:
            raise ConfigError(f"evaluation.max_clients: {self.max_clients} is below 1. Leave it out to evaluate all.")
        check_positive("evaluation.", every=self.every)
        for target in self.target_accuracies:
            if not 0 < target <= 1:
                raise ConfigError(
                    f"evaluation.target_accuracies: {target} is outside (0, 1]. Give a fraction, not a percentage."
                )

    @property
    def of_received(self) -> bool:
        """Whether `client/*` are metrics of the received models, rather than of the trained ones."""
        return self.client_model != "trained"

    def is_due(self, round: int, rounds: int) -> bool:
        """Return whether models are evaluated in round `round` of a run with `rounds` rounds."""
        return round % self.every == 0 or round == rounds

    def chosen(self, clients: int, seed: int) -> Sequence[int]:
        """Return the ascending ids of the clients to evaluate. They do not depend on the round or the algorithm."""
        if self.max_clients is None or self.max_clients >= clients:
            return range(clients)
        return sorted(generator(seed, Stream.EVALUATED).choice(clients, self.max_clients, replace=False).tolist())


def evaluate(
    module: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    objective: Objective = Classification(),
    measures: Sequence[Measure] = (),
) -> Score:
    """Return the loss and metrics of a module over some batches, without changing the module's mode or device.

    Args:
        module: Maps inputs to outputs.
        batches: Inputs and labels.
        objective: Computes the loss and the standard metrics.
        measures: Additional metrics.

    Raises:
        ConfigError: A metric fails.
    """
    accumulator = ScoreAccumulator(objective, measures)
    for x, y in batches:
        accumulator.add(module(x).detach().float(), y)
    return accumulator.score()


def evaluate_each(
    module: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    sizes: Iterable[int],
    objective: Objective = Classification(),
    measures: Sequence[Measure] = (),
) -> list[Score | None]:
    """Return a module's loss and metrics on each of several sets of samples. A batch may span several sets.

    The module's output for a sample must not depend on the other samples of the batch. At most one batch is in memory.

    Args:
        module: Maps inputs to outputs.
        batches: Inputs and labels of all sets, one set after another.
        sizes: Number of samples of each set.
        objective: Computes the loss and the standard metrics.
        measures: Additional metrics.

    Returns:
        The score of each set, as from `evaluate`; None for an empty set.

    Raises:
        ConfigError: A metric fails.
    """
    scores: list[Score | None] = []
    remaining = iter(batches)
    outputs = y = torch.empty(0)
    for size in sizes:
        accumulator = ScoreAccumulator(objective, measures)
        while accumulator.n < size:
            if not len(y):
                x, y = next(remaining)
                outputs = module(x).detach().float()
            missing = size - accumulator.n
            accumulator.add(outputs[:missing], y[:missing])
            outputs, y = outputs[missing:], y[missing:]
        scores.append(accumulator.score() if size else None)
    return scores


class ScoreAccumulator:
    """Accumulates the loss and metrics of a model over one set of samples, batch by batch.

    Args:
        objective: Computes the loss and the standard metrics.
        measures: Additional metrics.

    Attributes:
        n: Number of samples added so far.
    """

    def __init__(self, objective: Objective, measures: Sequence[Measure]) -> None:
        self.objective, self.n = objective, 0
        self._accumulators = [measure.start() for measure in measures]
        self._sums: list[dict[str, Tensor]] = []  # kept on the device, since each copy to the CPU would wait
        self._units: list[Tensor] = []

    def add(self, outputs: Tensor, targets: Tensor) -> None:
        """Add a batch: the model's outputs `(B, *output_shape)` in float32, and the labels.

        Raises:
            ConfigError: A metric fails.
        """
        self._sums.append(self.objective.sums(outputs, targets))
        self._units.append(self.objective.units(targets))
        for each in self._accumulators:
            each.update(*self.objective.predictions(outputs, targets))
        self.n += len(targets)

    def score(self) -> Score:
        """Return the loss and metrics over all batches added so far.

        Raises:
            ConfigError: A metric fails.
        """
        if not self.n:
            raise ValueError("nothing to evaluate on: no batch")
        parts = torch.stack([torch.stack(list(sums.values())) for sums in self._sums])
        means = parts.cpu().double().sum(dim=0) / int(torch.stack(self._units).sum())
        extra = {each.name: each.value() for each in self._accumulators}
        defined = {name: value for name, value in extra.items() if math.isfinite(value)}
        named = dict(zip(self._sums[-1], means.tolist(), strict=True))
        return Score(self.n, self.objective.metrics(named) | defined)


def evaluation_metrics(
    shared: Score | None,
    own: Mapping[int, Score],
    on_global: Sequence[Score] = (),
    new: Sequence[Score] = (),
    trained: Sequence[Score] = (),
) -> RoundMetrics:
    """Return the evaluation metrics of a round, given the scores of all evaluated models.

    Args:
        shared: The global model's score on the global test set, if there is a global model.
        own: Scores of clients' models on their own test splits, by client.
        on_global: Scores of clients' models on the global test set.
        new: Scores of the models of held-out clients on their own test splits.
        trained: Scores of the participants' trained models on their own test splits, if `own` are of other models.
    """
    row = {f"global/{name}": value for name, value in shared.values.items()} if shared else {}
    summaries = [client_summary(list(own.values())), client_summary(trained, "trained_client")]
    summaries += [client_summary(new, "new_client")]
    row = {name: value for part in (row, *summaries) for name, value in part.items()}
    return RoundMetrics(row | personal_means(on_global), own_metrics(own))


def client_summary(scores: Sequence[Score], group: str = "client") -> Row:
    """Return the mean, weighted mean, standard deviation and worst decile of each metric over the clients' scores.

    The weighted mean is weighted by the number of test samples. The standard deviation is that of the population. The
    worst decile is the mean over the worst tenth of the clients, rounded up. Clients for which a metric is undefined do
    not count. For the loss, only the mean is returned. The columns begin with the `group` of the clients.
    """
    names = dict.fromkeys(name for score in scores for name in score.values)
    row: Row = {}
    for name in names:
        values, n = np.array([(s.values[name], s.n) for s in scores if name in s.values], dtype=np.float64).T
        row[f"{group}/{name}_mean"] = float(values.mean())
        if name != "loss":
            sign = -1 if is_lower_better(name) else 1
            worst = sign * np.sort(sign * values)[: math.ceil(len(values) / 10)]
            row[f"{group}/{name}_weighted"] = float(np.average(values, weights=n))
            with np.errstate(invalid="ignore"):  # the metric of a client that diverged can be Inf
                row[f"{group}/{name}_std"] = float(values.std())
            row[f"{group}/{name}_worst_decile"] = float(worst.mean())
    return row


def architecture_means(scores: Mapping[str, Sequence[Score]]) -> Row:
    """Return the mean of each metric over the clients with each architecture, without the loss.

    The columns are `architecture/<name>/<metric>_mean`.

    Args:
        scores: The scores of the clients with an architecture, by its name.
    """
    rows = [client_summary(own, f"architecture/{name}") for name, own in scores.items()]
    means = ((name, value) for row in rows for name, value in row.items() if name.endswith("_mean"))
    return {name: value for name, value in means if not name.endswith("/loss_mean")}


def personal_means(scores: Sequence[Score]) -> Row:
    """Return the mean of each metric over the clients' models, all evaluated on the global test set.

    The loss is left out.
    """
    names = dict.fromkeys(name for score in scores for name in score.values if name not in ("loss", "acc_interval"))
    values = {name: [score.values[name] for score in scores if name in score.values] for name in names}
    return {f"personal_on_global/{name}_mean": sum(own) / len(own) for name, own in values.items()}


def own_metrics(scores: Mapping[int, Score]) -> dict[int, Row]:
    """Return the test metrics of each client's own model, without the loss."""
    return {
        client: {name: value for name, value in score.values.items() if name != "loss"}
        for client, score in scores.items()
    }


def train_metrics(results: Sequence[Result]) -> Row:
    """Return the training loss and each of its terms, averaged over the clients that trained in the round."""
    names = dict.fromkeys(name for result in results for name in result.losses)
    return {f"client/train_{name}": sum(r.losses.get(name, 0.0) for r in results) / len(results) for name in names}


def logged_metrics(results: Sequence[Result]) -> RoundMetrics:
    """Return the metrics that callbacks logged while clients trained: the value of each client, and the mean."""
    names = dict.fromkeys(name for result in results for name in result.logged)
    means = {name: fmean(r.logged[name] for r in results if name in r.logged) for name in names}
    shared = {f"client/{name}": mean for name, mean in means.items()}
    return RoundMetrics(shared, {result.client: result.logged for result in results})
