"""Objectives: the kind of labels (classes, several labels, numbers), with their loss and metrics."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from fl_lightning.core.errors import ConfigError

__all__ = ["Classification", "MultiLabel", "Objective", "Regression"]

Reduction = Literal["mean", "sum"]


class Objective(ABC):
    """The kind of labels, with the loss and the metrics for them: `scenario.objective`.

    Found from the labels where a config is silent. Subclasses give at least `loss` and `check`.

    Attributes:
        term: The loss's name among the training losses.
        kind: What torchmetrics' names of metrics for such labels begin with.
        count: The argument by which those metrics take the number of outputs.
        fewest: Fewest outputs that a network can have.
        classes: Whether a label is one class, as partitions by class and methods that compare classes need.
    """

    term: str = "objective"
    kind: str = ""
    count: str = "num_outputs"
    fewest: int = 1
    classes: bool = False

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and vars(other) == vars(self)

    def __hash__(self) -> int:
        return hash(type(self))

    @property
    def no_classes(self) -> str:
        """Return the error message for a part that needs classes."""
        return f"the labels are no classes but for {type(self).__name__}"

    @abstractmethod
    def loss(self, outputs: Tensor, targets: Tensor, reduction: Reduction = "mean") -> Tensor:
        """The loss of a batch, a scalar.

        Args:
            outputs: `(B, C)` of the network.
            targets: `(B, ...)` labels.
            reduction: The `mean` over the samples, or their `sum`.
        """

    @abstractmethod
    def check(self, labels: Tensor, outputs: int) -> None:
        """Check the labels.

        Args:
            labels: `(n, ...)`, all of a split.
            outputs: How many numbers the network puts out for a sample.

        Raises:
            ValueError: Says what is wrong, in words that follow the labels' name.
        """

    def sums(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Return `loss` and the metrics of a batch, each summed over the samples.

        Args:
            outputs: `(B, C)` of the network, in float32.
            targets: `(B, ...)` labels.
        """
        return {"loss": self.loss(outputs, targets, "sum")}

    def predictions(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs and targets as torchmetrics takes them: probabilities where there are some, and of its dtypes."""
        return outputs, targets

    def strata(self, labels: Tensor) -> Tensor:
        """Return the strata of partitions and stratified splits, `(n,)` whole numbers."""
        return torch.zeros(len(labels), dtype=torch.int64)

    def stratum_count(self, outputs: int) -> int:
        """Return the number of different strata."""
        return 1


class Classification(Objective):
    """One of `C` classes: cross-entropy, and the share that is classified correctly (`acc`).

    Args:
        label_smoothing: Share of a target that is spread over all classes in training, in [0, 1). What is measured is
            the cross-entropy without it.

    Raises:
        ConfigError: `label_smoothing` is outside [0, 1).
    """

    term, kind, count, fewest, classes = "ce", "Multiclass", "num_classes", 2, True

    def __init__(self, label_smoothing: float = 0.0) -> None:
        if not 0 <= label_smoothing < 1:
            raise ConfigError(f"scenario.objective.label_smoothing: {label_smoothing} is outside [0, 1)")
        self.label_smoothing = label_smoothing

    def loss(self, outputs: Tensor, targets: Tensor, reduction: Reduction = "mean") -> Tensor:
        """Cross-entropy of logits `(B, C)` and class indices `(B,)`."""
        return F.cross_entropy(outputs, targets, reduction=reduction, label_smoothing=self.label_smoothing)

    def check(self, labels: Tensor, outputs: int) -> None:
        """Check that labels are whole numbers from 0, `(n,)`, below the number of classes."""
        if labels.dtype != torch.int64 or labels.ndim != 1:
            also = "" if labels.is_floating_point() or labels.ndim != 1 else "; make it int64"
            raise ValueError(f"needs one whole number a sample, got {described(labels)}{also}")
        low, high = map(int, labels.aminmax()) if len(labels) else (0, -1)
        if low < 0:
            raise ValueError(f"holds label {low}; labels count from 0")
        if high >= outputs:
            raise ValueError(f"holds label {high}, which is out of range for num_classes {outputs}")

    def sums(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Return the number of correct samples and the sum of the cross-entropy."""
        correct = (outputs.argmax(dim=1) == targets).sum()
        return {"acc": correct.float(), "loss": F.cross_entropy(outputs, targets, reduction="sum")}

    def predictions(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Each class's probability."""
        return outputs.softmax(dim=1), targets

    def strata(self, labels: Tensor) -> Tensor:
        """The class."""
        return labels

    def stratum_count(self, outputs: int) -> int:
        """Return the number of classes."""
        return outputs


class MultiLabel(Objective):
    """Any of `L` labels, each there or not: binary cross-entropy, and the share of labels that are right (`acc`).

    A label is taken to be there where its logit is above 0. The loss is the mean over labels.
    """

    term, kind, count = "bce", "Multilabel", "num_labels"

    def loss(self, outputs: Tensor, targets: Tensor, reduction: Reduction = "mean") -> Tensor:
        """Binary cross-entropy of logits `(B, L)` and labels `(B, L)` of 0 and 1."""
        loss = F.binary_cross_entropy_with_logits(outputs, targets.to(outputs.dtype), reduction=reduction)
        return loss if reduction == "mean" else loss / outputs.shape[1]

    def check(self, labels: Tensor, outputs: int) -> None:
        """Check that labels are 0 or 1, `(n, L)`."""
        if labels.ndim != 2 or labels.shape[1] != outputs:
            raise ValueError(f"needs {outputs} labels a sample, of 0 and 1, got {described(labels)}")
        if len(labels) and not bool(((labels == 0) | (labels == 1)).all()):
            raise ValueError("holds other numbers than 0 and 1: a label is there, or is not")

    def sums(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """The share of labels that are right, and the binary cross-entropy."""
        right = ((outputs > 0) == targets.bool()).float().mean(dim=1).sum()
        return {"acc": right, "loss": self.loss(outputs, targets, "sum")}

    def predictions(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Each label's probability."""
        return outputs.sigmoid(), targets.long()


class Regression(Objective):
    """One or several numbers: the mean squared error, and the mean absolute error (`mae`).

    Args:
        criterion: What is descended: the squared error (`mse`), the absolute one (`l1`), or `huber`'s, which is squared
            below 1 and absolute above. `loss` is measured by it too.

    Raises:
        ConfigError: `criterion` is none of these.
    """

    def __init__(self, criterion: Literal["mse", "l1", "huber"] = "mse") -> None:
        if criterion not in CRITERIA:
            raise ConfigError(f"scenario.objective.criterion: {criterion!r} is none of {', '.join(CRITERIA)}")
        self.criterion = self.term = criterion

    def loss(self, outputs: Tensor, targets: Tensor, reduction: Reduction = "mean") -> Tensor:
        """The criterion of outputs `(B, T)` and targets `(B,)` or `(B, T)`; of several numbers, their mean."""
        loss = CRITERIA[self.criterion](outputs, targets.view_as(outputs).to(outputs.dtype), reduction=reduction)
        return loss if reduction == "mean" else loss / outputs.shape[1]

    def check(self, labels: Tensor, outputs: int) -> None:
        """Check that labels are finite numbers, `(n,)` or `(n, T)`."""
        if not labels.is_floating_point():
            raise ValueError(f"needs float32 numbers as the other labels are, got {described(labels)}")
        if labels.shape[1:] not in ((outputs,), () if outputs == 1 else (outputs,)):
            mend = "make it float32 of that shape, or int64 (n,) for classes"
            raise ValueError(f"needs {outputs} numbers a sample, got {described(labels)}; {mend}")
        if not bool(labels.isfinite().all()):
            raise ValueError("holds NaN or Inf, or numbers too large for float32")

    def sums(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """The absolute error, and the criterion."""
        error = (outputs - targets.view_as(outputs)).abs().mean(dim=1).sum()
        return {"mae": error, "loss": self.loss(outputs, targets, "sum")}

    def predictions(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Both of one shape: `(B,)` where there is one number a sample."""
        return (outputs[:, 0], targets.reshape(-1)) if outputs.shape[1] == 1 else (outputs, targets)


CRITERIA: dict[str, Callable[..., Tensor]] = {"mse": F.mse_loss, "l1": F.l1_loss, "huber": F.huber_loss}


def objective_of(labels: Tensor) -> Objective:
    """The objective that labels are for: numbers with a point are regressed, several whole ones a sample are labels."""
    if labels.is_floating_point():
        return Regression()
    return MultiLabel() if labels.ndim == 2 else Classification()


def described(values: Tensor) -> str:
    """A tensor's type and shape in words."""
    return f"{str(values.dtype).removeprefix('torch.')} of shape {tuple(values.shape)}"
