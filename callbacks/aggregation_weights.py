"""Callback that records each client's weight in the server's average (FedSKC, FedSiam-DA, cwFedAVG)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from matplotlib.figure import Figure

from fl_lightning.callbacks.base import require
from fl_lightning.callbacks.figures import Arrays, RoundFigure
from fl_lightning.callbacks.plots import bars, heat_maps, panels
from fl_lightning.core.names import labels
from fl_lightning.evaluation.round_metrics import RoundMetrics

if TYPE_CHECKING:
    from fl_lightning.callbacks.base import FederatedRun


class AggregationWeights(RoundFigure):
    """Record each client's weight in the server's average, for methods that compute such weights.

    Logs `client_<id>/weight`, summed over classes.

    Args:
        every: Rounds between measurements. By default every round.

    Raises:
        ConfigError: The aggregator computes no weights, like the mean by samples.
    """

    name = "aggregation_weights"

    def __init__(self, every: int = 1) -> None:
        super().__init__(every)

    def check(self, run: FederatedRun) -> None:
        """Check that the method computes aggregation weights."""
        super().check(run)
        self._require_weights(run)

    def metrics(self, run: FederatedRun) -> Iterable[str]:
        """Return the name of the logged metric, `client_<id>/weight`."""
        return ["client_<id>/weight"]

    def measure(self, run: FederatedRun) -> Arrays:
        """Return the ids of the clients in the server's average, and their weights.

        The ids are `(K,)`. The weights are `(K,)` or, if the method weights each class separately, `(K, C)`.
        """
        self._require_weights(run)
        clients, weights = (run.state["weights"][name].numpy() for name in ("client", "value"))
        return {"clients": clients[clients >= 0], "weights": weights[clients >= 0]}

    @staticmethod
    def _require_weights(run: FederatedRun) -> None:
        owner = type(run.algorithm.aggregator if run.algorithm.server else run.algorithm).__name__
        require(run, "weights", f"callbacks: AggregationWeights: {owner} computes no weights. Leave it out.")

    def numbers(self, arrays: Arrays) -> RoundMetrics:
        """Return each client's aggregation weight, summed over classes."""
        totals = arrays["weights"].reshape(len(arrays["clients"]), -1).sum(axis=1)
        clients = zip(arrays["clients"].tolist(), totals.tolist(), strict=True)
        return RoundMetrics(clients={client: {"weight": weight} for client, weight in clients})

    def draw(self, arrays: Arrays) -> Figure:
        """Draw the aggregation weights: a bar per client or, for weights by class, a heat map."""
        clients = labels(self.names.clients, arrays["clients"])
        if arrays["weights"].ndim == 2:
            weights = {"weight of a client in a class model": arrays["weights"]}
            return heat_maps(weights, row_names=clients, column_names=self.names.classes)
        figure, (axes,) = panels(1)
        bars(axes, clients, arrays["weights"], "weight in the aggregation")
        axes.axhline(1 / len(arrays["clients"]), color="grey", linewidth=0.8)
        return figure
