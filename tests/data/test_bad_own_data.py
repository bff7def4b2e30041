"""Custom data that cannot be used are refused in one line: the key, what is wrong and how to fix it."""

import builtins
import os
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from layouts import (
    Pairs,
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
from refusals import NO_FILES, check_refused, empty, halve, refusal, replace_by, time_limit  # noqa: F401

from fl_lightning.core import files
from fl_lightning.core.errors import ConfigError
from fl_lightning.data import Arrays, HuggingFace, ImageFolder, Table, TextTable, TorchDataset, image_files
from fl_lightning.data.files import CHECKSUM_BYTES

# --- Image folders ---


POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n"
DAMAGE = {
    "empty": (empty, "not a readable image ("),
    "halved": (halve, ""),
    "PostScript": (lambda path: path.write_bytes(POSTSCRIPT), "not a"),
    "16 bits": (lambda path: Image.new("I;16", (6, 8)).save(path), "an image of mode I"),
    "a pipe": NO_FILES["a pipe"],
    "a link to nothing": (replace_by(lambda path: path.symlink_to("nothing")), "is a broken link"),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("options", [{}, pytest.param({"cache": "cache"}, marks=pytest.mark.thorough)])
def test_a_damaged_image_is_named(damage: str, options: dict, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    write_image_folder(tmp_path / "mine")
    apply, why = DAMAGE[damage]
    path = tmp_path / "mine" / "test" / "dog" / "015.png"
    apply(path)
    check_refused(lambda: ImageFolder("mine", **options), "dataset.path", f": mine/test/dog/015.png: {why}")
    assert not list(tmp_path.glob("cache/*"))
    path.unlink()
    assert len(ImageFolder("mine", **options).checked().y_test) == 19


def test_images_of_different_sizes_are_refused_with_the_fix(tmp_path: Path) -> None:
    write_image_folder(tmp_path)
    Image.new("RGB", (6, 9)).save(tmp_path / "test" / "cat" / "000.png")
    first, other = (f"{tmp_path}/{split}/cat/000.png is {size}" for split, size in (("train", "6x8"), ("test", "6x9")))
    check_refused(lambda: ImageFolder(str(tmp_path)), "dataset.size", first, other)
    assert ImageFolder(str(tmp_path), size=64).checked().in_shape == (3, 64, 64)


def test_more_images_than_memory_are_refused_before_decoding(tmp_path: Path, monkeypatch: Any) -> None:
    write_image_folder(tmp_path)
    monkeypatch.setattr(image_files, "decode", None)
    check_refused(lambda: ImageFolder(str(tmp_path), size=10**6), "dataset.size", "40 images", "111,758.7 GiB")


def empty_folder(folder: Path) -> None:
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def add_one_class(root: Path) -> None:
    (root / "a" / "b").mkdir(parents=True)


FOLDERS = {
    "no folder": (lambda root: None, "nowhere", ": nowhere: no such folder"),
    "a file": (lambda root: (root / "a").write_text(""), "a", ": a: is a file"),
    "a table": (lambda root: (root / "a.csv").touch(), "a.csv", "ImageTable?"),
    "no table": (lambda root: None, "a.csv", ": a.csv: no such folder"),
    "one class": (add_one_class, "a", "has 1 folder(s)"),
    "no test": (
        lambda root: (root / "mine/test").rename(root / "away"),
        "mine",
        "no test. Add it, or set it to mine/train",
    ),
    "an empty test": (lambda root: empty_folder(root / "mine/test"), "mine", "mine/test: has no class folders"),
    "another class": (lambda root: (root / "mine/test/cat").rename(root / "mine/test/Cat"), "mine", "mine/test/Cat: "),
    "an empty class": (lambda root: empty_folder(root / "mine/train/dog"), "mine", "mine/train/dog: contains no files"),
}


@pytest.mark.parametrize("case", FOLDERS)
def test_a_folder_of_another_layout_is_refused(case: str, tmp_path: Path, monkeypatch: Any) -> None:
    change, path, expected = FOLDERS[case]
    monkeypatch.chdir(tmp_path)
    write_image_folder(tmp_path / "mine")
    change(tmp_path)
    check_refused(lambda: ImageFolder(path), "dataset.path", expected)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"size": (4, -1)}, "size: -1 "),
        ({"mean": [0.5]}, "mean: "),
        ({"mean": [0.5], "std": [0.0]}, "std: 0.0 "),
        ({"mean": [float("nan")], "std": [1.0]}, "mean: nan "),
        ({"mean": [0.5], "std": [0.5, 0.5, 0.5]}, "mean: 1 number"),
    ],
)
def test_image_options_out_of_range_are_refused(options: dict, expected: str, tmp_path: Path) -> None:
    write_image_folder(tmp_path)
    assert refusal(lambda: ImageFolder(str(tmp_path), **options)).startswith(f"scenario.dataset.{expected}")


