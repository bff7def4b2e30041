"""Inputs of samples that are read when a batch needs them, instead of at the start of the run."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from fl_lightning.core.errors import ConfigError
from fl_lightning.core.inputs import Inputs
from fl_lightning.core.objectives import describe_tensor
from fl_lightning.core.seeding import RandomStates

PROBED = 64
"""Number of evenly spaced samples that are read at the start: to see if they draw random numbers, and for the digest.
"""


class Reader(Protocol):
    """Reads the inputs of samples, one at a time. It is picklable, so that other processes can read, too."""

    who: str
    """Beginning of error messages: the config key and the class."""

    def __len__(self) -> int: ...

    def read(self, item: int) -> Tensor:
        """Return the input of a sample."""
        ...


class LazySamples:
    """The inputs of many samples, used like one tensor `(n, ...)`, but read on demand.

    Indices and slices give other `LazySamples` without reading anything. `index_select` and `read` read samples.

    If reading draws random numbers, as random transforms do, each sample is read with generators of its own seed, and
    the global random states do not change.

    Args:
        readers: Read the samples: first all of the first reader, then those of the second, ...
        rows: The samples, as indices into those of all readers; None for all.
        sample: The input of a sample, `(...)`.
        draws: Whether reading draws random numbers. If None, some samples are read to find it out.
    """

    device = torch.device("cpu")
    layout = torch.strided

    def __init__(
        self,
        readers: Sequence[Reader],
        rows: Tensor | None = None,
        sample: Tensor | None = None,
        draws: bool | None = None,
    ) -> None:
        self.readers = list(readers)
        self._ends = list(accumulate(map(len, self.readers)))
        self.rows = torch.arange(self._ends[-1]) if rows is None else rows
        self.sample = self._item(int(self.rows[0]), 0) if sample is None else sample
        self.draws = self._find_draws() if draws is None else draws

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that a tensor of all samples would have."""
        return (len(self), *self.sample.shape)

    @property
    def ndim(self) -> int:
        """The number of dimensions that a tensor of all samples would have."""
        return 1 + self.sample.ndim

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the samples."""
        return self.sample.dtype

    @property
    def nbytes(self) -> int:
        """The number of bytes that a tensor of all samples would have."""
        return len(self) * self.sample.nbytes

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.rows)

    def __getitem__(self, index: Any) -> LazySamples:
        """Select samples by a slice, or a tensor or array of indices, without reading them."""
        return LazySamples(self.readers, self.rows[index], self.sample, self.draws)

    def index_select(self, dim: int, index: Tensor) -> Tensor:
        """Read the samples at these indices, as `Tensor.index_select` with `dim` 0."""
        return self.read(index)

    def read(self, index: Tensor, seeds: Iterable[int] | None = None) -> Tensor:
        """Read samples, and return their inputs `(len(index), ...)`.

        Args:
            index: The samples.
            seeds: A seed of the random numbers of each, below 2^63. By default always the same for a sample.
        """
        rows = self.rows[index].tolist()
        if not self.draws:
            return self._stack([self._item(row) for row in rows])
        outside = RandomStates(self.device)
        try:
            return self._stack(
                [self._item(row, seed) for row, seed in zip(rows, rows if seeds is None else seeds, strict=True)]
            )
        finally:
            outside.restore()

    def batches(self, order: Tensor, size: int, seed: Callable[[int], int] | None = None) -> Iterator[Tensor]:
        """Read samples in batches. Another thread reads the next batch, unless reading draws random numbers.

        Threads share torch's random states, so random numbers are drawn in this thread only.

        Args:
            order: The samples, `(n,)`.
            size: Samples per batch.
            seed: Returns the seed of the i-th sample of the order, for `read`.
        """
        parts = order.split(size)
        if self.draws:
            for number, part in enumerate(parts):
                start = number * size
                yield self.read(part, None if seed is None else map(seed, range(start, start + len(part))))
            return
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(self.read, parts[0])
            for part in parts[1:]:
                ready, waiting = waiting, pool.submit(self.read, part)
                yield ready.result()
            yield waiting.result()

    def probe(self) -> Tensor:
        """Read evenly spaced samples, `(n, ...)`: at most `PROBED`."""
        return self.read(torch.linspace(0, len(self) - 1, min(PROBED, len(self))).long())

    def _item(self, row: int, seed: int | None = None) -> Tensor:
        """Read one sample, with a seed of its random numbers if it is given."""
        if seed is not None:
            random.seed(seed)
            np.random.seed(seed % 2**32)
            torch.default_generator.manual_seed(seed)
        part = bisect_right(self._ends, row)
        reader = self.readers[part]
        item = row - (self._ends[part] - len(reader))
        x = reader.read(item)
        sample = getattr(self, "sample", x)
        if x.shape != sample.shape or x.dtype != sample.dtype:
            what = f"{describe_tensor(x)} in item {item}, but {describe_tensor(sample)} in others"
            fix = "A transform such as torchvision.transforms.v2.Resize can resize them"
            raise ConfigError(f"{reader.who}: x is {what}. All need the same shape and dtype. {fix}")
        return x

    def _stack(self, items: list[Tensor]) -> Tensor:
        return torch.stack(items) if items else self.sample.new_empty(0, *self.sample.shape)

    def _find_draws(self) -> bool:
        """Return whether reading some evenly spaced samples, or the first of a reader, draws random numbers."""
        self.draws = False
        outside = RandomStates(self.device)
        self.probe()
        for start in [0, *self._ends[:-1]]:
            self._item(start)
        return not outside.unmoved()

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> LazySamples:
        """Concatenate samples for `torch.cat`. No other function of torch takes samples that are not read."""
        if function is not torch.cat:
            raise TypeError(f"{function.__name__} does not take samples that are read on demand. Set lazy false")
        parts: list[LazySamples] = args[0]
        readers = [reader for part in parts for reader in part.readers]
        starts = [0, *accumulate(part._ends[-1] for part in parts)]
        rows = torch.cat([part.rows + start for part, start in zip(parts, starts, strict=False)])
        return cls(readers, rows, parts[0].sample, any(part.draws for part in parts))


Samples = Tensor | Inputs | LazySamples
"""The inputs of many samples."""


def first_samples(x: Samples, count: int) -> Tensor | Inputs:
    """Return the first inputs as a tensor or `Inputs`, at most `count`. Samples that are read on demand are read."""
    return x.index_select(0, torch.arange(min(count, len(x)))) if isinstance(x, LazySamples) else x[:count]
