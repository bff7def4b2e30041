"""Your own tables: numbers and categories, or texts, in CSV or Parquet files."""

from __future__ import annotations

import os
import re
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Literal

import numpy as np
import torch
from torch import Tensor

from fl_lightning.core.errors import ConfigError, one_line
from fl_lightning.data.datasets import Dataset, LoadedData
from fl_lightning.data.own import (
    KEY,
    check_share,
    client_ids,
    column_named,
    divided,
    held_out,
    placed,
    refuse_missing,
    refuse_not_finite,
    refuse_nul,
    spot,
    targets,
    token_ids,
)
from fl_lightning.data.reading import BadFile, opened
from fl_lightning.data.schema import Column, TableSchema, is_numeric
from fl_lightning.data.text import check_lengths
from fl_lightning.data.transforms import Normalize

if TYPE_CHECKING:
    import pandas as pd

MOST_CATEGORIES = 1_000
"""A column of more is a name, a number of a sample or a text, and would take a column of zeros for each."""

SEPARATOR = re.compile(r"[^\w\n\r\0\"'()\[\]{}.+-]")
"""A character that separates columns: no part of a name or number, no quote, bracket, NUL or line break."""


class _Rows(Dataset):
    """Samples that are rows of a file, some of its columns the labels.

    Args:
        path: The file.
        label: The label's column, or several.
        regression: Whether labels are numbers to be predicted; if that is not said, fractions are.
        client: Column of who each row comes from.
        split: Column that holds `train` and `test`.
        test_path: A second file, of the rows to test on.
        test_share: Share of the rows to test on where there is neither.
        separator: What stands between the columns of a text file.
    """

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
        if split is not None and test_path is not None:
            raise ConfigError(f"{KEY}.split: the rows of test_path are the test set; leave out one of the two")
        check_share(test_share)
        if not separator.isascii() or not SEPARATOR.fullmatch(separator):
            raise ConfigError(
                f"{KEY}.separator: {one_line(repr(separator))} cannot separate columns. Give one character, such as "
                "',', ';', '|' or a tab (\"\\t\" in YAML, $'\\t' in a shell)"
            )
        self.path, self.test_path, self.separator = path, test_path, separator
        self.label = [label] if isinstance(label, str) else list(label)
        if not self.label:
            raise ConfigError(f"{KEY}.label: it names no column")
        self.regression, self.client, self.split, self.test_share = regression, client, split, test_share

    def load(self) -> LoadedData:
        """Read the file or files."""
        frame, given = self._read()
        labels = [frame[name] for name in self.label]
        y, outputs = targets(labels, self.regression)
        client = None if self.client is None else client_ids(frame[self.client])
        test = self._test_rows(frame, y, client) if given is None else np.arange(len(frame)) >= given
        order = np.argsort(test, kind="stable")  # the training rows first
        train = len(order) - int(test.sum())
        x, schema = self._inputs(frame.iloc[order], train)
        data = divided(x, y[order], train, outputs, Normalize(), client=None if client is None else client[order])
        if schema:
            classes = np.unique(labels[0].to_numpy(object)).tolist() if y.dtype == torch.int64 else None
            schema = replace(schema, label=self.label, classes=classes, client=self.client)
        return replace(data, schema=schema)

    def _inputs(self, frame: pd.DataFrame, train: int) -> tuple[Tensor, TableSchema | None]:
        """Return a row of numbers for each row, of which the first `train` are to train on; and their schema."""
        raise NotImplementedError

    def _columns(self) -> dict[str, Sequence[str]]:
        """The columns that options name, by option."""
        single = {"client": self.client, "split": self.split}
        return {"label": self.label, **{key: [name] for key, name in single.items() if name is not None}}

    def _check_columns(self, columns: list[str]) -> None:
        used: dict[str, str] = {}
        for key, names in self._columns().items():
            for name in names:
                column_named(name, columns, key)
                if name in used:
                    also = f"{used[name]} names it too" if used[name] != key else "it is named twice"
                    raise ConfigError(f"{KEY}.{key}: column {one_line(repr(name))}: {also}")
                used[name] = key

    def _read(self) -> tuple[pd.DataFrame, int | None]:
        """All rows, each known by its file and number; and how many of them are to train on, if the files say that."""
        import pandas as pd

        frame = read_table("path", self.path, self.separator)
        self._check_columns(list(frame.columns))
        if self.test_path is None:
            return pd.concat([frame], keys=[self.path]), None
        test = read_table("test_path", self.test_path, self.separator)
        for name in (name for names in self._columns().values() for name in names):
            column_named(name, list(test.columns), "test_path")
        if os.path.samefile(self.path, self.test_path):
            warnings.warn(
                f"{KEY}.test_path: {one_line(self.test_path)} is the same file as {KEY}.path: the test rows are "
                "training rows. Name another file, or leave test_path out",
                stacklevel=2,
            )
        test = test.reindex(columns=frame.columns)
        return pd.concat([frame, test], keys=[self.path, self.test_path]), len(frame)

    def _test_rows(self, frame: pd.DataFrame, y: Tensor, client: np.ndarray | None) -> np.ndarray:
        if self.split is None:
            return held_out(y, self.test_share, client)
        column = frame[self.split]
        refuse_missing(column, "split")
        if not (known := column.isin(["train", "test"])).all():
            odd = one_line(repr(column[~known].iloc[0]))
            raise ConfigError(f"{KEY}.split: column {self.split!r} holds {odd}; it needs to hold train and test")
        return (column == "test").to_numpy(dtype=bool)


