"""FedAT: tiers of similarly fast clients train side by side, and slow tiers get large weights.

Chai, Chen, Anwar, Zhao, Cheng, Rangwala: "FedAT: A High-Performance and Communication-Efficient Federated Learning
System with Asynchronous Tiers", SC 2021, Algorithm 2 and Eq. 4.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from fl_lightning.algorithms.aggregators import Aggregator, mean_or
from fl_lightning.algorithms.base import Algorithm
from fl_lightning.algorithms.global_model.fedprox import Proximal
from fl_lightning.client.loss_term import LossTerm
from fl_lightning.core.arguments import number
from fl_lightning.core.message import Tensors
from fl_lightning.core.round import Round
from fl_lightning.core.state_dicts import RunningMean, State

START = "start"
"""The section of the state with the initial model."""

TIERS, ROUNDS = "tiers", "rounds"
"""The section of the state with the tiers' numbers of finished rounds, and its only entry."""


def tier_section(tier: int) -> str:
    """Return the name of the state's section with the last model of a tier."""
    return f"tier_{tier}"


class TieredMean(Aggregator):
    """FedAT's server: `w = Σ_m T_(M+1-m) / T · w_m` over the tiers m = 1..M, from the fastest to the slowest.

    `w_m` is the mean of the models of tier m's last round, `T_m` the number of its rounds so far, and `T = Σ T_m`. The
    weights of the tiers are those numbers in reverse order: the slowest tier has that of the fastest. A tier without a
    finished round counts with the initial model.

    Args:
        inner: Computes the mean of a tier's models; by default that weighted by the numbers of samples.
    """

    accepts_stale = True

    def __init__(self, inner: Aggregator | None = None) -> None:
        self.inner: Aggregator = self.wrap(mean_or(inner, "samples"))

    def initial(self, model: Tensors, num_classes: int) -> State:
        """Return the initial model, and an empty list of the tiers' numbers of rounds."""
        kept = {START: dict(model), TIERS: {ROUNDS: torch.zeros(0, dtype=torch.int64)}}
        return super().initial(model, num_classes) | kept

    def finish(self, folded: Any, round: Round, knowledge: State) -> State:
        """Return the weighted mean of the tiers' models, after the round's mean has replaced that of its tier."""
        averaged = self.inner.finish(folded, round, knowledge)
        kept = {name: content for name, content in round.before.items() if name == START or name.startswith("tier_")}
        kept[tier_section(round.tier)] = averaged["model"]
        finished = round.before[TIERS][ROUNDS]
        rounds = torch.cat([finished, finished.new_zeros(round.tiers - len(finished))])
        rounds[round.tier] += 1
        mean = RunningMean()
        for tier, weight in enumerate(rounds.flip(0).tolist()):
            mean.add(kept.get(tier_section(tier), kept[START]), weight)
        return averaged | kept | {"model": mean.value(), TIERS: {ROUNDS: rounds}}


class FedAT(Algorithm):
    """FedAT: within a tier of similarly fast clients training is synchronous, between tiers asynchronous.

    It needs a `clock` and `round_policy: Tiers`. In a round, one tier finishes. With a single tier or without these
    options, it is FedProx, and FedAvg with `mu` 0.

    Bytes a round, each participant: down `model`, up `model + 8`.

    Kept by the server: the last model of each tier, and its number of rounds.

    Args:
        mu: λ of the paper, the weight of FedProx's term.
        aggregator: Computes the mean of a tier's models instead, such as a robust rule.
    """

    mu: float = number(0.4, "[0, inf)")

    corrects_aggregator = True
    search_space: ClassVar = {"mu": {"values": [0.0, 0.01, 0.1, 0.4]}}

    def own_terms(self) -> list[LossTerm]:
        """Return the proximal term."""
        return [Proximal(self.mu)]

    def own_aggregator(self) -> Aggregator:
        """Return the server that keeps a model of each tier."""
        return TieredMean(self.aggregator)
