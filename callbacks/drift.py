"""How far clients drift apart in a round."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
from fl_lightning.callbacks.figures import Arrays, RoundFigure, trained_model
from fl_lightning.callbacks.plots import bars, panels
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn import functional as F

from fl_lightning.core.errors import ConfigError
from fl_lightning.core.message import Tensors
from fl_lightning.core.state import flatten

if TYPE_CHECKING:
    from fl_lightning.callbacks.base import FederatedRun

    from fl_lightning.engines import Result
    from fl_lightning.evaluation.metrics import Row


class ClientDrift(RoundFigure):
    """Distance and cosine of each local update to the aggregate's, over all parameters.

    A local update is what a client trained less what it started from; the aggregate's is the new shared model less the
    last. Logs `drift/distance_mean` (Euclidean), `drift/cosine_mean`, and each client's own beside its other series. It
    holds the round's updates in memory until the aggregation.

    Args:
        every: Rounds between measurements; by default each round has one.

    Raises:
        ConfigError: Clients' models as trained are not to be known, as CriticalFL's in a critical period, or clients
            share nothing of them.
    """

    name = "drift"
    looks_at_clients = True

    def __init__(self, every: int = 1) -> None:
        super().__init__(every)
        self._updates: dict[int, Tensor] = {}
        self._before: Tensors | None = None

    def check(self, run: FederatedRun) -> None:
        """Refuse a method that aggregates no models.

        Raises:
            ConfigError: It does not.
        """
        super().check(run)
        if not run.state["model"]:
            method = type(run.algorithm).__name__
            raise ConfigError(f"callbacks: ClientDrift: clients of {method} share no model to drift from; leave it out")

    def metrics(self, run: FederatedRun) -> Iterable[str]:
        """Means, and each client's."""
        forms = ("drift/{}_mean", "client_<id>/drift_{}")
        return [form.format(what) for form in forms for what in ("distance", "cosine")]

    def on_client_end(self, run: FederatedRun, result: Result) -> None:
        """Keep one client's update."""
        if not self.is_due(run, run.round + 1) or result.upload is None:
            return
        trained, shared = trained_model(run, result), run.state["model"]
        start = run.starting_module(result.client).backbone.state_dict()
        _, begun, ended = flatten([shared, start, trained])
        self._before, self._updates[result.client] = shared, (ended - begun).float()

    def measure(self, run: FederatedRun) -> Arrays:
        """`clients`, `distance` and `cosine`, each `(K,)`."""
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

    def numbers(self, arrays: Arrays) -> Row:
        """Means, and each client's."""
        row = {f"drift/{what}_mean": float(arrays[what].mean()) for what in ("distance", "cosine")}
        for i, client in enumerate(arrays["clients"]):
            row |= {f"client_{client}/drift_{what}": float(arrays[what][i]) for what in ("distance", "cosine")}
        return row

    def draw(self, arrays: Arrays) -> Figure:
        """A bar a client, of each."""
        figure, places = panels(2)
        for axes, what in zip(places, ("distance", "cosine"), strict=True):
            bars(axes, arrays["clients"], arrays[what], f"{what} to the aggregate's update")
        return figure
