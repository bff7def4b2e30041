"""Public image datasets, held in memory as `uint8`. Batches are normalized and augmented when used."""

from __future__ import annotations

import pickle
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torchvision
from torch import Tensor, nn
from torchvision.datasets.utils import download_and_extract_archive
from torchvision.io import ImageReadMode, decode_image
from torchvision.transforms.functional import InterpolationMode, rotate

from fl_lightning.core.errors import ConfigError, require_extra
from fl_lightning.data.datasets import Dataset
from fl_lightning.data.files import (
    BadFile,
    files_in,
    naming_file,
    read_idx,
    read_npz,
    read_published,
    read_text,
    whole_numbers,
)
from fl_lightning.data.loaded_data import LoadedData
from fl_lightning.data.published_files import FileDataset
from fl_lightning.data.transforms import CropFlip, Normalize, PerImage

Augment = Literal["none", "per_sample", "per_batch"] | nn.Module
"""Random changes of training images: none, a crop and flip, or a transform of single images, such as `RandAugment`."""

MOST_ANGLES = 26
"""Maximum number of domains of `RotatedDigits`: the smallest class has 26 test images."""


def make_augment(augment: Augment) -> CropFlip | PerImage | None:
    """Return the transform that randomly changes training batches, or None if `augment` is `none`."""
    if isinstance(augment, nn.Module):
        return PerImage(augment)
    return None if augment == "none" else CropFlip(per_sample=augment == "per_sample")


class Digits(Dataset):
    """scikit-learn's 8x8 handwritten digits: 1,797 grey images, 10 classes, no download.

    Every fifth image is in the test set; pixels are scaled from 0-16 to 0-1.
    """

    def load(self) -> LoadedData:
        """Read the images from scikit-learn, and split them into a training and a test set."""
        rows = read_digits()
        x = torch.from_numpy(rows[:, :-1]).float().div(16).reshape(-1, 1, 8, 8)
        y = torch.from_numpy(rows[:, -1]).long()
        test = torch.arange(len(y)) % 5 == 0
        return LoadedData(x[~test], y[~test], x[test], y[test], 10, Normalize())


class RotatedDigits(Dataset):
    """scikit-learn's digits in several domains: each domain has other images, rotated by its angle. No download.

    Like RotatedMNIST, but with 8x8 images. The images of each class are assigned to the domains in turn, separately
    for training and test images, so that the domains have the same classes. The domain of an image, its angle, is its
    client id, for the partitions `Domains` and `ByClient`. Rotated pixels are rounded to the 17 levels of the digits.

    Args:
        angles: The angle of each domain, counter-clockwise in degrees.

    Raises:
        ConfigError: There are not between 1 and 26 different angles.
    """

    def __init__(self, angles: tuple[int, ...] = (0, 15, 30, 45, 60, 75)) -> None:
        if not 1 <= len(angles) <= MOST_ANGLES or len({angle % 360 for angle in angles}) < len(angles):
            what = f"{list(angles)} are not 1 to {MOST_ANGLES} different angles"
            raise ConfigError(f"scenario.dataset.angles: {what}. Give each domain its own")
        self.angles = tuple(angles)

    def load(self) -> LoadedData:
        """Read the digits, assign them to domains, and rotate them."""
        digits = Digits().load()
        sets, domains = [], []
        for x, y in ((digits.x_train, digits.y_train), (digits.x_test, digits.y_test)):
            assert isinstance(x, Tensor)
            domain = torch.empty(len(y), dtype=torch.int64)
            for rows in (torch.nonzero(y == label).flatten() for label in y.unique()):
                domain[rows] = torch.arange(len(rows)) % len(self.angles)
            rotated = x.clone()
            for number, angle in enumerate(self.angles):
                own = rotate(16 * x[domain == number], angle, InterpolationMode.BILINEAR)
                rotated[domain == number] = own.round() / 16
            sets += [rotated, y]
            domains.append(np.array(self.angles)[domain.numpy()])
        x_train, y_train, x_test, y_test = sets
        names = dict(zip(("client_train", "client_test"), domains, strict=True))
        return LoadedData(x_train, y_train, x_test, y_test, digits.num_classes, digits.prepare, **names)


