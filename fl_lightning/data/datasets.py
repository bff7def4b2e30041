"""Base classes of datasets, and the class of a loaded dataset: its tensors, and how batches are prepared."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fl_lightning.core.arguments import ArgumentsMixin
from fl_lightning.core.errors import ConfigError, FLError, one_line
from fl_lightning.core.objectives import Classification, Objective, describe_tensor, objective_of
from fl_lightning.core.task import Score
from fl_lightning.core.trusted_imports import require_trust
from fl_lightning.data.files import BadFile, check_exists
from fl_lightning.data.loaders import Batches
from fl_lightning.data.schema import TableSchema
from fl_lightning.data.transforms import BatchTransform

MOST_CLASSES = 10_000_000
"""Maximum number of classes: with more, a network's last layer would fill the memory."""


@dataclass
class LoadedData:
    """A loaded dataset: training and test tensors, and how their batches are prepared.

    Args:
        x_train: Training inputs `(n, ...)`; images are `(n, channels, height, width)`, `uint8` or `float32`, texts
            are token ids `(n, length)`, `int64`, padded with 0.
        y_train: Training labels: classes `(n,)`, `int64` in `[0, num_classes)`; multi-label targets `(n, L)`, integers
            0 and 1; or numbers to predict, `(n,)` or `(n, T)`, `float32`.
        x_test: Test inputs, of the same shape and dtype.
        y_test: Test labels.
        num_classes: Number of classes, `C`, at least 2; without classes the number of the network's outputs, `L` or
            `T`.
        prepare: Converts a stored batch to the network's input, on the batch's device.
        augment: Random change of a prepared training batch, on its device; None for none.
        cut: Makes a client's training batches; takes the arguments of `Batches`.
        evaluate: Custom scoring of a shared module on the prepared batches of the global test set; None for the
            usual metrics.
        client_train: The client of each training sample, `(n,)` integers or text, for the partition `ByClient`; None
            if the data have no client ids.
        client_test: The client of each test sample. Requires `client_train`.
        schema: The columns of a table and their encoding; None for other data.
    """

    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor
    num_classes: int
    prepare: BatchTransform
    augment: BatchTransform | None = None
    cut: Callable[..., Batches] = Batches
    evaluate: Callable[..., Score] | None = None
    client_train: np.ndarray | None = None
    client_test: np.ndarray | None = None
    schema: TableSchema | None = None

    @property
    def in_shape(self) -> tuple[int, ...]:
        """Return the shape of one input, without the batch dimension."""
        return tuple(self.x_train.shape[1:])


class Dataset(ArgumentsMixin, ABC):
    """Base class of datasets: the `scenario.dataset` of a config.

    Attributes:
        objective: The learning task; inferred from the labels if None.
    """

    objective: Objective | None = None

    @abstractmethod
    def load(self) -> LoadedData:
        """Read the training and test data and return them as `LoadedData`.

        Raises:
            ConfigError: Files are missing or damaged; the message says which files go where.
        """

    def checked(self, objective: Objective | None = None) -> LoadedData:
        """Load the data and check them. Scenarios call this instead of `load`.

        Args:
            objective: The learning task; the dataset's own, or inferred from the labels, if None.

        Raises:
            ConfigError: The data cannot be loaded, or do not match `LoadedData`.
        """
        with naming_class(self.error_prefix):
            data = self.load()
        try:
            check(data, objective or self.objective)
        except ValueError as error:
            raise ConfigError(f"{self.error_prefix}: {error}") from error
        return data

    @property
    def error_prefix(self) -> str:
        """Return the beginning of error messages about the data: the config key and the class."""
        return f"scenario.dataset: {type(self).__name__}"


@contextmanager
def naming_class(who: str) -> Iterator[None]:
    """Context manager: convert unexpected exceptions of a dataset or partition class to a `ConfigError` naming it."""
    try:
        yield
    except FLError:
        raise
    except Exception as error:
        raise ConfigError(f"{who}: {type(error).__name__}: {one_line(error)}. Use --debug for the traceback") from error


