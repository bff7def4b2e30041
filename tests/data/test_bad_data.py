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
from refusals import (
    NO_FILES,
    ONE_ROUND,
    Trap,
    check_refused,
    check_refused_command,
    empty,
    halve,
    refusal,
    replace_by,
    time_limit,  # noqa: F401
)

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
    ("name", "file"), [pytest.param(*one, marks=() if one[1] in FAST_FILES else pytest.mark.thorough) for one in FILES]
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
    check_refused(LAYOUTS[name].make(str(tmp_path)), f"dataset: {name}", f" {', '.join(gone)} into {tmp_path}, ")


@pytest.mark.parametrize(
    "dataset", [MNIST, FashionMNIST, EMNIST, CIFAR10, CIFAR100, SVHN, PathMNIST, TinyImageNet, AGNews, IMDB, FEMNIST]
)
def test_the_message_about_missing_files_names_folder_and_fix(dataset: type, tmp_path: Path) -> None:
    missing = dataset(data_dir=str(tmp_path))
    check_refused(missing, f"dataset: {dataset.__name__}", missing.files, str(tmp_path), "scenario.dataset.data_dir")
    assert ("scenario.dataset.download" in refusal(missing)) == (dataset is not FEMNIST)


def test_a_download_is_only_suggested_if_it_is_possible(tmp_path: Path) -> None:
    """IMDB's csv file cannot be downloaded, and a second download of AG News is not suggested."""
    download = "scenario.dataset.download"
    assert download not in refusal(IMDB(str(tmp_path), layout="csv"))
    write_imdb_csv(tmp_path)
    empty(tmp_path / "IMDB Dataset.csv")
    assert download not in refusal(IMDB(str(tmp_path), layout="csv"))
    write_ag_news(tmp_path)
    empty(tmp_path / "ag_news_csv" / "train.csv")
    assert download in refusal(AGNews(str(tmp_path)))
    assert download not in refusal(AGNews(str(tmp_path), download=True))


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
    for damaged, *facts in (
        (content[:-1], "47,055", "47,056"),
        (content + b"\0", "47,057", "47,056"),
        (struct.pack(">3sB3I", b"\0\0\x08", 3, 2**31, 2**31, 2**31), "header"),
        (b"\0\0\x0d" + content[3:], "unsigned bytes"),
        (content[:3] + b"\1" + content[4:], "dimensions is 1"),
        (content[:9], "not a readable idx file"),
    ):
        path.write_bytes(damaged)
        check_refused(MNIST(str(tmp_path)), "dataset", f"{path}: ", *facts)


def test_files_of_another_dataset_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_emnist(tmp_path, "balanced")
    (tmp_path / "MNIST" / "raw").mkdir(parents=True)
    for ours, theirs in zip(IDX, EMNIST_FILES, strict=True):
        (tmp_path / theirs.replace("letters", "balanced")).rename(tmp_path / "MNIST" / "raw" / ours)
    check_refused(MNIST(str(tmp_path)), "dataset: MNIST", "y_train", "46", "10")
    write_cifar(tmp_path, 100, monkeypatch)
    write_cifar(tmp_path / "ten", 10, monkeypatch)
    (tmp_path / "ten" / "cifar-10-batches-py" / "test_batch").replace(tmp_path / "cifar-100-python" / "test")
    check_refused(CIFAR100(str(tmp_path)), "dataset", "cifar-100-python/test: ", "MD5")


@pytest.mark.parametrize(
    ("name", "change", "facts"),
    [
        ("train_labels", lambda y: y + 0.5, ("train_labels", "float64", "(54")),
        ("train_labels", lambda y: y + 246, ("y_train", "254")),
        ("train_labels", lambda y: np.tile(y, 14), ("y_train", "int64", "(54, 14)")),
        ("train_images", lambda x: x / 255, ("x_train", "float64", "(54, 3, 28, 28)")),
        ("test_images", lambda x: x[0, 0, 0], ("pathmnist.npz",)),
        ("test_images", lambda x: None, ("has no test_images",)),
    ],
)
def test_wrong_arrays_of_pathmnist_are_refused(name: str, change: Callable, facts: Any, tmp_path: Path) -> None:
    write_pathmnist(tmp_path)
    path = tmp_path / "pathmnist.npz"
    with np.load(path) as archive:
        arrays = dict(archive)
    arrays[name] = change(arrays[name])
    np.savez(path, **{name: values for name, values in arrays.items() if values is not None})
    check_refused(PathMNIST(str(tmp_path)), "dataset", *facts)


