"""Classes that only test samples have, and names that differ only in their writing."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from layouts import Pairs, save_arrays, save_dataset, table, write_csv, write_image, write_image_folder, write_table
from refusals import check_refused

from fl_lightning.data import (
    IID,
    Arrays,
    HuggingFace,
    ImageFolder,
    ImageTable,
    Scenario,
    Table,
    TextTable,
    TorchDataset,
)

# --- Classes that only test samples have ---


def dotted(columns: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Return columns with a dot after each label, as in the test file of Adult."""
    return columns | {"label": [f"{label}." for label in columns["label"]]}


@pytest.mark.parametrize("kind", [Table, TextTable, ImageTable])
def test_a_label_that_only_the_test_file_has_is_refused(kind: Any, tmp_path: Path) -> None:
    columns = {"text": ["a b"] * 8, "path": ["a.png"] * 8, "age": [1, 2] * 4, "label": ["no", "yes"] * 4}
    write_image(tmp_path / "a.png", 1)
    write_csv(tmp_path / "t.csv", columns)
    write_csv(tmp_path / "test.csv", dotted(columns))
    make = partial(kind, str(tmp_path / "t.csv"), label="label", test_path=str(tmp_path / "test.csv"))
    check_refused(make, "dataset.label", "'label'", f"'no.' in row 1 of {tmp_path}/test.csv", "'no', 'yes'")


def test_a_label_that_only_the_test_rows_of_a_split_have_is_refused(tmp_path: Path) -> None:
    columns = table(20) | {"label": [0, 1] * 9 + [2, 2], "part": ["train"] * 15 + ["test"] * 5}
    write_csv(tmp_path / "t.csv", columns)
    make = partial(Table, str(tmp_path / "t.csv"), "label", ["age"], split="part")
    check_refused(make, "dataset.label", "column 'label' holds 2 in row 19 of ")


def test_a_class_of_a_schema_needs_no_training_sample(tmp_path: Path) -> None:
    write_table(tmp_path / "whole.csv")
    schema = Table(str(tmp_path / "whole.csv"), "label", ["age"]).load().schema
    (tmp_path / "schema.json").write_text(schema.to_json())
    write_csv(tmp_path / "train.csv", table(8) | {"label": ["no"] * 8})
    paths = {"path": str(tmp_path / "train.csv"), "test_path": str(tmp_path / "whole.csv")}
    assert Table(label="label", schema=str(tmp_path / "schema.json"), **paths).checked().class_names == ["no", "yes"]


def test_a_class_that_only_the_test_array_has_is_refused_unless_declared(tmp_path: Path) -> None:
    save_arrays(tmp_path / "a", y_test=np.arange(6) % 4)
    check_refused(lambda: Arrays(str(tmp_path / "a")), "dataset.path", f": {tmp_path}/a: y_test has the class 3")
    assert Arrays(str(tmp_path / "a"), num_classes=4).checked().num_classes == 4


def test_classes_of_a_test_split_of_hugging_face_are_those_of_training(tmp_path: Path, library: Any) -> None:
    def dataset(names: list[str], labels: list[int]) -> Any:
        features = library.Features(text=library.Value("string"), label=library.ClassLabel(names=names))
        return library.Dataset.from_dict({"text": ["a b"] * len(labels), "label": labels}, features=features)

    names = ["a", "b", "c"]
    path = save_dataset(tmp_path / "new class", dataset(names, [0, 1] * 5), dataset(names, [0, 2]))
    check_refused(partial(HuggingFace, path), "dataset.label", "'label' holds 'c' in row 2 of test")
    path = save_dataset(tmp_path / "other order", dataset(names, [0, 1, 2] * 5), dataset(["b", "a", "c"], [0, 2]))
    check_refused(partial(HuggingFace, path), "dataset.test", "b, a, c instead of a, b, c")
    texts = [library.Dataset.from_dict({"text": ["a"] * 4, "label": ["x", second] * 2}) for second in "yZ"]
    path = save_dataset(tmp_path / "texts", *texts)
    check_refused(partial(HuggingFace, path), "dataset.label", "'label' holds 'Z' in row 2 of test")


class Named(Pairs):
    def __init__(self, classes: list[str], labels: int) -> None:
        super().__init__(y=lambda i: i % labels)
        self.classes = classes


def test_classes_of_a_torch_test_set_are_those_of_training() -> None:
    names = ["a", "b", "c"]
    for train, test, fact in (
        (Pairs(y=lambda i: i % 2), Pairs(y=lambda i: i % 4), "class 2,"),
        (Named(names, 2), Named(names, 3), "class c,"),
        (Named(names, 3), Named(["b", "c", "d"], 3), "b, c, d instead of a, b, c"),
    ):
        check_refused(partial(TorchDataset, train, test), "dataset.test", fact)
    assert TorchDataset(Named(names, 3), Pairs()).checked().class_names == names


# --- Names that differ only in their writing ---

SIMILAR = {
    "case": ["yes", "Yes"],
    "a trailing dot": ["<=50K", "<=50K."],
    "spaces": ["new york", " new  york"],
    "underscore": ["new_york", "new york"],
    "no-break space": ["new york", "new\N{NO-BREAK SPACE}york"],
    "zero-width space": ["yes", "yes\N{ZERO WIDTH SPACE}"],
    "composed letters": ["Zu\N{COMBINING DIAERESIS}rich", "Z\N{LATIN SMALL LETTER U WITH DIAERESIS}rich"],
    "quotes": ["'yes'", "yes"],
}
DIFFERENT = {"signs": ["<=50K", ">50K"], "grades": ["A", "A-"], "languages": ["C", "C++"], "digits": ["1.5", "15"]}


