"""CSV files in other encodings and archives, without a header, or with another separator; other files by mistake."""

import bz2
import gzip
import lzma
import tarfile
from collections.abc import Callable
from functools import partial
from io import BytesIO
from pathlib import Path
from zipfile import ZipFile

import pytest
import torch
from layouts import table, write_csv, write_table
from refusals import check_refused

from fl_lightning.data import Table


def zipped(*names: str) -> Callable[[bytes], bytes]:
    def compress(content: bytes) -> bytes:
        buffer = BytesIO()
        with ZipFile(buffer, "w") as archive:
            for name in names:
                archive.writestr(name, content)
        return buffer.getvalue()

    return compress


def tarred(content: bytes) -> bytes:
    buffer = BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        info = tarfile.TarInfo("t.csv")
        info.size = len(content)
        archive.addfile(info, BytesIO(content))
    return buffer.getvalue()


def encoded(encoding: str) -> Callable[[bytes], bytes]:
    return lambda content: content.decode().replace("Basel", "Zürich").encode(encoding)


READ = {
    "UTF-8 with a mark": encoded("utf-8-sig"),
    "UTF-16": encoded("utf-16"),
    "UTF-32": encoded("utf-32"),
    "gzip": gzip.compress,
    "bzip2": bz2.compress,
    "xz": lzma.compress,
    "zip": zipped("t.csv"),
    "zip of a Mac": zipped("data/t.csv", "__MACOSX/data/._t.csv", "data/"),
    "UTF-16 in gzip": lambda content: gzip.compress(encoded("utf-16")(content)),
    "Windows line ends": lambda content: content.replace(b"\r\n", b"\n").replace(b"\n", b"\r\n"),
}


@pytest.mark.parametrize("case", READ)
@pytest.mark.parametrize(
    "ending",
    ["csv", pytest.param("csv.gz", marks=pytest.mark.thorough), pytest.param("data", marks=pytest.mark.thorough)],
)
def test_tables_in_other_encodings_and_archives_are_read(case: str, ending: str, tmp_path: Path) -> None:
    write_table(tmp_path / "plain.csv")
    plain = Table(str(tmp_path / "plain.csv"), "label", ["age", "town"]).checked()
    path = tmp_path / f"t.{ending}"
    path.write_bytes(READ[case]((tmp_path / "plain.csv").read_bytes()))
    data = Table(str(path), "label", ["age", "town"]).checked()
    assert torch.equal(data.x_train[:, 0], plain.x_train[:, 0])
    assert data.schema.columns[1].categories in (["Basel", "Bern", "Chur"], ["Bern", "Chur", "Zürich"])


def test_a_parquet_file_is_read_under_any_name(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    pandas = pytest.importorskip("pandas")
    pandas.DataFrame(table()).to_parquet(tmp_path / "t.csv")
    assert Table(str(tmp_path / "t.csv"), "label", ["age"]).checked().num_classes == 2


OTHER: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "Latin-1": (encoded("latin-1"), "not a readable CSV file (its text is not utf-8: "),
    "UTF-16 without a mark": (encoded("utf-16-le"), "is a binary file (or text in UTF-16"),
    "tar": (tarred, "is a tar archive"),
    "tar in gzip": (lambda content: gzip.compress(tarred(content)), "is a tar archive"),
    "two files": (zipped("a.csv", "b.csv"), "is a zip archive of 2 files"),
    "xlsx": (zipped("[Content_Types].xml", "xl/workbook.xml"), "is an Excel workbook"),
    "xls": (lambda content: b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + content, "is an Excel workbook"),
    "zstd": (lambda content: b"\x28\xb5\x2f\xfd" + content, "is a zstd archive"),
    "LFS": (lambda content: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "is a pointer of Git LFS"),
    "web page": (lambda content: b"<!DOCTYPE html>\n<html></html>", "is a web page"),
    "Feather": (lambda content: b"ARROW1\0\0" + content, "is a Feather file"),
    "pickle": (lambda content: b"\x80\x04" + content, "is a pickle"),
    "JSON lines": (lambda content: b'{"age": 1, "label": "a"}\n', "is JSON"),
    "ARFF": (lambda content: b"@relation t\n@data\n" + content, "is an ARFF file"),
    "comment": (lambda content: b"# exported on Monday\n" + content, "begins with '# exported on Monday'"),
    "Excel's separator": (lambda content: b"\xef\xbb\xbfsep=,\r\n" + content, "begins with 'sep=,'"),
    "half a gzip file": (lambda content: gzip.compress(content)[:-20], "not a readable CSV file ("),
}


