"""Callback that measures client drift: how far each client's update is from the aggregated update."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn import functional as F

from fl_lightning.algorithms.protocols import SlicesModel
from fl_lightning.callbacks.figures import Arrays, RoundFigure, trained_model
from fl_lightning.callbacks.plots import bars, panels
from fl_lightning.core.errors import ConfigError
from fl_lightning.core.message import Tensors
from fl_lightning.core.names import labels
from fl_lightning.core.state_dicts import flatten
from fl_lightning.evaluation.round_metrics import RoundMetrics

if TYPE_CHECKING:
    from fl_lightning.callbacks.base import FederatedRun
    from fl_lightning.engines import Result


class ClientDrift(RoundFigure):
    """Measure each client's drift: distance and cosine similarity of its update to the aggregated update.

    A client's update is its trained model minus the model that it started from. The aggregated update is the new shared
    model minus the previous one. Both cover all parameters. Logs `drift/distance_mean` (Euclidean), `drift/cosine_mean`
    and the values of each client. Keeps the updates of the round in memory until the aggregation.

    Args:
        every: Rounds between measurements. By default every round.

    Raises:
        ConfigError: The method does not reveal the clients' trained models, as CriticalFL in a critical period, or
            clients do not share a model.
    """

    name = "drift"
    looks_at_clients = True

    def __init__(self, every: int = 1) -> None:
        super().__init__(every)
        self._updates: dict[int, Tensor] = {}
        self._before: Tensors | None = None

    def check(self, run: FederatedRun) -> None:
        """Raise an error if the method has no model that all clients start a round from."""
        super().check(run)
        if not run.state["model"]:
            method = type(run.algorithm).__name__
            raise ConfigError(f"callbacks: ClientDrift: clients of {method} share no model. Leave it out.")
        if isinstance(run.algorithm, SlicesModel) and len(run.worker.groups) > 1:
            raise ConfigError(
                "callbacks: ClientDrift: clients share slices of the model of different sizes. Leave it out."
            )

    def metrics(self, run: FederatedRun) -> Iterable[str]:
        """Return the names of the logged drift metrics: the means over clients, and the values of each client."""
        forms = ("drift/{}_mean", "client_<id>/drift_{}")
        return [form.format(what) for form in forms for what in ("distance", "cosine")]

    def observe(self, run: FederatedRun, result: Result) -> None:
        """Store the update of one client: its trained model minus the model that it started from."""
        trained, shared = trained_model(run, result), run.state["model"]
        start = run.starting_module(result.client).backbone.state_dict()
        _, begun, ended = flatten([shared, start, trained])
        self._before, self._updates[result.client] = shared, (ended - begun).float()

    def measure(self, run: FederatedRun) -> Arrays:
        """Return client ids `(K,)`, and the distances and cosine similarities of updates to the aggregated update."""
        assert self._before is not None
        before, after = flatten([self._before, run.state["model"]]).float()
        step = after - before
        clients = sorted(self._updates)
        updates = [self._updates[client] for client in clients]
        self._updates, self._before = {}, None
        return {
            "clients": np.array(clients),
            "distance": np.array([float((update - step).norm()) for update in updates]),
            "cosine": np.array([float(F.cosine_similarity(update, step, dim=0)) for update in updates]),
        }

    def numbers(self, arrays: Arrays) -> RoundMetrics:
        """Return the distance and cosine similarity of each client's update to the aggregated one, and their means."""
        metrics = RoundMetrics()
        for what in ("distance", "cosine"):
            metrics[f"drift/{what}_mean"] = float(arrays[what].mean())
            for client, value in zip(arrays["clients"].tolist(), arrays[what].tolist(), strict=True):
                metrics.clients[client][f"drift_{what}"] = value
        return metrics

    def draw(self, arrays: Arrays) -> Figure:
        """Draw bar charts of the distance and cosine similarity of each client's update to the aggregated one."""
        figure, places = panels(2)
        for axes, what in zip(places, ("distance", "cosine"), strict=True):
            bars(
                axes,
                labels(self.names.clients, arrays["clients"]),
                arrays[what],
                f"{what} of updates to the aggregate's",
            )
        return figure
