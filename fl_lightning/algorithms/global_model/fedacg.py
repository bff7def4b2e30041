"""FedACG: clients start from a point ahead of the global model, along the server's momentum, and stay near this point.

Kim, Kim, Han: "Communication-Efficient Federated Learning with Accelerated Client Gradient", CVPR 2024, Algorithm 1.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from fl_lightning.algorithms.aggregators import Aggregator, Weighting, mean_or
from fl_lightning.algorithms.base import Algorithm
from fl_lightning.algorithms.global_model.fedprox import Proximal
from fl_lightning.client.loss_term import LossTerm
from fl_lightning.core.arguments import number
from fl_lightning.core.errors import check_number
from fl_lightning.core.message import Tensors
from fl_lightning.core.round import Round
from fl_lightning.core.state_dicts import State, parameter_names

MOMENTUM = "momentum"
"""The section of the state with the server's momentum `m`."""


class LookAhead(Aggregator):
    """Send clients the weights `x + λ m`, ahead of the model `x` along the momentum `m`, and average their models.

    `m` is the server's last step. With `Δ` the clients' mean change, Algorithm 1 sets `m ← λ m + Δ` and `x ← x + m`.
    Clients start at `x + λ m`, so the new `x` is their mean, and the new `m` is the new `x` minus the old `x`.
    BatchNorm's statistics have no momentum.

    Args:
        lam: λ, in [0, 1).
        weighting: Weight clients by their number of `samples`, or equally (`uniform`).
        inner: Computes the clients' mean instead, such as a robust rule. `weighting` has no effect then.

    Raises:
        ConfigError: λ is out of range, or `inner` computes no kind of mean.
    """

    def __init__(self, lam: float = 0.85, weighting: Weighting = "uniform", inner: Aggregator | None = None) -> None:
        self.inner: Aggregator = self.wrap(mean_or(inner, weighting))
        check_number("algorithm.lam", lam, "[0, 1)", "the paper uses 0.85")
        self.lam = lam

    def initial(self, model: Tensors, num_classes: int) -> State:
        """Return a momentum of zero."""
        momentum = {name: torch.zeros_like(model[name]) for name in parameter_names(model, self.buffers)}
        return super().initial(model, num_classes) | {MOMENTUM: momentum}

    def model_for(self, state: State, client: int) -> Tensors:
        """Return the weights that clients start from, `x + λ m`: the model `x` moved ahead along the momentum `m`."""
        moved = {name: state["model"][name] + self.lam * value for name, value in state[MOMENTUM].items()}
        return state["model"] | moved if self.lam else state["model"]

    def finish(self, folded: Any, round: Round, knowledge: State) -> State:
        """Return the mean of the uploads as the next model, and its change from the old model as the next momentum."""
        averaged = self.inner.finish(folded, round, knowledge)
        model = averaged["model"]
        old, names = round.before["model"], round.before[MOMENTUM]
        return averaged | {MOMENTUM: {name: model[name] - old[name] for name in names}}


class FedACG(Algorithm):
    """FedAvg with server momentum. Clients start from `x + λ m` (global model plus momentum), and stay near this point.

    With `lam` and `beta` 0 this is FedAvg with `weighting: uniform`, bit for bit.

    Bytes a round, each participant: down `model`, up `model + 8`.

    Kept by the server: the momentum.

    Args:
        lam: λ, the server's momentum, in [0, 1).
        beta: β, the weight of the proximal term `β/2 · ||w - w_received||²`.
        weighting: Weight clients by their number of `samples`, or equally (`uniform`).
        aggregator: Computes the clients' mean instead, such as a robust rule.
    """

    lam: float = 0.85
    beta: float = number(0.01, "[0, inf)", "the paper uses 0.01")
    weighting: Weighting = "uniform"

    corrects_aggregator = True
    search_space: ClassVar = {  # around the values of Kim et al.
        "lam": {"values": [0.5, 0.8, 0.85, 0.9, 0.95]},
        "beta": {"distribution": "log_uniform_values", "min": 0.001, "max": 0.1},
    }

    def own_terms(self) -> list[LossTerm]:
        """Return the proximal term around the look-ahead model."""
        return [Proximal(self.beta)]

    def own_aggregator(self) -> Aggregator:
        """Return the server that sends a model ahead of the mean."""
        return LookAhead(self.lam, self.weighting, self.aggregator)
