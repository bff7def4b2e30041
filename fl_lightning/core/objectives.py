"""Losses and metrics for each type of labels: one class, several 0/1 labels, numbers, a mask, or a class per token."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar, Literal, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from fl_lightning.core.capabilities import Capable
from fl_lightning.core.errors import ConfigError, check_number
from fl_lightning.core.precision import at_least_float32

__all__ = [
    "CausalLM",
    "Classification",
    "MultiLabel",
    "Objective",
    "Regression",
    "Segmentation",
    "TokenClassification",
]

ClassWeights = Literal["balanced"] | list[float]
Reduction = Literal["mean", "sum"]
LARGE_TARGET = 10
"""Magnitude of regression targets above which they may be the reason why a loss diverged."""
DICE_EPSILON = 1e-6
"""Added to both sides of the Dice loss's fraction, so that a class that is neither predicted nor present has loss 0."""
IGNORED = 255
"""Label of pixels that are not used, by default."""
IGNORED_TOKEN = -100
"""Label of tokens that are not used, as in Hugging Face's models."""
AnyObjective = TypeVar("AnyObjective", bound="Objective")


class Objective(Capable, ABC):
    """The loss and the metrics for a type of labels. The config key is `scenario.objective`.

    By default the objective is derived from the labels. Subclasses override at least `loss` and `check`.

    Attributes:
        term: Name of the loss among the training losses.
        kind: Prefix of torchmetrics' metrics for such labels.
        count: Argument of these metrics for the number of outputs.
        fewest: Smallest number of outputs of a network.
        classes: Whether each label is one class, which partitions by class and methods that compare classes require.
        weights: Weights of the classes in `loss`, `(C,)`, if `weighted` has set them. Evaluation does not use them.
        weighs_classes: Whether `loss` uses `weights`, so that `class_weights` can be set.
        token_labels: Whether labels have one entry per token, `(n, length)`, so that batches trim them with the inputs.
        bounds: Lowest and highest possible value of metrics in `sums`, by name. Metrics that a client's own machine
            sends are checked against them.
    """

    capabilities: ClassVar = {"weighs_classes": ("loss",)}
    weighs_classes: bool = False
    token_labels: bool = False
    weights: Tensor | None = None

    term: str = "objective"
    kind: str = ""
    count: str = "num_outputs"
    fewest: int = 1
    classes: bool = False
    bounds: ClassVar[dict[str, tuple[float, float]]] = {}

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and vars(other) == vars(self)

    def __hash__(self) -> int:
        return hash(type(self))

    @property
    def no_classes(self) -> str:
        """Text for error messages that says why a method that requires class labels cannot use these labels."""
        return f"the labels are for {type(self).__name__}, not classes"

    def output_shape(self, labels: Tensor, outputs: int) -> tuple[int, ...]:
        """Return the shape of a network's output for one sample.

        Args:
            labels: Labels of some samples, `(n, ...)`.
            outputs: Number of outputs, `C`.
        """
        return (outputs,)

    @abstractmethod
    def loss(self, outputs: Tensor, targets: Tensor, reduction: Reduction = "mean") -> Tensor:
        """Return the mean or the sum of the loss over a batch, a scalar.

        Args:
            outputs: Outputs of the network, `(B, *output_shape)`.
            targets: Labels, `(B, ...)`.
            reduction: Return the `mean` or the `sum` over the batch's `units`.
        """

    def units(self, targets: Tensor) -> Tensor:
        """Return the number of units over which losses and metrics of a batch are averaged, a scalar.

        By default these are the samples. The evaluation of a model divides the sums over all batches by the number of
        units in all batches, so the result does not depend on how the samples are put into batches.

        Args:
            targets: Labels, `(B, ...)`.
        """
        return torch.tensor(len(targets))

    @abstractmethod
    def check(self, labels: Tensor, outputs: int) -> None:
        """Check that the labels of a data split are valid for this objective and the network's number of outputs.

        Args:
            labels: All labels of a split, `(n, ...)`.
            outputs: Number of the network's outputs per sample.

        Raises:
            ValueError: The labels are invalid. The message continues a line that begins with their name.
        """

    def sums(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Return `loss` and the objective's metrics by name, each summed over the `units` of a batch.

        Args:
            outputs: Outputs of the network in float32, `(B, *output_shape)`.
            targets: Labels, `(B, ...)`.
        """
        return {"loss": self.loss(outputs, targets, "sum")}

    def metrics(self, means: dict[str, float]) -> dict[str, float]:
        """Return the metrics of a set of samples by name, given the means of `sums` over all units of the set.

        By default these are the means. Override it for metrics that are functions of means, such as the perplexity.
        """
        return means

    def predictions(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the predictions and targets of a batch in the form that torchmetrics expects."""
        return outputs, targets

    def weighted(self: AnyObjective, weights: Tensor) -> AnyObjective:
        """Return a copy of the objective whose training loss has class weights, `(C,)`."""
        weighted = copy.copy(self)
        weighted.weights = weights
        return weighted

    def _weigh(self, outputs: Tensor) -> tuple[Tensor, Tensor | None]:
        """Prepare outputs and class weights for a weighted loss: convert them to the same dtype and device.

        Without weights, return the outputs and None.
        """
        if self.weights is None:
            return outputs, None
        outputs = at_least_float32(outputs)
        return outputs, self.weights.to(outputs)

    def balanced_weights(self, labels: Tensor, outputs: int) -> Tensor:
        """Return the class weights `(C,)` that balance the loss of these training samples (`class_weights: balanced`).

        Args:
            labels: Labels of the samples, `(n, ...)`.
            outputs: Number of the network's outputs, `C`.
        """
        raise NotImplementedError

    def divergence_hint(self, labels: Tensor) -> str:
        """Return a hint for the error message about a diverged loss, such as to scale the labels; empty by default."""
        return ""

    def strata(self, labels: Tensor) -> Tensor:
        """Return each sample's group for stratified sampling, `(n,)`. Labels that are not classes form one group, 0.

        Partitions by label use the same groups.
        """
        return torch.zeros(len(labels), dtype=torch.int64)

    def stratum_count(self, outputs: int) -> int:
        """Return the number of groups for stratified sampling: the number of classes, or 1 if there are none."""
        return 1


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
        low, high = map(int, labels.aminmax()) if len(labels) else (0, -1)
        if low < 0:
            raise ValueError(f"holds label {low}. Labels count from 0")
        if high >= outputs:
            raise ValueError(f"holds label {high}, which is out of range for num_classes {outputs}")

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
            raise ValueError("has other numbers than 0 and 1")

    def sums(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Return `acc` and `loss`, each averaged over the labels of a sample and summed over the samples."""
        correct = ((outputs > 0) == targets.bool()).float().mean(dim=1).sum()
        loss = F.binary_cross_entropy_with_logits(outputs, targets.to(outputs.dtype), reduction="sum")
        return {"acc": correct, "loss": loss / outputs.shape[1]}

    def predictions(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sigmoid probabilities of a batch, `(B, L)`, and its labels as integers, `(B, L)`."""
        return outputs.sigmoid(), targets.long()


class Regression(Objective):
    """Regression of one or several numbers: squared error as the default loss, mean absolute error as the metric `mae`.

    Args:
        criterion: The loss: the squared error (`mse`), the absolute error (`l1`), or `huber`, which is squared below 1
            and absolute above.

    Raises:
        ConfigError: `criterion` is not one of these.
    """

    bounds: ClassVar = {"mae": (0.0, float("inf"))}

    def __init__(self, criterion: Literal["mse", "l1", "huber"] = "mse") -> None:
        if criterion not in CRITERIA:
            raise ConfigError(f"scenario.objective.criterion: {criterion!r} is not one of {', '.join(CRITERIA)}")
        self.criterion = self.term = criterion

    def loss(self, outputs: Tensor, targets: Tensor, reduction: Reduction = "mean") -> Tensor:
        """Return the loss `criterion` of outputs `(B, T)` and targets, averaged over the `T` numbers of each sample."""
        loss = CRITERIA[self.criterion](outputs, targets.view_as(outputs).to(outputs.dtype), reduction=reduction)
        return loss if reduction == "mean" else loss / outputs.shape[1]

    def check(self, labels: Tensor, outputs: int) -> None:
        """Check that labels are finite floating-point numbers of shape `(n,)` or `(n, T)`."""
        if not labels.is_floating_point():
            raise ValueError(f"needs float32 numbers like the other labels, got {describe_tensor(labels)}")
        if labels.shape[1:] not in ((outputs,), () if outputs == 1 else (outputs,)):
            fix = "Use float32 of that shape, or int64 (n,) for classes"
            raise ValueError(f"needs {outputs} numbers per sample, got {describe_tensor(labels)}. {fix}")
        if not bool(labels.isfinite().all()):
            raise ValueError("holds NaN or Inf, or numbers too large for float32")

    def sums(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Return the absolute error (`mae`) and the value of `criterion` (`loss`), each summed over a batch."""
        error = (outputs - targets.view_as(outputs)).abs().mean(dim=1).sum()
        return {"mae": error, "loss": self.loss(outputs, targets, "sum")}

    def divergence_hint(self, labels: Tensor) -> str:
        """Return a hint with the range of the targets and how to scale them, or an empty text if they are small."""
        low, high = map(float, labels.aminmax())
        if max(-low, high) <= LARGE_TARGET:
            return ""
        return f"The targets range from {low:g} to {high:g}. Scale them to about -1 to 1 in the data"

    def predictions(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return a batch's outputs and targets in the same shape: `(B,)` for one number per sample, else `(B, T)`."""
        return (outputs[:, 0], targets.reshape(-1)) if outputs.shape[1] == 1 else (outputs, targets)


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
        used = labels[labels != self.ignore_index]
        low, high = map(int, used.aminmax()) if len(used) else (0, -1)
        if low < 0 or high >= outputs:
            wrong = low if low < 0 else high
            raise ValueError(f"holds label {wrong}, which is out of range for num_classes {outputs}")

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


class TokenClassification(Objective):
    """One of `C` classes for each token of a text, with cross-entropy and token accuracy (`acc`).

    The label -100 marks tokens that are not used, such as padding. The loss and the accuracy are means over the used
    tokens of all texts together, so a long text counts more than a short one, and padding does not count.
    """

    term, kind, count, fewest, token_labels = "ce", "Multiclass", "num_classes", 2, True
    bounds: ClassVar = {"acc": (0.0, 1.0)}

    def output_shape(self, labels: Tensor, outputs: int) -> tuple[int, ...]:
        """Return `(length, C)`: one logit for each token and class."""
        return (*labels.shape[1:], outputs)

    def expected(self, targets: Tensor) -> Tensor:
        """Return the class that the outputs at each position are compared with, `(B, length)`: the labels."""
        return targets

    def units(self, targets: Tensor) -> Tensor:
        """Return the number of used tokens in a batch."""
        return (self.expected(targets) != IGNORED_TOKEN).sum()

    def loss(self, outputs: Tensor, targets: Tensor, reduction: Reduction = "mean") -> Tensor:
        """Return the cross-entropy of logits `(B, length, C)` and labels `(B, length)`; 0 if no token is used."""
        logits, classes = at_least_float32(outputs).flatten(0, 1), self.expected(targets).flatten()
        loss = F.cross_entropy(logits, classes, ignore_index=IGNORED_TOKEN, reduction="sum")
        return loss if reduction == "sum" else loss / self.units(targets).clamp(min=1)

    def check(self, labels: Tensor, outputs: int) -> None:
        """Check that labels are class indices or -100, int64, `(n, length)`, and that each text has a used token."""
        if labels.dtype != torch.int64 or labels.ndim != 2:
            raise ValueError(f"needs one class per token, int64 (n, length), got {describe_tensor(labels)}")
        expected = self.expected(labels)
        used = expected != IGNORED_TOKEN
        if not bool(used.any(dim=1).all()):
            raise ValueError(f"has no label in sample {int(used.any(dim=1).int().argmin())}. Remove the sample")
        low, high = map(int, expected[used].aminmax()) if len(labels) else (0, -1)
        if low < 0 or high >= outputs:
            wrong = low if low < 0 else high
            raise ValueError(f"holds label {wrong}, which is out of range for num_classes {outputs}")

    def sums(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Return the number of correct tokens (`acc`) and the summed cross-entropy (`loss`) of a batch."""
        correct = (outputs.argmax(dim=2) == self.expected(targets)).sum()
        return {"acc": correct.float(), "loss": self.loss(outputs, targets, "sum")}

    def predictions(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the softmax probabilities `(N, C)` and the classes `(N,)` of the N used tokens."""
        expected = self.expected(targets)
        used = expected != IGNORED_TOKEN
        return outputs[used].softmax(dim=1), expected[used]


class CausalLM(TokenClassification):
    """Causal language modelling: each token is predicted from those before it. The metric `perplexity` is `exp(loss)`.

    Labels are token ids, aligned with the inputs as in Hugging Face's models: the output at a position is compared with
    the label of the next position, so the first token has no loss. The label -100 marks tokens that are not used, such
    as padding, or the prompt of an instruction. The perplexity is that of a whole set: the exponential of the mean loss
    over its used tokens, not a mean of perplexities.
    """

    bounds: ClassVar = {"acc": (0.0, 1.0), "perplexity": (1.0, float("inf"))}

    def expected(self, targets: Tensor) -> Tensor:
        """Return the label of the next position, `(B, length)`; -100 at the last position, which has none."""
        return F.pad(targets[:, 1:], (0, 1), value=IGNORED_TOKEN)

    def metrics(self, means: dict[str, float]) -> dict[str, float]:
        """Add the perplexity to the means of a set; infinite if it is too large for a float64."""
        return means | {"perplexity": float(torch.tensor(means["loss"], dtype=torch.float64).exp())}


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


CRITERIA: dict[str, Callable[..., Tensor]] = {"mse": F.mse_loss, "l1": F.l1_loss, "huber": F.huber_loss}


def objective_of(labels: Tensor) -> Objective:
    """Return the default objective for labels.

    It is regression for floating-point labels, segmentation for whole numbers `(n, height, width)`, multi-label for
    `(n, L)`, and else classification.
    """
    if labels.is_floating_point():
        return Regression()
    if labels.ndim == 3:
        return Segmentation()
    return MultiLabel() if labels.ndim == 2 else Classification()


def describe_tensor(values: Tensor) -> str:
    """Return a tensor's type and shape in words."""
    return f"{str(values.dtype).removeprefix('torch.')} of shape {tuple(values.shape)}"