def test_the_message_names_an_image_of_another_size_or_without_a_file(tmp_path: Path) -> None:
    write_tiny_imagenet(tmp_path, classes=2)
    val = tmp_path / "tiny-imagenet-200" / "val"
    path = val / "images" / "val_0.JPEG"
    Image.new("RGB", (32, 64)).save(path)
    check_refused(TinyImageNet(str(tmp_path)), "dataset", f"{path}: ", "32x64", "64x64")
    path.unlink()
    check_refused(TinyImageNet(str(tmp_path)), "dataset", f"{val}/val_annotations.txt: ", "val_0.JPEG")


def test_folders_of_tiny_imagenet_match_its_list_and_hidden_files_are_ignored(tmp_path: Path) -> None:
    write_tiny_imagenet(tmp_path, classes=2)
    root = tmp_path / "tiny-imagenet-200"
    for folder in ("train", "val/images", "train/n00000000/images"):
        (root / folder / ".DS_Store").write_text("a Mac was here")
    assert len(TinyImageNet(str(tmp_path)).checked().y_test) == 2
    for listed, wrong in (("n00000000\n", "n00000001"), ("n00000000\nn00000001\n../val\n", "../val")):
        (root / "wnids.txt").write_text(listed)
        check_refused(TinyImageNet(str(tmp_path)), "dataset", f"{root}/wnids.txt: ", f"train: {wrong}")


def test_an_annotation_cannot_name_a_file_elsewhere(tmp_path: Path) -> None:
    write_tiny_imagenet(tmp_path, classes=2)
    table = tmp_path / "tiny-imagenet-200" / "val" / "val_annotations.txt"
    Image.new("RGB", (64, 64)).save(tmp_path / "elsewhere.JPEG")
    elsewhere = table.read_text().replace("val_0.JPEG", "../../../elsewhere.JPEG")
    for content, wrong in ((elsewhere, "images: elsewhere.JPEG"), ("val_0.JPEG\tn99999999\n", "'n99999999'")):
        table.write_text(content)
        check_refused(TinyImageNet(str(tmp_path)), "dataset", f"{table}: ", wrong)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ('"five","a","b"\n', "row 41 (column 1 (the label) holds 'five', "),
        ('"5","a","b"\n', "row 41 (column 1 (the label) holds '5', "),
        (f'"{"9" * 5000}","a","b"\n', f"row 41 (column 1 (the label) holds '{'9' * 40}', "),
        ('"1","a"\n', "row 41 ("),
        ("\n", "row 41 ("),
        ('"1","a","cut', "csv file ("),
    ],
)
def test_the_message_names_a_bad_row_of_ag_news(row: str, expected: str, tmp_path: Path) -> None:
    write_ag_news(tmp_path)
    with (tmp_path / "ag_news_csv" / "train.csv").open("a") as file:
        file.write(row)
    check_refused(AGNews(str(tmp_path)), "dataset", "train.csv: ", expected)


def test_a_length_beyond_the_memory_is_refused_by_its_key(tmp_path: Path) -> None:
    write_ag_news(tmp_path)
    for length in (10**13, 10**30):
        check_refused(AGNews(str(tmp_path), length=length), "dataset.length")


# --- Files cannot execute code ---


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


