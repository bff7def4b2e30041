"""The objective whose labels are masks: one class for each pixel."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from fl_lightning.core.errors import check_number
from fl_lightning.core.objectives.base import Objective, Reduction, check_range, describe_tensor
from fl_lightning.core.precision import at_least_float32

DICE_EPSILON = 1e-6
"""Added to both sides of the Dice loss's fraction, so that a class that is neither predicted nor present has loss 0."""
IGNORED = 255
"""Label of pixels that are not used, by default."""


class Segmentation(Objective):
    """Segmentation: one of `C` classes for each pixel, with cross-entropy, optional Dice loss, and pixel accuracy.

    The loss and the accuracy (`acc`) are means over the pixels of an image, then over images, so that each image counts
    equally. Without ignored pixels, the cross-entropy is torch's. For the overlap over all pixels, name torchmetrics'
    metrics in `evaluation.metrics`, such as `JaccardIndex` (IoU) and `F1Score` (Dice).

    Args:
        dice: Weight of the Dice loss, 0 or more. It is `1 - 2 |P ∩ G| / (|P| + |G|)` for the predicted probabilities P
            and the mask G of a class, averaged over the classes (Milletari, Navab, Ahmadi: "V-Net", 3DV 2016, with sums
            instead of squares).
        ignore_index: Label of pixels that are not used.

    Raises:
        ConfigError: `dice` is negative.
    """

    term, kind, count, fewest = "ce", "Multiclass", "num_classes", 2
    bounds: ClassVar = {"acc": (0.0, 1.0)}

    def __init__(self, dice: float = 0.0, ignore_index: int = IGNORED) -> None:
        check_number("scenario.objective.dice", dice, "[0, inf)")
        self.dice, self.ignore_index = dice, ignore_index
        self.term = "ce_dice" if dice else "ce"

    def output_shape(self, labels: Tensor, outputs: int) -> tuple[int, ...]:
        """Return `(C, height, width)`: one logit for each class and pixel."""
        return (outputs, *labels.shape[1:])

    def loss(self, outputs: Tensor, targets: Tensor, reduction: Reduction = "mean") -> Tensor:
        """Return the loss of logits `(B, C, height, width)` and masks `(B, height, width)` of class indices."""
        outputs, targets = at_least_float32(outputs), targets.long()
        pixels = F.cross_entropy(outputs, targets, reduction="none", ignore_index=self.ignore_index)
        images = self._mean_over_pixels(pixels, targets)
        if self.dice:
            images = images + self.dice * dice_loss(outputs, targets, targets != self.ignore_index)
        return images.mean() if reduction == "mean" else images.sum()

    def check(self, labels: Tensor, outputs: int) -> None:
        """Check that labels are masks `(n, height, width)` of class indices, as uint8 or int64."""
        if labels.dtype not in (torch.uint8, torch.int64) or labels.ndim != 3:
            raise ValueError(f"needs one mask (height, width) of classes per sample, got {describe_tensor(labels)}")
        check_range(labels[labels != self.ignore_index], outputs)

    def sums(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Return each image's share of correct pixels (`acc`) and its loss (`loss`), summed over a batch."""
        correct = (outputs.argmax(dim=1) == targets).float()
        return {"acc": self._mean_over_pixels(correct, targets).sum(), "loss": self.loss(outputs, targets, "sum")}

    def predictions(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the softmax probabilities `(N, C)` and the classes `(N,)` of the N pixels that are not ignored."""
        used = targets != self.ignore_index
        return outputs.softmax(dim=1).movedim(1, -1)[used], targets[used].long()

    def _mean_over_pixels(self, values: Tensor, targets: Tensor) -> Tensor:
        """Return the mean of each image's values over its used pixels, `(B,)`; 0 if it has none."""
        used = targets != self.ignore_index
        return (values * used).sum(dim=(1, 2)) / used.sum(dim=(1, 2)).clamp(min=1)


def dice_loss(outputs: Tensor, targets: Tensor, used: Tensor) -> Tensor:
    """Return the soft Dice loss of each image, averaged over the classes, `(B,)`. A class absent from both has loss 0.

    Args:
        outputs: Logits, `(B, C, height, width)`.
        targets: Class indices, `(B, height, width)`.
        used: Boolean mask of the pixels that count, `(B, height, width)`.
    """
    classes = torch.arange(outputs.shape[1], device=outputs.device).view(1, -1, 1, 1)
    masks = (targets.unsqueeze(1) == classes) & used.unsqueeze(1)
    predicted = outputs.softmax(dim=1) * used.unsqueeze(1)
    overlap, sizes = ((value.sum(dim=(2, 3))) for value in (predicted * masks, predicted + masks))
    return 1 - ((2 * overlap + DICE_EPSILON) / (sizes + DICE_EPSILON)).mean(dim=1)
