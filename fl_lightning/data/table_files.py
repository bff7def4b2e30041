"""Reading of CSV and Parquet files, and the base class of datasets with one sample per row of such a file."""

from __future__ import annotations

import os
import re
import warnings
from collections import Counter
from collections.abc import Collection, Sequence, Set
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np

from fl_lightning.core.errors import ConfigError, one_line
from fl_lightning.data.custom_data import (
    KEY,
    CustomDataset,
    Labels,
    Samples,
    client_ids,
    column_error,
    existing_path,
    find_column,
    read_known_classes,
    read_labels,
    refuse_missing,
)
from fl_lightning.data.files import BadFile, open_file
from fl_lightning.data.schema import is_numeric

if TYPE_CHECKING:
    import pandas as pd

SEPARATOR = re.compile(r"[^\w\n\r\0\"'()\[\]{}.+-]")
"""Characters that may separate columns: not part of names or numbers, no quotes, brackets, NUL or line breaks."""


class FileTable(CustomDataset):
    """Base class of datasets with one sample per row of a CSV or Parquet file. `Table` describes the arguments."""

    categorical: Set[str] = frozenset()

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
    ) -> None:
        super().__init__(test_share)
        if split is not None and test_path is not None:
            raise ConfigError(f"{KEY}.split: test_path holds the test rows already. Leave out one of the two")
        if not separator.isascii() or not SEPARATOR.fullmatch(separator):
            raise ConfigError(
                f"{KEY}.separator: {one_line(repr(separator))} cannot separate columns. Give one character, such as "
                "',', ';', '|' or a tab (\"\\t\" in YAML, $'\\t' in a shell)"
            )
        self.path, self.test_path, self.separator = path, test_path, separator
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
        frame, test = read_table("path", self.path, self.separator, text), None
        self._check_columns(list(frame.columns))
        if self.test_path is None:
            frame = pd.concat([frame], keys=[self.path])
        else:
            rest = self._read_test(self.test_path, text).reindex(columns=frame.columns)
            categorical = self.categorical & set(frame.columns)
            # `read_csv` reads the code 01 as a number, but as text if the file also has A1.
            if mixed := [name for name in categorical if is_numeric(frame[name]) != is_numeric(rest[name])]:
                frame = read_table("path", self.path, self.separator, mixed)
                rest = read_table("test_path", self.test_path, self.separator, mixed).reindex(columns=frame.columns)
            test = np.arange(len(frame) + len(rest)) >= len(frame)
            frame = pd.concat([frame, rest], keys=[self.path, self.test_path])
        labels = self._read_labels([frame[name] for name in self.label])
        client = None if self.client is None else client_ids(frame[self.client])
        test = test if self.split is None else self._test_rows(frame[self.split])
        classes = labels.classes if len(self.label) == 1 else None
        return Samples((frame, classes), labels, client, test)

    def _read_labels(self, columns: Sequence[pd.Series]) -> Labels:
        if self.known_classes is not None and len(columns) == 1:
            return read_known_classes(columns[0], self.known_classes, "listed under classes")
        return read_labels(columns, self.regression)

    def _text_columns(self) -> Collection[str]:
        """Return the names of columns to read as text, also if they look like numbers."""
        return ()

    def _read_test(self, path: str, text: Collection[str]) -> pd.DataFrame:
        test = read_table("test_path", path, self.separator, text)
        for name in chain(*self._columns().values()):
            find_column(name, list(test.columns), "test_path")
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

    @staticmethod
    def _test_rows(column: pd.Series) -> np.ndarray:
        refuse_missing(column, "split")
        if not (valid := column.isin(["train", "test"])).all():
            other = one_line(repr(column[~valid].iloc[0]))
            raise column_error(column, "split", f"holds {other}. Its values must be train and test")
        return (column == "test").to_numpy(dtype=bool)


def read_table(key: str, path: str, separator: str, text: Collection[str] = ()) -> pd.DataFrame:
    """Read a CSV or Parquet file as a data frame, with row numbers from 1 as the index.

    The columns `text` of a CSV file are read as text, so that the code 01 does not become the number 1.
    """
    import pandas as pd

    if parquet := path.endswith((".parquet", ".pq")):
        _check_pyarrow(key)
    kind = "Parquet file" if parquet else "CSV file"
    try:
        with open_file(existing_path(path, key=key), kind) as file, warnings.catch_warnings():
            warnings.simplefilter("error", pd.errors.ParserWarning)  # a row of more cells than the header has
            names = Counter(_header(file, separator, parquet))
            if twice := [name for name, times in names.items() if times > 1]:
                name = one_line(repr(twice[0]))
                raise BadFile(Path(path), f"two columns have the name {name}. Rename one of them")
            file.seek(0)
            options = {"sep": separator, "index_col": False, "low_memory": False, "dtype": dict.fromkeys(text, str)}
            frame = pd.read_parquet(file) if parquet else pd.read_csv(file, **options)
    except BadFile as error:
        raise ConfigError(f"{KEY}.{key}: {error}") from error
    frame.columns = [str(name) for name in frame.columns]
    if not len(frame):
        raise ConfigError(f"{KEY}.{key}: {one_line(path)}: has no rows")
    other = [sign for sign in ",;\t|" if sign != separator and sign in frame.columns[0]]
    if len(frame.columns) == 1 and other:
        raise ConfigError(
            f"{KEY}.separator: {one_line(path)} has only one column with this separator. Did you mean {other[0]!r}?"
        )
    frame.index = pd.RangeIndex(1, len(frame) + 1)
    return frame


def _header(file: BinaryIO, separator: str, parquet: bool) -> list[str]:
    """Return the column names of a table file as they stand in the file, including duplicates.

    `pandas.read_csv` would rename a second `a` to `a.1`.
    """
    import pandas as pd

    if parquet:
        from pyarrow.parquet import read_schema

        return list(read_schema(file).names)
    first = pd.read_csv(file, sep=separator, header=None, nrows=1, dtype=str, keep_default_na=False)
    return [name for name in first.iloc[0] if name]


def _check_pyarrow(key: str) -> None:
    try:
        import pyarrow  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"{KEY}.{key}: Parquet needs the package pyarrow. Install it with: pip install 'fl-lightning[parquet]'"
        ) from error
