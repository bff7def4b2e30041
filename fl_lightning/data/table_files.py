"""Reading of CSV and Parquet files, and the base class of datasets with one sample per row of such a file."""

from __future__ import annotations

import bz2
import codecs
import gzip
import lzma
import os
import re
import warnings
from collections import Counter
from collections.abc import Collection, Sequence, Set
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast
from zipfile import ZipFile

import numpy as np

from fl_lightning.core.errors import ConfigError, check_instance, one_line, require_extra
from fl_lightning.core.names import join_names
from fl_lightning.data.checks import path_text
from fl_lightning.data.columns import NO_HEADER, client_ids, column_error, find_column, refuse_missing
from fl_lightning.data.custom_data import CustomDataset, Samples, existing_path, split_of
from fl_lightning.data.datasets import KEY
from fl_lightning.data.files import BadFile, is_left_behind, naming_file, open_file
from fl_lightning.data.labels import Labels, read_known_classes, read_labels, refuse_untrained_classes
from fl_lightning.data.number_text import NumberFormat, is_number
from fl_lightning.data.schema import is_numeric

if TYPE_CHECKING:
    import pandas as pd

SNIFFED_BYTES = 1 << 12
"""Number of bytes at the start of a file from which its encoding and its format are recognized."""

ENCODINGS = {
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
"""Encodings of text by the byte order mark at its start."""

OTHER_FILES = {
    b"ustar": "a tar archive",
    b"\x28\xb5\x2f\xfd": "a zstd archive",
    b"7z\xbc\xaf": "a 7z archive",
    b"Rar!": "a RAR archive",
    b"\xd0\xcf\x11\xe0": "an Excel workbook",
    b"SQLite format 3": "a database",
    b"version https://git-lfs": "a pointer of Git LFS, without the content",
    b"<!DOCTYPE": "a web page",
    b"<html": "a web page",
    b"ARROW1": "a Feather file",
    b"\x80": "a pickle",
    b"{": "JSON",
    b"[": "JSON",
    b"@": "an ARFF file",
}
"""Files that are no tables, by the bytes at their start or, for tar archives, at byte 257."""

SEPARATOR = re.compile(r"[^\w\n\r\0\"'()\[\]{}.+-]")
"""Characters that may separate columns: not part of names or numbers, no quotes, brackets, NUL or line breaks."""


class FileTable(CustomDataset):
    """Base class of datasets with one sample per row of a CSV or Parquet file. `Table` describes the arguments."""

    categorical: Set[str] = frozenset()
    schema: str | None = None

    def __init__(
        self,
        path: str,
        label: str | list[str],
        regression: bool | None,
        client: str | None,
        split: str | None,
        test_path: str | None,
        test_share: float,
        separator: str,
        decimal: str,
        thousands: str | None,
    ) -> None:
        super().__init__(test_share)
        if split is not None and test_path is not None:
            raise ConfigError(f"{KEY}.split: test_path holds the test rows already. Leave out one of the two")
        if not separator.isascii() or not SEPARATOR.fullmatch(separator):
            raise ConfigError(
                f"{KEY}.separator: {one_line(repr(separator))} cannot separate columns. Give one character, such as "
                "',', ';', '|' or a tab (\"\\t\" in YAML, $'\\t' in a shell)"
            )
        if thousands is not None and not re.fullmatch(r"[^\w+-]|_", thousands):
            what = f"{one_line(repr(thousands))} is not one character between digits, such as ',' or ' '"
            raise ConfigError(f"{KEY}.thousands: {what}. Leave it out if there is none")
        if decimal not in (".", ","):
            raise ConfigError(f"{KEY}.decimal: {one_line(repr(decimal))} is neither '.' nor ','. Set one of them")
        for name, other in (("separator", separator), ("thousands", thousands)):
            if decimal == other:
                raise ConfigError(f"{KEY}.decimal: {name} is the same character ({decimal!r}). Set {KEY}.{name}, too")
        self.path, self.separator = path_text(f"{KEY}.path", path), separator
        self.test_path = None if test_path is None else path_text(f"{KEY}.test_path", test_path)
        self.number_format = NumberFormat(decimal, thousands)
        check_instance(f"{KEY}.label", label, str | list | tuple, "Give the name of the label column")
        self.label = [label] if isinstance(label, str) else list(label)
        if not self.label:
            raise ConfigError(f"{KEY}.label: names no column. Name the label column")
        self.regression, self.client, self.split = regression, client, split

    def _samples(self) -> Samples:
        """Read the table files, and return the labels, clients and test mask of all rows.

        The data frame is indexed by file and row number, for error messages.
        """
        import pandas as pd

        text = self._text_columns()
        frame, test = self._read("path", self.path, text), None
        self._check_columns(list(frame.columns))
        self._refuse_missing_header(frame)
        if self.test_path is None:
            frame = pd.concat([frame], keys=[self.path])
        else:
            rest = self._read_test(self.test_path, text, frame).reindex(columns=frame.columns)
            categorical = self.categorical & set(frame.columns)
            # `read_csv` reads the code 01 as a number, but as text if the file also has A1.
            if mixed := [name for name in categorical if is_numeric(frame[name]) != is_numeric(rest[name])]:
                frame = self._read("path", self.path, mixed)
                rest = self._read("test_path", self.test_path, mixed).reindex(columns=frame.columns)
            test = np.arange(len(frame) + len(rest)) >= len(frame)
            frame = pd.concat([frame, rest], keys=[self.path, self.test_path])
        labels = self._read_labels([frame[name] for name in self.label])
        client = None if self.client is None else client_ids(frame[self.client])
        test = test if self.split is None else self._test_rows(frame[self.split])
        classes = labels.classes if len(self.label) == 1 else None
        if test is not None and classes is not None and self.schema is None:
            refuse_untrained_classes(frame[self.label[0]], labels, test)
        return Samples((frame, classes), labels, client, test)

    def _read_labels(self, columns: Sequence[pd.Series]) -> Labels:
        if self.known_classes is not None and len(columns) == 1:
            return read_known_classes(columns[0], self.known_classes, "listed under classes")
        return read_labels(columns, self.regression)

    def _read(self, key: str, path: str, text: Collection[str]) -> pd.DataFrame:
        return read_table(key, path, self.separator, self.number_format, text)

    def _text_columns(self) -> Collection[str]:
        """Return the names of columns to read as text, also if they look like numbers."""
        return ()

    def _used(self, columns: list[str]) -> list[str]:
        """Return those of a table's columns that samples are made from."""
        return [name for names in self._columns().values() for name in names]

    def _read_test(self, path: str, text: Collection[str], training: pd.DataFrame) -> pd.DataFrame:
        """Read the test rows, and check that they have the columns of the training rows, with the same kind of values.

        Args:
            path: The file with the test rows.
            text: Names of columns to read as text.
            training: The training rows.
        """
        test = self._read("test_path", path, text)
        any_kind = {*text, *self.categorical, self.client, self.split}
        for name in self._used(list(training.columns)):
            find_column(name, list(test.columns), "test_path")
            numeric = is_numeric(training[name])
            if name in any_kind or numeric == is_numeric(test[name]) or test[name].isna().all():
                continue
            one, other = ("numbers", "text") if numeric else ("text", "numbers")
            what = f"column {one_line(repr(name))} holds {other}, but {one} in {one_line(self.path)}"
            raise ConfigError(f"{KEY}.test_path: {what}. Write it the same way in both files")
        if os.path.samefile(self.path, path):
            warnings.warn(
                f"{KEY}.test_path: {one_line(path)} is the same file as {KEY}.path: the test rows are "
                "training rows. Name another file, or leave test_path out",
                stacklevel=2,
            )
        return test

    def _columns(self) -> dict[str, Sequence[str]]:
        """Return the column names that the config gives for each option, such as `label` or `client`."""
        single = {"client": self.client, "split": self.split}
        return {"label": self.label, **{key: [name] for key, name in single.items() if name is not None}}

    def _check_columns(self, columns: list[str]) -> None:
        used: dict[str, str] = {}
        for key, names in self._columns().items():
            for name in names:
                find_column(name, columns, key)
                if name in used:
                    also = f"{used[name]} names it too" if used[name] != key else "is named twice"
                    raise ConfigError(f"{KEY}.{key}: column {one_line(repr(name))}: {also}. Use it once")
                used[name] = key

    def _refuse_missing_header(self, frame: pd.DataFrame) -> None:
        """Raise an error, or warn, if the names of the columns are probably the values of a sample."""
        for name in self.label:
            if not is_numeric(frame[name]) and (frame[name] == name).any():
                what = f"{one_line(repr(name))} is also one of its values. {NO_HEADER}"
                raise ConfigError(f"{KEY}.label: column {what}")
        numbers = [float(name) for name in frame.columns if is_number(name)]
        if any(one >= next_one for one, next_one in pairwise(numbers)):  # names such as years ascend
            shown = one_line(join_names(frame.columns))
            warnings.warn(
                f"{KEY}.path: the columns of {one_line(self.path)} are named {shown}. {NO_HEADER}", stacklevel=2
            )

    @staticmethod
    def _test_rows(column: pd.Series) -> np.ndarray:
        refuse_missing(column, "split")
        splits = column.astype(str).map(split_of)
        if not (valid := splits.isin(["train", "test"])).all():
            other = one_line(repr(column[~valid].iloc[0]))
            raise column_error(column, "split", f"holds {other}. Its values must be train and test")
        return (splits == "test").to_numpy(dtype=bool)


def read_table(
    key: str, path: str, separator: str, number_format: NumberFormat, text: Collection[str] = ()
) -> pd.DataFrame:
    """Read a CSV or Parquet file as a data frame, with row numbers from 1 as the index.

    The columns `text` of a CSV file are read as text, so that the code 01 does not become the number 1.
    """
    import pandas as pd

    try:
        with open_file(existing_path(path, key=key), "table") as file:
            parquet = path.endswith((".parquet", ".pq")) or file.read(4) == b"PAR1"
            file.seek(0)
            if parquet:
                with require_extra("parquet", f"{KEY}.{key}: Parquet needs the package pyarrow"):
                    import pyarrow  # noqa: F401
            with naming_file(Path(path), "Parquet file" if parquet else "CSV file"):
                frame = _read_parquet(path, file) if parquet else _read_csv(path, file, separator, number_format, text)
    except BadFile as error:
        raise ConfigError(f"{KEY}.{key}: {error}") from error
    frame.columns = [str(name) for name in frame.columns]
    if not len(frame):
        raise ConfigError(f"{KEY}.{key}: {one_line(path)}: has no rows")
    frame.index = pd.RangeIndex(1, len(frame) + 1)
    if number_format != NumberFormat():
        for name in frame.columns:
            if name not in text and not is_numeric(frame[name]):
                frame[name] = _as_numbers(frame[name], number_format)
    return frame


def _as_numbers(column: pd.Series, number_format: NumberFormat) -> pd.Series:
    """Return a column converted to numbers, if all of its values are numbers in this format or missing."""
    present = column.dropna()
    if not all(isinstance(value, str) for value in present):
        return column
    numbers = number_format.parse(present)
    return numbers.reindex(column.index) if numbers.notna().all() else column


def _read_parquet(path: str, file: BinaryIO) -> pd.DataFrame:
    import pandas as pd
    from pyarrow.parquet import read_schema

    _refuse_duplicates(path, read_schema(file).names)
    file.seek(0)
    return pd.read_parquet(file)


def _read_csv(
    path: str, file: BinaryIO, separator: str, number_format: NumberFormat, text: Collection[str]
) -> pd.DataFrame:
    import pandas as pd

    file = decompress(path, file)
    encoding = _check_start(path, file.read(SNIFFED_BYTES))
    options: dict[str, Any] = {"sep": separator, "encoding": encoding}
    try:
        file.seek(0)
        # `read_csv` would rename a second column `a` to `a.1`.
        header = pd.read_csv(file, **options, header=None, nrows=1, dtype=str, keep_default_na=False)
        _check_header(path, header, separator)
        file.seek(0)
        options |= {"decimal": number_format.decimal, "dtype": dict.fromkeys(text, str)}
        with warnings.catch_warnings():
            warnings.simplefilter("error", pd.errors.ParserWarning)  # a row of more cells than the header has
            return pd.read_csv(file, **options, index_col=False, low_memory=False)
    except UnicodeError as error:
        fix = "Save it as UTF-8, for example with iconv -f windows-1252 -t utf-8"
        raise BadFile(Path(path), f"not a readable CSV file (its text is not {encoding}: {error}). {fix}") from error


def _check_start(path: str, start: bytes) -> str:
    """Check that a file begins as a CSV file with a header, and return its encoding."""
    encoding = next((name for mark, name in ENCODINGS.items() if start.startswith(mark)), "utf-8")
    kind = next((kind for mark, kind in OTHER_FILES.items() if mark in (start[: len(mark)], start[257:262])), None)
    if encoding == "utf-8" and b"\0" in start:
        kind = kind or "a binary file (or text in UTF-16, which you can save as UTF-8)"
    if kind:
        raise BadFile(Path(path), f"is {kind}, it needs to be a CSV or Parquet file")
    if encoding == "utf-8" and (line := re.match(rb"(?:\xef\xbb\xbf)?((?:# |sep=)[^\r\n]*)", start)):
        first = one_line(line[1].decode(errors="replace"))
        raise BadFile(Path(path), f"begins with {first!r} instead of the names of the columns. Remove this line")
    return encoding


def _check_header(path: str, header: pd.DataFrame, separator: str) -> None:
    """Check a CSV file's first row, as a data frame: the columns' names differ, and the separator separates them."""
    names = [name for name in header.iloc[0] if name]
    _refuse_duplicates(path, names)
    other = [sign for sign in ",;\t| " if sign != separator and sign in "".join(names)]
    if len(header.columns) == 1 and other:
        what = f"{one_line(path)} has only one column with this separator"
        raise ConfigError(f"{KEY}.separator: {what}. Did you mean {other[0]!r}?")


def _refuse_duplicates(path: str, names: Sequence[str]) -> None:
    if twice := [name for name, times in Counter(names).items() if times > 1]:
        hint = f" {NO_HEADER}" if is_number(twice[0]) else ""
        name = one_line(repr(twice[0]))
        raise BadFile(Path(path), f"two columns have the name {name}. Rename one of them{hint and '.'}{hint}")


def decompress(path: str, file: BinaryIO) -> BinaryIO:
    """Return the content of a file that is compressed with gzip, bzip2 or xz, or is the only file of a zip archive.

    Any other file is returned unchanged, from its beginning.
    """
    start = file.read(6)
    file.seek(0)
    for mark, open_compressed in ((b"\x1f\x8b", gzip.open), (b"BZh", bz2.open), (b"\xfd7zXZ\0", lzma.open)):
        if start.startswith(mark):
            return cast(BinaryIO, open_compressed(file))
    if not start.startswith(b"PK\3\4"):
        return file
    archive = ZipFile(file)
    names = [name for name in archive.namelist() if not name.endswith("/") and not is_left_behind(name)]
    if len(names) != 1:
        kind = "an Excel workbook" if "[Content_Types].xml" in names else f"a zip archive of {len(names)} files"
        raise BadFile(Path(path), f"is {kind}, it needs to be a CSV or Parquet file")
    return cast(BinaryIO, archive.open(names[0]))
