"""The schedule of a run on a simulated clock: which results arrive in each round, and when.

It does not depend on the results themselves. So it is computed before a round, and a resumed run computes it again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from fl_lightning.core.arguments import ArgumentsMixin
from fl_lightning.core.seeding import Stream, generator
from fl_lightning.scheduling.clock import ClientWork, Clock


@dataclass(frozen=True, order=True)
class Dispatch:
    """A client at work, from the server's message to its upload. The order is that of the ends, then of the ids.

    Args:
        end: When its upload arrives, in simulated seconds since the start of the run.
        client: The client's id.
        version: The number of finished rounds when it got its message: the version of the model it trains.
    """

    end: float
    client: int
    version: int


@dataclass(frozen=True)
class RoundPlan:
    """The results that a round aggregates.

    Args:
        arrived: The clients whose uploads arrive in the round, in order of arrival.
        metrics: Metrics of the round: its simulated duration `time/simulated_s`, and those of the policy.
    """

    arrived: list[Dispatch]
    metrics: dict[str, float]

    @property
    def versions(self) -> dict[int, int]:
        """The version of the model that each client has trained, by client id in ascending order."""
        return {one.client: one.version for one in sorted(self.arrived, key=lambda one: one.client)}


class RoundPolicy(ArgumentsMixin, ABC):
    """Base class of round policies. The config key is `round_policy`; it needs a `clock`.

    Attributes:
        carries_over: Whether clients can still be at work when a round ends. Their uploads then belong to a model of an
            earlier round (stale uploads), which only some aggregators use.
        metrics: Names of the metrics that `collect` returns.
    """

    carries_over: bool = False
    metrics: tuple[str, ...] = ()

    @abstractmethod
    def collect(self, schedule: Schedule, size: int) -> tuple[list[Dispatch], dict[str, float]]:
        """Advance a schedule by a round. Return the uploads that the round aggregates, and metrics of the policy.

        Args:
            schedule: The schedule, at the start of the round.
            size: The number of results wanted.
        """


@dataclass
class Schedule:
    """The clients at work, and the simulated time, from round to round.

    Args:
        policy: Decides which results a round waits for.
        clock: The clients' speeds.
        sample: The client sampler: returns the ids of a number of clients for a round.
        work: What each client does in a round.
        seed: The run's seed.
        min_clients: Smallest number of uploads of a round.

    Attributes:
        now: Simulated seconds since the start of the run.
        running: The clients at work.
        round: The round that is being planned.
    """

    policy: RoundPolicy
    clock: Clock
    sample: Callable[[int, int], list[int]]
    work: list[ClientWork]
    seed: int
    min_clients: int = 1
    now: float = field(default=0.0, init=False)
    running: list[Dispatch] = field(default_factory=list, init=False)
    round: int = field(default=0, init=False)

    def plan(self, round: int, size: int) -> RoundPlan:
        """Return the results that a round aggregates. Earlier rounds are planned again if needed.

        Args:
            round: The round, from 1.
            size: The number of results wanted: `clients_per_round`, or the method's own number.
        """
        if not self.policy.carries_over:
            self.now, self.running, self.round = 0.0, [], round - 1
        elif round <= self.round:
            self.now, self.running, self.round = 0.0, [], 0
        while self.round < round:
            self.round += 1
            began = self.now
            arrived, metrics = self.policy.collect(self, size)
        return RoundPlan(arrived, {"time/simulated_s": self.now - began} | metrics)

    def staleness(self, arrived: Sequence[Dispatch]) -> dict[str, float]:
        """Return the metric `client/staleness`: how many rounds old the clients' models are, on average.

        A round without uploads has no such metric.
        """
        ages = [self.round - 1 - one.version for one in arrived]
        return {"client/staleness": sum(ages) / len(ages)} if ages else {}

    def dispatch(self, size: int, busy: Collection[int] = ()) -> None:
        """Send the current model to up to `size` clients.

        If all clients are free, the client sampler draws them, as in a run without a clock. Otherwise they are drawn
        uniformly from the free ones.

        Args:
            size: Number of clients.
            busy: Clients that are not free, in addition to those at work.
        """
        taken = {*busy, *(one.client for one in self.running)}
        free = np.setdiff1d(np.arange(len(self.work)), [*taken])
        size = min(size, len(free))
        if size < 1:
            return
        if taken:
            rng = generator(self.seed, Stream.REPLACEMENTS, self.round, len(busy))
            chosen = rng.choice(free, size, replace=False).tolist()
        else:
            chosen = self.sample(self.round, size)
        for client in chosen:
            seconds = self.clock.seconds(client, self.work[client], self.round)
            self.running.append(Dispatch(self.now + seconds, client, self.round - 1))

    def next_arrivals(self, most: int) -> list[Dispatch]:
        """Advance the time to the next uploads, and return those that arrive at this time, at most `most`."""
        self.now = min(self.running).end
        arrived = sorted(one for one in self.running if one.end == self.now)[:most]
        self.running = [one for one in self.running if one not in arrived]
        return arrived
