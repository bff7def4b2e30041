"""ProtoNet: train on episodes. Queries are classified by the nearest class mean of the support set.

Snell, Swersky, Zemel: "Prototypical Networks for Few-shot Learning", NeurIPS 2017. A loss term for any method; the
episodes come from a few-shot dataset such as `FC100`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from fl_lightning.client.loss_term import LossTerm, Step
from fl_lightning.core.arguments import number
from fl_lightning.core.precision import without_autocast
from fl_lightning.data.few_shot import prototype_logits


class Prototypical(LossTerm):
    """Cross-entropy of an episode's queries, classified by the class means of its support set.

    This is Algorithm 1. Every batch is an episode: for each class, the first `shots` samples are the support and the
    others are queries. The term is zero for a batch without queries. It is added to the cross-entropy of the
    classification layer.

    Args:
        shots: Number of support samples per class, 1 or more.
        weight: Factor on the loss, 0 or more.

    Example:
        >>> features, targets = torch.tensor([[0.0], [2.0], [1.0]]), torch.tensor([4, 7, 7])
        >>> round(float(Prototypical(shots=1)(Step(features, targets, features))), 4)
        0.6931
    """

    shots: int = number(5, "[1, inf)")
    weight: float = number(1.0, "[0, inf)")

    section = "algorithm.loss_terms"
    needs_classes = True

    def forward(self, step: Step) -> Tensor:
        """Return the mean cross-entropy of a batch's query samples, times `weight`."""
        assert step.features is not None
        classes, labels = torch.unique(step.targets, return_inverse=True)
        members = F.one_hot(labels, len(classes))
        earlier = (members.cumsum(dim=0) * members).sum(dim=1) - 1  # samples of the same class before this one
        support = earlier < self.shots
        if bool(support.all()):
            return step.features.new_zeros(())
        with without_autocast(step.features.device):
            logits = prototype_logits(step.features[~support], step.features[support], labels[support], len(classes))
            return self.weight * F.cross_entropy(logits, labels[~support])
