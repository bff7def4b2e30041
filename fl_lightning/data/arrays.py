"""Your own data, from one file of arrays."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fl_lightning.data.datasets import Dataset, LoadedData
from fl_lightning.data.reading import BadFile, is_there, read_npz, whole_numbers
from fl_lightning.data.transforms import Normalize
from fl_lightning.errors import ConfigError, one_line


class Arrays(Dataset):
    """Your own data: an `.npz` file with x_train, y_train, x_test and y_test.

    `uint8` inputs are scaled to 0-1, floating-point inputs are taken as they are; images may be `(n, height, width)`,
    `(n, height, width, channels)` with 1 or 3 channels, or `(n, channels, height, width)`. Labels are whole numbers
    from 0.

    Args:
        path: The file.
        num_classes: Number of classes; by default one more than the largest label.

    Raises:
        ConfigError: `num_classes` is below 2.
    """

    def __init__(self, path: str, num_classes: int | None = None) -> None:
        if num_classes is not None and num_classes < 2:
            raise ConfigError(f"scenario.dataset.num_classes: {num_classes} is below 2")
        self.path, self.num_classes = path, num_classes

    def load(self) -> LoadedData:
        """Read the file."""
        arrays = self._arrays()
        y_train, y_test = (self._labels(name, arrays[name]) for name in ("y_train", "y_test"))
        x_train, x_test = (self._inputs(name, arrays[name]) for name in ("x_train", "x_test"))
        num_classes = self._counted(y_train, y_test) if self.num_classes is None else self.num_classes
        return LoadedData(x_train, y_train, x_test, y_test, num_classes, Normalize())

    @property
    def blamed(self) -> str:
        """The key and the file."""
        return f"scenario.dataset.path: {one_line(self.path)}"

    def _error(self, what: str) -> ConfigError:
        return ConfigError(f"{self.blamed}: {what}")

    def _arrays(self) -> dict[str, np.ndarray]:
        try:
            if is_there(Path(self.path)):
                return read_npz(Path(self.path), ("x_train", "y_train", "x_test", "y_test"))
        except BadFile as error:
            raise ConfigError(f"scenario.dataset.path: {error}; write it with numpy.savez") from error
        raise self._error("no such file")

    def _labels(self, name: str, values: np.ndarray) -> Tensor:
        try:
            return whole_numbers(values, name)
        except ValueError as error:
            raise self._error(str(error)) from error

    def _counted(self, *labels: Tensor) -> int:
        found, samples = max((int(y.max()) for y in labels if len(y)), default=-1) + 1, sum(map(len, labels))
        if found > samples:
            raise self._error(
                f"label {found - 1}, in {samples} samples: count classes from 0, or set scenario.dataset.num_classes"
            )
        return found

    def _inputs(self, name: str, values: np.ndarray) -> Tensor:
        if values.dtype != np.uint8 and not np.issubdtype(values.dtype, np.floating):
            raise self._error(f"{name} is {values.dtype}; it needs uint8 or floating-point numbers")
        with np.errstate(over="ignore"):  # what overflows is refused as Inf
            x = torch.from_numpy(values if values.dtype == np.uint8 else values.astype(np.float32))
        if x.ndim == 3:
            return x.unsqueeze(1)
        if x.ndim == 4 and x.shape[3] in (1, 3) and x.shape[1] not in (1, 3):
            return x.permute(0, 3, 1, 2).contiguous()
        return x