class Table(_Rows):
    """Your own table in a CSV or Parquet file: columns of numbers and categories, and one or more of labels.

    Labels that are text or whole numbers are classes, fractions are numbers to be predicted, and several columns of 0
    and 1 are labels that a row may have several of. Text columns are categories, and so are those that `categorical`
    names.

    Args:
        path: The file. Its columns have names; `.parquet` is Parquet, any other file is text with `separator`.
        label: The label's column, or a list of several.
        features: Columns to learn from; all that no other option names, if they have a name.
        categorical: Columns of numbers that stand for categories.
        encoding: What becomes of a category: `one_hot` a column for each that the training rows hold, all 0 for any
            other; `codes` one column that counts them from 1, 0 for any other.
        standardize: Shift and scale columns of numbers, and codes, to mean 0 and standard deviation 1 of the training
            rows.
        regression: Whether labels are numbers to be predicted; if that is not said, fractions are.
        client: Column of who each row comes from; `ByClient` deals rows to clients by it.
        split: Column that holds `train` or `test`.
        test_path: A second file, of the rows to test on.
        test_share: Share of the rows to test on where there is neither: of each class, or of each client's rows.
        separator: What stands between the columns of a text file.

    Raises:
        ConfigError: An option is out of range, or two exclude each other.
    """

    def __init__(
        self,
        path: str,
        label: str | list[str],
        features: list[str] | None = None,
        categorical: list[str] | None = None,
        encoding: Literal["one_hot", "codes"] = "one_hot",
        standardize: bool = True,
        regression: bool | None = None,
        client: str | None = None,
        split: str | None = None,
        test_path: str | None = None,
        test_share: float = 0.2,
        separator: str = ",",
    ) -> None:
        super().__init__(path, label, regression, client, split, test_path, test_share, separator)
        self.features, self.categorical = features, set(categorical or ())
        self.encoding, self.standardize = encoding, standardize

    def _columns(self) -> dict[str, Sequence[str]]:
        return {**super()._columns(), "features": self.features or ()}

    def _inputs(self, frame: pd.DataFrame, train: int) -> tuple[Tensor, TableSchema]:
        features = self._features(list(frame.columns))
        for name in self.categorical - set(features):
            raise ConfigError(
                f"{KEY}.categorical: {column_named(name, list(frame.columns), 'categorical')!r} is no feature"
            )
        schema = TableSchema([self._described(frame[name], train) for name in features], self.encoding)
        return schema.encode(schema.rows(frame)), schema

    def _features(self, columns: list[str]) -> list[str]:
        if self.features is not None:
            return self.features
        named = {name for names in self._columns().values() for name in names}
        # pandas writes its row numbers to a column without a name, and reads that as "Unnamed: 0".
        found = [name for name in columns if name not in named and not name.startswith("Unnamed: ")]
        if not found:
            raise ConfigError(f"{KEY}.path: {one_line(self.path)} has no columns left to learn from")
        return found

    def _described(self, column: pd.Series, train: int) -> Column:
        """Return a column's categories or scale, of its first `train` rows."""
        refuse_missing(column, "features", "fill it in, leave its row out, or leave the column out of the features")
        described = Column(str(column.name), str(column.dtype))
        if column.name not in self.categorical and is_numeric(column):
            refuse_not_finite(column, "features")
            return self._scaled(described, column, train)
        if column.name not in self.categorical:
            refuse_no_categories(column)
        refuse_nul(column, "features")
        import pandas as pd

        known = pd.Series(column.to_numpy(object if is_numeric(column) else str)[:train]).unique().tolist()
        described = replace(described, categories=sorted(known))
        if self.encoding == "codes":
            return self._scaled(described, column, train)
        if len(known) > MOST_CATEGORIES:
            raise ConfigError(
                f"{KEY}.features: column {column.name!r} holds {len(known):,} texts, each a column in one_hot; "
                "leave it out, or set scenario.dataset.encoding codes"
            )
        return described

    def _scaled(self, described: Column, column: pd.Series, train: int) -> Column:
        if not self.standardize:
            return described
        values = described.values(column)
        own = values[:train] + (described.categories is not None)  # codes count from 1
        # Rounded, so that the order in which a machine sums changes no bit of the data.
        mean, scale = (float(f"{number:.12g}") for number in (own.mean(), own.std() if np.ptp(own) else 1.0))
        return replace(described, mean=mean, scale=scale)


