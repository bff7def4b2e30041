"""The number of training steps and epochs of a client's fit."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import lightning as L

from fl_lightning.core.errors import ConfigError

Interval = Literal["epoch", "step"]
"""The unit in which a learning-rate scheduler within a fit counts: epochs or optimizer steps."""


@dataclass(frozen=True)
class LocalWork:
    """The number of training steps of a client in a fit, per epoch and in total.

    Args:
        per_epoch: Steps in each epoch except possibly the last.
        steps: Steps in total.
    """

    per_epoch: int
    steps: int

    @classmethod
    def under(cls, trainer: L.Trainer, batches: int, max_steps: int | None = None) -> LocalWork:
        """Return a client's number of steps under a trainer's limits.

        Args:
            trainer: The trainer.
            batches: The client's number of batches per epoch.
            max_steps: The client's own limit, if any.
        """
        limit, epochs, steps = trainer.limit_train_batches, trainer.max_epochs, trainer.max_steps
        batches = min(batches, limit) if isinstance(limit, int) else int(batches * limit)
        per_epoch = math.ceil(batches / trainer.accumulate_grad_batches)
        bounds = (steps, per_epoch * (-1 if epochs is None else epochs), -1 if max_steps is None else max_steps)
        return cls(per_epoch, min(bound for bound in bounds if bound >= 0))

    @classmethod
    def of(cls, trainer: Any) -> LocalWork:
        """Return the number of steps of a trainer's fit. The trainer is a `Trainer` in a fit, or its stand-in.

        Raises:
            ConfigError: The fit has no limit.
        """
        if isinstance(work := getattr(trainer, "work", None), cls):
            return work
        steps = trainer.estimated_stepping_batches  # loads the data first
        if steps == math.inf:
            raise ConfigError("trainer.max_epochs: the learning-rate schedule needs a fit with an end. Set max_steps.")
        per_epoch = trainer.num_training_batches / trainer.accumulate_grad_batches
        return cls(math.ceil(min(per_epoch, steps)), int(steps))

    def length(self, interval: Interval) -> int:
        """Return the number of steps, or of epochs, in the fit."""
        return self.steps if interval == "step" else self.epochs

    @property
    def epochs(self) -> int:
        """Number of epochs in the fit; the last one may be incomplete."""
        return math.ceil(self.steps / self.per_epoch)

    def steps_in(self, epoch: int) -> int:
        """Return the number of steps in an epoch; epochs are counted from 0."""
        return max(0, min(self.per_epoch, self.steps - epoch * self.per_epoch))
