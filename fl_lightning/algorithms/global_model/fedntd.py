"""FedNTD: clients distil the global model's predictions for all classes except a sample's true class.

Lee, Jeong, Shin, Bae, Yun: "Preservation of the Global Knowledge by Not-True Distillation in Federated Learning",
NeurIPS 2022, Eq. 3-5.

The term, `NotTrueDistillation`, also works in any other method's `loss_terms`.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from fl_lightning.algorithms.base import Algorithm
from fl_lightning.client.loss_term import LossTerm, Step
from fl_lightning.client.module import ClientModule
from fl_lightning.core.arguments import number
from fl_lightning.core.precision import at_least_float32, without_autocast
from fl_lightning.models.base import frozen_copy


def not_true(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the logits of all classes except each sample's own, `(B, C - 1)`, in ascending order of the classes."""
    others = torch.arange(logits.shape[1] - 1, device=logits.device)
    others = others + (others >= targets[:, None]).long()  # skips the true class
    return logits.gather(1, others)


def not_true_distillation(logits: Tensor, teacher: Tensor, targets: Tensor, tau: float) -> Tensor:
    """Return the batch mean of `τ² KL(q̃_g || q̃)` (Eq. 4), with softmax over all classes except a sample's true class.

    Args:
        logits: `(B, C)`.
        teacher: The received model's logits, `(B, C)`.
        targets: `(B,)`.
        tau: τ, the temperature.
    """
    log_q, log_q_g = ((not_true(values, targets) / tau).log_softmax(dim=1) for values in (logits, teacher))
    return tau**2 * (log_q_g.exp() * (log_q_g - log_q)).sum(dim=1).mean()  # vmap slows F.kl_div down


class NotTrueDistillation(LossTerm):
    """Loss term with weight `β`: distil the received model's predictions for all classes except a sample's true class.

    The received model is the teacher. It is in eval mode.

    Args:
        beta: β, 0 or more; 0 switches the term off.
        tau: τ, the temperature, above 0.
    """

    beta: float = number(1.0, "[0, inf)", "the paper uses 1")
    tau: float = number(1.0, "(0, inf)", "the paper uses 1")

    needs_classes = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.active = self.beta > 0
        self._teacher: list[nn.Module] = []  # a list keeps it out of the client's module

    def begin(self, module: ClientModule) -> None:
        """Copy the received model as the teacher."""
        if self.active:
            self._teacher = [frozen_copy(module.backbone)]

    def forward(self, step: Step) -> Tensor:
        """Return `β` times the not-true distillation loss on a batch, or zero outside a fit."""
        if not self._teacher or step.inputs is None:
            return self.outside_fit(step.logits.new_zeros(()))
        with torch.no_grad():
            teacher = at_least_float32(self._teacher[0](step.inputs))
        with without_autocast(step.logits.device):
            logits = at_least_float32(step.logits)
            return self.beta * not_true_distillation(logits, teacher, step.targets, self.tau)


class FedNTD(Algorithm):
    """FedAvg in which clients distil the received model's predictions for all classes except a sample's true class.

    With `beta` 0 this is FedAvg, bit for bit.

    Bytes a round, each participant: down `model`, up `model + 8`.

    Args:
        beta: β, the weight of the term.
        tau: τ, the temperature.
    """

    beta: float = 1.0
    tau: float = 1.0

    search_space: ClassVar = {  # the ranges of Lee et al., Appendix
        "beta": {"distribution": "log_uniform_values", "min": 0.1, "max": 5.0},
        "tau": {"values": [0.5, 1.0, 2.0, 3.0]},
    }

    def own_terms(self) -> list[LossTerm]:
        """Return the distillation of the received model."""
        return [NotTrueDistillation(self.beta, self.tau)]
