"""FedAvgM: FedAvg with server momentum.

Hsu, Qi, Brown: "Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification", 2019,
Section 4.3.
"""

from __future__ import annotations

from torch import Tensor

from fl_lightning.algorithms.aggregators import ServerStep, Weighting
from fl_lightning.algorithms.base import Algorithm, Buffers
from fl_lightning.client.module import LossTerm
from fl_lightning.core.errors import check_number
from fl_lightning.core.message import Tensors


def momentum_step(change: Tensor, momentum: Tensor, beta: float, nesterov: bool) -> tuple[Tensor, Tensor]:
    """Return the direction of the step, `v'` or with Nesterov `Δ + β v'`, and `v' = β v + Δ`.

    Args:
        change: `Δ`, the clients' mean less the old weights.
        momentum: `v`, of the same shape.
        beta: β.
        nesterov: Look ahead.
    """
    momentum = beta * momentum + change
    return (change + beta * momentum if nesterov else momentum), momentum


class ServerMomentum(ServerStep):
    """The server of FedAvgM, with momentum over the rounds: `v' = β v + Δ`.

    Args:
        beta: β, from 0 to below 1.
        server_lr: η_s, the server's learning rate.
        nesterov: Step by `Δ + β v'`, not by `v'`.
        weighting: Weigh each client by its number of `samples`, or all the same (`uniform`).

    Raises:
        ConfigError: A number is out of its range.
    """

    def __init__(
        self, beta: float = 0.9, server_lr: float = 1.0, nesterov: bool = True, weighting: Weighting = "samples"
    ) -> None:
        super().__init__(server_lr, weighting)
        check_number("algorithm.beta", beta, "[0, 1)", "the paper uses 0 to 0.997")
        self.beta, self.nesterov = beta, nesterov
        self.moments = {"momentum": 0.0}

    def direction(self, change: Tensor, moments: Tensors) -> tuple[Tensor, Tensors]:
        """Return the direction with momentum, and the new momentum."""
        direction, momentum = momentum_step(change, moments["momentum"], self.beta, self.nesterov)
        return direction, {"momentum": momentum}


class FedAvgM(Algorithm):
    """FedAvg with server momentum.

    With `beta` 0 and `server_lr` 1 this is FedAvg.

    Bytes a round, each participant: down `model`, up `model + 8`.

    Args:
        beta: β, how much of its momentum the server keeps.
        server_lr: η_s, the server's learning rate; 1 goes all the way to the clients' mean.
        nesterov: Nesterov's momentum, as in the paper's experiments; off is the plain one.
        weighting: Weigh clients by their number of `samples`, or all the same (`uniform`).
        loss_terms: Loss terms of any paper, added to the cross-entropy.
        buffers: BatchNorm's running statistics: `average`, `local` or `drop`; the mean has no momentum.

    Raises:
        ConfigError: A number is out of its range.
    """

    def __init__(
        self,
        beta: float = 0.9,
        server_lr: float = 1.0,
        nesterov: bool = True,
        weighting: Weighting = "samples",
        loss_terms: list[LossTerm] | None = None,
        buffers: Buffers = "average",
    ) -> None:
        super().__init__(loss_terms, ServerMomentum(beta, server_lr, nesterov, weighting), buffers)