def test_an_unusable_cache_is_refused_by_its_key(tmp_path: Path, monkeypatch: Any) -> None:
    root, cache = tmp_path / "mine", tmp_path / "cache"
    write_image_folder(root)
    make = partial(ImageFolder, str(root), cache=str(cache))
    cache.write_text("")
    assert refusal(make).startswith("scenario.dataset.cache: ")
    cache.unlink()
    make().checked()
    (file,) = cache.iterdir()
    file.unlink()
    os.mkfifo(file)
    assert refusal(make).startswith(f"scenario.dataset.cache: {file}: is a pipe")
    file.unlink()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    assert "scenario.dataset.cache: [Errno 28] No space left on device" in refusal(make)
    assert not list(cache.iterdir())
    monkeypatch.undo()
    assert len(make().checked().y_test) == 20


CACHES = {
    "a flipped byte": lambda content: content[:200] + bytes([255 - content[200]]) + content[201:],
    "of an older version": lambda content: content[:-CHECKSUM_BYTES],
    "shorter than a checksum": lambda content: content[:5],
}


@pytest.mark.parametrize("case", CACHES)
def test_a_damaged_cache_is_built_again_with_one_warning(case: str, tmp_path: Path) -> None:
    write_image_folder(tmp_path / "mine")
    make = partial(ImageFolder, str(tmp_path / "mine"), cache=str(tmp_path / "cache"))
    plain = ImageFolder(str(tmp_path / "mine")).checked()
    make().checked()
    (file,) = (tmp_path / "cache").iterdir()
    content = file.read_bytes()
    file.write_bytes(CACHES[case](content))
    with pytest.warns(UserWarning, match=rf"^scenario.dataset.cache: {file} ") as caught:
        again = make().checked()
    assert len(caught) == 1
    assert file.read_bytes() == content
    assert torch.equal(again.x_train, plain.x_train)
    make().checked()  # without a warning, which would be an error


def test_a_cache_under_the_name_of_another_one_is_built_again(tmp_path: Path) -> None:
    write_image_folder(tmp_path / "mine")
    make = partial(ImageFolder, str(tmp_path / "mine"), cache=str(tmp_path / "cache"))
    make(channels=1).checked()
    (grey,) = (tmp_path / "cache").iterdir()
    make().checked()
    (file,) = set((tmp_path / "cache").iterdir()) - {grey}
    grey.replace(file)
    with pytest.warns(UserWarning, match=r"^scenario.dataset.cache: .*checksum"):
        assert make().checked().in_shape == (3, 8, 6)


# --- Arrays ---

NPY = {
    "missing": (Path.unlink, " y_train.npy"),
    "empty": (empty, "y_train.npy: not a readable .npy file ("),
    "truncated": (lambda path: path.write_bytes(path.read_bytes()[:-1]), "y_train.npy: not a readable .npy file ("),
    "objects": (lambda path: np.save(path, np.array([{}] * 20)), "y_train.npy: not a readable .npy file ("),
    "a pipe": (replace_by(os.mkfifo), "y_train.npy: is a pipe"),
}


@pytest.mark.parametrize("case", NPY)
def test_a_folder_of_damaged_arrays_is_refused(case: str, tmp_path: Path) -> None:
    apply, expected = NPY[case]
    save_arrays(tmp_path / "a")
    apply(tmp_path / "a" / "y_train.npy")
    check_refused(lambda: Arrays(str(tmp_path / "a")), "dataset.path", f": {tmp_path}/a", expected)