NO_ROWS = {"x_test": torch.zeros(0, 1, 4, 4, dtype=torch.uint8), "y_test": labels(0)[:0]}
TOKENS = torch.zeros(20, 5, dtype=torch.int64)
TWO_KINDS = {"client_train": np.arange(20), "client_test": np.arange(20).astype(str)}
WRONG: dict[str, tuple[Any, ...]] = {
    # Changed values, the name that the message begins with, and values that it holds
    "label too large": ({"y_train": labels(10)}, "y_train", "label 10", "num_classes 10"),
    "test label too large": ({"y_test": labels(255)}, "y_test", "label 255"),
    "negative label": ({"y_test": labels(-1)}, "y_test", "label -1"),
    "float labels": ({"y_train": labels(0) / 2}, "y_train", "float32", "(20,)"),
    "int32 labels": ({"y_train": labels(0).to(torch.int32)}, "y_train", "int32 of shape (20,)", "int64"),
    "label column": ({"y_test": labels(0)[:, None]}, "y_test", "int64 of shape (20, 1)"),
    "too few labels": ({"y_train": labels(0)[1:]}, "x_train", "20 rows", "y_train 19"),
    "array": ({"x_test": images(3, 1, 4, 4)}, "x_test", "ndarray"),
    "no test samples": (NO_ROWS, "x_test", "0 rows", "y_test 0"),
    "different shapes": ({"x_test": NO_ROWS["x_test"].new_zeros(20, 1, 4, 5)}, "x_train", "(1, 4, 4)", "(1, 4, 5)"),
    "different dtypes": ({"x_test": filled(0)}, "x_train", "x_test", "dtype"),
    "scalars": ({"x_train": torch.zeros(20)}, "x_train", "(20,)"),
    "inputs of size 0": ({"x_train": torch.zeros(20, 0)}, "x_train", "(20, 0)"),
    "NaN": ({"x_train": filled(np.nan)}, "x_train", "NaN"),
    "minus Inf": ({"x_train": filled(0), "x_test": filled(-np.inf)}, "x_test", "Inf"),
    "integer pixels": ({"x_train": filled(200, torch.int64)}, "x_train", "int64 of shape (20, 1, 4, 4)"),
    "float64": ({"x_train": filled(0, torch.float64)}, "x_train", "float64 of shape (20, 1, 4, 4)"),
    "negative token": ({"x_train": TOKENS - 1, "x_test": TOKENS}, "x_train", "-1"),
    "sparse": ({"x_train": filled(1).to_sparse()}, "x_train", "torch.sparse_coo on cpu"),
    "meta device": ({"y_test": torch.zeros(20, device="meta")}, "y_test", "torch.strided on meta"),
    "one class": ({"num_classes": 1, "y_train": labels(0) * 0, "y_test": labels(0) * 0}, "num_classes", "is 1,"),
    "too many classes": ({"num_classes": 10**9}, "num_classes", "1000000000"),
    "float num_classes": ({"num_classes": 10.0}, "num_classes", "10.0"),
    "boolean num_classes": ({"num_classes": True}, "num_classes", "True"),
    "no prepare": ({"prepare": None}, "prepare", "NoneType"),
    "mixed clients": ({"client_train": [0, "0"] * 10}, "client_train", "object"),
    "client column": ({"client_train": np.zeros((20, 1), np.int64)}, "client_train", "int64 of shape (20, 1)"),
    "float clients": ({"client_train": np.zeros(20)}, "client_train", "float64"),
    "too few clients": ({"client_train": np.arange(19)}, "client_train", "19 samples"),
    "only test clients": ({"client_test": np.arange(20)}, "client_test", "client_train"),
    "clients of two kinds": (TWO_KINDS, "client_train", "client_test"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_dataset_is_checked_and_its_class_named(case: str) -> None:
    changed, name, *facts = WRONG[case]
    check_refused(lambda: Scenario(MyData(changed), IID(), 2).build(0), "dataset: MyData", f": {name} ", *facts)


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"x_train": filled(3e38), "x_test": filled(-3e38)},
        {"x_train": TOKENS + 10**6, "x_test": TOKENS},
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

    assert refusal(Broken()).startswith("scenario.dataset: Broken: KeyError: 'images'. ")
    check_refused(NoReturn(), "dataset: NoReturn", "NoneType")


# --- Scenarios and partitions ---


@pytest.mark.parametrize("clients", [1438, 10**30])
def test_more_clients_than_samples_are_refused_before_the_split(clients: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(IID, "split", None)
    check_refused(lambda: Scenario(Digits(), IID(), clients).build(0), "clients", f"{clients} ", "1437")


def test_the_number_of_clients_is_compared_to_train_samples() -> None:
    check_refused(lambda: Scenario(Digits(), IID(), 11, train_samples=10).build(0), "clients", "11 ", "10 ")
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
        check_refused(lambda value=value: Scenario(Digits(), IID(), **{key: value}), key, f": {value} is ")


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
        check_refused(lambda value=value: make(**{key: value}), f"partition.{key}", f": {value} is ")


TWO = np.repeat([2, 5], [50, 3])
IMPOSSIBLE: dict[str, tuple[Any, ...]] = {
    "min_samples": (Dirichlet(1.0, 14), "min_samples", "4 clients", "14 samples", "53 samples"),
    "huge": (QuantitySkew(0.5, 10**30), "min_samples", "4 clients"),
    "groups": (Dirichlet(1e-300, 1, "groups"), "min_samples", "4 clients", "1000 draws", "alpha 1e-300"),
    "shards": (Shards(14), "per_client", "56 shards", "53 samples"),
    "too many classes": (Pathological(3), "classes_per_client", ": 3,", "2 classes"),
    "a small class": (Pathological(2), "classes_per_client", "class 5", "3 samples", "4 clients"),
}


@pytest.mark.parametrize("case", IMPOSSIBLE)
def test_an_impossible_partition_is_refused_by_its_key(case: str) -> None:
    partition, key, *facts = IMPOSSIBLE[case]
    check_refused(lambda: partition.split(TWO, 4, np.random.default_rng(0)), f"partition.{key}", *facts)


def test_more_clients_than_samples_of_a_block_of_classes_are_refused() -> None:
    split = partial(DisjointClasses(1).split, np.array([0, 1, 1]), 9, np.random.default_rng(0))
    check_refused(split, "partition", "3 samples", "9 clients", "scenario.clients")


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
        ([[0, 1]], "MyPartition: returned 1 "),
        ([[0.0], [1.0]], "MyPartition: returned arrays of float64"),
        ([[0, 1437], [1]], "MyPartition: assigned sample 1437"),
        ([[0], [-1]], "MyPartition: assigned sample -1"),
        ([[0, 5], [1, 5]], "MyPartition: assigned sample 5 twice"),
        (7, "MyPartition: TypeError: "),
        ([[0], []], "client 1 "),
    ],
)
def test_the_result_of_a_custom_partition_is_checked(parts: Any, expected: str) -> None:
    message = refusal(lambda: Scenario(Digits(), MyPartition(parts), 2).build(0))
    assert message.startswith(f"scenario.partition: {expected}")


