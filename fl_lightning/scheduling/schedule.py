"""The schedule of a run on a simulated clock: which results arrive in each round, and when.

It does not depend on the results themselves. So it is computed before a round, and a resumed run computes it again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from fl_lightning.core.arguments import PartMixin
from fl_lightning.core.seeding import Stream, generator
from fl_lightning.scheduling.clock import ClientWork, Clock
from fl_lightning.scheduling.hours import Hours


@dataclass(frozen=True, order=True)
class Dispatch:
    """A client at work, from the server's message to its upload. The order is that of the ends, then of the ids.

    Args:
        end: When its upload arrives, in simulated seconds since the start of the run.
        client: The client's id.
        version: The number of finished rounds when it got its message: the version of the model it trains.
        steps: The number of training steps that it has time for, if it is less than all of its work.
    """

    end: float
    client: int
    version: int
    steps: int | None = field(default=None, compare=False)


@dataclass(frozen=True)
class RoundPlan:
    """The results that a round aggregates.

    Args:
        arrived: The clients whose uploads arrive in the round, in order of arrival.
        metrics: Metrics of the round: its simulated duration `time/simulated_s`, and those of the policy.
        tier: The tier whose round it is; 0 without tiers.
    """

    arrived: list[Dispatch]
    metrics: dict[str, float]
    tier: int = 0

    @property
    def versions(self) -> dict[int, int]:
        """The version of the model that each client has trained, by client id in ascending order."""
        return {one.client: one.version for one in sorted(self.arrived, key=lambda one: one.client)}

    @property
    def steps(self) -> dict[int, int]:
        """The number of training steps of each client that has not time for all of its work, by client id."""
        return {one.client: one.steps for one in self.arrived if one.steps is not None}


class RoundPolicy(PartMixin, ABC):
    """Base class of round policies. The config key is `round_policy`; it needs a `clock`.

    Attributes:
        carries_over: Whether clients can still be at work when a round ends. Their uploads then belong to a model of an
            earlier round (stale uploads), which only some aggregators use.
        limits_work: Whether clients may be asked to take fewer training steps than they would.
        tiers: Number of groups of similarly fast clients that work side by side, see `Schedule.tier_of`.
        metrics: Names of the metrics that `collect` returns.
    """

    section = "round_policy"
    carries_over = False
    limits_work = False
    tiers: int = field(default=1, init=False)
    metrics: tuple[str, ...] = field(default=(), init=False)

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

    @cached_property
    def tier_of(self) -> list[int]:
        """The tier of each client: by their time for round 1, in `policy.tiers` groups of equal size, fastest first."""
        clients = len(self.work)
        found = [0] * clients
        if self.policy.tiers > 1:
            order = sorted(range(clients), key=lambda client: self.clock.seconds(client, self.work[client], 1))
            for rank, client in enumerate(order):
                found[client] = rank * self.policy.tiers // clients
        return found

    @property
    def carries_over(self) -> bool:
        """Whether a round depends on the rounds before it: on clients at work, or on the time of the day."""
        return self.policy.carries_over or self.clock.hours is not None

    def plan(self, round: int, size: int) -> RoundPlan:
        """Return the results that a round aggregates. Earlier rounds are planned again if needed.

        Args:
            round: The round, from 1.
            size: The number of results wanted: `clients_per_round`, or the method's own number.
        """
        if not self.carries_over:
            self.now, self.running, self.round = 0.0, [], round - 1
        elif round <= self.round:
            self.now, self.running, self.round = 0.0, [], 0
        while self.round < round:
            self.round += 1
            began = self.now
            arrived, metrics = self.policy.collect(self, size)
        tier = self.tier_of[arrived[0].client] if arrived else 0
        return RoundPlan(arrived, {"time/simulated_s": self.now - began} | metrics, tier)

    def staleness(self, arrived: Sequence[Dispatch]) -> dict[str, float]:
        """Return the metric `client/staleness`: how many rounds old the clients' models are, on average.

        A round without uploads has no such metric.
        """
        ages = [self.round - 1 - one.version for one in arrived]
        return {"client/staleness": sum(ages) / len(ages)} if ages else {}

    def dispatch(self, size: int, busy: Collection[int] = (), draw: int = 0) -> None:
        """Send the current model to up to `size` clients.

        If all clients are free, the client sampler draws them, as in a run without a clock. Otherwise they are drawn
        uniformly from the free ones. If no client is at work and too few are online, the server waits until
        `min_clients` are.

        Args:
            size: Number of clients.
            busy: Clients that are not free, in addition to those at work.
            draw: Number of the draw, if there are several in a round.
        """
        taken = {*busy, *(one.client for one in self.running)}
        free = [client for client in range(len(self.work)) if client not in taken]
        if self.clock.hours:
            free = self._online(self.clock.hours, free)
        size = min(size, len(free))
        if size < 1:
            return
        if len(free) < len(self.work):
            rng = generator(self.seed, Stream.REPLACEMENTS, self.round, draw)
            chosen = rng.choice(free, size, replace=False).tolist()
        else:
            chosen = self.sample(self.round, size)
        for client in chosen:
            end = self.clock.end(client, self.work[client], self.round, self.now)
            self.running.append(Dispatch(end, client, self.round - 1))

    def _online(self, hours: Hours, clients: list[int]) -> list[int]:
        """Return the clients that are online. If no client is at work, wait until there are enough."""
        found = [client for client in clients if not hours.wait(client, self.now)]
        needed = min(max(1, self.min_clients), len(clients))
        if self.running or len(found) >= needed:
            return found
        for time in sorted(self.now + hours.wait(client, self.now) for client in clients):
            found = [client for client in clients if not hours.wait(client, time)]
            if len(found) >= needed:
                break
        self.now = time
        return found

    def limit_work(self, deadline: float) -> None:
        """Let clients at work that were asked just now and would miss a deadline do only the steps that fit.

        Clients that cannot take a step in time are not changed.

        Args:
            deadline: When uploads must have arrived.
        """
        self.running = [one if one.end <= deadline else self._limited(one, deadline) for one in self.running]

    def _limited(self, one: Dispatch, deadline: float) -> Dispatch:
        work = self.work[one.client]

        def end(steps: int) -> float:
            return self.clock.end(one.client, replace(work, steps=steps), self.round, self.now)

        steps = bisect_right(range(work.steps), deadline, key=end) - 1
        return Dispatch(end(steps), one.client, one.version, steps) if steps >= 1 else one

    def next_arrivals(self, most: int) -> list[Dispatch]:
        """Advance the time to the next uploads, and return those that arrive at this time, at most `most`."""
        self.now = min(self.running).end
        arrived = sorted(one for one in self.running if one.end == self.now)[:most]
        self.running = [one for one in self.running if one not in arrived]
        return arrived
