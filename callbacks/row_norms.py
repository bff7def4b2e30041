"""Callback that compares the last layer's row norms with clients' class shares (FedDW Fig. 4, cwFedAVG Figs. 4-7)."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.figure import Figure

from fl_lightning.algorithms.personalized.cwfedavg import class_layer, class_layer_name, class_models
from fl_lightning.callbacks.figures import Arrays, RoundFigure, trained_model
from fl_lightning.callbacks.plots import heat_maps
from fl_lightning.core.errors import ConfigError
from fl_lightning.core.message import Tensors
from fl_lightning.core.names import labels

if TYPE_CHECKING:
    from fl_lightning.callbacks.base import FederatedRun
    from fl_lightning.engines import Result
    from fl_lightning.evaluation.summary import Row


class RowNorms(RoundFigure):
    """Plot each client's number of samples per class, and the row norms of its classification layer.

    The row norms are those before and after training. Rows are the round's participants. With class-wise averaging, the
    norms of the class models are drawn too. Logs `row_norms/gap`, the mean over clients of `||p - p̃||_2` of the
    trained models (`p` class shares, `p̃` shares of the norms), and `row_norms/correlation`, that of `p` and `p̃` over
    all clients and classes.

    Args:
        every: Rounds between measurements. By default only the last round.

    Raises:
        ConfigError: The model's head does not end with a row of weights per class, or the method does not reveal the
            clients' trained models.
    """

    name = "row_norms"
    needs_classes = True
    looks_at_clients = True

    def __init__(self, every: int | None = None) -> None:
        super().__init__(every)
        self._received: dict[int, np.ndarray] = {}
        self._trained: dict[int, np.ndarray] = {}

    def check(self, run: FederatedRun) -> None:
        """Check that the model's last layer has one row of weights per class."""
        super().check(run)
        with suppress(ConfigError):
            layers = [class_layer(group.template.backbone.state_dict()) for group in run.worker.groups]
            if all(len(layer) == run.data.data.num_classes for layer in layers):
                return
        reason = "the model's head does not end with one row of weights per class"
        raise ConfigError(f"callbacks: RowNorms: {reason}. Leave it out.")

    def metrics(self, run: FederatedRun) -> Iterable[str]:
        """Return the names of the two metrics that compare class shares with row norms of the classification layer."""
        return ["row_norms/gap", "row_norms/correlation"]

    def observe(self, run: FederatedRun, result: Result) -> None:
        """Store the row norms of one client's classification layer, before and after its fit."""
        self._received[result.client] = row_norms(run.starting_module(result.client).backbone.state_dict())
        self._trained[result.client] = row_norms(trained_model(run, result))

    def measure(self, run: FederatedRun) -> Arrays:
        """Return arrays `(K, C)`: clients' class counts, and their last layers' row norms before and after the fit.

        With class-wise averaging, also return the row norms of the class models.
        """
        clients = sorted(self._trained)
        arrays = {
            "clients": np.array(clients),
            "data": run.data.class_counts()[clients],
            "received": np.stack([self._received[client] for client in clients]),
            "trained": np.stack([self._trained[client] for client in clients]),
        }
        if "sources" in run.state:
            name = class_layer_name(run.state["model"])
            layer = {name: run.state["sources"][name]}  # the other layers of the class models are not read
            arrays["class_models"] = class_models(run.state | {"sources": layer})[name].norm(dim=2).numpy()
        self._received, self._trained = {}, {}
        return arrays

    def numbers(self, arrays: Arrays) -> Row:
        """Return the metrics `row_norms/gap` and `row_norms/correlation`, which compare class shares with row norms.

        The row norms are scaled to sum 1 per client. The gap is the L2 distance, averaged over clients.
        """
        shares, estimates = (row_shares(arrays[name]) for name in ("data", "trained"))
        gap = float(np.linalg.norm(shares - estimates, axis=1).mean())
        flat = estimates.std() == 0 or shares.std() == 0
        correlation = 0.0 if flat else float(np.corrcoef(shares.ravel(), estimates.ravel())[0, 1])
        return {"row_norms/gap": gap, "row_norms/correlation": correlation}

    def draw(self, arrays: Arrays) -> Figure:
        """Draw heat maps by client and class: sample counts, and row norms of the classification layer's weights."""
        panels = {
            "samples": arrays["data"],
            "row norms, received": arrays["received"],
            "row norms, trained": arrays["trained"],
            "trained - received": arrays["trained"] - arrays["received"],
        }
        if "class_models" in arrays:
            panels["row norms, class models"] = arrays["class_models"]
        clients = labels(self.names.clients, arrays["clients"])
        return heat_maps(panels, row_names=clients, column_names=self.names.classes)


def row_shares(matrix: np.ndarray) -> np.ndarray:
    """Return a matrix with each row divided by its sum; a row of zeros stays zero."""
    return matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1e-12)


def row_norms(model: Tensors) -> np.ndarray:
    """Return the row norms of a model's classification layer, `(C,)`."""
    return class_layer(model).float().norm(dim=1).numpy()
