"""Numbers and dates that a table holds as text: refused with the fix, or read with `decimal` and `thousands`."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from layouts import write_csv, write_hugging_face, write_image
from refusals import check_refused

from fl_lightning.data import HuggingFace, ImageTable, Table, TextTable

INCOMES = np.random.default_rng(0).normal(30_000, 5_000, 40).round(2).tolist()
LABELS = ["no", "yes"] * 20
KEY = "scenario.dataset."


def write_incomes(path: Path, form: Callable[[float], str], separator: str = ";", label: Any = LABELS) -> str:
    write_csv(path, {"income": [form(income) for income in INCOMES], "label": label}, separator)
    return str(path)


def european(value: float) -> str:
    return f"{value:,.2f}".translate(str.maketrans(",.", ".,"))


WRITTEN: dict[str, Callable[[float], str]] = {
    "decimal comma": lambda x: f"{x:.2f}".replace(".", ","),
    "thousands": lambda x: f"{x:,.2f}",
    "European": european,
    "Swiss": lambda x: f"{x:,.2f}".replace(",", "\N{RIGHT SINGLE QUOTATION MARK}"),
    "thin spaces": lambda x: f"{x:,.2f}".replace(",", "\N{NARROW NO-BREAK SPACE}"),
    "Indian": lambda x: f"1,{int(x) // 1000:02},{int(x) % 1000:03}",
    "comma of both kinds": lambda x: f"{x / 1000:.3f}".replace(".", ","),
    "dollars": lambda x: f"${x:.2f}",
    "Euros": lambda x: f"{x:.2f} €",
    "currency code": lambda x: f"CHF {x:.2f}",
    "unit": lambda x: f"{x:.2f} kg",
    "percent": lambda x: f"{x:.2f}%",
    "no-break space": lambda x: f"{x:.2f}\N{NO-BREAK SPACE}",
    "accounting": lambda x: f"({x:.2f})",
    "zero width": lambda x: f"{x:.2f}\N{ZERO WIDTH SPACE}",
    "about": lambda x: f"~{x:.2f}",
    "minus sign": lambda x: f"\N{MINUS SIGN}{x:.2f}",
    "full width": lambda x: "".join(chr(ord(d) + 0xFEE0) for d in str(int(x))),
    "dates": lambda x: f"{int(x) % 28 + 1:02}.11.2026",
    "dates with names of months": lambda x: f"{int(x) % 28 + 1} {('Jan', 'March', 'Sept.', 'dec')[int(x) % 4]} 2026",
    "American dates": lambda x: f"Nov {int(x) % 28 + 1}, 2026",
    "days of a year": lambda x: f"{int(x) % 28 + 1}-Nov",
    "dates in German": lambda x: f"{int(x) % 28 + 1}. {('März', 'Mai', 'Dezember')[int(x) % 3]} 2026",
    "dates in Spanish": lambda x: f"{int(x) % 28 + 1} de {('enero', 'marzo', 'mayo')[int(x) % 3]} de 2026",
    "Fortran": lambda x: f"{x:.3E}".replace("E", "D"),
    "base 16": lambda x: hex(int(x)),
    "ratios": lambda x: f"{int(x) % 90 + 90}/{int(x) % 50 + 50}",
    "durations": lambda x: f"{int(x) % 23}h{int(x) % 59}m",
    "times": lambda x: f"{int(x) % 24:02}:{int(x) % 60:02}",
}


@pytest.mark.filterwarnings("ignore:.*a category that is not known")
@pytest.mark.parametrize("case", WRITTEN)
def test_numbers_and_dates_written_as_text_are_refused_with_the_fix(case: str, tmp_path: Path) -> None:
    make = partial(Table, write_incomes(tmp_path / "t.csv", WRITTEN[case]), "label", separator=";")
    what = "dates" if case in ("times", "days of a year") or "dates" in case else "numbers"
    facts = (f"'income' holds {what}", f" in row 1 of {tmp_path}/t.csv. ", f"{KEY}categorical")
    check_refused(make, "dataset.features", *facts)
    assert make(categorical=["income"]).checked().schema.columns[0].categories


FORMATS = {
    "decimal comma": {"decimal": ","},
    "thousands": {"thousands": ","},
    "European": {"decimal": ",", "thousands": "."},
    "Swiss": {"thousands": "'"},
    "thin spaces": {"thousands": " "},
}


@pytest.mark.parametrize("case", FORMATS)
@pytest.mark.parametrize("parquet", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_with_decimal_and_thousands_numbers_are_read_as_plain_ones(case: str, parquet: bool, tmp_path: Path) -> None:
    paths = [write_incomes(tmp_path / name, form) for name, form in (("a.csv", str), ("b.csv", WRITTEN[case]))]
    if parquet:
        pytest.importorskip("pyarrow")
        pd.read_csv(paths[1], sep=";", dtype=str).to_parquet(tmp_path / "b.parquet")
        paths[1] = str(tmp_path / "b.parquet")
    plain, written = (
        Table(path, "label", separator=";", **options).checked()
        for path, options in zip(paths, ({}, FORMATS[case]), strict=True)
    )
    assert torch.equal(plain.x_train, written.x_train)
    assert written.schema.columns[0].categories is None


def test_a_decimal_comma_does_not_change_other_texts_dates_and_codes(tmp_path: Path) -> None:
    codes = {"version": ["1.2", "1.10", "2.0", "2.1"] * 10, "code": ["1.234.5", "a", "b", "c"] * 10, "label": LABELS}
    write_csv(tmp_path / "t.csv", codes, ";")
    read = partial(Table, str(tmp_path / "t.csv"), "label", separator=";", decimal=",", thousands=".")
    schema = read(categorical=["version", "code"]).checked().schema
    assert [column.categories for column in schema.columns] == [
        ["1.10", "1.2", "2.0", "2.1"],
        ["1.234.5", "a", "b", "c"],
    ]


CATEGORIES = {
    "few with a unit": ["36 months", "60 months", "12 months", "24 months"],
    "ranges": ["[0-10)", "[10-20)", "[20-30)", "[30-40)"],
    "comparisons": ["<30", ">30", "<=50K", ">50K"],
    "quarters": ["Q1", "Q2", "Q3", "Q4"],
    "ordinals": ["1st", "2nd", "3rd", "4th"],
    "codes with zeros": ["01-A", "02-B", "03-C", "04-D"],
    "half of them numbers": ["$1", "$2", "few", "many"],
    "months": ["January", "Feb", "March", "May"],
    "names like months": ["Mars 1", "Maya 12", "Decade 3", "Juno 4"],
    "versions": ["1.2.3", "1.2.4", "2.0.0", "2.0.1"],
}


@pytest.mark.parametrize("case", CATEGORIES)
def test_categories_with_digits_stay_categories(case: str, tmp_path: Path) -> None:
    write_csv(tmp_path / "t.csv", {"kind": CATEGORIES[case] * 10, "label": LABELS})
    (column,) = Table(str(tmp_path / "t.csv"), "label").checked().schema.columns
    assert column.categories == sorted(CATEGORIES[case])


@pytest.mark.parametrize("key", ["features", "label"])
@pytest.mark.parametrize("text", ["[1, 2]", "['cat', 'a dog that is longer than forty characters']", '{"x": 1}'])
def test_lists_written_as_text_are_refused(text: str, key: str, tmp_path: Path) -> None:
    columns = {"kind": ["a", "b"] * 20, "label": LABELS}
    write_csv(tmp_path / "t.csv", columns | {"kind" if key == "features" else "label": [text] * 39 + ["other"]})
    check_refused(partial(Table, str(tmp_path / "t.csv"), "label"), f"dataset.{key}", "holds lists written as text")


def test_a_number_in_another_form_among_numbers_is_refused_with_the_fix(tmp_path: Path) -> None:
    write_csv(tmp_path / "t.csv", {"size": ["12,5", *range(39)], "label": LABELS}, ";")
    make = partial(Table, str(tmp_path / "t.csv"), "label", separator=";")
    facts = ("'size'", f"row 1 of {tmp_path}/t.csv, '12,5'", f"{KEY}decimal", f"{KEY}categorical")
    check_refused(make, "dataset.features", *facts)


def test_numbers_in_a_text_column_of_parquet_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    pd.DataFrame({"size": [str(income) for income in INCOMES], "label": LABELS}).to_parquet(tmp_path / "t.parquet")
    make = partial(Table, str(tmp_path / "t.parquet"), "label")
    check_refused(make, "dataset.features", "column 'size' holds numbers", "'30628.65' in row 1")


@pytest.mark.parametrize("kind", [Table, TextTable, ImageTable])
def test_labels_written_as_text_are_refused_and_the_options_read_them(kind: Any, tmp_path: Path) -> None:
    columns = {"text": ["a b"] * 40, "path": ["a.png"] * 40, "label": [european(income) for income in INCOMES]}
    write_csv(tmp_path / "t.csv", columns, ";")
    write_image(tmp_path / "a.png", 1)
    make = partial(kind, str(tmp_path / "t.csv"), label="label", separator=";")
    for options in ({}, {"regression": True}):
        check_refused(make(**options), "dataset.label", "'label' holds numbers", "'30.628,65'", f"{KEY}decimal")
    read = make(decimal=",", thousands=".").load()
    assert sorted(torch.cat([read.y_train, read.y_test]).tolist()) == sorted(torch.tensor(INCOMES).tolist())
    assert make(regression=False).load().num_classes == 40


def test_labels_of_hugging_face_written_as_text_are_refused(tmp_path: Path, library: Any) -> None:
    rows = {"text": ["a b"] * 20, "label": [f"${i}.5" for i in range(20)]}
    library.Dataset.from_dict(rows).save_to_disk(str(tmp_path / "s"))
    facts = ("'label' holds numbers", "'$0.5'", f"{KEY}regression to false")
    check_refused(lambda: HuggingFace(str(tmp_path / "s")), "dataset.label", *facts)
    write_hugging_face(tmp_path / "other")
    assert HuggingFace(str(tmp_path / "other")).checked().num_classes == 2


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"decimal": ";"}, "decimal"),
        ({"decimal": ",", "separator": ","}, "decimal"),
        ({"decimal": ",", "separator": ";", "thousands": ","}, "decimal"),
        ({"thousands": ", "}, "thousands"),
        ({"thousands": "1"}, "thousands"),
        ({"thousands": ""}, "thousands"),
        ({"thousands": "-"}, "thousands"),
    ],
)
def test_impossible_number_formats_are_refused_by_their_key(options: dict, key: str, tmp_path: Path) -> None:
    check_refused(lambda: Table("t.csv", "label", **options), f"dataset.{key}")


@pytest.mark.parametrize("how", ["drawn", "split"])
def test_unknown_categories_of_any_test_rows_are_warned_of(how: str, tmp_path: Path) -> None:
    columns = {"street": [f"street {'abcdefghij'[i // 4]}{'klmn'[i % 4]}" for i in range(40)], "label": LABELS}
    split = {"split": "part"} if how == "split" else {}
    write_csv(tmp_path / "t.csv", columns | {"part": ["train", "train", "train", "test"] * 10})
    exclude = None if split else ["part"]
    with pytest.warns(UserWarning, match="^scenario.dataset.features: column 'street': ") as caught:
        Table(str(tmp_path / "t.csv"), "label", exclude=exclude, **split).checked()
    assert ("Leave the column out" in str(caught[0].message)) == (how == "drawn")