@pytest.mark.parametrize("case", OTHER)
def test_other_files_are_refused_by_what_they_are(case: str, tmp_path: Path) -> None:
    change, expected = OTHER[case]
    write_table(tmp_path / "t.csv")
    (tmp_path / "t.csv").write_bytes(change((tmp_path / "t.csv").read_bytes()))
    make = partial(Table, str(tmp_path / "t.csv"), "label", ["age"])
    check_refused(make, "dataset.path", f": {tmp_path}/t.csv: {expected}")


@pytest.mark.parametrize(
    "named", [",", pytest.param(";", marks=pytest.mark.thorough), pytest.param("\t", marks=pytest.mark.thorough)]
)
@pytest.mark.parametrize("used", [";", "\t", "|", " "])
def test_another_separator_is_named_also_with_decimal_commas(named: str, used: str, tmp_path: Path) -> None:
    if named == used:
        return
    columns = {"age": ["1,5", "2,5"] * 5, "label": ["no", "yes"] * 5}
    write_csv(tmp_path / "t.csv", columns, used)
    make = partial(Table, str(tmp_path / "t.csv"), "label", decimal=",")
    options = {"separator": named} if named != "," else {"separator": ",", "decimal": "."}
    check_refused(lambda: make(**options), "dataset.separator", f"{used!r}?")
    assert make(separator=used).checked().in_shape == (1,)


HINT = "If the first line is a sample"


def without_header(path: Path, columns: dict[str, list]) -> str:
    write_csv(path, columns)
    path.write_text(path.read_text().partition("\n")[2])
    return str(path)


def test_a_file_without_a_header_is_refused_with_the_fix(tmp_path: Path) -> None:
    columns = {"age": [31, 42] * 10, "town": ["Bern", "Chur"] * 10, "label": ["no", "yes"] * 10}
    path = without_header(tmp_path / "t.csv", columns)
    check_refused(lambda: Table(path, "label"), "dataset.label", "'label'", "31, Bern, no. ", HINT)
    check_refused(lambda: Table(path, "no"), "dataset.label", "'no' is also one of its values", HINT)
    same = without_header(tmp_path / "same.csv", {"a": [0, 1] * 10, "b": [0, 1] * 10, "label": ["x", "y"] * 10})
    check_refused(lambda: Table(same, "label"), "dataset.path", f": {same}: ", "'0'", HINT)


def test_numbers_as_names_of_columns_are_warned_of_only_if_they_do_not_ascend(tmp_path: Path) -> None:
    path = without_header(tmp_path / "t.csv", {"a": [5.5, 7] * 10, "b": [1.5, 2] * 10, "label": [3, 2] * 10})
    with pytest.warns(UserWarning, match=rf"^scenario.dataset.path: .*{path} .* 5.5, 1.5, 3. {HINT}"):
        Table(path, "3").checked()
    write_csv(tmp_path / "years.csv", {"2024": [1, 2] * 10, "2025": [1, 2] * 10, "label": ["a", "b"] * 10})
    assert Table(str(tmp_path / "years.csv"), "label").checked().in_shape == (2,)


@pytest.mark.parametrize("names", [("Training", "TEST"), ("train", "testing"), ("train_set", "test_set")])
def test_a_split_column_can_use_other_names(names: tuple[str, str], tmp_path: Path) -> None:
    write_csv(tmp_path / "t.csv", table() | {"part": [names[0]] * 30 + [names[1]] * 10})
    data = Table(str(tmp_path / "t.csv"), "label", ["age"], split="part").checked()
    assert (len(data.y_train), len(data.y_test)) == (30, 10)
