"""What CFL splits its clusters by, to set its thresholds from."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fl_lightning.callbacks.base import RoundCallback

from fl_lightning.errors import ConfigError

if TYPE_CHECKING:
    from fl_lightning.metrics import Row
    from fl_lightning.orchestrator import FederatedOrchestrator


class ClusterNorms(RoundCallback):
    """The norms that CFL's `eps1` and `eps2` are compared with, and the number of clusters.

    Logs `clusters/count`, and of each cluster that had participants `clusters/mean_norm_<c>`, the norm of the mean
    update, and `clusters/max_norm_<c>`, the largest of its members'.

    Raises:
        ConfigError: The method has no such clusters.
    """

    def on_round_metrics(self, run: FederatedOrchestrator, metrics: Row) -> None:
        """Add the round's."""
        if "norms" not in run.state:
            owner = type(run.algorithm).__name__
            raise ConfigError(f"callbacks: ClusterNorms: {owner} splits no clusters; leave it out, or use CFL")
        for name in ("mean", "max"):
            for cluster, norm in enumerate(run.state["norms"][name].tolist()):
                if norm == norm:  # NaN: nobody of it took part
                    metrics[f"clusters/{name}_norm_{cluster}"] = norm
        metrics["clusters/count"] = float(run.state["assignment"]["cluster"].max() + 1)
