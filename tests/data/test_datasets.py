import gc
import hashlib
import io
import os
import pickle
import struct
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from sklearn.datasets import load_digits

from fl_lightning.core.errors import ConfigError
from fl_lightning.data import CIFAR10, CIFAR100, IID, MNIST, Arrays, Digits, FashionMNIST, PathMNIST, Scenario
from fl_lightning.data.transforms import CropFlip

GREY = [MNIST, FashionMNIST]
COLOUR = [CIFAR10, CIFAR100]


# --- Digits ---


def test_digits_are_scikit_learns_with_every_fifth_held_out() -> None:
    source = load_digits()
    data = Digits().load()
    held_out = np.arange(1797) % 5 == 0
    for x, y, chosen in ((data.x_train, data.y_train, ~held_out), (data.x_test, data.y_test, held_out)):
        assert x.dtype == torch.float32
        assert np.array_equal(x.numpy()[:, 0] * 16, source.images[chosen])
        assert np.array_equal(y.numpy(), source.target[chosen])
    assert (len(data.y_train), len(data.y_test)) == (1437, 360)
    assert data.in_shape == (1, 8, 8)
    assert data.num_classes == 10
    assert data.augment is None
    assert torch.equal(data.prepare(data.x_test), data.x_test)


# --- torchvision's layouts ---


def idx(values: np.ndarray) -> bytes:
    return struct.pack(f">HBB{values.ndim}I", 0, 8, values.ndim, *values.shape) + values.tobytes()


def write_grey(name: str, root: Path) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    arrays = {}
    folder = root / name / "raw"
    folder.mkdir(parents=True)
    for split, n in (("train", 7), ("t10k", 3)):
        x, y = rng.integers(0, 256, (n, 28, 28), dtype=np.uint8), rng.integers(0, 10, n, dtype=np.uint8)
        (folder / f"{split}-images-idx3-ubyte").write_bytes(idx(x))
        (folder / f"{split}-labels-idx1-ubyte").write_bytes(idx(y))
        arrays |= {f"x_{split}": x, f"y_{split}": y}
    return arrays


def as_python_2_wrote_it(entry: dict[str, Any]) -> bytes:
    pickled = pickle.dumps(entry, protocol=2)
    return pickled.replace(b"numpy._core.multiarray", b"numpy.core.multiarray").replace(
        b"\x89\x88\x87", b"K\x00K\x01\x87"
    )


def write_colour(dataset: type, root: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[np.ndarray, list[int]]]:
    rng = np.random.default_rng(0)
    source = dataset.source
    folder = root / source.base_folder
    folder.mkdir()
    label, classes = ("labels", 10) if dataset is CIFAR10 else ("fine_labels", 100)

    def write(name: str, entry: dict[str, Any]) -> str:
        (folder / name).write_bytes(as_python_2_wrote_it(entry))
        return hashlib.md5((folder / name).read_bytes()).hexdigest()

    parts = {}
    for which in ("train_list", "test_list"):
        sums, xs, ys = [], [], []
        for name, _ in getattr(source, which):
            x, y = rng.integers(0, 256, (4, 3072), dtype=np.uint8), rng.integers(0, classes, 4).tolist()
            others = {"coarse_labels": [0] * 4} if dataset is CIFAR100 else {}
            sums.append([name, write(name, {"data": x, label: y, **others})])
            xs.append(x)
            ys += y
        monkeypatch.setattr(source, which, sums)
        parts[which] = np.concatenate(xs), ys
    meta = source.meta
    checksum = write(meta["filename"], {meta["key"]: [f"class {j}" for j in range(classes)]})
    monkeypatch.setattr(source, "meta", {**meta, "md5": checksum})
    return parts


@pytest.mark.parametrize("dataset", GREY)
def test_grey_images_come_from_idx_files(dataset: type, tmp_path: Path) -> None:
    arrays = write_grey(dataset.__name__, tmp_path)
    data = dataset(str(tmp_path)).load()
    for x, y, split in ((data.x_train, data.y_train, "train"), (data.x_test, data.y_test, "t10k")):
        assert x.dtype == torch.uint8
        assert y.dtype == torch.int64
        assert np.array_equal(x.numpy()[:, 0], arrays[f"x_{split}"])
        assert np.array_equal(y.numpy(), arrays[f"y_{split}"])
    assert data.in_shape == (1, 28, 28)
    assert data.num_classes == 10


