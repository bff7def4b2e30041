"""FedAdagrad, FedAdam and FedYogi: adaptive server optimizers with the round's mean client update as gradient.

Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar, McMahan: "Adaptive Federated Optimization", ICLR 2021,
Algorithm 2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field
from typing import ClassVar, Literal

from torch import Tensor

from fl_lightning.algorithms.aggregators import Aggregator, ServerStep, Weighting
from fl_lightning.algorithms.base import Algorithm
from fl_lightning.core.errors import check_number
from fl_lightning.core.message import Tensors

Rule = Literal["adagrad", "adam", "yogi"]


def adagrad(v: Tensor, square: Tensor, beta2: float) -> Tensor:
    """Return Adagrad's second moment, `v + Δ²`. `β2` is not used."""
    return v + square


def adam(v: Tensor, square: Tensor, beta2: float) -> Tensor:
    """Return Adam's second moment, `β2 v + (1 - β2) Δ²`."""
    return beta2 * v + (1 - beta2) * square


def yogi(v: Tensor, square: Tensor, beta2: float) -> Tensor:
    """Return Yogi's second moment, `v - (1 - β2) Δ² sign(v - Δ²)`."""
    return v - (1 - beta2) * square * (v - square).sign()


RULES: dict[Rule, Callable[[Tensor, Tensor, float], Tensor]] = {"adagrad": adagrad, "adam": adam, "yogi": yogi}
"""The update of the second moment, from `v`, `Δ²` and `β2`."""


class AdaptiveServer(ServerStep):
    """FedOpt's server optimizer: a step of `m / (√v + τ)`, with moments `m` and `v` of the mean update.

    There is no bias correction.

    Args:
        rule: Update of the second moment: `adagrad`, `adam` or `yogi`.
        server_lr: Server learning rate η_s, above 0.
        beta1: β1 of the first moment, `m' = β1 m + (1 - β1) Δ`, in [0, 1).
        beta2: β2 of the second moment, in [0, 1). Adagrad does not use it.
        tau: Degree of adaptivity τ, above 0. A smaller τ is more adaptive.
        initial_v: Initial second moment, 0 or more; τ² by default.
        weighting: Weight clients by their number of `samples`, or equally (`uniform`).
        inner: Computes the clients' mean instead, such as a robust rule. `weighting` has no effect then.
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
        inner: Aggregator | None = None,
    ) -> None:
        super().__init__(server_lr, weighting, inner)
        for name, beta in (("beta1", beta1), ("beta2", beta2)):
            check_number(f"algorithm.{name}", beta, "[0, 1)")
        check_number("algorithm.tau", tau, "(0, inf)", "the paper uses 1e-3")
        check_number("algorithm.initial_v", initial_v, "[0, inf)", "the paper's is tau squared")
        self.rule: Rule = rule
        self.beta1, self.beta2, self.tau = beta1, beta2, tau
        self.moments = {"first_moment": 0.0, "second_moment": tau**2 if initial_v is None else initial_v}

    def direction(self, change: Tensor, moments: Tensors) -> tuple[Tensor, Tensors]:
        """Return the direction `m / (√v + τ)` of one parameter's server step, and its new moments `m` and `v`."""
        m = self.beta1 * moments["first_moment"] + (1 - self.beta1) * change
        v = RULES[self.rule](moments["second_moment"], change.square(), self.beta2)
        return m / (v.sqrt() + self.tau), {"first_moment": m, "second_moment": v}


class FedAdam(Algorithm):
    """FedAvg with Adam as server optimizer and the round's mean client update as its gradient.

    With `beta1` and `initial_v` 0 and `server_lr` and `tau` both 1e8 this is FedAvg up to rounding.

    Bytes a round, each participant: down `model`, up `model + 8`.

    Kept by the server: both moments.

    Args:
        server_lr: Server learning rate η_s. This default and that of `tau` are the paper's for CIFAR-10.
        beta1: β1, the share of the first moment that the server keeps.
        beta2: β2, the share of the second moment that the server keeps.
        tau: Degree of adaptivity τ. A smaller τ is more adaptive.
        initial_v: Initial second moment; τ² by default.
        weighting: Weight clients by their number of `samples`, or equally (`uniform`).
        aggregator: Computes the clients' mean instead, such as a robust rule.
    """

    server_lr: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3
    initial_v: float | None = None
    weighting: Weighting = "samples"

    corrects_aggregator = True
    search_space: ClassVar = {  # within the grid of Reddi et al., Appendix D
        "server_lr": {"distribution": "log_uniform_values", "min": 0.001, "max": 1.0},
        "tau": {"distribution": "log_uniform_values", "min": 1e-5, "max": 0.1},
    }
    rule: ClassVar[Rule] = "adam"

    def own_aggregator(self) -> Aggregator:
        """Return the server step of `rule`."""
        moments = self.beta1, self.beta2, self.tau, self.initial_v
        return AdaptiveServer(self.rule, self.server_lr, *moments, self.weighting, self.aggregator)


class FedAdagrad(FedAdam):
    """FedAvg with Adagrad as server optimizer and the round's mean client update as its gradient.

    With `initial_v` 0 and `server_lr` and `tau` both 1e8 this is FedAvg up to rounding.

    Bytes a round, each participant: down `model`, up `model + 8`.

    Kept by the server: both moments.

    Args:
        initial_v: Initial sum of squares; τ² by default.
    """

    server_lr: float = 0.1
    beta1: float = 0.0
    beta2: float = field(default=0.99, init=False)
    tau: float = 1e-2

    rule = "adagrad"


class FedYogi(FedAdam):
    """FedAvg with Yogi as server optimizer: like FedAdam, but the second moment decreases more slowly.

    With `beta1` and `initial_v` 0 and `server_lr` and `tau` both 1e8 this is FedAvg up to rounding.

    Bytes a round, each participant: down `model`, up `model + 8`.

    Kept by the server: both moments.
    """

    rule = "yogi"
