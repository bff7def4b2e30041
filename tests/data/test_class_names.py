"""Class names: where each dataset takes them from, in the order of the classes."""

from pathlib import Path
from typing import Any

import pytest
from layouts import (
    Pairs,
    table,
    write_cifar,
    write_csv,
    write_emnist,
    write_femnist,
    write_hugging_face,
    write_image_folder,
    write_imdb_csv,
)
from refusals import check_refused

from fl_lightning.data import (
    CIFAR10,
    EMNIST,
    FEMNIST,
    IMDB,
    Digits,
    HuggingFace,
    ImageFolder,
    LoadedData,
    Table,
    TextTable,
    TorchDataset,
)


def test_folders_and_label_values_name_the_classes(tmp_path: Path, library: Any) -> None:
    write_image_folder(tmp_path / "images")
    assert ImageFolder(str(tmp_path / "images")).checked().class_names == ["cat", "dog"]
    write_csv(tmp_path / "t.csv", {**table(), "stage": [3, 1] * 20, "text": ["a b"] * 40})
    path = str(tmp_path / "t.csv")
    assert Table(path, "label", ["age"]).checked().class_names == ["no", "yes"]
    assert Table(path, "stage", ["age"]).checked().class_names == ["1", "3"]
    assert Table(path, ["flu", "cold"], ["age"]).checked().class_names == ["flu", "cold"]
    assert Table(path, "days", ["age"]).checked().class_names is None
    assert TextTable(path).checked().class_names == ["no", "yes"]
    write_hugging_face(tmp_path / "saved")
    assert HuggingFace(str(tmp_path / "saved")).checked().class_names == ["cat", "dog"]


def test_lists_of_classes_of_hugging_face_have_names(tmp_path: Path, library: Any) -> None:
    labels = library.Sequence(library.ClassLabel(names=["flu", "cold", "other"]))
    features = library.Features(text=library.Value("string"), labels=labels)
    columns = {"text": ["a b"] * 10, "labels": [[0], [1, 2]] * 5}
    library.Dataset.from_dict(columns, features=features).save_to_disk(str(tmp_path / "saved"))
    assert HuggingFace(str(tmp_path / "saved")).checked().class_names == ["flu", "cold", "other"]


def test_public_datasets_have_their_authors_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_cifar(tmp_path, 10, monkeypatch)
    assert CIFAR10(str(tmp_path)).checked().class_names == [f"class {j}" for j in range(10)]  # as in batches.meta
    write_emnist(tmp_path, "letters")
    assert "".join(EMNIST("letters", str(tmp_path)).checked().class_names) == "abcdefghijklmnopqrstuvwxyz"
    write_imdb_csv(tmp_path)
    assert list(IMDB(str(tmp_path), layout="csv").checked().class_names) == ["negative", "positive"]
    write_femnist(tmp_path)
    names = FEMNIST(str(tmp_path)).checked().class_names
    assert [names[label] for label in (0, 10, 61)] == ["0", "A", "z"]
    assert Digits().load().class_names is None


@pytest.mark.parametrize(
    ("classes", "expected"), [(("a", "b", "c"), ["a", "b", "c"]), (["a", "b"], None), ([0, 1, 2], None), (None, None)]
)
def test_classes_of_a_torch_dataset_are_names_if_they_are_texts(classes: Any, expected: Any) -> None:
    data = Pairs()
    data.classes = classes
    assert TorchDataset(data, data).checked().class_names == expected


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("ab", "class_names is 'ab'"),
        ([0, 1], "class_names is [0, 1]"),
        (["a"], "class_names and num_classes differ: 1 and 10"),
    ],
)
def test_names_that_do_not_fit_the_classes_are_refused(names: Any, expected: str) -> None:
    class Named(Digits):
        def load(self) -> LoadedData:
            data = super().load()
            data.class_names = names
            return data

    check_refused(Named(), "dataset: Named", expected)
