"""AFL: the server learns weights of the clients for which the mean loss is largest (agnostic federated learning).

Mohri, Sivek, Suresh: "Agnostic Federated Learning", ICML 2019, Stochastic-AFL (Figure 2). Here a client's gradient step
is replaced by local training as in FedAvg, and its loss is that of all of its training data.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from fl_lightning.algorithms.aggregators import Aggregator, Weighting
from fl_lightning.algorithms.base import Algorithm, Batches
from fl_lightning.client.module import ClientModule
from fl_lightning.client.received_loss import keep_received_loss, received_loss
from fl_lightning.core.arguments import number
from fl_lightning.core.message import Message, Upload
from fl_lightning.core.round import Round
from fl_lightning.core.state_dicts import RunningMean, State

AGNOSTIC = "agnostic"
"""The section of the state with the weight of each client."""


def project_to_simplex(values: Tensor, total: float = 1.0) -> Tensor:
    """Return the nearest vector with non-negative entries and a given sum (Duchi et al., ICML 2008, Figure 1).

    Args:
        values: The vector, `(K,)`.
        total: The sum, above 0.

    Example:
        >>> project_to_simplex(torch.tensor([0.9, 0.5, -1.0]))
        tensor([0.7000, 0.3000, 0.0000])
    """
    ordered = values.sort(descending=True).values
    thresholds = (ordered.cumsum(0) - total) / torch.arange(1, len(values) + 1, dtype=values.dtype)
    positive = int((ordered > thresholds).sum())
    return (values - thresholds[positive - 1]).clamp(min=0)


def ascend(shares: Tensor, losses: Tensor, weight_lr: float) -> Tensor:
    """Return the participants' next shares of λ: a step along the gradient of `Σ λ_k F_k`, which is `F`, and projected.

    Their sum does not change. If all clients take part, it is 1, and this is the paper's step on the whole simplex.

    Args:
        shares: `λ_k` of the participants, `(m,)`.
        losses: `F_k` of the participants, `(m,)`.
        weight_lr: γ_λ.
    """
    total = float(shares.sum())
    if weight_lr == 0 or total == 0:
        return shares
    return project_to_simplex(shares + weight_lr * losses, total)


@dataclass
class AgnosticFold:
    """The parts of a round's uploads that are kept.

    Attributes:
        mean: The mean of the clients' models, weighted by λ.
        weights: The weight of each client at the start of the round, `(K,)`.
        clients: The participants.
        losses: Each participant's loss of the received model.
    """

    mean: RunningMean
    weights: Tensor
    clients: list[int]
    losses: list[float]


class AgnosticMean(Aggregator):
    """Average the participants' models with the weights λ, then increase λ of clients with a large loss.

    Clients send `received_loss`, the loss of the received model on their training data. The state has a weight of each
    client in the section `agnostic`; λ are the weights divided by their sum. If all participants have weight 0, the
    model does not change.

    Args:
        weight_lr: γ_λ, the step along the losses, 0 or more.
    """

    weight_lr: float = number(0.1, "[0, inf)")

    only_in = "AFL"
    leaves = ("weights",)

    def begin(self, round: Round) -> AgnosticFold:
        """Return an empty mean, and the weights with which uploads are added to it."""
        return AgnosticFold(RunningMean(), round.before[AGNOSTIC]["weight"], [], [])

    def fold(self, folded: AgnosticFold, upload: Upload) -> None:
        """Add an upload to the mean, with the client's weight."""
        folded.mean.add(upload.message.section("model"), float(folded.weights[upload.client]))
        folded.clients.append(upload.client)
        folded.losses.append(float(upload.message.numbers["received_loss"]))

    def finish(self, folded: AgnosticFold, round: Round, knowledge: State) -> State:
        """Return the mean model, the next weights of all clients, and the participants' shares in the mean."""
        clients, losses = torch.tensor(folded.clients), torch.tensor(folded.losses, dtype=torch.float64)
        own, total = folded.weights[clients], folded.weights.sum()
        shares = ascend(own / total, losses, self.weight_lr)
        weights = folded.weights.clone()
        if self.weight_lr > 0:  # otherwise they keep all bits
            weights[clients] = shares * total
        used = own / own.sum() if own.any() else own
        state: State = {AGNOSTIC: {"weight": weights}, "weights": {"client": clients, "value": used}}
        return state | ({"model": folded.mean.value()} if own.any() else {})


class AFL(Algorithm):
    """Agnostic FL: FedAvg whose server learns the weights of the clients for which the mean loss is largest.

    So the next model is better on the data of the worst clients. In a round, the participants' models are averaged with
    the weights λ; then λ takes a step along the losses of the received model, and is projected to the simplex. With
    `weight_lr` 0 this is FedAvg whose `weighting` is `initial_weights`, bit for bit.

    Bytes a round, each participant: down `model`, up `model + 16`.

    Kept by the server: the weight of each client.

    Args:
        weight_lr: γ_λ, the step of λ along the losses. All λ together are 1.
        initial_weights: λ of the first round: equal (`uniform`), or by number of `samples`.
    """

    weight_lr: float = number(0.1, "[0, inf)")
    initial_weights: Weighting = "uniform"
    aggregator: Aggregator = field(init=False)

    search_space: ClassVar = {"weight_lr": {"distribution": "log_uniform_values", "min": 0.001, "max": 1.0}}
    starts_alike = True  # `prepare` only computes a loss

    def own_aggregator(self) -> Aggregator:
        """Return the aggregator that learns the clients' weights."""
        return AgnosticMean(self.weight_lr)

    def initial_state(self, backbone: nn.Module, num_classes: int, clients: int, rng: np.random.Generator) -> State:
        """Return the initial weights of the model and of the clients."""
        sizes = self.samples if self.initial_weights == "samples" else [1] * clients
        weights = {"weight": torch.tensor(sizes, dtype=torch.float64)}
        return super().initial_state(backbone, num_classes, clients, rng) | {AGNOSTIC: weights}

    def prepare(self, module: ClientModule, batches: Batches, validation: Batches) -> None:
        """Compute the loss of the received model on the client's training data."""
        keep_received_loss(module, batches)

    def upload(self, module: ClientModule, batches: Batches, n_samples: int, num_classes: int) -> Message:
        """Return the trained weights, and the loss of the received model."""
        message = super().upload(module, batches, n_samples, num_classes)
        return message.plus(received_loss=received_loss(module))