def read_digits() -> np.ndarray:
    """Return scikit-learn's digits, `(1797, 65)`: in each row 64 pixels from 0 to 16, and the label.

    Reads the file without importing scikit-learn, which takes a second.
    """
    package = find_spec("sklearn")
    assert package
    assert package.origin
    return np.loadtxt(Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz", delimiter=",")


class ImageDataset(FileDataset):
    """Base class of public image datasets that are read from files.

    Args:
        data_dir: Folder that contains the dataset's file or folder.
        download: Download missing files.
        augment: Random crop (4 pixels of padding) and horizontal flip of training batches: `none`, drawn
            `per_sample`, or drawn once `per_batch`; or a transform of single images, such as
            `torchvision.transforms.v2.RandAugment`.

    Attributes:
        num_classes: Number of classes, `C`.
        mean: Mean of each channel of the training pixels, in [0, 1].
        std: Standard deviation of each channel.
    """

    num_classes: int = 10
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __init__(self, data_dir: str = "data", download: bool = False, augment: Augment = "none") -> None:
        super().__init__(data_dir, download)
        self.augment = augment

    def load(self) -> LoadedData:
        """Read the training and test images. Missing files are downloaded first if `download` is set."""
        return self._loaded(*self._read_both())

    def _loaded(self, train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor], **fields: Any) -> LoadedData:
        prepare, augment = Normalize(self.mean, self.std), make_augment(self.augment)
        names = self.class_names
        return LoadedData(*train, *test, self.num_classes, prepare, augment, class_names=names, **fields)


class _TorchvisionDataset(ImageDataset):
    """Base class of datasets that torchvision downloads. This module reads the files, so that errors can name them."""

    source: Any

    def _fetch(self) -> None:
        for train in (True, False):
            type(self).source(root=self.data_dir, download=True, **self._split(train))

    def _split(self, train: bool) -> dict[str, Any]:
        return {"train": train}


class _IdxDataset(_TorchvisionDataset):
    """Base class of image datasets in MNIST's file format (idx)."""

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
    """Base class of the CIFAR datasets. Files are unpickled only if they have the published checksum."""

    labels: str

    def _paths(self) -> list[str]:
        source = self.source
        names = [name for name, _ in (*source.train_list, *source.test_list)] + [source.meta["filename"]]
        return [f"{source.base_folder}/{name}" for name in names]

    def _read(self, train: bool) -> tuple[Tensor, Tensor]:
        if train:
            meta = self.source.meta
            self.class_names = self._unpickled(meta["filename"], meta["md5"])[meta["key"]]
        files = self.source.train_list if train else self.source.test_list
        batches = [self._unpickled(name, md5) for name, md5 in files]
        planes = np.concatenate([batch["data"] for batch in batches]).reshape(-1, 3, 32, 32)
        return torch.from_numpy(planes), torch.tensor([label for batch in batches for label in batch[self.labels]])

    def _unpickled(self, name: str, md5: str) -> dict[str, Any]:
        path = self._path(f"{self.source.base_folder}/{name}")
        return pickle.loads(read_published(path, md5, f"{type(self).__name__} file"), encoding="latin1")


class MNIST(_IdxDataset):
    """MNIST: 60,000 + 10,000 grey 28x28 handwritten digits, 10 classes."""

    source = torchvision.datasets.MNIST
    files = "MNIST/raw/{train,t10k}-{images-idx3,labels-idx1}-ubyte"
    mean, std = (0.1307,), (0.3081,)


class FashionMNIST(_IdxDataset):
    """Fashion-MNIST: 60,000 + 10,000 grey 28x28 images of clothes, 10 classes."""

    source = torchvision.datasets.FashionMNIST
    class_names = tuple(source.classes)
    files = "FashionMNIST/raw/{train,t10k}-{images-idx3,labels-idx1}-ubyte"
    mean, std = (0.2860,), (0.3530,)


class CIFAR10(_CifarDataset):
    """CIFAR-10: 50,000 + 10,000 colour 32x32 images, 10 classes."""

    source = torchvision.datasets.CIFAR10
    files = "cifar-10-batches-py/{data_batch_1..5,test_batch,batches.meta}"
    labels = "labels"
    mean, std = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


class CIFAR100(_CifarDataset):
    """CIFAR-100: 50,000 + 10,000 colour 32x32 images, 100 classes (the fine labels)."""

    source = torchvision.datasets.CIFAR100
    files = "cifar-100-python/{train,test,meta}"
    labels = "fine_labels"
    num_classes = 100
    mean, std = (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)


