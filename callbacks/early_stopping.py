"""Callback that stops a run early."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

from fl_lightning.callbacks.monitor import ACCURACIES, Monitor
from fl_lightning.core.errors import ConfigError, check_positive

if TYPE_CHECKING:
    from fl_lightning.callbacks.base import FederatedRun
    from fl_lightning.evaluation.round_metrics import RoundMetrics


class EarlyStopping(Monitor):
    """Stop the run when a metric has not improved for a number of evaluations.

    Args:
        monitor: The metric. By default `global/acc` or, for methods without a global model, `client/acc_mean`; the loss
            if there is no accuracy. Rounds without the metric or without an evaluation do not count.
        mode: Whether higher (`max`) or lower (`min`) is better; `auto` is the direction of the metric.
        patience: Number of evaluations without improvement after which the run stops.
        min_delta: Smallest change that counts as an improvement, 0 or more.

    Raises:
        ConfigError: `patience` is below 1, `min_delta` below 0 or no number, `mode` is unknown.
    """

    def __init__(
        self,
        monitor: str | None = None,
        mode: Literal["auto", "max", "min"] = "auto",
        patience: int = 10,
        min_delta: float = 0.0,
    ) -> None:
        super().__init__(monitor, mode)
        check_positive("callbacks: EarlyStopping.", patience=patience)
        if not 0 <= min_delta < math.inf:
            raise ConfigError(f"callbacks: EarlyStopping.min_delta: {min_delta} is not a finite number of 0 or more")
        self.patience, self.min_delta = patience, min_delta
        self.best: float | None = None
        self.waited = 0

    def check(self, run: FederatedRun) -> None:
        """Check that at least one round will log the watched metric."""
        super().check(run)
        if self.metric is None:
            fix = "Name another metric as monitor, or hold out test data (scenario.local_test)."
            raise ConfigError(f"callbacks: EarlyStopping: no round will have {' or '.join(ACCURACIES)}. {fix}")

    def on_round_metrics(self, run: FederatedRun, metrics: RoundMetrics) -> None:
        """Compare the watched metric of an evaluated round with its best value so far."""
        due = run.evaluation.is_due(run.round, run.rounds)
        if not due or (watched := self.watched(metrics)) is None:
            return
        value = watched if self.mode == "max" else -watched
        if self.best is None or value > self.best + self.min_delta:
            self.best, self.waited = value, 0
        else:
            self.waited += 1

    @property
    def stops(self) -> bool:
        """Whether the watched metric has not improved for `patience` evaluations."""
        return self.waited >= self.patience

    @property
    def stop_reason(self) -> str:
        """The reason for the stop: the watched metric, and the number of evaluations without improvement."""
        assert self.best is not None
        best = self.best if self.mode == "max" else -self.best
        evaluations = f"{self.waited} evaluations" if self.waited > 1 else "1 evaluation"
        by = f" by more than {self.min_delta:g}" if self.min_delta else ""
        return f"{self.metric} has not improved{by} for {evaluations} (best {best:.4g})"

    def state_dict(self) -> dict[str, Any]:
        """Return the best value of the watched metric, and the number of evaluations since that value."""
        return {"best": self.best, "waited": self.waited}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the best value of the watched metric, and the number of evaluations since that value."""
        self.best, self.waited = state["best"], state["waited"]