class TextTable(_Rows):
    """Your own texts in a CSV or Parquet file: a column of texts, and one or more of labels.

    The most frequent words of the training texts have an id, as in the datasets of texts that are there already.

    Args:
        path: The file. Its columns have names; `.parquet` is Parquet, any other file is text with `separator`.
        text: Column of the texts.
        label: The label's column, or a list of several.
        length: Words a text; longer ones are cut, shorter ones padded.
        vocab_size: Number of ids, padding and unknown among them; the most frequent training words have one.
        regression: Whether labels are numbers to be predicted; if that is not said, fractions are.
        client: Column of who each row comes from; `ByClient` deals rows to clients by it.
        split: Column that holds `train` or `test`.
        test_path: A second file, of the rows to test on.
        test_share: Share of the rows to test on where there is neither: of each class, or of each client's rows.
        separator: What stands between the columns of a text file.

    Raises:
        ConfigError: An option is out of range, or two exclude each other.
    """

    def __init__(
        self,
        path: str,
        text: str = "text",
        label: str | list[str] = "label",
        length: int = 200,
        vocab_size: int = 10_000,
        regression: bool | None = None,
        client: str | None = None,
        split: str | None = None,
        test_path: str | None = None,
        test_share: float = 0.2,
        separator: str = ",",
    ) -> None:
        super().__init__(path, label, regression, client, split, test_path, test_share, separator)
        check_lengths(length, vocab_size)
        self.text, self.length, self.vocab_size = text, length, vocab_size

    def _columns(self) -> dict[str, Sequence[str]]:
        return {"text": [self.text], **super()._columns()}

    def _inputs(self, frame: pd.DataFrame, train: int) -> tuple[Tensor, None]:
        return token_ids(frame[self.text], train, self.length, self.vocab_size), None


def refuse_no_categories(column: pd.Series) -> None:
    """Refuse a column that is taken for categories and holds something else.

    Raises:
        ConfigError: It holds dates, lists and the like, or numbers and texts.
    """
    import pandas as pd

    values = pd.Series(column.to_numpy(object))
    if (kind := pd.api.types.infer_dtype(values)) not in ("string", "mixed-integer", "boolean", "integer", "floating"):
        raise ConfigError(
            f"{KEY}.features: column {column.name!r} holds neither numbers nor text ({kind}); make numbers of it, or "
            "leave it out"
        )
    numbers = pd.to_numeric(values.astype(str), errors="coerce").notna().to_numpy()
    if numbers.any() and not numbers.all():
        odd = int((~numbers).argmax())
        raise ConfigError(
            f"{KEY}.features: column {column.name!r} holds numbers and, in {spot(column, odd)}, "
            f"{one_line(repr(values[odd]))}; mend it, or name the column in scenario.dataset.categorical"
        )


def read_table(key: str, path: str, separator: str) -> pd.DataFrame:
    """A file's rows, by its columns' names; the index counts them from 1.

    Raises:
        ConfigError: There is no such file, it cannot be read, it has no rows, or two columns have the same name.
    """
    import pandas as pd

    parquet = path.endswith((".parquet", ".pq"))
    if parquet:
        _need_pyarrow(key)
    try:
        with (
            opened(placed(path, key=key), "Parquet file" if parquet else "CSV file") as file,
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("error", pd.errors.ParserWarning)  # a row of more cells than the header has
            _refuse_equal_names(path, _header(file, separator, parquet))
            file.seek(0)
            frame = (
                pd.read_parquet(file)
                if parquet
                else pd.read_csv(file, sep=separator, index_col=False, low_memory=False)
            )
    except BadFile as error:
        raise ConfigError(f"{KEY}.{key}: {error}") from error
    frame.columns = [str(name) for name in frame.columns]
    if not len(frame):
        raise ConfigError(f"{KEY}.{key}: {one_line(path)}: holds no rows")
    other = [sign for sign in ",;\t|" if sign != separator and sign in frame.columns[0]]
    if len(frame.columns) == 1 and other:
        raise ConfigError(
            f"{KEY}.separator: {one_line(path)} has one column only; its columns seem to be separated by {other[0]!r}"
        )
    frame.index = pd.RangeIndex(1, len(frame) + 1)
    return frame


def _header(file: BinaryIO, separator: str, parquet: bool) -> list[str]:
    """Return the columns' names as the file has them: `read_csv` renames the second `a` to `a.1`."""
    import pandas as pd

    if parquet:
        from pyarrow.parquet import read_schema

        return list(read_schema(file).names)
    first = pd.read_csv(file, sep=separator, header=None, nrows=1, dtype=str, keep_default_na=False)
    return [name for name in first.iloc[0] if name]


def _refuse_equal_names(path: str, names: list[str]) -> None:
    if twice := [name for name, times in Counter(names).items() if times > 1]:
        raise BadFile(Path(path), f"two columns have the name {one_line(repr(twice[0]))}. Rename one of them")


def _need_pyarrow(key: str) -> None:
    try:
        import pyarrow  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"{KEY}.{key}: Parquet is read by the pyarrow package; install it with: pip install 'fl-lightning[parquet]'"
        ) from error
