"""Wrong data are refused with one line. It names the file, the key or the class, and what is wrong."""

import os
import pickle
import struct
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import run
from layouts import (
    images,
    write_ag_news,
    write_arrays,
    write_cifar,
    write_emnist,
    write_femnist,
    write_image_folder,
    write_imdb_csv,
    write_imdb_folder,
    write_mnist,
    write_pathmnist,
    write_svhn,
    write_tiny_imagenet,
)
from PIL import Image
from refusals import NO_FILES, ONE_ROUND, check_refused_command, empty, halve, refusal, replace_by, time_limit  # noqa: F401

from fl_lightning.data import (
    CIFAR10,
    CIFAR100,
    EMNIST,
    FC100,
    FEMNIST,
    IID,
    IMDB,
    MNIST,
    SVHN,
    AGNews,
    Arrays,
    ByClient,
    Dataset,
    Digits,
    Dirichlet,
    DisjointClasses,
    FashionMNIST,
    FewShot,
    LoadedData,
    Partition,
    PathMNIST,
    Pathological,
    QuantitySkew,
    Scenario,
    Shards,
    TinyImageNet,
)
from fl_lightning.data.transforms import Normalize

# --- Files that cannot be read ---


@dataclass(frozen=True)
class Layout:
    """A dataset on disk.

    Args:
        write: Writes it into a folder.
        make: Makes the dataset of that folder.
        files: Some of its files, one of each kind at least.
        open_ended: Whether half a file is a valid file.
    """

    write: Callable[[Path, pytest.MonkeyPatch], Any]
    make: Callable[[str], Dataset]
    files: tuple[str, ...]
    open_ended: bool = False


def leaf_files(name: str, *numbers: int) -> tuple[str, ...]:
    files = ((number, split) for number in numbers for split in ("train", "test"))
    return tuple(f"{name}/data/{split}/all_data_{number}_niid_0_keep_0_{split}_8.json" for number, split in files)


