"""The privacy that training with `dp_sgd` has cost so far."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from fl_lightning.callbacks.base import RoundCallback
from fl_lightning.core.errors import ConfigError
from fl_lightning.privacy.accountant import poisson_epsilon

if TYPE_CHECKING:
    from fl_lightning.callbacks.base import FederatedRun
    from fl_lightning.evaluation.round_metrics import RoundMetrics

LARGEST = "privacy/record_epsilon"
"""The largest epsilon of a client."""


class RecordPrivacy(RoundCallback):
    """Compute each client's epsilon for a single record, from all of its steps so far. Runs with `dp_sgd` have it.

    Logs `privacy/record_epsilon`, the largest one, and each participant's as `record_epsilon` of the client. A client
    that was asked to train counts as trained, whether or not its upload arrived.
    """

    keeps_no_uploads = True

    def __init__(self) -> None:
        self.rounds: Counter[int] = Counter()  # by client: the rounds in which it took part
        self.largest = 0.0
        self._participants: Sequence[int] = ()

    def check(self, run: FederatedRun) -> None:
        """Check that the run has `dp_sgd`, and that the accountant is installed."""
        options = run.worker.training.dp_sgd
        if options is None:
            raise ConfigError("callbacks: RecordPrivacy measures the privacy of dp_sgd, which is not set. Remove it.")
        poisson_epsilon(1.0, 1.0, 1, options.delta)

    def metrics(self, run: FederatedRun) -> Iterable[str]:
        """Return the names of the largest epsilon, and of each client's."""
        return [LARGEST, "client_<id>/record_epsilon"]

    def on_round_start(self, run: FederatedRun, participants: Sequence[int]) -> None:
        """Count the participants' fits."""
        self._participants = participants
        self.rounds.update(participants)

    def on_round_metrics(self, run: FederatedRun, metrics: RoundMetrics) -> None:
        """Add the participants' epsilons, and the largest epsilon of all clients."""
        for client in self._participants:
            epsilon = self.epsilon(run, client)
            self.largest = max(self.largest, epsilon)
            metrics.clients.setdefault(client, {})["record_epsilon"] = epsilon
        metrics[LARGEST] = self.largest

    def epsilon(self, run: FederatedRun, client: int) -> float:
        """Return a client's epsilon after its rounds so far. Infinity without noise, 0 before its first round."""
        options = run.worker.training.dp_sgd
        assert options
        assert options.noise is not None
        work = run.worker.client_data.private_work(client)
        return poisson_epsilon(options.noise, work.rate, work.steps * self.rounds[client], options.delta)

    def state_dict(self) -> dict[str, Any]:
        """Return the number of each client's rounds and the largest epsilon, to save in a checkpoint."""
        return {"rounds": {str(client): count for client, count in self.rounds.items()}, "largest": self.largest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the numbers of the rounds before the resume."""
        self.rounds = Counter({int(client): count for client, count in state["rounds"].items()})
        self.largest = state["largest"]
