"""Logit adjustment: a cross-entropy whose logits are shifted by the client's number of samples of each class."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from fl_lightning.client.loss_term import LossTerm, Step
from fl_lightning.client.module import ClientModule
from fl_lightning.core.precision import at_least_float32


class LogitAdjustment(LossTerm):
    """Base class of cross-entropies of adjusted logits. They replace the plain cross-entropy.

    Subclasses override `adjusted`. The client's class counts come from the module's `class_counts`.

    Attributes:
        counts: `n_c`, the client's training samples of each class, `(C,)`; None outside of a fit.

    Raises:
        ConfigError: A fit begins in a module without `class_counts`.
    """

    needs_classes = True
    objective_weight = 0.0  # replaces the objective's loss

    def __post_init__(self) -> None:
        super().__post_init__()
        self.counts: Tensor | None = None

    def adjusted(self, logits: Tensor, counts: Tensor) -> Tensor:
        """Return the adjusted logits of a batch, `(B, C)`.

        Args:
            logits: The logits, `(B, C)`.
            counts: The client's training samples of each class, `(C,)`.
        """
        raise NotImplementedError

    def begin(self, module: ClientModule) -> None:
        """Keep the client's class counts for the fit."""
        self.counts = module.class_counts_for(self)

    def forward(self, step: Step) -> Tensor:
        """Return the cross-entropy of a batch's adjusted logits; outside a fit, the plain cross-entropy."""
        logits = at_least_float32(step.logits)
        if self.counts is None:
            return self.outside_fit(F.cross_entropy(logits, step.targets))
        return F.cross_entropy(self.adjusted(logits, self.counts), step.targets)
