"""Custom datasets in NumPy files: an `.npz` file, or a folder of `.npy` files."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fl_lightning.core.errors import ConfigError, check_number, one_line
from fl_lightning.core.inputs import Inputs
from fl_lightning.data.datasets import Dataset, count_outputs, untrained_classes
from fl_lightning.data.files import BadFile, check_exists, npz_names, read_mapped, read_npz, whole_numbers
from fl_lightning.data.loaded_data import LoadedData
from fl_lightning.data.transforms import Normalize

NAMES = ("x_train", "y_train", "x_test", "y_test")
CLIENTS = ("client_train", "client_test")


class Arrays(Dataset):
    """Custom data: an `.npz` file with x_train, y_train, x_test and y_test, or a folder with an `.npy` file of each.

    `uint8` inputs are scaled to 0-1, floating-point inputs are used as they are. Other whole numbers `(n, length)` are
    token ids, for networks with an embedding such as `TextCNN`; 0 is padding. Images may be `(n, height, width)`,
    `(n, height, width, channels)` with 1 or 3 channels, or `(n, channels, height, width)`. Labels are integers from 0,
    one per sample; `(n, L)` of 0 and 1 for a multi-label target; masks `(n, height, width)` of classes from 0, in which
    255 marks pixels that are not used; or floating-point numbers to predict, `(n,)` or `(n, T)`. With `num_classes` and
    `scenario.objective`, `(n, length)` can also be a class per token, or -100. Optional arrays `client_train` and
    `client_test` hold the client id of each sample.

    For several inputs per sample, the arrays are `x_train_<name>` and `x_test_<name>`, and `name` is a parameter of the
    network's `forward`. They can have any shape `(n, ...)`, and can also hold booleans.

    The `.npy` files of a folder are memory-mapped: `uint8` and `float32` inputs stay on disk until a batch needs them.

    Args:
        path: The file, or the folder.
        num_classes: Number of classes; by default one more than the largest label. Needed for a class per token.

    Raises:
        ConfigError: `num_classes` is below 2.
    """

    def __init__(self, path: str, num_classes: int | None = None) -> None:
        check_number("scenario.dataset.num_classes", num_classes, "[2, inf)")
        self.path, self.num_classes = path, num_classes

    def load(self) -> LoadedData:
        """Read the `.npz` file, or memory-map the `.npy` files, and return the training and test data."""
        arrays = self._arrays()
        y_train, y_test = (self._labels(name, arrays[name]) for name in ("y_train", "y_test"))
        x_train, x_test = (self._inputs(name, arrays) for name in ("x_train", "x_test"))
        clients: dict[str, Any] = {name: arrays.get(name) for name in CLIENTS}
        return LoadedData(x_train, y_train, x_test, y_test, self._outputs(y_train, y_test), Normalize(), **clients)

    def check_test_classes(self, data: LoadedData) -> None:
        """Raise a `ConfigError` if `num_classes` is not set and a class has only test samples."""
        if self.num_classes is None and (classes := untrained_classes(data)):
            fix = "Correct the labels, or set scenario.dataset.num_classes if this is intended"
            raise self._error(f"y_test has the class {classes[0]}, but y_train has no sample of it. {fix}")

    @property
    def error_prefix(self) -> str:
        """Return the beginning of error messages about the data: the config key and the file."""
        return f"scenario.dataset.path: {one_line(self.path)}"

    def _error(self, what: str) -> ConfigError:
        return ConfigError(f"{self.error_prefix}: {what}")

    def _arrays(self) -> dict[str, np.ndarray]:
        path, fix = Path(self.path), "Write it with numpy.savez"
        try:
            if os.path.isdir(path):
                fix = "Write it with numpy.save"
                return self._map_folder(path)
            if check_exists(path):
                return read_npz(path, required_names(npz_names(path)), CLIENTS)
        except BadFile as error:
            if "Object arrays" in str(error.__cause__):  # NumPy refuses to load Python objects
                fix = "Convert its arrays of the dtype object before you save them, with astype(str) or astype(int)"
            raise ConfigError(f"scenario.dataset.path: {error}. {fix}") from error
        raise self._error("no such file")

    def _map_folder(self, folder: Path) -> dict[str, np.ndarray]:
        names = required_names([path.stem for path in folder.glob("*.npy")])
        present = [name for name in (*names, *CLIENTS) if check_exists(folder / f"{name}.npy")]
        if missing := [f"{name}.npy" for name in names if name not in present]:
            raise BadFile(folder, f"is a folder, it needs to be a file, or to contain {', '.join(missing)}")
        return {name: read_mapped(folder / f"{name}.npy") for name in present}

    def _labels(self, name: str, values: np.ndarray) -> Tensor:
        """Return targets (float), class numbers (integers), or flags and masks (uint8)."""
        if np.issubdtype(values.dtype, np.floating):
            with np.errstate(over="ignore"):
                return torch.from_numpy(np.array(values, np.float32))
        if values.dtype == np.bool_:
            return torch.from_numpy(np.array(values, np.uint8 if values.ndim == 2 else np.int64))
        if values.dtype == np.uint8 and values.ndim == 3:  # masks
            return torch.from_numpy(values)
        if values.dtype.kind == "U":
            fix = "Save numbers, such as those of numpy.unique(labels, return_inverse=True)"
            raise self._error(f"{name} holds text. {fix}")
        try:
            return whole_numbers(values, name)
        except ValueError as error:
            raise self._error(str(error)) from error

    def _outputs(self, *labels: Tensor) -> int:
        outputs, samples = count_outputs(*labels), sum(map(len, labels))
        if labels[0].is_floating_point():
            if self.num_classes is not None:
                raise ConfigError("scenario.dataset.num_classes: the labels are not classes. Leave it out")
        elif labels[0].ndim != 2 and self.num_classes is None and outputs > samples:
            fix = "Number classes from 0, or set scenario.dataset.num_classes"
            raise self._error(f"label {outputs - 1} in {samples} samples is too large. {fix}")
        return self.num_classes or outputs

    def _inputs(self, name: str, arrays: dict[str, np.ndarray]) -> Tensor | Inputs:
        if name not in arrays:
            several = {key: values for key, values in arrays.items() if key.startswith(f"{name}_")}
            return Inputs({key.removeprefix(f"{name}_"): self._tensor(key, several[key]) for key in several})
        values = arrays[name]
        if values.ndim > 2 and values.dtype.kind in "iu" and values.dtype != np.uint8:
            fix = "Save uint8 (0 to 255), or floating point, for example x / 65535"
            raise self._error(f"{name} is {values.dtype} of shape {values.shape}. {fix}")
        x = self._tensor(name, values)
        if x.ndim == 3:
            return x.unsqueeze(1)
        if x.ndim == 4 and x.shape[3] in (1, 3) and x.shape[1] not in (1, 3):
            x = x.permute(0, 3, 1, 2)
            return x if isinstance(values, np.memmap) else x.contiguous()
        return x

    def _tensor(self, name: str, values: np.ndarray) -> Tensor:
        if values.dtype.kind not in "iufb":
            raise self._error(f"{name} is {values.dtype}; it needs whole numbers or floating point")
        dtype = {"f": np.float32, "b": np.bool_}.get(values.dtype.kind, np.int64)
        with np.errstate(over="ignore"):  # overflow becomes Inf, which is refused
            return torch.from_numpy(values if values.dtype == np.uint8 else values.astype(dtype, copy=False))


def required_names(present: Collection[str]) -> Sequence[str]:
    """Return the names of the arrays that a dataset must have, which depend on the number of inputs per sample.

    Args:
        present: The names of the arrays that it has.
    """
    several = sorted(name.removeprefix("x_train_") for name in present if name.startswith("x_train_"))
    if "x_train" in present or not several:
        return NAMES
    return [*(f"x_{split}_{name}" for split in ("train", "test") for name in several), "y_train", "y_test"]