@pytest.mark.parametrize("case", SIMILAR)
@pytest.mark.parametrize(
    "column",
    ["label", pytest.param("clinic", marks=pytest.mark.thorough), pytest.param("town", marks=pytest.mark.thorough)],
)
def test_names_that_differ_only_in_their_writing_are_warned_of(case: str, column: str, tmp_path: Path) -> None:
    write_csv(tmp_path / "t.csv", table() | {column: (SIMILAR[case] + ["other", "none of them"]) * 10})
    key = {"label": "label", "clinic": "client", "town": "features"}[column]
    with pytest.warns(UserWarning, match=rf"^scenario.dataset.{key}: .* writing: ") as caught:
        Table(str(tmp_path / "t.csv"), "label", ["age", "town"], client="clinic").checked()
    assert len(caught) == 1


@pytest.mark.parametrize("case", DIFFERENT)
def test_names_that_differ_in_more_than_their_writing_give_no_warning(case: str, tmp_path: Path) -> None:
    write_csv(tmp_path / "t.csv", table() | {"label": (DIFFERENT[case] + ["x", "y"]) * 10})
    assert Table(str(tmp_path / "t.csv"), "label", ["age"]).checked().num_classes == 4


def test_class_folders_that_differ_only_in_their_writing_are_warned_of(tmp_path: Path) -> None:
    write_image_folder(tmp_path, ("",))
    write_image(tmp_path / "Cat " / "x.png", 1)
    with pytest.warns(UserWarning, match="^scenario.dataset.path: .*: 'Cat ' and 'cat'"):
        Scenario(ImageFolder(str(tmp_path), size=8), IID(), 2).build(0)


# --- Classes in another form: one-hot rows, whole numbers in floating point ---


def test_one_hot_labels_are_warned_of(tmp_path: Path) -> None:
    labels = np.eye(3, dtype=np.int64)[np.arange(30) % 3]
    data = {"x_train": np.zeros((30, 4), np.float32), "x_test": np.zeros((3, 4), np.float32), "y_test": labels[:3]}
    for name, y in {"one": labels, "two": labels | labels[:, [0, 0, 0]]}.items():
        np.savez(tmp_path / f"{name}.npz", y_train=y, **data)
    with pytest.warns(UserWarning, match=r"^scenario.dataset.path: .* argmax") as caught:
        Arrays(str(tmp_path / "one.npz")).checked()
    assert len(caught) == 1
    assert Arrays(str(tmp_path / "two.npz")).checked().num_classes == 3


def test_classes_that_are_numbered_from_1_are_warned_of(tmp_path: Path) -> None:
    for name, first in {"from_0": 0, "from_1": 1}.items():
        labels = {f"y_{split}": np.arange(n) % 3 + first for split, n in (("train", 20), ("test", 6))}
        save_arrays(tmp_path / name, **labels)
    with pytest.warns(UserWarning, match=r"^scenario.dataset.path: .* 1 to 3, .* class 0") as caught:
        Arrays(str(tmp_path / "from_1")).checked()
    assert len(caught) == 1
    assert Arrays(str(tmp_path / "from_0")).checked().num_classes == 3
    assert Arrays(str(tmp_path / "from_1"), num_classes=6).checked().num_classes == 6


def test_classes_in_a_column_and_images_of_16_bits_are_refused_with_the_fix(tmp_path: Path) -> None:
    classes = {f"y_{split}": np.arange(n)[:, None] % 3 for split, n in (("train", 20), ("test", 6))}
    save_arrays(tmp_path / "column", **classes)
    check_refused(lambda: Arrays(str(tmp_path / "column")), "dataset.path", "(n,)")
    save_arrays(tmp_path / "images", x_train=np.full((20, 4, 4), 300, np.uint16))
    check_refused(lambda: Arrays(str(tmp_path / "images")), "dataset.path", "x_train is uint16")


def test_labels_of_0_and_1_in_floating_point_are_classes_or_labels(tmp_path: Path) -> None:
    columns = table() | {name: [float(value) for value in table()[name]] for name in ("flu", "cold")}
    write_csv(tmp_path / "t.csv", columns)
    one = Table(str(tmp_path / "t.csv"), "flu", ["age"]).checked()
    assert (one.num_classes, one.y_train.dtype, one.class_names) == (2, torch.int64, ["0", "1"])
    both = Table(str(tmp_path / "t.csv"), ["flu", "cold"], ["age"]).checked()
    assert (both.y_train.dtype, both.class_names) == (torch.uint8, ["flu", "cold"])
    numbers = Table(str(tmp_path / "t.csv"), "flu", ["age"], regression=True).checked()
    assert (numbers.num_classes, numbers.y_train.dtype) == (1, torch.float32)


def test_few_whole_numbers_in_floating_point_are_refused_until_regression_is_set(tmp_path: Path) -> None:
    write_csv(tmp_path / "t.csv", table() | {"label": [1.0, 2.0, 3.0, 4.0] * 10})
    make = lambda **options: Table(str(tmp_path / "t.csv"), "label", ["age"], **options)  # noqa: E731
    check_refused(make, "dataset.regression", "column 'label' holds 4 different whole numbers")
    assert make(regression=False).checked().class_names == ["1", "2", "3", "4"]
    assert make(regression=True).checked().y_train.is_floating_point()


def test_arrays_of_whole_numbers_in_floating_point_are_warned_of(tmp_path: Path) -> None:
    save_arrays(tmp_path / "a", y_train=np.arange(20) % 2.0, y_test=np.arange(6) % 2.0)
    with pytest.warns(UserWarning, match="a: the labels are 2 "):
        assert Arrays(str(tmp_path / "a")).checked().num_classes == 1
