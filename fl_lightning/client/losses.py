"""Sum and record the losses of training steps; functions from which several methods build their losses."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import reduce
from statistics import fmean

import torch
from torch import Tensor

from fl_lightning.core.errors import NonFiniteError


def total_loss(losses: Mapping[str, Tensor]) -> Tensor:
    """Return the sum of a training step's losses, given by name."""
    return reduce(torch.add, losses.values())


def loss_with_gradients(value: Tensor, parameters: Iterable[Tensor], gradients: Iterable[Tensor]) -> Tensor:
    """Return a loss with a given value, whose backward pass gives each parameter the given gradient."""
    zeros = ((gradient * (p - p.detach())).sum() for p, gradient in zip(parameters, gradients, strict=True))
    return reduce(torch.add, zeros, value.detach())


def distillation_loss(logits: Tensor, teacher: Tensor) -> Tensor:
    """Return the batch mean of `KL(softmax(teacher) || softmax(logits))`; both are `(B, C)`."""
    log_p, log_t = logits.log_softmax(dim=1), teacher.log_softmax(dim=1)
    return (log_t.exp() * (log_t - log_p)).sum(dim=1).mean()  # vmap slows F.kl_div down


class LossRecord:
    """Training losses of one client's fit. Losses on a GPU stay there until they are needed, so that no step waits."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._pending: list[Tensor] = []  # the losses of all terms, step by step
        self._read: list[float] = []

    def add(self, losses: dict[str, Tensor]) -> None:
        """Record the losses of one training step: a scalar tensor for the objective and for each loss term, by name."""
        self._names = list(losses)
        self._pending += [value.detach() for value in losses.values()]

    def add_values(self, names: list[str], values: Tensor) -> None:
        """Record the losses of one training step, given as a 1-D tensor in the order of `names`."""
        self._names = names
        self._pending += values.unbind()

    def end_epoch(self) -> None:
        """At the end of an epoch, read and check its losses if they are on the CPU. Losses on a GPU are read later."""
        if self._pending and self._pending[0].device.type == "cpu":
            self.settle()

    @property
    def pending(self) -> list[Tensor]:
        """The losses that have not been read from the device yet."""
        return self._pending

    def epoch_means(self) -> dict[str, float]:
        """Read the losses recorded since the last call, as `settle` does, and return the mean of each."""
        values = self.settle()
        return self._means(values) if values else {}

    def settle(self, values: list[float] | None = None) -> list[float]:
        """Read the losses recorded since the last call, check that they are finite, and return them.

        Args:
            values: The values of `pending`, if they have already been transferred.

        Raises:
            NonFiniteError: A loss is NaN or Inf. The message names the first such term.
        """
        if not self._pending:
            return []
        values = torch.stack(self._pending).tolist() if values is None else values
        self._pending = []
        if not all(map(math.isfinite, values)):
            first = next(number for number, value in enumerate(values) if not math.isfinite(value))
            term = self._names[first % len(self._names)]
            raise NonFiniteError(f"loss term {term!r} is NaN or Inf: lower the learning rate or the term's coefficient")
        self._read += values
        return values

    @property
    def steps(self) -> int:
        """Number of training steps recorded so far."""
        return (len(self._read) + len(self._pending)) // max(1, len(self._names))

    def means(self, values: list[float] | None = None) -> dict[str, float]:
        """Return the mean of each loss over the fit's steps, and the sum of the means as `loss`; empty before any step.

        Args:
            values: The values of `pending`, if they have already been transferred.
        """
        self.settle(values)
        return self._means(self._read) if self._read else {}

    def _means(self, values: list[float]) -> dict[str, float]:
        terms = len(self._names)
        means = [fmean(values[number::terms]) for number in range(terms)]
        return {"loss": sum(means), **dict(zip(self._names, means, strict=True))}
