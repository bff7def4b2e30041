"""Custom data: image folders, tables, texts, Hugging Face and torch datasets, and mapped arrays."""

import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import torchvision
import yaml
from commands import TINY, run, tiny, untimed_rows
from layouts import (
    Pairs,
    images,
    save_arrays,
    save_dataset,
    table,
    write_csv,
    write_hugging_face,
    write_image_folder,
    write_table,
    write_text_table,
)
from PIL import Image
from refusals import check_refused, refusal
from torchvision.transforms.functional import pil_to_tensor

from fl_lightning.data import (
    IID,
    Arrays,
    HuggingFace,
    ImageFolder,
    LoadedData,
    Scenario,
    Table,
    TextTable,
    TorchDataset,
)
from fl_lightning.data.custom_data import hold_out
from fl_lightning.data.text import Vocabulary, split_words


def rows(data: LoadedData, split: str) -> list[tuple[bytes, int]]:
    """Return the samples of a split in a form that can be compared."""
    x, y = getattr(data, f"x_{split}"), getattr(data, f"y_{split}")
    return [(one.contiguous().numpy().tobytes(), int(label)) for one, label in zip(x, y, strict=True)]


# --- A share held out ------------------------------------------------------------------------------------------------


def test_a_share_is_held_out_of_each_class() -> None:
    y = torch.tensor([0] * 50 + [1] * 30 + [2] * 20)
    mask = hold_out(y, 0.2)
    assert Counter(y[mask].tolist()) == {0: 10, 1: 6, 2: 4}
    assert np.array_equal(mask, hold_out(y, 0.2))
    assert not np.array_equal(np.flatnonzero(mask)[:10], np.arange(10))  # drawn, not the first


def test_with_clients_a_share_of_each_client_is_held_out() -> None:
    client = np.array(["a"] * 20 + ["b"] * 10 + ["c"])
    y = torch.tensor(([0] * 10 + [1] * 10) + [0] * 10 + [1])
    mask = hold_out(y, 0.3, client)
    assert Counter(client[mask].tolist()) == {"a": 6, "b": 3}
    assert Counter(y[mask][: len(y[mask]) - 3].tolist()) == {0: 3, 1: 3}


def test_numbers_and_multi_label_targets_are_held_out_without_classes() -> None:
    assert hold_out(torch.randn(30), 0.1).sum() == 3
    assert hold_out(torch.zeros(30, 4, dtype=torch.uint8), 0.5).sum() == 15


def test_the_held_out_samples_are_the_same_for_every_seed(tmp_path: Path) -> None:
    write_image_folder(tmp_path, ("",))
    one, other = (Scenario(ImageFolder(str(tmp_path)), IID(), 2).build(seed).digest() for seed in (1, 2))
    assert [name for name in one if one[name] != other[name]] == ["partition"]


# --- Image folders ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("second", ["test", "val"])
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_images_equal_those_of_torchvisions_image_folder(mode: str, second: str, tmp_path: Path) -> None:
    written = write_image_folder(tmp_path, ("train", second), mode)
    data = ImageFolder(str(tmp_path)).checked()
    assert data.in_shape == (3 if mode == "RGB" else 1, 8, 6)
    for split, name in (("train", "train"), ("test", second)):
        theirs = torchvision.datasets.ImageFolder(str(tmp_path / name))
        expected = [(pil_to_tensor(x.convert(mode)).numpy().tobytes(), y) for x, y in theirs]
        assert rows(data, split) == expected
        assert np.array_equal(getattr(data, f"x_{split}"), written[name].x)
    assert data.num_classes == 2
    assert data.augment is None


def test_images_are_normalized_by_the_training_images(tmp_path: Path) -> None:
    written = write_image_folder(tmp_path)
    data = ImageFolder(str(tmp_path)).checked()
    pixels = written["train"].x / 255
    ready = data.prepare(data.x_test)
    axes = (0, 2, 3)
    mean, std = pixels.mean(axis=axes, keepdims=True), pixels.std(axis=axes, keepdims=True)
    assert np.allclose(ready.numpy(), (written["test"].x / 255 - mean) / std, atol=1e-5)
    given = ImageFolder(str(tmp_path), mean=[0.5, 0.4, 0.3], std=[0.2, 0.1, 0.5]).checked()
    assert torch.allclose(given.prepare(given.x_test)[:, 1], (given.x_test[:, 1] / 255 - 0.4) / 0.1, atol=1e-5)


