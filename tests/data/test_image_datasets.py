"""Image datasets, read from files as their authors distribute them."""

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from layouts import same, write_cifar, write_emnist, write_mnist, write_pathmnist, write_svhn, write_tiny_imagenet
from refusals import refusal

from fl_lightning.data import CIFAR10, CIFAR100, EMNIST, MNIST, SVHN, Dataset, FashionMNIST, PathMNIST, TinyImageNet
from fl_lightning.data import images as image_datasets
from fl_lightning.data.transforms import CropFlip

RGB_MEAN, RGB_STD = [0.5] * 3, [0.5] * 3
DATASETS: dict[str, tuple[Callable, Callable, int, Any, Any]] = {
    # How it is written and loaded, its number of classes, and the published mean and std.
    "MNIST": (lambda root, _: write_mnist(root), MNIST, 10, [0.1307], [0.3081]),
    "FashionMNIST": (lambda root, _: write_mnist(root, "FashionMNIST"), FashionMNIST, 10, [0.2860], [0.3530]),
    **{
        split: (lambda root, _, s=split: write_emnist(root, s), partial(EMNIST, split), classes, [0.1736], [0.3317])
        for split, classes in (("bymerge", 47), ("letters", 26))
    },
    "CIFAR10": (
        lambda root, patch: write_cifar(root, 10, patch),
        CIFAR10,
        10,
        [0.4914, 0.4822, 0.4465],
        [0.2470, 0.2435, 0.2616],
    ),
    "CIFAR100": (
        lambda root, patch: write_cifar(root, 100, patch),
        CIFAR100,
        100,
        [0.5071, 0.4865, 0.4409],
        [0.2673, 0.2564, 0.2762],
    ),
    "SVHN": (write_svhn, SVHN, 10, [0.4377, 0.4438, 0.4728], [0.1980, 0.2010, 0.1970]),
    "PathMNIST": (lambda root, _: write_pathmnist(root), PathMNIST, 9, RGB_MEAN, RGB_STD),
}


@pytest.mark.parametrize("name", DATASETS)
def test_images_are_read_as_written_and_normalized(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "medmnist", None)  # only a download needs it
    write, make, classes, mean, std = DATASETS[name]
    splits = write(tmp_path, monkeypatch)
    data = make(str(tmp_path)).checked()
    for x, y, split in zip((data.x_train, data.x_test), (data.y_train, data.y_test), splits, strict=True):
        channels_last = split.x.ndim == 4 and split.x.shape[3] == 3
        expected = split.x.transpose(0, 3, 1, 2) if channels_last else split.x.reshape(len(x), -1, *split.x.shape[-2:])
        assert same(x, expected)
        assert x.is_contiguous()
        assert y.dtype == torch.int64
        assert y.tolist() == split.y
    assert data.num_classes == classes
    assert data.augment is None
    expected = torchvision.transforms.functional.normalize(data.x_test.float() / 255, mean, std)
    torch.testing.assert_close(data.prepare(data.x_test), expected)


@pytest.mark.parametrize(("augment", "per_sample"), [("per_sample", True), ("per_batch", False)])
def test_augmentation_is_per_sample_or_per_batch(augment: Any, per_sample: bool, tmp_path: Path) -> None:
    write_mnist(tmp_path)
    made = MNIST(str(tmp_path), augment=augment).load().augment
    assert isinstance(made, CropFlip)
    assert (made.per_sample, made.padding) == (per_sample, 4)


def test_tiny_imagenet_is_read_from_folders_and_an_annotation_file(tmp_path: Path) -> None:
    train, test = write_tiny_imagenet(tmp_path, classes=5, n=(3, 2))
    data = TinyImageNet(str(tmp_path)).load()
    assert data.num_classes == 200
    for x, y, written in ((data.x_train, data.y_train, train), (data.x_test, data.y_test, test)):
        assert x.dtype == torch.uint8
        assert x.shape == (len(written.y), 3, 64, 64)
        assert y.tolist() == written.y
        colours = x.float().mean(dim=(2, 3)).numpy()
        assert np.abs(colours - np.array(written.x)).max() <= 3  # JPEG rounds in another colour space


# --- Downloads ---


def test_a_download_of_pathmnist_without_the_package_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "medmnist", None)
    assert "pip install 'fl-lightning[medmnist]'" in refusal(PathMNIST(str(tmp_path), download=True))


def test_files_are_downloaded_only_if_they_are_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    class Package:
        @staticmethod
        def PathMNIST(split: str, root: str, download: bool) -> None:
            calls.append(download)
            write_pathmnist(Path(root))

    def fetch(url: str, root: str, md5: str) -> None:
        calls.append((url, md5))
        write_tiny_imagenet(Path(root), classes=2)

    monkeypatch.setitem(sys.modules, "medmnist", Package)
    monkeypatch.setattr(image_datasets, "download_and_extract_archive", fetch)
    for _ in range(2):
        TinyImageNet(str(tmp_path / "new"), download=True).load()
        assert len(PathMNIST(str(tmp_path / "new"), download=True).load().y_train) == 54
    assert calls == [(TinyImageNet.url, TinyImageNet.md5), True]


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*_: Any, **__: Any) -> None:
        raise OSError("no route\n to host")

    monkeypatch.setattr(torchvision.datasets.mnist, "download_and_extract_archive", download)
    monkeypatch.setitem(sys.modules, "medmnist", SimpleNamespace(PathMNIST=download))


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("make", [MNIST, PathMNIST])
@pytest.mark.parametrize("place", ["new/data", "there"])
def test_a_failed_download_says_why_and_leaves_no_empty_folders(
    place: str, make: Callable[..., Dataset], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("there").mkdir()
    for root in (place, str(tmp_path / place)):
        message = refusal(make(root, download=True))
        assert "(the download failed: no route to host)" in message
        assert "download true" not in message
        assert list(Path().rglob("*")) == [Path("there")]


@pytest.mark.usefixtures("offline")
def test_a_failed_download_keeps_folders_that_existed_or_have_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "was" / "MNIST").mkdir(parents=True)
    refusal(MNIST(str(tmp_path / "was"), download=True))
    assert list((tmp_path / "was").rglob("*")) == [tmp_path / "was" / "MNIST"]

    def half(_: str, download_root: str, **__: Any) -> None:
        Path(download_root, "half.gz").write_bytes(b"x")
        raise OSError("no route to host")

    monkeypatch.setattr(torchvision.datasets.mnist, "download_and_extract_archive", half)
    refusal(MNIST(str(tmp_path / "new"), download=True))
    assert (tmp_path / "new" / "MNIST" / "raw" / "half.gz").exists()


@pytest.mark.skipif("FL_LIGHTNING_DATA" not in os.environ, reason="FL_LIGHTNING_DATA names no folder with the data")
@pytest.mark.parametrize(
    ("dataset", "counts"),
    [(MNIST, [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]), (FashionMNIST, [6000] * 10)],
)
def test_the_real_files_have_the_published_class_sizes(dataset: type, counts: list[int]) -> None:
    data = dataset(os.environ["FL_LIGHTNING_DATA"]).load()
    assert (data.x_train.shape, data.x_test.shape) == ((60_000, 1, 28, 28), (10_000, 1, 28, 28))
    assert data.y_train.bincount().tolist() == counts
    prepared = data.prepare(data.x_train)
    assert prepared.mean().abs() < 2e-4  # mean and std are given to four digits
    assert (prepared.std() - 1).abs() < 2e-4
