"""q-FFL: clients on whose data the received model has a large loss move the next model more, by q-FedAvg.

Li, Sanjabi, Beirami, Smith: "Fair Resource Allocation in Federated Learning", ICLR 2020, Algorithm 2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from fl_lightning.algorithms.aggregators import Aggregator
from fl_lightning.algorithms.base import Algorithm, Batches
from fl_lightning.client.lightning_model import own_optimizer
from fl_lightning.client.module import ClientModule
from fl_lightning.client.received_loss import keep_received_loss, received_loss
from fl_lightning.core.arguments import number
from fl_lightning.core.errors import NonFiniteError
from fl_lightning.core.message import Message, Tensors, Upload
from fl_lightning.core.round import Round
from fl_lightning.core.state_dicts import RunningMean, State, parameter_names

SMALLEST_LOSS = 1e-10
"""Smaller losses count as this one, so that `F^(q - 1)` is finite for a loss of 0."""

RANGE, ADVICE = "[0, 30]", "the paper uses 0.001 to 15"


def weight(loss: float, q: float) -> float:
    """Return `F_k^q`, a client's weight.

    Raises:
        NonFiniteError: It is too large for a float64.
    """
    try:
        return loss**q
    except OverflowError as error:
        fix = "Lower the learning rate or algorithm.q."
        raise NonFiniteError(f"the loss {loss:.3g} to the power of {q} is Inf. {fix}") from error


def step_bound(loss: float, q: float, squared_change: float, lipschitz: float) -> float:
    """Return `h_k / L = q F_k^(q - 1) · L ||w - w_k||² + F_k^q`, by whose sum over clients the step is divided.

    `h_k` bounds the curvature of `F^(q + 1) / (q + 1)` (Algorithm 2, where `Δw_k = L (w - w_k)`).

    Args:
        loss: `F_k`, above 0.
        q: q.
        squared_change: `||w - w_k||²`.
        lipschitz: L. It may be infinite if the weights have not changed.

    Example:
        >>> step_bound(loss=2.0, q=1.0, squared_change=0.5, lipschitz=10.0)
        7.0
    """
    curvature = q * loss ** (q - 1) * lipschitz * squared_change if squared_change else 0.0
    return curvature + weight(loss, q)


def squared_distance(weights: Tensors, start: Tensors, names: list[str]) -> float:
    """Return `||w - w_k||²` over the named entries of two state dicts, computed in float64."""
    squares = [(weights[name].double() - start[name].double()).square().sum() for name in names]
    return float(torch.stack(squares).sum())


@dataclass
class FairSums:
    """Running sums over a round's uploads.

    Attributes:
        mean: The mean of the clients' weights, weighted by `F_k^q`.
        start: `w`, the weights at the start of the round.
        bounds: `Σ h_k / L`.
        clients: The participants.
        weights: `F_k^q` of each participant.
    """

    mean: RunningMean
    start: Tensors
    bounds: float
    clients: list[int]
    weights: list[float]


class FairAveraging(Aggregator):
    """Step along the clients' changes, each weighted by a power of the client's loss (q-FedAvg).

    The next model is `w - Σ Δ_k / Σ h_k`, with `Δ_k = F_k^q L (w - w_k)` and
    `h_k = q F_k^(q - 1) ||L (w - w_k)||² + L F_k^q`. Clients send `received_loss`, `F_k`, and `lr`. BatchNorm's
    statistics become their mean with weights `F_k^q`.

    Args:
        q: q, in [0, 30]. With 0 all weights are 1.
        lipschitz: L, above 0. By default 1 over the client's learning rate.
    """

    q: float = number(1.0, RANGE, ADVICE)
    lipschitz: float | None = number(None, "(0, inf)")

    only_in = "QFFL"
    leaves = ("weights",)

    def begin(self, round: Round) -> FairSums:
        """Return empty sums."""
        return FairSums(RunningMean(), round.before["model"], 0.0, [], [])

    def fold(self, folded: FairSums, upload: Upload) -> None:
        """Add an upload's weights to the mean, and its bound `h_k / L` to the sum of the bounds."""
        model, numbers = upload.message.section("model"), upload.message.numbers
        loss = max(numbers["received_loss"], SMALLEST_LOSS)
        change = squared_distance(model, folded.start, parameter_names(model, self.buffers))
        folded.weights.append(weight(loss, self.q))
        folded.mean.add(model, folded.weights[-1])
        lipschitz = self.lipschitz or (1 / numbers["lr"] if numbers["lr"] else math.inf)
        folded.bounds += step_bound(loss, self.q, change, lipschitz)
        folded.clients.append(upload.client)

    def finish(self, folded: FairSums, round: Round, knowledge: State) -> State:
        """Return the next model, and each participant's share in the sum of the weights `F_k^q`.

        With the mean `m` of the clients' models, weighted by `F_k^q`, `w - Σ Δ_k / Σ h_k` is `w + s (m - w)` for the
        step `s = Σ F_k^q / Σ (h_k / L)`. With q = 0, `s` is 1, and the result is `m` bit for bit.
        """
        weights, model = torch.tensor(folded.weights, dtype=torch.float64), folded.mean.value()
        step = sum(folded.weights) / folded.bounds
        for name in parameter_names(model, self.buffers):
            mean = model[name].double()
            model[name] = (mean + (1 - step) * (folded.start[name].double() - mean)).to(model[name].dtype)
        shares = {"client": torch.tensor(folded.clients), "value": weights / weights.sum()}
        return {"model": model, "weights": shares}


class QFFL(Algorithm):
    """q-FFL: FedAvg in which clients with a large loss of the received model weigh more, for more equal accuracies.

    The larger q, the fairer. With `q` 0 this is FedAvg with `weighting: uniform`, bit for bit.

    Bytes a round, each participant: down `model`, up `model + 24`.

    Args:
        q: q, the power of the loss, in [0, 30].
        lipschitz: L, above 0: the smaller, the larger the steps. By default 1 over the client's learning rate. With τ
            local steps, 1 over τ learning rates is an estimate, too.
    """

    q: float = number(1.0, RANGE, ADVICE)
    lipschitz: float | None = number(None, "(0, inf)")
    aggregator: Aggregator = field(init=False)

    search_space: ClassVar = {"q": {"values": [0.001, 0.01, 0.1, 1.0, 2.0, 5.0]}}  # from the grid of Li et al.
    starts_alike = True  # `prepare` only computes a loss

    def own_aggregator(self) -> Aggregator:
        """Return the aggregator that weighs the clients' changes by their losses."""
        return FairAveraging(self.q, self.lipschitz)

    def prepare(self, module: ClientModule, batches: Batches, validation: Batches) -> None:
        """Compute the loss of the received model on the client's training data."""
        keep_received_loss(module, batches)

    def upload(self, module: ClientModule, batches: Batches, n_samples: int, num_classes: int) -> Message:
        """Return the trained weights, the loss of the received model, and the learning rate."""
        message = super().upload(module, batches, n_samples, num_classes)
        return message.plus(received_loss=received_loss(module), lr=learning_rate(module))


def learning_rate(module: ClientModule) -> float:
    """Return the learning rate of a client's round, without the effect of `lr_scheduler`.

    If `lr_factors` gives some parameters another one, it is the largest.
    """
    own = module.has_own_optimizer
    optimizer = own_optimizer(module)[1] if own else module.optimizer_for(module.backbone.parameters())
    return max(float(group["lr"]) for group in optimizer.param_groups)