def test_a_number_of_classes_for_numeric_labels_is_refused(tmp_path: Path) -> None:
    save_arrays(tmp_path / "a", y_train=np.ones(20), y_test=np.ones(6))
    check_refused(lambda: Arrays(str(tmp_path / "a"), num_classes=3), "dataset.num_classes")


# --- Tables ---


def missing(name: str, *at: int) -> dict[str, list]:
    return {name: ["" if i in at else value for i, value in enumerate(table()[name])]}


PLAIN: dict[str, Any] = {"label": "label", "features": ["age", "town"]}
TABLES: dict[str, tuple[Any, ...]] = {
    # Changed columns, options, the key of the refusal, and values that the message names.
    "unknown label": ({}, {"label": "lable"}, "label", "'lable'", "'label'?"),
    "nothing similar": ({}, {"label": "q"}, "label", "'q'", "age, income, town, clinic, la"),
    "unknown feature": ({}, {"features": ["agee"]}, "features", "'agee'", "'age'?"),
    "no label": ({}, {"label": []}, "label"),
    "label twice": ({}, {"label": ["flu", "flu"]}, "label", "'flu'", "twice"),
    "label among the features": ({}, {"features": ["age", "label"]}, "features", "'label': label"),
    "split and test_path": ({}, {"split": "x", "test_path": "t.csv"}, "split", "test_path"),
    "share": ({}, {"test_share": 1.5}, "test_share", "1.5 is outside (0, 1)"),
    "small share": ({}, {"test_share": 0.01}, "test_share", "0.01 of 40 samples is less than one"),
    "small share of each client": ({}, {"test_share": 0.04, "client": "clinic"}, "test_share", "0.04", "each client"),
    "missing features": (
        missing("age", 6, 30),
        {},
        "features",
        "'age'",
        "2 of 40 rows",
        "row 7 of t.csv",
        "leave the col",
    ),
    "missing label": (missing("label", 39), {}, "label", "'label'", "1 of 40 rows", "row 40 of t.csv"),
    "missing client": (missing("clinic", 2), {"client": "clinic"}, "client", "'clinic' has no value"),
    "float clients": ({}, {"client": "income"}, "client", "'income'", "float64"),
    "unknown split": ({"part": ["train", "val"] * 20}, {"split": "part"}, "split", "'part'", "'val'"),
    "numbers and text": (
        {"age": [*range(39), "forty"]},
        {},
        "features",
        "'age'",
        "row 40 of t.csv, 'forty'",
        "categorical",
    ),
    "too large for 64 bits": ({"age": [10**25, *range(39)]}, {}, "features", "'age'", f"{10**25} in row 1 of t.csv"),
    "too large for float32": ({"age": [*range(38), 1e300, 7]}, {}, "features", "'age'", "1e+300 in row 39", "float32"),
    "no feature": ({}, {"categorical": ["days"]}, "categorical", "'days'"),
    "unknown category": ({}, {"categorical": ["dais"]}, "categorical", "'dais'", "'days'?"),
    "one class": ({"label": ["yes"] * 40}, {}, "label", "'label'", "'yes'"),
    "many integers": ({"label": list(range(40))}, {}, "regression", "'label'", "40 different integers in 40 rows"),
    "not 0 and 1": ({"flu": [2, 0] * 20}, {"label": ["flu", "cold"]}, "label", "'flu' holds 2"),
    "text": ({}, {"regression": True}, "label", "'label'", "not numeric"),
    "label too large": ({"label": [1e39, *[0.5] * 39]}, {}, "label", "'label'", "1e+39 in row 1 of t.csv", "float32"),
}


@pytest.mark.parametrize("case", TABLES)
def test_a_bad_table_is_refused_by_option_column_and_row(case: str, tmp_path: Path, monkeypatch: Any) -> None:
    changed, options, key, *facts = TABLES[case]
    monkeypatch.chdir(tmp_path)
    write_csv(Path("t.csv"), table() | changed)
    check_refused(lambda: Table("t.csv", **{**PLAIN, **options}), f"dataset.{key}", *facts)


