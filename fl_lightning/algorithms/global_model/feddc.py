"""FedDC: each client sums its drift from the global model over the rounds, and a loss term corrects for this drift.

Gao, Fu, Li, Chen, Xu, Xu: "FedDC: Federated Learning with Non-IID Data via Local Drift Decoupling and Correction", CVPR
2022, Eq. 2-7 and Algorithm 1.

The gradient correction of Eq. 5 has the control variates of SCAFFOLD, which this method extends.
"""

from __future__ import annotations

from dataclasses import field
from typing import ClassVar

import torch
from torch import Tensor

from fl_lightning.algorithms.aggregators import Aggregator, DriftCorrection
from fl_lightning.algorithms.global_model.fedprox import proximal_distance
from fl_lightning.algorithms.global_model.scaffold import SCAFFOLD
from fl_lightning.client.loss_term import LossTerm, Step
from fl_lightning.client.module import ClientModule
from fl_lightning.client.weights import unfixed_parameters
from fl_lightning.core.arguments import number
from fl_lightning.core.message import Tensors


class DriftPenalty(LossTerm):
    """Loss term that keeps a client's weights near the received weights minus the client's drift so far.

    It is `α/2 · ||h_k + θ - w||²` (Eq. 3), with the drift `h_k`, the received weights `w` and the weights in training
    `θ`. A client keeps `h_k` from round to round; it is zero at first, and never sent. After a fit, `h_k` grows by
    `θ - w`.

    Args:
        alpha: α, 0 or more; with 0 the drift does not change the training.
    """

    alpha: float = number(0.1, "[0, inf)", "the paper uses 0.005 to 0.1")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.active = self.alpha > 0
        self._drift: Tensors = {}  # h_k
        self._received: Tensors = {}  # w; empty before the first fit
        self._target: list[Tensor] = []  # w - h_k

    def recall(self, kept: Tensors) -> None:
        """Restore the client's drift `h_k`."""
        self._drift = kept

    def begin(self, module: ClientModule) -> None:
        """Keep the received weights `w`, and the weights minus the client's drift, `w - h_k`."""
        self._received = {name: p.detach().clone() for name, p in unfixed_parameters(module.backbone).items()}
        zero = {name: torch.zeros_like(p) for name, p in self._received.items()}
        self._drift = zero | {name: value.to(zero[name]) for name, value in self._drift.items()}
        self._target = [w - self._drift[name] for name, w in self._received.items()]

    def forward(self, step: Step) -> Tensor:
        """Return the penalty `α/2 ||θ - (w - h_k)||²` at the current weights `θ`, or zero outside a fit."""
        if not self._target or step.backbone is None:
            return self.outside_fit(step.logits.new_zeros(()))
        parameters = dict(step.backbone.named_parameters())
        return self.alpha / 2 * proximal_distance([parameters[name] for name in self._received], self._target)

    def remember(self, module: ClientModule) -> Tensors:
        """Return the client's next drift, `h_k + θ_k - w` (Eq. 6)."""
        now = dict(module.backbone.named_parameters())
        return {name: self._drift[name] + now[name].detach() - w for name, w in self._received.items()}


class FedDC(SCAFFOLD):
    """SCAFFOLD whose clients and server also correct for the drift of each client from the global model.

    It needs plain SGD. BatchNorm's statistics are averaged.

    Bytes a round, each participant: down `model + 4 * P`, up `model + 4 * P + 8`.

    Kept by a client: its control variate and its drift. Kept by the server: the control variate and the mean drift.

    Args:
        alpha: α, the weight of the penalty on the drift, 0 or more.
        aggregator: Computes the participants' mean instead, such as a robust rule.
    """

    alpha: float = 0.1
    server_lr: float = field(default=1.0, init=False)

    corrects_aggregator = True
    search_space: ClassVar = {"alpha": {"distribution": "log_uniform_values", "min": 0.001, "max": 0.5}}  # Gao et al.

    def own_terms(self) -> list[LossTerm]:
        """Return the term of SCAFFOLD and the penalty on the drift."""
        return [*super().own_terms(), DriftPenalty(self.alpha)]

    def own_aggregator(self) -> Aggregator:
        """Return the mean of the models plus the mean drift."""
        return DriftCorrection(self.aggregator)