IDX = [f"{split}-{kind}-ubyte" for split in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")]
EMNIST_FILES = tuple(f"EMNIST/raw/emnist-letters-{name.replace('t10k', 'test')}" for name in IDX)


def root_only(write: Callable[..., Any], *options: Any) -> Callable[[Path, pytest.MonkeyPatch], Any]:
    return lambda root, _: write(root, *options)


CIFAR_10 = ("data_batch_1", "data_batch_5", "test_batch", "batches.meta")
TINY = ("wnids.txt", "val/val_annotations.txt", "val/images/val_1.JPEG")
LAYOUTS = {
    "MNIST": Layout(root_only(write_mnist), MNIST, tuple(f"MNIST/raw/{name}" for name in IDX)),
    "EMNIST": Layout(root_only(write_emnist, "letters"), partial(EMNIST, "letters"), EMNIST_FILES),
    "CIFAR10": Layout(
        lambda root, patch: write_cifar(root, 10, patch), CIFAR10, tuple(f"cifar-10-batches-py/{n}" for n in CIFAR_10)
    ),
    "CIFAR100": Layout(
        lambda root, patch: write_cifar(root, 100, patch),
        CIFAR100,
        tuple(f"cifar-100-python/{name}" for name in ("train", "test", "meta")),
    ),
    "SVHN": Layout(write_svhn, SVHN, ("train_32x32.mat", "test_32x32.mat")),
    "PathMNIST": Layout(root_only(write_pathmnist), PathMNIST, ("pathmnist.npz",)),
    "TinyImageNet": Layout(
        root_only(write_tiny_imagenet, 2), TinyImageNet, tuple(f"tiny-imagenet-200/{name}" for name in TINY)
    ),
    "AGNews": Layout(root_only(write_ag_news), AGNews, ("ag_news_csv/train.csv", "ag_news_csv/test.csv")),
    "IMDB": Layout(
        root_only(write_imdb_folder), IMDB, ("aclImdb/train/pos/3_10.txt", "aclImdb/test/neg/0_1.txt"), True
    ),
    "IMDB csv": Layout(root_only(write_imdb_csv), partial(IMDB, layout="csv"), ("IMDB Dataset.csv",)),
    "FEMNIST": Layout(root_only(write_femnist), FEMNIST, leaf_files("femnist", 0, 2)),
    "Arrays": Layout(lambda root, _: write_arrays(root / "a.npz"), lambda root: Arrays(f"{root}/a.npz"), ("a.npz",)),
}
FILES = [(name, file) for name, layout in LAYOUTS.items() for file in layout.files]
FAST_FILES = ("MNIST/raw/t10k-labels-idx1-ubyte", "cifar-100-python/test", "aclImdb/test/neg/0_1.txt", "a.npz")


def garbage(path: Path) -> None:
    path.write_bytes(np.random.default_rng(5).bytes(path.stat().st_size + 1))


DAMAGE = {
    "empty": (empty, ""),
    "halved": (halve, ""),
    "garbage": (garbage, ""),
    **NO_FILES,
    "links in a circle": (replace_by(lambda path: path.symlink_to(path)), "Too many levels of symbolic links"),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize(
    ("name", "file"),
    [pytest.param(*one, marks=() if one[1] in FAST_FILES else pytest.mark.thorough) for one in FILES],
)
def test_the_message_names_a_damaged_file_and_the_damage(
    name: str, file: str, damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout, (apply, why) = LAYOUTS[name], DAMAGE[damage]
    layout.write(tmp_path, monkeypatch)
    path = tmp_path / file
    apply(path)
    if layout.open_ended and damage == "halved":
        layout.make(str(tmp_path)).checked()
        return
    message = refusal(layout.make(str(tmp_path)))
    assert f": {path}: " in message
    assert why in message
    assert f"Put {file}" not in message
    assert message.startswith(f"scenario.dataset.path: {path}: " if name == "Arrays" else "scenario.dataset: ")


@pytest.mark.parametrize(
    ("name", "gone"),
    [
        ("CIFAR10", ["cifar-10-batches-py/data_batch_2", "cifar-10-batches-py/batches.meta"]),
        ("TinyImageNet", ["tiny-imagenet-200/wnids.txt"]),
    ],
)
def test_only_the_missing_files_are_named(
    name: str, gone: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    LAYOUTS[name].write(tmp_path, monkeypatch)
    for file in gone:
        (tmp_path / file).unlink()
    expected = f"{name}: files not found. Put {', '.join(gone)} into {tmp_path}, or set scenario.dataset.data_dir"
    assert expected in refusal(LAYOUTS[name].make(str(tmp_path)))


@pytest.mark.parametrize(
    "dataset",
    [MNIST, FashionMNIST, EMNIST, CIFAR10, CIFAR100, SVHN, PathMNIST, TinyImageNet, AGNews, IMDB, FEMNIST],
)
def test_the_message_about_missing_files_names_folder_and_fix(dataset: type, tmp_path: Path) -> None:
    missing = dataset(data_dir=str(tmp_path))
    fix = "or set scenario.dataset.data_dir" + " or scenario.dataset.download true" * (dataset is not FEMNIST)
    expected = f"files not found. Put {missing.files} into {tmp_path}, {fix}"
    assert refusal(missing) == f"scenario.dataset: {dataset.__name__}: {expected}"


def test_a_download_is_only_suggested_if_it_is_possible(tmp_path: Path) -> None:
    """IMDB's csv file cannot be downloaded, and a second download of AG News is not suggested."""
    assert refusal(IMDB(str(tmp_path), layout="csv")).endswith("or set scenario.dataset.data_dir")
    write_imdb_csv(tmp_path)
    empty(tmp_path / "IMDB Dataset.csv")
    assert refusal(IMDB(str(tmp_path), layout="csv")).endswith("IMDB Dataset.csv: is empty. Replace the file")
    write_ag_news(tmp_path)
    empty(tmp_path / "ag_news_csv" / "train.csv")
    fix = "Replace the file, or delete it"
    assert refusal(AGNews(str(tmp_path))).endswith(f"{fix} and set scenario.dataset.download true")
    assert refusal(AGNews(str(tmp_path), download=True)).endswith(fix)


@pytest.mark.parametrize("name", ["TinyImageNet", "IMDB"])
def test_missing_and_empty_folders_are_named(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    LAYOUTS[name].write(tmp_path, monkeypatch)
    folder = tmp_path / {"TinyImageNet": "tiny-imagenet-200/val/images", "IMDB": "aclImdb/test/pos"}[name]
    for path in folder.iterdir():
        path.unlink()
    assert f"{folder}: contains no files" in refusal(LAYOUTS[name].make(str(tmp_path)))
    folder.rmdir()
    assert f"Put {folder.relative_to(tmp_path)}/ into" in refusal(LAYOUTS[name].make(str(tmp_path)))
    folder.write_text("no folder")
    assert f"{folder}: is a file, it needs to be a folder" in refusal(LAYOUTS[name].make(str(tmp_path)))


@pytest.mark.parametrize("make", [MNIST, Arrays])
@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("x" * 300, "File name too long"),
        ("a\0b", "null"),
        ("circle", "Too many levels of symbolic links"),
        ("a\nfile/below", "a file/below: Not a directory"),
    ],
)
def test_an_impossible_path_is_refused_by_its_key(
    make: Callable[[str], Dataset], path: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a\nfile").write_text("")
    Path("circle").symlink_to("circle")
    message = refusal(make(path))
    assert message.startswith(f"scenario.dataset.{'data_dir' if make is MNIST else 'path'}: ")
    assert why in message


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_the_message_names_a_file_without_permission(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    path = tmp_path / "MNIST" / "raw" / "t10k-labels-idx1-ubyte"
    path.chmod(0)
    assert f"{path}: cannot be read: Permission denied" in refusal(MNIST(str(tmp_path)))


# --- Files with wrong content ---


def test_the_header_of_an_idx_file_is_checked(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    path = tmp_path / "MNIST" / "raw" / "train-images-idx3-ubyte"
    content = path.read_bytes()
    for damaged, why in (
        (content[:-1], "its size is 47,055 bytes, but its header says 47,056"),
        (content + b"\0", "its size is 47,057 bytes, but its header says 47,056"),
        (struct.pack(">3sB3I", b"\0\0\x08", 3, 2**31, 2**31, 2**31), "but its header says"),
        (b"\0\0\x0d" + content[3:], "it does not hold unsigned bytes"),
        (content[:3] + b"\1" + content[4:], "its number of dimensions is 1, not 3"),
        (content[:9], "not a readable idx file"),
    ):
        path.write_bytes(damaged)
        assert why in refusal(MNIST(str(tmp_path)))


def test_files_of_another_dataset_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_emnist(tmp_path, "balanced")
    (tmp_path / "MNIST" / "raw").mkdir(parents=True)
    for ours, theirs in zip(IDX, EMNIST_FILES, strict=True):
        (tmp_path / theirs.replace("letters", "balanced")).rename(tmp_path / "MNIST" / "raw" / ours)
    assert "MNIST: y_train holds label 46, which is out of range for num_classes 10" in refusal(MNIST(str(tmp_path)))
    write_cifar(tmp_path, 100, monkeypatch)
    write_cifar(tmp_path / "ten", 10, monkeypatch)
    (tmp_path / "ten" / "cifar-10-batches-py" / "test_batch").replace(tmp_path / "cifar-100-python" / "test")
    message = refusal(CIFAR100(str(tmp_path)))
    assert "cifar-100-python/test: is damaged, or another file: its MD5" in message
    assert "(to read arrays of your own, use the dataset Arrays). Replace the file" in message


@pytest.mark.parametrize(
    ("name", "change", "expected"),
    [
        ("train_labels", lambda y: y + 0.5, "train_labels needs one whole number per sample, got float64 of shape (54"),
        ("train_labels", lambda y: y + 246, "y_train holds label 254, which is out of range for num_classes 9"),
        ("train_labels", lambda y: np.tile(y, 14), "y_train needs one whole number per sample, got int64 of shape"),
        ("train_images", lambda x: x / 255, "x_train is float64 of shape (54, 3, 28, 28); it needs uint8 or float32"),
        ("test_images", lambda x: x[0, 0, 0], "not a readable MedMNIST file"),
        ("test_images", lambda x: None, "has no test_images. It needs test_images, test_labels"),
    ],
)
def test_wrong_arrays_of_pathmnist_are_refused(name: str, change: Callable, expected: str, tmp_path: Path) -> None:
    write_pathmnist(tmp_path)
    path = tmp_path / "pathmnist.npz"
    with np.load(path) as archive:
        arrays = dict(archive)
    arrays[name] = change(arrays[name])
    np.savez(path, **{name: values for name, values in arrays.items() if values is not None})
    assert expected in refusal(PathMNIST(str(tmp_path)))


def test_the_message_names_an_image_of_another_size_or_without_a_file(tmp_path: Path) -> None:
    write_tiny_imagenet(tmp_path, classes=2)
    val = tmp_path / "tiny-imagenet-200" / "val"
    path = val / "images" / "val_0.JPEG"
    Image.new("RGB", (32, 64)).save(path)
    assert f"{path}: is 32x64 pixels, not 64x64" in refusal(TinyImageNet(str(tmp_path)))
    path.unlink()
    assert f"{val}/val_annotations.txt: does not match the files in images: val_0.JPEG" in refusal(
        TinyImageNet(str(tmp_path))
    )


def test_folders_of_tiny_imagenet_match_its_list_and_hidden_files_are_ignored(tmp_path: Path) -> None:
    write_tiny_imagenet(tmp_path, classes=2)
    root = tmp_path / "tiny-imagenet-200"
    for folder in ("train", "val/images", "train/n00000000/images"):
        (root / folder / ".DS_Store").write_text("a Mac was here")
    assert len(TinyImageNet(str(tmp_path)).checked().y_test) == 2
    (root / "wnids.txt").write_text("n00000000\n")
    assert f"{root}/wnids.txt: does not match the folders in train: n00000001" in refusal(TinyImageNet(str(tmp_path)))
    (root / "wnids.txt").write_text("n00000000\nn00000001\n../val\n")
    assert f"{root}/wnids.txt: does not match the folders in train: ../val" in refusal(TinyImageNet(str(tmp_path)))


def test_an_annotation_cannot_name_a_file_elsewhere(tmp_path: Path) -> None:
    write_tiny_imagenet(tmp_path, classes=2)
    table = tmp_path / "tiny-imagenet-200" / "val" / "val_annotations.txt"
    Image.new("RGB", (64, 64)).save(tmp_path / "elsewhere.JPEG")
    table.write_text(table.read_text().replace("val_0.JPEG", "../../../elsewhere.JPEG"))
    assert f"{table}: does not match the files in images: elsewhere.JPEG" in refusal(TinyImageNet(str(tmp_path)))
    table.write_text("val_0.JPEG\tn99999999\n")
    assert f"{table}: not a readable table of images and classes ('n99999999')" in refusal(TinyImageNet(str(tmp_path)))


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ('"five","a","b"\n', "row 41 (column 1 (the label) holds 'five', not a class from 1 to 4)"),
        ('"5","a","b"\n', "row 41 (column 1 (the label) holds '5', not a class from 1 to 4)"),
        (f'"{"9" * 5000}","a","b"\n', f"row 41 (column 1 (the label) holds '{'9' * 40}', not a class from 1 to 4)"),
        ('"1","a"\n', "row 41 (not enough values to unpack"),
        ("\n", "row 41 (not enough values to unpack"),
        ('"1","a","cut', "not a readable csv file (unexpected end of data)"),
    ],
)
def test_the_message_names_a_bad_row_of_ag_news(row: str, expected: str, tmp_path: Path) -> None:
    write_ag_news(tmp_path)
    with (tmp_path / "ag_news_csv" / "train.csv").open("a") as file:
        file.write(row)
    assert expected in refusal(AGNews(str(tmp_path)))


def test_a_length_beyond_the_memory_is_refused_by_its_key(tmp_path: Path) -> None:
    write_ag_news(tmp_path)
    for length in (10**13, 10**30):
        assert refusal(AGNews(str(tmp_path), length=length)).startswith("scenario.dataset.length: ")


# --- Files cannot execute code ---


class Trap:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_no_file_in_a_data_folder_can_execute_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pickles that would make a folder are in the place of every file, and of old caches."""
    for layout in LAYOUTS.values():
        with suppress(FileExistsError):
            layout.write(tmp_path, monkeypatch)
    sprung = tmp_path / "sprung"
    trap = pickle.dumps(Trap(sprung), protocol=2)
    for name, files in {name: layout.files for name, layout in LAYOUTS.items()}.items():
        for file in files:
            (tmp_path / file).write_bytes(trap)
        refusal(LAYOUTS[name].make(str(tmp_path)))
    np.savez(tmp_path / "pathmnist.npz", **dict.fromkeys(("train_images", "train_labels"), np.array([Trap(sprung)])))
    refusal(PathMNIST(str(tmp_path)))
    for name in ("MNIST", "EMNIST"):
        (tmp_path / name / "processed").mkdir()
        for cache in ("training", "test", "training_letters", "test_letters"):
            (tmp_path / name / "processed" / f"{cache}.pt").write_bytes(trap)
    for file in LAYOUTS["MNIST"].files + LAYOUTS["EMNIST"].files:
        (tmp_path / file).unlink()
    for download in (False, True):
        refusal(MNIST(str(tmp_path), download=download))
        refusal(EMNIST("letters", str(tmp_path), download=download))
    assert not sprung.exists()
    pickle.loads(trap)
    assert sprung.exists()


# --- Loaded data ---


@dataclass
class MyData(Dataset):
    """A custom dataset."""

    changed: dict[str, Any] = field(default_factory=dict)

    def load(self) -> LoadedData:
        x, y = torch.from_numpy(images(20, 1, 4, 4)), torch.arange(20) % 10
        return replace(LoadedData(x, y, x.clone(), y.clone(), 10, Normalize()), **self.changed)


def filled(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    x = torch.zeros(20, 1, 4, 4)
    x[7, 0, 1, 2] = value
    return x.to(dtype)


def labels(at_seven: int) -> torch.Tensor:
    y = torch.arange(20) % 10
    y[7] = at_seven
    return y


ONE_NUMBER = "needs one whole number per sample"
WRONG = {
    "label too large": ({"y_train": labels(10)}, "y_train holds label 10, which is out of range for num_classes 10"),
    "test label too large": ({"y_test": labels(255)}, "y_test holds label 255, which is out of range for num_classes"),
    "negative label": ({"y_test": labels(-1)}, "y_test holds label -1. Labels count from 0"),
    "float labels": (
        {"y_train": labels(0) / 2},
        "y_train needs 10 numbers per sample, got float32 of shape (20,). Use float32 of that shape, or int64",
    ),
    "int32 labels": (
        {"y_train": labels(0).to(torch.int32)},
        f"y_train {ONE_NUMBER}, got int32 of shape (20,). Convert it to int64",
    ),
    "label column": ({"y_test": labels(0)[:, None]}, f"y_test {ONE_NUMBER}, got int64 of shape (20, 1)"),
    "too few labels": ({"y_train": labels(0)[1:]}, "x_train has 20 rows and y_train 19. They need equally many"),
    "array": ({"x_test": images(3, 1, 4, 4)}, "x_test is of type ndarray, not a torch.Tensor"),
    "no test samples": (
        {"x_test": torch.zeros(0, 1, 4, 4, dtype=torch.uint8), "y_test": labels(0)[:0]},
        "x_test has 0 rows and y_test 0. They need equally many, and at least one",
    ),
    "different shapes": (
        {"x_test": torch.zeros(20, 1, 4, 5, dtype=torch.uint8)},
        "x_train and x_test hold inputs of different shapes, (1, 4, 4) and (1, 4, 5)",
    ),
    "different dtypes": ({"x_test": filled(0)}, "x_train and x_test need the same dtype"),
    "scalars": ({"x_train": torch.zeros(20)}, "x_train has shape (20,); it needs one row per sample: (n, ...)"),
    "inputs of size 0": ({"x_train": torch.zeros(20, 0)}, "x_train has shape (20, 0); it needs one row per sample"),
    "NaN": ({"x_train": filled(np.nan)}, "x_train holds NaN or Inf"),
    "minus Inf": ({"x_train": filled(0), "x_test": filled(-np.inf)}, "x_test holds NaN or Inf"),
    "integer pixels": (
        {"x_train": filled(200, torch.int64)},
        "x_train is int64 of shape (20, 1, 4, 4); it needs uint8 or float32, or int64 for token ids (n, length)",
    ),
    "float64": ({"x_train": filled(0, torch.float64)}, "x_train is float64 of shape (20, 1, 4, 4); it needs uint8 or"),
    "negative token": (
        {"x_train": torch.full((20, 5), -1), "x_test": torch.zeros(20, 5, dtype=torch.int64)},
        "x_train holds -1; token ids count from 0",
    ),
    "sparse": ({"x_train": filled(1).to_sparse()}, "x_train is torch.sparse_coo on cpu; it needs to be dense"),
    "meta device": ({"y_test": torch.zeros(20, device="meta")}, "y_test is torch.strided on meta; it needs to be"),
    "one class": (
        {"num_classes": 1, "y_train": labels(0) * 0, "y_test": labels(0) * 0},
        "num_classes is 1, not between 2 and",
    ),
    "too many classes": ({"num_classes": 10**9}, "num_classes is 1000000000, not between 2 and 10,000,000"),
    "float num_classes": ({"num_classes": 10.0}, "num_classes is 10.0, not an integer"),
    "boolean num_classes": ({"num_classes": True}, "num_classes is True, not an integer"),
    "no prepare": ({"prepare": None}, "prepare is of type NoneType, which cannot be called"),
    "mixed clients": (
        {"client_train": [0, "0"] * 10},
        "client_train needs one id per sample, integers or text, got object",
    ),
    "client column": (
        {"client_train": np.zeros((20, 1), np.int64)},
        "client_train needs one id per sample, integers or text, got int64 of shape (20, 1)",
    ),
    "float clients": ({"client_train": np.zeros(20)}, "client_train needs one id per sample, integers or text, got f"),
    "too few clients": ({"client_train": np.arange(19)}, "client_train has ids of 19 samples, but there are 2"),
    "only test clients": ({"client_test": np.arange(20)}, "client_test is given, but client_train is missing"),
    "clients of two kinds": (
        {"client_train": np.arange(20), "client_test": np.arange(20).astype(str)},
        "client_train and client_test need ids of one type, integers or text",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_dataset_is_checked_and_its_class_named(case: str) -> None:
    changed, expected = WRONG[case]
    message = refusal(lambda: Scenario(MyData(changed), IID(), 2).build(0))
    assert message.startswith(f"scenario.dataset: MyData: {expected}")


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"x_train": filled(3e38), "x_test": filled(-3e38)},
        {"x_train": torch.full((20, 5), 10**6), "x_test": torch.zeros(20, 5, dtype=torch.int64)},
        {"num_classes": np.int64(12)},
        {"y_train": torch.zeros(20, dtype=torch.int64)},
        {"client_train": np.arange(20, dtype=np.uint8), "client_test": -np.arange(20)},
        {"client_train": np.array(["ann", "bert"] * 10)},
    ],
)
def test_valid_data_are_not_changed(changed: dict[str, Any]) -> None:
    data = MyData(changed).checked()
    for name, value in changed.items():
        assert getattr(data, name) is value


def test_an_exception_in_a_custom_dataset_names_its_class() -> None:
    class Broken(Dataset):
        def load(self) -> LoadedData:
            return {}["images"]

    class NoReturn(Dataset):
        def load(self) -> LoadedData:
            MyData().load()

    assert refusal(Broken()) == "scenario.dataset: Broken: KeyError: 'images'. Use --debug for the traceback"
    assert refusal(NoReturn()) == "scenario.dataset: NoReturn: load() returned NoneType, not LoadedData"


# --- Scenarios and partitions ---


@pytest.mark.parametrize("clients", [1438, 10**30])
def test_more_clients_than_samples_are_refused_before_the_split(clients: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(IID, "split", None)
    expected = f"scenario.clients: {clients} is above the 1437 training samples. Each client needs one"
    assert refusal(lambda: Scenario(Digits(), IID(), clients).build(0)) == expected


def test_the_number_of_clients_is_compared_to_train_samples() -> None:
    message = refusal(lambda: Scenario(Digits(), IID(), 11, train_samples=10).build(0))
    assert message.startswith("scenario.clients: 11 is above the 10 training samples")
    assert len(Scenario(Digits(), IID(), 10, train_samples=10).build(0).shards) == 10


NUMBERS = {
    "clients": [0, -1],
    "local_test": [True, -0.1, 1, np.nan, np.inf, "0.5"],
    "long_tail": [True, 0.5, -1, np.nan, np.inf],
    "train_samples": [True, 0, -1, 0.0, 1.0, 1.5, np.nan, np.inf],
    "held_out_clients": [True, 0, -1, 0.0, 1.0, 1.5, np.nan, np.inf],
    "validation_share": [0, 1, -0.1, np.nan, np.inf],
}


@pytest.mark.parametrize("key", NUMBERS)
def test_numbers_of_a_scenario_are_checked(key: str) -> None:
    for value in NUMBERS[key]:
        message = refusal(lambda value=value: Scenario(Digits(), IID(), **{key: value}))
        assert message.startswith(f"scenario.{key}: {value} is ")


@pytest.mark.parametrize(
    ("make", "key", "values"),
    [
        (Dirichlet, "alpha", [0, -1, np.nan, np.inf, 1e300, 1.1e6]),
        (QuantitySkew, "alpha", [0]),
        (Dirichlet, "min_samples", [0, -(10**30)]),
        (QuantitySkew, "min_samples", [0]),
        (ByClient, "min_samples", [0]),
        (Shards, "per_client", [0, -(10**30)]),
        (Pathological, "classes_per_client", [0, -(10**30)]),
        (DisjointClasses, "classes_per_client", [0]),
    ],
)
def test_numbers_of_a_partition_are_checked(make: type, key: str, values: list[float]) -> None:
    for value in values:
        message = refusal(lambda value=value: make(**{key: value}))
        assert message.startswith(f"scenario.partition.{key}: {value} is ")


TWO = np.repeat([2, 5], [50, 3])
IMPOSSIBLE: dict[str, tuple[Partition, str]] = {
    "min_samples": (
        Dirichlet(1.0, 14),
        "min_samples: cannot give each of 4 clients 14 samples: 53 samples are too",
    ),
    "huge": (QuantitySkew(0.5, 10**30), "min_samples: cannot give each of 4 clients"),
    "groups": (
        Dirichlet(1e-300, 1, "groups"),
        "min_samples: cannot give each of 4 clients 1 samples: 1000 draws with alpha 1e-300 left one below half an eq",
    ),
    "shards": (Shards(14), "per_client: 56 shards of 53 samples leave some empty"),
    "too many classes": (Pathological(3), "classes_per_client: 3, but the dataset has 2 classes"),
    "a small class": (Pathological(2), "classes_per_client: class 5 has 3 samples for 4 clients. Lower classes_per"),
}


@pytest.mark.parametrize("case", IMPOSSIBLE)
def test_an_impossible_partition_is_refused_by_its_key(case: str) -> None:
    partition, expected = IMPOSSIBLE[case]
    message = refusal(lambda: partition.split(TWO, 4, np.random.default_rng(0)))
    assert message.startswith(f"scenario.partition.{expected}")


def test_more_clients_than_samples_of_a_block_of_classes_are_refused() -> None:
    message = refusal(lambda: DisjointClasses(1).split(np.array([0, 1, 1]), 9, np.random.default_rng(0)))
    assert message == "scenario.partition: 3 samples are too few for 9 clients. Lower scenario.clients"


@pytest.mark.parametrize("partition", [Dirichlet(1e-300), Dirichlet(5e-324, form="balanced"), DisjointClasses(10**30)])
def test_extreme_but_valid_numbers_are_accepted(partition: Partition) -> None:
    data = Scenario(Digits(), partition, 5).build(0)
    assert data.class_counts("train").sum() + data.class_counts("test").sum() == 1437


@dataclass
class MyPartition(Partition):
    """A custom partition."""

    parts: Any

    def split(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        return [np.array(part) for part in self.parts]


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([[0, 1]], "MyPartition: returned 1 index arrays for 2 clients"),
        ([[0.0], [1.0]], "MyPartition: returned arrays of float64. They must be sample indices"),
        ([[0, 1437], [1]], "MyPartition: assigned sample 1437, but there are 1437"),
        ([[0], [-1]], "MyPartition: assigned sample -1, but there are 1437"),
        ([[0, 5], [1, 5]], "MyPartition: assigned sample 5 twice"),
        (7, "MyPartition: TypeError: 'int' object is not iterable. Use --debug for the traceback"),
        ([[0], []], "client 1 has no data"),
    ],
)
def test_the_result_of_a_custom_partition_is_checked(parts: Any, expected: str) -> None:
    assert refusal(lambda: Scenario(Digits(), MyPartition(parts), 2).build(0)).startswith(
        f"scenario.partition: {expected}"
    )


def test_episodes_too_large_for_the_test_set_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_cifar(tmp_path, 100, monkeypatch)
    message = refusal(FC100(str(tmp_path), few_shot=FewShot(ways=21)))
    assert message.startswith("scenario.dataset.few_shot: the test set has 20 classes, the smallest with 3 samples")


# --- On the command line ---

OWN_DATA = """
import torch
from fl_lightning.data import Dataset, LoadedData
from fl_lightning.data.transforms import Normalize

class MyData(Dataset):
    def load(self):
        x, y = torch.zeros(20, 1, 4, 4), torch.full((20,), 255)
        return LoadedData(x, y, x, y, 10, Normalize())

class Items(torch.utils.data.Dataset):
    def __init__(self, n: int = 20):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        return torch.full((4,), float(i)), i % 3
"""
FIT = ["fit", "--config", "one.yaml", "--run_dir", "out"]
DATASET = [*FIT, "--scenario.dataset"]
ITEMS = [*DATASET, "TorchDataset"]
ITEMS += [word for split in ("train", "test") for word in (f"--scenario.dataset.{split}", "own_data.Items")]
PARTITION = ["partition", "--config", "one.yaml", "--out"]
SPLIT = [*FIT, "--scenario.partition=PredefinedSplit"]
COMMANDS = {
    # A refused command, its message, and the corrected command.
    "label out of range": (
        [*DATASET, "own_data.MyData"],
        "scenario.dataset: MyData: y_train holds label 255, which",
        FIT,
    ),
    "a torch dataset": (
        [*DATASET, "own_data.Items"],
        "own_data.Items is a Dataset of torch's; use TorchDataset, with scenario.dataset.train own_data.Items and",
        ITEMS,
    ),
    "a known torch dataset": (
        [*DATASET, "torchvision.datasets.ImageFolder"],
        "torchvision.datasets.ImageFolder is a Dataset of torch's; use ImageFolder, which reads the same files, or ",
        [*DATASET, "ImageFolder", "--scenario.dataset.path", "mine", "--scenario.dataset.size", "[4, 5]"],
    ),
    "no dataset": (
        [*DATASET, "torch.nn.Linear"],
        "scenario.dataset: torch.nn.Linear is no Dataset. See `fl-lightning list datasets`.",
        FIT,
    ),
    "an unknown argument": (
        [*ITEMS, "--scenario.dataset.train.m", "1"],
        "Items has no key 'm'",
        [*ITEMS, "--scenario.dataset.train.n", "9"],
    ),
    "pipe": (
        [*DATASET, "Arrays", "--scenario.dataset.path", "pipe.npz"],
        "pipe.npz: is a pipe, it needs to be a file",
        FIT,
    ),
    "local_test": ([*FIT, "--scenario.local_test", ".nan"], "scenario.local_test: nan is outside [0, 1)", FIT),
    "split without path": (SPLIT, "scenario.partition", FIT),
    "suffix of a split": ([*SPLIT, "--scenario.partition.path=a.yaml"], "path: a.yaml is neither .npz nor .json", FIT),
    "partition into a run": ([*PARTITION, "done"], "--out: done is the folder of a run. Choose another folder.", FIT),
    "partition into a long name": ([*PARTITION, "x" * 256], "--out: xxx", FIT),
    "partition into no name": ([*PARTITION, "a\0b"], "--out: ", FIT),
}


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("name", COMMANDS)
def test_a_refused_command_writes_one_line_and_no_file(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.delitem(sys.modules, "own_data", raising=False)
    Path("one.yaml").write_text(ONE_ROUND)
    Path("own_data.py").write_text(OWN_DATA)
    write_image_folder(Path("mine"))
    os.mkfifo("pipe.npz")
    Path("done").mkdir()
    Path("done/metrics.csv").write_text("round\n")
    refused, message, corrected = COMMANDS[name]
    check_refused_command(refused, [message])
    code, _, err = run(*corrected)
    assert code == 0, err