def test_a_column_of_too_many_categories_is_refused(tmp_path: Path) -> None:
    write_csv(tmp_path / "t.csv", {"name": [f"name {i}" for i in range(3000)], "label": [0, 1] * 1500})
    make = partial(Table, str(tmp_path / "t.csv"), "label")
    check_refused(make, "dataset.features", "column 'name'", "2,400", "scenario.dataset.exclude", "encoding codes")
    with pytest.warns(UserWarning, match="'name': 600 of 600 rows"):
        assert make(["name"], encoding="codes").checked().in_shape == (1,)


def test_features_that_look_like_ids_give_one_warning_with_the_fix(tmp_path: Path) -> None:
    n = 100
    columns = {
        "label": [0, 1] * 50,
        "row": [7 * i for i in range(n)],
        "the name": [f"name {i}" for i in range(n)],
        "patient_id": [min(i, 70) for i in range(n)],
        "covid": [min(i, 70) for i in range(n)],
        "siteID": [i % 3 for i in range(n)],
        "weight": [50 + i / 7 for i in range(n)],
    }
    write_csv(tmp_path / "t.csv", columns)
    make = partial(Table, str(tmp_path / "t.csv"), "label")
    ids = r"""^scenario.dataset.features: .*exclude '\["row", "the name", "patient_id"\]'$"""
    with pytest.warns(UserWarning, match=ids) as caught:
        make().checked()
    assert len(caught) == 1
    data = make(exclude=["row", "the name", "patient_id"]).checked()
    assert [column.name for column in data.schema.columns] == ["covid", "siteID", "weight"]
    with pytest.warns(UserWarning, match=ids):
        make(exclude=["row"]).checked()
    make(["row", "patient_id"]).checked()  # chosen, so without a warning, which would be an error
    with pytest.warns(UserWarning, match="'row': 20 of 20 rows"):
        make(exclude=["the name", "patient_id"], categorical=["row"]).checked()
    write_csv(tmp_path / "t.csv", {name: values[:99] for name, values in columns.items()})
    with pytest.warns(UserWarning, match="'the name': 20 of 20 rows"):
        make().checked()  # too few rows to tell an id
    check_refused(lambda: make(exclude=["rows"]), "dataset.exclude", "'rows'", "'row'?")
    check_refused(lambda: make(["row"], exclude=["row"]), "dataset.exclude", "'row'", "features")


def test_a_table_without_features_is_refused(tmp_path: Path) -> None:
    write_csv(tmp_path / "t.csv", {"label": [0, 1] * 5})
    check_refused(lambda: Table(str(tmp_path / "t.csv"), "label"), "dataset.features", "t.csv")


def test_columns_of_dates_and_lists_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    odd = {"when": pd.date_range("2026-01-01", periods=4), "list": [[1, 2]] * 4, "label": [0, 1, 0, 1]}
    pd.DataFrame(odd).to_parquet(tmp_path / "t.parquet")
    for name in ("when", "list"):
        make = partial(Table, str(tmp_path / "t.parquet"), "label", [name])
        check_refused(make, "dataset.features", f"column '{name}'")


TABLE_FILES = {
    "missing": (Path.unlink, "no such file"),
    "empty": (empty, "not a readable CSV file (No columns"),
    "no rows": (lambda path: path.write_text("age,label\n"), "has no rows"),
    "bytes": (lambda path: path.write_bytes(b"\xff\x00" * 50), "is a binary file"),
    "rows too long": (lambda path: path.write_text("age,label\n1,2,3\n4,5,6\n"), "not a readable CSV file ("),
    "a row too long": (lambda path: path.write_text("age,label\n1,2\n4,5,6\n"), "not a readable CSV file ("),
    "two columns of one name": (
        lambda path: path.write_text("label,age,town,age,town\n1,2,3,4,5\n"),
        "two columns have the name 'age'",
    ),
    **NO_FILES,
}