class EMNIST(_IdxDataset):
    """EMNIST: grey 28x28 handwritten digits and letters; `bymerge` and `balanced` have 47 classes, `letters` 26.

    The images are transposed, as in the files.

    Args:
        split: `bymerge` (697,932 + 116,323 images; FedSKC), `balanced` (112,800 + 18,800) or `letters`
            (124,800 + 20,800).
        data_dir: Folder that contains the dataset's folder.
        download: Download missing files.
        augment: Random crop and flip of training batches: `none`, `per_sample` or `per_batch`; or a transform of
            single images, such as `torchvision.transforms.v2.RandAugment`.
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
        self.class_names = [name for name in self.source.classes_split_dict[split] if name != "N/A"]
        self.num_classes = len(self.class_names)
        self.files = f"EMNIST/raw/emnist-{split}-{{train,test}}-{{images-idx3,labels-idx1}}-ubyte"

    def _prefix(self, train: bool) -> str:
        return f"emnist-{self.split}-{'train' if train else 'test'}"

    def _read(self, train: bool) -> tuple[Tensor, Tensor]:
        x, y = super()._read(train)
        return x, y - 1 if self.split == "letters" else y  # letters count from 1

    def _split(self, train: bool) -> dict[str, Any]:
        return {"split": self.split, "train": train}


class SVHN(_TorchvisionDataset):
    """SVHN: 73,257 + 26,032 colour 32x32 images of house numbers, 10 classes."""

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
    """PathMNIST (MedMNIST): 89,996 + 7,180 colour 28x28 images of colon tissue, 9 classes.

    Read from MedMNIST's file `pathmnist.npz`; its validation images are unused. Only `download` needs the package
    `medmnist`.
    """

    files = "pathmnist.npz"
    num_classes = 9
    class_names = (
        "adipose",
        "background",
        "debris",
        "lymphocytes",
        "mucus",
        "smooth muscle",
        "normal colon mucosa",
        "cancer-associated stroma",
        "colorectal adenocarcinoma epithelium",
    )
    mean, std = (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)

    def _paths(self) -> list[str]:
        return [self.files]

    def _read(self, train: bool) -> tuple[Tensor, Tensor]:
        path, split = self._path(self.files), "train" if train else "test"
        images, labels = read_npz(path, (f"{split}_images", f"{split}_labels")).values()
        with naming_file(path, "MedMNIST file"):
            column = whole_numbers(labels, f"{split}_labels")
            return channels_first(torch.from_numpy(images)), column.squeeze(1) if column.ndim == 2 else column

    def _fetch(self) -> None:
        with require_extra("medmnist", "scenario.dataset.download: PathMNIST is downloaded by the package medmnist"):
            import medmnist
        Path(self.data_dir).mkdir(parents=True, exist_ok=True)
        medmnist.PathMNIST(split="train", root=self.data_dir, download=True)


class TinyImageNet(ImageDataset):
    """Tiny-ImageNet: 100,000 + 10,000 colour 64x64 images, 200 classes. Its validation set is the test set."""

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
        self.class_names = list(classes) if len(classes) == self.num_classes else None
        labels = self._train_files(root, classes) if train else self._val_files(root, classes)
        with ThreadPoolExecutor() as pool:  # decoding releases Python's lock
            images = list(pool.map(decode, labels))
        return torch.stack(images), torch.tensor(list(labels.values()))

    @staticmethod
    def _train_files(root: Path, classes: dict[str, int]) -> dict[Path, int]:
        with naming_file(root / "train", "folder"):
            folders = {path.name for path in (root / "train").iterdir() if path.is_dir()}
        if odd := folders ^ classes.keys():
            raise BadFile(root / "wnids.txt", f"does not match the folders in train: {min(odd)}")
        places = ((root / "train" / name / "images", label) for name, label in classes.items())
        return {path: label for place, label in places for path in files_in(place)}

    @staticmethod
    def _val_files(root: Path, classes: dict[str, int]) -> dict[Path, int]:
        annotations, found = root / "val" / "val_annotations.txt", set(files_in(root / "val" / "images"))
        with naming_file(annotations, "table of images and classes"):
            rows = (line.split("\t") for line in read_text(annotations).splitlines())
            labels = {root / "val" / "images" / name: classes[label] for name, label, *_ in rows}
        if odd := found ^ labels.keys():
            raise BadFile(annotations, f"does not match the files in images: {min(odd).name}")
        return labels


def decode(path: Path) -> Tensor:
    """Read an image file of 64x64 pixels as a colour image tensor `(3, 64, 64)`, `uint8`."""
    with naming_file(path, "image"):
        image = decode_image(str(path), mode=ImageReadMode.RGB)
    if image.shape != (3, 64, 64):
        raise BadFile(path, f"is {image.shape[2]}x{image.shape[1]} pixels, not 64x64")
    return image


def channels_first(images: Tensor) -> Tensor:
    """Convert images `(n, height, width)` or `(n, height, width, channels)` to `(n, channels, height, width)`."""
    return images.unsqueeze(1) if images.ndim == 3 else images.permute(0, 3, 1, 2).contiguous()
