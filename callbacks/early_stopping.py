"""Stop when a metric no longer gets better."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from fl_lightning.callbacks.base import RoundCallback, monitored

from fl_lightning.errors import ConfigError

if TYPE_CHECKING:
    from fl_lightning.metrics import Row
    from fl_lightning.orchestrator import FederatedOrchestrator


class EarlyStopping(RoundCallback):
    """Ends the run when a round metric has not improved for a number of evaluations.

    Args:
        monitor: The metric; by default `global/acc` or, for methods without a global model, `client/acc_mean`.
        mode: Whether more (`max`) or less (`min`) of it is better.
        patience: How many evaluations without an improvement end the run.
        min_delta: What counts as an improvement, at least.

    Raises:
        ConfigError: `patience` is below 1, or a round is evaluated and has no such metric.
    """

    def __init__(
        self,
        monitor: str | None = None,
        mode: Literal["max", "min"] = "max",
        patience: int = 10,
        min_delta: float = 0.0,
    ) -> None:
        if patience < 1:
            raise ConfigError(f"callbacks: EarlyStopping.patience: {patience} is below 1")
        self.monitor, self.mode, self.patience, self.min_delta = monitor, mode, patience, min_delta
        self.best: float | None = None
        self.waited = 0

    def on_round_metrics(self, run: FederatedOrchestrator, metrics: Row) -> None:
        """Compare an evaluated round with the best so far."""
        watched = monitored(metrics, self.monitor, "EarlyStopping")
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

    def state_dict(self) -> dict[str, Any]:
        """The best value and how long it has stood."""
        return {"best": self.best, "waited": self.waited}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on waiting."""
        self.best, self.waited = state["best"], state["waited"]