def check(data: LoadedData, objective: Objective | None = None) -> None:
    """Check the shapes, dtypes and values of a loaded dataset. Reads all labels, and all inputs that are not `uint8`.

    Raises:
        ValueError: Describes the first problem.
    """
    if not isinstance(data, LoadedData):
        raise ValueError(f"load() returned {type(data).__name__}, not LoadedData")
    if not isinstance(data.num_classes, int | np.integer) or isinstance(data.num_classes, bool):
        raise ValueError(f"num_classes is {one_line(repr(data.num_classes))}, not an integer")
    if not callable(data.prepare):
        raise ValueError(f"prepare is of type {type(data.prepare).__name__}, which cannot be called")
    for name in ("x_train", "y_train", "x_test", "y_test"):
        values = getattr(data, name)
        if not isinstance(values, Tensor):
            raise ValueError(f"{name} is of type {type(values).__name__}, not a torch.Tensor")
        if values.layout != torch.strided or values.device.type != "cpu":
            raise ValueError(f"{name} is {values.layout} on {values.device}; it needs to be dense, on the CPU")
    objective = objective or objective_of(data.y_train)
    for split in ("train", "test"):
        x, y = getattr(data, f"x_{split}"), getattr(data, f"y_{split}")
        try:
            objective.check(y, data.num_classes)
        except ValueError as error:
            raise ValueError(f"y_{split} {error}") from error
        _check_inputs(f"x_{split}", x)
        if len(x) != len(y) or not len(x):
            sizes = f"x_{split} has {len(x)} rows and y_{split} {len(y)}"
            raise ValueError(f"{sizes}. They need equally many, and at least one")
    if data.x_train.shape[1:] != data.x_test.shape[1:]:
        shapes = f"{data.in_shape} and {tuple(data.x_test.shape[1:])}"
        raise ValueError(f"x_train and x_test hold inputs of different shapes, {shapes}")
    if data.x_train.dtype != data.x_test.dtype:
        raise ValueError("x_train and x_test need the same dtype: uint8 is scaled to 0-1, floating point is not")
    if not objective.fewest <= data.num_classes <= MOST_CLASSES:
        raise ValueError(f"num_classes is {data.num_classes}, not between {objective.fewest} and {MOST_CLASSES:,}")
    _check_clients(data)


def _check_clients(data: LoadedData) -> None:
    for name, y in (("client_train", data.y_train), ("client_test", data.y_test)):
        ids = getattr(data, name)
        if ids is None:
            continue
        if not isinstance(ids, np.ndarray):
            raise ValueError(f"{name} is of type {type(ids).__name__}, not a numpy array")
        if ids.ndim != 1 or ids.dtype.kind not in "iuU":
            raise ValueError(f"{name} needs one id per sample, integers or text, got {ids.dtype} of shape {ids.shape}")
        if len(ids) != len(y):
            raise ValueError(f"{name} has ids of {len(ids)} samples, but there are {len(y)}")
    if data.client_test is not None:
        if data.client_train is None:
            raise ValueError("client_test is given, but client_train is missing")
        kinds = {data.client_train.dtype.kind, data.client_test.dtype.kind}
        if "U" in kinds and len(kinds) > 1:
            raise ValueError("client_train and client_test need ids of one type, integers or text")