def write_same_image(
    root: Path, image: Image.Image, classes: tuple[str, ...] = ("a", "b"), ending: str = "png", **options: Any
) -> None:
    """Write five copies of an image per class."""
    for path in (root / name / f"{i}.{ending}" for name in classes for i in range(5)):
        path.parent.mkdir(exist_ok=True)
        image.save(path, **options)


def test_images_of_one_colour_are_not_divided_by_zero(tmp_path: Path) -> None:
    write_same_image(tmp_path, Image.new("L", (4, 4), 7))
    data = ImageFolder(str(tmp_path)).checked()
    assert data.prepare(data.x_test).abs().max() == 0


def test_a_class_can_be_named_train(tmp_path: Path) -> None:
    write_same_image(tmp_path, Image.new("L", (4, 4)), ("bus", "train"))
    assert ImageFolder(str(tmp_path)).checked().num_classes == 2


def test_images_are_resized_to_the_given_size(tmp_path: Path) -> None:
    written = write_image_folder(tmp_path)
    odd = tmp_path / "train" / "cat" / "zz.png"
    Image.new("RGB", (20, 10), (10, 20, 30)).save(odd)
    data = ImageFolder(str(tmp_path), size=(8, 6)).checked()
    assert data.in_shape == (3, 8, 6)
    assert np.array_equal(data.x_test, written["test"].x)  # of that size already
    assert (data.x_train[10] == torch.tensor([10, 20, 30]).view(3, 1, 1)).all()
    assert ImageFolder(str(tmp_path), size=5).checked().in_shape == (3, 5, 5)
    small = ImageFolder(str(tmp_path), size=4).checked().x_test[0]
    by_pillow = Image.fromarray(written["test"].x[0].transpose(1, 2, 0)).resize((4, 4), Image.Resampling.BILINEAR)
    assert np.array_equal(small, np.asarray(by_pillow).transpose(2, 0, 1))


def test_grey_and_colour_images_together_become_colour_images(tmp_path: Path) -> None:
    write_image_folder(tmp_path, mode="L")
    Image.new("RGB", (6, 8), (200, 0, 0)).save(tmp_path / "test" / "cat" / "zz.png")
    assert ImageFolder(str(tmp_path)).checked().in_shape == (3, 8, 6)
    grey = ImageFolder(str(tmp_path), channels=1).checked()
    assert grey.in_shape == (1, 8, 6)
    assert grey.x_test[10].unique().tolist() == [60]  # 0.299 of 200
    with_alpha = Image.new("RGBA", (6, 8), (1, 2, 3, 0))
    with_alpha.save(tmp_path / "test" / "cat" / "zzz.png")
    with_alpha.quantize(4).save(tmp_path / "test" / "cat" / "zzzz.png", transparency=b"\x00\x80")
    assert ImageFolder(str(tmp_path)).checked().x_test[11, :, 0, 0].tolist() == [1, 2, 3]


