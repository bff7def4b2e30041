"""The moments of a run at which a callback is called."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from fl_lightning.core.errors import ConfigError

if TYPE_CHECKING:
    from fl_lightning.algorithms import Algorithm
    from fl_lightning.client.module import ClientModule
    from fl_lightning.core.state import State
    from fl_lightning.core.task import Result
    from fl_lightning.data import FederatedData
    from fl_lightning.engines import Engine, Worker
    from fl_lightning.evaluation.evaluation import Evaluation
    from fl_lightning.evaluation.metrics import Row
    from fl_lightning.loggers.collection import Loggers, MetricsCsv
    from fl_lightning.runs.record import Keep


class FederatedRun(Protocol):
    """What a callback may use of the run that it watches; `FederatedOrchestrator` provides it.

    Attributes:
        algorithm: The federated method.
        callbacks: All callbacks of the run.
        clients: Number of clients.
        csv: The measurements; `csv.rows` holds those of all rounds so far.
        data: The dataset and who holds what.
        engine: Carries out the clients' fits.
        evaluation: What is measured.
        logger: The run's loggers.
        on_client_failure: `raise` or `drop`.
        round: The last finished round.
        rounds: Number of rounds.
        run_dir: The run's folder.
        scored: The clients whose received models are scored.
        state: The shared state after `round`.
        worker: Builds and scores client modules.
    """

    algorithm: Algorithm
    callbacks: list[RoundCallback]
    clients: int
    csv: MetricsCsv
    data: FederatedData
    engine: Engine
    evaluation: Evaluation
    logger: Loggers
    on_client_failure: Any
    round: int
    rounds: int
    run_dir: Path
    scored: Sequence[int]
    state: State
    worker: Worker

    @property
    def is_over(self) -> bool:
        """Whether all rounds are done, or a callback has stopped the run."""

    def client_module(self, client: int) -> ClientModule:
        """Return a client's module as the last round left it."""

    def starting_module(self, client: int) -> ClientModule:
        """Return a client's module, on the CPU, as it starts the round under way."""

    def save_checkpoint(self, keep: Keep | None = None) -> None:
        """Write a checkpoint of the last finished round."""


def is_own(kind: type) -> bool:
    """Whether a class is a user's own, and none of this package's."""
    return kind.__module__.partition(".")[0] != __name__.partition(".")[0]


def require(run: FederatedRun, section: str, refusal: str) -> None:
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

    def check(self, run: FederatedRun) -> None:
        """The run's data and state are there, and nothing of it is written yet: the moment to refuse what cannot work.

        Raises:
            ConfigError: It cannot.
        """

    def metrics(self, run: FederatedRun) -> Iterable[str]:
        """Names of the metrics that this callback adds, in every round or in some, so that others may watch them.

        In a name `<id>` stands for any whole number, as in `client_<id>/weight`. A metric that no callback names is
        refused as a `monitor` before the run begins, unless one of a user's own adds metrics and does not say which.
        """
        return ()

    def on_fit_start(self, run: FederatedRun) -> None:
        """The run's folder, data and state are there; no round has begun."""

    def on_round_start(self, run: FederatedRun, participants: Sequence[int]) -> None:
        """A round begins with these clients."""

    def on_client_end(self, run: FederatedRun, result: Result) -> None:
        """A client has finished its fit, or failed; the weights it uploads may be on the GPU that trained them."""

    def on_round_metrics(self, run: FederatedRun, metrics: Row) -> None:
        """The round is aggregated and evaluated; metrics may be added before they are logged."""

    def on_round_end(self, run: FederatedRun, metrics: Row) -> None:
        """The round's metrics are on disk."""

    def on_fit_end(self, run: FederatedRun) -> None:
        """The run is over, or broken off; always called."""

    def state_dict(self) -> dict[str, Any]:
        """Numbers and strings to keep in checkpoints."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up what `state_dict` gave."""
