"""FedProx: a proximal term keeps local training near the global model.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith: "Federated Optimization in Heterogeneous Networks", MLSys 2020, Eq. 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from fl_lightning.algorithms.base import Algorithm
from fl_lightning.client.loss_term import LossTerm, Step
from fl_lightning.client.module import ClientModule
from fl_lightning.client.weights import unfixed_parameters
from fl_lightning.core.arguments import number
from fl_lightning.core.message import Tensors


def proximal_distance(weights: Sequence[Tensor], anchors: Sequence[Tensor]) -> Tensor:
    """Return the squared distance `||w - w^t||²` (Eq. 2) of the weights to the received ones, over all parameters."""
    parts = [(w - anchor).square().sum() for w, anchor in zip(weights, anchors, strict=True)]
    return sum(parts[1:], start=parts[0])


class Proximal(LossTerm):
    """The proximal term `μ/2 · ||w - w^t||²`, where `w^t` are the weights before the fit.

    A method can set other weights `w^t`, see `anchor`.

    Args:
        mu: μ, 0 or more; 0 switches the term off.

    Attributes:
        anchor: The weights `w^t` by name, set before a fit. For a missing parameter, `w^t` is its value before the fit.
    """

    mu: float = number(0.01, "[0, inf)")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.active = self.mu > 0
        self.anchor: Tensors = {}
        self._names: list[str] = []
        self._anchors: list[Tensor] = []

    def begin(self, module: ClientModule) -> None:
        """Keep the received weights `w^t`, the centre of the proximal term."""
        starts = unfixed_parameters(module.backbone)
        self._names = [*starts]
        self._anchors = [self.anchor.get(name, start).detach().to(start, copy=True) for name, start in starts.items()]

    def forward(self, step: Step) -> Tensor:
        """Return the proximal term at the current weights, or zero outside a fit."""
        if not self._anchors or step.backbone is None:
            return self.outside_fit(step.logits.new_zeros(()))
        parameters = dict(step.backbone.named_parameters())
        return self.mu / 2 * proximal_distance([parameters[name] for name in self._names], self._anchors)


class FedProx(Algorithm):
    """FedAvg with a proximal term that keeps clients near the global model.

    With `mu` 0 this is FedAvg, bit for bit.

    Bytes a round, each participant: down `model`, up `model + 8`.

    Args:
        mu: μ, the weight of the proximal term.
    """

    mu: float = 0.01

    search_space: ClassVar = {  # Li et al.: 0.001, 0.01, 0.1, 1
        "mu": {"distribution": "log_uniform_values", "min": 0.001, "max": 1.0},
    }

    def own_terms(self) -> list[LossTerm]:
        """Return the proximal term."""
        return [Proximal(self.mu)]
