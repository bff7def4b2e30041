"""`Objective`: the base class of the losses and metrics for each type of labels."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from typing import ClassVar, Literal, TypeVar

import torch
from torch import Tensor

from fl_lightning.core.capabilities import Capable
from fl_lightning.core.precision import at_least_float32

ClassWeights = Literal["balanced"] | list[float]
Reduction = Literal["mean", "sum"]
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


def describe_tensor(values: Tensor) -> str:
    """Return a tensor's type and shape in words."""
    return f"{str(values.dtype).removeprefix('torch.')} of shape {tuple(values.shape)}"


def check_range(classes: Tensor, outputs: int) -> None:
    """Raise a `ValueError` if class indices are below 0, or not below the number of a network's outputs."""
    low, high = map(int, classes.aminmax()) if len(classes) else (0, -1)
    if low < 0 or high >= outputs:
        wrong = low if low < 0 else high
        raise ValueError(f"holds label {wrong}, which is out of range for num_classes {outputs}")
