"""Objectives whose labels are one class, or several 0/1 labels, per sample."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from fl_lightning.core.errors import ConfigError
from fl_lightning.core.objectives.base import Objective, Reduction, check_range, describe_tensor


class Classification(Objective):
    """Classification into one of `C` classes, with cross-entropy loss and accuracy (`acc`).

    Args:
        label_smoothing: Fraction of a target that is spread over all classes in training, in [0, 1). The evaluated
            cross-entropy is without it.

    Raises:
        ConfigError: `label_smoothing` is outside [0, 1).
    """

    term, kind, count, fewest, classes = "ce", "Multiclass", "num_classes", 2, True
    weighs_classes = True
    bounds: ClassVar = {"acc": (0.0, 1.0)}

    def __init__(self, label_smoothing: float = 0.0) -> None:
        if not 0 <= label_smoothing < 1:
            raise ConfigError(f"scenario.objective.label_smoothing: {label_smoothing} is outside [0, 1)")
        self.label_smoothing = label_smoothing

    def loss(self, outputs: Tensor, targets: Tensor, reduction: Reduction = "mean") -> Tensor:
        """Return the cross-entropy of logits `(B, C)` and class indices `(B,)`.

        With `weights`, the mean is divided by the weights of the batch's samples, as in torch's `cross_entropy`.
        """
        outputs, weights = self._weigh(outputs)
        return F.cross_entropy(outputs, targets, weights, reduction=reduction, label_smoothing=self.label_smoothing)

    def balanced_weights(self, labels: Tensor, outputs: int) -> Tensor:
        """Return weights that are inversely proportional to the class counts. Classes without samples have weight 1.

        They are scikit-learn's balanced weights, `n / (C' n_j)`, with `n` samples, `n_j` of them in class `j`, and `C'`
        classes that occur.
        """
        counts = torch.bincount(labels, minlength=outputs)
        weights = len(labels) / (counts * (counts > 0).sum())
        return weights.where(counts > 0, 1.0)

    def check(self, labels: Tensor, outputs: int) -> None:
        """Check that labels are class indices: int64, `(n,)`, at least 0 and less than the number of classes."""
        if labels.dtype != torch.int64 or labels.ndim != 1:
            fix = "" if labels.is_floating_point() or labels.ndim != 1 else ". Convert it to int64"
            raise ValueError(f"needs one whole number per sample, got {describe_tensor(labels)}{fix}")
        check_range(labels, outputs)

    def sums(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Return the number of correct predictions (`acc`) and the summed cross-entropy (`loss`) of a batch."""
        correct = (outputs.argmax(dim=1) == targets).sum()
        return {"acc": correct.float(), "loss": F.cross_entropy(outputs, targets, reduction="sum")}

    def predictions(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the softmax probabilities of a batch, `(B, C)`, and the true class indices, `(B,)`."""
        return outputs.softmax(dim=1), targets

    def strata(self, labels: Tensor) -> Tensor:
        """Return the class of each sample, by which stratified splits and partitions group the samples."""
        return labels

    def stratum_count(self, outputs: int) -> int:
        """Return the number of classes, which is the number of outputs of the network."""
        return outputs


class MultiLabel(Objective):
    """Multi-label classification with `L` 0/1 labels, binary cross-entropy and label accuracy (`acc`).

    A label is predicted if its logit is above 0. The loss is the mean over labels.
    """

    term, kind, count = "bce", "Multilabel", "num_labels"
    weighs_classes = True
    bounds: ClassVar = {"acc": (0.0, 1.0)}

    def loss(self, outputs: Tensor, targets: Tensor, reduction: Reduction = "mean") -> Tensor:
        """Return the binary cross-entropy of logits `(B, L)` and labels `(B, L)` of 0 and 1.

        With `weights`, the loss of a label's positives is multiplied by its weight, torch's `pos_weight`.
        """
        outputs, weights = self._weigh(outputs)
        loss = F.binary_cross_entropy_with_logits(
            outputs, targets.to(outputs.dtype), reduction=reduction, pos_weight=weights
        )
        return loss if reduction == "mean" else loss / outputs.shape[1]

    def balanced_weights(self, labels: Tensor, outputs: int) -> Tensor:
        """Return each label's number of negatives divided by its number of positives; 1 if either number is 0."""
        positives = labels.sum(dim=0)
        negatives = len(labels) - positives
        return (negatives / positives).where((positives > 0) & (negatives > 0), 1.0)

    def check(self, labels: Tensor, outputs: int) -> None:
        """Check that labels are all 0 or 1 and of shape `(n, L)`, with `L` the network's number of outputs."""
        if labels.ndim != 2 or labels.shape[1] != outputs:
            raise ValueError(f"needs {outputs} labels of 0 and 1 per sample, got {describe_tensor(labels)}")
        if len(labels) and not bool(((labels == 0) | (labels == 1)).all()):
            fix = ". Give classes the shape (n,), for example with y[:, 0]" if labels.shape[1] == 1 else ""
            raise ValueError(f"has other numbers than 0 and 1{fix}")

    def sums(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Return `acc` and `loss`, each averaged over the labels of a sample and summed over the samples."""
        correct = ((outputs > 0) == targets.bool()).float().mean(dim=1).sum()
        loss = F.binary_cross_entropy_with_logits(outputs, targets.to(outputs.dtype), reduction="sum")
        return {"acc": correct, "loss": loss / outputs.shape[1]}

    def predictions(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sigmoid probabilities of a batch, `(B, L)`, and its labels as integers, `(B, L)`."""
        return outputs.sigmoid(), targets.long()
