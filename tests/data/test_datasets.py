"""scikit-learn's digits, the dataset of the docs, and `Arrays` from `.npz` files."""

import gc
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from refusals import check_refused
from sklearn.datasets import load_digits

from fl_lightning.data import Arrays, Digits


def test_digits_are_scikit_learns_with_every_fifth_held_out() -> None:
    source = load_digits()
    data = Digits().load()
    held_out = np.arange(1797) % 5 == 0
    for x, y, chosen in ((data.x_train, data.y_train, ~held_out), (data.x_test, data.y_test, held_out)):
        assert x.dtype == torch.float32
        assert np.array_equal(x.numpy()[:, 0] * 16, source.images[chosen])
        assert np.array_equal(y.numpy(), source.target[chosen])
    assert (data.in_shape, data.num_classes, data.augment) == ((1, 8, 8), 10, None)
    assert torch.equal(data.prepare(data.x_test), data.x_test)


# --- Arrays ---


def valid_arrays() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {
        "x_train": rng.random((6, 4), dtype=np.float32),
        "y_train": np.array([0, 1, 2, 0, 1, 2]),
        "x_test": rng.random((3, 4), dtype=np.float32),
        "y_test": np.array([2, 0, 1]),
    }


def save(tmp_path: Path, write: Any = np.savez, **changed: Any) -> Path:
    path = tmp_path / "mine.npz"
    write(path, **{name: value for name, value in {**valid_arrays(), **changed}.items() if value is not None})
    return path


def test_arrays_are_loaded_as_they_were_saved(tmp_path: Path) -> None:
    data = Arrays(str(save(tmp_path, np.savez_compressed))).load()
    for name, values in valid_arrays().items():
        assert np.array_equal(getattr(data, name).numpy(), values)
    assert (data.in_shape, data.num_classes, data.augment) == ((4,), 3, None)
    assert torch.equal(data.prepare(data.x_test), data.x_test)


@pytest.mark.parametrize(
    ("shape", "axes", "in_shape"),
    [
        ((5, 7), None, (1, 5, 7)),
        ((5, 7, 1), (0, 3, 1, 2), (1, 5, 7)),
        ((5, 7, 3), (0, 3, 1, 2), (3, 5, 7)),
        ((1, 5, 3), (0, 1, 2, 3), (1, 5, 3)),
        ((5, 7, 4), (0, 1, 2, 3), (5, 7, 4)),
    ],
)
def test_images_are_converted_to_channels_first(
    shape: tuple[int, ...], axes: tuple[int, ...] | None, in_shape: tuple[int, ...], tmp_path: Path
) -> None:
    rng = np.random.default_rng(1)
    x = {name: rng.integers(0, 256, (n, *shape), dtype=np.uint8) for name, n in (("x_train", 6), ("x_test", 3))}
    data = Arrays(str(save(tmp_path, **x))).load()
    assert data.in_shape == in_shape
    for name, values in x.items():
        expected = values[:, None] if axes is None else values.transpose(axes)
        assert np.array_equal(getattr(data, name).numpy(), expected)
    assert torch.equal(data.prepare(data.x_test), data.x_test.float() / 255)


@pytest.mark.parametrize("dtype", ["float16", "float64", ">f4"])
def test_floating_point_inputs_become_float32(dtype: str, tmp_path: Path) -> None:
    x = valid_arrays()["x_train"].astype(dtype)
    data = Arrays(str(save(tmp_path, x_train=x))).load()
    assert data.x_train.dtype == torch.float32
    assert np.array_equal(data.x_train.numpy(), x.astype(np.float32))


@pytest.mark.parametrize("dtype", ["uint16", "int32", ">i8"])
def test_integer_inputs_become_int64_and_are_not_scaled(dtype: str, tmp_path: Path) -> None:
    x = np.arange(24).reshape(6, 4)
    data = Arrays(str(save(tmp_path, x_train=x.astype(dtype), x_test=x[:3].astype(dtype)))).checked()
    assert data.x_train.dtype == data.x_test.dtype == torch.int64
    assert data.prepare(data.x_train).tolist() == x.tolist()


@pytest.mark.parametrize("dtype", ["uint8", "uint64", ">i8"])
def test_labels_of_any_integer_type_become_int64(dtype: str, tmp_path: Path) -> None:
    data = Arrays(str(save(tmp_path, y_train=valid_arrays()["y_train"].astype(dtype)))).load()
    assert data.y_train.dtype == torch.int64
    assert data.y_train.tolist() == [0, 1, 2, 0, 1, 2]


def test_a_label_beyond_the_number_of_samples_needs_num_classes(tmp_path: Path) -> None:
    assert Arrays(str(save(tmp_path, y_test=np.array([0, 8, 0])))).load().num_classes == 9  # of 9 samples
    path = str(save(tmp_path, y_test=np.array([0, 9, 0])))
    check_refused(Arrays(path), "dataset.path", f": {path}: label 9 in 9 samples", "scenario.dataset.num_classes")
    assert Arrays(path, num_classes=12).load().num_classes == 12


BAD_ARRAYS = {
    "missing": ({"x_train": None, "y_test": None}, "has no x_train, y_test"),
    "objects": ({"y_train": np.array([None] * 6)}, "Object arrays cannot be loaded"),
    "float labels": ({"y_train": np.arange(6.0)}, "y_test needs float32 numbers"),
    "text labels": ({"y_train": np.array(list("abcabc"))}, "y_train holds text"),
    "complex labels": ({"y_train": np.full(6, 1j)}, "got complex128"),
    "complex inputs": ({"x_test": np.full((3, 4), 1j)}, "x_test is complex128"),
    "complex clients": ({"client_train": np.full(6, 1j)}, "client_train needs one id per sample"),
    "too large for float32": ({"x_train": np.full((6, 4), 1e300)}, "x_train holds NaN or Inf"),
    "integer inputs": ({"x_train": np.ones((6, 4), int)}, "x_train and x_test need the same dtype"),
    "integer images": ({"x_train": np.ones((6, 4, 4), int)}, "int64 of shape (6, "),
    "negative integers": ({"x_train": np.full((6, 4), -1)}, "x_train holds -1"),
    "scalar": ({"x_train": np.float32(1)}, "x_train has shape ()"),
}


@pytest.mark.parametrize("case", BAD_ARRAYS)
def test_bad_arrays_are_refused_by_name(case: str, tmp_path: Path) -> None:
    changed, reason = BAD_ARRAYS[case]
    path = save(tmp_path, **changed)
    check_refused(Arrays(str(path)), "dataset.path", f": {path}: ", reason)


def test_num_classes_is_checked(tmp_path: Path) -> None:
    check_refused(Arrays(str(save(tmp_path)), 2), "dataset.path", "label 2,", "num_classes 2")
    check_refused(lambda: Arrays("mine.npz", 1), "dataset.num_classes", ": 1 ")


@contextmanager
def all_files_closed() -> Iterator[None]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ResourceWarning)
        yield
        gc.collect()
    assert not caught


def test_a_truncated_npz_file_is_refused_and_closed(tmp_path: Path) -> None:
    path = save(tmp_path)
    content = path.read_bytes()
    with all_files_closed():
        for size in (*range(0, len(content), 97), len(content) - 1):
            path.write_bytes(content[:size])
            check_refused(Arrays(str(path)), "dataset.path", f": {path}: not a readable .npz file (")
