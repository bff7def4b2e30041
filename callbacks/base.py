"""The moments of a run at which a callback is called."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fl_lightning.errors import ConfigError

if TYPE_CHECKING:
    from fl_lightning.engines import Result
    from fl_lightning.metrics import Row
    from fl_lightning.orchestrator import FederatedOrchestrator


def monitored(metrics: Row, name: str | None, owner: str) -> float | None:
    """A round's value of a metric that a callback watches; None in a round that was not evaluated.

    Args:
        metrics: The round's metrics.
        name: The metric; by default the accuracy of the global model or, for methods without, the clients' mean.
        owner: The callback, for the message.

    Raises:
        ConfigError: The round was evaluated, and there is no such metric; the message says which there are.
    """
    evaluated = [known for known in ("global/acc", "client/acc_mean") if known in metrics]
    if name is None:
        return metrics[evaluated[0]] if evaluated else None
    if name not in metrics and evaluated:
        raise ConfigError(f"callbacks: {owner}.monitor: there is no metric {name!r}; there are {', '.join(metrics)}")
    return metrics.get(name)


class RoundCallback:
    """Watches a run; subclasses override the moments they care for.

    `state_dict` travels with checkpoints, so a callback that counts goes on counting after a resume.
    """

    @property
    def stops(self) -> bool:
        """Whether the run is over, as far as this callback knows."""
        return False

    def check(self, run: FederatedOrchestrator) -> None:
        """The run's data and state are there, and nothing of it is written yet: the moment to refuse what cannot work.

        Raises:
            ConfigError: It cannot.
        """

    def on_fit_start(self, run: FederatedOrchestrator) -> None:
        """The run's folder, data and state are there; no round has begun."""

    def on_round_start(self, run: FederatedOrchestrator, participants: Sequence[int]) -> None:
        """A round begins with these clients."""

    def on_client_end(self, run: FederatedOrchestrator, result: Result) -> None:
        """A client has finished its fit, or failed."""

    def on_round_metrics(self, run: FederatedOrchestrator, metrics: Row) -> None:
        """The round is aggregated and evaluated; metrics may be added before they are logged."""

    def on_round_end(self, run: FederatedOrchestrator, metrics: Row) -> None:
        """The round's metrics are on disk."""

    def on_fit_end(self, run: FederatedOrchestrator) -> None:
        """The run is over, or broken off; always called."""

    def state_dict(self) -> dict[str, Any]:
        """Numbers and strings to keep in checkpoints."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up what `state_dict` gave."""
