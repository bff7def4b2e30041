"""Callback that records the update norms by which CFL (clustered federated learning) splits clusters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from fl_lightning.callbacks.base import RoundCallback, require

if TYPE_CHECKING:
    from fl_lightning.callbacks.base import FederatedRun
    from fl_lightning.evaluation.round_metrics import RoundMetrics


class ClusterNorms(RoundCallback):
    """Record the number of clusters, and the update norms by which CFL decides whether to split a cluster.

    CFL compares the norms with its options `eps1` and `eps2`. Logs `clusters/count` and, for each cluster with
    participants, `clusters/mean_norm_<c>`, the norm of the mean update, and `clusters/max_norm_<c>`, the largest norm
    of a member's update.

    Raises:
        ConfigError: The method does not split clusters by these norms.
    """

    def check(self, run: FederatedRun) -> None:
        """Check that the method splits clusters by the norms of clients' updates, like CFL."""
        owner = type(run.algorithm).__name__
        require(run, "norms", f"callbacks: ClusterNorms: {owner} has no clusters. Leave it out, or use CFL.")

    def metrics(self, run: FederatedRun) -> Iterable[str]:
        """Return the metric names: cluster count, and the norms of each cluster's mean update and largest update."""
        return ["clusters/count", "clusters/mean_norm_<id>", "clusters/max_norm_<id>"]

    def on_round_metrics(self, run: FederatedRun, metrics: RoundMetrics) -> None:
        """Add the number of clusters and each cluster's update norms to the round's metrics."""
        self.check(run)
        for name in ("mean", "max"):
            for cluster, norm in enumerate(run.state["norms"][name].tolist()):
                if norm == norm:  # NaN: no member took part
                    metrics[f"clusters/{name}_norm_{cluster}"] = norm
        metrics["clusters/count"] = float(run.state["assignment"]["cluster"].max() + 1)
