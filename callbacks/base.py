"""Base class of round callbacks, and the interface through which they access the run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from fl_lightning.core.capabilities import Capable
from fl_lightning.core.errors import ConfigError

if TYPE_CHECKING:
    from fl_lightning.algorithms import Algorithm
    from fl_lightning.attacks import Adversary
    from fl_lightning.client.module import ClientModule
    from fl_lightning.core.state_dicts import State
    from fl_lightning.core.task import Result
    from fl_lightning.data import FederatedData, Scenario
    from fl_lightning.engines import Engine, Worker
    from fl_lightning.engines.evaluator import Evaluator
    from fl_lightning.evaluation.evaluation import Evaluation
    from fl_lightning.evaluation.round_metrics import RoundMetrics
    from fl_lightning.loggers.collection import Loggers
    from fl_lightning.runs.metrics_csv import MetricsCsv
    from fl_lightning.runs.record import Keep


class FederatedRun(Protocol):
    """The attributes and methods of a run that callbacks may use. `FederatedOrchestrator` implements them.

    Attributes:
        adversary: Which clients attack, and how.
        algorithm: The federated method.
        callbacks: All callbacks of the run.
        clients: Number of clients.
        csv: The metrics; `csv.rows` holds those of all rounds so far.
        data: The dataset and its partition.
        engine: Trains the clients of a round.
        evaluation: The options of evaluation.
        is_dry_run: Whether `fit` makes a dry run, in a temporary folder.
        logger: The run's loggers.
        on_client_failure: `raise` or `drop`.
        round: The last finished round.
        rounds: Number of rounds.
        run_dir: The run folder.
        scenario: The dataset, the partition and the local test split.
        evaluator: Evaluates models; `evaluator.scored` has the ids of the clients that are evaluated.
        worker: Builds and scores client modules.
    """

    adversary: Adversary
    algorithm: Algorithm
    callbacks: list[RoundCallback]
    clients: int
    csv: MetricsCsv
    data: FederatedData
    engine: Engine
    evaluation: Evaluation
    evaluator: Evaluator
    is_dry_run: bool
    logger: Loggers
    on_client_failure: Any
    round: int
    rounds: int
    run_dir: Path
    scenario: Scenario
    worker: Worker

    @property
    def state(self) -> State:
        """The algorithm's shared state, such as the global model, after the last finished round."""

    @property
    def is_over(self) -> bool:
        """Whether all rounds are done, or a callback has stopped the run."""

    def client_module(self, client: int) -> ClientModule:
        """Return a client's module with the weights that the client would receive in the next round.

        Without a server, it has the weights that the client trained last.
        """

    def starting_module(self, client: int) -> ClientModule:
        """Return a client's module on the CPU, with the weights from which its training in this round starts."""

    def save_checkpoint(self, keep: Keep | None = None) -> None:
        """Write a checkpoint of the last finished round."""


def is_own(kind: type) -> bool:
    """Return whether a class is a user's own class, not part of this package."""
    return kind.__module__.partition(".")[0] != __name__.partition(".")[0]


def require(run: FederatedRun, section: str, refusal: str) -> None:
    """Raise an error if the method's shared state lacks a section (group of tensors) that a callback reads.

    Sections that the aggregator lists in `leaves` count as present. A user's own aggregator is checked in round 1.

    Args:
        run: The run.
        section: The section of the state that the callback reads.
        refusal: The error message.

    Raises:
        ConfigError: The aggregator does not write the section.
    """
    aggregator = run.algorithm.aggregator
    if section not in {*run.state, *aggregator.leaves} and (run.round or not is_own(type(aggregator))):
        raise ConfigError(refusal)


class RoundCallback(Capable):
    """Base class of round callbacks. Subclasses override the hooks that they need, like `on_round_end`.

    `state_dict` is saved in checkpoints, so that a callback can continue after a resume.

    Attributes:
        keeps_no_uploads: Whether `on_client_end` keeps no tensor of the upload, whose memory is then used for the next
            client. A subclass that overrides `on_client_end` can set it.
        initial_state: The state before the first run, from which each new run starts. The orchestrator sets it.
    """

    capabilities: ClassVar = {"keeps_no_uploads": ("on_client_end",)}
    keeps_no_uploads: bool = True
    initial_state: dict[str, Any] | None = None

    @property
    def stops(self) -> bool:
        """Whether this callback stops the run after the present round."""
        return False

    @property
    def stop_reason(self) -> str:
        """The reason why this callback stops the run. `fit` prints it when the run ends."""
        return ""

    def check(self, run: FederatedRun) -> None:
        """Check the callback's options against the run's data and method, before any file is written.

        Raises:
            ConfigError: An option does not fit the run.
        """

    def metrics(self, run: FederatedRun) -> Iterable[str]:
        """Return the names of the metrics that this callback adds. Other callbacks can watch them (option `monitor`).

        In a name, `<id>` stands for any whole number, as in `client_<id>/weight`. A `monitor` that no callback names is
        refused before the run begins, unless a user's callback adds metrics without naming them here.
        """
        return ()

    def on_fit_start(self, run: FederatedRun) -> None:
        """Called before the first round, when run folder, data and state exist."""

    def on_round_start(self, run: FederatedRun, participants: Sequence[int]) -> None:
        """Called when a round begins.

        Args:
            run: The run.
            participants: Ids of the clients of the round, ascending.
        """

    def on_client_end(self, run: FederatedRun, result: Result) -> None:
        """Called when a client has finished its fit or failed. Its uploaded tensors may be on a GPU."""

    def on_round_metrics(self, run: FederatedRun, metrics: RoundMetrics) -> None:
        """Called after aggregation and evaluation, before logging. The callback may add to `metrics`.

        The metrics of client 3 are in `metrics.clients[3]`.
        """

    def on_round_end(self, run: FederatedRun, metrics: RoundMetrics) -> None:
        """Called when the metrics of the round are on disk."""

    def on_fit_end(self, run: FederatedRun) -> None:
        """Called when the run ends, also after an error."""

    def state_dict(self) -> dict[str, Any]:
        """Return the callback's state to save in checkpoints, as numbers and strings."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the callback's state from a checkpoint, as `state_dict` returned it."""
