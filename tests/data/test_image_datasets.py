import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from layouts import same, write_cifar, write_emnist, write_mnist, write_pathmnist, write_svhn, write_tiny_imagenet

from fl_lightning.core.errors import ConfigError
from fl_lightning.data import CIFAR100, EMNIST, MNIST, SVHN, Dataset, PathMNIST, TinyImageNet, images


def refusal(dataset: Dataset) -> str:
    with pytest.raises(ConfigError) as caught:
        dataset.load()
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(("split", "classes"), [("bymerge", 47), ("balanced", 47), ("letters", 26)])
def test_emnist_comes_from_idx_files_with_labels_from_zero(split: str, classes: int, tmp_path: Path) -> None:
    train, test = write_emnist(tmp_path, split)
    data = EMNIST(split, str(tmp_path)).load()
    assert same(data.x_train, train.x[:, None])
    assert same(data.x_test, test.x[:, None])
    assert data.y_train.tolist() == train.y
    assert data.y_test.tolist() == test.y
    assert data.num_classes == classes == max(train.y) + 1
    assert data.y_train.dtype == torch.int64


def test_svhn_comes_from_matlab_files_with_zero_for_the_digit_zero(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train, test = write_svhn(tmp_path, monkeypatch)
    data = SVHN(str(tmp_path)).load()
    assert same(data.x_train, train.x)
    assert same(data.x_test, test.x)
    assert data.x_train.is_contiguous()
    assert data.y_train.tolist() == train.y
    assert data.y_test.tolist() == test.y
    assert data.y_train.dtype == torch.int64


def test_svhn_files_of_another_checksum_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_svhn(tmp_path, monkeypatch)
    path = tmp_path / "test_32x32.mat"
    path.write_bytes(path.read_bytes() + b"\0")
    assert f"SVHN cannot be read: {path}: is damaged, or another file: its MD5" in refusal(SVHN(str(tmp_path)))


def test_pathmnist_comes_from_medmnists_file_without_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "medmnist", None)
    train, test = write_pathmnist(tmp_path)
    data = PathMNIST(str(tmp_path), download=True).load()
    assert same(data.x_train, train.x.transpose(0, 3, 1, 2))
    assert same(data.x_test, test.x.transpose(0, 3, 1, 2))
    assert data.y_train.tolist() == train.y
    assert data.y_test.tolist() == test.y
    assert data.num_classes == 9


def test_fetching_pathmnist_without_the_package_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "medmnist", None)
    assert "pip install fl-lightning[medmnist]" in refusal(PathMNIST(str(tmp_path), download=True))


def test_pathmnist_is_fetched_by_the_package_where_the_file_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Package:
        @staticmethod
        def PathMNIST(split: str, root: str, download: bool) -> None:
            assert download
            write_pathmnist(Path(root))

    monkeypatch.setitem(sys.modules, "medmnist", Package)
    assert len(PathMNIST(str(tmp_path / "new"), download=True).load().y_train) == 54


def test_tiny_imagenet_comes_from_folders_and_an_annotation_file(tmp_path: Path) -> None:
    train, test = write_tiny_imagenet(tmp_path, classes=5, n=(3, 2))
    data = TinyImageNet(str(tmp_path)).load()
    assert data.num_classes == 200
    for x, y, written in ((data.x_train, data.y_train, train), (data.x_test, data.y_test, test)):
        assert x.dtype == torch.uint8
        assert x.shape == (len(written.y), 3, 64, 64)
        assert y.tolist() == written.y
        colours = x.float().mean(dim=(2, 3)).numpy()
        assert np.abs(colours - np.array(written.x)).max() <= 3  # JPEG rounds in another colour space


def test_tiny_imagenet_unpacks_its_archive_only_where_the_folder_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def fetch(url: str, root: str, md5: str) -> None:
        calls.append((url, md5))
        write_tiny_imagenet(Path(root), classes=2)

    monkeypatch.setattr(images, "download_and_extract_archive", fetch)
    for _ in range(2):
        TinyImageNet(str(tmp_path), download=True).load()
    assert calls == [(TinyImageNet.url, TinyImageNet.md5)]


def test_the_cifar_writer_lays_files_out_as_torchvision_reads_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train, test = write_cifar(tmp_path, 100, monkeypatch)
    data = CIFAR100(str(tmp_path)).load()
    assert same(data.x_train, train.x)
    assert data.y_test.tolist() == test.y


@pytest.mark.parametrize("dataset", [EMNIST, SVHN, PathMNIST, TinyImageNet])
def test_missing_files_are_named_on_one_line(dataset: type, tmp_path: Path) -> None:
    made = dataset(data_dir=str(tmp_path))
    message = refusal(made)
    assert message == (
        f"scenario.dataset: {dataset.__name__}: files not found. Put {made.files} into {tmp_path}, "
        "or set scenario.dataset.data_dir or scenario.dataset.download true"
    )


@pytest.mark.parametrize("dataset", [SVHN, PathMNIST, TinyImageNet])
def test_a_training_batch_is_changed_at_random_only_where_asked_for(
    dataset: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_svhn(tmp_path, monkeypatch)
    write_pathmnist(tmp_path)
    write_tiny_imagenet(tmp_path, classes=2)
    assert dataset(str(tmp_path)).load().augment is None
    data = dataset(str(tmp_path), augment="per_sample").load()
    batch = data.prepare(data.x_train)
    assert data.augment is not None
    assert data.augment(batch).shape == batch.shape


def test_each_channel_is_normalised_by_its_own_mean_and_deviation(tmp_path: Path) -> None:
    write_pathmnist(tmp_path)
    data = PathMNIST(str(tmp_path)).load()
    torch.testing.assert_close(data.prepare(data.x_test), data.x_test.float() / 127.5 - 1)


@pytest.mark.skipif("FL_LIGHTNING_DATA" not in os.environ, reason="FL_LIGHTNING_DATA names no folder with the data")
def test_the_real_mnist_has_its_published_class_sizes() -> None:
    data = MNIST(os.environ["FL_LIGHTNING_DATA"]).load()
    assert torch.bincount(data.y_train).tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]


def test_the_mnist_writer_lays_files_out_as_torchvision_reads_them(tmp_path: Path) -> None:
    train, _ = write_mnist(tmp_path)
    assert same(MNIST(str(tmp_path)).load().x_train, train.x[:, None])
