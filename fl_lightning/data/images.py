"""Datasets of images: `uint8` in memory, normalised and augmented a batch at a time."""

from __future__ import annotations

import pickle
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torchvision
from torch import Tensor
from torchvision.datasets.utils import download_and_extract_archive
from torchvision.io import ImageReadMode, decode_image

from fl_lightning.core.errors import ConfigError
from fl_lightning.data.datasets import Dataset, FileDataset, LoadedData
from fl_lightning.data.reading import (
    BadFile,
    files_in,
    read_idx,
    read_npz,
    read_published,
    read_text,
    told_of,
    whole_numbers,
)
from fl_lightning.data.transforms import CropFlip, Normalize

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
    """Files that torchvision knows where to get; they are read here, so that what is wrong with one can be named."""

    source: Any

    def _fetch(self) -> None:
        for train in (True, False):
            type(self).source(root=self.data_dir, download=True, **self._split(train))

    def _split(self, train: bool) -> dict[str, Any]:
        return {"train": train}


class _IdxDataset(_TorchvisionDataset):
    """Images and labels in MNIST's format."""

    def _paths(self) -> list[str]:
        return [path for train in (True, False) for path in self._pair(train)]

    def _pair(self, train: bool) -> tuple[str, str]:
        folder = f"{self.source.__name__}/raw/{self._prefix(train)}"
        return f"{folder}-images-idx3-ubyte", f"{folder}-labels-idx1-ubyte"

    def _prefix(self, train: bool) -> str:
        return "train" if train else "t10k"

    def _read(self, train: bool) -> tuple[Tensor, Tensor]:
        images, labels = map(self._path, self._pair(train))
        return torch.from_numpy(read_idx(images, 3)).unsqueeze(1), torch.from_numpy(read_idx(labels, 1)).long()


class _CifarDataset(_TorchvisionDataset):
    """Pickled batches, of which nothing is unpickled before its checksum is the published one."""

    labels: str

    def _paths(self) -> list[str]:
        source = self.source
        names = [name for name, _ in (*source.train_list, *source.test_list)] + [source.meta["filename"]]
        return [f"{source.base_folder}/{name}" for name in names]

    def _read(self, train: bool) -> tuple[Tensor, Tensor]:
        if train:
            self._published(self.source.meta["filename"], self.source.meta["md5"])
        files = self.source.train_list if train else self.source.test_list
        batches = [pickle.loads(self._published(name, md5), encoding="latin1") for name, md5 in files]
        planes = np.concatenate([batch["data"] for batch in batches]).reshape(-1, 3, 32, 32)
        return torch.from_numpy(planes), torch.tensor([label for batch in batches for label in batch[self.labels]])

    def _published(self, name: str, md5: str) -> bytes:
        return read_published(self._path(f"{self.source.base_folder}/{name}"), md5, f"{type(self).__name__} file")


class MNIST(_IdxDataset):
    """MNIST: 60,000 + 10,000 grey 28x28 handwritten digits, 10 classes."""

    source = torchvision.datasets.MNIST
    files = "MNIST/raw/{train,t10k}-{images-idx3,labels-idx1}-ubyte"
    mean, std = (0.1307,), (0.3081,)


class FashionMNIST(_IdxDataset):
    """Fashion-MNIST: 60,000 + 10,000 grey 28x28 pictures of clothes, 10 classes."""

    source = torchvision.datasets.FashionMNIST
    files = "FashionMNIST/raw/{train,t10k}-{images-idx3,labels-idx1}-ubyte"
    mean, std = (0.2860,), (0.3530,)


class CIFAR10(_CifarDataset):
    """CIFAR-10: 50,000 + 10,000 colour 32x32 pictures, 10 classes."""

    source = torchvision.datasets.CIFAR10
    files = "cifar-10-batches-py/{data_batch_1..5,test_batch,batches.meta}"
    labels = "labels"
    mean, std = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


class CIFAR100(_CifarDataset):
    """CIFAR-100: 50,000 + 10,000 colour 32x32 pictures, 100 classes (the fine labels)."""

    source = torchvision.datasets.CIFAR100
    files = "cifar-100-python/{train,test,meta}"
    labels = "fine_labels"
    num_classes = 100
    mean, std = (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)


