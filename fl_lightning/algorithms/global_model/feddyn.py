"""FedDyn: a dynamic regularizer moves the minima of the clients' losses to a minimum of the global loss.

Acar, Zhao, Matas, Mattina, Whatmough, Saligrama: "Federated Learning Based on Dynamic Regularization", ICLR 2021,
Algorithm 1.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from fl_lightning.algorithms.aggregators import Aggregator, DriftCorrection
from fl_lightning.algorithms.base import Algorithm
from fl_lightning.client.loss_term import LossTerm, Step
from fl_lightning.client.module import ClientModule
from fl_lightning.core.arguments import number
from fl_lightning.core.message import Tensors


def next_gradient(gradient: Tensor, start: Tensor, end: Tensor, alpha: float) -> Tensor:
    """Return the estimated gradient of a client's own loss with respect to one parameter, after a fit.

    It is `g_k - α (θ_k - θ)` (Eq. 1). It is exact if `θ_k` is a minimum of the regularized loss. The client keeps it
    for its next round.

    Args:
        gradient: `g_k`, the estimate from the client's last round.
        start: `θ`, the received parameter.
        end: `θ_k`, the parameter after the fit.
        alpha: α.
    """
    return gradient - alpha * (end - start)


class DynamicRegularizer(LossTerm):
    """FedDyn's loss term: the squared distance to the received weights, and a linear term from the client's last round.

    It is `-<g_k, θ> + α/2 · ||θ - θ_received||²`. `g_k` is the gradient of the client's own loss, estimated at the end
    of its last round. A client keeps `g_k` from round to round; it is zero at first, and never sent. The term covers
    all parameters, also those that the loss does not depend on.

    Args:
        alpha: α, above 0.
    """

    alpha: float = number(0.1, "(0, inf)", "the paper uses 0.001 to 0.1")

    def __post_init__(self) -> None:
        super().__post_init__()
        self._gradient: Tensors = {}
        self._start: Tensors = {}

    def recall(self, kept: Tensors) -> None:
        """Restore `g_k`, the gradient of the client's own loss that was estimated in its last round."""
        self._gradient = kept

    def begin(self, module: ClientModule) -> None:
        """Keep the received weights. Move `g_k`, the gradient from the client's last round, to the weights' device."""
        self._start = {name: p.detach().clone() for name, p in module.backbone.named_parameters()}
        zero = {name: torch.zeros_like(p) for name, p in self._start.items()}
        self._gradient = zero | {name: value.to(zero[name]) for name, value in self._gradient.items()}

    def forward(self, step: Step) -> Tensor:
        """Return the regularizer at the current weights, or zero outside a fit."""
        if not self._start or step.backbone is None:
            return self.outside_fit(step.logits.new_zeros(()))
        parts = [
            self.alpha / 2 * (p - self._start[name]).square().sum() - (self._gradient[name] * p).sum()
            for name, p in step.backbone.named_parameters()
        ]
        return sum(parts[1:], start=parts[0])

    def remember(self, module: ClientModule) -> Tensors:
        """Return `g_k` for the next round: the estimated gradient of the client's own loss at the trained weights.

        A client that has not trained keeps its last `g_k`.
        """
        if not self._start:
            return self._gradient
        now = module.backbone.named_parameters()
        return {name: next_gradient(self._gradient[name], self._start[name], p.detach(), self.alpha) for name, p in now}


class FedDyn(Algorithm):
    """FedAvg with a dynamic regularizer, which moves the minima of the clients' losses to a minimum of the global loss.

    BatchNorm's statistics are averaged.

    The server keeps the mean drift `d = -h / α` of all `m` clients instead of the paper's `h`. The paper's server,
    `h ← h - α / m · Σ (θ_k - θ)` and `θ ← mean - h / α`, is then `d ← d + 1 / m · Σ (θ_k - θ)` and `θ ← mean + d`. This
    is FedDC's aggregator, `DriftCorrection`.

    Bytes a round, each participant: down `model`, up `model + 8`.

    Kept by a client: the estimated gradient of its loss. Kept by the server: the mean drift of all clients.

    Args:
        alpha: α, the weight of the regularizer, above 0. The paper uses 0.1 for CIFAR-10 and 0.01 for others.
        aggregator: Computes the participants' mean instead, such as a robust rule.
    """

    alpha: float = 0.1

    corrects_aggregator = True
    search_space: ClassVar = {"alpha": {"distribution": "log_uniform_values", "min": 0.001, "max": 1.0}}  # Acar et al.

    def own_terms(self) -> list[LossTerm]:
        """Return the dynamic regularizer."""
        return [DynamicRegularizer(self.alpha)]

    def own_aggregator(self) -> Aggregator:
        """Return the mean of the models plus the mean drift."""
        return DriftCorrection(self.aggregator)
