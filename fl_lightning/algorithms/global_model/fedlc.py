"""FedLC: a calibrated cross-entropy, in which a client's rare classes need a larger margin.

Zhang, Li, Li, Xu, Wu, Ding, Wu: "Federated Learning with Label Distribution Skew via Logits Calibration", ICML 2022,
Section 4.

The term, `CalibratedLoss`, also works in any other method's `loss_terms`.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from fl_lightning.algorithms.base import Algorithm
from fl_lightning.client.logit_adjustment import LogitAdjustment
from fl_lightning.client.loss_term import LossTerm
from fl_lightning.core.arguments import number


def calibrated_logits(logits: Tensor, counts: Tensor, tau: float) -> Tensor:
    """Return the logits minus `τ n_c^(-1/4)`, `(B, C)`; minus infinity for classes without samples.

    Args:
        logits: `(B, C)`.
        counts: `n_c`, the client's training samples of each class, `(C,)`.
        tau: τ, the scale of the margins.
    """
    return logits - tau * counts.to(logits).pow(-0.25)  # 0 ** -0.25 is infinite


class CalibratedLoss(LogitAdjustment):
    """Cross-entropy with larger margins for a client's rare classes. It replaces the plain cross-entropy.

    It is the cross-entropy of `calibrated_logits`. The client's class counts come from the module's `class_counts`.

    Args:
        tau: τ, 0 or more; 0 switches the term off, and the objective's loss is used.

    Raises:
        ConfigError: A fit begins in a module without `class_counts`.

    Example:
        >>> import torch
        >>> from fl_lightning import Step
        >>> term = CalibratedLoss(tau=1.0)
        >>> term.counts = torch.tensor([16.0, 1.0])
        >>> round(float(term(Step(torch.zeros(1, 2), torch.tensor([1])))), 4)  # margins 0.5 and 1
        0.9741
    """

    tau: float = number(1.0, "[0, inf)", "the paper uses 0.1 to 2")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.active = self.tau > 0

    def adjusted(self, logits: Tensor, counts: Tensor) -> Tensor:
        """Return the calibrated logits of a batch."""
        return calibrated_logits(logits, counts, self.tau)


class FedLC(Algorithm):
    """FedAvg with a cross-entropy in which the rare classes of a client need a larger margin.

    With `tau` 0 this is FedAvg, bit for bit.

    Bytes a round, each participant: down `model`, up `model + 8`.

    Args:
        tau: τ, the scale of the margins `τ n_c^(-1/4)`.
    """

    tau: float = 1.0

    search_space: ClassVar = {"tau": {"distribution": "log_uniform_values", "min": 0.1, "max": 5.0}}  # Zhang et al.

    def own_terms(self) -> list[LossTerm]:
        """Return the calibrated cross-entropy."""
        return [CalibratedLoss(self.tau)]
