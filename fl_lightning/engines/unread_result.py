"""Results whose losses are still on the training device, so that several clients' losses are read in one transfer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from fl_lightning.client.losses import LossRecord
from fl_lightning.core.errors import NonFiniteError
from fl_lightning.core.state_dicts import first_non_finite, read_numbers, sums_of
from fl_lightning.core.task import Result, Task, failed_result

HELD = 1 << 28
"""Number of bytes of unread uploads and losses on a GPU at which they are read together."""

NUMBER = 512
"""Bytes that torch allocates on a GPU for a tensor of a single number."""


class UnreadResult(NamedTuple):
    """A task's result before its losses are read from the device and its values are checked for NaN and Inf.

    Attributes:
        task: The task.
        result: The result, without losses.
        losses: The losses of the fit; None without a fit.
        sums: For each section of the upload, sums that show whether it is finite.
    """

    task: Task
    result: Result
    losses: LossRecord | None
    sums: dict[str, list[Tensor]]

    @property
    def size(self) -> int:
        """Bytes that the result takes on the device."""
        losses = NUMBER * len(self.losses.pending) if self.losses else 0
        return losses + (self.result.upload.nbytes if self.result.upload else 0)

    @property
    def parts(self) -> list[list[Tensor]]:
        """The tensors to read from the device: the losses, and the sums that show whether the upload is finite."""
        return [self.losses.pending if self.losses else [], *self.sums.values()]

    def read(self, losses: list[float], *sums: list[float]) -> Result:
        """Return the result with its losses, or the client's failure if a loss or the upload contains NaN or Inf.

        Args:
            losses: The values of the losses.
            *sums: The values of the sums of each section.
        """
        try:
            means = self.losses.means(losses) if self.losses else {}
            for section, own in zip(self.sums, sums, strict=True):
                assert self.result.upload
                if bad := first_non_finite(self.result.upload.section(section), own):
                    raise NonFiniteError(f"the upload's {f'{section}/{bad}'!r} is NaN or Inf: lower the learning rate")
        except BaseException as error:
            return failed_result(self.task, error)
        return replace(self.result, losses=means)


def unread_result(task: Task, result: Result, losses: LossRecord | None = None) -> UnreadResult:
    """Return a task's result whose losses are read from the device later, together with those of other clients.

    It includes sums of the upload's tensors, for a later check for NaN and Inf.
    """
    sections = result.upload.sections if result.upload else {}
    return UnreadResult(task, result, losses, {name: sums_of(tensors) for name, tensors in sections.items()})


class ResultReader:
    """Passes results on after reading their losses from the device. On a GPU, several are read in one transfer.

    Results on a GPU wait until they take `HELD` bytes, because after each transfer the GPU has no work until the next
    client's first step.

    Args:
        device: Where clients train.
        done: Receives the results.
    """

    def __init__(self, device: torch.device, done: Callable[[Result], object]) -> None:
        self._limit, self._done = 0 if device.type == "cpu" else HELD, done
        self._held: list[UnreadResult] = []
        self._size = 0

    def add(self, unread: UnreadResult) -> None:
        """Add a result."""
        self._held.append(unread)
        self._size += unread.size
        if self._size >= self._limit:
            self.flush()

    def flush(self) -> None:
        """Pass on the results that are waiting."""
        held, self._held, self._size = self._held, [], 0
        for result in read_together(held):
            self._done(result)


def read_together(unread: Sequence[UnreadResult]) -> Iterator[Result]:
    """Yield results with their losses, which are all read from the device in one transfer."""
    read = iter(read_numbers([part for one in unread for part in one.parts]))
    for one in unread:
        yield one.read(*islice(read, len(one.parts)))
