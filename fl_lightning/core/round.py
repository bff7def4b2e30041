"""`Round`: the round whose uploads the server aggregates, with the state before it and random numbers."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from fl_lightning.core.state_dicts import State


@dataclass(frozen=True)
class Round:
    """A round as the aggregation sees it. Aggregators and shared knowledge get it.

    Args:
        number: The round, from 1.
        before: The server's state at the start of the round, such as the weights `before["model"]`. Do not change its
            tensors in place: a checkpoint of it may be being written.
        seed: Seed of `rng`.
        metrics: Metrics of the server for the log. The aggregator or the shared knowledge adds them; `step` becomes
            the column `server/step`. A name with a slash, such as `privacy/epsilon`, is the name of the column.
        tier: The tier of clients whose round it is, from 0 for the fastest, with the round policy `Tiers`.
        tiers: Number of tiers.

    Example:
        >>> bool(Round(3, {}, seed=1).rng.random() == Round(3, {}, seed=1).rng.random())
        True
    """

    number: int
    before: State
    seed: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    tier: int = 0
    tiers: int = 1

    @cached_property
    def rng(self) -> np.random.Generator:
        """The round's random numbers. A resumed run draws the same."""
        return np.random.default_rng(self.seed)
