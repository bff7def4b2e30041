"""Evaluation of client modules on the global test set and on clients' own test splits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fl_lightning.client.module import ClientModule
from fl_lightning.core.task import Score
from fl_lightning.engines.client_data import ClientData
from fl_lightning.evaluation.evaluation import evaluate, evaluate_each
from fl_lightning.evaluation.extra_metrics import measures_of


class Scorer:
    """Evaluates client modules on the global test set or on clients' test splits.

    Call its methods inside the context `inference`, which puts the module into eval mode on the training device.

    Args:
        clients: The samples of each client.
        metrics: Metrics in addition to those of the objective, as `Evaluation.metrics` names them.
        positive_class: The class, 0 or 1, that binary metrics count as positive.

    Attributes:
        measures: The additional metrics.
    """

    def __init__(
        self, clients: ClientData, metrics: Sequence[str | dict[str, Any]] = (), positive_class: int = 1
    ) -> None:
        self.clients, self.data, self.objective = clients, clients.data.data, clients.data.objective
        self.measures = measures_of(metrics, self.objective, self.data.num_classes, positive_class)

    @property
    def score_names(self) -> list[str]:
        """Names of the metrics that each evaluation of a module returns."""
        y = self.data.y_train[:1]
        outputs = torch.zeros(1, *self.objective.output_shape(y, self.data.num_classes))
        sums = self.objective.sums(outputs, y)
        return [*self.objective.metrics(dict.fromkeys(sums, 0.0)), *(measure.name for measure in self.measures)]

    def score(self, module: ClientModule) -> Score:
        """Return the metrics of a module on the global test set."""
        own, batches = self.data.evaluate, self.clients.test_batches()
        return own(module, batches) if own else evaluate(module, batches, self.objective, self.measures)

    def success_rate(self, module: ClientModule) -> float | None:
        """Return the share of `wanted_predictions` that a module makes; None if attackers want none."""
        wanted = self.clients.data.wanted_predictions
        return wanted and evaluate(module, self.clients.prepared_batches(*wanted)).values["acc"]

    def local_scores(self, module: ClientModule, clients: Sequence[int]) -> list[Score | None]:
        """Return one module's metrics on the test split of each of these clients; None for an empty split."""
        tests = [self.clients.data.shard(client).test for client in clients]
        batches, sizes = self.clients.ordered_batches(torch.cat(tests), one_width=False), [len(test) for test in tests]
        return evaluate_each(module, batches, sizes, self.objective, self.measures)
