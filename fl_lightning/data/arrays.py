"""Your own data, from one file of arrays."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fl_lightning.data.datasets import Dataset, LoadedData, one_line
from fl_lightning.data.transforms import Normalize
from fl_lightning.errors import ConfigError


class Arrays(Dataset):
    """Your own data: an `.npz` file with x_train, y_train, x_test and y_test.

    `uint8` inputs are scaled to 0-1, floating-point inputs are taken as they are; images may be `(n, height, width)`,
    `(n, height, width, channels)` with 1 or 3 channels, or `(n, channels, height, width)`. Labels are whole numbers
    from 0.

    Args:
        path: The file.
        num_classes: Number of classes; by default one more than the largest label.
    """

    def __init__(self, path: str, num_classes: int | None = None) -> None:
        self.path, self.num_classes = path, num_classes

    def load(self) -> LoadedData:
        """Read and check the file."""
        arrays = self._arrays()
        labels = {name: self._labels(name, arrays[name]) for name in ("y_train", "y_test")}
        inputs = {name: self._inputs(name, arrays[name]) for name in ("x_train", "x_test")}
        for split in ("train", "test"):
            n_x, n_y = len(inputs[f"x_{split}"]), len(labels[f"y_{split}"])
            if n_x != n_y or not n_x:
                raise self._error(f"x_{split} has {n_x} rows and y_{split} {n_y}: they need as many, and at least one")
        if inputs["x_train"].shape[1:] != inputs["x_test"].shape[1:]:
            raise self._error("x_train and x_test hold inputs of different shapes")
        if inputs["x_train"].dtype != inputs["x_test"].dtype:
            raise self._error("x_train and x_test need one type: uint8 is scaled to 0-1, floating point is not")
        largest = max(int(y.max()) for y in labels.values())
        num_classes = largest + 1 if self.num_classes is None else self.num_classes
        if largest >= num_classes:
            raise self._error(f"label {largest} is out of range for num_classes {num_classes}")
        return LoadedData(
            inputs["x_train"], labels["y_train"], inputs["x_test"], labels["y_test"], num_classes, Normalize()
        )

    def _error(self, what: str) -> ConfigError:
        return ConfigError(f"scenario.dataset.path: {self.path}: {what}")

    def _arrays(self) -> dict[str, np.ndarray]:
        names = ("x_train", "y_train", "x_test", "y_test")
        try:
            # Opened here: numpy leaves a file open that turns out to be no archive.
            with open(self.path, "rb") as file, np.load(file, allow_pickle=False) as archive:
                missing = [name for name in names if name not in archive]
                if missing:
                    raise self._error(f"holds no {', '.join(missing)}; it needs {', '.join(names)}")
                return {name: archive[name] for name in names}
        except FileNotFoundError:
            raise self._error("no such file") from None
        except ConfigError:
            raise
        except Exception as error:  # a damaged zip raises anything: BadZipFile, zlib.error, KeyError, ...
            raise self._error(f"is no readable .npz file ({one_line(error)}); write it with numpy.savez") from error

    def _labels(self, name: str, values: np.ndarray) -> Tensor:
        if values.ndim != 1 or not np.issubdtype(values.dtype, np.integer):
            raise self._error(f"{name} needs one whole number a sample, got {values.dtype} of shape {values.shape}")
        if values.size and values.min() < 0:
            raise self._error(f"{name} holds label {values.min()}; labels count from 0")
        if values.size and values.max() > np.iinfo(np.int64).max:
            raise self._error(f"{name} holds label {values.max()}, more than int64 can")
        return torch.from_numpy(values.astype(np.int64))

    def _inputs(self, name: str, values: np.ndarray) -> Tensor:
        if values.dtype != np.uint8 and not np.issubdtype(values.dtype, np.floating):
            raise self._error(f"{name} is {values.dtype}; it needs uint8 or floating-point numbers")
        if values.ndim < 2:
            raise self._error(f"{name} has shape {values.shape}; it needs a row a sample: (n, ...)")
        with np.errstate(over="ignore"):  # what overflows is refused below
            x = torch.from_numpy(values if values.dtype == np.uint8 else values.astype(np.float32))
        if not x.isfinite().all():
            raise self._error(f"{name} holds NaN or Inf, or numbers too large for float32")
        if x.ndim == 3:
            return x.unsqueeze(1)
        if x.ndim == 4 and x.shape[3] in (1, 3) and x.shape[1] not in (1, 3):
            return x.permute(0, 3, 1, 2).contiguous()
        return x