@pytest.mark.parametrize("key", ["path", pytest.param("test_path", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("case", TABLE_FILES)
def test_the_message_names_a_file_that_is_not_a_table(case: str, key: str, tmp_path: Path) -> None:
    apply, message = TABLE_FILES[case]
    paths = {name: str(tmp_path / f"{name}.csv") for name in ("path", "test_path")}
    for path in paths.values():
        write_text_table(Path(path))
    apply(Path(paths[key]))
    assert refusal(lambda: TextTable(**paths)).startswith(f"scenario.dataset.{key}: {paths[key]}: {message}")


@pytest.mark.parametrize(("separator", "other"), [(",", ";"), (";", ","), ("\t", ",")])
def test_a_wrong_separator_is_refused_with_the_right_one(separator: str, other: str, tmp_path: Path) -> None:
    path = str(tmp_path / "t.csv")
    write_csv(Path(path), table(), separator)
    make = partial(Table, path, "label", ["age"])
    assert make(separator=separator).checked().in_shape == (1,)
    check_refused(lambda: make(separator=other), "dataset.separator", path, f"{separator!r}?")


@pytest.mark.parametrize("separator", ["", ";;", "\n", '"', "a", "é", "\\t"])
def test_an_impossible_separator_is_refused_by_its_key(separator: str, tmp_path: Path) -> None:
    make = partial(Table, str(tmp_path / "t.csv"), label="label", separator=separator)
    check_refused(make, "dataset.separator", f": {separator!r} ")


def test_several_columns_can_have_no_name(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("age,label,,\n" + "1,yes,,\n2,no,,\n" * 5)
    assert Table(str(tmp_path / "t.csv"), "label").checked().in_shape == (1,)


def test_two_parquet_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    path = tmp_path / "t.parquet"
    columns = [pyarrow.array([1, 2]), pyarrow.array([3, 4]), pyarrow.array([0, 1])]
    pytest.importorskip("pyarrow.parquet").write_table(pyarrow.table(columns, names=["age", "age", "label"]), path)
    check_refused(lambda: Table(str(path), "label"), "dataset.path", f": {path}: ", "'age'")


def test_a_test_file_equal_to_the_training_file_gives_one_warning(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    write_table(Path("t.csv"))
    Path("link.csv").symlink_to("t.csv")
    with pytest.warns(UserWarning, match=r"^scenario.dataset.test_path: link.csv ") as seen:
        assert len(Table("t.csv", "label", test_path="link.csv").checked().y_test) == 40
    assert len(seen) == 1


def test_a_test_file_without_the_columns_is_refused(tmp_path: Path) -> None:
    write_table(tmp_path / "t.csv")
    rest = table(8, seed=1)
    del rest["label"]
    write_csv(tmp_path / "new.csv", rest)
    make = partial(Table, str(tmp_path / "t.csv"), "label", test_path=str(tmp_path / "new.csv"))
    check_refused(make, "dataset.test_path", "'label'")
    del rest["town"]
    write_csv(tmp_path / "new.csv", rest | {"label": ["yes"] * 8})
    check_refused(make, "dataset.test_path", "'town'")


def test_a_test_file_with_text_for_numbers_is_refused_by_its_key(tmp_path: Path) -> None:
    write_table(tmp_path / "t.csv")
    for changes, column in ({"age": ["old"] * 8}, "'age'"), ({"label": [0, 1] * 4}, "'label'"):
        write_csv(tmp_path / "new.csv", table(8, seed=1) | changes)
        make = partial(Table, str(tmp_path / "t.csv"), "label", test_path=str(tmp_path / "new.csv"))
        check_refused(make, "dataset.test_path", column, f"{tmp_path}/t.csv")


def test_an_empty_path_and_one_that_a_shell_would_replace_are_refused(tmp_path: Path) -> None:
    check_refused(partial(Table, "", "label"), "dataset.path", "is empty")
    check_refused(partial(Table, "~/no such table.csv", "label"), "dataset.path", "~ is not replaced")
    check_refused(partial(Table, "$DATA/no such table.csv", "label"), "dataset.path", "$ is not replaced")


def test_no_features_are_refused(tmp_path: Path) -> None:
    write_table(tmp_path / "t.csv")
    check_refused(partial(Table, str(tmp_path / "t.csv"), "label", features=[]), "dataset.features", "Name some")


def test_a_damaged_parquet_file_and_a_missing_package_are_refused(tmp_path: Path, monkeypatch: Any) -> None:
    pytest.importorskip("pyarrow")
    path = tmp_path / "t.parquet"
    pd.DataFrame(table()).to_parquet(path)
    content = path.read_bytes()
    for damaged in (b"", content[: len(content) // 2], b"PAR1" + os.urandom(200) + b"PAR1"):
        path.write_bytes(damaged)
        check_refused(lambda: Table(str(path), "label"), "dataset.path", f": {path}: not a readable Parquet file (")
    without(monkeypatch, "pyarrow")
    assert "'fl-lightning[parquet]'" in refusal(lambda: Table(str(path), "label"))


def without(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    """Make the import of a package fail."""
    plain = builtins.__import__

    def importing(name: str, *rest: Any) -> Any:
        if name.partition(".")[0] == package:
            raise ImportError(name)
        return plain(name, *rest)

    monkeypatch.setattr(builtins, "__import__", importing)


@pytest.mark.parametrize(("column", "key"), [("clinic", "client"), ("town", "features")])
def test_a_nul_character_in_a_client_id_or_category_is_refused(
    column: str, key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("pyarrow")
    monkeypatch.chdir(tmp_path)
    pd.DataFrame(table() | {column: ["a", "a\0"] * 20}).to_parquet("t.parquet")  # read_csv may stop at a NUL
    make = partial(Table, "t.parquet", "label", features=["age", "town"], client="clinic")
    check_refused(make, f"dataset.{key}", f"'{column}'", r"'a\x00' in row 2 of t.parquet")


# --- Texts ---


@pytest.mark.parametrize(
    ("columns", "options", "key", "fact"),
    [
        ({}, {"label": "text"}, "label", "'text'"),
        ({"text": ["", *["a b"] * 39]}, {}, "text", "1 of 40 rows, first in row 1 of t.csv"),
        ({"text": ["None", *["a b"] * 39]}, {}, "text", "NA, None and null"),
        ({"text": list(range(40))}, {}, "text", "0 in row 1 of t.csv"),
        ({}, {"length": 0}, "length", "0 is below 1"),
        ({}, {"vocab_size": 2}, "vocab_size", "2 is below 3"),
    ],
)
def test_a_bad_table_of_texts_is_refused(
    columns: dict, options: dict, key: str, fact: str, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    written = write_text_table(Path("t.csv"))
    write_csv(Path("t.csv"), written | columns)
    check_refused(lambda: TextTable("t.csv", **options), f"dataset.{key}", fact)


# --- Hugging Face ---


TEXTS = {
    "review": ["a b", "c d"] * 10,
    "other": ["e", "f", "g", "!"] * 5,
    "label": [0, 1] * 10,
    "stars": [1, 2, 3, 4] * 5,
}
SAVED: dict[str, tuple[Any, ...]] = {
    "no folder": ({"path": "nowhere"}, "path", ": nowhere: no such folder"),
    "a file": ({"path": "file"}, "path", ": file: is a file"),
    "another folder": ({"path": "empty"}, "path", ": empty: cannot be read"),
    "two texts": ({}, "text", "review, other"),
    "unknown label": ({"label": "labl"}, "label", "'labl'", "'label'?"),
    "unknown train": ({"train": "training"}, "train", "'training'", "train, test"),
    "unknown test": ({"test": "dev"}, "test", "'dev'", "train, test"),
    "test is train": ({"test": "train"}, "test", "'train'"),
    "no image": ({"image": "review"}, "image", "'review'", "Value('string')"),
    "numbers": ({"text": "stars"}, "text", "'stars' holds 1 in row 1 of train"),
    "text and image": ({"text": "review", "image": "other"}, "text", "'review'", "image"),
}


@pytest.mark.parametrize("case", SAVED)
def test_a_bad_saved_dataset_is_refused(case: str, tmp_path: Path, monkeypatch: Any, library: Any) -> None:
    options, key, *facts = SAVED[case]
    monkeypatch.chdir(tmp_path)
    texts = library.Dataset.from_dict(TEXTS)
    save_dataset(Path("saved"), texts, texts)
    Path("empty").mkdir()
    Path("file").write_text("")
    check_refused(lambda: HuggingFace(**{"path": "saved", **options}), f"dataset.{key}", *facts)


def test_bad_columns_of_a_saved_dataset_are_refused(tmp_path: Path, library: Any) -> None:
    features = library.Features(text=library.Value("string"), label=library.ClassLabel(names=["a", "b"]))
    train = library.Dataset.from_dict({"text": ["a"] * 10, "label": [0, 1] * 5}, features=features)
    bare = library.Dataset.from_dict({"text": ["a"] * 10, "mood": [0, 1] * 5})
    hidden = train.map(lambda row: {"label": -1})
    for test, options, key, fact in (
        (hidden, {}, "label", "-1 in row 1 of test"),
        (train.remove_columns("label"), {}, "test", "'label'"),
        (None, {}, "label", "text, mood"),
        (None, {"label": "text"}, "path", "neither an image nor a text column"),
    ):
        path = save_dataset(tmp_path / "s", bare if test is None else train, test)
        check_refused(partial(HuggingFace, path, **options), f"dataset.{key}", fact)
        shutil.rmtree(path)


def test_bad_images_of_a_dataset_are_named_and_urls_and_pipes_are_not_opened(
    tmp_path: Path, monkeypatch: Any, library: Any
) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    features = library.Features(image=library.Image(), label=library.ClassLabel(names=["a", "b"]))
    splits: dict[str, Any] = {}
    monkeypatch.setattr(library, "load_dataset", lambda *_: splits)
    for image, expected in (
        ({"bytes": b"garbage", "path": None}, "row 1 of train: not a readable image"),
        (None, "row 1 of train: "),
        ({"bytes": None, "path": "http://127.0.0.1:9/a.png"}, "http:/127.0.0.1:9/a.png: no such file"),
        ({"bytes": None, "path": f"{tmp_path}/pipe.png"}, f"{tmp_path}/pipe.png: is a pipe"),
    ):
        rows = {"image": [image] * 8, "label": [0, 1] * 4}
        splits["train"] = splits["test"] = library.Dataset.from_dict(rows, features=features)
        check_refused(lambda: HuggingFace("a/b", download=True), "dataset.image", f": {expected}")
    splits["test"] = splits["test"].select([])
    check_refused(lambda: HuggingFace("a/b", download=True), "dataset.path", "'test' of a/b")


SAVED_FILES = {
    "halved info": ("dataset_info.json", halve, "s: ", "Save the dataset again with save_to_disk"),
    "halved state": ("state.json", halve, "s: ", "Save the dataset again with save_to_disk"),
    "halved table": ("*.arrow", halve, "s: ", ""),
    "no table": (
        "*.arrow",
        Path.unlink,
        "s/data-00000-of-00001.arrow: cannot be read: No such file or directory",
        "Save the dataset again with save_to_disk",
    ),
    "damaged text": (
        "*.arrow",
        lambda path: path.write_bytes(path.read_bytes().replace(b"a bc d", b"a \xffc d")),
        "s: not a readable dataset (",
        "Save or fetch the dataset again",
    ),
}


@pytest.mark.parametrize("case", SAVED_FILES)
def test_a_damaged_file_of_a_saved_dataset_is_refused(case: str, tmp_path: Path, library: Any) -> None:
    pattern, apply, start, fix = SAVED_FILES[case]
    library.Dataset.from_dict(TEXTS).save_to_disk(str(tmp_path / "s"))
    (path,) = (tmp_path / "s").glob(pattern)
    apply(path)
    message = refusal(lambda: HuggingFace(str(tmp_path / "s"), text="review"))
    assert message.startswith(f"scenario.dataset.path: {tmp_path}/{start}")
    assert message.endswith(fix)


def test_images_as_labels_are_refused_by_the_label_key(tmp_path: Path, library: Any) -> None:
    write_hugging_face(tmp_path / "s")
    for options in ({}, {"image": "image"}):
        make = partial(HuggingFace, str(tmp_path / "s"), label="image", **options)
        check_refused(make, "dataset.label", "column 'image' ", "image, label")


@pytest.mark.parametrize("key", ["train", "test"])
def test_a_split_of_a_dataset_without_splits_is_refused(key: str, tmp_path: Path, library: Any) -> None:
    write_hugging_face(tmp_path / "s")
    check_refused(lambda: HuggingFace(str(tmp_path / "s"), **{key: "zz"}), f"dataset.{key}", f"{tmp_path}/s", "'zz'")
    assert len(HuggingFace(str(tmp_path / "s"), train="train").checked().y_test)


def test_a_failed_download_and_a_missing_package_are_refused(library: Any, monkeypatch: Any) -> None:
    def load_dataset(*_: Any) -> None:
        raise ConnectionError("no\nnetwork")

    monkeypatch.setattr(library, "load_dataset", load_dataset)
    check_refused(lambda: HuggingFace("a/b", download=True), "dataset.path", "a/b", "no network")
    without(monkeypatch, "datasets")
    check_refused(lambda: HuggingFace("a/b", download=True), "dataset", "HuggingFace", "pip install 'fl-lightning[")


# --- Torch datasets ---


class Endless(torch.utils.data.IterableDataset):
    def __iter__(self) -> Iterator[Any]:
        yield torch.zeros(1), 0


class Items(torch.utils.data.Dataset):
    """Three equal items."""

    def __init__(self, item: Any) -> None:
        self.item = item

    def __len__(self) -> int:
        return 3

    def __getitem__(self, i: int) -> Any:
        return self.item


def changes_at_7(first: Any, then: Any) -> Callable[[int], Any]:
    """Return a function of the index that returns another value from item 7 on."""
    return lambda i: first if i < 7 else then


ONE, TWO = torch.ones(1), torch.ones(2)
TORCH: dict[str, tuple[Any, ...]] = {
    "no length": (Endless(), "__len__"),
    "no items": (Pairs(0), "no items"),
    "three values": (Items((1, 2, 3)), "item 0 is a tuple of 3"),
    "one value": (Items(torch.zeros(2)), "item 0 is of type Tensor"),
    "text": (Pairs(x=lambda i: "a"), "x of item 0 is of type str"),
    "complex numbers": (Pairs(x=lambda i: torch.full((4,), 1j)), "x of item 0 is complex64 of shape (4,)"),
    "different shapes": (Pairs(x=changes_at_7(TWO, ONE)), "x is float32 of shape (2,) in item 0", "(1,) in item 7"),
    "different inputs": (Pairs(x=changes_at_7({"ids": TWO}, {"id": TWO})), "['ids'] in item 0 and ['id'] in item 7"),
    "one input more": (Pairs(x=changes_at_7(TWO, (TWO, TWO))), "one tensor in item 0 and [0, 1] in item 7"),
    "several inputs of different shapes": (
        Pairs(x=changes_at_7({"ids": TWO}, {"ids": ONE})),
        "x['ids'] is float32 of shape (2,) in item 0 and float32 of shape (1,) in item 7",
    ),
    "text among several inputs": (Pairs(x=lambda i: {"ids": [1, 2]}), "x of item 0, 'ids', is a list of 2"),
    "different labels": (
        Pairs(y=changes_at_7(0, 0.5)),
        "y is int64 of shape () in item 0 and float32 of shape () in item 7",
    ),
}


@pytest.mark.parametrize("case", TORCH)
def test_a_bad_torch_dataset_is_refused_by_its_key(case: str) -> None:
    data, *facts = TORCH[case]
    key = "train" if case.startswith("text") else "test"
    both = {"train": Pairs(), "test": Pairs(), key: data}
    check_refused(lambda: TorchDataset(**both), f"dataset.{key}", type(data).__name__, *facts)


def raise_error(*_: Any) -> Any:
    raise RuntimeError("not there")


def test_an_exception_in_a_torch_dataset_names_its_key() -> None:
    for key, make in (
        ("test", lambda: TorchDataset(Pairs(), Pairs(x=raise_error))),
        ("train", lambda: TorchDataset(raise_error, Pairs())),
    ):
        assert refusal(make).startswith(f"scenario.dataset.{key}: RuntimeError: not there. ")


@pytest.mark.parametrize("kind", [partial(Table, label="label"), ImageFolder])
def test_other_objects_than_paths_are_refused_by_the_key(kind):
    for path in (pd.DataFrame({"a": [1]}), ["a.csv"], b"a.csv"):
        with pytest.raises(ConfigError, match=r"^scenario\.dataset\.path: "):
            kind(path=path)


def test_a_label_that_is_no_name_is_refused():
    with pytest.raises(ConfigError, match=r"^scenario\.dataset\.label: "):
        Table(path="a.csv", label=2)


def test_a_path_object_is_a_path(tmp_path):
    write_table(tmp_path / "a.csv")
    assert len(Table(path=tmp_path / "a.csv", label="label").load().y_train)
