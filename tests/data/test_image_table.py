"""Images that a table lists by their paths."""

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from layouts import SITES, write_csv, write_image_table
from refusals import check_refused, empty, refusal

from fl_lightning.data import ByClient, ImageTable, LoadedData, Scenario


def values(data: LoadedData, split: str) -> list[int]:
    """Return the value of each image of a split."""
    return getattr(data, f"x_{split}")[:, 0, 0, 0].tolist()


@pytest.mark.parametrize("cache", [None, "cache"])
def test_image_label_and_client_of_a_row_stay_together(cache: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    write_image_table(Path("images.csv"))
    for _ in range(2):
        data = ImageTable("images.csv", client="site", split="split", cache=cache).checked()
        assert data.in_shape == (1, 8, 6)
        assert values(data, "test") == [i for i in range(36) if i // 6 % 3 == 2]
        assert values(data, "train") == [i for i in range(36) if i // 6 % 3 < 2]
        assert data.y_train.tolist() == [i // 3 % 2 for i in values(data, "train")]
        assert data.client_test.tolist() == [SITES[i % 3] for i in values(data, "test")]
    assert data.class_names == ["ill", "well"]
    assert len(list(Path().glob("cache/*"))) == (cache is not None)
    assert Scenario(ImageTable("images.csv", client="site"), ByClient()).build(0).client_ids == list(SITES)


def test_several_columns_are_multi_label_targets(tmp_path: Path) -> None:
    columns = write_image_table(tmp_path / "images.csv")
    write_csv(tmp_path / "images.csv", columns | {"cold": [1, 0, 0] * 12})
    data = ImageTable(str(tmp_path / "images.csv"), label=["flu", "cold"], split="split").checked()
    assert data.y_test.tolist() == [[i % 2, int(i % 3 == 0)] for i in values(data, "test")]


def test_paths_start_from_the_tables_folder_or_the_given_one(tmp_path: Path) -> None:
    columns = write_image_table(tmp_path / "images.csv")
    (tmp_path / "tables").mkdir()
    shutil.copy(tmp_path / "images.csv", tmp_path / "tables")
    moved = partial(ImageTable, str(tmp_path / "tables" / "images.csv"))
    assert "images.csv: " in refusal(moved)
    assert len(moved(folder=str(tmp_path)).checked().y_train) == 29
    write_csv(tmp_path / "absolute.csv", columns | {"path": [str(tmp_path / path) for path in columns["path"]]})
    assert len(ImageTable(str(tmp_path / "absolute.csv")).checked().y_train) == 29
    write_image_table(tmp_path / "second" / "images.csv", n=6)
    shutil.rmtree(tmp_path / "scans")
    write_image_table(tmp_path / "first" / "images.csv", n=12)
    first, second = (str(tmp_path / name / "images.csv") for name in ("first", "second"))
    (tmp_path / "second" / "scans").rename(tmp_path / "second" / "others")
    write_csv(Path(second), {"path": [f"others/{i:03}.png" for i in range(6)], "label": ["ill", "well"] * 3})
    data = ImageTable(first, test_path=second).checked()
    assert values(data, "test") == list(range(6))


@pytest.mark.parametrize("options", [{}, {"cache": "cache"}])
@pytest.mark.parametrize(
    ("damage", "why"), [(Path.unlink, ""), (empty, "not a readable image ("), (Path.mkdir, "is a folder")]
)
def test_a_missing_or_damaged_image_names_its_row(
    damage: Any, why: str, options: dict, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    write_image_table(Path("images.csv"))
    path = Path("scans/016.png")
    if damage == Path.mkdir:
        path.unlink()
    damage(path)
    place = "column 'path' holds 'scans/016.png' in row 17 of images.csv: scans/016.png: "
    check_refused(lambda: ImageTable("images.csv", **options), "dataset.image", f"{place}{why}")


def test_columns_and_folders_that_are_no_paths_are_refused(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    columns = write_image_table(Path("images.csv"))
    make = partial(ImageTable, "images.csv")
    check_refused(lambda: make(image="paths"), "dataset.image", "'paths'", "'path'?")
    check_refused(lambda: make(image="flu"), "dataset.image", "'flu' holds 0 in row 1 of images.csv")
    check_refused(lambda: make(folder="scan"), "dataset.folder", ": scan: no such folder")
    check_refused(lambda: make(label="path"), "dataset.label", "'path': image")
    write_csv(Path("images.csv"), columns | {"path": [*columns["path"][:-1], ""]})
    check_refused(make, "dataset.image", "'path'", "1 of 36 rows, first in row 36 of images.csv")
