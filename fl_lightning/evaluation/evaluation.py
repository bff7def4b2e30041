"""How good a model is, and how fair it is to clients."""

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
from fl_lightning.evaluation.measures import Measure
from fl_lightning.evaluation.metrics import Row, is_lower_better


@dataclass(frozen=True)
class Evaluation:
    """What is measured beside the global model on the global test set.

    Args:
        client_model: The model that is scored on a client's own test split: the one that a participant has just
            `trained`, or the one that each client has `received` after the aggregation.
        personal_on_global: Also score the participants' trained models on the global test set.
        max_clients: With `received`, score no more than so many, drawn once by the run's seed; all by default.
        target_accuracies: Accuracies for which R_acc, the first round that reaches it, is reported. The accuracy is
            that of the global model or, for methods without one, the clients' mean.
        metrics: Metrics of torchmetrics beside loss and accuracy, for the global model and every client: names
            (`MulticlassAUROC`, or `AUROC` for the one of the objective), mappings of `class_path` and `init_args`, or
            mappings of a name of one's own to either. The number of classes, labels or outputs is filled in.
        positive_class: Index of the positive class in metrics of a two-class task.
        every: Rounds between evaluations. The last round is always evaluated.

    Raises:
        ConfigError: A target is outside (0, 1], `max_clients` or `every` is below 1, or `positive_class` is not 0
            or 1.
    """

    client_model: Literal["trained", "received"] = "trained"
    personal_on_global: bool = False
    max_clients: int | None = None
    target_accuracies: list[float] = field(default_factory=lambda: [0.5, 0.8, 0.9])
    metrics: list[str | dict[str, Any]] = field(default_factory=list)
    positive_class: int = 1
    every: int = 1

    def __post_init__(self) -> None:
        if self.positive_class not in (0, 1):
            raise ConfigError(f"evaluation.positive_class: must be 0 or 1 ({self.positive_class}). Give a class index.")
        if self.max_clients is not None and self.max_clients < 1:
            raise ConfigError(f"evaluation.max_clients: {self.max_clients} is below 1; leave it out to score all")
        check_positive("evaluation.", every=self.every)
        for target in self.target_accuracies:
            if not 0 < target <= 1:
                raise ConfigError(
                    f"evaluation.target_accuracies: {target} is outside (0, 1]; accuracies are shares, not percent"
                )

    def is_due(self, round: int, rounds: int) -> bool:
        """Return whether a round is evaluated, of so many rounds."""
        return round % self.every == 0 or round == rounds

    def chosen(self, clients: int, seed: int) -> Sequence[int]:
        """Ids of the clients that are scored where all could be, ascending; the same in every round and method."""
        if self.max_clients is None or self.max_clients >= clients:
            return range(clients)
        return sorted(generator(seed, Stream.EVALUATED).choice(clients, self.max_clients, replace=False).tolist())


def evaluate(
    module: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    objective: Objective = Classification(),
    measures: Sequence[Measure] = (),
) -> Score:
    """Score a module on batches, in the mode and on the device it is in.

    Args:
        module: Maps inputs to outputs.
        batches: Inputs and labels.
        objective: What the outputs are for.
        measures: What is measured beside what the objective measures.

    Raises:
        ConfigError: A metric fails.
    """
    tally = Tally(objective, measures)
    for x, y in batches:
        tally.add(module(x).detach().float(), y)
    return tally.score()


def evaluate_each(
    module: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    sizes: Iterable[int],
    objective: Objective = Classification(),
    measures: Sequence[Measure] = (),
) -> list[Score | None]:
    """Score a module on several sets of samples that follow one another in common batches.

    It must put out the same for a sample whatever else is in the batch. No more than a batch is held.

    Args:
        module: Maps inputs to outputs.
        batches: Inputs and labels of all sets; a batch may hold the end of one and the beginning of the next.
        sizes: How many samples each set has.
        objective: What the outputs are for.
        measures: What is measured beside what the objective measures.

    Returns:
        Each set's score, as `evaluate` gives it; None for one without samples.

    Raises:
        ConfigError: A metric fails.
    """
    scores: list[Score | None] = []
    arriving = iter(batches)
    outputs = y = torch.empty(0)
    for size in sizes:
        tally = Tally(objective, measures)
        while tally.n < size:
            if not len(y):
                x, y = next(arriving)
                outputs = module(x).detach().float()
            missing = size - tally.n
            tally.add(outputs[:missing], y[:missing])
            outputs, y = outputs[missing:], y[missing:]
        scores.append(tally.score() if size else None)
    return scores


