"""What CFL splits its clusters by, to set its thresholds from."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from fl_lightning.callbacks.base import RoundCallback, require

if TYPE_CHECKING:
    from fl_lightning.callbacks.base import FederatedRun

    from fl_lightning.evaluation.metrics import Row


class ClusterNorms(RoundCallback):
    """The norms that CFL's `eps1` and `eps2` are compared with, and the number of clusters.

    Logs `clusters/count`, and of each cluster that had participants `clusters/mean_norm_<c>`, the norm of the mean
    update, and `clusters/max_norm_<c>`, the largest of its members'.

    Raises:
        ConfigError: The method has no such clusters.
    """

    def check(self, run: FederatedRun) -> None:
        """Refuse a method without such clusters.

        Raises:
            ConfigError: It has none.
        """
        owner = type(run.algorithm).__name__
        require(run, "norms", f"callbacks: ClusterNorms: {owner} splits no clusters; leave it out, or use CFL")

    def metrics(self, run: FederatedRun) -> Iterable[str]:
        """The number of clusters, and each cluster's norms."""
        return ["clusters/count", "clusters/mean_norm_<id>", "clusters/max_norm_<id>"]

    def on_round_metrics(self, run: FederatedRun, metrics: Row) -> None:
        """Add the round's."""
        self.check(run)
        for name in ("mean", "max"):
            for cluster, norm in enumerate(run.state["norms"][name].tolist()):
                if norm == norm:  # NaN: nobody of it took part
                    metrics[f"clusters/{name}_norm_{cluster}"] = norm
        metrics["clusters/count"] = float(run.state["assignment"]["cluster"].max() + 1)
