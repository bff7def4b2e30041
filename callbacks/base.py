"""The moments of a run at which a callback is called."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from fl_lightning.core.errors import ConfigError

if TYPE_CHECKING:
    from fl_lightning.engines import Result
    from fl_lightning.evaluation.metrics import Row
    from fl_lightning.orchestrator import FederatedOrchestrator


def is_own(kind: type) -> bool:
    """Whether a class is a user's own, and none of this package's."""
    return kind.__module__.partition(".")[0] != __name__.partition(".")[0]


def require(run: FederatedOrchestrator, section: str, refusal: str) -> None:
    """Refuse a run whose aggregator leaves a callback nothing to look at; of a user's own it is seen in round 1.

    Args:
        run: The run.
        section: The section of the state that the callback looks at.
        refusal: What to say.

    Raises:
        ConfigError: The aggregator does not leave it.
    """
    aggregator = run.algorithm.aggregator
    if section not in {*run.state, *aggregator.leaves} and (run.round or not is_own(type(aggregator))):
        raise ConfigError(refusal)


class RoundCallback:
    """Watches a run; subclasses override the moments they care for.

    `state_dict` travels with checkpoints, so a callback that counts goes on counting after a resume.
    """

    @property
    def stops(self) -> bool:
        """Whether the run is over, as far as this callback knows."""
        return False

    @property
    def stop_reason(self) -> str:
        """Why the callback stops the run; `fit` ends with it."""
        return ""

    def check(self, run: FederatedOrchestrator) -> None:
        """The run's data and state are there, and nothing of it is written yet: the moment to refuse what cannot work.

        Raises:
            ConfigError: It cannot.
        """

    def metrics(self, run: FederatedOrchestrator) -> Iterable[str]:
        """Names of the metrics that this callback adds, in every round or in some, so that others may watch them.

        In a name `<id>` stands for any whole number, as in `client_<id>/weight`. A metric that no callback names is
        refused as a `monitor` before the run begins, unless one of a user's own adds metrics and does not say which.
        """
        return ()

    def on_fit_start(self, run: FederatedOrchestrator) -> None:
        """The run's folder, data and state are there; no round has begun."""

    def on_round_start(self, run: FederatedOrchestrator, participants: Sequence[int]) -> None:
        """A round begins with these clients."""

    def on_client_end(self, run: FederatedOrchestrator, result: Result) -> None:
        """A client has finished its fit, or failed; the weights it uploads may be on the GPU that trained them."""

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
