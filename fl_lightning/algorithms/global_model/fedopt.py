"""FedAdagrad, FedAdam and FedYogi: adaptive server optimizers, with the mean update of a round as gradient.

Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar, McMahan: "Adaptive Federated Optimization", ICLR 2021,
Algorithm 2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from torch import Tensor

from fl_lightning.algorithms.aggregators import ServerStep, Weighting
from fl_lightning.algorithms.base import Algorithm, Buffers
from fl_lightning.client.module import LossTerm
from fl_lightning.core.errors import check_number
from fl_lightning.core.message import Tensors

Rule = Literal["adagrad", "adam", "yogi"]


def adagrad(v: Tensor, square: Tensor, beta2: float) -> Tensor:
    """Return `v + Δ²`. `β2` is not used."""
    return v + square


def adam(v: Tensor, square: Tensor, beta2: float) -> Tensor:
    """Return `β2 v + (1 - β2) Δ²`."""
    return beta2 * v + (1 - beta2) * square


def yogi(v: Tensor, square: Tensor, beta2: float) -> Tensor:
    """Return `v - (1 - β2) Δ² sign(v - Δ²)`."""
    return v - (1 - beta2) * square * (v - square).sign()


RULES: dict[Rule, Callable[[Tensor, Tensor, float], Tensor]] = {"adagrad": adagrad, "adam": adam, "yogi": yogi}
"""How the second moment `v` goes on, from it, `Δ²` and `β2`."""


class AdaptiveServer(ServerStep):
    """The server of FedOpt: it steps by `m / (√v + τ)`, with moments of the mean update, without bias correction.

    Args:
        rule: How the second moment goes on: `adagrad`, `adam` or `yogi`.
        server_lr: η_s, the server's learning rate.
        beta1: β1 of the first moment, `m' = β1 m + (1 - β1) Δ`, from 0 to below 1.
        beta2: β2 of the second moment, from 0 to below 1; Adagrad has none.
        tau: τ, the degree of adaptivity, above 0: the smaller, the more adaptive.
        initial_v: What the second moment starts from, 0 or more; τ² by default.
        weighting: Weigh each client by its number of `samples`, or all the same (`uniform`).

    Raises:
        ConfigError: A number is out of its range.
    """

    def __init__(
        self,
        rule: Rule = "adam",
        server_lr: float = 0.01,
        beta1: float = 0.9,
        beta2: float = 0.99,
        tau: float = 1e-3,
        initial_v: float | None = None,
        weighting: Weighting = "samples",
    ) -> None:
        super().__init__(server_lr, weighting)
        for name, beta in (("beta1", beta1), ("beta2", beta2)):
            check_number(f"algorithm.{name}", beta, "[0, 1)")
        check_number("algorithm.tau", tau, "(0, inf)", "the paper uses 1e-3")
        check_number("algorithm.initial_v", initial_v, "[0, inf)", "the paper's is tau squared")
        self.rule: Rule = rule
        self.beta1, self.beta2, self.tau = beta1, beta2, tau
        self.moments = {"first_moment": 0.0, "second_moment": tau**2 if initial_v is None else initial_v}

    def direction(self, change: Tensor, moments: Tensors) -> tuple[Tensor, Tensors]:
        """Return `m / (√v + τ)` and both moments, updated with this round's change."""
        m = self.beta1 * moments["first_moment"] + (1 - self.beta1) * change
        v = RULES[self.rule](moments["second_moment"], change.square(), self.beta2)
        return m / (v.sqrt() + self.tau), {"first_moment": m, "second_moment": v}


class FedAdagrad(Algorithm):
    """FedAvg with Adagrad as server optimizer. Its gradient is the mean update of a round.

    With `initial_v` 0 and `server_lr` and `tau` both 1e8 this is FedAvg but for rounding.

    Bytes a round, each participant: down `model`, up `model + 8`.

    Args:
        server_lr: η_s, the server's learning rate; the default and that of `tau` are the paper's for CIFAR-10.
        beta1: β1, how much of its momentum the server keeps.
        tau: τ, the degree of adaptivity: the smaller, the more adaptive.
        initial_v: What the sum of squares starts from; τ² by default.
        weighting: Weigh clients by their number of `samples`, or all the same (`uniform`).
        loss_terms: Loss terms of any paper, added to the cross-entropy.
        buffers: BatchNorm's running statistics: `average`, `local` or `drop`; the mean is taken as it is.

    Raises:
        ConfigError: A number is out of its range.
    """

    def __init__(
        self,
        server_lr: float = 0.1,
        beta1: float = 0.0,
        tau: float = 1e-2,
        initial_v: float | None = None,
        weighting: Weighting = "samples",
        loss_terms: list[LossTerm] | None = None,
        buffers: Buffers = "average",
    ) -> None:
        server = AdaptiveServer("adagrad", server_lr, beta1, tau=tau, initial_v=initial_v, weighting=weighting)
        super().__init__(loss_terms, server, buffers)


class FedAdam(Algorithm):
    """FedAvg with Adam as server optimizer. Its gradient is the mean update of a round.

    With `beta1` and `initial_v` 0 and `server_lr` and `tau` both 1e8 this is FedAvg but for rounding.

    Bytes a round, each participant: down `model`, up `model + 8`.

    Args:
        server_lr: η_s, the server's learning rate; the default and that of `tau` are the paper's for CIFAR-10.
        beta1: β1, how much of its momentum the server keeps.
        beta2: β2, how much of the second moment the server keeps.
        tau: τ, the degree of adaptivity: the smaller, the more adaptive.
        initial_v: What the second moment starts from; τ² by default.
        weighting: Weigh clients by their number of `samples`, or all the same (`uniform`).
        loss_terms: Loss terms of any paper, added to the cross-entropy.
        buffers: BatchNorm's running statistics: `average`, `local` or `drop`; the mean is taken as it is.

    Raises:
        ConfigError: A number is out of its range.
    """

    rule: Rule = "adam"

    def __init__(
        self,
        server_lr: float = 0.01,
        beta1: float = 0.9,
        beta2: float = 0.99,
        tau: float = 1e-3,
        initial_v: float | None = None,
        weighting: Weighting = "samples",
        loss_terms: list[LossTerm] | None = None,
        buffers: Buffers = "average",
    ) -> None:
        server = AdaptiveServer(self.rule, server_lr, beta1, beta2, tau, initial_v, weighting)
        super().__init__(loss_terms, server, buffers)


class FedYogi(FedAdam):
    """FedAvg with Yogi as server optimizer: like FedAdam, but the second moment decreases more slowly.

    With `beta1` and `initial_v` 0 and `server_lr` and `tau` both 1e8 this is FedAvg but for rounding.

    Bytes a round, each participant: down `model`, up `model + 8`.

    Args:
        server_lr: η_s, the server's learning rate; the default and that of `tau` are the paper's for CIFAR-10.
        beta1: β1, how much of its momentum the server keeps.
        beta2: β2, how slowly the second moment changes.
        tau: τ, the degree of adaptivity: the smaller, the more adaptive.
        initial_v: What the second moment starts from; τ² by default.
        weighting: Weigh clients by their number of `samples`, or all the same (`uniform`).
        loss_terms: Loss terms of any paper, added to the cross-entropy.
        buffers: BatchNorm's running statistics: `average`, `local` or `drop`; the mean is taken as it is.

    Raises:
        ConfigError: A number is out of its range.
    """

    rule: Rule = "yogi"