def test_episodes_too_large_for_the_test_set_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_cifar(tmp_path, 100, monkeypatch)
    check_refused(FC100(str(tmp_path), few_shot=FewShot(ways=21)), "dataset.few_shot", "20 classes", "3 samples")


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
MY_FOLDER = ["--scenario.dataset.path", "mine", "--scenario.dataset.size", "[4, 5]"]
COMMANDS = {
    # A refused command, what its message names, and the corrected command.
    "label out of range": ([*DATASET, "own_data.MyData"], "scenario.dataset: MyData: y_train", FIT),
    "a torch dataset": (
        [*DATASET, "own_data.Items"],
        "TorchDataset, with scenario.dataset.train own_data.Items",
        ITEMS,
    ),
    "a known torch dataset": (
        [*DATASET, "torchvision.datasets.ImageFolder"],
        "use ImageFolder, ",
        [*DATASET, "ImageFolder", *MY_FOLDER],
    ),
    "no dataset": ([*DATASET, "torch.nn.Linear"], "scenario.dataset: torch.nn.Linear", FIT),
    "an unknown argument": (
        [*ITEMS, "--scenario.dataset.train.m", "1"],
        "'m'",
        [*ITEMS, "--scenario.dataset.train.n", "9"],
    ),
    "pipe": ([*DATASET, "Arrays", "--scenario.dataset.path", "pipe.npz"], "pipe.npz: is a pipe", FIT),
    "local_test": ([*FIT, "--scenario.local_test", ".nan"], "scenario.local_test: nan ", FIT),
    "split without path": (SPLIT, "scenario.partition", FIT),
    "suffix of a split": ([*SPLIT, "--scenario.partition.path=a.yaml"], "path: a.yaml ", FIT),
    "partition into a run": ([*PARTITION, "done"], "--out: done ", FIT),
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
