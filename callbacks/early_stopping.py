"""Stop when a metric no longer gets better."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

from fl_lightning.callbacks.monitor import ACCURACIES, LOSSES, Monitor, round_metrics

from fl_lightning.core.errors import ConfigError, check_positive

if TYPE_CHECKING:
    from fl_lightning.callbacks.base import FederatedRun

    from fl_lightning.evaluation.metrics import Row


class EarlyStopping(Monitor):
    """Ends the run when a round metric has not improved for a number of evaluations.

    Args:
        monitor: The metric; by default `global/acc` or, for methods without a global model, `client/acc_mean`; where
            there is no accuracy, the loss. A round without it does not count.
        mode: Whether more (`max`) or less (`min`) of it is better; `auto` is the metric's own direction.
        patience: How many evaluations without an improvement end the run.
        min_delta: What counts as an improvement, at least; 0 or more.

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
            raise ConfigError(f"callbacks: EarlyStopping.min_delta: {min_delta} is no number from 0 on")
        self.patience, self.min_delta = patience, min_delta
        self.best: float | None = None
        self.waited = 0

    def check(self, run: FederatedRun) -> None:
        """Refuse what would never stop a run: a metric that no round will have.

        Raises:
            ConfigError: It is no metric, or none is named and no round will have an accuracy.
        """
        super().check(run)
        if self.monitor is None and not {*ACCURACIES, *LOSSES}.intersection(round_metrics(run)):
            mend = "name another as monitor, or hold data back to test on (scenario.local_test)"
            raise ConfigError(f"callbacks: EarlyStopping: no round will have {' or '.join(ACCURACIES)}; {mend}")

    def on_round_metrics(self, run: FederatedRun, metrics: Row) -> None:
        """Compare an evaluated round with the best so far."""
        watched = self.watched(metrics)
        if watched is None:
            return
        value = watched if self.mode == "max" else -watched
        if self.best is None or value > self.best + self.min_delta:
            self.best, self.waited = value, 0
        else:
            self.waited += 1

    @property
    def stops(self) -> bool:
        """Whether patience has run out."""
        return self.waited >= self.patience

    @property
    def stop_reason(self) -> str:
        """Which metric has not improved, and for how long."""
        metric = self.monitor or "the watched metric"
        return f"{metric} has not improved for {self.waited} evaluations (best {self.best:.4g})"

    def state_dict(self) -> dict[str, Any]:
        """The best value and how long it has stood."""
        return {"best": self.best, "waited": self.waited}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on waiting."""
        self.best, self.waited = state["best"], state["waited"]
