"""Round policies: how many clients the server asks, how long it waits, and what it does with late results."""

from __future__ import annotations

import math
from typing import Literal

from fl_lightning.core.arguments import number
from fl_lightning.core.errors import ConfigError
from fl_lightning.scheduling.schedule import Dispatch, RoundPolicy, Schedule

Late = Literal["drop", "next_round", "partial"]
"""The treatment of clients that would miss a deadline."""


class Synchronous(RoundPolicy):
    """The server waits for all clients that it asks. This is the default."""

    def collect(self, schedule: Schedule, size: int) -> tuple[list[Dispatch], dict[str, float]]:
        """Return the uploads of all participants."""
        schedule.dispatch(size)
        arrived = sorted(schedule.running)
        schedule.now = max((one.end for one in arrived), default=schedule.now)
        schedule.running = []
        return arrived, {}


class Deadline(RoundPolicy):
    """A round ends at a deadline, or as soon as `clients_per_round` uploads have arrived.

    If fewer than `min_clients` uploads have arrived at the deadline, the round ends when they have.

    Args:
        seconds: The deadline, in simulated seconds after the start of the round. By default there is none.
        over_sample: The server asks `over_sample · clients_per_round` clients, rounded up; at least 1.
        late: What happens to clients that would be late: their uploads are not used (`drop`), or belong to the next
            round (`next_round`), or they take only as many training steps as fit before the deadline (`partial`). If
            not even one fits, the upload is not used.

    Raises:
        ConfigError: An argument is out of range, or `partial` has no deadline.
    """

    seconds: float | None = number(None, "(0, inf)", "leave it out for no deadline")
    over_sample: float = number(1.0, "[1, inf)", "1 asks clients_per_round clients")
    late: Late = "drop"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.seconds is None and self.late == "partial":
            raise ConfigError("round_policy.late: partial needs a deadline. Set round_policy.seconds.")
        self.carries_over = self.late == "next_round"
        self.limits_work = self.late == "partial"
        self.metrics = ("client/staleness",) if self.carries_over else ("client/late",)
        if self.limits_work:
            self.metrics += ("client/partial",)

    def collect(self, schedule: Schedule, size: int) -> tuple[list[Dispatch], dict[str, float]]:
        """Return the uploads that arrive in time, in order of arrival."""
        schedule.dispatch(math.ceil(self.over_sample * size) - len(schedule.running))
        deadline = math.inf if self.seconds is None else schedule.now + self.seconds
        if self.limits_work:
            schedule.limit_work(deadline)
        arrived: list[Dispatch] = []
        while len(arrived) < size and schedule.running:
            if min(schedule.running).end > deadline and len(arrived) >= schedule.min_clients:
                schedule.now = max(schedule.now, deadline)
                break
            arrived += schedule.next_arrivals(size - len(arrived))
        if self.carries_over:
            return arrived, schedule.staleness(arrived)
        dropped, schedule.running = len(schedule.running), []
        metrics: dict[str, float] = {"client/late": dropped}
        if self.limits_work:
            metrics["client/partial"] = sum(one.steps is not None for one in arrived)
        return arrived, metrics


class Buffered(RoundPolicy):
    """Asynchronous rounds: a round ends when `clients_per_round` uploads have arrived, while other clients go on.

    A client whose upload has arrived is replaced at once by another one, which gets the current model. So
    `clients_per_round` is FedBuff's buffer size K; with 1 the server takes a step with every upload, as in FedAsync.

    Args:
        concurrency: Number of clients that are at work at a time; by default `clients_per_round`.

    Raises:
        ConfigError: `concurrency` is below 1.
    """

    concurrency: int | None = number(None, "[1, inf)", "leave it out for clients_per_round")

    carries_over = True
    metrics = ("client/staleness",)

    def collect(self, schedule: Schedule, size: int) -> tuple[list[Dispatch], dict[str, float]]:
        """Return the next uploads, in order of arrival."""
        arrived: list[Dispatch] = []
        while len(arrived) < size:
            held = {one.client for one in arrived}
            schedule.dispatch((self.concurrency or size) - len(schedule.running), held, len(held))
            arrived += schedule.next_arrivals(size - len(arrived))
        return arrived, schedule.staleness(arrived)


class Tiers(RoundPolicy):
    """Tiers of similarly fast clients work side by side: a round is that of the tier that finishes next (FedAT).

    Clients are sorted by the time that they need, and divided into tiers of equal size. Each tier trains
    `clients_per_round` of its clients at a time. When all of them have finished, the round ends, and other clients of
    the tier get the current model.

    Args:
        tiers: Number of tiers.

    Raises:
        ConfigError: `tiers` is below 1.
    """

    tiers: int = number(5, "[1, inf)")

    carries_over = True
    metrics = ("client/staleness",)

    def collect(self, schedule: Schedule, size: int) -> tuple[list[Dispatch], dict[str, float]]:
        """Return the uploads of the tier that finishes next."""
        tier_of = schedule.tier_of
        for tier in sorted(set(tier_of) - {tier_of[one.client] for one in schedule.running}):
            others = [client for client, own in enumerate(tier_of) if own != tier]
            schedule.dispatch(size, others, tier)
        at_work: dict[int, list[Dispatch]] = {}
        for one in sorted(schedule.running):
            at_work.setdefault(tier_of[one.client], []).append(one)
        arrived = min(at_work.values(), key=lambda tier: tier[-1])
        schedule.now = arrived[-1].end
        schedule.running = [one for one in schedule.running if one not in arrived]
        return arrived, schedule.staleness(arrived)
