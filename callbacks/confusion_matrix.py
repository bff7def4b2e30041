"""Callback that draws confusion matrices of the global model and of the client with the lowest accuracy."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
import torch
from matplotlib import colormaps
from matplotlib.figure import Figure
from torch import Tensor, nn

from fl_lightning.callbacks.figures import Arrays, RoundFigure, received_module, scored_module
from fl_lightning.callbacks.plots import panels
from fl_lightning.core.errors import ConfigError
from fl_lightning.engines.trainer import inference
from fl_lightning.runs.paper_figure import set_ticks

if TYPE_CHECKING:
    from fl_lightning.callbacks.base import FederatedRun
    from fl_lightning.client.module import ClientModule
    from fl_lightning.engines import Result

MOST_COUNTS = 12
"""Largest number of classes for which counts are written into the cells."""


class ConfusionMatrix(RoundFigure):
    """Draw the confusion matrices of the global model and of the client with the lowest accuracy.

    Both have the accuracies of the round's metrics. The global model is scored on the global test set. A client's model
    is scored on the client's own test split, and is the one that `evaluation.client_model` selects: the model that a
    participant of the round has trained, or the one that each client receives after the aggregation. It is
    personalised, if the method does so. The worst client is the first one with the lowest accuracy. Methods without a
    global model have only the matrix of the worst client.

    Args:
        every: Rounds between measurements. By default only the last round.

    Raises:
        ConfigError: The targets are not classes, there are no test samples, or the method does not reveal the clients'
            trained models.
    """

    name = "confusion_matrix"
    needs_classes = True

    def __init__(self, every: int | None = None) -> None:
        super().__init__(every)
        self._worst: Arrays = {}

    def check(self, run: FederatedRun) -> None:
        """Check that the dataset has class labels, that there are test samples, and that the models are known."""
        super().check(run)
        if self._shows_trained(run) and run.algorithm.server and not run.algorithm.whole:
            method = type(run.algorithm).__name__
            fix = "Set evaluation.client_model to received, or leave it out."
            raise ConfigError(f"callbacks: ConfusionMatrix: {method} does not reveal clients' trained models. {fix}")
        clients = range(run.clients) if self._shows_trained(run) else run.evaluator.scored
        if not self._tests_globally(run) and not any(len(run.data.shards[client].test) for client in clients):
            raise ConfigError("callbacks: ConfusionMatrix: no client has test samples. Increase scenario.local_test.")

    def observe(self, run: FederatedRun, result: Result) -> None:
        """Count the predictions of a client's trained model, if `evaluation.client_model` is `trained`."""
        if self._shows_trained(run) and len(run.data.shards[result.client].test):
            self._add(run, result.client, scored_module(run, result))

    def measure(self, run: FederatedRun) -> Arrays:
        """Return the confusion matrices `(C, C)` of the global model and the worst client.

        Rows are true classes. `client` is the worst client's id, and `model` says which of its models is shown:
        `trained` or `received`.
        """
        arrays: Arrays = {}
        if self._tests_globally(run):
            module = run.evaluator.global_module(run.round)
            with inference(module, run.worker.idle_trainer):
                batches = run.worker.client_data.test_batches()
                arrays["global"] = confusion(module, batches, run.data.data.num_classes)
        if not self._shows_trained(run):
            for client in run.evaluator.scored:
                if len(run.data.shards[client].test):
                    self._add(run, client, received_module(run, client))
        arrays |= self._worst
        self._worst = {}
        return arrays

    def _add(self, run: FederatedRun, client: int, module: ClientModule) -> None:
        """Keep the confusion matrix of a client's model if it is the worst so far in this round."""
        with inference(module, run.worker.idle_trainer):
            batches = run.worker.for_client(client).client_data.own_test_batches(client)
            matrix = confusion(module, batches, run.data.data.num_classes)
        if not self._worst or accuracy(matrix) < accuracy(self._worst["worst"]):
            model = np.array(run.evaluation.client_model)
            self._worst = {"worst": matrix, "client": np.array(client), "model": model}

    @staticmethod
    def _shows_trained(run: FederatedRun) -> bool:
        return run.evaluation.client_model == "trained"

    @staticmethod
    def _tests_globally(run: FederatedRun) -> bool:
        """Return whether the method has a global model that predicts the classes of the global test set."""
        return run.algorithm.one_model and run.data.data.evaluate is None

    def draw(self, arrays: Arrays) -> Figure:
        """Draw each confusion matrix as a heat map, with each row divided by its sum.

        Rows of classes without samples are grey.
        """
        titles = {"global": "global model on the global test set"}
        if "client" in arrays:
            client = self.names.client(int(arrays["client"]))
            titles["worst"] = f"{client}, the worst: {arrays['model']} model\non its own test split"
        drawn = {title: arrays[name] for name, title in titles.items() if name in arrays}
        figure, places = panels(len(drawn))
        classes = len(next(iter(drawn.values())))
        side = min(4.0 + 0.05 * classes, 9.0)
        figure.set_size_inches(side * len(drawn) + 1.0, side + 0.6)
        for axes, (title, matrix) in zip(places, drawn.items(), strict=True):
            held = matrix.sum(axis=1, keepdims=True)
            shares = np.ma.masked_where(np.repeat(held == 0, classes, axis=1), matrix / np.maximum(held, 1))
            image = axes.imshow(shares, cmap=colormaps["Blues"].with_extremes(bad="lightgrey"), vmin=0, vmax=1)
            axes.set(xlabel="predicted class")
            axes.set_title(f"{title}\naccuracy {accuracy(matrix):.4f}", fontsize=9, parse_math=False)
            for axis in (axes.xaxis, axes.yaxis):
                set_ticks(axis, classes, self.names.classes)
                axis.set_tick_params(labelsize=7)
            if classes <= MOST_COUNTS:
                for row, column in np.argwhere(matrix):
                    color = "white" if shares[row, column] > 0.5 else "black"
                    axes.text(column, row, str(matrix[row, column]), color=color, ha="center", va="center", fontsize=7)
        places[0].set_ylabel("true class")
        figure.colorbar(image, ax=places, label="share of the true class", shrink=0.8)
        return figure


def confusion(module: nn.Module, batches: Iterable[tuple[Tensor, Tensor]], num_classes: int) -> np.ndarray:
    """Count samples by true class (row) and predicted class (column), `(C, C)`.

    Args:
        module: Returns logits `(B, C)`. Its mode and device are not changed.
        batches: Inputs and classes `(B,)`.
        num_classes: Number of classes, `C`.
    """
    counts = torch.zeros(num_classes * num_classes, dtype=torch.int64)
    for x, y in batches:
        predicted = module(x).detach().float().argmax(dim=1)
        counts += torch.bincount((y * num_classes + predicted).cpu(), minlength=len(counts))
    return counts.reshape(num_classes, num_classes).numpy()


def accuracy(matrix: np.ndarray) -> float:
    """Return the accuracy that a confusion matrix gives: the share of samples on its diagonal."""
    return float(np.trace(matrix) / matrix.sum())
