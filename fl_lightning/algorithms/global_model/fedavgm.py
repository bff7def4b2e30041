"""FedAvgM: FedAvg with server momentum.

Hsu, Qi, Brown: "Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification", 2019,
Section 4.3.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from fl_lightning.algorithms.aggregators import Aggregator, ServerStep, Weighting
from fl_lightning.algorithms.base import Algorithm
from fl_lightning.core.errors import check_number
from fl_lightning.core.message import Tensors


def momentum_step(change: Tensor, momentum: Tensor, beta: float, nesterov: bool) -> tuple[Tensor, Tensor]:
    """Return the direction of the server's step and the new momentum `v' = β v + Δ`.

    The direction is `v'` or, with Nesterov momentum, `Δ + β v'`.

    Args:
        change: `Δ`, the clients' mean minus the old weights.
        momentum: `v`, of the same shape.
        beta: β.
        nesterov: Whether to use Nesterov's momentum.
    """
    momentum = beta * momentum + change
    return (change + beta * momentum if nesterov else momentum), momentum


class ServerMomentum(ServerStep):
    """FedAvgM's server optimizer: a step with momentum `v' = β v + Δ`, with `Δ` the mean client update.

    Args:
        beta: β, in [0, 1).
        server_lr: Server learning rate η_s, above 0.
        nesterov: Step by `Δ + β v'` instead of `v'`.
        weighting: Weight clients by their number of `samples`, or equally (`uniform`).
        inner: Computes the clients' mean instead, such as a robust rule. `weighting` has no effect then.
    """

    def __init__(
        self,
        beta: float = 0.9,
        server_lr: float = 1.0,
        nesterov: bool = True,
        weighting: Weighting = "samples",
        inner: Aggregator | None = None,
    ) -> None:
        super().__init__(server_lr, weighting, inner)
        check_number("algorithm.beta", beta, "[0, 1)", "the paper uses 0 to 0.997")
        self.beta, self.nesterov = beta, nesterov
        self.moments = {"momentum": 0.0}

    def direction(self, change: Tensor, moments: Tensors) -> tuple[Tensor, Tensors]:
        """Return the step direction of one parameter, with momentum, and the new momentum of this parameter."""
        direction, momentum = momentum_step(change, moments["momentum"], self.beta, self.nesterov)
        return direction, {"momentum": momentum}


class FedAvgM(Algorithm):
    """FedAvg with server momentum.

    With `beta` 0 and `server_lr` 1 this is FedAvg. BatchNorm's statistics have no momentum.

    Bytes a round, each participant: down `model`, up `model + 8`.

    Kept by the server: the momentum.

    Args:
        beta: β, the share of the momentum that the server keeps.
        server_lr: Server learning rate η_s. With 1, a step without momentum ends at the clients' mean.
        nesterov: Use Nesterov's momentum, as in the paper's experiments.
        weighting: Weight clients by their number of `samples`, or equally (`uniform`).
        aggregator: Computes the clients' mean instead, such as a robust rule.
    """

    beta: float = 0.9
    server_lr: float = 1.0
    nesterov: bool = True
    weighting: Weighting = "samples"

    corrects_aggregator = True
    search_space: ClassVar = {"beta": {"values": [0.0, 0.7, 0.9, 0.97, 0.99, 0.997]}}  # Hsu et al., Section 4

    def own_aggregator(self) -> Aggregator:
        """Return the server step with momentum."""
        return ServerMomentum(self.beta, self.server_lr, self.nesterov, self.weighting, self.aggregator)