def _check_inputs(name: str, x: Tensor) -> None:
    if x.ndim < 2 or 0 in x.shape[1:]:
        raise ValueError(f"{name} has shape {tuple(x.shape)}; it needs one row per sample: (n, ...)")
    if x.dtype not in (torch.uint8, torch.float32) and not (x.dtype == torch.int64 and x.ndim == 2):
        fix = "it needs uint8 or float32, or int64 for token ids (n, length)"
        raise ValueError(f"{name} is {describe_tensor(x)}; {fix}")
    if x.dtype == torch.uint8 or not len(x):
        return
    low, high = x.aminmax()  # a NaN makes both NaN
    if not (low.isfinite() and high.isfinite()):
        raise ValueError(f"{name} holds NaN or Inf, or numbers too large for float32")
    if x.dtype == torch.int64 and low < 0:
        raise ValueError(f"{name} holds {low}; token ids count from 0, which is padding")


def count_outputs(*labels: Tensor) -> int:
    """Return how many outputs a network needs for the labels: one per class, or one per label (column) of a sample."""
    y = labels[0]
    if y.is_floating_point() or y.ndim > 1:
        return 1 if y.ndim == 1 else y.shape[1]
    return max((int(y.max()) for y in labels if len(y)), default=-1) + 1


class FileDataset(Dataset):
    """Base class of public datasets, which are read from files in the layout of their authors.

    Args:
        data_dir: Folder that contains the dataset's file or folder.
        download: Download missing files.

    Attributes:
        files: The files that belong in `data_dir`, for error messages.
        fetchable: Whether they can be downloaded.
    """

    files: str
    fetchable = True
    objective = Classification()

    def __init__(self, data_dir: str = "data", download: bool = False) -> None:
        self.data_dir, self.download = data_dir, download

    @abstractmethod
    def _paths(self) -> Iterable[str]:
        """Return the files and folders that the dataset needs, relative to `data_dir`; folders end in a slash."""

    def _fetch(self) -> None:
        """Download the missing files, if the dataset is `fetchable`."""

    @abstractmethod
    def _read(self, train: bool) -> tuple[Any, Any]:
        """Read the inputs and labels of the training or the test set. Raises `BadFile` if a file is damaged."""

    def _path(self, name: str) -> Path:
        return Path(self.data_dir, name)

    def _read_both(self) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
        """Read the training and the test set. Missing files are downloaded first if `download` is set."""
        try:
            missing, failed = self._missing(), ""
            if missing and self.download:
                failed = self._failed_download()
                missing = self._missing()
            if missing:
                raise ConfigError(self._files_not_found(missing, failed))
            return self._read(train=True), self._read(train=False)
        except BadFile as error:
            fetched = f", or delete it{self._or_download(' and set')}" if self.fetchable else ""
            raise ConfigError(f"{self.error_prefix} cannot be read: {error}. Replace the file{fetched}") from error

    def _missing(self) -> list[str]:
        try:
            check_exists(Path(self.data_dir), folder=True)
        except BadFile as error:
            raise ConfigError(f"scenario.dataset.data_dir: {error}") from error
        return [name for name in self._paths() if not check_exists(self._path(name), folder=name.endswith("/"))]

    def _failed_download(self) -> str:
        require_trust("scenario.dataset.download", self.download)
        paths = {path for file in map(self._path, self._paths()) for path in (file, *file.parents)}
        absent = sorted((path for path in paths if not os.path.lexists(path)), reverse=True)  # innermost first
        try:
            self._fetch()
        except ConfigError:
            raise
        except Exception as error:  # URLError, RuntimeError, OSError, ...
            return f" (the download failed: {one_line(error)})"
        finally:
            for folder in absent:
                with suppress(OSError):  # not a folder, or not empty
                    folder.rmdir()
        return ""

    def _files_not_found(self, missing: list[str], failed: str) -> str:
        files = self.files if len(missing) == len(list(self._paths())) else ", ".join(missing)
        folder = one_line(os.path.abspath(self.data_dir))
        fix = f"or set scenario.dataset.data_dir{self._or_download(' or')}"
        return f"{self.error_prefix}: files not found{failed}. Put {files} into {folder}, {fix}"

    def _or_download(self, word: str) -> str:
        return f"{word} scenario.dataset.download true" if self.fetchable and not self.download else ""
