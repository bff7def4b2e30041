"""Bucketing: average the models of random groups of clients before a robust rule.

Karimireddy, He, Jaggi: "Byzantine-Robust Learning on Heterogeneous Datasets via Bucketing", ICLR 2022, Algorithm 1.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fl_lightning.algorithms.aggregators import Aggregator
from fl_lightning.algorithms.robust.median import Median
from fl_lightning.algorithms.robust.rule import PreAggregator
from fl_lightning.algorithms.robust.vectors import Vectors
from fl_lightning.core.arguments import count
from fl_lightning.core.flat_tensors import Tensors
from fl_lightning.core.round import Round


class Bucketing(PreAggregator, Aggregator):
    """Average the models of random groups (buckets) of `size` clients, then apply a robust rule to the averages.

    The averages of honest clients differ less than their models do, which helps if data are not IID. The rule sees
    ⌈n / size⌉ vectors, and its f counts those with an attacker: as many as attackers, at worst. So if f is a share, it
    is one of the clients. All clients weigh the same; a last bucket can be smaller. With `size` 1 it is the rule
    itself, bit for bit.

    Args:
        inner: The robust rule; `Median` by default.
        size: s, the number of clients of a bucket, 1 or more. The paper uses 2.

    Raises:
        ConfigError: `size` is below 1, or `inner` is no robust rule, or weights clients.
    """

    size: int = count(2)

    default_rule = Median

    def shortage(self, count: int, clients: int | None = None) -> str | None:
        """Return why a number of models is too small for the inner rule, or None."""
        buckets = math.ceil(count / self.size)
        reason = self.rule.shortage(buckets, count if clients is None else clients)
        return reason and f"{reason}, the buckets of {count} models"

    def extremes(self, count: int) -> int:
        """Return how many of the largest values of an integer entry the inner rule leaves out."""
        return self.rule.extremes(count)

    def combine(self, vectors: Vectors, round: Round) -> Tensors:
        """Return the inner rule's mean of the buckets' averages."""
        if self.size > 1:
            vectors = vectors.averaged(self.members(vectors.count, round))
        return self.rule.combine(vectors, round)

    def members(self, count: int, round: Round) -> Tensor:
        """Return the clients of each bucket, `(buckets, n)`, 1 or 0. Buckets are in the order of their first client."""
        order = round.rng.permutation(count)
        buckets = sorted(sorted(order[start : start + self.size].tolist()) for start in range(0, count, self.size))
        members = torch.zeros(len(buckets), count, dtype=torch.float64)
        for row, bucket in zip(members, buckets, strict=True):
            row[bucket] = 1.0
        return members
