"""The progress of a run within its rounds, which the displays of a terminal, a file and a notebook read."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from fl_lightning.callbacks.base import FederatedRun


class Pace:
    """The progress of a run within its rounds, and the time that is left. It receives the reports of a round.

    Args:
        run: The run.
        clock: Returns the present time in seconds.

    Attributes:
        finished_rounds: Number of finished rounds.
        clients: Number of clients of the present round; 0 between rounds.
        trained: Number of them that have finished their fit.
        steps: Number of training steps of the clients that are being trained.
        all_steps: Number of their steps in all; 0 if it is not known.
        together: Number of clients that are being trained together.
        evaluated: Number of clients' models that have been evaluated after the round.
        all_evaluated: Number of models to evaluate; 0 while clients train.
    """

    def __init__(self, run: FederatedRun, clock: Callable[[], float]) -> None:
        self.run, self.clock = run, clock
        self.started, self.first_round = clock(), run.round
        self.view: View | None = None
        self.begin_round(0)

    def begin_round(self, clients: int) -> None:
        """Reset the progress for a round with a number of clients."""
        self.finished_rounds, self.clients, self.trained = self.run.round, clients, 0
        self.evaluated = self.all_evaluated = 0
        self._begin_client()

    def _begin_client(self) -> None:
        self.steps, self.all_steps, self.together, self._client_started = 0, 0, 1, self.clock()

    def on_client(self) -> None:
        """Count a client that has finished its fit."""
        self.trained += 1
        self._begin_client()
        self.on_waiting()

    def on_steps(self, done: int, total: int, clients: int) -> None:
        """Record the training steps of the clients that are being trained."""
        self.steps, self.all_steps, self.together = done, total, clients
        self.on_waiting()

    def on_evaluated(self, done: int, total: int) -> None:
        """Record how many of the clients' models have been evaluated after the round."""
        self.evaluated, self.all_evaluated = done, total
        self.on_waiting()

    def on_waiting(self) -> None:
        """Let the display show that time passes."""
        if self.view:
            self.view.tick()

    @property
    def seconds(self) -> float:
        """Seconds since the run began or was resumed."""
        return self.clock() - self.started

    @property
    def client_seconds(self) -> float:
        """Seconds since a client of the round began its fit or ended it."""
        return self.clock() - self._client_started

    @property
    def rounds(self) -> float:
        """Number of finished rounds, with the finished share of the present one, measured in steps of its clients."""
        if not self.clients:
            return self.finished_rounds
        training = self.together * self.steps / self.all_steps if self.all_steps else 0.0
        return self.finished_rounds + min((self.trained + training) / self.clients, 1.0)

    @property
    def seconds_left(self) -> float | None:
        """The estimated seconds until the run ends, if all rounds take equally long; None if nothing is done yet."""
        done = self.rounds - self.first_round
        return self.seconds / done * (self.run.rounds - self.rounds) if done > 0 else None

    def describe_steps(self) -> str:
        """Return the steps of the clients that are being trained, or the number of evaluated models, as text.

        It is empty if they are not known.
        """
        if self.all_evaluated:
            return f"evaluated {self.evaluated}/{self.all_evaluated}"
        if not self.all_steps:
            return ""
        return f"step {self.steps}/{self.all_steps}" + (f" of {self.together} clients" if self.together > 1 else "")


class View(Protocol):
    """A display of the progress of a run, which it reads from a `Pace`."""

    def tick(self) -> None:
        """Called when a client has trained a step or has finished its fit. It must return quickly."""

    def end_round(self, note: str) -> None:
        """Show the metrics of a finished round."""

    def end(self, reason: str) -> None:
        """End the display, because the run is over."""
