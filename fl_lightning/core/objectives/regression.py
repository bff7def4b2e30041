"""The objective whose labels are numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Literal

from torch import Tensor
from torch.nn import functional as F

from fl_lightning.core.errors import ConfigError
from fl_lightning.core.objectives.base import Objective, Reduction, describe_tensor

LARGE_TARGET = 10
"""Magnitude of regression targets above which they may be the reason why a loss diverged."""

CRITERIA: dict[str, Callable[..., Tensor]] = {"mse": F.mse_loss, "l1": F.l1_loss, "huber": F.huber_loss}


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
