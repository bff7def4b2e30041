"""Datasets of images: `uint8` in memory, normalised and augmented a batch at a time."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torchvision
from torch import Tensor
from torchvision.datasets.utils import download_and_extract_archive
from torchvision.io import ImageReadMode, decode_image

from fl_lightning.data.datasets import Dataset, FileDataset, LoadedData
from fl_lightning.data.transforms import CropFlip, Normalize
from fl_lightning.errors import ConfigError

Augment = Literal["none", "per_sample", "per_batch"]


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


class ImageDataset(FileDataset):
    """Images in files.

    Args:
        data_dir: Folder that holds the dataset's own file or folder.
        download: Fetch the files when they are missing.
        augment: Random crop (4 pixels of padding) and horizontal flip of training batches: `none`, drawn
            `per_sample`, or one draw `per_batch`.

    Attributes:
        num_classes: Number of classes, `C`.
        mean: Mean of the training pixels by channel, of pixels in [0, 1].
        std: Their standard deviation by channel.
    """

    num_classes: int = 10
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __init__(self, data_dir: str = "data", download: bool = False, augment: Augment = "none") -> None:
        super().__init__(data_dir, download)
        self.augment = augment

    def load(self) -> LoadedData:
        """Read both splits, downloading them first if asked to."""
        (x_train, y_train), (x_test, y_test) = self._read_both()
        augment = None if self.augment == "none" else CropFlip(per_sample=self.augment == "per_sample")
        prepare = Normalize(self.mean, self.std)
        return LoadedData(x_train, y_train, x_test, y_test, self.num_classes, prepare, augment)


class _TorchvisionDataset(ImageDataset):
    source: Callable[..., Any]

    def _read(self, train: bool) -> tuple[Tensor, Tensor]:
        split = type(self).source(root=self.data_dir, download=self.download, **self._split(train))
        return channels_first(torch.as_tensor(split.data)), torch.as_tensor(split.targets).long()

    def _split(self, train: bool) -> dict[str, Any]:
        return {"train": train}


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


class EMNIST(_TorchvisionDataset):
    """EMNIST: grey 28x28 handwritten digits and letters; `bymerge` and `balanced` have 47 classes, `letters` 26.

    The images lie on their side, as in the files.

    Args:
        split: `bymerge` (697,932 + 116,323 images; FedSKC), `balanced` (112,800 + 18,800) or `letters`
            (124,800 + 20,800).
        data_dir: Folder that holds the dataset's own folder.
        download: Fetch the files when they are missing.
        augment: Random crop and flip of training batches: `none`, `per_sample` or `per_batch`.
    """

    source = torchvision.datasets.EMNIST
    mean, std = (0.1736,), (0.3317,)

    def __init__(
        self,
        split: Literal["bymerge", "balanced", "letters"] = "bymerge",
        data_dir: str = "data",
        download: bool = False,
        augment: Augment = "none",
    ) -> None:
        super().__init__(data_dir, download, augment)
        self.split = split
        self.num_classes = 26 if split == "letters" else 47
        self.files = f"EMNIST/raw/emnist-{split}-{{train,test}}-{{images-idx3,labels-idx1}}-ubyte"

    def _read(self, train: bool) -> tuple[Tensor, Tensor]:
        x, y = super()._read(train)
        return x, y - 1 if self.split == "letters" else y  # letters count from 1

    def _split(self, train: bool) -> dict[str, Any]:
        return {"split": self.split, "train": train}


class SVHN(_TorchvisionDataset):
    """SVHN: 73,257 + 26,032 colour 32x32 pictures of house numbers, 10 classes."""

    source = torchvision.datasets.SVHN
    files = "{train,test}_32x32.mat"
    mean, std = (0.4377, 0.4438, 0.4728), (0.1980, 0.2010, 0.1970)

    def _read(self, train: bool) -> tuple[Tensor, Tensor]:
        split = self.source(root=self.data_dir, download=self.download, split="train" if train else "test")
        return torch.from_numpy(np.ascontiguousarray(split.data)), torch.from_numpy(split.labels)


class PathMNIST(ImageDataset):
    """PathMNIST (MedMNIST): 89,996 + 7,180 colour 28x28 pictures of colon tissue, 9 classes.

    Read from MedMNIST's own `pathmnist.npz`; its validation images stay unused. Only `download` needs the `medmnist`
    package.
    """

    files = "pathmnist.npz"
    num_classes = 9
    mean, std = (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)

    def _read(self, train: bool) -> tuple[Tensor, Tensor]:
        path = Path(self.data_dir) / self.files
        if self.download and not path.is_file():
            self._fetch()
        split = "train" if train else "test"
        with np.load(path, allow_pickle=False) as archive:
            images, labels = archive[f"{split}_images"], archive[f"{split}_labels"]
        return channels_first(torch.from_numpy(images)), torch.from_numpy(labels).long().flatten()

    def _fetch(self) -> None:
        try:
            import medmnist
        except ImportError as error:
            raise ConfigError(
                "scenario.dataset.download: PathMNIST is fetched by the medmnist package; "
                "install it with: pip install fl-lightning[medmnist]"
            ) from error
        Path(self.data_dir).mkdir(parents=True, exist_ok=True)
        medmnist.PathMNIST(split="train", root=self.data_dir, download=True)


class TinyImageNet(ImageDataset):
    """Tiny-ImageNet: 100,000 + 10,000 colour 64x64 pictures, 200 classes; its validation set is the test set."""

    files = "tiny-imagenet-200/{wnids.txt,train,val}"
    num_classes = 200
    mean, std = (0.4802, 0.4481, 0.3975), (0.2770, 0.2691, 0.2821)
    url, md5 = "http://cs231n.stanford.edu/tiny-imagenet-200.zip", "90528d7ca1a48142e341f4ef8d21d0de"

    def _read(self, train: bool) -> tuple[Tensor, Tensor]:
        root = Path(self.data_dir) / "tiny-imagenet-200"
        if self.download and not root.is_dir():
            download_and_extract_archive(self.url, self.data_dir, md5=self.md5)
        classes = {name: label for label, name in enumerate((root / "wnids.txt").read_text().split())}
        labels = self._train_files(root, classes) if train else self._val_files(root, classes)
        with ThreadPoolExecutor() as pool:  # decoding leaves Python's lock
            images = list(pool.map(partial(decode_image, mode=ImageReadMode.RGB), map(str, labels)))
        return torch.stack(images), torch.tensor(list(labels.values()))

    @staticmethod
    def _train_files(root: Path, classes: dict[str, int]) -> dict[Path, int]:
        folders = ((root / "train" / name / "images", label) for name, label in classes.items())
        return {path: label for folder, label in folders for path in sorted(folder.iterdir())}

    @staticmethod
    def _val_files(root: Path, classes: dict[str, int]) -> dict[Path, int]:
        rows = (line.split("\t") for line in (root / "val" / "val_annotations.txt").read_text().splitlines())
        return {root / "val" / "images" / name: classes[label] for name, label, *_ in rows}


def channels_first(images: Tensor) -> Tensor:
    """`(n, height, width)` or `(n, height, width, channels)` to `(n, channels, height, width)`."""
    return images.unsqueeze(1) if images.ndim == 3 else images.permute(0, 3, 1, 2).contiguous()