class Tally:
    """What is measured of one set of samples, of which some come at a time.

    Args:
        objective: What the outputs are for.
        measures: What is measured beside what the objective measures.

    Attributes:
        n: Samples so far.
    """

    def __init__(self, objective: Objective, measures: Sequence[Measure]) -> None:
        self.objective, self.n = objective, 0
        self._running = [measure.begun() for measure in measures]
        self._sums: list[dict[str, Tensor]] = []  # on the device until the end: reading a number there waits for it

    def add(self, outputs: Tensor, targets: Tensor) -> None:
        """Take in outputs `(B, C)`, in float32, and what they are held against.

        Raises:
            ConfigError: A metric fails.
        """
        self._sums.append(self.objective.sums(outputs, targets))
        for each in self._running:
            each.update(*self.objective.predictions(outputs, targets))
        self.n += len(targets)

    def score(self) -> Score:
        """What it all comes to.

        Raises:
            ConfigError: A metric fails.
        """
        if not self.n:
            raise ValueError("nothing to evaluate on: no batch")
        parts = torch.stack([torch.stack(list(sums.values())) for sums in self._sums])
        means = parts.cpu().double().sum(dim=0) / self.n
        more = {each.name: each.value() for each in self._running}
        defined = {name: value for name, value in more.items() if math.isfinite(value)}
        return Score(self.n, dict(zip(self._sums[-1], means.tolist(), strict=True)) | defined)


def measured(shared: Score | None, own: Mapping[int, Score], on_global: Sequence[Score] = ()) -> Row:
    """A round's metrics of its models.

    Args:
        shared: The global model's score on the global test set, if there is a global model.
        own: Scores of clients' models on their own test splits, by client.
        on_global: Scores of clients' models on the global test set.
    """
    row = {f"global/{name}": value for name, value in shared.values.items()} if shared else {}
    return row | client_summary(list(own.values())) | personal_means(on_global) | own_series(own)


def client_summary(scores: Sequence[Score]) -> Row:
    """Over clients, of each metric: mean, mean weighted by test samples, standard deviation, worst decile.

    Of the loss the mean alone. The standard deviation is the population's; the worst decile is the mean over the worst
    tenth of the clients, rounded up. A client for which a metric is not defined does not count in it.
    """
    names = dict.fromkeys(name for score in scores for name in score.values)
    row: Row = {}
    for name in names:
        values, n = np.array([(s.values[name], s.n) for s in scores if name in s.values], dtype=np.float64).T
        row[f"client/{name}_mean"] = float(values.mean())
        if name != "loss":
            sign = -1 if is_lower_better(name) else 1
            worst = sign * np.sort(sign * values)[: math.ceil(len(values) / 10)]
            row[f"client/{name}_weighted"] = float(np.average(values, weights=n))
            row[f"client/{name}_std"] = float(values.std())
            row[f"client/{name}_worst_decile"] = float(worst.mean())
    return row


def personal_means(scores: Sequence[Score]) -> Row:
    """Each metric's mean over clients' models on the global test set; not the loss."""
    names = dict.fromkeys(name for score in scores for name in score.values if name not in ("loss", "acc_interval"))
    held = {name: [score.values[name] for score in scores if name in score.values] for name in names}
    return {f"personal_on_global/{name}_mean": sum(values) / len(values) for name, values in held.items()}


def own_series(scores: Mapping[int, Score]) -> Row:
    """Each client's metrics as series of its own; not the loss."""
    return {
        f"client_{client}/{name}": value
        for client, score in scores.items()
        for name, value in score.values.items()
        if name != "loss"
    }


def train_metrics(results: Sequence[Result]) -> Row:
    """Mean over a round's clients of the training loss and of each of its terms."""
    names = dict.fromkeys(name for result in results for name in result.losses)
    return {f"client/train_{name}": sum(r.losses.get(name, 0.0) for r in results) / len(results) for name in names}


def logged_metrics(results: Sequence[Result]) -> Row:
    """What callbacks logged in clients' fits: each client's, and the mean over the round's clients that have it."""
    own = {f"client_{r.client}/{name}": value for r in results for name, value in r.logged.items()}
    names = dict.fromkeys(name for result in results for name in result.logged)
    means = {name: fmean(r.logged[name] for r in results if name in r.logged) for name in names}
    return {**{f"client/{name}": mean for name, mean in means.items()}, **own}