class EMNIST(_IdxDataset):
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

    def _prefix(self, train: bool) -> str:
        return f"emnist-{self.split}-{'train' if train else 'test'}"

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

    def _paths(self) -> list[str]:
        return [self.source.split_list[split][1] for split in ("train", "test")]

    def _split(self, train: bool) -> dict[str, Any]:
        return {"split": "train" if train else "test"}

    def _read(self, train: bool) -> tuple[Tensor, Tensor]:
        from scipy.io import loadmat

        _, name, md5 = self.source.split_list["train" if train else "test"]
        arrays = loadmat(BytesIO(read_published(self._path(name), md5, "SVHN file")))
        labels = torch.from_numpy(arrays["y"]).long().flatten() % 10  # the digit 0 is class 10
        return torch.from_numpy(np.ascontiguousarray(arrays["X"].transpose(3, 2, 0, 1))), labels


class PathMNIST(ImageDataset):
    """PathMNIST (MedMNIST): 89,996 + 7,180 colour 28x28 pictures of colon tissue, 9 classes.

    Read from MedMNIST's own `pathmnist.npz`; its validation images stay unused. Only `download` needs the `medmnist`
    package.
    """

    files = "pathmnist.npz"
    num_classes = 9
    mean, std = (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)

    def _paths(self) -> list[str]:
        return [self.files]

    def _read(self, train: bool) -> tuple[Tensor, Tensor]:
        path, split = self._path(self.files), "train" if train else "test"
        images, labels = read_npz(path, (f"{split}_images", f"{split}_labels")).values()
        with told_of(path, "MedMNIST file"):
            column = whole_numbers(labels, f"{split}_labels")
            return channels_first(torch.from_numpy(images)), column.squeeze(1) if column.ndim == 2 else column

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

    def _paths(self) -> list[str]:
        places = ("wnids.txt", "train/", "val/val_annotations.txt", "val/images/")
        return [f"tiny-imagenet-200/{place}" for place in places]

    def _fetch(self) -> None:
        download_and_extract_archive(self.url, self.data_dir, md5=self.md5)

    def _read(self, train: bool) -> tuple[Tensor, Tensor]:
        root = self._path("tiny-imagenet-200")
        classes = {name: label for label, name in enumerate(read_text(root / "wnids.txt").split())}
        labels = self._train_files(root, classes) if train else self._val_files(root, classes)
        with ThreadPoolExecutor() as pool:  # decoding leaves Python's lock
            images = list(pool.map(decode, labels))
        return torch.stack(images), torch.tensor(list(labels.values()))

    @staticmethod
    def _train_files(root: Path, classes: dict[str, int]) -> dict[Path, int]:
        with told_of(root / "train", "folder"):
            folders = {path.name for path in (root / "train").iterdir() if path.is_dir()}
        if odd := folders ^ classes.keys():
            raise BadFile(root / "wnids.txt", f"does not fit train, in {min(odd)}")
        places = ((root / "train" / name / "images", label) for name, label in classes.items())
        return {path: label for place, label in places for path in files_in(place)}

    @staticmethod
    def _val_files(root: Path, classes: dict[str, int]) -> dict[Path, int]:
        annotations, found = root / "val" / "val_annotations.txt", set(files_in(root / "val" / "images"))
        with told_of(annotations, "table of names and classes"):
            rows = (line.split("\t") for line in read_text(annotations).splitlines())
            labels = {root / "val" / "images" / name: classes[label] for name, label, *_ in rows}
        if odd := found ^ labels.keys():
            raise BadFile(annotations, f"does not fit images, in {min(odd).name}")
        return labels


def decode(path: Path) -> Tensor:
    """A picture of 64x64 in colour, `(3, 64, 64)`.

    Raises:
        BadFile: It is none.
    """
    with told_of(path, "picture"):
        image = decode_image(str(path), mode=ImageReadMode.RGB)
    if image.shape != (3, 64, 64):
        raise BadFile(path, f"is a picture of {image.shape[2]}x{image.shape[1]}, it needs to be 64x64")
    return image


def channels_first(images: Tensor) -> Tensor:
    """`(n, height, width)` or `(n, height, width, channels)` to `(n, channels, height, width)`."""
    return images.unsqueeze(1) if images.ndim == 3 else images.permute(0, 3, 1, 2).contiguous()