@pytest.mark.parametrize("dataset", COLOUR)
def test_colour_images_come_from_pickled_batches(
    dataset: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = write_colour(dataset, tmp_path, monkeypatch)
    data = dataset(str(tmp_path)).load()
    assert len(data.y_train) == {CIFAR10: 20, CIFAR100: 4}[dataset]
    for x, y, (planes, labels) in (
        (data.x_train, data.y_train, parts["train_list"]),
        (data.x_test, data.y_test, parts["test_list"]),
    ):
        assert x.dtype == torch.uint8
        assert x.is_contiguous()
        assert y.dtype == torch.int64
        assert np.array_equal(x.numpy().reshape(-1, 3072), planes)  # red, green and blue plane, row by row
        assert y.tolist() == labels
    assert data.in_shape == (3, 32, 32)
    assert data.num_classes == {CIFAR10: 10, CIFAR100: 100}[dataset]


@pytest.mark.parametrize(
    ("dataset", "mean", "std"),
    [
        (MNIST, [0.1307], [0.3081]),
        (FashionMNIST, [0.2860], [0.3530]),
        (CIFAR10, [0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616]),
        (CIFAR100, [0.5071, 0.4865, 0.4409], [0.2673, 0.2564, 0.2762]),
    ],
)
def test_batches_are_normalized_with_the_datasets_own_mean_and_std(
    dataset: type, mean: list[float], std: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if dataset in GREY:
        write_grey(dataset.__name__, tmp_path)
    else:
        write_colour(dataset, tmp_path, monkeypatch)
    data = dataset(str(tmp_path)).load()
    expected = torchvision.transforms.functional.normalize(data.x_test.float() / 255, mean, std)
    torch.testing.assert_close(data.prepare(data.x_test), expected)


@pytest.mark.parametrize(("augment", "per_sample"), [("per_sample", True), ("per_batch", False)])
def test_augmentation_is_drawn_as_asked(augment: Any, per_sample: bool, tmp_path: Path) -> None:
    write_grey("MNIST", tmp_path)
    made = MNIST(str(tmp_path), augment=augment).load().augment
    assert isinstance(made, CropFlip)
    assert (made.per_sample, made.padding) == (per_sample, 4)


def test_there_is_no_augmentation_by_default(tmp_path: Path) -> None:
    write_grey("MNIST", tmp_path)
    assert MNIST(str(tmp_path)).load().augment is None


def message_of(dataset: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        dataset.checked()
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("dataset", "file"),
    [
        (MNIST, "MNIST/raw/{train,t10k}-{images-idx3,labels-idx1}-ubyte"),
        (FashionMNIST, "FashionMNIST/raw/{train,t10k}-{images-idx3,labels-idx1}-ubyte"),
        (CIFAR10, "cifar-10-batches-py/{data_batch_1..5,test_batch,batches.meta}"),
        (CIFAR100, "cifar-100-python/{train,test,meta}"),
    ],
)
def test_missing_files_are_named_with_their_folder_and_the_mend(dataset: type, file: str, tmp_path: Path) -> None:
    message = message_of(dataset(str(tmp_path)))
    assert message.startswith(f"scenario.dataset: {dataset.__name__}: ")
    assert f"Put {file} into {tmp_path}" in message
    assert "scenario.dataset.data_dir" in message
    assert "scenario.dataset.download true" in message


@pytest.mark.parametrize("file", ["train-images-idx3-ubyte", "t10k-labels-idx1-ubyte"])
def test_cut_short_idx_files_are_refused(file: str, tmp_path: Path) -> None:
    write_grey("MNIST", tmp_path)
    path = tmp_path / "MNIST" / "raw" / file
    path.write_bytes(path.read_bytes()[:-1])
    assert "MNIST cannot be read" in message_of(MNIST(str(tmp_path)))


@pytest.mark.parametrize("file", ["data_batch_3", "test_batch", "batches.meta"])
def test_cifar_files_that_do_not_match_their_checksum_are_refused(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_colour(CIFAR10, tmp_path, monkeypatch)
    path = tmp_path / "cifar-10-batches-py" / file
    content = bytearray(path.read_bytes())
    content[-20] ^= 1
    path.write_bytes(content)
    assert "CIFAR10 cannot be read" in message_of(CIFAR10(str(tmp_path)))


def test_a_failed_download_says_why_on_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(**options: Any) -> None:
        raise OSError(f"no route\n to host, download={options['download']}")

    monkeypatch.setattr(MNIST, "source", offline)
    message = message_of(MNIST(str(tmp_path), download=True))
    assert "(the download failed: no route to host, download=True)" in message
    assert "download true" not in message


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*_: Any, **__: Any) -> None:
        raise OSError("no route to host")

    monkeypatch.setattr(torchvision.datasets.mnist, "download_and_extract_archive", download)
    monkeypatch.setitem(sys.modules, "medmnist", SimpleNamespace(PathMNIST=download))


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("make", [MNIST, PathMNIST])
@pytest.mark.parametrize("place", ["new", "new/data", "there", "there/data"])
def test_a_failed_download_leaves_no_empty_folders_of_its_own(
    place: str, make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("there").mkdir()
    for root in (place, str(tmp_path / place)):
        assert "(the download failed: no route to host)" in message_of(make(root, download=True))
        assert list(Path().rglob("*")) == [Path("there")]


@pytest.mark.usefixtures("offline")
def test_a_failed_download_keeps_folders_that_were_there_or_hold_something(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "was" / "MNIST").mkdir(parents=True)
    message_of(MNIST(str(tmp_path / "was"), download=True))
    assert list((tmp_path / "was").rglob("*")) == [tmp_path / "was" / "MNIST"]

    def half(_: str, download_root: str, **__: Any) -> None:
        Path(download_root, "half.gz").write_bytes(b"x")
        raise OSError("no route to host")

    monkeypatch.setattr(torchvision.datasets.mnist, "download_and_extract_archive", half)
    message_of(MNIST(str(tmp_path / "new"), download=True))
    assert (tmp_path / "new" / "MNIST" / "raw" / "half.gz").exists()


# --- A dataset of one's own ---


def test_the_dataset_that_the_docs_write_can_be_dealt_out() -> None:
    page = (Path(__file__).parents[2] / "docs" / "scenarios.md").read_text()
    exec(page.split("```python\n")[1].split("```")[0], names := {"__name__": "my_module"})
    data = Scenario(names["Signs"](), IID(), clients=4).build(0)
    assert data.class_counts("train").sum() + data.class_counts("test").sum() == 800


# --- Arrays ---


def good() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {
        "x_train": rng.random((6, 4), dtype=np.float32),
        "y_train": np.array([0, 1, 2, 0, 1, 2]),
        "x_test": rng.random((3, 4), dtype=np.float32),
        "y_test": np.array([2, 0, 1]),
    }


def saved(tmp_path: Path, save: Any = np.savez, **changed: Any) -> Path:
    path = tmp_path / "mine.npz"
    save(path, **{name: value for name, value in {**good(), **changed}.items() if value is not None})
    return path


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_arrays_come_out_as_they_were_saved(save: Any, tmp_path: Path) -> None:
    data = Arrays(str(saved(tmp_path, save))).load()
    for name, values in good().items():
        assert np.array_equal(getattr(data, name).numpy(), values)
    assert data.in_shape == (4,)
    assert data.num_classes == 3
    assert data.augment is None
    assert torch.equal(data.prepare(data.x_test), data.x_test)


@pytest.mark.parametrize(
    ("shape", "axes", "in_shape"),
    [
        ((5, 7), None, (1, 5, 7)),
        ((5, 7, 1), (0, 3, 1, 2), (1, 5, 7)),
        ((5, 7, 3), (0, 3, 1, 2), (3, 5, 7)),
        ((3, 5, 7), (0, 1, 2, 3), (3, 5, 7)),
        ((1, 5, 3), (0, 1, 2, 3), (1, 5, 3)),
        ((5, 7, 4), (0, 1, 2, 3), (5, 7, 4)),
    ],
)
def test_images_come_out_with_channels_first(
    shape: tuple[int, ...], axes: tuple[int, ...] | None, in_shape: tuple[int, ...], tmp_path: Path
) -> None:
    rng = np.random.default_rng(1)
    x = {name: rng.integers(0, 256, (n, *shape), dtype=np.uint8) for name, n in (("x_train", 6), ("x_test", 3))}
    data = Arrays(str(saved(tmp_path, **x))).load()
    assert data.in_shape == in_shape
    for name, values in x.items():
        expected = values[:, None] if axes is None else values.transpose(axes)
        assert np.array_equal(getattr(data, name).numpy(), expected)
    assert data.x_train.dtype == torch.uint8
    assert torch.equal(data.prepare(data.x_test), data.x_test.float() / 255)


@pytest.mark.parametrize("dtype", ["float16", "float64", ">f4"])
def test_floating_point_inputs_become_float32(dtype: str, tmp_path: Path) -> None:
    x = good()["x_train"].astype(dtype)
    data = Arrays(str(saved(tmp_path, x_train=x))).load()
    assert data.x_train.dtype == torch.float32
    assert np.array_equal(data.x_train.numpy(), x.astype(np.float32))


@pytest.mark.parametrize("dtype", ["uint8", "int32", "uint64", ">i8"])
def test_labels_of_any_integer_type_become_int64(dtype: str, tmp_path: Path) -> None:
    data = Arrays(str(saved(tmp_path, y_train=good()["y_train"].astype(dtype)))).load()
    assert data.y_train.dtype == torch.int64
    assert data.y_train.tolist() == [0, 1, 2, 0, 1, 2]


def test_the_number_of_classes_may_be_more_than_the_labels_show(tmp_path: Path) -> None:
    assert Arrays(str(saved(tmp_path)), num_classes=12).load().num_classes == 12
    assert Arrays(str(saved(tmp_path, y_test=np.array([0, 7, 0])))).load().num_classes == 8


BAD_ARRAYS = {
    "missing": ({"y_test": None}, "has no y_test. It needs x_train, y_train, x_test, y_test"),
    "two missing": ({"x_train": None, "y_test": None}, "has no x_train, y_test"),
    "object inputs": ({"x_train": np.array([{}] * 6)}, "Object arrays cannot be loaded"),
    "object labels": ({"y_train": np.array([None] * 6)}, "Object arrays cannot be loaded"),
    "float labels": ({"y_train": np.arange(6.0)}, "y_test needs float32 numbers like the other labels, got int64"),
    "one-hot labels": (
        {"y_test": np.eye(3, dtype=int)},
        r"y_test needs one whole number per sample, .* shape \(3, 3\)",
    ),
    "text labels": ({"y_train": np.array(list("abcabc"))}, "y_train needs one whole number"),
    "negative labels": ({"y_test": np.array([0, -3, 1])}, "y_test holds label -3. Labels count from 0"),
    "huge labels": ({"y_train": np.full(6, 2**63, np.uint64)}, "y_train holds label 9223372036854775808, which is"),
    "NaN": ({"x_test": np.full((3, 4), np.nan, np.float32)}, "x_test holds NaN or Inf"),
    "Inf": ({"x_train": np.full((6, 4), np.inf)}, "x_train holds NaN or Inf"),
    "too large for float32": ({"x_train": np.full((6, 4), 1e300)}, "x_train"),
    "whole inputs": ({"x_train": np.ones((6, 4), int)}, "x_train is int64; it needs uint8 or floating point"),
    "complex inputs": ({"x_train": np.ones((6, 4), complex)}, "x_train is complex128"),
    "unequal lengths": ({"y_train": np.arange(5) % 3}, "x_train has 6 rows and y_train 5"),
    "unequal test lengths": ({"x_test": np.zeros((4, 4))}, "x_test has 4 rows and y_test 3"),
    "empty": ({"x_test": np.zeros((0, 4)), "y_test": np.zeros(0, int)}, "x_test has 0 rows and y_test 0"),
    "all empty": (
        dict.fromkeys(("x_train", "x_test"), np.zeros((0, 4))) | dict.fromkeys(("y_train", "y_test"), np.zeros(0, int)),
        "x_train has 0 rows and y_train 0",
    ),
    "unequal shapes": ({"x_test": np.zeros((3, 5), np.float32)}, "x_train and x_test hold inputs of different shapes"),
    "scales that differ": ({"x_test": np.zeros((3, 4), np.uint8)}, "x_train.*x_test"),
    "no rows": ({"x_train": np.float32(1)}, "x_train"),
    "bare numbers": ({"x_train": np.ones(6, np.float32), "x_test": np.ones(3, np.float32)}, "x_train"),
}


@pytest.mark.parametrize("case", BAD_ARRAYS)
def test_bad_arrays_are_refused_by_name(case: str, tmp_path: Path) -> None:
    changed, reason = BAD_ARRAYS[case]
    path = saved(tmp_path, **changed)
    with pytest.raises(ConfigError, match=reason) as caught:
        Arrays(str(path)).checked()
    assert str(caught.value).startswith(f"scenario.dataset.path: {path}: ")
    assert "\n" not in str(caught.value)


def test_labels_beyond_num_classes_are_refused(tmp_path: Path) -> None:
    assert "label 2, which is out of range for num_classes 2" in message_of(Arrays(str(saved(tmp_path)), 2))


@pytest.mark.parametrize("num_classes", [-1, 0, 1])
def test_fewer_than_two_classes_are_refused(num_classes: int) -> None:
    with pytest.raises(ConfigError, match=f"^scenario.dataset.num_classes: {num_classes} is below 2$"):
        Arrays("mine.npz", num_classes)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "nothing.npz"
    assert message_of(Arrays(str(path))) == f"scenario.dataset.path: {path}: no such file"


@contextmanager
def leaving_no_file_open() -> Iterator[None]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ResourceWarning)
        yield
        gc.collect()
    assert not caught


def npy() -> bytes:
    np.save(file := io.BytesIO(), np.zeros(3))
    return file.getvalue()


@pytest.mark.parametrize(
    "content",
    [b"", b"hello\nworld", npy(), pickle.dumps([1, 2]), b"PK\x03\x04"],
    ids=["empty", "text", "npy", "pickle", "zip"],
)
def test_what_is_no_npz_file_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "mine.npz"
    path.write_bytes(content)
    with leaving_no_file_open():
        message = message_of(Arrays(str(path)))
    assert message.startswith(f"scenario.dataset.path: {path}: not a readable .npz file (")
    assert message.endswith("Write it with numpy.savez")


def test_a_folder_is_no_npz_file(tmp_path: Path) -> None:
    assert "is a folder, it needs to be a file" in message_of(Arrays(str(tmp_path)))


class Trap:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_pickled_objects_in_an_npz_file_are_not_run(tmp_path: Path) -> None:
    path = saved(tmp_path, y_train=np.array([Trap(tmp_path / "sprung")] * 6))
    message_of(Arrays(str(path)))
    path.write_bytes(pickle.dumps(Trap(tmp_path / "sprung")))
    message_of(Arrays(str(path)))
    assert not (tmp_path / "sprung").exists()


@pytest.mark.thorough
@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_an_npz_file_cut_short_anywhere_is_refused(save: Any, tmp_path: Path) -> None:
    path = saved(tmp_path, save)
    content = path.read_bytes()
    with leaving_no_file_open():
        for size in (*range(0, len(content), 7), len(content) - 1):
            path.write_bytes(content[:size])
            assert "not a readable .npz file" in message_of(Arrays(str(path)))


@pytest.mark.thorough
@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_a_flipped_bit_in_an_npz_file_is_refused_or_harmless(save: Any, tmp_path: Path) -> None:
    path = saved(tmp_path, save)
    content = path.read_bytes()
    with leaving_no_file_open():
        for place in range(0, len(content), 3):
            spoilt = bytearray(content)
            spoilt[place] ^= 1 << place % 8
            path.write_bytes(spoilt)
            with suppress(ConfigError):
                data = Arrays(str(path)).load()
                assert all(np.array_equal(getattr(data, name).numpy(), values) for name, values in good().items())


# --- The real files ---


@pytest.mark.skipif("FL_LIGHTNING_DATA" not in os.environ, reason="FL_LIGHTNING_DATA names no folder with the data")
@pytest.mark.parametrize(
    ("dataset", "counts"),
    [
        (MNIST, [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]),
        (FashionMNIST, [6000] * 10),
    ],
)
def test_the_real_files_hold_what_their_authors_say(dataset: type, counts: list[int]) -> None:
    data = dataset(os.environ["FL_LIGHTNING_DATA"]).load()
    assert data.x_train.shape == (60_000, 1, 28, 28)
    assert data.x_test.shape == (10_000, 1, 28, 28)
    assert data.y_train.bincount().tolist() == counts
    prepared = data.prepare(data.x_train)
    assert prepared.mean().abs() < 2e-4  # mean and std are given to four digits
    assert (prepared.std() - 1).abs() < 2e-4