def test_images_are_rotated_by_their_exif_orientation(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    image = Image.new("L", (16, 8))
    image.paste(255, (0, 0, 8, 8))  # bright on the left
    write_same_image(tmp_path, image, ending="jpg", exif=exif, quality=100)
    data = ImageFolder(str(tmp_path)).checked()
    assert data.in_shape == (1, 16, 8)
    assert data.x_train[0, 0, 2, 4] > 250  # bright above
    assert data.x_train[0, 0, 13, 4] < 5


@pytest.mark.parametrize("ending", ["jpg", "gif", "webp"])
def test_common_formats_are_read(ending: str, tmp_path: Path) -> None:
    write_image_folder(tmp_path, ending=ending)
    assert ImageFolder(str(tmp_path)).checked().in_shape == (3, 8, 6)


def test_a_cache_has_the_same_images_and_is_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_image_folder(tmp_path / "images", ("",))
    cache = tmp_path / "a" / "cache"
    plain = ImageFolder(str(tmp_path / "images")).checked()
    first = ImageFolder(str(tmp_path / "images"), cache=str(cache)).checked()
    (file,) = cache.iterdir()
    written = file.stat().st_mtime_ns
    monkeypatch.setattr(Image, "open", None)  # no image is opened any more
    again = ImageFolder(str(tmp_path / "images"), cache=str(cache)).checked()
    assert file.stat().st_mtime_ns == written
    for data in (first, again):
        for split in ("train", "test"):
            assert rows(data, split) == rows(plain, split)
    assert again.x_train.untyped_storage().data_ptr() == again.x_test.untyped_storage().data_ptr()  # one file, no copy


def test_changed_images_or_options_get_another_cache(tmp_path: Path) -> None:
    write_image_folder(tmp_path / "images", ("",))
    cache, path = tmp_path / "cache", str(tmp_path / "images")
    ImageFolder(path, cache=str(cache)).checked()
    ImageFolder(path, cache=str(cache), size=4).checked()
    ImageFolder(path, cache=str(cache), channels=1).checked()
    ImageFolder(path, cache=str(cache), test_share=0.5).checked()
    assert len(list(cache.iterdir())) == 4
    Image.new("RGB", (6, 8), (1, 2, 3)).save(tmp_path / "images" / "cat" / "000.png")
    changed = ImageFolder(path, cache=str(cache)).checked()
    assert rows(changed, "train") == rows(ImageFolder(path).checked(), "train")


# --- Arrays ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(8, 8, 3), (8, 8)])
@pytest.mark.parametrize("dtype", [np.uint8, np.float64])
def test_a_folder_of_npy_files_equals_an_npz_file(shape: tuple[int, ...], dtype: type, tmp_path: Path) -> None:
    x = {name: images(n, *shape).astype(dtype) for name, n in (("x_train", 20), ("x_test", 6))}
    save_arrays(tmp_path / "a", shape, **x)
    one, other = (Scenario(Arrays(str(tmp_path / name)), IID(), 2).build(0) for name in ("a", "a.npz"))
    assert one.digest() == other.digest()
    index = torch.tensor([5, 0, 19])
    batches = [next(iter(each.data.cut(each.data.x_train, each.data.y_train, index, 3, 0, 1))) for each in (one, other)]
    assert torch.equal(batches[0][0], batches[1][0])


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_mapped_arrays_stay_on_disk_and_are_never_changed(dtype: type, tmp_path: Path) -> None:
    x = images(20, 8, 6, 3).astype(dtype)
    save_arrays(tmp_path / "a", x_train=x, x_test=x[:6])
    data = Arrays(str(tmp_path / "a")).checked()
    assert np.array_equal(data.x_train, x.transpose(0, 3, 1, 2))
    file = tmp_path / "a" / "x_train.npy"
    np.lib.format.open_memmap(file, mode="r+")[-1, -1, -1, -1] = 77  # in place, which a mapping shows
    assert data.x_train[-1, -1, -1, -1] == 77
    content = file.read_bytes()
    data.x_train[0] = 9
    assert file.read_bytes() == content


@pytest.mark.parametrize("path", ["a", "a.npz"])
def test_arrays_can_have_client_ids(path: str, tmp_path: Path) -> None:
    clients = {"client_train": np.array([f"u{i % 4}" for i in range(20)]), "client_test": np.array(["u0"] * 6)}
    save_arrays(tmp_path / "a", **clients)
    data = Arrays(str(tmp_path / path)).checked()
    for name, ids in clients.items():
        assert getattr(data, name).tolist() == ids.tolist()


@pytest.mark.parametrize(
    ("train", "test", "dtype", "outputs"),
    [
        (np.arange(20) / 3, np.arange(6) / 3, torch.float32, 1),
        (np.ones((20, 4), bool), np.ones((6, 4), bool), torch.uint8, 4),
        (np.ones((20, 4), np.int32), np.ones((6, 4), np.int32), torch.int64, 4),
    ],
)
def test_labels_of_arrays_can_be_numbers_or_multi_label_targets(
    train: np.ndarray, test: np.ndarray, dtype: torch.dtype, outputs: int, tmp_path: Path
) -> None:
    save_arrays(tmp_path / "a", y_train=train, y_test=test)
    for path in ("a", "a.npz"):
        data = Arrays(str(tmp_path / path)).load()
        assert (data.y_train.dtype, data.y_test.dtype, data.num_classes) == (dtype, dtype, outputs)
        assert np.allclose(data.y_train.numpy(), train)


def save_several(folder: Path, **changes: np.ndarray) -> dict[str, np.ndarray]:
    """Write a folder and an `.npz` file with a scan, an age, a mask and the words of each sample."""
    arrays = {"y_train": np.arange(20) % 3, "y_test": np.arange(6) % 3}
    for split, n in (("train", 20), ("test", 6)):
        inputs = {"scan": images(n, 5, 4, 3), "age": np.linspace(0, 1, n), "mask": np.eye(n, 7) > 0}
        inputs["words"] = np.arange(n * 7, dtype=np.int16).reshape(n, 7)
        arrays |= {f"x_{split}_{name}": values for name, values in inputs.items()}
    arrays |= changes
    folder.mkdir()
    for name, values in arrays.items():
        np.save(folder / f"{name}.npy", values)
    np.savez(folder.with_suffix(".npz"), **arrays)
    return arrays


@pytest.mark.parametrize("path", ["a", "a.npz"])
def test_arrays_can_have_several_inputs(path: str, tmp_path: Path) -> None:
    arrays = save_several(tmp_path / "a", x_test_unused=np.zeros(6))
    data = Arrays(str(tmp_path / path)).checked()
    dtypes = {"age": torch.float32, "mask": torch.bool, "scan": torch.uint8, "words": torch.int64}
    for split in ("train", "test"):
        inputs = dict(getattr(data, f"x_{split}").items())
        assert {name: x.dtype for name, x in inputs.items()} == dtypes
        for name, x in inputs.items():
            np.testing.assert_allclose(x.numpy(), arrays[f"x_{split}_{name}"], rtol=1e-6)
    assert data.in_shape == {"age": (), "mask": (7,), "scan": (5, 4, 3), "words": (7,)}


@pytest.mark.parametrize(("path", "ending"), [("a", ".npy"), ("a.npz", "")])
def test_several_inputs_need_the_same_names_for_testing(path: str, ending: str, tmp_path: Path) -> None:
    save_several(tmp_path / "a", x_train_site=np.zeros(20))
    message = refusal(lambda: Arrays(str(tmp_path / path)))
    assert re.search(rf"{path}: (has no|is a folder, .* contain) x_test_site{ending}\. ", message)


# --- Tables ----------------------------------------------------------------------------------------------------------


def expected_inputs(columns: dict[str, list], train: list[int]) -> np.ndarray:
    """Compute by hand: standardized age and income, and the towns of the training rows one-hot encoded."""
    parts = []
    for name in ("age", "income"):
        values = np.array(columns[name], float)
        parts.append(((values - values[train].mean()) / values[train].std())[:, None])
    towns = sorted({columns["town"][i] for i in train})
    parts.append(np.array([[town == one for one in towns] for town in columns["town"]], float))
    return np.concatenate(parts, axis=1)


@pytest.mark.parametrize("ending", ["csv", "parquet", "tsv"])
def test_a_table_has_scaled_numbers_and_one_hot_categories(ending: str, tmp_path: Path) -> None:
    columns = table() | {"part": ["test" if i % 4 == 3 else "train" for i in range(40)]}
    path = tmp_path / f"t.{ending}"
    if ending == "parquet":
        pytest.importorskip("pyarrow")
        pd.DataFrame(columns).to_parquet(path)
    else:
        write_csv(path, columns, "," if ending == "csv" else "\t")
    separator = "\t" if ending == "tsv" else ","
    features = ["age", "income", "town"]
    data = Table(str(path), "label", features, client="clinic", split="part", separator=separator).checked()
    train, test = ([i for i in range(40) if (columns["part"][i] == part)] for part in ("train", "test"))
    expected = expected_inputs(columns, train)
    for split, index in (("train", train), ("test", test)):
        x, client = getattr(data, f"x_{split}"), getattr(data, f"client_{split}")
        assert np.allclose(x.numpy(), expected[index], atol=1e-6)
        assert getattr(data, f"y_{split}").tolist() == [int(columns["label"][i] == "yes") for i in index]
        assert client.tolist() == [columns["clinic"][i] for i in index]
    assert data.num_classes == 2
    assert torch.equal(data.prepare(data.x_test), data.x_test)


def test_columns_that_no_option_names_are_features(tmp_path: Path) -> None:
    frame = pd.DataFrame(table()).drop(columns=["flu", "cold", "days"])
    frame.to_csv(tmp_path / "t.csv")  # with the row's number, in a column without a name
    assert Table(str(tmp_path / "t.csv"), "label", client="clinic").checked().in_shape == (5,)
    assert Table(str(tmp_path / "t.csv"), "label").checked().in_shape == (9,)
    assert Table(str(tmp_path / "t.csv"), "label", ["Unnamed: 0"]).checked().in_shape == (1,)


def test_scales_and_categories_are_those_of_the_training_file(tmp_path: Path) -> None:
    columns, test = table(), table(20, seed=1)
    test["town"][0] = "Zug"
    write_csv(tmp_path / "train.csv", columns)
    write_csv(tmp_path / "test.csv", dict(reversed(test.items())))  # the order of columns does not matter
    paths = {"path": str(tmp_path / "train.csv"), "test_path": str(tmp_path / "test.csv")}
    data = Table(label="label", features=["age", "income", "town"], **paths).checked()
    assert (len(data.x_train), len(data.x_test)) == (40, 20)
    both = {name: values + test[name] for name, values in columns.items()}
    expected = expected_inputs(both, list(range(40)))
    assert np.allclose(data.x_test.numpy(), expected[40:], atol=1e-6)
    assert data.x_test[0, 2:].tolist() == [0, 0, 0]
    codes = Table(label="label", features=["town"], encoding="codes", standardize=False, **paths).checked()
    assert codes.x_test[:3, 0].tolist() == [0, 1, 3]
    assert codes.x_train[:3, 0].tolist() == [2, 1, 3]  # Basel, Bern, Chur


def test_numbers_can_be_left_unscaled_or_be_categories(tmp_path: Path) -> None:
    columns = {"code": [10, 9, 10, 9, 8] * 4, "same": [0.1] * 20, "label": [0, 1] * 10}
    write_csv(tmp_path / "t.csv", columns)
    plain = Table(str(tmp_path / "t.csv"), "label", standardize=False).checked()
    assert set(plain.x_train[:, 0].tolist()) == {8, 9, 10}
    assert plain.x_train[:, 1].unique().tolist() == [np.float32(0.1)]
    scaled = Table(str(tmp_path / "t.csv"), "label").checked()
    assert scaled.x_train[:, 1].abs().max() < 1e-6  # all alike
    spread = Table(str(tmp_path / "t.csv"), "label", ["code"], categorical=["code"]).checked()
    assert spread.in_shape == (3,)
    codes = Table(
        str(tmp_path / "t.csv"), "label", ["code"], categorical=["code"], encoding="codes", standardize=False
    ).checked()
    assert (plain.x_train[:, 0] - codes.x_train[:, 0]).unique().tolist() == [7]  # by size: 8, 9, 10 are 1, 2, 3


def test_large_numbers_are_scaled_in_float64(tmp_path: Path) -> None:
    write_csv(tmp_path / "t.csv", {"seconds": [1_700_000_000 + i for i in range(20)], "label": [0, 1] * 10})
    data = Table(str(tmp_path / "t.csv"), "label").checked()
    assert len(torch.cat([data.x_train, data.x_test]).unique()) == 20


@pytest.mark.parametrize(
    ("label", "options", "dtype", "outputs"),
    [
        ("label", {}, torch.int64, 2),
        ("days", {}, torch.float32, 1),
        ("age", {"regression": True}, torch.float32, 1),
        ("age", {"regression": False}, torch.int64, None),
        (["flu", "cold"], {}, torch.uint8, 2),
        (["flu", "cold"], {"regression": True}, torch.float32, 2),
    ],
)
def test_the_kind_of_labels_follows_their_dtype_or_the_option(
    label: Any, options: dict, dtype: torch.dtype, outputs: int | None, tmp_path: Path
) -> None:
    columns = write_table(tmp_path / "t.csv")
    features = ["income", "town"]
    data = Table(str(tmp_path / "t.csv"), label, features, **options).load()
    assert data.y_train.dtype == data.y_test.dtype == dtype
    assert data.num_classes == (outputs or len(set(columns["age"])))
    names = [label] if isinstance(label, str) else label
    if outputs and label != "label":
        by_hand = Counter(zip(*(np.float32(columns[name]).tolist() for name in names), strict=True))
        y = torch.cat([data.y_train, data.y_test]).float()
        assert Counter(map(tuple, y.reshape(40, -1).tolist())) == by_hand
    assert data.y_train.shape[1:] == (() if isinstance(label, str) else (2,))


def test_input_label_and_client_of_a_row_stay_together(tmp_path: Path) -> None:
    columns = {"x": list(range(60)), "label": [i // 20 for i in range(60)], "who": [1000 + i // 10 for i in range(60)]}
    write_csv(tmp_path / "t.csv", columns)
    for options in ({}, {"client": "who"}):
        data = Table(str(tmp_path / "t.csv"), "label", ["x"], standardize=False, **options).checked()
        for split in ("train", "test"):
            x, y = (getattr(data, f"{name}_{split}") for name in "xy")
            assert (x[:, 0].long() // 20 == y).all()
            client = getattr(data, f"client_{split}")
            assert client is None if not options else (client == 1000 + x[:, 0].long().numpy() // 10).all()
    assert Counter(data.client_test.tolist()) == dict.fromkeys(range(1000, 1006), 2)


# --- Texts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_texts_become_token_ids_of_the_training_vocabulary(ending: str, tmp_path: Path) -> None:
    columns = write_text_table(tmp_path / "texts.csv")
    path = tmp_path / f"texts.{ending}"
    if ending == "parquet":
        pytest.importorskip("pyarrow")
        pd.DataFrame(columns).to_parquet(path)
    data = TextTable(str(path), client="author", length=6, vocab_size=12).checked()
    assert data.in_shape == (6,)
    by_text = dict(zip(columns["text"], zip(columns["label"], columns["author"], strict=True), strict=True))
    names = ["bad", "good"]
    test = hold_out(torch.tensor([names.index(one) for one in columns["label"]]), 0.2, np.array(columns["author"]))
    vocabulary = Vocabulary(np.array(columns["text"])[~test].tolist(), 12)
    for split, mask in (("train", ~test), ("test", test)):
        texts = np.array(columns["text"])[mask].tolist()
        assert torch.equal(getattr(data, f"x_{split}"), vocabulary.encode(texts, 6))
        assert getattr(data, f"y_{split}").tolist() == [names.index(by_text[text][0]) for text in texts]
        assert getattr(data, f"client_{split}").tolist() == [by_text[text][1] for text in texts]
    assert split_words("a good film, number 7") == ["a", "good", "film", "number", "7"]


def test_a_text_without_a_word_is_one_unknown_token(tmp_path: Path) -> None:
    write_csv(tmp_path / "t.csv", {"text": ["a b", "\U0001f600", "...", "b"] * 10, "label": [0, 1] * 20})
    data = TextTable(str(tmp_path / "t.csv"), length=3).checked()
    inputs = torch.cat([data.x_train, data.x_test])
    assert sorted(map(tuple, inputs.unique(dim=0).tolist())) == [(1, 0, 0), (2, 0, 0), (3, 2, 0)]


# --- Hugging Face ----------------------------------------------------------------------------------------------------


def test_a_saved_image_dataset_is_read_as_written(tmp_path: Path, library: Any) -> None:
    written = write_hugging_face(tmp_path / "saved")
    data = HuggingFace(str(tmp_path / "saved")).checked()
    pairs = [(x.tobytes(), y) for x, y in zip(np.ascontiguousarray(written.x), written.y, strict=True)]
    assert Counter(rows(data, "train") + rows(data, "test")) == Counter(pairs)
    assert Counter(data.y_test.tolist()) == {0: 4, 1: 4}
    assert data.num_classes == 2
    assert abs(float(data.prepare(data.x_train).mean())) < 1e-5
    assert HuggingFace(str(tmp_path / "saved"), size=5, channels=1).checked().in_shape == (1, 5, 5)


def save_splits(library: Any, path: Path, **splits: dict[str, list]) -> str:
    datasets = {name: library.Dataset.from_dict(columns) for name, columns in splits.items()}
    library.DatasetDict(datasets).save_to_disk(str(path))
    return str(path)


def texts(n: int = 20, mood: str = "good") -> dict[str, list]:
    stars, labels = [i % 3 for i in range(n)], ["a", "b"] * (n // 2)
    return {"review": [f"{mood} {i}" for i in range(n)], "stars": stars, "label": labels}


@pytest.mark.parametrize(
    ("splits", "options", "sizes"),
    [
        (("train", "test", "validation"), {}, (20, 10)),
        (("train", "extra"), {}, (16, 4)),
        (("train", "extra"), {"test": "extra"}, (20, 10)),
        (("test", "extra"), {"train": "extra"}, (10, 20)),
    ],
)
def test_splits_have_defaults_or_names(splits: Any, options: Any, sizes: Any, tmp_path: Path, library: Any) -> None:
    first, *others = splits
    path = save_splits(library, tmp_path / "s", **{first: texts()}, **{name: texts(10, "fair") for name in others})
    data = HuggingFace(path, **options).checked()
    assert (len(data.y_train), len(data.y_test)) == sizes


def test_columns_of_texts_labels_and_clients_are_read(tmp_path: Path, library: Any) -> None:
    both = texts() | {"writer": [f"w{i % 4}" for i in range(20)]}
    path = save_splits(library, tmp_path / "s", train=both, test=both)
    data = HuggingFace(path, text="review", client="writer", length=3).checked()
    assert torch.equal(data.x_train, Vocabulary(both["review"], 10_000).encode(both["review"], 3))
    assert data.client_train.tolist() == data.client_test.tolist() == both["writer"]
    assert data.y_train.tolist() == [0, 1] * 10
    assert HuggingFace(path, text="review", label="stars").checked().num_classes == 3
    numbers = HuggingFace(path, text="review", label="stars", regression=True).load()
    assert numbers.y_train.tolist() == both["stars"]
    assert numbers.y_train.dtype == torch.float32


def test_a_column_named_text_is_preferred(tmp_path: Path, library: Any) -> None:
    both = texts() | {"text": ["a b"] * 20}
    path = save_splits(library, tmp_path / "s", train=both, test=both)
    assert (HuggingFace(path, length=2).checked().x_train == torch.tensor([2, 3])).all()


def test_lists_of_classes_are_multi_label_targets(tmp_path: Path, library: Any) -> None:
    classes = [[0, 2], [], [1], [2, 1]] * 5
    kind = library.ClassLabel(names=["x", "y", "z"])
    features = library.Features(text=library.Value("string"), feelings=library.Sequence(kind))
    made = library.Dataset.from_dict({"text": ["a b"] * 20, "feelings": classes}, features=features)
    data = HuggingFace(save_dataset(tmp_path / "s", made, made)).load()
    assert data.y_train.tolist() == [[int(j in row) for j in range(3)] for row in classes]
    assert (data.y_train.dtype, data.num_classes) == (torch.uint8, 3)


def test_images_in_separate_files_are_read(tmp_path: Path, library: Any) -> None:
    x = images(4, 5, 5, 3)
    for i, pixels in enumerate(x):
        Image.fromarray(pixels).save(tmp_path / f"{i}.png")
    features = library.Features(image=library.Image(), label=library.ClassLabel(names=["a", "b"]))
    rows_ = {"image": [str(tmp_path / f"{i}.png") for i in range(4)], "label": [0, 1, 0, 1]}
    made = library.Dataset.from_dict(rows_, features=features).with_format("torch")
    data = HuggingFace(save_dataset(tmp_path / "s", made, made)).checked()
    assert np.array_equal(data.x_train, x.transpose(0, 3, 1, 2))


def test_a_dataset_is_downloaded_only_with_download(
    tmp_path: Path, library: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def load_dataset(*words: Any, **options: Any) -> Any:
        calls.append((words, options))
        return library.DatasetDict(train=library.Dataset.from_dict(texts()))

    monkeypatch.setattr(library, "load_dataset", load_dataset)
    monkeypatch.chdir(tmp_path)
    check_refused(lambda: HuggingFace("stanfordnlp/imdb"), "dataset.path", ": stanfordnlp/imdb: no such folder")
    assert not calls
    assert HuggingFace("stanfordnlp/imdb", subset="plain", text="review", download=True).checked().num_classes == 2
    assert calls == [(("stanfordnlp/imdb", "plain"), {})]


# --- Torch datasets -------------------------------------------------------------------------------------------------


def test_items_of_torch_datasets_are_read_in_order() -> None:
    data = TorchDataset(Pairs(), Pairs(5)).checked()
    assert data.x_train.tolist() == [[float(i)] * 4 for i in range(20)]
    assert data.y_test.tolist() == [0, 1, 2, 0, 1]
    assert (data.num_classes, data.x_train.dtype, data.y_train.dtype) == (3, torch.float32, torch.int64)


@pytest.mark.parametrize(
    ("x", "dtype", "shape"),
    [
        (lambda i: Image.new("RGB", (6, 4), (i, 0, 0)), torch.uint8, (3, 4, 6)),
        (lambda i: Image.new("L", (6, 4), i), torch.uint8, (1, 4, 6)),
        (lambda i: np.full((2, 2), i, np.float64), torch.float32, (2, 2)),
        (lambda i: torch.full((2, 2), i, dtype=torch.uint8), torch.uint8, (2, 2)),
        (lambda i: torch.full((7,), i), torch.int64, (7,)),
    ],
)
def test_inputs_of_torch_datasets_can_be_images_arrays_and_tensors(x: Any, dtype: Any, shape: tuple) -> None:
    data = TorchDataset(Pairs(x=x), Pairs(5, x=x)).checked()
    assert (data.x_train.dtype, data.in_shape) == (dtype, shape)
    assert data.x_train[3].max() == 3


def test_items_of_torch_datasets_can_have_several_inputs_by_name_or_in_order() -> None:
    def x(i: int) -> dict[str, Any]:
        return {"ids": torch.full((5,), i), "mask": np.array([True, False]), "age": i / 2}

    named = TorchDataset(Pairs(x=x), Pairs(5, x=x)).checked()
    in_order = TorchDataset(Pairs(x=lambda i: tuple(x(i).values())), Pairs(x=lambda i: tuple(x(i).values()))).checked()
    assert named.in_shape == {"ids": (5,), "mask": (2,), "age": ()}
    assert in_order.in_shape == ((5,), (2,), ())
    for tensors in (named.x_train.tensors.values(), in_order.x_train.tensors):
        ids, mask, age = tensors
        assert (ids.dtype, mask.dtype, age.dtype) == (torch.int64, torch.bool, torch.float32)
        assert (ids[3].tolist(), mask[3].tolist(), age[3].item()) == ([3] * 5, [True, False], 1.5)


@pytest.mark.parametrize(
    ("y", "dtype", "shape", "outputs"),
    [
        (lambda i: np.int32(i % 4), torch.int64, (20,), 4),
        (lambda i: i / 2, torch.float32, (20,), 1),
        (lambda i: torch.tensor([i, 1.5]), torch.float32, (20, 2), 2),
        (lambda i: torch.tensor([1, 0, 1]), torch.int64, (20, 3), 3),
        (lambda i: np.array([True, False]), torch.int64, (20, 2), 2),
    ],
)
def test_labels_of_torch_datasets_can_be_classes_numbers_or_multi_label_targets(
    y: Any, dtype: Any, shape: tuple, outputs: int
) -> None:
    data = TorchDataset(Pairs(y=y), Pairs(5, y=y)).load()
    assert (data.y_train.dtype, tuple(data.y_train.shape), data.num_classes) == (dtype, shape, outputs)
    assert torch.allclose(data.y_train[2].float(), torch.as_tensor(y(2)).float())


def test_random_transforms_draw_once_and_do_not_depend_on_the_global_seed() -> None:
    def x(i: int) -> np.ndarray:
        return np.array([random.random(), np.random.rand(), float(torch.rand(()))])

    torch.manual_seed(5)
    state = torch.get_rng_state()
    one = TorchDataset(Pairs(x=x), Pairs(x=x)).checked()
    assert torch.equal(torch.get_rng_state(), state)
    random.seed(99)
    np.random.seed(99)
    torch.manual_seed(99)
    assert torch.equal(TorchDataset(Pairs(x=x), Pairs(x=x)).checked().x_train, one.x_train)
    assert len(one.x_train.unique()) == 60


RESIZE = {"class_path": "torchvision.transforms.Resize", "init_args": {"size": [5, 7]}}
FAKE = {
    "class_path": "torchvision.datasets.FakeData",
    "init_args": {"size": 40, "image_size": [1, 8, 8], "transform": RESIZE},
}
BOTH = f"{{class_path: TorchDataset, init_args: {{train: {FAKE}, test: {FAKE}}}}}"


@pytest.mark.thorough
def test_a_torch_dataset_given_by_class_path_trains_and_resumes_and_needs_trust(tmp_path: Path) -> None:
    text = TINY.replace("dataset: Digits", f"dataset: {BOTH}").replace("min_samples: 20", "min_samples: 2")
    tiny(tmp_path / "run", text=text)
    resolved = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["scenario"]["dataset"]["init_args"]
    assert resolved["train"]["class_path"] == "torchvision.datasets.FakeData"
    code, _, err = run("fit", "--resume", tmp_path / "run", "--rounds", "4")
    assert code == 0, err
    assert len(untimed_rows(tmp_path / "run")) == 4
    weights = torch.load(tmp_path / "run" / "final" / "model.pt", weights_only=True)
    assert weights["encoder.1.weight"].shape == (8, 35)  # of images of 5x7
    (tmp_path / "run" / ".signature").unlink()  # as in a copied run
    code, _, err = run("test", tmp_path / "run")
    assert code == 2
    assert "scenario.dataset.train: torchvision.datasets.FakeData " in err
    assert run("test", tmp_path / "run", "--trust").code == 0
