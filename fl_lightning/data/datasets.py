"""Datasets as in-memory tensors: whole splits, batches are cut from them by index."""

from __future__ import annotations

import zipfile
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torchvision
from torch import Tensor

from fl_lightning.data.transforms import BatchTransform, CropFlip, Normalize
from fl_lightning.errors import ConfigError

Augment = Literal["none", "per_sample", "per_batch"]


@dataclass
class LoadedData:
    """A dataset in memory.

    Args:
        x_train: Training inputs `(n, ...)`; images are `(n, channels, height, width)`, `uint8` or `float32`.
        y_train: Training labels `(n,)`, `int64` in `[0, num_classes)`.
        x_test: Test inputs.
        y_test: Test labels.
        num_classes: Number of classes, `C`.
        prepare: Turns a batch as stored into what the network takes, on the batch's device.
        augment: Random change of a prepared training batch, on its device, or None.
    """

    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor
    num_classes: int
    prepare: BatchTransform
    augment: BatchTransform | None = None

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


class Digits(Dataset):
    """scikit-learn's bundled 8x8 handwritten digits: 1,797 grey images, 10 classes, no download.

    A fixed fifth of the images (every fifth one) is the test set; pixels are scaled from 0-16 to 0-1.
    """

    def load(self) -> LoadedData:
        """Read the images that scikit-learn ships."""
        from sklearn.datasets import load_digits

        digits = load_digits()
        x = torch.from_numpy(digits.images).float().div(16).unsqueeze(1)
        y = torch.from_numpy(digits.target).long()
        test = torch.arange(len(y)) % 5 == 0
        return LoadedData(x[~test], y[~test], x[test], y[test], 10, Normalize())


class _TorchvisionDataset(Dataset):
    """A dataset that torchvision reads, from files in torchvision's layout.

    Args:
        data_dir: Folder that holds the dataset's own folder.
        download: Fetch the files when they are missing.
        augment: Random crop (4 pixels of padding) and horizontal flip of training batches: `none`, drawn
            `per_sample`, or one draw `per_batch`.
    """

    source: Callable[..., Any]
    files: str
    num_classes = 10
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __init__(self, data_dir: str = "data", download: bool = False, augment: Augment = "none") -> None:
        self.data_dir, self.download, self.augment = data_dir, download, augment

    def load(self) -> LoadedData:
        """Read both splits, downloading them first if asked to."""
        (x_train, y_train), (x_test, y_test) = self._read(train=True), self._read(train=False)
        augment = None if self.augment == "none" else CropFlip(per_sample=self.augment == "per_sample")
        prepare = Normalize(self.mean, self.std)
        return LoadedData(x_train, y_train, x_test, y_test, self.num_classes, prepare, augment)

    def _read(self, train: bool) -> tuple[Tensor, Tensor]:
        name = type(self).__name__
        try:
            split = type(self).source(root=self.data_dir, train=train, download=self.download)
        except Exception as error:  # torchvision raises RuntimeError, OSError, URLError, UnpicklingError, ...
            fetched = f" (the download failed: {_one_line(error)})" if self.download else ""
            raise ConfigError(
                f"scenario.dataset: {name} cannot be read{fetched}; put {self.files} into "
                f"{Path(self.data_dir).resolve()}, or set scenario.dataset.data_dir"
                + ("" if self.download else " or scenario.dataset.download true")
            ) from error
        x = torch.as_tensor(split.data)
        x = x.unsqueeze(1) if x.ndim == 3 else x.permute(0, 3, 1, 2).contiguous()
        return x, torch.as_tensor(split.targets).long()


class MNIST(_TorchvisionDataset):
    """MNIST: 60,000 + 10,000 grey 28x28 handwritten digits, 10 classes."""

    source = torchvision.datasets.MNIST
    files = "MNIST/raw/{train,t10k}-{images-idx3,labels-idx1}-ubyte"
    mean, std = (0.1307,), (0.3081,)


class FashionMNIST(_TorchvisionDataset):
    """Fashion-MNIST: 60,000 + 10,000 grey 28x28 pictures of clothes, 10 classes."""

    source = torchvision.datasets.FashionMNIST
    files = "FashionMNIST/raw/{train,t10k}-{images-idx3,labels-idx1}-ubyte"
    mean, std = (0.2860,), (0.3530,)


class CIFAR10(_TorchvisionDataset):
    """CIFAR-10: 50,000 + 10,000 colour 32x32 pictures, 10 classes."""

    source = torchvision.datasets.CIFAR10
    files = "cifar-10-batches-py/{data_batch_1..5,test_batch,batches.meta}"
    mean, std = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


class CIFAR100(_TorchvisionDataset):
    """CIFAR-100: 50,000 + 10,000 colour 32x32 pictures, 100 classes (the fine labels)."""

    source = torchvision.datasets.CIFAR100
    files = "cifar-100-python/{train,test,meta}"
    num_classes = 100
    mean, std = (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)


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
        largest = max(int(y.max()) for y in labels.values())
        num_classes = self.num_classes or largest + 1
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
            with np.load(self.path, allow_pickle=False) as archive:
                missing = [name for name in names if name not in archive]
                if missing:
                    raise self._error(f"holds no {', '.join(missing)}; it needs {', '.join(names)}")
                return {name: archive[name] for name in names}
        except FileNotFoundError:
            raise self._error("no such file") from None
        except (OSError, EOFError, ValueError, AttributeError, TypeError, zipfile.BadZipFile) as error:
            if isinstance(error, ConfigError):
                raise
            raise self._error(f"is no readable .npz file ({_one_line(error)}); write it with numpy.savez") from error

    def _labels(self, name: str, values: np.ndarray) -> Tensor:
        if values.ndim != 1 or not np.issubdtype(values.dtype, np.integer):
            raise self._error(f"{name} needs one whole number a sample, got {values.dtype} of shape {values.shape}")
        if values.size and values.min() < 0:
            raise self._error(f"{name} holds label {values.min()}; labels count from 0")
        return torch.from_numpy(values.astype(np.int64))

    def _inputs(self, name: str, values: np.ndarray) -> Tensor:
        if values.dtype != np.uint8 and not np.issubdtype(values.dtype, np.floating):
            raise self._error(f"{name} is {values.dtype}; it needs uint8 or floating-point numbers")
        if not np.isfinite(values).all():
            raise self._error(f"{name} holds NaN or Inf")
        x = torch.from_numpy(values if values.dtype == np.uint8 else values.astype(np.float32))
        if x.ndim == 3:
            return x.unsqueeze(1)
        if x.ndim == 4 and x.shape[3] in (1, 3) and x.shape[1] not in (1, 3):
            return x.permute(0, 3, 1, 2).contiguous()
        return x


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
