"""Datasets as in-memory tensors: whole splits, batches are cut from them by index."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from fl_lightning.data.loaders import Batches
from fl_lightning.data.transforms import BatchTransform
from fl_lightning.errors import ConfigError
from fl_lightning.evaluation import Score, evaluate


@dataclass
class LoadedData:
    """A dataset in memory.

    Args:
        x_train: Training inputs `(n, ...)`; images are `(n, channels, height, width)`, `uint8` or `float32`, texts
            are token ids `(n, length)`, `int64`, padded with 0.
        y_train: Training labels `(n,)`, `int64` in `[0, num_classes)`.
        x_test: Test inputs.
        y_test: Test labels.
        num_classes: Number of classes, `C`.
        prepare: Turns a batch as stored into what the network takes, on the batch's device.
        augment: Random change of a prepared training batch, on its device, or None.
        cut: Makes a client's training batches; takes the arguments of `Batches`.
        evaluate: Scores a shared module on the prepared batches of the global test set.
    """

    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor
    num_classes: int
    prepare: BatchTransform
    augment: BatchTransform | None = None
    cut: Callable[..., Batches] = Batches
    evaluate: Callable[..., Score] = evaluate

    @property
    def in_shape(self) -> tuple[int, ...]:
        """Shape of one input, without the batch."""
        return tuple(self.x_train.shape[1:])


class Dataset(ABC):
    """Something that can be loaded: the `scenario.dataset` of a config."""

    @abstractmethod
    def load(self) -> LoadedData:
        """Read the data into memory.

        Raises:
            ConfigError: Files are missing or damaged; the message says which files go where.
        """


class FileDataset(Dataset):
    """A dataset read from files that somebody else's distribution lays out.

    Args:
        data_dir: Folder that holds the dataset's own file or folder.
        download: Fetch the files when they are missing.

    Attributes:
        files: Which files belong into `data_dir`, for the message where they are missing.
    """

    files: str

    def __init__(self, data_dir: str = "data", download: bool = False) -> None:
        self.data_dir, self.download = data_dir, download

    @abstractmethod
    def _read(self, train: bool) -> tuple[Any, Any]:
        """Inputs and labels of one split, downloading the files first if asked to."""

    def _read_both(self) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
        """The training and the test split.

        Raises:
            ConfigError: The files cannot be read.
        """
        try:
            return self._read(train=True), self._read(train=False)
        except ConfigError:
            raise
        except Exception as error:  # loaders raise RuntimeError, OSError, URLError, UnpicklingError, ...
            fetched = f" (the download failed: {one_line(error)})" if self.download else ""
            raise ConfigError(
                f"scenario.dataset: {type(self).__name__} cannot be read{fetched}; put {self.files} into "
                f"{Path(self.data_dir).resolve()}, or set scenario.dataset.data_dir"
                + ("" if self.download else " or scenario.dataset.download true")
            ) from error


def one_line(error: Exception) -> str:
    """An error's message on one line, or its class where it has none."""
    return " ".join(str(error).split()) or type(error).__name__
