"""Batches of samples from tensors in memory, and the LightningDataModule that serves a client's training batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import repeat
from typing import Any, Literal

import lightning as L
import torch
from torch import Tensor

from fl_lightning.core.inputs import Batch, Inputs
from fl_lightning.core.seeding import sample_seed
from fl_lightning.data.lazy import LazySamples, Samples
from fl_lightning.data.transforms import BatchTransform

BatchSampler = Literal["shuffle", "balanced"]

GATHERED = 1 << 20
"""Bytes of samples that are gathered at a time and then split into batches, which is faster for small batches."""


def send(value: Any, device: torch.device) -> Any:
    """Move a batch (a tensor, or `Inputs` with several tensors) to a device; from the CPU to a GPU asynchronously."""
    if value.device == device:
        return value  # `to` also returns it, but takes longer
    if device.type == "cuda" and value.device.type == "cpu":
        value = value.pin_memory()  # from other memory, the copy may wait
    return value.to(device, non_blocking=True)


class Batches:
    """Batches `(x, y)` of selected samples, reshuffled on each pass over the data if a seed is given.

    Args:
        x: Inputs of the whole split. `LazySamples` are read batch by batch.
        y: Labels of the whole split.
        index: Indices of the samples, or None for all.
        batch_size: Samples per batch; the last batch may be smaller.
        seed: Seed of the shuffling; None keeps the order of `index`.
        min_batch: A smaller last batch is dropped: BatchNorm cannot train on one sample.
        frequencies: Relative frequencies with which the samples of `index` are drawn, with replacement. By default,
            each sample is drawn once in a pass over the data.
        token_labels: Whether labels have one entry per token, as the inputs do.
        one_width: Whether all batches of texts have the width of the longest text of `index`, not each its own.

    Batches of texts (`Inputs.lengths`) have no padding beyond their longest text. The lengths are on the CPU, so that
    no batch waits for the device.
    """

    def __init__(
        self,
        x: Samples,
        y: Tensor,
        index: Tensor | None,
        batch_size: int,
        seed: int | None = None,
        min_batch: int = 1,
        frequencies: Tensor | None = None,
        token_labels: bool = False,
        one_width: bool = False,
    ) -> None:
        self.x, self.y, self.frequencies = x, y, frequencies
        self.token_labels, self.one_width = token_labels, one_width
        self.index = torch.arange(len(y)) if index is None else index
        self.batch_size = batch_size
        self.seed, self.passes = seed, 0
        self.generator = None if seed is None else torch.Generator().manual_seed(seed)
        full, rest = divmod(len(self.index), batch_size)
        self.length = full + (rest >= min_batch and rest > 0)

    def __len__(self) -> int:
        return self.length

    def indices(self) -> Iterable[Tensor]:
        """Yield the sample indices `(B,)` of each batch in one pass over the data, reshuffled if a seed is given."""
        yield from send(self._order(), self.x.device).split(self.batch_size) if self.length else ()

    def __iter__(self) -> Iterator[Batch]:
        if isinstance(self.x, LazySamples):
            yield from self._read(self.x) if self.length else ()
            return
        at_a_time = max(1, GATHERED // max(1, self.x[:1].nbytes * self.batch_size))
        order = self._order()
        widths = self._widths(order)
        for chosen in send(order, self.x.device).split(at_a_time * self.batch_size) if self.length else ():
            x, y = self.x.index_select(0, chosen), self.y.index_select(0, chosen)
            batches = zip(x.split(self.batch_size), y.split(self.batch_size), strict=True)
            yield from batches if widths is None else (self._trim(*batch, next(widths)) for batch in batches)

    def _widths(self, order: Tensor) -> Iterator[int] | None:
        """Return the length of the longest text of each batch; None if the inputs are no texts."""
        lengths = self.x.lengths if isinstance(self.x, Inputs) else None
        if lengths is None:
            return None
        if self.one_width:
            return repeat(int(lengths[self.index].max()))
        return (int(part.max()) for part in lengths[order].split(self.batch_size))

    def _trim(self, x: Inputs, y: Tensor, width: int) -> Batch:
        return x.trimmed(width), y[:, :width].contiguous() if self.token_labels else y

    def _read(self, x: LazySamples) -> Iterator[Batch]:
        """Yield the batches of one pass over samples that are read on demand."""
        order, epoch = self._order(), self.passes
        self.passes += 1
        seed = None if self.seed is None else partial(sample_seed, self.seed, epoch)
        labels = self.y.index_select(0, send(order, self.y.device)).split(self.batch_size)
        yield from zip(x.batches(order, self.batch_size, seed), labels, strict=True)

    def _order(self) -> Tensor:
        """Return the sample indices of one pass over the batches, in the order of use, on the CPU."""
        order = self.index
        if self.frequencies is not None:
            order = order[torch.multinomial(self.frequencies, len(order), True, generator=self.generator)]
        elif self.generator is not None:
            order = order.index_select(0, torch.randperm(len(order), generator=self.generator))
        return order[: self.length * self.batch_size]


class PoissonBatches:
    """Batches `(x, y)` to which each selected sample belongs independently, with the same probability (Poisson).

    Their sizes vary, and a batch can be empty. Texts keep the padding of the whole dataset, because the length of
    another sample's text must not change a sample's inputs.

    Args:
        x: Inputs of the whole split. `LazySamples` are read batch by batch.
        y: Labels of the whole split.
        index: Indices of the samples.
        batch_size: The expected number of samples in a batch, if there are that many. Otherwise each batch has all.
        uniform: Returns a given number of random numbers from [0, 1), `(n,)`.
        seed: Seed of the random numbers that are drawn when samples are read.

    Attributes:
        rate: The probability q = min(1, batch_size / n) of each sample.
        expected: The expected number of samples in a batch, q n.
    """

    def __init__(
        self, x: Samples, y: Tensor, index: Tensor, batch_size: int, uniform: Callable[[int], Tensor], seed: int
    ) -> None:
        self.x, self.y, self.index, self.uniform, self.seed = x, y, index, uniform, seed
        self.expected = min(batch_size, len(index))
        self.rate = self.expected / max(1, len(index))
        self.length, self.drawn = math.ceil(len(index) / batch_size), 0

    def __len__(self) -> int:
        """Return the number of batches in an epoch: as many as without Poisson sampling."""
        return self.length

    def __iter__(self) -> Iterator[Batch]:
        for _ in range(self.length):
            chosen = self.index[self.uniform(len(self.index)).to(self.index.device) < self.rate]
            yield self._inputs(chosen), self.y.index_select(0, send(chosen, self.y.device))

    def _inputs(self, chosen: Tensor) -> Any:
        if not isinstance(self.x, LazySamples):
            return self.x.index_select(0, send(chosen, self.x.device))
        self.drawn += 1
        return self.x.read(chosen, (sample_seed(self.seed, self.drawn, place) for place in range(len(chosen))))


class ReadyBatches:
    """Batches `(x, y)` as network inputs, prepared when they are requested.

    Args:
        batches: Returns the stored batches. It is called in each pass over the data.
        ready: Converts a batch to network inputs.
    """

    def __init__(self, batches: Callable[[], Batches], ready: Callable[[Any, Tensor], Batch]) -> None:
        self.batches, self.ready = batches, ready

    def __iter__(self) -> Iterator[Batch]:
        return (self.ready(x, y) for x, y in self.batches())


class ClientDataModule(L.LightningDataModule):
    """LightningDataModule that serves one client's training batches.

    `ready` converts the inputs of each batch to network inputs, after Lightning has moved the batch to the device.
    """

    def __init__(self, batches: Batches, ready: BatchTransform) -> None:
        super().__init__()
        self.batches, self.ready = batches, ready

    def train_dataloader(self) -> Batches:
        """Return the client's training batches."""
        return self.batches

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Batch:
        """Transform a batch's inputs, such as by normalization, after Lightning has moved the batch to the device."""
        x, y = batch
        return self.ready(x), y
